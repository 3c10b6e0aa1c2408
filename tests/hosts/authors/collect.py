"""The trainings that a checkout's authors ship: shell scripts as bash expands them, and functional test configurations."""

from __future__ import annotations

import contextlib
import json
import re
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import yaml

STARTERS = ("torchrun", "python", "python3", "srun", "sbatch", "deepspeed", "msrun", "uv", "ft_launcher", "sudo")
"""Commands that are written down in place of being run."""
_PASSED = ("nohup", "numactl", "time", "env", "exec")
_HARMLESS = (
    *("basename", "dirname", "date", "cat", "grep", "awk", "tr", "head", "tail", "cut", "wc", "seq", "expr"),
    *("realpath", "readlink", "sort", "uniq", "xargs", "printf", "echo", "true", "false", "bash", "sh"),
)
_SECONDS = 20
_LARGE_BYTES = 2**20
_MACHINES = "localhost\n" * 8
_MODEL = ("--num-layers", "--hybrid-layer-pattern", "--hybrid-override-pattern", "--mm-model", "--use-checkpoint-args")
"""A training names its model by one of these; ``encoder-num-layers`` is T5's."""


@dataclass(frozen=True, kw_only=True)
class Training:
    """A training as its authors start it: ``words`` follow ``program``, which is relative to the checkout."""

    checkout: Path
    source: str
    """The script or configuration, relative to the checkout."""
    program: str
    words: tuple[str, ...]
    num_processes: int


def trainings(checkout: Path) -> Iterator[Training]:
    """Yield every training of ``checkout`` that names its model by flags."""
    seen = set()
    for found in (*_of_recipes(checkout), *_of_scripts(checkout)):
        key = (found.source, found.program, found.words)
        if key not in seen and _is_training(found):
            seen.add(key)
            yield found


def kept(checkout: Path, file: Path) -> Iterator[Training]:
    """Yield ``trainings`` from ``file``, which gets them the first time."""
    if not file.is_file():
        rows = [
            {"source": one.source, "program": one.program, "words": one.words, "num_processes": one.num_processes}
            for one in trainings(checkout)
        ]
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    for line in file.read_text().splitlines():
        row = json.loads(line)
        yield Training(checkout=checkout, **{**row, "words": tuple(row["words"])})


def _is_training(found: Training) -> bool:
    names = {word.partition("=")[0].replace("_", "-") for word in found.words}
    file = found.program.rsplit("/", 1)[-1]
    trains = re.match(r"(pre|post)?train|finetune|sft", file) is not None
    return (
        trains
        and (checkout_file(found) is not None)
        and any(name in names for name in (*_MODEL, "--encoder-num-layers"))
    )


def checkout_file(found: Training) -> Path | None:
    """Return the program's file."""
    places = (found.checkout / found.program, (found.checkout / found.source).parent / found.program)
    return next((place for place in places if place.is_file()), None)


def _of_scripts(checkout: Path) -> Iterator[Training]:
    with tempfile.TemporaryDirectory() as text:
        folder = Path(text)
        stubs, copy = _stubs(folder / "bin"), folder / "copy"
        # Scripts edit files beside them (sed -i): they run in a copy, where nothing that they name is the checkout's.
        shutil.copytree(checkout, copy, ignore=_large_files, symlinks=True)
        for path in sorted(copy.rglob("*.sh")):
            source = path.relative_to(copy)
            if "functional_tests" in source.parts or not path.is_file():
                continue
            if not re.search(r"train|pretrain|torchrun|finetune", path.read_text(errors="replace")):
                continue
            _list_machines(path, copy)
            for words in _expanded(path, copy, folder, stubs):
                yield from _launched(checkout, copy, str(source), words)


def _list_machines(path: Path, copy: Path) -> None:
    """Write the list of machines that a script of several reads, and its users write."""
    for name in re.findall(r"^HOSTFILE=[\"']?([\w./-]+)", path.read_text(errors="replace"), re.MULTILINE):
        file = copy / name
        if file.resolve().is_relative_to(copy.resolve()) and not file.exists():
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(_MACHINES)


def _large_files(folder: str, names: list[str]) -> list[str]:
    paths = [Path(folder, name) for name in names]
    return [path.name for path in paths if path.is_file() and path.stat().st_size > _LARGE_BYTES]


def _stubs(folder: Path) -> Path:
    folder.mkdir()
    record = '#!/bin/bash\n{ printf "%s\\0" "${0##*/}" "$@"; printf "\\0"; } >> "$RECORDED"\n'
    for name in STARTERS:
        (folder / name).write_text(record)
    for name in _PASSED:
        (folder / name).write_text('#!/bin/bash\nwhile [[ "$1" == -* || "$1" == *=* ]]; do shift; done\n"$@"\n')
    (folder / "tee").write_text("#!/bin/bash\nwhile read -r; do :; done\n")
    edits = 'for p; do [[ "$p" == -i* || "$p" == --in-place* ]] && exit 0; done\n'
    (folder / "sed").write_text(f'#!/bin/bash\n{edits}exec {shutil.which("sed")} "$@"\n')
    (folder / "nproc").write_text("#!/bin/bash\necho 8\n")
    (folder / "hostname").write_text("#!/bin/bash\necho localhost\n")
    (folder / "mkdir").write_text('#!/bin/bash\nfor p; do [[ "$p" == /* ]] || /bin/mkdir -p "$p"; done\n')
    for name in _HARMLESS:
        if place := shutil.which(name):
            (folder / name).symlink_to(place)
    for file in folder.iterdir():
        if not file.is_symlink():
            file.chmod(0o700)
    rest = folder.with_name("missing.sh")
    rest.write_text("command_not_found_handle() { return 0; }\n")
    return folder


