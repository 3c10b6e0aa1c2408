"""Import once, fork the ranks of one job, and write how each of them ended: the process behind ``run_ranks``.

Words: how many ranks, the scratch folder, and as JSON the program: its file, a function's name or null, its arguments.
Rank N reads ``in``, writes ``N.out`` and ``N.err``; ``N.code`` holds its exit code, or minus the signal that ended it.
``begun`` appears when all are forked. SIGTERM ends all ranks with whatever they started.

What ranks do before their ``main()`` (a function's module, and the imports that it begins with) is done here, once: it
knows the program's words and variables and not yet RANK. A script of another form is run by every rank from its second
part on, behind its first imports.
"""

import __future__

import ast
import atexit
import contextlib
import gc
import itertools
import json
import os
import signal
import sys
import traceback
import types
from pathlib import Path

RESULT = "RESULT "
"""A rank hands a result back as a line of standard output: this word and JSON (functions do it by returning)."""


def main() -> None:
    """Fork all ranks; in each of them run the program instead."""
    num_ranks, scratch, program = int(sys.argv[1]), Path(sys.argv[2]), Program(*json.loads(sys.argv[3]))
    program.prepare()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)  # a tenth of a small training goes into looking for garbage at the default
    ranks: dict[int, int] = {}
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
    for rank in range(num_ranks):
        pid = os.fork()
        if pid == 0:
            _become(rank, scratch)
            _run(program)
            return
        ranks[pid] = rank
    alive = set(ranks)
    signal.signal(signal.SIGTERM, lambda *_: _kill(alive))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])
    (scratch / "begun").touch()
    while alive:
        pid, status = os.wait()
        alive.discard(pid)
        written = scratch / f"{ranks[pid]}.code.part"
        written.write_text(str(os.waitstatus_to_exitcode(status)))
        written.rename(scratch / f"{ranks[pid]}.code")
    _kill(set(ranks))  # what they started and left


class Program:
    """A script, or a function of a file: what is done once, and what every rank does."""

    def __init__(self, file: str, name: str | None, arguments: list[object]) -> None:
        self._file, self._name, self._arguments = file, name, arguments
        self._body = ast.parse(Path(file).read_bytes(), file).body
        postponed = any(isinstance(one, ast.ImportFrom) and one.module == "__future__" for one in self._body)
        self._flags = __future__.annotations.compiler_flag if postponed else 0
        kind = "__main__" if name is None else "rank_program"
        self._module = types.ModuleType(kind)
        self._module.__file__ = file
        sys.modules[kind] = self._module
        sys.path[0] = str(Path(file).parent)
        if name is None:
            sys.argv = [file, *map(str, arguments)]

    def prepare(self) -> None:
        """Do what is the same for all ranks."""
        if self._name is None:
            self._body, rest = _halves(self._body)
            self._execute(self._body)
            self._body = rest
            return
        self._execute(self._body)
        function = next(one for one in self._body if isinstance(one, ast.FunctionDef) and one.name == self._name)
        exec(self._compiled([*itertools.takewhile(_is_import_or_text, function.body)]), dict(vars(self._module)))

    def run(self) -> None:
        """Do one rank's part."""
        if self._name is None:
            self._execute(self._body)
        else:
            print(f"\n{RESULT}" + json.dumps(getattr(self._module, self._name)(*self._arguments)))
            _end()

    def _execute(self, statements: list[ast.stmt]) -> None:
        exec(self._compiled(statements), vars(self._module))

    def _compiled(self, statements: list[ast.stmt]) -> types.CodeType:
        return compile(ast.Module(statements, []), self._file, "exec", flags=self._flags)


def _halves(body: list[ast.stmt]) -> tuple[list[ast.stmt], list[ast.stmt]]:
    """Split a script before its last statement where that calls ``main()`` or is guarded, else behind its imports."""
    if ast.unparse(body[-1]).startswith(("main()", "if __name__ == '__main__':")):
        return body[:-1], body[-1:]
    first = [*itertools.takewhile(_is_import_or_text, body)]
    return first, body[len(first) :]


def _is_import_or_text(statement: ast.stmt) -> bool:
    text = isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
    return text or isinstance(statement, ast.Import | ast.ImportFrom)


def _kill(pids: set[int]) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)


def _become(rank: int, scratch: Path) -> None:
    """Take the rank's session, files and variables."""
    os.setsid()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])
    for number, name, flags in ((0, "in", os.O_RDONLY), (1, f"{rank}.out", _NEW), (2, f"{rank}.err", _NEW)):
        file = os.open(scratch / name, flags, 0o600)
        os.dup2(file, number)
        os.close(file)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank))


_NEW = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND


def _run(program: Program) -> None:
    try:
        program.run()
    except BaseException as error:
        if isinstance(error, SystemExit) and not error.code:
            raise
        traceback.print_exc()
        sys.stdout.flush()
        sys.stderr.flush()
        # At once: the exit handlers of a broken process group may wait for its peers forever.
        os._exit(error.code if isinstance(error, SystemExit) and isinstance(error.code, int) else 1)


def _end() -> None:
    """Leave with 0 as the interpreter would, but without C++'s destructors of static objects.

    They abort now and then ("terminate called without an active exception") where a process group is still there,
    which most functions leave behind.
    """
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
