"""The common part of searches that measure: a model, the nodes that measure it, and the roles of these nodes."""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from mindspeed_autoparallel.cost.catalogue import find_device, read_device
from mindspeed_autoparallel.cost.device import Device
from mindspeed_autoparallel.errors import ConfigError, flag_of
from mindspeed_autoparallel.interrupts import leaving_kept
from mindspeed_autoparallel.runtime.flags.flag import read_flags
from mindspeed_autoparallel.runtime.flags.shared import NodeFlags, ProfileSourceFlags
from mindspeed_autoparallel.runtime.launch.coordinator import Coordinator, run_agent
from mindspeed_autoparallel.runtime.launch.ports import check_port_is_free
from mindspeed_autoparallel.runtime.launch.rendezvous import Nodes
from mindspeed_autoparallel.runtime.megatron.description import Description
from mindspeed_autoparallel.runtime.megatron.mindspeed import least_expert_sizes
from mindspeed_autoparallel.runtime.megatron.short_training import batch_ramp
from mindspeed_autoparallel.runtime.megatron.unsearched import refuse_batch_schedule
from mindspeed_autoparallel.units import MIB
from mindspeed_autoparallel.whole_numbers import MOST_MEMORY_MIB

_LOGGER = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class MeasuringRequest:
    """The measuring part of a request; batch and context sizes are the script's own."""

    description: Description
    num_nodes: int
    num_processes_per_node: int
    node_rank: int
    master_addr: str
    master_port: int
    global_batch_size: int
    micro_batch_size: int
    context_size: int
    work_dir: Path
    memory_limit_bytes: int | None
    """Memory limit per device; ``None``: the device's memory minus a reserve."""
    launch_timeout_s: float
    target_device: Device | None
    """Device of the catalogue for which costs are computed; ``None`` if they are measured."""
    least_expert_sizes: Mapping[str, int] = field(default_factory=dict)
    """Fewest expert ranks that the host runs, by what requires them."""
    ramp: range = range(0)
    """Smaller global batches that ``--rampup-batch-size`` trains first."""

    @property
    def nodes(self) -> Nodes:
        """Return the nodes that take the measurements; those that share the work dir find the secret in it."""
        return Nodes(
            num_nodes=self.num_nodes if self.target_device is None else 1,
            num_processes_per_node=self.num_processes_per_node,
            master_addr=self.master_addr,
            master_port=self.master_port,
            secret_dir=self.work_dir,
        )

    @property
    def num_measuring(self) -> int:
        """Return the number of measuring devices."""
        return self.num_nodes * self.num_processes_per_node


def read_measuring(
    arguments: argparse.Namespace,
    feature: str,
    description: Description,
    work_dir: Path,
    memory_limit_mib: float | None,
    launch_timeout_s: float,
    *,
    cluster_devices_per_node: int = 0,
) -> MeasuringRequest:
    """Return the measuring part of a request of ``feature``; ``ConfigError`` names the flag at fault.

    ``cluster_devices_per_node``: devices per node of the cluster to plan for, whose ranks the first device may play;
    ``--profile-device`` may then name the device whose links are used. 0: no ranks are played.
    """
    nodes = read_flags(NodeFlags, arguments)
    plays = cluster_devices_per_node > 0 and plays_ranks(nodes.nnodes, nodes.nproc_per_node, cluster_devices_per_node)
    if nodes.node_rank >= nodes.nnodes:
        raise ConfigError(
            f"--node-rank must be 0 to {nodes.nnodes - 1} with --nnodes {nodes.nnodes}, got {nodes.node_rank}."
        )
    if memory_limit_mib is not None:
        check_memory_limit(memory_limit_mib)
    refuse_batch_schedule(arguments, feature)
    global_batch_size = needed(arguments, feature, "global_batch_size")
    return MeasuringRequest(
        description=description,
        num_nodes=nodes.nnodes,
        num_processes_per_node=nodes.nproc_per_node,
        node_rank=nodes.node_rank,
        master_addr=nodes.master_addr,
        master_port=nodes.master_port,
        global_batch_size=global_batch_size,
        micro_batch_size=int(arguments.micro_batch_size or 1),
        context_size=int(getattr(arguments, "context_parallel_size", 1) or 1),
        work_dir=work_dir,
        memory_limit_bytes=None if memory_limit_mib is None else int(memory_limit_mib * MIB),
        launch_timeout_s=float(launch_timeout_s),
        target_device=target_device(arguments, names_links=plays),
        least_expert_sizes=least_expert_sizes(arguments),
        ramp=batch_ramp(arguments, global_batch_size),
    )


