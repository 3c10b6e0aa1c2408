"""The example training of a GPT, started in the way that ``WAY`` names; ``bare``: nothing of the package is imported."""

import os
import sys
import types
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "docs" / "examples" / "pretrain_gpt.py"
WAY = os.environ.get("WAY", "")


def train(*unused):
    """Run the script."""
    Path(f"pid-{os.environ['RANK']}").write_text(str(os.getpid()))
    if WAY == "bare":
        import megatron.core.datasets.utils as utils

        bare_cpu.settle()
        utils.compile_helpers = lambda: None  # a wheel has them compiled
    exec(compile(SCRIPT.read_text(), str(SCRIPT), "exec"), {"__name__": "__main__", "__file__": str(SCRIPT)})


def spawned(index, argv):
    """Run the script in a process that ``torch.multiprocessing`` has spawned, as launchers of notebooks do."""
    sys.argv = argv
    train()


def test_training():
    """Run the script as a test of the user's."""
    train()


def compile_models():
    """Let the script's models be compiled; the backend keeps every operation, so losses stay what they are."""
    import torch
    from megatron.core.models.gpt import GPTModel

    forward = GPTModel.forward
    GPTModel.forward = torch.compile(forward, backend="eager")


if WAY == "bare":
    sys.path.insert(0, str(ROOT / "tests" / "helpers"))
    import bare_cpu

    bare_cpu.install_for_training()
    for name in ("", ".runtime", ".runtime.attention", ".runtime.attention.context_parallel"):
        sys.modules[f"mindspeed_autoparallel{name}"] = module = types.ModuleType(f"mindspeed_autoparallel{name}")
        module.use_in_spec = None
if __name__ == "__main__":
    if WAY == "spawn":
        import torch

        torch.multiprocessing.spawn(spawned, args=(sys.argv,), nprocs=1)
    elif WAY == "pytest":
        import pytest

        sys.exit(pytest.main(["-q", "-s", "-p", "no:cacheprovider", "--noconftest", "-c", os.devnull, __file__]))
    else:
        if WAY == "compile":
            import mindspeed_autoparallel  # noqa: F401  before megatron

            compile_models()
        train()
