"""``trace --script``: the model as the user's script builds it, custom layers included."""

import json
from pathlib import Path

import pytest

from mindspeed_autoparallel.cli.main import main

pytestmark = [
    pytest.mark.distributed,
    pytest.mark.torch,
    pytest.mark.megatron,
    pytest.mark.usefixtures("forked_starts"),
]
_EXAMPLE = Path(__file__).parents[3] / "docs/examples/pretrain_gpt.py"
_FILES = _EXAMPLE.with_name("qwen2vl_tiny")
_FLAGS = """--use-mcore-models --num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 64
    --max-position-embeddings 64 --micro-batch-size 1 --global-batch-size 8 --tokenizer-type NullTokenizer
    --vocab-size 511 --make-vocab-size-divisible-by 128 --normalization RMSNorm --swiglu --disable-bias-linear
    --position-embedding-type rope --lr 1e-3 --train-iters 2 --mock-data --use-distributed-optimizer
    --no-gradient-accumulation-fusion --no-masked-softmax-fusion --no-rope-fusion --no-persist-layer-norm
    --eval-interval 1000 --eval-iters 0 --transformer-impl local --untie-embeddings-and-output-weights"""
_CUSTOM = """
from megatron.core.transformer.mlp import MLP


class TwiceMLP(MLP):
    def forward(self, hidden, *args, **kwargs):
        output, bias = super().forward(hidden, *args, **kwargs)
        return super().forward({between}, *args, **kwargs)


class OwnModel(GPTModel):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        for layer in self.decoder.layers:
            layer.mlp.__class__ = TwiceMLP


def model_provider("""


@pytest.fixture(autouse=True)
def _training_is_there() -> None:
    pytest.importorskip("megatron.training")


def _custom(folder: Path, between: str) -> Path:
    """The example with a layer of its own, whose MLP runs twice."""
    text = _EXAMPLE.read_text().replace("\ndef model_provider(", _CUSTOM.replace("{between}", between), 1)
    text = text.replace("    return GPTModel(", "    return OwnModel(", 1)
    assert text.count("OwnModel") == 2
    script = folder / "train.py"
    script.write_text(text)
    return script


def _trace(
    capsys: pytest.CaptureFixture[str], script: Path, *flags: str, model: tuple[str, ...] = ()
) -> tuple[int, str, str]:
    code = main(["trace", "--script", str(script), *flags, "--json", "--", *_FLAGS.split(), *model])
    printed = capsys.readouterr()
    return code, printed.out, printed.err


def test_a_custom_layer_is_traced_unchanged_and_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ("--tp-size", "2", "--sequence-parallel", "--world", "8", "--cache", str(tmp_path / "kept"))
    code, out, err = _trace(capsys, _EXAMPLE, *flags)
    assert code == 0, err
    (plain,) = json.loads(out)["modules"]
    code, out, err = _trace(capsys, _custom(tmp_path, "output"), *flags)
    assert code == 0, err
    (custom,) = json.loads(out)["modules"]
    calls = {
        name: sum(count for _, count in module["calls"]["layer"]["forward"]["operators"])
        for name, module in (("plain", plain), ("custom", custom))
    }
    assert calls["custom"] > calls["plain"]
    assert custom["blocks"]["layer"]["saved_bytes"] > plain["blocks"]["layer"]["saved_bytes"]
    assert custom["blocks"]["layer"]["parameters"] == plain["blocks"]["layer"]["parameters"]
    # Kept by content: what is stored is given again, and not traced.
    (newest,) = sorted((tmp_path / "kept").iterdir(), key=lambda path: path.stat().st_mtime)[1:]
    newest.write_text(json.dumps({**json.loads(newest.read_text()), "kept": True}))
    assert json.loads(_trace(capsys, tmp_path / "train.py", *flags)[1])["kept"]


