"""Random small models of real operators, and a configuration file of MindSpeed-MM's native trainer for each."""

import random
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts


@dataclass(frozen=True)
class Shape:
    """Sizes of one model and its micro batch."""

    hidden: int
    heads: int
    inner: int
    vocabulary: int
    layers: int
    experts: tuple[bool, ...]
    """By layer: whether it has experts."""
    num_experts: int
    tower: int
    """Layers of the tower; 0: none."""
    frozen: bool
    tokens: int
    samples: int
    """Of the only micro batch there is, which counts as one."""


def drawn_shape(drawn: random.Random) -> Shape:
    layers = drawn.randint(2, 6)
    has_experts = drawn.random() < 0.5
    return Shape(
        hidden=drawn.choice((64, 128)),
        heads=4,
        inner=drawn.choice((128, 256, 320)),
        vocabulary=drawn.choice((256, 1024, 4096)),
        layers=layers,
        experts=tuple(has_experts and drawn.random() < 0.8 for _ in range(layers)),
        num_experts=drawn.choice((4, 8)),
        tower=drawn.choice((0, 0, 2, 3)),
        frozen=drawn.random() < 0.5,
        tokens=drawn.choice((64, 128, 256)),
        samples=drawn.choice((1, 2, 4)),
    )


class Norm(nn.Module):
    def __init__(self, hidden):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden))

    def forward(self, x):
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))


class Attention(nn.Module):
    def __init__(self, shape):
        super().__init__()
        self.heads = shape.heads
        self.qkv = nn.Linear(shape.hidden, 3 * shape.hidden, bias=False)
        self.out = nn.Linear(shape.hidden, shape.hidden, bias=False)

    def forward(self, x):
        batch, length, hidden = x.shape
        parts = self.qkv(x).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(*parts, is_causal=True)
        return self.out(mixed.transpose(1, 2).reshape(batch, length, hidden))


class Mlp(nn.Module):
    def __init__(self, shape):
        super().__init__()
        self.gate = nn.Linear(shape.hidden, shape.inner, bias=False)
        self.up = nn.Linear(shape.hidden, shape.inner, bias=False)
        self.down = nn.Linear(shape.inner, shape.hidden, bias=False)

    def forward(self, x):
        return self.down(functional.silu(self.gate(x)) * self.up(x))


class Experts(nn.Module):
    """All tokens through all experts of this rank; matrices stacked as the host's models have them."""

    def __init__(self, shape, local):
        super().__init__()
        self.first = nn.Parameter(0.02 * torch.randn(local, shape.hidden, 2 * shape.inner))
        self.second = nn.Parameter(0.02 * torch.randn(local, shape.inner, shape.hidden))

    def forward(self, x, weights):
        rows = x.reshape(1, -1, x.shape[-1]).expand(self.first.shape[0], -1, -1)
        gate, up = torch.bmm(rows, self.first).chunk(2, -1)
        out = torch.bmm(functional.silu(gate) * up, self.second)
        return (out * weights.reshape(-1, weights.shape[-1]).t().unsqueeze(-1)).sum(0).view_as(x)


class Routed(nn.Module):
    def __init__(self, shape, local):
        super().__init__()
        self.router = nn.Linear(shape.hidden, local, bias=False)
        self.experts = Experts(shape, local)

    def forward(self, x):
        return self.experts(x, self.router(x).softmax(-1))


class Layer(nn.Module):
    def __init__(self, shape, experts):
        super().__init__()
        self.norm1 = Norm(shape.hidden)
        self.attention = Attention(shape)
        self.norm2 = Norm(shape.hidden)
        self.mlp = Routed(shape, experts) if experts else Mlp(shape)

    def forward(self, x):
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


def called(layer, x):
    """A layer that is marked has a reentrant checkpoint around it, as Megatron's: its hooks run again."""
    again = getattr(layer, "is_called_again", False)
    return checkpoint(layer, x, use_reentrant=True, preserve_rng_state=False) if again else layer(x)


