"""MindSpeed-MM for real: its own pretrain_vlm.py with one import line, on a tiny model (tests/hosts/README.md)."""

import importlib.util
import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from launch_scripts import launched

from mindspeed_autoparallel.cli.main import main
from mindspeed_autoparallel.spec import Plan


def load(name):
    spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name(f"{name}.py"))
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


cells, tiny = load("mindspeed_cells"), load("tiny_qwen2vl")
MISSING = cells.missing(cells.MM_SOURCES)
pytestmark = [pytest.mark.distributed, pytest.mark.timeout(3000), pytest.mark.skipif(bool(MISSING), reason=MISSING)]
_DIGEST = """
    import hashlib
    from megatron.core.distributed import DistributedDataParallel

    (model,) = (each for each in gc.get_objects() if isinstance(each, DistributedDataParallel))
    digest = hashlib.sha256()
    for parameter in model.parameters():
        digest.update(parameter.detach().numpy().tobytes())
    print("parameters", digest.hexdigest(), flush=True)
"""
TOLERANCE = 1e-5
PORT = 23400
FLAGS = shlex.split("""
    --use-mcore-models --tensor-model-parallel-size 1 --pipeline-model-parallel-size 1 --context-parallel-size 1
    --micro-batch-size 1 --global-batch-size 4 --train-iters 6 --tokenizer-type NullTokenizer --vocab-size 512
    --seq-length 256 --make-vocab-size-divisible-by 1 --normalization RMSNorm --use-fused-rmsnorm --swiglu
    --use-fused-swiglu --no-masked-softmax-fusion --lr 1.0e-4 --lr-decay-style cosine --weight-decay 0 --clip-grad 0.0
    --no-gradient-accumulation-fusion --seed 42 --use-distributed-optimizer --use-flash-attn --no-load-optim
    --no-load-rng --no-save-optim --no-save-rng --num-workers 0 --num-layers 4 --hidden-size 64 --num-attention-heads 4
    --max-position-embeddings 1024 --log-interval 1 --save-interval 10000 --eval-interval 10000 --eval-iters 1
    --ckpt-format torch --distributed-backend gloo --variable-seq-lengths --distributed-timeout-minutes 3
    --mm-data data.json
""")


def test_the_hosts_own_parser_and_validators_accept_the_flags_of_a_plan(tmp_path):
    """One stage, beside a tiny model.json: what more stages hold stands there."""
    config, script = tmp_path / "config.json", tmp_path / "launch.sh"
    vision = {"depth": 8, "hidden_size": 1280, "intermediate_size": 3420, "num_heads": 16, "patch_size": 14}
    decoder = {"num_hidden_layers": 8, "hidden_size": 2048, "num_attention_heads": 16, "num_key_value_heads": 2}
    sizes = {"model_type": "qwen2_5_vl", "intermediate_size": 11008, "vocab_size": 151936, "vision_config": vision}
    config.write_text(json.dumps({**decoder, **sizes}))
    command = [
        "plan",
        "--profile-source",
        "analytic",
        "--model",
        str(config),
        "--device",
        "910B",
        "--images-per-sample",
        "1",
    ]
    command += ["--seq-length", "4096", "--nnodes", "1", "--nproc-per-node", "8", "--global-batch-size", "64"]
    command += ["--script", str(script), "--out", str(tmp_path / "plan.json"), "--time-limit-s", "20"]
    assert main(command) == 0
    words = launched(script, tmp_path)
    flags = words[words.index("pretrain_vlm.py") + 1 :]
    folder = tmp_path / "model"
    folder.mkdir()
    sources = Path(os.environ["MINDSPEED_MM_SOURCES"])
    tiny.write(folder, sources, "qwen2.5vl")
    model = [
        *FLAGS,
        "--mm-tool",
        str(sources / "mindspeed_mm/tools/tools.json"),
        "--mm-model",
        str(folder / "model.json"),
    ]
    drawn = {"plan": ([*model, *flags], 8), "illegal": ([*model, *flags, "--tensor-model-parallel-size", "3"], 8)}
    failed = cells.refused(cells.MM_SOURCES, "mindspeed_mm", drawn, folder)
    assert list(failed) == ["illegal"], failed


def run(folder, *words, num_processes=0, port=PORT, model="model.json", script="pretrain_vlm.py"):
    tools = Path(os.environ["MINDSPEED_MM_SOURCES"]) / "mindspeed_mm" / "tools" / "tools.json"
    files = ["--mm-tool", str(tools), "--mm-model", model]
    command = [script, *FLAGS, *files, *words]
    done = cells.run(folder, cells.MM_SOURCES, command, num_processes=num_processes, port=port)
    assert done.exit_code == 0, done.output[-3000:]
    print(f"{' '.join(words)}: {done.seconds:.0f} s, losses {done.losses}")
    return done


def resplit(host, target, *words):
    """Bring the checkpoint of one process into another layout by the command that users have."""
    command = [sys.executable, "-m", "mindspeed_autoparallel", "convert", "resplit", "checkpoint", target, *words]
    subprocess.run([*command, "--hf-dir", "hf", "--overwrite"], cwd=host, check=True, timeout=cells.TIMEOUT_S)
    return ["--load", target, "--finetune"]


