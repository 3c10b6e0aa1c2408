"""Multi-latent attention on Megatron's local attention: two head sizes, and everything else as it was."""

import types

import pytest
import torch

from mindspeed_autoparallel.runtime.devices.cpu.edits import Edits
from mindspeed_autoparallel.runtime.devices.cpu.megatron import let_local_attention_take_two_head_sizes


class LocalAttention:
    """Like Megatron's: one head size, views of key and value, and a result of the width given at construction."""

    def __init__(self, config, attention_dropout=None):
        self.num_attention_heads_per_partition = config["heads"]
        self.hidden_size_per_partition = config["heads"] * config["head_size"]

    def forward(self, query, key, value):
        sequence, batch = value.shape[:2]
        key.view(-1), value.view(-1)
        return value.contiguous().view(sequence, batch, self.hidden_size_per_partition)


CONFIG = {"heads": 2, "head_size": 8}


@pytest.fixture
def module():
    holder = types.SimpleNamespace(DotProductAttention=type("Attention", (LocalAttention,), dict(vars(LocalAttention))))
    edits = Edits()
    let_local_attention_take_two_head_sizes(edits, holder)
    yield holder
    edits.undo()


def test_values_of_another_size_than_keys_come_out_in_their_own_width(module):
    attention = module.DotProductAttention(CONFIG, k_channels=12, v_channels=4)
    projected = torch.ones(3, 1, 2, 16)
    key, value = projected.split([12, 4], dim=-1)
    assert attention.forward(key, key, value).shape == (3, 1, 8)


def test_ordinary_attention_is_left_alone(module):
    attention = module.DotProductAttention(CONFIG, attention_dropout=0.1)
    value = torch.ones(3, 1, 2, 8)
    assert attention.forward(value, value, value).shape == (3, 1, 16)
