"""Several nodes on localhost: a coordinator and agents, each a real process, meet through the store."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from mindspeed_autoparallel.runtime.launch.channel import SECRET_VARIABLE, find_secret
from mindspeed_autoparallel.runtime.launch.ports import reserved_port
from mindspeed_autoparallel.runtime.launch.store import StoreClient

pytestmark = [pytest.mark.distributed, pytest.mark.torch, pytest.mark.timeout(900)]

COORDINATOR = """
    import json, sys
    from pathlib import Path
    from mindspeed_autoparallel.errors import LaunchError
    from mindspeed_autoparallel.interrupts import leaving_kept
    from mindspeed_autoparallel.profiles.records import json_of
    from mindspeed_autoparallel.runtime.launch.coordinator import Coordinator
    from mindspeed_autoparallel.runtime.launch.outcome import LaunchSpec
    from mindspeed_autoparallel.runtime.launch.rendezvous import Nodes
    NODES = "num_nodes", "num_processes_per_node", "master_port"
    work, options = Path(sys.argv[1]), json.loads(sys.argv[2])
    try:
        nodes = Nodes(master_addr="localhost", secret_dir=work, **{name: options.pop(name) for name in NODES})
        with leaving_kept("bye"), Coordinator(
            nodes, log_dir=work / "logs", command=[str(work / "node.py")], **options
        ) as coordinator:
            for number, act in enumerate(sys.argv[3:]):
                spec = LaunchSpec(launch_id=f"launch{number}", argv=coordinator.command, task={"act": act}, timeout_s=800)
                print(json.dumps(json_of(coordinator.launch(spec))), flush=True)
    except LaunchError as error:
        sys.exit(str(error))
"""
AGENT = """
    import json, sys, time
    from pathlib import Path
    from mindspeed_autoparallel.errors import LaunchError
    from mindspeed_autoparallel.interrupts import leaving_kept
    from mindspeed_autoparallel.runtime.launch.coordinator import run_agent
    from mindspeed_autoparallel.runtime.launch.rendezvous import Nodes
    NODES = "num_nodes", "num_processes_per_node", "master_port"
    options = json.loads(sys.argv[2])
    off, here = options.pop("clock_off_s", 0), time.time
    time.time = lambda: here() + off
    Path(sys.argv[1], f"agent{options['node_rank']}").touch()
    try:
        with leaving_kept("bye"):
            work = Path(sys.argv[1])
            command, logs = [str(work / "node.py")], work / f"logs{options['node_rank']}"
            nodes = Nodes(master_addr="localhost", secret_dir=work, **{name: options.pop(name) for name in NODES})
            print(run_agent(nodes, log_dir=logs, command=command, **options))
    except LaunchError as error:
        sys.exit(str(error))
"""
NODE = """
import json, os, pathlib, sys, time
folder, rank = pathlib.Path(sys.path[0]), os.environ["RANK"]
act = json.loads(pathlib.Path(os.environ["MINDSPEED_AUTOPARALLEL_TASK"]).read_text())["act"]
if act == "good":
    (folder / f"ran{rank}-{os.environ['WORLD_SIZE']}").touch()
elif act == "bad" and rank == "3":
    sys.exit("rank 3 on the other node broke")
else:
    (folder / f"pid{rank}").write_text(str(os.getpid()))
    time.sleep(900)
"""
"""The one script of all nodes: an order says for what, never which."""


@pytest.fixture
def nodes(tmp_path):
    """Starts a coordinator or an agent; ends all of them after the test."""
    (tmp_path / "node.py").write_text(NODE)
    started = []

    def start(rank, *scripts, environment=None, folder=tmp_path, **options):
        code = AGENT if rank else COORDINATOR
        options = {"num_nodes": 2, "num_processes_per_node": 1, "master_port": port, "join_timeout_s": 300, **options}
        if rank:
            options["node_rank"] = rank
        command = [sys.executable, "-c", textwrap.dedent(code), str(folder), json.dumps(options), *scripts]
        environment = {**os.environ, **(environment or {})}
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)
        started.append(process)
        return started[-1]

    with reserved_port() as port:
        yield start
    for process in started:
        process.kill()


def outcomes(process):
    """What a coordinator printed, and its errors."""
    out, error = process.communicate(timeout=600)
    return [json.loads(line) for line in out.splitlines() if line.startswith("{")], error


def wait_for_pids(tmp_path, number):
    deadline = time.monotonic() + 400
    while True:
        texts = [path.read_text() for path in tmp_path.glob("pid*")]
        if len(texts) == number and all(texts):
            return [int(text) for text in texts]
        assert time.monotonic() < deadline
        time.sleep(0.1)


def wait_for_signature(command, key):
    """Until a node has signed in; the secret lies in the folder that all of them share."""
    deadline = time.monotonic() + 300
    while True:
        secret = find_secret(Path(command[3]))
        with contextlib.suppress(OSError):
            if secret is not None:
                port = json.loads(command[4])["master_port"]
                StoreClient("localhost", port, secret, timeout_s=300).get(key)
                return
        assert time.monotonic() < deadline
        time.sleep(0.1)


def assert_dead(pids):
    deadline = time.monotonic() + 200
    while any(Path(f"/proc/{pid}").exists() for pid in pids):
        assert time.monotonic() < deadline
        time.sleep(0.1)


def disturbed(port, over):
    """Strangers come to the node's port until ``over``: some send what is no message, some only stay."""
    silent = []
    while not over.wait(0.2):
        with contextlib.suppress(OSError):
            silent.append(socket.create_connection(("localhost", port), timeout=1))
            silent[-1].sendall((b"GET / HTTP/1.1\r\n\r\n", b"", os.urandom(99))[len(silent) % 3])
    for one in silent:
        one.close()
    return len(silent)


