"""A process that gets a signal ends the processes that it started."""

import os
import signal
import subprocess
import sys
import threading

import pytest

from mindspeed_autoparallel.interrupts import Terminated, ended_like_ctrl_c, exit_code_of, leaving_kept
from mindspeed_autoparallel.progress import show_progress


def test_a_signal_raises_once_and_its_handler_is_given_back():
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(Terminated) as caught, ended_like_ctrl_c():
        try:
            os.kill(os.getpid(), signal.SIGTERM)
        finally:
            os.kill(os.getpid(), signal.SIGTERM)  # impatient schedulers repeat themselves
    assert exit_code_of(caught.value) == 128 + signal.SIGTERM
    assert signal.getsignal(signal.SIGTERM) is before


def test_ignored_signals_stay_ignored():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with ended_like_ctrl_c():
            os.kill(os.getpid(), signal.SIGHUP)
    finally:
        signal.signal(signal.SIGHUP, before)


def test_other_threads_leave_signals_alone():
    seen = []

    def look():
        with ended_like_ctrl_c():
            seen.append(signal.getsignal(signal.SIGTERM))

    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    assert seen == [signal.getsignal(signal.SIGTERM)]


def test_an_interrupt_ends_with_a_line_and_its_code(capsys):
    show_progress("auto-tuning", "warning")
    with pytest.raises(SystemExit) as caught, leaving_kept("the traces stay"):
        raise KeyboardInterrupt
    assert caught.value.code == 130
    assert capsys.readouterr().out.endswith("] interrupted; the traces stay\n")


def test_a_terminated_command_reports_it():
    code = (
        "import os, signal\nfrom mindspeed_autoparallel.cli import main\n"
        "class Command:\n    run = staticmethod(lambda arguments: os.kill(os.getpid(), signal.SIGTERM))\n"
        "main._load = lambda name: Command\nmain.build_parser = lambda argv: main.argparse.ArgumentParser()\n"
        "main.argparse.ArgumentParser.parse_args = lambda self, argv: main.argparse.Namespace(command='x', quiet=False, verbose=False)\n"
        "raise SystemExit(main.main([]))\n"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (run.returncode, run.stderr) == (143, "interrupted\n")
