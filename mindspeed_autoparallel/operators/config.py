"""The YAML block of operator search, its checks, and the batch-size table."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from mindspeed_autoparallel.errors import ConfigError
from mindspeed_autoparallel.files import parse_yaml, read_text, shown
from mindspeed_autoparallel.operators.search.pins import Pins
from mindspeed_autoparallel.operators.search.pricing import Machine

_MAX_BYTES = 65536
_KEYS: dict[str, set[str]] = {
    "": {"use_parallel", "parallel", "parallel_config", "micro_batch_interleave_num"},
    "parallel": {"parallel_mode", "search_mode", "auto_pipeline", "full_batch", "gradients_mean"},
    "parallel_config": {"mem_coeff", "data_parallel", "pipeline_stage", "micro_batch_num"},
    "runner_config": {"batch_size", "gradient_accumulation_steps"},
    "context": {"max_device_memory"},
}
_HOST_SECTIONS = {"runner_config", "context", "trainer", "model"}
"""Sections that occur only in a complete MindFormers file."""
SEARCH_MODES = ("recursive_programming", "sharding_propagation", "exact")
_KINDS: dict[str, type] = {
    **dict.fromkeys(("use_parallel", "auto_pipeline", "full_batch", "gradients_mean"), bool),
    **dict.fromkeys(("search_mode", "max_device_memory"), str),
    **dict.fromkeys(("parallel_mode", "data_parallel", "pipeline_stage", "micro_batch_num", "batch_size"), int),
    **dict.fromkeys(("micro_batch_interleave_num", "gradient_accumulation_steps"), int),
}


@dataclass(frozen=True)
class OperatorConfig:
    """``parallel_mode``: 0 data parallel, 1 semi-automatic (pins only), 2 automatic.

    ``gradients_mean`` scales gradients and changes no plan. None: not set in the file.
    """

    use_parallel: bool = True
    parallel_mode: int = 2
    search_mode: str = "recursive_programming"
    auto_pipeline: bool = False
    mem_coeff: float | None = None
    full_batch: bool = False
    gradients_mean: bool = False
    data_parallel: int | None = None
    pipeline_stage: int | None = None
    micro_batch_num: int | None = None
    micro_batch_interleave_num: int = 1
    batch_size: int | None = None
    gradient_accumulation_steps: int = 1
    max_device_memory: int | None = None
    """Bytes."""
    ignored: tuple[str, ...] = ()
    """Keys of the file's parallel sections that a search ignores."""

    def with_flags(self, auto_pipeline: bool, **given: Any) -> OperatorConfig:
        """Return the configuration with the values of the flags that are ``given``, not None.

        Raises ``ConfigError`` for a ``mem_coeff`` that the mode does not read; a file may have it with any mode.
        """
        flags = {name: value for name, value in given.items() if value is not None}
        config = replace(self, auto_pipeline=auto_pipeline or self.auto_pipeline, **flags)
        if "mem_coeff" in flags and config.search_mode != "recursive_programming":
            raise ConfigError(f"--mem-coeff is for recursive_programming, not {config.search_mode}: drop it.")
        return config

    def checked(self, where: str) -> OperatorConfig:
        """Return this configuration; ``ConfigError`` with ``where`` for a value out of range."""
        if self.parallel_mode not in (0, 1, 2):
            raise ConfigError(f"{where}: parallel_mode is {self.parallel_mode!r}; give 0, 1 or 2.")
        if self.search_mode not in SEARCH_MODES:
            modes = ", ".join(SEARCH_MODES)
            raise ConfigError(f"{where}: search_mode is {shown(repr(self.search_mode), 80)}; give one of {modes}.")
        _check_coefficient(1.0 if self.mem_coeff is None else self.mem_coeff, where)
        return self

    def samples(self, devices: int) -> int | None:
        """Return the samples of one step on ``devices``; None if the file has no batch.

        A search (mode 2) decides the data-parallel size itself: with ``full_batch``, ``batch_size`` counts the samples
        of all devices of a stage.
        """
        if self.batch_size is None:
            return None
        searched = self.parallel_mode == 2
        return global_batch_size(
            self.batch_size,
            device_num=devices,
            data_parallel=1 if searched else self.data_parallel or 1,
            pipeline=(self.pipeline_stage or 1) > 1 or self.auto_pipeline,
            full_batch=self.full_batch,
            micro_batch_interleave_num=self.micro_batch_interleave_num,
            micro_batch_num=self.micro_batch_num or 1,
            gradient_accumulation_steps=self.gradient_accumulation_steps,
        )


def read_config(path: Path) -> OperatorConfig:
    """Return the block in a YAML file; ``ConfigError`` if it cannot be read or is invalid."""
    given = parse_yaml(read_text(path, "configuration", max_bytes=_MAX_BYTES), str(path))
    return config_from_mapping({} if given is None else given, str(path))


