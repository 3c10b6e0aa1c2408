"""The patch engine on a stand-in host written to disk."""

import copy
import importlib
import pickle
import sys
import threading
import warnings

import pytest

from mindspeed_autoparallel.errors import PatchError
from mindspeed_autoparallel.patching import (
    Engine,
    LateImportWarning,
    Patch,
    PatchState,
    call_after_import,
    call_before_import,
)


@pytest.fixture
def host(tmp_path, monkeypatch):
    """A module `standin_host` with a function and a class, and one that copies the function by name."""
    (tmp_path / "standin_host.py").write_text(
        "def double(x):\n    return 2 * x\n\nclass Model:\n    def size(self, scale=1):\n        return 10 * scale\n"
    )
    (tmp_path / "standin_copier.py").write_text(
        "from standin_host import double\n\ndef quadruple(x):\n    return double(double(x))\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    yield "standin_host"
    for name in ("standin_host", "standin_copier"):
        sys.modules.pop(name, None)


def add_one(wrapped, instance, args, kwargs):
    return wrapped(*args, **kwargs) + 1


def patch(target="standin_host:double", **options):
    return Patch(target=target, wrapper=options.pop("wrapper", add_one), why="test", distribution="standin", **options)


def test_names_copied_after_arming_are_patched(host):
    engine = Engine()
    engine.install([patch()])
    copier = importlib.import_module("standin_copier")
    assert copier.quadruple(1) == (2 * (2 * 1 + 1)) + 1


def test_methods_are_patched_and_undo_restores_the_very_original(host):
    engine = Engine()
    engine.install([patch(), patch("standin_host:Model.size")])
    module = importlib.import_module(host)
    assert (module.double(3), module.Model().size(scale=2)) == (7, 21)
    originals = [entry.original for entry in engine.patches]
    engine.undo_all()
    assert [module.double, module.Model.__dict__["size"]] == originals
    assert (module.double(3), module.Model().size(scale=2)) == (6, 20)


def test_undo_under_another_plugins_wrapper_goes_inert(host):
    engine = Engine()
    engine.install([patch()])
    module = importlib.import_module(host)
    ours = module.double
    module.double = lambda x: ours(x) * 100
    engine.undo_all()
    assert module.double(1) == 200
    assert "inert" in engine.patches[0].reason


def test_a_patch_of_a_flag_that_is_off_passes_calls_on_until_it_is_true(host):
    """Which flags are true is known when the host parses its arguments: by then names have been copied."""
    engine = Engine()
    engine.install([patch(flags=("--feature",))])
    copier = importlib.import_module("standin_copier")
    assert copier.quadruple(1) == 4
    assert engine.patches[0].state is PatchState.DORMANT
    engine.enable({"--other"})
    assert copier.quadruple(1) == 4
    engine.enable({"--feature"})
    assert copier.quadruple(1) == (2 * (2 * 1 + 1)) + 1
    engine.undo_all()
    assert importlib.import_module(host).double(1) == 2


def test_enabling_counts_for_modules_imported_later(host):
    engine = Engine()
    engine.install([patch(flags=("--feature",))])
    engine.enable({"--feature"})
    assert importlib.import_module(host).double(1) == 3


def test_a_late_import_patches_what_was_copied_before(host):
    copier = importlib.import_module("standin_copier")
    engine = Engine()
    with pytest.warns(LateImportWarning):
        engine.install([patch(flags=("--feature",))])
    engine.enable({"--feature"})
    assert copier.quadruple(1) == (2 * (2 * 1 + 1)) + 1


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"target": "standin_host:gone"}, "no gone in standin_host"),
        ({"target": "standin_host:Model.gone"}, "no Model.gone"),
        ({"parameters": ("x", "y")}, "signature has no y"),
    ],
)
def test_a_patch_that_does_not_fit_is_an_error_only_for_the_flag_that_needs_it(host, options, words):
    engine = Engine()
    engine.install([patch(flags=("--feature",), **options)])
    assert importlib.import_module(host).double(1) == 2
    engine.require("--other")
    with pytest.raises(PatchError, match=words):
        engine.require("--feature")


