"""What a run leaves behind and serves, made in a second: a random tiny policy behind a real endpoint, in a thread of this process."""

import asyncio
import contextlib
import json
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path

from transformers import AutoTokenizer

from skyrl_async.chat import ChatRenderer
from skyrl_async.config.load import from_overrides, to_yaml
from skyrl_async.endpoint.server.app import create_app
from skyrl_async.endpoint.server.serve import start_server
from skyrl_async.inference.client import InferenceEngineClient
from skyrl_async.inference.engines.deterministic import DeterministicEngine
from skyrl_async.metrics.summary import write_summary
from skyrl_async.metrics.tracker import MetricsLog
from skyrl_async.tasks.tiny_policy import PolicySizes, build_tiny_policy
from skyrl_async.tasks.tokenizer import train_tokenizer
from tests.patience import PATIENCE_S

KEY = "sk-test"
CONTROLLER_KEY = "ck-test"


def build_policy(directory: Path) -> Path:
    """A Hugging Face directory with random weights."""
    sizes = PolicySizes(hidden_size=32, num_layers=2, num_heads=2, intermediate_size=64)
    build_tiny_policy(directory, sizes, train_tokenizer(["Extend 3248 until 0."]), seed=0)
    return directory


def make_client(policy_dir: Path) -> tuple[InferenceEngineClient, ChatRenderer]:
    """A client over one deterministic engine."""
    tokenizer = AutoTokenizer.from_pretrained(policy_dir)
    renderer = ChatRenderer(tokenizer)
    engine = DeterministicEngine("engine-0", policy_dir, max_model_len=256)
    return InferenceEngineClient([engine], tokenizer=tokenizer, max_model_len=256, renderer=renderer), renderer


def write_run(run_dir: Path) -> Path:
    """Config, metrics, summary and policy of a finished run."""
    build_policy(run_dir / "policy")
    (run_dir / "config.yaml").write_text(to_yaml(from_overrides(f"trainer.output_dir={run_dir}")))
    log = MetricsLog(run_dir / "metrics.jsonl")
    log.log(0, {"reward/eval": 0.5})
    log.log(1, {"reward/mean": 0.5})
    log.log(2, {"reward/mean": 0.75})
    log.log(2, {"reward/eval": 0.75})
    log.close()
    write_summary(run_dir / "summary.json", {"reward_before": 0.5, "reward_after": 0.75, "steps": 2})
    return run_dir


@contextlib.contextmanager
def served_run(run_dir: Path) -> Iterator[Path]:
    """The run's directory, with an ``endpoint.json`` that is true while the block lasts."""
    write_run(run_dir)
    loop, started, stopping = asyncio.new_event_loop(), Future[tuple[str, int]](), asyncio.Event()

    async def serve() -> None:
        client, renderer = make_client(run_dir / "policy")
        async with start_server(
            create_app(client, renderer, api_keys=[KEY], controller_keys=[CONTROLLER_KEY])
        ) as address:
            started.set_result(address)
            await stopping.wait()

    def work() -> None:
        try:
            loop.run_until_complete(serve())
        except BaseException as error:
            if started.done():
                raise
            started.set_exception(error)
        finally:
            loop.close()

    thread = threading.Thread(target=work, name="served-run")
    thread.start()
    try:
        host, port = started.result(timeout=PATIENCE_S)
        root = f"http://{host}:{port}"
        endpoint = {
            "base_url": f"{root}/v1",
            "api_key": KEY,
            "model": "policy",
            "front_ends": [root],
            "controller_key": CONTROLLER_KEY,
        }
        (run_dir / "endpoint.json").write_text(json.dumps(endpoint))
        yield run_dir
    finally:
        if thread.is_alive():
            loop.call_soon_threadsafe(stopping.set)
        thread.join(timeout=PATIENCE_S)
