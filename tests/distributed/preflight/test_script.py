"""``--auto-parallel-preflight`` on a user's script: a report, or one line with the reason for a missing one."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
from example_plan import example_plan
from forked_python import forked_python
from native_runs import plan_of
from script_ranks import GPT, GPT_FLAGS, MARKS, environment

from mindspeed_autoparallel.spec.sharded import ShardedDecisions, ShardSizes

pytestmark = MARKS

FLAGS = f"{GPT_FLAGS} --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --sequence-parallel"
IN_SAMPLES = "--train-samples 160 --lr-warmup-samples 16 --lr-decay-samples 100 --rampup-batch-size 4 4 32"
MAIN = 'if __name__ == "__main__":\n'
PEERS = f"""{MAIN}    import datetime
    import torch
    torch.distributed.init_process_group("nccl")
    names = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(names, "me")
    assert len(names) == 8 and all(names)
    torch.distributed.monitored_barrier(timeout=datetime.timedelta(seconds=5))
"""
COUNTS = f"""{PEERS}    ones = torch.ones(1)
    torch.distributed.all_reduce(ones)
    assert int(ones) == 8, f"only {{int(ones)}} of 8 ranks answered"
"""
OBJECT = f"""{PEERS}    told = [{{"path": "data"}} if torch.distributed.get_rank() == 0 else None]
    torch.distributed.broadcast_object_list(told, src=0)
    print(told[0]["path"])
"""
STORE = f"""{PEERS}    from datetime import timedelta
    rank, port = torch.distributed.get_rank(), int(os.environ["MASTER_PORT"])
    store = torch.distributed.TCPStore("localhost", port, 8, rank == 0, timedelta(seconds=300))
    store.wait(["ready"])
"""
FILE = f"""{PEERS}    import time
    while not os.path.exists("made_by_rank_0"):
        time.sleep(0.1)
"""
ONLY_FIRST_BUILDS = """    built = datasets_provider

    def datasets_provider(num_samples, vp_stage=None):
        path = "data.built"
        if torch.distributed.get_rank() == 0:
            open(path, "w").write("built")
        torch.distributed.barrier()
        assert os.path.exists(path), "rank 0 has not built the data"
        os.remove(path)
        return built(num_samples)

    datasets_provider.is_distributed = True
