"""Which link a group uses, by Megatron's rank order (tensor, context, data, pipeline: the first varies fastest)."""

from __future__ import annotations

from mindspeed_autoparallel.profiles import DeviceCost, LinkTier
from mindspeed_autoparallel.spec import Cluster, Layout


def data_parallel_link(layout: Layout, cluster: Cluster, device: DeviceCost) -> LinkTier:
    """Return the slowest link inside a data x context group: its ranks are ``tensor_size`` apart within one pipeline
    stage."""
    span = layout.tensor_size * layout.context_size * layout.data_size
    # Consecutive blocks of ``span`` ranks never straddle nodes if ``span`` divides a node.
    return device.inter if cluster.devices_per_node % span else device.intra


def boundary_link(layout: Layout, cluster: Cluster, device: DeviceCost, boundary: int) -> LinkTier:
    """Return the link between pipeline ranks ``boundary`` and ``boundary + 1`` (wrapping, for interleaved)."""
    stride = layout.num_devices // layout.pipeline_size
    node = device.exchange.network.devices_per_node if device.exchange is not None else cluster.devices_per_node
    sender = boundary % layout.pipeline_size
    receiver = (sender + 1) % layout.pipeline_size
    crossing = any(
        (sender * stride + rank) // node != (receiver * stride + rank) // node for rank in range(min(stride, node))
    )
    return device.inter if crossing else device.intra


def embedding_link(layout: Layout, cluster: Cluster, device: DeviceCost) -> LinkTier:
    """Return the link between the first and the last rank of a pipeline."""
    return device.intra if cluster.num_nodes == 1 or layout.pipeline_size == 1 else device.inter
