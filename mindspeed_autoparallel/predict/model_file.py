"""A model described in a user's file, for planning without a script."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from mindspeed_autoparallel.cost.analytic.model_shape import ENCODER, Encoder
from mindspeed_autoparallel.cost.analytic.request_keys import KNOWN
from mindspeed_autoparallel.cost.analytic.spellings import canonical
from mindspeed_autoparallel.cost.analytic.workload import Workload
from mindspeed_autoparallel.errors import ConfigError, destination_of
from mindspeed_autoparallel.files import read_json
from mindspeed_autoparallel.predict.hugging_face import decoder_of_config
from mindspeed_autoparallel.predict.hugging_face_modules import (
    SampleMedia,
    is_of_several_modules,
    modules_of_config,
    request_model,
)
from mindspeed_autoparallel.predict.megatron_arguments import model_and_rest
from mindspeed_autoparallel.spec.model import RESULT_KEYS, Module

_OWN_KEYS = ("name", "frozen", "deepstack_layers", "deepstack_visual_indexes")


@dataclass(frozen=True)
class Section:
    """One module of the model: ``shape`` as the ``model`` of a prediction request, whose ``seq`` counts its tokens."""

    name: str
    shape: Mapping[str, object]
    frozen: bool = False
    deepstack_layers: int = 0
    """See ``spec.Module``."""


def read_model_file(
    path: Path, sequence_length: int | None = None, media: SampleMedia | None = None
) -> tuple[Section, ...]:
    """Return the modules in ``path``: one model, a whole request, or ``{"modules": [...]}``, encoders first.

    Each is in the words of a request, of Megatron's flags, or of a Hugging Face config.json. ``sequence_length``:
    tokens of the text decoder, in place of the file's; ``media``: what a sample holds beside text, for the config.json
    of a vision-language or omni model. Raises ``ConfigError`` with file and key.
    """
    content = read_json(path, "model file")
    if isinstance(content, dict) and isinstance(content.get("model"), dict):
        content = content["model"]
    if not isinstance(content, dict):
        raise ConfigError(f"model file {path} must be an object: one model's sizes, or modules.")
    modules = content.get("modules", [{"name": "text_decoder", **content}])
    if is_of_several_modules(content):
        modules = modules_of_config(content, f"model file {path}", media or SampleMedia())
    elif media is not None and media.stated:
        raise ConfigError(
            f"model file {path} is not a config.json with encoders: flags for images and audio have no effect."
        )
    if not isinstance(modules, list) or not modules or not all(isinstance(module, dict) for module in modules):
        raise ConfigError(f"model file {path}: modules must be a list of objects, the text decoder last.")
    for index, module in enumerate(modules):
        if not isinstance(module.get("name"), str) or not module["name"]:
            raise ConfigError(f"model file {path}: modules[{index}].name is missing.")
    sections = [_section(module, f"model file {path}") for module in modules]
    decoder = sections[-1]
    if sequence_length is not None:
        sections[-1] = dataclasses.replace(decoder, shape={**decoder.shape, "seq": sequence_length})
    elif "seq" not in decoder.shape and "hidden" in decoder.shape:
        raise ConfigError(f"model file {path} has no sequence length; give --seq-length.")
    return tuple(sections)


def _section(module: Mapping[str, object], where: str) -> Section:
    sizes = {key: value for key, value in module.items() if key not in _OWN_KEYS}
    places = module.get("deepstack_visual_indexes") or []
    number = module.get("deepstack_layers", len(places) if isinstance(places, list) else -1)
    if isinstance(number, bool) or not isinstance(number, int) or number < 0:
        raise ConfigError(f"{where}: deepstack_layers of {module['name']} must be 0 or more, got {number!r}.")
    shape, frozen = in_request_words(sizes, where), bool(module.get("frozen", False))
    return Section(name=str(module["name"]), shape=shape, frozen=frozen, deepstack_layers=number)


def in_request_words(model: Mapping[str, object], where: str) -> dict[str, object]:
    """Return ``model`` as a prediction request has it; what already is stays as it is.

    A Hugging Face config has no sequence length: ``seq`` or ``seq_length`` stand beside its keys. Raises
    ``ConfigError`` with ``where`` and the key.
    """
    if "hidden" in model:
        return dict(model)
    names = {destination_of(str(key)): value for key, value in model.items()}
    if is_of_several_modules(names):
        return request_model(names, where)
    if "model_type" in names or "num_hidden_layers" in names:
        sequence = names.get("seq", names.get("seq_length"))
        return {**decoder_of_config(names, where), **({} if sequence is None else {"seq": sequence})}
    if "hidden_size" in names:
        try:
            return _of_arguments(names)
        except ConfigError as error:
            raise ConfigError(f"{where}: {error}") from None
    return dict(model)


def _of_arguments(names: Mapping[str, object]) -> dict[str, object]:
    """Return a model in Megatron's names, with a request's own keys among them, which count before Megatron's defaults,
    and with what is neither, so that it is named."""
    model, rest = model_and_rest(names)
    own = canonical({"model": rest})["model"]
    assert isinstance(own, dict)
    if own.keys() & KNOWN["model"] and "untie_embeddings_and_output_weights" not in names:
        model.pop("tied_embeddings")
    if own.get("layer_pattern") or own.get("type"):
        model.pop("type")
    return {**model, **own}


def request_in_own_words(request: Mapping[str, object]) -> dict[str, object]:
    """Return ``request`` in a request's own words; anything that is no request stays as it is."""
    model = request.get("model")
    return canonical({**request, "model": in_request_words(model, "model")} if isinstance(model, Mapping) else request)


def encoder_module(encoder: Encoder) -> Module:
    """Return an encoder that the decoder's section describes."""
    return Module(
        name=ENCODER,
        result_key=ENCODER,
        num_layers=encoder.num_layers,
        frozen=encoder.frozen,
        hidden_size=encoder.hidden,
        tokens_per_sample=encoder.tokens,
        num_heads=encoder.heads,
    )


def module_of(section: Section, work: Workload, before: Sequence[Module]) -> Module:
    """Return the module of a section that reads the modules ``before``."""
    return Module(
        name=section.name,
        result_key=RESULT_KEYS.get(section.name, section.name),
        num_layers=work.model.num_layers,
        frozen=section.frozen,
        hidden_size=work.model.hidden,
        tokens_per_sample=work.model.sequence,
        num_heads=work.model.heads,
        num_kv_heads=work.model.kv_heads,
        num_experts=work.model.num_experts,
        predecessors=tuple(other.name for other in before),
        deepstack_layers=section.deepstack_layers,
    )
