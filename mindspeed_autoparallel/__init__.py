"""Automatic parallel plans for Megatron: import this before megatron.

The packages, top to bottom; each may import only those below it (checked by the tests):

    cli, patches,       one command per file; one patch table per patched Megatron module;
    testing             suites for those who write adapters
    runtime             everything that touches torch and megatron: devices, launch, profiling, hetero, and
                        ``features``, one folder per flag
    weights             checkpoints that follow a plan
    report, predict,    text, html and timeline of a plan; prediction of step time and memory without a launch;
    operators, hosts    operator-level strategy search; configuration files of FSDP2 trainers, read and edited in place
    planner             the exact search over plans
    data                how samples of a data set differ, and how they are shared between replicas
    cost, schedule      one sourced formula per function; pipeline schedules as action programs and one exact simulator
    profiles            measured costs with provenance
    spec                frozen nouns with JSON round trip: cluster, model, layout, plan
    patching            what a patch is; install, list, undo
    errors, units, files, interrupts, redaction, whole_numbers

Importing arms the patches and loads neither torch nor ortools; nothing in Megatron changes without a flag.
"""

__version__ = "0.1.0"

from mindspeed_autoparallel.first_interrupt import handle_first_interrupt as _handle_first_interrupt

_handle_first_interrupt(__name__)

from mindspeed_autoparallel import patches as _patches  # noqa: E402  # loads most of what an interrupt can meet

_patches.install()
