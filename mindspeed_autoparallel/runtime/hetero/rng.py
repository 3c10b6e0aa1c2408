"""Random states per module: each module's tracker is seeded from its own tensor rank and follows the switch."""

from __future__ import annotations

from typing import Any

from mindspeed_autoparallel.runtime.hetero.states import ModuleStates


class ModuleRandomStates:
    """Swaps the named states inside Megatron's RNG tracker when the module changes."""

    def __init__(self, states: ModuleStates) -> None:
        self._states = states
        self._tracker: Any = None
        self._fields: dict[str, tuple[Any, Any]] = {}
        states.on_switch(self._switch)

    def seed(self, seed: int) -> None:
        """Seed every module's tracker by Megatron's rule; the default generator ends as the current one's."""
        import torch
        from megatron.core import tensor_parallel

        home = self._states.current
        assert home is not None, "adopt the backbone's state before seeding"
        tensor_parallel.model_parallel_cuda_manual_seed(seed)
        default = torch.cuda.get_rng_state()
        self._keep(home)
        for name in self._states.names:
            if name != home:
                with self._states.use(name):
                    tensor_parallel.model_parallel_cuda_manual_seed(seed)
                    self._keep(name)
        torch.cuda.set_rng_state(default)

    def seed_others(self, seed: int) -> None:
        """Keep the tracker as the host seeded it for the current module and seed the others by Megatron's rule."""
        import torch
        from megatron.core import tensor_parallel

        home = self._states.current
        assert home is not None, "adopt the backbone's state before seeding"
        default, accelerator = torch.get_rng_state(), torch.cuda.get_rng_state()
        self._keep(home)
        for name in self._states.names:
            if name != home:
                with self._states.use(name):
                    tensor_parallel.model_parallel_cuda_manual_seed(seed)
                    self._keep(name)
        torch.set_rng_state(default)
        torch.cuda.set_rng_state(accelerator)

    def _keep(self, name: str) -> None:
        from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

        self._tracker = tracker = get_cuda_rng_tracker()
        # The tracker is reset in place by the next seeding: keep containers of our own.
        tracker.states_, tracker.seeds_ = dict(tracker.states_), set(getattr(tracker, "seeds_", ()))
        self._fields[name] = (tracker.states_, tracker.seeds_)

    def _switch(self, old: str | None, new: str) -> None:
        if new not in self._fields:
            return
        tracker = self._tracker
        if old in self._fields:
            self._fields[old] = (tracker.states_, tracker.seeds_)
        tracker.states_, tracker.seeds_ = self._fields[new]
