"""mindspeed_mm.training: MindSpeed-MM has its own training loop; only the set-up functions are Megatron's."""

from dataclasses import replace

from mindspeed_autoparallel.patches.training_training import LOG, STEP, TRAIN

PATCHES = [
    replace(
        TRAIN,
        target="mindspeed_mm.training:train",
        instead_of=TRAIN.target,
        distribution="mindspeed-mm",
        why="A measuring process measures where MindSpeed-MM's own training would begin, and ends.",
    ),
    replace(
        STEP,
        target="mindspeed_mm.training:train_step",
        instead_of=STEP.target,
        distribution="mindspeed-mm",
        why="Predicted step time and memory are compared with the first steps of MindSpeed-MM's own training.",
    ),
    replace(
        LOG,
        target="mindspeed_mm.training:training_log",
        instead_of=LOG.target,
        distribution="mindspeed-mm",
        why="The time of each phase and the bytes moved are logged with MindSpeed-MM's iteration.",
    ),
]
