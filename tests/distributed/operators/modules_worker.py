"""Modules put together at random, and refusals of ``distribute_plan``, on two ranks.

    modules_worker.py COUNT SEED

A module is a chain of steps that nobody tuned rules to: rotary codes written into slices, complex rotations, Fourier
layers, spectral norms, boolean masks, gathers, reductions. Each is captured, run by random plans and compared with one
process. What is refused must be a ``ConfigError``.
"""

import copy
import random
import sys
import warnings

import torch
import torch.distributed as dist
from plan_checks import COUNTER, compare, make_groups, random_plan
from ranks import leave_with
from torch.distributed.device_mesh import init_device_mesh

from mindspeed_autoparallel.errors import ConfigError
from mindspeed_autoparallel.operators.torch.capture import capture_program
from mindspeed_autoparallel.operators.torch.distribute import distribute_plan

WIDTH, ROWS, LENGTH = 16, 8, 4
Linear = torch.nn.Linear


class Doubled(torch.autograd.Function):
    """A backward that is not the derivative: refused."""

    @staticmethod
    def forward(ctx, value):
        return value * 1

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 2


class Step(torch.nn.Module):
    """``function(module, value)`` with the modules it needs."""

    def __init__(self, function, **modules):
        super().__init__()
        self.function = function
        for name, module in modules.items():
            setattr(self, name, module)

    def forward(self, value):
        return self.function(self, value)


def rotary_by_slices(step, value):
    turned, half = torch.empty_like(value), WIDTH // 2
    turned[..., :half] = value[..., :half] * 0.6 - value[..., half:] * 0.8
    turned[..., half:] = value[..., half:] * 0.6 + value[..., :half] * 0.8
    return turned


