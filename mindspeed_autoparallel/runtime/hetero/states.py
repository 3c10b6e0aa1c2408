"""One Megatron ``parallel_state`` per module, switched at run time.

Every module's globals are built once from a pristine snapshot and kept; switching assigns them back. The list of
globals is read from the module itself, so new Megatron releases need no new list here. Process groups with the same
ranks, role, backend and options are shared between modules. State that changes while a module runs (such as the virtual
pipeline rank) is written back to the module's snapshot when its context ends, also after an exception.
"""

from __future__ import annotations

import contextlib
import copy
import operator
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from mindspeed_autoparallel.errors import ConfigError
from mindspeed_autoparallel.runtime.devices.cpu.edits import replaced
from mindspeed_autoparallel.runtime.hetero.redistribution.placement import Coordinates, Placement, sized_placement
from mindspeed_autoparallel.runtime.megatron.exchanged_shapes import plays_alone

SHARED_GLOBALS = ("_GLOBAL_MEMORY_BUFFER", "_GLOBAL_SYMMETRIC_MEMORY_BUFFER", "_global_process_group_list")
"""Globals independent of the layout: scratch memory, and the list of groups to destroy. Shared by all modules."""


def global_names(namespace: types.ModuleType) -> list[str]:
    """Return a namespace's state variables: names with one underscore that are no function, class or module."""
    return [
        name
        for name, value in vars(namespace).items()
        if name.startswith("_")
        and not name.startswith("__")
        and not isinstance(value, type | types.FunctionType | types.BuiltinFunctionType | types.ModuleType)
        and name not in SHARED_GLOBALS
    ]


class GroupMemo:
    """Returns one process group per (role, ranks, backend, options) while it replaces ``create_group``."""

    def __init__(self) -> None:
        self._groups: dict[Any, Any] = {}
        self.num_requested = 0

    @property
    def num_created(self) -> int:
        return len(self._groups)

    def of_ranks(self, ranks: Sequence[int]) -> Any:
        """Return a group of exactly these ranks, for the exchange between modules (collective over the world)."""
        import torch

        key = ("exchange", tuple(ranks))
        if key not in self._groups:
            self._groups[key] = torch.distributed.new_group(list(ranks))
        return self._groups[key]

    @contextlib.contextmanager
    def installed(self, parallel_state: Any) -> Iterator[None]:
        """Inside the block, ``parallel_state.create_group`` returns a group from the memo if it exists."""
        original = parallel_state.create_group

        def create_group(ranks: Any = None, *args: Any, **kwargs: Any) -> Any:
            self.num_requested += 1
            options = kwargs.get("pg_options")
            key = (
                kwargs.get("group_desc"),
                None if ranks is None else tuple(ranks),
                str(kwargs.get("backend")),
                repr(sorted(vars(options).items())) if hasattr(options, "__dict__") else str(type(options)),
                bool(kwargs.get("use_local_synchronization")),
            )
            if key not in self._groups:
                self._groups[key] = original(ranks, *args, **kwargs)
            return self._groups[key]

        with replaced(parallel_state, "create_group", create_group):
            yield


