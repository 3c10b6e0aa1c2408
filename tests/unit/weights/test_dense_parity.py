"""Converted dense text models in Megatron's own GPTModel give what transformers gives: logits, loss and gradients."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
pytest.importorskip("megatron.core")

pytestmark = [pytest.mark.torch, pytest.mark.megatron, pytest.mark.usefixtures("one_process")]

CLASSES = {"llama": ("LlamaConfig", "LlamaForCausalLM"), "qwen2": ("Qwen2Config", "Qwen2ForCausalLM")}
VOCABULARY, LENGTH = 256, 32


def hugging_face(family: str, tied: bool) -> Any:
    config, model = (getattr(transformers, name) for name in CLASSES[family])
    torch.manual_seed(5)
    theirs = model(
        config(
            vocab_size=VOCABULARY,
            hidden_size=64,
            intermediate_size=96,
            num_hidden_layers=3,
            num_attention_heads=4,
            num_key_value_heads=2,
            rms_norm_eps=1e-6,
            max_position_embeddings=LENGTH,
            tie_word_embeddings=tied,
            rope_parameters={"rope_type": "default", "rope_theta": 1e5},
        )
    )
    # Fresh norms are all ones and biases zero: random ones show whether they arrive.
    for parameter in theirs.parameters():
        torch.nn.init.normal_(parameter, mean=1.0 if parameter.dim() == 1 else 0.0, std=0.1)
    return theirs.eval()


def gpt_model(family: str, tied: bool) -> Any:
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.transformer_config import TransformerConfig

    config = TransformerConfig(
        num_layers=3,
        hidden_size=64,
        ffn_hidden_size=96,
        num_attention_heads=4,
        num_query_groups=2,
        normalization="RMSNorm",
        layernorm_epsilon=1e-6,
        add_bias_linear=False,
        add_qkv_bias=family == "qwen2",
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        bias_activation_fusion=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        use_cpu_initialization=True,
        params_dtype=torch.float32,
    )
    return GPTModel(
        config,
        get_gpt_layer_local_spec(normalization="RMSNorm"),
        VOCABULARY,
        LENGTH,
        position_embedding_type="rope",
        rotary_base=100000,
        share_embeddings_and_output_weights=tied,
        parallel_output=False,
    ).eval()


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", sorted(CLASSES))
def test_gpt_model_equals_transformers(family: str, tied: bool, tmp_path: Path) -> None:
    from mindspeed_autoparallel.weights import conversion
    from mindspeed_autoparallel.weights.architecture import read_architecture
    from mindspeed_autoparallel.weights.layouts import make_layout

    theirs = hugging_face(family, tied)
    theirs.save_pretrained(tmp_path / "hf")
    layout = make_layout(read_architecture(tmp_path / "hf"), layers={}, tensor_sizes={})
    conversion.huggingface_to_checkpoint(tmp_path / "hf", tmp_path / "mm", layout)
    ours = gpt_model(family, tied)
    path = tmp_path / "mm" / "release" / "mp_rank_00" / "model_optim_rng.pt"
    ours.load_state_dict(torch.load(path, weights_only=True)["model"])

    ids = torch.randint(0, VOCABULARY, (2, LENGTH))
    positions = torch.arange(LENGTH).expand(2, LENGTH)
    hidden = torch.triu(torch.ones(LENGTH, LENGTH, dtype=torch.bool), 1)[None, None]
    our_logits, their_logits = ours(ids, positions, hidden), theirs(input_ids=ids).logits
    assert our_logits.shape == their_logits.shape
    assert (our_logits - their_logits).abs().max() < 1e-4

    gradients = []
    for logits, embedding in (
        (our_logits, ours.embedding.word_embeddings.weight),
        (their_logits, theirs.get_input_embeddings().weight),
    ):
        loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
        gradients.append((loss.item(), *torch.autograd.grad(loss, embedding)))
    assert abs(gradients[0][0] - gradients[1][0]) < 1e-5
    assert (gradients[0][1] - gradients[1][1]).abs().max() < 1e-4
