"""megatron.core...language_module: tied embeddings of a language model that begins after the first stage."""

from mindspeed_autoparallel.patching import Calls, Patch

PATCHES = [
    Patch(
        target=(
            "megatron.core.models.common.language_module.language_module:"
            "LanguageModule.setup_embeddings_and_output_layer"
        ),
        wrapper=Calls("runtime.megatron.shared_embedding:send_embedding"),
        flags=("--auto-parallel-plan",),
        why="MindSpeed-MM's language model may begin after the first stage: the last gets its weights from there.",
    )
]
