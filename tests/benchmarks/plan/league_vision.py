"""The 72B vision language model that experts split by hand on Ascend, beside our split, for any share of image tokens.

python tests/benchmarks/plan/league_vision.py

Published: Qwen2.5-VL 72B, 128k tokens, 64 Ascend A3 (128 devices), TP8 PP4 CP4, decoder layers 6, 25, 25, 24, the vision
encoder on the first stage. How many of the tokens are images is not, nor the batch; so both are varied. Costs are this
package's formulas for an Ascend 910C (no measurement), nothing is recomputed, memory is left out.
"""

from __future__ import annotations

from mindspeed_autoparallel.cost.catalogue import find_device
from mindspeed_autoparallel.planner.evaluate import evaluate
from mindspeed_autoparallel.planner.layouts.options import SearchOptions
from mindspeed_autoparallel.planner.layouts.search import search
from mindspeed_autoparallel.planner.placement import ModulePlacement
from mindspeed_autoparallel.predict.analytic_profile import analytic_profile
from mindspeed_autoparallel.predict.model_file import Section
from mindspeed_autoparallel.spec import Cluster, Layout

TOKENS, PATCHES_PER_TOKEN = 131_072, 4
DECODER = {
    "num_layers": 80,
    "hidden": 8192,
    "heads": 64,
    "kv_heads": 8,
    "ffn": 29568,
    "seq": TOKENS,
    "vocab": 152064,
    "swiglu": True,
}
VISION = {"num_layers": 32, "hidden": 1280, "heads": 16, "ffn": 3456, "swiglu": True, "causal": False}
BY_HAND = (6, 25, 25, 24)
CLUSTER = Cluster(num_nodes=8, devices_per_node=16, memory_limit_bytes=2**60)
LAYOUT = Layout(pipeline_size=4, tensor_size=8, context_size=4, sequence_parallel=True)


def main() -> None:
    """Print a row per batch and share of image tokens."""
    print(
        "| microbatches | image tokens | by hand, ms | ours, ms | bound, ms | saves | vision layers | decoder layers |"
    )
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    for batch in (8, 32):
        for percent in (5, 10, 20, 30, 40, 60, 80, 100):
            patches = TOKENS * PATCHES_PER_TOKEN * percent // 100 // 128 * 128
            # Windowed attention: a patch attends to 64 others in 28 of 32 layers.
            vision = {**VISION, "seq": patches, "window": 64, "windowed_share": 28 / 32}
            sections = (Section("image_encoder", vision), Section("text_decoder", DECODER))
            profile = analytic_profile(sections, find_device("910C"), CLUSTER.devices_per_node)
            placement = ModulePlacement(
                layers={"image_encoder": (32, 0, 0, 0), "text_decoder": BY_HAND},
                recompute={"image_encoder": {}, "text_decoder": {}},
            )
            hand = evaluate(profile, CLUSTER, LAYOUT, placement, batch)
            options = SearchOptions(layouts=[LAYOUT], with_relaxations=False, time_limit_s=60)
            plan = search(profile, CLUSTER, batch, options)
            layers = [[stage.layers.get(module, 0) for stage in plan.stages] for module in placement.layers]
            saved = 1 - plan.step.total_us / hand.step.total_us
            times = (hand.step.total_us, plan.step.total_us, plan.search.lower_bound_us)
            shown = " | ".join(f"{time / 1e3:.1f}" for time in times)
            print(f"| {batch} | {percent} % | {shown} | {saved:.2%} | {layers[0]} | {layers[1]} |", flush=True)


if __name__ == "__main__":
    main()
