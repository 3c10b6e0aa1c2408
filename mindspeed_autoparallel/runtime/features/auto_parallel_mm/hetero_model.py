"""The sizes of a hetero plan as a model.json that ``--hetero-parallel`` trains with, beside the user's."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from mindspeed_autoparallel.errors import ConfigError
from mindspeed_autoparallel.files import write_json_atomic
from mindspeed_autoparallel.runtime.megatron.description import Description
from mindspeed_autoparallel.runtime.megatron.layout_arguments import model_keys
from mindspeed_autoparallel.spec import Plan

_SIZES = ("tp", "pp", "cp", "mbs")
_STALE = ("pipeline_num_layers", "recompute_granularity", "recompute_method", "recompute_num_layers")


def hetero_model(plan: Plan, description: Description) -> dict[str, Any]:
    """A copy of the described model.json with every module's tp, pp, cp and mbs, and the backbone's layers by stage.

    Raises ``ConfigError`` where modules or layers are not those of ``plan``.
    """
    planned = {module.name: module.num_layers for module in plan.model.modules}
    described = {module.name: module.num_layers for module in description.modules}
    if planned != described:
        raise ConfigError(f"{description.model_file} has the layers {described}, the plan is for {planned}.")
    content: dict[str, Any] = description.with_layers({}, {})
    for module in description.modules:
        _drop_sizes(content[module.keys[0]])
        block: Any = content
        for key in module.keys:
            block = block[key]
        for stale in _STALE:
            block.pop(stale, None)
        own = plan.layout.modules.get(module.name)
        if own is not None:
            mbs = own.micro_batch_scale * plan.layout.micro_batch_size
            block |= {"tp": own.tensor_size, "pp": 1, "cp": own.context_size, "mbs": mbs}
        else:
            layout = plan.layout
            block |= model_keys(plan, module.name)
            block |= {"tp": layout.tensor_size, "pp": layout.pipeline_size, "cp": layout.context_size}
            block["mbs"] = layout.micro_batch_size
    return content


def write_hetero_model(plan: Plan, description: Description, otherwise: Path) -> Path:
    """Write it beside the user's model.json (into ``otherwise`` where that folder is read-only); its path.

    The name ends in a digest of the content: no file of the user is ever written over.
    """
    assert description.model_file is not None
    content = hetero_model(plan, description)
    digest = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:8]
    name = f"{description.model_file.stem}_hetero_{digest}.json"
    path = description.model_file.parent / name
    try:
        write_json_atomic(path, content)
    except ConfigError:
        path = otherwise / name
        write_json_atomic(path, content)
    return path


def training_flags(plan: Plan, model_file: Path) -> str:
    """What to add to the launch script, whose TP, PP and CP are 1."""
    assert plan.hetero is not None
    flags = f"--hetero-parallel --mm-model {model_file} --global-batch-size {plan.global_batch_size}"
    for flag, value, default in (("memory", plan.hetero.memory, "upfront"), ("balance", plan.hetero.balance, "local")):
        if value != default:
            flags += f" --hetero-{flag} {value}"
    return flags


def _drop_sizes(block: dict[str, Any]) -> None:
    """Sizes anywhere in a module's block: they now stand in one place."""
    for key in _SIZES:
        block.pop(key, None)
    for child in block.values():
        if isinstance(child, dict):
            _drop_sizes(child)
