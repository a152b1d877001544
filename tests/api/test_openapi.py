"""GET /openapi.json says what the server does: no route, method, field, bound or answer more or less."""

import itertools
import json
from collections.abc import Iterator
from random import Random
from typing import Any

import jsonschema_rs
import pytest
from starlette.routing import Route

from tests.api.fakes import Answer, FakeServer, call
from tests.api.mutate import mutate
from tests.api.test_fuzz import FITTING, VALID
from toka.api.app import App
from toka.api.fields import IGNORED, UNSERVED_CHAT, UNSERVED_COMPLETION
from toka.api.schemas import ChatBody, CompletionBody
from toka.api.tokenize import DetokenizeBody, TokenizeBody
from toka.errors import EngineFault

Json = dict[str, Any]

METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE")
HI = [{"role": "user", "content": "Hi"}]
BODIES: dict[str, tuple[str, Json]] = {
    "ChatBody": ("/v1/chat/completions", {"messages": HI}),
    "CompletionBody": ("/v1/completions", {"prompt": "Hi"}),
    "TokenizeBody": ("/tokenize", {"prompt": "Hi"}),
    "DetokenizeBody": ("/detokenize", {"tokens": [72]}),
}
"""A valid body of each kind, and where it goes."""
NAMES = {
    *ChatBody.__struct_fields__,
    *CompletionBody.__struct_fields__,
    *TokenizeBody.__struct_fields__,
    *DetokenizeBody.__struct_fields__,
    *UNSERVED_CHAT,
    *UNSERVED_COMPLETION,
    *IGNORED,
    *("chat_template", "extra_body", "requests", "inputs", "input", "max_length", "do_sample", "stopp"),
}
"""Every name that some body knows, and some that none does."""
COUPLED = {
    *("add_generation_prompt", "best_of", "chat_template_kwargs", "continue_final_message", "logit_bias"),
    *("max_completion_tokens", "max_tokens", "messages", "min_tokens", "prompt_logprobs", "reasoning_effort"),
    *("logprobs_format", "stream_options", "tools", "top_logprobs"),
}
"""Fields whose value is refused unless another one, the template or the vocabulary fits it."""


@pytest.fixture
async def document(app: App) -> Json:
    answer = await call(app, "GET", "/openapi.json")
    assert answer.status == 200
    found: Json = answer.json
    return found


def fields(document: Json, name: str) -> Json:
    """The fields of a component."""
    found: Json = document["components"]["schemas"][name]["properties"]
    return found


def conforms(document: Json, name: str, value: object) -> None:
    """Raises jsonschema_rs.ValidationError if a value is not of this component."""
    schema = {"$ref": f"#/components/schemas/{name}", "components": document["components"]}
    jsonschema_rs.Draft202012Validator(schema).validate(value)


async def send(app: App, name: str, **changes: object) -> Answer:
    """The answer to a valid body with changes."""
    path, body = BODIES[name]
    if name == "TokenizeBody" and changes.get("messages"):
        body = {}  # it is either of the two
    return await call(app, "POST", path, body | changes)


async def test_the_document_is_openapi(document: Json) -> None:
    """Version 3.1, every reference leads somewhere, every schema is one, ids of operations differ."""
    assert document["openapi"].startswith("3.1.")
    for name in document["components"]["schemas"]:
        jsonschema_rs.meta.validate(document["components"]["schemas"][name])
    for reference in set(references(document)):
        at: Any = document
        for step in reference.removeprefix("#/").split("/"):
            at = at[step]
    operations = [
        one["operationId"] for path in document["paths"].values() for key, one in path.items() if key != "parameters"
    ]
    assert len(set(operations)) == len(operations)


def references(value: object) -> Iterator[str]:
    """Every $ref in a document."""
    if isinstance(value, dict):
        if "$ref" in value:
            yield value["$ref"]
        value = list(value.values())
    if isinstance(value, list):
        for one in value:
            yield from references(one)


