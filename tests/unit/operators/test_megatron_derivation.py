"""A plan per operator becomes sizes, flags and a price; what the model forbids gives way with a note."""

import itertools
import json

import pytest

from mindspeed_autoparallel.cli.main import main
from mindspeed_autoparallel.errors import ConfigError, InfeasiblePlan
from mindspeed_autoparallel.operators import preset_graph, search_graph
from mindspeed_autoparallel.operators.candidate import read_candidate
from mindspeed_autoparallel.operators.costs import plan_cost
from mindspeed_autoparallel.operators.lowering.megatron import derive_megatron
from mindspeed_autoparallel.operators.lowering.uniform import uniform_decisions
from mindspeed_autoparallel.operators.pipeline import Pipeline, search_pipelined


def _graph(batch=16, layers=2, model="llama2-7b"):
    return preset_graph(model, batch=batch, sequence=2048, num_layers=layers)


@pytest.mark.parametrize(("mem_coeff", "sizes"), [(0.1, (8, 1)), (16, (2, 4)), (1024, (1, 8))])
def test_mem_coeff_moves_the_derived_configuration_from_data_to_tensor(mem_coeff, sizes):
    found = derive_megatron(search_graph(_graph(12 if mem_coeff > 1 else 16), 8, mem_coeff=mem_coeff))
    assert (found.layout.data_size, found.layout.tensor_size) == sizes
    assert found.layout.num_devices == 8


def test_uniform_plan_costs_nothing_to_make_uniform():
    found = derive_megatron(search_graph(_graph(), 8, mem_coeff=0.1))
    assert found.num_changed == 0 and found.extra_us == 0 and found.plan_cost == found.uniform_cost


def test_price_of_uniformity_is_that_of_the_uniform_plan_itself():
    found = derive_megatron(search_graph(_graph(12), 6, search_mode="exact"))
    sent = sum(forward + backward for forward, backward in found.uniform.edge_bytes().values())
    assert found.uniform_cost.sent_bytes == sent != found.plan_cost.sent_bytes
    assert found.num_changed > 0
    assert found.extra_us == found.uniform_cost.total_us - found.plan_cost.total_us != 0


def test_uniform_tensor_parallelism_is_columns_then_inner_and_sums_once_per_block():
    graph = _graph(1)
    decisions = uniform_decisions(graph, (4,), ("tensor",), sequence_parallel=False)
    cut = {n: graph.nodes[n].axes[c[0]].name if c[0] >= 0 else "" for n, c in decisions.choices.items()}
    for part in ("q", "k", "v", "up", "gate"):
        assert cut[f"layers.0.{part}"] == "columns"
    assert cut["layers.0.o"] == cut["layers.0.down"] == "inner" and cut["layers.0.attention"] == "heads"
    assert cut["layers.0.attention_norm"] == cut["layers.0.mlp_add"] == "" and cut["output"] == "columns"
    by_rows = uniform_decisions(graph, (4,), ("tensor",), sequence_parallel=True).choices
    assert by_rows["layers.0.mlp_norm"] == by_rows["layers.1.attention_norm"] == (0,)


def test_more_devices_than_samples_become_context_parallel():
    layout = derive_megatron(search_graph(_graph(4), 8, mem_coeff=0.1)).layout
    assert (layout.data_size, layout.context_size, layout.tensor_size) == (4, 2, 1)


def test_tokens_of_norms_cut_under_tensor_parallelism_are_sequence_parallelism():
    assert derive_megatron(search_graph(_graph(8), 4, search_mode="exact")).layout.sequence_parallel


