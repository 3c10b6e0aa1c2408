"""data.json of MindSpeed-MM: the records to read, and how to convert them to tokens and patches."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from mindspeed_autoparallel.files import read_json
from reference_vlm.configuration import accepted_keys
from reference_vlm.configuration.section import Section

ITEMS_PER_SAMPLE = 1024
"""Most images, or clips, of a sample that dropout distinguishes."""


@dataclass(frozen=True, kw_only=True)
class DataDescription:
    """``files`` are mllm-format json files; paths inside them are relative to ``folder``."""

    file: Path
    files: tuple[Path, ...]
    folder: Path
    max_samples: int | None
    val_rate: float
    """Share of the records, taken from the end, that is kept for evaluation."""
    tokenizer: str | None
    min_pixels: int
    max_pixels: int
    train_on_prompt: bool
    shuffle: bool
    images_key: str
    audios_key: str
    messages_key: str
    role_tag: str
    content_tag: str
    user_tag: str
    assistant_tag: str
    system_tag: str


def read_data(file: Path) -> DataDescription:
    """Read ``file``, a data.json; ``ConfigError`` for anything wrong in it."""
    root = Section(read_json(file, "data description (--mm-data)"), file)
    parameters = root.child("dataset_param")
    parameters.accept(("dataset_type",))
    prepare = parameters.child("preprocess_parameters")
    prepare.accept(accepted_keys.DATA_PREPROCESS)
    basic = parameters.child("basic_parameters")
    basic.accept(accepted_keys.DATA_BASIC)
    names = parameters.child("attr")
    names.accept(accepted_keys.DATA_ATTRIBUTES)
    loader = root.child("dataloader_param")
    loader.accept(accepted_keys.DATALOADER)
    listed = [name for name in basic.text("dataset").split(",") if name]
    if not listed:
        raise basic.error("dataset", "", "one or more files separated by ','")
    tokenizer = prepare.raw("model_name_or_path")
    min_pixels = prepare.integer("image_min_pixels", 0, at_least=0)
    description = DataDescription(
        file=file,
        files=tuple(Path(name.strip()) for name in listed),
        folder=Path(basic.text("dataset_dir", ".")),
        max_samples=basic.integer("max_samples") if "max_samples" in basic else None,
        val_rate=basic.number("val_rate", 0.0, at_least=0.0, at_most=0.9),
        tokenizer=str(tokenizer) if tokenizer else None,
        min_pixels=min_pixels,
        max_pixels=prepare.integer("image_max_pixels", 1280 * 28 * 28, at_least=max(1, min_pixels)),
        train_on_prompt=basic.flag("train_on_prompt"),
        shuffle=loader.flag("shuffle", True),
        images_key=names.text("images", "images"),
        audios_key=names.text("audios", "audios"),
        messages_key=names.text("messages", "messages"),
        role_tag=names.text("role_tag", "role"),
        content_tag=names.text("content_tag", "content"),
        user_tag=names.text("user_tag", "user"),
        assistant_tag=names.text("assistant_tag", "assistant"),
        system_tag=names.text("system_tag", "system"),
    )
    basic.raw("max_samples")
    root.report_unknown_keys()
    return description
