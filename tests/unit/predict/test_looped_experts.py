"""Experts that run one after another, each indexed from the tensors of all."""

import pytest

from mindspeed_autoparallel.cost.catalogue import find_device
from mindspeed_autoparallel.hosts.opening import open_host_file
from mindspeed_autoparallel.predict.sharded_profile import sharded_profile
from mindspeed_autoparallel.profiles.sharded import CostPoint, Described

SIZES = {
    "hidden_size": 2048,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 32,
}
CONFIG = SIZES | {"model_type": "qwen3_moe", "intermediate_size": 512, "vocab_size": 1000, "num_experts": 128}
CONFIG |= {"num_experts_per_tok": 2, "moe_intermediate_size": 768}


def test_indexed_experts_write_and_add_gradients_of_all_for_each():
    device = find_device("910B")
    kinds = [
        sharded_profile(CONFIG, "c", Described(sequence=512, loops_experts=loops), device, 8).kinds
        for loops in (False, True)
    ]
    name = next(name for name in kinds[0] if name.endswith(": experts"))
    grouped, looped = (row[name] for row in kinds)
    stack, experts = 2 * sum(grouped.parameters), grouped.shapes[0][0]
    at_two = [next(cost for cost in row.costs if cost.at == CostPoint(expert_size=2)) for row in (grouped, looped)]
    for (before, after), share in (((grouped.costs[0], looped.costs[0]), 1), (at_two, 2)):
        passes = 4 * experts // share - 3
        moved_us = passes * stack / share / (device.memory_bandwidth_gb_per_s * 1e3)
        assert before.backward_us < moved_us < after.backward_us, (share, before.backward_us, moved_us)
        assert after.backward_transient_bytes == before.backward_transient_bytes + stack / share


@pytest.mark.torch
def test_torch_makes_a_gradient_of_the_whole_stack_for_each_indexed_expert():
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode

    class Made(TorchDispatchMode):
        """Counts operations that return a tensor as large as the stack."""

        def __init__(self):
            super().__init__()
            self.names = []

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            result = function(*args, **(kwargs or {}))
            if isinstance(result, torch.Tensor) and result.shape == stack.shape:
                self.names.append(str(function))
            return result

    stack = torch.randn(8, 6, 4, requires_grad=True)
    total = sum((torch.randn(3, 4) @ stack[torch.tensor(one)].t()).sum() for one in range(8))
    with Made() as made:
        total.backward()
    assert made.names.count("aten.select_backward.default") == 8
    assert sum(name.startswith("aten.add") for name in made.names) == 7


@pytest.mark.parametrize(
    ("changed", "loops"),
    [("", True), ("optimization:\n  moe_grouped_gemm: True\n", False), ("  ep_dispatcher: fused\n", False)],
)
def test_mindspeed_llms_files_run_experts_one_after_another_unless_they_are_grouped(tmp_path, changed, loops):
    path = tmp_path / "train.yaml"
    path.write_text(f"parallel:\n  fsdp_size: 8\n  fsdp_modules: ['model.layers.{{*}}']\n{changed}")
    assert open_host_file(path).described.loops_experts == loops
