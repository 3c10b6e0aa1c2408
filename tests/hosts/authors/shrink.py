"""A training's words with smaller sizes, and without what only an accelerator or the authors' files have.

Every other flag stays as it is, so that a training meets what its authors give. ``Small.replaced`` names what does not.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

Flags = dict[str, list[str]]
"""A flag as its authors spell it, and its values."""

_LAYER_FLAGS = (
    *("--pipeline-model-parallel-layout", "--noop-layers", "--num-layer-list", "--decoder-first-pipeline-num-layers"),
    *("--decoder-last-pipeline-num-layers", "--hybrid-layer-pattern", "--hybrid-override-pattern", "--is-hybrid-model"),
    *("--account-for-embedding-in-pipeline-split", "--linear-attention-freq", "--first-k-dense-replace"),
    *("--num-layers-at-start-in-bf16", "--recompute-norm-num-layers", "--recompute-activation-function-num-layers"),
)
"""Beside one of these the number of layers is the authors'."""
_WIDTHS = {
    "--kv-channels": 16,
    "--moe-ffn-hidden-size": 32,
    "--moe-intermediate-size": 32,
    "--moe-shared-expert-intermediate-size": 32,
    "--q-lora-rank": 32,
    "--kv-lora-rank": 32,
    "--qk-head-dim": 16,
    "--qk-nope-head-dim": 16,
    "--qk-pos-emb-head-dim": 8,
    "--qk-rope-head-dim": 8,
    "--v-head-dim": 16,
    "--mamba-state-dim": 16,
    "--mamba-head-dim": 16,
    "--mamba-chunk-size": 16,
    "--linear-key-head-dim": 16,
    "--linear-value-head-dim": 16,
    "--moe-latent-size": 32,
    "--mup-base-hidden-size": 32,
}
_FILES = (
    *("--data-path", "--split", "--data-cache-path", "--vocab-file", "--merge-file", "--tokenizer-model", "--load"),
    *("--train-data-path", "--valid-data-path", "--test-data-path", "--data-args-path", "--per-split-data-args-path"),
    *("--tokenizer-name-or-path", "--tokenizer-type", "--save", "--tensorboard-dir", "--pretrained-checkpoint"),
    *("--wandb-project", "--wandb-exp-name", "--wandb-save-dir", "--wandb-entity", "--language-model-checkpoint"),
    *("--tiktoken-pattern", "--exit-on-missing-checkpoint", "--dataloader-save"),
    *("--use-checkpoint-args", "--one-logger-project", "--one-logger-run-name", "--vocab-extra-ids", "--finetune"),
    *("--prompt-path", "--hf-assign-unused-tokens", "--auto-detect-ckpt-format", "--fim-data", "--fim-rate"),
    *("--fim-spm-rate", "--export-kd-teacher-load", "--export-kd-cfg", "--lora-load", "--per-dataset-sequences-path"),
    "--te-precision-config-file",
)
"""Data, tokenizers and checkpoints of the authors' disks."""
_ACCELERATOR = (
    *("--use-flash-attn", "--attention-backend", "--fp8-format", "--fp8-recipe", "--fp8-param-gather"),
    "--tp-comm-overlap",
    *("--tp-comm-overlap-cfg", "--fp8-amax-history-len", "--fp8-amax-compute-algo", "--fp8-margin", "--fp8-interval"),
    *("--fp8-hybrid", "--gemm-gradient-accumulation-fusion", "--cuda-graph-impl", "--cuda-graph-modules", "--use-te"),
    *("--cuda-graph-scope", "--cuda-graph-warmup-steps", "--enable-cuda-graph", "--external-cuda-graph"),
    "--use-nccl-ub",
    *("--te-rng-tracker", "--profile", "--profile-step-start", "--profile-step-end"),
    "--use-transformer-engine-op-fuser",
    *("--moe-permute-fusion", "--moe-router-fusion", "--first-last-layers-bf16"),
    "--moe-router-padding-for-quantization",
    *("--fp8-param", "--num-layers-at-start-in-bf16", "--num-layers-at-end-in-bf16", "--cross-entropy-fusion-impl"),
    *("--reuse-grad-buf-for-mxfp8-param-ag", "--moe-router-padding-for-fp8", "--bf16", "--fp16"),
    "--grad-reduce-in-bf16",
    *("--initial-loss-scale", "--accumulate-allreduce-grads-in-fp32", "--async-save", "--use-persistent-ckpt-worker"),
    *("--main-params-dtype", "--main-grads-dtype", "--exp-avg-dtype", "--exp-avg-sq-dtype", "--distributed-backend"),
    *("--use-precision-aware-optimizer", "--transformer-impl", "--export-default-te-spec", "--reuse-fp32-param"),
    *("--cross-entropy-loss-fusion", "--deterministic-mode", "--use-sharp", "--moe-grouped-gemm"),
    *("--apply-layernorm-1p", "--fsdp-manual-registration", "--fine-grained-activation-offloading"),
    *("--offload-modules", "--delay-wgrad-compute", "--fp4-format", "--fp4-recipe", "--fp4-param"),
    "--fp4-param-gather",
)
"""Kernels, precisions and libraries that the CPU lacks; what they need instead is in ``_ADDED``."""
_STANDS_IN = ("--use-flash-attn",)
_GROUPED = ("--moe-fb-overlap", "--moe-alltoall-overlap-comm", "--moe-allgather-overlap-comm")
"""MindSpeed checks for ``--moe-grouped-gemm`` beside one of these: it stays there, and arguments are checked with it."""
_BF16 = "--mamba-chunk-size"
"""MindSpeed-LLM's Mamba computes in bf16 whatever a training's type is: ``--bf16`` stays beside this flag."""
_ADDED = (
    *("--distributed-backend", "gloo", "--transformer-impl", "local", "--no-gradient-accumulation-fusion"),
    *("--no-masked-softmax-fusion", "--no-persist-layer-norm", "--no-rope-fusion"),
    *("--tokenizer-type", "NullTokenizer", "--mock-data"),
)
PATTERNS = ("--hybrid-layer-pattern", "--hybrid-override-pattern")
"""Flags that name a kind of every layer."""
_OLD, _NEW = "0.12", "0.17"


