"""The profile of measured steps: costs of each kind of module, the device and its links, the optimizer."""

from __future__ import annotations

import math
import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from typing import Any

from mindspeed_autoparallel.cost.device import usable_bytes
from mindspeed_autoparallel.hosts.opening import BYTES_OF_TYPE
from mindspeed_autoparallel.profiles.device import DeviceCost
from mindspeed_autoparallel.profiles.profile import Provenance, utc_now
from mindspeed_autoparallel.profiles.sharded import (
    CostPoint,
    ElementBytes,
    HeadCost,
    ModuleCosts,
    ModuleKind,
    ShardedModule,
    ShardedProfile,
)
from mindspeed_autoparallel.runtime.fsdp2.frames import Passed
from mindspeed_autoparallel.runtime.fsdp2.measuring import MeasuredStep
from mindspeed_autoparallel.runtime.fsdp2.modules import FoundModules
from mindspeed_autoparallel.runtime.fsdp2.trainer import NativeTrainer
from mindspeed_autoparallel.runtime.profiling.measure.communication import measure_links
from mindspeed_autoparallel.runtime.profiling.sources.device_cost import both_tiers

_COPIED_BYTES = 64 * 1024 * 1024
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
_TOPK = ("num_experts_per_tok", "moe_topk")


def sharded_profile(
    trainer: Any, native: NativeTrainer, found: FoundModules, steps: Sequence[MeasuredStep], device: Any
) -> ShardedProfile:
    """Return the profile of ``steps`` (collective: it measures links)."""
    first, config = steps[0], native.config
    modules = tuple(_seen(module, first) for module in found.ordered(first.order))
    settings = _model_settings(trainer.model)
    topk = _setting(settings, _TOPK)
    kinds = {
        name: replace(kind, costs=tuple(_costs(step, modules, name, topk) for step in steps))
        for name, kind in found.kinds.items()
        if any(module.kind == name for module in modules)
    }
    gathered = BYTES_OF_TYPE.get(config.sharding.param_dtype, 4)
    optimizer_us, elements = _optimizer_step(trainer, device)
    profile = ShardedProfile(
        model=config.model_id or config.model_path,
        modules=modules,
        kinds=kinds,
        device=_device_cost(device, notes := list[str]()),
        provenance=_provenance(device, config.text),
        tokens_per_sample=first.tokens_per_sample,
        attention_heads=_heads(settings),
        num_experts=_setting(settings, _EXPERTS),
        topk=topk,
        head=_head(modules, first, gathered),
        bytes_of=ElementBytes(
            gathered=gathered, reduced=BYTES_OF_TYPE.get(config.sharding.reduce_dtype, 4), sharded=4, optimizer=8
        ),
        host_link_bytes_per_s=_host_link(device),
        optimizer_us_per_element=optimizer_us / max(1, elements),
        notes=tuple(notes),
    )
    return with_divided_costs(profile)


def _seen(module: ShardedModule, step: MeasuredStep) -> ShardedModule:
    """Return ``module`` with what ``step`` shows: whether its input requires a gradient, whether it has a backward."""
    through = step.inputs.get(module.name, (0, False))[1]
    return replace(module, input_requires_grad=through, needs_backward=module.name in step.backward)


