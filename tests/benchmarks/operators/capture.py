"""Capture time of an 80-layer 70B decoder on the meta device, one thread, and the time of two searches on its graph.

python tests/benchmarks/operators/capture.py [LAYERS]
"""

import sys
import time

import torch

from mindspeed_autoparallel.operators.torch.capture import capture

torch.set_num_threads(1)
H, KV, F, V, HEAD = 8192, 1024, 28672, 32000, 128
LAYERS = int(sys.argv[1]) if len(sys.argv) > 1 else 80


class Layer(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.n1, self.n2 = torch.nn.RMSNorm(H), torch.nn.RMSNorm(H)
        self.q, self.o = torch.nn.Linear(H, H, bias=False), torch.nn.Linear(H, H, bias=False)
        self.k, self.v = torch.nn.Linear(H, KV, bias=False), torch.nn.Linear(H, KV, bias=False)
        self.gate, self.up = torch.nn.Linear(H, F, bias=False), torch.nn.Linear(H, F, bias=False)
        self.down = torch.nn.Linear(F, H, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, s, _ = x.shape
        y = self.n1(x)
        q, k, v = (p(y).view(b, s, -1, HEAD).transpose(1, 2) for p in (self.q, self.k, self.v))
        mixed = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.o(mixed.transpose(1, 2).reshape(b, s, H))
        y = self.n2(x)
        return x + self.down(torch.nn.functional.silu(self.gate(y)) * self.up(y))


class Decoder(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = torch.nn.Embedding(V, H)
        self.layers = torch.nn.ModuleList(Layer() for _ in range(LAYERS))
        self.norm, self.head = torch.nn.RMSNorm(H), torch.nn.Linear(H, V, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.table(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


with torch.device("meta"):
    model, tokens = Decoder(), torch.zeros(64, 4096, dtype=torch.int64)
started, core = time.perf_counter(), time.process_time()
graph = capture(model, (tokens,))
print(
    f"captured {len(graph.nodes)} nodes in {time.process_time() - core:.2f} core seconds, "
    f"{time.perf_counter() - started:.2f} s elapsed; unknown: {graph.unknown}"
)
from mindspeed_autoparallel.operators.strategies import search_graph  # noqa: E402

for mode in ("recursive_programming", "exact"):
    core = time.process_time()
    plan = search_graph(graph, 64, search_mode=mode)
    print(f"{mode} {time.process_time() - core:.2f} core seconds, {plan.search_s:.2f} s elapsed; {plan.dp_mp()}")
