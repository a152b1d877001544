"""One server for all tests of a client."""

from collections.abc import Iterator

import pytest

from tests.clients.engine import Engine, serving


@pytest.fixture(scope="session")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """A tiny model, with room for many clients."""
    with serving(tmp_path_factory.mktemp("tiny"), "kv_cache_num_tokens=16384", "served_model_name=tiny") as engine:
        yield engine
