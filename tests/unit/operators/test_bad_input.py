"""Input that cannot be right is named, with a way out and exit code 2."""

import json

import pytest
from exit_codes import exit_code

from mindspeed_autoparallel.cli.main import main
from mindspeed_autoparallel.errors import ConfigError, InfeasiblePlan
from mindspeed_autoparallel.operators import global_batch_size, preset_graph, search_graph
from mindspeed_autoparallel.operators.config import config_from_mapping
from mindspeed_autoparallel.operators.graph.node import Graph
from mindspeed_autoparallel.operators.rules.products import matrix_product, source


def _graph():
    return preset_graph("llama2-7b", batch=4, sequence=128, num_layers=1)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"devices": 0}, "devices=0"),
        ({"devices": 4, "mem_coeff": 0}, "mem_coeff=0"),
        ({"devices": 4, "mem_coeff": float("nan")}, "mem_coeff"),
        ({"devices": 4, "search_mode": "magic"}, "magic"),
        ({"devices": 4, "search_mode": "sharding_propagation"}, "none is pinned"),
        ({"devices": 4, "pins": {"nothing*": {"rows": 2}}}, "matches no operator"),
        ({"devices": 4, "pins": {"layers.0.q": {"rows": 7}}}, "do not divide"),
        ({"devices": 4, "pins": {"layers.0.attention_norm": {"hidden": 2}}}, "cannot cut hidden"),
        ({"devices": 4, "pins": {"layers.0.q": {"rows": 8}}}, "does not divide 4"),
    ],
)
def test_impossible_search_is_refused_with_its_reason(options, words):
    with pytest.raises(ConfigError, match=words):
        search_graph(_graph(), **options)


def test_contradicting_pins_are_both_named():
    with pytest.raises(ConfigError, match=r"layers\.\*\.q gives .* and layers\.0\.\* gives"):
        search_graph(_graph(), 4, pins={"layers.*.q": {"rows": 4}, "layers.0.*": {"rows": 2}})


def test_parameter_limit_that_no_cut_meets_is_infeasible():
    with pytest.raises(InfeasiblePlan, match="Raise the limit"):
        search_graph(_graph(), 4, search_mode="exact", parameter_limit_bytes=1000)


def test_parameter_limit_is_kept():
    graph = _graph()
    total = sum(node.output_bytes for node in graph.nodes.values() if node.is_parameter)
    plan = search_graph(graph, 4, search_mode="exact", parameter_limit_bytes=total // 3)
    held = 0
    for name, node in graph.nodes.items():
        parts = 1
        for _, count in plan.decisions.cuts(name):
            parts *= count
        held += node.output_bytes // parts if node.is_parameter else 0
    assert held <= total // 3


@pytest.mark.parametrize(
    ("block", "words"),
    [
        ({"paralel": {}}, "unknown key paralel"),
        ({"parallel": {"mode": 2}}, "unknown key mode"),
        ({"parallel": {"parallel_mode": 3}}, "give 0, 1 or 2"),
        ({"parallel_config": {"mem_coeff": -1}}, "positive"),
    ],
)
def test_yaml_block_with_wrong_keys_or_values_is_refused(block, words):
    with pytest.raises(ConfigError, match=words):
        config_from_mapping(block, "file.yaml")


def test_command_keeps_a_limit_of_weights_in_the_exact_mode_only(capfd):
    command = ["operators", "--layers", "2", "--parameter-limit-gib"]
    assert main([*command, "0.2", "--search-mode", "exact", "--json"]) == 0
    weights = json.loads(capfd.readouterr().out)["megatron"]["plan_cost"]["parameter_bytes"]
    assert 0 < weights <= 0.2 * 2**30
    assert main([*command, "0.001", "--search-mode", "exact"]) == 3
    assert main([*command, "0.2"]) == 2
    assert "only search_mode exact supports" in capfd.readouterr().err
    assert exit_code([*command, "-1"]) == 2


def test_shapes_that_nothing_divides_are_searched_and_reported():
    graph = Graph()
    graph.add(source("x", (7, 11)))
    graph.add(source("w", (11, 13), parameter=True))
    graph.add(matrix_product("product", ("x", "w"), 7, 13, 11))
    for mode in ("recursive_programming", "exact"):
        plan = search_graph(graph, 4, search_mode=mode)
        assert plan.degrees() == {"product": {}}
        assert sum("no operator is cut there, those devices repeat the same work" in note for note in plan.notes) == 2


@pytest.mark.parametrize(
    ("block", "words"),
    [
        ("paralel: {}", "unknown key paralel"),
        ("parallel: {search_mod: exact}", "parallel: unknown key search_mod"),
        ("parallel_config: {mem_coeff: -1}", "mem_coeff is -1; give a positive number"),
        ("use_parallel: false", "use_parallel is false"),
        ("- a list", "expected a mapping"),
        ("a: [\n", "is not valid YAML: line"),
        ("parallel: {search_mode: exact\nparallel_config:\n  mem_coeff: 1\n", "is not valid YAML: line"),
    ],
)
def test_command_refuses_a_wrong_yaml_file_with_exit_code_two(tmp_path, capsys, block, words):
    file = tmp_path / "auto.yaml"
    file.write_text(block)
    assert main(["operators", "--layers", "1", "--config", str(file)]) == 2
    error = capsys.readouterr().err.strip()
    assert words in error
    assert "\n" not in error


@pytest.mark.parametrize(
    "words",
    [
        ("--devices", "0"),
        ("--devices", "-8"),
        ("--mem-coeff", "0"),
        ("--mem-coeff", "nan"),
        ("--batch", "0"),
        ("--seq-length", "0"),
        ("--layers", "0"),
        ("--stages", "3"),
        ("--micro-batch-num", "0"),
        ("--memory-gib", "0"),
        ("--memory-gib", "nan"),
        ("--memory-gib", "inf"),
        ("--pin", "q"),
        ("--pin", "layers.0.q:rows=x"),
        ("--untied", "--mem-coeff", "0.1"),
        ("--search-mode", "exact", "--mem-coeff", "0.1"),
        ("--config", "nowhere.yaml"),
        ("--page", "/dev/null/plan.html"),
    ],
)
def test_command_refuses_impossible_input_in_one_line(capsys, words):
    assert exit_code(["operators", "--layers", "1", *words]) == 2
    error = capsys.readouterr().err.strip()
    assert error and "\n" not in error and "Traceback" not in error


def test_devices_that_are_no_power_of_two_get_the_exact_mode():
    plan = search_graph(_graph(), 6)
    assert plan.search_mode == "exact" and plan.decisions.mesh == (3, 2) and "power of two" in plan.notes[0]


def test_command_prints_only_json(capfd):
    assert main(["operators", "--layers", "1", "--search-mode", "exact", "--json"]) == 0
    printed = json.loads(capfd.readouterr().out)
    assert printed["mesh"] == [2, 2, 2] and set(printed["operators"]) >= {"layers.0.q", "output"}


def test_command_ends_with_exit_code_two_for_an_unknown_model(capsys):
    assert main(["operators", "--model", "llama9"]) == 2
    assert "llama2-7b" in capsys.readouterr().err


@pytest.mark.parametrize(("pipeline", "full", "expected"), [(0, 0, 240), (0, 1, 60), (1, 0, 336), (1, 1, 84)])
def test_global_batch_size_follows_the_table(pipeline, full, expected):
    assert expected == global_batch_size(
        2,
        device_num=8,
        data_parallel=2,
        pipeline=bool(pipeline),
        full_batch=bool(full),
        micro_batch_interleave_num=3,
        micro_batch_num=7,
        gradient_accumulation_steps=5,
    )
