"""The best plan for the cluster of a request, from a profile."""

from __future__ import annotations

import argparse
import logging
from dataclasses import replace

from mindspeed_autoparallel.errors import AutoParallelError, ConfigError, PlanError
from mindspeed_autoparallel.planner.hetero.compare import (
    Comparison,
    HeteroOptions,
    OnlyHomogeneous,
    without_homogeneous,
)
from mindspeed_autoparallel.planner.layouts.options import SearchOptions
from mindspeed_autoparallel.planner.results import PLAN_FILE
from mindspeed_autoparallel.planner.wanted import Wanted, find_plan
from mindspeed_autoparallel.profiles import Profile
from mindspeed_autoparallel.runtime.features.apply_plan.applicable import gives_recompute, refusal
from mindspeed_autoparallel.runtime.features.apply_plan.hetero_model import can_stage_encoders
from mindspeed_autoparallel.runtime.features.auto_parallel_mm.request import SearchRequest
from mindspeed_autoparallel.runtime.megatron.hybrid import recomputes_whole_layers
from mindspeed_autoparallel.runtime.megatron.mindspeed import sums_encoder_gradients
from mindspeed_autoparallel.spec import Plan
from mindspeed_autoparallel.spec.recompute import policy_of

_LOGGER = logging.getLogger(__name__)


def search(request: SearchRequest, profile: Profile, arguments: argparse.Namespace) -> Plan | Comparison:
    """Return the best plan for the cluster of ``request`` that the host of ``arguments`` can apply.

    If encoders may have their own layouts, returns the best such plan together with the best homogeneous one.
    Raises ``PlanError`` if the host refuses the plan found, and the errors of ``find_plan``.
    """
    cluster, profile = request.cluster, _what_the_host_runs(request, profile, arguments)
    growing = f" (from {request.ramp[0]} on: DP x MBS divides each batch of the ramp)" if request.ramp else ""
    _LOGGER.info(
        f"planning for {cluster.num_nodes} x {cluster.devices_per_node} devices, batch {request.global_batch_size}"
        + growing
    )
    hetero, sample_data = None, request.sample_data
    if request.hetero_balance is not None:
        hetero = HeteroOptions(
            balance=request.hetero_balance, encoder_pipelines=can_stage_encoders(request.description)
        )
    wanted = Wanted(
        cluster=cluster,
        global_batch_size=request.global_batch_size,
        options=SearchOptions(time_limit_s=request.time_limit_s, space=request.space),
        splits=request.splits,
        runs=lambda plan: gives_recompute(plan, request.description, arguments),
        hetero=hetero,
        data=None if sample_data is None else (sample_data.distribution, sample_data.options),
    )
    try:
        found = find_plan(profile, wanted, _LOGGER.info)
    except OnlyHomogeneous as error:
        _LOGGER.warning(f"no hetero plan: {error}")
        found = error.plan
    if isinstance(found, Plan) and found.layout.pipeline_size > 1:
        found = _of_one_stage_if_refused(found, wanted, profile, request, arguments)
    return _what_applies(found, request, arguments)


def _of_one_stage_if_refused(
    found: Plan, wanted: Wanted, profile: Profile, request: SearchRequest, arguments: argparse.Namespace
) -> Plan:
    """Return the best plan of one stage if the host refuses ``found`` and accepts that plan, else ``found``."""
    reason = refusal(found, request.description, arguments, request.output_dir / PLAN_FILE)
    if not reason:
        return found
    options = wanted.options
    one_stage = replace(options, space=replace(options.space, held={**options.space.held, "pipeline_size": 1}))
    try:
        other = find_plan(profile, replace(wanted, options=one_stage, hetero=None), _LOGGER.info)
    except AutoParallelError:
        return found
    if not isinstance(other, Plan) or refusal(other, request.description, arguments, request.output_dir / PLAN_FILE):
        return found
    _LOGGER.warning(
        f"the best plan, {found.layout.label()}, is not written, and this is the best of one stage: {reason}"
    )
    return other


def _what_applies(found: Plan | Comparison, request: SearchRequest, arguments: argparse.Namespace) -> Plan | Comparison:
    def refused(plan: Plan) -> str:
        return refusal(plan, request.description, arguments, request.output_dir / PLAN_FILE)

    if isinstance(found, Plan):
        if reason := refused(found):
            raise PlanError(f"the best plan, {found.layout.label()}, is not written, for the host refuses it: {reason}")
        return found
    hetero, other = found.hetero, found.homogeneous
    reason = refused(hetero)
    if other is None:
        return found if not reason else _what_applies(hetero, request, arguments)
    if reason:
        _LOGGER.warning(f"no hetero plan: the host refuses {hetero.layout.label()}: {reason}")
        return _what_applies(replace(other, hetero_rival=None), request, arguments)
    if reason := refused(other):
        _LOGGER.warning(f"no homogeneous plan: the host refuses {other.layout.label()}: {reason}")
        return without_homogeneous(found, reason)
    return found


def _what_the_host_runs(request: SearchRequest, profile: Profile, arguments: argparse.Namespace) -> Profile:
    if not recomputes_whole_layers(arguments):
        modules = (module for measured in profile.measurements for module in measured.modules.values())
        kinds = {kind for module in modules for kind in module.layer.recompute}
        profile = profile.with_recompute({kind for kind in kinds if policy_of(kind).kind != "full"})
    if sums_encoder_gradients(request.description.content):
        own = "is left out" if request.fixed.whole_sequence else "stays as the script has it"
        _LOGGER.warning(
            f"sequence parallelism {own}: MindSpeed-MM sums the image encoder's gradients over the tensor ranks there, "
            "and trains otherwise than on one"
        )
    kept = tuple(measured for measured in profile.measurements if request.fixed.runs(measured.at))
    per_node = request.cluster_devices_per_node
    if not any(one.at.tensor_size <= per_node for one in kept):
        raise ConfigError(
            f"a plan cannot change {request.fixed.words}, and no such size fits nodes of {per_node} devices and the "
            "profile: change or leave out these flags."
        )
    return replace(profile, measurements=kept)
