"""Counts of recomputed layers per stage in a host that takes one number."""

import types
from pathlib import Path

import pytest

from mindspeed_autoparallel.errors import PlanError
from mindspeed_autoparallel.runtime.megatron.mindspeed import check_deepstack, keep_largest, keep_stage, ties_embeddings
from mindspeed_autoparallel.runtime.megatron.shared_embedding import (
    EmbeddingStage,
    place_embedding,
    send_embedding,
    tie_first_and_last,
)
from mindspeed_autoparallel.runtime.state import of_process


@pytest.fixture(autouse=True)
def no_plan():
    yield
    of_process(EmbeddingStage).pipeline_rank = 0


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


def test_all_chunks_of_a_rank_share_its_largest_number_with_a_note():
    model = content([[2, 1], [0, 1]])
    assert keep_stage(model, 0) == [0]
    assert model["text_decoder"]["recompute_num_layers"] == 2


def test_a_file_for_all_ranks_has_the_largest_number():
    model = content([2, 0, 3])
    keep_largest(model)
    assert model["text_decoder"]["recompute_num_layers"] == 3


@pytest.mark.parametrize(("layers", "ranks"), [((0, 4), [12]), ((0, 3, 1), [11, 12]), ((0, 0, 4), [12])])
def test_the_embedding_is_tied_from_the_stage_where_the_language_model_begins(layers, ranks):
    """With images alone on the first stage its rank must not be in the group: it never calls the collective."""
    place_embedding(layers, len(layers), Path("plan.json"))
    given = tie_first_and_last(lambda *args, **kwargs: kwargs, (), {"order": "tp", "get_embedding_ranks": None})
    assert given["order"] == "tp"
    assert given["get_embedding_ranks"]([10, 11, 12][-len(layers) :]) == ranks


def test_a_language_model_from_the_first_stage_on_is_left_to_megatron():
    place_embedding((1, 3), 2, Path("plan.json"))
    assert tie_first_and_last(lambda *args, **kwargs: kwargs, (), {}) == {}
    calls = []
    model = types.SimpleNamespace(pre_process=True, post_process=False, share_embeddings_and_output_weights=True)
    send_embedding(types.MethodType(lambda _: calls.append("stock"), model), (), {})
    assert calls == ["stock"]


def test_a_later_chunk_with_tied_embeddings_is_refused():
    with pytest.raises(PlanError, match=r"plan\.json: .* virtual stage 2 of 4, .* from the first 2 alone.*untie"):
        place_embedding((0, 0, 2, 2), 2, Path("plan.json"))


def test_the_model_file_determines_whether_embeddings_are_tied():
    """As in the host, a missing key means untied."""
    assert ties_embeddings({"text_decoder": {"untie_embeddings_and_output_weights": False}})
    assert not ties_embeddings({"text_decoder": {"untie_embeddings_and_output_weights": True}})
    assert not ties_embeddings({"text_decoder": {}})


@pytest.mark.parametrize(
    ("encoder", "decoder", "runs"),
    [
        ([4, 0], [3, 5], True),
        ([4, 0], [2, 6], False),
        ([4, 0], [0, 8], False),
        ([2, 2], [0, 8], True),
        ([2, 2], [1, 7], False),
    ],
)
def test_features_of_vision_layers_find_their_decoder_layers_on_the_encoders_last_stage(encoder, decoder, runs):
    """Qwen3-VL's deepstack: what the host would leave out without a word is refused."""
    content = {"image_encoder": {"vision_encoder": {"deepstack_visual_indexes": [8, 16, 24]}}}
    if runs:
        check_deepstack(content, encoder, decoder, Path("plan.json"))
    else:
        with pytest.raises(PlanError, match="features of 3 vision layers are added to the first 3 decoder layers"):
            check_deepstack(content, encoder, decoder, Path("plan.json"))
    check_deepstack({"image_encoder": {"vision_encoder": {}}}, encoder, decoder, Path("plan.json"))
