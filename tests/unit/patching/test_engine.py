"""The patch engine on a stand-in host written to disk."""

import importlib
import sys
import warnings

import pytest

from mindspeed_autoparallel.errors import PatchError
from mindspeed_autoparallel.patching import Engine, LateImportWarning, Patch, PatchState, call_before_import


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
    engine.arm([patch()])
    copier = importlib.import_module("standin_copier")
    assert copier.quadruple(1) == (2 * (2 * 1 + 1)) + 1


def test_methods_are_patched_and_undo_restores_the_very_original(host):
    engine = Engine()
    engine.arm([patch(), patch("standin_host:Model.size")])
    module = importlib.import_module(host)
    assert (module.double(3), module.Model().size(scale=2)) == (7, 21)
    originals = [entry.original for entry in engine.patches]
    engine.undo_all()
    assert [module.double, module.Model.__dict__["size"]] == originals
    assert (module.double(3), module.Model().size(scale=2)) == (6, 20)


def test_undo_under_another_plugins_wrapper_goes_inert(host):
    engine = Engine()
    engine.arm([patch()])
    module = importlib.import_module(host)
    ours = module.double
    module.double = lambda x: ours(x) * 100
    engine.undo_all()
    assert module.double(1) == 200
    assert "inert" in engine.patches[0].reason


def test_a_patch_of_a_flag_that_is_off_passes_calls_on_until_it_is_true(host):
    """Which flags are true is known when the host parses its arguments: by then names have been copied."""
    engine = Engine()
    engine.arm([patch(flags=("--feature",))])
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
    engine.arm([patch(flags=("--feature",))])
    engine.enable({"--feature"})
    assert importlib.import_module(host).double(1) == 3


def test_a_late_import_patches_what_was_copied_before(host):
    copier = importlib.import_module("standin_copier")
    engine = Engine()
    with pytest.warns(LateImportWarning):
        engine.arm([patch(flags=("--feature",))])
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
    engine.arm([patch(flags=("--feature",), **options)])
    assert importlib.import_module(host).double(1) == 2
    engine.require("--other")
    with pytest.raises(PatchError, match=words):
        engine.require("--feature")


def test_late_import_warns_and_still_patches_the_module(host):
    module = importlib.import_module(host)
    engine = Engine()
    with pytest.warns(LateImportWarning, match="Move `import mindspeed_autoparallel` above"):
        engine.arm([patch()])
    assert module.double(1) == 3


def test_arming_before_the_import_does_not_warn(host):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Engine().arm([patch()])


def test_patched_modules_keep_their_own_loader_and_source(host):
    import inspect

    Engine().arm([patch()])
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
