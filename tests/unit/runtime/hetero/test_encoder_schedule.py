"""Memory mode window: when macro-batches are encoded and taken back along the schedule, virtual stages included."""

import types

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mindspeed_autoparallel.schedule import SENDS
from mindspeed_autoparallel.schedule.event_graph import take_all
from mindspeed_autoparallel.schedule.messages import Post, SendReceive, Wait, message_steps
from mindspeed_autoparallel.schedule.programs import Action, make_program
from mindspeed_autoparallel.schedule.window import ticks_of

pytest.importorskip("torch")

from mindspeed_autoparallel.runtime.hetero.schedules import WindowedSchedule


class Recorded:
    """Stands in for one encoder's macro-batches; records the calls."""

    def __init__(self, log, name, num_microbatches, scale):
        self.log, self.name, self.scale, self.total = log, name, scale, num_microbatches

    def __len__(self):
        return -(-self.total // self.scale)

    def first_microbatch(self, k):
        return k * self.scale

    def last_microbatch(self, k):
        return min((k + 1) * self.scale, self.total) - 1

    def encode(self, ks):
        self.log += [("encode", self.name, k) for k in ks]

    def take_back(self, ks):
        self.log += [("back", self.name, k) for k in ks]


def walk(stage, num_stages, num_microbatches, scales, num_chunks=1):
    """One stage's schedule: forward and backward of its first chunk with what is done in between."""
    log = []
    steps = [Recorded(log, name, num_microbatches, scale) for name, scale in scales.items()]
    times = WindowedSchedule(steps, stage=stage, ticks=ticks_of(num_stages, num_microbatches, num_chunks))
    program = make_program("interleaved" if num_chunks > 1 else "1f1b", num_stages, num_microbatches, num_chunks)
    times.before()
    forwards = 0
    for action in program[stage]:
        if action.kind == "F":
            times.at_forward(forwards)
            forwards += 1
        if not action.chunk:
            log.append(({"F": "forward", "B": "backward"}[action.kind], action.microbatch))
    times.after()
    return log


@pytest.mark.parametrize(
    ("num_stages", "num_microbatches", "num_chunks"),
    [(stages, count, 1) for stages in (1, 2, 4) for count in (1, 2, 3, 8, 11)]
    + [(2, 2, 2), (2, 8, 3), (4, 8, 2), (4, 16, 3), (3, 6, 4)],
)
@pytest.mark.parametrize("scale", [1, 3])
def test_rows_are_there_before_they_are_needed_and_gradients_before_they_are_taken(
    num_stages, num_microbatches, num_chunks, scale
):
    log = walk(0, num_stages, num_microbatches, {"image": scale}, num_chunks)
    for number in range(num_microbatches):
        k = number // scale
        assert log.index(("encode", "image", k)) < log.index(("forward", number))
        assert log.index(("backward", number)) < log.index(("back", "image", k))
    assert [entry for entry in log if entry[0] == "back"] == [
        ("back", "image", k) for k in range(-(-num_microbatches // scale))
    ]


@pytest.mark.parametrize(("num_stages", "num_chunks"), [(2, 1), (4, 1), (2, 2), (4, 3)])
def test_every_stage_does_the_same_in_the_same_order(num_stages, num_chunks):
    scales = {"image": 2, "audio": 3}
    logs = [walk(stage, num_stages, 12, scales, num_chunks) for stage in range(num_stages)]
    done = [[entry for entry in log if entry[0] in ("encode", "back")] for log in logs]
    assert all(order == done[0] for order in done)


def test_few_macro_batches_live_at_a_time():
    alive = most = 0
    for kind, *_ in walk(0, 4, 64, {"image": 2}):
        alive += {"encode": 1, "back": -1}.get(kind, 0)
        most = max(most, alive)
    assert most == 3, "the pipeline's four microbatches and the next two"


def test_under_virtual_stages_as_many_live_as_the_warm_up_needs():
    alive = most = 0
    for kind, *_ in walk(0, 4, 64, {"image": 2}, num_chunks=2):
        alive += {"encode": 1, "back": -1}.get(kind, 0)
        most = max(most, alive)
    assert most == 4, "of 32: the first chunk's microbatches in flight, and the next two"


def steps_of(stage, program, sends):
    """A stage's passes and messages with its ticks among them, as training runs them."""
    num_chunks = 1 + max(action.chunk for action in program[0])
    num_microbatches = 1 + max(action.microbatch for action in program[0])
    log = []
    steps = [Recorded(log, "image", num_microbatches, 1)]
    times = WindowedSchedule(steps, stage=stage, ticks=ticks_of(len(program), num_microbatches, num_chunks))
    found, forwards = [], 0

    def note():
        found.extend(log)
        log.clear()

    times.before()
    note()
    for step in message_steps(program, sends)[stage]:
        if isinstance(step, Action) and step.kind == "F":
            times.at_forward(forwards)
            forwards += 1
            note()
        found.append(step)
    times.after()
    note()
    return found


@pytest.mark.parametrize("sends", [name for name in SENDS if name != "eager"])
@given(st.integers(2, 5), st.integers(2, 4), st.integers(1, 4))
def test_no_stage_waits_in_a_circle_under_virtual_stages(sends, num_stages, num_chunks, num_groups):
    program = make_program("interleaved", num_stages, num_stages * num_groups, num_chunks)
    no_circle([steps_of(stage, program, sends) for stage in range(num_stages)])


@given(st.integers(1, 6), st.integers(1, 9))
def test_no_stage_waits_in_a_circle(num_stages, num_microbatches):
    program = make_program("1f1b", num_stages, num_microbatches)
    no_circle([steps_of(stage, program, "blocking") for stage in range(num_stages)])


def no_circle(steps):
    """Messages and meetings both wait for the other side; the replay must not stop."""
    posted, met = set(), {}

    def take(stage, step):
        if isinstance(step, Post | Wait | SendReceive):
            posted.update(() if isinstance(step, Wait) else step.messages)
            return isinstance(step, Post) or all(message.other_side in posted for message in step.messages)
        if step[0] in ("encode", "back"):
            met.setdefault(step, set()).add(stage)
            return len(met[step]) == len(steps)
        return True

    take_all(steps, take)


def test_a_longer_warm_up_is_refused_with_the_other_mode_named():
    from mindspeed_autoparallel.errors import ConfigError
    from mindspeed_autoparallel.runtime.hetero import phases

    session = types.SimpleNamespace(memory="window")
    config = types.SimpleNamespace(overlap_moe_expert_parallel_comm=True)
    with pytest.raises(ConfigError, match=r"under 2 virtual stages.* Use --hetero-memory recompute"):
        phases._encoder_schedule(session, [], 4, 2, config)
