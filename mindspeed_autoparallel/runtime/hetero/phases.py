"""Three phases around Megatron's own schedule: encode everything, run the backbone, bring the gradients back.

No schedule is copied: ``run`` calls the stock function under the backbone's state, with the encoders answering from
rows computed before and the gradient reduction observed. The encoders' backward runs afterwards under their own states,
so no autograd hook ever sees the wrong layout.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from mindspeed_autoparallel.errors import ConfigError
from mindspeed_autoparallel.runtime.hetero.encode import MacroBatch
from mindspeed_autoparallel.runtime.hetero.layouts import check_scale
from mindspeed_autoparallel.runtime.hetero.metadata import gather_items, local_items
from mindspeed_autoparallel.runtime.hetero.modules import Encoder, finalize_gradients
from mindspeed_autoparallel.runtime.hetero.redistribution.plan import Item, make_plan
from mindspeed_autoparallel.runtime.hetero.session import HeteroSession, Route


class Answers:
    """What one encoder answers in phase 2: the current microbatch's rows, leaves whose gradients phase 3 reads."""

    def __init__(self, encoder: Encoder) -> None:
        self._encoder = encoder
        self._rows: dict[int, dict[int, torch.Tensor]] = {}
        self._leaves: dict[int, torch.Tensor] = {}
        self.current = -1
        self._asked: set[int] = set()

    def give(self, microbatch: int, item: int, rows: torch.Tensor) -> None:
        self._rows.setdefault(microbatch, {})[item] = rows

    def close(self, with_gradient: bool) -> None:
        """One leaf per microbatch, items in the order of the batch."""
        for microbatch, rows in self._rows.items():
            leaf = torch.cat([rows[item] for item in sorted(rows)])
            self._leaves[microbatch] = leaf.requires_grad_(with_gradient)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        adapter = self._encoder.adapter
        self._asked.add(self.current)
        leaf = self._leaves.get(self.current)
        if leaf is None:
            device = next(self._encoder.module.parameters()).device
            leaf = torch.zeros((0, *adapter.output_shape), dtype=adapter.output_dtype, device=device)
        return adapter.embeddings(leaf)

    def gradient(self, microbatch: int, item: int) -> torch.Tensor:
        """Gradient of one item's merged rows."""
        leaf, rows = self._leaves[microbatch], self._rows[microbatch]
        if leaf.grad is None:
            return torch.zeros_like(rows[item])
        start = sum(rows[other].shape[0] for other in rows if other < item)
        return leaf.grad[start : start + rows[item].shape[0]]

    def check_all_used(self) -> None:
        unused = sorted(set(self._leaves) - self._asked)
        if unused:
            raise ConfigError(
                f"the model never called {self._encoder.name} for microbatch {unused[0]}, which has items for it. "
                "The forward step must call the encoder wherever the batch has inputs for it."
            )

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        """Inside the block, calling the encoder module returns the answers."""
        fields = self._encoder.module.__dict__
        before = fields.get("forward")
        fields["forward"] = self
        try:
            yield
        finally:
            del fields["forward"]
            if before is not None:
                fields["forward"] = before


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
    """The stock ``forward_backward``'s result; gradients of all modules are final. Arguments are Megatron's."""
    batches, iterators = _pull(data_iterator, num_microbatches)
    session.learn_holders(batches is not None)
    answers = []
    macros: list[tuple[Route, list[Item], MacroBatch, Answers]] = []
    for route in session.routes:
        if not forward_only:
            check_scale(route.encoder.scale, num_microbatches)
        answer = Answers(route.encoder)
        train = route.encoder.trainable and not forward_only
        macros += [
            (route, items, macro, answer)
            for items, macro in _encode(session, route, batches, num_microbatches, train, answer)
        ]
        answer.close(with_gradient=train)
        answers.append(answer)
    chunks = model if isinstance(model, list) else [model]
    factor: list[Any] = []
    started = time.perf_counter()
    with contextlib.ExitStack() as stack:
        stack.enter_context(session.states.use(session.backbone))
        for answer in answers:
            stack.enter_context(answer.installed())
        stack.enter_context(_observe_finalize(chunks[0], session.backbone_data_context, factor))
        result = forward_backward(
            forward_step_func=_counting(forward_step_func, chunks[0], answers),
            data_iterator=iterators,
            model=model,
            num_microbatches=num_microbatches,
            forward_only=forward_only,
            **kwargs,
        )
    session.times.backbone += time.perf_counter() - started
    if session.first_stage:
        for answer in answers:
            answer.check_all_used()
    if not forward_only:
        _encoder_backward(session, macros, factor[0] if factor else 1.0 / session.backbone_data_context)
    return result


