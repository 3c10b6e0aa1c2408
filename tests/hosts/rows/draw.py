"""Draws trainings: features of a model, of its script and of its run, and plans to train it by.

Every draw is legal Megatron: it trains in one process, and by its plans, with the same losses.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import hybrids
import mindspeed_rows

from mindspeed_autoparallel import __version__
from mindspeed_autoparallel.spec import Plan
from mindspeed_autoparallel.spec.layout import Cluster, Layout
from mindspeed_autoparallel.spec.model import Model, Module
from mindspeed_autoparallel.spec.plan_records import ProfileRecord, RankMemory, SearchRecord, StagePlan, StepTime

BATCH = 8
_EXPERTS = (
    "--num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 48 --moe-router-load-balancing-type none "
    "--moe-token-dispatcher-type "
)
_LATENT = "--multi-latent-attention --q-lora-rank 32 --kv-lora-rank 32 --qk-head-dim 16 --qk-pos-emb-head-dim 8 --v-head-dim 16"
FEATURES: dict[str, dict[str, str]] = {
    "attention": {"mha": "", "gqa": "--group-query-attention --num-query-groups 2", "mla": _LATENT},
    "norm": {"RMSNorm": "--normalization RMSNorm", "LayerNorm": "--normalization LayerNorm"},
    "mlp": {"swiglu": "--swiglu", "gelu": "", "squared relu": "--squared-relu --no-bias-gelu-fusion"},
    "bias": {"no bias": "--disable-bias-linear", "bias": "", "qkv bias": "--disable-bias-linear --add-qkv-bias"},
    "output": {"untied": "--untie-embeddings-and-output-weights", "tied": ""},
    "positions": {
        "rope": "--position-embedding-type rope",
        "half rope": "--position-embedding-type rope --rotary-percent 0.5",
        "learned": "--position-embedding-type learned_absolute",
    },
    "experts": {
        "dense": "",
        "experts": _EXPERTS + "alltoall",
        "gathered": _EXPERTS + "allgather",
        "shared": _EXPERTS + "alltoall --moe-shared-expert-intermediate-size 32",
        "first dense": _EXPERTS + "alltoall --moe-layer-freq ([0]*1+[1]*{rest})",
        "every second": _EXPERTS + "alltoall --moe-layer-freq 2",
        "expert bias": _EXPERTS
        + "alltoall --moe-router-score-function sigmoid --moe-router-enable-expert-bias --moe-router-bias-update-rate 1e-3",
    },
    "prediction": {"": "", "mtp": "--mtp-num-layers 1", "mtp2": "--mtp-num-layers 2"},
    "optimizer": {
        "adam": "--lr 1e-3",
        "sgd": "--optimizer sgd --lr 1e-1 --clip-grad 0",
        "clipped": "--lr 1e-3 --clip-grad 0.3",
    },
    "loss": {"": "", "per token": "--calculate-per-token-loss"},
    "data": {"mock": "--mock-data", "indexed": "--data-path {data} --split 80,20,0 --data-cache-path {cache}"},
    "steps": {
        "iterations": "--train-iters 3",
        "samples": "--train-samples 24 --lr-decay-samples 24 --lr-warmup-samples 4",
        "ramp-up": "--train-samples 24 --lr-decay-samples 24 --rampup-batch-size 4 4 8",
    },
    "script": {"": "", "own arguments": "--own-number 7", "own step": "", "replaced step": ""},
}
EXTRAS = {
    "evaluation": "--eval-interval 2 --eval-iters 1",
    "TensorBoard": "--tensorboard-dir {cache}",
    "exit duration": "--exit-duration-in-mins 600",
    "qk norm": "--qk-layernorm",
    "fp32 softmax": "--attention-softmax-in-fp32",
    "weight decay": "--weight-decay 0.1 --adam-beta2 0.95",
}
OWN_LAYOUTS = {
    "": "",
    "own TP": "--tensor-model-parallel-size 2 --sequence-parallel",
    "own PP": "--pipeline-model-parallel-size 2",
    "own recompute": "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
    "own overlap": "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather",
    "own batch": "--micro-batch-size 4",
}
"""Flags of the script's own that one process does without and a plan replaces, or keeps with a line."""
MUST = (
    {"output": "tied", "prediction": "", "pipeline": 2, "virtual": 2},
    {"attention": "mla", "prediction": "mtp", "experts": "dense", "pipeline": 2},
    {"experts": "shared", "pipeline": 2, "expert": 2},
    {"norm": "LayerNorm", "mlp": "gelu", "bias": "bias", "positions": "learned"},
    {"script": "replaced step"},
    {"script": "own arguments", "steps": "samples"},
    {"data": "indexed", "extras": ("evaluation",)},
    {"output": "tied", "prediction": "mtp", "pipeline": 2},
    {"extras": ("TensorBoard", "exit duration"), "script": "own step"},
    {"experts": "first dense", "attention": "mla", "prediction": "mtp2", "pipeline": 2},
)
"""What the first draws have, whatever else is drawn beside it."""
_FIRSTS: dict[object, Sequence[dict[str, object]]] = {"hybrid": hybrids.MUST, "mindspeed": mindspeed_rows.MUST}
_SHARE = {
    "bias": (2, 1, 1),
    "experts": (4, 1, 1, 1, 1, 1, 1),
    "prediction": (4, 1, 1),
    "steps": (3, 1, 1),
    "script": (4, 1, 1, 1),
}


