"""The timer by which sessions expire.

Flows in: an endpoint's sessions. Flows out: nothing; those past a deadline are closed and their requests ended. Does not know what a
deadline is.
"""

import asyncio
import logging

from skyrl_async.endpoint.requests.context import Serving

logger = logging.getLogger(__name__)


async def sweep_sessions(serving: Serving, interval_s: float = 5.0) -> None:
    """Close sessions that are past a deadline, every ``interval_s``. Runs until it is cancelled."""
    while True:
        await asyncio.sleep(interval_s)
        for session in serving.sessions.sweep():
            logger.info("%r has expired", session)
            serving.exchange.end_session(session)
