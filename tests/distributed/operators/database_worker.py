"""Modules that nobody wrote a rule for, captured and run by random plans on two ranks.

    database_worker.py torch COUNT SEED           of torch's own test database: half operators, half modules of torch.nn
    database_worker.py transformers COUNT SEED    models of transformers with tiny random configurations
    database_worker.py NAME 1 0                   one language model of transformers, no part of it in fp32

What is refused must be a ``ConfigError``.
"""

import itertools
import sys
import warnings

import torch
import torch.distributed as dist
from plan_checks import COUNTER, compare, make_groups, random_plan
from ranks import leave_with
from torch_database import layer_modules, operator_modules
from transformers_models import language_model_in_double, transformers_models

from mindspeed_autoparallel.errors import ConfigError
from mindspeed_autoparallel.operators.torch.capture import capture_program

PLANS = 2


def drawn(kind, count, seed):
    """Yield (name, model, inputs by position or by name)."""
    if kind not in ("transformers", "torch"):
        return [language_model_in_double(kind)]
    if kind == "transformers":
        return transformers_models(seed, count)
    return itertools.chain(operator_modules(seed, count - count // 2), layer_modules(seed, count // 2))


def captured_or_error(model, given):
    """Return a capture, or the error that it ends with."""
    try:
        return capture_program(model, *(((), given) if isinstance(given, dict) else (given,)))
    except Exception as error:
        return error


warnings.filterwarnings("ignore")
torch.set_num_threads(1)
PREPARED = [
    (name, model, given, captured_or_error(model, given))
    for name, model, given in drawn(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
]
"""Once, before the ranks are forked."""


def main():
    dist.init_process_group("gloo")
    COUNTER.install()
    mesh, rows = make_groups((2,)), []
    for name, model, given, captured in PREPARED:
        try:
            if isinstance(captured, Exception):
                raise captured
            for each in range(PLANS):
                worst, exact, predicted, sent = compare(
                    model, given, captured, random_plan(captured.graph, (2,), each), mesh
                )
                rows.append((name, "ran", worst, exact, [predicted, sent]))
        except ConfigError as error:
            rows.append((name, "refused", str(error)))
        except Exception as error:
            rows.append((name, "raw", f"{type(error).__name__}: {error}"[:300]))
            break  # the ranks may no longer be at the same place
    leave_with(rows)


main()
