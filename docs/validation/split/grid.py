"""Time and proof of the inner problem on a synthetic profile shaped like Qwen2-VL-72B (32 + 80 layers).

python docs/validation/split/grid.py [seconds per case]   (one or two minutes)
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
import time
from pathlib import Path

from mindspeed_autoparallel.errors import InfeasiblePlan
from mindspeed_autoparallel.planner.split import solve
from mindspeed_autoparallel.planner.split.from_profile import problem_from_profile
from mindspeed_autoparallel.profiles import read_profile

# ms, MiB and [parameters, optimizer, gradients] in MiB: invented, in the proportions of that model at TP 4.
BLOCKS = {
    "vit_pre": (10, 20, 50, [20, 120, 40]),
    "vit": (18, 36, 180, [40, 240, 80]),
    "vit_post": (6, 12, 30, [100, 600, 200]),
    "llm_pre": (3, 5, 40, [600, 1200, 600]),
    "llm": (42, 85, 620, [420, 630, 420]),
    "llm_post": (30, 60, 900, [600, 1200, 600]),
}
CASES = [(2, 8, 200_000), (4, 32, 120_000), (8, 8, 62_000), (8, 32, 62_000), (8, 128, 80_000), (16, 16, 40_000),
         (16, 64, 40_000), (16, 128, 60_000)]  # fmt: skip


def profile_file(folder: Path) -> Path:
    """A model_profile.json of the synthetic model."""
    content: dict[str, object] = {
        name: {"fwd_time": forward, "bwd_time": backward, "act_mem": memory, "module_param": state}
        for name, (forward, backward, memory, state) in BLOCKS.items()
    }
    content["image_encoder"] = {"vision_encoder": {"num_layers": 32}}
    content["text_decoder"] = {"num_layers": 80, "seq_length": 8192, "hidden_size": 8192}
    content |= {"micro_batch_size": 1, "grad_acc_step": 32}
    path = folder / "model_profile.json"
    path.write_text(json.dumps(content))
    return path


def main() -> None:
    """Print a row per case."""
    limit_s = float(sys.argv[1]) if len(sys.argv) > 1 else 60.0
    seconds = []
    with tempfile.TemporaryDirectory() as folder:
        profile = read_profile(profile_file(Path(folder)), tensor_size=4, p2p_gbps=25.0)
    print("PP  microbatches  limit_MiB  status    step_ms   bound_ms    gap_%  seconds  rounds")
    for stages, microbatches, memory in CASES:
        problem = problem_from_profile(
            profile, num_stages=stages, num_microbatches=microbatches, memory_limit_mib=memory
        )
        begin = time.perf_counter()
        try:
            found = solve(problem, time_limit_s=limit_s, num_workers=2)
        except InfeasiblePlan:
            print(f"{stages:2d} {microbatches:13d} {memory:10d}  infeasible {time.perf_counter() - begin:.2f} s")
            continue
        seconds.append(time.perf_counter() - begin)
        gap = (1 - found.lower_bound / found.step_time) * 100
        print(
            f"{stages:2d} {microbatches:13d} {memory:10d}  {found.status:8s} {found.step_time / 1e6:9.1f} "
            f"{found.lower_bound / 1e6:9.1f} {gap:8.3f} {seconds[-1]:8.2f} {found.rounds:7d}",
            flush=True,
        )
    print(f"median {statistics.median(seconds):.2f} s, worst {max(seconds):.2f} s")


if __name__ == "__main__":
    main()
