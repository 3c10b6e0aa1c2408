"""What goes wrong is recorded and passed over, or named; nothing finished is lost, and nobody shares a work dir."""

import json
import signal
import time
from pathlib import Path

import pytest
from auto_tuning import SCRIPT, finish, result_of, start, tune
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
    launches = {launch["id"]: launch for launch in json.loads((tmp_path / "work/launches.json").read_text())["launches"]}
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
        deadline = time.monotonic() + 300
        while not points_of_traces(work) and time.monotonic() < deadline and first.poll() is None:
            time.sleep(0.2)
        assert first.poll() is None
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

