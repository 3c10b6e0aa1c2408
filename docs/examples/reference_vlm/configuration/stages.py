"""The pipeline stages of a module's layers: ``pipeline_num_layers`` flat, or one list per virtual stage."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from mindspeed_autoparallel.errors import ConfigError
from reference_vlm.configuration.section import Section

NO_OWN_PIPELINES: Mapping[str, int] = {}


@dataclass(frozen=True)
class PipelineSizes:
    """Stages a module is cut over; ``even``: without ``pipeline_num_layers`` they share its layers evenly."""

    size: int
    virtual_size: int
    even: bool = True


def encoder_pipeline(name: str, sizes: PipelineSizes, own_pipelines: Mapping[str, int]) -> PipelineSizes:
    """Return an encoder's own pipeline, or the whole model's, on whose first stage it is by default."""
    if name in own_pipelines:
        return PipelineSizes(own_pipelines[name], 1)
    return PipelineSizes(sizes.size, sizes.virtual_size, even=False)


@dataclass(frozen=True)
class StageLayers:
    """``counts[v][p]``: layers of virtual stage ``v`` on pipeline rank ``p``; chunk order is v-major."""

    counts: tuple[tuple[int, ...], ...]

    @property
    def flat(self) -> tuple[int, ...]:
        """Return layers per chunk in the order in which data passes the chunks."""
        return tuple(count for row in self.counts for count in row)

    @property
    def pipeline_size(self) -> int:
        return len(self.counts[0])

    @property
    def virtual_size(self) -> int:
        return len(self.counts)

    def first_layer(self, chunk: int) -> int:
        """Return global index of the first layer of ``chunk``."""
        return sum(self.flat[:chunk])

    @property
    def first_chunk(self) -> int:
        """Return the chunk with the module's first layer."""
        return next(index for index, count in enumerate(self.flat) if count)

    @property
    def last_chunk(self) -> int:
        """Return the chunk with the module's last layer."""
        return max(index for index, count in enumerate(self.flat) if count)


def read_stages(
    section: Section, num_layers: int, pipeline_size: int, virtual_size: int, *, all_on_first: bool
) -> StageLayers:
    """Return ``pipeline_num_layers`` of a module; without it all layers on the first stage, or an even split."""
    key = "pipeline_num_layers"
    value = section.raw(key)
    if value is None:
        return _default(num_layers, pipeline_size, virtual_size, all_on_first)
    rows = value if isinstance(value, list) and value and all(isinstance(row, list) for row in value) else [value]
    for row in rows:
        good = isinstance(row, list) and all(
            isinstance(count, int) and not isinstance(count, bool) and count >= 0 for count in row
        )
        if not good:
            raise section.error(key, value, "a list of layer counts of at least 0, or one such list per virtual stage")
    if len(rows) != virtual_size or any(len(row) != pipeline_size for row in rows):
        shape = f"{pipeline_size} counts" if virtual_size == 1 else f"{virtual_size} lists of {pipeline_size} counts"
        raise ConfigError(
            f"{section.where(key)} is {value!r}; the pipeline of size {pipeline_size} needs {shape} that sum to "
            f"{num_layers}."
        )
    total = sum(count for row in rows for count in row)
    if total != num_layers:
        raise ConfigError(
            f"{section.where(key)} is {value!r} and sums to {total}; num_layers is {num_layers}: "
            f"{abs(num_layers - total)} layers too {'few' if total < num_layers else 'many'}."
        )
    return StageLayers(tuple(tuple(row) for row in rows))


def virtual_size_in(section: Section) -> int:
    """Return the number of virtual stages in ``pipeline_num_layers`` (1 for a flat list or none)."""
    value = section.raw("pipeline_num_layers")
    return len(value) if isinstance(value, list) and value and all(isinstance(row, list) for row in value) else 1


def _default(num_layers: int, pipeline_size: int, virtual_size: int, all_on_first: bool) -> StageLayers:
    num_chunks = pipeline_size * virtual_size
    if all_on_first:
        flat = [num_layers] + [0] * (num_chunks - 1)
    else:
        flat = [num_layers // num_chunks + (chunk < num_layers % num_chunks) for chunk in range(num_chunks)]
    return StageLayers(
        tuple(tuple(flat[row * pipeline_size : (row + 1) * pipeline_size]) for row in range(virtual_size))
    )
