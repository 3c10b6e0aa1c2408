"""Before a feature starts, its wrappers must still be called: plugins that replace what was wrapped are named."""

import functools
import importlib
import sys

import pytest

from mindspeed_autoparallel.errors import PatchError
from mindspeed_autoparallel.patching import Engine, Patch

FLAG = "--feature"


def passed_on(wrapped, instance, args, kwargs):
    return wrapped(*args, **kwargs)


@pytest.fixture
def host(tmp_path, monkeypatch):
    """A host module with `train_step`, and a host above it that has a `train_step` of its own."""
    (tmp_path / "chain_host.py").write_text("def train_step(x):\n    return x\n")
    (tmp_path / "chain_upper.py").write_text("import chain_host\n\ndef train_step(x):\n    return -x\n")
    (tmp_path / "chain_plugin.py").write_text(
        "import functools\n\n"
        "def replacing(x):\n    return x\n\n"
        "def wrapping(step):\n    @functools.wraps(step)\n    def with_profiler(x):\n        return step(x)\n"
        "    return with_profiler\n\n"
        "def without_wraps(step):\n    def bare(x):\n        return step(x)\n    return bare\n\n"
        "def replacing_with_wraps(step):\n    @functools.wraps(step)\n    def dual(x):\n        return x\n"
        "    del dual.__wrapped__\n    return dual\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    yield
    for name in ("chain_host", "chain_upper", "chain_plugin"):
        sys.modules.pop(name, None)


def installed(*targets, **more):
    engine = Engine()
    more = {"flags": (FLAG,), **more}
    patches = [
        Patch(target=target, wrapper=passed_on, why="test", distribution="x", instead_of=instead, **more)
        for target, instead in targets
    ]
    engine.install(patches)
    engine.enable({FLAG})
    return engine


def test_untouched_and_wrapped_functions_pass(host):
    engine = installed(("chain_host:train_step", ""))
    module = importlib.import_module("chain_host")
    plugin = importlib.import_module("chain_plugin")
    engine.verify(FLAG)
    for wrap in (plugin.wrapping, plugin.without_wraps, functools.partial):
        module.train_step = wrap(module.train_step)
        engine.verify(FLAG)


def test_a_replacement_that_goes_on_to_the_one_it_imported_passes(host, tmp_path):
    (tmp_path / "chain_going_on.py").write_text(
        "from chain_host import train_step as stock\n\ndef train_step(x):\n    return stock(x)\n"
    )
    engine = installed(("chain_host:train_step", ""))
    # Another feature's wrapper around the same function.
    installed(("chain_host:train_step", ""), flags=("--other",))
    module = importlib.import_module("chain_host")
    module.train_step = importlib.import_module("chain_going_on").train_step
    engine.verify(FLAG)


@pytest.mark.parametrize("name", ["replacing", "replacing_with_wraps"])
def test_the_plugin_that_replaced_a_wrapped_function_is_named(host, name):
    engine = installed(("chain_host:train_step", ""))
    module = importlib.import_module("chain_host")
    plugin = importlib.import_module("chain_plugin")
    module.train_step = plugin.replacing if name == "replacing" else plugin.replacing_with_wraps(module.train_step)
    written = "replacing" if name == "replacing" else r"(replacing_with_wraps\.<locals>\.)?dual"
    with pytest.raises(PatchError, match=rf"chain_host:train_step, but chain_plugin\.{written} replaces it"):
        engine.verify(FLAG)
    engine.verify("--other")


def test_a_users_own_step_is_let_alone_by_a_flag_that_only_watches_it(host, tmp_path):
    engine = installed(("chain_host:train_step", ""), flags=(FLAG, "--searches"), watched_by=(FLAG,))
    engine.enable({"--searches"})
    module = importlib.import_module("chain_host")
    module.train_step = importlib.import_module("chain_plugin").replacing
    (line,) = engine.verify(FLAG)
    assert line.startswith("chain_plugin.replacing replaces chain_host:train_step")
    with pytest.raises(PatchError, match=r"chain_plugin\.replacing"):
        engine.verify("--searches")
    exec("def train_step(x):\n    return x\n", own := {"__name__": "mindspeed.core.dualpipev"})
    module.train_step = own["train_step"]
    with pytest.raises(PatchError, match=r"mindspeed\.core\.dualpipev\.train_step"):
        engine.verify(FLAG)


def test_where_a_host_has_its_own_function_that_one_counts(host):
    engine = installed(("chain_host:train_step", ""), ("chain_upper:train_step", "chain_host:train_step"))
    upper = importlib.import_module("chain_upper")
    lower = sys.modules["chain_host"]
    lower.train_step = importlib.import_module("chain_plugin").replacing
    engine.verify(FLAG)
    upper.train_step = lower.train_step
    with pytest.raises(PatchError, match="chain_upper:train_step"):
        engine.verify(FLAG)
