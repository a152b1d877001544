"""/metrics: what the engine counts, for Prometheus."""

import asyncio

from toka.api.exchange import Endpoint, Exchange
from toka.api.service import Service
from toka.metrics.page import CONTENT_TYPE, Page


class Scrape(Endpoint):
    """GET: the page."""

    def __init__(self, service: Service) -> None:
        self._page = Page(service.metrics)

    async def serve(self, exchange: Exchange) -> None:
        """Answer."""
        snapshot = self._page.take()
        body = await asyncio.to_thread(snapshot.render)
        await exchange.respond(200, body, ((b"content-type", CONTENT_TYPE.encode()),))
