"""The launcher every multi-process test relies on."""

import os
import socket
import subprocess
import time
from pathlib import Path

import pytest
from forked_python import forked_python
from ranks import run_ranks

pytestmark = pytest.mark.distributed


def place(word):
    return [word, os.environ["RANK"], os.environ["LOCAL_RANK"], os.environ["WORLD_SIZE"], os.environ["OMP_NUM_THREADS"]]


def broken():
    if os.environ["RANK"] == "1":
        raise ValueError("rank one broke")
    time.sleep(300)


def alive(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_a_function_runs_on_every_rank_and_its_results_come_back_in_order():
    outputs = run_ranks(3, place, "hello")
    assert [output.result for output in outputs] == [["hello", str(rank), str(rank), "3", "1"] for rank in range(3)]


def test_source_text_and_scripts_run_in_a_scratch_folder(tmp_path):
    code = "import sys, pathlib; pathlib.Path('left').touch(); print(sys.argv[1]); print('RESULT 7')"
    script = tmp_path / "script.py"
    script.write_text(code)
    for program in (code, script):
        (output,) = run_ranks(1, program, "argument")
        assert (output.stdout, output.result) == ("argument\nRESULT 7\n", 7)
    assert [path.name for path in tmp_path.iterdir()] == ["script.py"]
    with pytest.raises(AssertionError, match="ended with 4"):
        run_ranks(1, "import sys; sys.exit(4)")


def test_a_client_that_is_killed_before_its_request_leaves_the_server_to_others():
    address = str(Path(forked_python()).with_name("socket"))
    for _ in range(2):  # the second is refused where the first has ended the server
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(address)
        subprocess.run([forked_python(), "-c", ""], check=True)


def test_a_failing_rank_ends_the_others_and_is_named_first():
    begin = time.monotonic()
    with pytest.raises(AssertionError, match=r"^rank 1 ended with 1:[\s\S]*rank one broke[\s\S]*rank 0 ended with -9"):
        run_ranks(2, broken)
    assert time.monotonic() - begin < 100


def test_after_the_time_out_nothing_that_a_rank_started_is_left(tmp_path):
    code = (
        "import subprocess, sys, pathlib, os, time\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(300)'])\n"
        "pathlib.Path(sys.argv[1], os.environ['RANK']).write_text(f'{child.pid} {os.getpid()}')\n"
        "time.sleep(300)"
    )
    with pytest.raises(AssertionError, match="not finished after 8 s"):
        run_ranks(2, code, tmp_path, timeout_s=8)
    pids = [int(word) for path in tmp_path.iterdir() for word in path.read_text().split()]
    assert len(pids) == 4
    deadline = time.monotonic() + 10  # a killed orphan is gone once init has collected it
    while any(map(alive, pids)) and time.monotonic() < deadline:
        time.sleep(0.05)
    # An orphan nobody collects is a zombie: dead, and not to be mistaken for a process.
    left = [pid for pid in pids if alive(pid) and "State:\tZ" not in open(f"/proc/{pid}/status").read()]
    assert left == []


def test_a_rank_that_breaks_inside_a_job_ends_at_once_although_its_peers_are_waiting():
    pytest.importorskip("torch")
    code = (
        "import os, torch, torch.distributed as dist\n"
        "dist.init_process_group('gloo')\n"
        "if dist.get_rank() == 1: raise ValueError('broke')\n"
        "dist.all_reduce(torch.ones(1))"
    )
    with pytest.raises(AssertionError, match=r"^rank 1 ended with 1:[\s\S]*ValueError: broke"):
        run_ranks(2, code)


def test_without_check_the_outputs_of_a_failed_job_come_back():
    (output,) = run_ranks(1, "import sys; sys.exit(3)", check=False)
    assert output.returncode == 3
