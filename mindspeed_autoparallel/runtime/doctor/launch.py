"""The launch script: do its sizes fit one another, and does the search find what it needs?"""

from __future__ import annotations

from collections.abc import Iterable

from mindspeed_autoparallel.runtime.doctor.finding import Finding, fine, problem, unknown
from mindspeed_autoparallel.runtime.doctor.node import Node

_SIZES = ("--tensor-model-parallel-size", "--pipeline-model-parallel-size", "--context-parallel-size")


def check_world_size(node: Node) -> Iterable[Finding]:
    """Check that TP x PP x CP divides the number of processes; the global batch divides over the rest."""
    script = node.script
    if not any(size in script.flags for size in _SIZES):
        return
    sizes = [script.number(size) for size in _SIZES]
    num_nodes, per_node = script.number("--nnodes"), script.number("--nproc-per-node", 0)
    if None in (*sizes, num_nodes, per_node):
        yield unknown("sizes", "the script computes its parallel sizes in a way that cannot be read without running it")
        return
    if not per_node:
        return
    tensor, pipeline, context = (size or 1 for size in sizes)
    world, model = (num_nodes or 1) * per_node, tensor * pipeline * context
    said = f"TP {tensor} x PP {pipeline} x CP {context} = {model} on {world} processes"
    if world % model:
        yield problem("sizes", said, "the processes cannot be shared out equally", "choose sizes whose product divides")
        return
    data = world // model
    batch, micro = script.number("--global-batch-size", 0), script.number("--micro-batch-size")
    if batch and micro and batch % (data * micro):
        yield problem(
            "batch",
            f"global batch {batch}, DP {data} x micro batch {micro}",
            "it does not divide",
            f"--global-batch-size {-(-batch // (data * micro)) * data * micro}",
        )
    else:
        yield fine("sizes", f"{said}, DP {data}")


def check_search_launcher(node: Node) -> Iterable[Finding]:
    """Check that the search starts its own processes."""
    if "--auto-parallel-mm" in node.script.flags and node.script.launcher == "torchrun":
        yield problem(
            "launcher",
            "--auto-parallel-mm under torchrun",
            "the search starts and restarts measuring processes itself, once per node",
            "start the script with python on every node, with --nnodes, --nproc-per-node, --node-rank, --master-addr",
        )
