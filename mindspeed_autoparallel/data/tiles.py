"""Data of MindSpeed-MM's InternVL (``multimodal``): conversations whose pictures are cut into square tiles.

Turns are counted with the marks of the host's templates. The image encoder processes one tile per item.
"""

from __future__ import annotations

import functools
import hashlib
from pathlib import Path
from typing import Annotated

import msgspec

from mindspeed_autoparallel.data.latents import LeftOut
from mindspeed_autoparallel.data.media import picture_size
from mindspeed_autoparallel.data.records import RecordSet, SizeOf, read_data_file, read_records
from mindspeed_autoparallel.data.sizes import Counter, text_counter
from mindspeed_autoparallel.data.work import SampleSize
from mindspeed_autoparallel.errors import ConfigError
from mindspeed_autoparallel.files import shown

KIND = "multimodal"
_MARK, _AROUND_PICTURE, _AROUND_TURN = "<image>", 2, 2
_SYSTEM = {
    "internvl2_5": "你是书生·万象，英文名是InternVL，"
    "是由上海人工智能实验室、清华大学及多家合作单位联合开发的多模态大语言模型。",
    "internvit_qwen3": "",
}
"""The host's text for the model before a conversation without a system turn."""
_ROLES = {"human": "user", "gpt": "assistant"}
_Count = Annotated[int, msgspec.Meta(ge=1, le=2**12)]


class _Basic(msgspec.Struct):
    data_path: str = ""
    data_folder: str = ""
    repeat_time: Annotated[float, msgspec.Meta(ge=0, le=1000)] = 1.0


class _Tokenizer(msgspec.Struct):
    from_pretrained: str | None = None


class _Parameters(msgspec.Struct):
    basic_parameters: list[_Basic] | _Basic
    template_name: str = ""
    tokenizer_config: _Tokenizer | None = None
    image_size: _Count = 224
    patch_size: _Count = 14
    down_sample_ratio: Annotated[float, msgspec.Meta(gt=0, le=1)] = 0.5
    group_by_length: bool = False
    dynamic_image_size: bool = False
    use_thumbnail: bool = False
    min_dynamic_patch: Annotated[int, msgspec.Meta(ge=1, le=256)] = 1
    max_dynamic_patch: Annotated[int, msgspec.Meta(ge=1, le=256)] = 6


