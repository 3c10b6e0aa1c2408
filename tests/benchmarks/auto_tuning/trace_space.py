"""Traces all layer kinds of Llama-70B and Mixtral-8x7B over their full space and prints how long that took.

python tests/benchmarks/auto_tuning/trace_space.py [--processes 2]
"""

from __future__ import annotations

import argparse
import itertools
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from mindspeed_autoparallel.runtime.profiling.trace.process import trace_all
from mindspeed_autoparallel.runtime.profiling.trace.request import TraceRequest, read_request

LLAMA_70B = {
    "hidden": 8192,
    "heads": 64,
    "kv_heads": 8,
    "ffn": 28672,
    "gated": True,
    "sequence": 4096,
    "vocabulary": 128256,
}
MIXTRAL_8X7B = {
    "hidden": 4096,
    "heads": 32,
    "kv_heads": 8,
    "ffn": 14336,
    "gated": True,
    "sequence": 4096,
    "vocabulary": 32000,
    "num_experts": 8,
    "topk": 2,
    "expert_ffn": 14336,
}
TENSOR = (1, 2, 4, 8)
CONTEXT = (1, 2, 4)
MICRO_BATCH = (1, 2, 4)
EXPERT = (1, 2, 4, 8)
RECOMPUTE = ("none", "selective", "full")


def space(model: dict[str, Any]) -> list[TraceRequest]:
    """Layers in every layout, embedding and head in every tensor, context and micro batch size."""
    requests = []
    for tensor, context, micro_batch in itertools.product(TENSOR, CONTEXT, MICRO_BATCH):
        layout = {"tensor": tensor, "context": context, "micro_batch": micro_batch, "sequence_parallel": tensor > 1}
        dense = {key: value for key, value in model.items() if "expert" not in key and key != "topk"}
        requests += [read_request({**dense, **layout, "block": block}) for block in ("embedding", "head")]
        for expert, recompute in itertools.product(EXPERT if "num_experts" in model else (1,), RECOMPUTE):
            requests.append(read_request({**model, **layout, "expert": expert, "recompute": recompute}))
    return requests


def main() -> None:
    """Traces one model after the other, nothing cached."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--processes", type=int, default=2)
    processes = parser.parse_args().processes
    total = 0.0
    for name, model in (("Llama-70B", LLAMA_70B), ("Mixtral-8x7B", MIXTRAL_8X7B)):
        requests = space(model)
        begin = time.perf_counter()
        share = -(-len(requests) // processes)
        with ThreadPoolExecutor(processes) as pool:
            parts = pool.map(trace_all, itertools.batched(requests, share))
            results = list(itertools.chain.from_iterable(parts))
        seconds = time.perf_counter() - begin
        total += seconds
        failed = [result["error"] for result in results if "error" in result]
        print(f"{name}: {len(requests)} traces in {seconds:.1f} s on {processes} processes, {len(failed)} impossible")
        for reason in sorted(set(failed)):
            print(f"  {reason}")
    print(f"together {total:.1f} s")


if __name__ == "__main__":
    main()
