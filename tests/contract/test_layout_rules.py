"""Layout strings are refused here exactly where Megatron's own validator refuses them."""

from __future__ import annotations

import argparse
import itertools
import random
from types import SimpleNamespace
from typing import Any

import pytest

from mindspeed_autoparallel.cost.analytic.placement import layout_counts
from mindspeed_autoparallel.errors import ConfigError, PlanError
from mindspeed_autoparallel.runtime.megatron.description import describe
from mindspeed_autoparallel.runtime.megatron.splits import runnable_splits
from mindspeed_autoparallel.runtime.megatron.stage_rows import arguments_of_row, rows_by_flags
from mindspeed_autoparallel.spec import Layout

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


def _built(said: dict[str, Any], layers: int, pipeline: int, chunks: int) -> tuple[int, ...] | None:
    """Return the row that Megatron's own function builds under the flags ``said``; ``None`` if it refuses them."""
    from megatron.core.transformer.transformer_block import get_num_layers_to_build

    config = SimpleNamespace(
        num_layers=layers,
        num_layers_in_first_pipeline_stage=said.get("decoder_first_pipeline_num_layers"),
        num_layers_in_last_pipeline_stage=said.get("decoder_last_pipeline_num_layers"),
        account_for_embedding_in_pipeline_split=said.get("account_for_embedding_in_pipeline_split", False),
        account_for_loss_in_pipeline_split=said.get("account_for_loss_in_pipeline_split", False),
        pipeline_model_parallel_layout=None,
        pipeline_model_parallel_size=pipeline,
        virtual_pipeline_model_parallel_size=chunks if chunks > 1 else None,
    )
    try:
        return tuple(
            get_num_layers_to_build(config, vp_stage=chunk if chunks > 1 else None, pp_rank=rank)
            for chunk in range(chunks)
            for rank in range(pipeline)
        )
    except (AssertionError, ZeroDivisionError):
        return None


SIZES = [(2, 6), (2, 7), (3, 12), (3, 10), (4, 16)]


@pytest.mark.parametrize(("pipeline", "layers"), SIZES)
def test_splits_without_a_layout_string_equal_those_that_megatron_builds(pipeline: int, layers: int) -> None:
    """Every row that is searched for such a release, as flags, parsed by Megatron's own function."""
    searched = runnable_splits(argparse.Namespace(num_layers=layers), describe(argparse.Namespace(num_layers=layers)))
    assert searched is not None
    for chunks in (1, 2):
        layout = Layout(pipeline_size=pipeline, virtual_size=chunks, schedule="interleaved" if chunks > 1 else "1f1b")
        for found in searched.of_layout(layout):
            (counts,) = found.values()
            assert _built(arguments_of_row(counts, pipeline, chunks), layers, pipeline, chunks) == tuple(counts)


@pytest.mark.parametrize("chunks", [1, 2])
@pytest.mark.parametrize(("pipeline", "layers"), SIZES)
def test_every_row_that_the_flags_express_is_searched_and_no_other(pipeline: int, layers: int, chunks: int) -> None:
    ends = [None, *range(1, layers)]
    expressed = {
        _built(
            {"decoder_first_pipeline_num_layers": first, "decoder_last_pipeline_num_layers": last},
            layers,
            pipeline,
            chunks,
        )
        for first, last in itertools.product(ends, repeat=2)
    } | {
        _built(
            {"account_for_embedding_in_pipeline_split": first, "account_for_loss_in_pipeline_split": last},
            layers,
            pipeline,
            chunks,
        )
        for first, last in itertools.product((False, True), repeat=2)
    }
    rows = {row for row in expressed if row is not None and min(row) > 0 and sum(row) == layers}
    assert {row for row, _ in rows_by_flags(layers, pipeline, chunks)} == rows


def test_drawn_rows_are_accepted_exactly_where_they_are_searched() -> None:
    drawn = random.Random(0)
    outcomes = set()
    for _ in range(500):
        pipeline = drawn.choice((1, 2, 3, 4))
        chunks = drawn.choice((1, 1, 2, 3)) if pipeline > 1 else 1
        counts = [drawn.choice((1, 2, 2, 2, 3)) for _ in range(pipeline)] * chunks
        if drawn.random() < 0.5:
            counts[drawn.randrange(len(counts))] += drawn.choice((-1, 1))
        searched = tuple(counts) in {row for row, _ in rows_by_flags(sum(counts), pipeline, chunks)}
        try:
            said = arguments_of_row(counts, pipeline, chunks)
        except PlanError:
            accepted = False
        else:
            accepted = True
            assert _built(said, sum(counts), pipeline, chunks) == tuple(counts), counts
        assert accepted == searched, counts
        outcomes.add(accepted)
    assert outcomes == {True, False}
