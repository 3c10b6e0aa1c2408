"""Checks of the launch script: whether its sizes fit one another, and whether the search can start from it."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from pathlib import Path

from mindspeed_autoparallel.errors import ConfigError, flag_of
from mindspeed_autoparallel.hosts.opening import host_of_script
from mindspeed_autoparallel.hosts.script import Script
from mindspeed_autoparallel.runtime.doctor.finding import Finding, advice, fine, problem, unknown
from mindspeed_autoparallel.runtime.doctor.node import Node
from mindspeed_autoparallel.runtime.flags.switches import SWITCHES, Switch
from mindspeed_autoparallel.runtime.megatron.unsearched import SHARDED

_OWN_SPLITS = (
    *("--pipeline-model-parallel-layout", "--decoder-first-pipeline-num-layers", "--decoder-last-pipeline-num-layers"),
    *("--account-for-embedding-in-pipeline-split", "--account-for-loss-in-pipeline-split", "--hybrid-layer-pattern"),
    *("--num-layer-list", "--noop-layers", "--heterogeneous-layers-config-path"),
)
"""Flags under which stages need not hold equally many layers."""
_SHARDED = tuple(flag_of(name) for name in SHARDED)
_FSDP2_PROGRAM = "train_fsdp2.py"
"""MindSpeed-LLM's trainer without Megatron; its sizes are ``--parallel.fsdp_size`` and relatives."""
_FIRST_MEGATRON = re.compile(r"^\s*(import|from)\s+(megatron|mindspeed)\b(?!_autoparallel)", re.MULTILINE)
_SIZES = ("--tensor-model-parallel-size", "--pipeline-model-parallel-size", "--context-parallel-size")


def check_world_size(node: Node) -> Iterable[Finding]:
    """Check that TP x PP x CP divides the number of processes, and DP x MBS the global batch."""
    script = node.script
    if all(script.given(size) is None for size in _SIZES):
        return
    sizes = [script.number(size) for size in _SIZES]
    world = num_processes(script)
    if None in (*sizes, world):
        more = f" ({', '.join(script.unread)})" if script.unread else ""
        yield unknown(
            "sizes", f"the script's parallel sizes or processes cannot be read without running it{more}: not checked"
        )
        return
    if not world:
        yield unknown("sizes", "the script does not set its number of processes: its parallel sizes are not checked")
        return
    tensor, pipeline, context = (size or 1 for size in sizes)
    model = tensor * pipeline * context
    what = f"TP {tensor} x PP {pipeline} x CP {context} = {model} on {world} processes"
    if world % model:
        yield problem("sizes", what, "the processes cannot be divided evenly", "choose sizes whose product divides")
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
        yield fine("sizes", f"{what}, DP {data}")


def num_processes(script: Script) -> int | None:
    """Count the processes of all nodes; 0 if the script does not set them, ``None`` if they cannot be read."""
    if script.given("--worker-num") is not None:  # msrun's, of all nodes together
        return script.number("--worker-num")
    num_nodes, per_node = script.number("--nnodes"), script.number("--nproc-per-node", 0)
    return None if num_nodes is None or per_node is None else num_nodes * per_node


def check_model_sizes(node: Node) -> Iterable[Finding]:
    """Check that heads, columns, experts and layers divide as Megatron requires, unless a model.json has them."""
    script = node.script
    if script.given("--mm-model") is not None or all(script.given(size) is None for size in _SIZES):
        return
    for divisor, flag, why in (
        ("--tensor-model-parallel-size", "--num-attention-heads", "every tensor rank computes whole heads"),
        ("--tensor-model-parallel-size", "--ffn-hidden-size", "every tensor rank holds equally many columns"),
        ("--expert-model-parallel-size", "--num-experts", "every expert rank holds equally many experts"),
        ("--num-attention-heads", "--hidden-size", "heads are equally wide"),
        ("--pipeline-model-parallel-size", "--num-layers", "every stage holds equally many layers"),
    ):
        by, count = script.number(divisor), script.number(flag, 0)
        if by is None or not count or (divisor == "--num-attention-heads" and script.given("--kv-channels")):
            continue
        if flag == "--num-layers" and any(script.given(own) is not None for own in _OWN_SPLITS):
            continue
        if by > 0 and count % by:
            yield problem(
                "sizes",
                f"{flag} {count} is not a multiple of {divisor} {by}",
                f"Megatron refuses it: {why}",
                f"take a divisor of {count}, or another {flag}",
            )
    if script.given("--sequence-parallel") is not None and script.number("--tensor-model-parallel-size") == 1:
        yield advice("sizes", "--sequence-parallel with TP 1", "Megatron switches it off", "leave it out")


