"""``--auto-parallel-mm`` as a user runs it: plain python, the reference training, real processes on gloo."""

import contextlib
import json
import os
import subprocess
from pathlib import Path

import pytest
from forked_python import forked_python, program_of

from mindspeed_autoparallel.runtime.launch.ports import reserved_port

pytestmark = [pytest.mark.distributed, pytest.mark.torch, pytest.mark.megatron]
ROOT = Path(__file__).parents[3]
EXAMPLE = ROOT / "docs/examples/qwen2vl_tiny"
FLAGS = f"""--use-mcore-models --num-layers 4 --hidden-size 64 --ffn-hidden-size 160 --num-attention-heads 4
    --tensor-model-parallel-size 1 --pipeline-model-parallel-size 1 --micro-batch-size 1
    --tokenizer-type NullTokenizer --vocab-size 512 --seq-length 128 --max-position-embeddings 1024
    --make-vocab-size-divisible-by 1 --normalization RMSNorm --swiglu --lr 1.0e-3 --weight-decay 0 --clip-grad 1.0
    --train-iters 4 --seed 42 --use-distributed-optimizer --no-gradient-accumulation-fusion
    --no-masked-softmax-fusion --log-interval 1 --eval-interval 10000 --eval-iters 0
    --mm-data {EXAMPLE / "data.json"} --mm-model {EXAMPLE / "model.json"} --mm-tool {EXAMPLE / "tools.json"}""".split()


@pytest.fixture(autouse=True)
def _examples_are_here():
    pytest.importorskip("megatron.training")


def start(*words, out):
    """A search."""
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "MINDSPEED_AUTOPARALLEL_DEVICE": "cpu",
        "SECRET_TOKEN": "hunter2",
    }
    # Words come last: of a flag given twice, the last one counts.
    places = ["--auto-parallel-work-dir", str(out / "work"), "--auto-parallel-output-dir", str(out)]
    command = [forked_python(), "docs/examples/pretrain_vlm.py", *FLAGS, *places, *map(str, words)]
    return subprocess.Popen(
        command, cwd=ROOT, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )


def finish(process, timeout=300):
    text, _ = process.communicate(timeout=timeout)
    return process.returncode, text


def search(out, *words, nodes=1, per_node=4, batch=4):
    return start(
        "--auto-parallel-mm",
        "--global-batch-size",
        batch,
        "--simulated-nnodes",
        nodes,
        "--simulated-nproc-per-node",
        per_node,
        *words,
        out=out,
    )


def test_search_measures_once_plans_and_its_plan_is_trained(tmp_path):
    code, text = finish(search(tmp_path, "--nproc-per-node", 2, batch=2, per_node=2))
    assert code == 0, text[-3000:]
    result = json.loads((tmp_path / "auto_parallel_search_optimal_config.json").read_text())
    assert {"parallel_config", "layer_placement", "layer_recompute", "e2e_time", "throughput"} <= set(result)
    pipeline = result["parallel_config"]["PP"]
    for key, layers in (("vit_layer_placement", 4), ("llm_layer_placement", 4)):
        assert len(result["layer_placement"][key]) == pipeline
        assert sum(result["layer_placement"][key]) == layers
    assert "<html" in (tmp_path / "auto_parallel_report.html").read_text()
    assert json.loads((tmp_path / "auto_parallel_trace.json").read_text())["traceEvents"]
    assert not any("hunter2" in log.read_text(errors="replace") for log in (tmp_path / "work/logs").iterdir())

    # Again, for another cluster: nothing is measured twice.
    (tmp_path / "again").mkdir()
    again = search(
        tmp_path / "again",
        "--nproc-per-node",
        2,
        "--auto-parallel-work-dir",
        tmp_path / "work",
        batch=2,
        per_node=1,
        nodes=2,
    )
    code, text = finish(again)
    assert code == 0, text[-3000:]
    assert "were measured before and are reused" in text
    assert "in one launch" not in text

    command = [forked_python(), "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += ["docs/examples/pretrain_vlm.py", *FLAGS, "--global-batch-size", "2"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MINDSPEED_AUTOPARALLEL_DEVICE": "cpu"}
    run = subprocess.run(
        [*command, "--auto-parallel-plan", str(tmp_path / "plan.json"), "--auto-parallel-check-steps", "3"],
        cwd=ROOT,
        env=environment,
        text=True,
        capture_output=True,
        timeout=300,
    )
    assert run.returncode == 0, run.stderr[-3000:]
    assert "plan against the first steps of this training" in run.stdout
    assert "iteration        4/       4" in run.stdout


