"""Unchanged Llama, Qwen2, Mixtral, ViT and BERT on 2 and 4 gloo ranks in all ways of torch's tensor parallelism.

Run: python tests/benchmarks/operators/hugging_face.py [NAME ..]. Three steps of training beside one process: the
largest relative difference of a loss, by way and number of ranks, or why there is none.
"""

import sys
from pathlib import Path

TESTS = Path(__file__).parents[2]
sys.path.insert(0, str(TESTS / "helpers"))

from ranks import run_ranks  # noqa: E402

WORKER = TESTS / "distributed" / "operators" / "hugging_face_worker.py"


def main():
    print("| model | ranks | way | worst difference | with |")
    for name in sys.argv[1:] or ("llama", "qwen2", "mixtral", "vit", "bert"):
        for ranks in (2, 4):
            rows = run_ranks(ranks, WORKER, f"{name}:styles,sequence,planned", timeout_s=900)[0].result
            for _, way, error, told, _ in rows:
                shown = "none" if error is None else f"{error:.1e}"
                print(f"| {name} | {ranks} | {way} | {shown} | {', '.join(told)} |", flush=True)


if __name__ == "__main__":
    main()
