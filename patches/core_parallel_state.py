"""megatron.core.parallel_state: the host's arguments for its process groups are kept for the next layout."""

from mindspeed_autoparallel.patching import Calls, Patch
from mindspeed_autoparallel.runtime.megatron.features import TASK_VARIABLE

PATCHES = [
    Patch(
        target="megatron.core.parallel_state:initialize_model_parallel",
        wrapper=Calls("runtime.profiling.measure.worker:record", ("initialize_model_parallel",)),
        parameters=("tensor_model_parallel_size", "pipeline_model_parallel_size"),
        flags=("--auto-parallel-mm", "--auto-tuning", TASK_VARIABLE),
        why="A measuring process sets the groups up again with another tensor-parallel size; other sizes stay.",
    ),
    Patch(
        target="megatron.core.parallel_state:initialize_model_parallel",
        wrapper=Calls("runtime.hetero.job:initialize_groups"),
        parameters=("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size"),
        flags=("--hetero-parallel", "--auto-parallel-hetero"),
        why="The groups of every module with its own layout are made in addition to the backbone's.",
    ),
    Patch(
        target="megatron.core.parallel_state:initialize_model_parallel",
        wrapper=Calls("runtime.megatron.shared_embedding:tie_first_and_last"),
        parameters=("get_embedding_ranks",),
        flags=("--auto-parallel-plan",),
        why="MindSpeed-MM's language model may begin after the first stage: its embedding is tied from there.",
    ),
]
