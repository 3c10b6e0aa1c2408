"""Search times on the 80-layer 70B shape for 64 devices: seconds of one core, and as they passed."""

import time

from mindspeed_autoparallel.operators.presets import preset_graph
from mindspeed_autoparallel.operators.strategies import search_graph

graph = preset_graph("llama2-70b", batch=64, sequence=4096)
pin = {"layers.*.q": {"rows": 8, "columns": 8}}
search_graph(
    preset_graph("llama2-70b", batch=64, sequence=4096, num_layers=1), 64, search_mode="exact"
)  # loads ortools
print(f"{len(graph.nodes)} nodes")
print("| mode | tied layers | core seconds | elapsed | dp, mp | GB sent |")
for mode, options in (
    ("recursive_programming", {}),
    ("sharding_propagation", {"pins": pin}),
    ("sharding_propagation", {"pins": pin, "tied": False}),
    ("exact", {}),
    ("exact", {"tied": False}),
):
    started = time.process_time()
    plan = search_graph(graph, 64, search_mode=mode, **options)
    used = time.process_time() - started
    sent = sum(map(sum, plan.edge_bytes().values())) / 1e9
    tied = "-" if mode == "recursive_programming" else "yes" if options.get("tied", True) else "no"
    print(f"| {mode} | {tied} | {used:.2f} | {plan.search_s:.2f} | {plan.dp_mp()} | {sent:.1f} |", flush=True)
