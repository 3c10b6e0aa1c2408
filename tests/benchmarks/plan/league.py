"""Layouts that experts wrote by hand beside ours, under the same analytic costs and within the memory theirs take.

python tests/benchmarks/plan/league.py [processor seconds a model] [model] > table

Costs are this package's formulas for an H100 (no measurement): layers of every kind, embedding, loss and multi-token
prediction are units of their own. Nothing is recomputed; messages travel while stages compute. Every layout of ours is
given to Megatron's own validator.
"""

from __future__ import annotations

import itertools
import sys
import time
from dataclasses import dataclass, field
from typing import Any

from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout

from mindspeed_autoparallel.cost.analytic.activations import layer_activation_bytes
from mindspeed_autoparallel.cost.analytic.kernels import linear_us, memory_pass_us
from mindspeed_autoparallel.cost.analytic.layer_time import LayerTime, head_time, layer_time
from mindspeed_autoparallel.cost.analytic.model_shape import LayerKind as AnalyticKind
from mindspeed_autoparallel.cost.analytic.parameters import layer_parameters, padded_vocabulary
from mindspeed_autoparallel.cost.analytic.placement import unfold_layout
from mindspeed_autoparallel.cost.analytic.reading import read_workload
from mindspeed_autoparallel.cost.analytic.step_time import boundary_send_us
from mindspeed_autoparallel.cost.analytic.workload import Workload
from mindspeed_autoparallel.cost.catalogue import Device, Efficiency, find_device
from mindspeed_autoparallel.cost.collectives import Fabric
from mindspeed_autoparallel.planner.split import LayerKind, Segment, SplitProblem, solve, stage_memory
from mindspeed_autoparallel.planner.split.model import cut_model
from mindspeed_autoparallel.planner.split.model.problem import fullest_moments
from mindspeed_autoparallel.planner.split.model.solution import Placement, stage_times, time_of
from mindspeed_autoparallel.schedule import make_program
from mindspeed_autoparallel.units import MIB

DEEPSEEK = {
    "num_layers": 61, "hidden": 7168, "heads": 128, "ffn": 18432, "num_experts": 256, "topk": 8, "moe_ffn": 2048,
    "shared_expert_ffn": 2048, "num_dense_layers": 3, "vocab": 129280, "seq": 4096, "mtp_layers": 1, "swiglu": True,
    "mla": {"q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64,
            "v_head_dim": 128},
}  # fmt: skip
KIMI = {**DEEPSEEK, "heads": 64, "num_experts": 384, "num_dense_layers": 1, "vocab": 163840, "mtp_layers": 0}
LLAMA = {"num_layers": 80, "hidden": 8192, "heads": 64, "kv_heads": 8, "ffn": 28672, "vocab": 128256, "seq": 4096,
         "swiglu": True}  # fmt: skip
LLAMA_405B = {**LLAMA, "num_layers": 126, "hidden": 16384, "heads": 128, "ffn": 53248, "seq": 8192}
QWEN = {"num_layers": 94, "hidden": 4096, "heads": 64, "kv_heads": 4, "head_size": 128, "ffn": 12288, "num_experts": 128,
        "topk": 8, "moe_ffn": 1536, "vocab": 151936, "seq": 4096, "swiglu": True}  # fmt: skip
# Two symbols a layer: three of gated delta nets, then one of attention, each with experts.
NEXT = {"layer_pattern": ("GE" * 3 + "*E") * 12, "hidden": 2048, "heads": 16, "kv_heads": 2, "head_size": 256,
        "num_experts": 512, "topk": 10, "moe_ffn": 512, "shared_expert_ffn": 512, "vocab": 151936, "seq": 4096,
        "mtp_layers": 1, "swiglu": True, "linear_attention": {"num_key_heads": 16, "num_value_heads": 32}}  # fmt: skip
# Its indexer has 32 heads and runs in one of four layers: priced as 8 heads in each.
GLM = {**DEEPSEEK, "num_layers": 78, "hidden": 6144, "heads": 64, "ffn": 12288, "vocab": 154880,
       "mla": {"q_lora_rank": 2048, "kv_lora_rank": 512, "qk_nope_head_dim": 192, "qk_rope_head_dim": 64,
               "v_head_dim": 256}, "dsa": {"heads": 8, "head_dim": 128, "topk": 2048}}  # fmt: skip
