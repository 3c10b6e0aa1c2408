"""Processes of one launch on this node: real children, real deaths."""

import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from forked_python import forked_python

from mindspeed_autoparallel.runtime.launch.children import child_environment
from mindspeed_autoparallel.runtime.launch.coordinator import Coordinator
from mindspeed_autoparallel.runtime.launch.outcome import LaunchOutcome, LaunchSpec, LaunchStatus, worst
from mindspeed_autoparallel.runtime.launch.processes import LocalRanks, run_local_processes, whole_error
from mindspeed_autoparallel.runtime.launch.rendezvous import Nodes


def run(tmp_path, code, **options):
    script = tmp_path / "script.py"
    script.write_text(code)
    spec = LaunchSpec(
        launch_id="test", argv=(str(script),), timeout_s=options.pop("timeout_s", 400.0), task={"kind": "x"}
    )
    return run_local_processes(
        spec,
        LocalRanks(node_rank=0, num_processes=2, num_nodes=1, master_addr="localhost", master_port=1),
        log_dir=tmp_path / "logs",
        **options,
    )


def alive(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def assert_nobody_is_left(tmp_path):
    """No process has ``tmp_path`` among its words, except killed ones that are not yet reaped."""
    deadline = time.monotonic() + 120
    while processes := [path for path in Path("/proc").glob("[0-9]*/cmdline") if names(path, tmp_path)]:
        assert time.monotonic() < deadline, processes
        time.sleep(0.05)


def names(path, folder):
    try:
        return str(folder).encode() in path.read_bytes()
    except OSError:
        return False


def test_every_rank_gets_its_place_and_its_task(tmp_path):
    code = (
        "import os, json, pathlib\n"
        "task = json.load(open(os.environ['MINDSPEED_AUTOPARALLEL_TASK']))\n"
        "place = [os.environ[n] for n in ('RANK', 'LOCAL_RANK', 'WORLD_SIZE')]\n"
        f"pathlib.Path({str(tmp_path)!r}, 'rank' + place[0]).write_text(' '.join([*place, task['kind']]))\n"
    )
    assert run(tmp_path, code).status is LaunchStatus.OK
    assert [(tmp_path / f"rank{rank}").read_text() for rank in (0, 1)] == ["0 0 2 x", "1 1 2 x"]


LISTENING = """
import os, sys, torch, torch.distributed as dist
dist.init_process_group("gloo")
dist.new_group([0, 1])
ones = torch.ones(4)
dist.all_reduce(ones)
assert ones[0] == 2
mine = {os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{fd}")}
for table in ("tcp", "tcp6", "udp", "udp6"):
    for line in open(f"/proc/self/net/{table}").read().splitlines()[1:]:
        words = line.split()
        if f"socket:[{words[9]}]" in mine:
            inside = words[1].startswith(("0100007F:", "00000000000000000000000001000000:", "0000000000000000FFFF00000100007F:"))
            assert inside, (table, words)
            print("inside", table, words[3])
dist.barrier()
dist.destroy_process_group()
"""


@pytest.mark.torch
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_the_ranks_of_one_node_open_no_socket_beyond_loopback(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "executable", forked_python())
    outcome = run(tmp_path, LISTENING)
    assert outcome.status is LaunchStatus.OK, outcome.last_lines
    logs = [path.read_text() for path in (tmp_path / "logs").glob("*.log")]
    assert len(logs) == 2 and all("inside tcp 0A" in log for log in logs)  # 0A: it listens


@pytest.mark.torch
def test_a_coordinator_of_one_node_binds_no_port_beyond_loopback(tmp_path, monkeypatch):
    bound, bind = [], socket.socket.bind
    monkeypatch.setattr(socket.socket, "bind", lambda self, place: (bound.append(place[0]), bind(self, place))[1])
    (tmp_path / "script.py").write_text("pass")
    spec = LaunchSpec(launch_id="test", argv=(str(tmp_path / "script.py"),), timeout_s=400.0, task={})
    nodes = Nodes(num_nodes=1, num_processes_per_node=1, master_addr="localhost", master_port=29500)
    with Coordinator(nodes, log_dir=tmp_path / "logs") as coordinator:
        assert coordinator.launch(spec).status is LaunchStatus.OK
    assert set(bound) == {"127.0.0.1"}


def test_a_crash_ends_the_others_and_carries_the_last_lines(tmp_path):
    code = (
        "import os, sys, time, pathlib\n"
        f"pathlib.Path({str(tmp_path)!r}, 'pid' + os.environ['RANK']).write_text(str(os.getpid()))\n"
        "if os.environ['RANK'] == '1':\n"
        f"    while not pathlib.Path({str(tmp_path)!r}, 'pid0').exists(): time.sleep(0.01)\n"
        "    sys.exit('the projector is missing')\n"
        "time.sleep(900)\n"
    )
    outcome = run(tmp_path, code)
    assert (outcome.status, outcome.exit_code) == (LaunchStatus.FAILED, 1)
    assert "the projector is missing" in outcome.describe()
    assert_nobody_is_left(tmp_path)


def test_a_killed_rank_is_the_cause_and_not_the_error_of_the_rank_that_lost_it(tmp_path):
    killed = tmp_path / "killed"
    code = (
        "import os, sys, time, pathlib\n"
        f"killed = pathlib.Path({str(killed)!r})\n"
        "if os.environ['RANK'] == '1':\n"
        "    killed.touch()\n"
        "    os.kill(os.getpid(), 9)\n"
        "while not killed.exists(): time.sleep(0.01)\n"
        "raise RuntimeError('the data failed to build')\n"
    )
    outcome = run(tmp_path, code)
    assert (outcome.exit_code, Path(outcome.log).name) == (-9, "test.rank1.log")
    assert "signal 9" in outcome.describe()


def test_out_of_memory_is_distinguished_from_a_crash(tmp_path):
    outcome = run(tmp_path, "raise RuntimeError('NPU out of memory. Tried to allocate 2.00 GiB')")
    assert outcome.status is LaunchStatus.OUT_OF_MEMORY


def test_a_hanging_launch_is_ended(tmp_path):
    outcome = run(tmp_path, "import time\ntime.sleep(900)", timeout_s=1.0)
    assert outcome.status is LaunchStatus.TIMED_OUT
    assert_nobody_is_left(tmp_path)


def test_grandchildren_are_ended_too(tmp_path):
    code = (
        "import os, subprocess, sys, pathlib, time\n"
        f"here = pathlib.Path({str(tmp_path)!r})\n"
        "subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(900)', str(here)])\n"
        "(here / ('child' + os.environ['RANK'])).touch()\n"
        "while len(list(here.glob('child*'))) < 2: time.sleep(0.01)\n"
        "sys.exit(3)\n"
    )
    assert run(tmp_path, code).exit_code == 3
    assert_nobody_is_left(tmp_path)


def test_stopping_on_request_ends_the_children(tmp_path):
    outcome = run(tmp_path, "import time; time.sleep(900)", should_stop=lambda: True)
    assert outcome.status is LaunchStatus.TIMED_OUT


def test_children_see_what_the_users_training_would_see():
    """A launch script's own variables reach every measuring process, for example on MindSpeed-MM."""
    parent = {
        "PATH": "/bin",
        "MY_DATA": "/data",
        "HF_TOKEN": "hf_hunter2",
        "SLURM_JOB_ID": "9",
        "RANK": "7",
        "SLURM_PROCID": "7",
        "TORCHELASTIC_RUN_ID": "1",
        "OOTB_OPTIMIZER_PROFILING": "TRUE",
    }
    child = child_environment(parent, {"RANK": "0"})
    assert child == {"PATH": "/bin", "MY_DATA": "/data", "HF_TOKEN": "hf_hunter2", "SLURM_JOB_ID": "9", "RANK": "0"}
    assert parent["RANK"] == "7"


def test_secrets_of_the_environment_reach_the_children_and_stay_out_of_logs(tmp_path):
    code = "import os; print('token', os.environ['MY_TOKEN']); raise SystemExit('bad ' + os.environ['MY_TOKEN'])"
    outcome = run(tmp_path, code, parent_environment={**os.environ, "MY_TOKEN": "hunter2hunter2"})
    assert outcome.last_lines[-1] == "bad ***"
    logs = [path.read_text() for path in tmp_path.rglob("*") if path.is_file() and path.suffix != ".py"]
    assert any("token ***" in text for text in logs)
    assert not any("hunter2hunter2" in text for text in logs)


def test_out_of_memory_explains_the_failures_it_causes():
    outcomes = [
        LaunchOutcome(status=status) for status in (LaunchStatus.OK, LaunchStatus.FAILED, LaunchStatus.OUT_OF_MEMORY)
    ]
    assert worst(outcomes).status is LaunchStatus.OUT_OF_MEMORY


@pytest.mark.skipif(sys.platform != "linux", reason="prctl is Linux")
def test_children_die_with_a_killed_coordinator(tmp_path):
    import signal

    script = tmp_path / "child.py"
    script.write_text(
        f"import os, pathlib, time\npathlib.Path({str(tmp_path)!r}, 'pid' + os.environ['RANK']).write_text(str(os.getpid()))\n"
        "time.sleep(900)\n"
    )
    parent = (
        "from pathlib import Path\n"
        "from mindspeed_autoparallel.runtime.launch.outcome import LaunchSpec\n"
        "from mindspeed_autoparallel.runtime.launch.processes import LocalRanks, run_local_processes\n"
        f"run_local_processes(LaunchSpec(launch_id='k', argv=({str(script)!r},)), LocalRanks(master_port=1),\n"
        f"    log_dir=Path({str(tmp_path)!r}))\n"
    )
    process = subprocess.Popen([sys.executable, "-c", parent])
    deadline = time.monotonic() + 300
    while not (tmp_path / "pid0").exists() or not (tmp_path / "pid0").read_text():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    process.send_signal(signal.SIGKILL)
    process.wait()
    pid = int((tmp_path / "pid0").read_text())
    while alive(pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not alive(pid)


INTERRUPTED = """
import os, signal, sys, threading, time
from pathlib import Path
from mindspeed_autoparallel.interrupts import leaving_kept
from mindspeed_autoparallel.runtime.launch.outcome import LaunchSpec
from mindspeed_autoparallel.runtime.launch.processes import LocalRanks, run_local_processes
script, moment = sys.argv[1:]
interrupt = lambda: os.kill(os.getpid(), signal.SIGINT)
if not moment.isdigit():
    os.register_at_fork(**{moment: interrupt})
with leaving_kept("bye"):
    if moment.isdigit():
        threading.Timer(int(moment) / 1000, interrupt).start()
    spec = LaunchSpec(launch_id="k", argv=(script,), task={}, timeout_s=60)
    run_local_processes(spec, LocalRanks(num_processes=3), log_dir=Path(script).parent / "logs")
"""


@pytest.mark.skipif(sys.platform != "linux", reason="processes are found in /proc")
@pytest.mark.parametrize("moment", ["before", "after_in_parent", *range(0, 45, 3)])
def test_an_interrupt_while_processes_start_ends_them(tmp_path, moment):
    """``moment``: milliseconds, or the hook of fork that receives it; Python discards an exception inside a hook."""
    (tmp_path / "child.py").write_text("import time\ntime.sleep(900)\n")
    command = [forked_python(), "-c", INTERRUPTED, str(tmp_path / "child.py"), str(moment)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert (run.returncode, run.stderr) == (130, "interrupted; bye\n")
    assert_nobody_is_left(tmp_path)


def test_an_error_is_quoted_whole_with_the_ones_that_led_to_it():
    noise = ["a line of the log"] * 30
    first = ["[rank0]: Traceback (most recent call last):", '[rank0]:   File "a.py", line 1', "[rank0]: KeyError: 1"]
    chain = ["[rank0]: During handling of the above exception, another exception occurred:"]
    last = ["[rank0]: Traceback (most recent call last):", *[f'  File "b{n}.py"' for n in range(40)], "ValueError: x"]
    assert whole_error([*noise, *first, *chain, *last]) == (*first, *chain, *last)
    assert whole_error([*noise, *first, *noise, *last]) == tuple(last)
    assert whole_error(noise) == tuple(noise[-12:])
