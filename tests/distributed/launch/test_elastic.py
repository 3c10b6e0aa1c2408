"""`--auto-parallel-elastic` under torchrun: ranks and nodes are killed, others come, and the losses do not change."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

pytest.importorskip("torch")
from elastic_job import elastic_job, planned, share_of_optimum, words_of
from megatron_releases import marks_of_trainings

pytestmark = marks_of_trainings()
ITERATIONS, START, LIMIT_S = 60, 2, 300
"""Iterations that set the learning rate; the one that all runs begin with."""
KEPT = f"iter_{START:07d}"


def test_a_rank_two_nodes_and_the_first_node_are_lost_and_one_comes_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = planned(tmp_path / "plan", nodes=4, per_node=1)
    # Megatron draws other initial weights under another PP, so that both begin with the same ones.
    begun = tmp_path / "begun"
    with elastic_job(
        tmp_path / "beginning", words_of(plan, begun, iterations=ITERATIONS, interval=START), per_node=1
    ) as job:
        job.start_node(0, 1)
        job.wait((begun / "latest_checkpointed_iteration.txt").exists, LIMIT_S, "checkpoint to begin with")
    save = beginning(begun, tmp_path / "save")
    monkeypatch.setenv("ELASTIC_STEP_S", "0.5")
    with elastic_job(tmp_path / "job", words_of(plan, save, iterations=ITERATIONS, interval=3), per_node=1) as job:
        for node in range(4):
            job.start_node(node, 4)

        def trained_on(num_ranks: int) -> bool:
            return any(step.num_ranks == num_ranks for step in job.steps())

        job.wait(lambda: trained_on(4), LIMIT_S, "step on all nodes")
        seen = len(job.lines("elastic: 4 processes"))
        job.kill_rank(1, 0)
        job.wait(lambda: len(job.lines("elastic: 4 processes")) > seen, LIMIT_S, "restart after a lost rank")
        # Two losses in a row, the first node among them: the second while the first is being recovered from.
        job.kill_node(0)
        job.kill_node(2)
        job.wait(lambda: bool(job.lines("elastic: 2 processes")), LIMIT_S, "restart after lost nodes")
        job.wait(lambda: trained_on(2), LIMIT_S, "step on two nodes")
        job.start_node(0, 4)
        job.wait(lambda: bool(job.lines("elastic: 3 processes")), LIMIT_S, "restart with the node that came")
        job.wait(lambda: trained_on(3), LIMIT_S, "step on three nodes")
        steps = job.steps()
    assert len({step.num_ranks for step in steps}) > 2
    monkeypatch.delenv("ELASTIC_STEP_S")
    expected = without_losses(
        plan, beginning(begun, tmp_path / "whole"), tmp_path, max(step.iteration for step in steps)
    )
    for step in steps:
        assert step.loss == pytest.approx(expected[step.iteration], rel=1e-6), step
    for file in (save / "auto_parallel_elastic").glob("plan-*.json"):
        nodes = int(re.findall(r"-(\d+)x1", file.name)[0])
        assert share_of_optimum(plan, file, nodes) >= 0.95


def beginning(begun: Path, save: Path) -> Path:
    """Return ``save``, which has the checkpoint that all runs begin with and no other."""
    shutil.copytree(begun / KEPT, save / KEPT)
    (save / "latest_checkpointed_iteration.txt").write_text(str(START))
    return save


def without_losses(plan: Path, save: Path, folder: Path, last: int) -> dict[int, float]:
    """Return the loss of every iteration up to ``last`` of one node that nothing happens to."""
    with elastic_job(
        folder / "reference", words_of(plan, save, iterations=ITERATIONS, interval=1000), per_node=1
    ) as job:
        job.start_node(0, 1)
        job.wait(lambda: any(step.iteration == last for step in job.steps()), LIMIT_S, "run without losses")
        expected = {step.iteration: step.loss for step in job.steps()}
    assert sorted(expected)[: last - START] == list(range(START + 1, last + 1))
    return expected
