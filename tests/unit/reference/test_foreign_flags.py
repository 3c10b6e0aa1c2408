"""Flags of other hosts."""

from __future__ import annotations

import argparse

import pytest

from reference_vlm import foreign_flags

SEED = ["--use-fused-rmsnorm", "--use-fused-swiglu", "--reuse-fp32-param", "--enable-one-logger", "--use-mcore-models"]


def test_flags_of_the_seed_script_are_accepted_and_named_once(capsys: pytest.CaptureFixture[str]) -> None:
    parser = foreign_flags.add_foreign_flags(argparse.ArgumentParser(allow_abbrev=False))
    arguments = parser.parse_args([*SEED, "--variable-seq-lengths", "--sparse-mode", "2"])
    names = foreign_flags.report(foreign_flags.given(arguments), rank=0)
    assert sorted(names) == sorted([*SEED, "--sparse-mode"])
    errors = capsys.readouterr().err
    for name in names:
        assert errors.count(name) == 1
    assert foreign_flags.report(foreign_flags.given(arguments), rank=1)
    assert capsys.readouterr().err == ""


def test_a_flag_that_the_host_has_stays_the_hosts() -> None:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--reuse-fp32-param", action="store_true")
    arguments = foreign_flags.add_foreign_flags(parser).parse_args(["--reuse-fp32-param"])
    assert arguments.reuse_fp32_param
    assert foreign_flags.given(arguments) == []
