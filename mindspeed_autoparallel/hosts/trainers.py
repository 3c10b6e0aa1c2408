"""Other trainers that shard with FSDP2: where their YAML files hold sizes, lists of modules and switches.

One table per trainer, read from its code. ``trainer_decisions`` reads and writes what a file decides beside sizes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from mindspeed_autoparallel.errors import ConfigError
from mindspeed_autoparallel.files import read_text, shown
from mindspeed_autoparallel.hosts.reading import Values
from mindspeed_autoparallel.hosts.yaml_edit import Value, with_values
from mindspeed_autoparallel.hosts.yaml_tree import load_tree
from mindspeed_autoparallel.spec.sharded import ShardSizes

_UNSET = (None, "none", "None", "auto", -1, "-1", 0)
"""Values of sizes that a trainer computes from the world size, or that are missing."""

LAYERS, EMBEDDING, UNTIED_EMBEDDING, HEAD = "layers", "embedding", "untied embedding", "head"
"""Modules that a trainer wraps without a list."""


@dataclass(frozen=True, kw_only=True)
class Trainer:
    """Dotted keys of one trainer's files; empty if missing."""

    name: str
    section: str
    """Section that identifies the trainer's files."""
    marks: tuple[str, ...]
    """Keys of which ``section`` has at least one."""
    fully_shard: str = ""
    shards_alone: bool = False
    """Whether the key excludes Ulysses ranks."""
    unset_shard: int = 0
    """Size if the key is missing; 0: the world size."""
    replicas: str = ""
    tensor: str = ""
    sequence_parallel: str = ""
    """If set, tensor parallelism is priced and keeps the file's value."""
    pipeline: str = ""
    ulysses: str = ""
    expert: str = ""
    expert_shard: str = ""
    experts_everywhere: bool = False
    """Whether experts are sharded over all devices, replicas or not, if ``expert_shard`` has no key."""
    plans_experts: bool = True
    """False: expert sizes above 1 are experimental; they are read from a file, but not planned."""
    micro_batch: str = ""
    accumulation: str = ""
    global_batch: str = ""
    wrap: str = ""
    """List of patterns; by default ``wraps`` are wrapped."""
    wraps: tuple[str, ...] = (LAYERS,)
    recompute: str = ""
    """A switch, for all layers or for those of ``recompute_modules``."""
    recompute_modules: str = ""
    """List of patterns."""
    reshard: tuple[str, ...] = ()
    """Keys of the switch; the first one in the file counts."""
    reshard_default: bool = True
    root_stays: bool = True
    """Whether the root's own parameters stay gathered after forward."""
    last_layer_stays: bool = False
    """Whether the last layer of each stack stays gathered after forward if no key of ``reshard`` is set."""
    forward_prefetch: str = ""
    backward_prefetch: str = ""
    prefetch_default: int = 0
    prefetch_switch: str = ""
    """Switch that prefetch depths require."""
    prefetch_switched: tuple[int, int] = (0, 0)
    """Depths in forward and backward if the switch is on and a key is missing."""
    offload: str = ""
    strategy: str = ""
    """The sharding strategy: only ``fsdp2`` (or nothing) is supported."""
    older_strategy: str = ""
    """Value of ``strategy``, also if the key is missing, that a plan replaces by ``fsdp2``."""
    reduced: str = ""
    """Data type of reductions; fp32 if missing."""
    tokens: str = ""
    """Tokens of the longest sample."""
    words: Mapping[str, str] = field(default_factory=dict)
    """Fields of ``ShardSizes``, or ``recompute``, that are set only on the command line, with their words; ``{}`` is
    the value."""


