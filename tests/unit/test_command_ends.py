"""How the command ends where its output cannot be written, and at Ctrl-C while libraries are imported."""

import io
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from exit_codes import exit_code

from mindspeed_autoparallel.cli.main import main
from mindspeed_autoparallel.spec import Plan

COMMAND = (sys.executable, "-m", "mindspeed_autoparallel")
SMALL = ("operators", "--layers", "1", "--devices", "2")


@pytest.mark.parametrize("words", [("--version",), (*SMALL, "-q")])
def test_a_full_output_is_one_line(words):
    with Path("/dev/full").open("w") as full:
        run = subprocess.run([*COMMAND, *words], stdout=full, stderr=subprocess.PIPE, text=True, timeout=100)
    said = "ConfigError: cannot write to standard output: No space left on device. Free space or redirect it.\n"
    assert (run.returncode, run.stderr) == (2, said)


def test_a_closed_output_is_one_line(monkeypatch, capsys):
    monkeypatch.setattr(sys, "stdout", None)
    assert main(SMALL) == 2
    assert capsys.readouterr().err == (
        "ConfigError: standard output is closed. Redirect it to a file or to /dev/null.\n"
    )


def test_a_locale_without_the_letters_of_a_name_ends_no_command(monkeypatch):
    printed = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", printed)
    monkeypatch.setattr("mindspeed_autoparallel.cli.main._run", lambda arguments: print("\u4e09\udce9") or 0)
    assert main(SMALL) == 0
    assert printed.buffer.getvalue() == b"\\u4e09\\udce9\n"


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_waits_for_the_import_that_it_meets(number, code, tmp_path):
    (tmp_path / "slow_library.py").write_text(
        "import os, time\n"
        f"os.kill(os.getpid(), {int(number)})\n"
        "for _ in range(10): time.sleep(0.01)\n"
        "print('whole', flush=True)\n"
    )
    program = (
        "import time\nfrom mindspeed_autoparallel.cli import main\n"
        "def run(arguments):\n    import slow_library\n    time.sleep(60)\n"
        "main._run = run\nraise SystemExit(main.main(['operators']))\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join((str(tmp_path), os.environ.get("PYTHONPATH", "")))}
    run = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=50, env=environment, check=False
    )
    assert (run.returncode, run.stdout, run.stderr) == (code, "whole\n", "interrupted\n")


@pytest.mark.parametrize("module", ["patches", "patching", "cli.main", "cli._progress"])
@pytest.mark.parametrize("start", ["script", "module", "joined", "training"])
def test_ctrl_c_while_the_command_loads_is_one_line(start, module, tmp_path):
    """A program that only imports the package keeps Python's own handler."""
    (tmp_path / "sitecustomize.py").write_text(
        "import os, signal, sys\n"
        "class Finder:\n"
        "    def find_spec(self, name, *_):\n"
        f"        if name == 'mindspeed_autoparallel.{module}':\n"
        "            os.kill(os.getpid(), signal.SIGINT)\n"
        "sys.meta_path.insert(0, Finder())\n"
    )
    script = tmp_path / ("pretrain.py" if start == "training" else "mindspeed-autoparallel")
    script.write_text("from mindspeed_autoparallel.cli.main import main\nmain(['--version'])\n")
    words = {"module": ["-m", "mindspeed_autoparallel"], "joined": ["-mmindspeed_autoparallel"]}.get(start, [script])
    here = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(Path(__file__).parents[2])])}
    run = subprocess.run([sys.executable, *words, "--version"], env=here, capture_output=True, text=True, timeout=100)
    if start == "training":
        assert run.returncode != 130 and run.stderr.endswith("KeyboardInterrupt\n"), run.stderr
    else:
        assert (run.returncode, run.stdout, run.stderr) == (130, "", "interrupted\n")


def test_an_import_that_never_ends_can_be_interrupted(tmp_path):
    (tmp_path / "hanging_library.py").write_text(
        f"import os, time\nos.kill(os.getpid(), {int(signal.SIGINT)})\nwhile True: time.sleep(0.01)\n"
    )
    program = """
import signal
from mindspeed_autoparallel import interrupts
interrupts._LONGEST_IMPORT_S = 0.05
try:
    with interrupts.ended_like_ctrl_c():
        import hanging_library
except KeyboardInterrupt:
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    print("interrupted")
"""
    here = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[2]), str(tmp_path)])}
    run = subprocess.run([sys.executable, "-c", program], env=here, capture_output=True, text=True, timeout=100)
    assert (run.returncode, run.stdout) == (0, "interrupted\n"), run.stderr


