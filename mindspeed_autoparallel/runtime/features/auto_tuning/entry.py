"""``--auto-tuning`` from the host's parsed arguments to the files in the work dir; then the process ends."""

from __future__ import annotations

import argparse
import logging
import os
import sys
from pathlib import Path
from typing import Any

from mindspeed_autoparallel.cost.device import Device
from mindspeed_autoparallel.errors import ConfigError, ProfileError
from mindspeed_autoparallel.interrupts import leaving_kept
from mindspeed_autoparallel.profiles.knowledge import KnowledgeBase
from mindspeed_autoparallel.progress import show_progress
from mindspeed_autoparallel.runtime.features.auto_parallel_mm.analytic import kind_of
from mindspeed_autoparallel.runtime.features.auto_tuning.argv import SETTABLE_FLAGS
from mindspeed_autoparallel.runtime.features.auto_tuning.request import TuningRequest, read_request
from mindspeed_autoparallel.runtime.features.measuring import coordinator, serve_main_node
from mindspeed_autoparallel.runtime.launch.work_dir_lock import only_one
from mindspeed_autoparallel.units import US_PER_MS

_LOGGER = logging.getLogger(__name__)


def tune_and_exit(arguments: argparse.Namespace) -> None:
    """Profile small, model, search, write, and end the process: training does not start."""
    if not Path(sys.argv[0]).is_file():
        raise ConfigError(
            f"--auto-tuning starts the script again to trace it, but {sys.argv[0]!r} is not a file that can be read. "
            "Start it as python SCRIPT.py."
        )
    request = read_request(arguments)
    show_progress("auto-tuning", request.log_level)
    serve_main_node(request, "; node 0 goes on with what it has", SETTABLE_FLAGS)
    what_stays = f"finished traces and measurements are kept in {request.work_dir}"
    with leaving_kept(what_stays), only_one(request.work_dir, "--auto-tuning-work-dir"):
        _tune(request, arguments)
    sys.exit(0)


def _tune(request: TuningRequest, arguments: argparse.Namespace) -> None:
    from mindspeed_autoparallel.runtime.devices import current_device
    from mindspeed_autoparallel.runtime.features.auto_tuning.calibration import Calibration
    from mindspeed_autoparallel.runtime.features.auto_tuning.computed import Computed, marked
    from mindspeed_autoparallel.runtime.features.auto_tuning.dimensions import plan_search
    from mindspeed_autoparallel.runtime.features.auto_tuning.dimensions.asked import Asked
    from mindspeed_autoparallel.runtime.features.auto_tuning.launches import Launches
    from mindspeed_autoparallel.runtime.features.auto_tuning.modelling import families, usable_bytes
    from mindspeed_autoparallel.runtime.features.auto_tuning.output import PAGE_FILE, RESULT_FILE, rewrite, table, write
    from mindspeed_autoparallel.runtime.features.auto_tuning.recommend import recommend
    from mindspeed_autoparallel.runtime.features.auto_tuning.switching import modelled_families, target_of
    from mindspeed_autoparallel.runtime.features.auto_tuning.trace_failures import tell_untraced
    from mindspeed_autoparallel.runtime.features.auto_tuning.trace_store import Traces
    from mindspeed_autoparallel.runtime.features.auto_tuning.user_baseline import described
    from mindspeed_autoparallel.runtime.megatron.sends import interleaved_sends

    device, target = current_device(), request.target_device
    base = KnowledgeBase(request.knowledge_file)
    kind = device.name if target is None else kind_of(target)
    plan = plan_search(request, arguments, kind)
    if not plan.points:
        raise ConfigError(
            f"no layout of {request.num_ranks} ranks is legal for this model: "
            + "; ".join(f"{name}: {reason}" for name, reason in plan.left_out.items())
        )
    with coordinator(request) as launcher:
        launches = Launches(request, launcher)
        _LOGGER.info(f"stage 1 of 3: profile small; work dir {request.work_dir}")
        capacity_bytes = _capacity(request, device, target)
        traces = Traces(request, plan, usable_bytes(capacity_bytes))
        found = traces.take(launches)
        calibration = (
            Calibration(request, traces, found, device, base, interleaved_sends(arguments))
            if target is None
            else Computed(request, traces, found, target, base)
        )
        covered = calibration.take(launches)
        notes, impossible = tell_untraced(calibration.failed, calibration.measured(), found)
        calibration.notes += notes
        plan.left_out.update(impossible)
        if impossible and not calibration.found and not calibration.measured():
            reasons = "; ".join(f"{names} {reason}" for names, reason in impossible.items())
            raise ProfileError(f"no layout could be traced or measured: {reasons}. See {launcher.log_dir}.")
        _LOGGER.info("stage 2 of 3: model")
        kinds, prices = families(calibration, plan, arguments, capacity_bytes)
        asked = Asked(request=request, arguments=arguments, device_name=kind)
        kinds += modelled_families(kinds, plan, asked, calibration, prices, target_of(calibration.device_name, target))
        if target is not None:
            kinds = marked(kinds)
        _LOGGER.info("stage 3 of 3: search")
        recommended = recommend(request, plan, kinds, prices, arguments)
        picks, outcome = recommended.picks, recommended.outcome
        about: dict[str, Any] = {
            "ranks": request.num_ranks,
            "devices_per_node": request.devices_per_node,
            "device": calibration.device_name,
            "profile_source": "measured" if target is None else "analytic",
            "launches": launches.records,
            "num_device_launches": launches.num_on_devices,
            "knowledge": {
                "file": str(request.knowledge_file),
                "covered_time_share": covered.covered_time_share,
                "num_interpolated": len(covered.missing),
                "host_us_per_call": prices.host.per_call_us,
                "kernel_scale": prices.host.scale,
                "num_blocks_measured": prices.host.num_anchors,
                "relative_error": prices.host.relative_error,
            },
            "searched": plan.searched,
            "left_out_dimensions": plan.left_out,
            "left_out": dict(recommended.space.left_out.most_common()),
            "as_given": described(recommended.given),
            "search": {
                "num_candidates": outcome.num_legal + sum(recommended.space.left_out.values()),
                "num_legal": outcome.num_legal,
                "num_solved": outcome.num_solved,
                "num_bounded": outcome.num_bounded,
                "num_without_room": outcome.num_without_room,
                "seconds": outcome.proof.seconds,
                "lower_bound_ms": outcome.proof.lower_bound_us / US_PER_MS,
            },
            "notes": sorted(set(calibration.notes)),
        }
        result = write(request.work_dir, picks, about)
        if request.verify and target is not None:
            _LOGGER.warning("--auto-tuning-verify needs devices and is left out with --profile-source analytic")
        elif request.verify:
            from mindspeed_autoparallel.runtime.features.auto_tuning.verify import verify

            result["verified"] = []
            for item in verify(request, picks, launches, device):
                result["verified"].append(item)
                result["num_device_launches"] = launches.num_on_devices
                rewrite(request.work_dir, result)
    print(table(result), end="", flush=True)
    _LOGGER.info(f"result: {request.work_dir / RESULT_FILE}; page: {request.work_dir / PAGE_FILE}")


def _capacity(request: TuningRequest, device: Any, target: Device | None) -> int:
    if request.memory_limit_bytes is not None:
        # The reserve is the user's own business then.
        return int(request.memory_limit_bytes / 0.94) + 1
    if target is not None:
        return int(target.memory_gib * 2**30)
    capacity = int(device.total_memory_bytes())
    shared = device.name == "cpu" and "LOCAL_WORLD_SIZE" not in os.environ
    return capacity // request.num_processes_per_node if shared else capacity
