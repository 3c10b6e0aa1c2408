"""Live bytes are those of memory that exists."""

import pytest

torch = pytest.importorskip("torch")

from mindspeed_autoparallel.runtime.devices.cpu.storages import TrackedStorages  # noqa: E402

pytestmark = pytest.mark.torch


class Sharded(torch.Tensor):
    """Claims to be large and holds a small tensor, as a DTensor does."""

    @staticmethod
    def __new__(cls, local):
        return torch.Tensor._make_wrapper_subclass(cls, (1000,), dtype=local.dtype)

    def __init__(self, local):
        self._local_tensor = local

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        raise NotImplementedError


def test_a_sharded_tensor_counts_by_its_local_one():
    alive = Sharded(torch.zeros(10))
    with TrackedStorages() as live:
        before = live.current_bytes()
        own = Sharded(torch.zeros(20))
        live._add(own)
        assert live.current_bytes() - before == 20 * 4
        del own
        assert live.current_bytes() == before
    assert alive._local_tensor.numel() == 10
