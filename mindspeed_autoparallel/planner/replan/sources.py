"""The profile that a plan was made from: the file beside it, or the costs that the plan itself holds."""

from __future__ import annotations

from pathlib import Path

from mindspeed_autoparallel.errors import ProfileError
from mindspeed_autoparallel.planner.replay import planned_costs
from mindspeed_autoparallel.planner.results import PROFILE_FILE
from mindspeed_autoparallel.profiles import Profile, read_profile
from mindspeed_autoparallel.spec import Plan


def costs_of(plan: Plan, plan_file: Path, given: Path | None = None) -> tuple[Profile, str]:
    """Return the profile to plan with, and a line where the search is narrower than that of ``plan``.

    ``given``: the user's own choice. Otherwise ``plan.profile.json`` beside the plan, if its hash is the plan's; else
    the costs in the plan, which cover its own TP, CP, EP and micro batch size. Raises ``ProfileError`` for a profile
    of another model and ``PlanError`` for a plan without costs.
    """
    if given is not None:
        profile = read_profile(given)
        _check_model(plan, profile, given)
        return profile, ""
    beside = plan_file.with_name(PROFILE_FILE)
    if beside.is_file():
        profile = read_profile(beside)
        if profile.sha256() == plan.profile.sha256:
            return profile, ""
    profile = planned_costs(plan)
    (measured,) = (measurement.at.label() for measurement in profile.measurements[:1])
    return profile, (
        f"only {measured} is searched, with every PP, DP and VPP: {PROFILE_FILE} of this plan is not beside it. Give "
        "the profile with --profile to search all sizes."
    )


def _check_model(plan: Plan, profile: Profile, path: Path) -> None:
    planned = {module.name: module.num_layers for module in plan.model.modules}
    found = {module.name: module.num_layers for module in profile.model.modules}
    hashes = {plan.profile.model_hash, profile.provenance.model_hash} - {""}
    if planned != found or len(hashes) > 1:
        raise ProfileError(f"--profile {path} is of another model: layers {found}, the plan's {planned}.")
