"""The exit code of a command line, also of one that argparse refuses."""

from mindspeed_autoparallel.cli.main import main


def exit_code(words: list[str]) -> object:
    try:
        return main(words)
    except SystemExit as end:
        return end.code
