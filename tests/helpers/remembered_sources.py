"""Read and parse once what Megatron reads of its sources, for all forked programs: of the classes that it makes flags of, and
of the functions that triton's decorator is put on."""

import argparse
import ast
import contextlib
import dataclasses
import functools
import importlib
import inspect
import marshal
import os
import sys
import types
from pathlib import Path


def remember_sources() -> None:
    """Cache the results that Megatron's modules and this project's get from ``inspect.getsource``,
    ``inspect.getsourcelines``, ``ast.parse`` and the compiler."""
    read, written = os.pipe()
    pid = os.fork()
    if pid == 0:
        nowhere = os.open(os.devnull, os.O_RDWR)
        for number in (1, 2):
            os.dup2(nowhere, number)
        try:
            with os.fdopen(written, "wb") as answer:
                answer.write(marshal.dumps(_noted()))
        finally:
            os._exit(0)
    os.close(written)
    with os.fdopen(read, "rb") as answer:
        text = answer.read()
    os.waitpid(pid, 0)
    classes, functions, compiled = marshal.loads(text) if text else ({}, {}, {})
    read_source, read_lines, parse = inspect.getsource, inspect.getsourcelines, ast.parse
    trees = {source: parse(source) for source in classes.values()}

    @functools.wraps(read_source)
    def getsource(thing: object) -> str:
        return classes.get(_class_place(thing)) or read_source(thing)

    @functools.wraps(read_lines)
    def getsourcelines(thing: object) -> tuple[list[str], int]:
        found = functions.get(_function_place(thing))
        return (list(found[0]), found[1]) if found else read_lines(thing)

    @functools.wraps(parse)
    def parse_once(source: object, *options: object, **more: object) -> ast.AST:
        kept = trees.get(source) if isinstance(source, str) and not options and not more else None
        return kept or parse(source, *options, **more)

    inspect.getsource, inspect.getsourcelines, ast.parse = getsource, getsourcelines, parse_once
    dataclasses.exec = lambda text, *names: exec(compiled.get(text, text), *names)  # type: ignore[attr-defined]
    inspect.getmodule(compile("", "<no module's>", "exec"))  # which notes the path of every module that is there


def _noted() -> tuple[dict, dict, dict]:
    """Return the source of every class that Megatron reads to build its parser, by file and name, of every function whose lines
    are read while modules are imported, by file and line, and the code of what dataclasses are made of, by its text."""
    classes, functions, compiled = {}, {}, {}
    read_source, read_lines = inspect.getsource, inspect.getsourcelines

    def getsource(thing: object) -> str:
        classes[_class_place(thing)] = read_source(thing)
        return classes[_class_place(thing)]

    def getsourcelines(thing: object) -> tuple[list[str], int]:
        found = read_lines(thing)
        if _function_place(thing)[0]:
            functions[_function_place(thing)] = found
        return found

    def execute(text: str, *names: dict) -> None:
        compiled[text] = compile(text, "<string>", "exec")
        exec(compiled[text], *names)

    inspect.getsource, inspect.getsourcelines = getsource, getsourcelines
    dataclasses.exec = execute  # type: ignore[attr-defined]
    module = importlib.import_module("megatron.training.arguments")
    module.add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))
    sys.path.append(str(Path(__file__).parents[2] / "docs" / "examples"))
    for name in ("megatron.training", "reference_vlm.pretrain_vlm"):
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    return classes, functions, compiled


def _class_place(thing: object) -> tuple[str, str]:
    if not isinstance(thing, type):
        return "", ""
    return getattr(sys.modules.get(thing.__module__), "__file__", None) or "", thing.__qualname__


def _function_place(thing: object) -> tuple[str, int]:
    code = getattr(thing, "__code__", None) if isinstance(thing, types.FunctionType) else None
    return (code.co_filename, code.co_firstlineno) if code else ("", 0)
