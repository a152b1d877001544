"""The small routes that tell how the server is: /health, /ready, /version, /ping, /load, /server_info."""

import asyncio

import msgspec
from msgspec import structs

from toka.api.exchange import Endpoint, Exchange
from toka.api.service import Service
from toka.errors import Unavailable


class Health(Endpoint):
    """/health and /ready: 200 with nothing in it, or 503 while a request would not start."""

    def __init__(self, service: Service) -> None:
        self.service = service

    async def serve(self, exchange: Exchange) -> None:
        """Answer, or raise Unavailable."""
        if not self.service.server.ready:
            draining = bool(self.service.server.info().get("draining"))
            raise Unavailable(
                "No request can start now: the model is loading, draining, or its workers are gone.",
                code="draining" if draining else None,
            )
        await exchange.respond(200, b"", ())


class Fixed(Endpoint):
    """The same object each time: /version and /ping."""

    def __init__(self, value: dict[str, str]) -> None:
        self._value = value

    async def serve(self, exchange: Exchange) -> None:
        """Answer."""
        await exchange.respond_json(self._value)


class Load(Endpoint):
    """/load: requests that are open, as vLLM calls them."""

    def __init__(self, service: Service) -> None:
        self.service = service

    async def serve(self, exchange: Exchange) -> None:
        """Answer."""
        await exchange.respond_json({"server_load": self.service.server.info()["requests_open"]})


class ServerInfo(Endpoint):
    """/server_info: the version, the names, the options, asyncio's tasks, and the engine's own
    figures beside them."""

    def __init__(self, service: Service) -> None:
        self.service = service

    async def serve(self, exchange: Exchange) -> None:
        """Answer."""
        service = self.service
        config = service.config
        if config.api_key is not None:
            config = structs.replace(config, api_key="…")
        info: dict[str, object] = {
            "version": service.version,
            "models": service.names,
            "ready": service.server.ready,
            "max_model_len": service.server.max_model_len,
            "vocab_size": service.tokenizer.vocab_size,
            "config": msgspec.to_builtins(config),
            "tasks": len(asyncio.all_tasks()),
        }
        await exchange.respond_json(info | service.server.info())