def test_nodes_without_shared_storage_whose_clocks_differ_run_every_launch_and_a_failure_on_one_ends_it_on_both(
    tmp_path, nodes
):
    other, secret = tmp_path / "other", {SECRET_VARIABLE: "0f" * 32}
    other.mkdir()
    (other / "node.py").write_text(NODE)
    agent = nodes(1, num_processes_per_node=2, environment=secret, folder=other, clock_off_s=3600)
    main = nodes(0, "good", "bad", "good", num_processes_per_node=2, environment=secret)
    over = threading.Event()
    with ThreadPoolExecutor(1) as pool:
        strangers = pool.submit(disturbed, json.loads(main.args[4])["master_port"], over)
        try:
            ended, error = outcomes(main)
        finally:
            over.set()
        assert strangers.result()
    assert [outcome["status"] for outcome in ended] == ["ok", "failed", "ok"], error
    assert ended[1]["node_rank"] == 1
    assert any("rank 3 on the other node broke" in line for line in ended[1]["last_lines"])
    assert sorted(path.name for path in tmp_path.glob("ran*")) == ["ran0-4", "ran1-4"]
    assert sorted(path.name for path in other.glob("ran*")) == ["ran2-4", "ran3-4"]
    assert agent.communicate(timeout=300)[0].strip() == "3"


def test_all_nodes_that_die_at_once_are_named_and_nothing_is_started_without_them(tmp_path, nodes):
    agents = [nodes(1, num_nodes=4), nodes(2, num_nodes=4), nodes(3, num_nodes=4)]
    main = nodes(0, "hang", "good", num_nodes=4, silence_s=10)
    pids = wait_for_pids(tmp_path, 4)
    for agent in agents[::2]:
        agent.send_signal(signal.SIGKILL)
    ended, error = outcomes(main)
    assert [(outcome["status"], outcome["node_rank"]) for outcome in ended] == [("failed", 1), ("not_started", 1)], (
        error
    )
    assert all("nodes 1, 3 of 4 do not answer any more" in outcome["last_lines"][-1] for outcome in ended)
    assert not list(tmp_path.glob("ran*"))
    assert_dead(pids)
    assert agents[1].communicate(timeout=300)[0].strip() == "1"


def test_a_terminated_node_ends_its_processes_and_reports_it_at_once(tmp_path, nodes):
    agent = nodes(1)
    main = nodes(0, "hang", silence_s=500)
    pids = wait_for_pids(tmp_path, 2)
    agent.send_signal(signal.SIGTERM)
    assert agent.wait(300) == 128 + signal.SIGTERM
    ended, error = outcomes(main)
    assert ended[0]["status"] == "failed", error
    assert "node 1 left: SIGTERM" in ended[0]["last_lines"]
    assert_dead(pids)


@pytest.mark.parametrize(
    ("number", "said"), [(signal.SIGTERM, "it was interrupted"), (signal.SIGKILL, "lost the main node")]
)
def test_when_the_main_node_ends_the_others_end_their_processes(tmp_path, nodes, number, said):
    agent = nodes(1)
    main = nodes(0, "hang")
    pids = wait_for_pids(tmp_path, 2)
    main.send_signal(number)
    main.communicate(timeout=300)
    _, error = agent.communicate(timeout=300)
    assert (agent.returncode, said in error, "Traceback" in error) == (1, True, False), error
    assert_dead(pids)


def test_nodes_that_do_not_come_are_named_with_what_to_do(tmp_path, nodes):
    agent = nodes(2, num_nodes=4)
    deadline = time.monotonic() + 200
    while not (tmp_path / "agent2").exists():
        assert time.monotonic() < deadline
        time.sleep(0.1)
    _, error = outcomes(nodes(0, "good", num_nodes=4, join_timeout_s=8))
    assert "nodes 1, 3 of 4 did not connect to" in error
    assert "--node-rank 1 or 3" in error
    assert "nodes 1, 3 of 4 did not connect to" in agent.communicate(timeout=300)[1]


def test_nodes_that_were_started_differently_say_so_on_both(nodes):
    agent = nodes(1, num_processes_per_node=2)
    _, error = outcomes(nodes(0, "good"))
    wanted = "node 1 was started with --nnodes 2 --nproc-per-node 2, node 0 with --nnodes 2 --nproc-per-node 1"
    assert wanted in error
    assert wanted in agent.communicate(timeout=300)[1]


def test_a_second_process_of_one_node_is_refused_and_the_first_goes_on(nodes):
    main = nodes(0, "good", num_nodes=3)
    first = nodes(1, num_nodes=3)
    wait_for_signature(first.args, "node/1")
    second = nodes(1, num_nodes=3)
    _, error = second.communicate(timeout=300)
    assert f"node 1 is already connected: process {first.pid}" in error
    nodes(2, num_nodes=3)
    ended, error = outcomes(main)
    assert [outcome["status"] for outcome in ended] == ["ok"], error


def test_an_agent_without_a_main_node_ends_with_a_reason(nodes):
    _, error = nodes(1, join_timeout_s=1).communicate(timeout=300)
    assert "was rejected by the main node" in error
    assert "MINDSPEED_AUTOPARALLEL_SECRET" in error
    _, error = nodes(1, join_timeout_s=1, environment={SECRET_VARIABLE: "x" * 32}).communicate(timeout=300)
    assert "cannot reach the main node" in error
