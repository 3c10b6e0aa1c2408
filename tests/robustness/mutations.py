"""A grammar of what goes wrong with a file: values, keys, structure, bytes, and what stands in its place."""

from __future__ import annotations

import io
import json
import os
import pickle
import random
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

CANARY = "canary-was-run"
_HUGE = "@@huge@@"
_DIGITS = "9" * 5000
_ODD: tuple[Callable[[], Any], ...] = (
    lambda: None,
    lambda: True,
    lambda: -1,
    lambda: 0,
    lambda: 1.5,
    lambda: 1000,
    lambda: 10**6,
    lambda: 2**31,
    lambda: 10**18,
    lambda: 10**40,
    lambda: 1e308,
    lambda: -1e308,
    lambda: 5e-324,
    lambda: float("nan"),
    lambda: float("inf"),
    lambda: _HUGE,
    lambda: "",
    lambda: "7",
    lambda: "x" * 3000,
    lambda: "../../../../etc/passwd",
    lambda: "a\x00b",
    lambda: "\ud800",
    lambda: "<script>alert(1)</script>",
    lambda: "$(touch " + CANARY + ")",
    list,
    dict,
    lambda: [[]],
    lambda: {"": None},
    lambda: [None] * 500,
)


def mutated_json(text: str, random_source: random.Random) -> bytes:
    """A JSON text with one to three odd values, lost, renamed or doubled keys; sometimes broken as bytes as well."""
    value = json.loads(text)
    for _ in range(random_source.choice((1, 1, 1, 2, 3))):
        value = _with_change(value, random_source)
    try:
        written = json.dumps(value).replace(f'"{_HUGE}"', _DIGITS)
    except (ValueError, RecursionError):
        written = "[" * 4000
    content = written.encode("utf-8", errors="surrogatepass")
    return mutated_bytes(content, random_source) if random_source.random() < 0.15 else content


def _with_change(value: Any, source: random.Random) -> Any:
    places: list[tuple[Any, Any]] = []

    def walk(one: Any) -> None:
        for key in one if isinstance(one, dict) else range(len(one)) if isinstance(one, list) else ():
            places.append((one, key))
            walk(one[key])

    walk(value)
    if not places:
        return source.choice(_ODD)()
    holder, key = source.choice(places)
    kind = source.randrange(10)
    if kind < 6:
        holder[key] = source.choice(_ODD)()
    elif kind == 6:
        del holder[key]
    elif kind == 7 and isinstance(holder, dict):
        holder[str(key) + source.choice(("_", "x" * 200, "\u202e"))] = holder.pop(key)
    elif kind == 8:
        other, place = source.choice(places)
        if (isinstance(other, dict) and place in other) or (isinstance(other, list) and place < len(other)):
            holder[key] = json.loads(json.dumps(other[place]))
    else:
        deep: Any = 0
        for _ in range(source.choice((50, 250))):
            deep = [deep] if source.random() < 0.5 else {"k": deep}
        holder[key] = deep
    return value


def mutated_bytes(content: bytes, source: random.Random) -> bytes:
    """Cut off, changed, doubled or replaced."""
    kind = source.randrange(9)
    place = source.randrange(len(content) + 1)
    if kind == 0:
        return content[:place]
    if kind == 1:
        return b""
    if kind == 2:
        return content[:place] + source.randbytes(source.randrange(1, 40)) + content[place:]
    if kind == 3:
        changed = bytearray(content)
        for _ in range(source.choice((1, 1, 8))):
            if changed:
                changed[source.randrange(len(changed))] = source.randrange(256)
        return bytes(changed)
    if kind == 4:
        return content + content
    if kind == 5:
        return b"\xef\xbb\xbf" + content
    if kind == 6:
        return source.choice(
            (b"[" * 200_000, b'{"a":' * 50_000, b"null", b"0", _DIGITS.encode(), b"\xff\xfe" + content)
        )
    if kind == 7:
        return content.replace(b'"', b"'", source.randrange(1, 5))
    return content[place:] + content[:place]


def mutated_yaml(text: str, source: random.Random) -> bytes:
    """Of YAML: aliases that multiply, depth, tags that build objects, and everything JSON has."""
    bomb = "a: &a [x,x,x,x,x,x,x,x,x]\n" + "".join(
        f"{chr(98 + i)}: &{chr(98 + i)} [{','.join(['*' + chr(97 + i)] * 9)}]\n" for i in range(12)
    )
    kinds = (
        bomb,
        "[" * 3000,
        "a: " * 500,
        "- " * 3000,
        f"!!python/object/apply:os.system ['touch {CANARY}']",
        "use_parallel: !!python/name:os.system",
        "parallel: {search_mode: " + _DIGITS + "}",
        "parallel_config: {mem_coeff: .nan}",
        "parallel_config: {mem_coeff: 1e999}",
        "? [1, 2]\n: 3",
        "<<: *x",
        "%YAML 9.9\n---\n" + text,
    )
    if source.random() < 0.5:
        return source.choice(kinds).encode()
    return mutated_bytes(text.encode(), source)


class Canary:
    """Unpickled without care, it leaves a file."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch {CANARY}",)


def mutated_pickle(content: bytes, source: random.Random) -> bytes:
    """Of a torch file or a pickle: other objects, ones that run code, or damage."""
    kind = source.randrange(6)
    if kind == 0:
        return pickle.dumps(Canary())
    if kind == 1:
        return pickle.dumps({"model": Canary()}, protocol=source.choice((0, 2, 4)))
    if kind == 2:
        return _torch_saved(source)
    if kind == 3:
        return pickle.dumps(source.choice(({}, [], 7, {"model": 7}, {"state_dict_metadata": {}}, "x" * 5000)))
    return mutated_bytes(content, source)


def _torch_saved(source: random.Random) -> bytes:
    import torch

    odd = (
        {"model": Canary()},
        {"model": [torch.zeros(2)]},
        {"model": {7: torch.zeros(2)}},
        {7: 8},
        {"model": {"x": 7}, "checkpoint_version": None},
        torch.zeros(3),
        {f"model{'9' * 30}": {}},
        {"model0": {}, "model1": {"decoder.layers.99999.mlp.linear_fc2.weight": torch.zeros(2, 2)}},
    )
    stream = io.BytesIO()
    torch.save(source.choice(odd), stream)
    return stream.getvalue()


def mutated_safetensors(content: bytes, source: random.Random) -> bytes:
    """A header that lies, or damage."""
    if source.random() < 0.3:
        return mutated_bytes(content, source)
    length = struct.unpack("<Q", content[:8])[0]
    header = mutated_json(content[8 : 8 + length].decode(), source)
    said = source.choice((len(header), len(header), len(header), 2**63, 0))
    return struct.pack("<Q", said) + header + content[8 + length :]


def misplace(path: Path, source: random.Random) -> None:
    """Put something else in the place of a file: nothing, a folder, a loop of links, a pipe, a device."""
    kind = source.randrange(6)
    path.unlink()
    if kind == 1:
        path.mkdir()
    elif kind == 2:
        path.symlink_to(path.name)
    elif kind == 3:
        os.mkfifo(path)
    elif kind == 4:
        path.symlink_to("/dev/zero")
    elif kind == 5:
        path.write_bytes(b"x")
        path.chmod(0)
