"""Lower bounds of every placement, without solving: the filter of the outer search.

Proofs: docs/decisions/0003-outer-search.md.
"""

from __future__ import annotations

import heapq

from mindspeed_autoparallel.cost.buckets import in_buckets, least_tail_us
from mindspeed_autoparallel.cost.collectives import data_parallel_link
from mindspeed_autoparallel.cost.memory import PlacedBlock, static_terms, updated_parameter_bytes
from mindspeed_autoparallel.cost.sharding import units_of
from mindspeed_autoparallel.cost.step import embedding_us, post_pipeline_time
from mindspeed_autoparallel.planner.candidate import Candidate
from mindspeed_autoparallel.planner.stage_times import NS_PER_US, beside_blocks_ns, block_ns
from mindspeed_autoparallel.planner.variable_data import mean_factors


def sharding_bound_us(candidate: Candidate) -> float:
    """Return the link's time: it moves every unit's parameters twice and its gradients once per microbatch."""
    layout = candidate.layout
    if layout.sharding is None:
        return 0.0
    blocks = _all_blocks(candidate)
    link = data_parallel_link(layout, candidate.cluster, candidate.profile.device)
    units = units_of(blocks, [(0.0, 0.0)] * len(blocks), layout, link)
    return candidate.num_microbatches * sum(2 * unit.gather_us + unit.reduce_us for unit in units)


def _all_blocks(candidate: Candidate) -> list[PlacedBlock]:
    blocks = []
    for module in candidate.profile.model.modules:
        for part, block, number in candidate.measurement.modules[module.name].parts(module.num_layers):
            name = f"{module.name} layer 0" if part == "layer" else f"{module.name} {part}"
            blocks += [PlacedBlock(name=name, cost=block)] * number
    return blocks


