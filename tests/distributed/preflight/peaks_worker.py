"""Peaks of tracked memory per rank and layout: on real gloo ranks, or one process that plays every rank.

``peaks_worker.py real|played WORLD <case>...`` with cases as JSON for ``gpt_layouts``. Every rank prints a RESULT line:
its peak by case where it is real, else a list of all ranks' peaks by case.
"""

from __future__ import annotations

import functools
import gc
import importlib.util
import json
import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
gc.set_threshold(700, 10, 10)  # as a program has it: peaks depend on it
_spec = importlib.util.spec_from_file_location("gpt_layouts", HERE.parent / "devices" / "gpt_layouts.py")
assert _spec is not None and _spec.loader is not None
layouts = importlib.util.module_from_spec(_spec)
sys.modules["gpt_layouts"] = layouts
_spec.loader.exec_module(layouts)

import torch.distributed as dist  # noqa: E402

from mindspeed_autoparallel.runtime.devices.selection import current_device  # noqa: E402
from mindspeed_autoparallel.runtime.profiling import alone  # noqa: E402
from mindspeed_autoparallel.runtime.profiling.balanced_routing import balance_routing  # noqa: E402


def peak_of(case: dict[str, Any]) -> int | None:
    """Peak of the second of two steps on this rank; None where the release lacks what the case needs."""
    release = (layouts.package_info.MAJOR, layouts.package_info.MINOR)
    if release < tuple(case.get("since", (0, 0))):
        return None
    layouts.SEQUENCE, layouts.HIDDEN = case.get("sequence", 64), case.get("hidden", 64)
    layouts.NUM_LAYERS = case.get("layers", 4)
    with layouts._groups(case):
        case = with_features(case)
        config, chunks, optimizer = layouts._build(case)
        layouts._train_step(case, config, chunks, optimizer, 0)
        with current_device().tracked_memory() as memory:
            memory.take_peak_bytes()
            layouts._train_step(case, config, chunks, optimizer, 1)
            return int(memory.take_peak_bytes())


def with_features(case: dict[str, Any]) -> dict[str, Any]:
    """Return ``case`` for this rank: recompute of some stages only, latent attention, a prediction of further tokens."""
    config = dict(case.get("config", {}))
    if "recompute_stages" in case and layouts.ps.get_pipeline_model_parallel_rank() in case["recompute_stages"]:
        config.update(layouts.FULL)
    if case.get("latent"):
        from megatron.core.transformer.transformer_config import MLATransformerConfig

        layouts.TransformerConfig = MLATransformerConfig
        spec = layouts.get_gpt_layer_local_spec
        layouts.get_gpt_layer_local_spec = functools.partial(spec, multi_latent_attention=True)
    if case.get("further"):
        from megatron.core.models.gpt.gpt_layer_specs import get_gpt_mtp_block_spec

        model, config["mtp_num_layers"] = layouts.GPTModel, 1
        config["mtp_loss_scaling_factor"] = 0.1  # 0.12 has no default

        def with_further_tokens(*, config: Any, transformer_layer_spec: Any, **more: Any) -> Any:
            block = get_gpt_mtp_block_spec(config, transformer_layer_spec, use_transformer_engine=False)
            is_last = layouts.ps.is_pipeline_last_stage()
            more["mtp_block_spec"] = block if is_last else None
            return model(config=config, transformer_layer_spec=transformer_layer_spec, **more)

        layouts.GPTModel = with_further_tokens
    return {**case, "config": config}


def forked(case: dict[str, Any], start: Callable[[], None]) -> int | None:
    """Run ``case`` in a process of its own, forked after the imports: nothing of another case is alive in it."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            balance_routing()
            start()
            os.write(write, json.dumps(peak_of(case)).encode())
            if dist.get_backend() == "gloo":
                dist.barrier()
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    os.close(write)
    _, status = os.waitpid(pid, 0)
    assert status == 0, case
    with os.fdopen(read) as stream:
        found: int | None = json.loads(stream.read())
    return found


def real(cases: list[dict[str, Any]]) -> list[int | None]:
    """Return this rank's peak of every case, among real ranks."""
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])

    def start(number: int) -> None:
        dist.init_process_group("nccl", init_method=f"file://{Path.cwd()}/{number}", rank=rank, world_size=world)

    return [forked(case, functools.partial(start, number)) for number, case in enumerate(cases)]


def played(cases: list[dict[str, Any]], world: int) -> list[list[int | None]]:
    """Return the peaks of every case by rank; every rank is played alone."""

    def start(rank: int) -> None:
        os.environ.update(RANK=str(rank), WORLD_SIZE=str(world))
        alone.install()
        dist.init_process_group("nccl")

    return [[forked(case, functools.partial(start, rank)) for rank in range(world)] for case in cases]


def main() -> None:
    """Print this process's RESULT line."""
    kind, world, *texts = sys.argv[1:]
    cases = [json.loads(text) for text in texts]
    print("RESULT " + json.dumps(real(cases) if kind == "real" else played(cases, int(world))), flush=True)


if __name__ == "__main__":
    main()
