"""The picture shows every cut, folds equal layers, and escapes names."""

import re

from mindspeed_autoparallel.cli.main import main
from mindspeed_autoparallel.operators import preset_graph, search_graph
from mindspeed_autoparallel.operators.graph.node import Graph
from mindspeed_autoparallel.operators.picture import render_picture
from mindspeed_autoparallel.operators.rules.products import matrix_product, source


def test_equal_layers_are_one_row_and_all_operators_are_counted():
    graph = preset_graph("llama2-7b", batch=8, sequence=64, num_layers=4)
    page = render_picture(search_graph(graph, 8, search_mode="exact"))
    counts = [int(n) for n in re.findall(r"<tr><td>[^<]*</td><td>(\d+)</td>", page)]
    assert sum(counts) == sum(bool(node.inputs) for node in graph.nodes.values()) and max(counts) >= 3
    assert page.count("<th>cut ") == 3


def test_names_are_escaped():
    graph = Graph()
    graph.add(source("x", (8, 8)))
    graph.add(source("w", (8, 8), parameter=True))
    graph.add(matrix_product("<b>", ("x", "w"), 8, 8, 8))
    assert "<b>" not in render_picture(search_graph(graph, 2))


def test_command_writes_the_picture(tmp_path):
    file = tmp_path / "plan.html"
    assert main(["operators", "--layers", "1", "--html", str(file)]) == 0
    assert "layers.0.q" in file.read_text()
