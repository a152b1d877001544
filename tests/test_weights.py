"""`tenant_weights`."""

import pytest

from toka.errors import ConfigError
from toka.weights import check_tenants, weights_of


def test_weights_are_read() -> None:
    """A name and a number each, with or without blanks."""
    assert weights_of("key-1:2, key-3 : 0.5") == {"key-1": 2.0, "key-3": 0.5}
    assert weights_of(None) == {}


@pytest.mark.parametrize(
    "text", ["", "key-1", "key-1:", ":2", "key-1:0", "key-1:-1", "key-1:nan", "key-1:inf", "a:1,a:2"]
)
def test_what_is_no_weight_is_refused(text: str) -> None:
    """In one line that says what would be."""
    with pytest.raises(ConfigError, match="tenant_weights="):
        weights_of(text)


@pytest.mark.parametrize(("tenants", "hint"), [(["key-1"], "those there are: key-1"), ([], "there are no API keys")])
def test_a_weight_of_nobody_is_refused(tenants: list[str], hint: str) -> None:
    """It would change nothing, silently."""
    with pytest.raises(ConfigError, match=f"key-2.*{hint}"):
        check_tenants(weights_of("key-2:3"), tenants)
    check_tenants({}, tenants)
