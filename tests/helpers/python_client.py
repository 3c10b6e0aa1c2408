"""Stand in for ``python``: hand command line and files to the server beside this file, and end as its program ends.

Started without ``site`` and with C modules only: it takes some milliseconds. Signals are passed on; where this process
is killed outright the server kills the program, whose number stands in a file beside this one, named like the number of
this process. What a forked program could not honour starts Python itself.
"""

import _signal
import _socket
import marshal
import posix
import sys

HERE = __file__.rpartition("/")[0]
PYTHON = posix.readlink(HERE + "/real")
READ_WHEN_STARTED = ("PYTHON", "LD_", "OMP_", "MKL_", "TORCHDYNAMO_", "TORCH_DEVICE_", "MALLOC_")
SERVED = {
    "PYTHON": None,  # of scripts: the interpreter to take
    "PYTHONPATH": None,
    "PYTHONWARNINGS": None,
    "PYTHONUNBUFFERED": None,
    "PYTHONDONTWRITEBYTECODE": None,
    "PYTHONPYCACHEPREFIX": None,
    "OMP_NUM_THREADS": "1",
    "TORCHDYNAMO_DISABLE": "1",
}
"""Variables that are read when Python or torch starts, and can be served; None: whatever the value."""
PASSED_ON = (_signal.SIGHUP, _signal.SIGINT, _signal.SIGQUIT, _signal.SIGTERM, _signal.SIGUSR1, _signal.SIGUSR2)


def variables():
    return {name.decode(): value.decode() for name, value in posix.environ.items()}


def is_served(words, given):
    """Whether the server can run these words with these variables."""
    for name, value in given.items():
        if name.startswith(READ_WHEN_STARTED) and SERVED.get(name, "") not in (None, value):
            return False
    at = 0
    while at < len(words) and words[at] in ("-u", "-W"):
        at += 1 if words[at] == "-u" else 2
    return at < len(words) and (words[at] in ("-m", "-c", "-") or not words[at].startswith("-"))


def start_python(words):
    posix.execv(PYTHON, [PYTHON, *words])


def main():
    words, given = sys.argv[1:], variables()
    if not is_served(words, given):
        start_python(words)
    server = _socket.socket(_socket.AF_UNIX, _socket.SOCK_STREAM)
    files = []
    for name in posix.listdir("/proc/self/fd"):
        number = int(name)
        if number != server.fileno():
            try:
                posix.fstat(number)
            except OSError:  # the listing's own
                continue
            files.append(number)
    handlers = [(number, _signal.getsignal(number)) for number in PASSED_ON]
    umask = posix.umask(0)
    posix.umask(umask)
    request = {
        "words": words,
        "variables": given,
        "folder": posix.getcwd(),
        "files": files,
        "umask": umask,
        "leads": posix.getsid(0) == posix.getpid(),
        "ignored": [int(number) for number, handler in handlers if handler == _signal.SIG_IGN],
        "default": [int(number) for number, handler in handlers if handler != _signal.SIG_IGN],
    }
    body = marshal.dumps(request)
    try:
        server.connect(HERE + "/socket")
        rights = b"".join(number.to_bytes(4, sys.byteorder) for number in files)
        server.sendmsg([len(body).to_bytes(8, sys.byteorder)], [(_socket.SOL_SOCKET, _socket.SCM_RIGHTS, rights)])
        server.sendall(body)
    except OSError:
        start_python(words)
    pid = int.from_bytes(server.recv(4), sys.byteorder, signed=True)
    note = posix.open(f"{HERE}/{posix.getpid()}", posix.O_WRONLY | posix.O_CREAT | posix.O_TRUNC, 0o600)
    posix.write(note, b"%d" % pid)
    posix.close(note)
    to = posix.killpg if request["leads"] else posix.kill

    def pass_on(number, frame):
        try:  # noqa: SIM105  # contextlib takes longer to import than all of this
            to(pid, number)
        except ProcessLookupError:
            pass

    for number in request["default"]:
        _signal.signal(number, pass_on)
    ended = server.recv(4)
    code = int.from_bytes(ended, sys.byteorder, signed=True) if ended else -9
    if not ended:
        posix.write(2, b"the server of forked programs ended without this program's status\n")
    if code < 0:
        if -code != 9:
            _signal.signal(-code, _signal.SIG_DFL)
        posix.kill(posix.getpid(), -code)
    posix._exit(code)


main()