class ModuleStates:
    """The snapshots of all modules of a job and the one that is current.

    ``parallel_state``: Megatron's module (or a stand-in with the same functions). Attributes of an object
    (``get_args()``) follow the module through ``overlay``. ``groups``: a memo that other states of this process share.
    """

    def __init__(self, parallel_state: types.ModuleType, groups: GroupMemo | None = None) -> None:
        self.parallel_state = parallel_state
        self._names = global_names(parallel_state)
        # Reads all names in one call, because every macro-batch switches states.
        self._values = _reader(self._names)
        self._pristine = _fresh(self._capture())
        self._snapshots: dict[str, dict[str, object]] = {}
        self._overlays: dict[str, dict[str, object]] = {}
        self._overlaid: Any = None
        self._hooks: list[Callable[[str | None, str], None]] = []
        self.current: str | None = None
        self.drawing: Callable[[str], contextlib.AbstractContextManager[None]] = lambda name: contextlib.nullcontext()
        """Context manager around all computation of a module; ``ModuleRandomStates`` sets its own here."""
        self.groups = groups or GroupMemo()

    @property
    def names(self) -> list[str]:
        return list(self._snapshots)

    def on_switch(self, hook: Callable[[str | None, str], None]) -> None:
        """Call ``hook(old, new)`` at every switch to another module (used by ``ModuleRandomStates``)."""
        self._hooks.append(hook)

    def overlay(self, target: Any, values: Mapping[str, Mapping[str, object]]) -> None:
        """Set the attributes ``values[m]`` on ``target`` while module m is current."""
        self._overlaid = target
        self._overlays = {name: dict(fields) for name, fields in values.items()}

    def build(self, name: str, initialize: Callable[[], None]) -> None:
        """Run ``initialize``, which calls ``initialize_model_parallel``, from the pristine state, and keep the result.

        Collective: every rank builds the same modules in the same order. The previous state is restored.
        """
        before = self._capture()
        shared = {n: getattr(self.parallel_state, n) for n in SHARED_GLOBALS if hasattr(self.parallel_state, n)}
        self._restore(_fresh(self._pristine))
        # initialize_model_parallel creates the scratch memory, and asserts that none exists.
        for shared_name in ("_GLOBAL_MEMORY_BUFFER", "_GLOBAL_SYMMETRIC_MEMORY_BUFFER"):
            if shared_name in shared:
                setattr(self.parallel_state, shared_name, None)
        try:
            with self.groups.installed(self.parallel_state):
                initialize()
            self._snapshots[name] = self._capture()
        finally:
            for shared_name, value in shared.items():
                if value is not None:
                    setattr(self.parallel_state, shared_name, value)
            self._restore(before)

    def adopt(self, name: str) -> None:
        """Keep the state that is current now (the host initialised it) as module ``name`` and make it current."""
        self._snapshots[name] = self._capture()
        self.current = name

    @contextlib.contextmanager
    def use(self, name: str) -> Iterator[None]:
        """Make module ``name``'s state current inside the block; always restore the previous state."""
        previous = self.current
        if name == previous:
            yield
            return
        if name not in self._snapshots:
            raise ConfigError(f"no parallel state was built for {name!r}; there are {', '.join(self.names) or 'none'}.")
        outer = None if previous is not None else self._capture()
        self._leave(previous)
        self._enter(previous, name)
        try:
            yield
        finally:
            self._leave(name)
            if previous is not None:
                self._enter(name, previous)
            else:
                self.current = None
                self._restore(outer or {})

    @contextlib.contextmanager
    def computing(self, name: str) -> Iterator[None]:
        """Use module ``name``'s state and draw from its generators inside the block."""
        with self.use(name), self.drawing(name):
            yield

    def coordinates(self, name: str) -> Coordinates:
        """Return this rank's place in a module's layout, from Megatron."""
        with self.use(name):
            state = self.parallel_state
            return Coordinates(
                state.get_tensor_model_parallel_rank(),
                state.get_context_parallel_rank(),
                state.get_data_parallel_rank(),
                state.get_pipeline_model_parallel_rank(),
            )

    def placement(self, name: str) -> Placement:
        """Return every rank's place in a module's layout (collective: one small all-gather).

        A process that runs one rank alone computes them from the sizes.
        """
        import torch

        if plays_alone():
            world_size, rank = torch.distributed.get_world_size(), torch.distributed.get_rank()
            return self._placement_of_sizes(name, world_size, rank)
        everyone: list[Any] = [None] * torch.distributed.get_world_size()
        torch.distributed.all_gather_object(everyone, self.coordinates(name))
        return tuple(everyone)

    def _placement_of_sizes(self, name: str, world_size: int, rank: int) -> Placement:
        with self.use(name):
            state = self.parallel_state
            tensor, context = state.get_tensor_model_parallel_world_size(), state.get_context_parallel_world_size()
            pipeline = state.get_pipeline_model_parallel_world_size()
        before_data = bool(getattr(self._overlaid, "use_tp_pp_dp_mapping", False))
        found = sized_placement(world_size, tensor, context, pipeline, pipeline_before_data=before_data)
        if found[rank] != self.coordinates(name):
            raise ConfigError(
                f"{name}: rank {rank} is at {self.coordinates(name)}, and Megatron's order of dimensions gives "
                f"{found[rank]}. A rank alone cannot compute where the others are; use the host's own order."
            )
        return found

    def _leave(self, name: str | None) -> None:
        if name is not None:
            self._snapshots[name] = self._capture()

    def _enter(self, old: str | None, name: str) -> None:
        self._restore(self._snapshots[name])
        self.current = name
        if self._overlaid is not None:
            self._overlaid.__dict__.update(self._overlays.get(name, {}))
        for hook in self._hooks:
            hook(old, name)

    def _capture(self) -> dict[str, object]:
        return dict(zip(self._names, self._values(vars(self.parallel_state)), strict=True))

    def _restore(self, values: Mapping[str, object]) -> None:
        vars(self.parallel_state).update(values)


def _reader(names: Sequence[str]) -> Callable[[Mapping[str, object]], tuple[Any, ...]]:
    """Return a function that reads the values of ``names``, with one call if there are several."""
    if len(names) > 1:
        return operator.itemgetter(*names)
    return lambda fields: tuple(fields[name] for name in names)


def _fresh(values: Mapping[str, object]) -> dict[str, object]:
    """Return ``values`` with copied containers."""
    return {n: copy.copy(v) if isinstance(v, list | dict | set) else v for n, v in values.items()}
