"""Processes that have imported what several programs begin with; ``python_server.py`` has them fork these programs.

A program begins with imports: its file's, and for ``run_ranks`` those of the function. Where these lead to Megatron, a
template does them once, in their order, with the program's variables and our flags on its command line, as patches and
devices depend on both. Programs with other imports, variables, flags or folders get another template. What the imports
print is printed by every program.
"""

from __future__ import annotations

import ast
import builtins
import contextlib
import functools
import gc
import itertools
import json
import marshal
import os
import re
import signal
import socket
import sys
import threading
import time
import types
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

_OURS = re.compile(r"-{1,2}(auto|hetero|operator)[\w-]*")
_LEADS_TO_MEGATRON = frozenset({"megatron", "reference_vlm"})
_SHARED = frozenset({"mindspeed_autoparallel", "torch", "numpy", "packaging", *_LEADS_TO_MEGATRON})
"""Packages that are the same for all programs; the first import of another ends what a template does."""
_OWN = re.compile(
    r"MASTER_(ADDR|PORT)|(LOCAL_|GROUP_|ROLE_)?(RANK|WORLD_SIZE|NAME)|TORCHELASTIC_\w+|TORCH_NCCL\w+|PYTEST_CURRENT_TEST|PYTEST_XDIST_WORKER|_|"
    r"MINDSPEED_AUTOPARALLEL_(TASK|SECRET)\w*"
)
"""Variables whose values differ from launch to launch and are read behind the imports."""
_MOST_GENERATORS = 8
"""Of so many local ranks and less the import of the device makes the same."""
_RANKS = "forked_ranks.py"

Request = dict


def key_of(request: Request, files: list[int]) -> tuple | None:
    """Return what programs of one template have in common; None for a program without one."""
    try:
        return _key_of(request, files)
    except (OSError, SyntaxError, ValueError, LookupError, StopIteration):
        return None  # the program itself will show what is wrong


def _key_of(request: Request, files: list[int]) -> tuple | None:
    words, variables = request["words"], request["variables"]
    filters = list(itertools.takewhile(lambda word: word.startswith("-"), words))
    if filters not in ([], ["-u"]) or {0, 1, 2} - set(request["files"]):
        return None
    if any(os.isatty(file) for file, number in zip(files, request["files"], strict=True) if number < 3):
        return None
    words = words[len(filters) :]
    file, name, arguments = Path(request["folder"], words[0]), None, words[1:]
    is_ranks = file.name == _RANKS
    if is_ranks:
        given, name, arguments = json.loads(words[3])
        file = Path(request["folder"], given)
    elif file.suffix != ".py":
        return None
    imports = _imports(str(file), name, is_ranks, file.stat().st_mtime_ns)
    folders = [Path(request["folder"], entry) for entry in variables.get("PYTHONPATH", "").split(os.pathsep) if entry]
    if not imports or any((folder / "sitecustomize.py").exists() for folder in folders):
        return None
    named = {package for line in imports for package in _packages(ast.parse(line).body[0])}
    beside = _beside(file.parent, named | _SHARED)
    read = arguments if _beside(file.parent, named - _SHARED) else []  # files beside the program may read them
    ours = sorted({found[0] for word in map(str, arguments) if (found := _OURS.match(word))})
    many = int(variables.get("LOCAL_WORLD_SIZE", variables.get("WORLD_SIZE", "1")))
    return (
        tuple(imports),
        tuple(ours),
        bool(ours) and variables.get("RANK", "0") == "0",
        max(_MOST_GENERATORS, many),
        str(file.parent) if beside else "",
        tuple(map(str, read)),
        tuple(map(str, folders)),
        tuple(sorted((name, "" if _OWN.fullmatch(name) else value) for name, value in variables.items())),
        tuple(map(tuple, (filters, request["ignored"], request["default"]))),
    )


@functools.cache
def _imports(file: str, name: str | None, is_ranks: bool, changed: int) -> list[str]:
    """Return the imports that a file, or a file and its function ``name``, begins with, if they lead to Megatron.

    Of a program of ``run_ranks`` all: none may depend on RANK. Of another those of shared packages.
    """
    body = ast.parse(Path(file).read_bytes(), file).body
    every = [*itertools.takewhile(_is_import, body)]
    if name is not None:
        function = next(one for one in body if isinstance(one, ast.FunctionDef) and one.name == name)
        every += itertools.takewhile(_is_import, function.body)
    known = _SHARED | sys.stdlib_module_names
    first = every if is_ranks else [*itertools.takewhile(lambda one: _packages(one) <= known, every)]
    named = {package for one in first for package in _packages(one)}
    if not named & _LEADS_TO_MEGATRON and not _beside(Path(file).parent, named):
        return []
    return [ast.unparse(one) for one in first if _packages(one) - {"__future__"}]


def _beside(folder: Path, packages: Iterable[str]) -> bool:
    return any((folder / one).is_dir() or (folder / f"{one}.py").exists() for one in packages)


