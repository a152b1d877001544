"""GET /openapi.json: every route with what it takes and answers, made from the structs that bodies are checked with."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import msgspec
from msgspec import Struct
from starlette.routing import BaseRoute, Route

from toka.api.components import STRING, TEXT, Json, array, components, either, record, ref
from toka.api.exchange import Endpoint, Exchange
from toka.api.idempotency import MAX_KEY
from toka.api.keys import OPEN
from toka.api.schemas import (
    ChatBody,
    ChatCompletion,
    ChatCompletionChunk,
    CompletionBody,
    ErrorBody,
    ModelCard,
    ModelList,
    TextCompletion,
    TextCompletionChunk,
)
from toka.api.service import Service
from toka.api.tokenize import DetokenizeBody, TokenizeBody, Tokens
from toka.errors import (
    BadRequest,
    BodyTooLarge,
    Conflict,
    DeadlinePassed,
    EngineFault,
    InvalidApiKey,
    ModelNotFound,
    RateLimited,
    RequestError,
    Unavailable,
    WrongContentType,
)

READING = (BadRequest, BodyTooLarge, WrongContentType, ModelNotFound, EngineFault, Unavailable)
"""What may go wrong where there is a body."""
GENERATING = (*READING, Conflict, DeadlinePassed, RateLimited)


@dataclass(frozen=True, slots=True)
class Operation:
    """What a route does, whatever its methods are."""

    summary: str
    answer: Json | None
    """The body of a 200; None: it is empty."""
    body: Json | None = None
    """Of a POST."""
    events: type[Struct] | None = None
    """What each event of a stream holds, where a stream may be asked for."""
    refusals: tuple[type[RequestError], ...] = (EngineFault,)
    plain: bool = False
    """The answer is text, not JSON."""


CHATS = array({"allOf": [ref(ChatBody), {"properties": {"stream": {"enum": [False, None]}}}]}, 1)
"""The requests of a bulk body: none of them is streamed."""
BULK = Operation(
    "Many chats in one body, answered together and in order",
    array(ref(ChatCompletion), 1),
    either(CHATS, record(requests=CHATS) | {"additionalProperties": False}),
    refusals=GENERATING,
)
HEALTH = Operation("Whether a request would start now", None, refusals=(EngineFault, Unavailable))

OPERATIONS = {
    "/v1/chat/completions": Operation(
        "The assistant's next message", ref(ChatCompletion), ref(ChatBody), ChatCompletionChunk, GENERATING
    ),
    "/v1/completions": Operation(
        "What follows a prompt", ref(TextCompletion), ref(CompletionBody), TextCompletionChunk, GENERATING
    ),
    "/v1/chat/completions/batch": BULK,
    "/custom/synchronous-batch-completions": BULK,
    "/v1/models": Operation("The model, under each of its names", ref(ModelList)),
    "/v1/models/{id}": Operation(
        "The model, by one of its names", ref(ModelCard), refusals=(ModelNotFound, EngineFault)
    ),
    "/tokenize": Operation("The ids of a text or a chat", ref(Tokens), ref(TokenizeBody), refusals=READING),
    "/detokenize": Operation("The text of ids", record(prompt=STRING), ref(DetokenizeBody), refusals=READING),
    "/tokenizer_info": Operation("The tokenizer's settings and the chat template", record(tokenizer_class=STRING)),
    "/load": Operation("Requests that are open", record(server_load={"type": "integer"})),
    "/health": HEALTH,
    "/ready": HEALTH,
    "/version": Operation("The version", record(version=STRING)),
    "/ping": Operation("A sign of life", record(message={"const": "pong"})),
    "/server_info": Operation("The version, the options and the engine's figures", record(version=STRING)),
    "/metrics": Operation("What the server counts, for Prometheus", STRING, plain=True),
    "/openapi.json": Operation("This document", record(openapi=STRING)),
}
"""By the path of the route."""

REQUEST_ID = {"x-request-id": {"description": "The request's own, or a new one", "required": True, "schema": STRING}}


class OpenApi(Endpoint):
    """The document, made when it is first asked for."""

    def __init__(self, service: Service, routes: Sequence[BaseRoute]) -> None:
        """`routes` is read when the document is made."""
        self._service = service
        self._routes = routes
        self._document: bytes | None = None

    async def serve(self, exchange: Exchange) -> None:
        """Answer."""
        if self._document is None:
            self._document = msgspec.json.encode(document(self._service, self._routes))
        await exchange.respond(200, self._document)


def document(service: Service, routes: Sequence[BaseRoute]) -> Json:
    """OpenAPI 3.1. Raises KeyError for a route that OPERATIONS lacks."""
    told: list[type[Struct]] = [ChatCompletion, TextCompletion, ModelList, ModelCard, Tokens, ErrorBody]
    return {
        "openapi": "3.1.0",
        "info": {"title": "toka", "version": service.version, "license": {"name": "Apache-2.0"}},
        # A key, or nothing: which of the two is the server's to say.
        "security": [{"key": []}, {}],
        "paths": {route.path_format: path(route, service.names[0]) for route in routes if isinstance(route, Route)},
        "components": {
            "schemas": components(service, [*told, ChatCompletionChunk, TextCompletionChunk]),
            "responses": refusals(),
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer", "description": "An API key"}},
        },
    }


def path(route: Route, model: str) -> Json:
    """All methods of a route. `model` is an example of what its path may name."""
    endpoint = route.endpoint
    assert isinstance(endpoint, Endpoint)
    operation = OPERATIONS[route.path_format]
    name = route.path_format.strip("/").translate(str.maketrans("/.-", "___", "{}"))
    parameters: list[Json] = [{"name": "x-request-id", "in": "header", "schema": STRING}]
    if Conflict in operation.refusals:
        parameters.append({"name": "idempotency-key", "in": "header", "schema": STRING | {"maxLength": MAX_KEY}})
    parameters += [
        {"name": one, "in": "path", "required": True, "schema": TEXT, "example": model}
        for one in route.param_convertors
    ]
    body = {} if operation.body is None else {"requestBody": {"required": True, "content": as_json(operation.body)}}
    methods: Json = {
        method.lower(): {
            "operationId": f"{method.lower()}_{name}",
            "summary": operation.summary,
            "responses": dict(responses(operation, method, route.path_format)),
        }
        | ({"security": [{}]} if route.path_format in OPEN else {})
        | body
        for method in endpoint.methods
    }
    return {"parameters": parameters, **methods}


def responses(operation: Operation, method: str, path: str) -> Iterator[tuple[str, Json]]:
    """Every status of an operation, and what comes with it: to HEAD no body."""
    refusals: tuple[type[RequestError], ...] = operation.refusals
    if path not in OPEN:
        refusals = (*refusals, InvalidApiKey)
    empty = method == "HEAD"
    content: Json = {}
    if operation.answer is not None and not empty:
        content = {"text/plain": {"schema": operation.answer}} if operation.plain else as_json(operation.answer)
    if operation.events is not None:
        content["text/event-stream"] = {"schema": event(operation.events)}
    yield "200", {"description": "OK", "headers": REQUEST_ID} | ({"content": content} if content else {})
    for status in sorted({error.status for error in refusals}):
        named = {"$ref": f"#/components/responses/{status}"}
        yield str(status), {"description": "Refused", "headers": REQUEST_ID} if empty else named


def event(chunk: type[Struct]) -> Json:
    """The schema of each event: a chunk, an error if the stream breaks, and a mark at the end."""
    told = {
        "type": "string",
        "contentMediaType": "application/json",
        "contentSchema": either(ref(chunk), ref(ErrorBody)),
    }
    return record(data=either({"const": "[DONE]"}, told))


def refusals() -> Json:
    """What a refusal looks like, by its status."""
    known: dict[int, type[RequestError]] = {InvalidApiKey.status: InvalidApiKey}
    known |= {error.status: error for operation in OPERATIONS.values() for error in operation.refusals}
    return {
        str(status): {
            "description": (error.__doc__ or "").partition("\n")[0],
            "headers": REQUEST_ID | {name: {"schema": STRING} for name in error.headers},
            "content": as_json(ref(ErrorBody)),
        }
        for status, error in sorted(known.items())
    }


def as_json(schema: Json) -> Json:
    """A body that is JSON."""
    return {"application/json": {"schema": schema}}
