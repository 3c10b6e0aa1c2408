"""Megatron-FSDP in a launch script: the decisions of a plan, the buckets outside layers, and the refusals.

Read from ``megatron/core/distributed/fsdp`` and ``megatron/training`` (0.19).
"""

from __future__ import annotations

from mindspeed_autoparallel.errors import ConfigError
from mindspeed_autoparallel.hosts.script import Script
from mindspeed_autoparallel.spec.sharded import FIRST, KEEP, MEGATRON_FSDP, RECOMPUTE, ShardingHost

USE_MEGATRON_FSDP = "--use-megatron-fsdp"
_VERSION = "--megatron-fsdp-version"
UNIT_SIZE = "--suggested-communication-unit-size"
_STRATEGY = "--data-parallel-sharding-strategy"
_NEEDED = {
    "--overlap-grad-reduce": "without it gradients are reduced after the last micro batch, which is not replayed",
    "--overlap-param-gather": "without it parameters are gathered before a step, which is not replayed",
    "--untie-embeddings-and-output-weights": "a tied embedding has a bucket of its own, which is not replayed",
}
_TYPES = "parameters in other types than bf16 with gradients in theirs and fp32 copies have no price"
_POOLS = "its buffers come from a pool, whose bytes are not counted"
_UNREPLAYED = {
    "--num-experts": "buckets of experts are not replayed",
    "--fp8-recipe": "fp8 has no price in a sharded plan",
    "--fp8-param-gather": "fp8 has no price in a sharded plan",
    "--fp4-format": "fp4 has no price in a sharded plan",
    "--fsdp-double-buffer": _POOLS,
    "--megatron-fsdp-max-pool-double-buffer": _POOLS,
    "--use-nccl-ub": _POOLS,
    "--outer-dp-sharding-strategy": "sharding over two groups is not replayed",
    "--num-distributed-optimizer-instances": "sharding over two groups is not replayed",
    "--megatron-fsdp-main-params-dtype": _TYPES,
    "--megatron-fsdp-main-grads-dtype": _TYPES,
    "--megatron-fsdp-grad-comm-dtype": _TYPES,
    "--use-precision-aware-optimizer": _TYPES,
    "--optimizer-cpu-offload": "an optimizer in the host's memory has no price here",
    "--megatron-fsdp-enable-fine-grained-param-gather": "gathering single operators is not replayed",
    "--torch-fsdp2-no-reshard-after-forward": "it is a flag of --use-torch-fsdp2",
    "--ddp-bucket-size": "other buckets outside layers than by default are not planned",
    "--ddp-num-buckets": "other buckets outside layers than by default are not planned",
}


def number_of(script: Script, flag: str, default: int) -> int:
    """Return a flag's count; ``ConfigError`` if it is unknown without running the script."""
    value = script.number(flag, default) if script.given(flag) is not None else default
    if value is None:
        raise ConfigError(
            f"{script.path}: {flag} {script.given(flag)!r} cannot be read without running it: write the number."
        )
    return value


def check_megatron_fsdp(script: Script) -> None:
    """Raise ``ConfigError`` for settings that the replay does not cover."""
    strategy = script.given(_STRATEGY)
    if strategy != "optim_grads_params":
        raise ConfigError(
            f"{script.path}: {_STRATEGY} {strategy or '(none)'}: only optim_grads_params is planned; search the "
            "others with --auto-tuning."
        )
    for flag, reason in _NEEDED.items():
        if script.given(flag) is None:
            raise ConfigError(f"{script.path} has no {flag}: {reason}. Add it, or plan with --use-torch-fsdp2.")
    for flag, reason in _UNREPLAYED.items():
        if script.given(flag) not in (None, "no_shard" if flag.startswith("--outer") else None):
            raise ConfigError(f"{script.path}: {flag}: {reason}.")
    if number_of(script, _VERSION, 1) > 1:
        raise ConfigError(
            f"{script.path}: {_VERSION} 2 is another implementation, which is not replayed: plan version 1."
        )
    if number_of(script, "--context-parallel-size", 1) > 1:
        raise ConfigError(f"{script.path}: --context-parallel-size with {USE_MEGATRON_FSDP} is not replayed.")
    rotary = script.given("--use-rotary-position-embeddings") is not None
    if not rotary and script.given("--position-embedding-type") not in ("rope", "none"):
        raise ConfigError(
            f"{script.path}: buckets of a learned position embedding are not replayed: --position-embedding-type rope."
        )


def megatron_fsdp_host(script: Script) -> ShardingHost:
    """Return what a plan decides: the micro batch, how many first layers are recomputed, and the unit size."""
    return ShardingHost(
        name=f"Megatron {USE_MEGATRON_FSDP}",
        variant=MEGATRON_FSDP,
        policies=(KEEP, RECOMPUTE),
        layer_choice=FIRST,
        reentrant=True,
        reshard_choices=(True,),
        prefetch_depths=(0,),
        hybrid_shard=False,
        ulysses=False,
        expert_parallel=False,
        unit_elements=shipped_unit(script),
    )


def shipped_unit(script: Script) -> int:
    """Return the script's unit size; 0: Megatron's own choice."""
    return number_of(script, UNIT_SIZE, 0)


def buckets_in_front(script: Script, num_devices: int) -> tuple[str, ...]:
    """Return the embedding if it fills a bucket of the parameters outside layers, which then ends with it."""
    if num_devices == 1:
        raise ConfigError(f"{script.path}: {USE_MEGATRON_FSDP} shards nothing on one device: plan for two or more.")
    vocabulary = number_of(script, "--padded-vocab-size", 0)
    if not vocabulary:
        multiple = number_of(script, "--make-vocab-size-divisible-by", 128)
        vocabulary = -(-number_of(script, "--vocab-size", 0) // multiple) * multiple
    elements = vocabulary * number_of(script, "--hidden-size", 0)
    return ("embedding",) if elements >= max(40_000_000, 1_000_000 * num_devices) else ()