def _costs(step: MeasuredStep, modules: Sequence[ShardedModule], kind: str, topk: int) -> ModuleCosts:
    """Return medians over the modules of one kind that ran; zeros if none did."""
    names = [module.name for module in modules if module.kind == kind and module.name in step.forward]

    def median(value: Callable[[str], float]) -> float:
        return statistics.median(map(value, names)) if names else 0.0

    def of(passes: dict[str, Passed], what: str) -> float:
        return median(lambda name: getattr(passes.get(name, Passed()), what))

    def saved(index: int) -> Callable[[str], float]:
        return lambda name: step.saved.split(name, step.forward[name].num_segments)[index]

    def own_input(name: str) -> int:
        return step.inputs[name][0] if name in layers else step.saved.inputs.get(name, 0)

    def around(name: str) -> int:
        passed = step.transient_forward.get(name, Passed())
        return passed.around_bytes + step.saved.around.get(name, 0) - own_input(name) * passed.is_input_new

    layers = {module.name for module in modules if module.is_layer}
    experts = {module.name for module in modules if module.holds_experts}
    attention = step.attention
    attention_bytes = int(median(lambda name: attention.output_bytes.get(name, 0)))
    kept = int(median(saved(0)))
    return ModuleCosts(
        at=step.at,
        forward_us=of(step.forward, "head_us"),
        tail_forward_us=of(step.forward, "tail_us"),
        backward_us=of(step.backward, "head_us") if not _has_tail(step, names) else of(step.backward, "tail_us"),
        tail_backward_us=of(step.backward, "head_us") if _has_tail(step, names) else 0.0,
        attention_us=min(median(lambda name: attention.us.get(name, 0.0)), of(step.forward, "head_us")),
        input_bytes=int(median(own_input)),
        output_bytes=int(median(lambda name: step.output_bytes.get(name, 0))),
        kept_bytes=kept,
        tail_kept_bytes=int(median(saved(1))),
        tail_saves=any(step.saved.tail_saves(name, step.forward[name].num_segments) for name in names),
        attention_bytes=min(attention_bytes, kept),
        forward_transient_bytes=max(0, int(of(step.transient_forward, "head_bytes"))),
        tail_forward_transient_bytes=max(0, int(of(step.transient_forward, "tail_bytes"))),
        unsaved_transient_bytes=max(0, int(of(step.unsaved_forward, "head_bytes"))),
        tail_unsaved_transient_bytes=max(0, int(of(step.unsaved_forward, "tail_bytes"))),
        around_bytes=max(0, int(median(around))),
        unsaved_around_bytes=max(0, int(of(step.unsaved_forward, "around_bytes"))),
        backward_transient_bytes=max(
            0, int(of(step.transient_backward, "tail_bytes" if _has_tail(step, names) else "head_bytes"))
        ),
        made_gradient_bytes=int(
            of(step.transient_backward, "tail_made_bytes" if _has_tail(step, names) else "head_made_bytes")
        ),
        tail_backward_transient_bytes=max(
            0, int(of(step.transient_backward, "head_bytes")) if _has_tail(step, names) else 0
        ),
        ulysses_sent_bytes=int(median(lambda name: attention.exchanged_bytes.get(name, 0))),
        expert_sent_bytes=int(median(lambda name: topk * step.inputs[name][0] if name in experts else 0)),
    )


def _has_tail(step: MeasuredStep, names: Sequence[str]) -> bool:
    """Return whether submodules of ``names`` run in backward: its head is then the backward of forward's tail."""
    return any(step.backward.get(name, Passed()).num_segments > 1 for name in names)


def _head(modules: Sequence[ShardedModule], step: MeasuredStep, element_bytes: int) -> HeadCost | None:
    head = next((module.name for module in modules if module.is_head and module.name in step.shapes), None)
    if head is None or len(step.shapes[head]) < 2:
        return None
    *_, tokens, vocabulary = step.shapes[head]
    return HeadCost(tokens=tokens, vocabulary=vocabulary, kept_bytes_per_logit=element_bytes)


def _model_settings(model: Any) -> list[Any]:
    """Return the model's configuration and its sub-configurations, the text model's first."""
    config = getattr(model, "config", None)
    inner = [getattr(config, name, None) for name in ("text_config", "thinker_config", "llm_config")]
    inner += [getattr(one, "text_config", None) for one in inner]
    return [one for one in (*inner, config) if one is not None]


def _setting(settings: Sequence[Any], names: Sequence[str]) -> int:
    found = (getattr(one, name, None) for one in settings for name in names)
    return next((int(value) for value in found if isinstance(value, int)), 0)


def _heads(settings: Sequence[Any]) -> tuple[int, ...]:
    heads = [_setting(settings, ["num_attention_heads"]), _setting(settings, ["num_key_value_heads"])]
    return tuple(dict.fromkeys(one for one in heads if one)) or (1,)


def _optimizer_step(trainer: Any, device: Any) -> tuple[float, int]:
    """Return the time of an update, in microseconds, and the elements that this rank updates."""
    engine = trainer.trainer
    trained = [parameter for parameter in trainer.model.parameters() if parameter.requires_grad]
    for parameter in trained:
        parameter.grad = parameter.detach().clone().zero_()
    times = []
    for _ in range(2):
        device.synchronize()
        begin = time.perf_counter()
        engine.optimizer.step()
        device.synchronize()
        times.append((time.perf_counter() - begin) * 1e6)
    engine.optimizer.zero_grad()
    local = (parameter.to_local() if hasattr(parameter, "to_local") else parameter for parameter in trained)
    return min(times), sum(one.numel() for one in local)


