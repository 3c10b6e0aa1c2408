"""A sharded training's profile without measuring: a Hugging Face config.json on a device of the catalogue."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping

from mindspeed_autoparallel.cost.analytic.model_shape import ModelShape
from mindspeed_autoparallel.cost.collectives import Fabric
from mindspeed_autoparallel.cost.device import Device
from mindspeed_autoparallel.predict.sharded_costs import STACK, device_cost
from mindspeed_autoparallel.predict.sharded_modules import MEGATRON
from mindspeed_autoparallel.predict.sharded_tree import Tree, decoder_tree, tree_of
from mindspeed_autoparallel.profiles.profile import Provenance, utc_now
from mindspeed_autoparallel.profiles.sharded import Described, HeadCost, ShardedProfile

_HOST_LINK = 24e9
"""Bytes per second to the host where no datasheet says: what PCIe 4 x16 reaches."""


def sharded_profile(
    config: Mapping[str, object],
    where: str,
    described: Described,
    device: Device,
    devices_per_node: int,
    *,
    network_gbit_per_s: float | None = None,
) -> ShardedProfile:
    """Return costs of every module at every Ulysses, expert and micro-batch size worth trying.

    Raises ``ConfigError`` naming the file and the key for a family that the analytic model does not have.
    """
    tree = tree_of(config, where, described, device, devices_per_node)
    return _profile(
        tree, config, str(config.get("model_type") or ""), described, device, (devices_per_node, network_gbit_per_s)
    )


def megatron_profile(
    shape: Mapping[str, object],
    described: Described,
    device: Device,
    devices_per_node: int,
    *,
    network_gbit_per_s: float | None = None,
) -> ShardedProfile:
    """Return the same of Megatron's GPT model of ``shape``, a request's ``model``."""
    shape = {**shape, "seq": described.sequence}
    tree = decoder_tree(MEGATRON, shape, [], described, device, devices_per_node)
    return _profile(tree, shape, "gpt", described, device, (devices_per_node, network_gbit_per_s))


def _profile(
    tree: Tree,
    source: Mapping[str, object],
    family: str,
    described: Described,
    device: Device,
    network: tuple[int, float | None],
) -> ShardedProfile:
    notes = list(tree.notes)
    if device.host_link_gb_per_s is None:
        notes.append(f"host link: {_HOST_LINK / 1e9:g} GB/s assumed")
    efficiency = device.efficiency(STACK)
    fabric = Fabric.of(device, efficiency, *network)
    return ShardedProfile(
        model=family,
        modules=tree.modules,
        kinds=tree.kinds,
        device=device_cost(device, fabric, tree.resident_bytes),
        provenance=_provenance(source, device),
        tokens_per_sample=described.sequence,
        attention_heads=_heads(tree.decoder) if tree.decoder else (1,),
        num_experts=tree.decoder.num_experts if tree.decoder else 0,
        topk=tree.decoder.topk if tree.decoder else 0,
        routing=described.routing,
        head=_head(tree.decoder, described) if tree.decoder else None,
        bytes_of=described.bytes_of,
        memory_bytes_per_s=device.memory_bandwidth_gb_per_s * 1e9 * efficiency.memory_fraction,
        host_link_bytes_per_s=(device.host_link_gb_per_s or _HOST_LINK / 1e9) * 1e9,
        # Adam reads and writes moments, weights and the gradient: 28 bytes per element in fp32.
        optimizer_us_per_element=28 / (device.memory_bandwidth_gb_per_s * 1e3 * efficiency.optimizer_fraction),
        step_us=efficiency.step_us,
        notes=tuple(notes),
    )


def _head(decoder: ModelShape, described: Described) -> HeadCost:
    return HeadCost(
        tokens=described.sequence,
        vocabulary=decoder.vocabulary,
        kept_bytes_per_logit=described.logits.kept,
        transient_bytes_per_logit=described.logits.transient,
    )


def _heads(model: ModelShape) -> tuple[int, ...]:
    """Return what Ulysses sizes must divide: the heads of attention and of linear attention."""
    linear = (model.linear.key_heads, model.linear.value_heads) if model.linear else ()
    return (model.heads, model.kv_heads, *linear)


def _provenance(config: Mapping[str, object], device: Device) -> Provenance:
    return Provenance(
        source="analytic",
        device=device.name,
        created_utc=utc_now(),
        model_hash=hashlib.sha256(json.dumps(config, sort_keys=True).encode()).hexdigest()[:16],
        software={"stack": STACK, "efficiencies": device.efficiency(STACK).provenance},
    )
