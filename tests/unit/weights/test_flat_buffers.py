"""Places of parameters in a distributed optimizer's flat buffer, against buffers laid out bucket by bucket."""

from __future__ import annotations

import random
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from mindspeed_autoparallel.errors import ConfigError  # noqa: E402
from mindspeed_autoparallel.weights.optimizer_state import placed  # noqa: E402

pytestmark = pytest.mark.torch


def drawn(seed: int) -> tuple[dict[str, Any], Any, dict[str, int]]:
    """Parameters, their buffer (buckets of a random size, each without the padding of its end), and their places."""
    generator = random.Random(seed)
    torch.manual_seed(seed)
    kind = generator.choice((torch.float32, torch.bfloat16))
    shapes = [tuple(generator.randrange(1, 40) for _ in range(generator.choice((1, 2)))) for _ in range(20)]
    masters = {f"p{number}": torch.randn(shape) for number, shape in enumerate(shapes)}
    for name in generator.sample(sorted(masters), 6):
        masters[name].fill_(generator.choice((0.0, 1.0)))  # norms and biases before the first step
    most, whole, bucket, places = generator.choice((300, 2000, 10**9)), [], torch.zeros(0), {}
    for name, master in reversed(masters.items()):
        bucket = torch.cat((bucket, torch.zeros(-bucket.numel() % 64)))
        places[name] = sum(one.numel() for one in whole) + bucket.numel()
        bucket = torch.cat((bucket, master.reshape(-1)))
        if bucket.numel() >= most:
            whole, bucket = [*whole, bucket], torch.zeros(0)
    return {name: master.to(kind) for name, master in masters.items()}, torch.cat((*whole, bucket)), places


@pytest.mark.parametrize("seed", range(30))
def test_every_parameter_is_found_where_it_was_put(seed: int) -> None:
    weights, flat, places = drawn(seed)
    found = placed(weights, flat, "file")
    different = {name for name in places if found[name] != places[name]}
    assert all(len(weights[name].unique()) == 1 for name in different)  # nothing but one value: any place has its bits
    assert not different


def test_weights_of_another_step_are_refused() -> None:
    weights, flat, _ = drawn(1)
    weights["p7"] = weights["p7"] + 1
    with pytest.raises(ConfigError, match=r"the place of p7 in the optimizer's buffer cannot be proved: 12 of 20"):
        placed(weights, flat, "file")


def test_a_buffer_with_more_than_the_weights_is_refused() -> None:
    weights, flat, _ = drawn(2)
    with pytest.raises(ConfigError, match="cannot be proved"):
        placed(weights, torch.cat((flat, torch.ones(100))), "file")
