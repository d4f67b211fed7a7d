"""``/v1/models``, ``/health`` and ``/metrics``: what is served, whether it runs, and its figures.

Flows in: a name and a function giving figures. Flows out: OpenAI's model list, Prometheus text. Does not know
generation.
"""

import re
from collections.abc import Callable, Mapping
from typing import Any

from fastapi import APIRouter
from starlette.responses import JSONResponse, PlainTextResponse, Response

from skyrl_async.endpoint.requests.context import Serving

Statistics = Callable[[], Mapping[str, float]]
"""Figures by name, such as the client's ``statistics``."""


def make_router(serving: Serving, statistics: Statistics, created: int) -> APIRouter:
    """The surfaces around generation. ``created``: Unix seconds, told to clients as the model's."""
    router = APIRouter()
    model: dict[str, Any] = {
        "id": serving.model_name,
        "object": "model",
        "created": created,
        "owned_by": "skyrl_async",
        "max_model_len": serving.sampler.max_model_len,
    }

    @router.get("/v1/models")
    async def list_models() -> Response:
        return JSONResponse({"object": "list", "data": [model]})

    @router.get("/v1/models/{name:path}")
    async def retrieve_model(name: str) -> Response:
        serving.require_model(name)
        return JSONResponse(model)

    @router.get("/health")
    async def health() -> Response:
        return JSONResponse({"status": "ok"})

    @router.get("/metrics")
    async def metrics() -> Response:
        return PlainTextResponse(prometheus_text(statistics()), media_type="text/plain; version=0.0.4")

    return router


def prometheus_text(figures: Mapping[str, float]) -> str:
    """Figures as gauges ``skyrl_async_<name>`` in Prometheus' text format."""
    lines = []
    for name, value in figures.items():
        metric = "skyrl_async_" + re.sub(r"[^a-zA-Z0-9_]", "_", name)
        lines += [f"# TYPE {metric} gauge", f"{metric} {float(value)!r}"]
    return "\n".join(lines) + "\n"
