"""A capture whose gradients are not the module's is refused with the line; one whose are is not."""

import pytest
import torch

from mindspeed_autoparallel.errors import ConfigError
from mindspeed_autoparallel.operators.torch.capture import capture_program


class Doubling(torch.autograd.Function):
    """Forward is the identity; ``factor`` times the gradient goes back."""

    factor = 2.0

    @staticmethod
    def forward(ctx, value):
        return value * 1

    @staticmethod
    def backward(ctx, gradient):
        return gradient * Doubling.factor


class Layers(torch.nn.Module):
    def __init__(self, change=None):
        super().__init__()
        self.first, self.second = torch.nn.Linear(8, 8), torch.nn.Linear(8, 4)
        self.change = change or (lambda value: value)

    def forward(self, value):
        return self.second(self.change(torch.relu(self.first(value))))


class Sparse(torch.nn.Module):
    def forward(self, value):
        return value.to_sparse()


def hooked(value):
    if value.requires_grad:
        value.register_hook(lambda gradient: gradient * 3)
    return value


def with_parameter_hook():
    model = Layers()
    model.first.weight.register_hook(lambda gradient: gradient * 0)
    return model


def with_module_hook():
    model = Layers()
    model.second.register_full_backward_hook(lambda module, given, output: (given[0] * 2,))
    return model


def with_accumulate_hook():
    model = Layers()
    model.first.weight.register_post_accumulate_grad_hook(lambda parameter: parameter.grad.mul_(2))
    return model


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: Layers(Doubling.apply),
            r"50% off .* Cause: the backward of Doubling, written at .*test_compare\.py:\d+",
        ),
        (lambda: Layers(hooked), r"Cause: a tensor hook, registered at .*test_compare\.py:\d+"),
        (with_parameter_hook, r"first\.weight .* Cause: a hook of parameter first\.weight, written at .*test_compare"),
        (with_module_hook, r"Cause: a backward hook of module second, written at .*test_compare\.py:\d+"),
        (with_accumulate_hook, r"first\.weight has a post-accumulate-grad hook, .* Register it after"),
    ],
)
def test_code_that_changes_gradients_outside_operators_is_refused_with_its_line(make, message):
    with pytest.raises(ConfigError, match=message):
        capture_program(make(), (torch.randn(2, 8),))


def test_a_custom_backward_that_is_the_derivative_is_captured(monkeypatch):
    monkeypatch.setattr(Doubling, "factor", 1.0)
    assert capture_program(Layers(Doubling.apply), (torch.randn(2, 8),)).is_compared


def test_comparing_leaves_the_module_and_the_generators_as_they_were():
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.BatchNorm1d(8), torch.nn.Dropout(0.5))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    torch.manual_seed(5)
    state = torch.get_rng_state()
    captured = capture_program(model, (torch.randn(4, 8, generator=torch.Generator().manual_seed(1)),))
    assert captured.is_compared and torch.equal(state, torch.get_rng_state())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize("is_initialized", [True, False])
def test_comparing_draws_leaves_the_generators_of_accelerators_as_they_were(monkeypatch, is_initialized):
    seeds = {0: 7, 1: 8}

    def seed_all(seed):
        seeds.update(dict.fromkeys(seeds, seed))

    def set_state(state, device=0):
        seeds[torch.device(device).index] = int(state)

    names = {
        "is_initialized": lambda: is_initialized,
        "device_count": lambda: len(seeds),
        "get_rng_state": lambda device=0: torch.tensor(seeds[torch.device(device).index]),
        "set_rng_state": set_state,
        "manual_seed_all": seed_all,
        "_is_in_bad_fork": lambda: False,
    }
    for name, value in names.items():
        monkeypatch.setattr(torch.cuda, name, value)
    draws = Layers(lambda value: value + torch.multinomial(value.detach().abs() + 1, 8))
    assert capture_program(draws, (torch.randn(2, 8),)).is_compared
    assert seeds == {0: 7, 1: 8}


def test_a_module_without_values_is_compared_when_it_is_distributed():
    with torch.device("meta"):
        captured = capture_program(Layers(), (torch.ones(2, 8),))
    assert not captured.is_compared


def into_slices(value):
    made = torch.empty_like(value)
    made[..., :4] = value[..., 4:] * 2
    made[..., 4:] = value[..., :4]
    return made


@pytest.mark.parametrize(
    "change",
    [
        into_slices,
        lambda value: value.detach() // 0.3 + value,
        lambda value: torch.fft.ihfft(value).real.repeat(1, 2)[:, :8] + value,
        lambda value: value.index_fill(1, torch.tensor([1, 1]), value.sum()),
        lambda value: torch.addmm(value, value, torch.ones(8, 8)),
        lambda value: torch.linspace(value.min().detach(), value.max().detach(), 8) + value,
        lambda value: value + torch.empty_like(value).log_normal_(),
        lambda value: value + value.detach().clone().uniform_(),
        lambda value: value + torch.multinomial(value.detach().abs() + 1, 8),
        lambda value: torch.igamma(value.detach().abs() + 1, value.detach().abs() + 1) + value,
    ],
    ids=lambda change: str(change.__code__.co_firstlineno),
)
def test_operators_that_torch_rewrites_draws_or_cannot_derive_for_their_inputs_are_captured(change):
    captured = capture_program(Layers(change), (torch.randn(2, 8),))
    assert captured.is_compared


def test_a_gradient_that_torch_does_not_send_is_not_predicted():
    graph = capture_program(Layers(into_slices), (torch.randn(2, 8),)).graph
    copies = [node for node in graph.nodes.values() if "copy" in node.name and node.needs_gradient]
    assert len(copies) == 2 and all(0 in node.blocked_slots and 1 not in node.blocked_slots for node in copies)


def test_a_module_that_cannot_be_trained_or_returns_no_dense_tensor_is_refused():
    with pytest.raises(ConfigError, match=r"cannot be trained as it is: .* layout torch\.sparse_coo"):
        capture_program(torch.nn.Sequential(torch.nn.Linear(8, 8), Sparse()), (torch.randn(2, 8),))
