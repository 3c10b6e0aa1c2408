"""A sharded training's profile without measuring: a Hugging Face config.json on a device of the catalogue."""

from __future__ import annotations

import datetime
import hashlib
import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from mindspeed_autoparallel.cost.analytic.fields import integer
from mindspeed_autoparallel.cost.analytic.model_shape import LayerKind, ModelShape
from mindspeed_autoparallel.cost.analytic.parameters import layer_parameters
from mindspeed_autoparallel.cost.analytic.reading import read_workload
from mindspeed_autoparallel.cost.analytic.workload import Workload
from mindspeed_autoparallel.cost.collectives import Fabric
from mindspeed_autoparallel.cost.device import Device
from mindspeed_autoparallel.errors import ConfigError
from mindspeed_autoparallel.predict.hugging_face import decoder_of_config
from mindspeed_autoparallel.predict.hugging_face_modules import (
    DECODERS,
    SampleMedia,
    is_of_several_modules,
    modules_of_config,
)
from mindspeed_autoparallel.predict.sharded_costs import (
    KEPT_PER_LOGIT,
    TRANSIENT_PER_LOGIT,
    decoder_kinds,
    device_cost,
    layer_costs,
)
from mindspeed_autoparallel.predict.sharded_modules import MEGATRON, ModuleNames, TowerNames, decoder_modules, names_of
from mindspeed_autoparallel.profiles import Provenance
from mindspeed_autoparallel.profiles.sharded import (
    CostPoint,
    ElementBytes,
    HeadCost,
    ModuleCosts,
    ModuleKind,
    ShardedModule,
    ShardedProfile,
)

_STACK = "megatron-core"
_HOST_LINK = 24e9
"""Bytes per second to the host without a datasheet: what PCIe 4 x16 reaches."""
_MICRO_BATCHES = (1, 2, 4, 8)


@dataclass(frozen=True, kw_only=True)
class Described:
    """What config.json lacks."""

    sequence: int
    frozen: tuple[str, ...] = ()
    """Modules without gradients, as patterns."""
    tower_tokens: int = 1024
    """Patches of a sample's pictures, and positions of its sound."""
    micro_batch_size: int = 1
    """The file's own, beside powers of two."""
    bytes_of: ElementBytes = field(default_factory=ElementBytes)


def sharded_profile(
    config: Mapping[str, object],
    where: str,
    described: Described,
    device: Device,
    devices_per_node: int,
    *,
    network_gbit_per_s: float | None = None,
) -> ShardedProfile:
    """Return costs of every module at every Ulysses, expert and micro-batch size worth trying.

    Raises ``ConfigError`` naming the file and the key for a family that the analytic model does not have.
    """
    tree = _tree(config, where, described, device, devices_per_node)
    return _profile(
        tree, config, str(config.get("model_type") or ""), described, device, (devices_per_node, network_gbit_per_s)
    )


def megatron_profile(
    shape: Mapping[str, object],
    described: Described,
    device: Device,
    devices_per_node: int,
    *,
    network_gbit_per_s: float | None = None,
) -> ShardedProfile:
    """Return the same of Megatron's GPT model of ``shape``, a request's ``model``."""
    shape = {**shape, "seq": described.sequence}
    tree = _decoder_tree(MEGATRON, shape, [], described, device, devices_per_node)
    return _profile(tree, shape, "gpt", described, device, (devices_per_node, network_gbit_per_s))


def _profile(
    tree: _Tree,
    source: Mapping[str, object],
    family: str,
    described: Described,
    device: Device,
    network: tuple[int, float | None],
) -> ShardedProfile:
    notes, model = list(tree.notes), tree.whole.model
    if device.host_link_gb_per_s is None:
        notes.append(f"host link: {_HOST_LINK / 1e9:g} GB/s assumed")
    efficiency = device.efficiency(_STACK)
    fabric = Fabric.of(device, efficiency, *network)
    return ShardedProfile(
        model=family,
        modules=tree.modules,
        kinds=tree.kinds,
        device=device_cost(device, fabric),
        provenance=_provenance(source, device),
        tokens_per_sample=described.sequence,
        attention_heads=_heads(model),
        num_experts=model.num_experts,
        topk=model.topk,
        head=HeadCost(
            tokens=described.sequence,
            vocabulary=model.vocabulary,
            kept_bytes_per_logit=KEPT_PER_LOGIT,
            transient_bytes_per_logit=TRANSIENT_PER_LOGIT,
        ),
        bytes_of=described.bytes_of,
        memory_bytes_per_s=device.memory_bandwidth_gb_per_s * 1e9 * efficiency.memory_fraction,
        host_link_bytes_per_s=(device.host_link_gb_per_s or _HOST_LINK / 1e9) * 1e9,
        # Adam reads and writes moments, weights and the gradient: 28 bytes per element in fp32.
        optimizer_us_per_element=28 / (device.memory_bandwidth_gb_per_s * 1e3 * efficiency.optimizer_fraction),
        step_us=efficiency.step_us,
        notes=tuple(notes),
    )


