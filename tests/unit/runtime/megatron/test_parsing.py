"""Around a host's parse_args: flags join, features see the training's arguments and nobody else's."""

import argparse
import sys

import pytest

from mindspeed_autoparallel.errors import ConfigError
from mindspeed_autoparallel.runtime.megatron import parsing


def parse(extra_args_provider=None, ignore_unknown_args=False):
    """A stand-in with Megatron's signature."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--lr", type=float, default=0.1)
    if extra_args_provider is not None:
        parser = extra_args_provider(parser)
    return parser.parse_known_args()[0] if ignore_unknown_args else parser.parse_args()


@pytest.fixture
def seen(monkeypatch):
    calls = []
    monkeypatch.setattr(parsing, "after_parsing", calls.append)
    return calls


def with_argv(monkeypatch, *words):
    monkeypatch.setattr(sys, "argv", ["script.py", *words])


def test_without_our_flags_the_host_gets_the_very_same_arguments(monkeypatch, seen):
    with_argv(monkeypatch, "--lr", "1")

    def provider(parser):
        return parser

    passed = []
    parsing.parse_with_our_flags(lambda *args, **kwargs: passed.append((args, kwargs)), (provider,), {"x": 1})
    assert passed == [((provider,), {"x": 1})]
    assert seen == []


def test_features_see_what_the_script_parsed(monkeypatch, seen):
    with_argv(monkeypatch, "--auto-parallel-mm", "--own", "3")

    def provider(parser):
        parser.add_argument("--own", type=int)
        return parser

    arguments = parsing.parse_with_our_flags(parse, (provider,), {})
    assert (arguments.own, arguments.auto_parallel_mm) == (3, True)
    assert seen == [arguments]


def test_megatrons_side_looks_at_the_arguments_start_no_feature(monkeypatch, seen):
    with_argv(monkeypatch, "--auto-parallel-plan", "plan.json")
    parsing.parse_with_our_flags(parse, (), {"ignore_unknown_args": True})
    assert seen == []


def test_an_error_for_people_is_a_line_and_an_exit_code(monkeypatch, capsys):
    with_argv(monkeypatch, "--auto-parallel-mm")

    def refuse(arguments):
        raise ConfigError("--simulated-nnodes is missing")

    monkeypatch.setattr(parsing, "after_parsing", refuse)
    with pytest.raises(SystemExit) as ended:
        parsing.parse_with_our_flags(parse, (), {})
    assert ended.value.code == 2
    assert capsys.readouterr().err == "ConfigError: --simulated-nnodes is missing\n"
