"""A long step that is replayed from a short one takes exactly what its whole replay takes."""

import json
import random

import pytest

from mindspeed_autoparallel.cli.main import main
from mindspeed_autoparallel.planner.split.model import solution
from mindspeed_autoparallel.schedule import SENDS, StepTimes, folding, in_flight, make_program, simulate
from mindspeed_autoparallel.schedule.folding import program_of_peaks, simulate_folded

CYCLE = 12


def _drawn_sizes(drawn, sends):
    stages, paired = drawn.randint(1, 5), False
    if (sends == "blocking" and drawn.random() < 0.5) or (sends == "eager" and drawn.random() < 0.7):
        return "1f1b", stages, drawn.randint(80, 120), 1, 0, False
    stages, chunks = drawn.randint(2, 4), drawn.randint(2, 3)
    group = drawn.choice([0, stages, stages + 1])
    each = group or stages
    rest = drawn.choice([0, *range(stages, each)])
    paired = sends not in ("blocking", "eager") and drawn.random() < 0.3
    return "interleaved", stages, each * drawn.randint(70, 80) + rest, chunks, group, paired


def _drawn_times(drawn, sizes):
    """Equal stages, stages that are nearly equal, or any."""
    virtual = sizes[1] * sizes[3]
    low = drawn.choice([100, 98, 20])
    row = lambda: [drawn.randint(low, 100) for _ in range(virtual)]
    pairs = [(a, b) for a in range(virtual) for b in range(virtual)]
    return StepTimes(
        forward=row(),
        backward=row(),
        link=drawn.choice([[], [drawn.randint(0, 30) for _ in range(virtual - 1)]]),
        per_operation=drawn.choice([0, 3]),
        per_message=drawn.choice([0, 2]),
        paired_saving={pair: drawn.randint(0, 20) for pair in pairs} if sizes[5] else {},
    )


@pytest.mark.parametrize("sends", SENDS)
def test_a_folded_step_is_the_whole_step(sends, monkeypatch):
    drawn, replays = random.Random(f"folding {sends}"), []
    whole = lambda *args, **more: replays.append(1) or simulate(*args, **more)
    monkeypatch.setattr(folding, "simulate", whole)
    monkeypatch.setattr(folding, "_SHORTENS", 1)
    for _ in range(4):
        sizes = _drawn_sizes(drawn, sends)
        times = _drawn_times(drawn, sizes)
        found = simulate_folded(sizes, times, sends, cycles=(CYCLE,))
        wanted = simulate(make_program(*sizes), times, sends=sends)
        assert found.step_time == wanted.step_time, (sizes, times)
        assert (found.starts, found.finishes) == (wanted.starts, wanted.finishes)
        computing = sum(
            number * (time + times.per_operation)
            for numbers, row in ((found.num_forwards, times.forward), (found.num_backwards, times.backward))
            for number, time in zip(numbers, row, strict=True)
        )
        if not sizes[5]:
            assert computing == found.step_time or (computing < found.step_time and (times.link or times.per_message))
    assert len(replays) <= 2, "most steps are folded"


def test_microbatches_of_unequal_length_and_fractions_are_not_folded():
    rows = [[1 + number % 3 for number in range(400)]] * 2
    for times in (StepTimes(forward=rows, backward=rows), StepTimes(forward=[1.1, 1], backward=[1, 1])):
        sizes = ("1f1b", 2, 400, 1, 0, False)
        assert simulate_folded(sizes, times, "blocking") == simulate(make_program(*sizes), times, sends="blocking")


@pytest.mark.parametrize(
    "sizes",
    [("1f1b", 4, 900, 1, 0, False), ("interleaved", 3, 407, 2, 4, False), ("interleaved", 2, 300, 3, 2, True),
     ("gpipe", 2, 64, 1, 0, False)],
)  # fmt: skip
def test_a_shorter_program_holds_as_much_at_once(sizes):
    short, whole = program_of_peaks(sizes), make_program(*sizes)
    assert in_flight(short) == in_flight(whole)
    assert sizes[0] == "gpipe" or len(short[0]) < len(whole[0])


@pytest.mark.parametrize("stages", [5, 7, 8, 9, 10, 11])
def test_a_step_on_any_number_of_stages_is_folded(stages, monkeypatch):
    drawn, sizes = random.Random(stages), ("1f1b", stages, 3000, 1, 0, False)
    row = lambda: [drawn.randint(20, 100) for _ in range(stages)]
    times = StepTimes(forward=row(), backward=row())
    wanted = simulate(make_program(*sizes), times, sends="blocking")
    monkeypatch.setattr(folding, "simulate", None)
    assert simulate_folded(sizes, times, "blocking").step_time == wanted.step_time


def test_every_cycle_of_a_short_step_is_tried_before_the_whole_one():
    """A thousand rounds pass until the queue in front of a stage that is a thousandth faster is empty."""
    sizes = ("1f1b", 3, 20_000, 1, 0, False)
    times = StepTimes(forward=[1000, 999, 998], backward=[2000, 1999, 1998], link=[7, 5])
    found = simulate_folded(sizes, times, "eager")
    assert found.step_time == simulate(make_program(*sizes), times, sends="eager").step_time


def test_a_search_over_a_million_samples_replays_no_long_step_and_is_settled(tmp_path, monkeypatch, capsys):
    """Whole replays would take longer than the limit, and the plan would be the first that was tried."""
    lengths = []
    whole = lambda *sizes: lengths.append(sizes[2]) or make_program(*sizes)
    for module in (folding, solution):
        monkeypatch.setattr(module, "make_program", whole)
    (tmp_path / "model.json").write_text('{"num_layers": 4, "hidden": 512, "heads": 8, "seq": 512, "vocab": 1000}')
    words = ["plan", "--profile-source", "analytic", "--model", str(tmp_path / "model.json"), "--device", "H100"]
    words += ["--nnodes", "1", "--nproc-per-node", "2", "--global-batch-size", str(2**20), "--num-workers", "1"]
    assert main([*words, "--json", "--out", str(tmp_path / "out")]) == 0
    assert json.loads(capsys.readouterr().out)["search"]["status"] == "optimal"
    assert lengths and max(lengths) < 1000
