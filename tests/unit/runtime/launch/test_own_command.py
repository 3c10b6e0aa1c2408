"""Children start with the command line that the user typed, even if the script has changed it since."""

import sys

import pytest

from mindspeed_autoparallel.runtime.launch.orders import own_command


@pytest.mark.parametrize(
    ("typed", "now", "command"),
    [
        (["python", "-u", "train.py", "--lr", "1"], ["train.py", "--lr", "1"], ("train.py", "--lr", "1")),
        (
            ["python", "train.py", "config.yaml"],
            ["train.py", "--lr", "1", "--mm-data", "c"],
            ("train.py", "config.yaml"),
        ),
        (["pytest"], ["train.py", "--lr", "1"], ("train.py", "--lr", "1")),
    ],
    ids=["as typed", "replaced by a YAML launcher", "embedded"],
)
def test_a_second_start_gets_the_arguments_of_the_first(monkeypatch, typed, now, command):
    monkeypatch.setattr(sys, "orig_argv", typed)
    monkeypatch.setattr(sys, "argv", now)
    monkeypatch.delitem(sys.modules, "__main__")
    assert own_command() == command
