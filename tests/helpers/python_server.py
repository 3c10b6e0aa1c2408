"""Fork Python programs from one process that has imported torch: the server behind ``forked_python.python()``.

Words: the socket's path, the client's, and names of further modules to import. A request is the command line, variables,
folder and open files of a client (``python_client.py``), which the forked process takes over. Then it runs what
``python WORDS...`` would have run. Imported beforehand are torch and what Megatron reads of it (4 of the 5 seconds that
``import megatron.core`` takes), and Megatron or this project only where the words name them: patches, devices and the
order of imports are those of a program started by hand.
The server ends all its programs, and itself, when its standard input closes.

Of these programs, those that begin with the same imports of Megatron are forked from a process that has done these
(``python_templates.py``). ``remembered_sources.py`` and ``spared_work.py`` hold what costs programs less here, and changes
nothing that they see; filelock's hook for every event of the interpreter (a module, a file, an ``id``) is not installed.
"""

import contextlib
import gc
import importlib
import marshal
import os
import select
import signal
import socket
import struct
import sys
import warnings
from pathlib import Path

from python_program import (
    Program,
    Programs,
    add_seconds,
    open_streams,
    set_up,
    take_signals,
    take_surroundings,
    worker_of,
)
from python_templates import Imported, Template, Waiting, key_of
from remembered_sources import remember_sources
from spared_work import (
    keep_libraries,
    leave_senders_running,
    list_operators_once,
    measure_briefly,
    share_gloo_devices,
    share_managers,
)

_IMPORTED = (
    *("torch", "torch._dynamo", "torch._inductor.compile_fx", "torch.distributed.run", "torch.distributed.tensor"),
    *("torch.distributed.checkpoint", "torch.distributed.fsdp", "torch.distributed._composable", "torch.export"),
    *("torch.utils.data", "torch.utils.cpp_extension", "numpy", "yaml", "wrapt", "psutil", "tqdm", "safetensors.torch"),
    *("torch.distributed._tensor.experimental", "torch.distributed.tensor.experimental"),
    *("packaging.version", "importlib.metadata", "setuptools", "unittest.mock", "absl.logging", "einops", "msgspec"),
    *("numpy.typing", "numpy.core", "sqlite3", "wave", "xml.dom.minidom", "torch._inductor.compiler_bisector"),
    # What Megatron's tokenizers import, whichever is chosen.
    *("transformers", "transformers.models.auto.tokenization_auto", "transformers.utils.chat_template_utils"),
    # What planning and the workers of xdist import.
    *("ortools.sat.python.cp_model", "ortools.linear_solver.pywraplp", "pytest"),
)
_MOST_TEMPLATES = 16
"""Each holds some 100 MiB."""
_IMPORTED_WITHIN_S = 120.0
_variables: dict[str, str] = {}
"""That imported modules have set."""


def main() -> None:
    """Serve until standard input closes."""
    path, client, *also = sys.argv[1:]
    leave_senders_running()
    del sys.path[0]  # this folder, which programs have on their path where they ask for it
    warnings.simplefilter("ignore")
    add_hook, sys.addaudithook = sys.addaudithook, lambda hook: None
    for name in _IMPORTED:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    sys.addaudithook = add_hook
    remember_sources()
    share_gloo_devices()
    list_operators_once()
    _import_also(also)
    warnings.resetwarnings()
    keep_libraries()
    share_managers()
    measure_briefly()
    listening = socket.socket(socket.AF_UNIX)
    listening.bind(path)
    listening.listen(256)
    gc.collect()
    gc.freeze()
    print("ready", flush=True)
    program = _serve(clients := _Clients(listening), Path(path).parent)
    clients.close()
    if program is not None:
        program(client)
    with contextlib.suppress(ChildProcessError):
        while True:
            os.wait()  # templates end with their sockets; who waits for this process learns what they used


def _import_also(names: list[str]) -> None:
    """Import ``names``; the variables that they set are those of every program that does not set them itself."""
    before = dict(os.environ)
    if names:
        sys.path.insert(0, str(Path(__file__).parents[2]))
    for name in names:
        importlib.import_module(name)
    _variables.update({name: value for name, value in os.environ.items() if before.get(name) != value})


