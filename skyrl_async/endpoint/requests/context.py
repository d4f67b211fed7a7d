"""What the routes of one endpoint share, and how they answer.

Flows in: the parts of an endpoint. Flows out: one object that every surface is made with. Does not know wire formats.
"""

from dataclasses import dataclass

from skyrl_async.chat import ChatRenderer
from skyrl_async.endpoint.requests.errors import ApiError
from skyrl_async.endpoint.requests.request_handler import RequestHandler
from skyrl_async.endpoint.sessions.store import SessionStore
from skyrl_async.rollout.sampler import Sampler


@dataclass(frozen=True, slots=True, kw_only=True)
class Serving:
    """The parts of one endpoint."""

    sampler: Sampler
    renderer: ChatRenderer
    model_name: str
    sessions: SessionStore
    exchange: RequestHandler
    """Answers a request."""

    def require_model(self, name: str | None) -> None:
        """Raise ``ApiError`` 404 for a model that is not served; none is asked for by None."""
        if name in (None, self.model_name):
            return
        raise ApiError(
            404,
            f"model {name!r} is not served here; the model is {self.model_name!r}",
            code="model_not_found",
            param="model",
        )
