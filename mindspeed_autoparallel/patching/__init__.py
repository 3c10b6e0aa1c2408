"""The patch engine: patches are data, installation happens when Megatron is imported, undo is derived.

Call ``install(patches)`` before Megatron is imported; ``enable(flags)`` activates the patches of flags that are
true; ``require(flag)`` raises if a patch that the flag needs could not be installed; ``undo_all()`` restores every
original.
"""

from mindspeed_autoparallel.patching.engine import ENGINE, Engine, InstalledPatch, LateImportWarning, PatchState
from mindspeed_autoparallel.patching.imports import call_after_import, call_before_import
from mindspeed_autoparallel.patching.patch import Calls, Patch, Wrapper

__all__ = [
    "ENGINE",
    "Calls",
    "Engine",
    "InstalledPatch",
    "LateImportWarning",
    "Patch",
    "PatchState",
    "Wrapper",
    "call_after_import",
    "call_before_import",
]