def _is_import(statement: ast.stmt) -> bool:
    text = isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
    return text or isinstance(statement, ast.Import | ast.ImportFrom)


def _packages(statement: ast.stmt) -> set[str]:
    """Return the packages that a statement imports from; "." for one beside the file."""
    if isinstance(statement, ast.ImportFrom):
        return {(statement.module or "").partition(".")[0] if not statement.level else "."}
    return {one.name.partition(".")[0] for one in statement.names} if isinstance(statement, ast.Import) else set()


class Waiting(NamedTuple):
    """A program that a client has requested and that no process runs yet."""

    connection: socket.socket
    request: Request
    files: list[int]
    body: bytes
    """The request as it was sent."""

    def close(self) -> None:
        """Close what the server holds of it."""
        self.connection.close()
        for number in self.files:
            os.close(number)


class Template:
    """What the server holds of a template: the socket that hands it programs; it ends when that closes."""

    def __init__(self, control: socket.socket, pid: int, within_s: float) -> None:
        self._control, self._pid, self._deadline = control, pid, time.monotonic() + within_s
        self.is_importing, self.has_failed, self._waiting = True, False, list[Waiting]()
        self.fileno = control.fileno

    def close(self) -> None:
        """Close what this process holds of it."""
        self._control.close()
        while self._waiting:
            self._waiting.pop().close()

    def take(self, waiting: Waiting) -> bool:
        """Hand over a program, now or when the imports are done; False where the template has ended."""
        if self.is_importing:
            self._waiting.append(waiting)
            return True
        return self._hand(waiting)

    def imported(self) -> list[Waiting]:
        """Hand over the programs that wait; return those that it cannot run, as its imports failed or take too long."""
        try:
            self.has_failed = not self._control.recv(1, socket.MSG_DONTWAIT)
        except OSError:
            self.has_failed = True
        waiting, self._waiting, self.is_importing = self._waiting, [], False
        if self.has_failed:
            self._control.close()
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._pid, signal.SIGKILL)
        return [one for one in waiting if self.has_failed or not self._hand(one)]

    @property
    def is_late(self) -> bool:
        """Whether the imports take too long."""
        return time.monotonic() > self._deadline

    def _hand(self, waiting: Waiting) -> bool:
        taken = self._send(waiting.body, [waiting.connection.fileno(), *waiting.files])
        if taken:
            waiting.close()
        return taken

    def retire(self) -> None:
        """Have it end with the last of its programs."""
        self._send(marshal.dumps({"words": [], "variables": {}}), [])

    def _send(self, body: bytes, files: list[int]) -> bool:
        try:
            socket.send_fds(self._control, [len(body).to_bytes(8, sys.byteorder)], files)
            self._control.sendall(body)
        except OSError:
            return False
        return True


def _argv(request: Request) -> list[str]:
    words = [word for word in request["words"] if word != "-u"]
    file, name, arguments = json.loads(words[3]) if Path(words[0]).name == _RANKS else (words[0], None, words[1:])
    return words if name else [file, *map(str, arguments)]


class Imported:
    """In a template, and in the programs that it forks: what the imports left."""

    def __init__(self, request: Request, key: tuple) -> None:
        """Do the imports; an exception where they fail or leave a thread."""
        imports, beside = key[0], key[4]
        printed = [os.memfd_create(name) for name in ("stdout", "stderr")]
        nowhere = os.open(os.devnull, os.O_RDONLY)
        for number, file in enumerate((nowhere, *printed)):
            os.dup2(file, number)
        main = types.ModuleType("__main__")
        sys.modules["__main__"], sys.argv = main, _argv(request)
        path = list(sys.path)
        if beside:
            sys.path.insert(0, beside)
        for line in imports:
            exec(line, {"__name__": "__main__", "__builtins__": builtins})
        sys.path[:] = path
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        if threading.active_count() > 1 or len([*Path("/proc/self/task").iterdir()]) > 1:
            raise RuntimeError("the imports started a thread")
        self._handlers = {
            number: signal.getsignal(number) for number in (*request["default"], signal.SIGINT, signal.SIGCHLD)
        }
        given = request["variables"]
        self._set = {name: value for name, value in os.environ.items() if given.get(name) != value}
        self._unset = set(given) - set(os.environ)
        self._printed = [os.pread(file, os.fstat(file).st_size, 0) for file in printed]
        for file in (nowhere, *printed):
            os.close(file)
        gc.collect()
        gc.freeze()

    def take_signals(self) -> None:
        """Handle signals as the imports left it."""
        for number, handler in self._handlers.items():
            signal.signal(number, handler)

    def go_on(self) -> None:
        """Have a program, which has its own files and variables, stand where its imports left it."""
        os.environ.update(self._set)
        for name in self._unset:
            os.environ.pop(name, None)
        for number, text in enumerate(self._printed, 1):
            while text:
                text = text[os.write(number, text) :]
