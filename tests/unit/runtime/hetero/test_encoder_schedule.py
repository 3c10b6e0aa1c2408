"""Memory mode window: when macro-batches are encoded and taken back along the 1F1B schedule."""

import types

import pytest

pytest.importorskip("torch")

from mindspeed_autoparallel.runtime.hetero.encoder_schedule import WindowedSchedule


class Recorded:
    """Stands in for one encoder's macro-batches; writes down what is asked of it."""

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


def walk(stage, num_stages, num_microbatches, scales):
    """One stage's 1F1B: forward and backward of its microbatches with what the schedule does in between."""
    log = []
    steps = [Recorded(log, name, num_microbatches, scale) for name, scale in scales.items()]
    times = WindowedSchedule(steps, stage=stage, num_stages=num_stages, num_microbatches=num_microbatches)
    times.before()
    warmup, back = min(num_stages - stage - 1, num_microbatches), 0
    for forward in range(num_microbatches):
        times.at_forward(forward)
        log.append(("forward", forward))
        if forward >= warmup:
            log.append(("backward", back))
            back += 1
    log += [("backward", number) for number in range(back, num_microbatches)]
    times.after()
    return log


@pytest.mark.parametrize("num_stages", [1, 2, 4])
@pytest.mark.parametrize("num_microbatches", [1, 2, 3, 8, 11])
@pytest.mark.parametrize("scale", [1, 3])
def test_rows_are_there_before_they_are_needed_and_gradients_before_they_are_taken(num_stages, num_microbatches, scale):
    log = walk(0, num_stages, num_microbatches, {"image": scale})
    for number in range(num_microbatches):
        k = number // scale
        assert log.index(("encode", "image", k)) < log.index(("forward", number))
        assert log.index(("backward", number)) < log.index(("back", "image", k))
    assert [entry for entry in log if entry[0] == "back"] == [
        ("back", "image", k) for k in range(-(-num_microbatches // scale))
    ]


@pytest.mark.parametrize("num_stages", [2, 4])
def test_every_stage_does_the_same_in_the_same_order(num_stages):
    scales = {"image": 2, "audio": 3}
    logs = [walk(stage, num_stages, 10, scales) for stage in range(num_stages)]
    done = [[entry for entry in log if entry[0] in ("encode", "back")] for log in logs]
    assert all(order == done[0] for order in done)


def test_few_macro_batches_live_at_a_time():
    alive = most = 0
    for kind, *_ in walk(0, 4, 64, {"image": 2}):
        alive += {"encode": 1, "back": -1}.get(kind, 0)
        most = max(most, alive)
    assert most == 3, "the pipeline's four microbatches and the next two"


def test_virtual_stages_are_refused_with_the_other_modes_named():
    from mindspeed_autoparallel.errors import ConfigError
    from mindspeed_autoparallel.runtime.hetero import phases

    session = types.SimpleNamespace(memory="window")
    with pytest.raises(ConfigError, match=r"2 virtual stages on each rank\. Use --hetero-memory recompute"):
        phases._encoder_schedule(session, [], 4, 2)
