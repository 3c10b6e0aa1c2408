"""The sample of an image or a clip and the places of its tokens, derived from the tokens."""

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("megatron.core")

from mindspeed_autoparallel.errors import ConfigError  # noqa: E402

pytestmark = [pytest.mark.torch, pytest.mark.megatron]


def places_of(counts, sizes):
    from mindspeed_autoparallel.runtime.hetero.adapters.protocol import places_of

    marked = torch.arange(8).expand(len(counts), 8) < torch.tensor(counts)[:, None]
    return places_of(marked, sizes, "image")


def test_items_follow_the_samples_in_order():
    assert places_of([4, 0, 6], [4, 2, 4]) == [(0, 0), (2, 0), (2, 2)]


def test_an_item_with_other_tokens_between_its_own_has_no_single_place():
    from mindspeed_autoparallel.runtime.hetero.adapters.protocol import places_of

    marked = torch.tensor([[0, 1, 1, 0, 1, 1, 0, 1, 1]]).bool()
    assert places_of(marked, [2, 4], "image") == [(0, 1), (0, None)]


def test_a_stand_in_is_nobodys_item():
    assert places_of([0, 0], [1]) == []


@pytest.mark.parametrize(
    ("counts", "sizes", "message"),
    [
        ([4, 3], [4, 4], "sample 1 of the microbatch has 3 image tokens, but its image inputs make 4"),
        ([4, 4], [4], "sample 1 of the microbatch has 4 image tokens, but its image inputs make 0"),
        ([4, 0], [4, 4], "has 2 image inputs, but tokens for 1 of them"),
    ],
)
def test_tokens_that_are_not_those_of_whole_items_name_the_sample(counts, sizes, message):
    with pytest.raises(ConfigError, match=message):
        places_of(counts, sizes)
