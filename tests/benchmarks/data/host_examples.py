"""The example data of MindSpeed-MM: how many data.json are described, and frames beside the host's own processor.

python tests/benchmarks/data/host_examples.py MINDSPEED_MM [NUMBER]

Every data.json under examples/ gets data of its kind in a temporary folder (pictures, features, annotations); nothing
else of it is changed but the paths, the tokenizer (estimated) and, of features, the model.json beside it. NUMBER records
(2,000) are drawn for each description of videos or tiles and judged by the host's own code, taken from its source.
"""

from __future__ import annotations

import ast
import copy
import json
import os
import random
import re
import sys
import tempfile
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import msgspec
import numpy
import torch
from PIL import Image

from mindspeed_autoparallel.data import tiles
from mindspeed_autoparallel.data.describe import DescribeOptions, Reader
from mindspeed_autoparallel.data.latents import KINDS, LeftOut, check_resolution, frames_of
from mindspeed_autoparallel.data.video_parameters import Video
from mindspeed_autoparallel.errors import ConfigError

ENDS = ("</img>", "<|vision_end|>")


def main(host: Path, number: int) -> None:
    outcomes: Counter[str] = Counter()
    wrong = judged = 0
    for file in sorted((host / "examples").rglob("*.json")):
        try:
            data = json.loads(file.read_text())["dataset_param"]
        except (KeyError, TypeError, ValueError):
            continue
        kind = data.get("dataset_type", "none")
        try:
            described(file, data, kind)
            outcomes[f"{kind}: described"] += 1
        except (ConfigError, StopIteration) as error:
            outcomes[f"{kind}: not described"] += 1
            print(f"{file.relative_to(host)}: {str(error)[:160]}")
        if kind == "multimodal":
            differing = beside_internvl(host, data, number)
            judged, wrong = judged + number, wrong + differing
        if kind == "t2v":
            differing = beside_the_host(host, data["preprocess_parameters"], number)
            judged, wrong = judged + number, wrong + differing
    print(
        dict(outcomes),
        f"{sum(n for k, n in outcomes.items() if k.endswith(' described') and 'not' not in k)} described",
    )
    print(f"{judged} drawn records judged, {wrong} unlike the host")


def described(file: Path, data: dict, kind: str) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        basic = data["basic_parameters"]
        if kind == "huggingface":
            Image.new("RGB", (640, 480)).save(folder / "a.png")
            names = {"messages": "messages", "images": "images", **{k: v for k, v in data.get("attr", {}).items() if v}}
            roles = names.get("role_tag", "role"), names.get("content_tag", "content")
            record = {
                names["messages"]: [
                    dict(zip(roles, (who, text), strict=True))
                    for who, text in (("user", "<image>?"), ("assistant", "Yes."))
                ],
                names["images"]: ["a.png"],
            }
            (folder / "records.json").write_text(json.dumps([record]))
            basic.update(dataset=str(folder / "records.json"), dataset_dir=str(folder))
            # Vision sizes of Qwen2.5-VL: those of the example are in its weights' folder.
            model = folder / "model.json"
            model.write_text(json.dumps({"image_encoder": {"vision_encoder": {}}}))
        elif kind == "t2v":
            drawn = [draw(random.Random(seed), data["preprocess_parameters"]) for seed in range(50)]
            (folder / "data.json").write_text(json.dumps(drawn))
            (folder / "data.txt").write_text(f"{folder},{folder / 'data.json'}\n")
            basic["data_path"] = str(folder / "data.txt")
            model = model_beside(file, "examples/wan2.1/1.3b/t2v")
        elif kind == "feature":
            torch.save({"video": torch.zeros(16, 21, 60, 104), "prompt_ids": torch.zeros(1, 8, 4)}, folder / "a.pt")
            (folder / "data.jsonl").write_text(json.dumps({"file": "a.pt", "cap": "a"}) + "\n")
            basic.update(data_path=str(folder / "data.jsonl"), data_folder=str(folder))
            model = model_beside(file, "")
        elif kind == "multimodal":
            Image.new("RGB", (640, 480)).save(folder / "a.png")
            turns = [{"from": "human", "value": "<image>\n?"}, {"from": "gpt", "value": "Yes."}]
            (folder / "data.json").write_text(json.dumps([{"image": "a.png", "conversations": turns}]))
            basic.update(data_path=str(folder / "data.json"), data_folder=str(folder))
            model = folder / "model.json"
            model.write_text(json.dumps({"image_encoder": {"vision_encoder": {}}}))
        else:
            model = file
        (folder / "mm_data.json").write_text(json.dumps({"dataset_param": data}))
        options = DescribeOptions(bytes_per_token=0.0 if kind in KINDS else 4.0)
        found, _ = Reader(options=options, model_file=model).records(folder / "mm_data.json")
        if kind == "feature":
            assert found.rows[0][0] == 21 * 30 * 52, found.rows


