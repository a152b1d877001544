"""GET /v1/models: what is served, under every name it answers to."""

from toka.api.exchange import Endpoint, Exchange
from toka.api.schemas import ModelCard, ModelList
from toka.api.service import Service


class Models(Endpoint):
    """The list, or one of it where the path names it. Ids may contain slashes."""

    def __init__(self, service: Service) -> None:
        self.service = service

    async def serve(self, exchange: Exchange) -> None:
        """Answer, or raise ModelNotFound."""
        asked: str | None = exchange.scope["path_params"].get("id")
        if asked is not None:
            await exchange.respond_json(self._card(self.service.model(asked)))
        else:
            await exchange.respond_json(ModelList(data=[self._card(name) for name in self.service.names]))

    def _card(self, name: str) -> ModelCard:
        return ModelCard(
            id=name,
            created=self.service.created,
            root=self.service.names[0],
            max_model_len=self.service.server.max_model_len or None,
        )
