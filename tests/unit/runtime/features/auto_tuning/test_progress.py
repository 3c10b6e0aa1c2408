"""How far a launch has come is said when it has changed, and only while it runs."""

import os
import threading
import time

from mindspeed_autoparallel.runtime.features.auto_tuning.progress import num_written, telling


def test_changes_are_said_and_standstill_is_not():
    said, twice = [], threading.Event()
    counts = iter([0, 0, 1, 1, 2])

    def say(line):
        said.append(line)
        if len(said) == 2:
            twice.set()

    with telling(say, lambda: f"{next(counts, 2)} of 2", every_s=0.001):
        assert twice.wait(30)
    assert said == ["1 of 2", "2 of 2"]
    before = threading.active_count()
    with telling(said.append, lambda: "never asked again"):
        pass
    assert threading.active_count() == before


def test_files_of_an_earlier_run_do_not_count(tmp_path):
    files = [tmp_path / name for name in ("old", "new", "absent")]
    files[0].write_text("")
    since = time.time() + 100
    files[1].write_text("")
    os.utime(files[1], (since + 1, since + 1))
    assert num_written(files, since) == 1