class TiledRecords:
    """The records of one data.json of this kind, and the size of each."""

    def __init__(self, file: Path) -> None:
        """Read data.json and its records; raises ``ConfigError`` for unsupported values."""
        given = read_data_file(file, _Parameters)
        if given.template_name not in _SYSTEM:
            raise ConfigError(
                f"{file}: template_name {shown(given.template_name)} is not read, only {', '.join(_SYSTEM)}. Give the "
                "lengths: --lengths FILE."
            )
        if given.image_size < given.patch_size:
            raise ConfigError(f"{file}: image_size {given.image_size} is below patch_size {given.patch_size}.")
        self._given = given
        self.settings = (repr(given),)
        """The values of data.json that affect sizes."""
        self._tokenizer = given.tokenizer_config.from_pretrained if given.tokenizer_config else None
        sets = given.basic_parameters if isinstance(given.basic_parameters, list) else [given.basic_parameters]
        self.files = tuple(Path(one.data_path) for one in sets)
        self.records = _repeated(sets)
        self._folder_of = {one.data_path: Path(one.data_folder) for one in sets}
        self._side = given.image_size // given.patch_size

    def counting(self, bytes_per_token: float, seq_length: int) -> tuple[SizeOf, str]:
        """Return the function for the size of a record, and a description of the token count."""
        count, tokens_by = text_counter(self._tokenizer, bytes_per_token)
        return (lambda name, record: self.size_of(name, record, count, seq_length)), tokens_by

    def size_of(self, name: str, record: dict[str, object], count: Counter, seq_length: int) -> SampleSize:
        """Return the sizes of one record, texts not cut; raises ``LeftOut`` if training skips it, ``ConfigError`` if it
        is broken."""
        folder = self._folder_of[name.rpartition("[")[0]]
        pictures, turns = record.get("image"), _turns(record)
        if not pictures:
            if record.get("video"):
                raise ConfigError("it has a video, whose frames are not read. Give the lengths: --lengths FILE.")
            raise LeftOut("no image: the host's class does not accept text alone.")
        alone = isinstance(pictures, str)
        names = [pictures] if alone else pictures
        if not isinstance(names, list) or not all(isinstance(name, str) and name for name in names):
            raise ConfigError("'image' must be a file name or a list of them.")
        if alone and _MARK not in turns[0][1]:
            turns[0] = (turns[0][0], f"{_MARK}\n{turns[0][1]}")
        most = self._given.max_dynamic_patch // (1 if alone else len(names))
        tiles = [self.tiles_of(*picture_size(folder / name), most) for name in names]
        of_tile = int(self._side**2 * self._given.down_sample_ratio**2)
        tokens = self._num_tokens(turns, [of_tile * number for number in tiles], count, seq_length, cut=alone)
        if not self._given.group_by_length:
            if not seq_length:
                raise ConfigError("without group_by_length the host pads every sample to --seq-length: give it.")
            tokens = seq_length
        number = sum(tiles)
        return SampleSize(
            tokens=tokens, images=number, patches=number * self._side**2, squared_patches=number * self._side**4
        )

    def tiles_of(self, height: int, width: int, most: int) -> int:
        """Return the tiles that the host cuts a picture into, the thumbnail included; ``most``: without it."""
        given = self._given
        if not given.dynamic_image_size:
            return 1
        best, least = (1, 1), float("inf")
        for columns, rows in _ratios(given.min_dynamic_patch, most):
            distance = abs(width / height - columns / rows)
            # Of two equally near ratios the later, larger one, if the picture fills more than half of it.
            fills = width * height > 0.5 * given.image_size**2 * columns * rows
            if distance < least or (distance == least and fills):
                best, least = (columns, rows), distance
        number = best[0] * best[1]
        return number + (given.use_thumbnail and number != 1)

    def _num_tokens(
        self, turns: list[tuple[str, str]], pictures: list[int], count: Counter, seq_length: int, *, cut: bool
    ) -> int:
        """Return the tokens of a conversation; ``pictures``: tokens of each. ``cut``: a picture may end at
        ``seq_length``."""
        total, end_of_pictures, left = 0, 0, list(pictures)
        if turns[0][0] != "system":
            turns = [("system", _SYSTEM[self._given.template_name]), *turns]
        for role, text in turns:
            total += _AROUND_TURN + count("\n")
            pieces = text.split(_MARK) if role == "human" else [text]
            kept = min(len(left), len(pieces) - 1)
            # Marks without a picture remain text.
            pieces = [*pieces[:kept], _MARK.join(pieces[kept:])]
            total += count(f"{_ROLES.get(role, role)}\n{pieces[0]}")
            for piece in pieces[1:]:
                total += _AROUND_PICTURE + left.pop(0)
                end_of_pictures = total
                total += count(piece) if piece else 0
        if left:
            raise ConfigError(f"{len(pictures)} images, but {len(pictures) - len(left)} {_MARK} marks of a human.")
        if not cut and 0 < seq_length < end_of_pictures:
            raise LeftOut(f"its images reach beyond --seq-length {seq_length}.")
        return total


def _repeated(sets: list[_Basic]) -> RecordSet:
    """Return the records of every set, repeated by its number, or its first part."""
    digest = hashlib.sha256()
    records: list[tuple[str, bytes]] = []
    for one in sets:
        found = read_records([Path(one.data_path)])
        digest.update(found.sha256.encode())
        times = one.repeat_time
        if times > 1 and times != int(times):
            raise ConfigError(f"repeat_time {times:g} of {one.data_path} must be a whole number or below 1.")
        records += found.records[: int(len(found.records) * times)] if times < 1 else found.records * int(times)
    if not records:
        raise ConfigError("basic_parameters has no records, or repeat_time leaves none.")
    return RecordSet(records=tuple(records), sha256=digest.hexdigest())


def _turns(record: dict[str, object]) -> list[tuple[str, str]]:
    given = record.get("conversations")
    turns = [
        (one.get("from"), one.get("value")) if isinstance(one, dict) else (None, None)
        for one in (given if isinstance(given, list) else [])
    ]
    found = [(role, text) for role, text in turns if isinstance(role, str) and isinstance(text, str)]
    known = ("system", *_ROLES)
    if (
        not found
        or len(found) != len(turns)
        or not all(role in (known if place == 0 else _ROLES) for place, (role, _) in enumerate(found))
    ):
        raise ConfigError("'conversations' must be a list of turns, 'from' human or gpt (first also system), 'value'.")
    return found


@functools.lru_cache
def _ratios(least: int, most: int) -> tuple[tuple[int, int], ...]:
    """Return (columns, rows) with ``least`` to ``most`` tiles, fewer tiles first."""
    found = {
        (columns, rows)
        for number in range(least, most + 1)
        for columns in range(1, number + 1)
        for rows in range(1, number + 1)
        if least <= columns * rows <= most
    }
    return tuple(sorted(found, key=lambda ratio: ratio[0] * ratio[1]))
