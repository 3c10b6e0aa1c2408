"""Text -> token ids: a Hugging Face tokenizer if data.json names one, plain bytes otherwise (no download)."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

from mindspeed_autoparallel.errors import ConfigError

_NUM_BYTES = 256


class Tokenizer(Protocol):
    """The tokenizer interface for samples, with the ids of turn marks and padding."""

    turn_start: int
    turn_end: int
    padding: int

    def encode(self, text: str) -> list[int]: ...


class ByteTokenizer:
    """One token per byte of UTF-8; three more for turns and padding."""

    turn_start, turn_end, padding = _NUM_BYTES, _NUM_BYTES + 1, _NUM_BYTES + 2
    num_tokens = _NUM_BYTES + 3

    def encode(self, text: str) -> list[int]:
        return list(text.encode("utf-8"))


class HuggingFaceTokenizer:
    """The tokenizer in a local folder, with the turn marks of Qwen."""

    def __init__(self, folder: Path) -> None:
        try:
            from transformers import AutoTokenizer
        except ImportError as error:
            raise ConfigError(
                "model_name_or_path names a tokenizer, which needs the package transformers: pip install transformers, "
                "or remove the key to train on bytes."
            ) from error
        try:
            self._inner: Any = AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
        except (OSError, ValueError) as error:
            raise ConfigError(f"cannot load a tokenizer from {folder}: {error}") from error
        self.turn_start = self._id("<|im_start|>")
        self.turn_end = self._id("<|im_end|>")
        self.padding = self._inner.pad_token_id if self._inner.pad_token_id is not None else self.turn_end

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self._inner.encode(text, add_special_tokens=False)
        return ids

    def _id(self, token: str) -> int:
        number = self._inner.convert_tokens_to_ids(token)
        fallback = self._inner.eos_token_id
        return int(number if number is not None and number != self._inner.unk_token_id else fallback)


def make_tokenizer(folder: str | None, special_ids: dict[str, int], vocab_size: int) -> Tokenizer:
    """Load ``folder``, model_name_or_path of data.json. ``special_ids`` must not collide with the byte tokenizer's
    ids."""
    if folder is not None:
        return HuggingFaceTokenizer(Path(folder))
    for name, number in special_ids.items():
        if not ByteTokenizer.num_tokens <= number < vocab_size:
            raise ConfigError(
                f"{name} is {number}; with the byte tokenizer (no model_name_or_path in data.json) it must be between "
                f"{ByteTokenizer.num_tokens} and vocab_size - 1 = {vocab_size - 1}."
            )
    return ByteTokenizer()
