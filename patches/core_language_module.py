"""megatron.core...language_module: tied embeddings of a language model that begins after the first stage."""

from collections.abc import Callable, Mapping
from typing import Any

from mindspeed_autoparallel.patching import Patch


def _set_up(wrapped: Callable[..., Any], instance: Any, args: tuple[Any, ...], kwargs: Mapping[str, object]) -> Any:
    from mindspeed_autoparallel.runtime.megatron.shared_embedding import send_embedding

    return send_embedding(wrapped, instance, args, kwargs)


PATCHES = [
    Patch(
        target=(
            "megatron.core.models.common.language_module.language_module:"
            "LanguageModule.setup_embeddings_and_output_layer"
        ),
        wrapper=_set_up,
        versions=">=0.12,<0.21",
        flags=("--auto-parallel-plan",),
        why="MindSpeed-MM's language model may begin after the first stage: the last gets its weights from there.",
    ),
]
