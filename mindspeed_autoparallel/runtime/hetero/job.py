"""The hetero-parallel job of this process: the requested layouts, the states, and the built modules."""

from __future__ import annotations

import argparse
import functools
import inspect
import sys
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from mindspeed_autoparallel.errors import ConfigError
from mindspeed_autoparallel.runtime.launch.rank_watch import watch_ranks
from mindspeed_autoparallel.runtime.state import of_process

if TYPE_CHECKING:
    from mindspeed_autoparallel.runtime.hetero.adapters.protocol import HostModule
    from mindspeed_autoparallel.runtime.hetero.layouts import HeteroLayout, ModuleLayout
    from mindspeed_autoparallel.runtime.hetero.modules import Encoder
    from mindspeed_autoparallel.runtime.hetero.rng import ModuleRandomStates
    from mindspeed_autoparallel.runtime.hetero.session import HeteroSession
    from mindspeed_autoparallel.runtime.hetero.states import ModuleStates

_ENCODER_GROUPS: Mapping[str, object] = {
    "virtual_pipeline_model_parallel_size": None,
    "expert_model_parallel_size": 1,
    "expert_tensor_parallel_size": None,
    "gtp_remat_size": 1,
    "expert_gtp_remat_size": 1,
    "hierarchical_context_parallel_sizes": None,
    "hybrid_context_parallel": False,
    "get_embedding_ranks": None,
    "get_position_embedding_ranks": None,
}
"""``initialize_model_parallel``'s parameters that apply to the backbone only."""

_ENCODER_ARGUMENTS: Mapping[str, object] = {
    "virtual_pipeline_model_parallel_size": None,
    "pipeline_model_parallel_layout": None,
    "expert_model_parallel_size": 1,
    "expert_tensor_parallel_size": None,
    "tensor_parallel_num_weight_shards": None,
    "expert_tensor_parallel_num_weight_shards": None,
    "gtp_weight_remat_size": 1,
    "expert_gtp_weight_remat_size": 1,
}
"""Values of ``get_args()`` while an encoder is current, in addition to its own tp, pp, cp and sp."""


_MINDSPEED_MM = {
    "image_encoder": "mindspeed_autoparallel.runtime.hetero.adapters.mindspeed_mm:ImageEncoder",
    "audio_encoder": "mindspeed_autoparallel.runtime.hetero.adapters.mindspeed_mm:AudioEncoder",
}
"""Encoders of MindSpeed-MM's VLMModel, for which model.json needs no adapter."""


class HeteroJob:
    """One training; inactive until ``begin``, and then filled in by the host's patched functions."""

    def __init__(self) -> None:
        self.layout: HeteroLayout | None = None
        self.scales: dict[str, int] = {}
        self.arguments: argparse.Namespace = argparse.Namespace()
        self.hosts: dict[str, HostModule] = {}
        self.states: ModuleStates | None = None
        self.random: ModuleRandomStates | None = None
        self.encoders: list[Encoder] = []
        self.generators: list[Encoder] = []
        self.chunks: list[Any] = []
        self.session: HeteroSession | None = None

    def begin(self, layout: HeteroLayout, scales: dict[str, int], arguments: argparse.Namespace) -> None:
        """Activate the job with ``layout``; ``arguments``: the host's namespace."""
        self.layout, self.scales, self.arguments = layout, scales, arguments

    def offer(self, hosts: Mapping[str, HostModule]) -> None:
        """Register a host's builders of its encoders, by the name of their block in model.json."""
        self.hosts.update(hosts)

    def adapter_of(self, module: ModuleLayout) -> str | None:
        """Return the adapter of ``module``: from model.json, or the built-in one for MindSpeed-MM.

        ``None`` if the host registered a builder, or if there is none.
        """
        known = module.adapter is None and module.name not in self.hosts and "mindspeed_mm" in sys.modules
        return _MINDSPEED_MM.get(module.name) if known else module.adapter

    def check_hosts(self) -> None:
        """Raise ``ConfigError`` for an encoder without a builder; called before anything is built."""
        for module in self.layout.others if self.layout is not None else ():
            if module.name not in self.hosts and self.adapter_of(module) is None:
                offered = ", ".join(self.hosts) or "none"
                raise ConfigError(
                    f"no host module builds {module.name} under a layout of its own (offered: {offered}). Name a "
                    f'class in model.json: "{module.name}": {{"hetero": {{"adapter": "package.module:Class"}}}} '
                    "(docs/hetero-parallel.md)."
                )

    @property
    def modules_of_host(self) -> tuple[ModuleLayout, ...]:
        """Return the modules other than the backbone whose block names no adapter: the host builds them."""
        modules = self.layout.others if self.layout is not None else ()
        return tuple(module for module in modules if module.adapter is None)

    @property
    def own_pipelines(self) -> dict[str, int]:
        """Return the pipeline size of each module with its own layout, by name."""
        return {m.name: m.pipeline_size for m in self.layout.others} if self.layout is not None else {}


