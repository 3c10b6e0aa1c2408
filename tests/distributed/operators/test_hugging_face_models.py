"""Llama, Qwen, Mixtral, ViT and BERT as they come, by styles of parallelize_module, with one process's losses."""

from pathlib import Path

import pytest
from ranks import run_ranks

pytest.importorskip("torch")
pytest.importorskip("transformers")
pytestmark = [pytest.mark.distributed, pytest.mark.torch]


def test_models_lowered_in_all_ways_train_with_the_losses_of_one_process():
    # All five models in all ways on 2 and 4 ranks: tests/benchmarks/operators/hugging_face.py.
    worker = Path(__file__).with_name("hugging_face_worker.py")
    names = ["llama:styles,sequence,planned", "qwen2:styles:1", "mixtral:styles:1", "vit:styles:1", "bert:styles:1"]
    rows = run_ranks(4, worker, *names, timeout_s=600)[0].result
    found = {(name, way): told for name, way, _, told, _ in rows}
    assert list(found) == [(name.split(":")[0], way) for name in names for way in name.split(":")[1].split(",")]
    for name, way, error, told, losses in rows:
        assert error is not None, (name, way, told)
        assert error < 1e-6 and len(set(losses)) == 2, (name, way)  # the models compute norms in fp32 themselves
        if way == "styles":
            assert told == ["ColwiseParallel", "RowwiseParallel"], name
    around = ["PrepareModuleInput", "PrepareModuleOutput"]
    assert found["llama", "sequence"] == ["ColwiseParallel", *around, "RowwiseParallel", "SequenceParallel"]
    assert len(found["llama", "planned"]) == 1  # a plan that styles do not say
