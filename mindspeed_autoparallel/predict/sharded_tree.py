"""A model's modules in the order of forward, with computed costs: decoders, encoders, and further parts."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from mindspeed_autoparallel.cost.analytic.fields import integer, part
from mindspeed_autoparallel.cost.analytic.model_shape import LayerKind, ModelShape
from mindspeed_autoparallel.cost.analytic.parameters import layer_parameters
from mindspeed_autoparallel.cost.analytic.reading import read_workload
from mindspeed_autoparallel.cost.analytic.workload import Workload
from mindspeed_autoparallel.cost.device import Device
from mindspeed_autoparallel.errors import ConfigError
from mindspeed_autoparallel.predict.hugging_face import decoder_of_config
from mindspeed_autoparallel.predict.hugging_face_modules import (
    DECODERS,
    SampleMedia,
    is_of_several_modules,
    modules_of_config,
)
from mindspeed_autoparallel.predict.sharded_costs import STACK, decoder_kinds, layer_costs
from mindspeed_autoparallel.predict.sharded_families import (
    FUN_ASR,
    LTX2,
    QWEN_TTS,
    fun_asr_front,
    ltx2_parts,
    qwen_tts_back,
    qwen_tts_front,
)
from mindspeed_autoparallel.predict.sharded_modules import ModuleNames, TowerNames, decoder_modules, names_of
from mindspeed_autoparallel.predict.sharded_parts import Parts
from mindspeed_autoparallel.profiles.sharded import CostPoint, Described, ModuleCosts, ModuleKind, ShardedModule

_MICRO_BATCHES = (1, 2, 4, 8)
_ROOT = ShardedModule(name="", kind="root", pattern="", input_requires_grad=False)
_COMPUTED = "no device was measured: times and activations are computed"


@dataclass(frozen=True)
class Tree:
    """Modules and kinds of a model, and what else a profile holds of it."""

    modules: tuple[ShardedModule, ...]
    kinds: dict[str, ModuleKind]
    decoder: ModelShape | None
    notes: tuple[str, ...]
    resident_bytes: int = 0
    """On every device beside the modules."""


def tree_of(
    config: Mapping[str, object], where: str, described: Described, device: Device, devices_per_node: int
) -> Tree:
    """Return the modules of the model that ``config`` describes, encoders first."""
    family = str(config.get("model_type") or "")
    if family == LTX2:
        return _diffusion_tree(config, where, described, device)
    if family in (FUN_ASR, QWEN_TTS):
        speech_tree = _listener_tree if family == FUN_ASR else _talker_tree
        return speech_tree(config, where, described, device, devices_per_node)
    names = names_of(family)
    media = SampleMedia(patches=described.tower_tokens, audio_frames=described.tower_tokens)
    if is_of_several_modules(config):
        *encoders, shape = modules_of_config(config, where, media)
    else:
        encoders, shape = [], decoder_of_config({**config, "model_type": DECODERS.get(family, family)}, where)
    shape = {**{key: value for key, value in shape.items() if key != "name"}, "seq": described.sequence}
    return decoder_tree(names, shape, encoders, described, device, devices_per_node)


def decoder_tree(
    names: ModuleNames,
    shape: Mapping[str, object],
    encoders: Sequence[Mapping[str, object]],
    described: Described,
    device: Device,
    devices_per_node: int,
) -> Tree:
    """Return a decoder of ``shape``, a request's ``model``, behind its encoders."""
    if described.tensor_size > 1 and (encoders or shape.get("num_experts")):
        raise ConfigError(f"tensor parallelism {described.tensor_size} is priced for dense text models alone.")
    works = dict(_Points(shape, device, devices_per_node, described).works())
    whole = works[CostPoint()]
    kinds = decoder_kinds(works, device, described.logits, stacked_experts=names.stacked_experts, joined=names.joined)
    modules, notes = [_ROOT], [_COMPUTED]
    if described.tensor_size > 1:
        notes.append(
            f"tensor parallelism {described.tensor_size} stays as the file has it: a device of this plan is one of the "
            f"{described.tensor_size} ranks that share every layer"
        )
    if names.around:
        kinds[names.around] = ModuleKind(frozen_parameters=())
        modules.append(ShardedModule(name=names.around, kind=names.around, pattern=names.around))
    for encoder in encoders:
        name = str(encoder["name"])
        tower_kinds, tower_modules = _tower(
            names.towers.get(name, TowerNames(name=name)), encoder, described, works, device
        )
        kinds |= tower_kinds
        modules += tower_modules
        notes.append(f"{encoder['name']}: {described.tower_tokens} positions per sample")
    modules += decoder_modules(names, whole, after_tower=bool(encoders))
    return Tree(tuple(modules), kinds, whole.model, tuple(notes))


