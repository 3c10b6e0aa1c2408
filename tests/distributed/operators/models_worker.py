"""Whole tiny models trained for three steps by random plans on two ranks, beside one process.

    models_worker.py PLANS

A decoder with complex rotary codes and grouped heads, as Llama's authors wrote it; a diffusion transformer with adaptive
norms; DeepSeek-V3 of transformers, latent attention and routed experts.
"""

import copy
import math
import sys
import warnings

import torch
import torch.distributed as dist
from plan_checks import random_plan
from ranks import leave_with
from tiny_families import tiny_model
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional

from mindspeed_autoparallel.errors import ConfigError
from mindspeed_autoparallel.operators.torch.capture import capture_program
from mindspeed_autoparallel.operators.torch.distribute import distribute_plan

Linear = torch.nn.Linear
WIDTH, HEADS, HEAD, LENGTH, WORDS = 32, 4, 8, 8, 64
STEPS, RATE = 2, 0.1


class Rotated(torch.nn.Module):
    """Pairs of a head's numbers are complex, and turned by their place."""

    def __init__(self, kv_heads=2):
        super().__init__()
        self.kv_heads = kv_heads
        self.q, self.o = Linear(WIDTH, HEADS * HEAD, bias=False), Linear(HEADS * HEAD, WIDTH, bias=False)
        self.k, self.v = (Linear(WIDTH, kv_heads * HEAD, bias=False) for _ in range(2))
        self.norm, self.other = torch.nn.RMSNorm(WIDTH), torch.nn.RMSNorm(WIDTH)
        self.w1, self.w3 = (Linear(WIDTH, 2 * WIDTH, bias=False) for _ in range(2))
        self.w2 = Linear(2 * WIDTH, WIDTH, bias=False)

    def forward(self, x, turns, mask):
        y = self.norm(x)
        q, k, v = (each(y).view(*x.shape[:2], -1, HEAD) for each in (self.q, self.k, self.v))
        q, k = (self.turned(each, turns) for each in (q, k))
        k, v = (each.repeat_interleave(HEADS // self.kv_heads, 2) for each in (k, v))
        q, k, v = (each.transpose(1, 2) for each in (q, k, v))
        mixed = torch.softmax(q @ k.transpose(2, 3) / math.sqrt(HEAD) + mask, -1) @ v
        x = x + self.o(mixed.transpose(1, 2).flatten(2))
        y = self.other(x)
        return x + self.w2(functional.silu(self.w1(y)) * self.w3(y))

    @staticmethod
    def turned(value, turns):
        pairs = torch.view_as_complex(value.reshape(*value.shape[:-1], -1, 2))
        return torch.view_as_real(pairs * turns[None, :, None]).flatten(3)


class ComplexLlama(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.head = torch.nn.Embedding(WORDS, WIDTH), Linear(WIDTH, WORDS, bias=False)
        self.layers, self.norm = torch.nn.ModuleList(Rotated() for _ in range(2)), torch.nn.RMSNorm(WIDTH)
        angles = torch.outer(torch.arange(LENGTH).double(), 100.0 ** -torch.arange(0, 1, 2 / HEAD).double())
        self.register_buffer("turns", torch.polar(torch.ones_like(angles), angles))
        self.register_buffer("mask", torch.full((LENGTH, LENGTH), -math.inf).triu(1).double())

    def forward(self, words):
        x = self.table(words)
        for layer in self.layers:
            x = layer(x, self.turns, self.mask)
        return self.head(self.norm(x))


class Adaptive(torch.nn.Module):
    """Scale, shift and gate of both halves follow from the condition."""

    def __init__(self):
        super().__init__()
        self.norm, self.other = (torch.nn.LayerNorm(WIDTH, elementwise_affine=False) for _ in range(2))
        self.qkv, self.o = Linear(WIDTH, 3 * WIDTH), Linear(WIDTH, WIDTH)
        self.mlp = torch.nn.Sequential(Linear(WIDTH, 2 * WIDTH), torch.nn.GELU("tanh"), Linear(2 * WIDTH, WIDTH))
        self.adapt = torch.nn.Sequential(torch.nn.SiLU(), Linear(WIDTH, 6 * WIDTH))

    def forward(self, x, condition):
        shift, scale, gate, shift2, scale2, gate2 = self.adapt(condition).unsqueeze(1).chunk(6, -1)
        y = self.norm(x) * (1 + scale) + shift
        q, k, v = (each.unflatten(-1, (HEADS, HEAD)).transpose(1, 2) for each in self.qkv(y).chunk(3, -1))
        x = x + gate * self.o(functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return x + gate2 * self.mlp(self.other(x) * (1 + scale2) + shift2)


class DiffusionTransformer(torch.nn.Module):
    def __init__(self, channels=3, patch=2, size=8, classes=10):
        super().__init__()
        self.shape = (size // patch, patch, channels)
        self.patches, self.classes = torch.nn.Conv2d(channels, WIDTH, patch, patch), torch.nn.Embedding(classes, WIDTH)
        self.places = torch.nn.Parameter(torch.randn(1, (size // patch) ** 2, WIDTH) / 10)
        self.time = torch.nn.Sequential(Linear(WIDTH, WIDTH), torch.nn.SiLU(), Linear(WIDTH, WIDTH))
        self.layers, self.last = torch.nn.ModuleList(Adaptive() for _ in range(2)), Linear(WIDTH, patch**2 * channels)

    def forward(self, pictures, times, labels):
        rates = torch.exp(-math.log(1e4) * torch.arange(WIDTH // 2, dtype=torch.float64) / (WIDTH // 2))
        angles = times[:, None] * rates
        condition = self.time(torch.cat([angles.cos(), angles.sin()], -1)) + self.classes(labels)
        x = self.patches(pictures).flatten(2).transpose(1, 2) + self.places
        for layer in self.layers:
            x = layer(x, condition)
        side, patch, channels = self.shape
        x = self.last(x).view(-1, side, side, patch, patch, channels)
        return torch.einsum("nhwpqc->nchpwq", x).reshape(-1, channels, side * patch, side * patch)


class DeepSeek(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.model = tiny_model("deepseek_v3", num_hidden_layers=2, use_cache=False)
        self.model.set_experts_implementation("batched_mm")

    def forward(self, words):
        return self.model(input_ids=words).logits


def cases():
    draw = torch.Generator().manual_seed(1)
    words = torch.randint(3, WORDS, (4, LENGTH), generator=draw)
    pictures = torch.randn(4, 3, 8, 8, generator=draw, dtype=torch.float64)
    times, labels = torch.arange(4).double() * 100, torch.arange(4)
    return {
        "complex Llama": (ComplexLlama, (words,)),
        "diffusion transformer": (DiffusionTransformer, (pictures, times, labels)),
        "DeepSeek-V3": (DeepSeek, (words,)),
    }


def trained(model, given):
    """Return the losses of all steps, then every parameter."""
    losses, optimizer = [], torch.optim.SGD(model.parameters(), lr=RATE)
    for _ in range(STEPS):
        out = model(*given)
        loss = (out - out.detach().roll(1, 0).sin()).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss))
    state = {name: value.detach() for name, value in model.state_dict().items()}
    return losses, {n: v.full_tensor() if hasattr(v, "full_tensor") else v for n, v in state.items()}


def prepared(build, given):
    """Return a model, its capture or why it has none, and what one process trains."""
    torch.manual_seed(0)
    model = build().double().train()
    alone = copy.deepcopy(model)
    try:
        return model, capture_program(model, given), trained(alone, given)
    except ConfigError as error:
        return model, error, None


warnings.filterwarnings("ignore")
torch.set_num_threads(1)
PREPARED = {
    (name, seed): (given, *prepared(build, given))
    for name, (build, given) in cases().items()
    for seed in range(int(sys.argv[1]))
}
"""Once, before the ranks are forked."""


def compared(case, seed, mesh):
    """Return the largest relative difference of a loss or a parameter after all steps."""
    given, model, captured, alone = case
    if isinstance(captured, ConfigError):
        raise captured
    plan = random_plan(captured.graph, (2,), seed)
    made = distribute_plan(captured, plan, model, mesh)
    (losses, state), (right, expected) = trained(made, given), alone
    worst = max(abs(one / other - 1) for one, other in zip(losses, right, strict=True))
    for name, value in expected.items():
        if value.is_floating_point() and not value.isinf().any():
            worst = max(worst, float((state[name] - value).abs().max()) / max(1.0, float(value.abs().max())))
    sent = sum(forward + backward for forward, backward in plan.edge_bytes().values())
    return worst, losses[0] > losses[-1], sent


def main():
    dist.init_process_group("gloo")
    mesh, rows = init_device_mesh("cpu", (2,)), []
    for (name, seed), case in PREPARED.items():
        try:
            rows.append((name, seed, *compared(case, seed, mesh)))
        except ConfigError as error:
            rows.append((name, seed, str(error), False, 0))
    leave_with(rows)


main()
