"""Failures are recorded and skipped, or named; no finished result is lost, and no two runs share a work dir."""

import json
import os
import shutil
import signal
import subprocess
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from auto_tuning import DEEP_GPT, ENVIRONMENT, GPT, ROOT, SCRIPT, SECRET_TOKEN, finish, result_of, start, tune
from forked_python import forked_python, program_of

from mindspeed_autoparallel.runtime.launch.channel import SECRET_VARIABLE
from mindspeed_autoparallel.runtime.launch.ports import reserved_port

pytestmark = [pytest.mark.timeout(1200), pytest.mark.distributed, pytest.mark.torch, pytest.mark.megatron]


@pytest.fixture
def again(finished_run, tmp_path, monkeypatch):
    """Its script, a hook to set, and a copy of the work dir without ``parts``."""
    hook = tmp_path / "hook"
    monkeypatch.setenv("RUN_HOOK", str(hook))

    def copy(*parts):
        ignored = shutil.ignore_patterns(*parts, "knowledge.sqlite-*")
        return shutil.copytree(finished_run.work, tmp_path / "work", ignore=ignored)

    def run(work, *words, wait=True):
        return (tune if wait else start)(work, *SECRET_TOKEN, *words, script=finished_run.script, model=DEEP_GPT)

    return SimpleNamespace(copy=copy, run=run, hook=hook.write_text, unhook=hook.unlink)


def wait_until(happened, process):
    deadline = time.monotonic() + 900
    while not happened() and time.monotonic() < deadline and process.poll() is None:
        time.sleep(0.2)
    assert process.poll() is None, process.communicate()[0][-4000:]


def launches_of(work):
    return json.loads((work / "launches.json").read_text())["launches"]


def traces_of(work):
    return list(work.glob("traces/*/TP*.json"))


def interrupt(process, number):
    process.send_signal(number)
    code, text = finish(process, 300)
    assert (code, "finished traces and measurements are kept" in text) == (128 + number, True), text[-2000:]
    return text


def assert_no_child_is_left(work):
    for status in Path("/proc").glob("[0-9]*/environ"):
        try:
            assert str(work).encode() not in status.read_bytes(), f"{status} is still there"
        except OSError:
            continue


def test_secrets_of_the_command_line_are_in_no_file(finished_run):
    files = [path for path in finished_run.work.rglob("*") if path.is_file()]
    assert any(path.suffix == ".log" and b"hub_token" in path.read_bytes() for path in files)
    assert not [path for path in files if b"hunter" in path.read_bytes()]
    assert "hunter" not in finished_run.output
    assert "--hub-token '***'" in result_of(finished_run.work)["top"][0]["command"]


def test_a_trace_that_dies_and_a_launch_without_memory_are_passed_over(again):
    work = again.copy("knowledge.sqlite", "measurements", "TP2_CP1_EP1_MBS1.json", "launches.json")
    again.hook(
        "if args.tensor_model_parallel_size == 2:\n"
        "    if kind == 'trace': os._exit(9)\n"
        "    raise RuntimeError('CPU out of memory: injected')\n"
    )
    code, text = again.run(work)
    assert code == 0, text[-4000:]
    result = result_of(work)
    launches = launches_of(work)
    assert len({launch["id"] for launch in launches}) == len(launches) == len(result["launches"]) == 3
    ended = [(launch["purpose"], launch["status"], launch["exit_code"]) for launch in launches]
    assert ended == [("trace", "failed", 9)] * 2 + [("calibrate", "out_of_memory", 77)]
    assert any("out_of_memory" in line for line in launches[-1]["last_lines"])
    assert "exit code 9" in result["left_out_dimensions"]["TP2 CP1 EP1 MBS1"]
    assert any("what it finished is used" in note for note in result["notes"])
    assert result["top"]
    again.unhook()
    second = again.run(work, wait=False)
    try:
        line = next(line for line in second.stdout if "one launch on" in line)
        assert " 0 whole layouts" not in line, "what the failed launch left out is measured"
    finally:
        second.kill()
    (trace,) = (path for path in traces_of(work) if path.stem == "TP2_CP1_EP1_MBS1")
    assert json.loads(trace.read_text())["status"] == "ok"


