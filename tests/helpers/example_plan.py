"""A realistic plan: three modules on PP 8, recompute of two kinds, every outcome; its times come from the simulator."""

from __future__ import annotations

from dataclasses import replace

from mindspeed_autoparallel.schedule import StepTimes, make_program, simulate
from mindspeed_autoparallel.spec.layout import Cluster, Layout
from mindspeed_autoparallel.spec.model import Model, Module
from mindspeed_autoparallel.spec.plan import Plan
from mindspeed_autoparallel.spec.plan_records import (
    Alternative,
    Baseline,
    ProfileRecord,
    RankMemory,
    Relaxation,
    SearchRecord,
    StagePlan,
    StepTime,
    Verdict,
)

GIB = 1024**3
LINK_US = 350.0
FORWARD_US = {"image_encoder": 2900.0, "audio_encoder": 1500.0, "text_decoder": 6100.0}
MODEL = Model(
    name="Qwen2-VL-72B + audio",
    sequence_length=4096,
    vocab_size=152064,
    num_parameters=73_900_000_000,
    modules=(
        Module(name="image_encoder", result_key="vit", num_layers=32, hidden_size=1280, tokens_per_sample=6144),
        Module(name="audio_encoder", result_key="audio", num_layers=12, hidden_size=1280, frozen=True),
        Module(name="text_decoder", result_key="llm", num_layers=80, hidden_size=8192, predecessors=("image_encoder",)),
    ),
)
LAYERS = {
    "image_encoder": (26, 6, 0, 0, 0, 0, 0, 0),
    "audio_encoder": (0, 12, 0, 0, 0, 0, 0, 0),
    "text_decoder": (0, 5, 13, 13, 13, 13, 13, 10),
}
RECOMPUTE = {
    "image_encoder": ({"full": 9}, {"full": 2}, {}, {}, {}, {}, {}, {}),
    "text_decoder": (
        {},
        {"full": 2, "selective": 3},
        {"full": 5},
        {"full": 4},
        {"full": 1, "selective": 6},
        {},
        {},
        {},
    ),
}


def _step_us(stages: list[StagePlan], layout: Layout, num_microbatches: int) -> tuple[float, float]:
    """Pipeline time and bubble of the stages on 350 us links."""
    program = make_program(layout.schedule, layout.pipeline_size, num_microbatches, layout.virtual_size)
    times = StepTimes(
        forward=[stage.forward_us for stage in stages],
        backward=[stage.backward_us for stage in stages],
        per_message=LINK_US,
    )
    step = simulate(program, times, rendezvous=True, with_timeline=True)
    return float(step.step_time), 1 - sum(step.busy) / (len(step.busy) * step.step_time)


def _stage(
    index: int, layers: dict[str, int], first: dict[str, int], recompute: dict[str, dict[str, int]], size: int
) -> StagePlan:
    forward = sum(FORWARD_US[name] * count for name, count in layers.items())
    # A frozen encoder without trained layers before it has no backward.
    backward = sum(2 * FORWARD_US[name] * count for name, count in layers.items() if name != "audio_encoder")
    for name, kinds in recompute.items():
        backward += FORWARD_US[name] * (kinds.get("full", 0) + 0.2 * kinds.get("selective", 0))
    if index == size - 1:
        forward, backward = forward + 5300.0, backward + 10700.0
    return StagePlan(
        stage=index,
        pipeline_rank=index,
        chunk=0,
        layers=layers,
        first_layer=first,
        recompute=recompute,
        forward_us=forward,
        backward_us=backward,
    )


def _memory(stage: StagePlan, layout: Layout) -> RankMemory:
    text, image = stage.layers["text_decoder"], stage.layers["image_encoder"]
    held = layout.pipeline_size - stage.pipeline_rank
    parameters = int((text * 0.86 + image * 0.02) / layout.tensor_size * 4 * GIB * 0.47)
    kept = sum(stage.layers.values()) - sum(sum(kinds.values()) for kinds in stage.recompute.values())
    terms = {
        "parameters": parameters,
        "gradients": 2 * parameters,
        "optimizer": 6 * parameters // layout.data_size,
        "activations": int(held * kept * 0.163 * GIB),
        "recompute inputs": int(held * 0.011 * GIB * (text + image)),
        "logits and loss": int(4.6 * GIB) if stage.pipeline_rank == layout.pipeline_size - 1 else 0,
        "communication buffers": int(1.5 * GIB),
        "runtime": int(2.1 * GIB),
    }
    return RankMemory(
        pipeline_rank=stage.pipeline_rank,
        peak_bytes=sum(terms.values()),
        limit_bytes=38 * GIB,
        terms=terms,
        peak_point="loss"
        if terms["logits and loss"]
        else f"backward of text_decoder layer {stage.first_layer.get('text_decoder', 0)}",
        runtime_overhead_bytes=terms["runtime"],
    )