@dataclass(frozen=True, kw_only=True)
class Small:
    """A training that a laptop can start."""

    words: tuple[str, ...]
    replaced: tuple[str, ...]
    """Flags that are not the authors' any more, or are gone."""
    num_processes: int
    """The fewest that the authors' sizes run on."""


def flags_of(words: tuple[str, ...]) -> Flags:
    """Return the flags of a command line with their values; the last of a name counts, as with argparse."""
    flags: Flags = {}
    values: list[str] = []
    for word in words:
        if word.startswith("--"):
            name, equals, value = word.partition("=")
            values = flags[name] = [value] if equals else []
        else:
            values.append(word)
    return flags


def shrink(words: tuple[str, ...], *, release: str, mindspeed: bool = False) -> Small:
    """Return ``words`` for CPU with Megatron ``release``: hidden size 64 to 256, a stage one layer where that is free.

    ``mindspeed``: the host trains through operators of Ascend, of which ``tests/hosts/stand_ins`` has some.
    """
    flags = flags_of(words)
    given = {name: list(values) for name, values in flags.items()}
    kept = _STANDS_IN if mindspeed else ()
    if mindspeed and any(name in flags for name in _GROUPED):
        kept = (*kept, "--moe-grouped-gemm", "--bf16")  # Megatron checks for the one beside the other
    if mindspeed and _BF16 in flags:
        kept = (*kept, "--bf16")
    for name in (*_FILES, *_ACCELERATOR):
        if name not in kept:
            flags.pop(name, None)
    _shrink_layers(flags)
    _shrink_widths(flags)
    _shrink_experts(flags)
    _shrink_batch(flags)
    for name, *values in _rows(_ADDED):
        flags[name] = values
    # 0.12's mock data has tokens up to 4095.
    flags["--vocab-size"] = ["4095" if release.startswith(_OLD) else "511"]
    flags["--make-vocab-size-divisible-by"] = ["8"]
    flags["--eval-interval"], flags["--eval-iters"] = ["1000"], ["0"]
    flags["--log-interval"] = ["1"]
    flags["--num-workers"] = ["0"]
    flags["--hidden-dropout"], flags["--attention-dropout"] = ["0"], ["0"]
    if flags.get("--spec", [""])[0].endswith("hybrid_layer_specs"):
        flags["--spec"] = ["local_hybrid", *flags["--spec"][1:]]  # tests/hosts/hybrid_stand_ins
    if float(release) < float(_NEW):
        flags["--use-mcore-models"] = []
    replaced = [name for name in given if flags.get(name) != given[name]]
    line = [word for name, values in flags.items() for word in (name, *values)]
    return Small(words=tuple(line), replaced=tuple(replaced), num_processes=_processes(flags))


