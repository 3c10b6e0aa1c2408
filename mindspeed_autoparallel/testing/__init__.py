"""Suites that writers of a device adapter, an encoder adapter or a host module run on theirs, with pytest.

devices   what every ``DeviceAdapter`` must do
encoders  what every ``EncoderAdapter``, and the ``HostModule`` that makes it, must do

Subclass a suite in a test file and override what it asks for::

    class TestMyAdapter(EncoderAdapterSuite):
        def make_case(self) -> EncoderCase: ...
"""

from mindspeed_autoparallel.testing.devices import DeviceAdapterSuite
from mindspeed_autoparallel.testing.encoders import EncoderAdapterSuite, EncoderCase, HostModuleSuite

__all__ = ["DeviceAdapterSuite", "EncoderAdapterSuite", "EncoderCase", "HostModuleSuite"]
