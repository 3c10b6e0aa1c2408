"""Attention over context ranks gives the same whether keys are gathered or rows are exchanged for heads."""

import pytest
from ranks import run_ranks

pytestmark = [pytest.mark.distributed, pytest.mark.torch, pytest.mark.megatron]


def attention_of(kind, groups):
    import types

    import torch
    import torch.distributed as dist
    from megatron.core.transformer.enums import AttnMaskType

    from mindspeed_autoparallel.runtime.attention.context_parallel import ContextParallelAttention

    if not dist.is_initialized():
        dist.init_process_group("gloo")
    config = types.SimpleNamespace(kv_channels=8, attention_dropout=0.0, sequence_parallel=False)
    attention = ContextParallelAttention(
        config, 1, AttnMaskType.causal, cp_comm_type=kind, pg_collection=types.SimpleNamespace(cp=dist.group.WORLD)
    )
    torch.manual_seed(dist.get_rank())
    inputs = [torch.randn(6, 2, heads, 8, requires_grad=True) for heads in (4, groups, groups)]
    output = attention(*inputs)
    output.square().sum().backward()
    return output, [tensor.grad for tensor in inputs]


def largest_differences():
    import torch

    (gathered, wanted), (exchanged, found) = attention_of("allgather", 2), attention_of("a2a", 2)
    assert torch.any(gathered)
    return [float((a - b).detach().abs().max()) for a, b in zip((gathered, *wanted), (exchanged, *found), strict=True)]


def refusal():
    from mindspeed_autoparallel.errors import ConfigError

    try:
        attention_of("a2a", 1)
    except ConfigError as error:
        return str(error)
    return ""


def test_output_and_gradients_are_the_same():
    pytest.importorskip("megatron.core")
    for rank in run_ranks(2, largest_differences):
        assert max(rank.result) < 1e-5, rank.result


def test_heads_that_ranks_do_not_divide_are_named():
    pytest.importorskip("megatron.core")
    assert "as many heads, but a tensor rank has 1" in run_ranks(2, refusal)[0].result
