"""Layouts that cannot be are refused with the numbers and the way out. Needs no torch."""

from __future__ import annotations

from typing import Any

import pytest

from mindspeed_autoparallel.errors import ConfigError
from mindspeed_autoparallel.weights.architecture import TEXT, VISION, architecture_from_config
from mindspeed_autoparallel.weights.families.conditions import stored_words
from mindspeed_autoparallel.weights.layouts import make_layout, parse_layers

TEXT_CONFIG = {
    "hidden_size": 1536,
    "intermediate_size": 8960,
    "num_hidden_layers": 28,
    "num_attention_heads": 12,
    "num_key_value_heads": 2,
    "vocab_size": 151936,
}
VISION_CONFIG = {"depth": 32, "embed_dim": 1280, "num_heads": 16}
FLAT = {"model_type": "qwen2_vl", **TEXT_CONFIG, "vision_config": VISION_CONFIG, "tie_word_embeddings": True}
NESTED = {
    "model_type": "qwen2_vl",
    "text_config": TEXT_CONFIG,
    "vision_config": VISION_CONFIG,
    "tie_word_embeddings": True,
}


def layout_of(config: dict[str, Any] = FLAT, **given: Any) -> Any:
    layers = {module: given.get(module) for module in (VISION, TEXT)}
    sizes = {TEXT: given.get("tp"), VISION: given.get("vit_tp")}
    return make_layout(
        architecture_from_config(config, "config.json"),
        layers=layers,
        tensor_sizes=sizes,
        vocab_multiple=given.get("multiple"),
        hetero=given.get("hetero", False),
    )


def test_older_and_newer_configs_say_the_same() -> None:
    assert architecture_from_config(FLAT, "") == architecture_from_config(NESTED, "")


def test_an_unknown_architecture_is_refused_with_the_supported_ones() -> None:
    with pytest.raises(ConfigError, match=r"mamba is not supported. Supported: qwen2_vl, .*llama"):
        architecture_from_config({"model_type": "mamba"}, "config.json")


def test_a_config_without_a_size_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="vocab_size"):
        architecture_from_config({**FLAT, "vocab_size": None}, "config.json")


@pytest.mark.parametrize(
    ("text", "rows"),
    [("32,0", ((32, 0),)), ("[1, 2]", ((1, 2),)), ("[[28]]", ((28,),)), ("[[1,2],[3,4]]", ((1, 2), (3, 4)))],
)
def test_layer_lists_in_all_forms(text: str, rows: Any) -> None:
    assert parse_layers(text, "--llm-pp-layers") == rows


@pytest.mark.parametrize("text", ["", "a", "1,-1", "[[1,2],[3]]", "[[],[]]", "1.5", "[1,[2]]", "[true]"])
def test_other_layer_lists_are_refused_by_flag(text: str) -> None:
    with pytest.raises(ConfigError, match="--vit-pp-layers"):
        parse_layers(text, "--vit-pp-layers")


def test_a_wrong_sum_names_the_list_and_the_difference() -> None:
    with pytest.raises(ConfigError, match=r"--llm-pp-layers \[\[14, 15\]\] sums to 29; the model has 28 .*1 too many"):
        layout_of(text=((14, 15),))
    with pytest.raises(ConfigError, match=r"--vit-pp-layers .*2 too few"):
        layout_of(text=((14, 14),), vision=((30, 0),))


def test_lists_of_different_length_are_refused() -> None:
    with pytest.raises(ConfigError, match="1 of 2"):
        layout_of(text=((14, 14),), vision=((32,),))


def test_query_groups_that_do_not_divide_name_the_sizes_that_do() -> None:
    with pytest.raises(ConfigError, match=r"--tp-size 4: the text module has 2 query groups .* fit: 1, 2\."):
        layout_of(tp=4, vit_tp=4)


def test_a_vocabulary_that_does_not_divide_is_refused_unless_padded() -> None:
    odd = {**FLAT, "vocab_size": 151655}
    with pytest.raises(ConfigError, match=r"151655 .*1 rows.*--make-vocab-size-divisible-by"):
        layout_of(odd, tp=2)
    assert layout_of(odd, tp=2, multiple=64).padded_vocab(151655) == 151680


def test_tensor_sizes_of_modules_must_divide_one_another() -> None:
    assert layout_of(tp=2, vit_tp=8).tensor_size == 8
    odd = {**FLAT, "num_key_value_heads": 3}
    with pytest.raises(ConfigError, match="divide"):
        layout_of({**odd, "intermediate_size": 8961, "vocab_size": 151938}, tp=3, vit_tp=4)


def test_layers_of_a_module_the_model_lacks_are_refused() -> None:
    with pytest.raises(ConfigError, match="no vision module"):
        layout_of({"model_type": "llama", **TEXT_CONFIG}, vision=((32,),))


def test_first_and_last_chunk_skip_stages_without_layers() -> None:
    placed = layout_of(text=((0, 10), (18, 0)), vision=((32, 0), (0, 0))).modules[TEXT]
    assert (placed.filled_chunks(), placed.start_of(1, 0)) == ([(0, 1), (1, 0)], 10)


@pytest.mark.parametrize(
    ("family", "shape", "found"),
    [
        ("each", (4, 32, 16), "stacked"),
        ("each", (4, 16, 32), "transposed"),
        ("each", (4, 32, 32), "stacked"),
        ("transposed", (4, 32, 32), "transposed"),  # its shape does not show how it lies
        ("transposed", (128, 16), "stacked"),
        ("stacked", (64, 32), "transposed"),
    ],
)
def test_the_shape_of_a_stack_shows_how_experts_lie(family: str, shape: tuple[int, ...], found: str) -> None:
    stored = {"model.layers.0.mlp.experts.down_proj": shape}
    assert stored_words(frozenset({family, "experts"}), stored, hidden=32) == {found, "experts"}