def _rows(words: tuple[str, ...]) -> list[list[str]]:
    return [[name, *values] for name, values in flags_of(words).items()]


def _number(flags: Flags, name: str, default: int = 1) -> int:
    values = flags.get(name, [])
    try:
        return int(float(values[0])) if values else default
    except ValueError:
        return default


def _set(flags: Flags, name: str, value: int) -> None:
    """Set ``name`` where the authors give it; 0 stays."""
    if name in flags and flags[name][:1] != ["0"]:
        flags[name] = [str(value)]


def _shrink_patterns(flags: Flags) -> None:
    """Cut every stage behind the first layer of its last kind; without stages, at a multiple of the authors' chunks."""
    for name in PATTERNS:
        for pattern in flags.get(name, [])[:1]:
            main, slash, depths = pattern.partition("/")
            stages = [part[: max(map(part.index, part), default=0) + 1] for part in main.split("|")]
            if len(stages) == 1:
                chunks = _number(flags, "--pipeline-model-parallel-size")
                stages = [main[: -(-len(stages[0]) // chunks) * chunks]]
            flags[name] = ["|".join(stages) + slash + depths]
            _set(flags, "--num-layers", sum(map(len, stages)))


def _shrink_layers(flags: Flags) -> None:
    _shrink_patterns(flags)
    frequency = (flags.get("--moe-layer-freq") or ["1"])[0]
    if any(name in flags for name in _LAYER_FLAGS) or not frequency.lstrip("-").isdigit():
        return
    layers, pipeline = _number(flags, "--num-layers"), _number(flags, "--pipeline-model-parallel-size")
    pipeline = max(pipeline, _number(flags, "-pp"))
    per_virtual = _number(flags, "--num-layers-per-virtual-pipeline-stage", 0)
    chunks = (
        layers // (pipeline * per_virtual) if per_virtual else _number(flags, "--num-virtual-stages-per-pipeline-rank")
    )
    chunks = min(max(chunks, 1), 2)
    _set(flags, "--num-layers-per-virtual-pipeline-stage", 1)
    _set(flags, "--num-virtual-stages-per-pipeline-rank", chunks)
    small = max(pipeline * chunks, 2)
    for name in ("--num-layers", "--encoder-num-layers", "--decoder-num-layers"):
        _set(flags, name, min(small, layers) if name == "--num-layers" else small)
    _set(flags, "--recompute-num-layers", 1)


def _shrink_widths(flags: Flags) -> None:
    tensor, context = _number(flags, "--tensor-model-parallel-size"), _number(flags, "--context-parallel-size")
    heads = max(4, tensor * context)  # Ulysses shares them out
    groups = math.gcd(heads, max(_number(flags, "--num-query-groups", heads), tensor))
    _set(flags, "--num-attention-heads", heads)
    _set(flags, "--num-query-groups", groups)
    # Mamba's heads of 64 must share eight groups of states out.
    mamba = any("M" in value for name in PATTERNS for value in flags.get(name, []))
    mamba = mamba or any("mamba" in value for value in flags.get("--spec", []))
    _set(flags, "--hidden-size", 64 * heads if mamba and "--mamba-num-heads" not in flags else 16 * heads)
    _set(flags, "--ffn-hidden-size", 32 * heads)
    for name, value in _WIDTHS.items():
        _set(flags, name, value)
    _set(flags, "--mamba-num-heads", 2 * heads)
    for name in ("--linear-num-key-heads", "--linear-num-value-heads"):
        _set(flags, name, heads)
    for name in ("--long-factor", "--short-factor"):  # MindSpeed-LLM's, one for every second number of a head
        if name in flags:
            flags[name] = [",".join(",".join(flags[name]).split(",")[:8])]
    length = max(64, 2 * context * tensor)
    for name in ("--seq-length", "--max-position-embeddings", "--encoder-seq-length", "--decoder-seq-length"):
        _set(flags, name, length)


def _shrink_experts(flags: Flags) -> None:
    if "--num-experts" not in flags:
        return
    modules = flags.get("--recompute-modules", [])
    # That part is one of grouped products alone.
    if "moe_act" in modules and "--moe-grouped-gemm" not in flags:
        flags["--recompute-modules"] = [name for name in modules if name != "moe_act"] or ["core_attn"]
    expert, groups = _number(flags, "--expert-model-parallel-size"), _number(flags, "--moe-router-num-groups")
    wanted, group_top = _number(flags, "--num-experts"), _number(flags, "--moe-router-group-topk")
    topk = min(_number(flags, "--moe-router-topk"), 4)
    number = math.lcm(expert, groups) * max(1, math.ceil(max(4, 2 * groups) / math.lcm(expert, groups)))
    number = min(number, wanted) if wanted % max(expert, groups) == 0 else number
    _set(flags, "--num-experts", number)
    topk = max(1, min(topk, number // groups * group_top))
    _set(flags, "--moe-router-topk", topk - topk % group_top if topk >= group_top else topk)


def _shrink_batch(flags: Flags) -> None:
    """Make it eight samples in micro batches of one or two, and three iterations."""
    micro = 2 if _number(flags, "--micro-batch-size") > 1 else 1
    _set(flags, "--micro-batch-size", micro)
    shares = _processes(flags) // _model_size(flags)
    chunks = "--num-layers-per-virtual-pipeline-stage" in flags or "--num-virtual-stages-per-pipeline-rank" in flags
    rounds = _number(flags, "--pipeline-model-parallel-size") if chunks else 2
    if "--schedules-method" in flags:  # DualPipe needs twice as many microbatches as stages
        rounds = 2 * _number(flags, "--pipeline-model-parallel-size")
    batch = max(8, micro * shares * rounds)
    _set(flags, "--global-batch-size", batch)
    _set(flags, "--train-iters", 3)
    samples = (5 if "--rampup-batch-size" in flags else 3) * batch
    _set(flags, "--train-samples", samples)
    for name, value in (("--lr-decay-iters", 3), ("--lr-warmup-iters", 1), ("--lr-wsd-decay-iters", 1)):
        _set(flags, name, value)
    for name, value in (("--lr-decay-samples", samples), ("--lr-warmup-samples", 1), ("--lr-wsd-decay-samples", 1)):
        _set(flags, name, value)
    if len(flags.get("--rampup-batch-size", [])) > 0:  # the batch doubles behind the first iteration
        flags["--rampup-batch-size"] = [str(batch), str(batch), str(batch)]
        flags["--global-batch-size"] = [str(2 * batch)]
    for name in ("--exit-interval", "--exit-duration-in-mins", "--save-interval"):
        if name in flags:
            flags[name] = ["1000"]


def _model_size(flags: Flags) -> int:
    names = ("--tensor-model-parallel-size", "--pipeline-model-parallel-size", "--context-parallel-size")
    return math.prod(_number(flags, name) for name in names)


def _processes(flags: Flags) -> int:
    """Return the fewest processes that the authors' sizes of layouts run on."""
    tensor = _number(flags, "--tensor-model-parallel-size")
    shared = _number(flags, "--expert-tensor-parallel-size", tensor) * _number(flags, "--pipeline-model-parallel-size")
    return math.lcm(_model_size(flags), shared * _number(flags, "--expert-model-parallel-size"))
