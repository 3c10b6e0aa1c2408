"""Every number that trades time for quality in the search for splits, with its reason.

A docstring covers the fields above it up to the one before. Seconds are of the processor.
"""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Settings:
    """One record for all strategies. No value makes a bound or a plan wrong."""

    # What a unit of effort is worth, about a processor second: counts, so that every machine finds the same
    effort_labels: int = 100_000
    effort_replays: int = 6_000
    effort_nodes: int = 4_000
    effort_divisions: int = 50
    """Labels of the chain search, replays of local searches, nodes of queries about whole layers, divisions of modules
    side by side."""

    # The order of strategies
    solve_long_step_share: float = 0.8
    """Share of the time for a step of very many microbatches."""
    solve_cuts_kept: int = 200
    """Cuts returned with a solution with virtual stages, from which the next solve begins."""

    # Small problems, enumerated
    enumeration_most_placements: int = 100_000
    """Placements of layers, and combinations with recomputation: about half a second of work."""
    enumeration_most_ideals: int = 1_000
    """Order ideals with three virtual stages or more, where there are about as many placements as pairs of ideals."""
    enumeration_most_events: int = 50_000
    """Forwards and backwards of one step: sorting more of them takes more than half a second."""
    enumeration_most_collections: int = 30_000
    """Sets of layers on one rank, some of which must be recomputed: about 0.02 ms each."""
    enumeration_most_ways: int = 500_000
    """Ways to recompute the layers of one rank that are compared together: about 20 MiB."""
    enumeration_first_block: int = 256
    enumeration_replayed: int = 64
    """Placements examined together, doubled each round; candidates replayed together."""
    enumeration_learned: int = 4
    """Critical paths kept from each replay."""

    # Chains: targets between bound and plan
    chain_beam: int = 100
    """Partial paths kept per stage while the search looks for good plans."""
    chain_simulated: int = 4
    """Plans simulated per round: each may bring a cut."""
    chain_first_share: float = 0.1
    chain_most_share: float = 0.3
    """Target between bound and plan, as a share of the gap. It grows with every proof that no plan reaches it, and
    shrinks when a proof takes too long: proofs and plans are both cheap just below the optimum."""
    chain_quick_effort: int = 2_000
    """Labels made before weighted means of cuts are computed."""
    chain_first_effort: int = 10_000
    """Labels made before a lower target is tried; doubled each time."""
    chain_branching_effort: int = 20_000
    """Labels from which a query is divided at the bottleneck; below, one search is cheaper than two halves."""
    chain_most_means: int = 4

    # Chains: moves
    chain_moves_most_tried: int = 40
    """Moves simulated without success before the descent ends."""

    # Chains: labels
    paths_most_labels: int = 20_000
    """Labels expanded together; the others wait, which bounds memory."""
    paths_most_compared: int = 300
    """Labels of one node that others are compared with; more comparisons cost more than they save."""
    paths_worthwhile: int = 16
    """Comparisons after which the loop continues only while each removes one label on average."""
    paths_slice: int = 1_000
    """Labels expanded between two readings of the clock."""

    # Chains: weighted means of cuts
    best_mean_close: float = 1e-5
    """Share of the step at which the mixture and the mean count as one."""
    best_mean_centred: float = 0.5
    """Share of the best weights in the next weights tried: damps oscillation."""
    best_mean_most_rounds: int = 400

    # Virtual stages
    virtual_most_simulated: int = 300_000
    """Replays of a local search without a limit."""
    virtual_most_nodes: int = 100_000
    """Nodes of one query about whole layers."""
    virtual_hopeless: float = 0.06
    virtual_hopeless_split: float = 0.2
    """How much slower than the plan to beat the first placements, and the simple splits before them, may be to be
    improved. A descent gains about a tenth."""
    virtual_little_effort: float = 0.25
    virtual_few_rounds: int = 15
    virtual_rounds_again: int = 4
    """Up to this effort the first relaxation alone gives the bound, in this many rounds; fewer if cuts are known."""
    virtual_relaxed_share: float = 0.3
    virtual_search_share: float = 0.5
    """Shares of the time: for the first relaxation, and until the local search ends."""

    # The linear relaxation
    relaxation_between: tuple[float, ...] = (0.1, 0.3, 0.6)
    """Where paths are sought between the fastest fractional plan (0) and the optimum of the relaxation (1)."""
    relaxation_close: float = 1e-4
    """Share of the step at which bound and fastest fractional plan count as one."""
    relaxation_most_rounds: int = 300
    relaxation_most_events: int = 4_000_000
    """Rounds of one relaxation, and events replayed in all: counts, so that a rerun gives the same result."""

    # Whole layers per rank
    ranks_worth_rounding: float = 0.02
    """Layers below this share of a rank's work stay fractional."""
    ranks_halvings: int = 6
    ranks_most_ways: int = 20_000
    """Ways to keep or recompute a number of whole layers on one rank; with more, fractions hide little."""

    # Whole layers: queries between bound and plan
    whole_layers_first_nodes: int = 1_000
    whole_layers_rounds: int = 40
    """Nodes of the first query, and rounds of its relaxation."""
    whole_layers_first_share: float = 0.25
    whole_layers_least_share: float = 0.02
    whole_layers_few_ticks: int = 4
    """Step time of the first query as a share of the gap; the least share; and the ticks closed in one query."""
    whole_layers_nearly: float = 5e-4
    """Share of the step that is closed in one query."""
    whole_layers_nearer: float = 1.5
    whole_layers_round_share: float = 0.5
    whole_layers_last_seconds: float = 1.0
    """Growth of the share after a proof; share of the time left for one query; seconds that are not divided."""

    # Local search
    search_most_fastest: int = 3
    """Fastest simple splits that fit from which descents begin, beside those even in time."""
    search_side_by_side: int = 8
    """Descents that share a replay."""
    search_first_batch: int = 16
    search_most_in_batch: int = 128
    """Candidates of one descent timed together; doubled while none is better."""
    search_most_kicks: int = 6
    """Random moves of a perturbation, at most."""
    search_forgiven: float = 5e-4
    """How much slower than the current placement the end of a descent may be to replace it."""
    search_restart: int = 30
    """Perturbations without success after which the search returns to the best placement."""
    search_patience: int = 90
    search_more_patience: float = 1.5
    """Perturbations without success before the search ends, plus this multiple of those until the last success."""
    search_other_places: float = 0.05
    """Weight of recomputation off the critical path, in passes per microbatch."""
    search_most_cuts: int = 400
    """Newest cuts kept to bound candidates."""

    # Simple splits
    starts_lighter_ends: tuple[float, ...] = (0.0, 0.1, 0.2, 0.3, 0.5)
    """Share by which the last chunk holds less; the first chunk half of that."""
    starts_fewer_first: tuple[int, ...] = (0, 1)
    starts_fewer_last: tuple[int, ...] = (0, 1, 2)
    """Layers that the first and the last virtual stage hold less than others, beside embedding and loss."""
    starts_short: int = 2
    """Runs of at most this many layers at either end (embedding, prediction, loss) count as blocks, not layers."""

    # Recompute policies
    ways_most_combined: int = 512
    """Combinations of ways over all chunks but the last; longer lists are thinned evenly."""
    ways_most_ways: int = 48
    """Ways kept for one rank."""

    # Modules side by side
    beside_ceilings: tuple[float, ...] = (1.6, 3.2, math.inf)
    """Longest steps searched, one after the other until there is a plan, as multiples of the step of equal stages."""
    beside_without_plan: int = 100
    """Nodes without any plan before the integer solver takes over, which proves infeasibility sooner."""
    beside_rounded: int = 16
    """Roundings of a mixture from which the local search begins."""
    beside_every: int = 8
    """Nodes between two mixtures that are rounded."""
    beside_first_perturbations: int = 2
    beside_later_perturbations: int = 1
    """Replays of the local search without a faster plan, per move."""
    beside_first_share: float = 0.3
    beside_most_share: float = 1.0
    """Target between bound and plan, as for chains."""
    beside_first_nodes: int = 30
    """Divisions of one query before a lower target is tried; doubled each time."""
    beside_futile: float = 0.005
    """Share of the options: a cut that drops less by itself is skipped until the next query."""
    beside_nearly: float = 0.999
    beside_nearly_share: float = 0.6
    """Bound as a share of the step that is good enough after this share of the time."""
    beside_worthwhile: float = 0.7
    """Share of options left below which prices are computed again before the rest is divided."""

    # Modules side by side: stages' options
    options_most_options: int = 100_000
    """Combinations of counts that one stage may hold; a longer table is too slow."""

    # Modules side by side: prices
    mixture_whole: float = 1e-4
    """Layers that count as none in a mixture."""
    mixture_close: float = 1e-5
    """Share of the step at which mixture and bound count as one."""
    mixture_centred: float = 0.5
    """Share of the best prices in the next prices tried: damps oscillation."""
    mixture_most_rounds: int = 200
    mixture_beginnings: int = 3
    """Rounds of one program, and the options of every stage with which it begins."""
    mixture_missing: float = 10.0
    """Cost of a missing layer in steps, so that the program always has a solution."""
    mixture_settled: int = 20
    """Options whose recomputation is solved together."""

    # Modules side by side: moves
    layer_moves_replayed: int = 32
    """Moves replayed together: those with the lowest bounds."""
    layer_moves_most_failed: int = 4
    """Replays without a faster plan before the descent ends."""
    layer_moves_kicks: tuple[int, ...] = (1, 2, 3, 4)
    """Random moves of a perturbation."""

    # Steps of many microbatches
    long_step_many: int = 100_000
    long_step_fewer: int = 10_000
    """Forwards and backwards above which a step is searched with fewer microbatches, and their number then."""
    long_step_searched: float = 0.5
    """Share of the time for that search; whole layers and replays get the rest."""

    # Group sizes
    groups_most_sizes: int = 8
    """Sizes tried, from the smallest to the largest legal one."""
    groups_first_share: float = 0.5
    """Share of the time for the smallest group; each other gets half of what is left, the likeliest first."""
    groups_least_seconds: float = 0.1

    # The next best plans
    alternatives_slacks: tuple[float, ...] = (0.002, 0.01, 0.05, 0.25, 4.0)
    """How much slower the plans listed may be, as shares of the step; the next share is tried if there are too few."""
    alternatives_most_expanded: int = 20_000
    """Partial paths expanded per share."""


SETTINGS = Settings()
