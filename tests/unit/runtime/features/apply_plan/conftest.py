"""Arguments of a job and the plan that it is to train under."""

import argparse
import json
import sys

import pytest
from made_plans import MODEL, make_plan


@pytest.fixture
def job(tmp_path, monkeypatch):
    """Arguments of a multimodal job of two processes, and a writer of its plan."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")
    (tmp_path / "model.json").write_text(json.dumps(MODEL))
    arguments = argparse.Namespace(
        mm_model=str(tmp_path / "model.json"),
        auto_parallel_plan=str(tmp_path / "plan.json"),
        auto_parallel_check_steps=5,
        recompute_granularity="full",
    )

    def write(plan):
        plan.write(tmp_path / "plan.json")
        return arguments

    return write


@pytest.fixture
def flags_job(job, monkeypatch):
    """Arguments of a language model described by flags, and their command line."""
    arguments = job(make_plan({"text_decoder": [1, 3]}, tensor_size=1))
    del arguments.mm_model

    def give(plan=None, **values):
        words = [f"--{name.replace('_', '-')}" for name, value in values.items() if value not in (False, None)]
        monkeypatch.setattr(sys, "argv", ["script.py", *words])
        if plan is not None:
            job(plan)
        vars(arguments).update(num_layers=4, pipeline_model_parallel_layout=None, **values)
        return arguments

    return give
