"""All checks, in the order of the report."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from mindspeed_autoparallel.patching.patch import Patch
from mindspeed_autoparallel.runtime.doctor import ascend, cores, device, launch, network, releases, resources
from mindspeed_autoparallel.runtime.doctor.finding import Finding
from mindspeed_autoparallel.runtime.doctor.node import Node

CHECKS: tuple[Callable[[Node], Iterable[Finding]], ...] = (
    device.check_device,
    device.check_processes_against_devices,
    releases.check_releases,
    ascend.check_task_queue,
    cores.check_affinity,
    ascend.check_allocator,
    ascend.check_memory_reuse,
    ascend.check_combined,
    ascend.check_caches,
    ascend.check_launch_blocking,
    ascend.check_max_connections,
    network.check_connect_timeout,
    network.check_interface,
    network.check_debug_output,
    network.check_master,
    network.check_clock,
    resources.check_shared_memory,
    resources.check_disk,
    resources.check_open_files,
    launch.check_world_size,
    launch.check_model_sizes,
    launch.check_import,
    launch.check_search_launcher,
    launch.check_fsdp2_trainer,
)


def examine(node: Node, patches: Sequence[Patch] = ()) -> list[Finding]:
    """Return every finding of every check."""
    found = [finding for check in CHECKS for finding in check(node)]
    return [*found, *releases.check_patches(node, patches)]
