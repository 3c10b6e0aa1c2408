"""A layout that can be solved: legal, and with costs; and the splits that a host can run."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from mindspeed_autoparallel.profiles import DeviceCost, Measurement, Profile
from mindspeed_autoparallel.spec import Cluster, Layout


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A legal, measured layout of one training."""

    profile: Profile
    cluster: Cluster
    layout: Layout
    measurement: Measurement
    """The costs that the search uses, of one point of the profile."""
    num_microbatches: int

    @property
    def global_batch_size(self) -> int:
        """Return the samples of one step."""
        return self.num_microbatches * self.layout.data_size * self.layout.micro_batch_size

    @property
    def limit_bytes(self) -> int:
        """Return the bytes that a rank may use."""
        return limit_of(self.profile.device, self.cluster)

    @property
    def limits(self) -> tuple[int, ...]:
        """Return the bytes that each pipeline rank may use."""
        return (self.limit_bytes,) * self.layout.pipeline_size


def limit_of(device: DeviceCost, cluster: Cluster) -> int:
    """Return the bytes that a rank may use."""
    return cluster.memory_limit_bytes or device.memory_capacity_bytes


Layers = Mapping[str, tuple[int, ...]]
"""Module name to layers by virtual stage."""


@dataclass(frozen=True, kw_only=True)
class Splits:
    """The splits that a host can run."""

    of_layout: Callable[[Layout], Iterable[Layers]]
    """Every split of a layout; none if the host cannot run the layout."""
    recompute_by_stage: bool
    """Whether stages may recompute different numbers of layers; otherwise all layers of all modules, or none."""
    description: str
    """Text for messages: ``first and last stage of any size, those between alike``."""
