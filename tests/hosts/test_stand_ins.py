"""Stand-ins compute what the operators that they replace are documented to."""

import importlib.util
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch
FILE = Path(__file__).parent / "stand_ins" / "torch_npu" / "operators.py"
SCAN = Path(__file__).parent / "hybrid_stand_ins" / "mamba_ssm" / "ops" / "triton" / "ssd_combined.py"
SCALE = 0.25


def _module(file):
    spec = importlib.util.spec_from_file_location(file.stem, file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def operators():
    return _module(FILE)


def test_mambas_scan_is_a_state_that_runs_over_tokens():
    generator = torch.Generator().manual_seed(0)
    x, steps = torch.randn(2, 7, 4, 3, generator=generator), torch.rand(2, 7, 4, generator=generator)
    rates = -torch.rand(4, generator=generator)
    written, reading = torch.randn(2, 2, 7, 2, 5, generator=generator)
    outputs, state = [], torch.zeros(2, 4, 3, 5)
    for token in range(7):
        key, query = (part[:, token].repeat_interleave(2, 1)[:, :, None] for part in (written, reading))
        added = (steps[:, token, :, None] * x[:, token])[..., None] * key
        state = torch.exp(steps[:, token] * rates)[..., None, None] * state + added
        outputs.append((state * query).sum(-1))
    found = _module(SCAN).mamba_chunk_scan_combined(x, steps, rates, written, reading, 4)
    torch.testing.assert_close(found, torch.stack(outputs, 1))


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


def test_a_position_bias_is_added_in_front_of_the_scale(operators):
    """MindSpeed-LLM divides its biases by the scale: they are added to the scaled products."""
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(1, 4, 6, 8, generator=generator) for _ in range(3))
    bias = torch.randn(1, 4, 6, 6, generator=generator)
    found, *_ = operators.npu_fusion_attention(query, key, value, 4, "BNSD", scale=SCALE, pse=bias / SCALE)
    expected = torch.nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=bias, scale=SCALE)
    torch.testing.assert_close(found, expected)


def test_adamw_steps_as_torch_does(operators):
    generator = torch.Generator().manual_seed(0)
    own = torch.nn.Parameter(torch.randn(5, generator=generator))
    optimizer = torch.optim.AdamW([own], lr=0.1, betas=(0.9, 0.95), eps=1e-3, weight_decay=0.1)
    state = own.detach().clone(), torch.zeros(5), torch.zeros(5)
    for step in range(3):
        own.grad = torch.randn(5, generator=generator)
        optimizer.step()
        operators.npu_apply_adam_w(0.9**step, 0.95**step, 0.1, 0.1, 0.9, 0.95, 1e-3, own.grad, None, out=state)
        torch.testing.assert_close(state[0], own.detach())