def _diffusion_tree(config: Mapping[str, object], where: str, described: Described, device: Device) -> Tree:
    """Return LTX-2's transformer, which has neither words nor a head; Ulysses has no costs there."""
    sizes = sorted({*_MICRO_BATCHES, described.micro_batch_size})
    parts = Parts(device, [CostPoint(micro_batch_size=size) for size in sizes], described.frozen)
    resident = ltx2_parts(parts, config, where, described.sequence)
    modules = (_ROOT, *parts.modules)
    return Tree(modules, {"root": ModuleKind(), **parts.kinds}, None, (_COMPUTED, *parts.notes), resident)


def _listener_tree(
    config: Mapping[str, object], where: str, described: Described, device: Device, devices_per_node: int
) -> Tree:
    """Return Fun-ASR: an encoder and an adaptor in front of a decoder."""
    shape = _qwen3_shape(config, "text_config", where, described)
    tree = decoder_tree(names_of(FUN_ASR), shape, [], described, device, devices_per_node)
    parts = Parts(device, _points_of(tree), described.frozen)
    fun_asr_front(parts, config, where, described.tower_tokens)
    return _beside(tree, parts.modules, parts, [])


def _talker_tree(
    config: Mapping[str, object], where: str, described: Described, device: Device, devices_per_node: int
) -> Tree:
    """Return Qwen3-TTS: a decoder of codes, and a small one that predicts the other codes of each position."""
    talker, at = part(config, "talker_config"), f"{where}: talker_config"
    shape = _qwen3_shape(config, "talker_config", where, described)
    tree = decoder_tree(names_of(QWEN_TTS), shape, [], described, device, devices_per_node)
    parts = Parts(device, _points_of(tree), described.frozen)
    qwen_tts_front(parts, talker, at)
    front = len(parts.modules)
    codes = qwen_tts_back(parts, talker, at, described.sequence)
    small = {**_qwen3_shape(talker, "code_predictor_config", at, described), "seq": codes}
    pattern = "talker.code_predictor.model.layers.{*}"
    points = _Points(small, device, 1, described)
    costs, plain = [], points.work(CostPoint(micro_batch_size=described.sequence))
    for point in _points_of(tree):
        work = points.work(CostPoint(micro_batch_size=point.micro_batch_size * described.sequence))
        costs.append(replace(layer_costs(CostPoint(), work, device, LayerKind("attention", "dense")), at=point))
    parts.kinds[pattern] = _held(round(layer_parameters(plain).shared), tuple(costs), frozen=False)
    parts.repeat(pattern, plain.model.num_layers)
    return _beside(tree, parts.modules[:front], parts, parts.modules[front:])


def _qwen3_shape(config: Mapping[str, object], key: str, where: str, described: Described) -> dict[str, object]:
    inner = {"tie_word_embeddings": config.get("tie_word_embeddings"), **part(config, key), "model_type": "qwen3"}
    return {**decoder_of_config(inner, f"{where}: {key}"), "seq": described.sequence}


def _points_of(tree: Tree) -> list[CostPoint]:
    return [costs.at for costs in tree.kinds["head"].costs]


def _beside(tree: Tree, before: Sequence[ShardedModule], parts: Parts, behind: Sequence[ShardedModule]) -> Tree:
    """Return ``tree`` with modules in front of and behind its own; a module that holds others comes first."""
    root, *modules = tree.modules
    names = {one.name for one in modules}
    outer = [one for one in modules if any(other.parent == one.name for other in (*before, *behind)) and not one.parent]
    rest = [one for one in modules if one not in outer]
    assert all(one.parent in names or not one.parent for one in rest)
    kinds = {**tree.kinds, **parts.kinds}
    ordered = (root, *outer, *before, *rest, *behind)
    return Tree(ordered, kinds, tree.decoder, (*tree.notes, *parts.notes))


