"""A grammar of bash launch scripts: what people write, and what no shell would take."""

from __future__ import annotations

import random
from collections.abc import Callable

from mutations import CANARY

_NAMES = ("TP", "PP", "NNODES", "MASTER_PORT", "GPT_ARGS", "WORLD_SIZE", "A", "_x", "HERE", "NPUS_PER_NODE", "PATH")
_FLAGS = (
    "--nproc_per_node", "--nproc-per-node", "--nnodes", "--node_rank", "--master_port", "--master_addr",
    "--tensor-model-parallel-size", "--pipeline-model-parallel-size", "--context-parallel-size", "--num-layers",
    "--micro-batch-size", "--global-batch-size", "--hetero-parallel", "--auto-parallel-mm", "--mm-model", "--",
    "--lr=", "---", "--auto-tuning",
)  # fmt: skip
_ATOMS = (
    "0", "1", "2", "-1", "08", "1e9", "9" * 4400, "x" * 3000, "", " ", "\t", "\\", "\\\n", "\0", "\x07", "\ud7ff", "ü",
    "*", "?", "~", "[", "]]", "{1..1000000000}", "{a,b}", "!", "#", "&", ";", ";;", "|", ">", "2>&1", "<(ls)", ">(cat)",
    "$", "$$", "$!", "$?", "$#", "$@", "$*", "$0", "$1", "${", "${}", "${#A[@]}", "${!A}", "${A", "${A[@]:1:2}", "`",
    "${A//x/y}", "${A:?gone}", "$((", "$(", "))", "'", '"', "$'\\x41'", "=", "+=", "()", "(", ")", "{", "}", "\u202e",
    "if", "fi", "done", "esac", "then", "function", "localhost", "127.0.0.1", "::1", "6010", "65536", "train.py",
)  # fmt: skip
_ODD_LINES = (
    f"touch {CANARY}",
    f"X=$(touch {CANARY})",
    f"source <(echo touch {CANARY})",
    f'eval "touch {CANARY}"',
    f"trap 'touch {CANARY}' EXIT",
    f"PROMPT_COMMAND='touch {CANARY}'",
    "source train.sh",
    ". /dev/zero",
    "source /dev/stdin",
    "source ../../../../../etc/passwd",
    "source .",
    ":(){ :|:& };:",
    'A="$A$A"',
    "A=(${A[@]} ${A[@]})",
    "A+=$A",
    "while true; do A+=$A; done",
    "X=$((9**9**9**9))",
    "X=$((1<<1000000000))",
    "X=$((X*X*X*X*X*X))",
    "X=$((1/0))",
    "X=$((0x7fffffffffffffff+1))",
    "X=$((" + "(" * 40 + "1" + ")" * 40 + "))",
    "cat <<E",
    "<<<<<",
    "set -euo pipefail",
    "exec bash",
)


def mutated_script(text: str, source: random.Random) -> bytes:
    """Lines of the grammar among those of ``text``, or in their place; the start of the training may stay or not."""
    lines = text.split("\n")
    kept = lines[source.randrange(len(lines)) :] if source.random() < 0.3 else lines
    for _ in range(source.choice((1, 2, 5, 20, 100))):
        kept.insert(source.randrange(len(kept) + 1), _line(source, 0))
    if source.random() < 0.2:
        source.shuffle(kept)
    if source.random() < 0.1:
        kept = [line for line in kept for _ in range(source.choice((1, 1, 8)))]
    return "\n".join(kept).encode("utf-8", errors="surrogatepass")


def _line(source: random.Random, depth: int) -> str:
    """Write a statement, on one line or several."""
    if source.random() < 0.15:
        return source.choice(_ODD_LINES)
    if depth > 4:
        return f"{source.choice(_NAMES)}={_word(source, depth)}"
    return source.choice(_STATEMENTS)(source, depth + 1)


def _word(source: random.Random, depth: int) -> str:
    """Write one word of one to three pieces."""
    return "".join(_piece(source, depth) for _ in range(source.choice((1, 1, 1, 2, 3))))