def test_dense_layers_before_those_with_experts_are_traced_as_two_kinds(capsys: pytest.CaptureFixture[str]) -> None:
    experts = ("--num-experts", "4", "--moe-router-topk", "2", "--moe-token-dispatcher-type", "alltoall")
    code, out, err = _trace(capsys, _EXAMPLE, "--ep-size", "2", model=(*experts, "--moe-layer-freq", "([0]*2+[1]*2)"))
    assert code == 0, err
    (module,) = json.loads(out)["modules"]
    assert module["kinds"] == [0, 0, 1, 1]
    assert list(module["blocks"]) == ["pre", "layer", "layer:1", "post"]
    dense, sparse = (module["blocks"][block]["parameters"] for block in ("layer", "layer:1"))
    # An MLP of three matrices of 64 x 128, or two of four experts and a router; the rest of the layers is alike.
    matrices = 3 * 64 * 128
    assert dense["dense"]["num_parameters"] - sparse["dense"]["num_parameters"] == matrices - 4 * 64
    assert (dense["expert"]["num_parameters"], sparse["expert"]["num_parameters"]) == (0, 2 * matrices)


@pytest.mark.parametrize(
    ("flags", "kinds"),
    [
        (("--window-size", "16,0", "--window-attn-skip-freq", "2"), [0, 1, 0, 1]),
        (("--no-rope-freq", "([0]*2+[1]*2)"), [0, 0, 1, 1]),
        # Another scale on every layer takes as long.
        (("--apply-query-key-layer-scaling", "--attention-softmax-in-fp32"), [0, 0, 0, 0]),
    ],
)
def test_layers_of_one_structure_that_compute_differently_are_kinds_of_their_own(
    flags: tuple[str, ...], kinds: list[int], capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = _trace(capsys, _EXAMPLE, model=flags)
    assert code == 0, err
    (module,) = json.loads(out)["modules"]
    assert module["kinds"] == kinds
    blocks = [module["blocks"][block] for block in ("layer", "layer:1") if block in module["blocks"]]
    assert len(blocks) == len(set(kinds))
    # Their parameters are alike, what they compute is not.
    assert blocks[0]["parameters"] == blocks[-1]["parameters"]
    if len(blocks) > 1:
        calls = [module["calls"][block]["forward"]["operators"] for block in ("layer", "layer:1")]
        assert calls[0] != calls[1]


def test_a_layer_that_needs_data_is_named_with_the_way_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = _custom(tmp_path, "torch.from_numpy(output.detach().float().numpy()).to(output)")
    code, _, err = _trace(capsys, script)
    assert code != 0
    assert "cannot be traced in TP1" in err
    assert "measure it instead" in err
    assert "numpy" in err


def test_a_script_that_never_trains_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = tmp_path / "train.py"
    script.write_text("print('nothing to do')\n")
    code, _, err = _trace(capsys, script)
    assert code != 0
    assert "ended before training started" in err
    script.write_text("raise SystemExit('no data here')\n")
    code, _, err = _trace(capsys, script)
    assert code != 0
    assert "no data here" in err
    assert main(["trace", "--script", str(tmp_path / "absent.py")]) == 2
    assert main(["trace", "--script", str(script), "--hidden", "64"]) == 2
    assert "the script builds it" in capsys.readouterr().err


def test_a_model_of_a_file_is_refused_with_the_way_out(capsys: pytest.CaptureFixture[str]) -> None:
    """Its layers cannot be shortened by flags: the script ended with an error about the file."""
    files = ("--mm-model", "model.json", "--mm-data", "data.json", "--mm-tool", "tools.json")
    model = tuple(word if word.startswith("-") else str(_FILES / word) for word in files)
    code, _, err = _trace(capsys, _EXAMPLE.with_name("pretrain_vlm.py"), model=model)
    assert code == 2
    (line,) = [line for line in err.splitlines() if "Error" in line]
    assert line.startswith("ConfigError: ") and "cannot be traced: measure it with --auto-parallel-mm." in line