@dataclass(frozen=True, kw_only=True)
class Row:
    """A training, and plans for it."""

    number: int
    labels: tuple[str, ...]
    words: str
    """Of one process; ``{data}`` and ``{cache}`` are filled in by who runs it."""
    own_layout: str
    """Words that the script has beside a plan."""
    script: str
    """A key of ``FEATURES["script"]``."""
    program: str
    """The checkout's script that trains it."""
    plans: tuple[Plan, ...]


def rows(
    seed: int, first: int, count: int, must: dict[str, object] | None = None, *, num_plans: int = 2
) -> Iterator[Row]:
    """Yield ``count`` draws of ``seed``, from number ``first`` on; ``must``: what all of them have."""
    for number in range(first, first + count):
        draw = random.Random(f"{seed}/{number}")
        must_have = must or {}
        firsts = _FIRSTS.get(must_have.get("kind"), MUST)
        must_have = {**(firsts[number] if number < len(firsts) else {}), **must_have}
        if must_have.get("kind") == "hybrid":
            must_have |= hybrids.drawn(draw, str(must_have.get("pattern", "")))
        chosen = _features(draw, must_have)
        yield _row(draw, number, chosen, must_have, num_plans)


def _features(draw: random.Random, must: dict[str, object]) -> dict[str, str]:
    chosen: dict[str, str] = {}
    for group, options in FEATURES.items():
        weights = _SHARE.get(group, (1,) * len(options))
        chosen[group] = str(must.get(group, draw.choices(list(options), weights)[0]))
    if chosen["attention"] == "mla" or chosen["prediction"]:
        # Both build rotary embeddings of their own; latent attention has no bias of queries alone.
        chosen["positions"] = "rope"
        chosen["bias"] = "no bias" if chosen["bias"] == "qkv bias" else chosen["bias"]
    if chosen["experts"] != "dense":
        chosen["bias"] = "no bias"
    return chosen


def _row(draw: random.Random, number: int, chosen: dict[str, str], must: dict[str, object], num_plans: int) -> Row:
    pattern = str(must.get("pattern", ""))
    layers = len(pattern.partition("/")[0]) or draw.choice((3, 4, 5, 6, 7))
    extras = list(must.get("extras", ()))  # type: ignore[call-overload]
    extras += [name for name in EXTRAS if name not in extras and draw.random() < 0.2]
    if (chosen["attention"] == "mla" or pattern) and "qk norm" in extras:
        extras.remove("qk norm")
    words = [f"--num-layers {layers}", *(options[chosen[group]] for group, options in FEATURES.items())]
    if pattern:
        words[0] = hybrids.WORDS + pattern
        words.remove(FEATURES["prediction"][chosen["prediction"]])
    if "evaluation" not in extras:
        words.append("--eval-interval 1000 --eval-iters 0")
    words += [EXTRAS[name] for name in extras]
    own = draw.choice([name for name in OWN_LAYOUTS if name != "own PP" or layers % 2 == 0])
    if must.get("kind") == "mindspeed":
        extras, own = [], ""
        words = [*words[: 1 + len(FEATURES)], mindspeed_rows.WORDS, str(must.get("words", ""))]
    plans = tuple(_plan(draw, layers, chosen, must) for _ in range(num_plans))
    labels = (
        pattern or f"{layers} layers",
        *(name for name in chosen.values() if name),
        *extras,
        *([own] if own else []),
    )
    return Row(
        number=number,
        labels=labels,
        words=" ".join(words).replace("{rest}", str(layers - 1)),
        own_layout=OWN_LAYOUTS[own],
        script=chosen["script"],
        program="pretrain_hybrid.py" if pattern else "pretrain_gpt.py",
        plans=plans,
    )


