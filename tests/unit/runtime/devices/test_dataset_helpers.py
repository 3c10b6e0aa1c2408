"""A checkout's C++ data set helpers: compiled for the interpreter that runs, once, and named where that fails."""

import shutil
import sysconfig

import pytest

from mindspeed_autoparallel.errors import ConfigError
from mindspeed_autoparallel.runtime.devices.cpu.dataset_helpers import compile_dataset_helpers

MAKEFILE = """\
CPPFLAGS += $(shell python3 -m pybind11 --includes)
OUT = helpers_cpp$(shell python3-config --extension-suffix)
$(OUT): helpers.cpp
\tcp $< $@ && echo $(CPPFLAGS) > flags
"""


@pytest.fixture
def checkout(tmp_path):
    """Megatron's data set folder of a source checkout; its Makefile copies in place of compiling."""
    if shutil.which("make") is None:
        pytest.skip("make is not installed")
    (tmp_path / "Makefile").write_text(MAKEFILE)
    (tmp_path / "helpers.cpp").write_text("// helpers\n")
    return tmp_path


def test_a_checkout_is_compiled_for_this_interpreter_and_only_once(checkout):
    compiled = compile_dataset_helpers(checkout)
    assert compiled == checkout / f"helpers_cpp{sysconfig.get_config_var('EXT_SUFFIX')}"
    assert sysconfig.get_paths()["include"] in (checkout / "flags").read_text()
    assert [path.name for path in checkout.glob("*_helpers*")] == []
    (checkout / "helpers.cpp").write_text("changed\n")
    assert compile_dataset_helpers(checkout) == compiled
    assert compiled.read_text() == "// helpers\n"


def test_a_wheel_has_nothing_to_compile(tmp_path):
    assert compile_dataset_helpers(tmp_path) is None


def test_a_failing_compiler_is_quoted_with_the_way_out(checkout):
    (checkout / "Makefile").write_text("$(OUT): helpers.cpp\n\t@echo no such header >&2; false\n")
    with pytest.raises(ConfigError, match=r"(?s)Install make and.*no such header"):
        compile_dataset_helpers(checkout)
