"""The canonical tensors of a model, and the chunk and local name of each in a layout."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from mindspeed_autoparallel.weights import names
from mindspeed_autoparallel.weights.architecture import TEXT, Architecture, ModuleShape
from mindspeed_autoparallel.weights.layouts import CheckpointLayout


@dataclass(frozen=True)
class Entry:
    """One canonical tensor: its rule, its layer (0 outside layers) and its expert (0 without experts).

    ``behind``: number of the layer continued after the decoder's (``{m}``), or among the layers that have the tensor
    (``{d}``).
    """

    rule: names.Rule
    layer: int = 0
    expert: int = 0
    behind: int = 0

    @property
    def name(self) -> str:
        return self.local_name(0, 0)

    @property
    def sources(self) -> tuple[str, ...]:
        """Return the classic Hugging Face names; one that holds all experts ends in ``[e]``."""
        return tuple(
            source.replace("{n}", str(self.layer))
            .replace("{e}", str(self.expert))
            .replace("{m}", str(self.behind))
            .replace("{d}", str(self.behind))
            for source in self.rule.sources
        )

    def local_name(self, start: int, first_expert: int = 0) -> str:
        """Return the name in the file of a chunk whose first layer is ``start`` (layers count from 0 in every chunk) on
        an expert rank whose first expert is ``first_expert``."""
        name = self.rule.target.replace("{n}", str(self.layer - start))
        return name.replace("{e}", str(self.expert - first_expert))


def entries_of(architecture: Architecture) -> Iterator[Entry]:
    """Yield all canonical tensors of the model, first parts, then layer by layer, then last parts of each module.

    The experts of one rule and layer are consecutive.
    """
    for module, shape in architecture.modules.items():
        mine = [rule for rule in architecture.rules if rule.module == module]
        counted: dict[str, int] = {}
        for place in (names.FIRST, names.LAYER, names.LAST, names.MULTI_TOKEN):
            placed = [rule for rule in mine if rule.place == place]
            for layer in range(_num_layers(place, shape)):
                for rule in placed:
                    if place == names.LAYER and not rule.meets(shape.layer_words[layer]):
                        continue
                    behind = shape.num_layers + layer
                    if any("{d}" in source for source in rule.sources):
                        behind = counted.get(rule.target, 0)
                        counted[rule.target] = behind + 1
                    for expert in range(shape.num_experts if rule.per_expert else 1):
                        yield Entry(rule, layer, expert, behind)


def _num_layers(place: str, shape: ModuleShape) -> int:
    return {names.LAYER: shape.num_layers, names.MULTI_TOKEN: shape.num_multi_token}.get(place, 1)


def chunk_entries(
    architecture: Architecture, layout: CheckpointLayout, virtual: int, stage: int
) -> Iterator[tuple[Entry, int]]:
    """Yield (entry, first layer of the chunk) of every tensor in a chunk: tied output layers where they need a copy,
    and the embedding once more where layers for multi-token prediction read it."""
    for entry in entries_of(architecture):
        placed = layout.modules[entry.rule.module]
        if placed.replicated:
            if virtual == 0:
                yield entry, 0
            continue
        here, filled = (virtual, stage), placed.filled_chunks()
        if entry.rule.place == names.FIRST:
            reads_it = architecture.modules[entry.rule.module].num_multi_token > 0
            belongs = here == filled[0] or (here == filled[-1] and reads_it)
        elif entry.rule.place == names.LAYER:
            start = placed.start_of(virtual, stage)
            belongs = start <= entry.layer < start + placed.layers[virtual][stage]
        else:
            belongs = here == filled[-1]
        if not belongs or (names.is_output_layer(entry.rule) and not has_output_layer(architecture, layout)):
            continue
        yield entry, placed.start_of(virtual, stage) if entry.rule.place == names.LAYER else 0


def has_output_layer(architecture: Architecture, layout: CheckpointLayout) -> bool:
    """Return whether a tied output layer has a separate copy only if it is not in the chunk of the embedding."""
    filled = layout.modules[TEXT].filled_chunks()
    return not architecture.tied_embeddings or filled[0] != filled[-1]
