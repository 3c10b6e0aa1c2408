"""Is there a device, and its driver?"""

from __future__ import annotations

from collections.abc import Iterable

from mindspeed_autoparallel.runtime.doctor.finding import Finding, advice, fine, problem, unknown
from mindspeed_autoparallel.runtime.doctor.node import ASCEND, NO_DEVICE, Node


def check_device(node: Node) -> Iterable[Finding]:
    """Check devices and driver version."""
    kind, count = node.device_kind(), node.num_devices()
    if kind == NO_DEVICE:
        yield advice("device", "no Ascend NPU and no NVIDIA GPU", "training needs one; planning does not")
        return
    if kind == ASCEND:
        text = node.read("usr/local/Ascend/driver/version.info") or ""
        driver = next((line.partition("=")[2] for line in text.splitlines() if line.startswith("Version=")), "")
    else:
        text = node.run(["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]) or ""
        driver = text.splitlines()[0] if text else ""
    name = f"{count} {'Ascend NPU' if kind == ASCEND else 'NVIDIA GPU'}(s)"
    yield fine("device", f"{name}, driver {driver}") if driver else unknown("device", f"{name}, driver unknown")


def check_processes_against_devices(node: Node) -> Iterable[Finding]:
    """Check that there is one process per device."""
    wanted = node.script.number("--nproc-per-node", 0)
    count = node.num_devices()
    if not wanted or not count:
        return
    if wanted > count:
        yield problem(
            "processes",
            f"the script starts {wanted} processes, this node has {count} devices",
            "two processes on one device run out of memory or hang",
            f"--nproc-per-node {count}",
        )
    elif wanted < count:
        yield advice("processes", f"the script uses {wanted} of {count} devices", "the others stay idle")
    else:
        yield fine("processes", f"one process for each of {count} devices")
