"""What goes wrong is recorded and passed over, or named; nothing finished is lost, and nobody shares a work dir."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from auto_tuning import ENVIRONMENT, GPT, ROOT, SCRIPT, finish, result_of, start, tune
from ranks import free_port

pytestmark = [pytest.mark.timeout(1200), pytest.mark.distributed, pytest.mark.torch, pytest.mark.megatron]
BUILD = "    args = get_args()\n    spec ="


@pytest.fixture(autouse=True)
def _host_is_here():
    pytest.importorskip("megatron.training")


def script_with(folder, code):
    """The example training whose model provider first runs ``code``."""
    text = SCRIPT.read_text().replace(BUILD, f"    args = get_args()\n    import os\n    {code}\n    spec =")
    assert code in text
    path = folder / "pretrain_broken.py"
    path.write_text(text)
    return path


def test_a_trace_that_dies_and_a_launch_without_memory_are_passed_over(tmp_path):
    script = script_with(
        tmp_path,
        "split = args.tensor_model_parallel_size == 2\n"
        "    if split and os.environ.get('OOTB_OPTIMIZER_PARSE_MODEL') and args.micro_batch_size == 1 "
        "and not args.sequence_parallel: os._exit(9)\n"
        "    if split and os.environ.get('OOTB_OPTIMIZER_PROFILING'): raise RuntimeError('CPU out of memory: injected')",
    )
    code, text = tune(tmp_path / "work", script=script)
    assert code == 0, text[-4000:]
    result = result_of(tmp_path / "work")
    launches = {launch["id"]: launch for launch in launches_of(tmp_path / "work")}
    assert len(launches) == len(result["launches"]) == 3
    ended = [(launch["purpose"], launch["status"], launch["exit_code"]) for launch in launches.values()]
    assert ended == [("trace", "failed", 9), ("trace", "ok", 0), ("calibrate", "out_of_memory", 77)]
    assert any("out_of_memory" in line for line in list(launches.values())[2]["last_lines"])
    assert "exit code 9" in result["left_out_dimensions"]["TP2 CP1 EP1 MBS1"]
    assert any("what it finished is used" in note for note in result["notes"])
    assert result["top"]


def test_a_script_that_never_trains_is_told_so(tmp_path):
    text = SCRIPT.read_text()
    (tmp_path / "no_training.py").write_text(text[: text.index("    pretrain(\n")] + "    parse_and_validate_args()\n")
    code, text = tune(tmp_path / "work", script=tmp_path / "no_training.py")
    assert code == 2, text[-3000:]
    assert "ended without coming to training" in text
    assert "Traceback" not in text


def test_interrupt_keeps_what_was_traced_and_a_second_tuner_is_refused(tmp_path):
    work = tmp_path / "work"
    first = start(work)
    try:
        wait_until(lambda: points_of_traces(work), first)
        code, text = tune(work)
        assert (code, "another tuning run is at work" in text) == (2, True), text[-2000:]
        assert str(first.pid) in text
        first.send_signal(signal.SIGINT)
        code, text = finish(first, 60)
        assert (code, "finished traces and measurements are kept" in text) == (130, True), text[-2000:]
        assert_no_child_is_left(work)
    finally:
        first.kill()
    kept = points_of_traces(work)
    again = start(work, "--auto-tuning-log-level", "info")
    try:
        for line in again.stdout:
            if "points were traced before" in line:
                assert int(line.split("]")[1].split()[0]) >= len(kept) > 0
                break
        else:
            pytest.fail("nothing was reused")
    finally:
        again.send_signal(signal.SIGINT)
        finish(again, 60)


def wait_until(happened, process):
    deadline = time.monotonic() + 300
    while not happened() and time.monotonic() < deadline and process.poll() is None:
        time.sleep(0.2)
    assert process.poll() is None


def launches_of(work):
    return json.loads((work / "launches.json").read_text())["launches"]


def points_of_traces(work):
    return list(work.glob("traces/*/TP*.json"))


def assert_no_child_is_left(work):
    for status in Path("/proc").glob("[0-9]*/environ"):
        try:
            assert str(work).encode() not in status.read_bytes(), f"{status} is still there"
        except OSError:
            continue


def test_two_nodes_sample_the_links_between_them(tmp_path):
    words = ("--nnodes", 2, "--nproc-per-node", 1, "--master-port", free_port())
    other = start(tmp_path / "other", *words, "--node-rank", 1)
    try:
        code, text = tune(tmp_path / "work", *words, "--node-rank", 0)
        assert code == 0, text[-4000:]
        assert not any("between nodes were never sampled" in note for note in result_of(tmp_path / "work")["notes"])
        code, text = finish(other, 60)
        assert (code, "the results are on node 0" in text) == (0, True), text[-2000:]
    finally:
        other.kill()


def test_a_node_that_does_not_come_is_named(tmp_path):
    words = ("--nnodes", 2, "--nproc-per-node", 1, "--master-port", free_port(), "--auto-tuning-launch-timeout-s", 2)
    code, text = tune(tmp_path / "work", *words)
    assert code == 2, text[-2000:]
    assert "node 1 of 2 did not come" in text


def test_a_node_that_dies_in_a_launch_is_named(tmp_path):
    script = script_with(tmp_path, "import time\n    if os.environ.get('OOTB_OPTIMIZER_PROFILING'): time.sleep(3600)")
    words = ("--nnodes", 2, "--nproc-per-node", 1, "--master-port", free_port())
    other = start(tmp_path / "other", *words, "--node-rank", 1, script=script)
    main = start(tmp_path / "work", *words, "--node-rank", 0, script=script)
    try:
        wait_until(lambda: list((tmp_path / "other").glob("logs/node1/calibrate-*.log")), main)
        other.kill()
        code, text = finish(main, 300)
        assert (code, "Traceback" in text) == (2, False), text[-3000:]
        assert "node 1 of 2 does not answer any more" in text
        assert_no_child_is_left(tmp_path)
    finally:
        other.kill()
        main.kill()
    (launch,) = (item for item in launches_of(tmp_path / "work") if item["purpose"] == "calibrate")
    assert (launch["status"], launch["node_rank"]) == ("failed", 1)


def test_launches_that_hang_are_ended_and_what_was_found_stays(tmp_path):
    script = script_with(
        tmp_path, "import time\n    if os.path.exists(__file__ + '.hang'): print('hanging', flush=True), time.sleep(3600)"
    )
    code, text = tune(tmp_path / "work", script=script)
    assert code == 0, text[-4000:]
    found = result_of(tmp_path / "work")["top"]
    (tmp_path / f"{script.name}.hang").touch()
    code, text = tune(tmp_path / "work", "--auto-tuning-verify", "--auto-tuning-launch-timeout-s", 20, script=script)
    assert code == 0, text[-4000:]
    result = result_of(tmp_path / "work")
    assert [plan["label"] for plan in result["top"]] == [plan["label"] for plan in found]
    assert {item["status"] for item in result["verified"]} == {"timed_out"}
    launches = launches_of(tmp_path / "work")
    assert [launch["status"] for launch in launches] == ["timed_out"] * len(found)
    assert all("given up after" in launch["last_lines"][-1] for launch in launches)
    assert_no_child_is_left(tmp_path)


def test_a_trace_that_hangs_ends_in_a_message(tmp_path):
    script = tmp_path / "sleeps.py"
    text = SCRIPT.read_text()
    waits = "    import os, time\n    if os.environ.get('OOTB_OPTIMIZER_PARSE_MODEL'): time.sleep(3600)\n    pretrain(\n"
    script.write_text(text.replace("    pretrain(\n", waits))
    code, text = tune(tmp_path / "work", "--auto-tuning-launch-timeout-s", 3, script=script)
    assert (code, "Traceback" in text) == (2, False), text[-2000:]
    assert "did not come to training on pretended ranks" in text
    assert "timed out on node 0" in text
    assert_no_child_is_left(tmp_path)


def test_a_script_that_cannot_be_read_again_is_named(tmp_path):
    run = subprocess.run(
        [sys.executable, "-", *GPT, "--auto-tuning-work-dir", tmp_path / "work"], input=SCRIPT.read_text(), text=True,
        capture_output=True, cwd=ROOT, env={**os.environ, **ENVIRONMENT}, timeout=300,
    )  # fmt: skip
    assert (run.returncode, "Traceback" in run.stderr) == (2, False), run.stderr[-2000:]
    assert "'-' is not a file that can be read. Start it as python SCRIPT.py" in run.stderr


def test_ranks_that_fill_no_node_end_in_one_line(tmp_path):
    code, text = tune(tmp_path / "work", "--auto-tuning-ranks", 3)
    assert (code, "the nearest are 2 and 4" in text, "Traceback" in text) == (2, True, False), text[-2000:]


@pytest.mark.parametrize("content", [b"no sqlite at all" * 100, None])
def test_a_knowledge_base_that_cannot_be_read_is_named_before_anything_starts(tmp_path, content):
    path = tmp_path / "base.sqlite"
    if content is not None:
        path.write_bytes(content)
    else:
        import sqlite3

        with sqlite3.connect(path) as connection:
            connection.execute("create table about (schema_version integer not null)")
            connection.execute("insert into about values (99)")
    code, text = tune(tmp_path / "work", "--auto-tuning-knowledge-base", path)
    assert code == 2, text[-2000:]
    assert f"knowledge base {path}" in text
    assert "Traceback" not in text
    assert not (tmp_path / "work/launches.json").exists()

