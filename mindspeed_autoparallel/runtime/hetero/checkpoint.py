"""Encoders' random states in a checkpoint: ``hetero_random_states.json`` in the host's folder of the same step.

The host saves the current module's generators. Those of the other modules depend on the layout: they are restored if
every module has the same layout as before; otherwise these modules start from the seed, with a line in the log.
"""

from __future__ import annotations

import base64
import inspect
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from mindspeed_autoparallel.files import read_json, write_json_atomic
from mindspeed_autoparallel.runtime.hetero.job import current_job

FILE_NAME = "hetero_random_states.json"
SCHEMA_VERSION = 1


def save(wrapped: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, object]) -> Any:
    """Wrap the host's ``save_checkpoint``: rank 0 also writes the random states of all ranks (collective)."""
    job = current_job()
    result = wrapped(*args, **kwargs)
    given = inspect.signature(wrapped).bind(*args, **kwargs).arguments
    wanted = job.random is not None and not job.arguments.no_save_rng and job.arguments.save
    if not wanted or given.get("non_persistent_ckpt"):
        return result
    import torch
    from megatron.training.checkpointing import get_checkpoint_name

    everyone: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(everyone, _own_states())
    if torch.distributed.get_rank() == 0:
        folder = Path(get_checkpoint_name(job.arguments.save, given["iteration"], return_base_dir=True))
        content = {"schema_version": SCHEMA_VERSION, "layout": _layout(), "ranks": everyone}
        write_json_atomic(folder / FILE_NAME, content)
    return result


def load(wrapped: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, object]) -> Any:
    """Wrap the host's ``load_checkpoint``: also restore this rank's random states, if the layouts are the same."""
    job = current_job()
    result = wrapped(*args, **kwargs)
    given = inspect.signature(wrapped).bind(*args, **kwargs).arguments
    arguments = job.arguments
    if job.random is None or arguments.no_load_rng or arguments.finetune or given.get("load_arg", "load") != "load":
        return result
    import torch
    from megatron.training.checkpointing import get_checkpoint_name

    iteration = result[0]
    if not iteration:
        return result
    file = Path(get_checkpoint_name(arguments.load, iteration, return_base_dir=True)) / FILE_NAME
    content = read_json(file, "random states of encoders") if file.exists() else {}
    rank = torch.distributed.get_rank()
    if content.get("schema_version") == SCHEMA_VERSION and content["layout"] == _layout():
        _take_up(content["ranks"][rank])
    elif rank == 0:
        print(f"encoders draw from the seed again: {file} has no random states of this layout.", flush=True)
    return result


def _layout() -> dict[str, dict[str, int]]:
    job = current_job()
    import torch

    assert job.layout is not None
    sizes = {
        module.name: {"tp": module.tensor_size, "pp": module.pipeline_size, "cp": module.context_size}
        for module in (*job.layout.others, job.layout.backbone)
    }
    return {"world": {"size": torch.distributed.get_world_size()}, **sizes}


def _own_states() -> dict[str, object]:
    """Return this rank's random states of every encoder and generator, as text."""
    job = current_job()
    assert job.random is not None
    states: dict[str, object] = {}
    for encoder in (*job.encoders, *job.generators):
        generators = job.random.generators(encoder.name)
        states[encoder.name] = {
            "host": _text(generators.default.host),
            "device": _text(generators.default.device),
            "tracker": {name: _text(state) for name, state in generators.tracker.items()},
        }
    return states


def _take_up(states: Mapping[str, Any]) -> None:
    job = current_job()
    from mindspeed_autoparallel.runtime.hetero.rng import DefaultGenerators, Generators

    assert job.random is not None
    for name, own in states.items():
        default = DefaultGenerators(_tensor(own["host"]), _tensor(own["device"]))
        tracker = {key: _tensor(state) for key, state in own["tracker"].items()}
        job.random.set_generators(name, Generators(default, tracker))


def _text(state: Any) -> str:
    """Return a random state as base64; ``state`` may be a generator, which Megatron keeps under CUDA graphs."""
    state = state.get_state() if hasattr(state, "get_state") else state
    return base64.b64encode(state.cpu().numpy().tobytes()).decode("ascii")


def _tensor(text: str) -> Any:
    import torch

    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)
