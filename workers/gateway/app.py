"""The HTTP routes. Every error leaves in OpenAI's shape; what a route does is in generation.py and metrics.py."""

import logging
import time
from collections.abc import Mapping

import msgspec
from fastapi import FastAPI, Request, Response
from starlette.exceptions import HTTPException

from workers.gateway.admission import Admission
from workers.gateway.bodies import Bodies
from workers.gateway.disconnect import ClientGone
from workers.gateway.dispatcher import Dispatcher
from workers.gateway.errors import ApiError, broken
from workers.gateway.generation import Generation
from workers.gateway.limits import ApiLimits
from workers.gateway.metrics import Metrics
from workers.gateway.origins import Origins
from workers.gateway.requests import ChatRequest, CompletionRequest
from workers.policy import NoRoute

log = logging.getLogger(__name__)


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


def json_response(status: int, body: object, headers: Mapping[str, str] | None = None) -> Response:
    return Response(msgspec.json.encode(body), status, headers, media_type="application/json")
