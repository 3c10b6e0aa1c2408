"""Published FSDP2 trainings that the model can describe exactly, beside its predictions from computed costs.

python tests/benchmarks/fsdp2/published.py

Times, then peaks. torchtitan's docs/performance.md: Llama 3 on 64 A100 of 80 GB, sequences of 8,192, one sample per GPU, tokens per
second and GPU. "selective layer" recomputes every second layer, "full" every layer. torchtitan's pull request 1690:
Qwen3-32B on 8 H100 of 95 GiB, two samples of 4,096, every layer recomputed, compiled. NeMo Automodel's
docs/performance-summary.mdx with the files of examples/llm_benchmark: H100, samples of 4,096, experts divided; "full" where
activation_checkpointing is on. Its code loads models in bf16 unless ``torch_dtype`` has another type, Adam's moments too; the
loss stays in bf16 (``fp32_upcast: false``), gradients are reduced in the last micro batch (``defer_fsdp_grad_sync``), units
stay gathered after forward, and after backward with ``enable_fsdp_optimizations``; whole experts are no parameters of
``fully_shard``. MindSpeed-LLM's tests/pipeline/st: 2.294 s, the last steps of
pretrain_qwen3_moe_30b_4K_fsdp2. Factors are learnt from the first row of a table.

Who runs out of memory: all rows of torchtitan's pull request 1690, whose ranks' losses take slices of the logits with tensor
parallelism, and Automodel's pull request 2577, nemotron_nano_v3_cp_test.yaml: two micro batches of one short sample (256 tokens
are assumed), nothing recomputed, two context parallel ranks, experts divided among four and sharded over two. A row fits if its
peak is below the limit of computed plans on what torch counts on the device: torchtitan's H100s have more than the catalogue's
(81.85 GiB are 86.17 %).

torchtitan publishes reserved memory. Its allocator gives blocks of one stream to no other, and ``fully_shard`` allocates gathers and
the results of reductions in streams of their own, so what is reserved is the sum of what each stream holds at most. Bytes per logit
are those of the loss's own tensors, in blocks that a tensor of the same size may take again: compiled, the logits and their gradient;
else their bf16 and fp32 forms and three more in fp32 (logarithm of the softmax, two gradients), four in a loss of slices
(torch/distributed/tensor/parallel/loss.py).
"""

import importlib
from dataclasses import replace
from typing import NamedTuple

from mindspeed_autoparallel.cost.catalogue import find_device
from mindspeed_autoparallel.planner.sharded.pricing import priced
from mindspeed_autoparallel.planner.sharded.problem import Problem
from mindspeed_autoparallel.predict.sharded_profile import sharded_profile
from mindspeed_autoparallel.profiles.sharded import Described, ElementBytes, LogitBytes, Routing
from mindspeed_autoparallel.schedule.sharded.queues import Bytes
from mindspeed_autoparallel.spec.sharded import KEEP, RECOMPUTE, GroupChoice, ShardedDecisions, ShardingHost, ShardSizes

