"""Collectives on the links that they cross."""

import pytest

from mindspeed_autoparallel.cost.collectives import Fabric

_LINKS = {
    "devices_per_node": 8,
    "link_bytes_per_us": 1000.0,
    "link_latency_us": 0.0,
    "inter_bytes_per_us": 8.0,
    "inter_latency_us": 0.0,
    "exchange_bytes_per_us": 1.0,
}
_FABRIC = Fabric(**_LINKS)


def test_groups_of_a_node_share_its_network() -> None:
    # One rank per node and eight groups side by side: an eighth of the node's network each.
    assert _FABRIC.one_shot_us(1600.0, 2, 8) == pytest.approx(800 / 1.0)
    # One group over both nodes has all of it.
    assert _FABRIC.one_shot_us(1600.0, 16, 1) == pytest.approx(1500 / 8.0)


def test_an_all_reduce_over_two_nodes_sends_a_tensor_once_where_a_ring_sends_nearly_two() -> None:
    ring = 2 * _FABRIC.one_shot_us(1600.0, 16, 1)
    assert _FABRIC.all_reduce_us(1600.0, 16, 1) == pytest.approx(1600 / 8.0)
    assert _FABRIC.all_reduce_us(1600.0, 16, 1) < 0.6 * ring


def test_over_many_nodes_or_one_rank_each_the_ring_stays() -> None:
    assert _FABRIC.all_reduce_us(1600.0, 4, 8) == 2 * _FABRIC.one_shot_us(1600.0, 4, 8)
    many = _FABRIC.all_reduce_us(1600.0, 8 * 64, 1)
    assert many == pytest.approx(2 * _FABRIC.one_shot_us(1600.0, 8 * 64, 1), rel=0.02)


def test_replicas_that_share_a_node_reduce_gradients_at_the_given_share() -> None:
    slow = Fabric(**_LINKS, replica_fraction=0.25)
    assert slow.all_reduce_us(1600.0, 16, 1, replicas=True) == pytest.approx(4 * 2 * _FABRIC.one_shot_us(1600.0, 16, 1))
    assert slow.all_reduce_us(1600.0, 4, 8, replicas=True) == _FABRIC.all_reduce_us(1600.0, 4, 8)
    assert slow.all_reduce_us(1600.0, 16, 1) == _FABRIC.all_reduce_us(1600.0, 16, 1)


def test_few_peers_of_a_mesh_reach_few_of_its_links() -> None:
    mesh = Fabric(**{**_LINKS, "link_bytes_per_us": 7.0}, mesh=True)
    # Two ranks have one of seven links; eight have all.
    assert mesh.one_shot_us(16.0, 2, 1) == pytest.approx(8.0)
    assert mesh.one_shot_us(16.0, 8, 1) == pytest.approx(14 / 7)
    assert mesh.send_us(7.0, 1) == pytest.approx(7.0)


def test_an_exchange_leaves_what_each_rank_keeps() -> None:
    assert _FABRIC.exchange_us(8000.0, 8, 1) == pytest.approx(7000 / 1000.0)
    # Half of it leaves for the other node, over one device's share.
    assert _FABRIC.exchange_us(16.0, 16, 1) == pytest.approx(8.0)
    assert _FABRIC.exchange_us(16.0, 1, 1) == 0