class Tower(nn.Module):
    def __init__(self, shape):
        super().__init__()
        self.patch = nn.Linear(48, shape.hidden)
        self.blocks = nn.ModuleList(Layer(shape, 0) for _ in range(shape.tower))
        self.merger = nn.Linear(shape.hidden, shape.hidden)

    def forward(self, pixels):
        x = self.patch(pixels)
        for block in self.blocks:
            x = called(block, x)
        return self.merger(x)


class Decoder(nn.Module):
    def __init__(self, shape, local):
        super().__init__()
        self.embed_tokens = nn.Embedding(shape.vocabulary, shape.hidden)
        self.layers = nn.ModuleList(Layer(shape, local if experts else 0) for experts in shape.experts)
        self.norm = Norm(shape.hidden)

    def forward(self, tokens, pictures):
        x = self.embed_tokens(tokens)
        if pictures is not None:
            x = x + pictures
        for layer in self.layers:
            x = called(layer, x)
        return self.norm(x)


class Model(nn.Module):
    def __init__(self, shape, expert_size=1):
        super().__init__()
        self.visual = Tower(shape) if shape.tower else None
        self.language_model = Decoder(shape, shape.num_experts // expert_size)
        self.lm_head = nn.Linear(shape.hidden, shape.vocabulary, bias=False)
        if self.visual is not None and shape.frozen:
            self.visual.requires_grad_(False)

    def forward(self, input_ids, pixels=None):
        pictures = self.visual(pixels) if self.visual is not None else None
        logits = self.lm_head(self.language_model(input_ids, pictures)).float()
        return functional.cross_entropy(logits.flatten(0, 1), input_ids.flatten())


def batch_of(shape):
    pixels = torch.zeros(shape.samples, shape.tokens, 48) if shape.tower else None
    return {"input_ids": torch.zeros(shape.samples, shape.tokens, dtype=torch.long), "pixels": pixels}


def configuration(shape, wrapped, param_dtype, reduce_dtype):
    """Return a file of the native trainer that wraps the modules of ``wrapped``."""
    experts = '["language_model.layers.{*}.mlp.experts"]' if any(shape.experts) else "[]"
    stacks = ["language_model.layers.{*}", *(["visual.blocks.{*}"] if shape.tower else [])]
    return f"""
parallel:
  fully_shard_parallel_size: auto
  fsdp_plan:
    apply_modules: {list(wrapped)}
    param_dtype: {param_dtype}
    reduce_dtype: {reduce_dtype}
  ulysses_parallel_size: 1
  expert_parallel_size: 1
  ep_plan: {{apply_modules: {experts}}}
model: {{model_id: drawn, model_name_or_path: ./none}}
data: {{dataset_param: {{dataset_type: huggingface}}}}
features:
  recompute: true
  recompute_plan: {{apply_modules: {stacks}}}
training: {{micro_batch_size: 1, gradient_accumulation_steps: 1, init_model_with_meta_device: true}}
"""


def recomputing(forward, keep_attention):
    def keeps(context, operator, *args, **kwargs):
        saved = keep_attention and "scaled_dot_product" in str(operator)
        return CheckpointPolicy.MUST_SAVE if saved else CheckpointPolicy.PREFER_RECOMPUTE

    contexts = {"context_fn": partial(create_selective_checkpoint_contexts, keeps)} if keep_attention else {}
    return lambda *args: checkpoint(forward, *args, use_reentrant=False, preserve_rng_state=False, **contexts)


def parted(forward, parts):
    part = recomputing(forward, keep_attention=False)
    # Sliced as the host does: the gradient of a slice is as large as the whole input's.
    size = lambda x: x.shape[0] // parts
    return lambda x: torch.cat([part(x[at : at + size(x)]) for at in range(0, x.shape[0], size(x))])
