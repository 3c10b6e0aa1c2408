"""Interface between a host and hetero parallel for each encoder and generator: how to build it and pass batches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import torch

from mindspeed_autoparallel.errors import ConfigError
from mindspeed_autoparallel.runtime.hetero.redistribution.placement import LocalItem as LocalItem


class ItemAdapter(Protocol):
    """The items of an encoder's and of a generator's microbatches; tensors keep items along dimension 0."""

    input_shape: tuple[int, ...]
    """Shape of one input row."""
    input_dtype: Any
    output_shape: tuple[int, ...]
    """Shape of one output row; several outputs that share rows are concatenated on the last dimension."""
    output_dtype: Any
    meta_size: int
    """Length of every item's ``meta``."""

    def items(self, batch: Any) -> Sequence[LocalItem]:
        """Return the items of one microbatch of the data iterator; a generator's in the order in which the host calls
        it with their rows."""

    def rows(self, batch: Any) -> Any:
        """Return the input rows of all items of the microbatch, ``[sum(input_rows), *input_shape]``."""


class EncoderAdapter(ItemAdapter, Protocol):
    """The interface of a host model's encoder."""

    def encode(self, module: Any, rows: Any, items: Sequence[Any]) -> Any:
        """Run the encoder on these items' rows; ``[sum(output_rows), *output_shape]``, complete on every rank."""

    def dummy(self) -> tuple[Any, Sequence[LocalItem]]:
        """Return the cheapest legal input, for a rank without items while others encode."""

    def embeddings(self, rows: Any) -> Any:
        """Return what the host's own call of the encoder returns, formed from the output rows of one microbatch."""


class PipelinedAdapter(EncoderAdapter, Protocol):
    """An adapter whose encoder can be cut into pipeline stages; all but the last return ``[rows, 1, width]``."""

    def encode_later_stage(self, module: Any, hidden: Any, items: Sequence[Any]) -> Any:
        """Run a stage after the first (``encode``) on ``hidden [rows, 1, width]`` from the previous stage.

        The last stage returns rows in the output shape of ``encode``.
        """

    def arriving_shape(self, module: Any, items: Sequence[Any]) -> tuple[int, int, int]:
        """Return the shape ``(rows, 1, width)`` of this rank's input from the previous stage for these items. Only a
        pre-flight of a later stage needs it."""


class SequenceParallelAdapter(EncoderAdapter, Protocol):
    """An adapter whose encoder can split its rows over tensor ranks between matrix products.

    ``encode`` takes and returns all rows on every rank.
    """

    runs_sequence_parallel: bool


class GeneratorAdapter(ItemAdapter, Protocol):
    """The interface of a host's generator. Input rows are targets, output rows are the decoder's hidden states.

    An item's ``first_token`` is the token of its first decoder row; sequence and context parallelism need it.
    """

    def generate(self, module: Any, hidden: Any, targets: Any, items: Sequence[Any]) -> Any:
        """Return the loss of every row of ``hidden [sum(output_rows), *output_shape]``, fp32 ``[sum(output_rows)]``."""

    def dummy(self) -> tuple[Any, Any, Sequence[LocalItem]]:
        """Return the cheapest legal rows, targets and items, for a rank without items while others generate."""


class PipelinedGeneratorAdapter(GeneratorAdapter, Protocol):
    """An adapter whose generator can be cut into pipeline stages; each item is one microbatch of this pipeline.

    ``generate`` runs the first stage. Every stage but the last returns ``[rows, 1, width]`` and gets None as targets.
    """

    def generate_later_stage(self, module: Any, hidden: Any, targets: Any, items: Sequence[Any]) -> Any:
        """Run a stage after the first on ``hidden [rows, 1, width]`` from the previous stage.

        The last stage returns the losses of ``generate``.
        """

    def arriving_shape(self, module: Any, items: Sequence[Any]) -> tuple[int, int, int]:
        """Return the shape ``(rows, 1, width)`` of the input from the previous stage. Only a pre-flight of a later
        stage needs it."""


class HostModule(Protocol):
    """How a host builds its encoder or generator. Registered by the host, or named in model.json as
    ``"module:Class"``.

    A class may list ``attributes``: the attributes of the host's model that can hold such an encoder. Any other
    ``attr`` in model.json is then refused before start-up; without the list it is refused once the model is built.
    """

    def build(self, arguments: Any) -> Any:
        """Return the encoder as the host's own model would hold it, with a ``config``. Called on every rank under the
        encoder's parallel state; ``arguments`` (and ``get_args()``) carry the encoder's tp, pp, cp and sp."""

    def adapter(self, module: Any, arguments: Any) -> EncoderAdapter | GeneratorAdapter:
        """Return the adapter of a module that ``build`` returned."""


class HostModel(Protocol):
    """An optional part of a ``HostModule``, for a host's model that is built without its encoders."""

    def without_encoders(self, provider: Any) -> Any:
        """Return a ``model_provider`` like ``provider`` that builds the host's model without its encoders."""

    def attached(self, chunk: Any) -> None:
        """Prepare ``chunk`` after the encoder has been attached to it."""


class Place(NamedTuple):
    """The sample of an item and the position of its tokens."""

    sample: int
    first_token: int | None
    """None if other tokens are between them."""


def places_of(marked: torch.Tensor, sizes: Sequence[int], kind: str) -> list[Place]:
    """Return the place of each item's tokens. ``marked [b, s]``: mask of all items' tokens; ``sizes``: tokens per item.

    The list is empty for a batch without such tokens: its input is a stand-in and no item.
    ``ConfigError`` names the first sample whose tokens are not those of whole items.
    """
    found: list[Place] = []
    if not bool(marked.any()):
        return found
    for sample, row in enumerate(marked):
        tokens = row.nonzero().flatten().tolist()
        given = 0
        while given < len(tokens) and len(found) < len(sizes):
            size = sizes[len(found)]
            own = tokens[given : given + size]
            found.append(Place(sample, own[0] if own[-1] - own[0] == size - 1 else None))
            given += size
        if given != len(tokens):
            raise ConfigError(
                f"sample {sample} of the microbatch has {len(tokens)} {kind} tokens, but its {kind} inputs make "
                f"{given}. Check the sample's placeholders against its files."
            )
    if len(found) < len(sizes):
        raise ConfigError(
            f"the microbatch has {len(sizes)} {kind} inputs, but tokens for {len(found)} of them (the last in sample "
            f"{found[-1].sample})."
        )
    return found
