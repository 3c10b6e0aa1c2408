"""Three phases around Megatron's own schedule: encode everything, run the backbone, run the encoders' backward.

No schedule is copied: ``run`` calls the stock function under the backbone's state, with the encoders' calls served from
precomputed rows and the gradient reduction observed. The encoders' backward runs afterwards under their own states, so
no autograd hook runs under the wrong layout.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch

from mindspeed_autoparallel.errors import ConfigError
from mindspeed_autoparallel.runtime.devices.cpu.edits import replaced
from mindspeed_autoparallel.runtime.hetero.batches import StepBatches, pull
from mindspeed_autoparallel.runtime.hetero.exchange import items_of_replicas, local_items
from mindspeed_autoparallel.runtime.hetero.generators import GeneratorStep
from mindspeed_autoparallel.runtime.hetero.layouts import check_scale
from mindspeed_autoparallel.runtime.hetero.macrobatches import EncoderStep
from mindspeed_autoparallel.runtime.hetero.modules import finalize_gradients, frozen
from mindspeed_autoparallel.runtime.hetero.redistribution.placement import Item
from mindspeed_autoparallel.runtime.hetero.schedules import GeneratorSchedule, UpfrontSchedule, WindowedSchedule
from mindspeed_autoparallel.runtime.hetero.session import HeteroSession
from mindspeed_autoparallel.runtime.megatron.exchanged_shapes import arriving, plays_alone, sequence_shape
from mindspeed_autoparallel.schedule.window import ticks_of


def run(
    session: HeteroSession,
    forward_backward: Callable[..., Any],
    *,
    forward_step_func: Callable[..., Any],
    data_iterator: Any,
    model: Any,
    num_microbatches: int,
    forward_only: bool = False,
    **kwargs: Any,
) -> Any:
    """Return the stock ``forward_backward``'s result; gradients of all modules are final. Arguments are Megatron's."""
    batches, iterators = pull(data_iterator, num_microbatches)
    session.learn_batch_owners(batches is not None)
    if not forward_only:
        for encoder in session.encoders:
            check_scale(encoder.scale, num_microbatches)
    with session.times.during("metadata"):
        everyones = _everyones_items(session, batches)
    steps, generator_steps = _steps(session, batches, everyones, num_microbatches, forward_only)
    chunks = model if isinstance(model, list) else [model]
    from megatron.core.utils import get_model_config

    schedule = _encoder_schedule(session, steps, num_microbatches, len(chunks), get_model_config(chunks[0]))
    generator_schedule = _generator_schedule(session, generator_steps, num_microbatches, len(chunks), forward_only)
    factor: list[Any] = []
    schedule.before()
    with contextlib.ExitStack() as stack:
        stack.enter_context(session.times.during("backbone"))
        stack.enter_context(session.states.use(session.backbone))
        stack.enter_context(arriving(lambda: _arriving(session, batches, num_microbatches, chunks)))
        for step in steps:
            stack.enter_context(step.outputs.patched_forward())
        for generator_step in generator_steps:
            stack.enter_context(generator_step.answering())
        stack.enter_context(_finalize_backbone_only(session, chunks[0], factor))
        result = forward_backward(
            forward_step_func=_telling(forward_step_func, chunks[0], steps, schedule, generator_schedule),
            data_iterator=iterators,
            model=model,
            num_microbatches=num_microbatches,
            forward_only=forward_only,
            **kwargs,
        )
        generator_schedule.after()
    if session.first_stage:
        for step in steps:
            step.outputs.check_all_used()
    if session.last_stage:
        _report(result, generator_steps)
    schedule.after()
    if not forward_only:
        with session.times.during("finalize"):
            for encoder in (*session.encoders, *session.generators):
                finalize_gradients(
                    session.states, encoder, factor[0] if factor else 1.0 / session.backbone_data_context
                )
    return result


def _steps(
    session: HeteroSession,
    batches: StepBatches | None,
    everyones: list[list[Item]],
    num_microbatches: int,
    forward_only: bool,
) -> tuple[list[EncoderStep], list[GeneratorStep]]:
    num_encoders = len(session.encoder_comms)
    encoder_steps = [
        EncoderStep(session, comm, batches, items, num_microbatches, forward_only)
        for comm, items in zip(session.encoder_comms, everyones[:num_encoders], strict=True)
    ]
    generator_steps = [
        # A copy, because a generator reads a batch after the schedule has taken it.
        GeneratorStep(session, comm, None if batches is None else batches.copy(), items, num_microbatches, forward_only)
        for comm, items in zip(session.generator_comms, everyones[num_encoders:], strict=True)
    ]
    return encoder_steps, generator_steps


def _encoder_schedule(
    session: HeteroSession, steps: list[EncoderStep], num_microbatches: int, num_chunks: int, config: Any
) -> UpfrontSchedule | WindowedSchedule:
    if session.memory != "window":
        return UpfrontSchedule(steps)
    if num_chunks > 1 and getattr(config, "overlap_moe_expert_parallel_comm", False):
        raise ConfigError(
            f"--hetero-memory window cannot be combined with --overlap-moe-expert-parallel-comm under {num_chunks} "
            "virtual stages: forwards run ahead of the schedule that it follows. Use --hetero-memory recompute."
        )
    group_size = getattr(config, "microbatch_group_size_per_vp_stage", None) or 0
    return WindowedSchedule(
        steps,
        stage=session.backbone_placement[session.rank].pipeline,
        ticks=ticks_of(session.num_stages, num_microbatches, num_chunks, group_size if num_chunks > 1 else 0),
    )


def _generator_schedule(
    session: HeteroSession, steps: list[GeneratorStep], num_microbatches: int, num_chunks: int, forward_only: bool
) -> GeneratorSchedule:
    if steps and num_chunks > 1:
        raise ConfigError(
            f"{steps[0].name} follows the 1F1B schedule, but the backbone has {num_chunks} virtual stages on each "
            "rank. Leave out the virtual stages."
        )
    return GeneratorSchedule(
        steps,
        stage=session.backbone_placement[session.rank].pipeline,
        num_stages=session.num_stages,
        num_microbatches=num_microbatches,
        forward_only=forward_only,
        diagonal=session.memory == "window",
    )


def _report(result: Any, steps: list[GeneratorStep]) -> None:
    """Add each generator's losses to the loss function's reports, as ``[sum, number]`` like the host's."""
    for step in steps:
        for report, losses in zip(result, step.reports, strict=False):
            if isinstance(report, dict):
                report[f"{step.name} loss"] = losses


