"""``--explain`` prints the log of the symbolic costs, the threshold and the value to set; notes tell when to look."""

from mindspeed_autoparallel.cli.main import main
from mindspeed_autoparallel.operators import search_graph
from mindspeed_autoparallel.operators.configured import explain
from mindspeed_autoparallel.operators.graph.node import Graph
from mindspeed_autoparallel.operators.rules.products import matrix_product, source


def published():
    graph = Graph()
    graph.add(source("x", (8192, 4096)))
    graph.add(source("w", (4096, 1), parameter=True))
    graph.add(matrix_product("product", ("x", "w"), 8192, 1, 4096))
    return graph


def test_log_of_the_published_example_with_its_threshold_and_value():
    plan = search_graph(published(), 2, mem_coeff=0.01)
    assert explain(plan, "product") == [
        "operator product, cut 1",
        "If the I-axis is cut, the op-cost is 20.48, the rest-cost is 0, and the total cost is 20.48",
        "If the K-axis is cut, the op-cost is 4096, the rest-cost is 0, and the total cost is 4096",
        "If do NOT cut the axis, the op-cost is 16.7772, the rest-cost is 0, and the total cost is 16.7772",
        "The costs of cutting the I-axis/J-axis/K-axis/no_cut are : [const vector]{20.48, 1.79769e+308, 4096, 16.7772}",
        "Choose NOT to cut",
        "mem_coeff where cutting I alone costs what no cut does: 0.012207",
        "to cut I set mem_coeff = 0.013 (tried: the whole search cuts it there)",
    ]


def test_value_to_set_cuts_rows():
    assert search_graph(published(), 2, mem_coeff=0.013).degrees() == {"product": {"rows": 2}}


def test_the_command_explains_every_cut_and_names_an_unknown_operator(capsys):
    symbolic = ["--mem-coeff", "0.1"]
    assert main(["operators", "--layers", "1", "--explain", "layers.0.q", *symbolic]) == 0
    printed = capsys.readouterr().out
    assert [line for line in printed.splitlines() if line.startswith("operator")] == [
        f"operator layers.0.q, cut {number}" for number in (1, 2, 3)
    ]
    assert main(["operators", "--layers", "1", "--explain", "layers.0.q"]) == 2
    assert "solved to its least modelled time; give --mem-coeff 0.1" in capsys.readouterr().err
    assert main(["operators", "--layers", "1", "--explain", "layers.0.attention", *symbolic]) == 2
    assert "not a matrix product of that search; these are: layers.0.q" in capsys.readouterr().err
    assert main(["operators", "--layers", "1", "--explain", "layers.0.q", "--devices", "1", *symbolic]) == 2
    assert "on one device nothing is cut" in capsys.readouterr().err
    assert main(["operators", "--layers", "1", "--explain", "layers.0.q", "--search-mode", "exact"]) == 2
    assert "only recursive_programming has costs to explain, not exact" in capsys.readouterr().err


def test_pinned_product_chose_nothing_and_is_not_named():
    plan = search_graph(published(), 2, mem_coeff=0.01, pins={"product": {"rows": 2}})
    assert not any("NOT to cut" in note for note in plan.notes)


def test_the_plan_names_the_products_that_are_not_cut_and_how_to_explain_them():
    (note,) = (n for n in search_graph(published(), 2, mem_coeff=0.01).notes if "NOT to cut" in n)
    assert note == "product: Choose NOT to cut (cut 1); --explain product gives the mem_coeff to set."
