"""Captures a megatron.core GPT on CPU and prints what was found."""

import json
import tempfile
import warnings

import mindspeed_autoparallel

warnings.filterwarnings("ignore")
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from megatron.core import parallel_state  # noqa: E402
from megatron.core.models.gpt import GPTModel  # noqa: E402
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec  # noqa: E402
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed  # noqa: E402
from megatron.core.transformer.transformer_config import TransformerConfig  # noqa: E402

from mindspeed_autoparallel.operators import search_strategies  # noqa: E402

assert mindspeed_autoparallel.__version__
with tempfile.TemporaryDirectory() as folder:
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    model_parallel_cuda_manual_seed(1)
    config = TransformerConfig(
        num_layers=2,
        hidden_size=32,
        num_attention_heads=4,
        use_cpu_initialization=True,
        hidden_dropout=0.0,
        attention_dropout=0.0,
    )
    model = GPTModel(config, get_gpt_layer_local_spec(), vocab_size=128, max_sequence_length=16)
    positions = torch.arange(16).expand(8, 16)
    mask = torch.ones(1, 1, 16, 16).triu(1).bool()
    plan = search_strategies(model, (torch.zeros(8, 16, dtype=torch.int64), positions, mask), devices=4, mem_coeff=0.1)
    held = {n for n, node in plan.decisions.graph.nodes.items() if node.is_parameter}
    found = {
        "degrees": plan.degrees(),
        "unknown": plan.decisions.graph.unknown,
        "parameters": held == {n for n, _ in model.named_parameters()},
        "roles": sorted({n.role for n in plan.decisions.graph.nodes.values() if n.matmul}),
    }
    print("RESULT " + json.dumps(found), flush=True)
    dist.destroy_process_group()
