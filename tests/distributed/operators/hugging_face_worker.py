"""Unchanged Hugging Face models, lowered in the ways of torch's own tensor parallelism, trained beside one process.

Arguments: ``MODEL:WAY,WAY``, and ``:LAYERS`` where it is not two; ways are ``styles``, ``sequence`` (styles with sequence parallelism) and ``planned``
(``distribute_module`` by a plan that styles cannot say). What is the same on all ranks is done before they are forked.
"""

import os
import sys
import warnings

import torch
import torch.distributed as dist
import transformers
from plan_checks import random_plan
from ranks import leave_with
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import parallelize_module

from mindspeed_autoparallel.operators.lowering.uniform import DATA, TENSOR, uniform_decisions
from mindspeed_autoparallel.operators.plan import OperatorPlan
from mindspeed_autoparallel.operators.torch.capture import capture_program
from mindspeed_autoparallel.operators.torch.distribute import distribute_plan
from mindspeed_autoparallel.operators.torch.parallelize import nearest_styled, parallelize_plan
from mindspeed_autoparallel.operators.torch.sequence_parallel import with_sequence_parallel

warnings.filterwarnings("ignore")
torch.set_num_threads(1)
SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
TEXT = {**SIZES, "vocab_size": 64, "num_key_value_heads": 2, "use_cache": False, "pad_token_id": 0}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
QUIET = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
IMAGE_SIZE = 24
"""Of the vision transformer: ten rows a picture, which two ranks can halve."""
MODELS = {
    "llama": ("LlamaForCausalLM", "LlamaConfig", TEXT),
    "qwen2": ("Qwen2ForCausalLM", "Qwen2Config", TEXT),
    "mixtral": ("MixtralForCausalLM", "MixtralConfig", {**TEXT, **EXPERTS}),
    "vit": ("ViTForImageClassification", "ViTConfig", {**SIZES, **QUIET, "image_size": IMAGE_SIZE, "patch_size": 8}),
    "bert": ("BertForMaskedLM", "BertConfig", {**TEXT, **QUIET}),
}
STEPS, RATE = 2, 0.1


def build(name, layers):
    model, config, options = MODELS[name]
    options = {**options, "num_hidden_layers": layers}
    torch.manual_seed(0)
    built = getattr(transformers, model)(getattr(transformers, config)(**options)).double().train()
    if name == "mixtral":
        built.set_experts_implementation("batched_mm")
    return built


def inputs_of(name):
    torch.manual_seed(1)
    if name == "vit":
        return {"pixel_values": torch.randn(8, 3, IMAGE_SIZE, IMAGE_SIZE, dtype=torch.float64)}
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


def mesh_of(lowered):
    return init_device_mesh("cpu", (lowered.data_size, lowered.tensor_size), mesh_dim_names=("dp", "tp"))


def by_styles(model, given, lowered):
    """Train with styles; give the losses and the names of the styles."""
    mesh = mesh_of(lowered)
    parallelize_module(model, mesh["tp"], lowered.styles)
    mine = {key: value.chunk(lowered.data_size)[mesh.get_coordinate()[0]] for key, value in given.items()}
    found = train(model, mine, lowered.data_size, mesh.get_group("dp"))
    return found, sorted({type(style).__name__ for style in lowered.styles.values()})


def cut_at_random(captured, model):
    """Return a plan that cuts every operator at random, and what styles could not say of it."""
    plan = random_plan(captured.graph, {2: (2,), 4: (2, 2)}[int(os.environ["WORLD_SIZE"])], 0)
    return plan, parallelize_plan(captured, model, plan).not_expressed


def by_plan(captured, model, given, plan, refused):
    """Train with a plan that cuts every operator at random; give the losses and what styles could not say of it."""
    distribute_plan(captured, plan, model, init_device_mesh("cpu", plan.decisions.mesh))
    assert all(isinstance(parameter, DTensor) for parameter in model.parameters())
    return train(model, given), list(refused[:1])


def lowered_styles(captured, model):
    """Lower the uniform plan of two-fold tensor parallelism, and data parallelism of what is left."""
    world = int(os.environ["WORLD_SIZE"])
    roles = {2: (TENSOR,), 4: (DATA, TENSOR)}[world]
    decisions = uniform_decisions(captured.graph, (2,) * len(roles), roles, sequence_parallel=False)
    plan, _ = nearest_styled(captured, model, OperatorPlan(decisions, "uniform", (), 0.0))
    lowered = parallelize_plan(captured, model, plan)
    assert lowered.not_expressed or (lowered.data_size, lowered.tensor_size) == (world // 2, 2)
    return lowered


def prepared(name, ways, layers="2"):
    """Return name and inputs, the one process's losses, and per way a model with its capture and what that is lowered to."""
    layers, given = int(layers), inputs_of(name)
    first = capture_program(build(name, layers), (), given)
    lowered, models = None, []
    for way in ways.split(","):
        model = build(name, layers)
        if way == "planned":
            captured = capture_program(model, (), given)
            models.append((way, model, captured, cut_at_random(captured, model)))
        else:
            lowered = lowered or lowered_styles(first, build(name, layers))
            used = with_sequence_parallel(first, model, lowered) if way == "sequence" else lowered
            models.append((way, model, first, used))
    return name, given, train(build(name, layers), given), models


PREPARED = [prepared(*asked.split(":")) for asked in sys.argv[1:]]


def main():
    dist.init_process_group("gloo")
    rows = []
    for name, given, expected, models in PREPARED:
        for way, model, captured, used in models:
            if way == "planned":
                found, told = by_plan(captured, model, given, *used)
            else:
                if used.not_expressed:
                    rows.append((name, way, None, list(used.not_expressed[:3]), []))
                    continue
                found, told = by_styles(model, given, used)
            error = float(((found - expected) / expected).abs().max())
            rows.append((name, way, error, told, expected.tolist()))
    leave_with(rows)


if __name__ == "__main__":
    main()