async def test_a_parameter_is_listed_once(document: Json) -> None:
    """OpenAPI forbids two parameters of one name and place, and generators of clients refuse such a document."""
    for item in document["paths"].values():
        places = [(one["in"], one["name"]) for one in item["parameters"]]
        assert len(places) == len(set(places))


async def test_every_route_and_method_is_in_the_document(app: App, document: Json) -> None:
    """The routes are those of the application, and 405 answers exactly the methods that the document lacks."""
    assert list(document["paths"]) == [route.path_format for route in app._router.routes if isinstance(route, Route)]
    for path, item in document["paths"].items():
        for method in METHODS:
            status = (await call(app, method, path.format(id="tiny"))).status
            assert (status != 405) == (method.lower() in item), (method, path)


@pytest.mark.parametrize("name", list(BODIES))
async def test_fields_that_are_accepted_are_those_of_the_document(app: App, document: Json, name: str) -> None:
    """Null is absent for each of them, and every other name is unknown."""
    told = fields(document, name)
    required = document["components"]["schemas"][name].get("required", [])
    assert document["components"]["schemas"][name]["additionalProperties"] is False
    for field in NAMES | told.keys():
        if field in BODIES[name][1]:
            continue
        answer = await send(app, name, **{field: None})
        if field in told:
            assert field not in required
            assert answer.status == 200, (field, answer.content)
        else:
            assert answer.error["code"] == "unknown_parameter", field


async def test_stream_options_are_those_of_the_document(app: App, document: Json) -> None:
    """Objects in objects too."""
    told = fields(document, "StreamOptions")
    for field in {*told, "chunk_size"}:
        answer = await send(app, "ChatBody", stream=True, stream_options={field: None})
        assert (answer.status == 200) == (field in told)


def alternatives(schema: Json) -> list[Json]:
    """What a field may be, one by one."""
    return [inner for one in schema["anyOf"] for inner in alternatives(one)] if "anyOf" in schema else [schema]


EXAMPLES: Json = {"string": "x", "integer": 5, "array": [5], "object": {}, "message": HI[0]}


def edges(schema: Json) -> Iterator[tuple[object, bool]]:
    """Values at the edges of a schema, and whether they are still within."""
    kind = schema.get("type")
    for value in schema.get("enum", ()):
        yield value, True
    if "enum" in schema:
        yield ["no such value"], False
    if kind in ("integer", "number"):
        for bound, step in (("minimum", -1), ("maximum", 1)):
            if bound in schema:
                yield schema[bound], True
                yield schema[bound] + step, False
        if "exclusiveMinimum" in schema:
            yield schema["exclusiveMinimum"], False
    if kind == "string":
        for bound, step in (("minLength", -1), ("maxLength", 1)):
            if bound in schema:
                yield "x" * schema[bound], True
                yield "x" * (schema[bound] + step), False
    if kind == "array":
        item = EXAMPLES[alternatives(schema.get("items", {}))[0].get("type", "message")]
        for bound, step in (("minItems", -1), ("maxItems", 1)):
            if bound in schema:
                yield [item] * schema[bound], True
                yield [item] * (schema[bound] + step), False
        for value, good in edges(schema.get("items", {})):
            if not good:
                yield [value], False
    if kind == "object" and "maxProperties" in schema:
        most = schema["additionalProperties"]["maximum"]
        yield {"5": most, "6": -most}, True
        yield from (({"5": most + 1}, False), ({"5": -most - 1}, False), ({"x": 0}, False))


@pytest.mark.parametrize("name", list(BODIES))
async def test_bounds_and_enums_hold(app: App, document: Json, name: str) -> None:
    """At each bound a value is served, beyond it the field is named; and an object is no number."""
    for field, schema in fields(document, name).items():
        kinds = alternatives(schema)
        for value, good in itertools.chain.from_iterable(map(edges, kinds)):
            answer = await send(app, name, **{field: value})
            told = (field, value, answer.content)
            if not good:
                assert answer.status in (400, 404), told
                assert answer.error["param"].startswith(field), told
            elif answer.status == 400:
                assert field in COUPLED or answer.error["code"] == "context_length_exceeded", told
            else:
                assert answer.status == 200, told
        if all(kind.get("type", "object") != "object" for kind in kinds):
            answer = await send(app, name, **{field: {"a": {}}})
            assert (answer.status, answer.error["param"]) == (400, field)


