"""Records that measuring and tracing processes write about one layout of a model, and the readers of their files.

A name that ends in ``_us`` counts microseconds, one in ``_bytes`` bytes, both on one rank and for one microbatch.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from mindspeed_autoparallel.errors import ConfigError, ProfileError
from mindspeed_autoparallel.files import read_json
from mindspeed_autoparallel.profiles.device import Collective
from mindspeed_autoparallel.profiles.knowledge import Operator, Signature

DIRECTIONS = ("forward", "backward")
PLAIN = "none"
"""The recompute kind of a variant without recompute."""

Record = TypeVar("Record")


@dataclass(frozen=True, kw_only=True)
class ParameterCount:
    """Parameters of a block."""

    num_parameters: int = 0
    parameter_bytes: int = 0
    num_trained: int = 0


@dataclass(frozen=True, kw_only=True)
class BlockParameters:
    """Parameters of a block that every data-parallel rank has, and those of experts."""

    dense: ParameterCount = field(default_factory=ParameterCount)
    expert: ParameterCount = field(default_factory=ParameterCount)

    @property
    def num_parameters(self) -> int:
        """Return both together."""
        return self.dense.num_parameters + self.expert.num_parameters


@dataclass(frozen=True, kw_only=True)
class BlockRecord:
    """One block (``pre``, a kind of layers, ``post``): bytes as in ``RecomputeCost``, and times where it was timed."""

    forward_us: float = 0.0
    backward_us: float = 0.0
    saved_bytes: float = 0.0
    forward_peak_bytes: float = 0.0
    backward_peak_bytes: float = 0.0
    output_bytes: float = 0.0
    parameters: BlockParameters = field(default_factory=BlockParameters)

    def time_us(self, direction: str) -> float:
        """Return the time of one of ``DIRECTIONS``."""
        return self.forward_us if direction == "forward" else self.backward_us


@dataclass(frozen=True, kw_only=True)
class CollectiveCalls:
    """Equal calls on one process group."""

    name: str
    """As ``profiles.device.COLLECTIVES`` has it."""
    size_bytes: int
    """The largest tensor of a call on one rank."""
    ranks: tuple[int, ...]
    """Of the whole job, in the group's order."""
    count: float
    """Calls per block."""


@dataclass(frozen=True, kw_only=True)
class Calls:
    """What a block calls in one direction."""

    operators: tuple[tuple[int, float], ...] = ()
    """Place in the trace's table of operators, and calls per block."""
    collectives: tuple[CollectiveCalls, ...] = ()
    num_calls: float = 0.0
    """All calls, those that compute nothing too: each costs the host's time."""


@dataclass(frozen=True, kw_only=True)
class BlockCalls:
    """What a traced block calls."""

    forward: Calls = field(default_factory=Calls)
    backward: Calls = field(default_factory=Calls)

    def of(self, direction: str) -> Calls:
        """Return the calls of one of ``DIRECTIONS``."""
        return self.forward if direction == "forward" else self.backward


@dataclass(frozen=True, kw_only=True)
class ModuleRecord:
    """A module of the built model."""

    name: str
    result_key: str = ""
    frozen: bool = False
    num_layers: int = 0
    """That were built; ``kinds`` may have more."""
    kinds: tuple[int, ...] = ()
    """Of every layer, numbered in the order they appear."""
    hidden_size: int = 0
    tokens_per_sample: int = 0
    num_heads: int = 0
    num_kv_heads: int = 0
    num_experts: int = 0
    blocks: dict[str, BlockRecord] = field(default_factory=dict)
    side_bytes: tuple[int, int] = (0, 0)
    """Inputs of every layer besides the hidden states, and the part of them that lives until the backward."""
    input_bytes: int = 0  # given to the module as a whole: an encoder's share of the batch
    calls: dict[str, BlockCalls] = field(default_factory=dict)
    """By block, where the module was traced."""


@dataclass(frozen=True, kw_only=True)
class BytesPerParameter:
    """Bytes per trained parameter besides its own, measured on this optimizer."""

    gradient: float
    optimizer: float
    """Whole, before a distributed optimizer splits it."""


@dataclass(frozen=True, kw_only=True)
class ModelRecord:
    """A model in one layout."""

    modules: tuple[ModuleRecord, ...] = ()
    bytes_per_trained_parameter: BytesPerParameter = BytesPerParameter(gradient=0.0, optimizer=0.0)
    batch_bytes: tuple[int, int] = (0, 0)
    """The microbatch's data, and what of it the forward saved."""
    workspace_bytes: int = 0
    host_bytes: int = 0
    """Memory of the host besides the model: data, random states, padding of its buffers."""
    tied_embeddings: bool = False
    time_by_rows: dict[str, tuple[tuple[float, float], ...]] = field(default_factory=dict)
    """By module, of several microbatches: rows of a sample, and the time of the layers over that of the blocks."""


