# /// script
# requires-python = ">=3.11"
# dependencies = ["openai-agents==0.24.0"]
# [tool.uv]
# exclude-newer = "2026-11-20T00:00:00Z"
# ///
"""An agent of the OpenAI Agents SDK, unmodified, with two function tools: what ``generator.command`` runs.

Flows in: the task file, and the address, key and model of a session, all by the environment. Flows out: the agent's answer.
Needs nothing of skyrl_async.

``AGENT_API`` chooses the surface: ``responses`` (the SDK's default) or ``chat_completions``.
"""

import json
import os
from pathlib import Path

from agents import Agent, Runner, function_tool, set_default_openai_api, set_tracing_disabled

MAX_TURNS = 8
INSTRUCTIONS = (
    "You serve in a shop. Look prices up and multiply with the tools. End your last answer with the amount alone."
)


def make_agent(model: str, prices: dict[str, int]) -> Agent:
    """An agent that can look up ``prices`` and multiply."""

    @function_tool
    def price(item: str) -> str:
        """The price of one item in euros."""
        return str(prices[item]) if item in prices else f"we do not sell {item!r}, only {', '.join(prices)}"

    @function_tool
    def multiply(a: int, b: int) -> int:
        """The product of two numbers."""
        return a * b

    return Agent(name="shop", instructions=INSTRUCTIONS, model=model, tools=[price, multiply])


def main() -> None:
    """Let the agent answer, and hand in what it says."""
    set_tracing_disabled(True)  # or the SDK sends what it does to its maker
    set_default_openai_api(os.environ.get("AGENT_API", "responses"))
    task = json.loads(Path(os.environ["SKYRL_TASK_FILE"]).read_text())
    agent = make_agent(os.environ["OPENAI_MODEL"], task["extras"]["prices"])
    result = Runner.run_sync(agent, task["messages"][-1]["content"], max_turns=MAX_TURNS)
    Path(os.environ["SKYRL_RESULT_FILE"]).write_text(json.dumps({"output": str(result.final_output)}))


if __name__ == "__main__":
    main()
