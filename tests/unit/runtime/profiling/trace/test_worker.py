"""What a tracing process changes of the user's arguments before Megatron validates them."""

import argparse

import pytest

pytest.importorskip("torch")

from mindspeed_autoparallel.runtime.profiling.trace.worker import go_without_gloo

pytestmark = [pytest.mark.torch, pytest.mark.megatron]


def test_a_script_that_saves_in_torchs_format_can_be_traced():
    """MindSpeed-LLM's scripts have `--ckpt-format torch`, for which Megatron asserts Gloo groups: a trace must not need
    them."""
    arguments = argparse.Namespace(enable_gloo_process_groups=True, ckpt_format="torch", use_distributed_optimizer=True)
    go_without_gloo(arguments)
    assert (arguments.enable_gloo_process_groups, arguments.ckpt_format) == (False, "torch_dist")
    older = argparse.Namespace()
    go_without_gloo(older)
    assert vars(older) == {}
