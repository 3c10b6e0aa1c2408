"""From the host's parsed arguments to the plan's files, and from a plan's file into the arguments."""

from __future__ import annotations

import argparse
import dataclasses
import os
import shlex
import sys
from pathlib import Path

from mindspeed_autoparallel.errors import PlanError
from mindspeed_autoparallel.files import made_folder, read_json, write_json_atomic, write_text_atomic
from mindspeed_autoparallel.operators.candidate import read_candidate
from mindspeed_autoparallel.operators.config import OperatorConfig, config_from_mapping, read_config
from mindspeed_autoparallel.operators.configured import SearchResult, explain, search_configured
from mindspeed_autoparallel.operators.presets import decoder_graph
from mindspeed_autoparallel.operators.search.pins import parse_pins
from mindspeed_autoparallel.runtime.features.operator_search.flags import OperatorSearchFlags
from mindspeed_autoparallel.runtime.features.operator_search.shape import read_shape, read_work
from mindspeed_autoparallel.runtime.flags.flag import read_flags

PLAN_FILE, PAGE_FILE = "operator_plan.json", "operator_plan.html"


def search_and_exit(arguments: argparse.Namespace) -> None:
    """Search on rank 0, write the plan and its picture, and end every process: training does not start."""
    if os.environ.get("RANK", "0") != "0":
        sys.exit(0)
    flags = read_flags(OperatorSearchFlags, arguments)
    folder = made_folder(Path(flags.operator_output_dir), "--operator-output-dir")
    work = read_work(arguments)
    graph = decoder_graph(work.shape, batch=work.global_batch_size, sequence=work.sequence)
    pins = parse_pins([text for text in (flags.operator_pin or "").split(";") if text])
    plan = search_configured(graph, work.devices, read_settings(flags), pins=pins, pipeline=work.pipeline)
    result = SearchResult(plan, micro_batch_size=work.micro_batch_size)
    from mindspeed_autoparallel.report.operator_page import render_operator_page

    write_json_atomic(folder / PLAN_FILE, {**result.as_json(), "model": dataclasses.asdict(work.shape)})
    write_text_atomic(folder / PAGE_FILE, render_operator_page(result.picture()))
    print("\n".join(explain(plan, flags.operator_explain) if flags.operator_explain else result.lines()))
    hint = " (train by it with --operator-plan)" if result.megatron else ""
    print(f"written: {folder / PLAN_FILE}{hint} and {folder / PAGE_FILE}", flush=True)
    sys.exit(0)


def read_settings(flags: OperatorSearchFlags) -> OperatorConfig:
    """Return the YAML block, with the flags that are given in place of its keys."""
    config = read_config(Path(flags.operator_config)) if flags.operator_config else OperatorConfig()
    given = {name: getattr(flags, name) for name in ("parallel_mode", "search_mode", "mem_coeff")}
    config = dataclasses.replace(config, **{name: value for name, value in given.items() if value is not None})
    config = dataclasses.replace(config, auto_pipeline=flags.auto_pipeline or config.auto_pipeline)
    keys = ("parallel_mode", "search_mode", "auto_pipeline")
    block = {
        "use_parallel": config.use_parallel,
        "parallel": {key: getattr(config, key) for key in keys},
        "parallel_config": {"mem_coeff": config.mem_coeff},
    }
    return config_from_mapping(block, flags.operator_config or "flags")


def apply_plan(arguments: argparse.Namespace) -> None:
    """Set the host's ``arguments`` by the configuration in ``--operator-plan``; ``PlanError`` where it does not fit."""
    path = Path(arguments.operator_plan)
    content = read_json(path, "operator plan (--operator-plan)")
    layout = read_candidate(path)
    shape = dataclasses.asdict(read_shape(arguments))
    planned = content.get("model")
    if planned is not None and planned != shape:
        differing = [key for key in shape if planned.get(key) != shape[key]]
        told = ", ".join(f"{key} {planned.get(key)} there and {shape[key]} here" for key in differing)
        raise PlanError(f"{path} was made for another model: {told}. Search again with --operator-search.")
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if world != layout.num_devices:
        raise PlanError(
            f"{path} is for {layout.num_devices} devices ({layout.label()}), but {world} processes were started."
        )
    values = {
        **layout.megatron_sizes,
        "sequence_parallel": layout.sequence_parallel,
        "micro_batch_size": layout.micro_batch_size,
        "global_batch_size": content["megatron"].get("global_batch_size"),
    }
    for name, value in values.items():
        setattr(arguments, name, value)
    if os.environ.get("RANK", "0") == "0":
        flags = content["megatron"].get("flags", [])
        print(f"training by the operator plan {path}: {layout.label()}\nas flags: {shlex.join(flags)}", flush=True)
