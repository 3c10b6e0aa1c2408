"""The best plan for the cluster of a request, from a profile."""

from __future__ import annotations

import logging
from dataclasses import replace
from functools import partial

from mindspeed_autoparallel.errors import ConfigError
from mindspeed_autoparallel.planner.hetero.compare import Comparison, compare, one_stage_layouts
from mindspeed_autoparallel.planner.hetero.encoders import MEMORY_MODES
from mindspeed_autoparallel.planner.hetero.search import EncoderSpace, search_hetero
from mindspeed_autoparallel.planner.layouts.given_splits import search_given
from mindspeed_autoparallel.planner.layouts.options import SearchOptions
from mindspeed_autoparallel.planner.layouts.search import search as search_layouts
from mindspeed_autoparallel.planner.layouts.space import SpaceOptions
from mindspeed_autoparallel.planner.spread.choose import choose_plan
from mindspeed_autoparallel.planner.spread.hetero_choice import compare_by_data
from mindspeed_autoparallel.profiles import BlockCost, Profile
from mindspeed_autoparallel.runtime.features.auto_parallel_mm.hetero_model import can_stage_encoders
from mindspeed_autoparallel.runtime.features.auto_parallel_mm.request import SearchRequest
from mindspeed_autoparallel.runtime.megatron.layout_arguments import gives_recompute
from mindspeed_autoparallel.spec import Layout, Plan

_LOGGER = logging.getLogger(__name__)


def search(request: SearchRequest, profile: Profile) -> Plan | Comparison:
    """Return the best plan for the cluster of ``request``; with layouts of their own for encoders, beside the best
    without."""
    cluster, profile = request.cluster, _what_the_host_runs(request, profile)
    _LOGGER.info(
        f"planning for {cluster.num_nodes} x {cluster.devices_per_node} devices, batch {request.global_batch_size}"
    )
    if request.hetero_balance is not None and request.sample_data is not None:
        data, options = request.sample_data.distribution, request.sample_data.options
        return compare_by_data(profile, data, options, partial(_searched, request), partial(_hetero, request))
    if request.hetero_balance is not None:
        return compare(
            profile,
            cluster,
            request.global_batch_size,
            SearchOptions(time_limit_s=request.time_limit_s, space=_space(request)),
            progress=_LOGGER.info,
            balance=request.hetero_balance,
            splits=request.splits,
            encoder_pipelines=can_stage_encoders(request.description),
        )
    if request.sample_data is None:
        return _searched(request, profile, None)
    data, options = request.sample_data.distribution, request.sample_data.options
    return choose_plan(profile, data, options, partial(_searched, request))


def _what_the_host_runs(request: SearchRequest, profile: Profile) -> Profile:
    kept = tuple(measured for measured in profile.measurements if request.runs(measured.at))
    per_node = request.cluster_devices_per_node
    if not any(one.at.tensor_size <= per_node for one in kept):
        raise ConfigError(
            f"a plan cannot change {request.kept_flags}, and no such size fits nodes of {per_node} devices and the "
            "profile: change or leave out these flags."
        )
    return replace(profile, measurements=kept)


def _space(request: SearchRequest) -> SpaceOptions:
    return SpaceOptions(
        group_sizes=request.group_sizes,
        standalone_ends=request.standalone_ends,
        overlap_gradient_reduce=request.overlap_gradient_reduce,
        overlap_parameter_gather=request.overlap_parameter_gather,
        bucket_elements=request.bucket_elements,
    )


def _searched(request: SearchRequest, profile: Profile, layouts: list[Layout] | None) -> Plan:
    """Return the best plan under ``profile`` whose split and recompute the host runs; ``layouts``: among these."""
    plan = _of_all_kinds(request, profile, layouts)
    if gives_recompute(plan, of_file=request.description.model_file is not None):
        return plan
    _LOGGER.info("the best plan recomputes parts of some layers, which no flag can give: whole layers alone are tried")
    plan = _of_all_kinds(request, _with_whole_layers(profile), layouts)
    scope = "; ".join(filter(None, (plan.search.scope, "layers recomputed whole or not at all")))
    return replace(plan, search=replace(plan.search, scope=scope))


def _with_whole_layers(profile: Profile) -> Profile:
    def whole(_: str, layer: BlockCost) -> BlockCost:
        kinds = {kind: cost for kind, cost in layer.recompute.items() if kind in ("none", "full")}
        return replace(layer, recompute=kinds)

    measurements = tuple(
        replace(one, modules={name: module.with_layers(whole) for name, module in one.modules.items()})
        for one in profile.measurements
    )
    return replace(profile, measurements=measurements)


def _of_all_kinds(request: SearchRequest, profile: Profile, layouts: list[Layout] | None) -> Plan:
    cluster, batch = request.cluster, request.global_batch_size
    options = SearchOptions(
        time_limit_s=request.time_limit_s,
        layouts=layouts,
        space=_space(request),
        with_relaxations=layouts is None,
    )
    if request.splits is not None:
        return search_given(profile, cluster, batch, request.splits, options, progress=_LOGGER.info)
    return search_layouts(profile, cluster, batch, options, progress=_LOGGER.info)


def _hetero(request: SearchRequest, profile: Profile, layouts: list[Layout] | None) -> Plan:
    """Return the best hetero plan under ``profile``; ``layouts`` of the backbone: among these."""
    cluster, batch = request.cluster, request.global_batch_size
    if request.splits is not None and layouts is None:
        layouts = one_stage_layouts(profile, cluster, batch)
    assert request.hetero_balance is not None
    return search_hetero(
        profile,
        cluster,
        batch,
        SearchOptions(time_limit_s=request.time_limit_s, layouts=layouts),
        progress=_LOGGER.info,
        memory_modes=MEMORY_MODES,
        balance=request.hetero_balance,
        encoder_space=EncoderSpace() if can_stage_encoders(request.description) else EncoderSpace(pipeline_sizes=(1,)),
    )
