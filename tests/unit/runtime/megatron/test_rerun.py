"""A followed step on the CPU device is without the rerun machine's copies of batches, and the machine goes on after it."""

import pytest

from mindspeed_autoparallel.runtime.megatron.rerun import without_kept_batches

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