def pipeline_bound_ns(candidate: Candidate) -> float:
    """Return a bound from the work W of one microbatch, spread freely over P ranks, with M microbatches.

    Messages and recomputation are excluded. The host's time outside blocks, equal for all stages, is part of W and t.

    Stage s cannot start before the first microbatch has passed the stages before it, and the last microbatch must
    return through them after stage s has finished: T >= M t_s + t_0 + ... + t_(s-1). If the t add up to W, then T >= W
    / (1 - (1 - 1/M)^P). With chunks the first arrival is earlier, and only M W / P and W remain. Layers are whole, too:
    some rank runs at least ceil(layers / P) of a module's (shortest) layers M times.
    """
    profile, layout, count = candidate.profile, candidate.layout, candidate.num_microbatches
    work, layer_ns = microbatch_work_ns(candidate)
    size = layout.pipeline_size
    beside = [2 * time_ns for time_ns in beside_blocks_ns(profile.device, layout)]
    least_beside = min(sum(beside[rank::size]) for rank in range(size))
    if layout.virtual_size > 1:
        whole = max(count * -(-m.num_layers // size) * layer_ns[m.name] for m in profile.model.modules)
        return max(work, count * work / size, whole + count * least_beside)
    whole = max(whole_layers_bound(m.num_layers, size, count) * layer_ns[m.name] for m in profile.model.modules)
    return max(work / (1 - (1 - 1 / count) ** size), whole + count * least_beside)


def step_bound_us(candidate: Candidate) -> float:
    """Return a bound of the step time in microseconds."""
    return pipeline_bound_ns(candidate) / NS_PER_US + tail_bound_us(candidate)


def microbatch_work_ns(candidate: Candidate) -> tuple[int, dict[str, int]]:
    """Return the compute time of all ranks for one microbatch, without recomputation, with the host's time outside
    blocks; and each module's shortest layer time."""
    profile = candidate.profile
    factors = mean_factors(profile.variable_data)
    work = sum(2 * time_ns for time_ns in beside_blocks_ns(profile.device, candidate.layout))
    layer_ns: dict[str, int] = {}
    for module in profile.model.modules:
        cost = candidate.measurement.modules[module.name]
        factor = factors.get(module.name, 1.0)
        layers = [(block_ns(layer, factor), number) for layer, number in cost.runs(0, module.num_layers)]
        work += sum(time_ns * number for time_ns, number in layers)
        layer_ns[module.name] = min(time_ns for time_ns, _ in layers)
        ends = (cost.pre, cost.prediction, cost.post)
        work += sum(block_ns(block, factor) for block in ends if block is not None)
    return work, layer_ns


def expected_us(candidate: Candidate) -> float:
    """Return an estimate, not a bound, of a layout's pipeline time: whole blocks spread over the ranks, longest first,
    and the bubble of an even split."""
    layout, factors = candidate.layout, mean_factors(candidate.profile.variable_data)
    blocks = []
    for module in candidate.profile.model.modules:
        factor = factors.get(module.name, 1.0)
        for _, block, number in candidate.measurement.modules[module.name].parts(module.num_layers):
            blocks += [block_ns(block, factor)] * number
    ranks = [0] * layout.pipeline_size
    for time_ns in sorted(blocks, reverse=True):
        heapq.heapreplace(ranks, ranks[0] + time_ns)
    bubble = (layout.pipeline_size - 1) * sum(blocks) / layout.num_virtual_stages
    return (candidate.num_microbatches * max(ranks) + bubble) / NS_PER_US


def whole_layers_bound(num_layers: int, pipeline_size: int, num_microbatches: int) -> int:
    """Return a step time bound in units of one layer's time, from one module's layers, which are whole.

    Some rank holds at least c = ceil(layers / P). Let s be the last such rank, holding h. All later ranks hold at most
    c - 1, so at least R layers precede it, and one microbatch passes them before s begins and after it ends: T >= M h +
    R. One of the s earlier ranks holds at least R / s of them. The minimum over s and h is the bound.
    """
    least = -(-num_layers // pipeline_size)
    bounds = []
    for stage in range(pipeline_size):
        here_or_before = num_layers - (least - 1) * (pipeline_size - 1 - stage)
        for held in range(least, num_layers + 1):
            before = max(0, here_or_before - held)
            if before and not stage:
                continue
            share = -(-before // stage) if stage else 0
            bounds.append(max(num_microbatches * held + before, num_microbatches * share))
    return min(bounds)


def tail_bound_us(candidate: Candidate) -> float:
    """Return gradient reduction and optimizer of the fullest rank: at least an even share of all, and of any single
    block."""
    layout, measurement, cluster = candidate.layout, candidate.measurement, candidate.cluster
    profile, device, blocks = candidate.profile, candidate.profile.device, _all_blocks(candidate)
    if not updated_parameter_bytes(blocks, layout):
        return 0.0
    tied = tied_us_of(candidate)
    if in_buckets(layout, device):
        roots = [module for module in profile.model.modules if not module.predecessors]
        # If several modules wait for no other, any of them may begin on the first stage.
        pre = measurement.modules[roots[0].name].pre if len(roots) == 1 else None
        first = blocks if layout.pipeline_size == 1 else [PlacedBlock(name="", cost=pre)] if pre is not None else []
        return least_tail_us(blocks, first, layout, cluster, device) + tied
    # Without its fixed parts the time is linear in bytes: an even share of it, plus the fixed parts once.
    tail = post_pipeline_time(blocks, layout, cluster, device)
    share = tail.total_us / layout.pipeline_size
    distinct = {id(block.cost): block for block in blocks}.values()
    largest = max(post_pipeline_time([block], layout, cluster, device).total_us for block in distinct)
    return max(share, largest) + tied


def tied_us_of(candidate: Candidate) -> float:
    """Return the time of the all-reduce of tied embeddings."""
    profile, cluster = candidate.profile, candidate.cluster
    return embedding_us(profile.model, candidate.measurement, candidate.layout, cluster, profile.device)


def least_static_bytes(candidate: Candidate) -> int:
    """Return bytes that some rank holds during the whole step, for any placement: an even share of all parameters,
    gradients and optimizer states, plus the runtime's memory."""
    states = static_terms(_all_blocks(candidate), candidate.layout)
    share = sum(states.values()) // candidate.layout.pipeline_size
    return candidate.profile.overhead_bytes(candidate.measurement) + share
