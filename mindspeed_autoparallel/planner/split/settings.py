"""All numbers that trade time for quality in the search for splits.

A docstring covers the fields above it up to the previous docstring. Seconds of work are processor seconds; fields named
``..._seconds`` are wall time.
"""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Settings of all strategies. No value makes a bound or a plan wrong."""

    # A unit of effort, about a processor second: counts, so that every machine gets the same result
    effort_labels: int = 100_000
    effort_replays: int = 6_000
    effort_nodes: int = 4_000
    effort_divisions: int = 50
    effort_programs: int = 20
    effort_moves: int = 700
    """Per unit: labels of the chain search, replays of local searches, nodes of queries on whole layers, nodes of the
    search of parallel branches, programs of mixtures on ranks, moves below a target."""

    # The order of strategies
    solve_long_step_share: float = 0.8
    """Share of the time for the strategy for very many microbatches."""
    solve_cuts_kept: int = 200
    """Most cuts returned with a solution with virtual stages; the next solve may start from them."""

    # Small problems, enumerated
    enumeration_most_placements: int = 100_000
    """Most placements of layers, and most combinations with recompute choices: about half a second of work."""
    enumeration_most_ideals: int = 1_000
    """Most order ideals with three virtual stages or more, which have about as many placements as pairs of ideals."""
    enumeration_most_events: int = 50_000
    """Most forwards and backwards of one step that does not fold: sorting more takes more than half a second."""
    enumeration_folded_events: int = 4_000
    """Forwards and backwards above which a step that repeats a shorter one is replayed folded."""
    enumeration_folded: int = 4
    """Placements replayed folded before the others are bounded again."""
    enumeration_most_collections: int = 30_000
    """Most sets of layers that need recomputation, over all ranks: about 0.02 ms each."""
    enumeration_most_ways: int = 500_000
    """Most recompute choices of one rank that are compared together: about 20 MiB."""
    enumeration_first_block: int = 256
    enumeration_replayed: int = 64
    """Placements of the first round, doubled each round; candidates simulated together."""
    enumeration_learned: int = 4
    """Critical paths kept from each replay."""

    # Chains: targets between bound and plan
    chain_beam: int = 100
    """Partial paths kept per stage while the search looks for good plans."""
    chain_simulated: int = 4
    """Plans simulated per round; each may add a cut."""
    chain_first_share: float = 0.1
    chain_most_share: float = 0.3
    """Target between bound and plan, as a share of the gap. It grows with every proof that no plan reaches it, and
    shrinks when a proof takes too long: proofs and plans are both cheap just below the optimum."""
    chain_quick_effort: int = 2_000
    """Labels made before the query is divided, or searched in earnest."""
    chain_first_effort: int = 10_000
    """Labels made before a lower target is tried; doubled each time."""
    chain_branching_effort: int = 20_000
    """Labels of a query from which it is divided at the bottleneck; below, one search is cheaper than two halves."""

    # Chains: moves
    chain_moves_most_tried: int = 40
    """Moves simulated without success before the descent ends."""

    # Chains: labels
    paths_most_labels: int = 20_000
    """Labels expanded together; the others wait, which bounds memory."""
    paths_most_compared: int = 300
    """Most labels of one node that others are compared with; more comparisons cost more than they save."""
    paths_worthwhile: int = 16
    """Comparisons after which the loop continues only while each removes one label on average."""
    paths_slice: int = 1_000
    """Labels expanded between two readings of the clock."""

    # Virtual stages
    virtual_most_simulated: int = 300_000
    """Most simulated placements of a local search without a limit of effort."""
    virtual_most_nodes: int = 100_000
    """Most nodes of one query on whole layers."""
    virtual_hopeless: float = 0.06
    virtual_hopeless_split: float = 0.2
    """How much slower than the step time to undercut the first placements, and the simple splits before them, may be
    for the search to go on. A descent gains about a tenth."""
    virtual_little_effort: float = 0.25
    virtual_few_rounds: int = 15
    virtual_rounds_again: int = 4
    """Up to this effort only the first relaxation gives the bound, in this many rounds, or in fewer with known cuts."""
    virtual_relaxed_share: float = 0.15
    virtual_search_share: float = 0.5
    virtual_tight_search_share: float = 0.6
    """Shares of the time: for the first relaxation, until the local search ends, and until it ends where placements
    recompute layers."""

    # The linear relaxation
    relaxation_between: tuple[float, ...] = (0.1, 0.3, 0.6)
    """Points between the fastest fractional plan (0) and the optimum of the relaxation (1) that give cuts."""
    relaxation_close: float = 1e-4
    """Gap between bound and fastest fractional plan, as a share of the step, that ends the relaxation."""
    relaxation_most_rounds: int = 300
    relaxation_most_events: int = 4_000_000
    """Most rounds of one relaxation, and most events simulated: counts, so that a rerun gives the same result."""

    # Whole layers per rank
    ranks_worth_rounding: float = 0.02
    """Layers below this share of a rank's work stay fractional."""
    ranks_halvings: int = 6
    ranks_most_ways: int = 20_000
    """Steps of bisection; most combinations of kinds for the whole layers of a rank (with more, fractions matter
    little)."""

    # Whole layers: queries between bound and plan
    whole_layers_first_nodes: int = 1_000
    whole_layers_rounds: int = 40
    """Nodes of the first query, and most rounds of the relaxation before it."""
    whole_layers_first_share: float = 0.25
    whole_layers_least_share: float = 0.02
    whole_layers_few_ticks: int = 4
    """First target as a share of the gap; the least share; and the gap in ticks that one query closes."""
    whole_layers_nearly: float = 5e-4
    """Gap, as a share of the step, that one query closes."""
    whole_layers_nearer: float = 1.5
    whole_layers_round_share: float = 0.5
    whole_layers_last_seconds: float = 1.0
    """Growth of the share after a proof; share of the remaining time for one query; remaining seconds that one query
    gets alone."""

    # Local search
    search_most_fastest: int = 3
    """Number of the fastest simple splits that fit from which descents start, besides those even in time."""
    search_side_by_side: int = 8
    """Descents that share a replay."""
    search_first_batch: int = 16
    search_most_in_batch: int = 128
    """Candidates of one descent simulated together, first and at most; doubled while none is better."""
    search_most_kicks: int = 6
    """Most random moves of a perturbation."""
    search_forgiven: float = 5e-4
    """How much slower than the current placement the result of a descent may be to replace it."""
    search_restart: int = 30
    """Perturbations without success after which the search returns to the best placement."""
    search_patience: int = 90
    search_more_patience: float = 1.5
    """Perturbations without success before the search ends, plus this multiple of those until the last success."""
    search_other_places: float = 0.05
    """Weight of recomputation off the critical path, in passes per microbatch."""
    search_most_cuts: int = 400
    search_newest_cuts: int = 50
    """Newest cuts kept to bound candidates, and those of them tried first."""

    # Local search below a target
    target_least_virtual: int = 48
    """Least virtual stages: with fewer, the plain local search finds faster placements."""
    target_below: float = 0.002
    """Share by which the target is below the best step."""
    target_moves_compared: int = 60
    target_replayed: int = 8
    """Moves compared exactly of all that the weighted cuts price, and most placements replayed together."""
    target_raised: float = 0.5
    """Rise of the weight of a cut above the target at a local minimum; weights begin at 1."""
    target_patience: int = 50
    """Moves that do not shorten the longest cut before the search begins again near the best placement."""
    target_most_kicks: int = 3
    """Most random moves from there."""

    # Simple splits
    starts_lighter_ends: tuple[float, ...] = (0.0, 0.1, 0.2, 0.3, 0.5)
    """Share by which the last chunk holds less; the first chunk holds less by half of it."""
    starts_fewer_first: tuple[int, ...] = (0, 1)
    starts_fewer_last: tuple[int, ...] = (0, 1, 2)
    """Layers that the first and the last virtual stage hold less than others, besides embedding and loss."""
    starts_short: int = 2
    """Runs of at most this many layers at either end (embedding, prediction, loss) count as blocks, not layers."""

    # Recompute policies
    ways_most_combined: int = 512
    """Most combinations of choices over all chunks but the last; longer lists are thinned evenly."""
    ways_most_ways: int = 48
    """Most recompute choices kept for one rank."""

    # Parallel branches
    beside_ceilings: tuple[float, ...] = (1.6, 3.2, math.inf)
    """Longest steps searched, in turn until a plan is found, as multiples of the step of equal stages."""
    beside_without_plan: int = 100
    """Nodes without any plan before the integer solver takes over, which proves infeasibility sooner."""
    beside_rounded: int = 16
    """Roundings of a mixture from which the local search begins."""
    beside_every: int = 8
    """Nodes between two mixtures that are rounded."""
    beside_first_perturbations: int = 2
    beside_later_perturbations: int = 1
    """Replays of the local search without a faster plan, per move: at first, and later."""
    beside_first_share: float = 0.3
    beside_most_share: float = 1.0
    """Target between bound and plan, as for chains."""
    beside_first_nodes: int = 30
    """Nodes of one query before a lower target is tried; doubled each time."""
    beside_futile: float = 0.005
    """A cut that alone drops less than this share of the options is skipped until the next query."""
    beside_nearly: float = 0.999
    beside_nearly_share: float = 0.6
    """A bound of this share of the step is good enough after this share of the time."""
    beside_worthwhile: float = 0.7
    """Share of options left below which the bound is computed again before branching."""

    # Parallel branches: stages' options
    options_most_options: int = 100_000
    """Most combinations of counts that one stage may hold; a longer table is too slow."""

    # Parallel branches: dual prices
    mixture_close: float = 1e-5
    """Difference between mixture and bound, as a share of the step, that ends the program."""
    mixture_centred: float = 0.5
    """Share of the best prices in the next prices tried, which damps oscillation."""
    mixture_most_rounds: int = 200
    mixture_beginnings: int = 3
    """Most rounds of one program, and the number of options of every stage with which it starts."""
    mixture_missing: float = 10.0
    """Cost of a missing layer in steps, so that the program always has a solution."""
    mixture_settled: int = 20
    """Most options whose exact recomputation is computed together."""

    # What ranks may hold, and its mixtures
    columns_most_held: int = 4_000
    columns_most_ways: int = 100_000
    columns_most: int = 2_000
    """Most collections of layers that one rank may hold, most combinations of their recompute choices, and most columns
    of a rank: with more of them, mixtures do not raise the bound within seconds."""
    ranks_mixture_time: float = 0.8
    ranks_mixture_gap: float = 0.045
    ranks_mixture_chunks: int = 3
    """Share of the time left for mixtures; the gap that they leave to queries on whole layers, and the least chunks of
    a rank where nothing is recomputed: otherwise queries do better."""
    ranks_mixture_met: float = 1e-4
    ranks_mixture_slow: float = 4e-4
    """Difference between mixture and bound at which the columns suffice for the cuts, and little rise of the bound
    between two such rounds; as shares of the work of a rank."""
    ranks_mixture_patience: int = 1
    """Rounds of little rise before the program ends."""
    ranks_mixture_every: int = 3
    """Rounds between two separations of cuts while columns are added."""
    ranks_mixture_share: float = 0.5
    """Rise of the bound of some plans before the next ones have their turn, as a share of the way to the target."""
    ranks_mixture_least: float = 1e-9
    """Shares and weights below this count as 0."""
    ranks_mixture_kept: int = 6
    """Newest columns per rank with which the next program starts."""

    # Parallel branches: moves
    layer_moves_replayed: int = 32
    """Moves simulated together: those with the lowest bounds."""
    layer_moves_most_failed: int = 4
    """Replays without a faster plan before the descent ends."""
    layer_moves_kicks: tuple[int, ...] = (1, 2, 3, 4)
    """Numbers of random moves of a perturbation, drawn at random."""

    # Steps of many microbatches
    long_step_many: int = 100_000
    long_step_fewer: int = 10_000
    """Number of forwards and backwards above which the search uses fewer microbatches, and their number then."""
    long_step_searched: float = 0.5
    """Share of the time for that search; bounds and simulation of the whole step get the rest."""

    # Group sizes
    groups_most_sizes: int = 8
    """Most sizes tried, from the smallest to the largest legal one."""
    groups_first_share: float = 0.5
    """Share of the time for the smallest group; each other size gets half of the rest, the most promising first."""
    groups_least_seconds: float = 0.1
    """Least seconds for one size; with less time left, it is not searched."""

    # The next best plans
    alternatives_slacks: tuple[float, ...] = (0.002, 0.01, 0.05, 0.25, 4.0)
    """How much slower than the best the listed plans may be, as shares; the next share follows if plans are too few."""
    alternatives_most_expanded: int = 20_000
    """Most partial paths expanded per share."""


SETTINGS = Settings()
