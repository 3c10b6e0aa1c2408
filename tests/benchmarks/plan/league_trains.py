"""Train a few steps of a model as deep as one of the league's under the layout by hand and under ours, tiny widths.

python tests/benchmarks/plan/league_trains.py 8 80 LAYOUT [LAYOUT ...]    # ranks, decoder layers, Megatron's strings
python tests/benchmarks/plan/league_trains.py 13 78 LAYOUT LAYOUT --microbatches 32 --group 16

One process per pipeline rank (gloo); weights depend on a parameter's global name only, so that losses and gradient norms
of all layouts must agree.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "distributed" / "devices"))

import gpt_layouts

NUM_STEPS, HIDDEN = 2, 16


def train(rank: int, pipeline: int, layouts: list[str], microbatches: int, group: int | None) -> None:
    """Print losses and norms of every layout, on the first rank; ``group``: microbatches of a chunk in a row."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(pipeline)}
    gpt_layouts.dist.init_process_group("nccl")
    for layout in layouts:
        virtual = len(parts_of(layout)) // pipeline
        case = {
            "pp": pipeline,
            "vpp": virtual if virtual > 1 else None,
            "batch": microbatches,
            "config": {"pipeline_model_parallel_layout": layout, "microbatch_group_size_per_vp_stage": group},
        }
        result = gpt_layouts.run_case(case)
        every: list[object] = [None] * pipeline
        gpt_layouts.dist.all_gather_object(every, result)
        if not rank:
            losses = next(item["losses"] for item in every if item and item["losses"][0] is not None)
            print(json.dumps({"layout": layout, "losses": losses, "norms": result["norms"]}), flush=True)
    gpt_layouts.dist.destroy_process_group()


def parts_of(layout: str) -> list[str]:
    """Return the parts of a layout string, as Megatron reads it."""
    from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout

    return PipelineParallelLayerLayout.parse_str_to_list(layout)


def main() -> None:
    """Fork a process per rank, so that imports are paid once."""
    parser = argparse.ArgumentParser()
    parser.add_argument("ranks", type=int)
    parser.add_argument("num_layers", type=int)
    parser.add_argument("layouts", nargs="+")
    parser.add_argument("--microbatches", type=int, help="as many as ranks, where nothing is said")
    parser.add_argument("--group", type=int)
    arguments = parser.parse_args()
    pipeline, gpt_layouts.NUM_LAYERS = arguments.ranks, arguments.num_layers
    gpt_layouts.HIDDEN, gpt_layouts.NUM_STEPS = HIDDEN, NUM_STEPS
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": os.environ.get("MASTER_PORT", "29731")}
    children = []
    for rank in range(pipeline):
        child = os.fork()
        if not child:
            code = 1
            try:
                train(rank, pipeline, arguments.layouts, arguments.microbatches or pipeline, arguments.group)
                code = 0
            finally:
                os._exit(code)
        children.append(child)
    codes = [os.waitpid(child, 0)[1] for child in children]
    sys.exit(max(map(bool, codes)))


if __name__ == "__main__":
    main()
