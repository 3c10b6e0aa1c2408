"""``--script``: a plan as launch lines to paste, torchrun with the host's flags or with ``--auto-parallel-plan``."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from mindspeed_autoparallel.cli import _launch
from mindspeed_autoparallel.cost.analytic.fields import integer
from mindspeed_autoparallel.errors import ConfigError, PlanError, flag_of
from mindspeed_autoparallel.files import printable, write_together

if TYPE_CHECKING:
    from mindspeed_autoparallel.spec import Plan

_SIZES = {
    "num_layers": "--num-layers",
    "hidden": "--hidden-size",
    "heads": "--num-attention-heads",
    "kv_heads": "--num-query-groups",
    "head_size": "--kv-channels",
    "ffn": "--ffn-hidden-size",
    "seq": "--seq-length",
    "num_experts": "--num-experts",
    "topk": "--moe-router-topk",
    "moe_ffn": "--moe-ffn-hidden-size",
    "shared_expert_ffn": "--moe-shared-expert-intermediate-size",
    "mtp_layers": "--mtp-num-layers",
}
"""Keys of a request's ``model``, with their flags in Megatron and in MindSpeed-LLM."""
_OTHERS = ("type", "name", "vocab", "swiglu", "tied_embeddings", "qk_norm")
_LINE = 100


def add_argument(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--script",
        type=Path,
        metavar="FILE",
        help="write the plan as a bash script: torchrun with the host's flags, or with --auto-parallel-plan",
    )
    add(
        "--megatron-release",
        metavar="RELEASE",
        help="Megatron-LM that --script is for, such as 0.12 (default: 0.15 and newer, whose flags are the same)",
    )


def check(arguments: argparse.Namespace) -> None:
    """Raise ``ConfigError`` before the search if ``--script`` cannot be written."""
    if arguments.script is None:
        if arguments.megatron_release is not None:
            raise ConfigError("--megatron-release is for --script, which writes flags of that release.")
        return
    _launch.release_of(arguments.megatron_release)
    if not arguments.script.absolute().parent.is_dir() or arguments.script.is_dir():
        raise ConfigError(f"--script {arguments.script} must be a file in a folder that exists.")
    for flag in ("fsdp2", "hetero_parallel"):
        if getattr(arguments, flag, None):
            raise ConfigError(
                f"--script is for one Megatron layout; {flag_of(flag)} trains from the files that it writes."
            )


def model_flags(shape: Mapping[str, object], host: str) -> list[str] | None:
    """Return the flags of a model with the request sizes ``shape``; ``None`` if a size has no known flag."""
    # A request's default: tied embeddings if MLPs are not gated and there are no experts.
    tied = shape.get("tied_embeddings", not shape.get("swiglu") and not shape.get("num_experts"))
    shape = {key: value for key, value in shape.items() if value not in (None, False, "", [])}
    if set(shape) - {*_SIZES, *_OTHERS} or "num_layers" not in shape or "hidden" not in shape:
        return None
    if host != _launch.MEGATRON and any(key in shape for key in ("mtp_layers", "shared_expert_ffn")):
        return None
    words = [word for key, flag in _SIZES.items() if key in shape for word in (flag, str(shape[key]))]
    words += ["--max-position-embeddings", str(shape["seq"])]
    words += ["--group-query-attention"] if "kv_heads" in shape else []
    words += [] if tied else ["--untie-embeddings-and-output-weights"]
    words += ["--swiglu"] if shape.get("swiglu") else []
    words += ["--qk-layernorm"] if shape.get("qk_norm") else []
    return words if host == _launch.MEGATRON else ["--use-mcore-models", *words]


def mtp_layers(shape: Mapping[str, object] | None) -> int:
    """Return the number of multi-token prediction layers in a model's sizes; 0 without sizes."""
    return integer(shape or {}, "mtp_layers", 0, "model", 0)


