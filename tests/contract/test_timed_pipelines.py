"""A pipeline's passes are timed through names that Megatron's schedules look up each time they run."""

import ast
from pathlib import Path

import pytest

pytestmark = pytest.mark.megatron

SCHEDULES = (
    "forward_backward_no_pipelining",
    "forward_backward_pipelining_without_interleaving",
    "forward_backward_pipelining_with_interleaving",
)


def folder_of(release):
    megatron = pytest.importorskip("megatron.core")
    return Path(release[0]) / "megatron" / "core" if release else Path(megatron.__path__[0])


def test_schedules_call_both_passes_and_the_end_of_the_step_by_name(megatron_release):
    text = (folder_of(megatron_release) / "pipeline_parallel" / "schedules.py").read_text(encoding="utf-8")
    functions = {node.name: node for node in ast.parse(text).body if isinstance(node, ast.FunctionDef)}
    assert {"forward_step", "backward_step"} <= set(functions)
    for schedule in SCHEDULES:
        nodes = list(ast.walk(functions[schedule]))
        loaded = {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}
        stored = {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
        assert {"forward_step", "backward_step"} <= loaded - stored, schedule
        assert "finalize_model_grads_func" in {node.attr for node in nodes if isinstance(node, ast.Attribute)}, schedule
