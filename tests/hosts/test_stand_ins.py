"""The stand-in torch_npu computes what the operators that it replaces are documented to."""

import importlib.util
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch
FILE = Path(__file__).parent / "stand_ins" / "torch_npu" / "operators.py"
SCALE = 0.25


@pytest.fixture(scope="module")
def operators():
    spec = importlib.util.spec_from_file_location("stand_in_operators", FILE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_attention_over_parts_of_the_keys_combines_by_its_statistics(operators):
    """Ring attention does so: outputs by maximum and sum of each row, gradients of a part from those of all keys."""
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(6, 2, 4 * 8, generator=generator, requires_grad=True)
    key, value = (torch.randn(10, 2, 2 * 8, generator=generator, requires_grad=True) for _ in range(2))
    whole, most, total, *_ = operators.npu_fusion_attention(query, key, value, 4, "SBH", scale=SCALE)
    gradient = torch.randn(whole.shape, generator=generator)
    whole.backward(gradient)
    combined, of_query, of_keys = torch.zeros(whole.shape), torch.zeros(query.shape), []
    for part in (slice(0, 3), slice(3, 10)):
        parts = query.detach(), key.detach()[part], value.detach()[part]
        output, own_most, own_total, *_ = operators.npu_fusion_attention(*parts, 4, "SBH", scale=SCALE)
        share = (own_most - most).exp() * own_total / total
        share = share[..., :1].expand(-1, -1, -1, 8).permute(2, 0, 1, 3).flatten(2)
        combined += output * share
        found = operators.npu_fusion_attention_grad(
            *parts,
            gradient,
            4,
            "SBH",
            softmax_max=most,
            softmax_sum=total,
            attention_in=whole.detach(),
            scale_value=SCALE,
        )
        of_query += found[0].detach()
        of_keys.append(found[1:3])
    torch.testing.assert_close(combined, whole.detach())
    torch.testing.assert_close(of_query, query.grad)
    torch.testing.assert_close(torch.cat([one[0] for one in of_keys]), key.grad)
    torch.testing.assert_close(torch.cat([one[1] for one in of_keys]), value.grad)
