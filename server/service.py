"""Service: what the routes share - the engine, the tokenizer, and what is running."""

from __future__ import annotations

import asyncio
import time
from functools import partial

from msgspec.structs import replace
from starlette.requests import Request

from specdec.errors import EngineStopped, SpecdecError
from specdec.server.admission import Admission
from specdec.server.caller import Caller
from specdec.server.deadlines import Deadlines
from specdec.server.engine_totals import EngineTotals
from specdec.server.generation import Generation, Preparation, prepare
from specdec.server.load_metrics import LoadMetrics
from specdec.server.messages import Output, Ready
from specdec.server.prometheus import PrometheusText
from specdec.server.protocol import ChatBody, CompletionBody, ModelNotFound
from specdec.server.responses import Reply
from specdec.server.settings import ServerSettings
from specdec.server.shadow import Shadow
from specdec.server.supervisor import Supervisor
from specdec.server.templates import RenderedChat, TemplatePool
from specdec.server.waits import Waits
from specdec.tokenizer import Tokenizer


class Service:
    """What the routes share: the engine, the tokenizer once it is loaded, and what is running.

    Example: `Service(Supervisor(), "my-model", ServerSettings())`.
    """

    def __init__(
        self, engine: Supervisor, served_model_name: str, settings: ServerSettings
    ) -> None:
        self.engine = engine
        self.settings = settings
        self.served_model_name = served_model_name
        self.created = int(time.time())
        self.tokenizer: Tokenizer | None = None
        self.templates: TemplatePool | None = None  # with the tokenizer
        self.is_draining = False
        self.running: dict[Generation, Deadlines] = {}
        self.admission = Admission(settings.max_queued_requests, settings.max_queued_tokens)
        self.load, self.waits = LoadMetrics(), Waits()
        engine.observer = self
        self.totals = EngineTotals(engine)
        self.shadow: Shadow | None = None
        if settings.shadow:
            self.shadow = Shadow(engine, settings.shadow, is_idle=lambda: self.is_idle)
        self.prometheus = PrometheusText(served_model_name, self.load, self.totals, self.shadow)

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

    @property
    def is_idle(self) -> bool:
        """Whether no request is with the engine or on its way to it, nor is the server to end."""
        return self.engine.is_idle and not (self.admission.num_requests or self.is_draining)

    def take(self, output: Output) -> None:
        """An output has arrived from the engine."""
        self.load.take(output)
        self.waits.take(output)
        if self.shadow is not None:
            self.shadow.take(output)

    def abort(self, request_id: str) -> None:
        """A request is over before its end."""
        self.load.abort(request_id)
        self.waits.abort(request_id)
        if self.shadow is not None:
            self.shadow.abort(request_id)

    async def generate(
        self, body: ChatBody | CompletionBody, reply: Reply, caller: Caller
    ) -> Generation:
        """Start the generation that a body asks for, accepted by the engine.

        Raises Overloaded when too much waits already, EngineStopped when nothing is served now.
        """
        arrived_at, clock = time.perf_counter(), asyncio.get_running_loop().time()
        ready = self.check_ready()
        self.check_model(body.model)
        place = self.admission.enter(body.num_choices)
        if self.shadow is not None:
            self.shadow.interrupt()
        try:
            preparation = await self._prepare(body, reply, caller, ready)
            prompts = preparation.submits[:: preparation.num_choices]
            place.hold(len(preparation.submits), [len(submit.prompt_ids) for submit in prompts])
            self.check_ready()
            generation = Generation(self.engine, preparation, on_close=self._close)
        except BaseException:
            place.leave()
            raise
        deadlines = Deadlines(self.settings, clock, fail=partial(self._fail, generation))
        self.running[generation] = deadlines
        caller.generation = generation
        self.load.begin(preparation.submits, arrived_at)
        self.waits.begin(preparation, place, deadlines)
        if self.shadow is not None:
            self.shadow.begin(preparation.submits, reply.shown_id)
        if not preparation.submits:
            place.leave()  # it waits for nothing
        try:
            await generation.accepted()
        except BaseException:
            generation.close()
            raise
        return generation

    async def render(self, body: ChatBody) -> RenderedChat:
        """The text of a chat's prompt, through the model's template; raises InvalidRequest."""
        assert self.templates is not None
        return await self.templates.render(
            body.template_messages(),
            body.template_variables(),
            add_generation_prompt=body.add_generation_prompt is not False,
            continue_final_message=bool(body.continue_final_message),
            chat_template=body.chat_template,
        )

    async def _prepare(
        self, body: ChatBody | CompletionBody, reply: Reply, caller: Caller, ready: Ready
    ) -> Preparation:
        """Render and tokenise a body; what is cached for one tenant is found by no other."""
        assert self.tokenizer is not None
        chat = await self.render(body) if isinstance(body, ChatBody) else None
        return await asyncio.to_thread(
            prepare,
            replace(body, cache_salt=caller.salted(body.cache_salt or "")),
            reply_id=reply.id,
            tokenizer=self.tokenizer,
            ready=ready,
            chat=chat,
        )

    def _fail(self, generation: Generation, error: SpecdecError) -> None:
        """End a generation with an error, and the engine's work on it at once."""
        generation.fail(error)
        for submit in generation.preparation.submits:
            self.engine.abort(submit.request_id)

    def _close(self, generation: Generation) -> None:
        deadlines = self.running.pop(generation, None)
        if deadlines is not None:
            deadlines.close()

    async def idle(self) -> None:
        """Wait until nothing runs."""
        while self.running:
            await asyncio.sleep(0.02)


def service_of(request: Request) -> Service:
    """The service of the application that a request came to."""
    service: Service = request.app.state.service
    return service