def write_script(
    plan: Plan, path: Path, shape: Mapping[str, object] | None, release: tuple[int, int] = _launch.NEWEST
) -> None:
    """Write launch lines of ``plan`` to ``path``, and the plan next to it if no flags describe it.

    ``release``: that of Megatron-LM. ``shape``: the model's sizes as request keys, or ``None`` if only the user's
    script has them.
    """
    host, mtp = _launch.host_of(plan), mtp_layers(shape)
    files: dict[Path, str] = {}
    plan_file = path.with_suffix(".plan.json")
    try:
        layout, reason = _launch.launch_flags(plan, host, mtp, release), ""
    except PlanError as error:
        layout = ["--auto-parallel-plan", plan_file.name, *_launch.switches(plan, host, release)]
        reason = str(error)
        files[plan_file] = plan.text()
    model = model_flags(shape, host) if shape is not None else None
    left = _launch.without_flags(plan, host, release)
    write_together({**files, path: _text(plan, layout, model, reason, left)})


def _text(plan: Plan, layout: list[str], model: list[str] | None, reason: str, left: Sequence[str]) -> str:
    cluster, host = plan.cluster, _launch.host_of(plan)
    lines = [
        "#!/usr/bin/env bash",
        f"# {plan.layout.label()} for {printable(plan.model.name)} on {cluster.num_nodes} x {cluster.devices_per_node} "
        f"{printable(plan.profile.device)}: {plan.mean_us / 1000:.1f} ms a step predicted.",
        f"# Run it on every node in {host}'s folder: NODE_RANK=0 MASTER_ADDR=first-node bash FILE <further arguments>",
        *_needs(model),
        *([f"# Priced with {', '.join(left)}, for which no flag of {host} is known here."] if left else []),
    ]
    if reason:
        lines += [
            f"# No flags describe this plan: {printable(reason)}",
            "# The training script needs `import mindspeed_autoparallel` above its first import of megatron.",
        ]
    first = "localhost" if cluster.num_nodes == 1 else ""
    address = f'"${{MASTER_ADDR:-{first}}}"' if first else '"${MASTER_ADDR:?the address of the first node}"'
    rank = '"${NODE_RANK:-0}"' if cluster.num_nodes == 1 else '"${NODE_RANK:?0 to ' + f'{cluster.num_nodes - 1}}}"'
    lines += ["set -euo pipefail", "export CUDA_DEVICE_MAX_CONNECTIONS=1"]
    if reason:
        lines += ['FOLDER=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)']
        layout = [layout[0], '"$FOLDER"/' + shlex.quote(layout[1]), *map(shlex.quote, layout[2:])]
    else:
        layout = [shlex.quote(word) for word in layout]
    lines += [
        "DISTRIBUTED=(",
        f"    --nnodes {cluster.num_nodes} --nproc_per_node {cluster.devices_per_node} --node_rank {rank}",
        f'    --master_addr {address} --master_port "${{MASTER_PORT:-6000}}"',
        ")",
        *(_array("MODEL", [shlex.quote(word) for word in model]) if model is not None else []),
        *_array("LAYOUT", layout),
    ]
    own = '"${MODEL[@]}" ' if model is not None else ""
    script = "pretrain_vlm.py" if host == _launch.MINDSPEED_MM else "pretrain_gpt.py"
    lines += [f'torchrun "${{DISTRIBUTED[@]}}" "${{SCRIPT:-{script}}}" {own}"${{LAYOUT[@]}}" "$@"', ""]
    return "\n".join(lines)


def _needs(model: list[str] | None) -> list[str]:
    if model is None:
        return ["# Further arguments: the model's sizes, data, tokenizer, learning rate and length of the training."]
    return [
        "# Further arguments: data, tokenizer (with the vocabulary), learning rate and length of the training, and",
        "# position embedding, normalization, biases, dropout.",
    ]


def _array(name: str, words: list[str]) -> list[str]:
    """Return a bash array of quoted ``words``, with a few flags per line."""
    lines, line = [f"{name}=("], ""
    for word in words:
        if line and word.startswith("--") and len(line) + len(word) > _LINE:
            lines.append(f"    {line}")
            line = ""
        line = f"{line} {word}".strip()
    return [*lines, *([f"    {line}"] if line else []), ")"]
