"""Reads a model's sizes in the words its owner has them in: a request's, Megatron's flags, or Hugging Face's config."""

from __future__ import annotations

from collections.abc import Mapping

from mindspeed_autoparallel.predict.hugging_face import decoder_of_config
from mindspeed_autoparallel.predict.hugging_face_modules import is_of_several_modules, request_model
from mindspeed_autoparallel.predict.megatron_arguments import model_of_arguments


def in_request_words(model: Mapping[str, object], where: str) -> dict[str, object]:
    """Return ``model`` as a prediction request has it; what already is stays as it is.

    A Hugging Face config says no sequence length: ``seq`` or ``seq_length`` stand beside its keys. Raises
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
        return model_of_arguments(names)
    return dict(model)


def request_in_own_words(request: Mapping[str, object]) -> dict[str, object]:
    """Return ``request`` with its ``model`` in a request's words; anything that is no request stays as it is."""
    model = request.get("model")
    return {**request, "model": in_request_words(model, "model")} if isinstance(model, Mapping) else dict(request)