TRAINERS = (
    Trainer(
        name="MindSpeed-MM fsdp2_config",
        section="",
        marks=("sharding_size", "sub_modules_to_wrap"),
        fully_shard="sharding_size",
        unset_shard=1,
        expert="expert_parallel_size",
        plans_experts=False,
        wrap="sub_modules_to_wrap",
        wraps=(LAYERS, EMBEDDING, HEAD),
        recompute_modules="recompute_modules",
        reshard=("reshard_after_forward",),
        root_stays=False,
        forward_prefetch="num_to_forward_prefetch",
        backward_prefetch="num_to_backward_prefetch",
        offload="offload_to_cpu",
        reduced="reduce_dtype",
        words={
            "ulysses_size": "--context-parallel-size {} --context-parallel-algo ulysses_cp_algo",
            "micro_batch_size": "--micro-batch-size {}",
        },
    ),
    Trainer(
        name="MindSpeed-LLM",
        section="parallel",
        marks=("fsdp_modules", "fsdp_size", "ep_modules"),
        fully_shard="parallel.fsdp_size",
        unset_shard=1,
        tensor="parallel.tp_size",
        ulysses="parallel.cp_size",
        expert="parallel.ep_size",
        expert_shard="parallel.ep_fsdp_size",
        micro_batch="training.per_device_train_batch_size",
        accumulation="training.gradient_accumulation_steps",
        wrap="parallel.fsdp_modules",
        recompute="parallel.recompute",
        recompute_modules="parallel.recompute_modules",
        reshard=("parallel.reshard_after_forward",),
        root_stays=False,
        forward_prefetch="parallel.num_to_forward_prefetch",
        backward_prefetch="parallel.num_to_backward_prefetch",
        prefetch_default=1,
        reduced="parallel.reduce_dtype",
        tokens="data.cutoff_len",
    ),
    Trainer(
        name="VeOmni",
        section="train",
        marks=("accelerator",),
        fully_shard="train.accelerator.dp_shard_size",
        shards_alone=True,
        replicas="train.accelerator.dp_replicate_size",
        tensor="train.accelerator.tp_size",
        pipeline="train.accelerator.pp_size",
        ulysses="train.accelerator.ulysses_size",
        expert="train.accelerator.ep_size",
        micro_batch="train.micro_batch_size",
        global_batch="train.global_batch_size",
        recompute="train.gradient_checkpointing.enable",
        reshard=("train.accelerator.fsdp_config.reshard_after_forward",),
        offload="train.accelerator.fsdp_config.offload",
        strategy="train.accelerator.fsdp_config.fsdp_mode",
        tokens="data.max_seq_len",
    ),
    Trainer(
        name="NeMo Automodel",
        section="distributed",
        marks=("strategy", "_target_", "dp_size", "tp_size", "cp_size"),
        replicas="distributed.dp_replicate_size",
        tensor="distributed.tp_size",
        sequence_parallel="distributed.sequence_parallel",
        pipeline="distributed.pp_size",
        ulysses="distributed.cp_size",
        expert="distributed.ep_size",
        experts_everywhere=True,
        micro_batch="step_scheduler.local_batch_size",
        global_batch="step_scheduler.global_batch_size",
        recompute="distributed.activation_checkpointing",
        reshard=("distributed.reshard_after_forward", "distributed.moe.reshard_after_forward"),
        last_layer_stays=True,
        forward_prefetch="distributed.fsdp2_forward_prefetch_depth",
        backward_prefetch="distributed.fsdp2_backward_prefetch_depth",
        prefetch_switch="distributed.enable_fsdp2_prefetch",
        prefetch_switched=(1, 2),
        offload="distributed.offload_policy",
        strategy="distributed.strategy",
    ),
    Trainer(
        name="verl",
        section="",
        marks=("fsdp_size", "reshard_after_forward", "wrap_policy"),
        fully_shard="fsdp_size",
        ulysses="ulysses_sequence_parallel_size",
        wraps=(LAYERS, UNTIED_EMBEDDING),
        reshard=("reshard_after_forward",),
        offload="offload_policy",
        strategy="strategy",
        older_strategy="fsdp",
        words={
            "micro_batch_size": "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu={}",
            "recompute": "actor_rollout_ref.model.enable_gradient_checkpointing={}",
        },
    ),
)


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
        beside = [key for key in (keys.ulysses, keys.expert) if size > 1 and (self.size(key) or 1) > 1]
        if beside:
            raise ConfigError(f"{self.path}: {keys.tensor} is {size} with {beside[0]}; it has a price only alone.")
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
    found = TrainerFile(trainer=trainer, path=path, text=text, values=values)
    for key in (trainer.fully_shard, trainer.ulysses, trainer.expert, trainer.micro_batch, trainer.global_batch):
        found.size(key)
    return found


def _is_of(values: Values, trainer: Trainer) -> bool:
    section = values.tree.get(trainer.section) if trainer.section else values.tree
    return isinstance(section, Mapping) and any(mark in section for mark in trainer.marks)
