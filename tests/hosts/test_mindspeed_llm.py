"""MindSpeed-LLM for real: its own validators and its own pretrain_gpt.py on CPU (tests/hosts/README.md)."""

import importlib.util
import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from flag_sets import drawn_flag_sets
from launch_scripts import CASES, FURTHER, drawn_launches

_spec = importlib.util.spec_from_file_location("mindspeed_cells", Path(__file__).with_name("mindspeed_cells.py"))
cells = importlib.util.module_from_spec(_spec)
sys.modules["mindspeed_cells"] = cells
_spec.loader.exec_module(cells)

MISSING = cells.missing(cells.LLM_SOURCES)
TOLERANCE = 1e-5
PORT = 23600
FLAGS = shlex.split("""
    --use-mcore-models --tensor-model-parallel-size 1 --pipeline-model-parallel-size 1 --micro-batch-size 1
    --global-batch-size 8 --num-layers 4 --hidden-size 64 --ffn-hidden-size 160 --num-attention-heads 4 --seq-length 64
    --max-position-embeddings 64 --make-vocab-size-divisible-by 8 --vocab-size 4096 --tokenizer-type NullTokenizer
    --mock-data --lr 1e-3 --train-iters 3 --lr-decay-style constant --eval-interval 1000 --eval-iters 0
    --save-interval 10000 --log-interval 1 --transformer-impl local --use-flash-attn --use-fused-rmsnorm
    --use-fused-swiglu --use-rotary-position-embeddings --position-embedding-type rope --normalization RMSNorm --swiglu
    --disable-bias-linear --untie-embeddings-and-output-weights --no-masked-softmax-fusion
    --no-gradient-accumulation-fusion --attention-dropout 0 --hidden-dropout 0 --seed 42 --num-workers 0
    --use-distributed-optimizer --distributed-backend gloo --no-shared-storage --ckpt-format torch
    --distributed-timeout-minutes 3
""")
NODE = ["--nnodes", "1", "--nproc-per-node", "2", "--node-rank", "0", "--master-addr", "localhost"]
pytestmark = [pytest.mark.distributed, pytest.mark.timeout(1200), pytest.mark.skipif(bool(MISSING), reason=MISSING)]


def test_the_hosts_own_validators_read_our_words_for_uneven_splits(tmp_path):
    cases = [([1, 3], 1), ([4, 3, 5, 2], 1), ([2, 1, 3, 2], 2), ([1, 1, 1, 2, 2, 1, 3, 1], 4)]
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(cells.HERE / "llm_words.py")],
        input=json.dumps(cases),
        capture_output=True,
        text=True,
        timeout=cells.TIMEOUT_S,
        cwd=tmp_path,
        env=cells.environment(cells.LLM_SOURCES),
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert json.loads(done.stdout.splitlines()[-1]) == [counts for counts, _ in cases]


def test_the_hosts_own_parser_and_validators_accept_the_flags_of_drawn_plans(tmp_path):
    drawn = {name: (words, devices) for name, words, devices in drawn_launches(tmp_path, "910B", CASES)}
    for one in drawn_flag_sets(3, every=5):
        if one.host == "mindspeed-llm":
            drawn[one.name] = [*one.words, *FURTHER], one.num_devices
    failed = cells.refused(cells.LLM_SOURCES, "mindspeed_llm", drawn)
    assert list(failed) == ["illegal"], failed


def run(folder, *words, num_processes=0, port=PORT):
    done = cells.run(
        folder, cells.LLM_SOURCES, ["pretrain_gpt.py", *FLAGS, *words], num_processes=num_processes, port=port
    )
    print(f"{' '.join(words)}: exit code {done.exit_code}, {done.seconds:.0f} s, losses {done.losses}")
    return done


@pytest.fixture(scope="module")
def host(tmp_path_factory):
    """A folder with the host's script, whose every layout starts from the same parameters."""
    folder = tmp_path_factory.mktemp("mindspeed_llm")
    text = (Path(os.environ["MINDSPEED_LLM_SOURCES"]) / "pretrain_gpt.py").read_text()
    main = 'if __name__ == "__main__":\n'
    assert main in text
    same = (
        f"    import sys\n    sys.path.append({str(cells.HERE)!r})\n    import same_start\n    same_start.install()\n"
    )
    (folder / "pretrain_gpt.py").write_text("import mindspeed_autoparallel\n" + text.replace(main, main + same))
    return folder


@pytest.fixture(scope="module")
def alone(host):
    return run(host, num_processes=1).losses


@pytest.fixture(scope="module")
def plan(host):
    """The best plan with two stages and recompute, from a profile that is measured on two processes."""
    place = ["--master-port", str(PORT + 20), "--auto-parallel-work-dir", "work", "--auto-parallel-output-dir", "."]
    cluster = ["--simulated-nnodes", "1", "--simulated-nproc-per-node", "2"]
    found = run(host, "--auto-parallel-mm", *NODE, *place, *cluster)
    assert found.exit_code == 0, found.output[-3000:]
    assert found.output.count("in one launch") == 1
    plan = cells.two_stages(host / "work" / "profile.json", 8)
    plan.write(host / "two.json")
    return plan


def test_a_model_is_trained_by_an_uneven_list_of_layers_as_by_one_process(host, alone, plan):
    assert any(stage.recompute for stage in plan.stages)
    planned = ["--auto-parallel-plan", "two.json", "--auto-parallel-check-steps", "3"]
    layers = ",".join(map(str, plan.layers_of("text_decoder")))
    if len(set(plan.layers_of("text_decoder"))) > 1:
        told = run(host, *planned, num_processes=2, port=PORT + 40)
        assert told.exit_code != 0
        assert f"Add --num-layer-list {layers}" in told.output
        planned += ["--num-layer-list", layers]
    done = run(host, *planned, num_processes=2, port=PORT + 60)
    assert done.exit_code == 0, done.output[-3000:]
    assert "plan against the first steps" in done.output
    assert len(alone) == 3
    assert done.losses == pytest.approx(alone, rel=TOLERANCE)


def test_tuning_traces_and_measures_and_its_first_command_trains_as_one_process_does(host, alone):
    words = ["--auto-tuning", "--auto-tuning-ranks", "2", *NODE, "--master-port", str(PORT + 80)]
    found = run(host, *words, "--auto-tuning-work-dir", "tuning")
    assert found.exit_code == 0, found.output[-3000:]
    assert "could not be traced" not in found.output
    best = json.loads((host / "tuning" / "auto_tuning_result.json").read_text())["top"][0]
    launcher, *pasted = shlex.split(best["command"])
    assert launcher == "torchrun"
    done = cells.run(host, cells.LLM_SOURCES, ["-m", "torch.distributed.run", *pasted])
    assert done.exit_code == 0, done.output[-3000:]
    assert done.losses == pytest.approx(alone, rel=TOLERANCE)


def test_the_fsdp2_trainer_refuses_our_flags_in_a_line(tmp_path):
    """Its parser drops words that it does not know: a real training would have started."""
    sources = Path(os.environ["MINDSPEED_LLM_SOURCES"])
    script = tmp_path / "train_fsdp2.py"
    script.write_text("import mindspeed_autoparallel\n" + (sources / script.name).read_text())
    example = next((sources / "examples" / "fsdp2" / "qwen3").glob("*.yaml"))
    done = cells.run(tmp_path, cells.LLM_SOURCES, [script.name, str(example), "--auto-parallel-mm"])
    assert done.exit_code == 2, done.output[-2000:]
    assert done.output.splitlines()[-1].startswith("ConfigError: --auto-parallel-mm works through Megatron")
    assert "Traceback" not in done.output
