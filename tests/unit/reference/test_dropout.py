"""Dropout drops the same elements in every layout: masks depend on the elements, not on the order of draws."""

from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("megatron.core")

from reference_vlm.model import dropout  # noqa: E402

RATES = dropout.DropoutRates(hidden=0.3, attention=0.25, seed=7, module=0)


@pytest.fixture
def tensor_ranks(monkeypatch):
    """Sets the tensor rank that the functions see."""
    ranks = SimpleNamespace(now=0)
    monkeypatch.setattr(dropout.parallel_state, "get_tensor_model_parallel_rank", lambda: ranks.now)
    return ranks


def test_a_share_is_dropped_and_the_rest_is_scaled():
    keys = dropout.token_rows(torch.tensor([3, 4]), 200)
    dropped = dropout.drop_hidden(torch.ones(200, 2, 64), RATES, 5, keys)
    assert dropped.unique().tolist() == pytest.approx([0.0, 1 / 0.7])
    shares = (dropped == 0).float()
    assert float(shares.mean()) == pytest.approx(0.3, abs=0.01)
    # Neither rows nor columns nor samples have a habit: five standard deviations of independent draws.
    for dims, count in (((0, 1), 400), ((1, 2), 128), ((0, 2), 200 * 64)):
        spread = (shares.mean(dim=dims) - 0.3).abs().max()
        assert float(spread) < 5 * (0.3 * 0.7 / count) ** 0.5


def test_other_samples_layers_and_seeds_drop_other_elements():
    ones = torch.ones(50, 1, 32)
    base = dropout.drop_hidden(ones, RATES, RATES.site(1, 0), dropout.token_rows(torch.tensor([3]), 50))
    other_seed = dropout.DropoutRates(hidden=0.3, attention=0.25, seed=8, module=0)
    for site, sample in (
        (RATES.site(1, 0), 4),
        (RATES.site(2, 0), 3),
        (RATES.site(1, 1), 3),
        (other_seed.site(1, 0), 3),
    ):
        other = dropout.drop_hidden(ones, RATES, site, dropout.token_rows(torch.tensor([sample]), 50))
        assert float((other == base).float().mean()) == pytest.approx(0.3**2 + 0.7**2, abs=0.06)


def test_tensor_ranks_drop_their_part_of_what_one_rank_drops(tensor_ranks):
    keys = dropout.token_rows(torch.tensor([3, 9]), 8)
    values = torch.randn(8, 2, 16)
    whole = dropout.drop_hidden(values, RATES, 3, keys)
    parts = []
    for tensor_ranks.now in (0, 1):
        own = slice(4 * tensor_ranks.now, 4 * tensor_ranks.now + 4)
        parts.append(dropout.drop_hidden(values[own], RATES, 3, keys))
    assert torch.equal(torch.cat(parts), whole)


def test_heads_and_queries_of_other_ranks_drop_their_part_of_the_probabilities(tensor_ranks):
    query, key, value = (torch.randn(2, 4, 8, 16) for _ in range(3))
    keys = dropout.token_rows(torch.tensor([3, 9]), 8)
    mask = torch.ones(8, 8, dtype=torch.bool).tril()

    def attend(heads, queries):
        return dropout.attend_with_dropout(
            query[:, heads, queries],
            key[:, heads],
            value[:, heads],
            scale=0.25,
            mask=mask[queries],
            rates=RATES,
            layer=2,
            row_keys=(keys[queries], keys),
        )

    every = slice(None)
    whole = attend(every, every)
    assert not torch.allclose(
        whole, torch.nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=0.25)
    )
    assert torch.allclose(torch.cat([attend(every, slice(0, 3)), attend(every, slice(3, 8))], dim=2), whole, atol=1e-6)
    first = attend(slice(0, 2), every)
    tensor_ranks.now = 1
    assert torch.allclose(torch.cat([first, attend(slice(2, 4), every)], dim=1), whole, atol=1e-6)


def test_rows_of_an_item_are_the_same_whatever_lies_beside_it():
    together = dropout.item_rows(torch.tensor([5, 8]), torch.tensor([3, 4]))
    assert torch.equal(together[3:], dropout.item_rows(torch.tensor([8]), torch.tensor([4])))
    assert len(together.unique()) == 7
