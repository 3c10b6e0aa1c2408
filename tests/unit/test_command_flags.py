"""Every command has -q and -v, shows defaults, accepts no abbreviated flag, and prints its progress."""

from __future__ import annotations

import argparse
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from mindspeed_autoparallel.cli import _progress
from mindspeed_autoparallel.cli.main import build_parser, main
from mindspeed_autoparallel.planner.best_first import Status


def _commands() -> dict[str, argparse.ArgumentParser]:
    parser = build_parser([])
    (action,) = (one for one in parser._actions if isinstance(one, argparse._SubParsersAction))
    return action.choices


def test_every_command_is_quiet_or_verbose_and_shows_defaults() -> None:
    for name, parser in _commands().items():
        assert {"-q", "--quiet", "-v", "--verbose"} <= set(parser._option_string_actions), name
        text = " ".join(parser.format_help().split())
        for action in parser._actions:
            shown = action.default not in (None, False, "", argparse.SUPPRESS) and action.default != []
            if shown and action.option_strings and action.nargs != 0:
                described = text[text.index(f"{action.option_strings[0]} ", text.index("options:")) :]
                assert "default" in described[:700], f"{name} {action.option_strings[0]}"


def test_no_flag_is_abbreviated(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["predict", "--reques", "x.json"])
    assert capsys.readouterr().err.count("\n") == 1


def test_a_silent_command_prints_that_it_works(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import threading

    monkeypatch.setattr(_progress, "_WAITS_S", (0.0,))
    worked = threading.Event()
    show = _progress._Shown.show

    def noted(self: _progress._Shown, text: str) -> None:
        show(self, text)
        worked.set()

    monkeypatch.setattr(_progress._Shown, "show", noted)
    with _progress.shown_progress(argparse.Namespace(command="simulate"), works_alone=True):
        assert worked.wait(60)
    assert re.search(r"simulate: working, \d+ s", capsys.readouterr().err)


def test_a_command_that_forks_prints_that_it_works_without_a_thread(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(_progress, "_WAITS_S", (0.0,))
    before = signal.getsignal(signal.SIGALRM), threading.active_count()
    interval = signal.getitimer(signal.ITIMER_REAL)[1]
    with _progress.shown_progress(argparse.Namespace(command="doctor"), works_alone=False):
        done = subprocess.run([sys.executable, "-c", "import time; time.sleep(1)"], check=False)
        assert threading.active_count() == before[1]
    assert done.returncode == 0
    assert re.search(r"doctor: working, \d+ s", capsys.readouterr().err)
    assert signal.getsignal(signal.SIGALRM) == before[0]
    assert signal.getitimer(signal.ITIMER_REAL)[1] == interval


def test_quiet_prints_no_progress(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = argparse.Namespace(command="plan", quiet=True)
    with _progress.shown_progress(arguments, works_alone=True):
        _progress.progress_of(arguments)("a line")
    assert capsys.readouterr().err == ""


def test_a_terminal_replaces_status_lines_and_keeps_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    import io

    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    arguments = argparse.Namespace(command="plan", time_limit_s=60.0)
    with _progress.shown_progress(arguments, works_alone=False):
        progress = _progress.progress_of(arguments)
        progress(Status("7 layouts left"))
        progress(Status("6 layouts left"))
        progress("PP2: 12 ms")
    text = terminal.getvalue()
    assert text.count("\n") == 1 and text.endswith("PP2: 12 ms\n")
    assert "[" in text and "of 60 s  7 layouts left" in text and text.count("\x1b[K") == 2


def test_a_search_in_a_pipe_prints_plain_lines(tmp_path: Path) -> None:
    request = Path(__file__).parents[2] / "docs" / "examples" / "requests.json"
    done = subprocess.run(
        [sys.executable, "-m", "mindspeed_autoparallel", "predict", "--request", str(request), "-q"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0 and done.stderr == ""
