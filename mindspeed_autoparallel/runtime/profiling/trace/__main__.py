"""The tracing process: a JSON list of requests per line of standard input, a JSON line per trace on standard output.

    python -m mindspeed_autoparallel.runtime.profiling.trace fake < requests.jsonl

``gloo`` instead of ``fake`` runs the same code on real ranks started by torchrun, to check traces.
"""

from __future__ import annotations

import json
import os
import sys

from mindspeed_autoparallel.runtime.profiling.trace.request import BlockResult, read_request

PREFIX = "TRACE "
_NUM_REASON_CHARACTERS = 600


def main() -> int:
    """Trace every request, even after a failed one; print the result of a rank of its stage."""
    from mindspeed_autoparallel.runtime.profiling.trace.running import trace
    from mindspeed_autoparallel.runtime.profiling.trace.world import World

    world = World(sys.argv[1])
    requests = (read_request(values) for line in sys.stdin for values in json.loads(line))
    for index, request in enumerate(requests):
        try:
            result: BlockResult = trace(request, world)
        except Exception as error:  # an error of Megatron in this layout: others may work
            if world.backend != "fake":
                raise
            result = {"error": f"{type(error).__name__}: {error}"[:_NUM_REASON_CHARACTERS]}
        if world.backend == "fake" or int(os.environ["RANK"]) == request.rank:
            print(PREFIX + json.dumps({"index": index, **result}), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
