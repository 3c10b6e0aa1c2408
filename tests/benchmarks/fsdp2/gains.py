"""Predicted steps of the native FSDP2 files that MindSpeed-MM ships: as shipped, without recomputation, greedy, planned.

python tests/benchmarks/fsdp2/gains.py CHECKOUT CONFIGS [--only WORDS]

CONFIGS has one folder with a config.json for each file, named as the file without its ending, or as the last part of its
``model_name_or_path``. A file without one, or one whose model has no computed costs, gets a row with the reason. The
machine is the one that the file's own script starts: 16 devices to a node are dies of 910C, fewer 910B. Samples are as long as
``cutoff_len``, at most 16,384 tokens; 1,024 where the file has none. An anchor that a file defines twice, which the trainer
refuses, is taken once.
"""

import argparse
import json
import re
import tempfile
import time
from dataclasses import replace
from pathlib import Path

from mindspeed_autoparallel.cost.catalogue import find_device
from mindspeed_autoparallel.cost.device import Device
from mindspeed_autoparallel.errors import AutoParallelError, InfeasiblePlan
from mindspeed_autoparallel.hosts.mindspeed_mm import is_native, read_native
from mindspeed_autoparallel.hosts.mindspeed_mm_decisions import read_decisions, sharding_host
from mindspeed_autoparallel.planner.sharded.problem import Problem
from mindspeed_autoparallel.planner.sharded.search import ShardedOptions, baselines_of, search_sharded
from mindspeed_autoparallel.predict.sharded_profile import sharded_profile
from mindspeed_autoparallel.profiles.sharded import Described, ElementBytes
from mindspeed_autoparallel.spec.layout import Cluster

TOKENS = "data.dataset_param.basic_parameters.cutoff_len"
MOST_TOKENS = 16384
TOKENS_OF = {"ltx2": 30 * 17 * 7}
"""Of LTX-2: 49 frames of 960 x 544, as its page prepares them, in patches of 32 x 32 pixels and eight frames."""


def machine_of(path: Path) -> tuple[int, int]:
    """Return nodes and devices of each, as the script that starts this file has them; one node of eight by default."""
    for script in sorted(path.parent.glob("*.sh")):
        text = script.read_text("utf-8", errors="replace")
        if path.name in text:
            found = [
                re.search(rf"^(?:{name})=(?:\$\{{\w+:-)?(\d+)", text, re.M)
                for name in ("NNODES", "NPUS_PER_NODE|NPROC_PER_NODE")
            ]
            return tuple(int(match[1]) if match else default for match, default in zip(found, (1, 8), strict=True))
    return 1, 8


def readable(path: Path) -> Path:
    """Return the file, or a copy without anchors that it defines again, which the trainer's own parser refuses."""
    text = path.read_text("utf-8")
    seen: set[str] = set()

    def once(match: re.Match[str]) -> str:
        again = match[1] in seen
        seen.add(match[1])
        return "" if again else match[0]

    changed = re.sub(r"&(\w+) ", once, text)
    if changed == text:
        return path
    copy = Path(tempfile.mkdtemp()) / path.name
    copy.write_text(changed)
    return copy


def die_of(package: Device) -> Device:
    """Return one of a 910C's two dies, which is what a node of sixteen counts."""
    halves = ("peak_tflops", "memory_gib", "counted_gib", "memory_bandwidth_gb_per_s", "link_gb_per_s")
    return replace(package, name=f"half a {package.name}", **{key: getattr(package, key) / 2 for key in halves})


