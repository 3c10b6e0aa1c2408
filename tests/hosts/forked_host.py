"""Jobs on CPU, forked from one process that has imported this package and a checkout's Megatron.

A rank that is forked begins its script at once; a rank that torchrun starts spends six processor seconds on imports.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import math
import os
import re
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from forked_ranks import Program
from host_runs import Ran
from python_server import share_gloo_devices
from remembered_sources import remember_sources

_GRACE_S = 10.0
"""Ranks that wait for one that has failed are ended after this."""
_LIBRARIES = (
    *("torch.distributed", "torch._dynamo", "torch.distributed.tensor.experimental", "torch.utils.cpp_extension"),
    *(
        "torch_npu",
        "transformers",
        "transformers.models.auto.tokenization_auto",
        "transformers.generation",
        "scipy.stats",
        "scipy.sparse.linalg",
        "sklearn.metrics",
    ),
    *("pandas", "accelerate", "datasets", "einops", "triton"),
)
"""What programs of MindSpeed import beside Megatron and MindSpeed."""


def import_megatron(*, features: bool = True) -> None:
    """Import what trainings use, this package first as in a script, and keep collections from copying all of it.

    ``features``: import this package and what its flags load.
    """
    if features:
        import mindspeed_autoparallel  # noqa: F401  # before Megatron

    import megatron.core.models.gpt
    import megatron.training
    import megatron.training.arguments
    import megatron.training.checkpointing
    import megatron.training.training  # noqa: F401

    if features:
        _import_features()
    sys.path.insert(0, os.environ["PYTHONPATH"].split(os.pathsep)[0])
    builders = ("gpt_builders", "mamba_builders", "hybrid_builders", "model_provider", "pretrain_gpt")
    for name in ("megatron.core.tokenizers.text", *builders):
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    remember_sources()
    share_gloo_devices()
    _keep_collections_away()


def import_libraries() -> None:
    """Import what programs of MindSpeed use beside Megatron and MindSpeed.

    MindSpeed's patches must come before Megatron's own imports, and depend on the command line of each training.
    """
    import mindspeed_autoparallel  # noqa: F401  # prepares the device in front of torch's users

    for name in _LIBRARIES:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    _import_features()
    share_gloo_devices()
    _keep_collections_away()


def _import_features() -> None:
    """Import what flags of this package load, none of which imports Megatron."""
    from mindspeed_autoparallel.runtime.features.apply_plan import entry as plans
    from mindspeed_autoparallel.runtime.features.auto_parallel_mm import entry, search, write
    from mindspeed_autoparallel.runtime.features.auto_tuning import entry as tuning

    _ = plans, entry, search, write, tuning


def _keep_collections_away() -> None:
    gc.collect()
    gc.freeze()
    gc.disable()


def become(file: Path, words: Sequence[str], folder: Path, log: Path, variables: Mapping[str, str]) -> None:
    """Take folder, output, variables and command line of the program ``file``."""
    os.chdir(folder)
    stream = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for number in (1, 2):
        os.dup2(stream, number)
    os.close(stream)
    os.environ.update(variables)
    sys.argv = [str(file), *words]
    sys.orig_argv[:] = [sys.executable, *sys.argv]


def exit_code_of(program: Callable[[], object]) -> int:
    """Run ``program`` as the interpreter runs a script; print the traceback of an error, and return the exit code."""
    code: object = None
    try:
        program()
    except SystemExit as error:
        code = error.code
        if isinstance(code, str):
            print(code)
    except BaseException as error:
        if getattr(error, "ends_well", False):
            return 0
        traceback.print_exc()
        code = 1
    return code & 0xFF if isinstance(code, int) else 0 if code is None else 1


def fork(program: Callable[[], int]) -> int:
    """Run ``program`` in a fork that ends with its result; return its process id."""
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        code = program()
    except BaseException:
        traceback.print_exc()
    finally:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
        os._exit(code)


def run_ranks(
    script: Path, words: Sequence[str], world: int, folder: Path, *, limit_s: float = 300.0, **variables: str
) -> Ran:
    """Run ``script`` on ``world`` ranks of one node; ``Ran.seconds`` are processor seconds of all of them.

    One process imports what ``script`` imports, with its ``words``, and the ranks are forks of that: nothing above the
    call of ``main()`` may depend on ``RANK``.
    """
    used = os.times()
    status = os.waitpid(fork(lambda: _launch(script, words, world, folder, limit_s, variables)), 0)[1]
    now = os.times()
    seconds = now.children_user + now.children_system - used.children_user - used.children_system
    logs = [_log(folder, "import"), *(_log(folder, rank) for rank in range(world))]
    output = "\n".join(log.read_text(errors="replace") for log in logs if log.is_file())
    for log in logs:
        log.unlink(missing_ok=True)
    code = os.waitstatus_to_exitcode(status)
    return Ran(exit_code=124 if code == -signal.SIGALRM else code, output=output, seconds=seconds)


def _log(folder: Path, part: int | str) -> Path:
    return folder / f"rank{part}.log"


def _launch(
    script: Path, words: Sequence[str], world: int, folder: Path, limit_s: float, variables: Mapping[str, str]
) -> int:
    """Import once, fork the ranks, and return the first exit code that is not 0."""
    deadline = time.monotonic() + limit_s
    signal.alarm(math.ceil(limit_s))  # of the import; ranks have the rest
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = str(free.getsockname()[1])
    places = {"WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(world), "MASTER_ADDR": "localhost", "MASTER_PORT": port}
    become(script, words, folder, _log(folder, "import"), {**variables, **places})
    sys.path.insert(0, "")  # which the program's folder replaces
    program = Program(str(script), None, list(words))
    code = exit_code_of(program.prepare)
    signal.alarm(0)
    if code:
        return code
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    _keep_collections_away()
    children = {}
    for rank in range(world):
        place = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        log = _log(folder, rank)
        children[fork(lambda log=log, place=place: _be_rank(program, script, words, folder, log, place))] = rank
    return _worst(set(children), deadline)


def _be_rank(
    program: Program, script: Path, words: Sequence[str], folder: Path, log: Path, place: Mapping[str, str]
) -> int:
    become(script, words, folder, log, place)
    return exit_code_of(program.run)


def _worst(children: set[int], deadline: float) -> int:
    """Wait for ``children``, end them at the ``deadline`` or soon after the first failure, and return its exit code."""
    worst = 0
    while children:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid:
            children.remove(pid)
            code = os.waitstatus_to_exitcode(status)
            worst = worst or code
            deadline = min(deadline, time.monotonic() + _GRACE_S) if code else deadline
            continue
        if time.monotonic() > deadline:
            for child in children:
                os.kill(child, signal.SIGKILL)
            worst, deadline = worst or 124, deadline + _GRACE_S
        time.sleep(0.02)
    return worst


def environment(checkout: os.PathLike[str], more: str = "") -> dict[str, str]:
    """Return the variables that a program of ``checkout`` starts with on CPU; ``more``: folders for PYTHONPATH."""
    here = Path(__file__).parent
    folders = (checkout, here.parents[1], here, here.parent / "helpers", here / "hybrid_stand_ins", more)
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, map(str, folders))),  # an empty one is the working directory
        "OMP_NUM_THREADS": "1",
        "TORCHDYNAMO_DISABLE": "1",
        "MINDSPEED_AUTOPARALLEL_DEVICE": "cpu",
        "CUDA_DEVICE_MAX_CONNECTIONS": "1",
    }


def release_of(folders: Iterable[Path]) -> str:
    """Return major and minor number of the first Megatron in ``folders``."""
    file = next(path for folder in folders if (path := folder / "megatron" / "core" / "package_info.py").is_file())
    text = file.read_text()
    return ".".join(re.search(rf"^{name} = (\d+)", text, re.MULTILINE)[1] for name in ("MAJOR", "MINOR"))
