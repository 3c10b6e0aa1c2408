"""Installs patches the moment their modules are imported, keeps the list, and undoes it.

Post-import hooks run before any other module can copy a name with ``from x import f``. That is why this package must
be imported before Megatron; of functions imported earlier, only copies that modules hold by name are replaced.
"""

from __future__ import annotations

import enum
import functools
import inspect
import sys
import threading
import types
import warnings
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from mindspeed_autoparallel.errors import PatchError
from mindspeed_autoparallel.patching.imports import call_after_import
from mindspeed_autoparallel.patching.patch import Patch
from mindspeed_autoparallel.patching.releases import release_of, within

_SCHEDULERS = ("mindspeed.", "mindspeed_llm.", "mindspeed_mm.")
"""Packages whose features replace a training step by one with another pipeline schedule."""


class LateImportWarning(UserWarning):
    """Megatron was imported before this package: names copied out of its modules earlier stay unpatched."""


class PatchState(enum.Enum):
    """The state of a patch."""

    WAITING = "waiting for its module to be imported"
    INSTALLED = "installed"
    DORMANT = "in place, and passes calls on until one of its flags is true"
    FAILED = "could not be installed"
    UNDONE = "undone"


@dataclass
class InstalledPatch:
    """A patch and its state."""

    patch: Patch
    state: PatchState = PatchState.WAITING
    reason: str = ""
    """Why it is in this state, for users; empty if there is no reason to give."""
    original: Any = None
    replacement: Any = None
    active: bool = False
    """Read by the wrapper on every call: false until a flag of the patch is true, and after the patch is undone."""


class Engine:
    """Holds the patches of one process. The package has exactly one, ``ENGINE``."""

    def __init__(self) -> None:
        self.patches: list[InstalledPatch] = []
        self.late_modules: list[str] = []
        self.enabled: set[str] = set()
        """Flags whose patches are active."""
        self._lock = threading.RLock()
        """Held while a patch changes: several threads may import modules."""

    def install(self, patches: Sequence[Patch]) -> None:
        """Install each patch when its module is imported; at once if the module is imported already.

        A patch with flags passes calls on until ``enable`` names one of them: by the time the host has parsed its
        flags, other modules have copied the names to patch.
        """
        for patch in patches:
            entry = InstalledPatch(patch)
            self.patches.append(entry)
            if patch.module in sys.modules:
                self.late_modules.append(patch.module)
            call_after_import(patch.module, functools.partial(self._install, entry))
        if self.late_modules:
            warnings.warn(
                f"mindspeed_autoparallel was imported after {', '.join(sorted(set(self.late_modules)))}: functions "
                "that other modules copied from them are patched only where a module holds them by name. Move `import "
                "mindspeed_autoparallel` above the first megatron import of the script.",
                LateImportWarning,
                stacklevel=4,
            )

    def enable(self, flags: Collection[str]) -> None:
        """Activate the patches of ``flags``, including those of modules that are imported later."""
        with self._lock:
            self.enabled |= set(flags)
            for entry in self.patches:
                if entry.state is PatchState.DORMANT and self.is_wanted(entry):
                    entry.state, entry.active = PatchState.INSTALLED, True

    def require(self, flag: str) -> None:
        """Raise ``PatchError`` if Megatron was imported first or a patch that ``flag`` needs could not be installed."""
        if self.late_modules:
            raise PatchError(
                f"{flag} needs mindspeed_autoparallel to be imported before megatron, but {min(self.late_modules)} was "
                "imported first. Move `import mindspeed_autoparallel` above the first megatron import of the script."
            )
        for entry in self.patches:
            if flag in entry.patch.flags and entry.state is PatchState.FAILED:
                raise PatchError(f"{flag} needs {entry.patch.target}, but {entry.reason}")

    def verify(self, flag: str) -> list[str]:
        """Raise ``PatchError`` naming the first function ``flag`` needs whose wrapper would not be called, and why.

        Other plugins may replace patched functions. If a host has its own version of a function (``Patch.instead_of``),
        that version is checked. Returns a line for each replaced function that ``flag`` only watches; a replacement
        by a MindSpeed feature raises, because it changes the schedule.
        """
        unwatched = []
        needed = [entry for entry in self.patches if flag in entry.patch.flags and entry.state is PatchState.INSTALLED]
        instead = {entry.patch.instead_of for entry in needed}
        for entry in needed:
            if entry.patch.target in instead:
                continue
            holder, name = _holder(sys.modules[entry.patch.module], entry.patch.attribute)
            current = None if holder is None else inspect.getattr_static(holder, name)
            if leads_to(current, entry.replacement):
                continue
            place = place_of(current)
            if flag in entry.patch.watched_by and not place.startswith(_SCHEDULERS):
                unwatched.append(
                    f"{place} replaces {entry.patch.target} and does not call it: the steps of this training are not "
                    f"compared with the prediction of {flag}."
                )
                continue
            raise PatchError(
                f"{flag} wraps {entry.patch.target}, but {place} replaces it and does not call it. Turn off the "
                "feature that installs it (its flag, or its entry in the host's configuration), or train without "
                f"{flag}."
            )
        return unwatched

    def undo_all(self) -> None:
        """Restore every original; a patch under another plugin's wrapper becomes inert instead."""
        with self._lock:
            for entry in reversed(self.patches):
                self._undo(entry)

    def _undo(self, entry: InstalledPatch) -> None:
        if entry.state not in (PatchState.INSTALLED, PatchState.DORMANT):
            if entry.state is PatchState.WAITING:
                entry.state = PatchState.UNDONE
            return
        entry.active = False
        entry.state = PatchState.UNDONE
        holder, name = _holder(sys.modules[entry.patch.module], entry.patch.attribute)
        if holder is not None and inspect.getattr_static(holder, name, None) is entry.replacement:
            setattr(holder, name, entry.original)
        else:
            entry.reason = "another plugin wrapped it afterwards: ours is inert underneath"

    def _install(self, entry: InstalledPatch, module: ModuleType) -> None:
        with self._lock:
            if entry.state is not PatchState.WAITING:
                return
            reason = _unfit(entry.patch, module)
            if reason:
                entry.state, entry.reason = PatchState.FAILED, reason
                return
            from mindspeed_autoparallel.patching.replacement import Replacement

            holder, name = _holder(module, entry.patch.attribute)
            assert holder is not None
            entry.original = inspect.getattr_static(holder, name)
            entry.replacement = Replacement(entry.original, entry.patch.wrapper, lambda: entry.active)
            entry.active = self.is_wanted(entry)
            setattr(holder, name, entry.replacement)
            entry.state = PatchState.INSTALLED if entry.active else PatchState.DORMANT
            if entry.patch.module in self.late_modules and holder is module:
                _replace_copies(entry.original, entry.replacement)

    def is_wanted(self, entry: InstalledPatch) -> bool:
        """Return whether ``entry`` is active: it belongs to no flag, or to one that is true."""
        return not entry.patch.flags or not self.enabled.isdisjoint(entry.patch.flags)