GLM_TOGETHER = (1, 1) + (4,) * 19
"""Layers that share an index: they stay on one virtual stage."""


@dataclass(frozen=True)
class Entry:
    """One layout that experts published."""

    name: str
    model: dict[str, Any]
    layout: str
    pipeline: int
    virtual: int
    microbatches: int
    num_devices: int
    sizes: dict[str, int] = field(default_factory=dict)
    micro_batch: int = 1
    group: int = 0
    """Megatron's microbatch_group_size_per_vp_stage; 0: the pipeline size."""
    together: tuple[int, ...] = ()
    """Decoder layers of each unit that stays whole; empty: one."""

    @property
    def num_layers(self) -> int:
        """Return decoder layers."""
        return int(self.model.get("num_layers") or len(self.model["layer_pattern"]) // 2)


LEAGUE = (
    Entry("DeepSeek-V3", DEEPSEEK, "Et*4|(t*4|)*14tmL", 4, 4, 64, 256, {"ep": 64}),
    Entry("DeepSeek-V3", DEEPSEEK, "Et*16|(t*16|)*2t*13mL", 4, 1, 64, 256, {"ep": 64}),
    Entry("DeepSeek-V3", DEEPSEEK, "Et*8|(t*8|)*6t*5mL", 8, 1, 64, 512, {"ep": 64}),
    Entry("DeepSeek-V3", DEEPSEEK, "Et*4|(t*4|)*14tmL", 16, 1, 64, 1024, {"ep": 64}),
    Entry("DeepSeek-V3", DEEPSEEK, "Et*4|(t*4|)*14tmL", 8, 2, 64, 512, {"ep": 64}),
    Entry("DeepSeek-V3", DEEPSEEK, "Et*3|(t*2|)*29m|L", 16, 2, 64, 1024, {"ep": 64}),
    Entry("Kimi-K2", KIMI, "Et|(tt|)*30L", 16, 2, 128, 1024, {"tp": 8, "ep": 64}),
    Entry("Llama 3 70B", LLAMA, "Et*2|(t*2|)*34,t*3|(t*2|)*3,tL", 8, 5, 128, 64, {"tp": 4}),
    Entry("Llama 3.1 405B", LLAMA_405B, "Et|(tt|)*62tL", 8, 8, 64, 512, {"tp": 8, "cp": 2}),
    Entry("Llama 3.1 405B", LLAMA_405B, "Et*7|(t*8|)*14t*7L", 8, 2, 64, 512, {"tp": 8, "cp": 2}),
    Entry("Qwen3 235B-A22B", QWEN, "Et*5|(t*6|)*14t*5L", 16, 1, 64, 512, {"tp": 4, "cp": 2, "ep": 8}),
    Entry("Qwen3-Next 80B-A3B", NEXT, "Et*4|(t*7|)*5t*8|tmL", 2, 4, 8, 64, {"ep": 32}, micro_batch=4),
    Entry(
        "GLM-5.2",
        GLM,
        "Et|t||" + "|".join(["tttt|" * 4] * 4) + "|tttt|tttt|ttttmL",
        13,
        2,
        32,
        416,
        {"ep": 32},
        group=16,
        together=GLM_TOGETHER,
    ),
    Entry("GLM-5.2", GLM, "Et*6|t*4|(t*8|)*6(t*4|)*4t*4mL", 13, 1, 32, 208, {"ep": 16}, together=GLM_TOGETHER),
)


def units_of(entry: Entry) -> tuple[list[tuple[str, int, LayerTime, float, float]], float]:
    """Return (name, number, time, static bytes, bytes kept of a microbatch) in the order of the model, and a message's
    microseconds."""
    layout = unfold_layout(entry.layout.replace(",", ""))
    parallel = {
        "pp": entry.pipeline,
        "vpp": entry.virtual,
        # A pattern has two symbols a layer.
        "pipeline_layout": layout.replace("t", "tt") if "layer_pattern" in entry.model else entry.layout,
        **({"microbatch_group_size": entry.group} if entry.group else {}),
        **entry.sizes,
    }
    replicas = entry.num_devices // entry.pipeline // entry.sizes.get("tp", 1)
    work = read_workload(
        {
            "model": entry.model,
            "hw": {"gpu": "H100", "num_gpus": entry.num_devices},
            "parallel": {**parallel, "sp": entry.sizes.get("tp", 1) > 1},
            "train": {
                "gbs": entry.microbatches * entry.micro_batch * replicas // entry.sizes.get("cp", 1),
                "mbs": entry.micro_batch,
            },
        }
    )
    device = find_device(work.gpu)
    efficiency = device.efficiency(work.stack)
    fabric = Fabric.of(device, efficiency, work.devices_per_node, work.inter_node_gbit_per_s)
    state = 6 + 12 / replicas
    hidden_bytes = work.tokens * work.model.hidden * work.element_bytes / (entry.sizes.get("tp", 1))
    table = padded_vocabulary(work) * work.model.hidden / work.tensor_size
    look_up = memory_pass_us(device, efficiency, 2 * hidden_bytes)
    units = [("E", 1, LayerTime(forward_us=look_up, backward_us=2 * look_up), table * state, 0.0)]
    priced = [_layer(work, device, efficiency, fabric, kinds, state, replicas) for kinds in _layers(work)]
    together = entry.together or (1,) * len(priced)
    bounds = list(itertools.accumulate(together, initial=0))
    rows = [_sum(priced[start:end]) for start, end in itertools.pairwise(bounds)]
    for (one, static, kept, number), run in itertools.groupby(rows):
        units.append(("t" * number, len(list(run)), one, static, kept))
    head = head_time(work, device, efficiency)
    logits = work.tokens * padded_vocabulary(work) / work.tensor_size * work.element_bytes
    heads = 1
    if work.model.mtp_layers:
        layer, static, kept, _ = priced[-1]
        joined = linear_us(device, efficiency, work.tokens, 2 * work.model.hidden, work.model.hidden / work.tensor_size)
        time_of_one = LayerTime(
            forward_us=layer.forward_us + joined.forward_us, backward_us=layer.backward_us + joined.backward_us
        )
        # Megatron computes the logits and the loss of further tokens where the loss is.
        heads = 2
        units.append(("m", 1, time_of_one, static + (table + 2 * work.model.hidden**2) * state, kept))
    ends = LayerTime(forward_us=heads * head.forward_us, backward_us=heads * head.backward_us)
    units.append(("L", 1, ends, table * state, heads * logits + 2 * hidden_bytes))
    return units, boundary_send_us(work, fabric)


Priced = tuple[LayerTime, float, float, int]
"""Time, static bytes, bytes kept of a microbatch, number of layers."""


def _layers(work: Workload) -> list[tuple[AnalyticKind, ...]]:
    """Return the kinds that make up each decoder layer: mixer and MLP are two where a pattern says them."""
    kinds = work.model.layers
    if "none" not in {kinds[0].mixer, kinds[0].mlp}:
        return [(kind,) for kind in kinds]
    return list(zip(kinds[::2], kinds[1::2], strict=True))


def _layer(
    work: Workload,
    device: Device,
    efficiency: Efficiency,
    fabric: Fabric,
    kinds: tuple[AnalyticKind, ...],
    state: float,
    replicas: int,
) -> Priced:
    rows = []
    for kind in kinds:
        parameters, one = layer_parameters(work, kind), layer_time(work, device, efficiency, fabric, kind, False)
        static = parameters.shared * state + parameters.expert * (6 + 12 * work.expert_size / replicas)
        rows.append((one, static, layer_activation_bytes(work, kind, False), 0))
    return (*_sum(rows)[:3], 1)


def _sum(layers: list[Priced]) -> Priced:
    times, static, kept, number = zip(*layers, strict=True)
    forward, backward = sum(one.forward_us for one in times), sum(one.backward_us for one in times)
    return LayerTime(forward_us=forward, backward_us=backward), sum(static), sum(kept), sum(number)


def problem_of(entry: Entry, limit_mib: int = 2**30) -> SplitProblem:
    """Return the split of an entry's units."""
    units, send_us = units_of(entry)
    stages, virtual = entry.pipeline, entry.pipeline * entry.virtual
    schedule = "interleaved" if entry.virtual > 1 else "1f1b"
    moments = fullest_moments(make_program(schedule, stages, entry.microbatches, entry.virtual, entry.group))
    segments = []
    for index, (name, number, one, static, kept) in enumerate(units):
        held, saved = round(static / MIB), round(kept / MIB)
        memory = [held] * virtual if entry.virtual > 1 else [held + saved * moments[v][0][0] for v in range(virtual)]
        segments.append(
            Segment(
                name=f"{name}{index}",
                num_layers=number,
                forward=round(one.forward_us),
                backward=round(one.backward_us),
                kinds=(LayerKind(name="none", memory=tuple(memory), saved=saved if entry.virtual > 1 else 0),),
                predecessors=(index - 1,) if index else (),
            )
        )
    return SplitProblem(
        segments=tuple(segments),
        num_stages=stages,
        num_chunks=entry.virtual,
        num_microbatches=entry.microbatches,
        schedule=schedule,
        memory_limit=(limit_mib,) * stages,
        link=(round(send_us),) * (virtual - 1),
        sends="eager",
        in_flight=moments if entry.virtual > 1 else (),
        microbatch_group_size=entry.group,
        allow_empty_stages="||" in entry.layout,
    )


def letters_of(segment: Segment) -> str:
    """Return what a unit of the segment is in Megatron's string."""
    return segment.name.rstrip("0123456789")


def placement_of(problem: SplitProblem, layout: str) -> Placement:
    """Return a layout string as rows."""
    parts = unfold_layout(layout.replace(",", "")).split("|")
    left = [[letters_of(segment), segment.num_layers] for segment in problem.segments]
    rows = [[0] * problem.num_virtual for _ in left]
    at = 0
    for v, part in enumerate(parts):
        while part:
            while not left[at][1]:
                at += 1
            letters, _ = left[at]
            assert part.startswith(letters), (layout, part, left[at])
            part = part.removeprefix(letters)
            left[at][1] -= 1
            rows[at][v] += 1
    return tuple((tuple(row),) for row in rows)


def string_of(problem: SplitProblem, placement: Placement) -> str:
    """Return rows as a layout string, equal parts folded."""
    parts = []
    for v in range(problem.num_virtual):
        text = "".join(letters_of(s) * rows[0][v] for s, rows in zip(problem.segments, placement, strict=True))
        layers = text.count("t")
        parts.append(text.replace("t" * layers, f"t*{layers}") if layers > 1 else text)
    return "|".join(parts)


def bubble_of(problem: SplitProblem, placement: Placement, step: float) -> float:
    """Return the share of the step in which the ranks do not compute, on average."""
    forward, backward = stage_times(problem, placement)
    return 1 - problem.num_microbatches * (sum(forward) + sum(backward)) / problem.num_stages / step


def main() -> None:
    """Print a table, and our layouts below it."""
    seconds = float(sys.argv[1]) if len(sys.argv) > 1 else 20.0
    only = sys.argv[2] if len(sys.argv) > 2 else ""
    time.monotonic = time.process_time
    cut_model.CLOCK = 1
    print(
        "| model | PP x VPP | M | by hand, ms | peak GiB | bubble | ours, ms | peak GiB | bubble | bound, ms | saves |"
    )
    print("| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |")
    layouts = []
    for entry in LEAGUE:
        if only not in entry.name:
            continue
        problem = problem_of(entry)
        hand = placement_of(problem, entry.layout)
        hand_step, hand_peak = time_of(problem, hand), max(stage_memory(problem, hand))
        problem = problem_of(entry, hand_peak)
        found = solve(problem, time_limit_s=seconds)
        ours, peak = string_of(problem, found.placement), max(found.stage_memory)
        model = PipelineParallelLayerLayout(ours, entry.pipeline)
        model.validate_layer_layout(entry.num_layers, entry.model.get("mtp_layers") or None)
        print(
            f"| {entry.name} | {entry.pipeline} x {entry.virtual} | {entry.microbatches} | {hand_step / 1e3:.1f} | "
            f"{hand_peak / 1024:.1f} | {bubble_of(problem, hand, hand_step):.1%} | {found.step_time / 1e3:.1f} | "
            f"{peak / 1024:.1f} | {bubble_of(problem, found.placement, found.step_time):.1%} | "
            f"{found.lower_bound / 1e3:.1f} | {1 - found.step_time / hand_step:.2%} |",
            flush=True,
        )
        layouts.append(f"{entry.name} PP{entry.pipeline} VPP{entry.virtual}: by hand {entry.layout}\n    ours {ours}")
        print(layouts[-1], file=sys.stderr, flush=True)
    print("\n" + "\n".join(layouts))


if __name__ == "__main__":
    main()
