"""The cluster of a plan."""

from __future__ import annotations

from dataclasses import dataclass

from mindspeed_autoparallel.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """Equal nodes of equal devices; links and memory of the devices are in the profile."""

    num_nodes: int
    devices_per_node: int
    memory_limit_bytes: int | None = None
    """Most bytes that a plan may use per device; ``None``: the profile's capacity."""

    def __post_init__(self) -> None:
        for name in ("num_nodes", "devices_per_node"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, got {getattr(self, name)}.")
        if self.memory_limit_bytes is not None and self.memory_limit_bytes <= 0:
            raise ConfigError(f"the memory limit must be above 0, got {self.memory_limit_bytes} bytes per device.")

    @property
    def num_devices(self) -> int:
        """Return the total number of devices."""
        return self.num_nodes * self.devices_per_node
