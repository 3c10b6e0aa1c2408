"""Reserved ports: refused to other processes, and still usable."""

import socket

import pytest

from mindspeed_autoparallel.errors import ConfigError
from mindspeed_autoparallel.runtime.launch.ports import check_port_is_free, reserved_port


def listener_on(port, reuse):
    one = socket.socket()
    one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, reuse)
    one.bind(("", port))
    one.listen()
    return one


def test_a_reserved_port_is_refused_to_others_and_open_to_its_owner():
    with reserved_port() as port, reserved_port() as another:
        assert port != another
        with pytest.raises(OSError, match="in use"):
            listener_on(port, reuse=False)
        listener_on(port, reuse=True).close()


def test_a_store_of_torch_serves_on_a_reserved_port():
    distributed = pytest.importorskip("torch.distributed")
    for libuv in (True, False):
        with reserved_port() as port:
            store = distributed.TCPStore("127.0.0.1", port, 1, True, use_libuv=libuv)
            store.set("key", "value")
            assert store.get("key") == b"value"


def test_a_master_port_in_use_is_an_error_before_anything_starts():
    with reserved_port() as port:
        check_port_is_free(port)
        with listener_on(port, reuse=True), pytest.raises(ConfigError, match=f"--master-port {port} cannot be used"):
            check_port_is_free(port)


@pytest.mark.parametrize("port", [0, 65536, 99999])
def test_a_number_that_is_no_port_is_refused_with_those_that_are(port):
    with pytest.raises(ConfigError, match=f"--master-port {port} is not a port: choose one from 1024 to 65535"):
        check_port_is_free(port)
