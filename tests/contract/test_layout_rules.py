"""Layout strings are refused here exactly where Megatron's own validator refuses them."""

from __future__ import annotations

import random

import pytest

from mindspeed_autoparallel.cost.analytic.placement import layout_counts
from mindspeed_autoparallel.errors import ConfigError

layouts = pytest.importorskip("megatron.core.transformer.pipeline_parallel_layer_layout")

PIPELINE, VIRTUAL, LAYERS, MTP = 2, 2, 4, 2


def _accepted_by_megatron(text: str) -> bool:
    try:
        layout = layouts.PipelineParallelLayerLayout(text, PIPELINE)
        if layout.virtual_pipeline_model_parallel_size != VIRTUAL:
            return False
        layout.validate_layer_layout(LAYERS, text.count("m"))
    except (AssertionError, IndexError):
        return False
    return True


def _accepted_here(text: str) -> bool:
    try:
        layout_counts(text, LAYERS, PIPELINE, VIRTUAL)
    except ConfigError:
        return False
    return True


def test_every_string_is_judged_as_megatron_judges_it() -> None:
    drawn = random.Random(0)
    accepted = refused = 0
    for _ in range(3_000):
        tokens = list("E" + "t" * LAYERS + "m" * drawn.randrange(MTP + 1) + "L")
        for _ in range(drawn.randrange(3)):
            place, other = drawn.randrange(len(tokens)), drawn.randrange(len(tokens))
            tokens[place], tokens[other] = tokens[other], tokens[place]
        if drawn.random() < 0.1:
            tokens.insert(drawn.randrange(len(tokens)), drawn.choice("EL"))
        for _ in range(PIPELINE * VIRTUAL - 1):
            tokens.insert(drawn.randrange(len(tokens) + 1), "|")
        text = "".join(tokens)
        expected = _accepted_by_megatron(text)
        assert _accepted_here(text) == expected, text
        accepted, refused = accepted + expected, refused + (not expected)
    assert min(accepted, refused) > 300


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("tEt|t|t|L", "begin with the embedding"),
        ("E|tmt|tt|L", "after all decoder layers"),
        ("Ett|ttm|m|L", "on virtual stages"),
        ("Ett|ttm||L", "not the last of its pipeline rank"),
    ],
)
def test_the_rule_is_named(text: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        layout_counts(text, 4, 2, 2 if text.count("|") == 3 else 1)
