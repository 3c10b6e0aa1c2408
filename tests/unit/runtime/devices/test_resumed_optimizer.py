"""States of Megatron's distributed optimizer on the CPU device, come back from a checkpoint."""

from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")
pytestmark = [pytest.mark.torch]


def test_weights_that_are_views_of_the_models_are_filled_and_counts_left_alone():
    """In fp32 the optimizer keeps no copy of its own: Megatron writes into views of leaves that need gradients. Counts
    of steps come with the groups."""
    from mindspeed_autoparallel.runtime.devices.cpu.edits import Edits
    from mindspeed_autoparallel.runtime.devices.cpu.megatron import _resumed_distributed_optimizer

    class DistributedOptimizer:
        def state_dict(self):
            return {}

        def load_state_dict(self):
            return None

        def __init__(self, weight):
            shard = torch.zeros(2)
            self.model_param_group_index_map = {weight: (0, 0)}
            self.optimizer = SimpleNamespace(
                param_groups=[{"params": [shard]}], state={shard: {"step": torch.tensor(3.0)}}
            )

        def _set_main_param_and_optimizer_states(self, model_param, tensors):
            # As Megatron up to 0.16: every state of Adam's is copied, the count too.
            model_param.view(-1)[1:3].copy_(tensors["param"])
            for state in self.optimizer.state.values():
                state["step"].copy_(tensors["step"])

    _resumed_distributed_optimizer(Edits(), SimpleNamespace(DistributedOptimizer=DistributedOptimizer))
    weight = torch.nn.Parameter(torch.zeros(2, 2))
    # Megatron's default format holds a count for every parameter, sharded like its values: it does not come back right.
    # Rank folders hold none.
    for loaded in ({"param": torch.ones(2), "step": torch.tensor(7e9)}, {"param": torch.ones(2)}):
        optimizer = DistributedOptimizer(weight)
        optimizer._set_main_param_and_optimizer_states(weight, loaded)
        assert weight.flatten().tolist() == [0, 1, 1, 0] and weight.requires_grad
        assert [float(state["step"]) for state in optimizer.optimizer.state.values()] == [3.0]
