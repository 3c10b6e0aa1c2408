"""The store of the nodes: a client without the secret reads nothing and orders nothing."""

from __future__ import annotations

import errno
import json
import os
import random
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from mindspeed_autoparallel.errors import ConfigError, LaunchError
from mindspeed_autoparallel.runtime.launch import channel, orders, store
from mindspeed_autoparallel.runtime.launch.outcome import LaunchSpec
from mindspeed_autoparallel.runtime.launch.ports import reserved_port
from mindspeed_autoparallel.runtime.launch.store import StoreClient, StoreServer

SECRET = b"a secret that the nodes share"
OWN = ("train.py", "--lr", "0.1", "--node-rank", "1")


@pytest.fixture
def server():
    with reserved_port() as port:
        one = StoreServer("127.0.0.1", port, SECRET)
        one.port = port  # type: ignore[attr-defined]
        one.set("launch/0", "precious")
        yield one
        one.close()


def answer_to(port: int, *parts: bytes) -> bytes:
    """What a stranger reads who sends ``parts`` and then closes its end."""
    with socket.create_connection(("127.0.0.1", port), timeout=20) as client:
        read = b""
        try:
            for part in parts:
                client.sendall(part)
            client.shutdown(socket.SHUT_WR)
            while part := client.recv(65536):
                read += part
        except OSError:
            pass  # it hung up
        return read