@pytest.mark.parametrize("per_node", [1, 4], ids=("two real ranks", "one rank played, links measured"))
def test_two_nodes_measure_together(tmp_path, per_node):
    with reserved_port() as port:
        common = ("--nnodes", 2, "--nproc-per-node", 1, "--master-port", port, "--micro-batch-size", 1)
        other = search(tmp_path, *common, "--node-rank", 1, batch=2, nodes=2, per_node=per_node)
        main = search(tmp_path, *common, "--node-rank", 0, batch=2, nodes=2, per_node=per_node)
        code, text = finish(main)
    assert code == 0, text[-3000:]
    code, said = finish(other, timeout=60)
    assert (code, "done after 1 launches; the results are on node 0" in said) == (0, True), said[-2000:]
    profile = json.loads((tmp_path / "work/profile.json").read_text())
    inside, between, links = *(profile["device"][tier] for tier in ("intra", "inter")), profile["provenance"]["links"]
    if per_node == 1:
        assert "links inside a node were not measured" in links and inside == between
        return
    assert links == "between nodes measured, one rank of each; inside a node of CPU, from the device catalogue"
    assert {"p2p", "all_reduce", "all_gather", "all_to_all"} <= set(between["operations"]) and inside != between
    assert {path.name.split("_")[0] for path in tmp_path.glob("work/measurements/*/TP*.json")} == {"TP1", "TP2"}
    rows = json.loads(next(tmp_path.glob("work/links/*/links.json")).read_text())["rows"]
    assert {(row["tier"], row["ranks"]) for row in rows} == {("inter", 2)}


def test_too_little_memory_is_reported_with_the_missing_amount(tmp_path):
    code, text = finish(search(tmp_path, "--nproc-per-node", 1, "--auto-parallel-memory-limit-mib", 1, batch=1))
    assert code == 3, text[-3000:]
    # One device plays every tensor-parallel size that the heads allow, and the links are the catalogue's.
    assert {path.name.split("_")[0] for path in tmp_path.glob("work/measurements/*/TP*.json")} == {"TP1", "TP2"}
    profile = json.loads((tmp_path / "work/profile.json").read_text())
    assert profile["provenance"]["links"] == "of CPU, from the device catalogue"
    assert "InfeasiblePlan" in text
    assert "Traceback" not in text


def tree_of(pid):
    """Return a process and all that it started, itself first; what runs for a stand-in of Python is of it."""
    children, program = [], program_of(pid)
    for task in Path(f"/proc/{program}/task").iterdir():
        with contextlib.suppress(FileNotFoundError):  # a thread that has ended since it was listed
            children += [int(word) for word in (task / "children").read_text().split()]
    return [*{pid: None, program: None}, *(one for child in children for one in tree_of(child))]


def test_a_second_search_is_refused_and_interrupt_leaves_no_child_and_keeps_what_was_measured(tmp_path):
    import signal
    import time

    process = search(tmp_path, "--nproc-per-node", 2)
    measured = tmp_path / "work/measurements"
    deadline = time.monotonic() + 200
    while not list(measured.glob("*/TP*.json")) and time.monotonic() < deadline and process.poll() is None:
        time.sleep(0.2)
    stopped = tree_of(process.pid)  # until the second has come, however long that takes
    for pid in stopped:
        os.kill(pid, signal.SIGSTOP)
    before = {path: path.read_bytes() for path in measured.glob("*/TP*.json")}
    try:
        code, text = finish(search(tmp_path, "--nproc-per-node", 2))
    finally:
        process.send_signal(signal.SIGINT)
        for pid in stopped:
            os.kill(pid, signal.SIGCONT)
    assert (code, "Traceback" in text) == (2, False), text[-2000:]
    assert f"{tmp_path / 'work'}" in text and str(program_of(process.pid)) in text
    assert all(path.read_bytes() == content for path, content in before.items())
    code, text = finish(process, timeout=60)
    assert code == 130, text[-2000:]
    assert "will be reused" in text
    assert list(measured.glob("*/TP*.json"))
    for status in Path("/proc").glob("[0-9]*/environ"):
        try:
            assert str(tmp_path).encode() not in status.read_bytes(), f"{status} is still there"
        except OSError:
            continue
