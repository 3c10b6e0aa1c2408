"""Trains a small training of an author's for real: in one process, and by each of its plans; losses are compared."""

from __future__ import annotations

import json
import re
import sys
import tempfile
from pathlib import Path
from typing import Any

from forked_host import run_ranks
from shrink import flags_of

_LAYOUT = (
    *("--tensor-model-parallel-size", "--pipeline-model-parallel-size", "--context-parallel-size"),
    *("--expert-model-parallel-size", "--expert-tensor-parallel-size", "--sequence-parallel"),
    *("--num-layers-per-virtual-pipeline-stage", "--num-virtual-stages-per-pipeline-rank"),
    *("--pipeline-model-parallel-layout", "--decoder-first-pipeline-num-layers", "--decoder-last-pipeline-num-layers"),
    *("--microbatch-group-size-per-virtual-pipeline-stage", "--overlap-p2p-communication-warmup-flush"),
    *("--account-for-embedding-in-pipeline-split", "--account-for-loss-in-pipeline-split"),
    *("--no-overlap-p2p-communication", "--defer-embedding-wgrad-compute", "--wgrad-deferral-limit"),
)
"""What one process does without."""


def trained(row: dict[str, Any]) -> dict[str, Any]:
    """Return losses of one process and of every plan in ``row``, and the largest relative difference."""
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as text:
        folder = Path(text)
        script = _script(Path(row["file"]), folder)
        if (own := str(Path(row["file"]).parent)) not in sys.path:
            sys.path.append(own)
        alone = [
            word
            for name, values in flags_of(tuple(row["words"])).items()
            if name not in _LAYOUT
            for word in (name, *values)
        ]
        found["alone"] = _run(script, alone, 1, folder)
        for name, stage in row["stages"].items():
            if "plan" not in stage:
                continue
            (folder / "plan.json").write_text(stage.pop("plan"))
            layout = json.loads((folder / "plan.json").read_text())["layout"]
            world = layout["pipeline_size"] * layout["tensor_size"] * layout["data_size"] * layout["context_size"]
            by_plan = _run(script, [*row["words"], "--auto-parallel-plan", "plan.json"], world, folder)
            pairs = zip(by_plan["losses"], found["alone"]["losses"], strict=False)
            by_plan["difference"] = max((abs(a - b) / abs(b) for a, b in pairs), default=None)
            by_plan["layout"] = {key: value for key, value in layout.items() if value not in (False, 0, 1, {}, None)}
            found[name] = by_plan
    return found


def _script(program: Path, folder: Path) -> Path:
    """Copy the program with our import in front, and with parameters that are the same in every layout."""
    text = program.read_text()
    main = re.search(r"^if __name__ == ['\"]__main__['\"]:.*\n", text, re.MULTILINE)
    assert main is not None, f"{program} is no program"
    start = "    import same_start\n\n    same_start.install()\n"
    future = "" if "from __future__" in text else "import mindspeed_autoparallel\n"
    copy = folder / program.name
    copy.write_text(future + text[: main.end()] + start + text[main.end() :])
    return copy


def _run(script: Path, words: list[str], world: int, folder: Path) -> dict[str, Any]:
    ran = run_ranks(script, words, world, folder)
    errors = re.findall(r"^\S*(?:Error|Plan): .*", ran.output, re.MULTILINE)
    error = errors[0] if errors and ran.exit_code else ""
    return {"exit_code": ran.exit_code, "losses": ran.losses, "error": error, "seconds": round(ran.seconds, 1)}
