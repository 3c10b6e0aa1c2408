"""A generator's exchanges inside Megatron's 1F1B: every stage reaches each of them, and none waits in a circle."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mindspeed_autoparallel.errors import ConfigError
from mindspeed_autoparallel.schedule.event_graph import take_all
from mindspeed_autoparallel.schedule.messages import SendReceive, message_steps
from mindspeed_autoparallel.schedule.programs import Action, make_program

torch = pytest.importorskip("torch")
pytest.importorskip("megatron.core")

from mindspeed_autoparallel.runtime.hetero.schedules import GeneratorSchedule  # noqa: E402

pytestmark = [pytest.mark.torch, pytest.mark.megatron]


class Recorder:
    """Stands in for a generator's step: notes the exchanges a stage comes to."""

    def __init__(self) -> None:
        self.name, self.current, self.done = "image_generator", -1, 0
        self.exchanges: list[int] = []

    def exchange(self, microbatch: int, given: object) -> None:
        self.exchanges.append(microbatch)
        self.done = microbatch + 1

    def after_forward(self) -> None:
        """Nothing: on the last stage the exchange is in the backward."""

    def check_done(self, count: int) -> None:
        assert self.done == count


def steps_of(stage: int, num_stages: int, num_microbatches: int, diagonal: bool) -> list[object]:
    """The stage's passes and messages with its exchanges among them, as training runs them."""
    recorder = Recorder()
    schedule = GeneratorSchedule(
        [recorder],  # type: ignore[list-item]
        stage=stage,
        num_stages=num_stages,
        num_microbatches=num_microbatches,
        forward_only=False,
        diagonal=diagonal,
    )
    program = make_program("1f1b", num_stages, num_microbatches)
    found: list[object] = []
    outputs: dict[int, torch.Tensor] = {}

    def note(before: int) -> None:
        found.extend(("exchange", microbatch) for microbatch in recorder.exchanges[before:])

    for step in message_steps(program, "blocking")[stage]:
        before = len(recorder.exchanges)
        if isinstance(step, Action) and step.kind == "F":
            schedule.before_forward(step.microbatch)
            note(before)
            before = len(recorder.exchanges)
            found.append(step)
            outputs[step.microbatch] = schedule.after_forward(step.microbatch, torch.zeros(1))
            note(before)
        elif isinstance(step, Action):
            if stage == num_stages - 1:
                recorder.exchange(step.microbatch, None)
            elif outputs[step.microbatch].requires_grad:
                outputs[step.microbatch].sum().backward()
            note(before)
            found.append(step)
        else:
            found.append(step)
    schedule.after()
    assert recorder.exchanges == list(range(num_microbatches))
    return found


@given(st.integers(1, 8), st.integers(0, 20), st.booleans())
def test_every_stage_reaches_every_exchange_between_the_last_stages_forward_and_backward(
    num_stages: int, more: int, diagonal: bool
) -> None:
    """Messages and exchanges both wait for the other side; the replay must not stop."""
    steps = [steps_of(stage, num_stages, num_stages + more, diagonal) for stage in range(num_stages)]
    arrived, forwards = [0] * num_stages, 0
    posted: set[object] = set()

    def take(stage: int, step: object) -> bool:
        nonlocal forwards
        if isinstance(step, SendReceive):
            posted.update(step.messages)
            return all(message.other_side in posted for message in step.messages)
        if isinstance(step, tuple) and step[0] == "exchange":
            arrived[stage] = step[1] + 1
            return min(arrived) > step[1]
        if isinstance(step, Action) and stage == num_stages - 1:
            forwards += step.kind == "F"
            done = min(arrived)
            assert done == (step.microbatch if step.kind == "F" else step.microbatch + 1)
        return True

    take_all(steps, take)
    assert forwards == num_stages + more


def test_fewer_microbatches_than_stages_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"image_generator needs at least as many .* there are 1 for 2 stages"):
        GeneratorSchedule(
            [Recorder()],  # type: ignore[list-item]
            stage=0,
            num_stages=2,
            num_microbatches=1,
            forward_only=False,
        )
