"""Launches processes on every node: the coordinator on node 0 decides, agents on the other nodes follow its orders.

``Coordinator.launch(spec)`` runs the user's script once on all devices and returns the outcome. It raises no exception
for a launch that fails, hangs or runs out of memory, because that is a data point.
"""

from mindspeed_autoparallel.runtime.launch.coordinator import Coordinator, run_agent
from mindspeed_autoparallel.runtime.launch.outcome import LaunchOutcome, LaunchSpec, LaunchStatus
from mindspeed_autoparallel.runtime.launch.rendezvous import Nodes

__all__ = ["Coordinator", "LaunchOutcome", "LaunchSpec", "LaunchStatus", "Nodes", "run_agent"]
