"""The exact mode beside the Megatron configuration derived from it, by the same cost model, over models and sizes."""

from mindspeed_autoparallel.errors import InfeasiblePlan
from mindspeed_autoparallel.operators.lowering.megatron import derive_megatron
from mindspeed_autoparallel.operators.presets import preset_graph
from mindspeed_autoparallel.operators.strategies import search_graph

MODELS = ("llama2-7b", "llama2-70b", "baichuan2-13b", "qwen-14b", "pangualpha-2.6b", "mixtral-8x7b")
rows = []
for model in MODELS:
    for devices in (4, 8, 64):
        for batch, sequence in ((1, 4096), (2, 2048), (8, 4096), (64, 4096)):
            plan = search_graph(preset_graph(model, batch=batch, sequence=sequence), devices, search_mode="exact")
            try:
                derived = derive_megatron(plan)
            except InfeasiblePlan:
                continue
            extra = 100 * derived.extra_us / derived.plan_cost.total_us
            rows.append((extra, model, devices, f"{batch} x {sequence}", derived.layout.label()))
rows.sort()
cheaper = sum(extra < -1e-6 for extra, *_ in rows)
print(
    f"{len(rows)} searches; the uniform configuration is cheaper in {cheaper}; median {rows[len(rows) // 2][0]:+.1f} %"
)
print("| uniform is dearer by % | model | devices | samples x tokens | configuration |")
for extra, *row in [*rows[:4], rows[-1]]:
    print(f"| {extra:+.1f} | " + " | ".join(map(str, row)) + " |")
