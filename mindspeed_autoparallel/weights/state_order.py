"""The parameters that an optimizer steps in a chunk of another layout, in the host's order, and their cut state."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from mindspeed_autoparallel.weights import names, tensors
from mindspeed_autoparallel.weights.layouts import CheckpointLayout
from mindspeed_autoparallel.weights.optimizer_state import PREFIX, OptimizerState
from mindspeed_autoparallel.weights.placement import Entry, chunk_entries
from mindspeed_autoparallel.weights.rank_files import RankFile
from mindspeed_autoparallel.weights.rank_folders import RankFolderSource
from mindspeed_autoparallel.weights.source import blocks_of_output_layer_or_embedding
from mindspeed_autoparallel.weights.spelling import TRANSFORMER_ENGINE, Spelling

Place = tuple[int, int]
"""(tensor rank, expert rank)"""


_LAST = (1 << 60,)


@dataclass(frozen=True)
class OrderedState:
    """The optimizer's ``state`` of ``weights``, for ``layout``."""

    weights: RankFolderSource
    state: OptimizerState
    layout: CheckpointLayout
    spelling: Spelling

    def parameters(self, virtual: int, stage: int) -> list[Entry]:
        """Return the parameters that the optimizer steps in a chunk, in the host's order."""
        architecture = self.weights.architecture
        source = next(iter(self.state.sources.values()))
        return [
            entry
            for entry, _ in self.in_order(chunk_entries(architecture, self.layout, virtual, stage))
            if source.has(entry) or (names.is_output_layer(entry.rule) and architecture.tied_embeddings)
        ]

    def in_order(self, chunk: Iterable[tuple[Entry, int]]) -> list[tuple[Entry, int]]:
        """Return (tensor, first layer of its chunk) in the host's order."""
        # A tied output layer has no index if the model was in one stage; as a separate parameter it comes last.
        return sorted(chunk, key=lambda held: self._order.get(held[0].name, _LAST))

    @functools.cached_property
    def _order(self) -> dict[str, tuple[int, ...]]:
        """Return canonical name -> index among the parameters of the whole model."""
        places = self.weights.places()
        first: dict[tuple[int, str], int] = {}
        for entry, (_, _, number) in places.items():
            if entry.rule.per_expert:
                for key in ((entry.layer, ""), (entry.layer, entry.rule.target)):
                    first[key] = min(number, first.get(key, number))
        found = {}
        for entry, (virtual, stage, number) in places.items():
            place: tuple[int, ...] = (number, 0, 0)
            if entry.rule.per_expert:
                # One expert after the other, or with Transformer Engine one product of all experts after the other.
                by_product = self.spelling.implementation == TRANSFORMER_ENGINE
                product = first[entry.layer, entry.rule.target]
                rest = (product, entry.expert) if by_product else (entry.expert, product)
                place = (first[entry.layer, ""], *rest)
            found[entry.name] = (virtual, stage, *place)
        return found

    def shards(self, kind: str, entry: Entry) -> list[list[Any]]:
        """Return the blocks of every tensor rank's part of the state ``kind`` of a parameter."""
        architecture = self.weights.architecture
        blocks = blocks_of_output_layer_or_embedding(self.state.sources[f"{PREFIX}{kind}."], entry)
        size = self.layout.size_of(entry.rule)
        return tensors.cut(entry.rule, blocks, size, self.layout.padded_vocab(architecture.vocab_size))

    def shapes(self, file: RankFile, virtual: int) -> dict[str, tuple[int, ...]]:
        return file.shapes[self.layout.chunk_key(virtual)]

    def stepped_by(self, number: int, chunk: list[Entry]) -> list[Entry]:
        """Return the parameters that the optimizer ``number`` steps; the second of two steps the experts."""
        return [entry for entry in chunk if len(self.state.parts) == 1 or entry.rule.per_expert == bool(number)]

    def held_by(self, file: RankFile, number: int, chunks: list[list[Entry]]) -> dict[Entry, tuple[int, ...]]:
        """Return parameter -> shape for the optimizer ``number`` on the rank of ``file``."""
        return {
            entry: self.shapes(file, virtual)[entry.name]
            for virtual, chunk in enumerate(chunks)
            for entry in self.stepped_by(number, chunk)
            if entry.name in self.shapes(file, virtual)
        }
