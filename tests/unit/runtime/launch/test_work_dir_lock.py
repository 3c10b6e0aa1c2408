"""Who may work in a work dir."""

import json
import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from mindspeed_autoparallel.errors import ConfigError
from mindspeed_autoparallel.runtime.launch import work_dir as lock
from mindspeed_autoparallel.runtime.launch.work_dir import HOLDER_FILE, only_one

HOLD = (
    "import sys, time\nfrom pathlib import Path\nfrom mindspeed_autoparallel.runtime.launch.work_dir import only_one\n"
    "with only_one(Path(sys.argv[1]), '--work-dir'):\n    print('held', flush=True)\n    time.sleep(300)\n"
)


@pytest.fixture
def holder(tmp_path):
    process = subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "held\n"
    yield process
    process.kill()
    process.wait()


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr(lock, "_BEAT_S", 0.05)
    monkeypatch.setattr(lock, "_WATCHED_S", 1.0)


def elsewhere(path, count):
    """What a holder on another machine has written."""
    about = {"host": "far", "machine": "another", "pid": 7, "count": count}
    path.write_text(json.dumps(about).ljust(400))


def test_a_second_process_is_refused_with_the_process_that_holds_the_lock(tmp_path, holder):
    with pytest.raises(ConfigError, match=f"process {holder.pid} on "), only_one(tmp_path, "--work-dir"):
        pass


def test_after_a_killed_holder_the_next_one_starts_at_once(tmp_path, holder, monkeypatch):
    holder.send_signal(signal.SIGKILL)
    holder.wait()
    assert json.loads((tmp_path / HOLDER_FILE).read_text())["pid"] == holder.pid
    monkeypatch.setattr(lock, "_counts", lambda *_: pytest.fail("the same machine needs no watching"))
    with only_one(tmp_path, "--work-dir"):
        pass


def test_a_holder_on_another_node_that_counts_is_believed(tmp_path, quick):
    """Its lock is not seen here, as on file systems that keep locks on each node."""
    path, ended = tmp_path / HOLDER_FILE, threading.Event()

    def count():
        number = 0
        while not ended.wait(0.02):
            number += 1
            elsewhere(path, number)

    elsewhere(path, 0)
    other = threading.Thread(target=count)
    other.start()
    try:
        with pytest.raises(ConfigError, match="process 7 on far"), only_one(tmp_path, "--work-dir"):
            pass
    finally:
        ended.set()
        other.join()


def test_a_holder_on_another_node_that_died_does_not_keep_the_work_dir(tmp_path, quick):
    elsewhere(tmp_path / HOLDER_FILE, 5)
    with only_one(tmp_path, "--work-dir"):
        deadline = time.monotonic() + 200
        while json.loads((tmp_path / HOLDER_FILE).read_text())["pid"] != os.getpid():
            assert time.monotonic() < deadline
        first = json.loads((tmp_path / HOLDER_FILE).read_text())["count"]
        while json.loads((tmp_path / HOLDER_FILE).read_text())["count"] == first:
            assert time.monotonic() < deadline
    assert not (tmp_path / HOLDER_FILE).exists()


def test_where_there_are_no_locks_the_holder_is_watched(tmp_path, holder, monkeypatch):
    def unsupported(*_):
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(lock.fcntl, "flock", unsupported)
    monkeypatch.setattr(lock, "_BEAT_S", 0.2)
    with pytest.raises(ConfigError, match=f"process {holder.pid} on "), only_one(tmp_path, "--work-dir"):
        pass


@pytest.mark.parametrize("name", [".lock", HOLDER_FILE])
def test_a_planted_link_is_not_written_through(tmp_path, name):
    (tmp_path / "precious").write_text("x")
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / name).symlink_to(tmp_path / "precious")
    try:
        with only_one(tmp_path / "work", "--work-dir"):
            pass
    except ConfigError as error:
        assert "Remove it" in str(error)
    assert (tmp_path / "precious").read_text() == "x"


def test_a_lock_that_is_a_folder_is_one_line(tmp_path):
    (tmp_path / ".lock").mkdir()
    with pytest.raises(ConfigError, match=r"cannot lock .*: \.lock: Is a directory"), only_one(tmp_path, "--work-dir"):
        pass