def complex_rotation(step, value):
    turned = torch.view_as_complex(value.reshape(*value.shape[:-1], -1, 2))
    angles = torch.polar(torch.ones(WIDTH // 2, dtype=value.dtype), torch.arange(WIDTH // 2, dtype=value.dtype))
    return torch.view_as_real(turned * angles).flatten(-2)


def fourier(step, value):
    made = torch.fft.rfft(step.inner(value), dim=-1)
    return torch.fft.irfft(made * torch.linspace(0, 1, made.shape[-1], dtype=value.dtype), n=WIDTH, dim=-1)


def masked(step, value):
    changed = value.clone()
    changed[value > 0.5] = 0.5
    return changed


def best_two(step, value):
    found, places = value.topk(2, -1)
    return torch.zeros_like(value).scatter(-1, places, found) + value


def attention(step, value):
    query, key, values = step.inner(value).chunk(3, -1)
    return value + torch.softmax(query @ key.transpose(-1, -2) / 4, -1) @ values


KINDS = [
    lambda: Linear(WIDTH, WIDTH),
    lambda: torch.nn.Sequential(Linear(WIDTH, 2 * WIDTH), torch.nn.GELU(), Linear(2 * WIDTH, WIDTH)),
    lambda: torch.nn.LayerNorm(WIDTH),
    lambda: torch.nn.RMSNorm(WIDTH),
    lambda: torch.nn.Dropout(0.2),
    lambda: torch.nn.RReLU(),
    lambda: torch.nn.utils.spectral_norm(Linear(WIDTH, WIDTH)),
    lambda: torch.nn.utils.parametrizations.weight_norm(Linear(WIDTH, WIDTH)),
    lambda: Step(rotary_by_slices),
    lambda: Step(complex_rotation),
    lambda: Step(fourier, inner=Linear(WIDTH, WIDTH)),
    lambda: Step(masked),
    lambda: Step(best_two),
    lambda: Step(attention, inner=Linear(WIDTH, 3 * WIDTH)),
    lambda: Step(lambda step, value: value.to(torch.float32).to(value.dtype)),
    lambda: Step(lambda step, value: value.cumsum(-2) / LENGTH),
    lambda: Step(lambda step, value: value - value.logsumexp(-1, keepdim=True)),
    lambda: Step(lambda step, value: torch.einsum("bij,bkj->bik", value, value).softmax(-1) @ value),
    lambda: Step(lambda step, value: torch.where(value > 0, value, value.roll(1, -1))),
    lambda: Step(lambda step, value: value.unflatten(-1, (4, 4)).transpose(-1, -2).flatten(-2)),
    lambda: Step(lambda step, value: torch.nn.functional.normalize(value, dim=-1)),
    lambda: Step(lambda step, value: step.inner(value.transpose(1, 2)).transpose(1, 2), inner=Linear(LENGTH, LENGTH)),
    lambda: Step(lambda step, value: Doubled.apply(value)),
    lambda: Step(lambda step, value: value[value > 0].sum() + value),
    lambda: Step(lambda step, value: value * (1 if value.sum() > 0 else 2)),
]


def module_of(seed):
    draw = random.Random(seed)
    torch.manual_seed(seed)
    # A leaf first: what follows works on a value that needs a gradient.
    return torch.nn.Sequential(
        Linear(WIDTH, WIDTH), *(draw.choice(KINDS)() for _ in range(draw.randint(2, 5)))
    ).double()


def refusals(mesh):
    """Give what calls that a capture is not for raise, by name."""
    found = {}

    def refused(name, call):
        try:
            call()
            found[name] = "nothing"
        except ConfigError as error:
            found[name] = str(error)
        except Exception as error:
            found[name] = f"raw {type(error).__name__}: {error}"

    model = torch.nn.Sequential(Linear(WIDTH, WIDTH), torch.nn.Dropout(0.5)).double()
    captured = capture_program(model, (torch.randn(ROWS, WIDTH).double(),))
    made = distribute_plan(captured, random_plan(captured.graph, (2,), 0), model, mesh)
    refused("smaller batch", lambda: made(torch.randn(ROWS - 2, WIDTH).double()))
    refused("copied", lambda: copy.deepcopy(made))
    made(torch.randn(ROWS, WIDTH).double())
    made.eval()
    refused("evaluation", lambda: made(torch.randn(ROWS, WIDTH).double()))
    model, _, captured = normed()
    made = distribute_plan(captured, random_plan(captured.graph, (2,), 0), model, mesh)
    own = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(dist.get_rank())).double()
    refused("samples of its own", lambda: made(own))
    refused("input with a gradient", lambda: made(torch.ones(ROWS, WIDTH).double().requires_grad_()))
    return found


def normed():
    """Return a module with running statistics, a copy of it, and its capture."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(Linear(WIDTH, WIDTH), torch.nn.BatchNorm1d(WIDTH), Linear(WIDTH, 4)).double()
    return model, copy.deepcopy(model), capture_program(model, (torch.randn(ROWS, WIDTH).double(),))


def to_train():
    """Return a module with running statistics, a copy of it, and captures: of a batch, of a smaller one, of evaluation."""
    model, alone, captured = normed()
    smaller = capture_program(model, (torch.randn(ROWS - 2, WIDTH).double(),))
    evaluated = capture_program(model.eval(), (torch.randn(ROWS, WIDTH).double(),))
    model.train()
    return model, alone, captured, smaller, evaluated


def training_as_users_have_it(seed, model, alone, captured, smaller, evaluated):
    """Return how far a loader's own samples on each rank, a smaller last batch, evaluation and the saved state are from
    one process that has all samples."""
    plan = random_plan(captured.graph, (2,), seed)
    made = distribute_plan(
        captured, plan, model, init_device_mesh("cpu", (2,)), also=[smaller, evaluated], loader_dims=[0]
    )
    own, other = (torch.optim.SGD(each.parameters(), lr=0.1) for each in (made, alone))
    worst = 0.0
    for number, rows in enumerate((ROWS, ROWS, ROWS - 2)):
        samples = torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(number)).double()
        targets = samples[:, :4].sin()
        mine = slice(dist.get_rank() * rows // 2, (dist.get_rank() + 1) * rows // 2)
        loss = (made(samples[mine]) - targets[mine]).square().mean()
        right = (alone(samples) - targets).square().mean()
        for optimizer, each in ((own, loss), (other, right)):
            optimizer.zero_grad()
            each.backward()
            optimizer.step()
        total = loss.detach().clone()
        dist.all_reduce(total)
        worst = max(worst, abs(float(total / 2 - right)) / float(right))
    made.eval(), alone.eval()
    found, right = made(samples_of_all()[dist.get_rank() * ROWS // 2 :][: ROWS // 2]), alone(samples_of_all())
    worst = max(worst, float((found - right[dist.get_rank() * ROWS // 2 :][: ROWS // 2]).abs().max()))
    for name, value in alone.state_dict().items():
        saved = made.state_dict()[name]
        saved = saved.full_tensor() if hasattr(saved, "full_tensor") else saved
        worst = max(worst, float((saved - value).abs().max()))
    return worst


def samples_of_all():
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(99)).double()


def prepared(number, seed):
    """Return a module, its input, and its capture or the error that this ends with."""
    model = module_of(seed * 1000 + number)
    given = (torch.randn(ROWS, LENGTH, WIDTH, generator=torch.Generator().manual_seed(number)).double(),)
    try:
        return model, given, capture_program(model, given)
    except Exception as error:
        return model, given, error


warnings.filterwarnings("ignore")
torch.set_num_threads(1)
PREPARED = [prepared(number, int(sys.argv[2])) for number in range(int(sys.argv[1]))]
TO_TRAIN = [to_train() for _ in range(6)]
"""Both once, before the ranks are forked."""


def main():
    dist.init_process_group("gloo")
    COUNTER.install()
    mesh, rows = make_groups((2,)), []
    for number, (model, given, captured) in enumerate(PREPARED):
        name = ", ".join(getattr(getattr(m, "function", m), "__name__", type(m).__name__) for m in model)
        try:
            if isinstance(captured, Exception):
                raise captured
            for each in range(2):
                worst, exact, *_ = compare(model, given, captured, random_plan(captured.graph, (2,), each), mesh)
                rows.append((number, name, "ran", worst, exact))
        except ConfigError as error:
            rows.append((number, name, "refused", str(error), True))
        except Exception as error:
            rows.append((number, name, "raw", f"{type(error).__name__}: {error}"[:300], False))
            break  # the ranks may no longer be at the same place
    trained = [training_as_users_have_it(number, *each) for number, each in enumerate(TO_TRAIN)]
    leave_with({"rows": rows, "trained": trained, "refusals": refusals(init_device_mesh("cpu", (2,)))})


main()
