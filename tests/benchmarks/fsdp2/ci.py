"""Rows of MindSpeed-MM's own CI that its native FSDP2 trainer makes, beside predictions from computed costs.

python tests/benchmarks/fsdp2/ci.py CHECKOUT CONFIGS

CONFIGS has a folder with a config.json for each row, as ``gains.py`` wants them, in the sizes that the row's script cuts the
model to. Time: mean of the steps behind the warm-up. Held: what a device has between steps, peak: the most (both as torch's
allocator counts them). The machine is a node of eight, which scripts do not name: 910B. Samples are as long as ``cutoff_len``,
1,024 where the file has none, as nothing else says how long they are.
"""

import argparse
import json
from pathlib import Path
from statistics import mean

from gains import TOKENS

from mindspeed_autoparallel.cost.catalogue import find_device
from mindspeed_autoparallel.hosts.mindspeed_mm import read_native
from mindspeed_autoparallel.hosts.mindspeed_mm_decisions import read_decisions, sharding_host
from mindspeed_autoparallel.planner.sharded.problem import Problem
from mindspeed_autoparallel.planner.sharded.search import baselines_of
from mindspeed_autoparallel.predict.sharded_profile import sharded_profile
from mindspeed_autoparallel.profiles.sharded import Described

DEVICES = 8
ROWS = {
    "finetune_kimik2_5": "finetune_kimik2_5/kimik2_5_config.yaml",
    "finetune_qwen3tts": "finetune_qwen3tts/qwen3tts_config.yaml",
    "finetune_qwen3_5_35B": "finetune_qwen3_5_35B/qwen3_5_35B_config.yaml",
    "finetune_qwen3vl_30B_v1": "finetune_qwen3vl_30B/qwen3vl_30B_config_v1.yaml",
}


def line(name: str, tests: Path, configs: Path) -> str:
    """Return one row of the table."""
    published = json.loads((tests / "baseline_results" / f"{name}.json").read_text())
    where = configs / name / "config.json"
    if not where.is_file():
        return f"| {name} | no {name}/config.json | | |"
    config = read_native(tests / "run_configs" / ROWS[name])
    described = Described(
        sequence=config.values.integer(TOKENS, 1024),
        frozen=config.frozen,
        micro_batch_size=config.sizes.micro_batch,
        eager=config.values.text("model.attn_implementation") == "eager",
    )
    profile = sharded_profile(json.loads(where.read_text()), name, described, find_device("910B", ()), DEVICES)
    shipped = read_decisions(config, profile.modules, DEVICES)
    problem = Problem(profile, sharding_host(config), DEVICES)
    outcome = baselines_of(problem, shipped, profile.device.memory_capacity_bytes)[0]
    kinds = [profile.kinds[one.kind] for one in profile.modules]
    held = (
        12 * sum(sum(kind.parameters) for kind in kinds) + 4 * sum(sum(kind.frozen_parameters) for kind in kinds)
    ) / 8
    memory = published["memo info"][0]
    pairs = (
        (mean(published["time"][published["warm_up"] :]), outcome.step.total_us / 1e3, "ms"),
        (memory["allocated memory"], held / 2**20, "MiB"),
        (memory["max allocated memory"], outcome.memory.peak_bytes / 2**20, "MiB"),
    )
    cells = [f"{theirs:.0f} {unit}, {ours:.0f} ({ours / theirs - 1:+.1%})" for theirs, ours, unit in pairs]
    return f"| {name} | {' | '.join(cells)} |"


def main() -> None:
    """Print published and predicted figures of each row."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkout", type=Path)
    parser.add_argument("configs", type=Path)
    arguments = parser.parse_args()
    print("| row | time of a step | held | peak |")
    print("| --- | --- | --- | --- |")
    for name in ROWS:
        print(line(name, arguments.checkout / "tests/st", arguments.configs), flush=True)


if __name__ == "__main__":
    main()
