"""Unchanged Hugging Face models, lowered in the ways of torch's own tensor parallelism, trained beside one process.

Arguments: ways with commas between (``styles``, ``sequence``: styles with sequence parallelism, ``planned``:
``distribute_module`` by a plan that styles cannot say), then names of models.
"""

import sys

import hugging_face_worker
import torch
import torch.distributed as dist
from hugging_face_worker import MODELS, train
from plan_checks import random_plan
from ranks import leave_with
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import parallelize_module

from mindspeed_autoparallel.operators.lowering.roles import DATA, TENSOR
from mindspeed_autoparallel.operators.lowering.uniform import uniform_decisions
from mindspeed_autoparallel.operators.plan import OperatorPlan
from mindspeed_autoparallel.operators.torch.capture import capture_program
from mindspeed_autoparallel.operators.torch.distribute import distribute_plan
from mindspeed_autoparallel.operators.torch.parallelize import nearest_styled, parallelize_plan
from mindspeed_autoparallel.operators.torch.sequence_parallel import with_sequence_parallel

IMAGE_SIZE = 24
"""Of the vision transformer: ten rows a picture, which two ranks can halve."""


def build(name):
    return hugging_face_worker.build(name, **({"image_size": IMAGE_SIZE} if name == "vit" else {}))


def inputs_of(name):
    return hugging_face_worker.inputs_of(name, IMAGE_SIZE)


def mesh_of(lowered):
    return init_device_mesh("cpu", (lowered.data_size, lowered.tensor_size), mesh_dim_names=("dp", "tp"))


def by_styles(model, given, lowered):
    """Train by styles; give the losses and the names of the styles."""
    mesh = mesh_of(lowered)
    parallelize_module(model, mesh["tp"], lowered.styles)
    mine = {key: value.chunk(lowered.data_size)[mesh.get_coordinate()[0]] for key, value in given.items()}
    found = train(model, mine, lowered.data_size, mesh.get_group("dp"))
    return found, sorted({type(style).__name__ for style in lowered.styles.values()})


def by_plan(captured, model, given):
    """Train by a plan that cuts every operator at random; give the losses and what styles could not say of it."""
    plan = random_plan(captured.graph, {2: (2,), 4: (2, 2)}[dist.get_world_size()], 0)
    refused = parallelize_plan(captured, model, plan).not_expressed
    distribute_plan(captured, plan, model, init_device_mesh("cpu", plan.decisions.mesh))
    assert all(isinstance(parameter, DTensor) for parameter in model.parameters())
    return train(model, given), list(refused[:1])


def main():
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    rows = []
    ways = sys.argv[1].split(",")
    for name in sys.argv[2:] or MODELS:
        model, given = build(name), inputs_of(name)
        captured = capture_program(model, (), given)
        expected = train(build(name), given)
        lowered = None
        for way in ways:
            model = build(name)
            if way == "planned":
                captured = capture_program(model, (), given)
                found, told = by_plan(captured, model, given)
            else:
                lowered = lowered or lowered_styles(captured, build(name))
                used = with_sequence_parallel(captured, model, lowered) if way == "sequence" else lowered
                if used.not_expressed:
                    rows.append((name, way, None, list(used.not_expressed[:3]), []))
                    continue
                found, told = by_styles(model, given, used)
            error = float(((found - expected) / expected).abs().max())
            rows.append((name, way, error, told, expected.tolist()))
    leave_with(rows)


def lowered_styles(captured, model):
    """Lower the uniform plan of two-fold tensor parallelism, and data parallelism of what is left."""
    roles = {2: (TENSOR,), 4: (DATA, TENSOR)}[dist.get_world_size()]
    decisions = uniform_decisions(captured.graph, (2,) * len(roles), roles, sequence_parallel=False)
    plan, _ = nearest_styled(captured, model, OperatorPlan(decisions, "uniform", (), 0.0))
    lowered = parallelize_plan(captured, model, plan)
    assert lowered.not_expressed or (lowered.data_size, lowered.tensor_size) == (dist.get_world_size() // 2, 2)
    return lowered


if __name__ == "__main__":
    main()
