"""What moves where adds up to the bytes of the plan, names both ends, and folds repeated layers."""

import json

import pytest

from mindspeed_autoparallel.cli.main import main
from mindspeed_autoparallel.operators import preset_graph, search_graph
from mindspeed_autoparallel.operators.costs import plan_cost
from mindspeed_autoparallel.operators.graph.redistribution import steps
from mindspeed_autoparallel.operators.moves import list_moves, move_lines, placement_text


@pytest.mark.parametrize("mode", ["recursive_programming", "exact"])
def test_moves_add_up_to_the_bytes_and_the_time_of_the_plan(mode):
    plan = search_graph(
        preset_graph("llama2-7b", batch=8, sequence=512, num_layers=2), 4, search_mode=mode, mem_coeff=16
    )
    moves = list_moves(plan)
    sent = plan.edge_bytes().values()
    assert sum(m.count * m.forward_bytes for m in moves) == sum(forward for forward, _ in sent) > 0
    assert sum(m.count * m.backward_bytes for m in moves) == sum(backward for _, backward in sent) > 0
    assert sum(m.total_us for m in moves) == pytest.approx(plan_cost(plan).communication_us)
    assert [m.total_us for m in moves] == sorted((m.total_us for m in moves), reverse=True)
    assert max(m.count for m in moves) == 2 and len(moves) < len(sent)


def test_a_move_lists_its_steps():
    plan = search_graph(preset_graph("llama2-7b", batch=8, sequence=512, num_layers=1), 4, search_mode="exact")
    for move in list_moves(plan):
        assert move.source == plan.decisions.output_placements(move.tensor)
        taken = steps(move.source, move.target, move.shape, plan.decisions.mesh)
        assert move.forward_steps == tuple(step.collective for step in taken)
        assert bool(move.forward_bytes) <= bool(set(move.forward_steps) - {"slice"})


def test_placements_are_written_as_pytorch_writes_them():
    assert placement_text((0, -1, -2)) == "S(0) R P" and placement_text(()) == "R"


def test_the_terminal_lists_what_is_left_out(capsys):
    plan = search_graph(preset_graph("llama2-7b", batch=8, sequence=512, num_layers=1), 4, search_mode="exact")
    moves = list_moves(plan)
    assert len(move_lines(moves, 2)) == 4 and f"{len(moves) - 2} others" in move_lines(moves, 2)[-1]
    assert main(["operators", "--layers", "2", "--devices", "4", "--mem-coeff", "16", "--moves"]) == 0
    assert "layers.0.q.weight x2: " in capsys.readouterr().out


def test_the_json_has_every_move(capsys):
    assert main(["operators", "--layers", "2", "--devices", "4", "--mem-coeff", "16", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert sum(m["count"] * m["forward_bytes"] for m in found["moves"]) == found["forward_bytes"]
    assert found["constraints"] == []
