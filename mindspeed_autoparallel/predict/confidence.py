"""The width of the interval around a predicted step time, by the request's distance from measured runs."""

from __future__ import annotations

import dataclasses
import math

from mindspeed_autoparallel.cost.analytic.layer_time import correction_key, is_calibrated, layer_time
from mindspeed_autoparallel.cost.analytic.step_time import closed_form_us
from mindspeed_autoparallel.cost.analytic.workload import Workload
from mindspeed_autoparallel.cost.collectives import Fabric
from mindspeed_autoparallel.cost.device import Device, Efficiency

NOMINAL = 0.9
"""Share of runs that an interval should contain."""
_HIDDEN_LAUNCHES = 1.03
"""Factor on a layer's device time up to which its host launch time counts as hidden."""


_SUPERVISED_WIDTH = 8.6
"""Nine of ten published tuning runs on devices that were fitted to pretraining took up to this much longer, for reasons
that their sources leave out (docs/validation/prediction.md)."""
_OF_KINDS = ("unmeasured_eight_bits", "unmeasured_latent")
"""Widths of new features that hold for some runs alone."""
_NETWORK_FACTOR = 2.0
"""Factor within which the reached share of a network's rate is known if no run over several nodes was measured."""


def features(work: Workload) -> frozenset[str]:
    """Return the features of ``work`` beyond dense pretraining in two bytes on whole sequences."""
    model = work.model
    having = {
        "experts": model.num_experts > 0,
        "latent": model.latent is not None,
        "sparse": model.sparse is not None,
        "state_space": model.state_space is not None or model.linear is not None,
        "context": work.context_size > 1,
        "adapters": work.adapters is not None,
        "preference": bool(work.preference),
        "documents": model.attended > 0,
        "encoder": model.encoder is not None,
        "eight_bits": bool(work.recipe),
        "tensor_grid": work.tensor_grid is not None,
        "supervised": work.supervised,
    }
    return frozenset(name for name, has in having.items() if has)


def extrapolation(work: Workload, device: Device) -> str:
    """Return the kind of extrapolation for ``work``: the key of its width in ``Efficiency.intervals``.

    ``seen``: a layer of about this shape was measured, and the run has one node. ``more_devices``: the shape was
    measured, and the run has several nodes. ``unseen_shape``: it was not measured, and the host's launches are exposed,
    in which layers differ most. ``unseen_large_shape``: it was not measured, and device work hides the launches.
    ``unmeasured_features``: the run has a feature beyond dense pretraining that no measured step had, ``supervised`` if
    that is tuning on examples.
    """
    efficiency = device.efficiency(work.stack)
    new = features(work) - set(efficiency.measured_features)
    if new:
        return "supervised" if "supervised" in new else "unmeasured_features"
    measured_so = not efficiency.measured_recompute or work.recompute in efficiency.measured_recompute
    if measured_so and is_calibrated(efficiency, correction_key(work)):
        return "seen" if work.num_devices <= work.devices_per_node else "more_devices"
    return "unseen_large_shape" if _launches_are_hidden(work, device, efficiency) else "unseen_shape"


def half_width(work: Workload, device: Device) -> tuple[float, str]:
    """Return the relative half width of the interval that holds nine of ten runs, and the kind of extrapolation.

    A kind without held-out runs on this device gets twice the widest of the device's kinds, or twice its stated mean
    error, which holds about nine of ten where errors are normal. Over several nodes the interval also covers a network
    of half the rate, because rings reach a share of a datasheet's rate that is uncertain by a factor of two.
    """
    efficiency = device.efficiency(work.stack)
    kind = extrapolation(work, device)
    widths = {name: width for name, width in efficiency.intervals.items() if name not in _OF_KINDS}
    unknown = 2 * max(efficiency.relative_error, *widths.values(), 0.0)
    if kind == "supervised":
        unknown = max(unknown, _SUPERVISED_WIDTH)
    key = _model_key(work) if kind == "unmeasured_features" else kind
    width = efficiency.intervals.get(key, efficiency.intervals.get(kind, unknown))
    width = max(width, efficiency.intervals.get("seen", 0.0))
    if work.num_devices > work.devices_per_node:
        width = max(width, efficiency.intervals.get("more_devices", 0.0))
        width = math.hypot(width, _network_share(work, device, efficiency))
    return width, kind


def _model_key(work: Workload) -> str:
    """Return the key of the width of ``work``, where new features differ by it: of latent attention, of eight-bit
    recipes without experts beside attention; elsewhere that of all."""
    having = features(work)
    if "latent" in having:
        return "unmeasured_latent"
    known = "experts" not in having or "state_space" in having
    return "unmeasured_eight_bits" if known and work.recipe and work.recipe != "nvfp4" else "unmeasured_features"


def _network_share(work: Workload, device: Device, efficiency: Efficiency) -> float:
    """Return how much longer a step takes, relatively, with networks between nodes of half the rate."""
    halved = dataclasses.replace(efficiency, inter_fraction=efficiency.inter_fraction / _NETWORK_FACTOR)
    slower = dataclasses.replace(device, efficiencies={**device.efficiencies, work.stack: halved})
    return closed_form_us(work, slower) / closed_form_us(work, device) - 1


def peak_half_width(peak_gib: float) -> float:
    """Return the relative half width of the interval around a peak of ``peak_gib``, which holds nine of ten measured
    peaks.

    Below 10 GiB the allocations of the framework and its checks are as large as the model.
    """
    return 0.05 if peak_gib >= 10 else 0.28


def _launches_are_hidden(work: Workload, device: Device, efficiency: Efficiency) -> bool:
    fabric = Fabric.of(device, efficiency, work.devices_per_node, work.inter_node_gbit_per_s)
    free = dataclasses.replace(efficiency, launch_us=0.0, tensor_launch_us=0.0, unfused_softmax_us=0.0)
    both, alone = layer_time(work, device, efficiency, fabric), layer_time(work, device, free, fabric)
    return both.forward_us + both.backward_us <= _HIDDEN_LAUNCHES * (alone.forward_us + alone.backward_us)
