"""Numbers on the command line."""

import argparse

import pytest

from mindspeed_autoparallel.runtime.flags.flag import non_negative_int, positive_int


@pytest.mark.parametrize(("kind", "least"), [(positive_int, 1), (non_negative_int, 0)])
def test_what_is_no_number_or_too_small_is_told_with_the_least(kind, least, capsys):
    parser = argparse.ArgumentParser()
    parser.add_argument("--ranks", type=kind)
    assert parser.parse_args(["--ranks", str(least)]).ranks == least
    for text in (str(least - 1), "many", "1.5"):
        with pytest.raises(SystemExit):
            parser.parse_args([f"--ranks={text}"])
        assert f"must be a whole number of at least {least}, got {text!r}" in capsys.readouterr().err
