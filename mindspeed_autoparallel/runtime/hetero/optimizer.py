"""One optimizer over modules with different layouts: Megatron's own chain, each part working under its module's state.

The total norm is the root of the sum of squares over modules, each module excluding its duplicates under its own tensor
ranks; one coefficient clips all. All parts share one loss scaler, updated once a step with their joint verdict on
infinities.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from mindspeed_autoparallel.runtime.hetero import optimizer_state
from mindspeed_autoparallel.runtime.hetero.modules import Encoder, frozen
from mindspeed_autoparallel.runtime.hetero.states import ModuleStates

_METHODS = (
    *("prepare_grads", "step_with_ready_grads", "step", "get_grad_norm", "get_main_grads_for_grad_norm", "count_zeros"),
    *("zero_grad", "state_dict", "sharded_state_dict", "load_state_dict", "reload_model_params"),
    *("get_parameter_state_dp_zero", "load_parameter_state_from_dp_zero", "prepare_model_params_for_param_sync"),
)


class _OneScaler:
    """Replaces every part's loss scaler: collects the parts' verdicts on infinities, and updates once."""

    def __init__(self, scaler: Any) -> None:
        self._scaler = scaler
        self._found = False

    def update(self, found_inf: bool) -> None:
        self._found |= bool(found_inf)

    def commit(self) -> bool:
        """Combine the verdicts of all ranks (collective), update the real scaler, and return the result."""
        import torch

        flag = torch.tensor([float(self._found)], device=self._scaler.scale.device)
        torch.distributed.all_reduce(flag, op=torch.distributed.ReduceOp.MAX)
        self._found = False
        found = bool(flag.item())
        self._scaler.update(found)
        return found

    def __getattr__(self, name: str) -> Any:
        return getattr(self._scaler, name)


def _under(states: ModuleStates, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def run(*args: Any, **kwargs: Any) -> Any:
        with states.use(name):
            return method(*args, **kwargs)

    return run


@functools.cache
def _optimizer_class() -> type:
    """Return the class of the chain; its base, Megatron's, is imported only when an optimizer is built."""
    from megatron.core.optimizer.optimizer import ChainedOptimizer

    class HeteroOptimizer(ChainedOptimizer):  # type: ignore[misc]
        """Megatron's chain, with one scaler and one verdict for all parts."""

        scaler: _OneScaler | None = None
        own_sizes: Sequence[int] = ()

        def prepare_grads(self) -> bool:
            found = bool(super().prepare_grads())
            return self.scaler.commit() if self.scaler is not None else found

        def sharded_state_dict(self, model_sharded_state_dict: Any, is_loading: bool = False, **kwargs: Any) -> Any:
            """Return the state dict of a homogeneous run's optimizer; a chain's, if the parts cannot be joined."""
            if not _joins(self.parts, kwargs.get("metadata") or {}):
                return super().sharded_state_dict(model_sharded_state_dict, is_loading, **kwargs)
            self._synchronize_steps()
            own = [part.sharded_state_dict(model_sharded_state_dict, is_loading, **kwargs) for part in self.parts]
            self.own_sizes = [optimizer_state.num_parameters(part) for part in own]
            return optimizer_state.join(own)

        def load_state_dict(self, state_dict: Any) -> None:
            """Load a state written by ``sharded_state_dict`` or by a homogeneous run."""
            if not optimizer_state.can_be_joined(state_dict):
                super().load_state_dict(state_dict)
                return
            groups = [part.optimizer.param_groups for part in self.parts]
            own = optimizer_state.split(state_dict, groups, self.own_sizes)
            for part, values in zip(self.parts, own, strict=True):
                part.load_state_dict(values)
            self._synchronize_steps()

        @property
        def parts(self) -> list[Any]:
            return [part for part in self.chained_optimizers if not getattr(part, "is_stub_optimizer", False)]

    return HeteroOptimizer


def build_optimizer(
    states: ModuleStates,
    backbone: str,
    encoders: Sequence[Encoder],
    make: Callable[[list[Any]], Any],
    chunks: list[Any],
) -> Any:
    """Return the optimizer of the whole model; ``make(model_chunks)`` is Megatron's factory with its other arguments
    bound."""
    parts: list[tuple[str, Any]] = []
    with frozen(encoders), states.use(backbone):
        parts += [(backbone, part) for part in _leaves(make(chunks))]
    for encoder in encoders:
        if encoder.ddp is not None:
            with states.use(encoder.name):
                parts += [(encoder.name, part) for part in _leaves(make([encoder.ddp]))]
    scalers = [part.grad_scaler for _, part in parts if getattr(part, "grad_scaler", None) is not None]
    shared = _OneScaler(scalers[0]) if scalers else None
    for name, part in parts:
        if getattr(part, "grad_scaler", None) is not None:
            part.grad_scaler = shared
        for method in _METHODS:
            if hasattr(part, method):
                setattr(part, method, _under(states, name, getattr(part, method)))
    optimizer = _optimizer_class()([part for _, part in parts])
    optimizer.scaler = shared
    return optimizer


def _joins(parts: Sequence[Any], metadata: Mapping[str, object]) -> bool:
    """Return whether the parts' states can be written as one optimizer's."""
    kinds = {type(part).__name__ for part in parts}
    if kinds == {"DistributedOptimizer"}:
        return metadata.get("distrib_optim_sharding_type") == "fully_reshardable"
    return len(kinds) == 1 and kinds <= {"FP32Optimizer", "Float16OptimizerWithFloat16Params"}


def _leaves(optimizer: Any) -> list[Any]:
    return list(getattr(optimizer, "chained_optimizers", [optimizer]))
