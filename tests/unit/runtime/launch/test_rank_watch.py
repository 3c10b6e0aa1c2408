"""Ranks of a training that is started without torchrun: who dies is named to the others."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import pytest
from forked_python import forked_python

from mindspeed_autoparallel.runtime.launch import liveness, rank_watch
from mindspeed_autoparallel.runtime.launch.ports import reserved_port
from mindspeed_autoparallel.runtime.launch.rank_watch import RankWatch

torch = pytest.importorskip("torch")
pytestmark = [pytest.mark.torch]


@pytest.fixture
def ranks(monkeypatch):
    """Three ranks on one store, and a clock that ``pass_`` moves while those it is given still live."""
    now = [100.0]
    monkeypatch.setattr(liveness.time, "monotonic", lambda: now[0])
    store = torch.distributed.HashStore()
    watches = [RankWatch(store, rank, 3, silence_s=15.0) for rank in range(3)]

    def pass_(seconds, *living):
        for _ in range(seconds):
            now[0] += 1
            for rank in living:
                watches[rank].tick()

    return SimpleNamespace(of=watches, pass_=pass_)


def test_a_rank_that_falls_silent_is_named_to_all_others(ranks):
    ranks.pass_(60, 0, 1, 2)
    assert not any(watch.found for watch in ranks.of)
    ranks.pass_(20, 0, 1)
    assert {watch.found for watch in ranks.of[:2]} == {ranks.of[0].found}
    assert re.match(
        rf"rank 2 \({re.escape(socket.gethostname())}, process {os.getpid()}\) has sent no heartbeat", ranks.of[1].found
    )


def test_rank_0_is_named_by_the_others(ranks):
    ranks.pass_(20, 1, 2)
    assert ranks.of[2].found.startswith("rank 0 (")


def test_a_rank_that_ends_is_not_missed_and_one_that_fails_is_named_with_its_reason(ranks):
    ranks.of[2].leave()
    ranks.pass_(40, 0, 1)
    assert not ranks.of[0].found
    ranks.of[1].leave(ValueError("loss is NaN\nin step 7"))
    ranks.pass_(2, 0)
    assert ranks.of[0].found.endswith("ended with ValueError: loss is NaN")


def test_the_end_of_a_training_waits_for_the_last_word_with_the_store(monkeypatch):
    """A thread that is still inside the store's C++ when the interpreter ends aborts the process."""
    asked = threading.Event()

    class SlowStore:
        def __init__(self):
            self._store = torch.distributed.HashStore()

        def check(self, keys):
            asked.set()
            time.sleep(0.5)
            return self._store.check(keys)

        def __getattr__(self, name):
            return getattr(self._store, name)

    monkeypatch.setattr(rank_watch, "_TICK_S", 0.01)
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    ends = []
    monkeypatch.setattr(rank_watch.atexit, "register", ends.append)
    rank_watch._RankThread().start(SlowStore, 0, 2, 15.0)
    assert asked.wait(10)
    (end,) = ends
    end()
    assert "rank watch" not in [thread.name for thread in threading.enumerate()]


SCRIPT = """
import os, signal, sys, torch
from mindspeed_autoparallel.runtime.launch.rank_watch import watch_ranks
torch.distributed.init_process_group("gloo")
watch_ranks(6.0)
watch_ranks()
one = torch.ones(1)
torch.distributed.all_reduce(one)
if os.environ["RANK"] == sys.argv[1]:
    print("process", os.getpid(), file=sys.stderr)
    os.kill(os.getpid(), signal.SIGKILL)
if sys.argv[1] != "none":
    torch.distributed.all_reduce(one)
torch.distributed.destroy_process_group()  # what is left behind aborts rank 0 now and then: torch's own
"""


def started(dying: str, world_size: int, port: int) -> list[subprocess.Popen[str]]:
    """Processes as a loop in a shell would start them."""
    own = {"WORLD_SIZE": str(world_size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
    return [
        subprocess.Popen(
            [forked_python(), "-c", SCRIPT, dying],
            env={**os.environ, **own, "RANK": str(rank)},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(world_size)
    ]


@pytest.mark.timeout(240)
def test_real_ranks_without_torchrun_name_the_one_that_was_killed_and_say_nothing_when_all_end():
    with reserved_port() as first, reserved_port() as second, reserved_port() as third:
        ports = (first, second, third)
    processes = {
        dying: started(dying, size, port)
        for (dying, size), port in zip((("1", 3), ("0", 2), ("none", 2)), ports, strict=True)
    }
    errors = {dying: [one.communicate(timeout=200)[1] for one in ranks] for dying, ranks in processes.items()}
    assert [one.returncode for one in processes["none"]] == [0, 0]
    assert not any("has sent no heartbeat" in text for text in errors["none"])
    assert processes["1"][1].returncode == -signal.SIGKILL
    (killed,) = re.findall(r"^process (\d+)$", errors["1"][1], re.M)
    for rank in (0, 2):
        assert processes["1"][rank].returncode == 1
        assert re.search(
            rf"^\[rank {rank}\] rank 1 \(.*, process {killed}\) has sent no heartbeat", errors["1"][rank], re.M
        )
    assert processes["0"][1].returncode == 1
    assert re.search(r"^\[rank 1\] .*rank 0", errors["0"][1], re.M)
