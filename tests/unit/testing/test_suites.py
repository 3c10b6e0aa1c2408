"""The suites pass on adapters that are right and fail on adapters that are wrong, each in the one way it looks for."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from mindspeed_autoparallel.runtime.devices.accelerator import CudaAdapter  # noqa: E402
from mindspeed_autoparallel.runtime.devices.cpu.adapter import CpuAdapter  # noqa: E402
from mindspeed_autoparallel.runtime.hetero.adapters.llava import LlavaAdapter  # noqa: E402
from mindspeed_autoparallel.runtime.hetero.adapters.protocol import LocalItem  # noqa: E402
from mindspeed_autoparallel.testing import DeviceAdapterSuite, EncoderAdapterSuite, EncoderCase, HostModuleSuite  # noqa: E402

pytestmark = pytest.mark.torch


class TestCpuAdapter(DeviceAdapterSuite):
    def make_device(self) -> CpuAdapter:
        return CpuAdapter()

    def out_of_memory_error(self) -> BaseException:
        return MemoryError()


@pytest.mark.gpu
# Not is_available(): the CPU device answers for a GPU once another test file has imported Megatron.
@pytest.mark.skipif(
    not torch.backends.cuda.is_built() or torch._C._cuda_getDeviceCount() == 0, reason="needs a GPU that is there"
)
class TestCudaAdapter(DeviceAdapterSuite):
    def make_device(self) -> CudaAdapter:
        return CudaAdapter()

    def out_of_memory_error(self) -> BaseException:
        with pytest.raises(RuntimeError) as raised:
            torch.empty(2**50, dtype=torch.uint8, device="cuda")
        return raised.value


class Chunks(torch.nn.Module):
    """Mean over pairs of rows of one item, then a layer: items must not meet."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.layer = torch.nn.Linear(6, 4)
        self.config = SimpleNamespace(tensor_model_parallel_size=1, params_dtype=torch.float32, num_layers=1)

    def forward(self, rows: Any, sizes: list[int]) -> Any:
        pairs = [part.reshape(-1, 2, 6).mean(dim=1) for part in rows.split(sizes)]
        centred = [part - 0.1 * part.mean(dim=0) for part in pairs]
        return self.layer(torch.cat(centred))


