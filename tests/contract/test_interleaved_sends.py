"""What the interleaved schedule of a release does with its sends is found out from the release itself."""

import pytest
from ranks import run_ranks

pytestmark = pytest.mark.megatron

PROGRAM = """
import argparse, json
import mindspeed_autoparallel
from mindspeed_autoparallel.runtime.megatron.sends import interleaved_sends
from megatron.core import package_info
found = [
    interleaved_sends(argparse.Namespace(overlap_p2p_comm=overlap, overlap_p2p_comm_warmup_flush=flush))
    for overlap, flush in ((True, False), (True, True), (False, False))
]
print("\\nRESULT " + json.dumps([package_info.MINOR, found]))
"""


def test_sends_are_those_of_the_release(megatron_release):
    [output] = run_ranks(1, PROGRAM, python_path=megatron_release)
    minor, found = output.result
    expected = {12: ["overlapped", "flushed", "blocking"], 16: ["overlapped", "flushed", "blocking"]}
    assert found == expected.get(minor, ["freed", "flushed-freed", "blocking"])