def beside_internvl(host: Path, parameters: dict, number: int) -> int:
    """Return how many drawn conversations, with pictures of drawn sizes, have other lengths or tiles than the host's."""
    theirs, wrong = host_conversations(host), 0
    with tempfile.TemporaryDirectory() as scratch:
        (Path(scratch) / "none.json").write_text("[{}]")
        for seed in range(number):
            chance = random.Random(seed)
            given = {
                **parameters,
                "basic_parameters": {"data_path": f"{scratch}/none.json", "data_folder": scratch},
                "template_name": chance.choice(["internvl2_5", "internvit_qwen3"]),
                "tokenizer_config": None,
                "use_thumbnail": chance.random() < 0.5,
                "min_dynamic_patch": chance.choice([1, 1, 2, 5]),
                "max_dynamic_patch": chance.choice([1, 4, 6, 12]),
            }
            (Path(scratch) / "mm.json").write_text(json.dumps({"dataset_param": given}))
            record, sizes = conversation(chance), {}
            for name in [record["image"]] if isinstance(record["image"], str) else record["image"]:
                sizes[name] = chance.choice(
                    [(chance.randint(20, 3000), chance.randint(20, 3000)), (448, 448), (896, 448)]
                )
            tiles.picture_size = lambda path, sizes=sizes: sizes[path.name][::-1]
            length = chance.choice([0, 0, 900])
            records = tiles.TiledRecords(Path(scratch) / "mm.json")
            try:
                found = records.size_of(f"{scratch}/none.json[0]", record, byte_count, length)
                ours = (min(found.tokens, length or found.tokens), found.images)
            except ConfigError:
                ours = None
            wrong += ours != theirs(given, record, sizes, length)
    return wrong


def byte_count(text: str) -> int:
    """Count a token for every byte."""
    return len(text.encode())


def conversation(chance: random.Random) -> dict:
    """Return one conversation about one picture or several, with marks that may be missing or too many."""
    names = [f"{index}.png" for index in range(chance.randint(1, 3))]
    turns = [{"from": "system", "value": "Be short."}] if chance.random() < 0.2 else []
    marks = chance.choice([len(names), len(names), 1, 0, 4])
    for index in range(chance.randint(1, 3)):
        own = marks if index == 0 else 0
        turns += [
            {"from": "human", "value": "<image>\n" * own + "what?" + "<image>" * (chance.random() < 0.1)},
            {"from": "gpt", "value": "that " * chance.randint(1, 40)},
        ]
    return {"image": names[0] if len(names) == 1 and chance.random() < 0.7 else names, "conversations": turns}


