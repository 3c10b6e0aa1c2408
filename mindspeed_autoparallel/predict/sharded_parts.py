"""Modules beside a decoder, as a tree with costs: stacks of blocks, and what only holds parameters."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from mindspeed_autoparallel.cost.analytic.blocks import Block
from mindspeed_autoparallel.cost.device import Device
from mindspeed_autoparallel.predict.sharded_costs import STACK
from mindspeed_autoparallel.profiles.sharded import CostPoint, ModuleCosts, ModuleKind, ShardedModule

_SIZE = 2


@dataclass(frozen=True, kw_only=True)
class Ends:
    """Elements of one sample at both ends of a module."""

    inputs: int = 0
    outputs: int = 0


@dataclass
class Parts:
    """Modules in the order of forward, with their kinds; filled module by module."""

    device: Device
    points: Sequence[CostPoint]
    frozen: Sequence[str] = ()
    """Names of modules without gradients, and of those around them."""
    kinds: dict[str, ModuleKind] = field(default_factory=dict)
    modules: list[ShardedModule] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def add(
        self, name: str, block: Block, ends: Ends, parent: str = "", unused: int = 0, tail: Block | None = None
    ) -> None:
        """Add a module that runs ``block``, and behind the modules in it ``tail``; ``unused`` of its parameters get no
        gradient."""
        self._kind(name, block, ends, unused, tail)
        self._module(name, name, parent, is_layer=False)

    def keep_from_units(self) -> None:
        """Keep the last module from becoming a unit: code outside uses its parameters without calling it."""
        self.modules[-1] = replace(self.modules[-1], may_be_unit=False)

    def stack(self, pattern: str, count: int, block: Block, ends: Ends, unused: int = 0) -> None:
        """Add ``count`` layers named as ``pattern``, in the module that its name begins with."""
        self._kind(pattern, block, ends, unused, None)
        self.repeat(pattern, count)

    def repeat(self, pattern: str, count: int) -> None:
        """Add ``count`` layers of the kind named ``pattern``, which is there already."""
        held = [one.name for one in self.modules if pattern.startswith(f"{one.name}.")]
        for number in range(count):
            name = pattern.replace("{*}", str(number))
            self._module(name, pattern, max(held, key=len, default=""), is_layer=True)

    def _is_frozen(self, name: str) -> bool:
        return any(one == name or name.startswith(f"{one}.") for one in self.frozen)

    def _module(self, name: str, pattern: str, parent: str, *, is_layer: bool) -> None:
        trains = not self._is_frozen(name)
        later = any(one.needs_backward and self.kinds[one.kind].costs for one in self.modules)
        self.modules.append(
            ShardedModule(
                name=name,
                kind=pattern,
                pattern=pattern,
                parent=parent,
                is_layer=is_layer,
                needs_backward=trains,
                input_requires_grad=trains and later,
            )
        )

    def _kind(self, name: str, block: Block, ends: Ends, unused: int, tail: Block | None) -> None:
        frozen = self._is_frozen(name)
        count = block.parameters + (tail.parameters if tail else 0)
        held = (count,) if count else ()
        still = (unused,) if unused else ()
        costs = tuple(self._costs(point, block, ends, frozen) for point in self.points)
        if tail:
            costs = tuple(self._with_tail(one, tail) for one in costs)
        self.kinds[name] = ModuleKind(
            parameters=() if frozen else held, frozen_parameters=(*still, *(held if frozen else ())), costs=costs
        )

    def _with_tail(self, costs: ModuleCosts, tail: Block) -> ModuleCosts:
        samples = costs.at.micro_batch_size
        times = tail.times(self.device, self.device.efficiency(STACK), samples)
        return replace(
            costs,
            tail_forward_us=times.forward_us,
            tail_backward_us=times.backward_us,
            tail_kept_bytes=round(samples * tail.saved_bytes),
            tail_backward_transient_bytes=_SIZE * (samples * tail.widest + tail.parameters),
        )

    def _costs(self, point: CostPoint, block: Block, ends: Ends, frozen: bool) -> ModuleCosts:
        samples = point.micro_batch_size
        times = block.times(self.device, self.device.efficiency(STACK), samples)
        gradients = 2 * block.widest * samples + block.parameters
        return ModuleCosts(
            at=point,
            forward_us=times.forward_us,
            backward_us=0.0 if frozen else times.backward_us,
            output_bytes=_SIZE * samples * ends.outputs,
            input_bytes=0 if frozen else _SIZE * samples * ends.inputs,
            kept_bytes=0 if frozen else round(samples * block.saved_bytes),
            backward_transient_bytes=0 if frozen else _SIZE * gradients,
        )