@pytest.mark.slow
@pytest.mark.parametrize(
    ("batch", "devices", "tied"),
    [
        *itertools.product((1,), (4,), (True, False)),
        *itertools.product((2,), (8,), (True, False)),
        *itertools.product((6,), (12,), (True, False)),
        (8, 64, True),
        *(pytest.param(*case, marks=pytest.mark.long) for case in ((8, 64, False), (1, 64, True), (1, 64, False))),
    ],
)  # (1, 64) and (8, 64): the cuts alone end above the uniform plan
def test_exact_is_never_dearer_than_the_configuration_derived_from_it(batch, devices, tied):
    graph = preset_graph("llama2-7b", batch=batch, sequence=4096, num_layers=2)
    found = derive_megatron(search_graph(graph, devices, search_mode="exact", tied=tied))
    assert found.extra_us >= -1e-6 * found.plan_cost.total_us


def test_pins_and_the_limit_of_weights_outlive_the_start_from_the_uniform_plan():
    graph = preset_graph("llama2-7b", batch=32, sequence=4096, num_layers=1)
    free = search_graph(graph, 16, search_mode="exact")
    held = sum(n.output_bytes for n in graph.nodes.values() if n.is_parameter)
    limited = search_graph(graph, 16, search_mode="exact", parameter_limit_bytes=held // 8)
    assert plan_cost(limited).parameter_bytes <= held // 8 < plan_cost(free).parameter_bytes
    pinned = search_graph(graph, 16, search_mode="exact", pins={"layers.0.up": {"inner": 16}})
    assert pinned.degrees()["layers.0.up"] == {"inner": 16}


def test_size_that_the_key_heads_do_not_divide_gives_way_with_a_note():
    plan = search_graph(_graph(16, 1, "llama2-70b"), 16, mem_coeff=1e6)
    found = derive_megatron(plan)
    assert plan.dp_mp() == (1, 16) and found.layout.tensor_size == 8
    assert any("TP 16 does not divide 8 key heads" in note for note in found.notes)


def test_stages_and_microbatches_are_in_the_flags():
    given = Pipeline(stages=2, servers=2, micro_batch_num=4)
    found = derive_megatron(search_pipelined(_graph(16), 8, pipeline=given))
    flags = dict(zip(found.flags()[::2], found.flags()[1::2], strict=True))
    assert flags["--pipeline-model-parallel-size"] == "2" and flags["--micro-batch-size"] == "1"
    assert flags["--global-batch-size"] == "16" and found.layout.data_size == 4


def test_devices_that_no_role_can_use_are_infeasible():
    graph = preset_graph("llama2-7b", batch=2, sequence=3, num_layers=1)
    with pytest.raises(InfeasiblePlan, match="cut 1"):
        derive_megatron(search_graph(graph, 7, search_mode="exact"))


def test_command_prints_flags_for_a_script_and_json_that_the_planner_reads(tmp_path, capfd):
    command = ["operators", "--layers", "2", "--mem-coeff", "16", "--batch", "12", "--seq-length", "2048"]
    assert main([*command, "--megatron-flags"]) == 0
    flags = capfd.readouterr().out.split()
    assert flags[:2] == ["--tensor-model-parallel-size", "4"]
    assert main([*command, "--json"]) == 0
    file = tmp_path / "operators.json"
    file.write_text(capfd.readouterr().out)
    layout = read_candidate(file)
    assert (layout.tensor_size, layout.data_size, layout.micro_batch_size) == (4, 2, 6)
    assert main([*command]) == 0
    assert "Megatron: PP1 TP4 DP2" in capfd.readouterr().out


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ({}, "no Megatron configuration"),
        ({"megatron": None, "megatron_reason": "no heads divide"}, "no Megatron configuration: no heads divide"),
        ({"megatron": {}, "schema_version": 7}, "this release reads 1"),
        (
            {"megatron": {"pipeline_model_parallel_size": 0}, "schema_version": 1},
            "pipeline_model_parallel_size must be a positive",
        ),
    ],
)
def test_foreign_candidate_is_refused(tmp_path, content, words):
    file = tmp_path / "operators.json"
    file.write_text(json.dumps(content))
    with pytest.raises(ConfigError, match=words):
        read_candidate(file)
