"""Reads our flags for uneven splits with MindSpeed-LLM's own features; prints the resulting layers as JSON."""

import itertools
import json
import sys
import types

sys.argv = ["pretrain_gpt.py"]
import mindspeed_autoparallel  # noqa: E402, F401  # before megatron
from mindspeed_autoparallel.runtime.megatron.mindspeed import split_arguments  # noqa: E402

from mindspeed_llm import megatron_adaptor  # noqa: E402, F401  # isort: skip
from mindspeed_llm.features_manager.pipeline_parallel.noop_layers import NoopLayersFeature  # noqa: E402
from mindspeed_llm.features_manager.pipeline_parallel.num_layer_list import NumLayerListFeature  # noqa: E402
from mindspeed_llm.training.arguments import get_layer_offset  # noqa: E402
from mindspeed_llm.training.utils import check_pipeline_config  # noqa: E402


def understood(counts, virtual_size):
    """Layers by virtual stage as the host's validation leaves them."""
    said, pipeline_size = split_arguments(counts, virtual_size), len(counts) // virtual_size
    arguments = types.SimpleNamespace(
        num_layers=sum(counts),
        num_layer_list=None,
        noop_layers=None,
        num_layers_per_virtual_pipeline_stage=None,
        pipeline_model_parallel_size=pipeline_size,
        schedules_method=None,
    )
    vars(arguments).update(said)
    listed = NumLayerListFeature()
    for check in (listed.pre_validate_args, listed.validate_args, listed.post_validate_args):
        check(arguments)
    NoopLayersFeature().post_validate_args(arguments)
    if arguments.num_layer_list:
        offsets = get_layer_offset(pipeline_size, list(map(int, arguments.num_layer_list.split(","))))
        assert offsets[-1] == arguments.num_layers
        return [after - before for before, after in itertools.pairwise(offsets)]
    size = arguments.num_layers_per_virtual_pipeline_stage
    check_pipeline_config(arguments.num_layers, pipeline_size, size, said["noop_layers"])
    return [
        sum(layer not in arguments.noop_layers for layer in range(first, first + size))
        for first in range(0, arguments.num_layers, size)
    ]


cases = json.load(sys.stdin)
print(json.dumps([understood(*case) for case in cases]))
