"""The fastest layouts of a described training: ``plan`` with a computed profile, for a request without a layout."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from mindspeed_autoparallel.cost.analytic.fields import integer, optional_integer, part, section_of, switch
from mindspeed_autoparallel.cost.analytic.model_shape import ENCODER
from mindspeed_autoparallel.cost.analytic.reading import network_rate
from mindspeed_autoparallel.cost.analytic.request_keys import KNOWN, refuse_unmodelled, unknown_keys
from mindspeed_autoparallel.cost.device import Device
from mindspeed_autoparallel.errors import ConfigError
from mindspeed_autoparallel.files import shown
from mindspeed_autoparallel.interrupts import Stopped
from mindspeed_autoparallel.planner.best_first import Progress, silent
from mindspeed_autoparallel.planner.evaluate import evaluate
from mindspeed_autoparallel.planner.layouts.assembly import limits_of_plan, plan_of
from mindspeed_autoparallel.planner.layouts.options import SearchOptions
from mindspeed_autoparallel.planner.layouts.search import search
from mindspeed_autoparallel.planner.layouts.space import SpaceOptions
from mindspeed_autoparallel.planner.placement import ModulePlacement
from mindspeed_autoparallel.predict.analytic_profile import analytic_profile, stated_train, usual_points
from mindspeed_autoparallel.predict.answers import Answer
from mindspeed_autoparallel.predict.hugging_face_modules import TEXT
from mindspeed_autoparallel.predict.model_file import Section, request_in_own_words
from mindspeed_autoparallel.predict.predict import UNKNOWN, predict_one
from mindspeed_autoparallel.predict.price import device_of
from mindspeed_autoparallel.profiles import MeasuredAt, Profile
from mindspeed_autoparallel.spec import Cluster, Plan
from mindspeed_autoparallel.spec.legality import IllegalLayout, uneven_chunks, uneven_devices
from mindspeed_autoparallel.spec.plan_records import Alternative

_HELD = {
    "tp": "tensor_size",
    "pp": "pipeline_size",
    "dp": "data_size",
    "cp": "context_size",
    "ep": "expert_size",
    "vpp": "virtual_size",
    "dist_opt": "distributed_optimizer",
}
"""Keys of a request's ``parallel``, and the field of a layout that each holds."""
_SWITCHES = ("sp", "dist_opt")
"""Keys that are on or off: off is held, too."""
_SIZES = ("tp", "pp", "dp", "cp", "ep", "vpp", "etp")
_DEFAULTS = {"cp_type": ("ring", "p2p", "megatron_cp_algo", "adaptive_cp_algo")}
"""Values of keys that ``tune`` does not hold which are those of every layout."""
_PLACEMENTS = (
    *("num_layer_list", "pipeline_layout", "noop_layers", "first_stage_layers", "last_stage_layers"),
    *("account_for_embedding", "account_for_loss", "layers_per_chunk", "encoder_layer_list"),
)
_KINDS = ("none", "selective", "full")


@dataclass(frozen=True, kw_only=True)
class Tuned:
    """The fastest plans of a request."""

    plans: tuple[Plan, ...]
    """Fastest first; the first has the search's record."""
    requests: tuple[dict[str, object], ...]
    """The request that describes each plan, with every switch stated."""
    answers: tuple[Answer, ...]
    """What ``predict`` returns for each of these."""
    left_out: Mapping[str, int]
    """How many layouts broke which rule."""


