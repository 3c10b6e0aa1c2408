"""A reason that many layouts share is listed once."""

from mindspeed_autoparallel.profiles import MeasuredAt
from mindspeed_autoparallel.profiles.records import TraceResult
from mindspeed_autoparallel.runtime.features.auto_tuning.traces import tell_refused, tell_untraced


def _point(tensor: int, batch: int) -> MeasuredAt:
    return MeasuredAt(
        tensor_size=tensor, context_size=1, expert_size=1, micro_batch_size=batch, sequence_parallel=False
    )


def test_layouts_are_listed_once_per_reason_and_outcome() -> None:
    points = [_point(tensor, batch) for tensor in (1, 2, 4) for batch in (1, 2)]
    found = {point: TraceResult(summary="asks for data" if point.tensor_size < 4 else "too large") for point in points}
    notes, left_out = tell_untraced(points, points[:3], found)
    assert notes == [
        "3 layouts (TP1 CP1 EP1 MBS1 to TP2 CP1 EP1 MBS1) could not be traced; measured whole instead: asks for data"
    ]
    assert [(names, reason.split(": ")[1]) for names, reason in left_out.items()] == [
        ("TP2 CP1 EP1 MBS2", "asks for data"),
        ("2 layouts (TP4 CP1 EP1 MBS1 to TP4 CP1 EP1 MBS2)", "too large"),
    ]


def test_nothing_is_listed_where_all_was_traced() -> None:
    assert tell_untraced([], [], {}) == ([], {})


def test_layouts_that_megatron_refuses_are_listed_once_per_reason():
    points = [MeasuredAt(context_size=2, micro_batch_size=size) for size in (1, 2)]
    assert tell_refused({point: TraceResult(summary="AssertionError: no") for point in points}) == {
        f"2 layouts ({points[0].label()} to {points[1].label()})": "Megatron refuses it: AssertionError: no"
    }
