"""Move weights between Hugging Face and training checkpoints, and from one layout to another.

convert hf-to-mm HF_FOLDER TARGET --plan plan.json
convert hf-to-mm HF_FOLDER TARGET --llm-pp-layers 1,10,10,7 --vit-pp-layers 32,0,0,0 --tp-size 2
convert mm-to-hf CHECKPOINT TARGET --hf-dir HF_FOLDER
convert resplit  CHECKPOINT TARGET --hf-dir HF_FOLDER --plan plan.json
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from mindspeed_autoparallel.cli._unused_flags import refuse
from mindspeed_autoparallel.errors import ConfigError
from mindspeed_autoparallel.whole_numbers import COUNT, LARGE_COUNT

if TYPE_CHECKING:
    from mindspeed_autoparallel.weights.layouts import CheckpointLayout
    from mindspeed_autoparallel.weights.spelling import Spelling

_SIZES = ("tp_size", "vit_tp_size", "audio_tp_size", "ep_size", "etp_size")
_OF_A_LAYOUT = ("llm_pp_layers", "vit_pp_layers", "audio_pp_layers", *_SIZES, "hetero")
_WRITTEN = ("make_vocab_size_divisible_by", "transformer_impl", "experts", "layers", "format")
"""Flags of the form in which a training checkpoint is written."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("direction", choices=("hf-to-mm", "mm-to-hf", "resplit"), help="hf-to-mm, mm-to-hf or resplit")
    add("source", type=Path, help="Hugging Face folder (hf-to-mm) or checkpoint folder")
    add("target", type=Path, help="folder to write")
    add("--hf-dir", type=Path, help="original Hugging Face folder with config.json, tokenizer and tensor names")
    add("--plan", type=Path, help="take the layout from this plan")
    add("--llm-pp-layers", help="text layers per stage, such as 1,10,10,7; with virtual stages: [[14],[14]]")
    add("--vit-pp-layers", help="vision layers per stage (default: all on the first)")
    add("--audio-pp-layers", help="audio layers per stage (default: all on the first)")
    add("--tp-size", type=COUNT, help="tensor parallel size (default 1)")
    add("--vit-tp-size", type=COUNT, help="tensor parallel size of the vision module")
    add("--audio-tp-size", type=COUNT, help="tensor parallel size of the audio module")
    add("--ep-size", type=COUNT, default=1, help="expert parallel size (dense parts are replicated)")
    add("--etp-size", type=COUNT, help="tensor parallel size of experts (default: --tp-size)")
    add("--names", choices=("megatron", "mindspeed_llm"), default="megatron", help="host whose tensor names are used")
    add(
        "--transformer-impl",
        choices=("local", "transformer_engine"),
        help="layer implementation of the host (default: local for mm, transformer_engine for torch_dist)",
    )
    add(
        "--experts", choices=("each", "grouped"), default="each", help="experts of a rank as separate tensors or as one"
    )
    add(
        "--layers",
        choices=("stacked", "each"),
        default="stacked",
        help="torch_dist: each if the host's --moe-layer-freq is a list",
    )
    add("--hetero", action="store_true", help="write whole encoders into every stage's file")
    add("--make-vocab-size-divisible-by", type=COUNT, metavar="N", help="pad the vocabulary as training does")
    add("--format", choices=("mm", "torch_dist", "dcp"), default="mm", help="format of the written checkpoint")
    add("--weights-only", action="store_true", help="resplit: drop the optimizer state")
    add("--max-shard-mib", type=LARGE_COUNT, default=4096, help="size of the written safetensors shards")
    add("--overwrite", action="store_true", help="replace an existing target")
    add("--json", action="store_true", help="print the result as JSON")