def test_late_import_warns_and_still_patches_the_module(host):
    module = importlib.import_module(host)
    engine = Engine()
    with pytest.warns(LateImportWarning, match="Move `import mindspeed_autoparallel` above"):
        engine.install([patch()])
    assert module.double(1) == 3


def test_arming_before_the_import_does_not_warn(host):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Engine().install([patch()])


def test_patched_modules_keep_their_own_loader_and_source(host):
    import inspect

    Engine().install([patch()])
    module = importlib.import_module(host)
    assert type(module.__loader__).__name__ == "SourceFileLoader"
    assert "class Model" in inspect.getsource(module)


def test_preparation_runs_once_right_before_the_first_import(host):
    calls = []
    call_before_import((host,), lambda: calls.append(host in sys.modules))
    importlib.import_module(host)
    sys.modules.pop(host)
    importlib.import_module(host)
    assert calls == [False]


class LegacyFinder:
    """A finder of the old protocol, as some plugins still put on ``sys.meta_path``."""

    def find_module(self, fullname, path=None):
        return None


def test_a_legacy_finder_on_the_path_does_not_break_the_hosts_import(host, monkeypatch):
    Engine().install([patch()])
    monkeypatch.setattr(sys, "meta_path", [sys.meta_path[0], LegacyFinder(), *sys.meta_path[1:]])
    assert importlib.import_module(host).double(1) == 3


def test_preparation_hides_no_later_finder(host, monkeypatch):
    asked = []

    class Behind:
        def find_spec(self, fullname, path, target=None):
            asked.append(fullname)

    monkeypatch.setattr(sys, "meta_path", [Behind(), *sys.meta_path])
    call_before_import(("standin_copier",), lambda: None)
    importlib.import_module("standin_copier")
    assert "standin_copier" in asked


def test_a_callback_for_a_module_that_is_being_executed_waits_for_its_end(host, tmp_path):
    """Another thread (or a circular import) may ask for a module that is in ``sys.modules`` and half done."""
    (tmp_path / "standin_host.py").write_text("import standin_waits\n\ndef double(x):\n    return 2 * x\n")
    (tmp_path / "standin_waits.py").write_text("import builtins\nbuiltins.standin_ask()\n")
    seen = []
    call_after_import(host, lambda module: None)
    import builtins

    builtins.standin_ask = lambda: call_after_import(host, lambda module: seen.append(hasattr(module, "double")))
    try:
        importlib.import_module(host)
    finally:
        del builtins.standin_ask
        sys.modules.pop("standin_waits", None)
    assert seen == [True]


def test_a_flag_that_becomes_true_while_its_patch_is_put_in_place_counts(tmp_path, monkeypatch):
    """The class tells when its method is being replaced; right then another thread parses the arguments."""
    (tmp_path / "standin_slow.py").write_text(
        "class Telling(type):\n"
        "    def __setattr__(cls, name, value):\n"
        "        super().__setattr__(name, value)\n"
        "        Telling.told()\n\n"
        "class Model(metaclass=Telling):\n"
        "    def size(self):\n"
        "        return 10\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    engine = Engine()
    thread = threading.Thread(target=engine.enable, args=({"--feature"},))

    def told():
        thread.start()
        thread.join(timeout=0.3)

    call_after_import("standin_slow", lambda module: setattr(module.Telling, "told", staticmethod(told)))
    engine.install([patch("standin_slow:Model.size", flags=("--feature",))])
    try:
        module = importlib.import_module("standin_slow")
        thread.join()
        assert module.Model().size() == 11
    finally:
        sys.modules.pop("standin_slow", None)


def test_patched_functions_and_methods_pickle_and_copy_like_the_originals(host):
    engine = Engine()
    engine.install([patch(), patch("standin_host:Model.size")])
    module = importlib.import_module(host)
    for read in (copy.copy, copy.deepcopy):
        assert read(module.double) is module.double
    kept = [pickle.dumps(value) for value in (module.double, module.Model.size, module.Model().size)]
    double, size, bound = (pickle.loads(data) for data in kept)
    assert double is module.double
    assert (size(module.Model(), 2), bound(scale=2)) == (21, 21)
    engine.undo_all()
    double, size, bound = (pickle.loads(data) for data in kept)
    assert (double, size) == (engine.patches[0].original, engine.patches[1].original)
    assert bound(scale=2) == 20