def priced(path: Path, configs: Path):
    """Return baselines and plan of one file; no plan where nothing fits."""
    config = read_native(readable(path))
    folders = (configs / path.stem, configs / Path(config.model_path).name)
    where = next((folder / "config.json" for folder in folders if (folder / "config.json").is_file()), None)
    if where is None:
        raise AutoParallelError(f"no {path.stem}/config.json")
    nodes, per_node = machine_of(path)
    described = Described(
        sequence=TOKENS_OF.get(config.model_id) or min(config.values.integer(TOKENS, 1024), MOST_TOKENS),
        frozen=config.frozen,
        eager=config.values.text("model.attn_implementation") == "eager",
        micro_batch_size=config.sizes.micro_batch,
        bytes_of=ElementBytes(reduced=4 if config.sharding.reduce_dtype == "fp32" else 2),
    )
    device = find_device("910B", ()) if per_node < 16 else die_of(find_device("910C", ()))
    profile = sharded_profile(json.loads(where.read_text()), where.parent.name, described, device, per_node)
    cluster = Cluster(num_nodes=nodes, devices_per_node=per_node)
    shipped = read_decisions(config, profile.modules, cluster.num_devices)
    host = sharding_host(config)
    try:
        plan = search_sharded(profile, cluster, host, shipped, ShardedOptions(time_limit_s=60.0))
    except InfeasiblePlan:
        baselines = baselines_of(Problem(profile, host, per_node), shipped, profile.device.memory_capacity_bytes)
        return profile, shipped, baselines, None
    return profile, shipped, plan.baselines, plan


def cell(outcome) -> str:
    """Return step and peak."""
    figure = f"{outcome.step.total_us / 1000:.0f} ms, {outcome.memory.peak_bytes / 2**30:.1f} GiB"
    return figure if getattr(outcome, "feasible", True) else f"{figure} (does not fit)"


def changes(shipped, decisions) -> str:
    """Return what the plan decides, beside the shipped sizes."""
    groups = decisions.groups[0]
    switches = [f"prefetch {groups.forward_prefetch}", *([] if groups.reshard_after_forward else ["kept gathered"])]
    switches += [f"loss in chunks of {decisions.loss_chunk}"] if decisions.loss_chunk else []
    words = [word for row in decisions.policies.values() for word in row if word != "keep"]
    counts = [f"{words.count(word)} x {word}" for word in dict.fromkeys(words)] or ["nothing recomputed"]
    return f"{shipped.sizes.label()} -> {decisions.sizes.label()}; {', '.join([*switches, *counts])}"


def row(path: Path, configs: Path) -> str:
    """Return one row of the table."""
    nodes, per_node = machine_of(path)
    begin = time.process_time()
    try:
        profile, shipped, baselines, plan = priced(path, configs)
    except AutoParallelError as error:
        return f"| {path.stem} | | {str(error)[:110]} | | | | | | |"
    elements = sum(
        sum(profile.kinds[one.kind].parameters + profile.kinds[one.kind].frozen_parameters) for one in profile.modules
    )
    machine = f"{nodes} x {per_node}, {elements / 1e9:.1f}B"
    cells = [cell(outcome) for outcome in baselines] or ["not priced"] * 3
    if plan is None:
        return f"| {path.stem} | {machine} | {' | '.join(cells)} | nothing fits | | | |"
    fits = [outcome.step.total_us for outcome in baselines if outcome.feasible]
    if fits and plan.step.total_us > min(fits) * (1 + 1e-9):
        raise SystemExit(f"{path.name}: the plan is slower than a baseline")
    faster = f"{fits[0] / plan.step.total_us:.2f}" if fits and baselines[0].feasible else ""
    ends = f"{plan.search.gap_fraction:.2%} | {time.process_time() - begin:.0f} s"
    return (
        f"| {path.stem} | {machine} | {' | '.join(cells)} | {cell(plan)} | {faster} | "
        f"{changes(shipped, plan.decisions)} | {ends} |"
    )


def main() -> None:
    """Print one row of a table for each file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkout", type=Path)
    parser.add_argument("configs", type=Path)
    parser.add_argument("--only", default="")
    arguments = parser.parse_args()
    print(
        "| file | machine, parameters | shipped | without recomputation | greedy | planned | times | decided | gap | processor |"
    )
    print("| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |")
    for path in sorted((arguments.checkout / "examples").rglob("*.yaml")):
        if arguments.only in path.stem and is_native(path.read_text("utf-8")):
            print(row(path, arguments.configs), flush=True)


if __name__ == "__main__":
    main()
