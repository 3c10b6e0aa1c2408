"""Requirements of every device adapter, so that measurements have the same meaning on all devices."""

from __future__ import annotations

import itertools
import json
from typing import TYPE_CHECKING, Any

from mindspeed_autoparallel.units import MIB

if TYPE_CHECKING:
    from mindspeed_autoparallel.runtime.devices.adapter import DeviceAdapter

_BLOCK = 16 * MIB


class DeviceAdapterSuite:
    """Checks an adapter. Override ``make_device``, and run the suite on a machine with the device.

    No check depends on speed.
    """

    def make_device(self) -> DeviceAdapter:
        """Return the adapter, prepared if work on the device requires it."""
        raise NotImplementedError(f"{type(self).__name__} must override make_device")

    def allocate(self, num_bytes: int) -> Any:
        """Return an object that holds ``num_bytes`` on the device until it is deleted."""
        import torch

        return torch.ones(num_bytes, dtype=torch.uint8, device=self.make_device().name)

    def out_of_memory_error(self) -> BaseException:
        """Return the exception that this device raises when its memory is full."""
        return RuntimeError("out of memory")

    def test_name_and_backend_are_words(self) -> None:
        device = self.make_device()
        assert device.name.isidentifier(), "name is used in files and flags"
        assert device.backend.isidentifier(), "backend is passed to torch.distributed"

    def test_points_of_the_clock_are_ordered(self) -> None:
        device = self.make_device()
        points = [device.clock()]
        for _ in range(3):
            self.allocate(_BLOCK)
            points.append(device.clock())
        parts = [device.seconds_between(start, end) for start, end in itertools.pairwise(points)]
        whole = device.seconds_between(points[0], points[-1])
        assert all(isinstance(part, float) and part >= 0 for part in parts)
        assert abs(whole - sum(parts)) <= 0.05 * whole + 1e-4, "parts of a span must add up to it"

    def test_waiting_ends(self) -> None:
        device = self.make_device()
        device.synchronize()
        device.synchronize()

    def test_memory_is_followed(self) -> None:
        device = self.make_device()
        with device.tracked_memory() as memory:
            before = memory.current_bytes()
            held = self.allocate(_BLOCK)
            assert memory.current_bytes() - before >= _BLOCK, "held memory counts"
            del held
            assert memory.current_bytes() - before < _BLOCK, "freed memory does not count"
            assert memory.take_peak_bytes() - before >= _BLOCK, "the peak includes freed memory"
            assert memory.take_peak_bytes() - before < _BLOCK, "taking the peak resets it"

    def test_what_was_alive_before_a_region_counts_in_it(self) -> None:
        device = self.make_device()
        held = self.allocate(_BLOCK)
        with device.tracked_memory() as memory:
            with_block = memory.current_bytes()
        del held
        with device.tracked_memory() as memory:
            assert with_block - memory.current_bytes() >= _BLOCK

    def test_capacity_is_a_number_of_bytes(self) -> None:
        capacity = self.make_device().total_memory_bytes()
        assert isinstance(capacity, int) and capacity >= _BLOCK

    def test_running_out_of_memory_is_told_from_other_errors(self) -> None:
        device = self.make_device()
        assert device.is_out_of_memory(self.out_of_memory_error())
        for other in (RuntimeError("shapes do not match"), ValueError("out of memory"), KeyError("memory")):
            assert not device.is_out_of_memory(other), repr(other)

    def test_the_fingerprint_names_device_and_software_and_stays(self) -> None:
        device = self.make_device()
        found = device.fingerprint()
        assert found.get("device"), "measurements are stored by device"
        assert all(isinstance(key, str) and isinstance(value, str) for key, value in found.items())
        assert json.loads(json.dumps(found)) == self.make_device().fingerprint()
