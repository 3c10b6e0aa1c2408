"""Puts layers on pipeline stages the way Megatron and MindSpeed do: even, counted, listed, by layout string."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from mindspeed_autoparallel.cost.analytic.model_shape import LayerKind, ModelShape
from mindspeed_autoparallel.cost.analytic.workload import StageLayers
from mindspeed_autoparallel.errors import ConfigError
from mindspeed_autoparallel.spec.legality import IllegalLayout, too_many_stages

_TOKEN = re.compile(r"\(([^()]*)\)(?:\*(\d+))?|([EtmL|])(?:\*(\d+))?")
_LONGEST = 100_000


@dataclass(frozen=True, kw_only=True)
class PlacementRequest:
    """What a request states about its stages; by default they are equal."""

    pipeline_size: int
    virtual_size: int = 1
    layer_list: tuple[int, ...] = ()
    """Layers per stage (``--num-layer-list``), or per chunk in the order of the model."""
    layout: str = ""
    """``--pipeline-model-parallel-layout``."""
    noop_layers: tuple[int, ...] = ()
    """Numbers of layers that do nothing (MindSpeed); they count among ``num_layers``."""
    first_stage: int | None = None
    last_stage: int | None = None
    account_for_embedding: bool = False
    account_for_loss: bool = False


def place_layers(model: ModelShape, request: PlacementRequest) -> tuple[StageLayers, ...]:
    """Return the layers of every stage; raises ``ConfigError`` if they cannot be split as requested."""
    chunks = _chunks(model, request)
    encoder = _encoder_counts(model, request)
    ahead = _stage_of_prediction(request)
    stages: list[StageLayers] = []
    for stage in range(request.pipeline_size):
        own = tuple(map(tuple, chunks[stage :: request.pipeline_size]))
        mtp = model.mtp_layers if stage == ahead else 0
        stages.append(StageLayers(chunks=own, encoder_chunks=encoder[stage :: request.pipeline_size], mtp_layers=mtp))
    return tuple(stages)


def _encoder_counts(model: ModelShape, request: PlacementRequest) -> tuple[int, ...]:
    """Return the encoder's layers of every chunk in the order of the model; nothing without an encoder.

    By default all are on the first chunk; layers per stage are on the first chunk of each.
    """
    if (encoder := model.encoder) is None:
        return ()
    size, chunks = request.pipeline_size, request.pipeline_size * request.virtual_size
    split = encoder.layers_per_stage or (encoder.num_layers, *(0,) * (size - 1))
    if len(split) not in (size, chunks) or sum(split) != encoder.num_layers:
        places = f"{size} stages" + f" or {chunks} chunks" * (chunks > size)
        raise ConfigError(f"the encoder has {encoder.num_layers} layers, its split over {places} is {list(split)}.")
    return (*split, *(0,) * (chunks - len(split)))


def _stage_of_prediction(request: PlacementRequest) -> int:
    """Return the stage of the multi-token prediction layers: as in the layout string, else the last."""
    parts = unfold_layout(request.layout).split("|")
    holder = next((v for v, part in enumerate(parts) if "m" in part), request.pipeline_size - 1)
    return holder % request.pipeline_size


def _chunks(model: ModelShape, request: PlacementRequest) -> list[list[LayerKind]]:
    """Return the kinds of the layers of every chunk in the order of the model; no-op layers are left out."""
    numbers = _counts(model, request)
    noop = set(request.noop_layers)
    if len(noop) < len(request.noop_layers) or max(noop, default=0) >= sum(numbers):
        raise ConfigError(
            f"noop_layers {list(request.noop_layers)} must name layers from 0 to {sum(numbers) - 1}, each once."
        )
    kinds = iter(model.layers)
    result, number = list[list[LayerKind]](), 0
    for count in numbers:
        chunk: list[LayerKind] = []
        for _ in range(count):
            if number not in noop:
                chunk.append(next(kinds))
            number += 1
        result.append(chunk)
    return result


def _counts(model: ModelShape, request: PlacementRequest) -> list[int]:
    total, size = model.num_layers + len(request.noop_layers), request.pipeline_size * request.virtual_size
    if request.layout:
        written = unfold_layout(request.layout).count("m")
        if written != model.mtp_layers:
            raise ConfigError(
                f"pipeline_layout {request.layout!r} has {written} MTP layers (m), the model {model.mtp_layers} "
                "(mtp_layers, --mtp-num-layers): it holds every one."
            )
        return layout_counts(request.layout, total, request.pipeline_size, request.virtual_size)
    if request.layer_list:
        return _listed(request, total)
    if request.first_stage is not None or request.last_stage is not None:
        return _uneven_ends(request, total)
    extra = request.account_for_embedding + request.account_for_loss
    each, more = divmod(total + extra, size)
    if reason := too_many_stages(size, total, extra):
        raise IllegalLayout(f"{reason} Give pipeline_layout to leave stages without layers.")
    # Megatron takes an uneven split only as a layout, and layouts put the fewest layers at the end, with the loss.
    counts = [each + (chunk < more) for chunk in range(size)]
    counts[0] -= request.account_for_embedding
    counts[-1] -= request.account_for_loss
    return counts


def _listed(request: PlacementRequest, total: int) -> list[int]:
    size = request.pipeline_size * request.virtual_size
    listed = list(request.layer_list)
    if (
        len(listed) == request.pipeline_size
        and request.virtual_size > 1
        and all(n % request.virtual_size == 0 for n in listed)
    ):
        listed = [count // request.virtual_size for _ in range(request.virtual_size) for count in listed]
    if len(listed) != size or sum(listed) != total or min(listed) < 0:
        raise ConfigError(
            f"num_layer_list {list(request.layer_list)} must have {size} counts that add up to {total} layers."
        )
    return listed


def _uneven_ends(request: PlacementRequest, total: int) -> list[int]:
    """Return layers by chunk under ``--decoder-first-pipeline-num-layers`` and ``...-last-...``: equal in between."""
    first, last = request.first_stage, request.last_stage
    between = request.pipeline_size - (first is not None) - (last is not None)
    left = total - (first or 0) - (last or 0)
    if between < 0 or left < 0 or (between and left % (between * request.virtual_size)) or (not between and left):
        raise ConfigError(
            f"{total} layers with {first} on the first and {last} on the last stage leave {left} for {between} stages."
        )
    middle = left // between if between else 0
    stages = [middle] * request.pipeline_size
    if first is not None:
        stages[0] = first
    if last is not None:
        stages[-1] = last
    if any(count % request.virtual_size for count in stages):
        raise ConfigError(f"stages of {stages} layers cannot be split over vpp {request.virtual_size}.")
    return [count // request.virtual_size for _ in range(request.virtual_size) for count in stages]


def layout_counts(layout: str, total: int, pipeline: int, virtual: int) -> list[int]:
    """Return the decoder layers of every chunk in ``layout`` (``Ettt|tt|ttmL``; ``t*3`` and ``(tt|)*3`` repeat).

    Raises ``ConfigError`` with the rule of Megatron's ``PipelineParallelLayerLayout`` that it breaks.
    """
    parts = unfold_layout(layout).split("|")
    if len(parts) != pipeline * virtual:
        raise ConfigError(
            f"pipeline_layout {layout!r} has {len(parts)} chunks, pp {pipeline} x vpp {virtual} needs "
            f"{pipeline * virtual}."
        )
    _check_order(layout, parts, pipeline)
    counts = [part.count("t") for part in parts]
    if sum(counts) != total:
        raise ConfigError(f"pipeline_layout {layout!r} has {sum(counts)} decoder layers, the model {total}.")
    return counts


def _check_order(layout: str, parts: Sequence[str], pipeline: int) -> None:
    """Raise ``ConfigError`` if embedding, loss or multi-token prediction are in places that Megatron refuses."""
    every = "".join(parts)
    if every.count("E") != 1 or every.count("L") != 1 or every[0] != "E" or every[-1] != "L":
        raise ConfigError(
            f"pipeline_layout {layout!r} must begin with the embedding (E) and end with the loss (L), once each."
        )
    holders = [v for v, part in enumerate(parts) if "m" in part]
    if not holders:
        return
    if "t" in every[every.index("m") :]:
        raise ConfigError(f"pipeline_layout {layout!r}: MTP layers (m) come after all decoder layers (t).")
    if len(holders) > 1:
        raise ConfigError(
            f"pipeline_layout {layout!r} has MTP layers (m) on virtual stages {holders}; all of them go on one."
        )
    if holders[0] < len(parts) - pipeline:
        raise ConfigError(
            f"pipeline_layout {layout!r} has MTP layers (m) on virtual stage {holders[0]}, which is not the last of "
            f"its pipeline rank: move them to virtual stage {len(parts) - pipeline} or later."
        )


def unfold_layout(layout: str) -> str:
    """Return ``layout`` with its repetitions written out, without spaces and commas."""
    layout = layout.replace(" ", "").replace(",", "")
    position, result = 0, list[str]()
    while position < len(layout):
        found = _TOKEN.match(layout, position)
        if not found:
            raise ConfigError(f"pipeline_layout {layout!r} cannot be read at {layout[position:]!r}.")
        inner, many, symbol, times = found.groups()
        piece = (unfold_layout(inner) if inner is not None else symbol) * int(many or times or 1)
        result.append(piece)
        if sum(map(len, result)) > _LONGEST:
            raise ConfigError("pipeline_layout is longer than any model.")
        position = found.end()
    return "".join(result)


def layer_kinds(
    number: int, *, dense_first: int, experts: bool, frequency: Sequence[int] | int = 1, pattern: str = ""
) -> tuple[LayerKind, ...]:
    """Return the kind of each of ``number`` layers.

    ``dense_first``: leading layers without experts. ``frequency``: every how many layers have experts, or 0 and 1 per
    layer. ``pattern``: Megatron's hybrid pattern, a symbol per layer.
    """
    if pattern:
        return tuple(_SYMBOLS[symbol] for symbol in pattern)
    result: list[LayerKind] = []
    for index in range(number):
        chosen = bool(frequency[index]) if not isinstance(frequency, int) else index % max(1, frequency) == 0
        result.append(LayerKind("attention", "experts" if experts and chosen and index >= dense_first else "dense"))
    return tuple(result)


_SYMBOLS = {
    "M": LayerKind("mamba", "none"),
    "*": LayerKind("attention", "none"),
    "-": LayerKind("none", "dense"),
    "E": LayerKind("none", "experts"),
    "G": LayerKind("linear", "none"),
}
PATTERN_SYMBOLS = frozenset(_SYMBOLS)
