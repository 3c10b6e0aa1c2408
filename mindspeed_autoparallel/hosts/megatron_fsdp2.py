"""Megatron's ``--use-torch-fsdp2`` and ``--use-megatron-fsdp``: what a launch script decides, and a plan's flags.

Read from ``megatron/core/distributed/torch_fully_sharded_data_parallel.py``, ``transformer_block.py`` and
``tensor_parallel/random.py`` (0.12 to 0.19), and ``megatron/core/distributed/fsdp`` (0.19).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from mindspeed_autoparallel.errors import ConfigError, PlanError, destination_of
from mindspeed_autoparallel.hosts.host_file import HostFile, Modules, Written
from mindspeed_autoparallel.hosts.megatron_own_fsdp import (
    UNIT_SIZE,
    USE_MEGATRON_FSDP,
    buckets_in_front,
    check_megatron_fsdp,
    megatron_fsdp_host,
    number_of,
    shipped_unit,
)
from mindspeed_autoparallel.hosts.script import Script
from mindspeed_autoparallel.profiles.sharded import Described, ElementBytes
from mindspeed_autoparallel.spec.sharded import (
    FIRST,
    KEEP,
    RECOMPUTE,
    GroupChoice,
    ShardedDecisions,
    ShardingHost,
    ShardSizes,
)

LAYERS = "decoder.layers.{*}"
_ROTARY = "rotary_pos_emb"
_BYTES = ElementBytes(sharded=2, gathered=2, reduced=2, optimizer=12)
"""Float16Module shards bf16 parameters without changing their type; the optimizer has fp32 copies and moments."""
_KEEPS_GATHERED = "--torch-fsdp2-no-reshard-after-forward"
_RECOMPUTE = ("--recompute-granularity", "--recompute-method", "--recompute-num-layers")
_REFUSED = {
    "--tensor-model-parallel-size": "a sharded plan has no tensor parallelism",
    "--pipeline-model-parallel-size": "Megatron refuses pipeline parallelism with --use-torch-fsdp2, and with "
    "--use-megatron-fsdp it is not replayed",
    "--expert-model-parallel-size": "Megatron refuses expert parallelism with --use-torch-fsdp2, and with "
    "--use-megatron-fsdp it is not replayed",
}
_UNTIED = "--untie-embeddings-and-output-weights"
_UNPRICED = {
    "--recompute-activations": "a plan cannot recompute single operators",
    "--cpu-offloading": "Transformer Engine's offload has no price here",
    "--fp8-format": "fp8 has no price in a sharded plan",
    "--mtp-num-layers": "multi-token prediction has no price in a sharded plan",
}


def read_megatron(script: Script) -> HostFile:
    """Return what ``script`` decides. Raises ``ConfigError`` in one line for what a plan cannot describe."""
    own = script.given(USE_MEGATRON_FSDP) is not None
    _check(script)
    if own:
        check_megatron_fsdp(script)
    elif script.given(_UNTIED) is None:
        raise ConfigError(f"{script.path}: Megatron refuses --use-torch-fsdp2 without {_UNTIED}.")
    return HostFile(
        path=Path(script.path),
        described=Described(
            sequence=number_of(script, "--seq-length", 0),
            micro_batch_size=number_of(script, "--micro-batch-size", 1),
            bytes_of=_BYTES,
        ),
        tokens_key="--seq-length",
        states_batch=False,
        arguments={destination_of(name): value or True for name, value in script.flags.items()},
        host=lambda npu: _host(script),
        decisions=lambda modules, devices, npu: _decisions(script, modules, devices),
        written=lambda decisions, modules: _written(script, decisions, modules),
    )


def _check(script: Script) -> None:
    _refuse_other_parallelism(script)
    for flag, reason in _UNPRICED.items():
        if script.given(flag) is not None:
            raise ConfigError(f"{script.path}: {flag}: {reason}.")
    if not (number_of(script, "--vocab-size", 0) or number_of(script, "--padded-vocab-size", 0)):
        raise ConfigError(f"{script.path} has no --vocab-size, which the size of embedding and head follows: add it.")
    if number_of(script, "--context-parallel-size", 1) > 1 and not _exchanges_heads(script):
        raise ConfigError(
            f"{script.path}: ring context parallelism has no price without measurements: use --cp-comm-type a2a."
        )
    _recomputed(script, 1)


def _refuse_other_parallelism(script: Script) -> None:
    for flag, reason in _REFUSED.items():
        if (value := number_of(script, flag, 1)) > 1:
            raise ConfigError(f"{script.path}: {flag} {value}: {reason}.")


def _exchanges_heads(script: Script) -> bool:
    return script.given("--cp-comm-type") == "a2a" or script.given("--context-parallel-algo") == "ulysses_cp_algo"


def _recomputed(script: Script, layers: int) -> int:
    """Return the number of first layers of ``layers`` that are recomputed."""
    granularity, method = script.given("--recompute-granularity"), script.given("--recompute-method")
    number = number_of(script, "--recompute-num-layers", 1)
    if granularity is None:
        return 0
    if granularity != "full":
        raise ConfigError(
            f"{script.path}: --recompute-granularity {granularity} recomputes single operators, which a plan "
            "cannot describe: use full, or none."
        )
    if method == "uniform" and number == 1:
        return layers
    if method != "block":
        raise ConfigError(
            f"{script.path}: --recompute-method {method} of {number} layers has no price: use block, or uniform "
            "with --recompute-num-layers 1."
        )
    return min(number, layers)


def _host(script: Script) -> ShardingHost:
    if script.given(USE_MEGATRON_FSDP) is not None:
        return megatron_fsdp_host(script)
    rotary = script.given("--position-embedding-type") == "rope"
    rotary |= script.given("--use-rotary-position-embeddings") is not None
    listed = ("embedding", *([_ROTARY] if rotary else []), LAYERS, "output_layer")
    return ShardingHost(
        name="Megatron --use-torch-fsdp2",
        policies=(KEEP, RECOMPUTE),
        layer_choice=FIRST,
        reentrant=True,
        relisted=listed,
        prefetch_depths=(0,),
        hybrid_shard=False,
        ulysses=True,
        expert_parallel=False,
    )


def _decisions(script: Script, modules: Modules, num_devices: int) -> ShardedDecisions:
    context = number_of(script, "--context-parallel-size", 1)
    micro = number_of(script, "--micro-batch-size", 1)
    if num_devices % context:
        raise ConfigError(f"{script.path}: --context-parallel-size {context} does not divide {num_devices} devices.")
    rows = micro * (num_devices // context)
    batch = number_of(script, "--global-batch-size", rows)
    if batch % rows:
        raise ConfigError(
            f"{script.path}: --global-batch-size {batch} is not a multiple of the {rows} samples of one micro batch on "
            f"{num_devices} devices; give --global-batch-size."
        )
    layers = sum(one.is_layer for one in modules)
    recomputed = _recomputed(script, layers)
    row = (RECOMPUTE,) * recomputed + (KEEP,) * (layers - recomputed)
    reshard = script.given(_KEEPS_GATHERED) is None
    local = script.given("--transformer-impl") == "local"
    patterns = ("embedding", LAYERS, *(() if local else ("output_layer",)), "")
    if script.given(USE_MEGATRON_FSDP) is not None:
        patterns = (*buckets_in_front(script, num_devices), LAYERS, "")
    return ShardedDecisions(
        sizes=ShardSizes(
            num_devices=num_devices,
            fully_shard_size=num_devices,
            ulysses_size=context,
            micro_batch_size=micro,
            accumulation=batch // rows,
        ),
        groups=tuple(GroupChoice(pattern=pattern, reshard_after_forward=reshard) for pattern in patterns),
        policies={LAYERS: row} if recomputed else {},
        unit_elements=shipped_unit(script),
    )


def _written(script: Script, decisions: ShardedDecisions, modules: Modules) -> Written:
    present = _decisions(script, modules, decisions.sizes.num_devices)
    words: list[str] = []
    left_out: list[str] = []
    sizes, before = decisions.sizes, present.sizes
    if sizes.micro_batch_size != before.micro_batch_size:
        words += ["--micro-batch-size", str(sizes.micro_batch_size)]
    if sizes.global_batch_size != before.global_batch_size:
        words += ["--global-batch-size", str(sizes.global_batch_size)]
    if sizes.ulysses_size != before.ulysses_size:
        words += ["--context-parallel-size", str(sizes.ulysses_size), "--cp-comm-type", "a2a"]
    if decisions.policies != present.policies:
        row = decisions.policies.get(LAYERS, ())
        number = row.count(RECOMPUTE)
        if set(row[:number]) - {RECOMPUTE}:
            raise PlanError(f"{script.path}: Megatron recomputes the first layers, the plan other ones: {row}.")
        named = ("full", "block", str(number))
        words += [word for pair in zip(_RECOMPUTE, named, strict=True) for word in pair] if number else []
        left_out += [] if number else [flag for flag in _RECOMPUTE if script.given(flag) is not None]
    if decisions.unit_elements != present.unit_elements:
        words += [UNIT_SIZE, str(decisions.unit_elements)] if decisions.unit_elements else []
        left_out += [] if decisions.unit_elements else [UNIT_SIZE]
    stays, stayed = (not one.groups[0].reshard_after_forward for one in (decisions, present))
    if stays != stayed:
        (words if stays else left_out).append(_KEEPS_GATHERED)
    return Written(words=tuple(words), left_out=tuple(left_out))


def flags_beside(script: Script, words: Mapping[str, str]) -> dict[str, int]:
    """Return the sizes that the script sets in addition to a YAML file: field of ``ShardSizes``, or another name.

    ``words``: the flag of each size, as ``--micro-batch-size {}``.
    """
    _refuse_other_parallelism(script)
    flags = {field: word.split()[0] for field, word in words.items()}
    flags |= {"global_batch_size": "--global-batch-size", "tokens": "--seq-length"}
    found = {field: number_of(script, flag, 0) for field, flag in flags.items()}
    if found.get("ulysses_size", 0) > 1 and not _exchanges_heads(script):
        raise ConfigError(f"{script.path}: --context-parallel-size without --context-parallel-algo ulysses_cp_algo.")
    return {field: value for field, value in found.items() if value}
