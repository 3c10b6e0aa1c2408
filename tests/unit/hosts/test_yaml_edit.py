"""Values are set in a YAML text; every other character stays, and the text parses to the requested values."""

from __future__ import annotations

import copy
import random
from typing import Any

import pytest
import yaml
from how_many import how_many

from mindspeed_autoparallel.errors import ConfigError
from mindspeed_autoparallel.hosts.yaml_edit import with_values

TEXT = """# 并行策略
parallel:
  size: auto  # the whole world
  plan:
     apply: # do not reorder
     - model.visual
     # the language model
     - model.layers.{*}  # all
     - lm_head

  empty:
  flow: {a: 1, b: [x, 'y']}
training:
    batch: &MBS 16
    lr: 1.0e-5
    "quoted": yes
data: {batch: *MBS}
"""


def edited(**values: Any) -> str:
    return with_values(TEXT, {key.replace("__", "."): value for key, value in values.items()}, "x.yaml")


def test_a_scalar_is_replaced_and_its_comment_stays() -> None:
    assert edited(parallel__size=8) == TEXT.replace("auto  #", "8  #")


def test_values_that_stand_there_change_nothing() -> None:
    assert edited(parallel__size="auto", training__lr=1e-5, training__quoted=True) == TEXT
    assert edited(parallel__plan__apply=["model.visual", "model.layers.{*}", "lm_head"]) == TEXT


def test_items_of_a_list_that_stay_keep_their_lines() -> None:
    after = edited(parallel__plan__apply=["model.visual", "model.layers.{0-3}", "lm_head", "mtp"])
    removed = "     - model.layers.{*}  # all\n"
    assert after == TEXT.replace(removed, "     - model.layers.{0-3}\n").replace(
        "     - lm_head\n", "     - lm_head\n     - mtp\n"
    )


def test_an_anchored_value_changes_with_what_refers_to_it() -> None:
    tree = yaml.safe_load(edited(training__batch=4))
    assert tree["training"]["batch"] == tree["data"]["batch"] == 4


@pytest.mark.parametrize("ending", ["\n", "\r\n"])
def test_random_edits_set_their_values_and_keep_the_rest(ending: str) -> None:
    generator = random.Random(11)
    text = TEXT.replace("\n", ending)
    keys = [
        "parallel.size",
        "parallel.plan.apply",
        "parallel.empty",
        "parallel.flow.a",
        "parallel.flow.b",
        "new.one.two",
    ]
    keys += [
        "training.lr",
        "training.fresh",
        "parallel.plan.depth",
        "parallel.flow.c",
        "training.quoted",
        "parallel.empty.in",
    ]
    choices: list[Any] = [3, 0.5, 1e-7, True, None, "plain", "a: b", "{x}", "#no", "", "yes", [], ["a.{*}", "*.b", "c"]]
    for _ in range(how_many(90, 300)):
        values = {key: generator.choice(choices) for key in generator.sample(keys, generator.randint(1, 4))}
        if "parallel.empty" in values and "parallel.empty.in" in values:
            del values["parallel.empty.in"]
        wanted = copy.deepcopy(yaml.safe_load(text))
        for key, value in values.items():
            *parents, last = key.split(".")
            node = wanted
            for part in parents:
                node[part] = {} if node.get(part) is None else node[part]
                node = node[part]
            node[last] = value
        after = with_values(text, values, "x.yaml")
        assert yaml.safe_load(after) == wanted
        assert (after.count("\r\n") == after.count("\n")) == (ending == "\r\n")
        assert "# 并行策略" in after
        # A list that becomes empty or a single value takes the comments between its items along.
        if values.get("parallel.plan.apply", ["kept"]) in (["kept"], ["a.{*}", "*.b", "c"]):
            assert "# the language model" in after


@pytest.mark.parametrize(
    ("text", "key", "words"),
    [
        ("a: [1", "a", "line 1"),
        ("- a\n", "a", "no sections"),
        ("", "a", "no sections"),
        ("{a: 1}", "a", "block of sections"),
        ("a: 1\n", "a.b", "must be a section"),
        ("a: &x {k: 1}\nb: *x\n", "b.k", "alias"),
        ("a: &x\n  k: 1\nb: *x\n", "a.k", "anchors"),
        ("a: &x 1\nb: &x 2\n", "a", "duplicate anchor"),
    ],
)
def test_texts_that_cannot_be_edited_are_refused_in_a_line(text: str, key: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words) as error:
        with_values(text, {key: 5}, "x.yaml")
    assert "\n" not in str(error.value) and "x.yaml" in str(error.value)
