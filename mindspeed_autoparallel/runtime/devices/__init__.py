"""Devices: one protocol, an adapter for each of npu, cuda and cpu, and the choice between them.

``MINDSPEED_AUTOPARALLEL_DEVICE=npu|cuda|cpu`` overrides the choice.
"""
