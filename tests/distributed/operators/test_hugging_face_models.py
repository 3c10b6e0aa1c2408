"""Llama, Qwen, Mixtral, ViT and BERT as they come, by styles of parallelize_module, with one process's losses."""

from pathlib import Path

import pytest
from ranks import run_ranks

pytest.importorskip("torch")
pytest.importorskip("transformers")
pytestmark = [pytest.mark.distributed, pytest.mark.torch]


def test_models_lowered_to_styles_train_with_the_losses_of_one_process():
    ranks = 4
    rows = run_ranks(ranks, Path(__file__).with_name("hugging_face_worker.py"), timeout_s=600)[0].result
    assert [row[0] for row in rows] == ["llama", "qwen2", "mixtral", "vit", "bert"]
    for name, error, sizes, styles, _, losses in rows:
        assert sizes == [ranks // 2, 2], name
        assert error < 1e-6 and len(set(losses)) == 3, name  # the models compute norms in fp32 themselves
        assert styles == ["ColwiseParallel", "RowwiseParallel"], name


def test_sequence_parallel_styles_and_a_distributed_plan_train_with_the_losses_of_one_process():
    # All five models in all ways on 2 and 4 ranks: tests/benchmarks/operators/hugging_face.py.
    worker = Path(__file__).with_name("hugging_face_ways_worker.py")
    rows = run_ranks(2, worker, "sequence,planned", "llama", timeout_s=600)[0].result
    assert [row[1] for row in rows] == ["sequence", "planned"]
    for _, way, error, told, losses in rows:
        assert error is not None, (way, told)
        assert error < 1e-6 and len(set(losses)) == 3, way  # the model computes norms in fp32 itself
    around = ["PrepareModuleInput", "PrepareModuleOutput"]
    assert rows[0][3] == ["ColwiseParallel", *around, "RowwiseParallel", "SequenceParallel"]
    assert len(rows[1][3]) == 1  # a plan that styles do not say
