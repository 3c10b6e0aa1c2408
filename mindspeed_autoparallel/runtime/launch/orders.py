"""Orders of node 0 to the other nodes: start their own script, with flags of a closed list, for a described task.

An order holds no command: the interpreter and the script are those that the agent itself was started with. Words of the
agent's own command line are given by index; the others are flags that the feature may set, and plain values.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Collection, Sequence
from difflib import SequenceMatcher
from typing import Any

from mindspeed_autoparallel.errors import ConfigError, LaunchError
from mindspeed_autoparallel.files import shown
from mindspeed_autoparallel.profiles.records import record_of
from mindspeed_autoparallel.runtime.launch.outcome import LaunchOutcome, LaunchSpec

LAUNCH_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,99}")
"""Pattern of a launch id, which names files: no path that leaves their folder."""
_VALUE = re.compile(r"[A-Za-z0-9_.,:|*()\[\]+-]{0,400}")
"""Pattern of values: numbers, choices and pipeline layouts; never a path."""
_VARIABLE = re.compile(
    r"OOTB_OPTIMIZER_[A-Z_]{1,60}|CUDA_DEVICE_MAX_CONNECTIONS|NVTE_CPU_OFFLOAD_V1|MINDSPEED_AUTOPARALLEL_DEVICE"
)
_MOST_S = 7 * 24 * 3600.0


def own_command() -> tuple[str, ...]:
    """Return this process's script and arguments; for a module under ``python -m``: ``-m``, its name and arguments.

    Some scripts replace ``sys.argv`` with the content of a file that an argument names (MindSpeed-MM's YAML
    launchers). A second start needs the original arguments.
    """
    spec = getattr(sys.modules.get("__main__"), "__spec__", None)
    if spec is not None and spec.name:
        name = spec.name.removesuffix(".__main__")
        return ("-m", name, *sys.argv[1:])
    started = [place for place, word in enumerate(sys.orig_argv) if word == sys.argv[0]]
    return tuple(sys.orig_argv[started[0] :] if started else sys.argv)


def order_of(spec: LaunchSpec, worker_port: int, own: Sequence[str]) -> dict[str, object]:
    """Return ``spec`` as JSON for the other nodes; words of ``own``, node 0's command line, become indices into it."""
    words: list[int | str] = []
    for tag, begin, end, other_begin, other_end in SequenceMatcher(None, own, spec.argv, autojunk=False).get_opcodes():
        words += range(begin, end) if tag == "equal" else spec.argv[other_begin:other_end]
    return {
        "launch_id": spec.launch_id,
        "words": words,
        "environment": spec.environment,
        "task": spec.task,
        "timeout_s": spec.timeout_s,
        "worker_port": worker_port,
    }


def read_order(order: Any, own: Sequence[str], flags: Collection[str]) -> tuple[LaunchSpec, int]:
    """Return the launch of ``order`` for an agent that was started as ``own``, and the workers' port.

    ``flags``: those that the feature may set in addition to the agent's own. ``LaunchError`` for anything else.
    """
    if not isinstance(order, dict):
        raise LaunchError(f"node 0 ordered {shown(order)}, which is not a launch.")
    words, task, environment = order.get("words"), order.get("task"), order.get("environment")
    port, timeout_s, launch_id = order.get("worker_port"), order.get("timeout_s"), order.get("launch_id")
    if not isinstance(launch_id, str) or not LAUNCH_ID.fullmatch(launch_id):
        raise LaunchError(f"node 0 ordered a launch called {shown(launch_id)}.")
    if type(port) is not int or not 0 < port < 65536:
        raise LaunchError(f"node 0 ordered a launch at port {shown(port)}.")
    if type(timeout_s) not in (int, float) or not 0 < float(str(timeout_s)) <= _MOST_S:
        raise LaunchError(f"node 0 ordered a launch of {shown(timeout_s)} s.")
    if not isinstance(task, dict) or not isinstance(words, list):
        raise LaunchError("node 0 ordered a launch without a task.")
    argv = tuple(_word(word, own, flags) for word in words)
    if not argv or argv[0] != own[0] or (argv[0] == "-m" and argv[1:2] != tuple(own[1:2])):
        raise LaunchError(f"node 0 ordered another script than this node's, {shown(own[0])}.")
    return (
        LaunchSpec(
            launch_id=launch_id,
            argv=argv,
            environment=_environment(environment),
            task=task,
            timeout_s=float(str(timeout_s)),
        ),
        port,
    )


def read_outcome(value: Any, node: int) -> LaunchOutcome:
    """Return the outcome of a launch that node ``node`` reports; ``LaunchError`` if it is malformed."""
    try:
        return record_of(value, "outcome", LaunchOutcome)
    except ConfigError as error:
        raise LaunchError(f"node {node} reports {shown(value)}, which is not an outcome of a launch.") from error


def _word(word: Any, own: Sequence[str], flags: Collection[str]) -> str:
    if type(word) is int and 0 <= word < len(own):
        return own[word]
    if isinstance(word, str) and (word in flags or (_VALUE.fullmatch(word) and not word.startswith("--"))):
        return word
    raise LaunchError(
        f"node 0 ordered the word {shown(word)}, which is neither in this node's command nor an allowed flag or value."
    )


def _environment(values: Any) -> dict[str, str]:
    if not isinstance(values, dict) or not all(
        isinstance(name, str) and _VARIABLE.fullmatch(name) and isinstance(value, str) for name, value in values.items()
    ):
        raise LaunchError(f"node 0 ordered the environment {shown(values)}.")
    return dict(values)
