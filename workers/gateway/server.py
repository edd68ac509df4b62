"""The gateway process: HTTP routes on the inherited socket, in front of a dispatcher.

Every error leaves in OpenAI's shape; what a route does is in generation.py and metrics.py.
"""

import asyncio
import logging
import socket
import time

from fastapi import FastAPI, Request, Response
from starlette.exceptions import HTTPException

from workers.environment import WorkerEnvironment
from workers.gateway.admission import Admission, Limits
from workers.gateway.bodies import Bodies, give_memory_back
from workers.gateway.chat_requests import ChatRequest
from workers.gateway.dispatcher import Dispatcher
from workers.gateway.errors import ApiError, broken, json_response
from workers.gateway.generation import Generation
from workers.gateway.limits import ApiLimits
from workers.gateway.listener import Listener
from workers.gateway.metrics import Metrics
from workers.gateway.origins import Origins
from workers.gateway.requests import CompletionRequest
from workers.gateway.responses import ClientGone
from workers.models import LoadedModel
from workers.policy import NoRoute
from workers.wire.frames import Counters

log = logging.getLogger(__name__)

# A gateway that cannot reach its workers for so long says so instead of staying silent: their start, and ten round
# trips of the longest path for theirs and its own handshakes.
CONNECT_S, CONNECT_ROUND_TRIPS = 60.0, 10


class Gateway:
    """A dispatcher and the HTTP server in front of it."""

    def __init__(self, environment: WorkerEnvironment, loaded: LoadedModel) -> None:
        serving = environment.serving
        self.dispatcher = Dispatcher(environment, loaded)
        self.admission = Admission(Limits(serving.max_running, serving.max_waiting))
        self._drain_s = serving.drain_ns / 1e9
        self._wait_for_workers = not environment.restarted
        self._listener = Listener(build_app(self.dispatcher, self.admission, environment.api), environment.api)
        self._serving = False

    @property
    def counters(self) -> Counters:
        return self.dispatcher.peers.local.counters

    async def start(self, listener: socket.socket) -> None:
        """Connect to the workers, then serve HTTP on `listener`. Raises NoRoute when no pipeline is complete.

        One that was started anew does not wait for all of them: its clients wait already, and some may be dead.
        """
        give_memory_back()
        await self.dispatcher.start()
        if self._wait_for_workers:
            await self._until_routable()
        self._listener.start(listener)
        self._serving = True

    async def close(self) -> None:
        """Refuse new requests, let those under way end (at most `serving.drain`), close every connection."""
        self.admission.drain()
        if self._serving:
            try:
                async with asyncio.timeout(self._drain_s):
                    await self.admission.idle()
            except TimeoutError:
                log.warning("%d requests were not finished within %.0f s", self.admission.running, self._drain_s)
                self.admission.abandon()
            await self._listener.close()
        await self.dispatcher.close()

    async def _until_routable(self) -> None:
        clock = asyncio.get_running_loop().time
        began = clock()
        while True:
            try:
                self.dispatcher.route_now()
                return
            except NoRoute:
                paths = [peer.path for peer in self.dispatcher.peers.known.values()]
                trip_s = max((path.rtt_s + path.queue_s for path in paths), default=0.0)
                if clock() > began + CONNECT_S + CONNECT_ROUND_TRIPS * trip_s:
                    raise
                await asyncio.sleep(0.02)


def build_app(dispatcher: Dispatcher, admission: Admission, limits: ApiLimits) -> FastAPI:
    """The application in front of `dispatcher`."""
    app = FastAPI(title="pddbed gateway", docs_url=None, redoc_url=None, openapi_url=None)
    loaded = dispatcher.loaded
    model_id = loaded.config.name  # a path would mean something on one machine only
    generation = Generation(dispatcher, admission, model_id, limits)
    metrics_of = Metrics(dispatcher, admission)
    bodies = Bodies(limits)
    card = {
        "id": model_id,
        "object": "model",
        "created": int(time.time()),
        "owned_by": "pddbed",
        "max_model_len": loaded.config.context_length,
        "default_sampling_params": loaded.defaults.given,
    }
    if loaded.defaults.told:
        log.info("generation_config.json of %s: %s", model_id, loaded.defaults.told)

    app.add_middleware(Origins, names=limits.names)

    @app.post("/v1/completions")
    async def completions(request: Request) -> Response:
        return await generation.completion(request, await bodies.parsed(CompletionRequest, request))

    @app.post("/v1/chat/completions")
    async def chat_completions(request: Request) -> Response:
        return await generation.chat(request, await bodies.parsed(ChatRequest, request))

    @app.get("/v1/models")
    async def models() -> Response:
        return json_response(200, {"object": "list", "data": [card]})

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> Response:
        if name != model_id:
            raise ApiError(404, f"the model {name[:200]!r} does not exist here", param="model", code="model_not_found")
        return json_response(200, card)

    @app.get("/health")
    async def health() -> Response:
        if admission.draining:
            waiting_for = admission.running + admission.waiting
            return json_response(503, {"status": "draining", "reason": f"{waiting_for} requests are being finished"})
        try:
            route = dispatcher.route_now()
        except NoRoute as error:
            return json_response(503, {"status": "unavailable", "reason": str(error)})
        return json_response(200, {"status": "ok", "pipeline": route.pipeline, "workers": list(route.workers)})

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(metrics_of.render(), media_type="text/plain; version=0.0.4")

    @app.exception_handler(ApiError)
    async def api_error(_: Request, error: ApiError) -> Response:
        return json_response(error.status, error.body(), error.headers)

    @app.exception_handler(ClientGone)
    async def client_gone(_: Request, error: ClientGone) -> Response:
        return Response(status_code=499)  # nginx's number; nobody is there to read it

    @app.exception_handler(HTTPException)
    async def http_error(request: Request, error: HTTPException) -> Response:
        message = f"{request.method} {request.url.path[:500]}: {error.detail}"
        return json_response(error.status_code, ApiError(error.status_code, message).body(), error.headers)

    @app.exception_handler(Exception)
    async def own_fault(_: Request, error: Exception) -> Response:
        return json_response(500, broken(error).body())

    return app
