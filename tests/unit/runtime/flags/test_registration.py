"""Our flags join a host's parser without ever clashing with it."""

import argparse

from mindspeed_autoparallel.runtime.flags.flag import flags_of
from mindspeed_autoparallel.runtime.flags.registration import (
    add_missing_flags,
    flag_groups,
    flags_given,
    without_switches,
)


def test_flags_the_host_has_already_stay_the_hosts():
    parser = argparse.ArgumentParser()
    parser.add_argument("--nnodes", type=str, default="hosts")
    parser.add_argument("--simulated-nnodes", type=int, default=3)
    add_missing_flags(parser)
    arguments = parser.parse_args(["--auto-parallel-mm"])
    assert (arguments.nnodes, arguments.simulated_nnodes, arguments.auto_parallel_mm) == ("hosts", 3, True)


def test_adding_twice_is_harmless():
    parser = argparse.ArgumentParser()
    first, _ = add_missing_flags(parser)
    assert first and add_missing_flags(parser)[0] == []
    parser.parse_args([])


def test_underscores_work_as_dashes_do():
    parser = argparse.ArgumentParser()
    add_missing_flags(parser)
    arguments = parser.parse_args(["--nproc_per_node", "8", "--auto_parallel_mm"])
    assert (arguments.nproc_per_node, arguments.auto_parallel_mm) == (8, True)


def test_flags_on_the_command_line_are_recognised_in_every_form():
    assert flags_given(["--auto-parallel-plan=p.json", "--lr", "1"]) == {"--auto-parallel-plan"}
    assert flags_given(["--auto_parallel_mm"]) == {"--auto-parallel-mm"}
    assert flags_given(["auto-parallel-mm"]) == set()


def test_flag_names_are_unique_and_documented():
    names = [flag.name for group in flag_groups() for flag in flags_of(group)]
    assert len(set(names)) == len(names)
    assert all(flag.help for group in flag_groups() for flag in flags_of(group))


def test_flags_that_the_host_has_are_reported():
    parser = argparse.ArgumentParser()
    parser.add_argument("--nproc_per_node", type=int)
    parser.add_argument("--hetero-parallel", action="store_true")
    assert add_missing_flags(parser)[1] == {"--nproc-per-node", "--hetero-parallel"}


def test_the_command_of_a_process_of_ours_has_no_switch_that_starts_a_feature():
    """MindSpeed-MM started a search of its own by our flag, inside our measuring processes."""
    argv = ["train.py", "--lr", "1", "--auto_parallel_mm", "--auto-parallel-work-dir", "work", "--auto-tuning"]
    assert without_switches(argv) == ["train.py", "--lr", "1", "--auto-parallel-work-dir", "work"]
