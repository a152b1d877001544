"""What can go wrong, as a tree. Each class knows its HTTP status and OpenAI's `type` and `code`.

TokaError
├── ConfigError              a wrong option: exit code 2
├── StartError               the server or a worker cannot start: exit code 1
└── RequestError             one request fails; everything else goes on
    ├── BadRequest           400  the request itself is wrong
    │   ├── ContextLengthExceeded
    │   └── Unsupported
    ├── InvalidApiKey        401
    ├── NotFound             404
    │   └── ModelNotFound
    ├── MethodNotAllowed     405
    ├── Conflict             409  it contradicts what is there or under way
    ├── BodyTooLarge         413
    ├── HeadTooLarge         431
    ├── WrongContentType     415
    ├── DeadlinePassed       408  the client's own timeout_s
    ├── RateLimited          429  too many wait already
    ├── EngineFault          500  this request broke something; do not send it again
    └── Unavailable          503  loading, draining, or the workers are gone
"""

from typing import ClassVar


class TokaError(Exception):
    """Anything that toka raises on purpose. `str(error)` is one line for a person."""


class ConfigError(TokaError):
    """An option that does not exist or has a wrong value."""


class StartError(TokaError):
    """Something is missing or in the way: a port in use, a shard that is not there, a worker that died."""


class RequestError(TokaError):
    """A request that gets an error instead of an answer, in OpenAI's shape."""

    status: ClassVar[int] = 500
    type: ClassVar[str] = "server_error"
    default_code: ClassVar[str | None] = None
    headers: ClassVar[dict[str, str]] = {}

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.code = code or self.default_code

    def sent_headers(self) -> dict[str, str]:
        """The headers of its answer."""
        return self.headers

    def body(self) -> dict[str, dict[str, str | None]]:
        """OpenAI's error object."""
        return {"error": {"message": self.message, "type": self.type, "param": self.param, "code": self.code}}


class BadRequest(RequestError):
    """The request is wrong and will stay wrong."""

    status = 400
    type = "invalid_request_error"


class ContextLengthExceeded(BadRequest):
    """The prompt, or the prompt and the tokens asked for, do not fit."""

    default_code = "context_length_exceeded"


class Unsupported(BadRequest):
    """A field that is known and not served, with a value other than its default."""

    default_code = "unsupported_parameter"


class InvalidApiKey(BadRequest):
    """No key, or a wrong one."""

    status = 401
    default_code = "invalid_api_key"
    headers: ClassVar[dict[str, str]] = {"www-authenticate": "Bearer"}


class NotFound(BadRequest):
    """No such thing, or no such route."""

    status = 404


class ModelNotFound(NotFound):
    """The model is not the one that is served."""

    default_code = "model_not_found"


class MethodNotAllowed(BadRequest):
    """The path is known, the method is not."""

    status = 405


class Conflict(BadRequest):
    """It contradicts what is there or under way. Clients send a 409 again unless they are told not to."""

    status = 409
    headers: ClassVar[dict[str, str]] = {"x-should-retry": "false"}


class BodyTooLarge(BadRequest):
    """More bytes than `max_body_bytes`, or more values than are parsed at once."""

    status = 413
    default_code = "request_too_large"


class HeadTooLarge(BadRequest):
    """A request line and headers without end."""

    status = 431
    default_code = "request_too_large"


class WrongContentType(BadRequest):
    """A body that is not JSON, or is encoded."""

    status = 415


class RateLimited(RequestError):
    """Too many requests wait already. `retry-after` says in how many seconds they will have started."""

    status = 429
    type = "rate_limit_error"
    default_code = "rate_limit_exceeded"
    headers: ClassVar[dict[str, str]] = {"retry-after": "1", "x-should-retry": "true"}

    def __init__(
        self, message: str, *, param: str | None = None, code: str | None = None, retry_after: int = 1
    ) -> None:
        super().__init__(message, param=param, code=code)
        self.retry_after = retry_after

    def sent_headers(self) -> dict[str, str]:
        """With the seconds of this one."""
        return self.headers | {"retry-after": str(self.retry_after)}


class EngineFault(RequestError):
    """A fault of the engine's own. Sending the request again would meet it again."""

    default_code = "engine_error"
    headers: ClassVar[dict[str, str]] = {"x-should-retry": "false"}


class DeadlinePassed(RequestError):
    """The request took longer than its `timeout_s`."""

    status = 408
    type = "timeout_error"
    default_code = "request_timeout"
    headers: ClassVar[dict[str, str]] = {"x-should-retry": "false"}


class Unavailable(RequestError):
    """Nothing can be served now; later perhaps."""

    status = 503
    default_code = "not_ready"
    headers: ClassVar[dict[str, str]] = {"retry-after": "1", "x-should-retry": "true"}
