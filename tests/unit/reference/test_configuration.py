"""model.json, data.json and tools.json: what is read, and what wrong values say."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from mindspeed_autoparallel.errors import ConfigError
from reference_vlm.configuration import describe_model, read_data, read_model, read_tools

EXAMPLE = Path(__file__).parents[3] / "docs" / "examples" / "qwen2vl_tiny"
FILE = Path("model.json")


@pytest.fixture
def values() -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads((EXAMPLE / "model.json").read_text())
    return loaded


def _set(values: dict[str, Any], path: str, value: Any) -> dict[str, Any]:
    changed = copy.deepcopy(values)
    *parents, last = path.split(".")
    inner = changed
    for name in parents:
        inner = inner[name]
    inner[last] = value
    return changed


VISION, TEXT = "image_encoder.vision_encoder.", "text_decoder."


def test_example_is_read_whole_without_an_unknown_key(capsys: pytest.CaptureFixture[str]) -> None:
    model = read_model(EXAMPLE / "model.json")
    assert model.vision is not None
    assert (model.vision.stack.num_layers, model.text.stack.num_query_groups, model.image_token_id) == (4, 2, 505)
    assert model.text.mrope_section == (2, 3, 3)
    assert model.audio is None
    assert capsys.readouterr().err == ""


def test_unknown_keys_are_named_once(values: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    describe_model(_set(_set(values, TEXT + "colour", 1), "taste", 2), FILE)
    errors = capsys.readouterr().err
    assert errors.count("taste") == 1
    assert errors.count("text_decoder.colour") == 1


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (TEXT + "num_layers", 0, "text_decoder.num_layers is 0; it must be a whole number of at least 1"),
        (TEXT + "num_layers", "4", "text_decoder.num_layers is '4'; it must be a whole number"),
        (TEXT + "hidden_size", 2.5, "text_decoder.hidden_size is 2.5"),
        (TEXT + "num_query_groups", 3, "a divisor of num_attention_heads (4)"),
        (TEXT + "normalization", "Batch", "one of LayerNorm, RMSNorm"),
        (TEXT + "freeze", "yes", "true or false"),
        (TEXT + "mrope_section", [2, 2, 2], "three counts that sum to half the head size (8)"),
        (TEXT + "rope_scaling", 1.5, "text_decoder.rope_scaling is 1.5; it must be an object"),
        (TEXT + "rope_scaling", {"mrope_section": 1e308}, "text_decoder.mrope_section is 1e+308"),
        (TEXT + "pipeline_num_layers", [5], "sums to 5; num_layers is 4: 1 layers too many"),
        (TEXT + "pipeline_num_layers", [2, 2], "needs 1 counts that sum to 4"),
        (TEXT + "pipeline_num_layers", [-4], "a list of layer counts of at least 0"),
        (VISION + "hidden_size", 24, "a multiple of 4 x num_attention_heads"),
        (VISION + "window_size", 30, "0 or a multiple of 28 pixels"),
        ("image_encoder.vision_projector.hidden_size", 63, "64, the width of the module it meets"),
        ("img_context_token_id", 512, "a whole number between 0 and 511"),
        ("text_decoder", [1], "must be an object"),
    ],
)
def test_wrong_value_names_file_key_and_what_is_allowed(
    values: dict[str, Any], path: str, value: Any, message: str
) -> None:
    with pytest.raises(ConfigError, match="json") as caught:
        describe_model(_set(values, path, value), FILE)
    assert message in str(caught.value)


def test_layers_per_stage_are_checked_against_the_pipeline_and_each_other(values: dict[str, Any]) -> None:
    staged = _set(_set(values, VISION + "pipeline_num_layers", [2, 2]), TEXT + "pipeline_num_layers", [0, 4])
    stages = describe_model(staged, FILE, 2).text.stack.stages
    assert (stages.first_chunk, stages.last_chunk, stages.first_layer(1)) == (1, 1, 0)
    with pytest.raises(ConfigError, match="must end on the text decoder's first stage"):
        describe_model(_set(staged, TEXT + "pipeline_num_layers", [1, 3]), FILE, 2)
    with pytest.raises(ConfigError, match="give the last stage at least 1 layer"):
        describe_model(
            _set(_set(staged, VISION + "pipeline_num_layers", [4, 0]), TEXT + "pipeline_num_layers", [4, 0]), FILE, 2
        )


def test_a_first_stage_without_parameters_is_refused_before_anything_is_built(values: dict[str, Any]) -> None:
    staged = _set(_set(values, VISION + "pipeline_num_layers", [0, 4, 0]), TEXT + "pipeline_num_layers", [0, 0, 4])
    with pytest.raises(ConfigError, match="leave stage 0 without a layer, the first is on stage 1"):
        describe_model(staged, FILE, 3)


def test_virtual_stages_are_lists_of_lists(values: dict[str, Any]) -> None:
    staged = _set(values, VISION + "pipeline_num_layers", [[2, 2], [0, 0]])
    staged = _set(staged, TEXT + "pipeline_num_layers", [[0, 1], [1, 2]])
    stages = describe_model(staged, FILE, 2).text.stack.stages
    assert stages.flat == (0, 1, 1, 2)
    assert [stages.first_layer(chunk) for chunk in range(4)] == [0, 0, 1, 2]


def test_without_a_split_encoders_lie_first_and_text_is_even(values: dict[str, Any]) -> None:
    for path in (VISION, TEXT):
        values = _set(values, path + "pipeline_num_layers", None)
    model = describe_model(values, FILE, 3)
    assert model.vision is not None
    assert model.vision.stack.stages.flat == (4, 0, 0)
    assert model.text.stack.stages.flat == (2, 1, 1)


def test_recompute_counts_are_per_stage_and_bounded_by_its_layers(values: dict[str, Any]) -> None:
    staged = _set(_set(values, TEXT + "recompute_granularity", "full"), TEXT + "recompute_num_layers", [3])
    assert describe_model(staged, FILE).text.stack.recompute_counts == (3,)
    with pytest.raises(ConfigError, match="recompute_num_layers is"):
        describe_model(_set(staged, TEXT + "recompute_num_layers", [5]), FILE)


def test_data_description(tmp_path: Path) -> None:
    data = read_data(EXAMPLE / "data.json")
    assert [file.name for file in data.files] == ["pictures.json"]
    values = json.loads((EXAMPLE / "data.json").read_text())
    basic = values["dataset_param"]["basic_parameters"]
    basic["dataset"], basic["max_samples"] = "a.json,b.json", 3
    (tmp_path / "data.json").write_text(json.dumps(values))
    data = read_data(tmp_path / "data.json")
    assert ([str(file) for file in data.files], data.max_samples) == (["a.json", "b.json"], 3)
    basic["max_samples"] = 0
    (tmp_path / "data.json").write_text(json.dumps(values))
    with pytest.raises(ConfigError, match="max_samples is 0; it must be a whole number of at least 1"):
        read_data(tmp_path / "data.json")


def test_tools_that_are_switched_on_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "tools.json").write_text('{"profile": {"enable": true}, "memory_profile": {"enable": false}}')
    read_tools(tmp_path / "tools.json")
    assert "tools without effect on this host: profile\n" in capsys.readouterr().err
