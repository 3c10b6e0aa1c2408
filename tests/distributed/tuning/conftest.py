"""One finished run of ``--auto-tuning``, read and continued by several files."""

import fcntl
import os
from types import SimpleNamespace

import pytest
from auto_tuning import DEEP_GPT, SCRIPT, SECRET_TOKEN, tune

BUILD = "    spec = get_gpt_layer_local_spec("
PARSE = "parse_and_validate_args()"
RUN_HOOK = """
    import json, os, pathlib, time
    hook = pathlib.Path(os.environ.get("RUN_HOOK", os.devnull))
    if hook.is_file():
        kind = json.loads(pathlib.Path(os.environ["MINDSPEED_AUTOPARALLEL_TASK"]).read_text())["kind"]
        exec(hook.read_text(), {"args": args, "kind": kind, "os": os, "pathlib": pathlib, "time": time})
    spec = get_gpt_layer_local_spec("""
"""The file that ``RUN_HOOK`` names runs in every process that builds the model; traces do not depend on it."""
KEYS = 'KEYS = ("tokens", '
SHORT_SILENCE = "from mindspeed_autoparallel.runtime.launch import liveness\n\nliveness.SILENCE_S = 10.0\n" + KEYS
TAKES_A_TOKEN = "parse_and_validate_args(lambda parser: (parser.add_argument('--hub-token'), parser)[1])"


@pytest.fixture(scope="session")
def finished_run(tmp_path_factory):
    """A cold, verified run of a dense model: its script, work dir and output. Workers of xdist share it."""
    pytest.importorskip("megatron.training")
    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent
    script, work, output = folder / "pretrain_hooked.py", folder / "finished/work", folder / "finished/output.txt"
    with (folder / "finished.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not output.exists():
            text = SCRIPT.read_text()
            assert text.count(BUILD) == text.count(PARSE) == text.count(KEYS) == 1
            text = text.replace(BUILD, RUN_HOOK[1:]).replace(PARSE, TAKES_A_TOKEN).replace(KEYS, SHORT_SILENCE)
            script.write_text(text)
            words = [*SECRET_TOKEN, "--auto-tuning-verify", "--auto-parallel-calibrate", work.parent / "mine.json"]
            work.parent.mkdir(exist_ok=True)
            code, printed = tune(work, *words, script=script, model=DEEP_GPT)
            assert code == 0, printed[-4000:]
            output.write_text(printed)
    return SimpleNamespace(script=script, work=work, output=output.read_text())
