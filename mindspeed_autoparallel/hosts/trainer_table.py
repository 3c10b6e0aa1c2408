"""Keys of other trainers that shard with FSDP2, one row per trainer, read from its code."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields

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
    shards_world: bool = False
    """Whether the trainer refuses any other size than that of the world."""
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
    recomputes: bool = False
    """Whether all layers are recomputed by default; the file has no key."""
    recompute_modules: str = ""
    """List of patterns."""
    reshard: tuple[str, ...] = ()
    """Keys of the switch; the first one in the file counts."""
    reshard_default: bool = True
    root_stays: bool = True
    """Whether the root's own parameters stay gathered after forward."""
    last_layer_stays: bool = False
    """Whether the last layer of each stack stays gathered after forward if no key of ``reshard`` is set."""
    divided_experts_stay: bool = False
    """Whether everything stays gathered after forward with expert parallelism if no key of ``reshard`` is set; experts
    that are not sharded besides are then no parameters of ``fully_shard``."""
    deferred: str = ""
    """Switch, on if missing: gradients are reduced in the last micro batch of a step."""
    frees_once: str = ""
    """Switch: backward frees parameters in the last micro batch of a step."""
    frees_each: str = ""
    """Its opposite, on if missing."""
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
    stored: str = ""
    """Data type of parameters and moments; without this key they are fp32."""
    unset_stored: str = "bf16"
    """The same if the file lacks the key."""
    tokens: str = ""
    """Tokens of the longest sample."""
    words: Mapping[str, str] = field(default_factory=dict)
    """Fields of ``ShardSizes``, or ``recompute``, that are set only on the command line, with their words; ``{}`` is
    the value."""

    @property
    def keys(self) -> tuple[str, ...]:
        """Return every dotted key of the table."""
        texts = [getattr(self, one.name) for one in fields(self) if one.type == "str"]
        named = (*texts, *self.reshard, *(f"{self.section}.{mark}".lstrip(".") for mark in self.marks))
        own = {"name", "section", "older_strategy", "unset_stored"}
        return tuple(key for key in named if key and key not in {getattr(self, one) for one in own})


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
        shards_world=True,
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
        frees_each="train.accelerator.fsdp_config.reshard_after_backward",
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
        divided_experts_stay=True,
        stored="model.torch_dtype",
        deferred="distributed.defer_fsdp_grad_sync",
        frees_once="model.backend.enable_fsdp_optimizations",
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
        recomputes=True,
        stored="model_dtype",
        unset_stored="fp32",
        reduced="mixed_precision.reduce_dtype",
        words={
            "micro_batch_size": "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu={}",
            "recompute": "actor_rollout_ref.model.enable_gradient_checkpointing={}",
        },
    ),
)
