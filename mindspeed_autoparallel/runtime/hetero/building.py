"""Model and optimizer of a hetero-parallel job, built by the host's own functions.

Every rank, on every pipeline stage, builds every encoder under the encoder's state and attaches it to its first model
chunk: state-dict keys are those of a homogeneous model, and checkpoints see all replicas.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import MISSING, fields
from importlib import import_module
from typing import Any

from mindspeed_autoparallel.errors import ConfigError
from mindspeed_autoparallel.files import shown
from mindspeed_autoparallel.runtime.hetero.job import current_job
from mindspeed_autoparallel.runtime.hetero.layouts import ModuleLayout


def build_model(wrapped: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, object]) -> Any:
    """Wrap the host's ``get_model``: the host builds the chunks, and each encoder is built under its own layout."""
    job = current_job()
    if job.states is None or job.layout is None:
        return wrapped(*args, **kwargs)
    from mindspeed_autoparallel.runtime.hetero.modules import broadcast_parameters, build_ddp, frozen
    from mindspeed_autoparallel.runtime.hetero.session import open_session

    states, layout = job.states, job.layout
    bound = inspect.signature(wrapped).bind(*args, **kwargs)
    provider = bound.arguments["model_provider_func"]
    hosts = [_host(module) for module in layout.others]
    job.encoders, job.generators, job.session = [], [], None
    for module, host in zip(layout.others, hosts, strict=True):
        (job.generators if module.role == "generator" else job.encoders).append(_build_encoder(module, host))
        provider = getattr(host, "without_encoders", _unchanged)(provider)
    bound.arguments["model_provider_func"] = _attaching(provider, hosts)
    others = [*job.encoders, *job.generators]
    with frozen(others):
        chunks = wrapped(*bound.args, **bound.kwargs)
    for module, encoder in zip(layout.others, others, strict=True):
        broadcast_parameters(states, encoder)
        if hasattr(chunks[0], "ddp_config"):
            build_ddp(states, encoder, chunks[0].ddp_config, may_overlap=module.role == "encoder")
        _save_under_own_state(encoder.name, encoder.module)
    if hasattr(chunks[0], "zero_grad_buffer"):
        _zero_together(chunks[0], [encoder.ddp for encoder in others if encoder.ddp is not None])
    job.chunks = list(chunks)
    job.session = open_session(
        states,
        layout.backbone.name,
        job.encoders,
        balance=job.arguments.hetero_balance,
        memory=job.arguments.hetero_memory,
        sequence_parallel=job.arguments.sequence_parallel,
        generators=job.generators,
    )
    return chunks


def build_optimizer(wrapped: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, object]) -> Any:
    """Wrap the host's ``get_megatron_optimizer``: one optimizer over all modules."""
    job = current_job()
    bound = inspect.signature(wrapped).bind(*args, **kwargs)
    chunks = bound.arguments["model_chunks"]
    if job.states is None or job.layout is None or [*chunks] != job.chunks:
        return wrapped(*args, **kwargs)
    from mindspeed_autoparallel.runtime.hetero import optimizer

    def make(own: list[Any]) -> Any:
        return wrapped(**{**bound.arguments, "model_chunks": own})

    return optimizer.build_optimizer(
        job.states, job.layout.backbone.name, [*job.encoders, *job.generators], make, chunks
    )


def _build_encoder(module: ModuleLayout, host: Any) -> Any:
    job = current_job()
    from mindspeed_autoparallel.runtime.hetero.modules import Encoder
    from mindspeed_autoparallel.runtime.hetero.rng import stage_offset

    assert job.states is not None
    with job.states.use(module.name), _same_start(stage_offset(job.states.parallel_state)):
        built = host.build(job.arguments)
    adapter = host.adapter(built, job.arguments)
    later = "generate_later_stage" if module.role == "generator" else "encode_later_stage"
    if module.pipeline_size > 1 and not hasattr(adapter, later):
        raise ConfigError(
            f"{module.name}: pp {module.pipeline_size}, but {type(adapter).__name__} has no {later}: it cannot run "
            f"this {module.role} in stages. Use pp 1 with a larger tp, or give the adapter that method."
        )
    if module.sequence_parallel and not getattr(adapter, "runs_sequence_parallel", False):
        raise ConfigError(
            f"{module.name}: sp true, but {type(adapter).__name__} does not declare that its encoder can split rows "
            "over tensor ranks. Leave sp out, or give the adapter runs_sequence_parallel = True."
        )
    return Encoder(module.name, built, adapter, job.scales.get(module.name, 1), _megatron_config(built))


