"""Megatron 0.19 builds models from settings that a script makes once: each layout gets settings of its own."""

import dataclasses
import sys
from types import ModuleType, SimpleNamespace

import pytest

from mindspeed_autoparallel.runtime.profiling.measure.relayout import container_for


@dataclasses.dataclass
class Transformer:
    tensor_model_parallel_size: int
    sequence_parallel: bool
    grad_sync_func: object = None


@dataclasses.dataclass
class Model:
    transformer: Transformer
    window: int = 0


@pytest.fixture
def argument_utils(monkeypatch):
    training, module = ModuleType("megatron.training"), ModuleType("megatron.training.argument_utils")
    training.argument_utils = module
    module.GPTModelConfig = Model
    module.gpt_config_from_args = lambda arguments, model_config_cls: model_config_cls(
        Transformer(arguments.tensor_model_parallel_size, arguments.sequence_parallel)
    )
    module.pretrain_cfg_container_from_args = lambda arguments, model: SimpleNamespace(
        model=model, replicas=arguments.data_parallel_size
    )
    monkeypatch.setitem(sys.modules, "megatron.training", training)
    return module


ARGUMENTS = SimpleNamespace(tensor_model_parallel_size=2, sequence_parallel=True, data_parallel_size=1)


def test_a_layout_has_its_own_sizes_and_nothing_of_the_model_before(argument_utils):
    hooked = Model(Transformer(1, False, grad_sync_func=object()), window=7)
    container = container_for(SimpleNamespace(model=hooked, replicas=2), ARGUMENTS)
    assert container == SimpleNamespace(model=Model(Transformer(2, True), window=7), replicas=1)
    assert hooked.transformer.tensor_model_parallel_size == 1


def test_a_model_of_another_kind_stays_as_the_script_made_it(argument_utils):
    other = SimpleNamespace(transformer=None)
    assert container_for(SimpleNamespace(model=other), ARGUMENTS).model is other