async def test_bodies_are_served_if_they_fit_the_document_and_refused_if_not(app: App, document: Json) -> None:
    """Thousands of nearly valid ones: the document says of each what the server says."""
    random = Random(1)
    fits = {path: validator(document, item["post"]) for path, item in document["paths"].items() if "post" in item}
    served = 0
    for _ in range(3000):
        path, body = random.choice(VALID)
        raw = mutate(body, FITTING, random)
        answer = await call(app, "POST", path, raw)
        told = (path, raw[:2000], answer.content[:2000])
        if answer.status == 400 and "could not parse" in answer.error["message"]:
            continue
        if answer.status == 200:
            served += 1
            assert fits[path].is_valid(json.loads(raw)), told
        elif answer.error["code"] not in ("context_length_exceeded", "request_timeout"):
            path_of_fault = answer.error["param"] or ""
            coupled = path_of_fault.rpartition("].")[2] in COUPLED
            assert coupled or not fits[path].is_valid(json.loads(raw)), told
    assert served > 500


def validator(document: Json, operation: Json) -> jsonschema_rs.Draft202012Validator:
    """Of the bodies that an operation takes."""
    schema = operation["requestBody"]["content"]["application/json"]["schema"]
    return jsonschema_rs.Draft202012Validator({"allOf": [schema], "components": document["components"]})


ASKED: dict[str, Json] = {
    "nothing": {},
    "samples": {"n": 2, "temperature": 1, "return_token_ids": True},
    "usage": {"stream_options": {"include_usage": True}},
    "running usage": {"stream_options": {"include_usage": True, "continuous_usage_stats": True}},
    "log-probabilities": {"logprobs": 2},
    "packed log-probabilities": {"logprobs": 2, "logprobs_format": "packed"},
    "prompt log-probabilities": {"prompt_logprobs": 2},
    "packed prompt log-probabilities": {"prompt_logprobs": 2, "logprobs": 1, "logprobs_format": "packed"},
}


@pytest.mark.parametrize("asked", list(ASKED))
@pytest.mark.parametrize("name", ["ChatBody", "CompletionBody"])
@pytest.mark.parametrize("stream", [False, True])
async def test_answers_and_events_are_those_of_the_document(
    app: App, document: Json, name: str, asked: str, stream: bool
) -> None:
    """Whatever is asked for, and no field more."""
    body = dict(ASKED[asked])
    if name == "ChatBody" and "logprobs" in body:
        body |= {"logprobs": True, "top_logprobs": body["logprobs"]}
    if stream and "prompt_logprobs" in body:
        return
    if not stream:
        body.pop("stream_options", None)
    answer = await send(app, name, stream=stream, **body)
    assert answer.status == 200, answer.content
    kind = {"ChatBody": "ChatCompletion", "CompletionBody": "TextCompletion"}[name] + ("Chunk" if stream else "")
    strict = closed(document)
    for value in answer.events if stream else [answer.json]:
        conforms(strict, kind, value)


def closed(document: Json) -> Json:
    """The same with answers that have no field more."""
    schemas = document["components"]["schemas"]
    return document | {
        "components": {
            "schemas": {
                name: schema | ({"additionalProperties": False} if "properties" in schema else {})
                for name, schema in schemas.items()
            }
        }
    }


async def test_refusals_are_those_of_the_document(app: App, server: FakeServer, document: Json) -> None:
    """Before an answer begins, and where a stream breaks."""
    for body in (b"{", b"[]", b"{}", b'{"messages": []}'):
        conforms(closed(document), "ErrorBody", (await call(app, "POST", "/v1/chat/completions", body)).json)
    server.failure, server.break_at = EngineFault("broken"), 2
    conforms(closed(document), "ErrorBody", (await send(app, "ChatBody", stream=True)).events[-1])
