"""Entry point: finds the command, runs it, and turns errors for people into one line and an exit code."""

from __future__ import annotations

import argparse
import contextlib
import errno
import importlib
import io
import json
import logging
import os
import pkgutil
import signal
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any, NoReturn

from mindspeed_autoparallel import cli
from mindspeed_autoparallel.cli import _progress
from mindspeed_autoparallel.cli._spellings import with_new_spellings
from mindspeed_autoparallel.errors import AutoParallelError, ConfigError, InfeasiblePlan
from mindspeed_autoparallel.files import shown
from mindspeed_autoparallel.first_interrupt import leave_interrupts_to_the_command
from mindspeed_autoparallel.interrupts import ended_like_ctrl_c, exit_code_of
from mindspeed_autoparallel.whole_numbers import WholeNumber

_LONGEST_LINE = 500
_FORKS = ("doctor", "preflight", "trace")
"""Commands that fork: none of them runs a thread before."""
_OUTPUT_ERRORS = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EBADF})


def _command_names() -> list[str]:
    return sorted(
        module.name.replace("_", "-")
        for module in pkgutil.iter_modules(cli.__path__)
        if module.name != "main" and not module.name.startswith("_")
    )


def _version() -> str:
    return str(importlib.import_module("mindspeed_autoparallel").__version__)


def _load(command: str) -> ModuleType:
    return importlib.import_module(f"{cli.__name__}.{command.replace('-', '_')}")


def _help_line(command: str) -> str:
    return (_load(command).__doc__ or "").strip().splitlines()[0]


class _Help(argparse.RawDescriptionHelpFormatter):
    """Adds the default of a flag to its help, where the help does not have it."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        text = action.help or ""
        silent = action.default in (None, False, "", argparse.SUPPRESS) or action.default == [] or action.nargs == 0
        if silent or not action.option_strings or "default" in text:
            return action.help
        return f"{text} (default: %(default)s)".strip()


class _Parser(argparse.ArgumentParser):
    """Takes flags as they are spelt, and answers a wrong one in one line instead of with the whole usage."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **{"allow_abbrev": False, **options})
        self.register("type", int, WholeNumber())

    def _get_values(self, action: argparse.Action, arg_strings: list[str]) -> Any:
        # argparse takes the "--" of --flag=-- for the end of the flags, and leaves an empty list as the value.
        if action.option_strings and action.nargs is None and arg_strings == ["--"]:
            raise argparse.ArgumentError(action, "'--' is no value")
        return super()._get_values(action, arg_strings)

    def _print_message(self, message: str, file: Any = None) -> None:
        # argparse's own drops what cannot be written, as if all were well.
        if message:
            (file or sys.stderr).write(message)

    def error(self, message: str) -> NoReturn:
        """Print what is wrong and where the flags are listed, and exit with code 2."""
        if "--json" in sys.argv:
            print(json.dumps({"status": "error", "code": "usage", "reason": message}))
        self.exit(ConfigError.exit_code, f"{self.prog}: error: {message} (flags: {self.prog} --help)\n")

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse; flags that a command has not are an error of the command's parser, whose help lists its flags."""
        found, unknown = self.parse_known_args(args, namespace)
        if unknown:
            chosen = self if self._subparsers is None else self._commands().get(getattr(found, "command", ""), self)
            chosen.error(f"unrecognized arguments: {' '.join(unknown)}")
        return found

    def _commands(self) -> dict[str, argparse.ArgumentParser]:
        return next(dict(action.choices) for action in self._actions if isinstance(action, argparse._SubParsersAction))


class _PrintCompletion(argparse.Action):
    """Prints a shell's completion script, made by shtab from the parsers, and ends."""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: object, values: object, option: object = None
    ) -> None:
        """Print and exit with code 0; with code 2 and one line where shtab is missing."""
        try:
            shtab = importlib.import_module("shtab")
        except ImportError:
            parser.error("--print-completion needs shtab: pip install 'mindspeed-autoparallel[completion]'")
        print(shtab.complete(build_parser([]), shell=str(values)))
        parser.exit()