class _Clients:
    """Where the server's programs come from: its socket."""

    def __init__(self, listening: socket.socket) -> None:
        self._listening = listening
        self._templates: dict[tuple, Template | None] = {}
        self._retired: list[Template] = []
        self.ends, self.imported, self.is_last = [sys.stdin.fileno()], None, False

    def fileno(self) -> int:
        return self._listening.fileno()

    def importing(self) -> list[Template]:
        """Return the templates that import."""
        return [template for template in self._templates.values() if template and template.is_importing]

    def after_import(self, template: Template) -> list[Waiting]:
        """Return the programs to fork here after ``template`` has imported, or failed to."""
        left = template.imported()
        if template.has_failed:
            self._templates = {key: None if one is template else one for key, one in self._templates.items()}
        return left

    def next(self, programs: Programs) -> list[Waiting] | Program:
        """Return the programs to fork here; in a template what is left to do there."""
        connection, _ = self._listening.accept()
        try:
            request, files, body = _request(connection)
        except (OSError, ValueError, EOFError):
            connection.close()
            return []
        waiting = Waiting(connection, request, files, body)
        key = key_of(request, files)
        if key is not None and key not in self._templates:
            here, there = socket.socketpair()
            pid = os.fork()
            if pid == 0:
                programs.close()
                self.close()
                for one in (waiting, here):
                    one.close()
                return lambda client: _be_template(request, key, there, client)
            there.close()
            self._retire_oldest()
            self._templates[key] = Template(here, pid, _IMPORTED_WITHIN_S)
        template = self._templates.pop(key) if key in self._templates else None
        if key is not None:
            self._templates[key] = template  # the last one used is the last to be retired
        return [] if template is not None and template.take(waiting) else [waiting]

    def _retire_oldest(self) -> None:
        used = [key for key, template in self._templates.items() if template and not template.is_importing]
        if len(used) >= _MOST_TEMPLATES:
            self._retired.append(self._templates.pop(used[0]))
            self._retired[-1].retire()

    def close(self) -> None:
        """Close, in a forked process, what only the server needs."""
        for one in (self._listening, *self._retired, *filter(None, self._templates.values())):
            one.close()


class _Handed:
    """Where a template's programs come from: the server."""

    def __init__(self, control: socket.socket, imported: Imported) -> None:
        self._control, self.imported, self.is_last = control, imported, False
        self.ends: list[int] = []

    def fileno(self) -> int:
        return self._control.fileno()

    def importing(self) -> list[Template]:
        """Return none: only the server has templates."""
        return []

    def next(self, programs: Programs) -> list[Waiting]:
        """Return the program to fork; none after the last one. Raises EOFError where the server has ended."""
        if self.is_last:
            raise EOFError  # nothing is written behind the last one
        try:
            request, given, body = _request(self._control)
        except OSError as error:
            raise EOFError from error
        if not request["words"]:
            self.is_last = True
            return []
        return [Waiting(socket.socket(fileno=given[0]), request, given[1:], body)]

    def close(self) -> None:
        """Close, in a forked process, what only the template needs."""
        self._control.close()


def _be_template(request: dict, key: tuple, control: socket.socket, client: str) -> None:
    """Import, and fork programs until the server ends or retires this process; then, in a program, run it."""
    try:
        take_signals(request)
        take_surroundings(request, client)
        open_streams()
        set_up([])
        imported = Imported(request, key)
        os.chdir("/")
        add_seconds(Path(client).parent, worker_of(request), sum(os.times()[:2]))
        control.sendall(b"r")
    except BaseException:
        os._exit(1)
    program = _serve(_Handed(control, imported), Path(client).parent)
    if program is None:
        os._exit(0)
    program(client)


def _serve(source: _Clients | _Handed, folder: Path) -> Program | None:
    """Return in a forked process what is left to do there; None in the server, at its end."""
    woken, wakes = os.pipe()
    for end in (woken, wakes):
        os.set_blocking(end, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.set_wakeup_fd(wakes, warn_on_full_buffer=False)
    programs = Programs((woken, wakes), folder)
    while programs.pids or not source.is_last:
        importing = source.importing()
        watched = [source, woken, *importing, *source.ends, *programs.pids]
        ready, _, _ = select.select(watched, [], [], _IMPORTED_WITHIN_S if importing else None)
        if set(source.ends) & set(ready):
            programs.kill_all()
            return None
        if woken in ready:
            os.read(woken, 4096)
            programs.reap()
        for connection in [one for one in ready if one in programs.pids]:
            programs.kill(connection)  # clients write once: readable is closed
        taken = [
            one
            for template in importing
            if template in ready or template.is_late
            for one in source.after_import(template)
        ]
        if source in ready and not taken:
            try:
                taken = source.next(programs)
            except EOFError:
                programs.kill_all()
                return None
        if not isinstance(taken, list):
            return taken
        while taken:
            connection, request, files, _ = taken.pop()
            pid = os.fork()
            if pid == 0:
                for one in (connection, programs, source, *taken):
                    one.close()
                return Program(request, files, source.imported)
            programs.add(connection, pid, request)
            for number in files:
                os.close(number)
            with contextlib.suppress(OSError):
                connection.sendall(struct.pack("i", pid))
    return None


def _request(connection: socket.socket) -> tuple[dict, list[int], bytes]:
    head, files, _, _ = socket.recv_fds(connection, 8, 250)
    if len(head) < 8:
        raise EOFError  # the client was killed before it wrote
    (size,) = struct.unpack("q", head)
    body = b""
    while len(body) < size:
        more = connection.recv(size - len(body))
        if not more:
            raise EOFError
        body += more
    request = marshal.loads(body)
    return {**request, "variables": {**_variables, **request["variables"]}}, files, body


if __name__ == "__main__":
    main()