def test_nodes_with_the_secret_share_a_table(server):
    one, other = (StoreClient("localhost", server.port, SECRET) for _ in range(2))
    one.set("node/1", '{"host": "é"}')
    assert other.get("node/1").decode() == '{"host": "é"}'
    assert server.get("node/1").decode() == '{"host": "é"}'
    assert other.check(["node/1", "launch/0"])
    assert not other.check(["node/2"])
    threads = [
        threading.Thread(target=lambda client=client: [client.add("n", 1) for _ in range(50)])
        for client in (one, other)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert server.add("n", 0) == 100


def test_a_stranger_reads_not_a_byte(server):
    random.seed(1)
    garbage = [random.randbytes(random.randrange(0, 400)) for _ in range(40)]
    torch_store = bytes([0, 0, 0, 0, 0, 0, 0, 4]) + b"size"
    for parts in ([b"GET / HTTP/1.0\r\n\r\n"], [channel.GREETING[:-1]], [torch_store], *([one] for one in garbage)):
        assert answer_to(server.port, *parts) == b""
    assert StoreClient("localhost", server.port, SECRET).get("launch/0") == b"precious"


def test_a_stranger_that_speaks_the_protocol_reads_a_nonce_only(server):
    hello = channel.GREETING + bytes(32)
    for proof in (b"", bytes(32), channel.digest(b"another secret", b"client" + bytes(64))):
        assert len(answer_to(server.port, hello, proof)) == 32
    assert answer_to(server.port, hello) != answer_to(server.port, hello)


def seconds_to_join(port: int) -> float:
    """How long a node takes that tries again as ``rendezvous.join`` does; fails after 10 s."""
    began = time.monotonic()
    while True:
        try:
            assert StoreClient("localhost", port, SECRET).get("launch/0") == b"precious"
            return time.monotonic() - began
        except OSError:
            assert time.monotonic() - began < 10
            time.sleep(0.05)


class Eavesdropper:
    """Stands between a node and the store, passes everything on and keeps what the node sent."""

    def __init__(self, port: int) -> None:
        self.sent = b""
        self._port = port
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.port = self._socket.getsockname()[1]
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        node, _ = self._socket.accept()
        store = socket.create_connection(("127.0.0.1", self._port))

        def back() -> None:
            while part := store.recv(4096):
                node.sendall(part)

        threading.Thread(target=back, daemon=True).start()
        while part := node.recv(4096):
            self.sent += part
            store.sendall(part)


def test_a_recorded_handshake_opens_nothing(server):
    between = Eavesdropper(server.port)
    StoreClient("localhost", between.port, SECRET).set("node/1", "there")
    server.set("node/1", "gone")
    assert len(answer_to(server.port, between.sent)) <= 32
    assert server.get("node/1") == b"gone"


_SERVER = """
import resource, sys
sys.path.insert(0, {here!r})
from mindspeed_autoparallel.runtime.launch.store import StoreServer
resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))
one = StoreServer("127.0.0.1", 0, {secret!r})
one.set("launch/0", "precious")
print(one._socket.getsockname()[1], flush=True)
sys.stdin.read()
"""


def test_two_thousand_replays_keep_no_node_out_and_leave_few_threads():
    """Every replay stays open, as an attacker's would; the store's process may open 256 files."""
    program = _SERVER.format(here=str(Path(__file__).parents[4]), secret=SECRET)
    with subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout
        port = int(process.stdout.readline())
        between = Eavesdropper(port)
        StoreClient("localhost", between.port, SECRET).set("node/1", "there")

        def threads() -> int:
            return len(list(Path(f"/proc/{process.pid}/task").iterdir()))

        before, most, held = threads(), 0, []
        for number in range(2000):
            one = socket.create_connection(("127.0.0.1", port))
            one.sendall(between.sent if number % 2 else between.sent[:100])
            held = [*held[-400:], one]
            most = max(most, threads())
            if number % 100 == 99 or number == 1999:
                seconds_to_join(port)
        process.kill()
    assert most - before <= 64


def test_the_store_outlives_a_time_without_free_descriptors(server, monkeypatch):
    accept, failures = socket.socket.accept, [errno.EMFILE, errno.ENFILE, errno.ECONNABORTED]

    def failing(self):
        if failures and self is server._socket:
            raise OSError(failures.pop(), "no")
        return accept(self)

    monkeypatch.setattr(socket.socket, "accept", failing)
    for _ in range(5):
        seconds_to_join(server.port)
    assert not failures


def test_a_changed_or_repeated_message_is_not_heard(server):
    client = StoreClient("localhost", server.port, SECRET)
    client._channel._sent += 1  # as if one message had been taken out of the stream
    with pytest.raises(ConnectionError):
        client.set("launch/0", "evil")
    assert server.get("launch/0") == b"precious"


def test_a_node_and_a_store_with_different_secrets_refuse_each_other(server):
    with pytest.raises(PermissionError, match="does not accept this node's secret"):
        StoreClient("localhost", server.port, b"another secret of a node")
    with socket.socket() as stranger:
        stranger.bind(("127.0.0.1", 0))
        stranger.listen()

        def answer():
            client, _ = stranger.accept()
            client.recv(4096)
            client.sendall(bytes(64))
            client.close()

        threading.Thread(target=answer, daemon=True).start()
        with pytest.raises(PermissionError, match="does not have the secret"):
            StoreClient("localhost", stranger.getsockname()[1], SECRET)


def test_silent_strangers_do_not_keep_nodes_out(server):
    silent = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(store._MOST_UNKNOWN + 50)]
    seconds_to_join(server.port)
    for one in silent:
        one.close()


def test_the_store_listens_at_the_given_address_only(server):
    assert server._socket.getsockname()[0] == "127.0.0.1"
    with pytest.raises(ConfigError, match=r"cannot listen at 203\.0\.113\.1:24001: .*--master-addr"):
        StoreServer("203.0.113.1", 24001, SECRET)


def test_the_secret_lies_in_a_private_file_while_the_run_lasts(tmp_path: Path, monkeypatch):
    monkeypatch.delenv(channel.SECRET_VARIABLE, raising=False)
    (tmp_path / "elsewhere").write_text("other people's")
    (tmp_path / channel.SECRET_FILE).symlink_to(tmp_path / "elsewhere")
    assert channel.find_secret(tmp_path) is None
    made = channel.make_secret(tmp_path)
    assert len(made) == 64
    assert channel.find_secret(tmp_path) == made != channel.make_secret(tmp_path)
    assert (tmp_path / channel.SECRET_FILE).stat().st_mode & 0o777 == 0o600
    assert (tmp_path / "elsewhere").read_text() == "other people's"
    channel.remove_secret(tmp_path)
    assert channel.find_secret(tmp_path) is None