def _everyones_items(session: HeteroSession, batches: StepBatches | None) -> list[list[Item]]:
    """Return per encoder, then per generator, the items of all ranks that exchange with this one.

    Collective over the groups of ``session.gathers()``.
    """
    modules = [*session.encoders, *session.generators]
    adapters = [module.adapter for module in modules]
    found = [local_items(adapter, batches, session.dp_replica) if batches is not None else [] for adapter in adapters]
    assert session.batch_owner_ranks is not None
    if plays_alone():
        _stand_in_for_items(session, found, batches is not None)
        return found
    contributes = session.rank == session.batch_owner_ranks[session.dp_replica][0]
    for gather, numbers in session.gathers():
        everyones = gather.gather(
            [found[number] if contributes else [] for number in numbers],
            [adapters[number].meta_size for number in numbers],
            next(modules[numbers[0]].module.parameters()).device,
        )
        for number, items in zip(numbers, everyones, strict=True):
            found[number] = items
    return found


def _stand_in_for_items(session: HeteroSession, found: list[list[Item]], has_batches: bool) -> None:
    """Use the items of this rank, which runs alone, for every replica."""
    if not has_batches:
        raise ConfigError(
            f"rank {session.rank} has no data iterator: alone it cannot compute which items its encoders get. Run a "
            "rank that reads data (--auto-parallel-preflight-ranks), or let the loader serve every rank."
        )
    for _, numbers in session.gathers():
        replicas = sorted({session.backbone_placement[rank].data for rank in session.comms[numbers[0]].ranks})
        for number in numbers:
            found[number] = items_of_replicas(found[number], replicas)


def _arriving(
    session: HeteroSession, batches: StepBatches | None, num_microbatches: int, chunks: list[Any]
) -> Iterator[tuple[int, ...]] | None:
    """Return the shapes that the previous stage sends, by the lengths of this rank's own texts; ``None``: unknown.

    Virtual stages receive them out of order: every shape is the longest then.
    """
    from megatron.core.utils import get_model_config

    texts = [batches[number].get("input_ids") for number in range(num_microbatches)] if batches is not None else []
    if not texts or any(text is None for text in texts):
        return None
    shapes = [sequence_shape(text.shape[1], text.shape[0], get_model_config(chunks[0])) for text in texts]
    return iter(shapes) if len(chunks) == 1 else itertools.repeat(max(shapes))


def _telling(
    forward_step: Callable[..., Any],
    first_chunk: Any,
    steps: list[EncoderStep],
    schedule: UpfrontSchedule | WindowedSchedule,
    generator_schedule: GeneratorSchedule,
) -> Callable[..., Any]:
    """Return a ``forward_step`` that passes the first model chunk's current microbatch to encoders, generators and
    schedules."""
    counter, every_chunk = itertools.count(), itertools.count()

    def step(data_iterator: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
        schedule.at_forward(next(every_chunk))
        if model is not first_chunk:
            return forward_step(data_iterator, model, *args, **kwargs)
        count = next(counter)
        for encoder_step in steps:
            encoder_step.outputs.current = count
        generator_schedule.before_forward(count)
        output, loss_function = forward_step(data_iterator, model, *args, **kwargs)
        return generator_schedule.after_forward(count, output), loss_function

    return step


@contextlib.contextmanager
def _finalize_backbone_only(session: HeteroSession, chunk: Any, factor: list[Any]) -> Iterator[None]:
    """Run the stock finalize on the backbone's parameters only, and record the factor by which it scales their
    gradients.

    The stock finalize visits the whole chunk, other modules included, and sums over the backbone's tensor ranks the
    gradients of parameters marked for sequence parallelism or as query norms. In memory mode window, and with
    generators, other modules already have gradients by then.
    """
    from megatron.core.utils import get_model_config

    config = get_model_config(chunk)
    original = config.finalize_model_grads_func
    if original is None:
        yield
        return

    def finalize(model: Any, num_tokens: Any = None, **kwargs: Any) -> Any:
        with frozen([*session.encoders, *session.generators]):
            result = original(model, num_tokens, **kwargs)
        # Megatron sums num_tokens over the job in place before it divides by it.
        factor.append(
            1.0 / session.backbone_data_context if num_tokens is None else 1.0 / torch.clamp(num_tokens, min=1)
        )
        return result

    with replaced(config, "finalize_model_grads_func", finalize):
        yield