def _verdicts(best: Layout, step_us: float) -> tuple[Verdict, ...]:
    rows = [Verdict(layout=best, outcome="solved", reason="the plan", step_us=step_us, lower_bound_us=step_us)]
    for pipeline in (1, 2, 4, 8, 16, 32):
        for tensor in (1, 2, 4, 8, 16):
            for micro in (1, 2, 4):
                data, rest = divmod(128, pipeline * tensor)
                layout = Layout(
                    pipeline_size=pipeline, tensor_size=tensor, data_size=max(1, data), micro_batch_size=micro
                )
                if layout == replace(best, sequence_parallel=False):
                    continue
                bound = step_us * (0.6 + 0.05 * tensor + 0.01 * pipeline + 0.04 * micro)
                if rest or not data:
                    rows.append(
                        Verdict(
                            layout=layout,
                            outcome="illegal",
                            reason=f"PP {pipeline} x TP {tensor} needs {pipeline * tensor} devices; there are 128.",
                        )
                    )
                elif tensor == 16:
                    rows.append(
                        Verdict(layout=layout, outcome="unmeasured", reason="the profile has no TP 16 of text_decoder.")
                    )
                elif pipeline * tensor < 16:
                    rows.append(
                        Verdict(
                            layout=layout,
                            outcome="memory",
                            reason=f"stage 0 needs {1500 / pipeline / tensor:.1f} GiB of 38.0 GiB even with full recompute.",
                        )
                    )
                elif bound > step_us:
                    rows.append(
                        Verdict(
                            layout=layout,
                            outcome="bounded",
                            reason="perfect balance alone takes longer than the plan.",
                            lower_bound_us=bound,
                        )
                    )
                elif micro == 4:
                    rows.append(
                        Verdict(layout=layout, outcome="unsolved", reason="60 s were over.", lower_bound_us=bound)
                    )
                else:
                    rows.append(
                        Verdict(
                            layout=layout,
                            outcome="solved",
                            reason="slower",
                            lower_bound_us=bound * 1.1,
                            step_us=step_us * 1.04,
                        )
                    )
    return tuple(rows)


def example_plan(**changes: object) -> Plan:
    """Qwen2-VL-72B with an audio encoder on 8 x 16 devices; ``changes`` replace fields."""
    layout = Layout(pipeline_size=8, tensor_size=4, data_size=4, micro_batch_size=1, sequence_parallel=True)
    stages, first = [], dict.fromkeys(LAYERS, 0)
    for index in range(8):
        layers = {name: row[index] for name, row in LAYERS.items()}
        recompute = {name: row[index] for name, row in RECOMPUTE.items() if row[index]}
        starts = {name: first[name] for name, count in layers.items() if count}
        stages.append(_stage(index, layers, starts, recompute, 8))
        first = {name: first[name] + count for name, count in layers.items()}
    pipeline_us, bubble = _step_us(stages, layout, 32)
    step = StepTime(
        total_us=pipeline_us + 91_000 + 38_000,
        pipeline_us=pipeline_us,
        data_parallel_us=91_000,
        optimizer_us=38_000,
        bubble_fraction=bubble,
        p50_us=(pipeline_us + 129_000) * 1.01,
        p95_us=(pipeline_us + 129_000) * 1.07,
    )
    total = step.total_us
    recomputed = {name: tuple(sum(kinds.values()) for kinds in row) for name, row in RECOMPUTE.items()}
    plan = Plan(
        model=MODEL,
        cluster=Cluster(num_nodes=8, devices_per_node=16, memory_limit_bytes=38 * GIB),
        layout=layout,
        global_batch_size=128,
        num_microbatches=32,
        stages=tuple(stages),
        memory=tuple(_memory(stage, layout) for stage in stages),
        step=step,
        throughput_tokens_per_s_per_device=128 * 4096 / (total / 1e6) / 128,
        baselines=(
            Baseline(name="even", step_us=total * 1.23, feasible=True, layers=LAYERS, recompute=recomputed),
            Baseline(
                name="greedy",
                step_us=None,
                feasible=False,
                layers=LAYERS,
                recompute=recomputed,
                note="stage 1 needs 41.2 GiB of 38.0 GiB.",
            ),
        ),
        alternatives=(
            Alternative(
                layout=replace(layout, pipeline_size=16, data_size=2),
                step_us=total * 1.043,
                lower_bound_us=total * 1.04,
                layers=LAYERS,
                recompute=recomputed,
                peak_bytes=37 * GIB,
            ),
            Alternative(
                layout=replace(layout, tensor_size=8, data_size=2),
                step_us=total * 1.11,
                lower_bound_us=total * 1.09,
                layers=LAYERS,
                recompute=recomputed,
                peak_bytes=31 * GIB,
            ),
        ),
        search=SearchRecord(
            status="optimal",
            lower_bound_us=total,
            gap_fraction=0.0,
            num_configurations=90,
            num_solved=11,
            seconds=7.4,
            verdicts=_verdicts(layout, total),
            limits=(
                "stage 2 computes for longest: 13 layers of text_decoder, 5 of them recomputed",
                "memory of stage 2: 94 % of the limit",
            ),
            relaxations=(
                Relaxation(change="40.0 GiB per device instead of 38.0", step_us=total * 0.971, gain_fraction=0.029),
                Relaxation(change="no recompute family limit", step_us=None, gain_fraction=None),
                Relaxation(change="twice the global batch", step_us=total * 1.9, gain_fraction=0.05),
            ),
        ),
        profile=ProfileRecord(
            sha256="9f2c" * 16,
            source="measured",
            device="Ascend 910B3",
            created_utc="2026-05-04T10:11:12Z",
            model_hash="ab" * 32,
            notes=("text_decoder backward at TP 8 interpolated between TP 4 and TP 16",),
        ),
        tool_version="0.1.0",
    )
    return replace(plan, **changes)  # type: ignore[arg-type]  # fields by name, checked by dataclasses
