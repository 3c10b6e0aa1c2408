"""A profile computed from shapes and the device catalogue, for planning without an accelerator, marked as such."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import lcm

from mindspeed_autoparallel.cost.analytic.fields import section_of
from mindspeed_autoparallel.cost.analytic.kernels import check_recipe
from mindspeed_autoparallel.cost.analytic.model_shape import ENCODER
from mindspeed_autoparallel.cost.analytic.reading import read_workload
from mindspeed_autoparallel.cost.analytic.spellings import canonical
from mindspeed_autoparallel.cost.analytic.states import bytes_per_parameter
from mindspeed_autoparallel.cost.analytic.step_time import EXPOSED_WHEN_OVERLAPPED, update_us
from mindspeed_autoparallel.cost.analytic.workload import Workload
from mindspeed_autoparallel.cost.catalogue import find_device
from mindspeed_autoparallel.cost.collectives import Fabric
from mindspeed_autoparallel.cost.device import Device
from mindspeed_autoparallel.errors import ConfigError
from mindspeed_autoparallel.predict.analytic_blocks import encoder_cost, module_cost
from mindspeed_autoparallel.predict.model_file import Section, encoder_module, module_of
from mindspeed_autoparallel.predict.switches import with_stated_switches
from mindspeed_autoparallel.predict.useful_work import UsefulWork, useful_work
from mindspeed_autoparallel.profiles import (
    Collective,
    DeviceCost,
    GradientExchange,
    LinkTier,
    MeasuredAt,
    Measurement,
    ModuleCost,
    Profile,
    Provenance,
)
from mindspeed_autoparallel.profiles.profile import utc_now
from mindspeed_autoparallel.spec.legality import IllegalLayout, without_experts
from mindspeed_autoparallel.spec.model import Model

_STACK = "megatron-core"
_MICRO_BATCHES = (1, 2, 4, 8)
_MOST_EXPERT_RANKS = 64
"""Largest expert size worth trying, unless the node has more devices."""
_LONG_SEQUENCE = 8192
"""Sequence length from which context parallelism is worth its communication and is tried."""


def analytic_profile(
    sections: Sequence[Section],
    device: Device,
    devices_per_node: int,
    *,
    network_gbit_per_s: float | None = None,
    command: str = "",
    train: Mapping[str, object] | None = None,
    points: Iterable[MeasuredAt] | None = None,
    tensor_grid: tuple[int, int] | None = None,
) -> Profile:
    """Return costs of every module in every tensor, context, expert and micro-batch size worth trying, or of
    ``points``.

    The last section is the text decoder: it has the embedding, the head and the loss. ``train``: switches as a
    prediction request has them (``predict.switches``). ``tensor_grid``: sides of MindSpeed's ``--tp-2d``. Raises
    ``ConfigError`` if a section's shape is impossible in every layout.
    """
    efficiency = device.efficiency(_STACK)
    fabric = Fabric.of(device, efficiency, devices_per_node, network_gbit_per_s)
    runs = _Runs(sections, device, devices_per_node, dict(train or {}), tensor_grid)
    whole = runs.at(MeasuredAt())
    tried = list(_points(whole, devices_per_node, {}) if points is None else points)
    measurements = [
        Measurement(at=point, modules=module_costs(sections, works, device, fabric))
        for point in tried
        if (works := runs.at_if_legal(point)) is not None
    ]
    if not measurements:
        for point in tried:
            runs.at(point)
        raise ConfigError("none of the requested sizes of tensor, context and expert parallelism divides the model.")
    return Profile(
        model=model_of(sections, whole, module_costs(sections, whole, device, fabric)),
        device=device_cost(whole[-1], device, fabric),
        measurements=tuple(measurements),
        overlaps_tensor_parallel=bool(whole[-1].tensor_overlap),
        provenance=Provenance(
            source="analytic",
            device=device.name,
            created_utc=utc_now(),
            software={"stack": _STACK, "efficiencies": efficiency.provenance},
            train={key: value for key, value in runs.train.items() if value is not None},
            command=command,
        ),
    )


def module_costs(
    sections: Sequence[Section], works: Sequence[Workload], device: Device, fabric: Fabric
) -> dict[str, ModuleCost]:
    """Return the costs of every module; an encoder that a decoder's section describes is one, too."""
    alone = len(sections) == 1 and works[-1].model.encoder is None
    costs = {ENCODER: encoder_cost(works[-1], device, fabric)} if works[-1].model.encoder else {}
    for at, (section, work) in enumerate(zip(sections, works, strict=True), start=1):
        costs[section.name] = module_cost(work, device, fabric, section.frozen, is_last=at == len(works), alone=alone)
    return costs


