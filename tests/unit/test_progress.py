"""What the package logs is shown by one handler; how far something has come is logged when it has changed."""

import itertools
import logging
import os
import re
import threading
import time

from mindspeed_autoparallel.progress import changes_logged, show_progress
from mindspeed_autoparallel.runtime.features.auto_tuning.traces import num_written


def test_one_handler_shows_the_requested_level(capsys):
    logger = logging.getLogger("mindspeed_autoparallel.planner.search")
    show_progress("auto-parallel", "debug")
    show_progress("auto-tuning", "warning")
    logger.info("progress")
    logger.warning("30 % is missing")
    assert re.fullmatch(r"\[auto-tuning +\d+\.\d s\] 30 % is missing\n", capsys.readouterr().out)


def test_changes_are_logged_and_standstill_is_not(logged):
    asked, enough = itertools.count(), threading.Event()

    def describe():
        turn = next(asked)
        if turn > 10:
            enough.set()
        return f"{min(turn // 3, 2)} of 2"

    before = threading.active_count()
    with changes_logged(describe, every_s=0.001):
        assert enough.wait(30)
    assert logged == ["1 of 2", "2 of 2"]
    assert threading.active_count() == before


def test_files_of_an_earlier_run_do_not_count(tmp_path):
    files = [tmp_path / name for name in ("old", "new", "absent")]
    files[0].write_text("")
    since = time.time() + 100
    files[1].write_text("")
    os.utime(files[1], (since + 1, since + 1))
    assert num_written(files, since) == 1
