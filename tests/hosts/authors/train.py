"""Trains a small training of an author's for real: in one process, and by each of its plans; losses are compared.

Where they differ, the plan's layout is trained with native flags, too, without a flag of this package, its patches taken back.
"""

from __future__ import annotations

import hashlib
import json
import re
import shlex
import sys
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from forked_host import run_ranks
from kept_rows import TOLERANCE, Row
from shrink import PATTERNS, Flags, flags_of

from mindspeed_autoparallel.spec.plan import Plan

_LAYOUT = (
    *("--tensor-model-parallel-size", "--pipeline-model-parallel-size", "--context-parallel-size"),
    *("--expert-model-parallel-size", "--expert-tensor-parallel-size", "--sequence-parallel"),
    *("--num-layers-per-virtual-pipeline-stage", "--num-virtual-stages-per-pipeline-rank"),
    *("--pipeline-model-parallel-layout", "--decoder-first-pipeline-num-layers", "--decoder-last-pipeline-num-layers"),
    *("--microbatch-group-size-per-virtual-pipeline-stage", "--overlap-p2p-communication-warmup-flush"),
    *("--account-for-embedding-in-pipeline-split", "--account-for-loss-in-pipeline-split"),
    *("--no-overlap-p2p-communication", "--defer-embedding-wgrad-compute", "--wgrad-deferral-limit"),
    "--overlap-param-gather-with-optimizer-step",
    *("--hierarchical-context-parallel-sizes", "--cp-comm-type"),
    *("--recompute-in-advance", "--tp-2d", "--tp-x", "--tp-y", "--num-layer-list"),
)
"""What one process does without."""
_KERNELS = (
    *("--use-fused-rotary-pos-emb", "--use-ascend-mc2", "--use-ascend-coc", "--use-fused-ring-attention-update"),
    "--overlap-moe-expert-parallel-comm",
)
"""MindSpeed's that are compiled where they are first called, or communicate by HCCL, and Megatron's that needs half
precision; arguments are checked with them."""

_CHECKPOINTS = re.compile(
    r"ckpt_|async_|dist_ckpt_|use_dist_ckpt|no_load_|no_save_|save_|verify_|use_checkpoint_|override_opt|exit_on_missing"
)
"""Arguments without an effect in a training that neither loads nor saves."""
Run = dict[str, Any]

UNDO = "mindspeed_autoparallel.patching.ENGINE.undo_all()\n"
_NATIVE = re.compile(r"^as native flags: (.*)$", re.MULTILINE)


