"""Writes the sizes of a hetero plan as a model.json for hetero parallel, in the folder of the user's."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from mindspeed_autoparallel.errors import ConfigError
from mindspeed_autoparallel.files import write_json_atomic
from mindspeed_autoparallel.runtime.megatron.description import Description
from mindspeed_autoparallel.runtime.megatron.features import hetero_flag
from mindspeed_autoparallel.runtime.megatron.layout_arguments import model_keys
from mindspeed_autoparallel.runtime.megatron.mindspeed import keep_largest
from mindspeed_autoparallel.spec import Layout, ModuleLayout, Plan
from mindspeed_autoparallel.spec.model import GENERATOR

_SIZES = ("tp", "pp", "cp", "mbs", "sp")
_LLAVA_ADAPTER = "mindspeed_autoparallel.runtime.hetero.adapters.llava:LlavaVision"
_STALE = ("pipeline_num_layers", "recompute_granularity", "recompute_method", "recompute_num_layers")


def hetero_model(plan: Plan, description: Description) -> dict[str, object]:
    """Return a copy of the described model.json with every module's tp, pp, cp and mbs, and the layers of each
    stage.

    Raises ``ConfigError`` if its modules or numbers of layers differ from those of ``plan``.
    """
    if description.model_file is None:
        return _llava_model(plan)
    planned = {module.name: module.num_layers for module in plan.model.modules}
    described = {module.name: module.num_layers for module in description.modules}
    if planned != described:
        raise ConfigError(f"{description.model_file} has the layers {described}, the plan is for {planned}.")
    content: dict[str, Any] = description.with_layers({}, {})
    for module in description.modules:
        whole = content[module.keys[0]]
        _drop_sizes(whole)
        words = _take_hetero_words(whole)
        block = module.block_in(content)
        for stale in _STALE:
            block.pop(stale, None)
        own = plan.layout.modules.get(module.name)
        if own is not None:
            # On the module's top-level block: MindSpeed-MM reads them there too, and the user names the adapter there.
            whole |= _sizes(own)
            if not module.name.endswith(GENERATOR):
                whole["mbs"] = own.micro_batch_scale * plan.layout.micro_batch_size
            block |= _stages_of(plan, module.name)
        elif module.name.endswith(GENERATOR):
            # A generator without sizes belongs to the decoder, on the last stage.
            block |= model_keys(plan, module.name)
        else:
            block |= model_keys(plan, module.name)
            block |= {**_sizes(plan.layout), "mbs": plan.layout.micro_batch_size}
        if words is not None:
            whole["hetero"] = words
    if hetero_flag(description.content) != "--hetero-parallel":
        keep_largest(content)
    return content


def _llava_model(plan: Plan) -> dict[str, object]:
    """Return the sizes only, for Megatron's pretrain_vlm.py: its flags describe the models."""
    layout = plan.layout
    blocks: dict[str, object] = {}
    for module in plan.model.modules:
        own = layout.modules.get(module.name)
        mbs = layout.micro_batch_size * (own.micro_batch_scale if own else 1)
        hetero = {"adapter": _LLAVA_ADAPTER} if own else {"role": "backbone"}
        blocks[module.name] = {**_sizes(own or layout), "mbs": mbs, "hetero": hetero}
    return blocks


def _sizes(layout: Layout | ModuleLayout) -> dict[str, int]:
    return {"tp": layout.tensor_size, "pp": layout.pipeline_size, "cp": layout.context_size}


def write_hetero_model(plan: Plan, description: Description, otherwise: Path) -> Path:
    """Write the model to the folder of the user's model.json, else (if impossible) to ``otherwise``; return its path.

    The name ends in a digest of the content: the user's files are never overwritten.
    """
    content = hetero_model(plan, description)
    digest = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:8]
    if description.model_file is None:
        path = otherwise / f"hetero_model_{digest}.json"
        write_json_atomic(path, content)
        return path
    name = f"{description.model_file.stem}_hetero_{digest}.json"
    path = description.model_file.parent / name
    try:
        write_json_atomic(path, content)
    except ConfigError:
        path = otherwise / name
        write_json_atomic(path, content)
    return path


def training_flags(plan: Plan, model_file: Path, description: Description) -> str:
    """Return the flags to add to the launch script, whose TP, PP and CP are 1."""
    assert plan.hetero is not None
    sizes_alone = description.model_file is None  # the flags describe the models
    flag = "--hetero-model" if sizes_alone else "--mm-model"
    flags = f"{hetero_flag(description.content)} {flag} {model_file} --global-batch-size {plan.global_batch_size}"
    if sizes_alone:
        (again,) = plan.recomputed_of(plan.backbone, "full")
        if again:
            flags += f" --recompute-granularity full --recompute-method block --recompute-num-layers {again}"
    for flag, value, default in (("memory", plan.hetero.memory, "upfront"), ("balance", plan.hetero.balance, "local")):
        if value != default:
            flags += f" --hetero-{flag} {value}"
    return flags


def can_stage_encoders(description: Description) -> bool:
    """Return whether the host's encoders can run in stages: only those of the reference model can.

    The adapters of MindSpeed-MM and LLaVA cannot, and a user's adapter is unknown before the module is built.
    """
    if description.model_file is None or hetero_flag(description.content) != "--hetero-parallel":
        return False
    return not any("adapter" in words for words in _hetero_words(description.content))


def _hetero_words(block: Mapping[str, object]) -> Iterator[Mapping[str, object]]:
    for key, child in block.items():
        if isinstance(child, Mapping):
            if key == "hetero":
                yield child
            yield from _hetero_words(child)


def _stages_of(plan: Plan, name: str) -> dict[str, list[int]]:
    """Return the layers by stage of an encoder's own pipeline, as model.json has them; nothing without one."""
    assert plan.hetero is not None
    phase = next(phase for phase in plan.hetero.encoders if phase.module == name)
    return {"pipeline_num_layers": list(phase.stage_layers)} if phase.stage_layers else {}


def _drop_sizes(block: dict[str, object]) -> None:
    """Remove the sizes at every depth of a module's block, before they are set in one place."""
    for key in _SIZES:
        block.pop(key, None)
    for child in block.values():
        if isinstance(child, dict):
            _drop_sizes(child)


def _take_hetero_words(block: dict[str, object]) -> Any:
    """Remove and return the user's keys for hetero parallel (attr, role, adapter) in a module's block; None without."""
    words = block.pop("hetero", None)
    for child in block.values():
        if isinstance(child, dict):
            inner = _take_hetero_words(child)
            words = inner if words is None else words
    return words
