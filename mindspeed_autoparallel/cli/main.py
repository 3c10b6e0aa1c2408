"""Entry point: finds the command, runs it, and turns errors for people into one line and an exit code."""

from __future__ import annotations

import argparse
import importlib
import json
import os
import pkgutil
import sys
from collections.abc import Sequence
from types import ModuleType

from mindspeed_autoparallel import cli
from mindspeed_autoparallel.errors import AutoParallelError, ConfigError, InfeasiblePlan
from mindspeed_autoparallel.files import shown
from mindspeed_autoparallel.interrupts import ended_like_ctrl_c, exit_code_of

_LONGEST_LINE = 500


def _command_names() -> list[str]:
    return sorted(
        module.name.replace("_", "-")
        for module in pkgutil.iter_modules(cli.__path__)
        if module.name != "main" and not module.name.startswith("_")
    )


def _load(command: str) -> ModuleType:
    return importlib.import_module(f"{cli.__name__}.{command.replace('-', '_')}")


def _help_line(command: str) -> str:
    return (_load(command).__doc__ or "").strip().splitlines()[0]


def build_parser(argv: Sequence[str]) -> argparse.ArgumentParser:
    """Return the parser for ``argv``: loads the chosen command's module; without one, all, for their help lines."""
    names = _command_names()
    chosen = next((word for word in argv if not word.startswith("-")), None)
    parser = argparse.ArgumentParser(
        prog="mindspeed-autoparallel", description="Find, explain and simulate parallel plans for Megatron training."
    )
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name in names:
        if chosen in names and name != chosen:
            subparsers.add_parser(name)
            continue
        command = subparsers.add_parser(name, help=_help_line(name), description=_load(name).__doc__)
        command.formatter_class = argparse.RawDescriptionHelpFormatter
        _load(name).add_arguments(command)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit code (0 done, 2 bad input, 3 no plan fits, 130 interrupted, 143 ended)."""
    arguments_given = list(sys.argv[1:] if argv is None else argv)
    arguments = build_parser(arguments_given).parse_args(arguments_given)
    try:
        with ended_like_ctrl_c():
            return int(_load(arguments.command).run(arguments) or 0)
    except InfeasiblePlan as error:
        if getattr(arguments, "json", False):
            print(json.dumps({"status": "infeasible", "reason": str(error)}))
        else:
            print(one_line(error), file=sys.stderr)
        return error.exit_code
    except AutoParallelError as error:
        print(one_line(error), file=sys.stderr)
        return error.exit_code
    except MemoryError:
        print("ConfigError: this machine has not the memory for sizes as large as these.", file=sys.stderr)
        return ConfigError.exit_code
    except KeyboardInterrupt as error:
        print("interrupted", file=sys.stderr)
        return exit_code_of(error)
    except BrokenPipeError:
        # The reader (head, less) went away: not an error of ours; silence the flush at interpreter exit too.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141


def one_line(error: AutoParallelError) -> str:
    """Write ``error`` as one printable line of at most 500 characters: values from files may be as long as the file."""
    return shown(" ".join(f"{type(error).__name__}: {error}".split()), _LONGEST_LINE)


if __name__ == "__main__":
    sys.exit(main())