def plays_ranks(num_nodes: int, num_processes_per_node: int, cluster_devices_per_node: int) -> bool:
    """Return whether the first device plays the ranks of every layout: it is the only one, or each node measures with
    one device and the cluster's nodes have more."""
    return num_processes_per_node == 1 and (num_nodes == 1 or cluster_devices_per_node > 1)


def check_memory_limit(limit_mib: float) -> None:
    """Raise ``ConfigError`` for an impossible device memory."""
    if not 0 < limit_mib <= MOST_MEMORY_MIB:
        raise ConfigError(
            f"the memory limit of a device must be above 0 and at most {MOST_MEMORY_MIB} MiB, got {limit_mib:g}. "
            "Leave the flag out to use the device's own memory."
        )


def needed(arguments: argparse.Namespace, feature: str, destination: str) -> int:
    """Return a whole number of at least 1 from ``arguments``; ``ConfigError`` names the ``feature`` that needs it."""
    value = getattr(arguments, destination, None)
    if value is None or int(value) < 1:
        raise ConfigError(f"{feature} needs {flag_of(destination)}, at least 1; the script gives {value}.")
    return int(value)


def target_device(arguments: argparse.Namespace, *, names_links: bool = False) -> Device | None:
    """Return the device of ``--profile-source analytic``; ``None`` if costs are measured.

    ``names_links``: whether a device may be given together with measured costs, for its links. Raises ``ConfigError``
    for an unknown device, a missing one, or one that is not allowed.
    """
    flags = read_flags(ProfileSourceFlags, arguments)
    if flags.profile_source != "analytic" and names_links:
        return None
    if flags.profile_source != "analytic":
        for name in ("profile_device", "profile_device_file"):
            if getattr(flags, name):
                raise ConfigError(f"{flag_of(name)} is for --profile-source analytic; add that, or drop it.")
        return None
    device = named_device(flags)
    if device is None:
        raise ConfigError("--profile-source analytic needs --profile-device, such as H100 or Ascend-910B.")
    return device


def named_device(flags: ProfileSourceFlags) -> Device | None:
    """Return the device of the catalogue or of a file that ``flags`` name; ``None`` if they name none."""
    own = (read_device(Path(flags.profile_device_file)),) if flags.profile_device_file else ()
    name = flags.profile_device or (own[0].name if own else None)
    return None if name is None else find_device(name, own)


def serve_main_node(request: MeasuringRequest, what_stays: str, flags: Collection[str] = ()) -> None:
    """On nodes other than the main one, run the main node's orders and end this process.

    ``flags``: flags that an order may add to this node's own command line.
    """
    rank = request.node_rank
    if rank == 0:
        return
    if request.target_device is not None:
        _LOGGER.info("node %s: nothing is measured with --profile-source analytic; node 0 works alone", rank)
        sys.exit(0)
    with leaving_kept(f"node {rank} has left{what_stays}"):
        num_launches = run_agent(
            request.nodes,
            node_rank=rank,
            log_dir=request.work_dir / "logs" / f"node{rank}",
            join_timeout_s=request.launch_timeout_s,
            flags=flags,
        )
    _LOGGER.info("node %s: done after %s launches; the results are on node 0", rank, num_launches)
    sys.exit(0)


def coordinator(request: MeasuringRequest) -> Coordinator:
    """Return the main node's side of all launches, a context manager that waits for the other nodes when entered."""
    nodes = request.nodes
    if nodes.num_nodes > 1:
        check_port_is_free(request.master_port)
        _LOGGER.info(f"waiting for {nodes.num_nodes - 1} other nodes at {request.master_addr}:{request.master_port}")
    return Coordinator(nodes, log_dir=request.work_dir / "logs", join_timeout_s=request.launch_timeout_s)
