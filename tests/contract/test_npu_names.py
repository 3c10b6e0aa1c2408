"""Every name the NPU adapter uses exists in torch_npu's wheel, which is read and never imported: it needs CANN."""

import ast
import inspect
import os
import zipfile
from pathlib import Path

import pytest

from mindspeed_autoparallel.runtime.devices import accelerator


@pytest.fixture(scope="module")
def wheel():
    folder = Path(os.environ.get("TORCH_NPU_WHEELS", ""))
    files = sorted(folder.glob("torch_npu-*.whl")) if "TORCH_NPU_WHEELS" in os.environ else []
    if not files:
        pytest.skip("no torch_npu wheel; tests/run.sh downloads one into TORCH_NPU_WHEELS")
    with zipfile.ZipFile(files[-1]) as opened:
        yield opened


def parsed(wheel, name):
    return ast.parse(wheel.read(name).decode())


def exported(wheel, name):
    for node in parsed(wheel, name).body:
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "__all__":
            return set(ast.literal_eval(node.value))
    raise AssertionError(f"{name} of the wheel has no __all__")


def dotted(node):
    parts = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    return ".".join([node.id, *reversed(parts)]) if isinstance(node, ast.Name) else ""


def names_used(module, prefix):
    """What the source says right behind ``prefix.``."""
    chains = {
        dotted(node) for node in ast.walk(ast.parse(inspect.getsource(module))) if isinstance(node, ast.Attribute)
    }
    return {chain[len(prefix) + 1 :].split(".")[0] for chain in chains if chain.startswith(prefix + ".")}


def test_device_functions_are_public_names_of_torch_npu(wheel):
    used = names_used(accelerator, "self._module") | names_used(accelerator, "torch_npu.npu") - {"utils"}
    assert {"Event", "memory_allocated", "max_memory_allocated", "is_available", "synchronize"} <= used
    assert used - exported(wheel, "torch_npu/npu/__init__.py") == set()


def test_events_have_the_methods_that_time_needs(wheel):
    classes = {node.name: node for node in parsed(wheel, "torch_npu/npu/streams.py").body if hasattr(node, "bases")}
    methods = {item.name for item in classes["Event"].body if isinstance(item, ast.FunctionDef)}
    assert {"record", "elapsed_time", "synchronize"} <= methods


def test_the_facade_and_the_release_functions_exist(wheel):
    assert "torch_npu/contrib/transfer_to_npu.py" in wheel.namelist()
    functions = {
        node.name: node for node in parsed(wheel, "torch_npu/npu/utils.py").body if isinstance(node, ast.FunctionDef)
    }
    assert names_used(accelerator, "torch_npu.npu.utils") <= set(functions)
    arguments = functions["get_cann_version"].args
    assert len(arguments.args) == len(arguments.defaults), "called without arguments"
