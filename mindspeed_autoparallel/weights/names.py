"""Rules: one per tensor, from the tables of ``families``; and the forms in which Hugging Face files name tensors.

``{n}`` is the layer, ``{e}`` the expert. Sources are written in the classic form (``visual.*``, ``model.*``); newer
releases of transformers nest them (``model.visual.*``, ``model.language_model.*``), LLaVA's descendants put
``language_model.`` in front, and Omni ``thinker.``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

VISION = "vision"
AUDIO = "audio"
TEXT = "text"
MODULES = (VISION, AUDIO, TEXT)

# How sources combine to the target.
COPY = "copy"  # one source, as it is
JOIN = "join"  # the rows of one after the other
QKV = "qkv"  # q, k, v -> for every query group: its queries, key, value
GATED_QKV = "gated_qkv"  # the same where every head of q has the rows of its output gate after its own
QKV_WITHOUT_KEY = "qkv_without_key"  # q, v -> the same with zeros for the key (bias of the audio tower)
FUSED_QKV = "fused_qkv"  # one source, all queries, all keys, all values -> by query group
DELTA = "delta"  # by key head: q, k, v, z and b, a -> all q, all k, all v, all z, all b, all a
TRANSPOSE = "transpose"
PAIRS = "pairs"  # gate and up rows in turn -> gate rows, then up rows
TRANSPOSE_PAIRS = "transpose_pairs"
MINUS_ONE = "minus_one"  # a norm around one -> the same around zero

# How tensor parallelism cuts the target.
WHOLE = "whole"
ROWS = "rows"  # of every section, where the rule has sections
COLUMNS = "columns"
VOCABULARY = "vocabulary"  # rows, padded

FIRST, LAYER, LAST, MULTI_TOKEN = "first", "layer", "last", "multi_token"

Shape = tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Rule:
    """One tensor (of every layer, where ``place`` is ``layer``; else in the first or last chunk of its module).

    ``shapes``: of the sources, without the dimension of the experts. ``groups``: heads or query groups that rows are
    ordered by. ``sections``: rows of the parts of the target, each of which is cut for itself. ``when``: words that a
    layer must have, or must not have (``not word``).
    """

    module: str
    place: str
    target: str
    sources: tuple[str, ...]
    shapes: tuple[Shape, ...]
    combine: str = COPY
    groups: int = 1
    split: str = WHOLE
    sections: tuple[int, ...] = ()
    when: tuple[str, ...] = ()

    @property
    def per_expert(self) -> bool:
        return "{e}" in self.target

    @property
    def untrained(self) -> bool:
        """Return whether training has no such parameter: on conversion to Hugging Face it is copied from the
        original."""
        return "untrained" in self.when

    def meets(self, words: Iterable[str]) -> bool:
        """Return whether a layer (or a module) of these words has the tensor."""
        have = frozenset(words)
        return all((word[4:] not in have) if word.startswith("not ") else (word in have) for word in self.when)


EMBEDDING = "embedding.word_embeddings.weight"
OUTPUT_LAYER = "output_layer.weight"


def is_output_layer(rule: Rule) -> bool:
    """Return whether the rule's tensor may be tied to the embedding."""
    return rule.module == TEXT and rule.target.endswith(OUTPUT_LAYER)


_CLASSIC = (("language_model.model.", "model."), ("language_model.lm_head.", "lm_head."))


def classic_name(name: str) -> str:
    """Return the classic Hugging Face name of any of the naming forms."""
    name = name.removeprefix("thinker.")
    for begin in ("model.visual.", "model.vision_tower.", "model.multi_modal_projector."):
        if name.startswith(begin):
            return name.removeprefix("model.")
    if name.startswith("model.language_model."):
        return "model." + name.removeprefix("model.language_model.")
    for form, classic in _CLASSIC:
        if name.startswith(form):
            return classic + name.removeprefix(form)
    return name


def nested_name(name: str) -> str:
    """Return the name newer transformers use for a classic name."""
    if name.startswith(("visual.", "vision_tower.", "multi_modal_projector.")):
        return "model." + name
    if name.startswith("model."):
        return "model.language_model." + name.removeprefix("model.")
    return name


def llava_name(name: str) -> str:
    """Return the name that LLaVA's descendants use for a classic name."""
    for form, classic in _CLASSIC:
        if name.startswith(classic):
            return form + name.removeprefix(classic)
    return name


def naming_form(known: Iterable[str]) -> Callable[[str], str]:
    """Return the function from classic names to the form of the names ``known``; the classic form without any."""
    names = list(known)
    if any(name.startswith(("model.visual.", "model.language_model.", "model.vision_tower.")) for name in names):
        return nested_name
    if any(name.startswith("language_model.model.") for name in names):
        return llava_name
    return lambda classic: classic


IGNORED_SOURCES = ("rotary_emb.inv_freq",)
"""Suffixes of the names of buffers that some old files contain."""
