"""Random hetero-parallel trainings of the reference model: layouts, memory modes, data and what else changes a gradient.

``draw(seed, count)`` gives cases as JSON; a case without blocks is the one process that it is compared with.
"""

import itertools
import random

WORLD, LAYERS, BATCH = 8, 4, 8
DATA = ("mixed", "mixed", "mixed", "no_images", "no_clips", "text")
"""Kinds of samples; a step of "text" has no item for any encoder."""


def draw(seed, count, *, generator_stages=False):
    """Return ``count`` cases, the same for the same seed; ``generator_stages``: only such whose generator has a
    pipeline."""
    chance = random.Random(seed)
    cases = (_case(chance, number) for number in itertools.count())
    wanted = (case for case in cases if not generator_stages or case.get("generator", {}).get("pp", 1) > 1)
    return list(itertools.islice(wanted, count))


def covering(cases):
    """Return few of ``cases`` that have, together, every value that all of them have: of sizes, modes, data and flags."""
    wanted, seen, chosen = set().union(*map(_values, cases)), set(), []
    while seen != wanted:
        chosen.append(max(cases, key=lambda case: len(_values(case) - seen)))
        seen |= _values(chosen[-1])
    return chosen


def _values(case):
    names = ("image", "audio", "text", "generator")
    sizes = {(name, *pair) for name in names for pair in _sizes(case.get(name, {}))}
    other = {(name, value) for name, value in case.items() if isinstance(value, str | bool | float) and name != "name"}
    return sizes | other | {("scaled", case["scale"] > 1), ("micro batch", case["micro_batch"])}


def _sizes(block):
    virtual = isinstance(block.get("pipeline_num_layers", [0])[0], list)
    return {("virtual", virtual), *((name, block.get(name)) for name in ("tp", "pp", "cp", "sp"))}


def reference_of(case):
    """Return the one process with the same samples and arithmetic."""
    same = {key: case[key] for key in ("data", "dropout", "dtype", "per_token", "generates", "micro_batch")}
    return {**same, "name": "one-" + "-".join(str(value) for value in same.values())}


def _case(chance, number):
    backbone = _backbone(chance)
    replicas = WORLD // (backbone["tp"] * backbone["pp"] * backbone["cp"])
    virtual = isinstance(backbone.get("pipeline_num_layers", [0])[0], list)
    micro_batch = chance.choice([size for size in (1, 1, 2) if BATCH % (size * replicas) == 0])
    num_microbatches = BATCH // (micro_batch * replicas)
    if virtual and num_microbatches % backbone["pp"]:
        micro_batch, num_microbatches = 1, BATCH // replicas
    generates = not virtual and num_microbatches >= backbone["pp"] and chance.random() < 0.5
    case = {
        "name": f"case-{number:03d}",
        "image": _encoder(chance, layers=4, most_stages=4),
        "audio": _encoder(chance, layers=2, most_stages=2),
        "text": backbone,
        "sequence_parallel": backbone["tp"] > 1 and chance.random() < 0.6,
        "memory": chance.choice(["upfront", "recompute", "window", "window"]),
        "balance": chance.choice(["local", "global", "off"]),
        "scale": chance.randint(1, num_microbatches),
        "distributed_optimizer": chance.random() < 0.4,
        "overlap": chance.random() < 0.4,
        "recompute": chance.random() < 0.2,
        "data": chance.choice(DATA),
        "dropout": chance.choice([0.0, 0.1]),
        "dtype": chance.choice(["fp32"] * 4 + ["bf16"]),
        "per_token": chance.random() < 0.25,
        "generates": generates,
        "micro_batch": micro_batch,
    }
    if generates:
        case["generator"] = _generator(chance.choice([1, 2, 4]), random.Random(repr(case)))
    return case


def _backbone(chance):
    tp, pp, cp = chance.choice(
        [(t, p, c) for t in (1, 2, 4) for p in (1, 2, 4) for c in (1, 2) if WORLD % (t * p * c) == 0]
    )
    layers = _partition(chance, LAYERS, pp)
    if pp == 2 and chance.random() < 0.4:
        layers = [[1, 1], [1, 1]]
    return {"tp": tp, "pp": pp, "cp": cp, "pipeline_num_layers": layers if pp > 1 else [LAYERS]}


def _encoder(chance, layers, most_stages):
    tp, pp, cp = chance.choice(
        [
            (t, p, c)
            for t in (1, 2, 4)
            for p in (1, 2, 4)
            for c in (1, 2)
            if p <= most_stages and WORLD % (t * p * c) == 0
        ]
    )
    block = {"tp": tp, "pp": pp, "cp": cp}
    if tp > 1 and chance.random() < 0.6:
        block["sp"] = True
    if pp > 1:
        block["pipeline_num_layers"] = _partition(chance, layers, pp)
    return block


def _generator(tp, chance):
    """Return the block of a generator of ``LAYERS`` layers; ``chance`` is its own."""
    pp = chance.choice([size for size in (1, 2, 4) if WORLD % (tp * size) == 0])
    return {"tp": tp, "pp": pp, "pipeline_num_layers": _partition(chance, LAYERS, pp)}


def _partition(chance, layers, stages):
    """Return at least one layer for every stage."""
    cuts = sorted(chance.sample(range(1, layers), stages - 1))
    return [stop - start for start, stop in zip([0, *cuts], [*cuts, layers], strict=True)]
