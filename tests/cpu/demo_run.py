"""Records the run that the viewer shows with ``--demo``: ``python -m tests.cpu.demo_run``.

An agent with a tool, two engines of which one is killed, samples that fail, and histories that are rewritten.
"""

import random
import shutil
import tempfile
from pathlib import Path
from typing import Any

from openai import AsyncOpenAI

from examples.own_agent.tool_agent import MAX_TURNS, look
from skyrl_async.record.files import DIRECTORY, files_in, join
from skyrl_async.view.__main__ import DEMO
from tests.chaos.attacked_run import AttackedRun, Role

_FAILS, _FORGETS = 0.13, 0.04
"""Chances per call."""
_BROKEN = 25
"""Of so many tasks, one never succeeds."""
_KILL_AT_STEP = 4
_OVERRIDES = (
    *("task=trail", "generator=agent", "generator.entrypoint=tests.cpu.demo_run:answer", "engine.num_engines=2"),
    *("generator.n_samples_per_prompt=4", "trainer.policy_mini_batch_size=8", "trainer.num_steps=16"),
    *("trainer.max_staleness_steps=4", "trainer.samples.keep=all", "evaluation.num_prompts=32"),
    *("trainer.eval_interval_steps=0", "generator.max_concurrent_agents=16", "generator.max_failed_fraction=0.5"),
)


async def answer(task: Any) -> str | None:
    """Answer the policy's calls; now and then the tool's server is gone, or all turns but the last are forgotten."""
    question, tools, signs = list(task.messages), task.extras["tools"], task.extras["signs"]
    if sum(digit * 10**place for place, digit in enumerate(signs.values())) % _BROKEN == 0:
        raise ValueError("the signs of this task cannot be read")
    turns: list[dict[str, Any]] = []
    async with AsyncOpenAI(base_url=task.base_url, api_key=task.api_key) as client:
        for _ in range(MAX_TURNS):
            reply = await client.chat.completions.create(model=task.model, messages=[*question, *turns], tools=tools)
            message = reply.choices[0].message
            if not message.tool_calls:
                return message.content
            if random.random() < _FAILS:
                raise ConnectionError("the server of the tool look did not answer")
            if random.random() < _FORGETS:
                turns.clear()
            turns.append(message.model_dump(exclude_none=True))
            for call in message.tool_calls:
                content = look(signs, call.function.arguments)
                turns.append({"role": "tool", "tool_call_id": call.id, "content": content})
    return None


def main() -> None:
    with tempfile.TemporaryDirectory() as directory:
        recorded = Path(directory) / "demo"
        run = AttackedRun([*_OVERRIDES, f"trainer.output_dir={recorded.name}"], recorded)
        run.start()
        try:
            run.wait(lambda: run.step >= _KILL_AT_STEP, timeout_s=1200)
            if engine := run.find(Role.engine, random.Random(0)):
                engine.kill()
            run.wait(lambda: False, timeout_s=1200)
        finally:
            run.close()
        if run.exit_code:
            raise SystemExit(run.output_path.read_text())
        shutil.rmtree(DEMO, ignore_errors=True)
        DEMO.mkdir()
        for name in ("config.yaml", "metrics.jsonl", "tokenizer.json"):
            shutil.copyfile(recorded / name, DEMO / name)
        for name in ("samples", "trace"):
            shutil.copytree(recorded / name, DEMO / name)
    join(files_in(DEMO / DIRECTORY))


if __name__ == "__main__":
    main()
