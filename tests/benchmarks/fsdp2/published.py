"""Published FSDP2 trainings that the model can describe exactly, beside its predictions from computed costs.

python tests/benchmarks/fsdp2/published.py

torchtitan's docs/performance.md: Llama 3 on 64 A100 of 80 GB, sequences of 8,192, one sample per GPU, tokens per
second and GPU. "selective layer" recomputes every second layer, "full" every layer. torchtitan's pull request 1690:
Qwen3-32B on 8 H100 of 95 GiB, two samples of 4,096, every layer recomputed, compiled.
"""

from typing import NamedTuple

from mindspeed_autoparallel.cost.catalogue import find_device
from mindspeed_autoparallel.planner.sharded.pricing import priced
from mindspeed_autoparallel.planner.sharded.problem import Problem
from mindspeed_autoparallel.predict.sharded_profile import sharded_profile
from mindspeed_autoparallel.predict.sharded_tree import Described
from mindspeed_autoparallel.spec.sharded import KEEP, RECOMPUTE, GroupChoice, ShardedDecisions, ShardingHost, ShardSizes

SMALL = {"hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32, "intermediate_size": 14336}
LARGE = {"hidden_size": 8192, "num_hidden_layers": 80, "num_attention_heads": 64, "intermediate_size": 28672}
SHARED = {"model_type": "llama", "num_key_value_heads": 8, "vocab_size": 128256, "tie_word_embeddings": False}
QWEN = {"hidden_size": 5120, "num_hidden_layers": 64, "num_attention_heads": 64, "intermediate_size": 25600}
QWEN |= {"model_type": "qwen3", "vocab_size": 151936, "head_dim": 128}


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


ROWS = (
    Row("Llama 3 8B, selective layer", SHARED | SMALL, (RECOMPUTE, KEEP), "A100", 64, 8192, 1, 2904),
    Row("Llama 3 70B, full", SHARED | LARGE, (RECOMPUTE, RECOMPUTE), "A100", 64, 8192, 1, 331),
    Row("Qwen3 32B, full", SHARED | QWEN, (RECOMPUTE, RECOMPUTE), "H100", 8, 4096, 2, 1874, 81.85),
)


def predicted(row):
    """Return the outcome of one row."""
    described = Described(sequence=row.tokens, micro_batch_size=row.samples)
    profile = sharded_profile(row.sizes, row.name, described, find_device(row.device, ()), 8)
    patterns = dict.fromkeys(module.pattern for module in profile.modules)
    decisions = ShardedDecisions(
        sizes=ShardSizes(num_devices=row.gpus, fully_shard_size=row.gpus, micro_batch_size=row.samples),
        groups=tuple(GroupChoice(pattern=pattern) for pattern in patterns),
        policies={"model.layers.{*}": row.policies * (row.sizes["num_hidden_layers"] // 2)},
    )
    return priced(Problem(profile, ShardingHost(name="torchtitan"), 8), decisions, 2**60)


def main() -> None:
    """Print published and predicted tokens per second of each row, and the same after a factor from the first row."""
    factor = None
    for row in ROWS:
        outcome = predicted(row)
        rate = row.samples * row.tokens / outcome.step.total_us * 1e6
        factor = factor or row.rate / rate
        line = f"{row.name}: published {row.rate}, predicted {rate:.0f} ({rate / row.rate - 1:+.1%}; "
        line += f"after the first row {rate * factor / row.rate - 1:+.1%}); "
        peak = outcome.memory.peak_bytes / 2**30
        published = f"published {row.peak_gib}, {peak / row.peak_gib - 1:+.1%}" if row.peak_gib else "not published"
        print(f"{line}peak {peak:.1f} GiB ({published})")


if __name__ == "__main__":
    main()
