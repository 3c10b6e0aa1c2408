"""Lowering: one device's step, in the form that the replay runs, from a profile and decisions."""

from __future__ import annotations

import functools
from dataclasses import replace

from mindspeed_autoparallel.planner.sharded.links import Exchanges
from mindspeed_autoparallel.planner.sharded.prefetching import relisted
from mindspeed_autoparallel.planner.sharded.problem import Problem
from mindspeed_autoparallel.profiles.sharded import CostPoint, ShardedModule
from mindspeed_autoparallel.schedule.sharded import StreamModule, StreamTraining, Unit
from mindspeed_autoparallel.spec.sharded import (
    KEEP,
    OFFLOAD,
    RECOMPUTE_KEEP_ATTENTION,
    RECOMPUTE_OFFLOAD,
    ShardedDecisions,
    ShardSizes,
)


def ns(microseconds: float) -> int:
    """Return ``microseconds`` as whole nanoseconds."""
    return round(microseconds * 1000)


def point_of(sizes: ShardSizes) -> CostPoint:
    return CostPoint(
        micro_batch_size=sizes.micro_batch_size,
        ulysses_size=sizes.ulysses_size,
        ring_size=sizes.ring_size,
        expert_size=sizes.expert_size,
    )


class Lowering:
    """Everything but the policies, for one choice of sizes and switches; ``training`` adds the policies."""

    def __init__(self, problem: Problem, decisions: ShardedDecisions) -> None:
        self.problem, self.decisions = problem, decisions
        self.profile, self.sizes = problem.profile, decisions.sizes
        self.exchanges = Exchanges.of(self.profile, problem.devices_per_node, self.sizes)
        sizes, self.point = self.sizes, point_of(self.sizes)
        self.costs = dict(problem.costs_at(self.point))
        self.structure = problem.units(decisions)
        self.hooked = self.structure.hooked(decisions.hooks, sizes.expert_size > 1)
        """Units whose hooks are on each module, by module name."""
        self.parts, self.forced = self._parts()
        """Number of parts of a micro batch in layers that run it in parts, and the policies of these layers by name."""
        if self.parts > 1:
            self._divide()
        self.kinds = self._kinds()
        """Fields of the first of units that are alike, and how many there are."""
        self._chunked = bool(decisions.loss_chunk and self.profile.head)
        chunks = (decisions.loss_chunk, decisions.micro_batch_chunk)
        self._built = problem.known_modules.setdefault((id(self.structure), sizes, *chunks, decisions.hooks), {})

    def _kinds(self) -> dict[int, tuple[Unit, int]]:
        sizes, structure = self.sizes, self.structure
        divided = (sizes.num_devices, sizes.fully_shard_size, sizes.expert_size, sizes.expert_shard_size)
        known = self.problem.known_units.setdefault((id(structure), *divided), {})
        found = {}
        for index, count in structure.alike:
            unit = known.get(index) or known.setdefault(index, self._unit(index))
            choice = self.decisions.group(structure.modules[index].pattern)
            if index in structure.staying or (choice is not None and not choice.reshard_after_forward):
                unit = replace(unit, reshard_after_forward=False)
            found[index] = (unit, count)
        return found

    def _parts(self) -> tuple[int, dict[str, str]]:
        """Return one part if a unit is inside a layer: before torch 2.14 it is not gathered for a second part."""
        decisions, problem = self.decisions, self.problem
        chunk = decisions.micro_batch_chunk
        layers = {one.name for one in self.profile.modules if one.is_layer and one.pattern in decisions.chunked}
        if not chunk or not layers or self.sizes.micro_batch_size % chunk:
            return 1, {}
        inside = (one for one in self.structure.modules if one.name not in layers and one.name in self.hooked)
        if any((layer := problem.layer_of(one)) is not None and layer.name in layers for one in inside):
            return 1, {}
        return self.sizes.micro_batch_size // chunk, dict.fromkeys(layers, RECOMPUTE_OFFLOAD)

    def _divide(self) -> None:
        """Replace the costs of divided layers by the sum over their parts; ``part_costs`` keeps those of one part."""
        chunk = self.decisions.micro_batch_chunk
        known = self.problem.known_parts.setdefault((self.point, chunk, self.decisions.chunked), {})
        if not known:
            point = replace(self.point, micro_batch_size=chunk)
            modules = zip(self.profile.modules, self.problem.layer_names, strict=True)
            for kind in {module.kind for module, layer in modules if layer in self.forced}:
                part = self.problem.costs_of(kind, point)
                times = {name: getattr(part, name) * self.parts for name in vars(part) if name.endswith("_us")}
                known[kind] = part, replace(self.costs[kind], **times)
        self.part_costs = {kind: part for kind, (part, _) in known.items()}
        self.costs |= {kind: whole for kind, (_, whole) in known.items()}

    @functools.cached_property
    def units(self) -> tuple[Unit, ...]:
        """Return all units with their prefetch lists."""
        structure, units = self.structure, []
        lists = structure.lists(self.decisions.groups, self.decisions.hooks, self.sizes.expert_size > 1)
        for module, like, (ahead, behind, context) in zip(structure.modules, structure.like, lists, strict=True):
            unit = self.kinds[like][0]
            if module.name != unit.name or ahead or behind or context:
                unit = replace(
                    unit, name=module.name or "root", context=context, forward_prefetch=ahead, backward_prefetch=behind
                )
            units.append(unit)
        return tuple(units)

    @functools.cached_property
    def relisted_units(self) -> tuple[Unit, ...]:
        """Return all units with the backward lists that the host sets if any layer is recomputed."""
        return relisted(self.units, [one.pattern for one in self.structure.modules], self.problem.host.relisted)

    def copy_us(self, size_bytes: float) -> float:
        """Return the time of a copy on the device that reads and writes ``size_bytes`` in total, in microseconds."""
        rate = self.profile.memory_bytes_per_s
        return size_bytes / rate * 1e6 if rate else 0.0

    def _unit(self, index: int) -> Unit:
        """Return a unit without prefetch lists that is resharded after forward."""
        of, sizes, module = self.profile.bytes_of, self.sizes, self.structure.modules[index]
        experts = module.holds_experts and sizes.expert_size > 1
        ranks = sizes.expert_shard_size if experts else sizes.fully_shard_size
        replicas = sizes.expert_replicas if experts else sizes.replicas
        trained, frozen, in_experts, frozen_experts = self.structure.tensors[index]
        in_experts, frozen_experts = (one.divided(sizes.expert_size) for one in (in_experts, frozen_experts))
        trainable, untrained = trained.numel + in_experts.numel, frozen.numel + frozen_experts.numel
        # With several expert ranks, experts are cut along their second dimension, without padding.
        strided = experts and self.problem.host.strided_experts and ranks > 1
        owned = trained.shard(ranks) + (in_experts.numel // ranks if strided else in_experts.shard(ranks))
        shard = frozen.shard(ranks) + (frozen_experts.numel // ranks if strided else frozen_experts.shard(ranks))
        shard += owned
        gathered, reduced = shard * ranks * of.gathered, owned * ranks * of.reduced
        casts, waits = of.gathered != of.sharded, of.gathered != of.reduced
        own_bytes = owned * of.sharded
        if self.problem.host.ignores_whole_experts and experts and ranks * replicas == 1 and not casts:
            return Unit(name=module.name, empty=True, shard_ranks=1, elements=shard, sharded_gradient_bytes=own_bytes)
        return Unit(
            name=module.name or "root",
            copy_in_ns=ns(self.copy_us(shard * (of.sharded + (3 if casts else 1) * of.gathered))),
            gather_ns=ns(self.exchanges.shard_us(gathered, experts=experts)),
            copy_out_ns=ns(self.copy_us((4 if strided else 2) * gathered)),
            pack_ns=ns(self.copy_us(owned * ranks * ((3 if strided else 1) * of.gathered + of.reduced))),
            reduce_ns=ns(self.exchanges.shard_us(reduced, experts=experts)),
            all_reduce_ns=ns(self.exchanges.replicas_us(owned * of.reduced, experts=experts)) if replicas > 1 else 0,
            finish_ns=ns(self.copy_us(owned * 3 * of.sharded)),
            empty=trainable + untrained == 0,
            has_gradients=trainable > 0,
            replicated=replicas > 1,
            shard_ranks=ranks,
            elements=shard * ranks,
            flat_bytes=shard * of.gathered if casts else 0,
            gathered_bytes=gathered,
            gradient_bytes=trainable * of.gathered,
            accumulated_bytes=trainable * of.reduced if waits else 0,
            upcast_ns=ns(self.copy_us(trainable * (of.gathered + of.reduced))),
            add_ns=ns(self.copy_us(trainable * (of.gathered + 2 * of.reduced))),
            reduced_bytes=reduced,
            output_bytes=owned * of.reduced,
            sharded_gradient_bytes=own_bytes,
            cast_gradient=of.reduced != of.sharded,
            strided=strided,
        )

    def training(self, policies: dict[str, str]) -> StreamTraining:
        """Return the step under ``policies`` (layer name to policy; other layers keep everything)."""
        modules = self.modules(policies)
        return StreamTraining(
            modules=modules,
            units=self.relisted_units if any(one.recomputes for one in modules) else self.units,
            accumulation=self.sizes.accumulation,
            variant=self.problem.host.variant,
            last_offload_stays=self.problem.host.last_offload_stays,
            defers_reduction=self.problem.host.defers_reduction,
            stays_gathered=self.problem.host.stays_gathered,
            static_bytes=self.static_bytes,
            optimizer_ns=self.optimizer_ns,
        )

    def modules(self, policies: dict[str, str]) -> tuple[StreamModule, ...]:
        modules = []
        for module, layer in zip(self.profile.modules, self.problem.layer_names, strict=True):
            policy = self.forced.get(layer) or policies.get(layer, KEEP) if layer else KEEP
            known = self._built.get((module.name, policy))
            if known is None:
                known = self._built[module.name, policy] = self._module(module, policy)
            modules.append(known)
        return tuple(modules)

    def _module(self, module: ShardedModule, policy: str) -> StreamModule:
        whole_costs = self.costs[module.kind]
        divided = self.problem.layer_names[self.problem.index_of[module.name]] in self.forced
        costs = self.part_costs[module.kind] if divided else whole_costs
        exchange = self.exchanges.forward_us(costs)
        again = costs.forward_us + exchange
        redoes, inside = policy not in (KEEP, OFFLOAD), not module.is_layer
        # Only the layer's own input outlives a recomputed forward.
        whole = costs.kept_bytes + costs.input_bytes * inside
        kept = 0 if redoes else whole
        if policy == RECOMPUTE_KEEP_ATTENTION:
            again -= costs.attention_us
            kept = costs.attention_bytes
        experts = self.sizes.expert_size if module.holds_experts else 1
        gradients = sum(self.profile.kinds[module.kind].parameters) // experts * self.profile.bytes_of.gathered
        link = self.profile.host_link_bytes_per_s
        record = StreamModule(
            name=module.name,
            parent=self.problem.index_of[module.parent] if module.name else -1,
            units=self.hooked.get(module.name, ()),
            forward_ns=ns(costs.forward_us + exchange),
            backward_ns=ns(costs.backward_us + exchange) if module.needs_backward else 0,
            tail_forward_ns=ns(costs.tail_forward_us),
            tail_backward_ns=ns(costs.tail_backward_us),
            again_ns=ns(again),
            policy=policy if module.is_layer else KEEP,
            input_requires_grad=module.input_requires_grad,
            needs_backward=module.needs_backward,
            parameters_of=self.structure.holders[self.problem.index_of[module.name]],
            output_bytes=(whole_costs if module.is_layer else costs).output_bytes if module.needs_backward else 0,
            input_bytes=whole_costs.input_bytes if module.is_layer else 0,
            kept_bytes=kept,
            again_bytes=whole - kept,
            forward_transient_bytes=costs.forward_transient_bytes,
            unsaved_bytes=costs.unsaved_bytes if redoes or not module.needs_backward else None,
            around_bytes=costs.unsaved_around_bytes if redoes and inside else whole_costs.around_bytes,
            backward_transient_bytes=costs.backward_transient_bytes if module.needs_backward else 0,
            made_gradient_bytes=costs.made_gradient_bytes if module.needs_backward else 0,
            tail_kept_bytes=0 if redoes else costs.tail_kept_bytes,
            tail_again_bytes=costs.tail_kept_bytes if redoes else 0,
            tail_saves=costs.tail_saves,
            tail_forward_transient_bytes=costs.tail_forward_transient_bytes,
            tail_backward_transient_bytes=costs.tail_backward_transient_bytes,
            gradient_bytes=gradients if module.needs_backward else 0,
            chunks=self.parts if divided and module.is_layer else 1,
            reentrant=module.is_layer and self.problem.host.reentrant,
            copies=self.problem.host.offload_copies if policy == OFFLOAD else 1,
            copy_ns=ns(whole_costs.input_bytes / link * 1e6) if link else 0,
        )
        if self._chunked and module.is_head:
            return self._head_in_chunks(record, costs.input_bytes)
        if self._chunked and not module.name:
            record = replace(record, tail_kept_bytes=0, tail_forward_ns=0, tail_backward_ns=0)
            return replace(record, tail_forward_transient_bytes=0, tail_backward_transient_bytes=0)
        return record

    def _head_in_chunks(self, record: StreamModule, input_bytes: int) -> StreamModule:
        """Return the head as chunked loss runs it: both passes of a chunk in forward, gradients kept."""
        head, root = self.profile.head, self.costs[self.profile.modules[0].kind]
        assert head is not None
        tokens = -(-head.tokens * self.sizes.micro_batch_size // self.sizes.context_size)
        chunk = min(self.decisions.loss_chunk * self.sizes.micro_batch_size, tokens)
        logits = chunk * head.vocabulary * (head.kept_bytes_per_logit + head.transient_bytes_per_logit)
        loss = ns(root.tail_forward_us + root.tail_backward_us)
        return replace(
            record,
            forward_ns=record.forward_ns + record.backward_ns + loss,
            backward_ns=0,
            kept_bytes=input_bytes + record.gradient_bytes,
            forward_transient_bytes=logits + record.gradient_bytes,
            backward_transient_bytes=0,
        )

    @property
    def late_head_ns(self) -> int:
        """Return the time that a chunked loss moves from a micro batch's backward to the end of its forward."""
        root = self.costs[self.profile.modules[0].kind]
        heads = (self.costs[one.kind].backward_us for one in self.profile.modules if one.is_head)
        return ns(sum(heads) + root.tail_forward_us + root.tail_backward_us) + 4

    @property
    def owned_elements(self) -> int:
        """Return the number of trainable elements whose optimizer state is on this device."""
        kinds = self.kinds.values()
        return sum(unit.sharded_gradient_bytes * count for unit, count in kinds) // self.profile.bytes_of.sharded

    @property
    def static_bytes(self) -> int:
        """Return the bytes that are live between steps."""
        of, kinds = self.profile.bytes_of, self.kinds.values()
        shards = sum(unit.elements // unit.shard_ranks * count for unit, count in kinds) * of.sharded
        states = 0 if self.decisions.offload_optimizer else self.owned_elements * of.optimizer
        return shards + states + self.profile.device.runtime_overhead_bytes

    @property
    def optimizer_ns(self) -> int:
        """Return the optimizer step time, including transfers of a state that is offloaded to host memory."""
        profile = self.profile
        time = self.owned_elements * profile.optimizer_us_per_element + profile.step_us
        if self.decisions.offload_optimizer and profile.host_link_bytes_per_s:
            time += 2 * self.owned_elements * profile.bytes_of.optimizer / profile.host_link_bytes_per_s * 1e6
        return ns(time)