"""
NO_STEP = f"{MAIN}    raise SystemExit(0)\n"


def in_children(beginning: str) -> str:
    """Return ``beginning`` for the ranks that are played: the parent never comes to what needs peers."""
    lines = beginning.removeprefix(MAIN).splitlines()
    guard = f"{MAIN}    import os\n    if os.environ.get('MINDSPEED_AUTOPARALLEL_ALONE'):\n"
    return guard + "".join(f"    {line}\n" for line in lines)


@pytest.fixture(autouse=True)
def _training_is_there() -> None:
    pytest.importorskip("megatron.training")


def preflight(folder: Path, beginning: str, *words: str, flags: str = FLAGS) -> tuple[int, str, dict[str, Any]]:
    """Return exit code, output and result of the pre-flight of the example with another ``beginning``."""
    text = GPT.read_text()
    assert MAIN in text
    script = folder / "train.py"
    script.write_text(text.replace(MAIN, beginning))
    done = subprocess.run(
        [forked_python(), str(script), *flags.split(), "--simulated-nproc-per-node", "8", *words],
        env=environment(),
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=800,
        check=False,
    )
    result = folder / "preflight_result.json"
    output = done.stdout + done.stderr
    return done.returncode, output, json.loads(result.read_text()) if result.exists() else {}


def test_a_script_that_talks_to_its_peers_first_is_run_and_leaves_no_process(tmp_path: Path) -> None:
    beginning = in_children(PEERS) + ONLY_FIRST_BUILDS
    flags = FLAGS.replace("--train-iters 20", IN_SAMPLES)
    code, output, result = preflight(tmp_path, beginning, "--auto-parallel-preflight", flags=flags)
    assert code == 0, output[-3000:]
    assert [report["run"]["rank"] for report in result["ranks"]] == [0, 4]
    assert result["num_ranks_covered"] == 8 and result["verdict"] == "fits" and result["replay_us"] > 0
    for report in result["ranks"]:
        run = report["run"]
        assert run["num_steps"] == 3 and 0 < run["resident_bytes"] < run["peak_bytes"]
        assert [item["microbatch"] for item in run["passes"] if item["kind"] == "B"] == [0, 1, 2, 3]
        assert run["peak_bytes"] == max(run["places"].values())
    assert "lm loss" not in output and "verdict: fits" in output
    alive = subprocess.run(["pgrep", "-f", str(tmp_path)], capture_output=True, text=True, check=False)
    assert not alive.stdout.strip()


@pytest.mark.long
@pytest.mark.parametrize(
    ("beginning", "said"),
    [
        (COUNTS, "only 1 of 8 ranks answered"),
        (OBJECT, "waits for an object that rank 0 broadcasts"),
        (STORE, "has waited 20 s for a peer at"),
        (FILE, "has waited 20 s for a peer at"),
        (NO_STEP, "the script ended by itself before any step was done"),
    ],
    ids=("a count of ranks", "an object", "a store", "a file", "no step"),
)
def test_a_script_that_cannot_run_alone_is_reported_in_a_line(beginning: str, said: str, tmp_path: Path) -> None:
    words = ("--auto-parallel-preflight", "--auto-parallel-preflight-ranks", "4")
    code, output, result = preflight(tmp_path, in_children(beginning), *words)
    assert code == 1, output[-3000:]
    (verdict,) = [line for line in output.splitlines() if line.startswith("verdict:")]
    assert said in verdict and result["verdict"] == "unknown"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--auto-parallel-preflight", "no_plan.json"], "no_plan.json"),
        (["--auto-parallel-preflight", "other_model.json"], "other_model.json"),
        (["--auto-parallel-preflight", "other_trainer.json"], "other_trainer.json"),
        (["--auto-parallel-preflight", "--auto-parallel-preflight-ranks", "8"], "has ranks 0 to 7"),
        (["--auto-parallel-preflight", "--auto-parallel-memory-limit-mib", "-1"], "above 0"),
    ],
)
def test_wrong_input_ends_before_anything_starts(words: list[str], said: str, tmp_path: Path) -> None:
    example_plan().write(tmp_path / "other_model.json")
    sizes = ShardSizes(num_devices=8, fully_shard_size=8, expert_shard_size=8)
    plan_of(ShardedDecisions(sizes=sizes, groups=(), policies={})).write(tmp_path / "other_trainer.json")
    code, output, result = preflight(tmp_path, MAIN, *words)
    last = output.splitlines()[-1]
    assert code == 2 and said in last and not result and "Traceback" not in output, output[-3000:]
    assert not (tmp_path / "auto_parallel_work" / "preflight").exists()


def test_a_layout_that_megatron_refuses_ends_with_the_first_rank(tmp_path: Path) -> None:
    flags = FLAGS.replace("--pipeline-model-parallel-size 2", "--pipeline-model-parallel-size 4 --num-layers 6")
    code, output, result = preflight(tmp_path, MAIN, "--auto-parallel-preflight", flags=flags)
    last = output.splitlines()[-1]
    assert code == 2 and "Megatron refuses these flags" in last and not result, output[-3000:]
    assert "Traceback" not in output
    assert [log.name for log in (tmp_path / "auto_parallel_work" / "logs").glob("*.log")] == [
        "preflight-rank0.rank0.log"
    ]


@pytest.mark.long
def test_a_plan_of_1024_devices_runs_its_first_last_and_fullest_rank(tmp_path: Path) -> None:
    flags = FLAGS.replace("--num-layers 4", "--num-layers 24").replace("-size 8 ", "-size 1024 ")
    flags = flags.replace(" --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2", "")
    search = ["--auto-parallel-mm", "--profile-source", "analytic", "--profile-device", "H100", "--simulated-nnodes"]
    code, output, _ = preflight(tmp_path, MAIN, *search, "128", "--auto-parallel-memory-limit-mib", "98", flags=flags)
    assert code == 0, output[-3000:]
    plan = json.loads((tmp_path / "plan.json").read_text())
    assert plan["layout"]["pipeline_size"] > 1, plan["layout"]
    words = ["--auto-parallel-preflight", "plan.json", "--auto-parallel-preflight-ranks", "ends"]
    code, output, result = preflight(tmp_path, MAIN, *words, "--auto-parallel-memory-limit-mib", "4096", flags=flags)
    assert code == 0 and result["world_size"] == 1024, output[-3000:]
    fullest = max(plan["memory"], key=lambda memory: memory["peak_bytes"])["pipeline_rank"]
    stages = {report["pipeline_rank"] for report in result["ranks"]}
    assert stages == {0, plan["layout"]["pipeline_size"] - 1, fullest}
    print(plan["layout"], fullest, [(report["run"]["rank"], report["run"]["seconds"]) for report in result["ranks"]])
    assert all(report["run"]["status"] == "ok" and report["run"]["seconds"] < 120 for report in result["ranks"])
