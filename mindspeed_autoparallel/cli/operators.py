"""Find a parallel strategy for every operator of a model described by its shape."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from mindspeed_autoparallel.errors import ConfigError, InfeasiblePlan
from mindspeed_autoparallel.whole_numbers import LARGE, POSITIVE, WholeNumber

if TYPE_CHECKING:
    from mindspeed_autoparallel.operators.config import OperatorConfig
    from mindspeed_autoparallel.operators.configured import SearchResult
    from mindspeed_autoparallel.operators.graph.node import Graph
    from mindspeed_autoparallel.operators.plan import OperatorPlan


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--model", default="llama2-7b", metavar="NAME", help="A preset, e.g. llama2-70b, or hf:NAME_OR_CONFIG.json.")
    add("--devices", type=WholeNumber(most=2**16), default=8, metavar="N", help="Number of devices.")
    add("--batch", type=LARGE, metavar="N", help="Samples over all devices (default: 16).")
    add("--seq-length", type=LARGE, default=4096, metavar="TOKENS", help="Tokens per sample.")
    add("--layers", type=WholeNumber(least=1, most=1_000), metavar="N", help="Shorten the model to this many layers.")
    add("--search-mode", help="recursive_programming (default), sharding_propagation or exact.")
    add(
        "--mem-coeff",
        type=float,
        help="Cut matrix products by symbolic costs: below 1 favours data parallel, above 1 model parallel. Without it "
        "each halving takes the least modelled time.",
    )
    add(
        "--config", type=Path, metavar="YAML", help="use_parallel, parallel and parallel_config, or a MindFormers file."
    )
    add("--pin", action="append", default=[], metavar="OP:AXIS=PARTS[,..]", help="Fix an operator.")
    add("--auto-pipeline", action="store_true", help="Choose the number of pipeline stages.")
    add("--stages", type=int, metavar="N", help="Pipeline stages without --auto-pipeline (default: 1).")
    add("--servers", type=int, default=1, metavar="N", help="Nodes; bounds the stages of --auto-pipeline.")
    add("--micro-batch-num", type=LARGE, metavar="N", help="Microbatches; bounds the stages (default: 1).")
    add("--memory-gib", type=POSITIVE, metavar="GIB", help="Memory of one device (default: 64).")
    add("--parameter-limit-gib", type=POSITIVE, metavar="GIB", help="Limit for the weights of one device (mode exact).")
    add("--untied", action="store_true", help="Allow repeated layers to differ (not with --mem-coeff).")
    add(
        "--explain",
        metavar="OP",
        help="Print the costs of each cut of this operator, and the mem_coeff that selects it.",
    )
    add("--moves", action="store_true", help="Print redistributions: tensors, placements, bytes, time.")
    add("--constraints", action="store_true", help="Search again without each constraint; print its cost.")
    add("--page", type=Path, metavar="FILE", help="Write a picture of the plan.")
    add("--megatron-flags", action="store_true", help="Print only the flags of the nearest Megatron run.")
    add("--json", action="store_true", help="Print the plan as JSON.")


def run(arguments: argparse.Namespace) -> int:
    from mindspeed_autoparallel.operators.config import OperatorConfig, read_config
    from mindspeed_autoparallel.operators.configured import SearchResult, search_configured
    from mindspeed_autoparallel.operators.constraints import Constraints
    from mindspeed_autoparallel.operators.pipeline import Pipeline
    from mindspeed_autoparallel.operators.search.pins import parse_pins

    config = read_config(arguments.config) if arguments.config else OperatorConfig()
    config = config.with_flags(
        arguments.auto_pipeline, search_mode=arguments.search_mode, mem_coeff=arguments.mem_coeff
    )
    _fill(arguments, config)
    graph = _graph(arguments)
    memory_bytes = int(arguments.memory_gib * 2**30)
    given = Constraints(
        parse_pins(arguments.pin),
        False if arguments.untied else None,
        None if arguments.parameter_limit_gib is None else int(arguments.parameter_limit_gib * 2**30),
        memory_bytes,
        arguments.stages,
    )

    def search(asked: Constraints) -> OperatorPlan:
        memory = {} if asked.memory_limit_bytes is not None else {"memory_limit_bytes": None}
        return search_configured(
            graph,
            arguments.devices,
            config,
            pins=asked.pins,
            pipeline=Pipeline(asked.stages, arguments.servers, arguments.micro_batch_num, memory_bytes),
            tied=asked.tied,
            parameter_limit_bytes=asked.parameter_limit_bytes,
            **memory,
        )

    result = SearchResult(search(given))
    if arguments.constraints:
        result.price_constraints(search, given)
    if config.ignored:
        print(f"note: {arguments.config}: ignored: {', '.join(config.ignored)}", file=sys.stderr)
    return _answer(arguments, result, result.shortages(memory_bytes))


def _fill(arguments: argparse.Namespace, config: OperatorConfig) -> None:
    """Fill values without a flag from the file, and the rest with defaults."""
    of_file = {
        "batch": config.samples(arguments.devices),
        "stages": config.pipeline_stage,
        "micro_batch_num": config.micro_batch_num,
        "memory_gib": config.max_device_memory and config.max_device_memory / 2**30,
    }
    for name, default in (("batch", 16), ("stages", 1), ("micro_batch_num", 1), ("memory_gib", 64.0)):
        if getattr(arguments, name) is None:
            setattr(arguments, name, default if of_file[name] is None else of_file[name])


def _answer(arguments: argparse.Namespace, result: SearchResult, short: dict[str, str]) -> int:
    """Write and print the requested output; returns the exit code. ``short``: the excess that does not fit."""
    from mindspeed_autoparallel.operators.configured import explain

    if arguments.page:
        from mindspeed_autoparallel.files import write_text_atomic
        from mindspeed_autoparallel.report.operator_page import render_operator_page

        write_text_atomic(arguments.page, render_operator_page(result.picture()))
    if arguments.explain:
        print("\n".join(explain(result.plan, arguments.explain)))
        return 0
    if arguments.megatron_flags:
        print(" ".join(result.flags()))
        if "megatron" in short:
            print(short["megatron"], file=sys.stderr)
            return InfeasiblePlan.exit_code
    elif arguments.json:
        print(json.dumps({**result.as_json(), "shortages": short}, indent=2))
    else:
        print("\n".join([*result.lines(), *short.values()]))
        if arguments.moves:
            from mindspeed_autoparallel.operators.moves import list_moves, move_lines

            print("\n".join(move_lines(list_moves(result.plan))))
    return InfeasiblePlan.exit_code if "plan" in short else 0


def _graph(arguments: argparse.Namespace) -> Graph:
    """Build the graph of a preset, or capture that of a Hugging Face configuration."""
    sizes = {"batch": arguments.batch, "sequence": arguments.seq_length, "num_layers": arguments.layers}
    kind, _, name = arguments.model.partition(":")
    if kind == "hf" and name:
        try:
            from mindspeed_autoparallel.operators.torch.hugging_face import hugging_face_graph
        except ImportError as error:
            raise ConfigError("--model hf:.. needs torch and transformers: pip install torch transformers.") from error
        return hugging_face_graph(name, **sizes)
    from mindspeed_autoparallel.operators.presets import preset_graph

    return preset_graph(arguments.model, **sizes)
