"""mindspeed_mm.fsdp.utils.register: how MindSpeed-MM's native FSDP2 trainer loads plugins, ours among them."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any

from mindspeed_autoparallel.patching import Patch

_PLUGIN = "mindspeed_autoparallel.plugin"


def load_own_plugin(
    wrapped: Callable[..., Any], instance: Any, args: tuple[Any, ...], kwargs: Mapping[str, object]
) -> Any:
    """Load the user's plugins, then ours if its flags are on the command line and no plugin list names it."""
    from mindspeed_autoparallel.runtime.flags.registration import flags_of_command

    result = wrapped(*args, **kwargs)
    if flags_of_command():
        importlib.import_module(_PLUGIN)
    return result


PATCHES = [
    Patch(
        target="mindspeed_mm.fsdp.utils.register:import_plugin",
        wrapper=load_own_plugin,
        distribution="mindspeed-mm",
        parameters=("plugin_list",),
        why="MindSpeed-MM's native trainer ignores flags after its YAML; if this package is imported ahead of "
        "the script, they work as if training.plugin named mindspeed_autoparallel.plugin.",
    )
]
