"""Environment variables of a tuned job, and the network: collectives, ports, addresses, clocks."""

from __future__ import annotations

import re
from collections.abc import Iterable

from mindspeed_autoparallel.runtime.doctor.finding import Finding, advice, fine, problem, unknown
from mindspeed_autoparallel.runtime.doctor.node import ASCEND, NVIDIA, Node

_LONG_ENOUGH_S = 1200
_MAX_SKEW_S = 1.0


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
    """Check that non-contiguous tensors are copied in one operator."""
    if node.device_kind() == ASCEND and node.variable("COMBINED_ENABLE") != "1":
        yield advice(
            "combined copies",
            "COMBINED_ENABLE is not 1",
            "transposed or sliced inputs are copied step by step instead of in one operator",
            COMBINED_ENABLE="1",
        )


def check_allocator(node: Node) -> Iterable[Finding]:
    """Check that the allocator has expandable segments, against fragmentation."""
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
        "images of varying size fragment memory; expandable segments grow in place (plans assume it)",
        **{name: joined},
    )


def check_memory_reuse(node: Node) -> Iterable[Finding]:
    """Check that memory is reused across streams."""
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
            "images of varying size cause new operator shapes in every step, which are prepared again without a cache",
            **absent,
        )


def check_max_connections(node: Node) -> Iterable[Finding]:
    """Check ``CUDA_DEVICE_MAX_CONNECTIONS``, which makes NVIDIA kernels keep the order of their launch."""
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


def check_connect_timeout(node: Node) -> Iterable[Finding]:
    """Check how long ranks wait for each other to connect."""
    if node.device_kind() != ASCEND:
        return
    value = node.variable("HCCL_CONNECT_TIMEOUT")
    if value and re.fullmatch(r"[0-9]{1,9}", value) and int(value) >= _LONG_ENOUGH_S:
        yield fine("connection timeout", f"HCCL_CONNECT_TIMEOUT={value} s")
    else:
        yield advice(
            "connection timeout",
            f"HCCL_CONNECT_TIMEOUT={value or '(not set: 120 s)'}",
            "the first rank to arrive times out while others still load weights or compile operators",
            HCCL_CONNECT_TIMEOUT=str(_LONG_ENOUGH_S),
        )


def check_interface(node: Node) -> Iterable[Finding]:
    """Check that the interface named for sockets exists."""
    present = node.matching("sys/class/net/*")
    for name in ("HCCL_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"):
        wanted = (node.variable(name) or "").lstrip("=^")
        if wanted and present and not any(card.startswith(part) for part in wanted.split(",") for card in present):
            yield problem(
                "interface",
                f"{name}={wanted}; this node has {', '.join(present)}",
                "processes cannot find one another",
                f"set {name} to one of these, or leave it out",
            )


def check_debug_output(node: Node) -> Iterable[Finding]:
    """Check for debug logs, which slow every collective."""
    if node.device_kind() == NVIDIA and (node.variable("NCCL_DEBUG") or "").upper() in ("INFO", "TRACE"):
        yield advice(
            "debug output",
            f"NCCL_DEBUG={node.variable('NCCL_DEBUG')}",
            "thousands of lines per start",
            NCCL_DEBUG="WARN",
        )
    if node.device_kind() == ASCEND and (node.variable("ASCEND_GLOBAL_LOG_LEVEL") or "3") in ("0", "1"):
        yield advice(
            "debug output",
            f"ASCEND_GLOBAL_LOG_LEVEL={node.variable('ASCEND_GLOBAL_LOG_LEVEL')}",
            "debug logging of the driver slows every operator",
            ASCEND_GLOBAL_LOG_LEVEL="3",
        )


def check_master(node: Node) -> Iterable[Finding]:
    """Check that the master address of several nodes is not local, and that its port is free on the first node."""
    address = _first(node, "MASTER_ADDR", "--master-addr", "--master_addr")
    port = _first(node, "MASTER_PORT", "--master-port", "--master_port")
    num_nodes = node.script.number("--nnodes")
    if (num_nodes or 1) > 1 and address in ("localhost", "127.0.0.1"):
        yield problem(
            "master address",
            f"{num_nodes} nodes and MASTER_ADDR={address}",
            "every node waits for itself",
            "set MASTER_ADDR to the first node's address on all nodes",
        )
    if not port:
        return
    if not re.fullmatch(r"[0-9]{1,5}", port) or not 0 < int(port) < 65536:
        yield problem("master port", f"MASTER_PORT={port}", "not a port", "choose one from 1024 to 65535")
        return
    rank = _first(node, "NODE_RANK", "--node-rank", "--node_rank") or "0"
    if rank != "0":
        return
    if node.port_is_free(int(port)):
        yield fine("master port", f"{port} is free")
    else:
        yield problem(
            "master port",
            f"{port} is in use on this node",
            "the job cannot start, or joins another one",
            "choose another MASTER_PORT on all nodes, or end the job that holds it",
        )


def check_clock(node: Node) -> Iterable[Finding]:
    """Check that the clock is synchronised; compare it with each peer's over ``ssh``, within half the round trip."""
    for peer in node.peers:
        before = node.now_s()
        answer = node.run(["ssh", "-o", "BatchMode=yes", "-o", "ConnectTimeout=5", peer, "date", "+%s.%N"])
        after = node.now_s()
        try:
            skew_s = float(answer or "") - (before + after) / 2
        except ValueError:
            yield unknown("clock", f"the time of {peer} cannot be read (ssh without a password is needed)")
            continue
        uncertain_s = (after - before) / 2
        what = f"{peer} is {abs(skew_s):.3f} s {'ahead' if skew_s > 0 else 'behind'} (+-{uncertain_s:.3f} s)"
        if abs(skew_s) - uncertain_s > _MAX_SKEW_S:
            yield problem(
                "clock",
                what,
                "logs and traces of the nodes cannot be aligned",
                "start the time service (chronyd or ntpd) on all nodes",
            )
        else:
            yield fine("clock", what)
    synchronised = node.run(["timedatectl", "show", "-p", "NTPSynchronized", "--value"])
    if synchronised == "no":
        yield advice("clock", "not synchronised", "clocks of several nodes drift apart", "start chronyd or ntpd")
    elif synchronised == "yes":
        yield fine("clock", "synchronised by the time service")
    elif not node.peers:
        yield unknown("clock", "no time service found; name other nodes with --peers to compare")


def _first(node: Node, variable: str, *flags: str) -> str:
    for flag in flags:
        if node.script.flags.get(flag):
            return node.script.flags[flag]
    return node.script.variables.get(variable) or node.variable(variable) or ""
