"""Integer flags of every command and feature are bounded, and what no parser can take ends in one line."""

import argparse

import pytest

from mindspeed_autoparallel.cli.main import build_parser, main
from mindspeed_autoparallel.runtime.flags.flag import flags_of
from mindspeed_autoparallel.runtime.flags.registration import flag_groups
from mindspeed_autoparallel.whole_numbers import LARGEST, MOST, WholeNumber

PLAN = ("plan", "--profile", "none.json", "--nnodes", "1", "--nproc-per-node", "8", "--time-limit-s", "2")


def _values(parser, path=()):
    """Yield the flags of ``parser`` and its commands that take a value."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, command in action.choices.items():
                yield from _values(command, (*path, name))
        elif action.type is not None:
            name = action.option_strings[0] if action.option_strings else action.dest
            yield " ".join((*path, name)), parser._registry_get("type", action.type, action.type)


def test_every_integer_flag_has_bounds():
    types = dict(_values(build_parser([])))
    assert len(types) > 100
    assert not [name for name, kind in types.items() if kind is int]
    assert sum(isinstance(kind, WholeNumber) for kind in types.values()) > 45
    features = [flag for group in flag_groups() for flag in flags_of(group) if flag.type is int]
    assert len(features) > 10
    assert not [flag.name for flag in features if not isinstance(flag.convert, WholeNumber)]


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("operators", "--layers", "1000000000000"), "--layers: must be at most 1000, got '1000000000000'"),
        (("operators", "--devices", "2147483648"), "--devices: must be at most 65536, got '2147483648'"),
        (("operators", "--batch", "-" + "9" * 20), f"--batch: must be at least -{LARGEST}"),
        ((*PLAN, "--global-batch-size", "1" + "0" * 30), f"--global-batch-size: must be at most {MOST}"),
        ((*PLAN, "--global-batch-size", "9" * 5000), "--global-batch-size: must be a whole number, got '999"),
        ((*PLAN, "--virtual-sizes", "9" * 5000), "--virtual-sizes must be auto or positive numbers"),
        ((*PLAN, "--virtual-sizes", "\u00b2"), "--virtual-sizes must be auto or positive numbers"),
        (
            ("data", "describe", "--lengths", "none", "--seq-length", "0"),
            "--seq-length: must be a whole number of at least 1",
        ),
        (("report", "--plan=--"), "--plan: '--' is no value"),
        (("operators", "--layers=--"), "--layers: '--' is no value"),
    ],
)
def test_a_hostile_value_ends_in_one_line(words, told, capsys):
    try:
        code = main(words)
    except SystemExit as ended:
        code = ended.code
    assert code == 2
    line = capsys.readouterr().err
    assert told in line
    assert line.count("\n") == 1
    assert len(line) < 500
