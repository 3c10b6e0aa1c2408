"""Scores Calculon and SimuMax beside ``predict`` on the published rows that they can express.

    python tests/benchmarks/prediction/rivals.py ROWS... [--calculon CHECKOUT] [--simumax SUMMARY.json] [--skip GROUP]

``ROWS``: files of rows (JSON with ``rows``, or one object a line); ``CHECKOUT``: a clone of github.com/calculon-ai/calculon.
It has system files of its own and models dense models with tensor, pipeline and data parallelism on A100 and H100: rows with experts, context parallelism,
documents, adapters, fully sharded parameters or uneven stages are left out. A gated MLP is given as one and a half times as
wide (as many operations), grouped queries as one head each. ``SUMMARY``: SimuMax's release figures of its own runs
(``docs/b200/b200_release_v1.2_summary.json``), by operator efficiencies that it measured on that machine for these shapes.
"""

from __future__ import annotations

import argparse
import collections
import importlib
import json
import logging
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from recipe_rows import request_of

from mindspeed_autoparallel.cost.analytic.reading import read_workload
from mindspeed_autoparallel.cost.analytic.workload import Workload
from mindspeed_autoparallel.errors import ConfigError
from mindspeed_autoparallel.predict.confidence import features
from mindspeed_autoparallel.predict.measured_rows import request_of_row
from mindspeed_autoparallel.predict.predict import predict_one
from mindspeed_autoparallel.predict.scoreboard import measured_step_ms

_SYSTEMS = {"A100": "a100_80g", "H100": "h100_80g_nvl8"}
_RECOMPUTE = {"none": "none", "selective": "attn_only", "full": "full"}


def rows_of(paths: list[Path], skipped: list[str]) -> Iterator[tuple[Mapping[str, Any], dict[str, Any]]]:
    """Yield rows with a measured step time, and the request of each; those of the groups ``skipped`` left out."""
    for path in paths:
        text = path.read_text()
        lined = path.suffix == ".jsonl"
        for row in (
            [json.loads(line) for line in text.splitlines() if line.strip()] if lined else json.loads(text)["rows"]
        ):
            if row.get("group") in skipped:
                continue
            try:
                request = request_of(row) if lined else request_of_row(row)
                if request and measured_step_ms(row) and not row.get("time_unusable"):
                    yield row, request
            except ConfigError:
                continue


def expressible(work: Workload) -> bool:
    """Return whether Calculon has everything that ``work`` does."""
    plain = not features(work) - {"eight_bits"} and work.recipe in ("", "fp8") and not work.sharding
    even = work.model.num_layers % (work.pipeline_size * work.virtual_size) == 0
    return plain and even and not work.model.mtp_layers and work.model.windowed_share == 0


def execution_of(work: Workload, networks: tuple[int, int]) -> dict[str, Any]:
    """Return ``work`` in Calculon's words; ``networks``: of pipeline and data parallelism (0 inside a node)."""
    return {
        "num_procs": work.num_devices, "tensor_par": work.tensor_size, "pipeline_par": work.pipeline_size,
        "data_par": work.data_size, "tensor_par_net": int(work.tensor_size > work.devices_per_node),
        "pipeline_par_net": networks[0], "data_par_net": networks[1], "batch_size": work.global_batch,
        "microbatch_size": work.micro_batch, "datatype": "float8" if work.recipe else "float16",
        "fused_activation": True, "attention_type": "multihead", "activation_recompute": _RECOMPUTE[work.recompute],
        "pipeline_interleaving": work.virtual_size,
        "optimizer_sharding": work.distributed_optimizer and work.data_size > 1,
        "tensor_par_comm_type": "rs_ag" if work.sequence_parallel else "ar",
        "tensor_par_overlap": "ring" if work.tensor_overlap and work.tensor_size > 1 else "none",
        "seq_par_ag_redo": False, "data_par_overlap": bool(work.gradient_overlap) and work.data_size > 1,
        "weight_offload": False, "activations_offload": False, "optimizer_offload": False, "training": True,
    }  # fmt: skip


def calculon_ms(work: Workload, checkout: Path) -> float | None:
    """Return Calculon's step time; nothing where it has no system for the device or refuses the layout."""
    system = next((name for word, name in _SYSTEMS.items() if word in work.gpu.upper()), None)
    if system is None:
        return None
    llm, machine = importlib.import_module("calculon.llm"), importlib.import_module("calculon.system")
    model = work.model
    shape = {
        "hidden": model.hidden, "feedforward": round(model.ffn * (1.5 if model.gated else 1)), "seq_size": model.sequence,
        "attn_heads": model.heads, "attn_size": model.query_size // model.heads, "num_blocks": model.num_layers,
    }  # fmt: skip
    for networks in ((0, 0), (0, 1), (1, 0), (1, 1)):
        try:
            own = machine.System(json.loads((checkout / "systems" / f"{system}.json").read_text()))
            run = llm.Llm(llm.Llm.Application(shape), logging.getLogger("calculon"))
            run.compile(own, llm.Llm.Execution.from_json(execution_of(work, networks)))
            run.run(own)
            return float(run.get_total_time() * 1e3)
        except AssertionError:
            continue
        except llm.Llm.Error:
            # Its memory does not hold the run, or a network is not filled by these groups.
            continue
    return None


