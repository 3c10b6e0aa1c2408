"""Data of video generators: rows of latents from records and from headers of features, by hand."""

import json
import pickle
import zipfile

import pytest

from mindspeed_autoparallel.data.describe import DescribeOptions, Reader
from mindspeed_autoparallel.data.media import shape_in
from mindspeed_autoparallel.errors import ConfigError

GOOD = {
    "path": "a.mp4", "cap": "a cat", "resolution": {"height": 720, "width": 1280}, "fps": 24, "duration": 10,
}  # fmt: skip
PREPARE = {
    "video_processor_type": "OpensoraplanVideoProcessor", "num_frames": 49, "min_num_frames": 5, "auto_interval": False,
    "max_height": 480, "max_width": 832, "max_hxw": 399360, "drop_short_ratio": 0.0, "hw_stride": 8,
    "force_resolution": False, "hw_aspect_thr": 2.0,
    "train_pipeline": {"video": [{"trans_type": "CenterCropResizeVideo", "param": {"transform_size": "auto"}}]},
}  # fmt: skip
WAN = {"predictor": {"patch_size": [1, 2, 2], "out_dim": 16}}


def described(tmp_path, kind, records, model=WAN, prepare=PREPARE, options=None, **basic):
    (tmp_path / "model.json").write_text(json.dumps(model))
    data = {"dataset_type": kind, "basic_parameters": basic, "preprocess_parameters": prepare}
    if kind == "t2v":
        (tmp_path / "videos.json").write_text(json.dumps(records))
        (tmp_path / "data.txt").write_text(f"{tmp_path},{tmp_path / 'videos.json'}\n")
        data["basic_parameters"] = {"data_path": str(tmp_path / "data.txt"), "data_storage_mode": "combine", **basic}
    (tmp_path / "data.json").write_text(json.dumps({"dataset_param": data}))
    reader = Reader(options=options or DescribeOptions(), model_file=tmp_path / "model.json")
    return reader.records(tmp_path / "data.json")


def test_frames_are_those_that_the_autoencoder_takes_and_pixels_those_of_the_crop(tmp_path):
    short = {**GOOD, "duration": 0.5}  # 12 frames: 9 of them make 3 latents
    data, left = described(tmp_path, "t2v", [GOOD, short, GOOD])
    assert dict(zip([row[0] for row in data.rows], data.weights, strict=True)) == {13 * 30 * 52: 2, 3 * 30 * 52: 1}
    assert left == () and data.source.tokens_by == "latents"
    wide = {"predictor": {"patch_size": [1, 2, 2], "out_dim": 48}}
    assert described(tmp_path, "t2v", [GOOD], wide)[0].rows[0][0] == 13 * 15 * 26
    hunyuan = {"predictor": {"patch_size": [1, 1, 1]}, "ae": {"ffactor_spatial": 16, "ffactor_temporal": 4}}
    assert described(tmp_path, "t2v", [GOOD], hunyuan)[0].rows[0][0] == 13 * 30 * 52


def test_records_that_training_leaves_out_are_left_out_and_counted(tmp_path):
    others = [
        {**GOOD, "cap": None},
        {**GOOD, "resolution": {"height": 100, "width": 90}},
        {**GOOD, "resolution": {"height": 2000, "width": 500}},
        {**GOOD, "duration": 0.1},
        {key: value for key, value in GOOD.items() if key != "fps"},
    ]
    data, left = described(tmp_path, "t2v", [GOOD, *others])
    assert (data.source.num_broken, data.weights) == (5, (1,))
    for line, word in zip(left, ("no cap", "too small", "another shape", "min_num_frames 5", "no fps"), strict=True):
        assert word in line


@pytest.mark.parametrize(
    ("record", "word"),
    [
        ({**GOOD, "path": "a.png"}, "is an image"),
        ({**GOOD, "path": 3}, "needs a string 'path'"),
        ({**GOOD, "fps": "fast"}, "fps is fast"),
    ],
)
def test_broken_records_are_named(tmp_path, record, word):
    with pytest.raises(ConfigError, match=word):
        described(tmp_path, "t2v", [GOOD, record])
    data, broken = described(tmp_path, "t2v", [GOOD, record], options=DescribeOptions(skip_broken=True))
    assert data.weights == (1,) and word in broken[0]


def test_features_are_read_by_their_headers(tmp_path):
    torch = pytest.importorskip("torch")
    batch = torch.zeros(2, 16, 21, 60, 104)
    torch.save(
        {"video": batch[1], "prompt_ids": torch.zeros(8, 4, dtype=torch.bfloat16), "name": "a"}, tmp_path / "a.pt"
    )
    (tmp_path / "data.jsonl").write_text(json.dumps({"file": "a.pt"}) + "\n")
    data, _ = described(
        tmp_path, "feature", None, data_path=str(tmp_path / "data.jsonl"), data_folder=str(tmp_path), prepare={}
    )
    assert data.rows[0][0] == 21 * 30 * 52
    with pytest.raises(ConfigError, match="holds no tensor 'latents'"):
        shape_in(tmp_path / "a.pt", "latents")


