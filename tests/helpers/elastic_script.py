"""A script of docs/examples, pretrain_gpt.py by default, whose last rank also prints every step's loss in full.

Megatron's own line has seven digits. The variable EXAMPLE names another script.
"""

import os
import runpy
import sys
import time
from pathlib import Path

import mindspeed_autoparallel  # noqa: F401  # first: before megatron

# isort: split
from megatron.training import training

print(f"\nPROCESS {os.getpid()}", flush=True)
_logged = training.training_log


def log(loss_dict, *arguments, **keywords):
    """Print the iteration, its loss and the number of ranks."""
    import torch.distributed as dist

    iteration = keywords.get("iteration", arguments[2] if len(arguments) > 2 else None)
    if loss_dict and dist.get_rank() == dist.get_world_size() - 1:
        loss = next(iter(loss_dict.values()))
        print(f"\nSTEP {iteration} {float(loss)!r} {dist.get_world_size()}", flush=True)
        time.sleep(float(os.environ.get("ELASTIC_STEP_S", "0")))
    return _logged(loss_dict, *arguments, **keywords)


training.training_log = log
script = Path(__file__).parents[2] / "docs" / "examples" / os.environ.get("EXAMPLE", "pretrain_gpt.py")
sys.argv[0] = str(script)
runpy.run_path(str(script), run_name="__main__")