def test_a_script_that_never_trains_is_refused_with_the_reason(tmp_path):
    text = SCRIPT.read_text()
    (tmp_path / "no_training.py").write_text(text[: text.index("    pretrain(\n")] + "    parse_and_validate_args()\n")
    code, text = tune(tmp_path / "work", script=tmp_path / "no_training.py")
    assert code == 2, text[-3000:]
    assert "ended before training started" in text
    assert "Traceback" not in text


def test_an_interrupted_trace_is_gone_on_with_and_a_second_tuner_is_refused(again):
    work = again.copy("traces", "launches.json")
    again.hook("if kind == 'trace' and args.tensor_model_parallel_size == 2: time.sleep(3600)")
    first = again.run(work, wait=False)
    try:
        wait_until(lambda: traces_of(work), first)
        code, text = again.run(work)
        assert (code, f"another run uses {work} (process {program_of(first.pid)} on " in text) == (2, True), text
        interrupt(first, signal.SIGTERM)
        assert_no_child_is_left(work)
        assert [launch["status"] for launch in launches_of(work)] == ["interrupted"]
        kept = traces_of(work)
        second = again.run(work, wait=False)
        for line in second.stdout:
            if "points were traced before" in line:
                assert int(line.split("]")[1].split()[0]) == len(kept) > 0
                break
        else:
            pytest.fail("nothing was reused")
        interrupt(second, signal.SIGINT)
        assert_no_child_is_left(work)
    finally:
        first.kill()


def test_finished_results_of_an_interrupted_launch_are_not_measured_again(again, tmp_path):
    work = again.copy("knowledge.sqlite", "measurements", "launches.json")
    stuck = tmp_path / "stuck"
    again.hook(
        "from mindspeed_autoparallel.runtime.profiling.calibrate import replay, worker\n"
        "worker._SAVE_EVERY_S, times, seen = 0, replay._times, []\n"
        "def until_the_sixth(*call):\n"
        "    seen.append(call)\n"
        f"    if len(seen) > 5: pathlib.Path({str(stuck)!r}).touch(), time.sleep(3600)\n"
        "    return times(*call)\n"
        "replay._times = until_the_sixth\n"
    )
    first = again.run(work, wait=False)
    wait_until(stuck.exists, first)
    interrupt(first, signal.SIGTERM)
    assert_no_child_is_left(work)
    wanted = len(json.loads((work / "missing_operators.json").read_text())["operators"])
    again.unhook()
    second = again.run(work, wait=False)
    try:
        lines = []
        for line in second.stdout:
            lines.append(line)
            if "one launch on" in line:
                break
        assert any("measured before it was cut off is used" in line for line in lines), lines
        assert f"{wanted - 5} operators" in lines[-1]
    finally:
        interrupt(second, signal.SIGTERM)


