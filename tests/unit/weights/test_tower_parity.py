"""Converted vision towers in Megatron's own layers give the features that transformers gives."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
from tiny_families import tiny_model

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("megatron.core")

pytestmark = [pytest.mark.torch, pytest.mark.megatron, pytest.mark.usefixtures("one_process")]
functional = torch.nn.functional
Named = dict[str, Any]


class WidthNorm(torch.nn.RMSNorm):
    """A norm of queries or keys over all heads together."""

    def __init__(self, hidden_size: int, config: Any, eps: float, **unused: Any) -> None:
        super().__init__(config.hidden_size, eps=1e-6)

    def forward(self, heads: Any) -> Any:
        return super().forward(heads.flatten(-2)).view_as(heads)


class Layers:
    """Megatron's layers with converted weights; ``ls1`` and ``ls2`` scale what attention and MLP add."""

    def __init__(self, vision: Any, state: Named, prefix: str, **flags: Any) -> None:
        from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
        from megatron.core.transformer.spec_utils import build_module
        from megatron.core.transformer.transformer_config import TransformerConfig
        from megatron_families import PlainAttention

        self.others: list[Named] = []
        self.layers = []
        count = flags.pop("num_layers")
        config = TransformerConfig(
            num_layers=count,
            hidden_size=vision.hidden_size,
            ffn_hidden_size=vision.intermediate_size,
            normalization="LayerNorm",
            add_qkv_bias=True,
            bias_activation_fusion=False,
            hidden_dropout=0.0,
            attention_dropout=0.0,
            use_cpu_initialization=True,
            **flags,
        )
        spec = get_gpt_layer_local_spec(normalization="LayerNorm", qk_layernorm=config.qk_layernorm)
        attention = spec.submodules.self_attention.submodules
        attention.core_attention = type("Attention", (PlainAttention,), {"causal": False})
        if config.qk_layernorm:
            attention.q_layernorm = attention.k_layernorm = WidthNorm
        for number in range(count):
            begin = f"{prefix}{number}."
            mine = {name.removeprefix(begin): tensor for name, tensor in state.items() if name.startswith(begin)}
            layer = build_module(spec, config=config, layer_number=number + 1).eval()
            left = layer.load_state_dict(mine, strict=False)
            assert not [name for name in left.missing_keys if "_extra_state" not in name]
            self.others.append({name: mine[name] for name in left.unexpected_keys})
            self.layers.append(layer)
            for product, scale in ((layer.self_attention.linear_proj, "ls1"), (layer.mlp.linear_fc2, "ls2")):
                if scale in mine:
                    product.register_forward_hook(partial(_scaled, mine[scale]))

    def run(self, number: int, rows: Any, angles: Any = None) -> Any:
        """Return [rows, width] behind a layer; all rows see each other. ``angles`` [rows, size of a head]."""
        given = None if angles is None else angles[:, None, None]
        return self.layers[number](rows[:, None], None, rotary_pos_emb=given)[0][:, 0]


def _scaled(scale: Any, module: Any, inputs: Any, output: Any) -> Any:
    return (output[0] + output[1]) * scale, None


def converted(family: str, folder: Path) -> tuple[Any, Named]:
    """Return a random model of transformers, and its weights under Megatron's names."""
    from mindspeed_autoparallel.weights import conversion
    from mindspeed_autoparallel.weights.architecture import read_architecture
    from mindspeed_autoparallel.weights.layouts import make_layout

    theirs = tiny_model(family)
    theirs.save_pretrained(folder / "hf")
    layout = make_layout(read_architecture(folder / "hf"), layers={}, tensor_sizes={})
    conversion.huggingface_to_checkpoint(folder / "hf", folder / "mm", layout)
    state = torch.load(folder / "mm" / "release" / "mp_rank_00" / "model_optim_rng.pt", weights_only=True)["model"]
    return theirs, state


def merged(named: Named, prefix: str, rows: Any) -> Any:
    """Join four rows to one and project them; the width of the norm shows whether it comes before the join."""
    norm, first, second = (
        (named[f"{prefix}{name}.weight"], named[f"{prefix}{name}.bias"])
        for name in ("layernorm", "encoder.linear_fc1", "encoder.linear_fc2")
    )
    width = norm[0].numel()
    rows = functional.layer_norm(rows.reshape(-1, width), (width,), *norm, eps=1e-6).view(-1, first[0].shape[1])
    return functional.linear(functional.gelu(functional.linear(rows, *first)), *second)