def ranking(groups: Mapping[Any, list[tuple[float, float]]]) -> str:
    """Return mean regret and how often the best is among the three first, over groups of (predicted, measured)."""
    regrets, held = [], 0
    for runs in groups.values():
        predicted, measured = np.array(runs).T
        order = np.argsort(predicted)
        regrets.append(measured[order[0]] / measured.min() - 1)
        held += int(measured.argmin() in order[:3])
    return f"regret {np.mean(regrets):.2%} (worst {np.max(regrets):.1%}), top three {held} of {len(regrets)}"


def errors(name: str, ratio: np.ndarray) -> str:
    """Return mean and median error of predicted over measured times, and the mean with the best common factor."""
    error, scaled = np.abs(ratio - 1), np.abs(ratio / np.median(ratio) - 1)
    return f"  {name:9s} mean {error.mean():6.1%}  median {np.median(error):6.1%}  with one scale {scaled.mean():6.1%}"


def beside_simumax(rows: list[tuple[Mapping[str, Any], dict[str, Any]]], summary: Path) -> None:
    """Print errors of SimuMax's release figures and of ``predict`` on the same runs."""
    theirs = {f"simumax-b200-{row['case']}": row for row in json.loads(summary.read_text())["rows"]}
    found: dict[str, list[tuple[float, float]]] = collections.defaultdict(list)
    for row, request in rows:
        answer, measured = predict_one(request), measured_step_ms(row)
        if row["id"] in theirs and answer["status"] != "error" and measured:
            kind = "experts" if request["model"].get("num_experts") else "dense"
            found[kind].append((theirs[row["id"]]["perf_ms"] / measured, answer["step_time_ms"] / measured))
    for kind, pairs in sorted(found.items()):
        print(f"B200, {kind}: {len(pairs)} rows")
        for name, ratio in zip(("SimuMax", "predict"), np.array(pairs).T, strict=True):
            print(errors(name, ratio))


def beside_calculon(rows: list[tuple[Mapping[str, Any], dict[str, Any]]], checkout: Path) -> None:
    """Print errors of both by device, precision and number of nodes, and the ranking of each group."""
    sys.path.insert(0, str(checkout))
    found: dict[str, list[tuple[Workload, float, float, float]]] = collections.defaultdict(list)
    refused: collections.Counter[str] = collections.Counter()
    for row, request in rows:
        try:
            work = read_workload(request)
        except ConfigError:
            continue
        if not expressible(work) or not any(word in work.gpu.upper() for word in _SYSTEMS):
            continue
        nodes = "one node" if work.num_devices <= work.devices_per_node else "several nodes"
        kind = f"{work.gpu[:4]} {work.stack} {work.recipe or 'bf16'} {nodes}"
        theirs, answer, measured = calculon_ms(work, checkout), predict_one(request), measured_step_ms(row)
        if theirs is None or answer["status"] == "error" or not measured:
            refused[kind] += 1
            continue
        found[kind].append((work, theirs, answer["step_time_ms"], measured))
    for kind, runs in sorted(found.items()):
        print(f"{kind}: {len(runs)} rows, {refused[kind]} more that Calculon refuses")
        for name, predicted in (("Calculon", [run[1] for run in runs]), ("predict", [run[2] for run in runs])):
            groups: dict[Any, list[tuple[float, float]]] = collections.defaultdict(list)
            for (work, *_, measured), own in zip(runs, predicted, strict=True):
                groups[work.model, work.num_devices, work.global_batch].append((own, measured))
            several = {key: group for key, group in groups.items() if len(group) > 3}
            order = f"; {len(several)} groups: {ranking(several)}" if several else ""
            print(errors(name, np.array(predicted) / [run[3] for run in runs]) + order)


def main() -> None:
    """Score what is given."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("rows", type=Path, nargs="+")
    parser.add_argument("--calculon", type=Path)
    parser.add_argument("--simumax", type=Path)
    parser.add_argument("--skip", action="append", default=[], help="a group of rows that is left out")
    arguments = parser.parse_args()
    rows = list(rows_of(arguments.rows, arguments.skip))
    if arguments.calculon:
        beside_calculon(rows, arguments.calculon)
    if arguments.simumax:
        beside_simumax([pair for pair in rows if pair[0]["id"].startswith("simumax")], arguments.simumax)


if __name__ == "__main__":
    main()
