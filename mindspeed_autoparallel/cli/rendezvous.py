"""Run torchrun's rendezvous on a separate machine, so that any node of a training may be lost.

rendezvous --port 29400
"""

from __future__ import annotations

import argparse

from mindspeed_autoparallel.whole_numbers import WholeNumber


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--port",
        type=WholeNumber(least=1, most=65535),
        default=29400,
        help="port to which the nodes' torchrun connects (default 29400)",
    )
    add("--address", default="0.0.0.0", help="address of this machine to listen at (default: all)")


def run(arguments: argparse.Namespace) -> int:
    from mindspeed_autoparallel.runtime.launch.ports import serve_elastic

    serve_elastic(arguments.address, arguments.port)
    return 0