def host_conversations(host: Path):
    """Return the host's tokens and tiles of a record by its own functions, or None where it draws another record."""
    utils = host / "mindspeed_mm" / "data" / "data_utils"
    marks = re.compile(r"(<\|\w+\|>|</?img>|<IMG_CONTEXT>)")

    class Tokenizer:
        add_bos_token, pad_token_id = False, -1

        def __init__(self, length: int) -> None:
            self.model_max_length = length or 2**40

        def __call__(self, texts, **unused):
            pieces = [marks.split(text) for text in ([texts] if isinstance(texts, str) else texts)]
            ids = [
                numpy.array(
                    [
                        number
                        for piece in row
                        for number in ([int(piece in ENDS)] if marks.fullmatch(piece) else [7] * len(piece.encode()))
                    ]
                )
                for row in pieces
            ]
            return SimpleNamespace(input_ids=ids)

    constants: dict = {}
    exec((utils / "constants.py").read_text(), constants)
    systems = {
        name: ast.literal_eval(text)
        for name, text in re.findall(
            r"name='(\w+)',\s+system_template=.*\n\s+system_message=('.*'),", (utils / "conversation.py").read_text()
        )
    }
    names = {
        "np": numpy, "torch": torch, "copy": copy, "transformers": SimpleNamespace(PreTrainedTokenizer=object),
        "Dict": dict, "MODEL_CONSTANTS": constants["MODEL_CONSTANTS"], "IGNORE_TOKEN_ID": -100,
        "get_args": lambda: SimpleNamespace(context_parallel_size=1),
        "get_conv_template": lambda name: SimpleNamespace(system_message=systems[name]),
    }  # fmt: skip
    for file, wanted in {
        "utils.py": ("preprocess_internvl2_5",),
        "multimodal_image_video_preprocess.py": ("find_closest_aspect_ratio", "dynamic_preprocess"),
    }.items():
        kept = [node for node in ast.parse((utils / file).read_text()).body if getattr(node, "name", "") in wanted]
        exec(compile(ast.Module(kept, []), file, "exec"), names)

    class Picture:
        def __init__(self, size):
            self.size = size

        def resize(self, size):
            return Picture(size)

        def crop(self, box):
            return self

    def judge(given: dict, record: dict, sizes: dict, length: int):
        one = isinstance(record["image"], str)
        pictures = [record["image"]] if one else record["image"]
        turns = copy.deepcopy(record["conversations"])
        if one and "<image>" not in turns[0]["value"]:
            turns[0]["value"] = "<image>\n" + turns[0]["value"]
        cut = [
            len(
                names["dynamic_preprocess"](
                    Picture(sizes[name]),
                    min_num=given["min_dynamic_patch"],
                    max_num=given["max_dynamic_patch"] // (1 if one else len(pictures)),
                    image_size=given["image_size"],
                    use_thumbnail=given["use_thumbnail"],
                )
            )
            for name in pictures
        ]
        of_tile = int((given["image_size"] // given["patch_size"]) ** 2 * given["down_sample_ratio"] ** 2)
        try:
            found = names["preprocess_internvl2_5"](
                given["template_name"],
                [turns],
                Tokenizer(length),
                [of_tile * number for number in cut],
                group_by_length=True,
                num_image=len(pictures),
            )["input_ids"]
        except ValueError:
            return None
        return (len(found), sum(cut)) if one or int((found == 1).sum()) == len(pictures) else None

    return judge


def model_beside(file: Path, otherwise: str) -> Path:
    """Return a model.json with a predictor in the folder, or in ``otherwise`` of the host."""
    host = next(parent for parent in file.parents if parent.name == "examples").parent
    for folder in (file.parent, *((host / otherwise,) if otherwise else ())):
        for each in sorted(folder.glob("*model*.json")):
            if "infer" not in each.name and "predictor" in json.loads(each.read_text()):
                return each
    raise StopIteration(f"no model.json with a predictor beside {file}")


def draw(chance: random.Random, video: dict) -> dict:
    """Return one record: sizes, lengths and gaps of every sort."""
    record = {
        "path": chance.choice(["a.mp4", "b.avi", "c.mkv"]),
        "cap": chance.choice(["a", "a", "a", None]),
        "resolution": {
            "height": chance.choice([720, 480, 1080, 100, 2000]),
            "width": chance.choice([1280, 832, 640, 90]),
        },
        "fps": chance.choice([24, 25.0, 29.97, 60, 12]),
        "duration": chance.uniform(0.05, 12),
        "num_frames": chance.choice([None, chance.randint(1, 400)]),
    }
    missing = chance.choice([*record, *[""] * 12])
    return {key: value for key, value in record.items() if key in ("path", "cap") or key != missing}


def beside_the_host(host: Path, parameters: dict, number: int) -> int:
    """Return how many drawn records our reading and the host's class judge differently."""
    video = msgspec.convert(parameters, Video)
    judge = host_processor(host, parameters)
    wrong = 0
    for seed in range(number):
        record = draw(random.Random(seed), parameters)
        try:
            ours = frames_of(record, video)
            check_resolution(record, video)
        except LeftOut:
            ours = None
        theirs = judge(json.loads(json.dumps(record)))
        wrong += ours != theirs
    return wrong


def host_processor(host: Path, parameters: dict):
    """Return the host's decision on a record: its frames, or None where it is left out."""
    utils = host / "mindspeed_mm" / "data" / "data_utils"
    names = {
        "np": numpy, "torch": torch, "os": os, "random": random, "VID_EXTENSIONS": (".mp4", ".avi", ".mov", ".mkv"),
        "IMG_EXTENSIONS": (".jpg", ".png"), "TENSOR_EXTENSIONS": (".pt",), "Counter": Counter,
    }  # fmt: skip
    taken = {
        "video_processor.py": ("OpensoraplanVideoProcessor",),
        "data_transform.py": ("maxhwresize", "calculate_centered_alignment", "TemporalRandomCrop"),
    }
    for file, wanted in taken.items():
        tree = ast.parse((utils / file).read_text())
        kept = [node for node in tree.body if getattr(node, "name", "") in wanted]
        for node in kept:
            node.decorator_list = []
            if isinstance(node, ast.ClassDef):
                node.bases = []
                node.body = [
                    part
                    for part in node.body
                    if getattr(part, "name", "") != "__init__" or node.name != "OpensoraplanVideoProcessor"
                ]
        code = ast.Module([ast.parse("from __future__ import annotations").body[0], *kept], [])
        exec(compile(ast.fix_missing_locations(code), file, "exec"), names)
    one = names["OpensoraplanVideoProcessor"]()
    given = {name: getattr(msgspec.convert(parameters, Video), name) for name in Video.__struct_fields__}
    for name, value in given.items():
        setattr(one, name, value)
    one.min_hxw = one.max_hxw // 4 if one.max_hxw is not None and one.min_hxw is None else one.min_hxw
    one.ae_stride_t, one.sp_size, one.generator = (one.vae_scale_factor or [4])[0], 1, torch.Generator()
    one.temporal_sample = names["TemporalRandomCrop"](one.num_frames)
    stats = SimpleNamespace(increment=lambda *_: None, collect=lambda *_: None)

    def judge(record: dict):
        taken_in = one._validate_caption(record, stats) and one._process_resolution(record, stats)
        return record["sample_num_frames"] if taken_in and one._process_temporal(record, stats) else None

    return judge


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 2000)