def _plan(draw: random.Random, num_layers: int, chosen: dict[str, str], must: dict[str, object]) -> Plan:
    layout = _layout(draw, num_layers, chosen, must)
    counts = _split(draw, num_layers, layout, empty_ends="kind" not in must)
    # Megatron recomputes layers of multi-token prediction one by one.
    kind = draw.choice(("none", "full", "full", "full" if chosen["prediction"] else "full:2", "selective"))
    apart = None
    in_layout = chosen["prediction"] and "kind" not in must
    if in_layout and chosen["output"] == "untied" and layout.pipeline_size > 2 and layout.virtual_size == 1:
        last = max(place for place, count in enumerate(counts) if count)
        apart = draw.choice([None, *range(max(last, 1), layout.num_virtual_stages - 1)])
    stages, first = [], 0
    for place, count in enumerate(counts):
        again = {"none": 0, "full": draw.randint(0, count)}.get(kind, count)
        stages.append(
            StagePlan(
                stage=place,
                pipeline_rank=place % layout.pipeline_size,
                chunk=place // layout.pipeline_size,
                layers={"text_decoder": count},
                first_layer={"text_decoder": first} if count else {},
                recompute={"text_decoder": {kind: again}} if again else {},
                forward_us=1.0,
                backward_us=1.0,
                prediction=place == apart,
            )
        )
        first += count
    return written_plan(layout, stages, num_layers, num_experts=0 if chosen["experts"] == "dense" else 4)


def _layout(draw: random.Random, num_layers: int, chosen: dict[str, str], must: dict[str, object]) -> Layout:
    experts = chosen["experts"] != "dense"
    world = draw.choice((2, 2, 4))
    wanted_pipeline, wanted_expert = int(str(must.get("pipeline", 0))), int(str(must.get("expert", 0)))
    context = int(str(must.get("context", 1)))
    world = 4 if (wanted_expert or context > 1 or "tensor" in must) and wanted_pipeline else world
    while True:
        tensor = int(str(must.get("tensor", 0))) or draw.choice((1, 1, 2))
        pipeline = wanted_pipeline or draw.choice((1, 2, 2, 4))
        data, rest = divmod(world, tensor * pipeline * context)
        expert = wanted_expert or (draw.choice((1, 2)) if experts else 1)
        virtual = int(str(must.get("virtual", draw.choice((1, 1, 2))))) if pipeline > 1 else 1
        micro = draw.choice((1, 2, 4))
        num_micro, odd = divmod(4 if chosen["steps"] == "ramp-up" else BATCH, max(data, 1) * micro)
        shared = draw.choice((0, 1)) if experts and tensor > 1 else 0
        holders = data * context * (tensor if shared else 1)
        fits = holders % expert == 0 and num_layers >= pipeline * virtual - ("kind" not in must)
        if not rest and data and not odd and fits and (virtual == 1 or num_micro % pipeline == 0):
            break
    groups = [0] if chosen["steps"] == "ramp-up" else [0, num_micro]
    distributed = chosen["optimizer"] != "sgd" and (draw.random() < 0.7 or "distributed" in must)
    return Layout(
        pipeline_size=pipeline,
        tensor_size=tensor,
        data_size=data,
        context_size=context,
        expert_size=expert,
        expert_tensor_size=shared,
        virtual_size=virtual,
        schedule="interleaved" if virtual > 1 else "1f1b",
        microbatch_group_size=draw.choice(groups) if virtual > 1 else 0,
        micro_batch_size=micro,
        sequence_parallel=tensor > 1 and (experts or draw.random() < 0.5),
        distributed_optimizer=distributed,
        overlap_gradient_reduce=draw.random() < 0.3,
        standalone_ends="kind" not in must,
    )


def _split(draw: random.Random, num_layers: int, layout: Layout, *, empty_ends: bool) -> list[int]:
    """Return layers of each virtual stage, at least one; the first and the last may have none."""
    stages = layout.num_virtual_stages
    least = [1] * stages
    if stages > 1 and empty_ends:
        for end in (0, -1):
            least[end] = draw.choice((0, 1, 1)) if sum(least) <= num_layers else 0
    counts = list(least)
    for _ in range(num_layers - sum(least)):
        counts[draw.randrange(stages)] += 1
    return counts


def written_plan(layout: Layout, stages: Sequence[StagePlan], num_layers: int, *, num_experts: int = 0) -> Plan:
    """Return a plan by hand: what it predicts means nothing."""
    module = Module(name="text_decoder", result_key="llm", num_layers=num_layers, num_experts=num_experts)
    return Plan(
        model=Model(name="drawn", modules=(module,), sequence_length=64),
        cluster=Cluster(num_nodes=1, devices_per_node=layout.num_devices),
        layout=layout,
        global_batch_size=BATCH,
        num_microbatches=layout.num_microbatches(BATCH),
        stages=tuple(stages),
        memory=tuple(
            RankMemory(pipeline_rank=rank, peak_bytes=1, limit_bytes=2, peak_point="optimizer step", terms={})
            for rank in range(layout.pipeline_size)
        ),
        step=StepTime(total_us=1.0, pipeline_us=1.0),
        throughput_tokens_per_s_per_device=1.0,
        baselines=(),
        alternatives=(),
        search=SearchRecord(
            status="edited", lower_bound_us=0.0, gap_fraction=1.0, num_configurations=1, num_solved=0, seconds=0.0
        ),
        profile=ProfileRecord(sha256="", source="analytic", device="CPU", created_utc="", model_hash=""),
        tool_version=__version__,
    )
