"""Frozen records with JSON round trip: the cluster, the model, a layout, a plan. See docs/profile.md and
docs/plan.md."""

from mindspeed_autoparallel.spec.codec import from_json, to_json
from mindspeed_autoparallel.spec.layout import Cluster, Layout, ModuleLayout, Sharding
from mindspeed_autoparallel.spec.model import Model, Module
from mindspeed_autoparallel.spec.plan import PLAN_SCHEMA_VERSION, Plan

__all__ = [
    "PLAN_SCHEMA_VERSION",
    "Cluster",
    "Layout",
    "Model",
    "Module",
    "ModuleLayout",
    "Plan",
    "Sharding",
    "from_json",
    "to_json",
]
