"""Every switch that a feature registers is in the one table of switches, with what the feature does."""

import ast
import pkgutil
import subprocess
from pathlib import Path

import pytest
from forked_python import forked_python

from mindspeed_autoparallel.runtime import features
from mindspeed_autoparallel.runtime.flags.flag import flags_of
from mindspeed_autoparallel.runtime.flags.registration import flag_groups, without_switches
from mindspeed_autoparallel.runtime.flags.switches import SWITCHES
from mindspeed_autoparallel.runtime.megatron.features import TASK_HANDLERS

FOLDER = Path(features.__path__[0])
NAMES = {switch.flag: switch for switch in SWITCHES}


def registered():
    """Return the switches of every feature's group: the readers of its flags."""
    own = [group for group in flag_groups() if ".features." in group.__module__]
    return {switch for group in own for switch in (group.USED_BY or (flags_of(group)[0].name,))}


def test_every_registered_switch_is_in_the_table_and_no_other():
    assert registered() == set(NAMES)


def test_every_feature_is_started_by_a_switch():
    found = {item.name for item in pkgutil.iter_modules(features.__path__) if item.ispkg}
    assert found == {switch.start.split(".features.")[1].split(".")[0] for switch in SWITCHES}


def callers(function):
    """Return the switches whose request or entry calls ``function``."""
    found = set()
    for switch in SWITCHES:
        folder = FOLDER / switch.start.split(".features.")[1].split(".")[0]
        calls = (node for path in folder.glob("*.py") for node in ast.walk(ast.parse(path.read_text("utf-8"))))
        if any(isinstance(node, ast.Call) and getattr(node.func, "id", "") == function for node in calls):
            found.add(switch.flag)
    return found


def test_the_table_has_what_the_features_check():
    whole = {switch.flag for switch in SWITCHES if switch.is_for_whole_parameters}
    assert callers("refuse_sharded_parameters") == whole


def test_a_hidden_switch_takes_no_value():
    """The word after it would stay on the command line."""
    kinds = {flag.name: flag.type for group in flag_groups() for flag in flags_of(group)}
    hidden = [switch.flag for switch in SWITCHES if switch.is_hidden]
    assert {kinds[flag] for flag in hidden} == {bool}
    assert without_switches(["train.py", *hidden]) == ["train.py"]


LOADED = """
import importlib, sys
for name in sys.argv[1:]:
    importlib.import_module(name)
print([name for name in sys.modules if name.startswith(("mindspeed_autoparallel.planner.split", "mindspeed_autoparallel.report"))])
"""


@pytest.mark.slow
def test_a_rank_loads_neither_the_search_nor_the_reports():
    trains = [one.start for one in SWITCHES if not one.is_own_launcher and one.flag != "--operator-search"]
    modules = [start.partition(":")[0] for start in (*trains, *TASK_HANDLERS.values())]
    run = subprocess.run([forked_python(), "-c", LOADED, *modules], capture_output=True, text=True, timeout=60)
    assert (run.stdout.strip(), run.stderr) == ("[]", "")
