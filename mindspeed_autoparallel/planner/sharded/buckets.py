"""Megatron-FSDP's buckets from a profile and decisions: flat buffers that are gathered without a copy."""

from __future__ import annotations

from dataclasses import replace

from mindspeed_autoparallel.planner.sharded.lowering import Lowering, ns
from mindspeed_autoparallel.planner.sharded.problem import Problem
from mindspeed_autoparallel.schedule.sharded import StreamTraining, Unit
from mindspeed_autoparallel.spec.sharded import MEGATRON_FSDP, ShardedDecisions

_LEAST_DEFAULT = 1_000_000_000
_GRADIENT_BYTES = 4
"""Bytes per element of a gradient as the optimizer reads it: a copy of the shard in the parameters' own type."""


def lowering_of(problem: Problem, decisions: ShardedDecisions) -> Lowering:
    """Return the lowering that follows the host's rules."""
    return (BucketLowering if problem.host.variant == MEGATRON_FSDP else Lowering)(problem, decisions)


def layer_elements(problem: Problem) -> list[int]:
    """Return the number of parameters of every layer, modules inside it included."""
    found: dict[str, int] = {}
    for module, layer in zip(problem.profile.modules, problem.layer_names, strict=True):
        if layer:
            found[layer] = found.get(layer, 0) + sum(problem.profile.kinds[module.kind].parameters)
    return list(found.values())


def unit_choices(problem: Problem) -> list[int]:
    """Return the unit sizes to choose from: the shipped one, and those that gather one, two or four layers ahead."""
    largest = max(layer_elements(problem), default=0)
    ahead = [2 * largest * layers for layers in (1, 2, 4)]
    return list(dict.fromkeys([problem.host.unit_elements, *(ahead if largest else ())]))


class BucketLowering(Lowering):
    """Everything but the policies, for one choice of Megatron-FSDP's sizes and switches."""

    def _unit(self, index: int) -> Unit:
        """Return a bucket: its parameters are views of the gather's buffer, its gradients are copied into another
        buffer."""
        unit, of = super()._unit(index), self.profile.bytes_of
        shard = -(-unit.gradient_bytes // of.gathered // unit.shard_ranks)
        elements = shard * unit.shard_ranks
        gathered, reduced = elements * of.gathered, elements * of.reduced
        return replace(
            unit,
            elements=elements,
            copy_in_ns=0,
            copy_out_ns=0,
            gather_ns=ns(self.exchanges.shard_us(gathered, experts=False)),
            pack_ns=ns(self.copy_us(gathered + reduced)),
            reduce_ns=ns(self.exchanges.shard_us(reduced, experts=False)),
            # Before its reduction a bucket is scaled in place; after it the shard is added to the gradients.
            finish_ns=ns(self.copy_us(2 * reduced + 3 * shard * of.reduced)),
            gathered_bytes=gathered,
            reduced_bytes=reduced,
            output_bytes=shard * of.reduced,
            sharded_gradient_bytes=shard * of.sharded,
        )

    @property
    def unit_elements(self) -> int:
        """Return the unit size in elements: the decided one, or the host's default, twice a layer's mean and at least
        10^9."""
        layers = layer_elements(self.problem)
        mean = sum(layers) // len(layers) if layers else 0
        return self.decisions.unit_elements or max(_LEAST_DEFAULT, 2 * mean)

    def training(self, policies: dict[str, str]) -> StreamTraining:
        """Return the step under ``policies`` (layer name to policy; other layers keep everything)."""
        return replace(
            super().training(policies),
            unit_elements=self.unit_elements,
            optimizer_transient_bytes=self.owned_elements * _GRADIENT_BYTES,
        )
