"""Release clauses."""

import pytest

from mindspeed_autoparallel.patching.releases import within


@pytest.mark.parametrize(
    ("release", "specifier", "fits"),
    [
        ("0.19.2", ">=0.12,<0.20", True),
        ("0.12.1", ">=0.12,<0.20", True),
        ("0.20.0", ">=0.12,<0.20", False),
        ("0.8.0", ">=0.12,<0.20", False),
        ("0.16.1", "==0.16", True),
        ("0.17.0", "==0.16", False),
    ],
)
def test_releases_are_compared_by_number(release, specifier, fits):
    assert within(release, specifier) is fits


def test_a_clause_that_is_none_is_a_programming_error():
    with pytest.raises(ValueError, match="not a release clause"):
        within("1.0", "~=1")