def test_features_that_would_run_code_are_refused(tmp_path):
    class Runs:
        def __reduce__(self):
            return print, ("ran",)

    with zipfile.ZipFile(tmp_path / "a.pt", "w") as made:
        made.writestr("a/data.pkl", pickle.dumps({"video": Runs()}))
    with pytest.raises(ConfigError, match=r"holds builtins.print, which is not read"):
        shape_in(tmp_path / "a.pt", "video")
    (tmp_path / "b.pt").write_bytes(b"no archive")
    with pytest.raises(ConfigError, match=r"cannot read .*b.pt"):
        shape_in(tmp_path / "b.pt", "video")


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"model": {"ae": {}}}, "predictor.patch_size"),
        ({"prepare": {**PREPARE, "train_pipeline": {}}}, "CenterCropResizeVideo"),
        ({"prepare": {**PREPARE, "video_processor_type": "CogVideoXProcessor"}}, "CogVideoXProcessor"),
        ({"options": DescribeOptions(seq_length=4)}, "--seq-length have no effect"),
        ({"data_storage_mode": "standard"}, "data_storage_mode"),
    ],
)
def test_unsupported_files_are_refused_by_name(tmp_path, changes, word):
    with pytest.raises(ConfigError, match=word):
        described(tmp_path, "t2v", [GOOD], **changes)


HOSTILE = (
    None,
    True,
    -1,
    0,
    1,
    1e-300,
    1e300,
    2**70,
    -0.5,
    "",
    "auto",
    "x\0y",
    "/dev/null",
    [],
    [0],
    [[]],
    {},
    {"a": 1},
)
"""What a key may hold by mistake; a description holds one at a time."""


def replaced(given, path, value):
    """Return a copy with ``value`` at ``path``."""
    if not path:
        return value
    key, *rest = path
    copy = list(given) if isinstance(given, list) else dict(given)
    copy[key] = replaced(given[key], rest, value)
    return copy


def places(given, path=()):
    """Yield the path of every value, objects and lists too."""
    yield list(path)
    for key, child in given.items() if isinstance(given, dict) else enumerate(given) if isinstance(given, list) else ():
        yield from places(child, (*path, key))


def test_hostile_values_of_every_key_are_refused_or_read_but_raise_nothing_else(tmp_path):
    fixed = {"transform_size": {"max_height": 480, "max_width": 832}}
    every = {
        **PREPARE, "frame_interval": 1, "train_fps": 24, "speed_factor": 1.0, "min_hxw": 0, "vae_scale_factor": [4, 8, 8],
        "train_pipeline": {"video": [{"trans_type": "CenterCropResizeVideo", "param": fixed}], "video_only": []},
    }  # fmt: skip
    model = {**WAN, "ae": {"ffactor_spatial": 8, "ffactor_temporal": 4}}
    whole = {"records": [{**GOOD, "num_frames": 200}], "model": model, "prepare": every}
    tried = refused = 0
    for flags in ({}, {"auto_interval": True}, {"force_resolution": True}):
        base = {**whole, "prepare": {**every, **flags}}
        for path in places(base):
            for value in HOSTILE if len(path) > 1 else ():
                tried += 1
                try:
                    data, _ = described(tmp_path, "t2v", **replaced(base, path, value))
                    assert data.rows[0][0] > 0, (path, value)
                except ConfigError as error:
                    assert "\n" not in str(error), (path, value)
                    refused += 1
    assert tried > 1500 and 0.3 * tried < refused < tried


def test_hostile_features_and_lists_of_data_sets_are_refused_in_one_line(tmp_path):
    torch = pytest.importorskip("torch")
    for shape in ((), (0, 1, 1, 1), (16, 1, 1, 1), (16, 21, 60)):
        torch.save({"video": torch.zeros(shape)}, tmp_path / "a.pt")
        (tmp_path / "data.jsonl").write_text(json.dumps({"file": "a.pt"}))
        with pytest.raises(ConfigError):
            described(tmp_path, "feature", None, data_path=str(tmp_path / "data.jsonl"), data_folder=str(tmp_path))
    for name in (*HOSTILE, "missing.pt", "../a.pt", "."):
        (tmp_path / "data.jsonl").write_text(json.dumps({"file": name}))
        with pytest.raises(ConfigError):
            described(tmp_path, "feature", None, data_path=str(tmp_path / "data.jsonl"), data_folder=str(tmp_path))
    for lines in ("", "a", "a,b\0c", ",", f"{tmp_path},{tmp_path}", "\x00"):
        (tmp_path / "list.txt").write_text(lines)
        with pytest.raises(ConfigError):
            described(tmp_path, "t2v", [GOOD], data_path=str(tmp_path / "list.txt"))
