"""Which canonical tensors a model has, and which lie in which chunk of a layout under which local name."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from mindspeed_autoparallel.weights import names
from mindspeed_autoparallel.weights.architecture import TEXT, Architecture
from mindspeed_autoparallel.weights.layouts import CheckpointLayout


@dataclass(frozen=True)
class Entry:
    """One canonical tensor: its rule and its layer (0 where there are no layers)."""

    rule: names.Rule
    layer: int = 0

    @property
    def name(self) -> str:
        return self.rule.target.replace("{n}", str(self.layer))

    @property
    def sources(self) -> tuple[str, ...]:
        """Return classic Hugging Face names."""
        return tuple(source.replace("{n}", str(self.layer)) for source in self.rule.sources)

    def local_name(self, start: int) -> str:
        """Return the name in the file of a chunk whose first layer is ``start``: layers count from 0 in every chunk."""
        return self.rule.target.replace("{n}", str(self.layer - start))


def entries_of(architecture: Architecture) -> Iterator[Entry]:
    """Yield all canonical tensors the family may have, first parts, then layer by layer, then last parts of each
    module."""
    rules = names.rules_for(architecture)
    for module, shape in architecture.modules.items():
        mine = [rule for rule in rules if rule.module == module]
        yield from (Entry(rule) for rule in mine if rule.place == names.FIRST)
        for layer in range(shape.num_layers):
            yield from (Entry(rule, layer) for rule in mine if rule.place == names.LAYER)
        yield from (Entry(rule) for rule in mine if rule.place == names.LAST)


def chunk_entries(
    architecture: Architecture, layout: CheckpointLayout, virtual: int, stage: int
) -> Iterator[tuple[Entry, str]]:
    """Yield (entry, local name) of every tensor in a chunk, tied output layers included where they need a copy."""
    for entry in entries_of(architecture):
        placed = layout.modules[entry.rule.module]
        if placed.replicated:
            if virtual == 0:
                yield entry, entry.name
            continue
        here = (virtual, stage)
        if entry.rule.place == names.FIRST:
            belongs = here == placed.first_chunk()
        elif entry.rule.place == names.LAST:
            belongs = here == placed.last_chunk()
        else:
            start = placed.start_of(virtual, stage)
            belongs = start <= entry.layer < start + placed.layers[virtual][stage]
        if not belongs or (names.is_output_layer(entry.rule) and not has_output_layer(architecture, layout)):
            continue
        start = placed.start_of(virtual, stage) if entry.rule.place == names.LAYER else 0
        yield entry, entry.local_name(start)


def has_output_layer(architecture: Architecture, layout: CheckpointLayout) -> bool:
    """Return whether a tied output layer has a copy of its own only where it is not in the chunk of the embedding."""
    text = layout.modules[TEXT]
    return not architecture.tied_embeddings or text.first_chunk() != text.last_chunk()
