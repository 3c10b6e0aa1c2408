"""Describe the sizes of a data set's samples; convert LLaVA-instruct JSON to the mllm format of MindSpeed-MM.

data describe --mm-data data.json --mm-model model.json --output distribution.json --page distribution.html
data describe --lengths lengths.txt
data llava-to-mllm llava_instruct_150k.json --images data/COCO2017/train2017 --output data/mllm.json
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from mindspeed_autoparallel.cli import _data_describe
from mindspeed_autoparallel.errors import ConfigError
from mindspeed_autoparallel.whole_numbers import LARGE_COUNT


def add_arguments(parser: argparse.ArgumentParser) -> None:
    commands = parser.add_subparsers(dest="data_command", metavar="describe | llava-to-mllm", required=True)
    describe = commands.add_parser("describe", help="distribution of the samples' sizes")
    _data_describe.add_arguments(describe)
    _add_conversion_arguments(commands.add_parser("llava-to-mllm", help="LLaVA-instruct JSON to the mllm format"))


def _add_conversion_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("sources", type=Path, nargs="+", help="one or more LLaVA-instruct files")
    add("--images", type=Path, required=True, help="folder with the images")
    add("--output", type=Path, required=True, help="file to write")
    add("--max-samples", type=LARGE_COUNT, metavar="N", help="stop after N good records")
    add("--strict", action="store_true", help="stop at a broken record instead of skipping it")
    add("--overwrite", action="store_true", help="replace the output file")
    add("--json", action="store_true", help="print only JSON: the result")


def run(arguments: argparse.Namespace) -> int:
    return _data_describe.run(arguments) if arguments.data_command == "describe" else _convert(arguments)


def _convert(arguments: argparse.Namespace) -> int:
    from mindspeed_autoparallel.data.llava import convert
    from mindspeed_autoparallel.files import write_json_atomic

    if arguments.output.exists() and not arguments.overwrite:
        raise ConfigError(f"{arguments.output} exists. Choose another --output or give --overwrite.")
    result = convert(
        arguments.sources,
        arguments.images,
        folder=arguments.output.parent,
        max_samples=arguments.max_samples,
        strict=arguments.strict,
    )
    write_json_atomic(arguments.output, result.records)
    if arguments.json:
        print(
            json.dumps({"output": str(arguments.output), "num_records": len(result.records), "broken": result.broken})
        )
        return 0
    _data_describe.print_broken(result.broken)
    print(f"{arguments.output}: {len(result.records)} records, {len(result.broken)} broken ones skipped")
    return 0
