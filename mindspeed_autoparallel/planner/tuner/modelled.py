"""Switches without effect in a CPU trace: their effect is computed from the trace of the same layers.

Only a measurement shows how much of the modelled time is hidden. Predictions count half of it, so that a switch wins by
more than its model may be wrong; the ends of the interval are all of it and nothing.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from mindspeed_autoparallel.cost.overlap import Offload, pipelined_saving_us, sent_once_share
from mindspeed_autoparallel.planner.paired_costs import without_whole_layers
from mindspeed_autoparallel.planner.tuner.candidates import ProfileVariant
from mindspeed_autoparallel.profiles import BlockCost, MeasuredAt, Measurement, Profile, RecomputeCost

OVERLAP_EFFICIENCY = 0.5
"""Share of the modelled hidden time that predictions count."""


@dataclass(frozen=True, kw_only=True)
class ExposedParts:
    """Parts of a traced block's time in one direction, in microseconds."""

    tensor_us: float = 0.0
    """Collectives of the tensor parallel group."""
    product_us: float = 0.0
    """Matrix products."""
    exchange_us: float = 0.0
    """All-to-alls of the expert parallel group."""
    num_destinations: int = 1
    """Nodes of that group if it spans several, otherwise ranks."""


BlockKey = tuple[str, str, str]
"""Module, block (``pre``, one per kind of layers, ``post``), direction."""
Parts = Mapping[MeasuredAt, Mapping[BlockKey, ExposedParts]]
Change = Callable[[Measurement, Mapping[BlockKey, ExposedParts], float], Measurement | None]
"""Costs with a switch on, counting a share of the time it hides; ``None`` if it has no effect or cannot run."""


@dataclass(frozen=True, kw_only=True)
class Switch:
    """One switch: its title, Megatron's arguments and its effect on costs."""

    title: str
    settings: Mapping[str, object] = field(default_factory=dict)
    """Megatron's argument destinations and values."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Environment variables that it needs; an empty value must be unset."""
    change: Change
    paired: bool = False
    """Whether microbatches run in pairs."""
    shards_parameters: bool | None = None
    """ZeRO-3 (true) or ZeRO-2 (false); ``None``: neither."""
    communication_unit: int | None = None
    """Elements, if set in the script; otherwise two layers, Megatron's choice for large ones."""


Group = Sequence[Switch]
"""Mutually exclusive switches."""


def with_switches(
    variants: Sequence[ProfileVariant], groups: Sequence[Group], alone: Group, parts: Mapping[str, Parts]
) -> list[ProfileVariant]:
    """Return a variant for every given one and every combination of one switch per group.

    Switches in ``alone`` are combined with no other.
    """
    chosen = [
        [switch for switch in combination if switch is not None]
        for combination in itertools.product(*[[None, *group] for group in groups])
    ]
    chosen = [combination for combination in chosen if combination] + [[switch] for switch in alone]
    found = (
        _variant(variant, combination, parts.get(variant.name, {})) for combination in chosen for variant in variants
    )
    return [variant for variant in found if variant is not None]


def _variant(variant: ProfileVariant, switches: Sequence[Switch], parts: Parts) -> ProfileVariant | None:
    counted, most, least = (
        _profile(variant.profile, switches, parts, share) for share in (OVERLAP_EFFICIENCY, 1.0, 0.0)
    )
    if counted is None or most is None or least is None:
        return None
    shards = next((switch for switch in switches if switch.shards_parameters is not None), None)
    return replace(
        variant,
        settings={**variant.settings, **{k: v for switch in switches for k, v in switch.settings.items()}},
        environment={k: v for switch in switches for k, v in switch.environment.items()},
        profile=counted,
        interval=(most, least),
        modelled=tuple(switch.title for switch in switches),
        paired=any(switch.paired for switch in switches),
        shards_parameters=shards.shards_parameters if shards else None,
        communication_unit=shards.communication_unit if shards else None,
    )


def _profile(profile: Profile, switches: Sequence[Switch], parts: Parts, share: float) -> Profile | None:
    """Return the costs with ``switches`` on, or ``None`` if no measured point supports them."""
    found = []
    for measurement in profile.measurements:
        changed: Measurement | None = measurement
        for switch in switches:
            if changed is not None:
                changed = switch.change(changed, parts.get(measurement.at, {}), share)
        if changed is not None:
            found.append(changed)
    if not found:
        return None
    return replace(profile, measurements=tuple(found), device=replace(profile.device, hidden_share=share))


def unchanged(measurement: Measurement, parts: Mapping[BlockKey, ExposedParts], share: float) -> Measurement | None:
    """Return ``measurement`` unchanged: blocks cost the same; the layout accounts for the change."""
    return measurement


