"""What a process forked by ``python_server.py`` becomes: it takes its client's place and runs a command line."""

import atexit
import builtins
import contextlib
import fcntl
import importlib
import io
import multiprocessing
import os
import runpy
import signal
import sys
import threading
import tokenize
import types
import warnings
from pathlib import Path

_FREE_FILES = 700
"""Files are moved to numbers from here on while those of the program are put in their places."""


class Program:
    """What a forked process becomes."""

    def __init__(self, request: dict, files: list[int]) -> None:
        self.request, self.files = request, files

    def __call__(self, client: str) -> None:
        """Take the client's place and run; leaves as Python does."""
        request = self.request
        if request["leads"]:
            os.setsid()
        for number in (signal.SIGCHLD, *request["default"]):
            signal.signal(number, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        for number in request["ignored"]:
            signal.signal(number, signal.SIG_IGN)
        held = [fcntl.fcntl(number, fcntl.F_DUPFD, _FREE_FILES) for number in self.files]
        for number in self.files:
            os.close(number)
        for number, target in zip(held, request["files"], strict=True):
            os.dup2(number, target, inheritable=True)
            os.close(number)
        os.umask(request["umask"])
        os.chdir(request["folder"])
        os.environ.clear()
        os.environ.update(request["variables"])
        sys.executable = client
        multiprocessing.set_executable(client)
        sys.dont_write_bytecode = bool(os.environ.get("PYTHONDONTWRITEBYTECODE"))
        sys.pycache_prefix = os.environ.get("PYTHONPYCACHEPREFIX") or None
        sys.orig_argv[:] = [client, *request["words"]]
        _open_streams()
        importlib.invalidate_caches()
        try:
            _run(list(request["words"]))
        except SystemExit as error:
            _leave(error.code)
        _leave(None)


def _leave(code: object) -> None:
    """End as the interpreter does, except that what was imported before the fork is not taken apart (half a second)."""
    if code is not None and not isinstance(code, int):
        print(code, file=sys.stderr)
        code = 1
    threading._shutdown()  # type: ignore[attr-defined]  # waits for the program's threads
    atexit._run_exitfuncs()
    sys.modules["__main__"].__dict__.clear()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(ValueError, AttributeError):
            stream.flush()
    os._exit((code or 0) & 0xFF)


def _open_streams() -> None:
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        raw = open(number, "rb" if number == 0 else "wb", closefd=False)
        lines = number == 2 or bool(os.environ.get("PYTHONUNBUFFERED")) or raw.isatty()
        errors = "backslashreplace" if number == 2 else "strict"
        stream = io.TextIOWrapper(raw, encoding="utf-8", errors=errors, line_buffering=lines)
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)


def _run(words: list[str]) -> None:
    """Run the words of a command line: [-u] [-W FILTER] and -m NAME, -c CODE, - or a file, then the arguments."""
    filters = [text for text in os.environ.get("PYTHONWARNINGS", "").split(",") if text]
    while words and words[0] in ("-u", "-W"):
        if words.pop(0) == "-W":
            filters.append(words.pop(0))
    sys.warnoptions[:] = filters
    _default_warnings()
    warnings._processoptions(filters)  # type: ignore[attr-defined]  # what the interpreter itself does of them
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    main.__dict__.update(__builtins__=builtins, __annotations__={})
    own = [str(Path.cwd() / entry) for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry]
    sys.path[:0] = own
    try:
        if any(Path(folder, "sitecustomize.py").exists() for folder in own):
            sys.modules.pop("sitecustomize", None)
            importlib.import_module("sitecustomize")
        if words[0] == "-m":
            sys.path.insert(0, str(Path.cwd()))
            sys.argv = words[1:]
            runpy._run_module_as_main(words[1], alter_argv=True)  # type: ignore[attr-defined]  # as python -m does
            return
        if words[0] in ("-c", "-"):
            sys.path.insert(0, "")
            sys.argv = [words[0], *words[2 if words[0] == "-c" else 1 :]]
            text, name = (words[1], "<string>") if words[0] == "-c" else (sys.stdin.read(), "<stdin>")
        else:
            sys.path.insert(0, str(Path(words[0]).resolve().parent))
            sys.argv, name = words, words[0]
            main.__file__ = str(Path.cwd() / name)
            with tokenize.open(name) as stream:
                text = stream.read()
        exec(compile(text, name, "exec"), main.__dict__)
    except SystemExit:
        raise
    except BaseException as error:
        # Without the frames of this file, as the interpreter would print it.
        frames = error.__traceback__
        while frames is not None and frames.tb_frame.f_code.co_filename == __file__:
            frames = frames.tb_next
        sys.excepthook(type(error), error.with_traceback(frames), frames)
        if isinstance(error, KeyboardInterrupt):
            sys.stdout.flush()
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGINT)
        raise SystemExit(1) from None


def _default_warnings() -> None:
    """Set the filters of a fresh interpreter, before those that torch adds while it is imported are missed."""
    warnings.resetwarnings()
    for action, category, module in (
        ("default", DeprecationWarning, "__main__"),
        ("ignore", DeprecationWarning, ""),
        ("ignore", PendingDeprecationWarning, ""),
        ("ignore", ImportWarning, ""),
        ("ignore", ResourceWarning, ""),
    ):
        warnings.filterwarnings(action, category=category, module=module, append=True)  # type: ignore[arg-type]