class _Points:
    """Sizes to compute costs at."""

    def __init__(
        self, shape: Mapping[str, object], device: Device, devices_per_node: int, described: Described
    ) -> None:
        self.shape, self.device, self.devices_per_node = shape, device, devices_per_node
        self.micro_batches = sorted({*_MICRO_BATCHES, described.micro_batch_size})
        self.tensor, self.parallel = described.tensor_size, {"sp": described.sequence_parallel}
        # Collectives of DTensor run between products, where Megatron hides a share of them.
        self.train: dict[str, object] = {"tp_comm_overlap": False}
        self.train |= {"attention": "unfused", "dropout": False} if described.eager else {}
        self.train |= {"grouped_gemm": False} if described.loops_experts else {}

    def works(self) -> Iterator[tuple[CostPoint, Workload]]:
        """Yield the decoder at every point that its shape allows; the plain one first."""
        experts = max(1, integer(self.shape, "num_experts", 1, "model", 0))
        expert_sizes = [2**power for power in range(8) if experts % 2**power == 0]
        contexts = [1, 2, 4, 8] if self.tensor == 1 else [1]
        for micro, ulysses, expert in itertools.product(self.micro_batches, contexts, expert_sizes):
            point = CostPoint(micro_batch_size=micro, ulysses_size=ulysses, expert_size=expert)
            try:
                yield point, self.work(point)
            except ConfigError:
                if point == CostPoint():
                    raise

    def work(self, point: CostPoint) -> Workload:
        """Return the decoder at ``point``."""
        ranks = point.ulysses_size * point.expert_size
        parallel: dict[str, object] = {"cp": point.ulysses_size, "cp_algo": "ulysses", "dist_opt": True}
        parallel |= {"tp": self.tensor, **(self.parallel if self.tensor > 1 else {})}
        if self.shape.get("num_experts"):
            parallel["ep"] = point.expert_size
        return read_workload(
            {
                "model": self.shape,
                "hw": {
                    "gpu": self.device.name,
                    "num_gpus": ranks * self.tensor,
                    "gpus_per_node": self.devices_per_node,
                },
                "parallel": parallel,
                "train": {
                    "gbs": point.micro_batch_size * ranks,
                    "mbs": point.micro_batch_size,
                    "stack": STACK,
                    **self.train,
                },
            }
        )


def _held(elements: int, costs: tuple[ModuleCosts, ...], *, frozen: bool) -> ModuleKind:
    trained, untrained = ((), (elements,)) if frozen else ((elements,), ())
    return ModuleKind(parameters=trained, frozen_parameters=untrained, costs=costs)


def _tower(
    names: TowerNames,
    encoder: Mapping[str, object],
    described: Described,
    works: Mapping[CostPoint, Workload],
    device: Device,
) -> tuple[dict[str, ModuleKind], list[ShardedModule]]:
    """Return an encoder; Ulysses and experts leave it as it is."""
    name, pattern = names.name, f"{names.name}.{names.layers}"
    frozen = any(one == name or one.startswith(f"{name}.") or name.startswith(f"{one}.") for one in described.frozen)
    shape = {key: value for key, value in encoder.items() if key not in ("name", "frozen", "deepstack_visual_indexes")}
    points = _Points({**shape, "vocab": 1024}, device, 1, described)
    by_micro = {point.micro_batch_size: work for point, work in points.works() if point.ulysses_size == 1}
    kind = LayerKind("attention", "dense")
    costs = []
    for point in works:
        work = by_micro[point.micro_batch_size]
        cost = replace(layer_costs(replace(point, ulysses_size=1), work, device, kind), at=point)
        costs.append(replace(cost, kept_bytes=0, input_bytes=0) if frozen else cost)
    work = by_micro[1]
    block, patch = round(layer_parameters(work, kind).shared), 3 * 2 * 16 * 16 * work.model.hidden
    merger = 16 * work.model.hidden**2 + 4 * work.model.hidden * works[CostPoint()].model.hidden
    kinds = {name: _held(patch + merger, (), frozen=frozen), pattern: _held(block, tuple(costs), frozen=frozen)}
    modules = [ShardedModule(name=name, kind=name, pattern=name, input_requires_grad=False, needs_backward=not frozen)]
    for number in range(work.model.num_layers):
        modules.append(
            ShardedModule(
                name=pattern.replace("{*}", str(number)),
                kind=pattern,
                pattern=pattern,
                parent=name,
                is_layer=names.recomputes,
                needs_backward=not frozen,
                input_requires_grad=not frozen,
            )
        )
    return kinds, modules
