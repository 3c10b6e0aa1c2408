"""Search times on the 80-layer 70B shape for 64 devices."""

from mindspeed_autoparallel.operators.presets import preset_graph
from mindspeed_autoparallel.operators.strategies import search_graph

g = preset_graph("llama2-70b", batch=64, sequence=4096)
print(len(g.nodes))
pin = {"layers.*.q": {"rows": 8, "columns": 8}}
for m, k in (
    ("recursive_programming", {}),
    ("sharding_propagation", {"pins": pin}),
    ("sharding_propagation", {"pins": pin, "tied": False}),
    ("exact", {}),
    ("exact", {"tied": False}),
):
    p = search_graph(g, 64, search_mode=m, **k)
    print(
        m,
        k.get("tied", True),
        round(p.search_s, 2),
        p.dp_mp(),
        sum(map(sum, p.edge_bytes().values())) / 1e9,
        flush=True,
    )
