"""Service: what the routes share - the engine, the tokenizer, and what is running."""

from __future__ import annotations

import asyncio
import time

from starlette.requests import Request

from specdec.errors import EngineStopped
from specdec.server.engine_client import EngineClient
from specdec.server.generation import Generation, prepare
from specdec.server.messages import Ready
from specdec.server.protocol import ChatBody, CompletionBody, ModelNotFound
from specdec.server.responses import Reply
from specdec.server.settings import ServerSettings
from specdec.tokenizer import Tokenizer


class Service:
    """What the routes share: the engine, the tokenizer once it is loaded, and what is running.

    Example: `Service(EngineClient(), "my-model", ServerSettings())`.
    """

    def __init__(
        self, engine: EngineClient, served_model_name: str, settings: ServerSettings
    ) -> None:
        self.engine = engine
        self.settings = settings
        self.served_model_name = served_model_name
        self.created = int(time.time())
        self.tokenizer: Tokenizer | None = None
        self.is_draining = False
        self.running: set[Generation] = set()

    def check_ready(self) -> Ready:
        """The engine's description; raises EngineStopped when requests cannot be served now."""
        if self.is_draining:
            raise EngineStopped("the server is shutting down")
        ready = self.engine.check_ready()
        if self.tokenizer is None:
            raise EngineStopped("the model is loading")
        return ready

    def check_model(self, name: str) -> None:
        """Raise ModelNotFound unless this is the served model."""
        if name != self.served_model_name:
            raise ModelNotFound(
                f"this server has no model {name[:100]!r}; it serves {self.served_model_name!r}",
                param="model",
            )

    async def generate(self, body: ChatBody | CompletionBody, reply: Reply) -> Generation:
        """Start the generation that a body asks for, accepted by the engine."""
        ready = self.check_ready()
        self.check_model(body.model)
        assert self.tokenizer is not None
        preparation = await asyncio.to_thread(
            prepare, body, reply_id=reply.id, tokenizer=self.tokenizer, ready=ready
        )
        self.check_ready()
        generation = Generation(self.engine, preparation, on_close=self.running.discard)
        self.running.add(generation)
        try:
            await generation.accepted()
        except BaseException:
            generation.close()
            raise
        return generation

    async def idle(self) -> None:
        """Wait until nothing runs."""
        while self.running:
            await asyncio.sleep(0.02)


def service_of(request: Request) -> Service:
    """The service of the application that a request came to."""
    service: Service = request.app.state.service
    return service
