"""Fields of a dataclass as flags: their argparse options, values set by a host, and refusals."""

import argparse
from dataclasses import dataclass
from typing import Literal

import pytest

from mindspeed_autoparallel.errors import ConfigError
from mindspeed_autoparallel.runtime.flags.flag import FlagGroup, flag, flags_of, read_flags
from mindspeed_autoparallel.runtime.flags.registration import add_missing_flags, flag_groups
from mindspeed_autoparallel.whole_numbers import WholeNumber


@dataclass(frozen=True, kw_only=True)
class Flags(FlagGroup):
    """Of a feature that tests invented."""

    TITLE = "a feature"

    on: bool = flag(False, "Switch it on.")
    num_ranks: int = flag(16, "Ranks.", metavar="N", least=1)
    limit: float | None = flag(None, "Limit.")
    mode: Literal["fast", "slow"] = flag("fast", "How.")
    file: str | None = flag(None, "File.", metavar="FILE")


@pytest.mark.parametrize("least", [0, 1])
def test_a_value_that_is_not_a_number_or_too_small_is_refused_with_the_minimum(least, capsys):
    parser = argparse.ArgumentParser()
    parser.add_argument("--ranks", type=WholeNumber(least=least))
    assert parser.parse_args(["--ranks", str(least)]).ranks == least
    for text in (str(least - 1), "many", "1.5"):
        with pytest.raises(SystemExit):
            parser.parse_args([f"--ranks={text}"])
        assert f"must be a whole number of at least {least}, got {text!r}" in capsys.readouterr().err


def test_the_type_of_a_field_determines_the_type_in_argparse():
    on, ranks, limit, mode, file = flags_of(Flags)
    assert (on.name, on.type, ranks.name, ranks.default) == ("--on", bool, "--num-ranks", 16)
    assert (limit.type, mode.type, mode.choices, file.metavar) == (float, str, ("fast", "slow"), "FILE")
    assert ranks.convert("3") == 3


def test_flags_that_the_host_registered_itself_are_read_as_well():
    read = read_flags(Flags, argparse.Namespace(num_ranks="8", limit=2, mode=None, other=1))
    assert read == Flags(num_ranks=8, limit=2.0)


@pytest.mark.parametrize(
    ("value", "told"),
    [
        ({"num_ranks": 0}, "--num-ranks must be a whole number of at least 1, got 0"),
        ({"num_ranks": 2**30}, "--num-ranks must be at most 1048576, got 1073741824"),
        ({"num_ranks": 10**5000}, "--num-ranks must be at most 1048576, got a number of more than 300 digits"),
        ({"num_ranks": "many"}, "--num-ranks: Expected `int`, got `str`, got 'many'"),
        ({"mode": "middle"}, "--mode: Invalid enum value 'middle', got 'middle'"),
    ],
)
def test_a_value_that_cannot_be_is_refused_with_the_flag(value, told):
    with pytest.raises(ConfigError, match=told):
        read_flags(Flags, argparse.Namespace(**value))


TEXTS = [one for group in flag_groups() for one in flags_of(group) if one.type is str]


@pytest.mark.parametrize("blank", ["", " "])
def test_an_empty_value_is_refused_for_every_flag(blank, capsys):
    """With a variable that was not set, --auto-parallel-plan "$PLAN" trained without the plan."""
    assert {"--auto-parallel-plan", "--auto-parallel-preflight", "--operator-plan"} < {one.name for one in TEXTS}
    parser = argparse.ArgumentParser(prog="train")
    add_missing_flags(parser)
    for one in TEXTS:
        for words in ([one.name, blank], [f"{one.name}={blank}"]):
            with pytest.raises(SystemExit) as ended:
                parser.parse_args(words)
            last = capsys.readouterr().err.splitlines()[-1]
            assert ended.value.code == 2 and one.name in last and "empty value" in last


def test_an_empty_value_that_a_host_parsed_is_refused():
    with pytest.raises(ConfigError, match="--file has an empty value"):
        read_flags(Flags, argparse.Namespace(file=""))
