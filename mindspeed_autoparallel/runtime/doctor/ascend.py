"""Variables that a tuned Ascend job sets, and the one Megatron needs on NVIDIA."""

from __future__ import annotations

from collections.abc import Iterable

from mindspeed_autoparallel.runtime.doctor.finding import Finding, advice, fine, problem
from mindspeed_autoparallel.runtime.doctor.node import ASCEND, NVIDIA, Node


def check_launch_blocking(node: Node) -> Iterable[Finding]:
    """Check for synchronous launches, which are for debugging."""
    for name in ("ASCEND_LAUNCH_BLOCKING", "CUDA_LAUNCH_BLOCKING"):
        if node.variable(name) == "1":
            yield advice(
                "launch blocking",
                f"{name}=1",
                "every operator waits for the device, which is for debugging only",
                **{name: "0"},
            )


def check_task_queue(node: Node) -> Iterable[Finding]:
    """Check two-level operator dispatch."""
    if node.device_kind() != ASCEND:
        return
    level = node.variable("TASK_QUEUE_ENABLE")
    if level == "2":
        yield fine("task queue", "TASK_QUEUE_ENABLE=2")
    else:
        yield advice(
            "task queue",
            f"TASK_QUEUE_ENABLE={level if level is not None else '(not set)'}",
            "level 2 moves part of the operator preparation to a second pipeline: less waiting for the host",
            TASK_QUEUE_ENABLE="2",
        )


def check_combined(node: Node) -> Iterable[Finding]:
    """Check joined non-contiguous copies."""
    if node.device_kind() == ASCEND and node.variable("COMBINED_ENABLE") != "1":
        yield advice(
            "combined copies",
            "COMBINED_ENABLE is not 1",
            "transposed or sliced inputs are copied step by step instead of in one operator",
            COMBINED_ENABLE="1",
        )


def check_allocator(node: Node) -> Iterable[Finding]:
    """Check fragmentation of device memory."""
    name = {ASCEND: "PYTORCH_NPU_ALLOC_CONF", NVIDIA: "PYTORCH_CUDA_ALLOC_CONF"}.get(node.device_kind())
    if name is None:
        return
    value = node.variable(name) or ""
    options = {key.strip(): setting.strip() for key, _, setting in (part.partition(":") for part in value.split(","))}
    if options.get("expandable_segments", "").lower() == "true":
        if "max_split_size_mb" in options:
            yield advice(
                "allocator",
                f"{name}={value}",
                "max_split_size_mb has no effect with expandable segments",
                **{name: "expandable_segments:True"},
            )
        else:
            yield fine("allocator", f"{name}={value}")
        return
    joined = f"{value},expandable_segments:True" if value else "expandable_segments:True"
    yield advice(
        "allocator",
        f"{name}={value or '(not set)'}",
        "pictures of changing size break memory into unusable pieces; expandable segments grow in place "
        "(plans assume it)",
        **{name: joined},
    )


def check_memory_reuse(node: Node) -> Iterable[Finding]:
    """Reuse of memory across streams."""
    if node.device_kind() == ASCEND and node.variable("MULTI_STREAM_MEMORY_REUSE") not in ("1", "2"):
        yield advice(
            "memory reuse",
            "MULTI_STREAM_MEMORY_REUSE is not set",
            "buffers of collectives are kept until the stream is idle: higher peak memory than planned",
            MULTI_STREAM_MEMORY_REUSE="2",
        )


def check_caches(node: Node) -> Iterable[Finding]:
    """Check host caches for operators of many shapes."""
    if node.device_kind() != ASCEND:
        return
    wanted = {"HOST_CACHE_CAPACITY": "20", "ACLNN_CACHE_LIMIT": "100000"}
    absent = {name: value for name, value in wanted.items() if not node.variable(name)}
    if absent:
        yield advice(
            "operator caches",
            f"{', '.join(absent)} not set",
            "pictures of changing size make new operator shapes every step, which are prepared again without a cache",
            **absent,
        )


def check_max_connections(node: Node) -> Iterable[Finding]:
    """Check Megatron's order of kernels on NVIDIA."""
    if node.device_kind() != NVIDIA:
        return
    value = node.variable("CUDA_DEVICE_MAX_CONNECTIONS")
    if value == "1":
        yield fine("kernel order", "CUDA_DEVICE_MAX_CONNECTIONS=1")
        return
    tensor_size = node.script.number("--tensor-model-parallel-size")
    what = f"CUDA_DEVICE_MAX_CONNECTIONS={value or '(not set)'}"
    why = "Megatron overlaps tensor-parallel communication only when kernels keep the order of their launch"
    report = problem if "--sequence-parallel" in node.script.flags or (tensor_size or 1) > 1 else advice
    yield report("kernel order", what, why, CUDA_DEVICE_MAX_CONNECTIONS="1")
