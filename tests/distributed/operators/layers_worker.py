"""Small modules, one per thing that once went wrong or has a rule of its own, run by random plans on four ranks."""

import sys

import torch
import torch.distributed as dist
from plan_checks import COUNTER, compare, make_groups, random_plan
from ranks import leave_with
from torch.nn import functional as F

from mindspeed_autoparallel.operators.torch.capture import capture_program

WIDTH = 16


class Tied(torch.nn.Module):
    """An output projection that is the table; a row of padding; dropout, a mask drawn by hand, the less of two."""

    def __init__(self):
        super().__init__()
        self.table = torch.nn.Embedding(32, WIDTH, padding_idx=3)
        self.drop = torch.nn.Dropout(0.4)
        self.head = torch.nn.Linear(WIDTH, 32, bias=False)
        self.head.weight = self.table.weight

    def forward(self, tokens):
        x = self.drop(self.table(tokens))
        x = torch.min(x, x.flip(0)) * torch.bernoulli(x.detach(), 0.7)
        return self.head(self.drop(x.transpose(0, 1)).transpose(0, 1))


class Adapted(torch.nn.Module):
    """A frozen product with trained adapters, a detached branch and a region without gradients."""

    def __init__(self):
        super().__init__()
        self.frozen = torch.nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.down, self.up = torch.nn.Linear(WIDTH, 4, bias=False), torch.nn.Linear(4, WIDTH, bias=False)
        self.first = torch.nn.Linear(WIDTH, WIDTH)

    def forward(self, tokens):
        x = self.first(F.one_hot(tokens % WIDTH, WIDTH).double())
        with torch.no_grad():
            scale = x.abs().sum(-1, keepdim=True)
        return self.frozen(x) + self.up(self.down(x)) / (1 + scale) + x.detach() * x


class Vectors(torch.nn.Module):
    """Products with a vector on either side, and of two vectors."""

    def __init__(self):
        super().__init__()
        self.matrix = torch.nn.Parameter(torch.randn(WIDTH, 8))
        self.vector = torch.nn.Parameter(torch.randn(8))
        self.other = torch.nn.Parameter(torch.randn(WIDTH))

    def forward(self, tokens):
        x = F.one_hot(tokens % WIDTH, WIDTH).double() @ self.matrix
        return torch.cat(((x @ self.vector).flatten(), self.other @ self.matrix, (self.matrix @ self.vector).tanh()))


class Pictures(torch.nn.Module):
    """Convolutions (grouped, transposed), norms over batch and groups, pooling, padding, a loss."""

    def __init__(self):
        super().__init__()
        self.first, self.batch = torch.nn.Conv2d(4, 8, 3, padding=1), torch.nn.BatchNorm2d(8)
        self.depth, self.group = torch.nn.Conv2d(8, 8, 3, groups=8), torch.nn.GroupNorm(4, 8)
        self.wider = torch.nn.ConvTranspose2d(8, 8, 2, stride=2)
        self.head = torch.nn.Linear(8 * 4, 8)

    def forward(self, tokens):
        x = F.one_hot(tokens % 4, 4).double().permute(0, 2, 1).reshape(8, 4, 4, 4)
        x = self.batch(F.relu(self.first(F.pad(x, (1, 1, 1, 1)))))
        x = F.max_pool2d(self.wider(self.group(self.depth(x))), 2)
        x = F.interpolate(F.adaptive_avg_pool2d(x, 2), scale_factor=2.0)
        x = self.head(F.avg_pool2d(x, 2).flatten(1))
        return F.cross_entropy(x, tokens[:, 0] % 8)


class Sequences(torch.nn.Module):
    """Recurrent layers, einsum, dropout inside attention, sorting, scatters, bags of words."""

    def __init__(self):
        super().__init__()
        self.table = torch.nn.Embedding(32, WIDTH)
        self.lstm, self.gru = torch.nn.LSTM(WIDTH, 8, batch_first=True), torch.nn.GRU(8, 8)
        self.bag = torch.nn.EmbeddingBag(32, 8, mode="sum")

    def forward(self, tokens):
        x = self.table(tokens)
        q = x.view(*tokens.shape, 4, 4).transpose(1, 2)
        x = F.scaled_dot_product_attention(q, q, q, is_causal=True, dropout_p=0.25).transpose(1, 2).flatten(2)
        x, (last, _) = self.lstm(x)
        x, _ = self.gru(x)
        x = torch.einsum("bsh,bth->bst", x, x) + self.bag(tokens).sum(-1)[:, None, None]
        values, where = x.topk(4, -1)
        x = x.scatter(-1, where, values * 2).index_put((torch.tensor([1, 0]),), x[:2])
        x = x.gather(-1, where.flip(-1)).cumsum(1).roll((1, 2), (0, 1)).index_select(1, tokens[0] % 8)
        return x + last.sum()


class Experts(torch.nn.Module):
    """Tokens sorted by expert, grouped products, and back: a mixture of experts whose rows are known when it runs."""

    def __init__(self):
        super().__init__()
        self.table, self.router = torch.nn.Embedding(32, WIDTH), torch.nn.Linear(WIDTH, 4, bias=False)
        self.up = torch.nn.Parameter(torch.randn(4, WIDTH, 32) / 4)
        self.down = torch.nn.Parameter(torch.randn(4, 32, WIDTH) / 4)

    def forward(self, tokens):
        x = self.table(tokens).flatten(0, 1)
        scores, chosen = self.router(x).softmax(-1).topk(2, -1)
        weights = F.one_hot(chosen, 4).double() * scores[..., None]
        shares = weights.sum(1)  # rows x experts
        hidden = torch.einsum("rh,ehf->erf", x, self.up)
        return torch.einsum("erf,efh,re->rh", F.silu(hidden), self.down, shares)


def prepared(kind):
    """Return a model, its inputs and its capture."""
    torch.manual_seed(0)
    model = kind().double().train()
    inputs = (torch.randint(0, 32, (8, 16 if kind is Pictures else 8)),)
    return model, inputs, capture_program(model, inputs)


torch.set_num_threads(1)
PREPARED = {kind.__name__: prepared(kind) for kind in (Tied, Adapted, Vectors, Pictures, Sequences, Experts)}
"""Once, before the ranks are forked."""


def main():
    dist.init_process_group("gloo")
    COUNTER.install()
    meshes = {(4,): make_groups((4,)), (2, 2): make_groups((2, 2))}
    rows = []
    for kind, (model, inputs, captured) in PREPARED.items():
        for shape, mesh in meshes.items():
            for seed in range(int(sys.argv[1])):
                row = compare(model, inputs, captured, random_plan(captured.graph, shape, seed), mesh)[:3]
                rows.append((f"{kind} {shape} {seed}", *row, sorted(set(captured.graph.unknown.values()))))
    leave_with(rows)


if __name__ == "__main__":
    main()