@dataclass(frozen=True, kw_only=True)
class OptimizerRecord:
    """The end of a step."""

    step_us: float = 0.0
    finalize_us: float = 0.0
    """Finalizing gradients, with their reduction."""
    parameter_bytes: int = 0
    """That this rank updates."""


@dataclass(frozen=True, kw_only=True)
class StepsRecord:
    """Whole steps of the host, of one microbatch and of ``num_microbatches``; 0: none was timed."""

    one_us: float = 0.0
    many_us: float = 0.0
    num_microbatches: int = 0


@dataclass(frozen=True, kw_only=True)
class PointResult(ModelRecord):
    """A layout that was measured on devices."""

    optimizer: OptimizerRecord = field(default_factory=OptimizerRecord)
    steps: StepsRecord = field(default_factory=StepsRecord)
    memory_capacity_bytes: int = 0
    links: dict[str, dict[str, Collective]] = field(default_factory=dict)
    """By tier and operation."""
    links_from: str = ""  # empty: measured with the rest


@dataclass(frozen=True, kw_only=True)
class BlockTrace(ModelRecord):
    """A layout that was traced in one variant: calls in place of times."""

    operators: tuple[Operator, ...] = ()
    """The distinct ones, in the order that blocks refer to them."""


class VariantName(NamedTuple):
    """A way to run the layers (empty: the script's own), and a recompute kind."""

    variant: str
    recompute: str

    def __str__(self) -> str:
        return f"{self.variant}|{self.recompute}"

    @classmethod
    def parse(cls, text: str) -> VariantName:
        """Read what ``str`` gives; a recompute kind has no ``|`` in it."""
        variant, _, recompute = text.rpartition("|")
        return cls(variant, recompute)


@dataclass(frozen=True, kw_only=True)
class Failure:
    """Why something could not be traced."""

    reason: str = ""
    """The end of the error, with its place."""
    refused: bool = False
    """Megatron itself refuses it, as it would on real ranks."""

    @property
    def summary(self) -> str:
        """Return the last line."""
        return self.reason.splitlines()[-1] if self.reason else ""


@dataclass(frozen=True, kw_only=True)
class TraceResult:
    """A layout in all its variants."""

    variants: dict[VariantName, BlockTrace] = field(default_factory=dict)
    failures: dict[VariantName, Failure] = field(default_factory=dict)
    """Variants that could not be traced; variants in neither were not needed."""
    failure: Failure | None = None
    """Of the layout itself."""
    summary: str = ""
    given_up: bool = False  # its process ended or hung; another run may try again
    headroom_bytes: int = 0
    """The memory headroom by which variants were not needed; 0: all were."""

    @property
    def plain(self) -> BlockTrace:
        """Return the script's own variant without recompute, which every traced layout has."""
        return self.variants[VariantName("", PLAIN)]


def read_record(path: Path, what: str, kind: type[Record]) -> Record:
    """Return the ``kind`` in the JSON of ``path``; ``ConfigError`` names ``what``, the file and the place of an error.

    Keys that ``kind`` lacks are ignored: another release may have written them.
    """
    return record_of(read_json(path, what), f"{what} {path}", kind)


def record_of(values: Any, where: str, kind: type[Record]) -> Record:
    """Return plain JSON ``values`` as ``kind``; ``ConfigError`` names ``where`` and the place of what is wrong."""
    import msgspec

    try:
        return msgspec.convert(values, kind, dec_hook=_read_field)
    except (msgspec.ValidationError, ProfileError) as error:
        raise ConfigError(f"{where} cannot be used: {error}.") from error


def json_of(record: object) -> Any:
    """Return a record as plain JSON values."""
    import msgspec

    return msgspec.to_builtins(record, enc_hook=_plain_field)


def _read_field(kind: type, value: Any) -> Any:
    # ``object`` takes any value.
    return Signature.of_json(value) if kind is Signature else value


def _plain_field(value: Any) -> Any:
    if isinstance(value, Signature):
        return value.json()
    raise NotImplementedError(type(value))


def read_trace(path: Path) -> TraceResult:
    """Return the trace of a layout; its file has variants by ``str`` of their names, each with a ``status``."""
    return trace_of(read_json(path, "trace"), str(path))


def trace_of(values: Any, where: str) -> TraceResult:
    """Return the plain JSON of a trace as a record."""
    result = record_of({**values, "variants": {}}, where, TraceResult)
    found = {VariantName.parse(name): variant for name, variant in values["variants"].items()}
    failed = values["status"] != "ok"
    return replace(
        result,
        variants={
            name: record_of(item, f"{where}, variant {name}", BlockTrace)
            for name, item in found.items()
            if item["status"] == "ok"
        },
        failures={name: record_of(item, where, Failure) for name, item in found.items() if item["status"] == "failed"},
        failure=record_of(values, where, Failure) if failed else None,
    )
