"""Whatever way a flag of ours becomes true, its patches are in place or the run is refused: flags by ways.

Each process imports the installed Megatron as a script would, makes a flag true in one way, and parses. What would begin
is recorded instead of begun; then a patched function that another module copied by name is looked at.
"""

import json
import os
import subprocess

import pytest
from forked_python import forked_python

pytest.importorskip("megatron.training")
pytestmark = [pytest.mark.torch, pytest.mark.megatron]

FLAGS = {
    "--auto-parallel-mm": None,
    "--auto-parallel-plan": "plan.json",
    "--hetero-parallel": None,
    "--auto-parallel-hetero": None,
    "--auto-tuning": None,
    "--operator-search": None,
    "--operator-plan": "plan.json",
}
YAML = ("in YAML", "beside YAML")
"""In the file of Megatron's --yaml-cfg, which replaces the command line, or on a command line that it replaces."""
WAYS = ("argv", "late argv", "parser default", "own registration", "runpy", "args_defaults", "after parsing", *YAML)
LATE = ("late import",)
"""Megatron first, then this package, then the flag: in a process of its own."""
REFUSED = ("args_defaults", "after parsing")
"""Ways that come when the arguments have been checked already."""

SCRIPT = """
import contextlib, io, json, os, runpy, sys, tempfile
flags, ways = json.loads(sys.argv[1]), json.loads(sys.argv[2])
sys.argv = ["script.py"]
if ways == ["late import"]:
    import megatron.training.arguments, megatron.training.training
import mindspeed_autoparallel
from mindspeed_autoparallel.patching import ENGINE, PatchState
import megatron.training.arguments as arguments_module
import megatron.training.training as training
from megatron.training.global_vars import set_global_variables
from mindspeed_autoparallel.runtime.megatron import features
from mindspeed_autoparallel.runtime.state import of_process

yaml_file = os.path.join(tempfile.mkdtemp(), "arguments.yaml")
begun = []
features._load = lambda handler: begun.append

def parse(destination, value):
    def provider(parser):
        if way == "parser default":
            parser.set_defaults(**{destination: value})
        if way == "own registration":
            parser.add_argument("--" + destination.replace("_", "-"), default=value)
        return parser
    arguments = arguments_module.parse_args(provider)
    if way == "args_defaults" and getattr(arguments, destination, None) is None:
        setattr(arguments, destination, value)  # as Megatron's validate_args does with the script's defaults
    if way == "after parsing":
        setattr(arguments, destination, value)
    from mindspeed_autoparallel.runtime.megatron.parsing import refuse_unseen_flags
    refuse_unseen_flags(arguments)

def outcome(flag, value):
    destination = flag.strip("-").replace("-", "_")
    words = [flag] if value is None else [flag, value]
    sys.argv = ["script.py"]
    if "YAML" in way:
        own = {destination: value or True} if way == "in YAML" else {}
        with open(yaml_file, "w") as file:
            json.dump({"disable_msc_deprecated": False, "enable_msc": False, **own}, file)
        sys.argv += ["--yaml-cfg", yaml_file]
    if way in ("argv", "late argv", "late import", "beside YAML"):
        sys.argv += words  # after the import in every case: the list may be another one then, too
    error = io.StringIO()
    try:
        with contextlib.redirect_stderr(error):
            if way == "runpy":
                with tempfile.NamedTemporaryFile("w", suffix=".py") as script:
                    script.write("import sys, __main__\\nsys.argv += %r\\n__main__.parse(%r, %r)\\n" % (words, destination, value or True))
                    script.flush()
                    runpy.run_path(script.name)
            else:
                parse(destination, value or True)
    except SystemExit as ended:
        return {"refused": ended.code, "error": error.getvalue(), "begun": len(begun)}
    # Patches of hosts above Megatron wait for those to be imported.
    needed = [entry for entry in ENGINE.patches if flag in entry.patch.flags and entry.patch.module in sys.modules]
    return {
        "begun": len(begun),
        "in place": all(entry.state is PatchState.INSTALLED and entry.active for entry in needed),
        "copies": all(
            value is not entry.original
            for entry in needed
            for module in (arguments_module, training)
            for value in vars(module).values()
        ),
    }

results = {}
for way in ways:
    results[way] = {}
    for flag, value in flags.items():
        begun.clear()
        of_process(features.Parses).command = None  # each is a run of its own, not a host's second parse
        ENGINE.enabled.clear()
        for entry in ENGINE.patches:
            if entry.patch.flags and entry.state is PatchState.INSTALLED:
                entry.state, entry.active = PatchState.DORMANT, False
        results[way][flag] = outcome(flag, value)
guard = [entry.state.name for entry in ENGINE.patches if entry.patch.attribute == "set_global_variables"]
print(json.dumps({"results": results, "guard": guard}))
"""


@pytest.mark.parametrize("ways", [WAYS, LATE], ids=["imported first", "imported late"])
def test_every_flag_works_or_is_refused(ways: tuple[str, ...]):
    run = subprocess.run(
        [forked_python(), "-W", "ignore", "-c", SCRIPT, json.dumps(FLAGS), json.dumps(ways)],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "MINDSPEED_AUTOPARALLEL_DEVICE": "cpu"},
    )
    assert run.returncode == 0, run.stderr[-3000:]
    answer = json.loads(run.stdout.splitlines()[-1])
    # Between parsing and training, the arguments pass the function that makes them the training's.
    assert answer["guard"] == ["INSTALLED"]
    assert list(answer["results"]) == list(ways)
    for way, results in answer["results"].items():
        for flag, result in results.items():
            if way in LATE:
                assert (result["refused"], result["begun"]) == (2, 0), (flag, way)
                assert f"{flag} needs mindspeed_autoparallel to be imported before megatron" in result["error"]
            elif way in YAML:
                assert (result["refused"], result["begun"]) == (2, 0), (flag, way)
                assert f"{flag} cannot be combined with --yaml-cfg" in result["error"]
            elif way in REFUSED:
                assert (result["refused"], result["begun"]) == (2, 0), (flag, way)
                assert f"{flag} became true after the arguments were parsed" in result["error"]
            elif (flag, way) == ("--hetero-parallel", "own registration"):
                # A host may have a hetero parallel of its own under this name (MindSpeed-MM): it stays the host's.
                assert (result["begun"], result["in place"]) == (0, False)
            else:
                assert result == {"begun": 1, "in place": True, "copies": True}, (flag, way)