def test_an_embedded_python_without_argv_imports_the_package():
    program = "import sys\ndel sys.argv\nimport mindspeed_autoparallel\nprint(mindspeed_autoparallel.__version__)"
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=100)
    assert (run.returncode, run.stderr) == (0, "")


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="reads children from /proc")
def test_ctrl_c_at_a_search_with_workers_writes_the_best_plan_and_leaves_no_process(tmp_path):
    model = {
        "num_layers": 80,
        "hidden": 8192,
        "heads": 64,
        "kv_heads": 8,
        "ffn": 28672,
        "swiglu": True,
        "vocab": 128256,
    }
    (tmp_path / "model.json").write_text(json.dumps(model))
    words = ["plan", "--profile-source", "analytic", "--model", "model.json", "--seq-length", "8192"]
    words += ["--device", "H100", "--nnodes", "8", "--nproc-per-node", "8", "--global-batch-size", "256"]
    words += ["--time-limit-s", "300", "--num-workers", "2", "--virtual-sizes", "1,2,4", "--out", "out"]
    here = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[2]), str(tmp_path)])}
    command = subprocess.Popen(
        [*COMMAND, *words], cwd=tmp_path, env=here, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    read = []
    for line in command.stderr:
        read.append(line)
        if re.search(r"best [\d.]+ ms|[\d.]+ ms, at least", line):
            break
    children = Path(f"/proc/{command.pid}/task/{command.pid}/children").read_text().split()
    children += [
        child
        for each in Path(f"/proc/{command.pid}/task").iterdir()
        for child in (each / "children").read_text().split()
    ]
    command.send_signal(signal.SIGINT)
    printed, rest = command.communicate(timeout=100)
    assert command.returncode == 130, "".join([*read, rest])[-2000:]
    plan = Plan.read(tmp_path / "out" / "plan.json")
    assert plan.layout.label() in printed
    assert children and not [child for child in children if Path(f"/proc/{child}/cmdline").exists()]


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ("plan --nnodes 0 --nproc-per-node 8", "argument --nnodes: must be a whole number of at least 1, got '0'"),
        (
            "plan --nnodes 1 --nproc-per-node -2",
            "argument --nproc-per-node: must be a whole number of at least 1, got '-2'",
        ),
        (
            "plan --nnodes 1 --nproc-per-node 8 --memory-limit-mib lots",
            "argument --memory-limit-mib: must be a number, got 'lots'",
        ),
        (
            "plan --nnodes 1 --nproc-per-node 8 --fsdp2 one.json",
            "one.json is not a configuration of any of MindSpeed-MM",
        ),
        ("plan --nnodes 1 --nproc-per-node 8 --fsdp2 one.json", "its top-level keys are id, model"),
        (
            "predict --request one.json",
            'one.json must hold {"requests": [...]}, not an object with the keys id, model.',
        ),
        ("predict --request empty.json", 'empty.json must hold {"requests": [...]}, not an empty object.'),
        ("tune --request empty.json", "with model, hw and train; model, hw and train are missing."),
        ("tune --request one.json", "with model, hw and train; hw and train are missing."),
        ("tune --request number.json", "with model, hw and train, not a value."),
        ("predict --request number.json", 'number.json must hold {"requests": [...]}, not a value.'),
        ("predict --request bytes.json", "cannot read request file bytes.json: byte 0 is not UTF-8 text."),
        ("preflight plan.json", "the training script is missing: give it and its arguments after --."),
        ("preflight plan.json --ranks 0 -- gone.py", "gone.py is not a file; give the training script after --."),
        ("data describe", "give one of --mm-data, --lengths, --indexed and --table; none was given."),
        (
            "data describe --lengths a --table b",
            "give one of --mm-data, --lengths, --indexed and --table; 2 were given.",
        ),
        ("data describe --lengths a --colour red", "(flags: mindspeed-autoparallel data describe --help)"),
        ("simulate --plan gone.json", "ConfigError: cannot read plan gone.json: No such file or directory."),
        (
            "plan --nnodes 1 --nproc-per-node 8 --global-batch-size 8 --profile plan.json",
            "(key 'format' is 'mindspeed-autoparallel/plan', should be 'mindspeed-autoparallel/profile')",
        ),
        ("trace --hidden 64", "missing: --heads, --seq-length, or --script."),
        ("rendezvous --port 70000", "argument --port: must be at most 65535, got '70000'"),
        (
            "data describe --lengths lengths.txt --output folder --overwrite",
            "cannot write folder: Is a directory. Choose another path.",
        ),
        (
            "plan --nnodes 1 --nproc-per-node 8 --global-batch-size 8 --model wide.json --device H100 --seq-length 64",
            "ConfigError: model file wide.json: --hidden-size is wide, must be a number.",
        ),
        ("trace --script gone.py", "--script gone.py: there is no such file."),
    ],
)
def test_wrong_input_is_refused_in_one_line(words, line, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("one.json").write_text('{"id": "a", "model": {}}')
    Path("number.json").write_text("1")
    Path("empty.json").write_text("{}")
    Path("plan.json").write_text('{"format": "mindspeed-autoparallel/plan"}')
    Path("wide.json").write_text('{"hidden_size": "wide"}')
    Path("lengths.txt").write_text("12\n")
    Path("folder").mkdir()
    Path("bytes.json").write_bytes(b"\x80\x81")
    code = exit_code(words.split())
    printed = capsys.readouterr().err.strip().splitlines()
    assert (code, len(printed)) == (2, 1), printed
    assert line in printed[0]
