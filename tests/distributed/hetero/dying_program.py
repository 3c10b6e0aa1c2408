"""The reference training in which rank 2 (``DYING_RANK`` names another) is killed in its second step."""

# ruff: noqa: I001
import mindspeed_autoparallel  # noqa: F401  before Megatron

import itertools
import os
import signal

from reference_vlm import pretrain_vlm

MICROBATCHES = itertools.count()
STEP = pretrain_vlm.Trainer.step


def step(self, batches, model):
    if os.environ["RANK"] == os.environ.get("DYING_RANK", "2") and next(MICROBATCHES) == 10:
        os.kill(os.getpid(), signal.SIGKILL)
    return STEP(self, batches, model)


pretrain_vlm.Trainer.step = step
if __name__ == "__main__":
    pretrain_vlm.main()
