"""Megatron's layout strings: refused where Megatron's own validator refuses them, and nowhere else."""

from __future__ import annotations

import random
from typing import Any

import pytest

from mindspeed_autoparallel.cost.analytic.reading import read_workload
from mindspeed_autoparallel.cost.analytic.step_time import stage_times_us
from mindspeed_autoparallel.cost.catalogue import find_device
from mindspeed_autoparallel.cost.collectives import Fabric
from mindspeed_autoparallel.errors import ConfigError

STRINGS = 400


def drawn_string(drawn: random.Random, num_parts: int, num_layers: int, num_mtp: int) -> str:
    """Return parts in the right order; in every second string one letter has moved."""
    letters = ["E", *"t" * num_layers, *"m" * num_mtp, "L"]
    cuts = sorted(drawn.randint(0, len(letters)) for _ in range(num_parts - 1))
    parts = [letters[low:high] for low, high in zip([0, *cuts], [*cuts, len(letters)], strict=True)]
    source, target = drawn.choice(parts), drawn.choice(parts)
    if source and drawn.random() < 0.5:
        letter = source.pop(drawn.randrange(len(source)))
        target.insert(drawn.randint(0, len(target)), letter)
    return "|".join("".join(part) for part in parts)


def _request(text: str, pipeline: int, virtual: int, num_layers: int, num_mtp: int) -> dict[str, Any]:
    model = {"num_layers": num_layers, "hidden": 512, "heads": 8, "ffn": 2048, "vocab": 1024, "seq": 256}
    return {
        "model": {**model, "mtp_layers": num_mtp},
        "hw": {"gpu": "H100", "num_gpus": pipeline},
        "parallel": {"pp": pipeline, "vpp": virtual, "pipeline_layout": text},
        "train": {"gbs": 8 * pipeline, "mbs": 1},
    }


def refused_by_us(text: str, pipeline: int, virtual: int, num_layers: int, num_mtp: int) -> bool:
    try:
        read_workload(_request(text, pipeline, virtual, num_layers, num_mtp))
    except ConfigError:
        return True
    return False


def test_layout_strings_that_megatrons_validator_refuses_are_refused_first() -> None:
    layouts = pytest.importorskip("megatron.core.transformer.pipeline_parallel_layer_layout")
    drawn = random.Random(0)
    refused = 0
    for _ in range(STRINGS):
        pipeline, virtual = drawn.choice((2, 4)), drawn.choice((1, 2))
        num_layers, num_mtp = drawn.randint(2, 8), drawn.choice((0, 0, 1, 2))
        written = max(0, num_mtp + drawn.choice((0, 0, 0, 0, 1, -1)))
        text = drawn_string(drawn, pipeline * virtual, num_layers, written)
        try:
            layout = layouts.PipelineParallelLayerLayout(text, pipeline)
            layout.validate_layer_layout(num_layers, num_mtp or None)
        except (AssertionError, ValueError, IndexError, KeyError):
            theirs = True
        else:
            theirs = False
        refused += theirs
        assert refused_by_us(text, pipeline, virtual, num_layers, num_mtp) == theirs, (text, num_layers, num_mtp)
    assert STRINGS / 5 < refused < STRINGS


def test_prediction_is_timed_on_the_stage_that_the_string_gives() -> None:
    """Its logits and its loss stay with the loss, as in Megatron."""
    device = find_device("H100")
    efficiency = device.efficiency("megatron-core")
    fabric = Fabric.of(device, efficiency, 8, None)
    times = []
    for text in ("Et|t|tt|mL", "Et|t|ttm|L"):
        times.append(stage_times_us(read_workload(_request(text, 4, 1, 4, 1)), device, efficiency, fabric))
    beside, apart = times
    assert sum(beside) == pytest.approx(sum(apart))
    assert beside[:2] == apart[:2]
    assert apart[2] > beside[2] and 0 < apart[3] < beside[3]
