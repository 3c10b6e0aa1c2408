"""Presets have the published sizes; adapters train alone, experts are cut as experts."""

import math

import pytest

from mindspeed_autoparallel.operators import preset_graph, search_graph
from mindspeed_autoparallel.operators.lowering.megatron import derive_megatron
from mindspeed_autoparallel.operators.presets import PRESETS
from mindspeed_autoparallel.operators.search.pricing import plan_resident_bytes


def parameters(name, trained=False):
    graph = preset_graph(name, batch=1, sequence=8)
    held = [n for n in graph.nodes.values() if n.is_parameter and (n.needs_gradient or not trained)]
    return sum(math.prod(node.output_shape) for node in held) / 1e9


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("llama2-7b", 6.74),
        ("llama2-13b", 13.02),
        ("llama2-70b", 68.98),
        ("baichuan2-7b", 7.51),
        ("baichuan2-13b", 13.90),
        ("qwen-7b", 7.72),
        ("qwen-14b", 14.17),
        ("pangualpha-2.6b", 2.72),
        ("pangualpha-13b", 12.99),
        ("mixtral-8x7b", 46.70),
    ],
)
def test_presets_have_the_parameters_of_their_models(name, billions):
    assert parameters(name) == pytest.approx(billions, rel=0.001)


def test_every_family_with_adapters_has_them_and_trains_only_them():
    for name in [n for n in PRESETS if n.endswith("-lora")]:
        shape = PRESETS[name]
        wide, narrow = shape.hidden, shape.kv_heads * shape.hidden // shape.heads
        adapters = 16 * (2 * (shape.hidden + wide) + 2 * (shape.hidden + narrow)) * shape.num_layers
        assert parameters(name, trained=True) * 1e9 == adapters
    assert {n.rsplit("-", 2)[0] for n in PRESETS if n.endswith("-lora")} == {"llama2", "baichuan2", "qwen"}


def test_frozen_weights_send_no_gradients_and_hold_no_states():
    whole, thin = (preset_graph(n, batch=8, sequence=512, num_layers=1) for n in ("llama2-7b", "llama2-7b-lora"))
    plans = [search_graph(graph, 8, mem_coeff=1e-3) for graph in (whole, thin)]
    assert [plan.dp_mp() for plan in plans] == [(8, 1), (8, 1)]
    sent = [sum(backward for _, backward in plan.edge_bytes().values()) for plan in plans]
    assert sent[1] < sent[0] / 10
    assert plan_resident_bytes(plans[1].decisions) < plan_resident_bytes(plans[0].decisions) / 3


def test_experts_divided_among_devices_are_expert_parallelism_inside_data_parallelism():
    graph = preset_graph("mixtral-8x7b", batch=8, sequence=512, num_layers=2)
    pins = {"layers.*.q": {"rows": 4}}
    pins |= {f"layers.*.experts.{part}": {"experts": 4} for part in ("up", "gate", "down")}
    found = derive_megatron(search_graph(graph, 4, search_mode="exact", pins=pins))
    assert (found.layout.data_size, found.layout.expert_size, found.layout.tensor_size) == (4, 4, 1)
    assert found.flags()[found.flags().index("--expert-model-parallel-size") + 1] == "4"
    cuts = found.uniform.decisions
    assert cuts.cuts("layers.0.experts.up") == ((0, 2), (0, 2)) and cuts.cuts("layers.0.q") == ((0, 2), (0, 2))
    # Tokens go to their experts and back by all-to-all: both ways on every mesh dim.
    sent = found.uniform.edge_bytes()
    assert (
        sent["layers.0.dispatch", "layers.0.experts.up", 0][0] > 0
        and sent["layers.0.experts.down", "layers.0.combine", 0][0] > 0
    )


def test_mixture_of_experts_is_searched_in_every_mode():
    graph = preset_graph("mixtral-8x7b", batch=8, sequence=512, num_layers=1)
    for mode, pins in (
        ("recursive_programming", {}),
        ("exact", {}),
        ("sharding_propagation", {"layers.0.q": {"rows": 4}}),
    ):
        plan = search_graph(graph, 4, search_mode=mode, pins=pins)
        assert any("experts" in parts or "rows" in parts for name, parts in plan.degrees().items() if "experts" in name)