def _megatron_config(module: Any) -> Any:
    """Return the first config in the module tree with every ``ModelParallelConfig`` field that has a default.

    The ``config`` of MindSpeed-MM's encoders is their block of model.json; only their submodules have Megatron's.
    """
    from megatron.core.model_parallel_config import ModelParallelConfig

    needed = [field.name for field in fields(ModelParallelConfig) if field.default is not MISSING]
    configs = (getattr(part, "config", None) for part in module.modules())
    return next((config for config in configs if all(hasattr(config, name) for name in needed)), None)


def _host(module: ModuleLayout) -> Any:
    """Return the module's builder: the one named in model.json, registered by the host, or MindSpeed-MM's own."""
    job = current_job()
    job.check_hosts()
    adapter = job.adapter_of(module)
    return job.hosts[module.name] if adapter is None else adapter_class(module.name, adapter)()


def adapter_class(name: str, adapter: str) -> Any:
    """Load the class that a block's ``adapter`` names as package.module:Class; ``ConfigError`` if it is not a class."""
    path, _, attribute = adapter.partition(":")
    try:
        found = getattr(import_module(path), attribute)
    except (ImportError, AttributeError, ValueError, TypeError) as error:
        raise ConfigError(f"{name}: adapter {shown(adapter)!r} cannot be loaded: {error}.") from error
    if not callable(found):
        raise ConfigError(f"{name}: adapter {adapter!r} is a {type(found).__name__}: name a class.")
    return found


@contextlib.contextmanager
def _same_start(offset: int) -> Iterator[None]:
    """Seed the default generators with the job's seed plus ``offset`` inside the block; restore them afterwards."""
    import torch

    from mindspeed_autoparallel.runtime.hetero.rng import DefaultGenerators

    before = DefaultGenerators.now()
    torch.manual_seed(int(current_job().arguments.seed) + offset)
    try:
        yield
    finally:
        before.restore()


def _unchanged(value: Any) -> Any:
    return value


def _attaching(provider: Callable[..., Any], hosts: list[Any]) -> Callable[..., Any]:
    """Return a model provider that attaches the other modules to the host's first chunk."""
    job = current_job()
    attached: list[Any] = []

    def provide(*args: Any, **kwargs: Any) -> Any:
        chunk = provider(*args, **kwargs)
        if not attached:
            attached.append(chunk)
            assert job.layout is not None
            for module, encoder, host in zip(job.layout.others, [*job.encoders, *job.generators], hosts, strict=True):
                _attach(chunk, module, encoder.module)
                getattr(host, "attached", _unchanged)(chunk)
        return chunk

    return provide


def _attach(chunk: Any, module: ModuleLayout, built: Any) -> None:
    *path, name = module.attribute.split(".")
    holder = chunk
    for part in path:
        holder = getattr(holder, part, None)
    if holder is None or not hasattr(holder, name):
        children = ", ".join(child for child, _ in chunk.named_children())
        raise ConfigError(
            f"{module.name}: {type(chunk).__name__} has no attribute {module.attribute!r} (it has {children}). Name "
            f'the right one in model.json: "hetero": {{"attr": "..."}}.'
        )
    setattr(holder, name, built)


def _zero_together(chunk: Any, ddps: list[Any]) -> None:
    """Zero the gradients of ``ddps`` whenever the host zeroes those of ``chunk``."""
    original = chunk.zero_grad_buffer

    def zero_grad_buffer(*args: Any, **kwargs: Any) -> None:
        original(*args, **kwargs)
        for ddp in ddps:
            ddp.zero_grad_buffer()

    chunk.zero_grad_buffer = zero_grad_buffer


def _save_under_own_state(name: str, module: Any) -> None:
    """Make the module build its part of a checkpoint under its own state, with its own replicas."""
    job = current_job()
    original = getattr(module, "sharded_state_dict", None)
    if original is None:
        return

    def sharded_state_dict(prefix: str = "", sharded_offsets: Any = (), metadata: Any = None) -> Any:
        assert job.states is not None
        with job.states.use(name):
            own = dict(metadata or {})
            if "dp_cp_group" in own:
                own["dp_cp_group"] = job.states.parallel_state.get_data_parallel_group(with_context_parallel=True)
            return original(prefix, sharded_offsets, own)

    module.sharded_state_dict = sharded_state_dict
