"""Questions that people ask of ``plan``: model, device, cluster, batch; the answer, its seconds and its gap, as a table.

python tests/benchmarks/plan/answers.py [--seconds S] [WORDS of the questions]

One process; seconds are of the processor. The published layout is priced by ``predict``.
"""

from __future__ import annotations

import argparse
import re
import resource
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[3] / "tests" / "helpers"))
from hugging_face_configs import QWEN3_30B_A3B

from mindspeed_autoparallel.cost.catalogue import find_device
from mindspeed_autoparallel.errors import InfeasiblePlan
from mindspeed_autoparallel.planner.layouts.options import SearchOptions
from mindspeed_autoparallel.predict.analytic_profile import stated_train
from mindspeed_autoparallel.predict.answers import Answer
from mindspeed_autoparallel.predict.model_file import Section, request_in_own_words
from mindspeed_autoparallel.predict.predict import predict_one
from mindspeed_autoparallel.predict.tuning import tune
from mindspeed_autoparallel.report.answer import answer_of

LLAMA3 = {"model_type": "llama", "vocab_size": 128256, "num_key_value_heads": 8, "tie_word_embeddings": False}
MODELS: dict[str, dict[str, Any]] = {
    "Llama 3 8B": {
        **LLAMA3,
        "num_hidden_layers": 32,
        "hidden_size": 4096,
        "num_attention_heads": 32,
        "intermediate_size": 14336,
    },
    "Llama 3 70B": {
        **LLAMA3,
        "num_hidden_layers": 80,
        "hidden_size": 8192,
        "num_attention_heads": 64,
        "intermediate_size": 28672,
    },
    "Llama 3.1 405B": {
        **LLAMA3,
        "num_hidden_layers": 126,
        "hidden_size": 16384,
        "num_attention_heads": 128,
        "intermediate_size": 53248,
    },
    "Mixtral 8x7B": {
        "model_type": "mixtral",
        "num_hidden_layers": 32,
        "hidden_size": 4096,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "intermediate_size": 14336,
        "vocab_size": 32000,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
    },
    "Qwen3 30B-A3B": QWEN3_30B_A3B,
    **{
        name: {
            "model_type": "qwen3",
            "num_hidden_layers": layers,
            "hidden_size": hidden,
            "num_attention_heads": heads,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "intermediate_size": ffn,
            "vocab_size": 151936,
            "tie_word_embeddings": tied,
        }
        for name, layers, hidden, heads, ffn, tied in (
            ("Qwen3 0.6B", 28, 1024, 16, 3072, True),
            ("Qwen3 1.7B", 28, 2048, 16, 6144, True),
            ("Qwen3 4B", 36, 2560, 32, 9728, True),
            ("Qwen3 8B", 36, 4096, 32, 12288, False),
            ("Qwen3 14B", 40, 5120, 40, 17408, False),
            ("Qwen3 32B", 64, 5120, 64, 25600, False),
        )
    },
    "Qwen2.5 72B": {
        "model_type": "qwen2",
        "num_hidden_layers": 80,
        "hidden_size": 8192,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "intermediate_size": 29568,
        "vocab_size": 152064,
    },
    "Mixtral 8x22B": {
        "model_type": "mixtral",
        "num_hidden_layers": 56,
        "hidden_size": 6144,
        "num_attention_heads": 48,
        "num_key_value_heads": 8,
        "intermediate_size": 16384,
        "vocab_size": 32768,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
    },
    "Qwen2.5-VL 7B": {
        "model_type": "qwen2_5_vl",
        "num_hidden_layers": 28,
        "hidden_size": 3584,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "intermediate_size": 18944,
        "vocab_size": 152064,
        "images": 4,
        "vision_config": {
            "depth": 32,
            "hidden_size": 1280,
            "intermediate_size": 3420,
            "num_heads": 16,
            "patch_size": 14,
            "window_size": 112,
            "fullatt_block_indexes": [7, 15, 23, 31],
        },
    },
}


@dataclass(frozen=True)
class Question:
    """One question; ``recipe``: of Megatron-LM's parallelism guide (main) for as many GPUs, or the script that
    MindSpeed-LLM (main) ships for the machine, if there is one."""

    model: str
    device: str
    nodes: int
    batch: int
    sequence: int
    recipe: str = ""

    def request(self) -> dict[str, Any]:
        """Return the question as a request without a layout."""
        return {
            "id": self.model,
            "model": {**MODELS[self.model], "seq": self.sequence},
            "hw": {"gpu": self.device, "num_gpus": 8 * self.nodes, "gpus_per_node": 8},
            "parallel": {},
            "train": {"gbs": self.batch},
        }