def _expanded(path: Path, copy: Path, folder: Path, stubs: Path) -> list[list[str]]:
    """Run the script where every program that it could start only writes its words down."""
    recorded = folder / "recorded"
    recorded.write_bytes(b"")
    environment = {
        "PATH": str(stubs),
        "BASH_ENV": str(folder / "missing.sh"),
        "HOME": str(copy),
        "RECORDED": str(recorded),
        "MASTER_ADDR": "localhost",
        "SLURM_JOB_ID": "1",
        "SLURM_NNODES": "1",
    }
    for arguments in ([], [f"/data/{number}" for number in range(1, 9)]):
        with contextlib.suppress(subprocess.TimeoutExpired):
            subprocess.run(
                ["/bin/bash", str(path), *arguments],
                cwd=copy,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                timeout=_SECONDS,
                check=False,
            )
        found = [part.decode(errors="replace").split("\0") for part in recorded.read_bytes().split(b"\0\0") if part]
        if any(word.endswith(".py") or ".py " in word for words in found for word in words):
            return found
    return []


def _launched(checkout: Path, copy: Path, source: str, words: list[str], depth: int = 0) -> Iterator[Training]:
    """Yield what ``words`` start: the first Python file with flags behind it, also inside a quoted command."""
    for place, word in enumerate(words):
        if word.endswith(".py"):
            yield Training(
                checkout=checkout,
                source=source,
                program=word.removeprefix(f"{copy}/").removeprefix("./"),
                words=tuple(text.replace(str(copy), ".") for text in words[place + 1 :]),
                num_processes=_num_processes(words[:place]),
            )
            return
        if ".py " in word and depth < 2:
            with contextlib.suppress(ValueError):  # unbalanced quotes
                yield from _launched(checkout, copy, source, shlex.split(word, comments=True), depth + 1)
            return


def _num_processes(words: list[str]) -> int:
    """Return processes that a launcher's words start; 1 where they do not tell."""
    found = {"nproc": 1, "nnodes": 1}
    for place, word in enumerate(words):
        name, equals, value = word.lstrip("-").replace("_", "-").partition("=")
        value = value if equals else words[place + 1] if place + 1 < len(words) else ""
        for key in found:
            if word.startswith("--") and name.startswith(key) and value.isdigit():
                found[key] = int(value)
    return found["nproc"] * found["nnodes"]


_PATTERNS = ("--hybrid-layer-pattern", "--hybrid-override-pattern")


def _of_recipes(checkout: Path) -> Iterator[Training]:
    """Yield trainings of Megatron-LM's functional tests, with the program that their recipe names."""
    cases = checkout / "tests" / "functional_tests" / "test_cases"
    if not cases.is_dir():
        return
    programs: dict[tuple[str, str], str] = {}
    for recipe in sorted((checkout / "tests" / "test_utils" / "recipes").rglob("*.yaml")):
        content = yaml.safe_load(recipe.read_text()) or {}
        spec = content.get("spec") or {}
        program = re.search(r"TRAINING_SCRIPT_PATH=([^\s\"]+\.py)", str(spec.get("script", "")))
        for product in content.get("products") or []:
            for case in product.get("test_case") or []:
                if program:
                    programs.setdefault((str(spec.get("model")), str(case)), program[1].removeprefix("./"))
    launcher = cases.parent / "shell_test_utils" / "_run_training.sh"
    quotes = not launcher.is_file() or "TRAINING_PARAMS_ARRAY" in launcher.read_text()
    for path in sorted(cases.rglob("model_config.yaml")):
        content = yaml.safe_load(path.read_text()) or {}
        case, model = path.parent.name, path.parent.parent.name
        hybrid = model in ("hybrid", "mamba") or any(name in (content.get("MODEL_ARGS") or {}) for name in _PATTERNS)
        usual = "pretrain_hybrid.py" if hybrid else "pretrain_gpt.py"
        if content.get("MODE", "pretraining") == "pretraining" and isinstance(content.get("MODEL_ARGS"), dict):
            yield Training(
                checkout=checkout,
                source=str(path.parent.relative_to(checkout)),
                program=programs.get((model, case), usual),
                words=tuple(_words(content["MODEL_ARGS"], quotes=quotes)),
                num_processes=8,
            )


def _words(arguments: dict[str, object], *, quotes: bool) -> Iterator[str]:
    """Yield a configuration's words. ``quotes``: its launcher keeps a value with spaces together; 0.12's does not."""
    for name, value in arguments.items():
        if value is False or value is None:
            continue
        yield name
        if isinstance(value, list):
            yield from map(str, value)
        elif value is not True:
            text = str(value).replace("${REPEAT}", "1").replace("\\", "")
            text = re.sub(r"\$\{?(\w+)\}?", r"/data/\1", text)
            if not quotes:
                yield from text.split()
                continue
            # As their launcher does: xargs takes quotes away, words in brackets are several, and bash reads what has no
            # character of its own.
            with contextlib.suppress(ValueError):  # unbalanced quotes
                text = " ".join(shlex.split(text))
            if re.fullmatch(r"\[[^\]]+\]", text):
                yield from text[1:-1].split()
            else:
                yield from [text] if re.search(r"[ |()]", text) else shlex.split(text)
