"""A training of several simulated nodes, each a torchrun of its own, whose nodes and ranks can be killed and started."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from forked_python import forked_python

from mindspeed_autoparallel.cli.main import main
from mindspeed_autoparallel.errors import ConfigError, InfeasiblePlan
from mindspeed_autoparallel.planner.layouts.options import SearchOptions
from mindspeed_autoparallel.planner.layouts.search import search
from mindspeed_autoparallel.planner.layouts.space import SpaceOptions
from mindspeed_autoparallel.planner.replan.sources import costs_of
from mindspeed_autoparallel.runtime.launch.ports import reserved_port
from mindspeed_autoparallel.spec import Plan

ROOT = Path(__file__).parents[2]
MODEL = """--num-layers 8 --hidden-size 64 --num-attention-heads 4 --ffn-hidden-size 256 --seq-length 64
    --max-position-embeddings 64 --tokenizer-type NullTokenizer --vocab-size 512 --make-vocab-size-divisible-by 8
    --untie-embeddings-and-output-weights --transformer-impl local --no-gradient-accumulation-fusion
    --no-masked-softmax-fusion --no-persist-layer-norm --attention-dropout 0 --hidden-dropout 0 --micro-batch-size 1
    --lr 1e-3 --min-lr 1e-4 --lr-decay-style cosine --lr-warmup-iters 2 --log-interval 1 --eval-iters 0
    --eval-interval 1000 --distributed-backend gloo --mock-data --num-workers 0 --ckpt-format torch_dist"""
BATCH = 24
RENDEZVOUS = "is_host=0,last_call_timeout=8,keep_alive_interval=2,keep_alive_max_attempt=6,join_timeout=600"
_STEP, _PROCESS = re.compile(r"STEP (\d+) (\S+) (\d+)"), re.compile(r"PROCESS (\d+)")


@dataclass(frozen=True)
class Step:
    """A step that was trained, as the last rank printed it."""

    iteration: int
    loss: float
    num_ranks: int


class _Log:
    """What one node prints; ``processes``: the ranks that it has started."""

    def __init__(self, path: Path) -> None:
        self.path, self._at = path, 0
        self.processes: list[int] = []
        self.lost = False
        """Whether the node was killed: ranks of it that show up later had been started before, and go, too."""

    def new_lines(self) -> list[str]:
        """Return the whole lines since the last call."""
        with self.path.open("rb") as stream:
            stream.seek(self._at)
            text = stream.read()
        text = text[: text.rfind(b"\n") + 1]
        self._at += len(text)
        return text.decode(errors="replace").splitlines()


class ElasticJob:
    """Starts nodes, kills them, and reads what they trained."""

    def __init__(self, folder: Path, port: int, per_node: int, words: list[str], python: str) -> None:
        self.folder, self.per_node, self.words = folder, per_node, words
        self.port, self.python = port, python
        self.agents: dict[int, subprocess.Popen[bytes]] = {}
        self._logs: list[_Log] = []
        self._log_of: dict[int, _Log] = {}
        self._steps: list[Step] = []
        self._lines: list[str] = []
        store = [python, "-m", "mindspeed_autoparallel", "rendezvous", "--address", "127.0.0.1"]
        self._store = self._start([*store, "--port", str(port)], "store")

    def _start(self, command: list[str], name: str) -> subprocess.Popen[bytes]:
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])),
            "OMP_NUM_THREADS": "1",
            "MINDSPEED_AUTOPARALLEL_DEVICE": "cpu",
            "CUDA_DEVICE_MAX_CONNECTIONS": "1",
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
        }
        log = self.folder / f"{name}.log"
        with log.open("ab") as stream:
            return subprocess.Popen(
                command, stdout=stream, stderr=stream, env=environment, cwd=self.folder, start_new_session=True
            )

    def start_node(self, node: int, most: int) -> None:
        """Start a torchrun that meets the others; ``most``: nodes at most."""
        command = [self.python, "-m", "torch.distributed.run", "--nnodes", f"1:{most}"]
        command += ["--nproc-per-node", str(self.per_node), "--max-restarts", "100", "--monitor-interval", "0.2"]
        command += ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{self.port}", "--rdzv-id", "job"]
        command += ["--local-addr", "127.0.0.1", "--rdzv-conf", RENDEZVOUS]
        name = f"node{node}-{len(self._logs)}"
        self._log_of[node] = _Log(self.folder / f"{name}.log")
        self._logs.append(self._log_of[node])
        script = Path(__file__).parent / "elastic_script.py"
        self.agents[node] = self._start([*command, str(script), *self.words], name)

    def ranks_of(self, node: int) -> list[int]:
        """Return the process numbers of the ranks on ``node`` that have started last."""
        self._read()
        return self._log_of[node].processes[-self.per_node :]

    def kill_node(self, node: int) -> None:
        """End a node as a power cut does."""
        agent = self.agents.pop(node)
        agent.kill()
        self._log_of[node].lost = True
        for pid in self.ranks_of(node):
            _kill(pid)
        agent.wait()

    def kill_rank(self, node: int, local_rank: int) -> None:
        """End one process of ``node``."""
        _kill(self.ranks_of(node)[local_rank])

    def steps(self) -> list[Step]:
        """Return the steps in the order in which they were read."""
        self._read()
        return self._steps

    def lines(self, word: str) -> list[str]:
        """Return the lines of ``--auto-parallel-elastic`` with ``word``."""
        self._read()
        return [line for line in self._lines if word in line]

    def _read(self) -> None:
        """Take in what the nodes have printed since the last call."""
        for log in self._logs:
            for line in log.new_lines():
                if found := _STEP.fullmatch(line):
                    self._steps.append(Step(int(found[1]), float(found[2]), int(found[3])))
                elif found := _PROCESS.fullmatch(line):
                    log.processes.append(int(found[1]))
                    if log.lost:
                        _kill(int(found[1]))
                elif "elastic: " in line:
                    self._lines.append(line)

    def wait(self, until: Callable[[], bool], timeout_s: float, what: str) -> float:
        """Wait for ``until``; return the seconds it took, ``AssertionError`` after ``timeout_s``."""
        began = time.monotonic()
        while not until():
            if time.monotonic() - began > timeout_s:
                raise AssertionError(f"no {what} within {timeout_s:.0f} s\n{self.tails()}")
            if self.agents and all(agent.poll() not in (None, 0) for agent in self.agents.values()):
                raise AssertionError(f"all nodes ended before {what}\n{self.tails()}")
            time.sleep(0.1)
        return time.monotonic() - began

    def tails(self) -> str:
        """Return the last lines of every log."""
        return "\n".join(
            f"{log.path.name}:\n" + "\n".join(log.path.read_text(errors="replace").splitlines()[-30:])
            for log in self._logs
        )

    def finished(self) -> bool:
        """Return whether all nodes ended well."""
        return all(agent.poll() == 0 for agent in self.agents.values())

    def close(self) -> None:
        """End everything that was started."""
        for node in list(self.agents):
            self.kill_node(node)
        self._store.kill()
        self._store.wait()


@contextlib.contextmanager
def elastic_job(
    folder: Path, words: list[str], *, per_node: int = 2, python: str | None = None
) -> Iterator[ElasticJob]:
    """Hold a job in ``folder``; all its processes are gone at the end.

    ``python``: default one that forks programs from a process that has imported torch.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with reserved_port() as port:
        job = ElasticJob(folder, port, per_node, words, python or forked_python())
        try:
            yield job
        finally:
            job.close()


