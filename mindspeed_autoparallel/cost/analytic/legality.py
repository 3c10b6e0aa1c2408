"""Refuses described runs whose layout breaks a rule of ``spec.legality``, or of what only a described run has."""

from __future__ import annotations

from collections.abc import Iterator

from mindspeed_autoparallel.cost.analytic.model_shape import ENCODER
from mindspeed_autoparallel.cost.analytic.workload import Workload
from mindspeed_autoparallel.spec.legality import (
    IllegalLayout,
    Shared,
    broken_batch,
    broken_groups,
    broken_shares,
    offloaded_beside_stages,
    uneven_sequence,
    uneven_widths,
)


def check_layout(work: Workload, name: str) -> None:
    """Raise ``IllegalLayout`` where no run can start; ``name``: of the described module."""
    broken = next(filter(None, _broken(work, name)), "")
    if broken:
        raise IllegalLayout(broken)


def _broken(work: Workload, name: str) -> Iterator[str]:
    model, layout = work.model, work.layout
    own = Shared(name=name, num_heads=model.heads, num_kv_heads=model.kv_heads, num_experts=model.num_experts)
    encoders = [Shared(name=ENCODER, num_heads=model.encoder.heads)] if model.encoder else []
    yield broken_shares(layout, [*encoders, own], bool(model.num_experts))
    yield uneven_sequence(layout, model.sequence)
    yield uneven_widths(layout, model.ffn, model.expert_ffn if model.num_experts else 0, name)
    yield broken_groups(layout, bool(model.num_experts))
    yield broken_batch(layout, work.global_batch)
    yield offloaded_beside_stages(layout, work.offloaded_layers)
