"""Data of MindSpeed-MM's InternVL: tiles and tokens of conversations, by hand. Beside the host: host_examples.py."""

import json

import pytest

from mindspeed_autoparallel.data.describe import DescribeOptions, Reader
from mindspeed_autoparallel.errors import ConfigError

GIVEN = {
    "dataset_type": "multimodal", "template_name": "internvit_qwen3", "image_size": 448, "patch_size": 14,
    "down_sample_ratio": 0.5, "group_by_length": True, "dynamic_image_size": True, "use_thumbnail": True,
    "max_dynamic_patch": 12,
}  # fmt: skip
TURNS = [{"from": "human", "value": "<image>\nwhat?"}, {"from": "gpt", "value": "a cat"}]
SYSTEM, HUMAN, ANSWER = 2 + 7 + 1, 2 + 5 + 1 + 6 + 2, 2 + 10 + 5 + 1
"""Tokens of "system\\n", of "user\\n", line end, the question and the marks around its picture, and of the answer."""


def described(folder, records, options=None, basic=None, **changes):
    image = pytest.importorskip("PIL.Image")
    for name, size in {"square.png": (448, 448), "wide.png": (1792, 448)}.items():
        image.new("RGB", size).save(folder / name)
    (folder / "records.json").write_text(json.dumps(records))
    places = {"data_path": str(folder / "records.json"), "data_folder": str(folder)}
    sets = [{**places, **one} for one in basic] if isinstance(basic, list) else {**places, **(basic or {})}
    (folder / "data.json").write_text(json.dumps({"dataset_param": {**GIVEN, "basic_parameters": sets, **changes}}))
    (folder / "model.json").write_text("{}")
    options = options or DescribeOptions(bytes_per_token=1.0)
    return Reader(options=options, model_file=folder / "model.json").records(folder / "data.json")


def test_pictures_are_cut_into_tiles_and_a_thumbnail(tmp_path):
    records = [{"image": name, "conversations": TURNS} for name in ("square.png", "wide.png")]
    data, left = described(tmp_path, records)
    text = SYSTEM + HUMAN + ANSWER
    # 12 tiles at most: 4 x 1 and a thumbnail, each 32 x 32 patches and a quarter as many tokens.
    assert sorted(row[:4] for row in data.rows) == [
        (text + 256, 1, 1024, 1024**2),
        (text + 5 * 256, 5, 5 * 1024, 5 * 1024**2),
    ]
    assert left == ()


def test_a_list_of_pictures_shares_the_tiles_and_sets_are_repeated(tmp_path):
    two = [{"from": "human", "value": "<image><image>"}, {"from": "gpt", "value": "a cat"}]
    records = [{"image": ["wide.png", "wide.png"], "conversations": two}]
    data, _ = described(tmp_path, records, basic=[{"repeat_time": 2}, {}], max_dynamic_patch=6)
    # 3 tiles of each at most, and its thumbnail.
    assert data.rows[0][:3] == (SYSTEM + 2 + 5 + 1 + 4 + 2 * 4 * 256 + ANSWER, 8, 8 * 1024)
    assert data.weights == (3,)


def test_without_grouping_the_host_pads_every_sample(tmp_path):
    record = {"image": "square.png", "conversations": TURNS}
    options = DescribeOptions(bytes_per_token=1.0, seq_length=2048)
    assert described(tmp_path, [record], options, group_by_length=False)[0].rows[0][0] == 2048
    with pytest.raises(ConfigError, match="pads every sample to --seq-length"):
        described(tmp_path, [record], group_by_length=False)


def test_records_that_training_leaves_out_are_counted(tmp_path):
    good = {"image": "square.png", "conversations": TURNS}
    beyond = {"image": ["square.png"], "conversations": TURNS}
    options = DescribeOptions(bytes_per_token=1.0, seq_length=100)
    data, left = described(tmp_path, [good, {"conversations": TURNS}, beyond], options)
    assert data.weights == (1,)
    assert [word in line for word, line in zip(("no image", "reach beyond"), left, strict=True)] == [True, True]


@pytest.mark.parametrize(
    ("record", "changes", "word"),
    [
        ({"video": "a.mp4"}, {}, "it has a video"),
        ({"image": ["square.png", "square.png"]}, {}, "2 images, but 1 <image> marks"),
        ({"image": 3}, {}, "file name or a list"),
        ({"image": "square.png", "conversations": [{"from": "bot", "value": "x"}]}, {}, "'from' human or gpt"),
        ({"image": "none.png"}, {}, "cannot read the image"),
        ({"image": "square.png"}, {"template_name": "deepseek"}, "template_name deepseek is not read"),
        ({"image": "square.png"}, {"max_dynamic_patch": 10**9}, "max_dynamic_patch"),
        ({"image": "square.png"}, {"image_size": 7}, "image_size 7 is below patch_size 14"),
        ({"image": "square.png"}, {"basic_parameters": []}, "has no records"),
        ({}, {"dataset_type": "vace"}, "extract features: give the data.json of the training"),
        ({}, {"dataset_type": "bagel"}, "packs samples to max_num_tokens"),
    ],
)
def test_unsupported_records_and_settings_are_named(tmp_path, record, changes, word):
    with pytest.raises(ConfigError, match=word):
        described(tmp_path, [{"conversations": TURNS, **record}], **changes)
