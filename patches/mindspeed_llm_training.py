"""mindspeed_llm.training.training: MindSpeed-LLM replaces Megatron's training loop."""

from dataclasses import replace

from mindspeed_autoparallel.patches.training_training import LOG, TRAIN

PATCHES = [
    replace(
        TRAIN,
        target="mindspeed_llm.training.training:train",
        instead_of=TRAIN.target,
        distribution="mindspeed-llm",
        why="A measuring or tracing process begins where MindSpeed-LLM's own training would, and ends. Its steps are "
        "Megatron's.",
    ),
    replace(
        LOG,
        target="mindspeed_llm.training.training:training_log",
        instead_of=LOG.target,
        distribution="mindspeed-llm",
        why="The time of each phase and the bytes moved are logged with MindSpeed-LLM's iteration.",
    ),
]