def planned(folder: Path, *, nodes: int, per_node: int = 2) -> Path:
    """Return a plan for ``MODEL`` on ``nodes`` simulated nodes of CPUs, a batch of 24, written to ``folder``."""
    sizes = {"num_layers": 8, "hidden": 64, "heads": 4, "ffn": 256, "seq": 64, "vocab": 512}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "model.json").write_text(json.dumps({"name": "tiny", "tied_embeddings": False, **sizes}))
    words = (
        f"plan --profile-source analytic --model {folder / 'model.json'} --device CPU --nnodes {nodes} --nproc-per-node"
    )
    words += f" {per_node} --global-batch-size {BATCH} --virtual-sizes 1 --out {folder} --json"
    with contextlib.redirect_stdout(io.StringIO()):
        assert main(words.split()) == 0
    return folder / "plan.json"


def words_of(plan: Path, save: Path, *, iterations: int, interval: int) -> list[str]:
    """Return the command line of an elastic training with ``plan``."""
    words = [*MODEL.split(), "--global-batch-size", str(BATCH), "--train-iters", str(iterations), "--save", str(save)]
    words += ["--save-interval", str(interval), "--auto-parallel-plan", str(plan), "--auto-parallel-elastic"]
    return words


def share_of_optimum(first: Path, plan_file: Path, nodes: int) -> float:
    """Return the proved bound for ``nodes`` nodes or fewer over the predicted step of ``plan_file``.

    ``first``: the plan of the whole cluster.
    """
    old = Plan.read(first)
    profile, _ = costs_of(old, first)
    options = SearchOptions(space=SpaceOptions(overlap_gradient_reduce=True, virtual_sizes=(1, 2, 4)))
    bounds = []
    for number in range(1, nodes + 1):
        with contextlib.suppress(InfeasiblePlan, ConfigError):
            cluster = replace(old.cluster, num_nodes=number)
            bounds.append(search(profile, cluster, BATCH, options).search.lower_bound_us)
    return min(bounds) / Plan.read(plan_file).step.total_us


def _kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