def key_of(program: str, world: int, arguments: dict[str, str], *more: object) -> str:
    """Return what trainings of one program have in common that do the same: checked arguments, processes, and ``more``."""
    lost = {"None"} >= {arguments.get("save", ""), arguments.get("load", "")}
    kept = {name: value for name, value in arguments.items() if not (lost and _CHECKPOINTS.match(name))}
    text = json.dumps([program, world, kept, more], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def trained(row: dict[str, Any], runs: dict[str, Run]) -> dict[str, Any]:
    """Return how one process and every plan in ``row`` trained, and the largest relative difference of their losses.

    ``runs``: trainings that have succeeded, by ``key_of``; one that is there is not repeated.
    """
    found: dict[str, Any] = {}
    limit_s = row["limit_s"]
    with tempfile.TemporaryDirectory() as text:
        folder = Path(text)
        script, bare = (script_of(Path(row["file"]), folder, undo=undo) for undo in ("", UNDO))
        if (own := str(Path(row["file"]).parent)) not in sys.path:
            sys.path.append(own)
        words = [word for word in row["words"] if word not in _KERNELS]
        flags = flags_of(tuple(words))
        alone = of_one_process(flags)
        one = found["alone"] = _once(runs, row, "alone", lambda: _run(script, alone, 1, folder, limit_s))
        for name, stage in row["stages"].items():
            # What one process does not train has nothing to be compared with.
            if "plan" not in stage or not one["losses"] or one["exit_code"]:
                continue
            plan = Plan.parse(json.loads(stage.pop("plan")))
            plan.write(folder / "plan.json")

            def by_plan(plan: Plan = plan) -> Run:
                world = plan.layout.num_devices
                run = _run(script, [*words, "--auto-parallel-plan", "plan.json"], world, folder, limit_s)
                run |= {"layout": plan.layout.label(), "difference": _difference(run, one)}
                native = _NATIVE.search(run["output"])
                if native and (run["difference"] or 0) > TOLERANCE:
                    ran = _run(bare, [*alone, *shlex.split(native[1])], world, folder, limit_s)
                    run["native"] = _difference(ran, run)
                return run

            found[name] = _once(runs, row, name, by_plan)
    return found


def _once(runs: dict[str, Run], row: dict[str, Any], stage: str, train: Callable[[], Run]) -> Run:
    """Return the training of ``stage``: that of another row with the same key, or a new one."""
    key = row["stages"][stage].get("key")
    if key in runs:
        return runs[key]
    run = train()
    if key and not run["error"]:
        run["key"] = key
        runs[key] = {**run, "as": row["flags"]}
    return run


def kept_runs(rows: Iterable[Row]) -> dict[str, Run]:
    """Return the trainings of ``rows`` by their keys."""
    return {
        run["key"]: {"losses": [], "exit_code": 0, "error": "", **run, "as": row["flags"]}
        for row in rows
        for run in row.get("trained", {}).values()
        if "key" in run
    }


def of_one_process(flags: Flags) -> list[str]:
    """Return the words of ``flags`` for one process. Sizes stay, as 1: MindSpeed reads some that only a flag gives."""
    sizes = {name: ["1"] for name in flags if name in _LAYOUT and name.endswith("-model-parallel-size")}
    # "|" in a pattern ends a stage.
    others = {
        name: [value.replace("|", "") for value in values] if name in PATTERNS else values
        for name, values in flags.items()
        if name not in _LAYOUT
    }
    return [word for name, values in {**others, **sizes}.items() for word in (name, *values)]


def _difference(run: dict[str, Any], other: dict[str, Any]) -> float | None:
    """Return the largest relative difference of losses; none where one of the runs ended early."""
    if run["exit_code"] or other["exit_code"] or len(run["losses"]) != len(other["losses"]):
        return None
    return max(abs(a - b) / abs(b) for a, b in zip(run["losses"], other["losses"], strict=True))


def script_of(program: Path, folder: Path, *, undo: str) -> Path:
    """Copy the program with our import and ``undo`` in front, and with parameters that are the same in every layout."""
    text = program.read_text()
    if "mindspeed_mm" in text:  # fp32 has no wrapper of half precision around the model
        text = text.replace("model.module.module", "model.module")
    main = re.search(r"^if __name__ == ['\"]__main__['\"]:.*\n", text, re.MULTILINE)
    assert main is not None, f"{program} is no program"
    start = "    import same_start\n\n    same_start.install()\n"
    future = re.search(r"^from __future__ .*\n", text, re.MULTILINE)
    begin = future.end() if future else 0
    own = "import mindspeed_autoparallel\n" + undo
    copy = folder / f"{'bare_' if undo else ''}{program.name}"
    copy.write_text(text[:begin] + own + text[begin : main.end()] + start + text[main.end() :])
    return copy


def _run(script: Path, words: list[str], world: int, folder: Path, limit_s: float) -> dict[str, Any]:
    ran = run_ranks(script, words, world, folder, limit_s=limit_s)
    errors = re.findall(r"^\S*(?:Error|Plan): .*", ran.output, re.MULTILINE)
    ended = "the time limit" if ran.exit_code == 124 else f"exit code {ran.exit_code}"
    error = (errors or [ended])[0] if ran.exit_code else ""
    return {
        "exit_code": ran.exit_code,
        "losses": ran.losses,
        "steps": len(ran.losses),
        "error": error,
        "seconds": round(ran.seconds, 1),
        "output": ran.output,
    }
