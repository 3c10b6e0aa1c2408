"""Shared memory, disk and open files."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from mindspeed_autoparallel.runtime.doctor.finding import Finding, advice, fine, problem
from mindspeed_autoparallel.runtime.doctor.node import Node
from mindspeed_autoparallel.units import GIB, format_bytes

_SHARED_BYTES_PER_PROCESS = GIB
_MIN_DISK_BYTES = 50 * GIB


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
    """Check the room where checkpoints go."""
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
