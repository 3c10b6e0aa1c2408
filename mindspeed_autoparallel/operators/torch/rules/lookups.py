"""Rules of operators that read or write at indices."""

from __future__ import annotations

from mindspeed_autoparallel.operators.graph.node import Axis
from mindspeed_autoparallel.operators.torch.rules.base import TENSOR, Call, Dims, Rule, Shape, aligned, axes_of


def embedding(call: Call) -> Rule:
    """Cut a look-up by index dims, width, and the table's rows (a pending sum of masked look-ups).

    Gradients scaled by frequency need the whole index, so then only the width is cut.
    """
    table, index = call.shapes
    by_frequency = call.operator == "embedding" and bool(call.argument(3, False))
    lead = tuple(range(len(index)))
    axes = (
        *(Axis(f"rows{d}", n, cuttable=not by_frequency) for d, n in enumerate(index)),
        Axis("hidden", table[1]),
        Axis("table", table[0], cuttable=not by_frequency),
    )
    wide = len(index)
    return Rule("gather", axes, ((wide + 1, wide), lead), (*lead, wide))


def embedding_bag(call: Call) -> Rule:
    """Cut only the width: where bags begin depends on values."""
    if call.index:
        raise ValueError("the bags' bookkeeping")
    table = call.shapes[0]
    none = tuple((None,) * len(shape) for shape in call.shapes[1:])
    return Rule("gather", (Axis("hidden", table[1]),), ((None, 0), *none), (None, 0))


def indexed(call: Call) -> Rule:
    """Cut x[.., i, j, ..] by the dims of the indices and by the dims of x that are not indexed.

    A table of two dims that is indexed by its first is cut like an embedding.
    """
    table, indices = call.shapes[0], call.shapes[1:]
    along = call.plain[1]
    if call.operator == "index_select":
        where = [int(along) % len(table)]
    else:
        where = [d for d, item in enumerate(along) if item is TENSOR]
        if len(along) > len(table) or len(where) != len(indices):
            raise ValueError("an index by a mask")
    if len(table) == 2 and where == [0]:
        return embedding(Call("index", call.shapes, call.plain, call.output))
    wide = _broadcast(indices)
    rest = [d for d in range(len(table)) if d not in where]
    axes = [Axis(f"rows{d}", n) for d, n in enumerate(wide)] + [Axis(f"dim{d}", table[d]) for d in rest]
    number = {d: len(wide) + at for at, d in enumerate(rest)}
    contiguous = where == list(range(where[0], where[0] + len(where)))
    before = [d for d in rest if contiguous and d < where[0]]
    output = (*(number[d] for d in before), *range(len(wide)), *(number[d] for d in rest if d not in before))
    operands = (tuple(number.get(d) for d in range(len(table))), *(aligned(shape, wide) for shape in indices))
    return Rule("gather", tuple(axes), operands, output)


def _broadcast(shapes: tuple[Shape, ...]) -> Shape:
    rank = max(map(len, shapes))
    padded = [(1,) * (rank - len(shape)) + shape for shape in shapes]
    return tuple(max(sizes) for sizes in zip(*padded, strict=True))


def index_put(call: Call) -> Rule:
    """Cut the dims of x that are not indexed; they are the last dims of the values."""
    given, values = call.shapes[0], call.shapes[-1]
    where = [d for d, item in enumerate(call.plain[1]) if item is TENSOR]
    if len(where) != len(call.shapes) - 2 or where != list(range(len(where))):
        raise ValueError("an index that does not begin at the first dim")
    rest = range(len(where), len(given))
    dims: Dims = tuple(d if d in rest else None for d in range(len(given)))
    shift = len(given) - len(values)
    back: Dims = tuple(d + shift if d + shift in rest and given[d + shift] == n else None for d, n in enumerate(values))
    indices = tuple((None,) * len(shape) for shape in call.shapes[1:-1])
    return Rule("scatter", axes_of(given, set(where)), (dims, *indices, back), dims)


def gathered(call: Call) -> Rule:
    """Cut gather(x, dim, index) by the index along ``dim`` (x is whole there) and by all other dims of equal size."""
    given, index = call.shapes
    dim = int(call.plain[1]) % len(given) if given else 0
    same = [d for d in range(len(given)) if d != dim and given[d] == index[d]]
    axes = tuple(Axis(f"dim{d}", n, cuttable=d == dim or d in same) for d, n in enumerate(index))
    everywhere = tuple(range(len(index)))
    return Rule("gather", axes, (tuple(d if d in same else None for d in everywhere), everywhere), everywhere)


def scattered(call: Call) -> Rule:
    """Cut scatter(x, dim, index, source) by the dims other than ``dim`` whose sizes agree in all tensors."""
    given = call.shapes[0]
    dim = int(call.plain[1]) % len(given)
    same = {d for d in range(len(given)) if d != dim and all(shape[d] == given[d] for shape in call.shapes)}
    dims: Dims = tuple(d if d in same else None for d in range(len(given)))
    return Rule("scatter", axes_of(given, set(range(len(given))) - same), (dims,) * len(call.shapes), dims)
