"""Counts of recomputed layers per stage in a host that takes one number."""

from mindspeed_autoparallel.runtime.megatron.mindspeed_mm import keep_largest, keep_stage


def content(counts):
    keys = {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": counts}
    return {"image_encoder": {"vision_encoder": {"num_layers": 4}}, "text_decoder": {"num_layers": 8, **keys}}


def test_a_stage_keeps_its_own_number():
    model = content([2, 0])
    assert keep_stage(model, 0) == []
    assert model["text_decoder"]["recompute_num_layers"] == 2
    without = content([2, 0])
    keep_stage(without, 1)
    assert without["text_decoder"] == {"num_layers": 8}


def test_all_chunks_of_a_rank_share_its_largest_number_and_that_is_told():
    model = content([[2, 1], [0, 1]])
    assert keep_stage(model, 0) == [0]
    assert model["text_decoder"]["recompute_num_layers"] == 2


def test_a_file_for_all_ranks_has_the_largest_number():
    model = content([2, 0, 3])
    keep_largest(model)
    assert model["text_decoder"]["recompute_num_layers"] == 3
