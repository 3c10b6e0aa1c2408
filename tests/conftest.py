"""Fixtures of all tests. The launcher and the release table are in tests/helpers: ``from ranks import run_ranks``."""

import gc
import os
import signal
import sys

import hypothesis
import pytest
from forked_python import forked_python, share_forked_python, take_interpreter
from megatron_releases import RELEASES, megatron_path

pytest_plugins = ["suite_seconds"]

# Tests share two cores with real trainings, so examples have no deadline. The suite draws the same examples every
# time, so that a change fails by its own fault; EXPLORE=1 draws new ones.
hypothesis.settings.register_profile("same_examples", deadline=None, derandomize=True, database=None)
hypothesis.settings.register_profile("new_examples", deadline=None)
hypothesis.settings.load_profile("new_examples" if os.environ.get("EXPLORE") else "same_examples")

# A shell starts a job behind "&" with interrupts ignored, and programs started by tests would inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


# Nothing that importing all tests makes is garbage: no look for it meanwhile, and later ones pass over it.
gc.disable()


def pytest_configure(config):
    if hasattr(config, "workerinput"):
        take_interpreter()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_setupnodes(specs):
    """Fork the workers, as the programs of their tests, from one process that has imported torch."""
    for spec in specs:
        spec.python = share_forked_python()


def pytest_collection_finish():
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)  # a tenth of a search goes into looking for garbage at the default
    gc.enable()


@pytest.fixture(params=list(RELEASES))
def megatron_release(request):
    """Runs the test once per supported Megatron: folders for ``run_ranks(..., python_path=megatron_release)``."""
    pytest.importorskip("megatron.core" if request.param == "installed" else "torch")
    folders = megatron_path(request.param)
    if folders is None:
        name = f"MEGATRON_CORE_{request.param.replace('.', '_')}"
        pytest.skip(f"no megatron-core {RELEASES[request.param]}: set {name} to its folder, or run tests/run.sh")
    return folders


@pytest.fixture(scope="module")
def forked_starts():
    """What the package starts from the test's own process is forked, as programs of ``forked_python()`` are."""
    with pytest.MonkeyPatch.context() as changed:
        changed.setattr(sys, "executable", forked_python())
        yield
