"""The price of one described run: its step, simulated, and the peak of every pipeline rank.

The same blocks, the same simulator and the same memory as those of a plan (``planner.evaluate``): a layout has one
price, for all commands.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from mindspeed_autoparallel.cost.analytic.fields import section_of
from mindspeed_autoparallel.cost.analytic.kernels import check_recipe
from mindspeed_autoparallel.cost.analytic.model_shape import ENCODER
from mindspeed_autoparallel.cost.analytic.reading import gpu_name, read_workload
from mindspeed_autoparallel.cost.analytic.reading_train import recipe_of
from mindspeed_autoparallel.cost.analytic.request_keys import refuse_unmodelled
from mindspeed_autoparallel.cost.analytic.spellings import canonical
from mindspeed_autoparallel.cost.analytic.states import update_bytes
from mindspeed_autoparallel.cost.analytic.step_time import run_again
from mindspeed_autoparallel.cost.analytic.workload import Workload
from mindspeed_autoparallel.cost.catalogue import find_device
from mindspeed_autoparallel.cost.collectives import Fabric
from mindspeed_autoparallel.cost.device import Device
from mindspeed_autoparallel.planner.evaluate import Evaluation, evaluate
from mindspeed_autoparallel.planner.layouts.assembly import plan_of
from mindspeed_autoparallel.planner.placement import ModulePlacement
from mindspeed_autoparallel.planner.rank_memory import measured_at
from mindspeed_autoparallel.predict.analytic_blocks import encoder_cost, module_cost
from mindspeed_autoparallel.predict.analytic_profile import device_cost, model_of, module_costs
from mindspeed_autoparallel.predict.hugging_face_modules import TEXT
from mindspeed_autoparallel.predict.model_file import Section, encoder_module, module_of, request_in_own_words
from mindspeed_autoparallel.predict.useful_work import on_one_rank
from mindspeed_autoparallel.profiles import Measurement, ModuleCost, Profile, Provenance
from mindspeed_autoparallel.spec import Cluster, Layout, Model, Plan
from mindspeed_autoparallel.spec.plan_records import EDITED, RankMemory, SearchRecord

_ROUNDS = 4
"""Rounds of microbatches (as many as pipeline ranks) that are simulated of longer steps, once with the last round and
once without: it is the steady one and repeats until the step ends."""


@dataclass(frozen=True, kw_only=True)
class Described:
    """A run as input of the planner."""

    profile: Profile
    cluster: Cluster
    layout: Layout
    placement: ModulePlacement


def price(work: Workload, device: Device) -> Evaluation:
    """Return the price of a step of ``work`` on ``device``. Raises ``ConfigError`` for runs that Megatron refuses."""
    run = described(work, device)
    layout, batch = run.layout, work.global_batch
    shorter = _short_counts(layout, work.num_microbatches)
    if shorter is None:
        return evaluate(run.profile, run.cluster, layout, run.placement, batch, with_timeline=False)
    each = work.data_size * work.micro_batch
    less, more = (
        evaluate(run.profile, run.cluster, layout, run.placement, count * each, with_timeline=False)
        for count in shorter
    )
    return _extended(less, more, shorter, work)


def _short_counts(layout: Layout, num_microbatches: int) -> tuple[int, int] | None:
    """Return two numbers of microbatches with the same remainder, the larger of which is steady at its end."""
    period = layout.microbatch_group_size or layout.pipeline_size
    most = _ROUNDS * period + num_microbatches % period
    return (most - period, most) if num_microbatches > 2 * most - period else None


def _extended(less: Evaluation, more: Evaluation, counts: tuple[int, int], work: Workload) -> Evaluation:
    """Return ``more`` with as many microbatches as the run has, each at the pace of those between the two."""
    pace_us = (more.step.pipeline_us - less.step.pipeline_us) / (counts[1] - counts[0])
    added_us = pace_us * (work.num_microbatches - counts[1])
    pipeline_us = more.step.pipeline_us + added_us
    busy_us = (1 - more.step.bubble_fraction) * more.step.pipeline_us * work.num_microbatches / counts[1]
    step = replace(
        more.step,
        pipeline_us=pipeline_us,
        total_us=more.step.total_us + added_us,
        bubble_fraction=max(0.0, 1 - busy_us / pipeline_us),
    )
    tokens = work.global_batch * work.model.sequence
    return replace(more, step=step, throughput=tokens / (step.total_us / 1e6) / work.num_devices)


def first_step_bytes(rank: RankMemory, work: Workload) -> int:
    """Return the peak of a rank's first step: the optimizer makes its moments when the activations are gone."""
    states = sum(rank.terms[name] for name in ("parameters", "gradients", "optimizer"))
    each = work.master_bytes + work.moment_bytes - 2.0 * work.shared_master_weights
    moments = int(rank.terms["optimizer"] * work.moment_bytes / each)
    updating = update_bytes(work, rank.pipeline_rank, rank.terms["optimizer"])
    return max(rank.peak_bytes - moments, round(states + updating) + rank.runtime_overhead_bytes)


