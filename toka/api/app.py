"""The ASGI application: routes, request ids, and the last net under everything that goes wrong."""

import hashlib
import logging
import time
from collections.abc import Sequence

import msgspec
from starlette.routing import Route, Router
from starlette.types import ASGIApp, Receive, Scope, Send

from toka.api.bulk import Bulk
from toka.api.chat import Chat
from toka.api.completions import Completions
from toka.api.cors import Cors
from toka.api.exchange import SCOPE_KEY, ClientGone, Exchange, GoneEarly
from toka.api.generate import Generate
from toka.api.health import Fixed, Health, Load, ServerInfo
from toka.api.keys import Keys
from toka.api.metrics import Scrape
from toka.api.models import Models
from toka.api.openapi import OpenApi
from toka.api.service import ChatTemplate, Service, Tokenizer, shown
from toka.api.tokenize import Detokenize, Tokenize, TokenizerInfo
from toka.config import Config
from toka.errors import EngineFault, NotFound, RequestError
from toka.metrics.record import Metrics
from toka.request import Sampling, Server
from toka.version import VERSION

log = logging.getLogger("toka.api")

CLOSED = 499
"""What the metrics call the status of an answer that nobody waited for."""
MODEL_PATH = "/v1/models/{id}"

HARMLESS = frozenset(
    {
        "look_ahead",
        "spec_allocation_target_kv_cache_utilization",
        "track_early_stopping",
        "use_spec_allocation",
        "served_model_name",
        "kv_cache_num_tokens",
        "gpu_memory_utilization",
        "max_seqs_per_forward",
        "max_tokens_per_forward",
        "page_size",
        "host",
        "port",
        "workers",
        "control",
        "worker_ports",
        "worker_timeout",
        "max_n",
        "max_logprobs",
        "max_body_bytes",
        "log_level",
        "log_format",
        "stats_report_seconds",
        "statsd_addr",
        "metrics_compat",
        "uds",
        "tls_cert",
        "tls_key",
        "api_key",
        "api_key_file",
        "allow_unauthenticated",
        "metrics_without_key",
        "cache_isolation",
        "cors_origins",
        "max_waiting_requests",
        "max_waiting_tokens",
        "stream_interval",
        "trust_request_chat_template",
    }
)
"""Options that do not change what a request is answered. All others are part of the fingerprint."""


def create_app(
    config: Config,
    server: Server,
    tokenizer: Tokenizer,
    template: ChatTemplate | None,
    model_names: Sequence[str],
    created: int,
    defaults: Sampling | None = None,
    keys: Keys | None = None,
    metrics: Metrics | None = None,
) -> "App":
    """The API of one engine.

    `template` is None for a model that cannot chat. The model answers to all of `model_names`; the first is its own.
    `created` is a Unix time. `defaults` is what requests leave open: OpenAI's values unless given.
    `keys` are those of `config` unless given. Raises ConfigError if they cannot be read. `metrics` are the engine's.

    It relies on no more than ASGI (`toka.serve` runs it under uvicorn); a `send` that returns at once while the client
    keeps up makes streams cheap.
    """
    return App(
        Service(
            config=config,
            server=server,
            tokenizer=tokenizer,
            template=template,
            names=tuple(model_names),
            created=created,
            version=VERSION,
            fingerprint=fingerprint(config, VERSION),
            defaults=defaults or Sampling(),
            metrics=metrics or Metrics(config, model_names[0]),
        ),
        Keys.load(config) if keys is None else keys,
    )


def fingerprint(config: Config, version: str) -> str:
    """A short hash of everything that can change outputs."""
    options = {name: value for name, value in msgspec.structs.asdict(config).items() if name not in HARMLESS}
    return "fp_" + hashlib.sha256(msgspec.json.encode([version, options], order="sorted")).hexdigest()[:12]