QUESTIONS = (
    Question("Llama 3 8B", "H100", 1, 128, 8192, "TP1 PP1 CP2 MBS1"),
    Question("Llama 3 8B", "H100", 2, 128, 8192),
    Question("Llama 3 8B", "H100", 16, 512, 8192),
    Question("Llama 3 8B", "A100", 2, 128, 8192),
    Question("Llama 3 8B", "910B", 2, 128, 8192),
    Question("Llama 3 8B", "B200", 1, 128, 8192),
    Question("Llama 3 70B", "H100", 8, 128, 8192, "TP4 PP4 CP2 MBS1"),
    Question("Llama 3 70B", "B200", 8, 128, 8192),
    Question("Llama 3 70B", "910B", 16, 256, 4096),
    Question("Llama 3 70B", "A100", 16, 256, 4096),
    Question("Llama 3.1 405B", "H100", 128, 512, 8192, "TP8 PP8 CP2 MBS1"),
    Question("Llama 3.1 405B", "H100", 64, 252, 8192),
    Question("Mixtral 8x7B", "H100", 8, 256, 4096, "TP1 PP4 EP8 MBS1"),
    Question("Mixtral 8x7B", "A100", 8, 256, 4096),
    Question("Mixtral 8x7B", "910B", 8, 256, 4096),
    Question("Mixtral 8x22B", "H100", 32, 256, 4096, "TP4 PP4 EP8 MBS1"),
    Question("Mixtral 8x22B", "910B", 32, 256, 4096),
    Question("Qwen3 0.6B", "910B", 1, 32, 4096, "TP1 PP1 MBS1"),
    Question("Qwen3 1.7B", "910B", 1, 32, 4096, "TP1 PP1 MBS1"),
    Question("Qwen3 4B", "910B", 1, 64, 4096, "TP1 PP1 MBS1"),
    Question("Qwen3 8B", "910B", 1, 64, 4096, "TP1 PP2 MBS1"),
    Question("Qwen3 14B", "910B", 1, 128, 4096, "TP8 PP1 MBS4"),
    Question("Qwen3 32B", "910B", 2, 256, 4096, "TP8 PP2 VPP4 MBS2"),
    Question("Qwen3 0.6B", "H100", 1, 256, 4096),
    Question("Qwen3 4B", "A100", 1, 256, 4096),
    Question("Qwen3 8B", "A100", 1, 128, 4096),
    Question("Qwen3 14B", "H100", 2, 256, 4096),
    Question("Qwen3 14B", "H100", 1, 64, 32768),
    Question("Qwen3 32B", "H100", 4, 256, 4096),
    Question("Qwen3 32B", "B200", 2, 256, 4096),
    Question("Qwen2.5 72B", "910B", 4, 32, 8192, "TP8 PP4 VPP5 MBS1"),
    Question("Qwen2.5 72B", "H100", 8, 256, 4096),
    Question("Qwen3 30B-A3B", "910B", 2, 256, 4096, "TP1 PP2 EP8 MBS1 full"),
    Question("Qwen3 30B-A3B", "910B", 8, 512, 4096),
    Question("Qwen3 30B-A3B", "H100", 2, 512, 4096),
    Question("Qwen3 30B-A3B", "H100", 16, 1024, 4096),
    Question("Qwen3 30B-A3B", "B200", 2, 512, 4096),
    Question("Qwen2.5-VL 7B", "910B", 2, 128, 4096),
    Question("Qwen2.5-VL 7B", "H100", 2, 128, 4096),
    Question("Qwen2.5-VL 7B", "A100", 4, 256, 4096),
)


def main() -> None:
    """Print a row for every question."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("words", nargs="*")
    arguments = parser.parse_args()
    # Limits count processor seconds: the machine may be shared.
    time.monotonic = time.process_time
    heads = ("model, sequence", "cluster", "batch", "s", "answer", "step, ms", "tokens/s/device", "MFU", "gap", "plain")
    print(f"| {' | '.join(heads)} | published |")
    print("| --- " * (len(heads) + 1) + "|")
    for item in QUESTIONS:
        if not arguments.words or any(word in f"{item.model} {item.device}" for word in arguments.words):
            head = f"| {item.model}, {item.sequence} | {item.nodes} x 8 {item.device} | {item.batch} |"
            print(f"{head} {_row(item, arguments.seconds)} |", flush=True)


def _row(item: Question, limit_s: float) -> str:
    started = _processor_s()
    options = SearchOptions(time_limit_s=limit_s, top_k=1, with_relaxations=False, num_workers=1)
    try:
        plan = tune(item.request(), options=options).plans[0]
    except InfeasiblePlan as error:
        return f"{_processor_s() - started:.0f} | {error}"
    seconds, answer = _processor_s() - started, answer_of(plan)
    loss = "-" if answer.plain_loss is None else f"{answer.plain_loss:+.1%}"
    row = (
        f"{seconds:.0f} | {answer.layout} | {answer.step_us / 1e3:,.0f} | {answer.tokens_per_s_per_device:,.0f} | "
        f"{answer.mfu or 0:.1%} | {plan.search.gap_fraction:.1%} | {loss}"
    )
    room_gib = min(rank.limit_bytes for rank in plan.memory) / 2**30
    return f"{row} | {_beside(answer.step_us / 1e3, room_gib, _published(item))}"


def _processor_s() -> float:
    return time.process_time() + resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime


def _beside(step_ms: float, room_gib: float, other: tuple[str, Answer] | None) -> str:
    """Return how much longer another layout takes, and how it is in memory."""
    if other is None:
        return "-"
    label, answer = other
    if answer["status"] == "error":
        return f"{label}: {answer['reason']}"
    peak_gib = answer["peak_memory_gib"]
    full = "" if peak_gib <= room_gib else f" ({peak_gib:.1f} of {room_gib:.1f} GiB)"
    return f"{label}: {answer['step_time_ms'] / step_ms - 1:+.1%}{full}"


def _published(item: Question) -> tuple[str, Answer] | None:
    if not item.recipe:
        return None
    sizes = {name.lower(): int(number) for name, number in re.findall(r"([A-Z]+)(\d+)", item.recipe)}
    train = {"gbs": item.batch, "mbs": sizes.pop("mbs"), "recompute": "full" if "full" in item.recipe else "none"}
    parallel = {**sizes, "sp": sizes["tp"] > 1, "dist_opt": True}
    return item.recipe, _priced(item, parallel, train)


def _priced(item: Question, parallel: dict[str, Any], train: dict[str, Any]) -> Answer:
    """Return what ``predict`` answers with the switches that ``plan`` turns on."""
    request = request_in_own_words(item.request())
    switches = stated_train([Section("text_decoder", request["model"])], find_device(item.device), {})
    return predict_one({**request, "parallel": {"dist_opt": True, **parallel}, "train": {**switches, **train}})


if __name__ == "__main__":
    main()