@dataclass(frozen=True)
class _Tree:
    modules: tuple[ShardedModule, ...]
    kinds: dict[str, ModuleKind]
    whole: Workload
    """The decoder at the plain point."""
    notes: tuple[str, ...]


def _tree(
    config: Mapping[str, object], where: str, described: Described, device: Device, devices_per_node: int
) -> _Tree:
    """Return the modules of the model that ``config`` describes, encoders first."""
    family = str(config.get("model_type") or "")
    names = names_of(family)
    media = SampleMedia(patches=described.tower_tokens, audio_frames=described.tower_tokens)
    if is_of_several_modules(config):
        *encoders, shape = modules_of_config(config, where, media)
    else:
        encoders, shape = [], decoder_of_config({**config, "model_type": DECODERS.get(family, family)}, where)
    shape = {**{key: value for key, value in shape.items() if key != "name"}, "seq": described.sequence}
    return _decoder_tree(names, shape, encoders, described, device, devices_per_node)


def _decoder_tree(
    names: ModuleNames,
    shape: Mapping[str, object],
    encoders: Sequence[Mapping[str, object]],
    described: Described,
    device: Device,
    devices_per_node: int,
) -> _Tree:
    works = dict(_Points(shape, device, devices_per_node, described.micro_batch_size).works())
    whole = works[CostPoint()]
    kinds = decoder_kinds(works, device, stacked_experts=names.stacked_experts)
    modules = [ShardedModule(name="", kind="root", pattern="", input_requires_grad=False)]
    notes = ["no device was measured: times and activations are computed"]
    for encoder in encoders:
        name = str(encoder["name"])
        tower_kinds, tower_modules = _tower(
            names.towers.get(name, TowerNames(name=name)), encoder, described, works, device
        )
        kinds |= tower_kinds
        modules += tower_modules
        notes.append(f"{encoder['name']}: {described.tower_tokens} positions per sample")
    modules += decoder_modules(names, whole, after_tower=bool(encoders))
    return _Tree(tuple(modules), kinds, whole, tuple(notes))


def _provenance(config: Mapping[str, object], device: Device) -> Provenance:
    return Provenance(
        source="analytic",
        device=device.name,
        created_utc=datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        model_hash=hashlib.sha256(json.dumps(config, sort_keys=True).encode()).hexdigest()[:16],
        software={"stack": _STACK, "efficiencies": device.efficiency(_STACK).provenance},
    )


class _Points:
    """Sizes to compute costs at."""

    def __init__(
        self, shape: Mapping[str, object], device: Device, devices_per_node: int, micro_batch_size: int
    ) -> None:
        self.shape, self.device, self.devices_per_node = shape, device, devices_per_node
        self.micro_batches = sorted({*_MICRO_BATCHES, micro_batch_size})

    def works(self) -> Iterator[tuple[CostPoint, Workload]]:
        """Yield the decoder at every point that its shape allows; the plain one first."""
        experts = max(1, integer(self.shape, "num_experts", 1, "model", 0))
        expert_sizes = [2**power for power in range(8) if experts % 2**power == 0]
        for micro, ulysses, expert in itertools.product(self.micro_batches, (1, 2, 4, 8), expert_sizes):
            point = CostPoint(micro_batch_size=micro, ulysses_size=ulysses, expert_size=expert)
            try:
                yield point, self._work(point)
            except ConfigError:
                if point == CostPoint():
                    raise

    def _work(self, point: CostPoint) -> Workload:
        ranks = point.ulysses_size * point.expert_size
        parallel: dict[str, object] = {"tp": 1, "cp": point.ulysses_size, "cp_algo": "ulysses", "dist_opt": True}
        if self.shape.get("num_experts"):
            parallel["ep"] = point.expert_size
        return read_workload(
            {
                "model": self.shape,
                "hw": {"gpu": self.device.name, "num_gpus": ranks, "gpus_per_node": self.devices_per_node},
                "parallel": parallel,
                "train": {"gbs": point.micro_batch_size * ranks, "mbs": point.micro_batch_size, "stack": _STACK},
            }
        )


def _heads(model: ModelShape) -> tuple[int, ...]:
    """Return what Ulysses sizes must divide: the heads of attention and of linear attention."""
    linear = (model.linear.key_heads, model.linear.value_heads) if model.linear else ()
    return (model.heads, model.kv_heads, *linear)


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
    points = _Points({**shape, "vocab": 1024}, device, 1, described.micro_batch_size)
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
    kinds = {
        name: _held(patch + merger, (), frozen=frozen),
        pattern: _held(block, tuple(costs), frozen=frozen),
    }
    modules = [ShardedModule(name=name, kind=name, pattern=name, input_requires_grad=False, needs_backward=not frozen)]
    for number in range(work.model.num_layers):
        modules.append(
            ShardedModule(
                name=pattern.replace("{*}", str(number)),
                kind=pattern,
                pattern=pattern,
                parent=name,
                is_layer=True,
                needs_backward=not frozen,
                input_requires_grad=not frozen,
            )
        )
    return kinds, modules
