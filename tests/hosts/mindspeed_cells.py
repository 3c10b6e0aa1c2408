"""Runs of the MindSpeed hosts on CPU: their own scripts in processes of their own, with the stand-ins on the path."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from host_runs import Ran

from mindspeed_autoparallel.errors import InfeasiblePlan
from mindspeed_autoparallel.planner.layouts.options import SearchOptions
from mindspeed_autoparallel.planner.layouts.search import search
from mindspeed_autoparallel.profiles.mindspeed import read_profile
from mindspeed_autoparallel.spec import Cluster, Layout, Plan

HERE = Path(__file__).parent
MM_SOURCES = ("MINDSPEED_MM_SOURCES", "MINDSPEED_SOURCES", "MINDSPEED_MEGATRON_SOURCES")
LLM_SOURCES = ("MINDSPEED_LLM_SOURCES", "MINDSPEED_SOURCES", "MINDSPEED_MEGATRON_SOURCES")
TIMEOUT_S = 580


def missing(variables: Sequence[str]) -> str:
    """Return the sentence for people where a host's folders are not given, nothing where they are."""
    absent = [name for name in variables if not os.environ.get(name)]
    return f"no host: set {', '.join(absent)} (tests/hosts/README.md says how)" if absent else ""


def environment(variables: Sequence[str]) -> dict[str, str]:
    """Return this process's environment with the host's ``variables`` and the stand-ins on Python's path."""
    path = [str(HERE / "stand_ins"), str(HERE.parents[1]), *(os.environ[name] for name in variables)]
    path += [folder for folder in (os.environ.get("HOST_LIBRARIES"),) if folder]
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(path),
        "OMP_NUM_THREADS": "1",
        "CUDA_DEVICE_MAX_CONNECTIONS": "1",
        "MINDSPEED_AUTOPARALLEL_DEVICE": "cpu",
        "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",
    }


def refused(
    variables: Sequence[str], host: str, drawn: dict[str, tuple[list[str], int]], folder: Path | None = None
) -> dict[str, str]:
    """Return which of ``drawn`` (words and devices by name) the host's own parser and validators refuse, and why.

    ``folder``: where the files lie that the words name.
    """
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(HERE / "host_flags.py"), host],
        input=json.dumps(drawn),
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        env=environment(variables),
        cwd=folder,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    failed: dict[str, str] = json.loads(done.stdout.splitlines()[-1])
    return failed


def run(folder: Path, variables: Sequence[str], words: Sequence[str], *, num_processes: int = 0, port: int = 0) -> Ran:
    """Run a script of ``folder`` alone (0 processes: no rank is set), or on every rank of one node."""
    begin = time.monotonic()
    base = environment(variables)
    ranks = [base]
    if num_processes:
        job = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
        job |= {"WORLD_SIZE": str(num_processes), "LOCAL_WORLD_SIZE": str(num_processes)}
        ranks = [{**base, **job, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(num_processes)]
    logs = [folder / f"rank{number}.log" for number in range(len(ranks))]
    processes = []
    for variables_of_rank, log in zip(ranks, logs, strict=True):
        with log.open("w") as stream:
            command = [sys.executable, "-W", "ignore", *words]
            processes.append(
                subprocess.Popen(command, cwd=folder, env=variables_of_rank, stdout=stream, stderr=subprocess.STDOUT)
            )
    try:
        codes = [process.wait(timeout=TIMEOUT_S) for process in processes]
    finally:
        for process in processes:
            process.kill()
    output = "\n".join(log.read_text(errors="replace") for log in logs)
    return Ran(exit_code=max(codes, key=abs), output=output, seconds=time.monotonic() - begin)


def two_stages(profile_file: Path, batch: int) -> Plan:
    """Return the best plan with two stages and so little memory that it recomputes on one of them."""
    layouts = [Layout(pipeline_size=2, tensor_size=1, data_size=1, micro_batch_size=1, distributed_optimizer=True)]
    profile = read_profile(profile_file)
    plan = search(
        profile, Cluster(num_nodes=1, devices_per_node=2), batch, SearchOptions(layouts=layouts, num_workers=1)
    )
    while not any(stage.recompute for stage in plan.stages):
        limit = int(max(memory.peak_bytes for memory in plan.memory) * 0.98)
        try:
            cluster = Cluster(num_nodes=1, devices_per_node=2, memory_limit_bytes=limit)
            plan = search(profile, cluster, batch, SearchOptions(layouts=layouts, num_workers=1))
        except InfeasiblePlan:
            break
    return plan
