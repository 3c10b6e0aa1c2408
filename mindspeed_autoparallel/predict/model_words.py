"""Reads a model's sizes from any notation: a request's keys, Megatron's flags, or a Hugging Face config."""

from __future__ import annotations

from collections.abc import Mapping

from mindspeed_autoparallel.cost.analytic.request_keys import KNOWN
from mindspeed_autoparallel.cost.analytic.spellings import canonical
from mindspeed_autoparallel.errors import ConfigError
from mindspeed_autoparallel.predict.hugging_face import decoder_of_config
from mindspeed_autoparallel.predict.hugging_face_modules import is_of_several_modules, request_model
from mindspeed_autoparallel.predict.megatron_arguments import model_and_rest


def in_request_words(model: Mapping[str, object], where: str) -> dict[str, object]:
    """Return ``model`` as a prediction request has it; what already is stays as it is.

    A Hugging Face config has no sequence length: ``seq`` or ``seq_length`` stand beside its keys. Raises
    ``ConfigError`` with ``where`` and the key.
    """
    if "hidden" in model:
        return dict(model)
    names = {str(key).lstrip("-").replace("-", "_"): value for key, value in model.items()}
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
