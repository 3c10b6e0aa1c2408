"""The cost of a move to another plan: bytes read and sent, and the seconds until training continues."""

from __future__ import annotations

from dataclasses import dataclass

from mindspeed_autoparallel.errors import ConfigError
from mindspeed_autoparallel.profiles import Profile
from mindspeed_autoparallel.spec import Plan
from mindspeed_autoparallel.units import GIB

_STATE = ("parameters", "optimizer")
"""Terms of a rank's memory that a checkpoint holds; gradients are computed anew."""


@dataclass(frozen=True, kw_only=True)
class MoveRates:
    """Assumptions about the machines, stated by the user."""

    storage_bytes_per_s: float = 2.0 * GIB
    """Read rate of one node for checkpoints; all nodes read at once."""
    restart_s: float = 60.0
    """Processes, imports, communicators and the first step."""

    def __post_init__(self) -> None:
        if not 0 < self.storage_bytes_per_s < float("inf"):
            raise ConfigError(f"--storage-gib-per-s must be above 0, got {self.storage_bytes_per_s / GIB:g}.")
        if not 0 <= self.restart_s < float("inf"):
            raise ConfigError(f"--restart-s must be at least 0, got {self.restart_s:g}.")


@dataclass(frozen=True, kw_only=True)
class Move:
    """The move to a plan."""

    read_bytes: int
    """From storage: every value of weights and optimizer state once."""
    sent_bytes: int
    """Between devices: values that more than one device holds are read by one and sent to the others."""
    seconds: float
    """Reading, sending, writing where files are recut, and the restart."""


STAYING = Move(read_bytes=0, sent_bytes=0, seconds=0.0)
"""No move: training continues unchanged."""


def move_to(plan: Plan, profile: Profile, rates: MoveRates, *, recut: bool) -> Move:
    """Return the cost of loading a checkpoint under ``plan``.

    ``recut``: files are cut for one layout, so that they are read and written once more before they are loaded.
    """
    layout, cluster = plan.layout, plan.cluster
    width = layout.num_devices // layout.pipeline_size
    held = [{name: rank.terms.get(name, 0) for name in _STATE} for rank in plan.memory]
    everywhere = width * sum(sum(terms.values()) for terms in held)
    encoders = sum(phase.state_bytes for phase in plan.hetero.encoders) if plan.hetero is not None else 0
    replicas = layout.data_size * layout.context_size
    copies = replicas // layout.expert_size if _is_mostly_experts(plan) else replicas
    parameters = width * sum(terms["parameters"] for terms in held) // max(1, copies)
    optimizer = width * sum(terms["optimizer"] for terms in held)
    optimizer = optimizer if layout.distributed_optimizer else optimizer // max(1, replicas)
    once = parameters + optimizer + encoders
    sent = max(0, everywhere + encoders * layout.num_devices - once)
    reading_s = once / (rates.storage_bytes_per_s * cluster.num_nodes)
    tier = profile.device.inter if cluster.num_nodes > 1 else profile.device.intra
    sending_s = sent / layout.num_devices / tier.of("broadcast").bytes_per_s
    # A recut reads and writes every value on one node.
    recut_s = 2 * once / rates.storage_bytes_per_s if recut else 0.0
    return Move(read_bytes=once, sent_bytes=sent, seconds=reading_s + sending_s + recut_s + rates.restart_s)


def _is_mostly_experts(plan: Plan) -> bool:
    return plan.layout.expert_size > 1 and any(module.num_experts for module in plan.model.modules)
