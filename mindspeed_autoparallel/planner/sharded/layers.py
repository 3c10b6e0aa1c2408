"""The policy of every layer at fixed sizes and switches: a small integer program with the replay as its oracle.

The program minimises a time that is at least the length of every known path, within the memory left at every known
point. Replays add paths and points. A path's length and a point's bytes are sums over layers under any policies, so
each is a valid cut. Paths leave out copies to the host, which only delay the step.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from mindspeed_autoparallel.planner.sharded.bounds import step_bound_ns
from mindspeed_autoparallel.planner.sharded.lowering import Lowering
from mindspeed_autoparallel.planner.sharded.memory import least_time_ns, policies_of, tight_moments
from mindspeed_autoparallel.planner.sharded.prefixes import every_number, fewest_first
from mindspeed_autoparallel.planner.sharded.program import THOROUGH, Cuts, Effort, Solved, solve_program
from mindspeed_autoparallel.schedule.sharded import Replayed, StreamModule, replay
from mindspeed_autoparallel.spec.sharded import (
    ALL,
    EACH,
    KEEP,
    OFFLOAD,
    RECOMPUTE,
    RECOMPUTE_KEEP_ATTENTION,
    RECOMPUTE_OFFLOAD,
)


class LayerSearch:
    """Search of the policies for one ``Lowering`` and one memory limit."""

    def __init__(self, lowering: Lowering, limit_bytes: int, effort: Effort = THOROUGH) -> None:
        self.lowering, self.limit, self.effort = lowering, limit_bytes, effort
        self._spent_s = 0.0
        problem = lowering.problem
        layers = [one for one in problem.profile.modules if one.is_layer and one.needs_backward]
        self.layers = [one for one in layers if one.name not in lowering.forced]
        self.members: dict[str, list[int]] = {layer.name: [] for layer in self.layers}
        for index, module in enumerate(problem.profile.modules):
            layer = problem.layer_of(module)
            if layer is not None and layer.name in self.members:
                self.members[layer.name].append(index)
        self.options = {layer.name: policies_of(lowering, layer.kind) for layer in self.layers}
        self._rows: dict[str, tuple[StreamModule, ...]] = {}
        self._held: dict[tuple[str, ...], int] = {}
        self.best_policies: dict[str, str] = {}
        self.least_peak = 0
        """Least peak memory of all replays, in bytes."""
        self.nothing_fits = False
        """True once a search has proved that nothing fits."""

    def _modules(self, policy: str) -> tuple[StreamModule, ...]:
        """Return the modules when every layer has ``policy``."""
        if policy not in self._rows:
            self._rows[policy] = self.lowering.training({layer.name: policy for layer in self.layers}).modules
        return self._rows[policy]

    def all(self, policy: str) -> dict[str, str]:
        """Return ``policy`` for every layer that supports it; the others keep everything."""
        return {layer.name: policy for layer in self.layers if policy in self.options[layer.name]}

    def run(self, policies: dict[str, str]) -> Replayed:
        outcome = replay(self.lowering.training(policies))
        self.least_peak = min(self.least_peak or outcome.peak_bytes, outcome.peak_bytes)
        return outcome

    def solve(self, target_ns: int | None = None, kept: Replayed | None = None) -> Solved | None:
        """Return the best policies, or ``None`` if nothing fits. Stop once the bound reaches ``target_ns``.

        ``kept``: the replay with every layer kept, if it exists already.
        """
        kept = kept or self.run({})
        if self.lowering.problem.host.reentrant:
            # A layer that is called again gathers at other moments: keeping it is not always faster.
            best = self._prefixes(every=True)
            self.nothing_fits = best is None
            return None if best is None else Solved(self.best_policies, best, best.step_ns)
        if kept.peak_bytes <= self.limit:
            return Solved({}, kept, kept.step_ns)
        if not self.may_fit():
            self.nothing_fits = True
            return None
        best = self._prefixes()
        choice = self.lowering.problem.host.layer_choice
        if choice != EACH:
            if best is None:
                return None
            bound = best.step_ns if choice == ALL else self.path_bound_ns(kept) or kept.step_ns
            return Solved(self.best_policies, best, min(bound, best.step_ns))
        cuts = Cuts()
        self._learn(cuts, {}, kept)
        bound = kept.step_ns
        tried: list[dict[str, str]] = []
        for _ in range(self.effort.rounds):
            answer = solve_program(self.options, cuts, self.effort, best.step_ns if best else None)
            policies = answer.policies
            self._spent_s += answer.spent_s
            if answer.status == "infeasible":  # nothing is faster than the best, or nothing fits the points
                bound = best.step_ns if best else bound
                self.nothing_fits = best is None
                break
            bound = max(bound, answer.bound_ns)
            if answer.status == "unknown" or self._spent_s > self.effort.total_s:
                break
            if (best and bound >= best.step_ns * (1 - self.effort.tolerance)) or (
                best and target_ns and bound >= target_ns
            ):
                break
            if policies in tried:
                break
            tried.append(policies)
            outcome = self.run(policies)
            if outcome.peak_bytes <= self.limit and (best is None or outcome.step_ns < best.step_ns):
                best, self.best_policies = outcome, policies
            self._learn(cuts, policies, outcome)
        best = self._with_less(cuts, best)
        return Solved(self.best_policies, best, min(bound, best.step_ns)) if best else None

    def _with_less(self, cuts: Cuts, best: Replayed | None) -> Replayed | None:
        """Return the best result with less memory at every point: inputs in flight make the points too lax."""
        margin = 0
        for _ in range(6 if cuts.known else 0):
            answer = solve_program(self.options, cuts.with_less(margin), self.effort, best.step_ns if best else None)
            outcome = self.run(answer.policies)
            if answer.status != "found" or (best and outcome.step_ns >= best.step_ns):
                break
            if outcome.peak_bytes <= self.limit:
                best, self.best_policies = outcome, answer.policies
                break
            margin += outcome.peak_bytes - self.limit
        return best

    def may_fit(self) -> bool:
        """Return whether the policies that hold the least fit; with copies in flight others may hold less."""
        smallest = {}
        for layer, options in self.options.items():
            smallest[layer] = min(options, key=lambda policy: (self._resting(layer, policy), policy))
        self.least_peak = replay(replace(self.lowering.training(smallest), accumulation=1)).peak_bytes
        if self.least_peak <= self.limit:
            return True
        # The estimate may exceed the true peak by the inputs on the device, at most two.
        inputs = max((self._modules(KEEP)[members[0]].input_bytes for members in self.members.values()), default=0)
        return self.least_peak - 2 * inputs <= self.limit

    def _prefixes(self, *, every: bool = False) -> Replayed | None:
        """Return the best simple choice: one policy for the fewest first layers that fit, or for ``every`` number."""
        policies = (RECOMPUTE_KEEP_ATTENTION, RECOMPUTE, RECOMPUTE_OFFLOAD, OFFLOAD)
        layers = {policy: [name for name, options in self.options.items() if policy in options] for policy in policies}
        all_or_none = self.lowering.problem.host.layer_choice == ALL
        if every:
            found = every_number(layers, self.run, self.limit)
        else:
            found = fewest_first(layers, self.run, self.limit, all_or_none=all_or_none)
        if found is not None:
            self.best_policies = found[1]
        return found and found[0]

    def path_bound_ns(self, kept: Replayed) -> int | None:
        """Return a lower bound of the step time under policies that fit, or ``None`` if none fit.

        ``kept``, the replay with every layer kept, gives the longest path; the recomputation that memory requires is
        added. That path is no bound for layers that are called again as a whole: they get the bound from sums.
        """
        if self.lowering.problem.host.reentrant:
            return step_bound_ns(self.lowering, self.limit)
        if self.lowering.forced or kept.peak_bytes <= self.limit:
            return kept.step_ns
        fixed, weights = self._path({}, kept)
        if (moments := tight_moments(self.lowering, self.limit)) is None:
            return None
        alike: Counter[tuple[tuple[int, int], ...]] = Counter()
        rows = {layer: self._choices(layer, weights) for layer in self.options}
        alike.update(rows.values())
        needed = []
        for left, running in moments:
            counts = alike.copy()
            if running:
                counts[rows[self.lowering.profile.modules[running[0]].name]] -= 1
            needed.append(least_time_ns([(list(points), count) for points, count in counts.items()], left))
        return None if None in needed else max(kept.step_ns, fixed + max(one for one in needed if one is not None))

    def _choices(self, layer: str, weights: dict[tuple[str, str], int]) -> tuple[tuple[int, int], ...]:
        """Return (bytes held while waiting, nanoseconds added to a path) by policy of a layer; keeping comes first."""
        policies = (KEEP, *(policy for policy in self.options[layer] if policy != KEEP))
        return tuple((self._resting(layer, policy), weights[layer, policy]) for policy in policies)

    # Cuts

    def _again_ns(self, layer: str, policy: str) -> int:
        modules = self._modules(policy)
        total = 0
        for index in self.members[layer]:
            module = modules[index]
            if modules[self.members[layer][0]].recomputes:
                total += module.again_ns if module.name == layer else module.forward_ns
                total += module.tail_forward_ns
        return total

    def _learn(self, cuts: Cuts, policies: dict[str, str], outcome: Replayed) -> None:
        cuts.paths.append(self._path(policies, outcome))
        if outcome.peak_bytes > self.limit:
            cuts.points.append(self._point(policies, outcome))
        if any(policy in (OFFLOAD, RECOMPUTE_OFFLOAD) for policy in policies.values()):
            cuts.known.append(policies)

    def _path(self, policies: dict[str, str], outcome: Replayed) -> tuple[int, dict[tuple[str, str], int]]:
        """Return a path's length as a sum over layers of what recomputation adds to it."""
        path = outcome.path
        if any(policy in (OFFLOAD, RECOMPUTE_OFFLOAD) for policy in policies.values()):
            training = self.lowering.training(policies)
            free = tuple(replace(module, copy_ns=0) for module in training.modules)
            path = replay(replace(training, modules=free)).path
        layer_of = {index: layer for layer, members in self.members.items() for index in members}
        number = {module.name: index for index, module in enumerate(self.lowering.profile.modules)}
        first = {layer: self._first_backward(layer) for layer in self.members}
        fixed, weights = 0, dict.fromkeys(((n, p) for n in self.members for p in self.options[n]), 0)
        for what, duration in path:
            kind, name = what if isinstance(what, tuple) else ("", "")
            layer = layer_of.get(number[name]) if kind in ("A", "AT", "B", "BT") else None
            if layer is not None and kind in ("A", "AT"):
                for policy in self.options[layer]:
                    weights[layer, policy] += self._redone(layer, policy, number[name], kind)
                continue
            fixed += duration
            if layer is not None and policies.get(layer, KEEP) in (KEEP, OFFLOAD) and (kind, name) == first[layer]:
                for policy in self.options[layer]:
                    weights[layer, policy] += self._again_ns(layer, policy)
        return fixed, weights

    def _redone(self, layer: str, policy: str, index: int, kind: str) -> int:
        modules = self._modules(policy)
        if not modules[self.members[layer][0]].recomputes:
            return 0
        module = modules[index]
        if kind == "AT":
            return module.tail_forward_ns
        return module.again_ns if module.name == layer else module.forward_ns

    def _first_backward(self, layer: str) -> tuple[str, str]:
        """Return the layer's first backward operation that reads a saved tensor: recomputation runs before it."""
        modules = self._modules(KEEP)
        at = self.members[layer][0]
        while not (modules[at].tail_backward_ns and modules[at].tail_saves):
            below = [index for index in self.members[layer] if modules[index].parent == at]
            if not below:
                return "B", modules[at].name
            at = below[-1]
        return "BT", modules[at].name

    def _point(
        self, policies: dict[str, str], outcome: Replayed
    ) -> tuple[int, dict[tuple[str, str], int], tuple[str, str] | None]:
        """Return a point's bytes as a sum over layers."""
        word, _, name = outcome.peak_point.rpartition(" of ")
        names = [module.name for module in self.lowering.profile.modules]
        at = names.index(name) if name in names else None
        acting = self.lowering.problem.layer_of(self.lowering.profile.modules[at]) if at is not None else None
        held = {layer: sum(outcome.peak_held.get(i, 0) for i in members) for layer, members in self.members.items()}
        left = self.limit - (outcome.peak_bytes - sum(held.values()))
        weights: dict[tuple[str, str], int] = {}
        only: tuple[str, str] | None = None
        for layer, size in held.items():
            chosen = policies.get(layer, KEEP)
            if acting is not None and layer == acting.name:
                left -= size
                if word != "backward":
                    only = (layer, chosen)
                continue
            if size == 0 and not (at is not None and word.endswith(("forward", "backward", "recomputation"))):
                continue
            # Between its forward and its backward. Inputs in flight to or from the host count as absent.
            if size >= self._resting(layer, chosen) and (size > 0 or self.members[layer][0] < (at or 0)):
                for policy in self.options[layer]:
                    weights[layer, policy] = self._resting(layer, policy)
        return left, weights, only

    def _resting(self, layer: str, policy: str) -> int:
        """Return the least bytes that a layer holds between its forward and its backward."""
        profile = self.lowering.profile.modules
        key = (policy, *(profile[index].kind for index in self.members[layer]))
        if key not in self._held:
            rows = [self._modules(policy)[index] for index in self.members[layer]]
            away = policy in (OFFLOAD, RECOMPUTE_OFFLOAD)
            inputs = sum(one.input_bytes for one in rows if not (away and one.name == layer))
            self._held[key] = inputs + sum(one.kept_bytes + one.tail_kept_bytes for one in rows)
        return self._held[key]
