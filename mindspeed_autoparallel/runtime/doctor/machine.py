"""The machine: devices and their driver, core binding, memory, disk and open files."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from mindspeed_autoparallel.runtime.doctor.finding import Finding, advice, fine, problem, unknown
from mindspeed_autoparallel.runtime.doctor.node import ASCEND, NO_DEVICE, Node
from mindspeed_autoparallel.units import GIB, format_bytes

_NAME = "CPU_AFFINITY_CONF"
_HUAWEI = "0x19e5"
_ACCELERATOR_CLASSES = ("0x1200", "0x0302", "0x0300")

_SHARED_BYTES_PER_PROCESS = GIB
_MIN_DISK_BYTES = 50 * GIB


def check_device(node: Node) -> Iterable[Finding]:
    """Report the devices and the version of their driver."""
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


def cores_by_numa(node: Node) -> dict[int, set[int]]:
    """Return NUMA node -> its cores; one node of all cores if the kernel reports no NUMA nodes."""
    numa = {}
    for name in node.matching("sys/devices/system/node/node[0-9]*"):
        listed = node.read(f"sys/devices/system/node/{name}/cpulist")
        if listed:
            numa[int(name.removeprefix("node"))] = parse_cores(listed)
    if not numa:
        online = node.read("sys/devices/system/cpu/online")
        return {0: parse_cores(online)} if online else {}
    return numa


def parse_cores(listed: str) -> set[int]:
    """Return ``0-3,8`` -> {0, 1, 2, 3, 8}; raises ``ValueError`` on anything else."""
    cores: set[int] = set()
    for part in listed.split(","):
        first, dash, last = part.strip().partition("-")
        cores.update(range(int(first), int(last if dash else first) + 1))
    return cores


def device_numa(node: Node) -> list[int]:
    """Return the NUMA node of every Ascend accelerator, in PCI order; -1 if the kernel does not report it."""
    found = []
    for name in node.matching("sys/bus/pci/devices/*"):
        base = f"sys/bus/pci/devices/{name}"
        kind = node.read(f"{base}/class") or ""
        if node.read(f"{base}/vendor") == _HUAWEI and kind.startswith(_ACCELERATOR_CLASSES):
            found.append(int(node.read(f"{base}/numa_node") or -1))
    return found


def check_affinity(node: Node) -> Iterable[Finding]:
    """Check the mode of ``CPU_AFFINITY_CONF``, and that its ranges exist, are disjoint and on the right NUMA node."""
    if node.device_kind() != ASCEND:
        return
    numa, value = cores_by_numa(node), node.variable(_NAME)
    seen = f"{len(numa)} NUMA node(s), {sum(map(len, numa.values()))} cores"
    why = "processes that migrate between NUMA nodes launch operators late"
    if value is None or value.strip() in ("", "0"):
        yield advice("core binding", f"{_NAME} is off; {seen}", why, **{_NAME: "2" if len(numa) > 1 else "1"})
        return
    mode, _, rest = value.replace(" ", "").partition(",")
    ranges: dict[int, set[int]] = {}
    for part in filter(None, rest.split(",")):
        match = re.fullmatch(r"npu([0-9]{1,5}):([0-9]{1,5})-([0-9]{1,5})", part)
        if match is None or int(match[2]) > int(match[3]):
            yield problem(
                "core binding",
                f"{_NAME}={value}: {part!r} is not npu<i>:<first>-<last>",
                why,
                f"write for example {_NAME}=1,npu0:0-7",
            )
            return
        ranges[int(match[1])] = set(range(int(match[2]), int(match[3]) + 1))
    if mode not in ("1", "2"):
        yield problem("core binding", f"{_NAME}={value}: mode {mode!r} is none of 0, 1, 2", why, **{_NAME: "1"})
        return
    found = list(_range_findings(node, mode, ranges, numa))
    yield from found or [fine("core binding", f"{_NAME}={value}; {seen}")]


def _range_findings(node: Node, mode: str, ranges: dict[int, set[int]], numa: dict[int, set[int]]) -> Iterable[Finding]:
    if ranges and mode == "2":
        yield advice("core binding", "ranges are given with mode 2", "they only work in mode 1", "use mode 1")
    every = set().union(*numa.values()) if numa else set()
    where = device_numa(node)
    for device, cores in sorted(ranges.items()):
        if every and not cores <= every:
            yield problem(
                "core binding",
                f"npu{device} is bound to cores {min(cores)}-{max(cores)}; this node has {len(every)}",
                "the binding fails and the process runs anywhere",
                "bind to cores that exist",
            )
        overlapping = [other for other in ranges if other < device and ranges[other] & cores]
        if overlapping:
            yield advice(
                "core binding",
                f"npu{device} and npu{overlapping[0]} share cores",
                "their processes take turns",
                "give every device cores of its own",
            )
        if device < len(where) and where[device] in numa and not cores <= numa[where[device]]:
            own = numa[where[device]]
            yield advice(
                "core binding",
                f"npu{device} is attached to NUMA node {where[device]}, its cores are on another",
                "every launch crosses between sockets",
                f"choose from cores {min(own)}-{max(own)}",
            )


def check_shared_memory(node: Node) -> Iterable[Finding]:
    """Check /dev/shm, through which data loading workers and collectives of one node pass data."""
    free = node.free_bytes(Path("/dev/shm"))
    if free is None:
        return
    num_processes = max(node.num_devices(), node.script.number("--nproc-per-node", 1) or 1)
    needed = num_processes * _SHARED_BYTES_PER_PROCESS
    what = f"{format_bytes(free)} free in /dev/shm for {num_processes} process(es)"
    if free < needed:
        yield problem(
            "shared memory",
            what,
            "data loading workers die with a bus error",
            f"start the container with --shm-size={needed // GIB}g or more",
        )
    else:
        yield fine("shared memory", what)


def check_disk(node: Node) -> Iterable[Finding]:
    """Check the free space for checkpoints."""
    save = node.script.flags.get("--save") or "."
    free = node.free_bytes(Path(save))
    if free is None:
        return
    what = f"{format_bytes(free)} free for {save}"
    if free < _MIN_DISK_BYTES:
        yield advice(
            "disk",
            what,
            "a checkpoint with optimizer state takes 14 to 18 bytes per parameter",
            "make room or choose another --save",
        )
    else:
        yield fine("disk", what)


def check_open_files(node: Node) -> Iterable[Finding]:
    """Check the limit of open files."""
    limits = node.read("proc/self/limits") or ""
    line = next((line for line in limits.splitlines() if line.startswith("Max open files")), "")
    numbers = [word for word in line.split() if word.isdigit()]
    if numbers and int(numbers[0]) < 4096:
        yield advice(
            "open files",
            f"at most {numbers[0]}",
            "many ranks and data workers open more sockets and files",
            "ulimit -n 65535 before the job",
        )
