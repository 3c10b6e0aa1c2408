"""A grid of tensor-parallel ranks (MindSpeed's ``--tp-2d``): what it moves."""

import dataclasses

from mindspeed_autoparallel.cost.analytic.layer_time import layer_time
from mindspeed_autoparallel.cost.analytic.reading import read_workload
from mindspeed_autoparallel.cost.catalogue import find_device
from mindspeed_autoparallel.cost.collectives import Fabric


def test_a_grid_of_tensor_ranks_moves_what_mindspeeds_2d_products_move() -> None:
    """Linear2DSplitAlongFirstDim gathers a product's input along one side of the grid and reduces and scatters its
    output along the other; the second product of a block has the sides the other way round. Norms of shares of the
    hidden state sum their squares over y. Queries, keys, values and the context change ranks of y as in Ulysses."""
    moved = []

    class Recorded(Fabric):
        def one_shot_us(self, size_bytes: float, ranks: int, stride: int, *, replicas: bool = False) -> float:
            moved.append(("one shot", size_bytes, ranks, stride))
            return 0.0

        def all_reduce_us(self, size_bytes: float, ranks: int, stride: int, **given: bool) -> float:
            moved.append(("all-reduce", size_bytes, ranks, stride))
            return 0.0

        def exchange_us(self, size_bytes: float, ranks: int, stride: int) -> float:
            moved.append(("exchange", size_bytes, ranks, stride))
            return 0.0

    sizes = {"hidden": 1024, "heads": 16, "kv_heads": 4, "ffn": 2816, "seq": 2048, "swiglu": True}
    request = {
        "model": {"type": "gpt", "num_layers": 8, **sizes},
        "hw": {"gpu": "Ascend-910B", "num_gpus": 8},
        "parallel": {"tp": 8, "tp_2d": {"x": 2, "y": 4}},
        "train": {"gbs": 8, "mbs": 1, "recompute": "none"},
    }
    device = find_device("Ascend-910B")
    efficiency = device.efficiency("megatron-core")
    fabric = Recorded(**dataclasses.asdict(Fabric.of(device, efficiency, 8, None)))
    layer_time(read_workload(request), device, efficiency, fabric)
    share = 2 * 2048
    over_x = [("one shot", share * 1024 / 4, 2, 1)] * 4
    over_y = [("one shot", share * width / 2, 4, 2) for width in (1536, 1024, 2 * 2816, 2816)]
    exchanged = [("exchange", share * (2 * 1024 + 2 * 256) / 8, 4, 2)]
    assert sorted(moved) == sorted([*over_x, *over_y, *exchanged, *[("all-reduce", 4 * 2048 / 2, 4, 2)] * 2])
