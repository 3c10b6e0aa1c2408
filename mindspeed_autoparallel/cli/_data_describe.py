"""``data describe``: the sizes of a data set's samples, as text, JSON and a page."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from mindspeed_autoparallel.cli._progress import progress_of
from mindspeed_autoparallel.errors import ConfigError
from mindspeed_autoparallel.whole_numbers import LARGE, LARGE_COUNT

if TYPE_CHECKING:
    from mindspeed_autoparallel.data.distribution import Distribution
    from mindspeed_autoparallel.data.statistics import Figure

_SHOWN = 10


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--mm-data", type=Path, help="data.json of records in the mllm format")
    add("--mm-model", type=Path, help="model.json, for patch sizes, audio windows and the longest text")
    add("--lengths", type=Path, help="alternative input: tokens of every sample, as text, .json or .npy")
    add(
        "--table",
        type=Path,
        help="alternative input: .parquet, .arrow, .csv, .jsonl, WebDataset .tar, or a folder of them (HF cache)",
    )
    add(
        "--tokenizer",
        metavar="FOLDER",
        help="with --table: tokenizer that counts tokens of texts (default: count bytes)",
    )
    add("--indexed", type=Path, metavar="PREFIX", help="alternative input: a Megatron data set (PREFIX.idx)")
    add("--seq-length", type=LARGE_COUNT, default=0, help="length at which training cuts texts (default: none)")
    add("--max-read", type=LARGE, default=0, metavar="N", help="read N randomly drawn records (default: all)")
    add("--seed", type=LARGE, default=0, help="seed for drawing the records of --max-read")
    add(
        "--bytes-per-token",
        type=float,
        default=0.0,
        metavar="X",
        help="estimate tokens as UTF-8 bytes divided by X, such as 4",
    )
    add("--skip-broken", action="store_true", help="skip broken records instead of stopping")
    add("--output", type=Path, help="write the distribution to this file, the input of `plan --data`")
    add("--page", type=Path, help="write a page with histograms to this file")
    add("--overwrite", action="store_true", help="read the data again and replace the output file")
    add("--json", action="store_true", help="print only the summary, as JSON")


def run(arguments: argparse.Namespace) -> int:
    """Read, print and write; return the exit code."""
    from mindspeed_autoparallel.files import write_text_atomic

    known = _known(arguments)
    data = _describe(arguments, known)
    is_known = data is known
    if arguments.output is not None and not is_known:
        if arguments.output.exists() and not arguments.overwrite:
            raise ConfigError(
                f"{arguments.output} exists and was written for other data or flags. Choose another --output or give "
                "--overwrite."
            )
        data.write(arguments.output)
    if arguments.page is not None:
        from mindspeed_autoparallel.report.data_page import render_data_page

        write_text_atomic(arguments.page, render_data_page(data))
    if arguments.json:
        print(json.dumps(_as_json(data)))
        return 0
    if is_known:
        print(f"{arguments.output} is up to date: read from it", file=sys.stderr)
    print("\n".join(text_lines(data)))
    return 0


def _known(arguments: argparse.Namespace) -> Distribution | None:
    from mindspeed_autoparallel.data.distribution import Distribution

    if arguments.output is None or arguments.overwrite or not arguments.output.exists():
        return None
    try:
        return Distribution.read(arguments.output)
    except ConfigError:
        return None


def _describe(arguments: argparse.Namespace, known: Distribution | None) -> Distribution:
    from mindspeed_autoparallel.data.describe import DescribeOptions, Reader

    given = [name for name in ("mm_data", "lengths", "indexed", "table") if getattr(arguments, name) is not None]
    if len(given) != 1:
        number = f"{len(given)} were" if given else "none was"
        raise ConfigError(f"give one of --mm-data, --lengths, --indexed and --table; {number} given.")
    _refuse_idle(arguments, given[0])
    options = DescribeOptions(
        max_read=arguments.max_read,
        seed=arguments.seed,
        seq_length=arguments.seq_length,
        bytes_per_token=arguments.bytes_per_token,
        skip_broken=arguments.skip_broken,
    )
    if arguments.mm_data is not None and arguments.mm_model is None:
        raise ConfigError("--mm-data needs --mm-model, which has the patch and audio window sizes.")
    reader = Reader(options=options, model_file=arguments.mm_model, known=known, progress=progress_of(arguments))
    if arguments.table is not None:
        data, broken = reader.table(arguments.table, arguments.tokenizer)
    elif arguments.mm_data is not None:
        data, broken = reader.records(arguments.mm_data)
    elif arguments.lengths is not None:
        data, broken = reader.lengths(arguments.lengths, "lengths")
    else:
        data, broken = reader.lengths(arguments.indexed, "indexed")
    print_broken(broken)
    for line in _empty_modalities(arguments.mm_model, data) if arguments.mm_data is not None else ():
        print(line, file=sys.stderr)
    return data


def print_broken(broken: Sequence[str]) -> None:
    """Print the first reasons for which records are skipped."""
    for line in broken[:_SHOWN]:
        print(f"skipped {line}", file=sys.stderr)
    if len(broken) > _SHOWN:
        print(f"skipped {len(broken) - _SHOWN} more", file=sys.stderr)


def _refuse_idle(arguments: argparse.Namespace, source: str) -> None:
    """Refuse flags that change nothing for this kind of data."""
    of_texts = source in ("mm_data", "table")
    idle = {
        "--tokenizer": arguments.tokenizer is not None and (source != "table" or arguments.bytes_per_token > 0),
        "--bytes-per-token": arguments.bytes_per_token != 0 and not of_texts,
        "--skip-broken": arguments.skip_broken and not of_texts,
        "--seed": arguments.seed != 0 and not arguments.max_read,
        "--overwrite": arguments.overwrite and arguments.output is None,
    }
    found = [flag for flag, is_idle in idle.items() if is_idle]
    if found:
        raise ConfigError(f"{', '.join(found)} has no effect with this kind of data; remove it.")


def _empty_modalities(model_file: Path, data: Distribution) -> list[str]:
    from mindspeed_autoparallel.data.media import read_media_sizes

    model, sizes = read_media_sizes(model_file), data.sizes()
    encoders = (("image", "images", model.patch_size, "images"), ("audio", "audio", model.audio_window, "clips"))
    return [
        f"no record has {word}, but {model_file} has an {kind}_encoder: it is planned as idle"
        for kind, word, has_encoder, column in encoders
        if has_encoder and not sizes[:, data.columns.index(column)].any()
    ]


def text_lines(data: Distribution) -> list[str]:
    from mindspeed_autoparallel.data import statistics

    source = data.source
    lines = [
        f"{', '.join(source.files)}: {source.num_records} samples, "
        + ("all read" if source.is_whole else f"{source.num_read} read, drawn at random")
    ]
    if source.num_broken or source.num_cut:
        cut = f"{source.num_cut} texts cut at {source.longest_tokens} tokens" if source.num_cut else "no text cut"
        lines.append(f"{source.num_broken} broken or not trained on, skipped; {cut}")
    if source.kind == "records":
        lines.append(f"tokens of text by {source.tokens_by}; longest: {source.longest_record}")
    header = ["mean", *(f"P{round(100 * share)}" for share in statistics.QUANTILES), "largest", "without"]
    lines.append("".join(["sample".ljust(9), *(name.rjust(18) for name in header)]))
    for row in statistics.summarize(data):
        cells = [_cell(figure) for figure in (row.mean, *row.quantiles)]
        cells += [f"{row.largest}", f"{100 * row.share_without:.1f} %"]
        lines.append("".join([row.name.ljust(9), *(cell.rjust(18) for cell in cells)]))
    values, counts = data.column("tokens")
    padding = [f"{100 * statistics.padding_share(values, counts, group):.0f} % at {group}" for group in (2, 4, 8)]
    lines.append(f"padding to the longest sample of a random microbatch: {', '.join(padding)} samples")
    if not source.is_whole:
        unseen = statistics.unseen_share(source.num_read, source.num_records)
        lines.append(
            f"intervals hold at 95 %; up to {100 * unseen:.3f} % of the records may be larger than the largest one read"
        )
    if source.kind == "indexed":
        lines.append(
            "Megatron's GPT data sets cut these documents into samples of --seq-length tokens: samples differ only if "
            "documents are kept whole (fine-tuning, packing)"
        )
    return lines


def _cell(figure: Figure) -> str:
    if figure.low == figure.high:
        return f"{figure.value:.0f}" if figure.value >= 100 or figure.value.is_integer() else f"{figure.value:.1f}"
    return f"{figure.value:.0f} ({figure.low:.0f}..{figure.high:.0f})"


def _as_json(data: Distribution) -> object:
    from mindspeed_autoparallel.data.statistics import summarize
    from mindspeed_autoparallel.spec.codec import to_json

    return {"source": to_json(data.source), "summary": to_json(summarize(data)), "num_distinct": len(data.rows)}
