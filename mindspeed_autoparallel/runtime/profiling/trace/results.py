"""The result of a trace of a block or a stage, key by key: the JSON line of the tracing process."""

from __future__ import annotations

from typing import TypedDict


class OperatorCount(TypedDict):
    """Equal calls of an operator; ``shapes``: of its tensor arguments."""

    name: str
    shapes: list[list[int]]
    count: int


class CollectiveCount(TypedDict):
    """Equal calls on process groups; ``size_bytes``: the largest tensor of one."""

    name: str
    size_bytes: int
    count: int


class Phase(TypedDict):
    """Calls of one phase; live bytes at its end and the highest so far, of storages that were not there before."""

    operators: list[OperatorCount]
    collectives: list[CollectiveCount]
    peak_bytes: int
    live_bytes: int


class BlockResult(TypedDict, total=False):
    """One rank's share of a block (``forward``, ``backward``) or of a stage's step (``step``), or why there is none."""

    schema_version: int
    block: str
    parameter_count: int
    saved_bytes: int
    """Distinct storages kept for the backward."""
    output_bytes: int
    forward: Phase
    backward: Phase
    step: Phase
    error: str
