"""The control socket of a run: whoever owns the run lists, adds and removes engines while it trains.

    uv run -m skyrl_async.engines RUN ──a line of JSON──> Unix socket in the trainer's process ──> Fleet
                                      <──a line of JSON──

``control.json`` in the run's directory says where the socket is. It lies in a temporary directory that only its owner may enter, because
paths of sockets are short and shared file systems have none.
"""

import asyncio
import contextlib
import json
import logging
import os
import socket
import tempfile
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

from skyrl_async.composition.run_directory import write_private
from skyrl_async.errors import InferenceError, SkyRLAsyncError
from skyrl_async.inference.fleet import Fleet
from skyrl_async.runtime.tasks import task_group

logger = logging.getLogger(__name__)

CONTROL_FILE = "control.json"
Describe = Callable[[], dict[str, dict[str, float]]]
"""Engine -> its figures."""


@contextlib.asynccontextmanager
async def controlled(run_dir: Path, fleet: Fleet | None, describe: Describe) -> AsyncIterator[None]:
    """Answer requests while the block runs; those in progress are cancelled at its end.

    Args:
        run_dir: gets ``control.json``.
        fleet: the engines; None where they are no processes: nothing can be changed then.
        describe: returns figures of each engine that serves.
    """
    open_requests: set[asyncio.Task[None]] = set()
    path = run_dir / CONTROL_FILE
    # A socket's path has at most 107 characters, which TMPDIR may exceed.
    with tempfile.TemporaryDirectory(prefix="skyrl_async-", dir="/tmp", ignore_cleanup_errors=True) as directory:
        async with task_group() as group:

            def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
                request = group.create_task(_serve(reader, writer, fleet, describe), name="control")
                open_requests.add(request)
                request.add_done_callback(open_requests.discard)

            server = await asyncio.start_unix_server(connected, f"{directory}/control")
            content = {"socket": f"{directory}/control", "host": socket.gethostname(), "pid": os.getpid()}
            write_private(path, json.dumps(content))
            try:
                yield
            finally:
                path.unlink(missing_ok=True)
                server.close()
                for request in open_requests:
                    request.cancel()


async def _serve(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, fleet: Fleet | None, describe: Describe
) -> None:
    """Answer one connection: a request, an answer. A failure is the caller's; the run goes on."""
    try:
        try:
            line = await reader.readline()
        except ValueError as error:
            answer = {"error": f"a request is a line of JSON of at most 64 KiB: {error}"}
        else:
            answer = await _answer_or_error(line, fleet, describe)
        writer.write(json.dumps(answer).encode() + b"\n")
        await writer.drain()
    except ConnectionError:
        logger.info("the caller of the control socket has left")
    finally:
        writer.close()


async def _answer_or_error(line: bytes, fleet: Fleet | None, describe: Describe) -> dict[str, Any]:
    try:
        request = json.loads(line)
    except (ValueError, RecursionError) as error:
        return {"error": f"a request is a line of JSON with an action, got {line[:200]!r}: {error}"}
    try:
        return await _answer(request, fleet, describe)
    except SkyRLAsyncError as error:
        return {"error": str(error)}
    except Exception as error:
        logger.exception("a request to the control socket failed: %r", line[:200])
        return {"error": f"{type(error).__name__}: {error}"}


async def _answer(request: Any, fleet: Fleet | None, describe: Describe) -> dict[str, Any]:
    """Raises ``InferenceError`` and ``PublishError``."""
    if fleet is None:
        raise InferenceError("engine=deterministic is in the trainer's process: there are no engines to list or change")
    match request:
        case {"action": "list"}:
            pass
        case {"action": "add"}:
            name = await fleet.add_engine()
            logger.info("%s was added over the control socket", name)
        case {"action": "remove", "name": str(name)}:
            await fleet.remove_engine(name)
            logger.info("%s was removed over the control socket", name)
        case _:
            raise InferenceError(f"a request's action is list, add, or remove with a name, got {str(request)[:200]}")
    figures = describe()
    return {"engines": [row | figures.get(row["serving"] or "", {}) for row in fleet.rows()]}
