"""vLLM's own OpenAI server, in a process of its own: what it and its core leave in a process is not the tests'."""

import asyncio
import os
import subprocess
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

from skyrl_async.endpoint.server.serve import start_server
from skyrl_async.inference.vllm.boot import VLLMEngineConfig, boot
from tests.cpu.forked_workers import forking_executable


@contextmanager
def vllm_server(policy_dir: str) -> Iterator[str]:
    """Serve a policy; yields the address. Needs ``forked_workers``."""
    command = [*forking_executable(), __file__, policy_dir]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdin is not None and server.stdout is not None
        try:
            address = server.stdout.readline().strip()
            assert address, "vLLM's server did not come up"
            yield address
        finally:
            server.stdin.close()


async def serve(policy_dir: str) -> None:
    """Print the address and serve until standard input is closed. The core is started as our engines' is, which takes half the time."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what vLLM prints
    llm = boot(VLLMEngineConfig(name="teacher", policy_dir=policy_dir, extra_args={"logprobs_mode": "raw_logprobs"}))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from vllm.entrypoints.launchers.api_server.app_state import init_app_state
        from vllm.entrypoints.launchers.app import build_app
        from vllm.entrypoints.launchers.cli_args import make_arg_parser
        from vllm.utils.argparse_utils import FlexibleArgumentParser

        arguments = make_arg_parser(FlexibleArgumentParser()).parse_args(["--model", policy_dir])
        tasks = await llm.get_supported_tasks()
        app = build_app(arguments, tasks, llm.model_config)
        await init_app_state(llm, app.state, arguments, tasks)
    async with start_server(app) as (host, port):
        print(f"http://{host}:{port}/v1", file=answers, flush=True)
        await asyncio.to_thread(sys.stdin.read)
    llm.shutdown()


if __name__ == "__main__":
    asyncio.run(serve(*sys.argv[1:]))
