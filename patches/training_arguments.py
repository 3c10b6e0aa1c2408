"""megatron.training.arguments: our flags join the host's parser."""

from mindspeed_autoparallel.patching import Calls, Patch

PATCHES = [
    Patch(
        target="megatron.training.arguments:parse_args",
        wrapper=Calls("runtime.megatron.parsing:parse_with_our_flags"),
        parameters=("extra_args_provider",),
        why="Adds the flags that the host lacks, and passes the parsed arguments to the features that they enable.",
    )
]