def tune(
    base: Mapping[str, object],
    extra_devices: tuple[Device, ...] = (),
    options: SearchOptions | None = None,
    progress: Progress = silent,
) -> Tuned:
    """Return the fastest layouts for ``base``, a request without a layout; sizes in it stay fixed.

    ``train.recompute`` is the most that may be recomputed. Raises ``InfeasiblePlan`` if nothing fits, ``ConfigError``
    if nothing is legal or the device is unknown, ``Stopped`` with the best so far at an interrupt.
    """
    options = options or SearchOptions(top_k=2)
    refuse_unmodelled(base)
    request = request_in_own_words(base)
    hardware, train, model = (section_of(request, name) for name in ("hw", "train", "model"))
    held = _held(part(request, "parallel"))
    device = device_of(request, extra_devices)
    devices = integer(hardware, "num_gpus", None, "hw")
    node = min(devices, integer(hardware, "gpus_per_node", min(8, devices), "hw"))
    batch = integer(train, "gbs", None, "train")
    _check_held(held, devices)
    sections = [Section(TEXT, model)]
    stated = stated_train(sections, device, {k: v for k, v in train.items() if k not in ("gbs", "mbs", "recompute")})
    micro_batch = optional_integer({"mbs": train.get("mbs") or None}, "mbs", "train")
    sizes = held if micro_batch is None else {**held, "mbs": micro_batch}
    points = [at for at in usual_points(sections, device, node, sizes) if _is_held(at, held)]
    profile = analytic_profile(
        sections, device, node, network_gbit_per_s=network_rate(hardware), train=stated, points=points
    )
    profile = _with_recompute_up_to(profile, str(train.get("recompute") or "full"))
    if isinstance(name := request.get("id"), str) and name:
        profile = replace(profile, model=replace(profile.model, name=name))
    if devices % node:
        raise ConfigError(f"hw.num_gpus {devices} is not a multiple of hw.gpus_per_node {node}.")
    cluster = Cluster(num_nodes=devices // node, devices_per_node=node)
    has_encoder = any(module.name == ENCODER for module in profile.model.modules)
    space = _space(device, stated, held, micro_batch, has_encoder)
    interrupt: KeyboardInterrupt | None = None
    try:
        plan = search(profile, cluster, batch, replace(options, space=space), progress=progress)
    except Stopped as stopped:
        plan, interrupt = stopped.plan, stopped.cause
    plans = (plan, *(_whole(profile, plan, other) for other in plan.alternatives))
    requests = tuple(request_of_plan(each, request, stated) for each in plans)
    answers = tuple(_with_notes_on(request, predict_one(each, extra_devices)) for each in requests)
    tuned = Tuned(plans=plans, requests=requests, answers=answers, left_out=_left_out(plan))
    if interrupt is not None:
        raise Stopped(tuned, interrupt)
    return tuned


def _held(parallel: Mapping[str, object]) -> dict[str, int]:
    """Return the sizes and switches that the request names. Raises ``ConfigError`` for what ``tune`` does not hold."""
    held = {key: integer(parallel, key, None, "parallel") for key in _SIZES if parallel.get(key)}
    switches = {key: switch(parallel, key, None, "parallel") for key in _SWITCHES}
    for key in sorted(KNOWN["parallel"] & set(parallel) - set(_HELD) - {"etp", "sp"}):
        if parallel[key] is not True and parallel[key] in (None, False, "", [], 1, *_DEFAULTS.get(key, ())):
            continue
        if key in _PLACEMENTS:
            raise ConfigError(f"parallel.{key} places the layers, which tune chooses: use predict for one placement.")
        raise ConfigError(
            f"parallel.{key} is {shown(parallel[key])}, which tune does not search: remove it, or use predict."
        )
    return held | {key: int(on) for key, on in switches.items() if on is not None}


def _check_held(held: Mapping[str, int], devices: int) -> None:
    """Raise ``ConfigError`` for sizes that no layout of ``devices`` has."""
    tensor, pipeline, context = (held.get(key, 1) for key in ("tp", "pp", "cp"))
    every = {"tp", "pp", "cp", "dp"} <= held.keys()
    reason = uneven_devices(devices, tensor, pipeline, context, held["dp"] if every else None)
    if not reason and "pp" in held:
        reason = uneven_chunks(held.get("vpp", 1), pipeline)
    if reason:
        raise IllegalLayout(reason)
    if "etp" in held and "tp" in held and held["etp"] not in (1, held["tp"]):
        raise ConfigError(
            f"parallel.etp is {held['etp']}, which tune does not search: it searches 1 and tp {tensor}. Use predict."
        )


def _with_notes_on(request: Mapping[str, object], answer: Answer) -> Answer:
    """Return ``answer`` with a note on every key that is not known, and without notes on switches that the request
    leaves open, which need none.
    """
    stated = {f"train.{key}" for key in part(request, "train")}
    notes = [f"{key}{UNKNOWN}" for key in unknown_keys(request)]
    for note in answer["notes"]:
        is_open = note.startswith("train.") and note.partition(":")[0] not in stated
        if not is_open and not note.endswith(UNKNOWN):
            notes.append(note)
    return {**answer, "notes": notes}


def _space(
    device: Device, stated: Mapping[str, object], held: Mapping[str, int], micro_batch: int | None, has_encoder: bool
) -> SpaceOptions:
    """Return the space of the layouts that have what the request holds; ``has_encoder``: on the first chunks."""
    return SpaceOptions(
        virtual_sizes=(1,) if has_encoder else None,
        distributed_optimizer=bool(held.get("dist_opt", True)),
        overlap_gradient_reduce=bool(stated["overlap_grad_reduce"]),
        held={
            **{field: held[key] for key, field in _HELD.items() if key in held},
            **({"micro_batch_size": micro_batch} if micro_batch else {}),
        },
        standalone_ends="ascend" not in device.name.lower(),
    )


def _left_out(plan: Plan) -> dict[str, int]:
    """Return how many layouts broke which rule, most first."""
    reasons = Counter(
        "does not fit in memory" if verdict.outcome == "memory" else re.sub(r"\d+", "N", verdict.reason)
        for verdict in plan.search.verdicts
        if verdict.outcome in ("memory", "illegal", "unmeasured")
    )
    return dict(reasons.most_common())


def _is_held(at: MeasuredAt, held: Mapping[str, int]) -> bool:
    shared = at.expert_tensor_size or at.tensor_size
    return held.get("etp", shared) == shared


def _with_recompute_up_to(profile: Profile, most: str) -> Profile:
    if most not in _KINDS:
        raise ConfigError(f"train.recompute is {most!r}, must be one of {', '.join(_KINDS)}.")
    return profile if most == "full" else profile.with_recompute(("none", most))


def _whole(profile: Profile, plan: Plan, other: Alternative) -> Plan:
    """Return an alternative of ``plan`` as a plan of its own."""
    placement = ModulePlacement(
        layers=dict(other.layers), recompute=dict(other.recompute_kinds), prediction_stage=other.prediction_stage
    )
    found = evaluate(profile, plan.cluster, other.layout, placement, plan.global_batch_size)
    record = replace(
        plan.search,
        status="feasible",
        gap_fraction=max(0.0, 1 - plan.search.lower_bound_us / found.step.total_us),
        limits=limits_of_plan(found),
        verdicts=(),
        relaxations=(),
    )
    return plan_of(profile, plan.cluster, other.layout, found, plan.global_batch_size, record)


def request_of_plan(plan: Plan, base: Mapping[str, object], stated: Mapping[str, object]) -> dict[str, object]:
    """Return the request that describes ``plan``: its sizes, its placement, and every switch.

    Recompute that differs by stage becomes the most of any stage (method ``block``): a request has no keys for more.
    """
    layout = plan.layout
    parallel: dict[str, object] = {
        "tp": layout.tensor_size,
        "pp": layout.pipeline_size,
        "cp": layout.context_size,
        "ep": layout.expert_size,
        "vpp": layout.virtual_size,
        "dp": layout.data_size,
        "sp": layout.sequence_parallel,
        "dist_opt": layout.distributed_optimizer,
    }
    if any(module.num_experts for module in plan.model.modules) and layout.tensor_size > 1:
        parallel["etp"] = layout.ranks_of_expert
    if layout.microbatch_group_size:
        parallel["microbatch_group_size"] = layout.microbatch_group_size
    counts = plan.layers_of(TEXT)
    if layout.num_virtual_stages > 1:
        parallel |= _placement_keys(plan, counts, integer(section_of(base, "model"), "mtp_layers", 0, "model", 0))
    train = {**stated, "gbs": plan.global_batch_size, "mbs": layout.micro_batch_size, **_recompute_keys(plan, counts)}
    described = {**base, "parallel": parallel, "train": train}
    if layout.pipeline_size > 1 and any(module.name == ENCODER for module in plan.model.modules):
        model = section_of(base, "model")
        placed = list(plan.layers_of(ENCODER))
        encoder = {**section_of(model, "vision_encoder"), "pipeline_num_layers": placed}
        described["model"] = {**model, "vision_encoder": encoder}
    return described


def _placement_keys(plan: Plan, counts: Sequence[int], num_ahead: int) -> dict[str, object]:
    if "ascend" in plan.profile.device.lower() and all(counts):
        return {"num_layer_list": list(counts)}
    parts = [f"t*{count}" if count else "" for count in counts]
    parts[0] = "E" + parts[0]
    ahead = next((stage.stage for stage in plan.stages if stage.prediction), len(parts) - 1)
    parts[ahead] += "m" * num_ahead
    parts[-1] += "L"
    return {"pipeline_layout": "|".join(parts)}


def _recompute_keys(plan: Plan, counts: Sequence[int]) -> dict[str, object]:
    full, partly = (plan.recomputed_of(TEXT, kind) for kind in ("full", "selective"))
    if any(full):
        if tuple(full) == tuple(counts):
            return {"recompute": "full"}
        return {"recompute": "full", "recompute_method": "block", "recompute_num_layers": max(full)}
    return {"recompute": "selective" if any(partly) else "none"}
