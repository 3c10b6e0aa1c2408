"""Search a parallel strategy per operator for a model given by its shape."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mindspeed_autoparallel.errors import ConfigError, InfeasiblePlan

if TYPE_CHECKING:
    from mindspeed_autoparallel.operators.lowering.megatron import MegatronConfiguration
    from mindspeed_autoparallel.operators.strategies import OperatorPlan


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default="llama2-7b", metavar="NAME", help="A preset, e.g. llama2-70b or qwen-14b.")
    parser.add_argument("--devices", type=int, default=8, metavar="N")
    parser.add_argument("--batch", type=int, default=16, metavar="N", help="Samples over all devices.")
    parser.add_argument("--sequence", type=int, default=4096, metavar="TOKENS")
    parser.add_argument("--layers", type=int, metavar="N", help="Shorten the model to this many layers.")
    parser.add_argument("--search-mode", help="recursive_programming (default), sharding_propagation or exact.")
    parser.add_argument("--mem-coeff", type=float, help="Below 1 leans to data parallel, above to model parallel.")
    parser.add_argument("--config", type=Path, metavar="YAML", help="use_parallel, parallel and parallel_config block.")
    parser.add_argument("--pin", action="append", default=[], metavar="OP:AXIS=PARTS[,..]", help="Fix an operator.")
    parser.add_argument("--auto-pipeline", action="store_true", help="Choose the number of pipeline stages.")
    parser.add_argument("--stages", type=int, default=1, metavar="N", help="Pipeline stages without --auto-pipeline.")
    parser.add_argument("--servers", type=int, default=1, metavar="N")
    parser.add_argument("--micro-batch-num", type=int, default=1, metavar="N", help="Microbatches; bounds the stages.")
    parser.add_argument("--memory-gib", type=float, default=64.0, metavar="GIB", help="Memory of one device.")
    parser.add_argument("--untied", action="store_true", help="Let repeated layers differ (exact, propagation).")
    parser.add_argument("--explain", metavar="OP", help="Costs of each cut of this operator, and mem_coeff to set.")
    parser.add_argument("--html", type=Path, metavar="FILE", help="Write a picture of the plan.")
    parser.add_argument(
        "--megatron-flags", action="store_true", help="Print only the flags of the nearest Megatron run."
    )
    parser.add_argument("--json", action="store_true", help="Print the plan as JSON.")


def run(arguments: argparse.Namespace) -> int:
    from mindspeed_autoparallel.operators.config import config_from_mapping
    from mindspeed_autoparallel.operators.pipeline import Pipeline, data_parallel, search_pipelined
    from mindspeed_autoparallel.operators.presets import preset_graph

    config = config_from_mapping(_read_yaml(arguments.config) if arguments.config else {}, str(arguments.config))
    if not config.use_parallel:
        raise ConfigError(f"{arguments.config}: use_parallel is false, so there is nothing to search. Set it to true.")
    if arguments.layers is not None and arguments.layers < 1:
        raise ConfigError(f"--layers {arguments.layers}: give 1 or more.")
    graph = preset_graph(
        arguments.model, batch=arguments.batch, sequence=arguments.sequence, num_layers=arguments.layers
    )
    mode, pins = arguments.search_mode or config.search_mode, _pins(arguments.pin)
    if config.parallel_mode == 1:
        if not pins:
            raise ConfigError(f"{arguments.config}: parallel_mode 1 spreads pinned operators; give one with --pin.")
        mode = "sharding_propagation"
    if config.parallel_mode == 0:
        plan = data_parallel(graph, arguments.devices)
    else:
        plan = search_pipelined(
            graph,
            arguments.devices,
            auto_pipeline=arguments.auto_pipeline or config.auto_pipeline,
            pipeline=Pipeline(
                arguments.stages, arguments.servers, arguments.micro_batch_num, int(arguments.memory_gib * 2**30)
            ),
            search_mode=mode,
            mem_coeff=config.mem_coeff if arguments.mem_coeff is None else arguments.mem_coeff,
            pins=pins,
            tied=not arguments.untied,
        )
    megatron, reason = _megatron(plan)
    if arguments.html:
        from mindspeed_autoparallel.files import write_text_atomic
        from mindspeed_autoparallel.operators.picture import picture_data
        from mindspeed_autoparallel.report.operator_page import render_operator_page

        shown = picture_data(plan, megatron.as_json() if megatron else None, reason)
        write_text_atomic(arguments.html, render_operator_page(shown))
    if arguments.explain:
        _explain(plan, arguments.explain)
    elif arguments.megatron_flags:
        if megatron is None:
            raise InfeasiblePlan(reason)
        print(" ".join(megatron.flags()))
    elif arguments.json:
        derived = {"megatron": megatron.as_json()} if megatron else {"megatron": None, "megatron_reason": reason}
        print(json.dumps({**plan.as_json(), **derived}, indent=2))
    else:
        _print(plan, arguments.devices, megatron.lines() if megatron else [f"Megatron: none: {reason}"])
    return 0


def _megatron(plan: OperatorPlan) -> tuple[MegatronConfiguration | None, str]:
    from mindspeed_autoparallel.operators.lowering.megatron import derive_megatron

    try:
        return derive_megatron(plan), ""
    except InfeasiblePlan as error:
        return None, str(error)


def _print(plan: OperatorPlan, devices: int, megatron: list[str]) -> None:
    dp, mp = plan.dp_mp()
    for name, parts in plan.degrees().items():
        print(f"{name:32} " + (", ".join(f"{axis} / {count}" for axis, count in parts.items()) or "not cut"))
    moved = plan.edge_bytes().values()
    print(
        f"{plan.search_mode} on {devices} devices: {plan.stages} stage(s), data parallel {dp}, model parallel {mp}; "
        f"{sum(f + b for f, b in moved) / 1e9:.2f} GB sent per device and step; searched in {plan.search_s:.2f} s"
    )
    for line in [*megatron, *(f"note: {note}" for note in plan.notes)]:
        print(line)


def _read_yaml(path: Path) -> Any:
    try:
        import yaml
    except ImportError as error:
        raise ConfigError("reading YAML needs pyyaml: pip install 'mindspeed-autoparallel[yaml]'.") from error
    try:
        return yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"cannot read {path}: {error}") from error


def _pins(given: list[str]) -> dict[str, dict[str, int]]:
    result: dict[str, dict[str, int]] = {}
    for text in given:
        name, _, rest = text.partition(":")
        try:
            wanted = {axis: int(parts) for axis, parts in (item.split("=") for item in rest.split(","))}
        except ValueError as error:
            raise ConfigError(f"--pin {text}: write OPERATOR:AXIS=PARTS, e.g. layers.*.q:rows=4,columns=2.") from error
        if result.get(name, wanted) != wanted:
            raise ConfigError(f"pins contradict each other for {name}: {result[name]} and {wanted}. Remove one.")
        result[name] = wanted
    return result


def _explain(plan: OperatorPlan, operator: str) -> None:
    cuts = [entry for entry in plan.explained if entry.operator == operator]
    if not cuts:
        known = ", ".join(dict.fromkeys(entry.operator for entry in plan.explained)) or "none: only the mode "
        raise ConfigError(f"--explain {operator}: it is no matrix product of that search; these are: {known[:300]}.")
    for entry in cuts:
        print(f"operator {operator}, cut {entry.cut + 1}")
        print("\n".join(entry.costs.log_lines()))
        if entry.costs.choice == "none" and entry.costs.threshold is not None:
            print(
                f"mem_coeff where cutting I costs the same: {entry.costs.threshold:.6g}; "
                f"to cut I set mem_coeff = {entry.costs.value_to_set:g}"
            )
