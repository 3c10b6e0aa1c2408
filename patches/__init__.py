"""Patch tables: one file per patched host module, named like it. No torch at module level.

``install()`` is called once by ``import mindspeed_autoparallel``; ``patching.ENGINE`` lists and undoes them.
"""

if __name__ != "mindspeed_autoparallel.patches":
    raise ImportError(
        f"this package is mindspeed_autoparallel.patches, imported here as {__name__!r}: "
        "import mindspeed_autoparallel.patches instead, and take the repository's root off sys.path if it is there"
    )

import importlib
import os
import pkgutil
import sys

from mindspeed_autoparallel.patching import ENGINE, Patch, call_before_import

_PREPARE_BEFORE = (
    *("megatron.core", "megatron.training", "megatron.legacy"),
    # They save torch's functions on import and later install wrappers of these, which would replace ours if ours were
    # installed in between.
    *("mindspeed", "mindspeed_llm", "mindspeed_mm"),
)
"""Packages that need the device to be ready when they are imported."""
_NATIVE_VARIABLE = "NON_MEGATRON"
"""The variable that MindSpeed-MM's users export for its native trainer."""


def patch_table() -> list[Patch]:
    """Return every patch, in the order of the tables' file names."""
    found: list[Patch] = []
    for item in sorted(pkgutil.iter_modules(__path__), key=lambda item: item.name):
        found += importlib.import_module(f"{__name__}.{item.name}").PATCHES
    return found


def install() -> None:
    """Install the patches as Megatron's modules are imported, and prepare the device right before the first of them."""
    from mindspeed_autoparallel.runtime.flags.registration import flags_of_command
    from mindspeed_autoparallel.runtime.megatron.features import TASK_VARIABLE

    if ENGINE.patches:
        return
    flags, asked_for = flags_of_command() | ({TASK_VARIABLE} & set(os.environ)), patch_table()
    if "megatron.core" not in sys.modules:
        call_before_import(_PREPARE_BEFORE, _before_megatron)
    else:
        from mindspeed_autoparallel.runtime.megatron.installation import refuse_late_import

        wanted = [patch.module for patch in asked_for if not patch.flags or set(patch.flags) & flags]
        refuse_late_import(flags, [module for module in wanted if module in sys.modules])
    if TASK_VARIABLE in os.environ:
        ENGINE.enable({TASK_VARIABLE})
    ENGINE.install(asked_for)


def _before_megatron() -> None:
    from mindspeed_autoparallel.runtime.devices.selection import prepare_for_megatron
    from mindspeed_autoparallel.runtime.flags.registration import flags_given
    from mindspeed_autoparallel.runtime.megatron.features import ALONE_VARIABLE
    from mindspeed_autoparallel.runtime.megatron.installation import refuse_unfit_installation
    from mindspeed_autoparallel.runtime.megatron.unsearched import refuse_hybrid_command

    if os.environ.get(_NATIVE_VARIABLE, "").lower() == "true":
        # MindSpeed-MM's native FSDP2 trainer imports no Megatron, and would take our CPU-backed torch.cuda for a GPU.
        return
    words = getattr(sys, "argv", [])[1:]
    flags = flags_given(words)
    refuse_unfit_installation(flags)
    refuse_hybrid_command(flags, words)
    prepare_for_megatron()
    if os.environ.get(ALONE_VARIABLE):
        # Scripts may make process groups before Megatron parses its arguments.
        from mindspeed_autoparallel.runtime.profiling import alone

        alone.install()
