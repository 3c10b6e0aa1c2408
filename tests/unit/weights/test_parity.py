"""Converted weights in the reference model give what transformers gives: logits, loss and gradients of the input."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
pytest.importorskip("megatron.core")

pytestmark = [pytest.mark.torch, pytest.mark.megatron, pytest.mark.usefixtures("one_process")]

IMAGE, START, END = 250, 252, 253
MERGE = 2
TOLERANCE = 1e-4


def text_config(**more: Any) -> dict[str, Any]:
    return {
        "vocab_size": 256,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 1e6},
        "bos_token_id": 0,
        "eos_token_id": 1,
        **more,
    }


TOKENS = {"image_token_id": IMAGE, "video_token_id": 251, "vision_start_token_id": START, "vision_end_token_id": END}


def hugging_face(family: str, tied: bool) -> Any:
    torch.manual_seed(3)
    if family == "qwen2_vl":
        vision = {"depth": 3, "embed_dim": 32, "hidden_size": 64, "num_heads": 2, "patch_size": 14}
        config = transformers.Qwen2VLConfig(
            text_config=text_config(), vision_config=vision, tie_word_embeddings=tied, **TOKENS
        )
        model = transformers.Qwen2VLForConditionalGeneration(config)
    else:
        vision = {
            "depth": 3,
            "hidden_size": 32,
            "out_hidden_size": 64,
            "intermediate_size": 40,
            "num_heads": 2,
            "patch_size": 14,
            "window_size": 112,
            "fullatt_block_indexes": [1],
        }
        config = transformers.Qwen2_5_VLConfig(
            text_config=text_config(), vision_config=vision, tie_word_embeddings=tied, **TOKENS
        )
        model = transformers.Qwen2_5_VLForConditionalGeneration(config)
    # Fresh norms are all ones and biases zero: random ones show whether they arrive.
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, mean=1.0 if parameter.dim() == 1 else 0.0, std=0.1)
    return model.eval()


def description(family: str, tied: bool) -> Any:
    from reference_vlm.configuration import describe_model

    older = family == "qwen2_vl"
    vision = {
        "num_layers": 3,
        "hidden_size": 32,
        "ffn_hidden_size": 128 if older else 40,
        "num_attention_heads": 2,
        "patch_size": 14,
        "normalization": "LayerNorm" if older else "RMSNorm",
        "activation_func": "quick_gelu" if older else "silu",
        "gated_linear_unit": not older,
        "add_bias_linear": True,
        "add_qkv_bias": True,
        "layernorm_epsilon": 1e-6,
    }
    if not older:
        vision |= {"window_attn_size": 112, "fullatt_block_indexes": [1]}
    values = {
        "image_encoder": {"vision_encoder": vision, "vision_projector": {"activation_func": "gelu"}},
        "text_decoder": {
            "num_layers": 3,
            "hidden_size": 64,
            "ffn_hidden_size": 96,
            "num_attention_heads": 4,
            "num_query_groups": 2,
            "vocab_size": 256,
            "rotary_base": 1000000,
            "mrope_section": [2, 3, 3],
            "add_qkv_bias": True,
            "add_bias_linear": False,
            "layernorm_epsilon": 1e-6,
            "untie_embeddings_and_output_weights": not tied,
            "max_position_embeddings": 512,
        },
        "img_context_token_id": IMAGE,
        "vision_start_token_id": START,
        "vision_end_token_id": END,
    }
    return describe_model(values, Path("model.json"))


def reference(family: str, tied: bool, checkpoint: Path) -> Any:
    from megatron.core.transformer.transformer_config import TransformerConfig

    from reference_vlm.model.vlm import VisionLanguageModel

    base = TransformerConfig(
        num_layers=3,
        hidden_size=64,
        num_attention_heads=4,
        use_cpu_initialization=True,
        perform_initialization=True,
        normalization="RMSNorm",
        add_bias_linear=False,
        gated_linear_unit=True,
        params_dtype=torch.float32,
    )
    model = VisionLanguageModel(base, description(family, tied), 256, 0)
    path = checkpoint / "release" / "mp_rank_00" / "model_optim_rng.pt"
    state = torch.load(path, weights_only=True)["model"]
    left = model.load_state_dict(state, strict=False)
    assert not left.unexpected_keys
    assert not [name for name in left.missing_keys if not name.endswith("_extra_state")]
    return model.eval()


def sample(grids: list[tuple[int, int, int]], num_text: int) -> tuple[Any, Any, Any]:
    """ids [1, tokens], pixel values [patches, features] or None, grid [images, 3] or None."""
    generator = torch.Generator().manual_seed(num_text)
    ids = torch.randint(2, 240, (num_text,), generator=generator).tolist()
    for frames, height, width in grids:
        ids += [START, *[IMAGE] * (frames * height * width // MERGE**2), END, 5, 6, 7]
    if not grids:
        return torch.tensor([ids]), None, None
    grid = torch.tensor(grids)
    pixels = torch.randn(int(grid.prod(1).sum()), 3 * 2 * 14 * 14, generator=generator)
    return torch.tensor([ids]), pixels, grid


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", ["qwen2_vl", "qwen2_5_vl"])
@pytest.mark.parametrize(
    "grids",
    [[], [(1, 4, 6)], [(1, 10, 18), (1, 2, 4), (1, 8, 8)]],
    ids=["text only", "one picture", "three pictures of different sizes"],
)
def test_reference_model_equals_transformers(
    family: str, tied: bool, grids: list[tuple[int, int, int]], tmp_path: Path
) -> None:
    from mindspeed_autoparallel.weights import conversion
    from mindspeed_autoparallel.weights.architecture import read_architecture
    from mindspeed_autoparallel.weights.layouts import make_layout
    from reference_vlm.model.text import multimodal_positions

    theirs = hugging_face(family, tied)
    theirs.save_pretrained(tmp_path / "hf")
    layout = make_layout(read_architecture(tmp_path / "hf"), layers={}, tensor_sizes={})
    conversion.huggingface_to_checkpoint(tmp_path / "hf", tmp_path / "mm", layout)
    ours = reference(family, tied, tmp_path / "mm")

    ids, pixels, grid = sample(grids, 11)
    labels = torch.cat((ids[:, 1:], torch.full((1, 1), -100)), dim=1)
    inputs: dict[str, Any] = {"input_ids": ids}
    if pixels is not None:
        their_pixels, our_pixels = (pixels.clone().requires_grad_() for _ in range(2))
        inputs |= {"pixel_values": their_pixels, "image_grid_thw": grid, "mm_token_type_ids": (ids == IMAGE).int()}
    their_logits = theirs(**inputs).logits
    their_loss = torch.nn.functional.cross_entropy(their_logits[0], labels[0], ignore_index=-100)
    their_loss.backward()

    positions = multimodal_positions(ids[0].tolist(), IMAGE, grids, MERGE)[:, None]
    stand_in = torch.zeros(4, 3 * 2 * 14 * 14), torch.tensor([[1, 2, 2]])
    pictures = (our_pixels, grid) if pixels is not None else stand_in
    given = {"input_ids": ids, "position_ids": positions, "pixel_values": pictures[0], "image_grid_thw": pictures[1]}
    our_logits = ours(**given)
    assert our_logits.shape == their_logits.shape
    assert (our_logits - their_logits).abs().max() < TOLERANCE
    losses = ours(**given, labels=labels.clamp(min=0))
    our_loss = losses[0, :-1].mean()
    our_loss.backward()
    assert abs(our_loss.item() - their_loss.item()) < 1e-5
    their_embedding = theirs.get_input_embeddings().weight.grad
    our_embedding = ours.text_decoder.embedding.word_embeddings.weight.grad
    assert (their_embedding - our_embedding).abs().max() < TOLERANCE
    if pixels is not None:
        assert their_pixels.grad.abs().max() > 0
        assert (their_pixels.grad - our_pixels.grad).abs().max() < TOLERANCE
