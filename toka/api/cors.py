"""Pages of other origins: Starlette's middleware, whose own answers are made to be like all others."""

import msgspec
from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response
from starlette.types import ASGIApp

from toka.api.exchange import request_id
from toka.errors import BadRequest

METHODS = ("GET", "HEAD", "POST", "DELETE")
EXPOSED = ("x-request-id", "retry-after", "x-should-retry")
"""Headers of answers that a page may read."""


class Cors(CORSMiddleware):
    """What browsers ask before and after they let a page of one of `origins` use the API; `*` stands for all.

    No cookies and no other credentials of the browser's own: a page sends its key itself.
    """

    def __init__(self, app: ASGIApp, origins: str) -> None:
        """`origins` are separated by commas."""
        super().__init__(
            app,
            allow_origins=[origin.strip() for origin in origins.split(",")],
            allow_methods=METHODS,
            allow_headers=["*"],
            expose_headers=EXPOSED,
        )

    def preflight_response(self, request_headers: Headers) -> Response:
        """With a request id, and the error object if it is refused."""
        response = super().preflight_response(request_headers)
        if response.status_code >= 400:
            error = BadRequest("This origin, method or header is not allowed: see cors_origins of the server.")
            del response.headers["content-length"], response.headers["content-type"]
            response = Response(
                msgspec.json.encode(error.body()), response.status_code, dict(response.headers), "application/json"
            )
        response.headers["x-request-id"] = request_id(request_headers.get("x-request-id", "").encode("latin1")).decode()
        return response
