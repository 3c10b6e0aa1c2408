"""The YAML block of operator search, its checks, and the batch-size table."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mindspeed_autoparallel.errors import ConfigError
from mindspeed_autoparallel.files import read_text, shown

_MAX_BYTES = 65536
_KEYS: dict[str, set[str]] = {
    "": {"use_parallel", "parallel", "parallel_config"},
    "parallel": {"parallel_mode", "search_mode", "auto_pipeline"},
    "parallel_config": {"mem_coeff"},
}


@dataclass(frozen=True)
class OperatorConfig:
    """``parallel_mode``: 0 data parallel, 1 semi-automatic (pins only), 2 automatic."""

    use_parallel: bool = True
    parallel_mode: int = 2
    search_mode: str = "recursive_programming"
    auto_pipeline: bool = False
    mem_coeff: float = 0.1


def read_config(path: Path) -> OperatorConfig:
    """Return the block in a YAML file; ``ConfigError`` where it cannot be read or says what it must not."""
    try:
        import yaml
    except ImportError as error:
        raise ConfigError("reading YAML needs pyyaml: pip install 'mindspeed-autoparallel[yaml]'.") from error
    try:
        text = read_text(path, "configuration", max_bytes=_MAX_BYTES)
        # Aliases multiply what they stand for: nine in nine lines are a billion, and nothing here needs one.
        if any(isinstance(token, yaml.AliasToken) for token in yaml.scan(text)):
            raise ConfigError(f"{path} has an alias (*name); write the values out.")
        given = yaml.safe_load(text)
    except yaml.YAMLError as error:
        # Its own text takes several lines: where the parser was, what it expected, and where that was.
        raise ConfigError(f"{path} is not valid YAML: {shown(' '.join(str(error).split()), 200)}.") from error
    except (ValueError, RecursionError, OverflowError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"{path} cannot be used: {shown(str(error), 200)}.") from error
    return config_from_mapping({} if given is None else given, str(path))


def config_from_mapping(given: Any, where: str) -> OperatorConfig:
    """Return the configuration in ``given`` (a parsed YAML document); ``where`` names the file in ``ConfigError``."""
    if not isinstance(given, dict):
        raise ConfigError(f"{where}: expected a mapping with use_parallel, parallel and parallel_config.")
    values: dict[str, Any] = {}
    for section, keys in _KEYS.items():
        block = given if not section else given.get(section, {})
        if not isinstance(block, dict):
            raise ConfigError(f"{where}: {section} must be a mapping with {', '.join(sorted(keys))}.")
        unknown = sorted(str(key) for key in set(block) - keys)
        if unknown:
            place = f"{where}: {section}" if section else where
            raise ConfigError(f"{place}: unknown key {', '.join(unknown)}; known are {', '.join(sorted(keys))}.")
        values.update({key: value for key, value in block.items() if key not in _KEYS})
    for key, kinds in (("use_parallel", bool), ("auto_pipeline", bool), ("search_mode", str)):
        if key in values and not isinstance(values[key], kinds):
            raise ConfigError(f"{where}: {key} is {values[key]!r}; give a {kinds.__name__}.")
    config = OperatorConfig(**values)
    if isinstance(config.parallel_mode, bool) or config.parallel_mode not in (0, 1, 2):
        raise ConfigError(f"{where}: parallel_mode is {config.parallel_mode!r}; give 0, 1 or 2.")
    if config.search_mode not in ("recursive_programming", "sharding_propagation", "exact"):
        raise ConfigError(
            f"{where}: search_mode is {config.search_mode!r}; give recursive_programming, "
            "sharding_propagation or exact."
        )
    coefficient = config.mem_coeff
    if isinstance(coefficient, bool) or not isinstance(coefficient, (int, float)) or not 0 < coefficient < math.inf:
        raise ConfigError(f"{where}: mem_coeff is {config.mem_coeff!r}; give a positive number.")
    return config


def global_batch_size(
    batch_size: int,
    *,
    device_num: int,
    data_parallel: int,
    pipeline: bool,
    full_batch: bool,
    micro_batch_interleave_num: int = 1,
    micro_batch_num: int = 1,
    gradient_accumulation_steps: int = 1,
) -> int:
    """Return samples per optimizer step, by the table of docs/operators.md."""
    repeats = micro_batch_num if pipeline else gradient_accumulation_steps
    return batch_size * (data_parallel if full_batch else device_num) * micro_batch_interleave_num * repeats