def _piece(source: random.Random, depth: int) -> str:
    if depth > 6 or source.random() < 0.4:
        return source.choice(_ATOMS)
    return source.choice(_PIECES)(source, depth + 1)


def _words(source: random.Random, depth: int) -> str:
    return " ".join(_word(source, depth) for _ in range(source.randrange(5)))


def _flags(source: random.Random, depth: int) -> str:
    return " ".join(f"{source.choice(_FLAGS)} {_word(source, depth)}" for _ in range(source.randrange(1, 8)))


def _body(source: random.Random, depth: int) -> str:
    return source.choice(("\n", "; ")).join(_line(source, depth) for _ in range(source.randrange(1, 4)))


def _name(source: random.Random) -> str:
    return source.choice(_NAMES)


_Production = Callable[[random.Random, int], str]
_PIECES: tuple[_Production, ...] = (
    lambda source, depth: f"${_name(source)}",
    lambda source, depth: f"${{{_name(source)}}}",
    lambda source, depth: f"${{{_name(source)}[@]}}",
    lambda source, depth: (
        f"${{{_name(source)}{source.choice((':-', '-', ':=', ':+', '#', '%%', '/'))}{_word(source, depth)}}}"
    ),
    lambda source, depth: f"$(({_word(source, depth)}{source.choice('+-*/%<&')}{_word(source, depth)}))",
    lambda source, depth: f"$({_line(source, depth)})",
    lambda source, depth: f"`{_words(source, depth)}`",
    lambda source, depth: f'"{_words(source, depth)}"',
    lambda source, depth: f"'{_words(source, depth)}'",
    lambda source, depth: f"{source.choice(_FLAGS)}={_word(source, depth)}",
    lambda source, depth: f"<({_line(source, depth)})",
)
_STATEMENTS: tuple[_Production, ...] = (
    lambda source, depth: f"{_name(source)}={_word(source, depth)}",
    lambda source, depth: f"{_name(source)}+={_word(source, depth)}",
    lambda source, depth: f"export {_name(source)}={_word(source, depth)} {_name(source)}",
    lambda source, depth: f'{_name(source)}="\n  {_flags(source, depth)} \\\n  {_flags(source, depth)}\n"',
    lambda source, depth: (
        f"{_name(source)}=({_flags(source, depth)} # {_words(source, depth)}\n {_words(source, depth)})"
    ),
    lambda source, depth: f"{_name(source)}+=({_words(source, depth)})",
    lambda source, depth: (
        f"if [ {_words(source, depth)} ]; then {_body(source, depth)}; else {_body(source, depth)}; fi"
    ),
    lambda source, depth: f"for {_name(source)} in {_words(source, depth)}; do\n{_body(source, depth)}\ndone",
    lambda source, depth: f"while {_line(source, depth)}; do {_body(source, depth)}; done",
    lambda source, depth: (
        f"case {_word(source, depth)} in {_word(source, depth)}) {_body(source, depth)};; *) :;; esac"
    ),
    lambda source, depth: f"{_name(source)}() {{\n{_body(source, depth)}\n}}",
    lambda source, depth: f"cat <<{source.choice(('', '-'))}'{_name(source)}'\n{_body(source, depth)}\n{_name(source)}",
    lambda source, depth: f"source {_word(source, depth)}",
    lambda source, depth: f"torchrun {_flags(source, depth)} train.py {_flags(source, depth)} {_words(source, depth)}",
    lambda source, depth: f"python -m torch.distributed.run {_flags(source, depth)} t.py ${_name(source)} | tee log",
    lambda source, depth: f'srun bash -c "torchrun {_flags(source, depth)} t.py" && {_line(source, depth)}',
    lambda source, depth: f"({_body(source, depth)}) || {_line(source, depth)} &",
    lambda source, depth: f"{_words(source, depth)} | {_words(source, depth)} > {_word(source, depth)}",
)
