"""The native trainer at plugin time: ``Trainer.__init__`` is running, arguments are parsed, no groups exist."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from mindspeed_autoparallel.errors import AutoParallelError, ConfigError
from mindspeed_autoparallel.hosts.mindspeed_mm import NativeConfig, read_native
from mindspeed_autoparallel.hosts.yaml_edit import Value
from mindspeed_autoparallel.runtime.first_rank import print_once


@dataclass(frozen=True)
class NativeTrainer:
    """The running trainer; ``module`` is the Python module that defines ``Trainer``, usually the script."""

    module: ModuleType
    arguments: Any
    config: NativeConfig

    def set_values(self, values: Mapping[str, Value]) -> None:
        """Set dotted keys on the parsed arguments, as if they were in the YAML."""
        for key, value in values.items():
            *parents, last = key.split(".")
            node = self.arguments
            for part in parents:
                node = getattr(node, part)
            if value is None:
                vars(node)[last] = None  # a default of the host, but its check of assignments refuses it
            else:
                setattr(node, last, list(value) if isinstance(value, tuple) else value)
        parallel, training = self.arguments.parallel, self.arguments.training
        if any(key.endswith(("_size", "_steps")) for key in values):
            training.compute_distributed_training(parallel)


def running_trainer() -> NativeTrainer:
    """Return the trainer of the running script; ``ConfigError`` if it is not the native trainer."""
    main = sys.modules["__main__"]
    arguments = next((value for value in vars(main).values() if _is_arguments(value)), None)
    bases = getattr(getattr(main, "Trainer", None), "__mro__", ())
    modules = [sys.modules[base.__module__] for base in bases if base.__module__ in sys.modules]
    module = next((one for one in modules if hasattr(one, "ParallelApplier")), None)
    if module is None or arguments is None:
        raise ConfigError(
            "mindspeed_autoparallel.plugin is for training.plugin of MindSpeed-MM's native FSDP2 trainer "
            "(mindspeed_mm/fsdp/train/trainer.py); this script has no such Trainer."
        )
    path = next((word for word in sys.argv[1:] if word.endswith((".yaml", ".yml"))), None)
    if path is None:
        raise ConfigError("the trainer's script is started without a YAML file.")
    return NativeTrainer(module, arguments, read_native(Path(path)))


def end_with(error: AutoParallelError) -> None:
    """End this process; the first rank prints the message."""
    print_once(f"{type(error).__name__}: {error}", to_stderr=True)
    sys.exit(error.exit_code)


def say(text: str) -> None:
    """Print a line on the first rank."""
    print_once(f"mindspeed_autoparallel: {text}")


def world_size() -> int:
    """Return the number of processes of this launch."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def before_sharding(native: NativeTrainer, action: Callable[[Any], object]) -> None:
    """Call ``action(model)`` once the model is built, before any feature is applied to it."""
    applier = native.module.FeaturesApplier
    original = applier.pre_fully_shard_apply

    @functools.wraps(original)
    def pre_fully_shard_apply(self: Any, model: Any) -> Any:
        try:
            action(model)
        except AutoParallelError as error:
            end_with(error)
        return original(self, model)

    applier.pre_fully_shard_apply = pre_fully_shard_apply


def _is_arguments(value: object) -> bool:
    return not isinstance(value, type) and all(hasattr(value, name) for name in ("parallel", "training", "features"))
