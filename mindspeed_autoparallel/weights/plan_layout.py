"""The checkpoint layout of a plan."""

from __future__ import annotations

from pathlib import Path

from mindspeed_autoparallel.errors import PlanError
from mindspeed_autoparallel.files import read_json
from mindspeed_autoparallel.spec.model import RESULT_KEYS, Module
from mindspeed_autoparallel.spec.plan import Plan
from mindspeed_autoparallel.weights.architecture import AUDIO, TEXT, VISION, Architecture
from mindspeed_autoparallel.weights.layouts import CheckpointLayout, make_layout
from mindspeed_autoparallel.weights.tensors import MAX_PADDING_ROWS

_MODULE_OF_PREFIX = {"vit": VISION, "audio": AUDIO, "llm": TEXT}


def layout_from_plan(path: Path, architecture: Architecture, vocab_multiple: int | None = None) -> CheckpointLayout:
    """Return layers per stage, virtual chunks and tensor sizes of ``plan.json``, or of the search's result file.

    The result file (``parallel_config``, ``layer_placement``) has no virtual stages.
    """
    value = read_json(path, "plan")
    if isinstance(value, dict) and "layer_placement" in value and "format" not in value:
        return _from_result(value, path, architecture, vocab_multiple)
    plan = Plan.parse(value, f"plan {path}")
    _check_model(plan, architecture, path)
    return layout_of(plan, architecture, vocab_multiple)


def _part_of(module: Module) -> str | None:
    """Return a module's name in a checkpoint, if it has one; its result key may repeat the module's name."""
    return _MODULE_OF_PREFIX.get(RESULT_KEYS.get(module.result_key, module.result_key))


def _check_model(plan: Plan, architecture: Architecture, path: Path) -> None:
    """Raise ``PlanError`` if the plan was made for a model of other sizes; a zero in the plan means unknown."""
    for module in plan.model.modules:
        shape = architecture.modules.get(_part_of(module) or "")
        if shape is None:
            continue
        pairs = {
            "hidden size": (module.hidden_size, shape.hidden_size),
            "attention heads": (module.num_heads, shape.num_heads),
            "key-value heads": (module.num_kv_heads, shape.num_query_groups),
        }
        for what, (planned, found) in pairs.items():
            if planned and planned != found:
                raise PlanError(_differs(path, f"{what} of {module.name}", planned, found))
    vocabulary = plan.model.vocab_size
    # The plan may have the padded one.
    if vocabulary and not 0 <= vocabulary - architecture.vocab_size <= MAX_PADDING_ROWS:
        raise PlanError(_differs(path, "vocabulary", vocabulary, architecture.vocab_size))
    if vocabulary and plan.model.tied_embeddings and not architecture.tied_embeddings:
        raise PlanError(_differs(path, "embedding and output layer", "tied", "untied"))


def _differs(path: Path, what: str, planned: object, found: object) -> str:
    return (
        f"plan {path} is for another model: {what} {planned}, config.json {found}. Plan for this model, or name its "
        "folder."
    )


def layout_of(plan: Plan, architecture: Architecture, vocab_multiple: int | None = None) -> CheckpointLayout:
    """Return the layout of a plan that has been read."""
    width = plan.layout.pipeline_size
    layers: dict[str, tuple[tuple[int, ...], ...] | None] = {}
    sizes: dict[str, int | None] = {TEXT: plan.layout.tensor_size}
    for module in plan.model.modules:
        mine = _part_of(module)
        if mine is None:
            raise PlanError(f"the plan has a module {module.name!r}, which has no place in a checkpoint of this kind.")
        chain = plan.layers_of(module.name)
        own = plan.layout.modules.get(module.name)
        rows = tuple(chain[begin : begin + width] for begin in range(0, len(chain), width))
        layers[mine] = rows if own is None or any(chain) else None
        if own is not None:
            sizes[mine] = own.tensor_size
    return make_layout(
        architecture, layers=layers, tensor_sizes=sizes, vocab_multiple=vocab_multiple, hetero=bool(plan.layout.modules)
    )


def _from_result(
    result: dict[str, object], path: Path, architecture: Architecture, vocab_multiple: int | None
) -> CheckpointLayout:
    placement, parallel = result["layer_placement"], result.get("parallel_config")
    tensor_size = parallel.get("TP") if isinstance(parallel, dict) else None
    if not isinstance(placement, dict) or not isinstance(tensor_size, int) or tensor_size < 1:
        raise PlanError(f"{path} has no 'parallel_config' with a TP of at least 1, or no layers in 'layer_placement'.")
    layers: dict[str, tuple[tuple[int, ...], ...] | None] = {}
    for prefix, module in _MODULE_OF_PREFIX.items():
        row = placement.get(f"{prefix}_layer_placement")
        if row is not None and not (isinstance(row, list) and all(type(count) is int for count in row)):
            raise PlanError(f"{path}: {prefix}_layer_placement is {row!r}, not a list of layer counts.")
        layers[module] = (tuple(row),) if row else None
    return make_layout(architecture, layers=layers, tensor_sizes={TEXT: tensor_size}, vocab_multiple=vocab_multiple)
