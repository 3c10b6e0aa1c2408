"""What a search reads of a trainer's file, whatever the trainer, and what it writes back."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from mindspeed_autoparallel.profiles.sharded import ElementBytes, ShardedModule
from mindspeed_autoparallel.spec.sharded import ShardedDecisions, ShardingHost

Modules = Sequence[ShardedModule]


@dataclass(frozen=True, kw_only=True)
class Written:
    """A plan in a trainer's words."""

    text: str = ""
    """The file's text with the decisions; empty where they stand on the command line alone."""
    words: tuple[str, ...] = ()
    """Of the command line, behind the user's own."""
    left_out: tuple[str, ...] = ()
    """Flags to take out of it."""


@dataclass(frozen=True, kw_only=True)
class HostFile:
    """A trainer's file; what depends on the model's modules are functions of them."""

    path: Path
    micro_batch: int
    frozen: tuple[str, ...] = ()
    """Patterns of modules without gradients."""
    tensor_size: int = 1
    """Fixed by the file: what is planned is one rank of each group of these."""
    sequence_parallel: bool = False
    eager: bool = False
    """Whether attention keeps its matrices."""
    tokens: int
    """Longest sample; 0: the file has none."""
    tokens_key: str
    bytes_of: ElementBytes
    notes: tuple[str, ...] = ()
    """What of the file is not priced."""
    states_batch: bool
    """Whether the file fixes the global batch."""
    arguments: Mapping[str, object] = field(default_factory=dict)
    """Megatron's arguments where they describe the model, by name; empty where a config.json does."""
    host: Callable[[bool], ShardingHost]
    """By whether the devices are NPUs."""
    decisions: Callable[[Modules, int, bool], ShardedDecisions]
    """By the model's modules, the number of devices and whether they are NPUs."""
    written: Callable[[ShardedDecisions, Modules], Written]
