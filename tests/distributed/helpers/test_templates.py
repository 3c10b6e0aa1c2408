"""Programs that begin with the same imports are forked behind them, and are what they would be without."""

import json
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest
from forked_python import forked_python, program_of

pytestmark = pytest.mark.distributed
NOTED = """
import os, sys
with open(os.environ["NOTES"], "a") as notes:
    notes.write(f"{os.getpid()}\\n")
os.environ["SET_BY_IMPORT"] = "yes"
print("imported", flush=True)
print("warned", file=sys.stderr)
if os.environ.get("BREAKS"):
    raise ImportError("broken")
"""
SCRIPT = """
import json, os, sys
from megatron import noted
print(json.dumps([sys.argv[1:], os.environ["RANK"], os.environ["SET_BY_IMPORT"], os.getcwd(), __name__, sys.path[0]]))
"""


@pytest.fixture
def start(tmp_path):
    """Starts the script with words and variables; ``start.imports()`` are the processes that imported the package."""
    (tmp_path / "megatron").mkdir()
    (tmp_path / "megatron" / "noted.py").write_text(NOTED)
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)

    def run(*words, folder=tmp_path, more="", **variables):
        script.write_text(SCRIPT + more)
        environment = {**os.environ, "NOTES": str(tmp_path / "notes"), "RANK": "0", **variables}
        kept = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        return subprocess.Popen([forked_python(), str(script), *words], cwd=folder, env=environment, **kept)

    run.imports = lambda: (tmp_path / "notes").read_text().split()
    return run


def test_equal_imports_are_done_once_and_each_program_has_its_own_words_rank_and_folder(start, tmp_path):
    other = tmp_path / "other"
    other.mkdir()
    for words, rank, folder in ((("a",), "0", tmp_path), (("b", "--lr=1"), "3", other)):
        printed, warned = start(*words, folder=folder, RANK=rank).communicate()
        first, own = printed.splitlines()
        assert (first, warned) == ("imported", "warned\n")
        assert json.loads(own) == [list(words), rank, "yes", str(folder), "__main__", str(tmp_path)]
    assert len(start.imports()) == 1


@pytest.mark.parametrize(
    "change", [{"NCCL_DEBUG": "INFO"}, {"words": ["--auto-tuning"]}, {"more": "\nimport megatron"}]
)
def test_what_imports_may_depend_on_makes_another_template(start, change):
    change = dict(change)
    words, more = change.pop("words", []), change.pop("more", "")
    assert start().wait() == 0
    assert start(*words, more=more, **change).wait() == 0
    assert len(start.imports()) == (1 if more else 2)


def test_a_failing_import_is_the_programs_own(start):
    for _ in range(2):
        process = start(BREAKS="1")
        assert "from megatron import noted\n" in process.communicate()[1].replace("    ", "")
        assert process.returncode == 1


def test_signals_reach_a_program_of_a_template_and_a_killed_client_ends_it(start):
    wait = "\nimport time\nprint('here', flush=True)\ntime.sleep(300)"
    for number in (signal.SIGTERM, signal.SIGKILL):
        process = start(more=wait)
        assert [process.stdout.readline() for _ in range(3)][-1] == "here\n"
        program = program_of(process.pid)
        assert str(program) not in start.imports()
        process.send_signal(number)
        assert process.wait() == -number
        deadline = time.monotonic() + 20
        while Path(f"/proc/{program}").exists() and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not Path(f"/proc/{program}").exists()


def test_a_retired_template_keeps_its_running_programs(start):
    running = start(more="\nimport time\nprint('here', flush=True)\ntime.sleep(4)")
    assert [running.stdout.readline() for _ in range(3)][-1] == "here\n"
    for number in range(17):
        assert start(NUMBER=str(number)).wait() == 0
    assert running.wait() == 0
