"""A trace on one process against the same layer on real gloo ranks: bytes and collectives must be equal."""

import dataclasses
import json
import os
import socket
import subprocess
import sys
from typing import Any

import pytest

pytest.importorskip("megatron.core")

from mindspeed_autoparallel.errors import ConfigError
from mindspeed_autoparallel.runtime.tracing.process import trace
from mindspeed_autoparallel.runtime.tracing.request import LayerRequest, read_layer_request

pytestmark = [pytest.mark.distributed, pytest.mark.torch, pytest.mark.megatron]

_BASE = LayerRequest(hidden=64, heads=4, sequence=32, micro_batch=2, ffn=128, gated=True, dtype="float32")


def _real(request: LayerRequest) -> dict[str, Any]:
    """The same request on ``num_ranks`` real processes; the trace of rank 0."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    workers = []
    for rank in range(request.num_ranks):
        environment = {
            **os.environ,
            "RANK": str(rank),
            "WORLD_SIZE": str(request.num_ranks),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "OMP_NUM_THREADS": "1",
        }
        workers.append(
            subprocess.Popen(
                [sys.executable, "-m", "mindspeed_autoparallel.runtime.tracing.layer", "gloo"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                env=environment,
            )
        )
    for worker in workers:
        assert worker.stdin is not None
        worker.stdin.write(json.dumps(dataclasses.asdict(request)))
        worker.stdin.close()
        worker.stdin = None
    outputs = [worker.communicate(timeout=300) for worker in workers]
    assert [worker.returncode for worker in workers] == [0] * len(workers), outputs[0][1][-2000:]
    line = next(line for line in outputs[0][0].splitlines() if line.startswith("TRACE "))
    result: dict[str, Any] = json.loads(line[len("TRACE ") :])
    return result


@pytest.mark.parametrize(
    "request_",
    [
        pytest.param(dataclasses.replace(_BASE, tensor=2), id="tensor"),
        pytest.param(dataclasses.replace(_BASE, tensor=2, sequence_parallel=True), id="sequence parallel"),
        pytest.param(dataclasses.replace(_BASE, context=2), id="context"),
    ],
)
def test_bytes_and_collectives_of_a_trace_are_those_of_real_ranks(request_: LayerRequest) -> None:
    real, traced = _real(request_), trace(request_)
    assert traced["parameter_count"] == real["parameter_count"]
    assert traced["saved_bytes"] == real["saved_bytes"]
    for phase in ("forward", "backward"):
        for figure in ("collectives", "live_bytes"):
            assert traced[phase][figure] == real[phase][figure], (phase, figure)
        # gloo has no reduce-scatter: it reduces a copy of the whole input, which no accelerator backend allocates.
        scattered = [c["size_bytes"] for c in real[phase]["collectives"] if "reduce_scatter" in c["name"]]
        allowed = max(scattered, default=0)
        assert traced[phase]["peak_bytes"] <= real[phase]["peak_bytes"] <= traced[phase]["peak_bytes"] + allowed


def test_sizes_that_no_layer_has_are_refused_before_anything_starts() -> None:
    with pytest.raises(ConfigError, match="not divisible by heads"):
        read_layer_request({"hidden": 65, "heads": 4, "sequence": 32})
    with pytest.raises(ConfigError, match="2 x context"):
        read_layer_request({"hidden": 64, "heads": 4, "sequence": 33, "context": 2})
    with pytest.raises(ConfigError, match="unknown keys"):
        read_layer_request({"hidden": 64, "heads": 4, "sequence": 32, "colour": 1})
