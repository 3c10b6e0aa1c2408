"""Pytest suites for authors of device adapters, encoder adapters and host modules.

devices   requirements of every ``DeviceAdapter``
encoders  requirements of every ``EncoderAdapter`` and of the ``HostModule`` that creates it

Subclass a suite in a test file and override its abstract methods::

class TestMyAdapter(EncoderAdapterSuite): def make_case(self) -> EncoderCase: ...
"""

from mindspeed_autoparallel.testing.devices import DeviceAdapterSuite
from mindspeed_autoparallel.testing.encoders import EncoderAdapterSuite, EncoderCase, HostModuleSuite

__all__ = ["DeviceAdapterSuite", "EncoderAdapterSuite", "EncoderCase", "HostModuleSuite"]