ENGINE = Engine()
"""Holds the patches of ``import mindspeed_autoparallel``; the only module-level mutable state of the package."""


def _replace_copies(original: Any, replacement: Any) -> None:
    """Replace the names that earlier imported modules copied (``from x import original``)."""
    for module in list(sys.modules.values()):
        names = vars(module) if isinstance(module, ModuleType) else {}
        for name in [name for name, value in list(names.items()) if value is original]:
            setattr(module, name, replacement)


def _holder(module: ModuleType, attribute: str) -> tuple[Any, str]:
    """Return the object that holds the last name of ``attribute`` (None when a part is missing) and that name."""
    holder: Any = module
    *path, name = attribute.split(".")
    for part in path:
        holder = getattr(holder, part, None)
        if holder is None:
            return None, name
    return (holder, name) if hasattr(holder, name) else (None, name)


def _unfit(patch: Patch, module: ModuleType) -> str:
    """Return why ``patch`` does not fit ``module``, or an empty string."""
    release = release_of(patch.distribution)
    if release and not within(release, patch.versions):
        return f"{patch.distribution} {release} is outside the supported releases {patch.versions}"
    holder, name = _holder(module, patch.attribute)
    if holder is None:
        found = f"{patch.distribution} {release}" if release else f"this {patch.distribution}"
        return f"{found} has no {patch.attribute} in {patch.module}"
    if patch.parameters:
        target = getattr(holder, name)
        present = set(inspect.signature(target).parameters)
        missing = [parameter for parameter in patch.parameters if parameter not in present]
        if missing:
            return f"its signature has no {', '.join(missing)} ({patch.distribution} {release})"
    return ""


_MOST_LOOKED_AT = 500
"""Closures of decorators hold a handful of functions; whole object graphs are not searched."""


def leads_to(function: Any, ours: Any) -> bool:
    """Return whether ``function`` can reach ``ours``, through wrappers, closures, partials and names it refers to."""
    waiting: list[Any] = [function]
    seen: set[int] = set()
    while waiting and len(seen) < _MOST_LOOKED_AT:
        item = waiting.pop(0)
        if item is ours:
            return True
        if id(item) not in seen:
            seen.add(id(item))
            waiting += _callables_in(item)
            # Of the globals that a function names, follow only our own wrappers: one may wrap another.
            waiting += [named for named in _names_referred_to(item) if type(named) is type(ours)]
    return False


def place_of(function: Any) -> str:
    """Return the qualified name of ``function`` for messages: ``package.module.name``."""
    plain = function
    while not isinstance(plain, types.FunctionType) and hasattr(plain, "__wrapped__"):
        plain = plain.__wrapped__
    # functools.wraps copies the name of the wrapped function; the code object keeps its own.
    code = getattr(plain, "__code__", None)
    written = getattr(plain, "__globals__", {}).get("__name__") or getattr(plain, "__module__", "")
    own = getattr(code, "co_qualname", None) or getattr(code, "co_name", None) or getattr(plain, "__qualname__", "")
    return ".".join(part for part in (written, own) if part) or repr(function)


def _callables_in(item: Any) -> Iterator[Any]:
    wrapped = inspect.getattr_static(item, "__wrapped__", None)
    if wrapped is not None or type(item).__module__.startswith("wrapt"):
        yield getattr(item, "__wrapped__", None)
    if isinstance(item, functools.partial):
        yield item.func
    if isinstance(item, (staticmethod, classmethod, types.MethodType)):
        yield item.__func__
    if isinstance(item, types.FunctionType):
        for cell in item.__closure__ or ():
            try:
                content = cell.cell_contents
            except ValueError:
                continue
            if callable(content):
                yield content
    elif callable(item) and not isinstance(item, type):
        # An object with __call__ keeps the function it calls in an attribute.
        yield from (value for value in getattr(item, "__dict__", {}).values() if callable(value))


def _names_referred_to(item: Any) -> Iterator[Any]:
    """Yield globals that a function's own code names: a replacement may have imported the function that it calls."""
    if isinstance(item, types.FunctionType):
        yield from (item.__globals__.get(name) for name in item.__code__.co_names)
