"""The common form in which a search reads and writes the files of all trainers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from mindspeed_autoparallel.profiles.sharded import Described, ShardedModule
from mindspeed_autoparallel.spec.sharded import ShardedDecisions, ShardingHost

Modules = Sequence[ShardedModule]


@dataclass(frozen=True, kw_only=True)
class Written:
    """A plan in a trainer's format."""

    text: str = ""
    """The file's text with the decisions; empty if they are only on the command line."""
    words: tuple[str, ...] = ()
    """Words to append to the user's command line."""
    left_out: tuple[str, ...] = ()
    """Flags to remove from it."""


@dataclass(frozen=True, kw_only=True)
class HostFile:
    """A trainer's file; values that depend on the model's modules are functions of them."""

    path: Path
    described: Described
    tokens_key: str
    notes: tuple[str, ...] = ()
    """Notes on parts of the file without a price."""
    states_batch: bool
    """Whether the file fixes the global batch."""
    arguments: Mapping[str, object] = field(default_factory=dict)
    """Megatron's arguments by name, if they describe the model; empty if a config.json does."""
    host: Callable[[bool], ShardingHost]
    """Argument: whether the devices are NPUs."""
    decisions: Callable[[Modules, int, bool], ShardedDecisions]
    """Arguments: the model's modules, the number of devices, whether they are NPUs."""
    written: Callable[[ShardedDecisions, Modules], Written]