def run(arguments: argparse.Namespace) -> int:
    from mindspeed_autoparallel.weights import conversion

    _check_flags(arguments)
    started = time.monotonic()
    result: dict[str, object] = {"direction": arguments.direction, "target": str(arguments.target)}
    show = _ProgressLine()
    source, target = arguments.source, arguments.target
    common = {"overwrite": arguments.overwrite, "progress": show}
    written = {"file_format": arguments.format, "spelling": _spelling(arguments), **common}
    if arguments.direction == "mm-to-hf":
        most_bytes = arguments.max_shard_mib * 1024**2
        conversion.checkpoint_to_huggingface(
            source, _hf_dir(arguments), target, max_shard_bytes=most_bytes, host=arguments.names, **common
        )
    elif arguments.direction == "hf-to-mm":
        conversion.huggingface_to_checkpoint(source, target, _layout(arguments, source), **written)
    elif arguments.weights_only:
        hf_dir = _hf_dir(arguments)
        conversion.huggingface_to_checkpoint(hf_dir, target, _layout(arguments, hf_dir), checkpoint=source, **written)
        result["optimizer_state_kept"] = False
    else:
        copied = arguments.hf_dir is None and conversion.is_whole_copy(source, arguments.format)
        original = None if copied else _hf_dir(arguments)
        layout = None if original is None else _layout(arguments, original)
        result["optimizer_state_kept"] = conversion.resplit(source, original, target, layout, **written)
    show.end()
    result["seconds"] = round(time.monotonic() - started, 2)
    if arguments.json:
        print(json.dumps(result))
    else:
        kept = {True: ", optimizer state kept", False: ", weights only (no optimizer state)"}
        print(f"{arguments.target} written in {result['seconds']} s" + kept.get(result.get("optimizer_state_kept"), ""))  # type: ignore[call-overload]  # the value is a bool where present
    return 0


def _check_flags(arguments: argparse.Namespace) -> None:
    if arguments.weights_only and arguments.direction != "resplit":
        raise ConfigError(f"--weights-only requires resplit: {arguments.direction} has no optimizer state to drop.")
    if arguments.direction == "mm-to-hf":
        refuse(arguments, ("plan", *_OF_A_LAYOUT, *_WRITTEN), "a Hugging Face folder has neither layout nor format.")
    else:
        refuse(arguments, ("max_shard_mib",), "it is for mm-to-hf, which writes safetensors.")
    if arguments.direction == "hf-to-mm":
        refuse(arguments, ("hf_dir",), "the source is the Hugging Face folder.")
    if arguments.plan is not None:
        refuse(arguments, _OF_A_LAYOUT, "--plan has the layers and sizes.")


def _hf_dir(arguments: argparse.Namespace) -> Path:
    if arguments.hf_dir is None:
        raise ConfigError(f"{arguments.direction} needs --hf-dir: the folder with the model's config.json.")
    return Path(arguments.hf_dir)


def _spelling(arguments: argparse.Namespace) -> Spelling:
    from mindspeed_autoparallel.weights.spelling import LOCAL, TRANSFORMER_ENGINE, Spelling

    default = TRANSFORMER_ENGINE if arguments.format == "torch_dist" else LOCAL
    return Spelling(arguments.transformer_impl or default, arguments.experts, arguments.names, arguments.layers)


def _layout(arguments: argparse.Namespace, hf_folder: Path) -> CheckpointLayout:
    from mindspeed_autoparallel.weights.architecture import AUDIO, TEXT, VISION, read_architecture
    from mindspeed_autoparallel.weights.layouts import make_layout, parse_layers
    from mindspeed_autoparallel.weights.plan_layout import layout_from_plan

    architecture = read_architecture(hf_folder)
    lists = {VISION: arguments.vit_pp_layers, AUDIO: arguments.audio_pp_layers, TEXT: arguments.llm_pp_layers}
    sizes = {VISION: arguments.vit_tp_size, AUDIO: arguments.audio_tp_size, TEXT: arguments.tp_size}
    multiple = arguments.make_vocab_size_divisible_by
    if arguments.plan is not None:
        return layout_from_plan(arguments.plan, architecture, multiple)
    flags = {VISION: "--vit-pp-layers", AUDIO: "--audio-pp-layers", TEXT: "--llm-pp-layers"}
    return make_layout(
        architecture,
        layers={module: parse_layers(text, flags[module]) if text else None for module, text in lists.items()},
        tensor_sizes=sizes,
        vocab_multiple=multiple,
        hetero=arguments.hetero,
        expert_size=arguments.ep_size,
        expert_tensor_size=arguments.etp_size,
    )


class _ProgressLine:
    """One line on stderr, rewritten at most ten times a second; prints only to a terminal."""

    def __init__(self) -> None:
        self._last, self._started = 0.0, time.monotonic()
        self._shown = False

    def __call__(self, done: int, total: int, what: str) -> None:
        now = time.monotonic()
        if sys.stderr.isatty() and (done == total or now - self._last > 0.1):
            left_s = (now - self._started) * (total - done) / max(1, done)
            line = f"{done:6d}/{total} tensors, {left_s:.0f} s left  {what[:50]:50s}"
            print(f"\r{line}", end="", file=sys.stderr, flush=True)
            self._last, self._shown = now, True

    def end(self) -> None:
        if self._shown:
            print(file=sys.stderr)
