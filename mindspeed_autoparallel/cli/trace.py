"""Trace one transformer layer in any layout on this machine's CPU: operators, bytes, collectives, parameters.

Nothing is launched on a device: the other ranks are pretended and tensors hold no data.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

_SIZES = ("hidden", "heads", "sequence")
_OPTIONAL = ("micro_batch", "kv_heads", "ffn", "tensor", "context", "expert", "world", "num_experts", "topk")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of the command."""
    for name in _SIZES:
        parser.add_argument(f"--{name}", type=int, required=True)
    for name in _OPTIONAL:
        parser.add_argument(f"--{name.replace('_', '-')}", type=int)
    parser.add_argument("--gated", action="store_true", help="SwiGLU and RMSNorm without bias")
    parser.add_argument("--sequence-parallel", action="store_true")
    parser.add_argument("--recompute", choices=("none", "selective", "full"), default="none")
    parser.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16")
    parser.add_argument("--cache", type=Path, metavar="FOLDER", help="keep and reuse traces here")
    parser.add_argument("--json", action="store_true", help="print JSON only")


def _print(result: dict[str, Any]) -> None:
    print(f"parameters {result['parameter_count']}, saved for backward {result['saved_bytes'] / 2**20:.2f} MiB")
    for phase in ("forward", "backward"):
        entry = result[phase]
        number = sum(operator["count"] for operator in entry["operators"])
        print(f"{phase}: peak {entry['peak_bytes'] / 2**20:.2f} MiB, {number} operators")
        for call in entry["collectives"]:
            print(f"  {call['count']:4d} x {call['name']:44s} {call['size_bytes'] / 2**20:10.3f} MiB")
        products = [operator for operator in entry["operators"] if "mm" in operator["name"].split(".")[1]]
        for operator in products:
            print(f"  {operator['count']:4d} x {operator['name']:44s} {operator['shapes']}")


def run(arguments: argparse.Namespace) -> int:
    """Traces and prints."""
    from mindspeed_autoparallel.runtime.tracing.process import trace
    from mindspeed_autoparallel.runtime.tracing.request import read_layer_request

    values = {name: getattr(arguments, name) for name in (*_SIZES, *_OPTIONAL) if getattr(arguments, name) is not None}
    for name in ("gated", "sequence_parallel", "recompute", "dtype"):
        values[name] = getattr(arguments, name)
    result = trace(read_layer_request(values), arguments.cache)
    if arguments.json:
        print(json.dumps(result))
    else:
        _print(result)
    return 0
