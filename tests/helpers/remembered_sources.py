"""Read and parse once what Megatron reads of its classes' sources to build its parser, for all forked programs."""

import argparse
import ast
import functools
import importlib
import inspect
import marshal
import os
import sys


def remember_sources() -> None:
    """Read and parse once what ``inspect.getsource`` and ``ast.parse`` are given by Megatron to build its parser."""
    read, written = os.pipe()
    pid = os.fork()
    if pid == 0:
        nowhere = os.open(os.devnull, os.O_RDWR)
        for number in (1, 2):
            os.dup2(nowhere, number)
        try:
            os.write(written, marshal.dumps(_sources_of_flags()))
        finally:
            os._exit(0)
    os.close(written)
    with os.fdopen(read, "rb") as answer:
        text = answer.read()
    os.waitpid(pid, 0)
    known, read_source, parse = marshal.loads(text) if text else {}, inspect.getsource, ast.parse
    trees = {source: parse(source) for source in known.values()}

    @functools.wraps(read_source)
    def getsource(thing: object) -> str:
        return known.get(_class_place(thing)) or read_source(thing)

    @functools.wraps(parse)
    def parse_once(source: object, *options: object, **more: object) -> ast.AST:
        kept = trees.get(source) if isinstance(source, str) and not options and not more else None
        return kept or parse(source, *options, **more)

    inspect.getsource, ast.parse = getsource, parse_once


def _sources_of_flags() -> dict:
    """Return the source of every class that Megatron reads to build its parser, by file and name."""
    found, read_source = {}, inspect.getsource

    def noting(thing: object) -> str:
        found[_class_place(thing)] = read_source(thing)
        return found[_class_place(thing)]

    inspect.getsource = noting
    module = importlib.import_module("megatron.training.arguments")
    module.add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))
    return found


def _class_place(thing: object) -> tuple[str, str]:
    if not isinstance(thing, type):
        return "", ""
    return getattr(sys.modules.get(thing.__module__), "__file__", None) or "", thing.__qualname__
