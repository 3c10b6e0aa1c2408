"""``--data-balance``: the samples of a global batch are given to replicas and microbatches by their work.

Every rank computes the same assignment from headers and texts before it loads a sample; nothing is communicated. The
assignment of the next batch is computed while this one trains.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import numpy

from mindspeed_autoparallel.data.balance import BatchShape, balance, in_order
from mindspeed_autoparallel.data.media import MediaSizes
from mindspeed_autoparallel.data.sizes import SampleSizes
from mindspeed_autoparallel.data.work import Array, ModuleWork, SampleSize, WorkModel
from mindspeed_autoparallel.errors import ConfigError
from reference_vlm.configuration import DataDescription, ModelDescription, StackDescription
from reference_vlm.data.evenness import Evenness, evenness
from reference_vlm.data.records import Record
from reference_vlm.data.tokens import Tokenizer


@dataclass(frozen=True, kw_only=True)
class Decision:
    """The assignment of one global batch, its gain, and the time of the decision."""

    samples: Array
    """``[replica, microbatch, place]``, see ``balance``."""
    before: Evenness
    after: Evenness
    milliseconds: float
    """Time of the decision, without reading headers."""


class Rearrangement:
    """Decides for one global batch after another, for one replica."""

    def __init__(
        self, shape: BatchShape, work: WorkModel, size_of: Callable[[Record], SampleSize], log_every: int = 0
    ) -> None:
        """Take the size of a record as training cuts it; ``log_every``: batches between lines of the log, 0: none."""
        self.shape, self._work, self._size_of, self._log_every = shape, work, size_of, log_every
        self._known: dict[str, SampleSize] = {}
        self._pool = ThreadPoolExecutor(1)
        self._decided: dict[int, Future[Decision]] = {}

    def samples(self, step: int, rank: int, batch_of: Callable[[range], list[Record]]) -> list[int]:
        """Return the sample numbers of microbatch ``step`` (counted from the start of training) of replica ``rank``.

        ``batch_of``: sample numbers to their records.
        """
        batch, place = divmod(step, self.shape.num_microbatches)
        if place == 0 or batch not in self._decided:
            self._decided = {number: self._decision(number, batch_of) for number in (batch, batch + 1)}
            if self._log_every and batch % self._log_every == 0:
                print(describe(batch, self._decided[batch].result()), flush=True)
        first = batch * self.shape.num_samples
        samples = self._decided[batch].result().samples
        return [first + int(index) for index in samples[rank, place] if index >= 0]

    def check_fits(self, records: Iterable[Record]) -> None:
        """Raise a ``ConfigError`` that names the first record that exceeds the token limit of a microbatch."""
        limit = self.shape.max_tokens
        for record in records if limit else ():
            tokens = self._size(record).tokens
            if tokens > limit:
                raise ConfigError(
                    f"{record.name} has {tokens} tokens and fits nowhere: "
                    f"{'--pack-length' if self.shape.is_filled else '--data-balance-max-tokens'} allows a "
                    f"microbatch {limit}. Raise it, or lower --seq-length to cut texts."
                )

    def decide(self, batch: int, records: list[Record]) -> Decision:
        """Return the decision for the records of a global batch."""
        sizes = numpy.array([self._size(record) for record in records], dtype=numpy.int64)
        began = time.perf_counter()
        try:
            samples = balance(sizes, self._work, self.shape)
        except ConfigError as error:
            # Every sample fits alone (checked before training): no reason to end a run hours in.
            if self._log_every:
                print(f"data balance: batch {batch} goes beyond the limit of tokens: {error}", flush=True)
            samples = balance(sizes, self._work, replace(self.shape, max_tokens=0))
        took = 1000 * (time.perf_counter() - began)
        before, after = (evenness(sizes, self._work, self.shape, one) for one in (in_order(sizes, self.shape), samples))
        return Decision(samples=samples, before=before, after=after, milliseconds=took)

    def _decision(self, batch: int, batch_of: Callable[[range], list[Record]]) -> Future[Decision]:
        if batch in self._decided:
            return self._decided[batch]
        first = batch * self.shape.num_samples
        # The order of an epoch is the caller's state: the thread only computes sizes and the decision.
        records = batch_of(range(first, first + self.shape.num_samples))
        return self._pool.submit(self.decide, batch, records)

    def _size(self, record: Record) -> SampleSize:
        if record.name not in self._known:
            self._known[record.name] = self._size_of(record)
        return self._known[record.name]


def describe(batch: int, decision: Decision) -> str:
    """Return a log line: the balance of the batch before and after, and its gap to the best possible."""
    return (
        f"data balance: batch {batch}: slowest replica {decision.after.imbalance:.3f} times the mean work "
        f"({decision.before.imbalance:.3f} in order), {max(0.0, decision.after.gap):.2%} above the batch's bound, "
        f"decided in {decision.milliseconds:.1f} ms"
    )


def make_rearrangement(
    arguments: Any,
    model: ModelDescription,
    data: DataDescription,
    tokenizer: Tokenizer,
    num_ranks: int,
    is_logged: bool,
) -> Rearrangement:
    """Return the settings of ``--data-balance``; ``ConfigError`` if the loss would change."""
    size = arguments.micro_batch_size
    length = getattr(arguments, "pack_length", 0)
    if size > 1 and not arguments.calculate_per_token_loss:
        raise ConfigError(
            f"--data-balance with a micro batch size of {size} changes what each sample weighs in the loss. Add "
            "--calculate-per-token-loss, or train with --micro-batch-size 1."
        )
    if getattr(arguments, "rampup_batch_size", None):
        raise ConfigError("--data-balance needs equal global batches: leave out --rampup-batch-size.")
    shape = BatchShape(
        num_replicas=num_ranks,
        num_microbatches=arguments.global_batch_size // (size * num_ranks),
        micro_batch_size=size,
        is_padded=not getattr(arguments, "pack_samples", False),
        max_tokens=length or getattr(arguments, "data_balance_max_tokens", 0),
        is_filled=length > 0,
    )
    media = MediaSizes(
        patch_size=model.vision.patch_size if model.vision else 0,
        spatial_merge_size=model.vision.spatial_merge_size if model.vision else 1,
        audio_window=model.audio.num_window_frames if model.audio else 0,
    )
    sizes = SampleSizes(
        media, (data.min_pixels, data.max_pixels), lambda text: len(tokenizer.encode(text)), arguments.seq_length
    )

    def size_of(record: Record) -> SampleSize:
        found = sizes.of(record.turns, record.images, record.audios)
        return found._replace(tokens=min(found.tokens, arguments.seq_length))

    return Rearrangement(shape, work_of(model), size_of, arguments.log_interval if is_logged else 0)


def work_of(model: ModelDescription) -> WorkModel:
    """Return operations of the modules for a sample; encoders with their own layouts are separate phases."""
    together, phases = [], []
    modules = [("text_decoder", "tokens", model.text.stack)]
    modules += [("image_encoder", "patches", model.vision.stack)] if model.vision else []
    modules += [("audio_encoder", "frames", model.audio.stack)] if model.audio else []
    for name, rows, stack in modules:
        # A frozen encoder has no backward; a frozen decoder still sends gradients to the modules before it.
        work = _stack_work(name, rows, stack, 1 if stack.freeze and name != "text_decoder" else 3)
        if name in model.own_layouts:
            phases.append((work,))
        else:
            together.append(work)
    return WorkModel(phases=(tuple(together), *phases))


def _stack_work(name: str, rows: str, stack: StackDescription, passes: int) -> ModuleWork:
    """Return the work of a stack: 2 operations a weight and row, 4 x width a pair of rows; a backward counts twice."""
    width = stack.num_attention_heads * stack.kv_channels
    attention = stack.hidden_size * (2 * width + 2 * stack.num_query_groups * stack.kv_channels)
    weights = attention + stack.hidden_size * stack.ffn_hidden_size * (3 if stack.gated else 2)
    pairs = 2 * width if name == "text_decoder" else 4 * width
    return ModuleWork(
        name=name,
        rows=rows,
        linear=float(passes * stack.num_layers * 2 * weights),
        quadratic=float(passes * stack.num_layers * pairs),
    )
