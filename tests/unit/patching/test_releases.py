"""Release clauses are PEP 440 specifiers."""

import inspect

import pytest

from mindspeed_autoparallel.patching import Calls
from mindspeed_autoparallel.patching.releases import within


@pytest.mark.parametrize(
    ("release", "specifier", "fits"),
    [
        ("0.19.2", ">=0.12,<0.20", True),
        ("0.12.1", ">=0.12,<0.20", True),
        ("0.20.0", ">=0.12,<0.20", False),
        ("0.8.0", ">=0.12,<0.20", False),
        ("0.16.1", "==0.16.*", True),
        ("0.17.0", "==0.16.*", False),
        ("0.16.3", "~=0.16.1", True),
        ("0.16.3", ">=0.12,!=0.16.3", False),
        ("0.20.0rc1", ">=0.12,<0.21", True),
    ],
)
def test_releases_are_compared_by_pep_440(release, specifier, fits):
    assert within(release, specifier) is fits


def test_a_clause_that_is_none_is_a_programming_error():
    with pytest.raises(ValueError, match="Invalid specifier"):
        within("1.0", "at least 1")


def test_every_patch_calls_a_function_that_exists():
    from mindspeed_autoparallel.patches import patch_table

    called = [patch.wrapper for patch in patch_table() if isinstance(patch.wrapper, Calls)]
    assert len(called) > 20
    for wrapper in called:
        parameters = list(inspect.signature(wrapper.function).parameters)
        assert parameters[len(wrapper.first) :][1:] == ["args", "kwargs"], wrapper.target
