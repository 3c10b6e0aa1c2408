"""Fork Python programs from one process that has imported torch: the server behind ``forked_python.python()``.

Words: the socket's path, the client's, and names of further modules to import. A request is the command line, variables, folder and open files of a client
(``python_client.py``), which the forked process takes over. Then it runs what ``python WORDS...`` would have run.
Imported beforehand are torch and what Megatron reads of it (4 of the 5 seconds that ``import megatron.core`` takes),
and Megatron or this project only where the words name them: patches, devices and the order of imports are those of a program started by hand.
The server ends all its programs, and itself, when its standard input closes.

Three things cost programs less here, and change nothing that they see: the source of the classes that Megatron makes
flags of, which it reads and parses for every parser, is read and parsed once; filelock's hook for every event of the interpreter (a
module, a file, an ``id``) is not installed; and the gloo groups of a process share one device, as a device's thread wakes a hundred
times a second and Megatron makes dozens of groups per layout.
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
import weakref
from pathlib import Path

from python_program import Program
from remembered_sources import remember_sources

_IMPORTED = (
    *("torch", "torch._dynamo", "torch._inductor.compile_fx", "torch.distributed.run", "torch.distributed.tensor"),
    *("torch.distributed.checkpoint", "torch.distributed.fsdp", "torch.distributed._composable", "torch.export"),
    *("torch.utils.data", "torch.utils.cpp_extension", "numpy", "yaml", "wrapt", "psutil", "tqdm", "safetensors.torch"),
    *("torch.distributed._tensor.experimental", "torch.distributed.tensor.experimental"),
    *("packaging.version", "importlib.metadata", "setuptools", "unittest.mock", "absl.logging", "einops", "msgspec"),
    *("numpy.typing", "numpy.core", "sqlite3", "wave", "xml.dom.minidom", "torch._inductor.compiler_bisector"),
    # What Megatron's tokenizers import, whichever is chosen.
    *("transformers", "transformers.models.auto.tokenization_auto", "transformers.utils.chat_template_utils"),
)
_variables: dict[str, str] = {}
"""That imported modules have set."""


def main() -> None:
    """Serve until standard input closes."""
    path, client, *also = sys.argv[1:]
    del sys.path[0]  # this folder, which programs have on their path where they ask for it
    warnings.simplefilter("ignore")
    add_hook, sys.addaudithook = sys.addaudithook, lambda hook: None
    for name in _IMPORTED:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    sys.addaudithook = add_hook
    remember_sources()
    share_gloo_devices()
    _import_also(also)
    warnings.resetwarnings()
    keep_libraries()
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


def share_gloo_devices() -> None:
    """Have torch's own function for a gloo group, but for the device: that of the process."""
    from torch.distributed import distributed_c10d as c10d

    devices: dict[int, object] = {}

    def make(given: object, backend_options: object) -> object:
        options = c10d.ProcessGroupGloo._Options()
        if os.getpid() not in devices:
            devices[os.getpid()] = c10d.ProcessGroupGloo.create_default_device()
        options._devices, options._timeout = [devices[os.getpid()]], given.timeout
        options.enable_reconfigure = given.enable_reconfigure
        group = c10d.ProcessGroupGloo(given.store, given.group_rank, given.group_size, options)
        group.options.global_ranks_in_group, group.options.group_name = given.global_ranks_in_group, given.group_id
        return group

    c10d.Backend._ensure_backend_registered(c10d.Backend.GLOO)
    plugin = c10d.Backend._plugins[c10d.Backend.GLOO.upper()]
    c10d.Backend._plugins[c10d.Backend.GLOO.upper()] = plugin._replace(creator_fn=make)


def keep_libraries() -> None:
    """Leave torch's libraries of operators whole when a program ends: taking them apart costs as much as the fork."""
    for one in list(weakref.finalize._registry):  # type: ignore[attr-defined]
        found = one.peek()
        if found and found[1].__module__ == "torch.library":
            one.atexit = False


def _import_also(names: list[str]) -> None:
    """Import ``names``; the variables that they set are those of every program that does not set them itself."""
    before = dict(os.environ)
    if names:
        sys.path.insert(0, str(Path(__file__).parents[2]))
    for name in names:
        importlib.import_module(name)
    _variables.update({name: value for name, value in os.environ.items() if before.get(name) != value})


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
            return Program(request, files)
        programs.pids[connection] = (pid, request["leads"])
        for number in files:
            os.close(number)
        with contextlib.suppress(OSError):
            connection.sendall(struct.pack("i", pid))


def _request(connection: socket.socket) -> tuple[dict, list[int]]:
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
    return {**request, "variables": {**_variables, **request["variables"]}}, files


if __name__ == "__main__":
    main()