def current_job() -> HeteroJob:
    """Return this process's job; ``--hetero-parallel`` activates it."""
    return of_process(HeteroJob)


def initialize_groups(wrapped: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, object]) -> Any:
    """Wrap the host's ``initialize_model_parallel``: the backbone's groups as requested, then every other module's."""
    job = current_job()
    if job.layout is None:
        return wrapped(*args, **kwargs)
    job.check_hosts()
    from megatron.core import parallel_state

    from mindspeed_autoparallel.runtime.hetero.states import ModuleStates

    states = ModuleStates(parallel_state)
    given = inspect.signature(wrapped).bind(*args, **kwargs).arguments
    with states.groups.installed(parallel_state):
        result = wrapped(**given)
    states.adopt(job.layout.backbone.name)
    known = inspect.signature(wrapped).parameters
    for encoder in job.layout.others:
        own = {**given, **{name: value for name, value in _ENCODER_GROUPS.items() if name in known}}
        own["tensor_model_parallel_size"], own["context_parallel_size"] = encoder.tensor_size, encoder.context_size
        own["pipeline_model_parallel_size"] = encoder.pipeline_size
        if encoder.pipeline_size > 1 and "get_embedding_ranks" in known:
            # No weight is shared between an encoder's stages: a group of one rank never reduces.
            own["get_embedding_ranks"] = own["get_position_embedding_ranks"] = _first_rank
        states.build(encoder.name, functools.partial(wrapped, **own))
    states.overlay(job.arguments, _overlays(job.layout))
    job.states = states
    watch_ranks()
    return result


def _first_rank(ranks: list[int], *unused: Any) -> list[int]:
    return ranks[:1]


def _overlays(layout: HeteroLayout) -> dict[str, dict[str, object]]:
    job = current_job()

    def seen(name: str) -> bool:
        return hasattr(job.arguments, name)

    def of_encoder(module: ModuleLayout) -> dict[str, object]:
        values = {**_ENCODER_ARGUMENTS}
        values |= {"tensor_model_parallel_size": module.tensor_size, "context_parallel_size": module.context_size}
        values |= {
            "pipeline_model_parallel_size": module.pipeline_size,
            "transformer_pipeline_model_parallel_size": module.pipeline_size,
            "sequence_parallel": module.sequence_parallel,
        }
        return {name: value for name, value in values.items() if seen(name)}

    overlays = {module.name: of_encoder(module) for module in layout.others}
    names = next(iter(overlays.values()))
    return {**overlays, layout.backbone.name: {name: getattr(job.arguments, name) for name in names}}


def seed(wrapped: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, object]) -> Any:
    """Wrap the host's seeding: its random states become the backbone's, and every other module gets its own."""
    job = current_job()
    result = wrapped(*args, **kwargs)
    if job.states is not None:
        from mindspeed_autoparallel.runtime.hetero.rng import ModuleRandomStates

        job.random = ModuleRandomStates(job.states)
        job.random.seed_others(int(job.arguments.seed))
    return result


def schedule(wrapped: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, object]) -> Any:
    """Wrap ``get_forward_backward_func``: run the stock schedule as the second of three phases."""
    job = current_job()
    stock = wrapped(*args, **kwargs)
    if job.session is None:
        return stock
    from mindspeed_autoparallel.runtime.hetero.phases import run

    return functools.partial(run, job.session, stock)