class App:
    """Routes an HTTP request to its endpoint, and answers for an endpoint that raises."""

    def __init__(self, service: Service, keys: Keys) -> None:
        self._keys = keys
        self._metrics = service.metrics
        origins = service.config.cors_origins
        self._entry: ASGIApp = self._answer if origins is None else Cors(self._answer, origins)
        models = Models(service)
        health = Health(service)
        chat = Chat(service)
        bulk = Bulk(chat)
        self._router = Router(
            [
                Route("/v1/chat/completions", chat),
                Route("/v1/completions", Completions(service)),
                Route("/v1/chat/completions/batch", bulk),
                Route("/custom/synchronous-batch-completions", bulk),
                Route("/v1/models", models),
                Route("/v1/models/{id:path}", models),
                Route("/tokenize", Tokenize(service, chat)),
                Route("/detokenize", Detokenize(service)),
                Route("/tokenizer_info", TokenizerInfo(service)),
                Route("/load", Load(service)),
                Route("/health", health),
                Route("/ready", health),
                Route("/version", Fixed({"version": service.version})),
                Route("/ping", Fixed({"message": "pong"})),
                Route("/server_info", ServerInfo(service)),
                Route("/metrics", Scrape(service)),
            ],
            redirect_slashes=False,
            default=not_found,
        )
        self._router.routes.append(Route("/openapi.json", OpenApi(service, self._router.routes)))
        self._paths = {route.path for route in self._router.routes if isinstance(route, Route)}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI."""
        if scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1000})
            return
        if scope["type"] != "http":
            await self._router(scope, receive, send)
            return
        await self._entry(scope, receive, send)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One exchange, from its path to its line in the log."""
        path: str = scope["path"]
        if path.endswith("/"):
            scope = {**scope, "path": path.rstrip("/") or "/"}
        exchange = Exchange(scope, receive, send)
        began = time.monotonic()
        try:
            await self._route(exchange)
        except ClientGone as when:
            log.debug("%r: the client hung up: %s", exchange, when, extra=exchange.labels)
            if isinstance(when, GoneEarly) and isinstance(endpoint_of(exchange), Generate | Bulk):
                self._metrics.abandoned()
            await exchange.disconnected()
        except Exception:
            log.exception("%r failed", exchange, extra=exchange.labels)
            if exchange.started:
                raise  # the server closes the connection: there is no other way to say it
            await exchange.fail(
                EngineFault(
                    f"The server met an error that it did not expect. It is logged as {exchange.request_id.decode()}."
                )
            )
        finally:
            self._metrics.answered(self._label(exchange), str(exchange.status or CLOSED), rejection(exchange.error))
            if log.isEnabledFor(logging.DEBUG):
                seconds = time.monotonic() - began
                more = {"method": exchange.method, "path": shown(exchange.path), "status": exchange.status or None}
                said = exchange.status or "not answered"
                log.debug(
                    "%r: %s, %.4f s", exchange, said, seconds, extra=exchange.labels | more | {"seconds": seconds}
                )

    def _label(self, exchange: Exchange) -> str:
        """The route of an exchange, for the metrics, which must not have a label for whatever a client writes."""
        path: str = exchange.scope["path"]
        if path in self._paths:
            return path
        return MODEL_PATH if path.startswith("/v1/models/") else "other"

    async def _route(self, exchange: Exchange) -> None:
        """Find the endpoint; what it refuses is answered here."""
        exchange.scope[SCOPE_KEY] = exchange
        try:
            exchange.tenant = self._keys.tenant(exchange)
            await self._router(exchange.scope, exchange.receive, exchange.send)
        except RequestError as error:
            # Its message may repeat what the client wrote, which no log does.
            log.debug("%r: refused: %s", exchange, error.code or error.type, extra=exchange.labels)
            await exchange.fail(error)


def endpoint_of(exchange: Exchange) -> object:
    """What the router has found for it; None: nothing."""
    return exchange.scope.get("endpoint")


def rejection(error: RequestError | None) -> str | None:
    """Why a request was not let in, if it was fit to be served or might have been: too much, too long, too early, or
    from nobody known."""
    if error is None:
        return None
    let_in = error.status not in (401, 403, 413, 429, 503) and error.code != "context_length_exceeded"
    return None if let_in else error.code or error.type


async def not_found(scope: Scope, receive: Receive, send: Send) -> None:
    """Where no route leads."""
    exchange: Exchange = scope[SCOPE_KEY]
    raise NotFound(f"Unknown request URL: {exchange.method} {shown(exchange.path)}.")