def tensor_overlap(num_chunks: Callable[[MeasuredAt], int]) -> Change:
    """Overlap collectives of tensor ranks with the adjacent matrix products in ``num_chunks`` chunks (O1)."""

    def change(measurement: Measurement, parts: Mapping[BlockKey, ExposedParts], share: float) -> Measurement | None:
        if measurement.at.tensor_size == 1 or not measurement.at.sequence_parallel:
            return None

        def saving(module: str, block: str, direction: str) -> float:
            shown = parts.get((module, block, direction), ExposedParts())
            return pipelined_saving_us(shown.product_us, shown.tensor_us, num_chunks(measurement.at))

        if not any(saving(*key) for key in parts):
            return None

        def faster(module: str, block: str, cost: BlockCost) -> BlockCost:
            return _less(cost, share * saving(module, block, "forward"), share * saving(module, block, "backward"))

        return _with_blocks(measurement, faster)

    return change


def expert_overlap(
    measurement: Measurement, parts: Mapping[BlockKey, ExposedParts], share: float
) -> Measurement | None:
    """Mark the exchanges of tokens in blocks: pairs hide them behind another microbatch's computation (O2).

    ``share`` becomes the device's ``hidden_share``, which ``evaluate`` uses; no whole layer is recomputed then.
    """
    if not any(shown.exchange_us for shown in parts.values()):
        return None

    def with_exchanges(module: str, block: str, cost: BlockCost) -> BlockCost:
        forward_us, backward_us = (
            parts.get((module, block, way), ExposedParts()).exchange_us for way in ("forward", "backward")
        )
        return replace(
            without_whole_layers(cost),
            forward_exchange_us=min(cost.forward_us, forward_us),
            backward_exchange_us=min(cost.backward_us, backward_us),
        )

    return _with_blocks(measurement, with_exchanges)


def tokens_sent_once(num_experts_per_token: int) -> Change:
    """Send copies of a token to the same node, or rank inside a node, once (O4)."""

    def change(measurement: Measurement, parts: Mapping[BlockKey, ExposedParts], share: float) -> Measurement | None:
        if not any(shown.exchange_us for shown in parts.values()):
            return None

        def saving(module: str, block: str, direction: str) -> float:
            shown = parts.get((module, block, direction), ExposedParts())
            return share * shown.exchange_us * (1 - sent_once_share(num_experts_per_token, shown.num_destinations))

        def faster(module: str, block: str, cost: BlockCost) -> BlockCost:
            return _less(cost, saving(module, block, "forward"), saving(module, block, "backward"))

        return _with_blocks(measurement, faster)

    return change


def activation_offload(shape: Callable[[MeasuredAt], Offload], host_bytes_per_s: float) -> Change:
    """Let layers keep ``freed_bytes`` less and copy ``moved_bytes`` each way while they compute (O3).

    Applies only if a forward takes at least as long as the copy that it hides: nothing waits for copies, so those of
    shorter forwards would accumulate on the device. In forward one layer's copy may be in flight; in backward the last
    layer, which is never offloaded, and the next one, which is being copied back. It is not combined with recompute.
    """

    def change(measurement: Measurement, parts: Mapping[BlockKey, ExposedParts], share: float) -> Measurement | None:
        offload = shape(measurement.at)
        copy_us = offload.moved_bytes / host_bytes_per_s * 1e6
        layers = [layer for module in measurement.modules.values() for layer in module.distinct_layers]
        if not offload.freed_bytes or any(layer.forward_us < copy_us for layer in layers):
            return None

        def smaller(module: str, block: str, cost: BlockCost) -> BlockCost:
            if block in ("pre", "post"):
                return cost
            plain = cost.recompute["none"]
            freed = min(offload.freed_bytes, max(0, plain.saved_bytes - cost.output_bytes))
            kept = RecomputeCost(
                saved_bytes=plain.saved_bytes - freed,
                extra_backward_us=plain.extra_backward_us,
                forward_peak_bytes=plain.forward_peak_bytes + freed,
                backward_peak_bytes=plain.backward_peak_bytes + 2 * freed,
            )
            return replace(_less(cost, -(1 - share) * copy_us, -(1 - share) * copy_us), recompute={"none": kept})

        return _with_blocks(measurement, smaller)

    return change


def _less(cost: BlockCost, forward_us: float, backward_us: float) -> BlockCost:
    return replace(
        cost, forward_us=max(0.0, cost.forward_us - forward_us), backward_us=max(0.0, cost.backward_us - backward_us)
    )


def _with_blocks(measurement: Measurement, change: Callable[[str, str, BlockCost], BlockCost]) -> Measurement:
    modules = {}
    for name, module in measurement.modules.items():
        modules[name] = replace(
            module.with_layers(functools.partial(change, name)),
            pre=None if module.pre is None else change(name, "pre", module.pre),
            post=None if module.post is None else change(name, "post", module.post),
        )
    return replace(measurement, modules=modules)
