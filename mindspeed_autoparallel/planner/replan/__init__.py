"""Planning again after nodes were lost or added: the best plan for the new cluster, and the cost of the move."""

from mindspeed_autoparallel.planner.replan.choose import Move, MoveRates, Option, Replanned, Window, best_plan, replan
from mindspeed_autoparallel.planner.replan.sources import cluster_after_loss, cluster_of_nodes, costs_of

__all__ = [
    "Move",
    "MoveRates",
    "Option",
    "Replanned",
    "Window",
    "best_plan",
    "cluster_after_loss",
    "cluster_of_nodes",
    "costs_of",
    "replan",
]
