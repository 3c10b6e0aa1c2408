"""Fork Python programs from one process that has imported torch: the server behind ``forked_python.python()``.

Words: the socket's path and the client's. A request is the command line, variables, folder and open files of a client
(``python_client.py``), which the forked process takes over. Then it runs what ``python WORDS...`` would have run.
Imported beforehand are torch and what Megatron reads of it (4 of the 5 seconds that ``import megatron.core`` takes),
never Megatron or this project: patches, devices and the order of imports are those of a program started by hand.
The server ends all its programs, and itself, when its standard input closes.

Two things cost programs nothing here, and change nothing that they see: the source of the classes that Megatron makes
flags of, which it reads and parses for every parser, is read and parsed once; and filelock's hook for every event of the interpreter (a
module, a file, an ``id``) is not installed.
"""

import argparse
import ast
import atexit
import builtins
import contextlib
import fcntl
import functools
import gc
import importlib
import inspect
import io
import marshal
import multiprocessing
import os
import runpy
import select
import signal
import socket
import struct
import sys
import threading
import tokenize
import types
import warnings
from pathlib import Path

_IMPORTED = (
    *("torch", "torch._dynamo", "torch._inductor.compile_fx", "torch.distributed.run", "torch.distributed.tensor"),
    *("torch.distributed.checkpoint", "torch.distributed.fsdp", "torch.distributed._composable", "torch.export"),
    *("torch.utils.data", "torch.utils.cpp_extension", "numpy", "yaml", "wrapt", "psutil", "tqdm", "safetensors.torch"),
    *("packaging.version", "importlib.metadata", "setuptools", "unittest.mock"),
    # What Megatron's tokenizers import, whichever is chosen.
    *("transformers", "transformers.models.auto.tokenization_auto", "transformers.utils.chat_template_utils"),
)
_FREE_FILES = 700
"""Files are moved to numbers from here on while those of the program are put in their places."""


def main() -> None:
    """Serve until standard input closes."""
    path, client = sys.argv[1:3]
    del sys.path[0]  # this folder, which programs have on their path where they ask for it
    warnings.simplefilter("ignore")
    add_hook, sys.addaudithook = sys.addaudithook, lambda hook: None
    for name in _IMPORTED:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    sys.addaudithook = add_hook
    _remember_sources()
    warnings.resetwarnings()
    listening = socket.socket(socket.AF_UNIX)
    listening.bind(path)
    listening.listen(256)
    woken, wakes = os.pipe()
    for end in (woken, wakes):
        os.set_blocking(end, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.set_wakeup_fd(wakes, warn_on_full_buffer=False)
    gc.collect()
    gc.freeze()
    print("ready", flush=True)
    program = _serve(listening, woken, wakes)
    listening.close()
    if program is not None:
        program(client)


def _remember_sources() -> None:
    """Read and parse once what ``inspect.getsource`` and ``ast.parse`` are given by Megatron to build its parser."""
    read, written = os.pipe()
    pid = os.fork()
    if pid == 0:
        nowhere = os.open(os.devnull, os.O_RDWR)
        for number in (1, 2):
            os.dup2(nowhere, number)
        try:
            os.write(written, marshal.dumps(_sources_of_flags()))
        finally:
            os._exit(0)
    os.close(written)
    with os.fdopen(read, "rb") as answer:
        text = answer.read()
    os.waitpid(pid, 0)
    known, read_source, parse = marshal.loads(text) if text else {}, inspect.getsource, ast.parse
    trees = {source: parse(source) for source in known.values()}

    @functools.wraps(read_source)
    def getsource(thing: object) -> str:
        return known.get(_class_place(thing)) or read_source(thing)

    @functools.wraps(parse)
    def parse_once(source: object, *options: object, **more: object) -> ast.AST:
        kept = trees.get(source) if isinstance(source, str) and not options and not more else None
        return kept or parse(source, *options, **more)

    inspect.getsource, ast.parse = getsource, parse_once


def _sources_of_flags() -> dict:
    """Return the source of every class that Megatron reads to build its parser, by file and name."""
    found, read_source = {}, inspect.getsource

    def noting(thing: object) -> str:
        found[_class_place(thing)] = read_source(thing)
        return found[_class_place(thing)]

    inspect.getsource = noting
    module = importlib.import_module("megatron.training.arguments")
    module.add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))
    return found


def _class_place(thing: object) -> tuple[str, str]:
    if not isinstance(thing, type):
        return "", ""
    return getattr(sys.modules.get(thing.__module__), "__file__", None) or "", thing.__qualname__


class _Programs:
    """The running programs, by the connection that asked for each."""

    def __init__(self) -> None:
        self.pids: dict[socket.socket, tuple[int, bool]] = {}

    def reap(self) -> None:
        """Hand the status of every program that has ended to its client."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
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
            (os.killpg if leads else os.kill)(pid, signal.SIGKILL)


def _serve(listening: socket.socket, woken: int, wakes: int):
    """Return in a forked program what is left to do there; None in the server, at its end."""
    programs = _Programs()
    while True:
        ready, _, _ = select.select([listening, woken, sys.stdin.fileno(), *programs.pids], [], [])
        if sys.stdin.fileno() in ready:
            for connection in list(programs.pids):
                programs.kill(connection)
            return None
        if woken in ready:
            os.read(woken, 4096)
            programs.reap()
        for connection in [one for one in ready if one in programs.pids]:
            programs.kill(connection)  # clients write once: readable is closed
        if listening not in ready:
            continue
        connection, _ = listening.accept()
        try:
            request, files = _request(connection)
        except (OSError, ValueError, EOFError):
            connection.close()
            continue
        pid = os.fork()
        if pid == 0:
            signal.set_wakeup_fd(-1)
            for open_one in (connection, *programs.pids):
                open_one.close()
            for number in (woken, wakes):
                os.close(number)
            return _Program(request, files)
        programs.pids[connection] = (pid, request["leads"])
        for number in files:
            os.close(number)
        with contextlib.suppress(OSError):
            connection.sendall(struct.pack("i", pid))


def _request(connection: socket.socket) -> tuple[dict, list[int]]:
    head, files, _, _ = socket.recv_fds(connection, 8, 250)
    (size,) = struct.unpack("q", head)
    body = b""
    while len(body) < size:
        more = connection.recv(size - len(body))
        if not more:
            raise EOFError
        body += more
    return marshal.loads(body), files


class _Program:
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


if __name__ == "__main__":
    main()