def described(work: Workload, device: Device) -> Described:
    """Return the profile of ``work``'s one point, its layout and its placement."""
    fabric = Fabric.of(device, device.efficiency(work.stack), work.devices_per_node, work.inter_node_gbit_per_s)
    layout = work.layout
    modules: dict[str, ModuleCost] = {}
    if work.model.encoder:
        modules[ENCODER] = encoder_cost(work, device, fabric)
    recomputes = ("none", work.recompute)
    modules[TEXT] = module_cost(work, device, fabric, False, is_last=True, alone=not modules, recomputes=recomputes)
    profile = Profile(
        model=_model(work),
        device=device_cost(work, device, fabric),
        measurements=(Measurement(at=measured_at(layout), modules=modules),),
        provenance=Provenance(source="analytic", device=device.name, created_utc=""),
    )
    nodes, left = divmod(work.num_devices, work.devices_per_node)
    cluster = Cluster(num_nodes=max(1, nodes), devices_per_node=left if not nodes else work.devices_per_node)
    return Described(profile=profile, cluster=cluster, layout=layout, placement=_placement(work))


def _model(work: Workload) -> Model:
    model = work.model
    modules = [encoder_module(model.encoder)] if model.encoder else []
    modules.append(module_of(Section(TEXT, {}), work, modules))
    return Model(
        name=TEXT,
        modules=tuple(modules),
        sequence_length=model.sequence,
        vocab_size=model.vocabulary,
        tied_embeddings=model.tied,
    )


def _placement(work: Workload) -> ModulePlacement:
    size, virtual = work.pipeline_size, work.virtual_size
    places = [(v % size, v // size) for v in range(size * virtual)]
    held = {TEXT: tuple(len(work.stages[stage].chunks[chunk]) for stage, chunk in places)}
    again = [run_again(work, stage) for stage in range(size)]
    recompute: dict[str, dict[str, tuple[int, ...]]] = {}
    if work.recompute == "full":
        recompute[TEXT] = {"full": tuple(again[stage][chunk] for stage, chunk in places)}
    elif work.recompute == "selective":
        recompute[TEXT] = {"selective": held[TEXT]}
    if work.model.encoder:
        held = {ENCODER: tuple(work.stages[stage].encoder_chunks[chunk] for stage, chunk in places), **held}
    ahead = next((stage for stage, place in enumerate(work.stages) if place.mtp_layers), size - 1)
    apart = size * (virtual - 1) + ahead if ahead != size - 1 else None
    return ModulePlacement(layers=held, recompute=recompute, prediction_stage=apart)


def device_of(request: Mapping[str, object], extra_devices: tuple[Device, ...] = ()) -> Device:
    """Return the device that a request names.

    Raises ``ConfigError`` if it is unknown or lacks the precision of ``train``, which no layout changes.
    """
    request = canonical(request)
    refuse_unmodelled(request)
    device = find_device(gpu_name(section_of(request, "hw")), extra_devices)
    check_recipe(device, recipe_of(section_of(request, "train")))
    return device


def priced_plan(request: Mapping[str, object], extra_devices: tuple[Device, ...] = ()) -> Plan:
    """Return the plan whose layout, placement and switches are those of ``request``. Raises ``ConfigError``."""
    own = request_in_own_words(request)
    device, work = device_of(own, extra_devices), read_workload(own)
    run = described(work, device)
    name, sections, alone = request.get("id"), [Section(TEXT, {})], [on_one_rank(work)]
    fabric = Fabric.of(device, device.efficiency(work.stack), work.devices_per_node, work.inter_node_gbit_per_s)
    model = model_of(sections, alone, module_costs(sections, alone, device, fabric))
    profile = replace(run.profile, model=replace(model, name=name) if isinstance(name, str) and name else model)
    found = evaluate(profile, run.cluster, run.layout, run.placement, work.global_batch)
    record = SearchRecord(
        status=EDITED, lower_bound_us=0.0, gap_fraction=0.0, num_configurations=1, num_solved=1, seconds=0.0
    )
    return plan_of(profile, run.cluster, run.layout, found, work.global_batch, record)
