"""Files of other trainers that shard with FSDP2: their sizes, read and written.

``trainer_decisions`` reads and writes what a file decides except sizes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from mindspeed_autoparallel.errors import ConfigError
from mindspeed_autoparallel.files import read_text, shown
from mindspeed_autoparallel.hosts.reading import Values
from mindspeed_autoparallel.hosts.trainer_table import TRAINERS, Trainer
from mindspeed_autoparallel.hosts.yaml_edit import Value, load_tree, with_values
from mindspeed_autoparallel.spec.sharded import ShardSizes

_UNSET = (None, "none", "None", "auto", -1, "-1", 0)
"""Values of sizes that a trainer computes from the world size, or that are missing."""


@dataclass(frozen=True, kw_only=True)
class TrainerFile:
    """A file of one of ``TRAINERS``."""

    trainer: Trainer
    path: Path
    text: str
    values: Values
    given: Mapping[str, int] = field(default_factory=dict)
    """Sizes from an accompanying launch script, by field of ``ShardSizes``; ``global_batch_size``; ``tokens``."""

    def size(self, key: str) -> int | None:
        """Return the size at ``key``; ``None`` if the trainer computes it."""
        if not key or self.values.at(key) in _UNSET:
            return None
        return self.values.integer(key, 1, least=1)

    @property
    def tensor_size(self) -> int:
        """Return the number of ranks that share every layer; ``ConfigError`` if that has no price."""
        keys = self.trainer
        size = self.size(keys.tensor) or 1
        if size > 1 and not keys.sequence_parallel:
            raise ConfigError(f"{self.path}: {keys.tensor} is {size}; a sharded plan has no tensor parallelism.")
        others = [key for key in (keys.ulysses, keys.expert) if size > 1 and (self.size(key) or 1) > 1]
        if others:
            raise ConfigError(f"{self.path}: {keys.tensor} is {size} with {others[0]}; it is priced only without them.")
        return size

    def sizes(self, num_devices: int) -> ShardSizes:
        """Return the sizes on ``num_devices`` devices, one of each tensor parallel group; ``ConfigError`` for what a
        plan lacks or does not divide."""
        keys = self.trainer
        if (value := self.size(keys.pipeline) or 1) > 1:
            raise ConfigError(f"{self.path}: {keys.pipeline} is {value}; a sharded plan has no pipeline parallelism.")
        context = self.size(keys.ulysses) or self.given.get("ulysses_size", 1)
        expert = self.size(keys.expert) or 1
        given = self.size(keys.fully_shard)
        unset = keys.unset_shard if self.values.at(keys.fully_shard or keys.replicas) is None else 0
        shard = given or unset or num_devices // (self.size(keys.replicas) or 1)
        shard = num_devices if keys.shards_world else shard
        shard *= context if given and keys.shards_alone else 1
        if context > num_devices or expert > num_devices or shard < 1:
            raise ConfigError(f"{self.path}: its sizes need more than {num_devices} devices.")
        micro = self.size(keys.micro_batch) or self.given.get("micro_batch_size", 1)
        rows = micro * (num_devices // context)
        whole = self.size(keys.global_batch) or self.given.get("global_batch_size")
        accumulation = self.size(keys.accumulation) or max(1, (whole or rows) // rows)
        return ShardSizes(
            num_devices=num_devices,
            fully_shard_size=shard,
            ulysses_size=context,
            expert_size=expert,
            expert_shard_size=self.size(keys.expert_shard) or self._expert_shard(num_devices, shard, expert),
            micro_batch_size=micro,
            accumulation=accumulation,
        )

    def _expert_shard(self, num_devices: int, shard: int, expert: int) -> int:
        ranks = num_devices if self.trainer.experts_everywhere else shard
        return 1 if self.trainer.expert_shard else max(1, ranks // expert)

    def size_values(self, sizes: ShardSizes) -> dict[str, Value]:
        """Return the keys that set ``sizes`` in the file; raises if a size has no key."""
        present, keys = self.sizes(sizes.num_devices), self.trainer
        changes = [
            (keys.ulysses, "ulysses_size", present.ulysses_size, sizes.ulysses_size),
            (keys.expert, "expert_size", present.expert_size, sizes.expert_size),
            (keys.micro_batch, "micro_batch_size", present.micro_batch_size, sizes.micro_batch_size),
        ]
        shards = [one.fully_shard_size // (one.context_size if keys.shards_alone else 1) for one in (present, sizes)]
        if keys.shards_world:
            shards[0] = self.size(keys.fully_shard) or keys.unset_shard
        if keys.fully_shard or not keys.replicas:
            changes.append((keys.fully_shard, "fully_shard_size", shards[0], shards[1]))
        if keys.replicas:
            changes.append((keys.replicas, "replicas", present.replicas, sizes.replicas))
        if keys.expert_shard and sizes.expert_size > 1:
            changes.append((keys.expert_shard, "", present.expert_shard_size, sizes.expert_shard_size))
        if keys.accumulation:
            changes.append((keys.accumulation, "", present.accumulation, sizes.accumulation))
        if keys.global_batch:
            changes.append((keys.global_batch, "", present.global_batch_size, sizes.global_batch_size))
        changed = [(key, name, value) for key, name, before, value in changes if value != before]
        for key, name, value in changed:
            if not key and name not in keys.words:
                raise ConfigError(f"{self.path}: {keys.name} has no key for {name.replace('_', ' ')} {value}.")
        return {key: value for key, _, value in changed if key}

    def with_values(self, values: Mapping[str, Value]) -> str:
        """Return the text with ``values`` set and everything else kept."""
        return with_values(self.text, values, str(self.path))


def read_trainer_file(path: Path) -> TrainerFile:
    """Read a file of any of ``TRAINERS``; raises ``ConfigError`` for other files or an invalid size."""
    text = read_text(path, "the configuration")
    values = Values(load_tree(text, str(path)), str(path))
    trainer = next((one for one in TRAINERS if _is_of(values, one)), None)
    if trainer is None:
        names, keys = ", ".join(one.name for one in TRAINERS), shown(", ".join(map(str, values.tree)), 100)
        raise ConfigError(f"{path} is not a configuration of any of {names}; its top-level keys are {keys}.")
    values.refuse_misspelt(trainer.name, trainer.keys)
    found = TrainerFile(trainer=trainer, path=path, text=text, values=values)
    for key in (trainer.fully_shard, trainer.ulysses, trainer.expert, trainer.micro_batch, trainer.global_batch):
        found.size(key)
    return found


def _is_of(values: Values, trainer: Trainer) -> bool:
    section = values.tree.get(trainer.section) if trainer.section else values.tree
    return isinstance(section, Mapping) and any(mark in section for mark in trainer.marks)
