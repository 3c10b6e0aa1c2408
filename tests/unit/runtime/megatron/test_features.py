"""Flags that are different jobs are refused together, before any of them starts."""

import argparse

import pytest

from mindspeed_autoparallel.errors import ConfigError
from mindspeed_autoparallel.runtime.megatron import features


@pytest.mark.parametrize("other", ["auto_parallel_plan", "auto_tuning"])
def test_searching_and_training_by_a_plan_are_two_runs(monkeypatch, other):
    started = []
    monkeypatch.setattr(features, "_load", started.append)
    with pytest.raises(ConfigError, match=r"--auto-parallel-mm and --auto-.* were given together"):
        features.after_parsing(argparse.Namespace(auto_parallel_mm=True, **{other: "plan.json"}))
    assert started == []
