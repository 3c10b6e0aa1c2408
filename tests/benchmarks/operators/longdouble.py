"""Gradients of a random module in numpy's longdouble, by a tape of its own: a third opinion where two fp64 runs differ."""

import numpy
import torch

Array = numpy.ndarray


class Taped:
    """Hold an array, and how its gradient goes to the arrays it was made of."""

    def __init__(self, value, *sources):
        self.value, self.sources, self.gradient = value, sources, numpy.zeros_like(value)

    def transposed(self):
        return Taped(self.value.swapaxes(0, 1), (self, lambda g: g.swapaxes(0, 1)))

    def detached(self):
        return Taped(self.value)


def product(x, weight):
    """Multiply (.., inner) by (columns, inner), transposed."""
    rows = x.value.reshape(-1, x.value.shape[-1])
    return Taped(
        x.value @ weight.value.T,
        (x, lambda g: g @ weight.value),
        (weight, lambda g: g.reshape(-1, g.shape[-1]).T @ rows),
    )


def vector(x, weight):
    """Scale rows by tanh of their product with a vector."""
    gate = numpy.tanh(x.value @ weight.value)[..., None]

    def slope(g):
        return (g * x.value).sum(-1, keepdims=True) * (1 - gate**2)

    return Taped(
        x.value * gate,
        (x, lambda g: g * gate + slope(g) * weight.value),
        (weight, lambda g: (slope(g) * x.value).reshape(-1, x.value.shape[-1]).sum(0)),
    )


def plus(x, y):
    return Taped(x.value + y.value, (x, lambda g: g), (y, lambda g: g))


def tanh(x):
    made = numpy.tanh(x.value)
    return Taped(made, (x, lambda g: g * (1 - made**2)))


def scaled(x, factor):
    return Taped(x.value * factor, (x, lambda g: g * factor))


def norm(x):
    """Divide by the root mean square of the last dim, with torch's eps for fp64."""
    inverse = 1 / numpy.sqrt((x.value**2).mean(-1, keepdims=True) + numpy.longdouble(torch.finfo(torch.float64).eps))
    made = x.value * inverse
    return Taped(made, (x, lambda g: inverse * (g - made * (g * made).mean(-1, keepdims=True))))


def softmax(x):
    """Normalise exponentials along dim 1."""
    powers = numpy.exp(x.value - x.value.max(1, keepdims=True))
    made = powers / powers.sum(1, keepdims=True)
    return Taped(made, (x, lambda g: made * (g - (g * made).sum(1, keepdims=True))))


def gradients(model, x):
    """Give output and gradients by parameter name of the summed squares of ``model(x)``, a ``RandomModule``."""
    weights = {name: Taped(p.detach().numpy().astype(numpy.longdouble)) for name, p in model.named_parameters()}
    given = Taped(x.numpy().astype(numpy.longdouble))
    first = Taped(weights["first"].value.T, (weights["first"], lambda g: g.T))
    tape = [*weights.values(), given, first]
    streams = [product(given, first)]
    tape += streams
    for kind, source, other, _ in model.script:
        value = streams[source]
        parts = []
        if kind in ("linear", "vector"):
            made = (product if kind == "linear" else vector)(value, weights[f"weights.{other}"])
        elif kind == "add":
            parts = [tanh(streams[other])]
            made = plus(value, parts[0])
        elif kind == "turn":
            parts = [value.transposed()]
            made = plus(parts[0], streams[other])
        elif kind == "detach":
            made = scaled(value, 1 / (1 + numpy.exp(-streams[other].value)))
        else:
            made = (norm if kind == "norm" else softmax)(value)
        tape += [*parts, made]
        streams.append(made)
    for stream in streams[-3:]:
        stream.gradient = stream.gradient + 2 * stream.value
    for taped in reversed(tape):
        for source, back in taped.sources:
            source.gradient = source.gradient + back(taped.gradient)
    return numpy.concatenate([s.value for s in streams[-3:]], -1), {n: w.gradient for n, w in weights.items()}
