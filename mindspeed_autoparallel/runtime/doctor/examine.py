"""Releases and patches, and all checks in the order of the report."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from mindspeed_autoparallel.patching.patch import Patch
from mindspeed_autoparallel.patching.releases import within
from mindspeed_autoparallel.runtime.doctor import launch, machine, settings
from mindspeed_autoparallel.runtime.doctor.finding import Finding, advice, fine, problem
from mindspeed_autoparallel.runtime.doctor.node import ASCEND, Node

_PACKAGES = ("megatron-core", "torch", "torch-npu", "mindspeed", "mindspeed-autoparallel")


def check_releases(node: Node) -> Iterable[Finding]:
    """Check versions, and that torch and torch_npu have the same release."""
    found = {name: node.release_of(name) for name in _PACKAGES}
    yield fine("versions", ", ".join(f"{name} {release or 'absent'}" for name, release in found.items()))
    for name in ("megatron-core", "torch"):
        if not found[name]:
            yield problem(
                "versions",
                f"{name} is not installed",
                "training needs it; planning does not",
                "put a Megatron-LM checkout on PYTHONPATH" if name == "megatron-core" else "pip install torch",
            )
    torch, npu = found["torch"], found["torch-npu"]
    if torch and npu and torch.split(".")[:2] != npu.split(".")[:2]:
        yield problem(
            "versions",
            f"torch {torch} with torch_npu {npu}",
            "torch_npu is built for exactly one torch release and fails on import or at random operators",
            f"install torch {'.'.join(npu.split('.')[:2])}.* or the torch_npu of torch {torch}",
        )
    if node.device_kind() == ASCEND and torch and not npu:
        yield problem("versions", "an NPU, but no torch_npu", "torch cannot use the device", "install torch_npu")


def check_patches(node: Node, patches: Sequence[Patch]) -> Iterable[Finding]:
    """Check every patch against the release that it wraps."""
    release = node.release_of("megatron-core")
    of_megatron = [patch for patch in patches if patch.distribution == "megatron-core"]
    unfit = [patch for patch in of_megatron if release and not within(release, patch.versions)]
    for patch in unfit:
        needed = ", ".join(patch.flags) or "every run"
        yield advice(
            "patches",
            f"{patch.target} is for {patch.distribution} {patch.versions}",
            f"needed by {needed}: it is refused there with {release}",
            "use a release in that range, or leave those flags out",
        )
    if patches and not unfit:
        yield fine("patches", f"all {len(patches)} patches fit")


CHECKS: tuple[Callable[[Node], Iterable[Finding]], ...] = (
    machine.check_device,
    machine.check_processes_against_devices,
    check_releases,
    settings.check_task_queue,
    machine.check_affinity,
    settings.check_allocator,
    settings.check_memory_reuse,
    settings.check_combined,
    settings.check_caches,
    settings.check_launch_blocking,
    settings.check_max_connections,
    settings.check_connect_timeout,
    settings.check_interface,
    settings.check_debug_output,
    settings.check_master,
    settings.check_clock,
    machine.check_shared_memory,
    machine.check_disk,
    machine.check_open_files,
    launch.check_world_size,
    launch.check_model_sizes,
    launch.check_encoder_gradients,
    launch.check_ring_mask,
    launch.check_import,
    launch.check_search_launcher,
    launch.check_fsdp2_trainer,
    launch.check_sharded_parameters,
)


def examine(node: Node, patches: Sequence[Patch] = ()) -> list[Finding]:
    """Return every finding of every check."""
    found = [finding for check in CHECKS for finding in check(node)]
    return [*found, *check_patches(node, patches)]