@pytest.fixture(scope="module", params=tiny.MODELS)
def host(request, tmp_path_factory):
    """A folder with script, data, model and the checkpoint of one process's first step."""
    folder = tmp_path_factory.mktemp("mindspeed_mm")
    tiny.write(folder, Path(os.environ["MINDSPEED_MM_SOURCES"]), request.param)
    run(folder, "--save", "checkpoint", "--train-iters", "1", num_processes=1)
    return folder


@pytest.fixture(scope="module")
def alone(host):
    """Losses of one process from that checkpoint on."""
    return run(host, "--load", "checkpoint", "--finetune", num_processes=1).losses


def test_a_model_is_measured_and_trained_by_its_plan_as_by_one_process(host, alone):
    """From measuring (TP and MBS, two processes) to plan.json; then two uneven stages with recompute of their own."""
    place = ["--master-port", str(PORT + 20), "--auto-parallel-work-dir", "work", "--nproc-per-node", "2"]
    found = run(host, "--auto-parallel-mm", *place, "--simulated-nnodes", "1", "--simulated-nproc-per-node", "2")
    assert found.output.count("in one launch") == 1
    assert "TP2" in found.output
    planned = Plan.read(host / "plan.json")
    assert [module.name for module in planned.model.modules] == ["image_encoder", "text_decoder"]
    plan = cells.two_stages(host / "work" / "profile.json", 4)
    plan.write(host / "two.json")
    assert any(stage.recompute for stage in plan.stages)
    vision, text = (",".join(map(str, plan.layers_of(name))) for name in ("image_encoder", "text_decoder"))
    weights = resplit(host, "two", "--vit-pp-layers", vision, "--llm-pp-layers", text)
    done = run(host, *weights, "--auto-parallel-plan", "two.json", num_processes=2, port=PORT + 40)
    assert done.output.count("training with the plan") == 1
    assert "plan against the first steps of this training" in done.output
    print(done.output[done.output.index("plan against the first steps") :][:400])
    assert done.losses == pytest.approx(alone, rel=TOLERANCE)


def hetero_weights(host):
    """The language model cut in two, the encoder whole, in the layout that the host's own converter writes."""
    return resplit(host, "hetero", "--tp-size", "2", "--vit-tp-size", "1", "--hetero")


def hetero_model(host, name, **of_encoder):
    """The sizes of that layout in model.json, where both ours and the host's own read them."""
    content = json.loads((host / "model.json").read_text())
    content["image_encoder"].update(tp=1, pp=1, cp=1)
    content["text_decoder"].update(tp=2, pp=1, cp=1)
    for part in ("vision_encoder", "vision_projector"):
        content["image_encoder"][part].update(of_encoder)
    (host / name).write_text(json.dumps(content))
    return name


def test_an_encoder_with_a_layout_of_its_own_trains_as_one_process_does(host, alone):
    """Ours, without a word of ours in model.json: the language model is cut in two, every rank encodes its images."""
    model, weights = hetero_model(host, "hetero.json"), hetero_weights(host)
    done = run(host, *weights, "--auto-parallel-hetero", model=model, num_processes=2, port=PORT + 60)
    assert done.losses == pytest.approx(alone, rel=TOLERANCE)


def test_the_hosts_own_hetero_parallel_is_unharmed(host):
    """Theirs gathers an encoder's output without a gradient: it is frozen. Its batch size counts every rank as a
    replica, so it is twice that of one process."""
    model, weights = hetero_model(host, "frozen.json", freeze=True), hetero_weights(host)
    size = ["--micro-batch-size", "2"]
    alone = run(host, "--load", "checkpoint", "--finetune", *size, model=model, num_processes=1).losses
    words = ["--hetero-parallel", *size, "--global-batch-size", "8"]
    done = run(host, *weights, *words, model=model, num_processes=2, port=PORT + 80)
    assert "--hetero-parallel is this host's own flag and keeps its meaning" in done.output
    assert done.losses == pytest.approx(alone, rel=TOLERANCE)


def test_importing_alone_changes_no_bit(tmp_path):
    """Beside a process whose patches were taken back before Megatron and MindSpeed were imported."""
    tiny.write(tmp_path, Path(os.environ["MINDSPEED_MM_SOURCES"]))
    text = (tmp_path / "pretrain_vlm.py").read_text() + _DIGEST
    bare = "from mindspeed_autoparallel.patching import ENGINE\n\nENGINE.undo_all()\n"
    found = []
    for name, start in (("alone.py", ""), ("bare.py", bare)):
        (tmp_path / name).write_text(text.replace("\n", f"\n{start}", 1))
        done = run(tmp_path, "--train-iters", "3", num_processes=1, script=name)
        found.append((done.losses, [line for line in done.output.splitlines() if line.startswith("parameters ")]))
    assert found[0] == found[1]
    assert len(found[0][0]) == 3 and len(found[0][1]) == 1
