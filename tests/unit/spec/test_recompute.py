"""A recompute policy and its text are the same."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mindspeed_autoparallel.spec.recompute import RecomputePolicy, in_order, is_known, policy_of

MODULES = st.lists(st.sampled_from(["mlp", "moe", "core_attn", "layernorm"]), unique=True, max_size=3)
POLICIES = st.one_of(
    st.just(RecomputePolicy("none")),
    MODULES.map(RecomputePolicy.selective),
    st.integers(1, 40).map(RecomputePolicy.full),
)


@given(POLICIES)
def test_the_text_of_a_policy_is_read_back(policy: RecomputePolicy) -> None:
    assert policy_of(str(policy)) == policy and is_known(str(policy))


@pytest.mark.parametrize("text", ["", "all", "full:1", "full:x", "full:", "selective:", "none:2", "FULL"])
def test_other_texts_are_refused(text: str) -> None:
    assert not is_known(text)
    with pytest.raises(ValueError, match="not a recompute policy"):
        policy_of(text)


@pytest.mark.parametrize(
    ("text", "words", "layers"),
    [
        ("none", "none", 0),
        ("selective", "selective", 0),
        ("selective:mlp,moe", "selective (mlp, moe)", 0),
        ("full", "full", 1),
        ("full:4", "full (groups of 4)", 4),
    ],
)
def test_words_and_groups(text: str, words: str, layers: int) -> None:
    assert (policy_of(text).words, policy_of(text).layers_per_group) == (words, layers)


def test_layers_that_are_recomputed_whole_lie_first() -> None:
    assert in_order(["selective", "full:2", "none", "full"]) == ["full", "full:2", "none", "selective"]
