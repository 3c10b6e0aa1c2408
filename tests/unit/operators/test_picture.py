"""The picture shows every operator once, folds equal layers, escapes names, and a browser draws it."""

import json
import re

from mindspeed_autoparallel.cli.main import main
from mindspeed_autoparallel.operators import preset_graph, search_graph
from mindspeed_autoparallel.operators.graph.node import Graph
from mindspeed_autoparallel.operators.lowering.megatron import derive_megatron
from mindspeed_autoparallel.operators.moves import list_moves
from mindspeed_autoparallel.operators.picture import picture_data
from mindspeed_autoparallel.operators.rules.products import matrix_product, source
from mindspeed_autoparallel.report.operator_page import render_operator_page


def _plan(layers=4):
    return search_graph(preset_graph("llama2-7b", batch=8, sequence=64, num_layers=layers), 8, search_mode="exact")


def test_every_operator_is_counted_once_and_equal_layers_are_one_row():
    plan = _plan()
    shown = picture_data(plan)
    assert sum(group["count"] for group in shown["groups"]) == shown["num_operators"]
    assert sum(group["count"] * group["forward_bytes"] for group in shown["groups"]) == shown["forward_bytes"]
    rows = re.findall(
        r"<tr>(.*?)</tr>", render_operator_page(shown).partition('id="operators"')[2].partition("</table>")[0]
    )
    assert len(rows) == 1 + len(shown["groups"]) < 30
    assert max(group["count"] for group in shown["groups"]) >= 3 and any(
        re.search(r"<td[^>]*>4</td>", row) for row in rows
    )


def test_names_are_escaped():
    graph = Graph()
    graph.add(source("x", (8, 8)))
    graph.add(source("w", (8, 8), parameter=True))
    graph.add(matrix_product("<u>", ("x", "w"), 8, 8, 8))
    page = render_operator_page(picture_data(search_graph(graph, 2)))
    assert "<u>" not in page and "&lt;u&gt;" in page
    held = re.search(r'id="explorer-data">(.*?)</script>', page, re.S).group(1)
    assert json.loads(held)["names"] == ["<u>"] and "<" not in held


def test_page_has_every_operator_of_the_plan_and_what_moves_where():
    plan = _plan()
    page = render_operator_page(picture_data(plan))
    held = json.loads(re.search(r'id="explorer-data">(.*?)</script>', page, re.S).group(1))
    assert held["names"] == [name for name, node in plan.decisions.graph.nodes.items() if node.inputs]
    assert sum(held["forward"]) + sum(held["backward"]) == sum(map(sum, plan.edge_bytes().values()))
    assert {move.tensor for move in list_moves(plan)} <= set(re.findall("<td>([^<]*)</td>", page))
    assert "add --constraints" in page


def test_page_gives_the_megatron_flags_or_the_reason():
    plan = _plan(1)
    page = render_operator_page(picture_data(plan, derive_megatron(plan).as_json()))
    assert "--tensor-model-parallel-size" in page and "http:" not in page and "src=" not in page
    assert "no heads" in render_operator_page(picture_data(plan, None, "no heads"))


def test_command_writes_the_picture(tmp_path):
    file = tmp_path / "plan.html"
    assert main(["operators", "--layers", "1", "--page", str(file)]) == 0
    assert "layers.0.q" in file.read_text()