def stated_train(sections: Sequence[Section], device: Device, train: Mapping[str, object]) -> dict[str, object]:
    """Return ``train`` with every switch stated, as for the model of ``sections`` (``predict.switches``)."""
    named = section_of(canonical({"train": train}), "train")
    runs = _Runs(sections, device, 1, named).at(MeasuredAt())
    return with_stated_switches(named, runs[-1].model, device.name, alone=len(sections) == 1)


def stated_work(sections: Sequence[Section]) -> UsefulWork:
    """Return the operations of a model on any device. Raises ``ConfigError`` if a size is unknown."""
    whole = _Runs(sections, find_device("H100"), 1, {}).at(MeasuredAt())
    return useful_work(whole, [section.frozen for section in sections])


@dataclass(frozen=True)
class _Runs:
    """The smallest run of every section at a point."""

    sections: Sequence[Section]
    device: Device
    devices_per_node: int
    train: Mapping[str, object]
    grid: tuple[int, int] | None = None

    def at(self, point: MeasuredAt) -> list[Workload]:
        """Return every section at ``point``; raises ``ConfigError`` if one of them cannot have this layout."""
        if point.expert_size > 1 and not any(section.shape.get("num_experts") for section in self.sections):
            raise IllegalLayout(without_experts(point.expert_size))
        return [self._run(section, point) for section in self.sections]

    def at_if_legal(self, point: MeasuredAt) -> list[Workload] | None:
        """Return every section at ``point``, or ``None`` if one of them cannot have this layout."""
        with contextlib.suppress(ConfigError):
            return self.at(point)
        return None

    def _run(self, section: Section, point: MeasuredAt) -> Workload:
        ranks, sharing = point.tensor_size * point.context_size, point.expert_tensor_size or point.tensor_size
        ranks = lcm(ranks * point.expert_size, point.expert_size * sharing)
        ranks = ranks if ranks <= self.devices_per_node else lcm(ranks, self.devices_per_node)
        grid = self.grid if self.grid is not None and point.tensor_size == self.grid[0] * self.grid[1] else ()
        sizes = {"tp": point.tensor_size, "cp": point.context_size, "sp": point.sequence_parallel, "dist_opt": True}
        parallel = {**sizes, **({"tp_2d": dict(zip("xy", grid, strict=True))} if grid else {})}
        if section.shape.get("num_experts"):
            parallel |= {"ep": point.expert_size, "etp": sharing}
        batch = {"gbs": point.micro_batch_size * ranks, "mbs": point.micro_batch_size, "recompute": "none"}
        hardware = {"gpu": self.device.name, "num_gpus": ranks, "gpus_per_node": self.devices_per_node}
        train = {"stack": _STACK, **self.train, **batch}
        try:
            request = {"model": section.shape, "hw": hardware, "parallel": parallel, "train": train}
            return read_workload(request, section.name)
        except IllegalLayout:
            raise
        except ConfigError as error:
            raise ConfigError(f"{section.name}: {error}") from error


def _powers_up_to(limit: int) -> list[int]:
    return [2**power for power in range(limit.bit_length())]


def usual_points(
    sections: Sequence[Section], device: Device, devices_per_node: int, held: Mapping[str, int]
) -> Iterator[MeasuredAt]:
    """Yield the sizes worth trying; ``held``: fixed ``tp``, ``cp``, ``ep`` and ``mbs``, and whether ``sp`` is on."""
    return _points(_Runs(sections, device, devices_per_node, {}).at(MeasuredAt()), devices_per_node, held)


def _points(whole: Sequence[Workload], devices_per_node: int, held: Mapping[str, int]) -> Iterator[MeasuredAt]:
    """Yield ``MeasuredAt()`` first if nothing is fixed: every possible shape allows it."""
    powers = _powers_up_to(devices_per_node)
    only = lambda key, usual: [held[key]] if key in held else usual
    most = max(work.model.num_experts for work in whole)
    # Many small experts are spread over nodes, because memory limits the experts per rank.
    experts = _powers_up_to(max(devices_per_node, min(most, _MOST_EXPERT_RANKS))) if most else [1]
    contexts = powers if whole[-1].model.sequence >= _LONG_SEQUENCE else [1]
    sizes = only("cp", contexts), only("ep", experts), only("tp", powers), only("mbs", _MICRO_BATCHES)
    for context, expert, tensor, micro_batch in itertools.product(*sizes):
        # MindSpeed is built on Megatron 0.12, where TP must divide the key/value groups.
        if any(work.on_ascend and work.model.kv_heads % tensor for work in whole):
            continue
        for expert_tensor in _shared_by(whole, tensor):
            yield MeasuredAt(
                tensor_size=tensor,
                context_size=context,
                expert_size=expert,
                micro_batch_size=micro_batch,
                sequence_parallel=tensor > 1 and bool(held.get("sp", True)),
                expert_tensor_size=expert_tensor,
            )


