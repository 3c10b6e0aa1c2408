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
import socket
import struct
import sys
import threading
import tokenize
import types
import warnings
from pathlib import Path

from python_templates import Imported

_FREE_FILES = 700
"""Files are moved to numbers from here on while those of the program are put in their places."""


class Programs:
    """The running programs, by the connection that asked for each."""

    def __init__(self, pipe: tuple[int, int], folder: Path) -> None:
        self.pids: dict[socket.socket, tuple[int, bool]] = {}
        self._pipe, self._folder = pipe, folder
        self._workers: dict[int, str] = {}

    def close(self) -> None:
        """Close, in a forked process, what only the server needs."""
        signal.set_wakeup_fd(-1)
        for one in self.pids:
            one.close()
        for number in self._pipe:
            os.close(number)

    def add(self, connection: socket.socket, pid: int, request: dict) -> None:
        """Add the program ``pid`` that a client requested."""
        self.pids[connection] = (pid, request["leads"])
        self._workers[pid] = worker_of(request)

    def kill_all(self) -> None:
        """Kill the programs that run."""
        for connection in list(self.pids):
            self.kill(connection)

    def reap(self) -> None:
        """Hand the status of every program that has ended to its client."""
        while True:
            try:
                pid, status, used = os.wait4(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if pid in self._workers:
                add_seconds(self._folder, self._workers.pop(pid), used.ru_utime + used.ru_stime)
            for connection in [one for one, (number, _) in self.pids.items() if number == pid]:
                del self.pids[connection]
                with contextlib.suppress(OSError):
                    connection.sendall(struct.pack("i", os.waitstatus_to_exitcode(status)))
                connection.close()

    def kill(self, connection: socket.socket) -> None:
        """Kill the program of a client that is gone."""
        pid, leads = self.pids.pop(connection)
        connection.close()
        with contextlib.suppress(ProcessLookupError):
            if leads:
                with contextlib.suppress(ProcessLookupError):  # it has no group before its first steps
                    os.killpg(pid, signal.SIGKILL)
            os.kill(pid, signal.SIGKILL)


def worker_of(request: dict) -> str:
    """Return the test process that a program belongs to."""
    return request["variables"].get("PYTEST_XDIST_WORKER", "")


def add_seconds(folder: Path, worker: str, seconds: float) -> None:
    """Record that programs of ``worker`` have used ``seconds`` of processor time; ``forked_python`` reads it."""
    with open(folder / f"seconds-{worker}", "ab") as written:
        written.write(struct.pack("d", seconds))


class Program:
    """What a forked process becomes."""

    def __init__(self, request: dict, files: list[int], imported: Imported | None = None) -> None:
        self.request, self.files, self._imported = request, files, imported

    def __call__(self, client: str) -> None:
        """Take the client's place and run; leaves as Python does."""
        request = self.request
        if request["leads"]:
            os.setsid()
        if self._imported:
            self._imported.take_signals()
        else:
            take_signals(request)
        held = [fcntl.fcntl(number, fcntl.F_DUPFD, _FREE_FILES) for number in self.files]
        for number in self.files:
            os.close(number)
        for number, target in zip(held, request["files"], strict=True):
            os.dup2(number, target, inheritable=True)
            os.close(number)
        take_surroundings(request, client)
        if self._imported:
            self._imported.go_on()
        else:
            open_streams()
        importlib.invalidate_caches()
        try:
            _run(list(request["words"]), new=not self._imported)
        except SystemExit as error:
            _leave(error.code)
        _leave(None)


def take_signals(request: dict) -> None:
    """Handle signals as a program does that the client would start."""
    for number in (signal.SIGCHLD, *request["default"]):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in request["ignored"]:
        signal.signal(number, signal.SIG_IGN)


def take_surroundings(request: dict, client: str) -> None:
    """Take the client's folder, variables and words."""
    os.umask(request["umask"])
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(request["variables"])
    sys.executable = client
    multiprocessing.set_executable(client)
    sys.dont_write_bytecode = bool(os.environ.get("PYTHONDONTWRITEBYTECODE"))
    sys.pycache_prefix = os.environ.get("PYTHONPYCACHEPREFIX") or None
    sys.orig_argv[:] = [client, *request["words"]]


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


def open_streams() -> None:
    """Open the standard streams anew."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        raw = open(number, "rb" if number == 0 else "wb", closefd=False)
        lines = number == 2 or bool(os.environ.get("PYTHONUNBUFFERED")) or raw.isatty()
        errors = "backslashreplace" if number == 2 else "strict"
        stream = io.TextIOWrapper(raw, encoding="utf-8", errors=errors, line_buffering=lines)
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)


def set_up(filters: list[str]) -> list[str]:
    """Set what the interpreter sets before it runs anything; return the entries of ``PYTHONPATH``."""
    filters = [text for text in os.environ.get("PYTHONWARNINGS", "").split(",") if text] + filters
    sys.warnoptions[:] = filters
    _default_warnings()
    warnings._processoptions(filters)  # type: ignore[attr-defined]  # what the interpreter itself does of them
    own = [str(Path.cwd() / entry) for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry]
    sys.path[:0] = own
    return own


def _run(words: list[str], new: bool) -> None:
    """Run the words of a command line: [-u] [-W FILTER] and -m NAME, -c CODE, - or a file, then the arguments.

    ``new``: nothing is set up.
    """
    filters = []
    while words and words[0] in ("-u", "-W"):
        if words.pop(0) == "-W":
            filters.append(words.pop(0))
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    main.__dict__.update(__builtins__=builtins, __annotations__={})
    own = set_up(filters) if new else []
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