def _encode(
    session: HeteroSession, route: Route, batches: Any, num_microbatches: int, train: bool, answer: Answers
) -> Iterator[tuple[list[Item], MacroBatch]]:
    encoder, adapter = route.encoder, route.encoder.adapter
    started = time.perf_counter()
    mine = local_items(adapter, batches, session.home) if batches is not None else []
    everyones = mine
    assert session.holders is not None
    if session.needs_metadata(route):
        contributes = session.rank == session.holders[session.home][0]
        device = next(encoder.module.parameters()).device
        everyones = gather_items(mine, contributes, adapter, route.group, device)
    session.times.metadata += time.perf_counter() - started
    replica = route.placement[session.rank].data
    for first in range(0, num_microbatches, encoder.scale):
        window = range(first, min(first + encoder.scale, num_microbatches))
        started = time.perf_counter()
        items = [item for item in everyones if item.microbatch in window]
        plan = make_plan(
            items,
            encoder=route.placement,
            backbone=session.backbone_placement,
            ranks=route.ranks,
            mode=session.balance,
            input_holders=session.holders,
        )
        session.times.planning += time.perf_counter() - started
        started = time.perf_counter()
        macro = MacroBatch(
            encoder,
            plan,
            route.exchange,
            session.states,
            replica=replica,
            rank=session.rank,
            train=train,
            keep_graph=session.memory == "upfront",
        )
        inputs = _held_inputs(adapter, batches, window, items, session.home)
        for item, rows in macro.encode(inputs).items():
            answer.give(items[item].microbatch, item, rows)
        session.times.encode += time.perf_counter() - started
        yield items, macro


def _held_inputs(
    adapter: Any, batches: Any, window: Sequence[int], items: Sequence[Item], home: int
) -> dict[int, torch.Tensor]:
    """Input rows of the items in this rank's own batches, by index among ``items``."""
    if batches is None:
        return {}
    held: dict[int, torch.Tensor] = {}
    for microbatch in window:
        indices = [i for i, item in enumerate(items) if item.home == home and item.microbatch == microbatch]
        if indices:
            sizes = [items[i].input_rows for i in indices]
            rows = adapter.rows(batches[microbatch])
            if rows.shape[0] != sum(sizes):
                raise ConfigError(
                    f"microbatch {microbatch} (samples {sorted({items[i].sample for i in indices})}) announces "
                    f"{sum(sizes)} input rows and holds {rows.shape[0]}."
                )
            held.update(zip(indices, torch.split(rows, sizes), strict=True))
    return held


def _encoder_backward(
    session: HeteroSession, macros: list[tuple[Route, list[Item], MacroBatch, Answers]], factor: Any
) -> None:
    started = time.perf_counter()
    for route, items, macro, answer in macros:
        if route.encoder.trainable:
            wanted = {
                i: answer.gradient(item.microbatch, i)
                for i, item in enumerate(items)
                if item.home == session.home and session.first_stage
            }
            macro.backward(wanted)
    session.times.encoder_backward += time.perf_counter() - started
    started = time.perf_counter()
    for encoder in session.encoders:
        finalize_gradients(session.states, encoder, factor)
    session.times.finalize += time.perf_counter() - started


def _pull(data_iterator: Any, num_microbatches: int) -> tuple[list[Any] | None, Any]:
    """The step's raw batches on ranks that have an iterator, and iterators over them for the stock schedule."""
    several = isinstance(data_iterator, list)
    sources = data_iterator if several else [data_iterator]
    pulled = [None if it is None else [next(it) for _ in range(num_microbatches)] for it in sources]
    again = [None if batches is None else iter(batches) for batches in pulled]
    return pulled[0], again if several else again[0]


def _counting(forward_step: Callable[..., Any], first_chunk: Any, answers: list[Answers]) -> Callable[..., Any]:
    """``forward_step`` that tells the encoders which microbatch the first model chunk is at."""

    def step(data_iterator: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
        if model is first_chunk:
            for answer in answers:
                answer.current += 1
        return forward_step(data_iterator, model, *args, **kwargs)

    return step


@contextlib.contextmanager
def _observe_finalize(chunk: Any, data_context: int, factor: list[Any]) -> Iterator[None]:
    """Let the stock finalize run, and note by which factor it scaled the backbone's gradients."""
    from megatron.core.utils import get_model_config

    config = get_model_config(chunk)
    original = config.finalize_model_grads_func
    if original is None:
        yield
        return

    def finalize(model: Any, num_tokens: Any = None, **kwargs: Any) -> Any:
        result = original(model, num_tokens, **kwargs)
        # Megatron sums num_tokens over the job in place before it divides by it.
        factor.append(1.0 / data_context if num_tokens is None else 1.0 / torch.clamp(num_tokens, min=1))
        return result

    config.finalize_model_grads_func = finalize
    try:
        yield
    finally:
        config.finalize_model_grads_func = original
