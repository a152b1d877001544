"""The ASGI application: routes, request ids, and the last net under everything that goes wrong."""

import hashlib
import logging
from collections.abc import Sequence

import msgspec
from starlette.routing import Route, Router
from starlette.types import Receive, Scope, Send

from toka.api.bulk import Bulk
from toka.api.chat import Chat
from toka.api.completions import Completions
from toka.api.exchange import SCOPE_KEY, ClientGone, Exchange
from toka.api.health import Fixed, Health, Load, ServerInfo
from toka.api.models import Models
from toka.api.openapi import OpenApi
from toka.api.service import ChatTemplate, Service, Tokenizer, shown
from toka.api.tokenize import Detokenize, Tokenize, TokenizerInfo
from toka.config import Config
from toka.errors import EngineFault, NotFound, RequestError
from toka.request import Sampling, Server
from toka.version import VERSION

log = logging.getLogger("toka.api")

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
) -> "App":
    """The API of one engine.

    `template` is None for a model that cannot chat. The model answers to all of `model_names`; the first is its own.
    `created` is a Unix time. `defaults` is what requests leave open: OpenAI's values unless given.

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
        )
    )


def fingerprint(config: Config, version: str) -> str:
    """A short hash of everything that can change outputs."""
    options = {name: value for name, value in msgspec.structs.asdict(config).items() if name not in HARMLESS}
    return "fp_" + hashlib.sha256(msgspec.json.encode([version, options], order="sorted")).hexdigest()[:12]


class App:
    """Routes an HTTP request to its endpoint, and answers for an endpoint that raises."""

    def __init__(self, service: Service) -> None:
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
            ],
            redirect_slashes=False,
            default=not_found,
        )
        self._router.routes.append(Route("/openapi.json", OpenApi(service, self._router.routes)))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI."""
        if scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1000})
            return
        if scope["type"] != "http":
            await self._router(scope, receive, send)
            return
        path: str = scope["path"]
        if path.endswith("/"):
            scope = {**scope, "path": path.rstrip("/") or "/"}
        exchange = Exchange(scope, receive, send)
        try:
            await self._route(exchange)
        except ClientGone as when:
            log.debug("%r: the client hung up: %s", exchange, when)
            await exchange.disconnected()
        except Exception:
            log.exception("%r failed", exchange)
            if exchange.started:
                raise  # the server closes the connection: there is no other way to say it
            await exchange.fail(
                EngineFault(
                    f"The server met an error that it did not expect. It is logged as {exchange.request_id.decode()}."
                )
            )

    async def _route(self, exchange: Exchange) -> None:
        """Find the endpoint; what it refuses is answered here."""
        exchange.scope[SCOPE_KEY] = exchange
        try:
            await self._router(exchange.scope, exchange.receive, exchange.send)
        except RequestError as error:
            log.debug("%r: %d: %s", exchange, error.status, error)
            await exchange.fail(error)


async def not_found(scope: Scope, receive: Receive, send: Send) -> None:
    """Where no route leads."""
    exchange: Exchange = scope[SCOPE_KEY]
    raise NotFound(f"Unknown request URL: {exchange.method} {shown(exchange.path)}.")