def check_ring_mask(node: Node) -> Iterable[Finding]:
    """Find ring attention under a general mask: MindSpeed-LLM gives one tensor, and MindSpeed reads only lists."""
    script = node.script
    ring = script.given("--context-parallel-algo") in (None, "megatron_cp_algo")
    general = script.given("--attention-mask-type") == "general" and script.given("--reset-attention-mask") is None
    if ring and general and (script.number("--context-parallel-size") or 1) > 1:
        yield advice(
            "sizes",
            "--attention-mask-type general with ring attention",
            "MindSpeed-LLM's ring drops the mask there: every token sees all later ones, and losses differ",
            "leave --attention-mask-type out (causal), or take --context-parallel-algo ulysses_cp_algo",
        )


def check_encoder_gradients(node: Node) -> Iterable[Finding]:
    """Find sequence parallelism in a training of MindSpeed-MM's models with image encoders."""
    script, tensor = node.script, node.script.number("--tensor-model-parallel-size") or 1
    is_model = script.given("--mm-model") is not None and Path(script.program or "").name == "pretrain_vlm.py"
    if is_model and tensor > 1 and script.given("--sequence-parallel") is not None:
        yield advice(
            "sizes",
            f"--sequence-parallel with TP {tensor} for an image encoder",
            f"MindSpeed-MM sums its gradients over the tensor ranks: they are {tensor} times those of one process",
            "leave it out",
        )


def check_import(node: Node) -> Iterable[Finding]:
    """Check that the program imports this package before Megatron, if the script gives flags of it."""
    script = node.script
    given = sorted(switch.flag for switch in _switches(script))
    if _is_fsdp2(script):
        return
    places = [Path(script.program), Path(script.path).parent / script.program] if script.program else []
    # A name that no file can have (too long, a NUL) does not exist; Path raises for it.
    program = next((place for place in places if os.path.isfile(place)), None)  # noqa: PTH113
    if not given or program is None:
        return
    text = program.read_text(encoding="utf-8", errors="replace")
    ours, first = text.find("import mindspeed_autoparallel"), _FIRST_MEGATRON.search(text)
    if ours < 0 or (first is not None and first.start() < ours):
        what = "does not import mindspeed_autoparallel" if ours < 0 else "imports megatron first"
        yield problem(
            "import",
            f"{program} {what}",
            f"{', '.join(given)} is unknown to Megatron",
            "put `import mindspeed_autoparallel` above its first import of megatron or mindspeed",
        )


def check_search_launcher(node: Node) -> Iterable[Finding]:
    """Check that no feature that starts its own processes is started under torchrun."""
    if node.script.launcher != "torchrun":
        return
    for switch in (one.flag for one in _switches(node.script) if one.is_own_launcher):
        yield problem(
            "launcher",
            f"{switch} under torchrun",
            "it starts its processes itself, once per node, and refuses torchrun",
            "start the script with python on every node, with --nnodes, --nproc-per-node, --node-rank, --master-addr",
        )


def check_fsdp2_trainer(node: Node) -> Iterable[Finding]:
    """Check a script that starts MindSpeed-LLM's FSDP2 trainer, which takes no flag of this package."""
    script = node.script
    if not _is_fsdp2(script):
        return
    given = sorted(switch.flag for switch in _switches(script))
    if given:
        why = "It works through Megatron, which this trainer does not import: the run is refused."
        yield problem("fsdp2", f"{given[0]} for MindSpeed-LLM's FSDP2 trainer", why, "leave it out")
    shard, world = script.number("--parallel.fsdp_size", 0), num_processes(script)
    what = f"MindSpeed-LLM's FSDP2 trainer: fsdp_size {shard or 'of its file'}, {world or 'unknown'} processes"
    if shard and world and world % shard:
        yield problem("fsdp2", what, "the processes cannot be divided evenly", f"--parallel.fsdp_size {world}")
    else:
        yield fine("fsdp2", what)


def check_sharded_parameters(node: Node) -> Iterable[Finding]:
    """Check a script that shards parameters through Megatron: which command plans it, or why none does."""
    script = node.script
    flag = next((flag for flag in _SHARDED if script.given(flag) is not None), None)
    if flag is None:
        return
    for switch in sorted(one.flag for one in _switches(script) if one.is_for_whole_parameters):
        why = "It prices whole parameters on every replica: the run is refused."
        yield problem("fsdp2", f"{switch} with {flag}", why, "leave it out")
    if not script.path:
        return
    try:
        host_of_script(script)
    except ConfigError as error:
        yield advice("fsdp2", f"{flag} shards the parameters, and no command plans this script", str(error))
    else:
        command = f"mindspeed-autoparallel plan --fsdp2 {script.path}"
        yield fine("fsdp2", f"{flag} shards the parameters; {command} plans the script")


def _switches(script: Script) -> list[Switch]:
    """Return the flags of the script that start a feature of this package and cannot be the host's own."""
    return [one for one in SWITCHES if script.given(one.flag) is not None and not one.may_be_hosts]


def _is_fsdp2(script: Script) -> bool:
    return script.program.rsplit("/", 1)[-1] == _FSDP2_PROGRAM