def test_nodes_that_die_are_named_and_the_run_goes_on_where_it_was(again, tmp_path, monkeypatch):
    """First in the measuring launch, which leaves too little to search by; then while its result is verified.

    The nodes share no work dir, so both are given the secret.
    """
    monkeypatch.setenv(SECRET_VARIABLE, "9a" * 32)
    words = ("--nnodes", 2, "--nproc-per-node", 1, "--auto-tuning-verify", "--master-port")

    def run_and_kill(kind, port):
        again.hook(f"if kind == {kind!r}: time.sleep(3600)")
        other = again.run(tmp_path / "other", *words, port, "--node-rank", 1, wait=False)
        main = again.run(tmp_path / "work", *words, port, "--node-rank", 0, wait=False)
        try:
            wait_until(lambda: list((tmp_path / "other").glob(f"logs/node1/{kind}-*.log")), main)
            other.kill()
            code, text = finish(main, 900)
        finally:
            other.kill()
            main.kill()
        assert "node 1 of 2 does not answer any more" in text
        assert "Traceback" not in text
        assert_no_child_is_left(tmp_path)
        return code, text

    with reserved_port() as port:
        code, text = run_and_kill("calibrate", port)
    assert code == 2, text[-3000:]
    (launch,) = (item for item in launches_of(tmp_path / "work") if item["purpose"] == "calibrate")
    assert (launch["status"], launch["node_rank"]) == ("failed", 1)
    with reserved_port() as port:
        code, text = run_and_kill("verify", port)
    assert (code, "points were traced before" in text) == (0, True), text[-3000:]
    result = result_of(tmp_path / "work")
    assert not any("between nodes were never sampled" in note for note in result["notes"])
    assert [item["status"] for item in result["verified"]] == ["failed"] + ["not_started"] * (len(result["top"]) - 1)
    # The measuring one, and the first to verify.
    assert result["num_device_launches"] == 2
    assert "\n1. not verified: failed on node 1" in text
    assert {launch["purpose"] for launch in launches_of(tmp_path / "work")} == {"trace", "calibrate", "verify"}


def test_verifying_launches_that_hang_are_ended_and_one_that_ended_is_not_repeated(again):
    work = again.copy("launches.json")
    result = result_of(work)
    (one, *others) = (work / "verify").iterdir()
    for path in others:
        path.unlink()
    again.hook("print('hanging', flush=True), time.sleep(3600)")
    code, text = again.run(work, "--auto-tuning-verify", "--auto-tuning-launch-timeout-s", 3)
    assert (code, "was run before" in text) == (0, True), text[-4000:]
    later = result_of(work)
    assert [plan["label"] for plan in later["top"]] == [plan["label"] for plan in result["top"]]
    kept = [item for item in later["verified"] if item["status"] == "ok"]
    assert len(kept) == 1
    assert kept[0]["measured_step_ms"] in [item["measured_step_ms"] for item in result["verified"]]
    launches = launches_of(work)
    ended = [launch["status"] for launch in launches]
    assert ended == ["timed_out"] * len(others) != []
    assert all("given up after" in launch["last_lines"][-1] for launch in launches)
    assert one.exists()
    assert_no_child_is_left(work)


@pytest.mark.long
def test_a_model_that_dies_whenever_it_is_traced_is_measured_whole(again):
    """How often, and what else may end a trace: tests/unit/runtime/features/auto_tuning/test_traces.py."""
    work = again.copy("traces", "launches.json")
    again.hook("if kind == 'trace': os.kill(os.getpid(), 9)")
    code, text = again.run(work, "--global-batch-size", 1)
    assert code == 0, text[-4000:]
    result = result_of(work)
    ended = [(launch["purpose"], launch["status"], launch["exit_code"]) for launch in launches_of(work)]
    assert ended == [("trace", "failed", -9)] * 2 + [("calibrate", "ok", 0)]
    assert any("could not be traced; measured whole instead: failed on node 0" in note for note in result["notes"])
    assert result["top"]


def test_a_script_that_cannot_be_read_again_is_named(tmp_path):
    run = subprocess.run(
        [forked_python(), "-", *GPT, "--auto-tuning-work-dir", tmp_path / "work"],
        input=SCRIPT.read_text(),
        text=True,
        capture_output=True,
        cwd=ROOT,
        env={**os.environ, **ENVIRONMENT},
        timeout=900,
    )
    assert (run.returncode, "Traceback" in run.stderr) == (2, False), run.stderr[-2000:]
    assert "'-' is not a file that can be read. Start it as python SCRIPT.py" in run.stderr


def test_a_knowledge_base_that_cannot_be_read_is_named_before_anything_starts(tmp_path):
    path = tmp_path / "base.sqlite"
    path.write_bytes(b"no sqlite at all" * 100)
    code, text = tune(tmp_path / "work", "--auto-tuning-knowledge-base", path)
    assert (code, "Traceback" in text) == (2, False), text[-2000:]
    assert f"knowledge base {path}" in text
    assert not (tmp_path / "work/launches.json").exists()
