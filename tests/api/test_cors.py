"""Pages of other origins: not let in unless told so, and then without a change to what else is answered."""

from collections.abc import Callable

from tests.api.fakes import FakeServer, call, complete
from toka.api.app import App

PAGE = "https://page.example"
ASKS = {"origin": PAGE, "access-control-request-method": "POST", "access-control-request-headers": "authorization"}


async def test_off_by_default(make: Callable[..., App]) -> None:
    """No header says that a page may read anything."""
    app = make()
    for method, path in (("GET", "/v1/models"), ("OPTIONS", "/v1/models")):
        answer = await call(app, method, path, headers=ASKS)
        assert not [name for name in answer.headers if name.startswith("access-control")]


async def test_a_browser_may_ask_first(make: Callable[..., App]) -> None:
    """A preflight of an allowed origin is 200 without a key, allows the header of the key, and has a request id."""
    answer = await call(
        make(cors_origins=f"{PAGE}, https://b.example", api_key="sk-a"), "OPTIONS", "/v1/x", headers=ASKS
    )
    assert answer.status == 200
    assert answer.headers["access-control-allow-origin"] == PAGE
    assert "authorization" in answer.headers["access-control-allow-headers"]
    assert "POST" in answer.headers["access-control-allow-methods"]
    assert "access-control-allow-credentials" not in answer.headers
    assert answer.headers["x-request-id"]


async def test_w_err_1_another_origin(make: Callable[..., App]) -> None:
    """It is refused with the error object and a request id, and is allowed nothing."""
    answer = await call(make(cors_origins="https://b.example"), "OPTIONS", "/v1/models", headers=ASKS)
    assert answer.status == 400
    assert answer.error["type"] == "invalid_request_error"
    assert answer.headers["content-type"] == "application/json"
    assert answer.headers["content-length"] == str(len(answer.content))
    assert answer.headers["x-request-id"]
    assert "access-control-allow-origin" not in answer.headers


async def test_answers_and_errors_may_be_read(make: Callable[..., App]) -> None:
    """Also a 401: a page must be able to tell what is wrong."""
    app = make(cors_origins="*", api_key="sk-a")
    for headers, status in (({"origin": PAGE}, 401), ({"origin": PAGE, "authorization": "Bearer sk-a"}, 200)):
        answer = await call(app, "GET", "/v1/models", headers=headers)
        assert answer.status == status
        assert answer.headers["access-control-allow-origin"] == "*"
        assert "x-request-id" in answer.headers["access-control-expose-headers"]


async def test_streams_are_as_without(make: Callable[..., App], server: FakeServer) -> None:
    """The same events, the same headers but for what browsers ask."""
    plain = await complete(make(), "x", stream=True, seed=1)
    page = await complete(make(cors_origins="*"), "x", stream=True, seed=1)
    assert [event["choices"] for event in page.events] == [event["choices"] for event in plain.events]
    assert page.headers.keys() - plain.headers.keys() <= {"vary", "access-control-allow-origin"}