def assert_close(found: Any, expected: Any) -> None:
    assert found.shape == expected.shape
    assert expected.std() > 1e-3
    assert (found - expected).abs().max() < 1e-5 * max(1.0, expected.abs().max())


@pytest.mark.parametrize("family", ["qwen3_vl", "qwen3_5"])
def test_the_tower_of_qwen3_equals_transformers(family: str, tmp_path: Path) -> None:
    from transformers.models.qwen3_vl import modeling_qwen3_vl as modeling

    theirs, state = converted(family, tmp_path)
    tower = theirs.model.visual
    vision = tower.config
    grid = torch.tensor([[1, 4, 6], [1, 2, 8]])
    pixels = torch.randn(int(grid.prod(1).sum()), 3 * 2 * vision.patch_size**2)
    layers = Layers(
        vision,
        state,
        "image_encoder.encoder.blocks.layers.",
        num_layers=vision.depth,
        num_attention_heads=vision.num_heads,
        layernorm_epsilon=1e-6,
        activation_func=partial(functional.gelu, approximate="tanh"),
    )
    indices, weights = modeling.get_vision_interpolation_indices_and_weights(
        grid,
        num_grid_per_side=tower.num_grid_per_side,
        mode="bilinear",
        align_corners=True,
        spatial_merge_size=vision.spatial_merge_size,
        kwargs={},
    )
    begin = "image_encoder.encoder."
    with torch.no_grad():
        expected = tower(pixels, grid_thw=grid)
        places = modeling.get_vision_position_ids(grid, vision.spatial_merge_size, kwargs={})
        cosine, sine = tower.rotary_pos_emb(pixels, places)
        product = state[begin + "patch_embed.proj.weight"].flatten(1), state[begin + "patch_embed.proj.bias"]
        rows = functional.linear(pixels, *product)
        rows = rows + (state[begin + "pos_embed.weight"][indices] * weights[:, :, None]).sum(1)
        lengths, angles, features = grid.prod(1).tolist(), torch.atan2(sine, cosine), []
        for number, others in enumerate(layers.others):
            images = zip(rows.split(lengths), angles.split(lengths), strict=True)
            rows = torch.cat([layers.run(number, *image) for image in images])
            if others:
                features.append(merged(others, "deepstack_layer.", rows))
        assert_close(merged(state, "image_encoder.projector.", rows), expected.pooler_output)
    stacked = getattr(expected, "deepstack_features", None) or []
    assert len(features) == len(stacked) == (2 if family == "qwen3_vl" else 0)
    for found, wanted in zip(features, stacked, strict=True):
        assert_close(found, wanted)


def test_the_tower_of_internvl_equals_transformers(tmp_path: Path) -> None:
    theirs, state = converted("internvl", tmp_path)
    vision = theirs.config.vision_config
    pixels = torch.randn(1, 3, *vision.image_size)
    layers = Layers(
        vision,
        state,
        "image_encoder.encoder.encoder.layers.",
        num_layers=vision.num_hidden_layers,
        num_attention_heads=vision.num_attention_heads,
        layernorm_epsilon=vision.layer_norm_eps,
        qk_layernorm=True,
        activation_func=functional.gelu,
    )
    begin, last = "image_encoder.encoder.embeddings.", "image_encoder.projector."
    named = {name.removeprefix(begin): tensor for name, tensor in state.items()}
    with torch.no_grad():
        expected = theirs.model.get_image_features(pixels).pooler_output
        kernel = named["patch_embedding.weight"], named["patch_embedding.bias"]
        patches = functional.conv2d(pixels, *kernel, stride=vision.patch_size).flatten(2).transpose(1, 2)
        rows = (torch.cat((named["class_embedding"], patches), dim=1) + named["position_embedding"])[0]
        for number in range(vision.num_hidden_layers):
            rows = layers.run(number, rows)
        side = int(patches.shape[1] ** 0.5)
        found = theirs.model.pixel_shuffle(rows[1:].view(1, side, side, -1), theirs.config.downsample_ratio)
        norm, first, second = (
            (state[f"{last}{name}.weight"], state[f"{last}{name}.bias"])
            for name in ("norm", "linear_fc1", "linear_fc2")
        )
        found = functional.layer_norm(found.flatten(1, 2), norm[0].shape, *norm)
        found = functional.linear(functional.gelu(functional.linear(found, *first)), *second)
        assert_close(found, expected)