def config_from_mapping(given: Any, where: str) -> OperatorConfig:
    """Return the configuration in ``given`` (a parsed YAML document); ``where`` names the file in ``ConfigError``.

    A complete MindFormers file is accepted, too: its batch, pipeline and memory settings are read, and unknown keys of
    its parallel sections are listed in ``ignored``. In a file that holds only the block, an unknown key is an error.
    """
    if not isinstance(given, dict):
        raise ConfigError(f"{where}: expected a mapping with use_parallel, parallel and parallel_config.")
    of_host = bool(_HOST_SECTIONS & given.keys())
    values: dict[str, Any] = {}
    ignored: list[str] = []
    for section, keys in _KEYS.items():
        block = given if not section else given.get(section, {})
        if not isinstance(block, dict):
            raise ConfigError(f"{where}: {section} must be a mapping with {', '.join(sorted(keys))}.")
        unknown = sorted(str(key) for key in set(block) - keys)
        if of_host:
            ignored += [f"{section}.{key}" for key in unknown if section in ("parallel", "parallel_config")]
        elif unknown or (section in _HOST_SECTIONS and block):
            place = f"{where}: {section}" if section else where
            raise ConfigError(
                f"{place}: unknown key {', '.join(unknown)}; known are {', '.join(sorted(keys - _HOST_SECTIONS))}."
            )
        values.update({key: value for key, value in block.items() if key in keys and key not in _KEYS})
    return _checked(values, tuple(ignored), where)


def _checked(values: dict[str, Any], ignored: tuple[str, ...], where: str) -> OperatorConfig:
    """Return the configuration of ``values``; ``ConfigError`` for a wrong type or a value out of range."""
    for key, kind in _KINDS.items():
        if key in values and (not isinstance(values[key], kind) or (kind is int and isinstance(values[key], bool))):
            shown_value = shown(repr(values[key]), 80) if not isinstance(values[key], (dict, list)) else "no value"
            raise ConfigError(f"{where}: {key} is {shown_value}; give a {kind.__name__}.")
        if kind is int and key != "parallel_mode" and values.get(key, 1) < 1:
            raise ConfigError(f"{where}: {key} is {values[key]}; give 1 or more.")
    if "max_device_memory" in values:
        values["max_device_memory"] = _memory(values["max_device_memory"], where)
    config = OperatorConfig(**values, ignored=ignored).checked(where)
    _check_coefficient(values.get("mem_coeff", 1.0), where)
    return config


def _check_coefficient(coefficient: Any, where: str) -> None:
    if isinstance(coefficient, bool) or not isinstance(coefficient, (int, float)) or not 0 < coefficient < math.inf:
        shown_value = repr(coefficient) if isinstance(coefficient, (int, float, str)) else "no number"
        raise ConfigError(f"{where}: mem_coeff is {shown_value}; give a positive number.")


def _memory(text: str, where: str) -> int:
    """Return the bytes of ``58GB``; as in MindSpore, a GB is 2**30 bytes."""
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*GB\s*", text)
    if not found or float(found.group(1)) <= 0:
        raise ConfigError(f"{where}: max_device_memory is {shown(text, 80)}; give it as 58GB.")
    return int(float(found.group(1)) * 2**30)


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
    """Return the samples per optimizer step, by the table of docs/operators.md."""
    repeats = micro_batch_num if pipeline else gradient_accumulation_steps
    return batch_size * (data_parallel if full_batch else device_num) * micro_batch_interleave_num * repeats


@dataclass(frozen=True)
class SearchOptions:
    """Options of a search; see docs/operators.md for the modes and units.

    ``tied``: repeated layers are cut alike; None lets the exact mode decide by the size of the graph. Symbolic costs
    (``mem_coeff``) always cut them alike.
    ``parameter_limit_bytes`` (exact): limit of one device's weights; ``InfeasiblePlan`` if it cannot be met.
    ``memory_limit_bytes`` (exact): limit of one device's weights, gradients, optimizer states and outputs kept for
    backward of one of ``num_microbatches``. A note of the plan reports a limit that cannot be met. ``mem_coeff``
    (recursive_programming): products are cut by symbolic costs; without it every halving is solved to its least
    modelled time. ``most_row_parts`` (the same mode): the most parts that rows are cut into.
    """

    search_mode: str = "recursive_programming"
    mem_coeff: float | None = None
    pins: Pins | None = None
    tied: bool | None = None
    machine: Machine = field(default_factory=Machine)
    parameter_limit_bytes: int | None = None
    memory_limit_bytes: int | None = 64 * 2**30
    num_microbatches: int = 1
    most_row_parts: int | None = None

    def __post_init__(self) -> None:
        if self.search_mode not in SEARCH_MODES:
            raise ConfigError(f"search_mode {self.search_mode!r} is none of {', '.join(SEARCH_MODES)}.")
        given = self.mem_coeff
        if given is not None and not (isinstance(given, (int, float)) and 0 < given < math.inf):
            raise ConfigError(f"mem_coeff={given}: give a positive number, for example 0.1.")
        if self.parameter_limit_bytes is not None and self.search_mode != "exact":
            raise ConfigError(f"only search_mode exact supports a limit of parameter bytes, not {self.search_mode}.")
        if self.tied is False and self.search_mode == "recursive_programming" and given is not None:
            raise ConfigError("symbolic costs (mem_coeff) cut repeated layers alike: drop mem_coeff, or --untied.")
