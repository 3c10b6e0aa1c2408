"""Flags that MindSpeed or MindSpeed-MM have and some Megatron releases lack: name, kind, and whether they matter here.

They are accepted if the host has not registered them, and listed once as having no effect.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Collection, Sequence
from dataclasses import dataclass

SWITCH, VALUE = "switch", "value"


@dataclass(frozen=True)
class ForeignFlag:
    """``kind``: a switch, or a flag with one value. ``honoured``: the reference training implements it."""

    name: str
    kind: str = SWITCH
    honoured: bool = False

    @property
    def destination(self) -> str:
        return self.name.lstrip("-").replace("-", "_")


_SWITCHES = (
    "--use-mcore-models",
    "--use-fused-rmsnorm",
    "--use-fused-swiglu",
    "--use-fused-rotary-pos-emb",
    "--use-flash-attn",
    "--reuse-fp32-param",
    "--enable-one-logger",
    "--use-ascend-mc2",
    "--use-ascend-coc",
    "--recompute-in-advance",
    "--recompute-in-bubble",
    "--recompute-activation-function",
    "--recompute-norm",
    "--adaptive-recompute-enable",
    "--swap-attention",
    "--swap-optimizer",
    "--use-pipe-experts",
    "--use-fusion-attn-v2",
    "--use-nanopipe",
    "--overlap-p2p-communication",
    "--optimize-send-recv-comm",
    "--optimize-vpp-send-recv-comm",
    "--use-cp-send-recv-overlap",
    "--use-multiparameter-pipeline-model-parallel",
    "--automated-pipeline",
    "--tp-2d",
    "--noop-layers-off",
    "--use-fused-ema-adamw",
    "--virtual-optimizer-on",
    "--smart-swap",
    "--enable-zero3",
    "--no-shuffle",
    "--dist-train",
    "--log-tps",
    "--lora-enable",
    "--use-deter-comp",
    "--encoder-dp-balance",
    "--recompute-skip-core-attention",
    "--jit-compile",
    "--disable-gloo-group",
    "--use-tflops",
    "--use-variable-vision",
    "--enable-dummy-optimizer",
    "--use-repeat-kv",
    "--use-legacy-models",
)
_VALUES = (
    "--ampipe-degree",
    "--pipe-experts-multi-stream",
    "--recompute-activation-function-num-layers",
    "--recompute-norm-num-layers",
    "--sparse-mode",
    "--pre-tockens",
    "--next-tockens",
    "--shape-order",
    "--context-parallel-algo",
    "--ulysses-degree-in-cp",
    "--attention-mask-type",
    "--cp-attention-mask-type",
    "--hccl-group-buffer",
    "--hccl-slice-size",
    "--nproc-per-node-of-encoder",
    "--model-id",
    "--optimizer-selection",
    "--noop-layers",
    "--fused-ema-decay",
    "--swap-modules",
    "--virtual-optimizer",
    "--seq-length-of-encoder",
    "--mm-custom-precision",
    "--npu-deterministic-level",
)

FOREIGN_FLAGS: tuple[ForeignFlag, ...] = (
    *(ForeignFlag(name) for name in _SWITCHES),
    *(ForeignFlag(name, VALUE) for name in _VALUES),
    # Read by the data loader: microbatches are padded to their longest text instead of --seq-length.
    ForeignFlag("--variable-seq-lengths", SWITCH, honoured=True),
)


def add_foreign_flags(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Register those that ``parser`` lacks; return ``parser``."""
    taken = set(parser._option_string_actions)
    section = parser.add_argument_group(title="flags of other hosts, accepted here")
    for flag in FOREIGN_FLAGS:
        if flag.name in taken:
            continue
        # They have separate destinations: a host's validation may reset an attribute of the plain name.
        destination = f"foreign_{flag.destination}"
        if flag.kind == SWITCH:
            section.add_argument(flag.name, dest=destination, action="store_true", help=argparse.SUPPRESS)
        else:
            section.add_argument(flag.name, dest=destination, default=None, help=argparse.SUPPRESS)
    return parser


def given(arguments: argparse.Namespace) -> list[ForeignFlag]:
    """Return the foreign flags on the command line that only ``add_foreign_flags`` registered."""
    return [flag for flag in FOREIGN_FLAGS if getattr(arguments, f"foreign_{flag.destination}", None)]


def report(flags: Sequence[ForeignFlag], *, rank: int, silent: Collection[str] = ()) -> list[str]:
    """Print the flags without effect, once, on rank 0; return their names."""
    names = [flag.name for flag in flags if not flag.honoured and flag.name not in silent]
    if names and rank == 0:
        print(f"flags without effect on this host: {', '.join(names)}", file=sys.stderr, flush=True)
    return names
