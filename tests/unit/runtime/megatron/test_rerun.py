"""A followed step on the CPU device is without the rerun machine's copies of batches, and the machine goes on after it."""

import pytest

from mindspeed_autoparallel.runtime.megatron.short_training import without_kept_batches

machines = pytest.importorskip("megatron.core.rerun_state_machine")


def test_batches_are_kept_outside_only(monkeypatch):
    machine = machines.RerunStateMachine(mode=machines.RerunMode.REPORT_DETERMINISM_STATS)
    monkeypatch.setattr(machines, "_GLOBAL_RERUN_STATE_MACHINE", machine)
    data = machines.RerunDataIterator(iter(range(10)))
    next(data)
    with without_kept_batches():
        next(data)
    next(data)
    assert data.saved_microbatches == [0, 2]


def test_objects_of_the_previous_step_are_released(monkeypatch):
    machine = machines.RerunStateMachine(mode=machines.RerunMode.REPORT_DETERMINISM_STATS)
    monkeypatch.setattr(machines, "_GLOBAL_RERUN_STATE_MACHINE", machine)
    alone, replayed = (machines.RerunDataIterator(iter(range(10))) for _ in range(2))
    next(alone), next(replayed)
    replayed.rewind()
    with without_kept_batches([alone, replayed, None]):
        assert alone.saved_microbatches == []
        assert replayed.saved_microbatches == [0], "a step that is run again needs them"
    with without_kept_batches(alone):
        pass
