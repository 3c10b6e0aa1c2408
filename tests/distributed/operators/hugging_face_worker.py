"""Unchanged Hugging Face models, lowered to styles of parallelize_module, trained beside one process."""

import sys
import warnings

import torch
import torch.distributed as dist
import transformers
from ranks import leave_with
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import parallelize_module

from mindspeed_autoparallel.operators.lowering.roles import DATA, TENSOR
from mindspeed_autoparallel.operators.lowering.uniform import uniform_decisions
from mindspeed_autoparallel.operators.plan import OperatorPlan
from mindspeed_autoparallel.operators.torch.capture import capture_program
from mindspeed_autoparallel.operators.torch.parallelize import nearest_styled, parallelize_plan

warnings.filterwarnings("ignore")
SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
TEXT = {**SIZES, "vocab_size": 64, "num_key_value_heads": 2, "use_cache": False, "pad_token_id": 0}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
QUIET = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
MODELS = {
    "llama": ("LlamaForCausalLM", "LlamaConfig", TEXT),
    "qwen2": ("Qwen2ForCausalLM", "Qwen2Config", TEXT),
    "mixtral": ("MixtralForCausalLM", "MixtralConfig", {**TEXT, **EXPERTS}),
    "vit": ("ViTForImageClassification", "ViTConfig", {**SIZES, **QUIET, "image_size": 32, "patch_size": 8}),
    "bert": ("BertForMaskedLM", "BertConfig", {**TEXT, **QUIET}),
}
STEPS, RATE = 3, 0.1


def build(name, **changes):
    """Make the model; ``changes`` of its configuration."""
    model, config, options = MODELS[name]
    torch.manual_seed(0)
    built = getattr(transformers, model)(getattr(transformers, config)(**{**options, **changes})).double().train()
    if name == "mixtral":
        built.set_experts_implementation("batched_mm")
    return built


def inputs_of(name, image_size=32):
    torch.manual_seed(1)
    if name == "vit":
        return {"pixel_values": torch.randn(8, 3, image_size, image_size, dtype=torch.float64)}
    return {"input_ids": torch.randint(1, 64, (8, 8))}


def train(model, given, replicas=1, group=None):
    losses = []
    for _ in range(STEPS):
        logits = model(**given).logits
        loss = logits.float().double().square().mean() + logits.flatten(0, -2).log_softmax(-1)[:, 0].neg().mean()
        loss.backward()
        losses.append(loss.detach().clone())
        with torch.no_grad():
            for parameter in model.parameters():
                gradient = parameter.grad
                if isinstance(parameter, DTensor):
                    gradient = gradient.redistribute(parameter.device_mesh, parameter.placements).to_local()
                if group is not None:
                    dist.all_reduce(gradient, group=group)
                local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
                local -= RATE * gradient / replicas
                parameter.grad = None
        if group is not None:
            dist.all_reduce(losses[-1], group=group)
    return torch.stack(losses) / replicas


def main():
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    rows = []
    for name in sys.argv[1:] or MODELS:
        model, given = build(name), inputs_of(name)
        captured = capture_program(model, (), given)
        roles = {2: (TENSOR,), 4: (DATA, TENSOR)}[dist.get_world_size()]
        decisions = uniform_decisions(captured.graph, (2,) * len(roles), roles, sequence_parallel=False)
        plan, whole = nearest_styled(captured, model, OperatorPlan(decisions, "uniform", (), 0.0))
        lowered = parallelize_plan(captured, model, plan)
        if lowered.not_expressed:
            rows.append((name, None, lowered.not_expressed[:3], 0, len(whole), []))
            continue
        expected = train(build(name), given)
        mesh = init_device_mesh("cpu", (lowered.data_size, lowered.tensor_size), mesh_dim_names=("dp", "tp"))
        parallelize_module(model, mesh["tp"], lowered.styles)
        mine = {key: value.chunk(lowered.data_size)[mesh.get_coordinate()[0]] for key, value in given.items()}
        found = train(model, mine, lowered.data_size, mesh.get_group("dp"))
        error = float(((found - expected) / expected).abs().max())
        styles = sorted({type(style).__name__ for style in lowered.styles.values()})
        rows.append((name, error, (lowered.data_size, lowered.tensor_size), styles, len(whole), expected.tolist()))
    leave_with(rows)


if __name__ == "__main__":
    main()
