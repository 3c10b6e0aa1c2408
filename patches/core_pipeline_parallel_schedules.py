"""megatron.core.pipeline_parallel.schedules: the stock schedule with phases around it, or other microbatch orders."""

from mindspeed_autoparallel.patching import Calls, Patch


def _pass(kind: str) -> Calls:
    return Calls("runtime.features.preflight.watch:schedule_pass", (kind,))


PATCHES = [
    Patch(
        target="megatron.core.pipeline_parallel.schedules:get_forward_backward_func",
        wrapper=Calls("runtime.hetero.job:schedule"),
        flags=("--hetero-parallel", "--auto-parallel-hetero"),
        why="Encoders run before the backbone's schedule, and their backward runs after it; the schedule is unchanged.",
    ),
    Patch(
        target="megatron.core.pipeline_parallel.schedules:get_forward_backward_func",
        wrapper=Calls("runtime.features.data_balance.stepping:schedule"),
        flags=("--data-balance", "--order-microbatches"),
        why="The iterators of a step return its microbatches in another order; the schedule itself is unchanged.",
    ),
    Patch(
        target="megatron.core.pipeline_parallel.schedules:forward_step",
        wrapper=_pass("F"),
        parameters=("forward_step_func", "data_iterator", "model"),
        flags=("--auto-parallel-preflight",),
        why="Each forward of a rank that runs alone is timed, and recorded if memory peaks in it.",
    ),
    Patch(
        target="megatron.core.pipeline_parallel.schedules:backward_step",
        wrapper=_pass("B"),
        parameters=("input_tensor", "output_tensor", "output_tensor_grad"),
        flags=("--auto-parallel-preflight",),
        why="Each backward of a rank that runs alone is timed, and recorded if memory peaks in it.",
    ),
]
