"""One process: converted random weights of transformers' models against the reference model, differences as JSON.

``python parity_worker.py <folder>``
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import mindspeed_autoparallel  # before megatron

assert mindspeed_autoparallel.__version__

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
import transformers  # noqa: E402
from megatron.core import parallel_state  # noqa: E402
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed  # noqa: E402
from megatron.core.transformer.transformer_config import TransformerConfig  # noqa: E402

from mindspeed_autoparallel.weights.architecture import read_architecture  # noqa: E402
from mindspeed_autoparallel.weights.conversion import huggingface_to_checkpoint  # noqa: E402
from mindspeed_autoparallel.weights.layouts import make_layout  # noqa: E402
from reference_vlm.configuration import describe_model  # noqa: E402
from reference_vlm.model.checks import check_parameters  # noqa: E402
from reference_vlm.model.text import multimodal_positions  # noqa: E402
from reference_vlm.model.vlm import VisionLanguageModel  # noqa: E402

IMAGE, START, END, VOCABULARY = 90, 91, 92, 96
TEXT = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0, "mrope_section": [1, 1, 2]},
    "tie_word_embeddings": False,
}
TOKENS = {
    "image_token_id": IMAGE,
    "video_token_id": 95,
    "vision_start_token_id": START,
    "vision_end_token_id": END,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}
VISION = {
    "qwen2_vl": {"depth": 3, "embed_dim": 16, "hidden_size": 32, "num_heads": 2, "mlp_ratio": 4, "patch_size": 14},
    "qwen2_5_vl": {
        "depth": 3,
        "hidden_size": 16,
        "out_hidden_size": 32,
        "num_heads": 2,
        "intermediate_size": 24,
        "patch_size": 14,
        "window_size": 56,
        "fullatt_block_indexes": [1],
        "hidden_act": "silu",
    },
}
CASES = {
    "one small picture": [[(1, 4, 4)]],
    "pictures of different sizes": [[(1, 4, 8)], [(1, 10, 6)]],
    "several pictures in a sample": [[(1, 4, 4), (1, 6, 10), (1, 2, 2)]],
    "text only": [[]],
    "a sample without pictures beside one with two": [[], [(1, 12, 4), (1, 4, 6)]],
}


def hugging_face_model(family: str) -> Any:
    kinds = {
        "qwen2_vl": (transformers.Qwen2VLConfig, transformers.Qwen2VLForConditionalGeneration),
        "qwen2_5_vl": (transformers.Qwen2_5_VLConfig, transformers.Qwen2_5_VLForConditionalGeneration),
    }
    config_class, model_class = kinds[family]
    torch.manual_seed(5)
    config = config_class(text_config=dict(TEXT), vision_config=dict(VISION[family]), **TOKENS)
    model = model_class(config).float().eval()
    with torch.no_grad():
        # Larger than usual, with biases and norms away from 0 and 1: nothing may hide.
        for parameter in model.parameters():
            parameter.normal_(std=0.15)
            if parameter.dim() == 1:
                parameter.add_(0.3)
    return model


def description(family: str) -> Any:
    vision, gated = VISION[family], family == "qwen2_5_vl"
    values = {
        "img_context_token_id": IMAGE,
        "vision_start_token_id": START,
        "vision_end_token_id": END,
        "image_encoder": {
            "vision_encoder": {
                "num_layers": vision["depth"],
                "hidden_size": 16,
                "num_attention_heads": 2,
                "ffn_hidden_size": 24 if gated else 64,
                "gated_linear_unit": gated,
                "activation_func": "silu" if gated else "quick_gelu",
                "normalization": "RMSNorm" if gated else "LayerNorm",
                "window_size": vision.get("window_size", 0),
                "fullatt_block_indexes": vision.get("fullatt_block_indexes", []),
            },
            "vision_projector": {"input_size": 16, "ffn_hidden_size": 64, "hidden_size": 32},
        },
        "text_decoder": {
            "num_layers": 2,
            "hidden_size": 32,
            "ffn_hidden_size": 48,
            "num_attention_heads": 4,
            "num_query_groups": 2,
            "vocab_size": VOCABULARY,
            "rotary_base": 1000000,
            "mrope_section": [1, 1, 2],
            "max_position_embeddings": 512,
        },
    }
    return describe_model(values, Path(f"{family}.json"))


def build(family: str, model: Any, folder: Path) -> Any:
    model.save_pretrained(folder / family)
    layout = make_layout(read_architecture(folder / family), layers={}, tensor_sizes={}, vocab_multiple=1)
    huggingface_to_checkpoint(folder / family, folder / f"{family}-mm", layout)
    state = torch.load(next((folder / f"{family}-mm").glob("*/*/model_optim_rng.pt")), weights_only=True)["model"]
    base = TransformerConfig(
        num_layers=2,
        hidden_size=32,
        num_attention_heads=4,
        gradient_accumulation_fusion=False,
        masked_softmax_fusion=False,
        bias_dropout_fusion=False,
    )
    described = description(family)
    own = VisionLanguageModel(base, described, VOCABULARY, 0)
    check_parameters(own, described, VOCABULARY)
    own.load_state_dict({name: value for name, value in state.items() if "_extra_state" not in name}, strict=True)
    return own.eval()


def inputs(case: list[list[tuple[int, int, int]]]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Token ids (right padding 0), position ids, pixel values, grids."""
    generator = torch.Generator().manual_seed(len(str(case)))
    rows, all_grids = [], [grid for grids in case for grid in grids]
    for grids in case:
        ids = torch.randint(3, 80, (5,), generator=generator).tolist()
        for frames, height, width in grids:
            ids += [START, *[IMAGE] * (frames * height * width // 4), END]
            ids += torch.randint(3, 80, (4,), generator=generator).tolist()
        rows.append(ids)
    length = max(map(len, rows))
    positions = torch.arange(length).expand(3, len(rows), length).clone()
    for row, (ids, grids) in enumerate(zip(rows, case, strict=True)):
        positions[:, row, : len(ids)] = multimodal_positions(ids, IMAGE, grids, 2)
    padded = torch.tensor([ids + [0] * (length - len(ids)) for ids in rows])
    patches = sum(frames * height * width for frames, height, width in all_grids)
    pixels = torch.randn(patches, 3 * 2 * 14 * 14, generator=generator)
    return padded, positions, pixels, torch.tensor(all_grids).view(-1, 3)


def compare(hugging_face: Any, own: Any, case: list[list[tuple[int, int, int]]]) -> dict[str, float]:
    ids, positions, pixels, grids = inputs(case)
    labels = ids.roll(-1, dims=1)
    with_images = bool(len(grids))
    theirs_pixels, ours_pixels = (pixels.clone().requires_grad_(with_images) for _ in range(2))
    images = {"pixel_values": theirs_pixels, "image_grid_thw": grids} if with_images else {}
    logits = hugging_face(input_ids=ids, position_ids=positions, **images).logits
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
    loss.backward()
    if not with_images:
        ours_pixels, grids = torch.zeros(4, pixels.shape[1]), torch.tensor([[1, 2, 2]])
    arguments = {"input_ids": ids, "position_ids": positions, "pixel_values": ours_pixels, "image_grid_thw": grids}
    ours = own(**arguments)
    losses = own(labels=labels, **arguments)
    losses.mean().backward()
    result = {
        "logits": float((ours - logits).abs().max()),
        "size of logits": float(logits.abs().max()),
        "loss": float((losses.mean() - loss).abs()),
        "input gradient": 0.0,
        "positions": 0.0,
    }
    if with_images:
        scale = float(theirs_pixels.grad.abs().max())
        result["input gradient"] = float((ours_pixels.grad - theirs_pixels.grad).abs().max()) / scale
        kinds = (ids == IMAGE).int()
        expected, _ = hugging_face.model.get_rope_index(
            input_ids=ids, mm_token_type_ids=kinds, image_grid_thw=grids, attention_mask=(ids != 0).int()
        )
        filled = (ids != 0)[None].expand(3, -1, -1)
        result["positions"] = float((expected - positions)[filled].abs().max())
    return result


def main() -> None:
    folder = Path(sys.argv[1])
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    model_parallel_cuda_manual_seed(1)
    results = {}
    for family in VISION:
        hugging_face = hugging_face_model(family)
        own = build(family, hugging_face, folder)
        for name, case in CASES.items():
            results[f"{family}: {name}"] = compare(hugging_face, own, case)
    (folder / "results.json").write_text(json.dumps(results))


if __name__ == "__main__":
    main()