def _device_cost(device: Any, notes: list[str]) -> DeviceCost:
    per_node = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    intra, inter = both_tiers(measure_links(device, per_node, device.name), notes)
    return DeviceCost(memory_capacity_bytes=usable_bytes(device.total_memory_bytes()), intra=intra, inter=inter)


def _host_link(device: Any) -> float:
    """Return the bandwidth of a copy from the device to pinned host memory, in bytes per second."""
    import torch

    if device.name == "cpu":
        source, target = torch.zeros(_COPIED_BYTES, dtype=torch.uint8), torch.zeros(_COPIED_BYTES, dtype=torch.uint8)
    else:
        source = torch.zeros(_COPIED_BYTES, dtype=torch.uint8, device=device.name)
        target = torch.zeros(_COPIED_BYTES, dtype=torch.uint8, pin_memory=True)
    times = []
    for _ in range(3):
        device.synchronize()
        begin = time.perf_counter()
        target.copy_(source, non_blocking=True)
        device.synchronize()
        times.append(time.perf_counter() - begin)
    return _COPIED_BYTES / max(min(times), 1e-9)


def _provenance(device: Any, text: str) -> Provenance:
    import hashlib

    return Provenance(
        source="measured",
        device=device.name,
        created_utc=utc_now(),
        model_hash=hashlib.sha256(text.encode()).hexdigest(),
        software=device.fingerprint(),
    )


_NOTE = "costs at Ulysses and expert sizes above 1 are computed from those measured at 1"


def with_divided_costs(profile: ShardedProfile) -> ShardedProfile:
    """Return ``profile`` with costs at all Ulysses sizes that divide its heads and expert sizes that divide experts.

    Ulysses divides tokens outside attention and heads inside it; encoders in front of the decoder run in full on every
    rank. Under expert parallelism a rank computes as many token rows on average, so its costs stay the same.
    """
    heads = math.gcd(*profile.attention_heads)
    contexts = [size for size in range(1, heads + 1) if heads % size == 0]
    experts = [size for size in range(1, max(1, profile.num_experts) + 1) if max(1, profile.num_experts) % size == 0]
    divided = _divided_kinds(profile)
    kinds = {
        name: replace(
            kind,
            costs=(
                *kind.costs,
                *(
                    _divided(costs, context if name in divided else 1, _at(costs.at, context, expert))
                    for costs in kind.costs
                    if costs.at == CostPoint(micro_batch_size=costs.at.micro_batch_size)
                    for context in contexts
                    for expert in experts
                    if context * expert > 1
                ),
            ),
        )
        for name, kind in profile.kinds.items()
    }
    computed = len(contexts) * len(experts) > 1 and _has_whole(profile.kinds)
    return replace(profile, kinds=kinds, notes=(*profile.notes, _NOTE) if computed else profile.notes)


def _has_whole(kinds: dict[str, ModuleKind]) -> bool:
    points = {costs.at for kind in kinds.values() for costs in kind.costs}
    return any(point == CostPoint(micro_batch_size=point.micro_batch_size) for point in points)


def _at(point: CostPoint, context: int, expert: int) -> CostPoint:
    return replace(point, ulysses_size=context, expert_size=expert)


def _divided(costs: ModuleCosts, ranks: int, at: CostPoint) -> ModuleCosts:
    values: dict[str, Any] = {field.name: getattr(costs, field.name) for field in fields(costs) if field.name != "at"}
    for name, value in values.items():
        if not isinstance(value, bool):
            values[name] = value / ranks if isinstance(value, float) else value // ranks
    # A rank has gradients of whole parameters, however few of a sample's tokens.
    whole = costs.made_gradient_bytes
    values["made_gradient_bytes"] = whole
    values["backward_transient_bytes"] = whole + (costs.backward_transient_bytes - whole) // ranks
    return ModuleCosts(at=at, **values)


def _divided_kinds(profile: ShardedProfile) -> set[str]:
    """Return the kinds of modules in the decoder: siblings of the token embedding and their submodules, and the
    head."""
    embedding = next((module for module in profile.modules if module.kind.endswith(":Embedding")), None)
    decoder = embedding.name.rpartition(".")[0] if embedding else ""
    return {
        module.kind
        for module in profile.modules
        if module.is_head or module.name == decoder or (module.name and module.name.startswith(decoder))
    }
