"""Llama, Qwen, Mixtral, ViT and BERT as they come, by styles of parallelize_module, with one process's losses."""

from pathlib import Path

import pytest
from ranks import run_ranks

pytest.importorskip("torch")
pytest.importorskip("transformers")
pytestmark = [pytest.mark.distributed, pytest.mark.torch]


@pytest.mark.parametrize("ranks", [2, 4])
def test_models_lowered_to_styles_train_with_the_losses_of_one_process(ranks):
    rows = run_ranks(ranks, Path(__file__).with_name("hugging_face_worker.py"), timeout_s=600)[0].result
    assert [row[0] for row in rows] == ["llama", "qwen2", "mixtral", "vit", "bert"]
    for name, error, sizes, styles, _, losses in rows:
        assert sizes == [ranks // 2, 2], name
        assert error < 1e-6 and len(set(losses)) == 3, name  # the models compute norms in fp32 themselves
        assert styles == ["ColwiseParallel", "RowwiseParallel"], name