def _shared_by(whole: Sequence[Workload], tensor: int) -> tuple[int, ...]:
    """Return the possible numbers of tensor ranks that share an expert: all of them (0), or 1. Megatron adds biases
    only to whole experts."""
    if tensor == 1 or not any(work.model.num_experts for work in whole):
        return (0,)
    return (1,) if any(work.model.expert_bias for work in whole) else (0, 1)


def model_of(sections: Sequence[Section], whole: Sequence[Workload], costs: Mapping[str, ModuleCost]) -> Model:
    """Return the described model; ``whole`` and ``costs``: its modules without any parallelism."""
    modules, total = [], 0
    if (encoder := whole[-1].model.encoder) is not None:
        modules.append(encoder_module(encoder))
        total += encoder.num_layers * costs[ENCODER].layer.dense.num_parameters
    for section, work in zip(sections, whole, strict=True):
        total += sum(
            number * (block.dense.num_parameters + block.expert.num_parameters)
            for _, block, number in costs[section.name].parts(work.model.num_layers)
        )
        modules.append(module_of(section, work, modules if section is sections[-1] else ()))
    text, useful = whole[-1].model, useful_work(whole, [section.frozen for section in sections])
    return Model(
        name="+".join(section.name for section in sections),
        modules=tuple(modules),
        sequence_length=text.sequence,
        vocab_size=text.vocabulary,
        tied_embeddings=text.tied,
        num_parameters=total,
        num_active_parameters=total - round(useful.idle_parameters),
        operations_per_sample=useful.operations,
    )


def device_cost(work: Workload, device: Device, fabric: Fabric) -> DeviceCost:
    """Return the costs of ``work``'s software outside its blocks: links, gradients, optimizer.

    Raises ``ConfigError`` if the device has no products in the recipe's form.
    """
    check_recipe(device, work.recipe)
    efficiency = device.efficiency(work.stack)
    sent_us = efficiency.point_to_point_us + _gathered_message_us(work, fabric)
    shares = work.tensor_size if work.stack == "megatron-2021" else 1

    def tier(latency_us: float, bytes_per_us: float, sent_per_us: float) -> LinkTier:
        send = Collective(latency_us=sent_us, bytes_per_s=sent_per_us * shares * 1e6)
        return LinkTier(
            default=Collective(latency_us=latency_us, bytes_per_s=bytes_per_us * 1e6), operations={"p2p": send}
        )

    across = fabric.inter_bytes_per_us / fabric.devices_per_node
    inside = 1 / fabric.send_us(1.0, 1) if fabric.devices_per_node > 1 else fabric.link_bytes_per_us
    rate = device.memory_bandwidth_gb_per_s * 1e3 * efficiency.optimizer_fraction
    stored = bytes_per_parameter(work, quantized=True).gathered
    sent = work.gradient_bytes if work.stack == "megatron-core" else work.element_bytes
    # Gradients in two bytes meet the optimizer in fp32, a shard at a time where it is precision-aware.
    cast = work.half_precision or (work.reduced_in_two_bytes and work.master_bytes + work.moment_bytes == 12)
    return DeviceCost(
        memory_capacity_bytes=device.usable_bytes,
        runtime_overhead_bytes=device.workspace_bytes,
        intra=tier(fabric.link_latency_us, fabric.link_bytes_per_us, inside),
        inter=tier(fabric.inter_latency_us, across, across),
        optimizer_step_us_per_byte=update_us(work, device, rate) / stored,
        optimizer_step_fixed_us=efficiency.step_us,
        optimizer_peak_bytes_per_parameter_byte=4.0 / stored if cast else 0.0,
        gradient_norm_us_per_byte=6 / stored / rate,
        exchange=GradientExchange(
            network=fabric.network,
            exposed=efficiency.gradient_exposed if work.gradient_overlap is None else 1.0,
            exposed_overlapped=EXPOSED_WHEN_OVERLAPPED,
            sent_share=sent / work.gradient_bytes,
        ),
        peak_flops_per_s=device.peak_tflops * 1e12,
    )


def _gathered_message_us(work: Workload, fabric: Fabric) -> float:
    """Return the time that the software of 2021 adds to a message: tensor ranks send shares and gather them again."""
    if work.stack != "megatron-2021" or work.sequence_parallel:
        return 0.0
    return fabric.one_shot_us(work.tokens * work.model.hidden * work.element_bytes, work.tensor_size, 1)
