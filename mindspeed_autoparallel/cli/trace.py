"""Trace your script's model, or a block of a model, in any layout on this machine's CPU: operators, bytes, collectives.

Nothing is launched on a device: process groups are fake and tensors hold no data.

  trace --script pretrain_gpt.py --tp-size 8 --sequence-parallel --world 64 -- <the script's own arguments>
  trace --hidden 8192 --heads 64 --kv-heads 8 --ffn 28672 --gated --seq-length 4096 --tp-size 8 --sequence-parallel
  trace ... --block head --vocabulary 128256
  trace ... --block stage --vocabulary 128256 --num-layers 80 --pp-size 4 --stage 0 --num-microbatches 8
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from mindspeed_autoparallel.errors import ConfigError, flag_of
from mindspeed_autoparallel.files import made_folder
from mindspeed_autoparallel.profiles.records import DIRECTIONS, BlockTrace
from mindspeed_autoparallel.runtime.profiling.trace.request import BLOCKS, BlockResult

_SIZES = ("hidden", "heads", "sequence")
_OPTIONAL = {
    "micro_batch": "samples of one microbatch (default: 1)",
    "kv_heads": "groups of grouped-query attention (default: heads)",
    "head_size": "width of one head (default: hidden / heads)",
    "ffn": "width of the MLP (default: 4 hidden)",
    "vocabulary": "padded vocabulary size; for embedding, head and stage",
    "num_experts": "number of experts; 0: a dense MLP",
    "topk": "experts per token (default: 2)",
    "expert_ffn": "width of an expert (default: ffn)",
    "shared_ffn": "width of the shared expert (default: no shared expert)",
    "tensor": "tensor-parallel size",
    "context": "context-parallel size",
    "expert": "expert-parallel size",
    "expert_tensor": "ranks that share an expert (default: --tp-size)",
    "world": "ranks of the job (default: the smallest number that fits the layout)",
    "num_layers": "layers of the whole model, for a stage",
    "pipeline": "stages",
    "virtual": "model chunks per stage",
    "stage": "the pipeline rank to trace (default: 0)",
    "num_microbatches": "microbatches of one step, for a stage",
}

_SPELT = {
    "sequence": "seq-length",
    "tensor": "tp-size",
    "context": "cp-size",
    "expert": "ep-size",
    "expert_tensor": "etp-size",
    "pipeline": "pp-size",
    "virtual": "vpp-size",
}
_OF_A_LAYOUT = ("micro_batch", "tensor", "context", "expert", "world")
_OF_A_BLOCK = tuple(name for name in (*_SIZES, *_OPTIONAL) if name not in _OF_A_LAYOUT)
_OF_EXPERTS = ("topk", "expert_ffn", "shared_ffn", "expert_tensor")
_READ_BY = {
    **dict.fromkeys(("kv_heads", "head_size", "ffn", "num_experts", *_OF_EXPERTS, "recompute"), ("layer", "stage")),
    "vocabulary": ("embedding", "head", "stage"),
    "gated": ("layer", "head", "stage"),
    **dict.fromkeys(("num_layers", "pipeline", "virtual", "stage", "num_microbatches"), ("stage",)),
}
"""The blocks whose trace depends on a size; the other sizes count in each."""


def _flag(name: str) -> str:
    """Return the flag of a size, spelt as in the other commands."""
    return flag_of(_SPELT.get(name, name))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--script", type=Path, metavar="FILE", help="trace the model that this training script builds")
    add("arguments", nargs="*", metavar="-- ARGUMENT", help="arguments of the script")
    for name in _SIZES:
        add(_flag(name), dest=name, type=int, metavar="N", help="size of the model, without --script")
    add("--block", choices=BLOCKS, default="layer", help="the part to trace; a stage runs a whole step")
    for name, meaning in _OPTIONAL.items():
        add(_flag(name), dest=name, type=int, metavar="N", help=meaning)
    add("--gated", action="store_true", help="SwiGLU and RMSNorm without bias")
    add("--sequence-parallel", action="store_true", help="split activations between matrices, too")
    add(
        "--recompute",
        default="none",
        metavar="KIND",
        help="none, selective, full, selective:MODULE,... (Megatron's names) or full:LAYERS (groups of a stage)",
    )
    add("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16")
    add("--cache", type=Path, metavar="FOLDER", help="keep traces in this folder and reuse them")
    add("--json", action="store_true", help="print JSON only")


def _print(result: BlockResult) -> None:
    print(f"parameters {result['parameter_count']}")
    if "saved_bytes" in result:
        print(f"saved for backward {result['saved_bytes'] / 2**20:.2f} MiB")
    phases = (("forward", result.get("forward")), ("backward", result.get("backward")), ("step", result.get("step")))
    for phase, entry in phases:
        if entry is None:
            continue
        number = sum(operator["count"] for operator in entry["operators"])
        print(f"{phase}: peak {entry['peak_bytes'] / 2**20:.2f} MiB, {number} operators")
        for call in entry["collectives"]:
            print(f"  {call['count']:4d} x {call['name']:44s} {call['size_bytes'] / 2**20:10.3f} MiB")
        products = [operator for operator in entry["operators"] if "mm" in operator["name"].split(".")[1]]
        for operator in products:
            print(f"  {operator['count']:4d} x {operator['name']:44s} {operator['shapes']}")


def _print_script(trace: BlockTrace) -> None:
    print(
        f"{'module':16s} {'block':8s} {'parameters':>12s} {'saved_MiB':>10s} {'forward_peak':>12s} "
        f"{'backward_peak':>13s} {'operators':>10s} {'collectives':>11s}"
    )
    for module in trace.modules:
        for name, block in module.blocks.items():
            calls = [module.calls[name].of(direction) for direction in DIRECTIONS]
            operators = sum(count for call in calls for _, count in call.operators)
            collectives = sum(item.count for call in calls for item in call.collectives)
            print(
                f"{module.name:16s} {name:8s} {block.parameters.num_parameters:12d} {block.saved_bytes / 2**20:10.2f} "
                f"{block.forward_peak_bytes / 2**20:12.2f} {block.backward_peak_bytes / 2**20:13.2f} "
                f"{operators:10.0f} {collectives:11.0f}"
            )


def _run_script(arguments: argparse.Namespace) -> int:
    from mindspeed_autoparallel.profiles import MeasuredAt
    from mindspeed_autoparallel.runtime.profiling.trace.script import ScriptRequest, trace_script

    if arguments.block != "layer" or any(getattr(arguments, name) is not None for name in _OF_A_BLOCK):
        named = [name for name in _OF_A_BLOCK if getattr(arguments, name) is not None] or ["block"]
        raise ConfigError(f"{_flag(named[0])} describes a model; with --script the script builds it.")
    point = MeasuredAt(
        tensor_size=_or_one(arguments.tensor),
        context_size=_or_one(arguments.context),
        expert_size=_or_one(arguments.expert),
        micro_batch_size=_or_one(arguments.micro_batch),
        sequence_parallel=arguments.sequence_parallel,
    )
    request = ScriptRequest(
        script=arguments.script,
        arguments=tuple(arguments.arguments),
        point=point,
        world=arguments.world or 0,
        recompute=arguments.recompute,
    )
    result = trace_script(request, _cache(arguments))
    if arguments.json:
        print(json.dumps(result.document))
    else:
        _print_script(result.blocks)
    return 0


def _cache(arguments: argparse.Namespace) -> Path | None:
    """Return the folder of traces, open for writing; ``ConfigError`` for another one, before anything is traced."""
    return None if arguments.cache is None else made_folder(arguments.cache, "--cache")


def _or_one(size: int | None) -> int:
    return 1 if size is None else size


def _refuse_unread(arguments: argparse.Namespace) -> None:
    """Raise ``ConfigError`` for a flag that changes nothing in the trace of the block."""
    for name, blocks in _READ_BY.items():
        if getattr(arguments, name) in (None, False, "none"):
            continue
        if arguments.block not in blocks:
            raise ConfigError(f"{_flag(name)} is for --block {', '.join(blocks)}, not {arguments.block}: drop it.")
        if name in _OF_EXPERTS and not arguments.num_experts:
            raise ConfigError(f"{_flag(name)} needs --num-experts, at least 1.")
    if arguments.sequence_parallel and _or_one(arguments.tensor) == 1:
        raise ConfigError("--sequence-parallel needs --tp-size, at least 2.")
    if arguments.recompute.startswith("full:") and arguments.block != "stage":
        raise ConfigError(f"--recompute {arguments.recompute} counts layers of --block stage; write --recompute full.")


def run(arguments: argparse.Namespace) -> int:
    """Trace and print the profile's path."""
    if arguments.script is not None:
        return _run_script(arguments)
    if arguments.arguments:
        raise ConfigError(f"{arguments.arguments[0]!r} is an argument for a script; give the script with --script.")
    if missing := [_flag(name) for name in _SIZES if getattr(arguments, name) is None]:
        raise ConfigError(f"missing: {', '.join(sorted(missing))}, or --script.")
    _refuse_unread(arguments)
    from mindspeed_autoparallel.runtime.profiling.trace.process import trace
    from mindspeed_autoparallel.runtime.profiling.trace.request import read_request

    values = {name: getattr(arguments, name) for name in (*_SIZES, *_OPTIONAL) if getattr(arguments, name) is not None}
    for name in ("block", "gated", "sequence_parallel", "recompute", "dtype"):
        values[name] = getattr(arguments, name)
    result = trace(read_request(values), _cache(arguments))
    if arguments.json:
        print(json.dumps(result))
    else:
        _print(result)
    return 0
