"""Megatron's arguments by name, from any source: a namespace, a log, a launch, a file."""

from __future__ import annotations

import math
from collections.abc import Mapping

from mindspeed_autoparallel.errors import ConfigError, destination_of, flag_of
from mindspeed_autoparallel.files import shown

_REFUSED = {
    "use_megatron_fsdp": "fully sharded parameters are not modelled",
    "use_custom_fsdp": "fully sharded parameters are not modelled",
    "use_torch_fsdp2": "fully sharded parameters are not modelled",
    "layerzero": "fully sharded parameters are not modelled",
    "cpu_offloading": "offload of activations is not modelled here",
    "fine_grained_activation_offloading": "offload of activations is not modelled here",
    "heterogeneous_layers_config_path": "layers of different sizes are not modelled",
    "export_kd_teacher_load": "distillation is not modelled",
    "kd_teacher_load": "distillation is not modelled",
    "enable_mhc": "hyper-connections are not modelled",
    "qlora": "quantized frozen weights are not modelled",
    "retro_add_retriever": "retrieval is not modelled",
}
_COUNTS_REFUSED = {
    "num_distributed_optimizer_instances": "several instances of the distributed optimizer are not modelled",
    "cpu_offloading_num_layers": "offload of activations is not modelled here",
    "encoder_tensor_model_parallel_size": "encoders with a layout of their own are not modelled here",
    "num_zero_experts": "experts that do nothing are not modelled",
    "cla_share_factor": "key and value states shared between layers are not modelled",
}
_NO = ("false", "none", "null", "")


class Arguments:
    """Megatron's arguments by name, whatever their spelling: ``--num-layers`` and ``num_layers`` are one."""

    def __init__(self, values: Mapping[str, object]) -> None:
        self._values = {destination_of(str(name)): value for name, value in values.items()}
        self._read: set[str] = set()

    def has(self, name: str) -> bool:
        """Return whether ``name`` has a value."""
        self._read.add(name)
        return name in self._values and str(self._values[name]).lower() not in _NO

    def unread(self) -> dict[str, object]:
        """Return the arguments that were not read so far."""
        return {name: value for name, value in self._values.items() if name not in self._read}

    def denied(self, name: str) -> bool:
        """Return whether ``name`` is present and off."""
        return name in self._values and not self.has(name)

    def text(self, *names: str) -> str | None:
        """Return the first of ``names`` that has a value."""
        return next((str(self._values[name]) for name in names if self.has(name)), None)

    def integer(self, *names: str) -> int | None:
        """Return the first of ``names`` that has a value, as a whole number."""
        number = self.number(*names)
        return None if number is None else int(number)

    def number(self, *names: str) -> float | None:
        """Return the first of ``names`` that has a value, as a finite number."""
        text = self.text(*names)
        if text is None:
            return None
        try:
            number = float(text)
        except ValueError:
            number = math.nan
        if not math.isfinite(number):
            raise ConfigError(f"{flag_of(names[0])} is {shown(text)}, must be a number.")
        return number


def refuse_unmodelled(arguments: Arguments) -> None:
    """Raise ``ConfigError`` naming the first argument whose effect on time or memory is not modelled."""
    for name, reason in _REFUSED.items():
        if arguments.has(name):
            raise ConfigError(f"{flag_of(name)}: {reason}.")
    for name, reason in _COUNTS_REFUSED.items():
        if (arguments.integer(name) or 0) > 1:
            raise ConfigError(f"{flag_of(name)} {arguments.text(name)}: {reason}.")
