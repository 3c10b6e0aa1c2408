"""``--auto-tuning`` where not everything fits: what is computed again is traced, recommended, and trained."""

import pytest
from auto_tuning import GPT, points_of, result_of, tune

pytestmark = [pytest.mark.timeout(1200), pytest.mark.distributed, pytest.mark.torch, pytest.mark.megatron]
# One head: no tensor parallelism, so few layouts to trace.
LONGER = ["--num-layers", "4", "--num-attention-heads", "1", "--seq-length", "256", "--max-position-embeddings", "256"]
LIMIT_MIB = 2


def test_a_plan_that_fits_by_recomputation_is_found_and_holds_the_predicted_bytes(tmp_path):
    pytest.importorskip("megatron.training")
    code, text = tune(tmp_path, *LONGER, "--auto-tuning-memory-limit-mib", LIMIT_MIB, "--auto-tuning-verify", model=GPT)
    assert code == 0, text[-4000:]
    result = result_of(tmp_path)
    best = result["top"][0]
    assert best["recompute"]["kind"] != "none"
    assert "--recompute-granularity" in best["argv"]
    for plan in result["top"]:
        assert all(rank["peak_bytes"] <= LIMIT_MIB * 2**20 for rank in plan["memory"])
    for item in result["verified"]:
        assert item["status"] == "ok", item
        # Generators' states weigh something in a model of 100 KB, and each chunk of a rank keeps a rotary table.
        for stage in item["stages"]:
            assert stage["predicted_bytes"] == pytest.approx(stage["measured_bytes"], rel=0.04), item
    for trace in points_of(tmp_path / "traces").values():
        kept = {
            name.partition("|")[2]: variant["modules"][0]["blocks"]["layer"]["saved_bytes"]
            for name, variant in trace["variants"].items()
            if variant["status"] == "ok"
        }
        light, both = "selective:core_attn,layernorm", "selective:core_attn,layernorm,mlp"
        assert kept[both] < kept[light] < min(kept["selective:core_attn"], kept["selective:layernorm"]) < kept["none"]
        assert kept["selective:mlp"] < kept["none"]
