"""One door to the files of all FSDP2 trainers: what a search reads of them, and what it writes back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from mindspeed_autoparallel.errors import ConfigError
from mindspeed_autoparallel.files import read_text
from mindspeed_autoparallel.hosts.mindspeed_mm import NativeConfig, is_native, read_native
from mindspeed_autoparallel.hosts.mindspeed_mm_decisions import decided_values, read_decisions, sharding_host
from mindspeed_autoparallel.hosts.reading import Values
from mindspeed_autoparallel.hosts.trainer_decisions import trainer_decisions, trainer_host, trainer_values
from mindspeed_autoparallel.hosts.trainers import TrainerFile, read_trainer_file
from mindspeed_autoparallel.profiles.sharded import ShardedModule
from mindspeed_autoparallel.spec.sharded import ShardedDecisions, ShardingHost

NATIVE_TOKENS = "data.dataset_param.basic_parameters.cutoff_len"
_REDUCED = {"fp32": 4, "float32": 4, "bf16": 2, "bfloat16": 2, "fp16": 2, "float16": 2}

Modules = Sequence[ShardedModule]


@dataclass(frozen=True, kw_only=True)
class HostFile:
    """A trainer's file; what depends on the model's modules are functions of them."""

    path: Path
    micro_batch: int
    frozen: tuple[str, ...]
    """Patterns of modules without gradients."""
    tokens: int
    """Longest sample; 0: the file has none."""
    tokens_key: str
    reduced_bytes: int
    """Of an element of a gradient as it is reduced."""
    states_batch: bool
    """Whether the file fixes the global batch."""
    host: Callable[[bool], ShardingHost]
    """By whether the devices are NPUs."""
    decisions: Callable[[Modules, int, bool], ShardedDecisions]
    """By the model's modules, the number of devices and whether they are NPUs."""
    written: Callable[[ShardedDecisions, Modules], tuple[str, tuple[str, ...]]]
    """The file's text with a plan's decisions, and words of the command line beside it."""


def open_host_file(path: Path) -> HostFile:
    """Read a file of MindSpeed-MM's native trainer or of one of ``trainers.TRAINERS``.

    Raises ``ConfigError`` in one line for what is none of them, and for what a plan cannot describe.
    """
    if is_native(read_text(path, "the configuration")):
        return _native(read_native(path))
    return _of_trainer(read_trainer_file(path))


def with_global_batch(decisions: ShardedDecisions, global_batch: int) -> ShardedDecisions:
    """Return ``decisions`` with the accumulation that makes their global batch; raises where none does."""
    sizes = replace(decisions.sizes, accumulation=1)
    if global_batch % sizes.global_batch_size:
        raise ConfigError(
            f"--global-batch-size {global_batch} is no multiple of the {sizes.global_batch_size} samples of one micro "
            "batch on all devices."
        )
    return replace(decisions, sizes=replace(sizes, accumulation=global_batch // sizes.global_batch_size))


def _native(config: NativeConfig) -> HostFile:
    def written(decisions: ShardedDecisions, modules: Modules) -> tuple[str, tuple[str, ...]]:
        return config.with_values(decided_values(config, decisions, modules)), ()

    return HostFile(
        path=config.path,
        micro_batch=config.sizes.micro_batch,
        frozen=config.frozen,
        tokens=config.values.integer(NATIVE_TOKENS, 0),
        tokens_key=NATIVE_TOKENS,
        reduced_bytes=_REDUCED.get(config.sharding.reduce_dtype, 4),
        states_batch=True,
        host=lambda npu: sharding_host(config, npu),
        decisions=lambda modules, devices, npu: read_decisions(config, modules, devices, npu),
        written=written,
    )


def _of_trainer(file: TrainerFile) -> HostFile:
    keys, values = file.trainer, file.values

    def written(decisions: ShardedDecisions, modules: Modules) -> tuple[str, tuple[str, ...]]:
        changed, words = trainer_values(file, decisions, modules)
        return file.with_values(changed), words

    return HostFile(
        path=file.path,
        micro_batch=file.size(keys.micro_batch) or 1,
        frozen=(),
        tokens=_integer(values, keys.tokens),
        tokens_key=keys.tokens or "length of samples",
        reduced_bytes=_REDUCED.get(values.text(keys.reduced), 4) if keys.reduced else 4,
        states_batch=bool(file.size(keys.global_batch) or file.size(keys.accumulation)),
        host=lambda npu: trainer_host(file),
        decisions=lambda modules, devices, npu: trainer_decisions(file, modules, devices),
        written=written,
    )


def _integer(values: Values, key: str) -> int:
    return values.integer(key, 0) if key else 0
