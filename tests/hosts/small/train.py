"""Runs the small host once and prints what happened as JSON; ``SMALL_HOST_REPLACES`` names a function to replace."""

import json
import os
import sys
import types

import mindspeed_autoparallel  # noqa: F401  # before megatron, as a user's script has it
from mindspeed_autoparallel.runtime.features.apply_plan import check
from mindspeed_autoparallel.runtime.megatron import features

handlers = []


def load(path):
    """Record the handler in place of its work, which the tests of the features show."""

    def handler(arguments, *task):
        handlers.append(".".join(path.split(".")[-2:]))
        arguments.seed = 77

    return handler


def watched(wrapped, args, kwargs):
    """Record that the step is watched."""
    handlers.append("watched step")
    return wrapped(*args, **kwargs)


def replacing_feature(*args, **kwargs):
    """Stand where the host's function stood, as a user's own step does."""


of_mindspeed = types.FunctionType(replacing_feature.__code__, {"__name__": "mindspeed.core.dualpipev"})

features._load = load
check.watch_step = watched

from mindspeed_mm import training  # noqa: E402


def replace():
    """Put a function of a feature in the place of the host's, after the arguments were parsed."""
    if name := os.environ.get("SMALL_HOST_REPLACES"):
        setattr(training, name, of_mindspeed if os.environ.get("SMALL_HOST_REPLACES_BY") else replacing_feature)


first, second = training.pretrain(replace)
print(
    json.dumps(
        {
            "argv": sys.argv[1:],
            "handlers": handlers,
            "calls": training.CALLS,
            "seeds": [first.seed, second.seed],
            "search": getattr(second, "auto_parallel_mm", False),
            "theirs": second.hetero_parallel,
            "variable": os.environ.get("A_VARIABLE_OF_THE_SCRIPT", ""),
        }
    )
)