def build_parser(argv: Sequence[str]) -> argparse.ArgumentParser:
    """Return the parser for ``argv``: loads the chosen command's module; without one, all, for their help lines."""
    names = _command_names()
    chosen = next((word for word in argv if not word.startswith("-")), None)
    parser = _Parser(
        prog="mindspeed-autoparallel", description="Find, explain and simulate parallel plans for Megatron training."
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {_version()}")
    parser.add_argument(
        "--print-completion",
        action=_PrintCompletion,
        choices=("bash", "zsh", "tcsh"),
        help='print a completion script for the shell (needs shtab); bash: eval "$(%(prog)s --print-completion bash)"',
    )
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name in names:
        if chosen in names and name != chosen:
            subparsers.add_parser(name)
            continue
        command = subparsers.add_parser(name, help=_help_line(name), description=_load(name).__doc__)
        command.formatter_class = _Help
        _load(name).add_arguments(command)
        _progress.add_arguments(command)
        for action in command._actions:
            if action.help is None and action.option_strings and action.default not in (None, False, ""):
                action.help = "default: %(default)s"
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit code (0 done, 2 bad input, 3 no plan fits, 130 interrupted, 143 ended)."""
    try:
        leave_interrupts_to_the_command()
        with ended_like_ctrl_c():
            return _printed(list(sys.argv[1:] if argv is None else argv))
    except MemoryError:
        _print_last("ConfigError: this machine has not the memory for sizes as large as these.")
        return ConfigError.exit_code
    except KeyboardInterrupt as error:
        _print_last("interrupted")
        return exit_code_of(error)
    finally:
        if argv is None:
            # The process ends now: an interrupt in the interpreter's last steps would be a traceback.
            signal.signal(signal.SIGINT, signal.SIG_IGN)


def _printed(words: list[str]) -> int:
    """Run the command of ``words`` and see its output written; returns the exit code."""
    if sys.stdout is None:
        _print_last("ConfigError: standard output is closed. Redirect it to a file or to /dev/null.")
        return ConfigError.exit_code
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        # A name that the locale (C, ASCII) cannot spell is printed escaped.
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        try:
            words = with_new_spellings(words)
            return _run(build_parser(words).parse_args(words))
        finally:
            sys.stdout.flush()
    except BrokenPipeError:
        # The reader (head, less) went away: not an error of ours.
        _discard_output()
        return 141
    except OSError as error:
        if error.filename is not None or error.errno not in _OUTPUT_ERRORS:
            raise
        _discard_output()
        reason = error.strerror
        _print_last(f"ConfigError: cannot write to standard output: {reason}. Free space or redirect it.")
        return ConfigError.exit_code


def _run(arguments: argparse.Namespace) -> int:
    command = _load(arguments.command)
    if arguments.verbose:
        logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(name)s: %(message)s")
    try:
        with _progress.shown_progress(arguments, works_alone=arguments.command not in _FORKS):
            return int(command.run(arguments) or 0)
    except AutoParallelError as error:
        if getattr(arguments, "json", False):
            print(json.dumps(_as_json(error)))
        if not (getattr(arguments, "json", False) and isinstance(error, InfeasiblePlan)):
            _print_last(one_line(error))
        return error.exit_code


def _discard_output() -> None:
    """Keep the flush at the interpreter's exit from failing as well."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _print_last(line: str) -> None:
    """Print ``line`` to stderr, if that can be written."""
    with contextlib.suppress(OSError):
        print(line, file=sys.stderr, flush=True)


def _as_json(error: AutoParallelError) -> dict[str, str]:
    """Return what ``--json`` prints of an error; ``code`` is the name of its class and does not change."""
    if isinstance(error, InfeasiblePlan):
        return {"status": "infeasible", "code": type(error).__name__, "reason": str(error)}
    return {"status": "error", "code": type(error).__name__, "reason": str(error)}


def one_line(error: AutoParallelError) -> str:
    """Write ``error`` as one printable line of at most 500 characters: values from files may be as long as the file."""
    return shown(" ".join(f"{type(error).__name__}: {error}".split()), _LONGEST_LINE)


if __name__ == "__main__":
    sys.exit(main())
