"""Memory of a device, the cost of stages, and models by a Hugging Face configuration alone."""

import json

import pytest

from mindspeed_autoparallel.cli.main import main
from mindspeed_autoparallel.operators import search_graph
from mindspeed_autoparallel.operators.costs import plan_cost
from mindspeed_autoparallel.operators.graph.node import Graph
from mindspeed_autoparallel.operators.plan import OperatorPlan
from mindspeed_autoparallel.operators.rules.products import matrix_product, pointwise, source
from mindspeed_autoparallel.operators.search.pricing import Machine, plan_resident_bytes, work_us
from mindspeed_autoparallel.operators.search.state import Decisions

# Sending is so slow that nothing is cut unless it has to be.
SLOW_LINKS = Machine(flops_per_us=1e12, memory_bytes_per_us=1e12, link_bytes_per_us=1.0)


def two_products(rows=64, width=64):
    graph = Graph()
    graph.add(source("x", (rows, width)))
    for number, given in enumerate(("x", "m0")):
        graph.add(source(f"w{number}", (width, width), parameter=True))
        graph.add(matrix_product(f"m{number}", (given, f"w{number}"), rows, width, width))
    graph.add(pointwise("out", ("m1",), (rows, width)))  # a pending sum has to be reduced for it
    return graph


def test_a_plan_that_does_not_fit_is_replaced_by_one_that_does_with_a_note():
    graph = two_products()
    free = search_graph(graph, 4, search_mode="exact", machine=SLOW_LINKS, memory_limit_bytes=None)
    needed = plan_resident_bytes(free.decisions)
    assert needed == 2 * 64 * 64 * (2 + 16) + 3 * 64 * 64 * 2  # two weights with states, three outputs; nothing is cut
    limit = int(needed * 0.6)
    found = search_graph(graph, 4, search_mode="exact", machine=SLOW_LINKS, memory_limit_bytes=limit)
    assert plan_resident_bytes(found.decisions) <= limit
    assert plan_cost(found, SLOW_LINKS).total_us > plan_cost(free, SLOW_LINKS).total_us
    assert "the cheapest plan needs" in found.notes[0] and found.bound.scope.endswith("memory aside")
    assert found.bound.bound_us <= plan_cost(free, SLOW_LINKS).total_us * (1 + 1e-9)


def test_a_limit_that_no_plan_keeps_to_is_reported_with_the_needed_memory():
    found = search_graph(two_products(), 2, search_mode="exact", memory_limit_bytes=1000)
    assert any("no plan was found that fits" in note for note in found.notes)


@pytest.mark.parametrize("microbatches", [2, 4, 8])
def test_stages_cost_their_own_work_what_crosses_and_the_bubble(microbatches):
    graph, machine = two_products(), Machine()
    decisions = Decisions(graph, (), dict.fromkeys(graph.nodes, ()))
    plan = OperatorPlan(decisions, "exact", (), 0.0, stages=2, num_microbatches=microbatches)
    found, whole = plan_cost(plan, machine), plan_cost(OperatorPlan(decisions, "exact", (), 0.0), machine)
    *first, second = (work_us(graph, graph.nodes[name], machine) for name in ("m0", "m1", "out"))
    assert sum(first) > second and found.compute_us == pytest.approx(sum(first))  # the first stage ends after m1
    assert whole.compute_us == pytest.approx(sum(first) + second)
    assert found.sent_bytes == 64 * 64 * 2  # what m1 made; its gradient is sent by the second stage
    assert found.parameter_bytes == whole.parameter_bytes
    busy = found.compute_us + found.communication_us
    assert found.bubble_us == pytest.approx(busy / microbatches)
    assert found.total_us == pytest.approx(busy * (1 + 1 / microbatches))


LLAMA = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 64, "intermediate_size": 128,
    "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 4, "vocab_size": 128,
}  # fmt: skip


@pytest.mark.torch
def test_a_hugging_face_configuration_is_searched_without_weights(tmp_path, capsys):
    pytest.importorskip("transformers")
    file = tmp_path / "config.json"
    file.write_text(json.dumps(LLAMA))
    sizes = ["--devices", "4", "--batch", "8", "--seq-length", "16", "--layers", "2", "--json"]
    assert main(["operators", "--model", f"hf:{file}", *sizes]) == 0
    found = json.loads(capsys.readouterr().out)
    products = [name for name, op in found["operators"].items() if op["kind"] == "matmul"]
    assert "model.layers.1.self_attn.q_proj" in products and "lm_head" in products
    assert not any(".layers.2." in name for name in products)
    assert any(axis for name in products for axis in found["operators"][name]["cut_axes"])
    file.write_text(json.dumps({**LLAMA, "model_type": "no-such-model"}))
    assert main(["operators", "--model", f"hf:{file}", *sizes]) == 2
    assert "no-such-model" in capsys.readouterr().err
    assert main(["operators", "--model", f"hf:{tmp_path / 'missing.json'}", *sizes]) == 2
    assert "missing.json" in capsys.readouterr().err


def test_a_plan_that_does_not_fit_ends_with_code_three_and_is_noted_beside_the_flags(capsys):
    sizes = ["operators", "--devices", "2", "--layers", "1", "--batch", "8", "--seq-length", "512"]
    assert main(sizes) == 0
    assert "does not fit" not in capsys.readouterr().out
    assert main([*sizes, "--memory-gib", "1"]) == 3
    printed = capsys.readouterr().out
    assert "the plan does not fit: it needs" in printed and "1.0 GiB are there (--memory-gib)" in printed
    assert main([*sizes, "--memory-gib", "1", "--megatron-flags"]) == 3
    printed = capsys.readouterr()
    assert printed.out.startswith("--tensor-model-parallel-size") and "the Megatron run does not fit" in printed.err
    assert main([*sizes, "--memory-gib", "1", "--json"]) == 3
    assert set(json.loads(capsys.readouterr().out)["shortages"]) == {"plan", "megatron"}