def test_a_secret_can_be_given_by_variable_or_file(tmp_path: Path, monkeypatch):
    monkeypatch.setenv(channel.SECRET_VARIABLE, "short")
    with pytest.raises(ConfigError, match="fewer than 16"):
        channel.given_secret()
    monkeypatch.setenv(channel.SECRET_VARIABLE, "x" * 32)
    assert channel.make_secret(tmp_path) == channel.find_secret(None) == b"x" * 32
    assert list(tmp_path.iterdir()) == []
    monkeypatch.delenv(channel.SECRET_VARIABLE)
    (tmp_path / "file").write_text("y" * 32 + "\n")
    monkeypatch.setenv(channel.SECRET_FILE_VARIABLE, str(tmp_path / "file"))
    (tmp_path / "file").chmod(0o644)
    with pytest.raises(ConfigError, match="can be read by others"):
        channel.given_secret()
    (tmp_path / "file").chmod(0o600)
    assert channel.given_secret() == b"y" * 32


def order(**changes: object) -> dict[str, object]:
    spec = LaunchSpec(launch_id="measure-1", argv=("train.py", "--lr", "0.1", "--tensor-model-parallel-size", "2"))
    return {**orders.order_of(spec, 24002, ("train.py", "--lr", "0.1", "--node-rank", "0")), **changes}


def test_an_order_starts_the_agents_own_script_with_its_own_arguments():
    own = ("/elsewhere/train.py", "--lr", "0.1", "--node-rank", "1")
    spec, port = orders.read_order(json.loads(json.dumps(order())), own, {"--tensor-model-parallel-size"})
    assert spec.argv == ("/elsewhere/train.py", "--lr", "0.1", "--tensor-model-parallel-size", "2")
    assert (spec.launch_id, port) == ("measure-1", 24002)


@pytest.mark.parametrize(
    "changes",
    [
        {"words": ["evil.py"]},
        {"words": [0, "/bin/sh"]},
        {"words": [0, "--load", "x"]},
        {"words": [1]},
        {"words": [0, 99]},
        {"words": [0, -1]},
        {"words": [0, True]},
        {"words": ["-c", "import os"]},
        {"words": [0, "$(id)"]},
        {"words": []},
        {"launch_id": "../../etc/passwd"},
        {"launch_id": "a" * 101},
        {"launch_id": 7},
        {"worker_port": 0},
        {"worker_port": "22"},
        {"timeout_s": float("nan")},
        {"timeout_s": 1e300},
        {"task": "evil"},
        {"environment": {"LD_PRELOAD": "/tmp/evil.so"}},
        {"environment": {"PYTHONSTARTUP": "x"}},
    ],
)
def test_any_other_order_is_refused(changes):
    with pytest.raises(LaunchError, match="node 0 ordered"):
        orders.read_order(order(**changes), OWN, {"--tensor-model-parallel-size"})


def test_an_order_without_the_module_of_an_agent_started_with_m_is_refused():
    with pytest.raises(LaunchError, match="another script"):
        orders.read_order(order(words=[0]), ("-m", "training"), set())


def test_secrets_are_masked_before_they_reach_a_private_log(tmp_path: Path):
    from mindspeed_autoparallel.runtime.launch.children import private_log

    (tmp_path / "precious").write_text("x")
    (tmp_path / "log").symlink_to(tmp_path / "precious")
    stream, copier = private_log(tmp_path / "log", frozenset({"tok-123456", "tok-123456789"}))
    with stream:
        for part in (b"key tok-1234", b"56789 and tok-", b"123456\n\xff", b" tok-12"):
            os.write(stream.fileno(), part)
    copier.join(20)
    assert (tmp_path / "log").read_bytes() == b"key *** and ***\n\xff tok-12"
    assert (tmp_path / "log").stat().st_mode & 0o777 == 0o600
    assert (tmp_path / "precious").read_text() == "x"
