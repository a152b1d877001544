"""W-MOD: the models that are served."""

import json
import urllib.request

import pytest

from tests.api.conftest import CREATED
from tests.api.fakes import FakeServer, call
from toka.api.app import App


async def test_w_mod_1_models(app: App, server: FakeServer) -> None:
    """Every name, with the context length as soon as it is known."""
    body = (await call(app, "GET", "/v1/models")).json
    assert body["object"] == "list"
    assert [card["id"] for card in body["data"]] == ["tiny", "org/alias"]
    card = body["data"][1]
    assert card == {
        **{"id": "org/alias", "object": "model", "created": CREATED, "owned_by": "toka"},
        **{"root": "tiny", "max_model_len": 2048},
    }
    server.max_model_len = 0
    assert (await call(app, "GET", "/v1/models")).json["data"][0]["max_model_len"] is None


async def test_w_mod_2_model(app: App) -> None:
    """One model, whose id may contain a slash; an unknown one is a 404."""
    assert (await call(app, "GET", "/v1/models/org/alias")).json["id"] == "org/alias"
    unknown = await call(app, "GET", "/v1/models/org/other")
    assert unknown.status == 404
    assert unknown.error["code"] == "model_not_found"


async def test_w_mod_1_created_stays(app: App) -> None:
    """The same at every call, and on every name."""
    answers = [(await call(app, "GET", "/v1/models")).json for _ in range(2)]
    assert answers[0] == answers[1]
    assert {card["created"] for card in answers[0]["data"]} == {CREATED}


@pytest.mark.parametrize("id", ["tiny", "org/alias", "org%2Falias"])
def test_w_mod_2_over_http(port: int, id: str) -> None:
    """A slash in an id may come as it is, or escaped."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/v1/models/{id}") as answer:
        assert json.load(answer)["id"] == id.replace("%2F", "/")