SMALL = {"hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32, "intermediate_size": 14336}
LARGE = {"hidden_size": 8192, "num_hidden_layers": 80, "num_attention_heads": 64, "intermediate_size": 28672}
SHARED = {"model_type": "llama", "num_key_value_heads": 8, "vocab_size": 128256, "tie_word_embeddings": False}
QWEN = {"hidden_size": 5120, "num_hidden_layers": 64, "num_attention_heads": 64, "intermediate_size": 25600}
QWEN |= {"model_type": "qwen3", "vocab_size": 151936, "head_dim": 128}


TOKENS = {
    "vocab_size": 151936,
    "hidden_size": 2048,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
}
QWEN_MOE = TOKENS | {"model_type": "qwen3_moe", "num_hidden_layers": 48, "intermediate_size": 6144, "num_experts": 128}
QWEN_MOE |= {"num_experts_per_tok": 8, "moe_intermediate_size": 768, "tie_word_embeddings": False}
OSS = {
    "model_type": "gpt_oss",
    "hidden_size": 2880,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
}
OSS |= {"intermediate_size": 2880, "num_experts_per_tok": 4, "vocab_size": 201088, "sliding_window": 128}


def oss(layers: int, experts: int) -> dict:
    """Return gpt-oss with ``layers``, every second of which has a window."""
    kinds = ["sliding_attention", "full_attention"] * (layers // 2)
    return OSS | {"num_hidden_layers": layers, "num_local_experts": experts, "layer_types": kinds}


NANO = {"model_type": "nemotron_h", "hidden_size": 2688, "num_attention_heads": 32, "num_key_value_heads": 2}
NANO |= {"hybrid_override_pattern": "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME", "num_hidden_layers": 52}
NANO |= {"mamba_num_heads": 64, "mamba_head_dim": 64, "ssm_state_size": 128, "n_groups": 8, "intermediate_size": 1856}
NANO |= {"n_routed_experts": 128, "num_experts_per_tok": 6, "moe_intermediate_size": 1856, "vocab_size": 131072}
NANO |= {"moe_shared_expert_intermediate_size": 3712, "n_shared_experts": 1}


COMPILED, WHOLE, SLICES = LogitBytes(2, 2), LogitBytes(6, 8), LogitBytes(10, 8, divided=True)
OWN_STREAM = {"gather buffers": "gathers", "sharded gradients": "reductions"}


class Pools(Bytes):
    """Bytes of a replay by the stream that allocates them."""

    last: "Pools"

    def __init__(self, static_bytes):
        super().__init__(static_bytes)
        self.now, self.most = {"computing": static_bytes}, {"computing": static_bytes}
        Pools.last = self

    def add(self, term, size):
        super().add(term, size)
        stream = OWN_STREAM.get(term, "computing")
        self.now[stream] = self.now.get(stream, 0) + size
        self.most[stream] = max(self.most.get(stream, 0), self.now[stream])

    def touch(self, term, size):
        self.add(term, size)
        self.add(term, -size)


class Row(NamedTuple):
    name: str
    sizes: dict
    policies: tuple[str, str]
    device: str
    gpus: int
    tokens: int
    samples: int
    rate: float
    """Tokens per second and GPU."""
    peak_gib: float = 0.0
    experts: int = 1
    """Devices among which a layer's experts are divided."""
    accumulation: int = 1
    stays: bool = False
    """Whether units stay gathered after forward."""
    table: str = "torchtitan"
    frees_once: bool = False
    """Whether units stay gathered until the last backward of a step."""
    tensor: int = 1
    """Tensor parallel ranks; ``gpus`` are those of one of them."""
    context: int = 1
    expert_shard: int = 1
    fits: bool = True
    first_step: bool = False
    """Whether the optimizer has no state yet."""
    loss: LogitBytes = SLICES


ROWS = (
    Row("Llama 3 8B, selective layer", SHARED | SMALL, (RECOMPUTE, KEEP), "A100", 64, 8192, 1, 2904),
    Row("Llama 3 70B, full", SHARED | LARGE, (RECOMPUTE, RECOMPUTE), "A100", 64, 8192, 1, 331),
    Row("Qwen3 32B, full", SHARED | QWEN, (RECOMPUTE, RECOMPUTE), "H100", 8, 4096, 2, 1874, 81.85, loss=COMPILED),
    Row(
        "Qwen3 30B-A3B in 2 layers (CI), full",
        QWEN_MOE | {"num_hidden_layers": 2},
        (RECOMPUTE, RECOMPUTE),
        "910B",
        8,
        4096,
        1,
        4096 / 2.294,
        table="MindSpeed-LLM",
    ),
    *(
        Row(name, sizes, policies, "H100", gpus, 4096, samples, rate, 0.0, gpus, steps, True, "Automodel", frees_once)
        for name, sizes, policies, gpus, samples, steps, frees_once, rate in (
            ("Nemotron 3 Nano 30B, full", NANO, (RECOMPUTE, RECOMPUTE), 8, 4, 16, True, 16789),
            ("Qwen3 30B-A3B, full", QWEN_MOE, (RECOMPUTE, RECOMPUTE), 8, 4, 16, True, 12040),
            ("GPT-OSS 20B", oss(24, 32), (KEEP, KEEP), 8, 2, 16, False, 13058),
            ("GPT-OSS 120B", oss(36, 128), (KEEP, KEEP), 64, 2, 4, True, 7626),
        )
    ),
)
SHORT = Row("", NANO, (KEEP, KEEP), "H100", 8, 256, 1, 0.0, table="Automodel")
TWO = SHORT._replace(context=2, experts=4, expert_shard=2, accumulation=2)
SLICED = Row("", SHARED | QWEN, (RECOMPUTE, RECOMPUTE), "H100", 4, 4096, 16, 0.0, tensor=8, table="torchtitan, slices")
ALONE = SLICED._replace(tensor=1, loss=WHOLE, table="torchtitan, not compiled")
MEMORY_ROWS = (
    ALONE._replace(name="Qwen3 32B, 8 x 1 sample", gpus=8, samples=1, peak_gib=81.47, rate=1444),
    ALONE._replace(name="Qwen3 32B, 8 x 2 samples, not compiled", gpus=8, samples=2, peak_gib=89.33, rate=1614),
    ALONE._replace(name="Qwen3 32B, 16 x 4 samples", gpus=16, samples=4, peak_gib=78.48, rate=1518),
    ALONE._replace(name="Qwen3 32B, 16 x 8 samples", gpus=16, samples=8, fits=False),
    ALONE._replace(name="Qwen3 32B, 16 x 16 samples", gpus=16, samples=16, fits=False),
    ALONE._replace(name="Qwen3 32B, 32 x 16 samples", gpus=32, samples=16, fits=False),
    SLICED._replace(name="Qwen3 32B, TP 2, 16 x 16 samples", tensor=2, gpus=16, fits=False),
    SLICED._replace(name="Qwen3 32B, TP 4, 8 x 16 samples", tensor=4, gpus=8, peak_gib=70.2, rate=1139),
    SLICED._replace(name="Qwen3 32B, TP 4, 8 x 32 samples", tensor=4, gpus=8, samples=32, fits=False),
    SLICED._replace(name="Qwen3 32B, TP 8, 8 x 64 samples", gpus=8, samples=64, fits=False),
    SLICED._replace(name="Qwen3 32B, TP 8, 4 x 16 samples", peak_gib=43.45, rate=876),
    SLICED._replace(name="Qwen3 32B, TP 8, 4 x 32 samples", samples=32, peak_gib=70.79, rate=883),
    SLICED._replace(name="Qwen3 32B, TP 8, 8 x 32 samples", samples=32, gpus=8, peak_gib=63.27, rate=873),
    SLICED._replace(name="Qwen3 32B, TP 8, 4 x 64 samples", samples=64, fits=False),
    TWO._replace(name="Nano, CP 2, EP 4", stays=True, fits=False),
    TWO._replace(name="Nano, CP 2, EP 4, first step", stays=True, first_step=True, peak_gib=62.45),
    TWO._replace(name="Nano, CP 2, EP 4, resharded"),
    SHORT._replace(name="Nano, EP 8", experts=8, stays=True),
)
LARGER = 94.99
"""GiB that torch counts on torchtitan's H100s."""


def predicted(row):
    """Return the outcome of one row."""
    # MindSpeed-LLM's row has neither moe_grouped_gemm nor expert parallelism: transformers' loop over experts runs.
    loops = row.table == "MindSpeed-LLM"
    described = Described(
        sequence=row.tokens,
        micro_batch_size=row.samples,
        loops_experts=loops,
        tensor_size=row.tensor,
        sequence_parallel=row.tensor > 1,
        logits=row.loss,
    )
    host = ShardingHost(name="torchtitan")
    if row.table == "Automodel":
        narrow = ElementBytes(sharded=2, optimizer=0 if row.first_step else 4)
        described = replace(described, logits=LogitBytes(kept=4, transient=2), bytes_of=narrow)
        # The table's gate gives tokens the experts in turn; pull request 2577 has no such gate.
        described = replace(described, routing=Routing(once=True, in_order=bool(row.rate)))
        host = replace(host, defers_reduction=True, stays_gathered=row.frees_once, ignores_whole_experts=True)
    profile = sharded_profile(row.sizes, row.name, described, device_of(row), 8)
    patterns = dict.fromkeys(module.pattern for module in profile.modules)
    decisions = ShardedDecisions(
        sizes=ShardSizes(
            num_devices=row.gpus,
            fully_shard_size=row.gpus,
            micro_batch_size=row.samples,
            ulysses_size=row.context,
            expert_size=row.experts,
            expert_shard_size=row.expert_shard,
            accumulation=row.accumulation,
        ),
        groups=tuple(GroupChoice(pattern=pattern, reshard_after_forward=not row.stays) for pattern in patterns),
        policies={"model.layers.{*}": row.policies * (row.sizes["num_hidden_layers"] // 2)},
    )
    return priced(Problem(profile, host, 8), decisions, profile.device.memory_capacity_bytes)


def device_of(row):
    """Return the row's device, with the memory of its table."""
    device = find_device(row.device, ())
    return replace(device, counted_gib=LARGER) if row.device == "H100" and "torchtitan" in row.table else device


def reserved_gib(row) -> float:
    """Return what torch's allocator reserves: the most bytes of each stream."""
    replaying = importlib.import_module(
        "mindspeed_autoparallel.schedule.sharded.replay"
    )  # the package has the function
    before, replaying.Bytes = replaying.Bytes, Pools
    try:
        predicted(row)
    finally:
        replaying.Bytes = before
    return sum(Pools.last.most.values()) / 2**30


def main() -> None:
    """Print published and predicted tokens per second of each row, and the same after a factor from the first row."""
    factors: dict[str, float] = {}
    for row in (one for one in (*ROWS, *MEMORY_ROWS) if one.rate):
        outcome = predicted(row)
        rate = row.accumulation * row.samples * row.tokens / row.tensor / outcome.step.total_us * 1e6
        factor = factors.setdefault(row.table, row.rate / rate)
        line = f"{row.name}: published {row.rate}, predicted {rate:.0f} ({rate / row.rate - 1:+.1%}; "
        line += f"after the first row {rate * factor / row.rate - 1:+.1%}); "
        print(f"{line}peak {outcome.memory.peak_bytes / 2**30:.1f} GiB")
    for row in [one for one in (*ROWS, *MEMORY_ROWS) if one.table != "MindSpeed-LLM"]:
        memory = predicted(row).memory
        peak, limit = memory.peak_bytes / 2**30, memory.limit_bytes / 2**30
        published = f" at {row.peak_gib} GiB" if row.peak_gib else ""
        outcomes = ["fits" if fits else "runs out" for fits in (row.fits, peak <= limit)]
        share = peak / (device_of(row).counted_bytes / 2**30)
        print(
            f"{row.name}: {outcomes[0]}{published}; predicted {outcomes[1]}: {peak:.1f} of {limit:.1f} GiB ({share:.1%})"
        )
        if row.peak_gib:
            same = peak if row.table == "Automodel" else reserved_gib(row)
            print(f"    peak {same:.1f} GiB, {same / row.peak_gib - 1:+.1%}")


if __name__ == "__main__":
    main()
