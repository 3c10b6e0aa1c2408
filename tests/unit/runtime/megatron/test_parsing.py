"""Around a host's parse_args: flags join, and features get the training's arguments only."""

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
    monkeypatch.setattr(parsing, "after_parsing", lambda arguments, of_host: calls.append(arguments))
    return calls


def with_argv(monkeypatch, *words):
    monkeypatch.setattr(sys, "argv", ["script.py", *words])


def test_without_our_flags_the_parser_stays_as_the_host_made_it(monkeypatch, seen):
    with_argv(monkeypatch, "--lr", "1")
    before, after = [], []

    def provider(parser):
        before.extend(parser._option_string_actions)
        return parser

    def parse_and_look(extra_args_provider, x):
        parser = argparse.ArgumentParser()
        parser.add_argument("--lr", type=float)
        after.extend(extra_args_provider(parser)._option_string_actions)
        return parser.parse_args()

    assert vars(parsing.parse_with_our_flags(parse_and_look, (provider,), {"x": 1})) == {"lr": 1.0}
    assert before == after
    assert seen == []


def test_a_flag_that_the_script_loses_before_parsing_is_an_error(monkeypatch, seen, capsys):
    monkeypatch.setattr(sys, "orig_argv", ["python", "script.py", "config.yaml", "--auto-parallel-mm", "--lr", "1"])
    with_argv(monkeypatch, "--lr", "1")
    with pytest.raises(SystemExit) as ended:
        parsing.parse_with_our_flags(parse, (), {})
    assert ended.value.code == 2
    assert "--auto-parallel-mm was on the command line, and the script replaced" in capsys.readouterr().err
    assert seen == []
    with_argv(monkeypatch, "--lr", "1", "--auto_parallel_mm")
    parsing.parse_with_our_flags(parse, (), {})
    assert len(seen) == 1


@pytest.mark.parametrize("kept", [True, False], ids=["on sys.argv", "taken by Hydra"])
@pytest.mark.parametrize("word", ["auto_parallel_mm=true", "+auto_parallel_mm=1", "trainer.auto-parallel-plan=p.json"])
def test_a_flag_that_is_written_as_a_key_of_hydras_is_an_error(monkeypatch, seen, capsys, word, kept):
    monkeypatch.setattr(sys, "orig_argv", ["python", "script.py", word])
    with_argv(monkeypatch, *([word] if kept else []))
    with pytest.raises(SystemExit) as ended:
        parsing.parse_with_our_flags(parse, (), {})
    assert ended.value.code == 2
    assert f"ConfigError: {word} has no effect here" in capsys.readouterr().err
    assert seen == []


def test_a_key_of_hydras_that_is_off_or_became_a_flag_is_none(monkeypatch, seen):
    monkeypatch.setattr(sys, "orig_argv", ["python", "script.py", "auto_parallel_mm=false", "lr=1"])
    with_argv(monkeypatch)
    parsing.parse_with_our_flags(parse, (), {})
    monkeypatch.setattr(sys, "orig_argv", ["python", "script.py", "auto_parallel_mm=true"])
    with_argv(monkeypatch, "--auto-parallel-mm")
    parsing.parse_with_our_flags(parse, (), {})
    assert len(seen) == 1


def test_a_flag_that_is_on_by_default_is_seen_with_the_defaults_of_the_others(monkeypatch, seen):
    with_argv(monkeypatch)

    def provider(parser):
        parser.set_defaults(hetero_parallel=True)
        return parser

    arguments = parsing.parse_with_our_flags(parse, (provider,), {})
    assert (arguments.hetero_parallel, arguments.hetero_balance) == (True, "local")
    assert seen == [arguments]


@pytest.mark.parametrize(
    ("words", "what"),
    [
        (
            ("--hetero-balance", "global"),
            "--hetero-balance is for --hetero-parallel or --auto-parallel-hetero, which is not given",
        ),
        (("--auto-tuning-verify",), "--auto-tuning-verify is for --auto-tuning"),
        (("--nnodes", "2"), "--nnodes is for --auto-parallel-mm or --auto-tuning or --operator-search"),
        (("--auto-parallel-plan", "p", "--simulated-nnodes", "2"), "--simulated-nnodes is for --auto-parallel-mm"),
    ],
)
def test_a_flag_whose_feature_is_off_is_refused(monkeypatch, capsys, seen, words, what):
    with_argv(monkeypatch, *words)
    with pytest.raises(SystemExit) as ended:
        parsing.parse_with_our_flags(parse, (), {})
    assert ended.value.code == 2
    assert what in capsys.readouterr().err
    assert seen == []


def test_flags_that_the_host_has_itself_are_its_own_business(monkeypatch, seen):
    with_argv(monkeypatch, "--nnodes", "2")

    def provider(parser):
        parser.add_argument("--nnodes", type=int)
        return parser

    assert parsing.parse_with_our_flags(parse, (provider,), {}).nnodes == 2


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

    def refuse(arguments, of_host):
        raise ConfigError("--simulated-nnodes is missing")

    monkeypatch.setattr(parsing, "after_parsing", refuse)
    with pytest.raises(SystemExit) as ended:
        parsing.parse_with_our_flags(parse, (), {})
    assert ended.value.code == 2
    assert capsys.readouterr().err == "ConfigError: --simulated-nnodes is missing\n"