class PairAdapter:
    input_shape, input_dtype, output_shape, output_dtype, meta_size = (6,), torch.float32, (4,), torch.float32, 1

    def items(self, batch: Any) -> list[LocalItem]:
        return [LocalItem(n, len(part), len(part) // 2, 1.0, (n,)) for n, part in enumerate(batch) if len(part)]

    def rows(self, batch: Any) -> Any:
        return torch.cat(list(batch))

    def encode(self, module: Any, rows: Any, items: Any) -> Any:
        return module(rows, [item.input_rows for item in items])

    def dummy(self) -> Any:
        return torch.zeros(2, 6), [LocalItem(0, 2, 1, 1.0, (0,))]

    def embeddings(self, rows: Any) -> Any:
        return rows


class PairHost:
    def build(self, arguments: Any) -> Chunks:
        return Chunks()

    def adapter(self, module: Any, arguments: Any) -> PairAdapter:
        return PairAdapter()


def batches() -> list[list[Any]]:
    draw = torch.Generator().manual_seed(0)
    sizes = [(4, 2), (2, 0, 6), (0,)]
    return [[torch.randn(size, 6, generator=draw) for size in row] for row in sizes]


class TestPairHost(HostModuleSuite):
    def make_host(self) -> Any:
        return PairHost(), SimpleNamespace(), batches()

    def call_host(self, case: EncoderCase, batch: Any) -> Any:
        return case.module(torch.cat(list(batch)), [len(part) for part in batch if len(part)])


class TestLlavaAdapter(EncoderAdapterSuite):
    @pytest.fixture(autouse=True)
    def on_cpu(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(torch.Tensor, "cuda", lambda self, *args, **kwargs: self)

    def make_case(self) -> EncoderCase:
        torch.manual_seed(0)
        vision = torch.nn.Sequential(
            torch.nn.Flatten(), torch.nn.Linear(3 * 4 * 4, 5 * 8), torch.nn.Unflatten(1, (5, 8))
        )
        shape = SimpleNamespace(img_h=4, img_w=4, seq_length=5, visual_hidden_size=8)
        images = [torch.randn(count, 3, 4, 4) for count in (2, 3)]
        batches = [{"image": image, "tokens": torch.tensor([[7, -200, 7]] * len(image))} for image in images]
        return EncoderCase(module=vision, adapter=LlavaAdapter(shape, torch.float32, -200), batches=batches)

    def call_host(self, case: EncoderCase, batch: Any) -> Any:
        return case.module(batch["image"])


class Bad(TestPairHost):
    """The suite on an adapter with one fault."""

    __test__ = False

    def __init__(self, **faults: Any) -> None:
        self.faults = faults

    def make_case(self) -> EncoderCase:
        case = super().make_case()
        for name, fault in self.faults.items():
            setattr(case.adapter, name, fault)
        return case


RIGHT = PairAdapter()
FAULTS = {
    "test_items_are_described_in_the_order_of_samples": {"items": lambda batch: RIGHT.items(batch)[::-1]},
    "test_rows_are_those_of_the_items": {"rows": lambda batch: RIGHT.rows(batch)[1:]},
    "test_outputs_are_as_described": {"encode": lambda module, rows, items: RIGHT.encode(module, rows, items)[:, :3]},
    # Normalizes over whatever happens to be encoded together.
    "test_items_of_several_batches_can_be_encoded_together": {
        "encode": lambda module, rows, items: RIGHT.encode(module, rows - rows.mean(dim=0), items)
    },
    "test_items_can_be_encoded_in_another_order": {
        "encode": lambda module, rows, items: RIGHT.encode(module, rows, sorted(items, key=lambda item: item.meta))
    },
    "test_the_host_gets_what_its_own_call_returns": {"embeddings": lambda rows: rows.flip(0)},
    "test_gradients_are_those_of_the_hosts_own_call": {"embeddings": lambda rows: rows + (rows - rows.detach())},
    "test_the_stand_in_is_a_legal_input_that_changes_nothing": {
        "dummy": lambda: (torch.zeros(3, 6), [LocalItem(0, 2, 1, 1.0, (0,))])
    },
    "test_the_adapter_has_all_that_is_asked_of_one": {"dummy": None},
}


@pytest.mark.parametrize("check", FAULTS)
def test_a_faulty_encoder_adapter_is_found(check: str) -> None:
    getattr(Bad(), check)()
    with pytest.raises((AssertionError, RuntimeError)):
        getattr(Bad(**FAULTS[check]), check)()


class Forgetful(CpuAdapter):
    """Faults of device adapters, by the check that finds them."""

    @contextlib.contextmanager
    def tracked_memory(self) -> Any:
        with super().tracked_memory() as real:
            yield SimpleNamespace(current_bytes=real.current_bytes, take_peak_bytes=real.current_bytes)

    def seconds_between(self, start: Any, end: Any) -> float:
        return float(start - end)

    def is_out_of_memory(self, error: BaseException) -> bool:
        return "memory" in str(error) or isinstance(error, MemoryError)

    def fingerprint(self) -> dict[str, str]:
        return {"torch": "2"}


@pytest.mark.parametrize(
    "check",
    [
        "test_points_of_the_clock_are_ordered",
        "test_memory_is_followed",
        "test_running_out_of_memory_is_told_from_other_errors",
        "test_the_fingerprint_names_device_and_software_and_stays",
    ],
)
def test_a_faulty_device_adapter_is_found(check: str) -> None:
    suite = TestCpuAdapter()
    suite.make_device = Forgetful  # type: ignore[method-assign, assignment]
    with pytest.raises(AssertionError):
        getattr(suite, check)()
