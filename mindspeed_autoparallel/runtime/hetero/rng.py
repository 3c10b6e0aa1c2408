"""Random states per module: each module draws from its own generators, seeded from its own tensor rank.

Megatron has two kinds: named states in a tracker, and default generators, which must agree on all tensor ranks.
Encoders draw once per item: without default generators of their own, those of the backbone's tensor ranks would
diverge.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from mindspeed_autoparallel.runtime.hetero.states import ModuleStates


@dataclass
class DefaultGenerators:
    """States of the default generators of the host and of this rank's device."""

    host: Any
    device: Any

    @staticmethod
    def now() -> DefaultGenerators:
        return DefaultGenerators(torch.get_rng_state(), torch.cuda.get_rng_state())

    def restore(self) -> None:
        torch.set_rng_state(self.host)
        torch.cuda.set_rng_state(self.device)


@dataclass
class Generators:
    """All generators that the current module may use, so that a second forward draws the same numbers."""

    default: DefaultGenerators
    tracker: dict[str, object]

    @staticmethod
    def now() -> Generators:
        return Generators(DefaultGenerators.now(), dict(_tracker().states_))

    def restore(self) -> None:
        self.default.restore()
        _tracker().states_.update(self.tracker)


class ModuleRandomStates:
    """Swaps the named states inside Megatron's RNG tracker when the module changes; ``drawing`` swaps the default
    generators too, while a module other than the host's current one runs."""

    def __init__(self, states: ModuleStates) -> None:
        self._states = states
        self._fields: dict[str, tuple[Any, Any]] = {}
        self._defaults: dict[str, DefaultGenerators] = {}
        self._current_tracker: Any = None
        states.on_switch(self._switch)
        states.drawing = self.drawing

    def seed(self, seed: int) -> None:
        """Seed every module, the current one included, by Megatron's rule."""
        from megatron.core import tensor_parallel

        tensor_parallel.model_parallel_cuda_manual_seed(seed)
        self.seed_others(seed)

    def seed_others(self, seed: int) -> None:
        """Keep the current module's generators as the host seeded them and seed the others by Megatron's rule."""
        from megatron.core import tensor_parallel

        backbone = self._states.current
        assert backbone is not None, "adopt the backbone's state before seeding"
        default = DefaultGenerators.now()
        self._keep(backbone)
        for name in self._states.names:
            if name != backbone:
                with self._states.use(name):
                    own = seed + stage_offset(self._states.parallel_state)
                    torch.manual_seed(own)
                    tensor_parallel.model_parallel_cuda_manual_seed(own)
                    self._keep(name)
                    self._defaults[name] = DefaultGenerators.now()
        default.restore()

    @contextlib.contextmanager
    def drawing(self, name: str) -> Iterator[None]:
        """Draw from module ``name``'s own default generators inside the block."""
        outer = DefaultGenerators.now()
        self._defaults[name].restore()
        try:
            yield
        finally:
            self._defaults[name] = DefaultGenerators.now()
            outer.restore()

    def generators(self, name: str) -> Generators:
        """Return the random state of a module that is not current (for a checkpoint)."""
        return Generators(self._defaults[name], dict(self._fields[name][0]))

    def set_generators(self, name: str, generators: Generators) -> None:
        """Restore a module's random state; the module must not be current."""
        self._defaults[name] = generators.default
        states = self._fields[name][0]
        for key, state in generators.tracker.items():
            if hasattr(states.get(key), "set_state"):
                states[key].set_state(state)
            else:
                states[key] = state

    def _keep(self, name: str) -> None:
        self._current_tracker = tracker = _tracker()
        # Separate containers, because the next seeding resets the tracker in place.
        tracker.states_, tracker.seeds_ = dict(tracker.states_), set(getattr(tracker, "seeds_", ()))
        self._fields[name] = (tracker.states_, tracker.seeds_)

    def _switch(self, old: str | None, new: str) -> None:
        if new not in self._fields:
            return
        tracker = self._current_tracker
        if old in self._fields:
            self._fields[old] = (tracker.states_, tracker.seeds_)
        tracker.states_, tracker.seeds_ = self._fields[new]


def stage_offset(parallel_state: Any) -> int:
    """Return the offset that Megatron adds to the seed so that pipeline stages draw different numbers."""
    rank: int = parallel_state.get_pipeline_model_parallel_rank()
    return 100 * rank


def _tracker() -> Any:
    from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

    return get_cuda_rng_tracker()
