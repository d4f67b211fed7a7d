"""An agent of the OpenAI Agents SDK, unmodified, with a shell: what ``generator.harness=openai-agents`` runs.

Flows in: the prompt, and the address, key and model of a session, all by the environment. Flows out: the agent's answer, as JSON. Imports
nothing of skyrl_async.
"""

import argparse
import asyncio
import json
import os
import sys
from pathlib import Path

from agents import Agent, MaxTurnsExceeded, Runner, function_tool, set_default_openai_api, set_tracing_disabled

INSTRUCTIONS = "You are an agent with a shell, in the directory of your task. Work until the task is done, then say what the answer is."
MAX_TURNS = 40
COMMAND_TIMEOUT_S = 60
MAX_OUTPUT_CHARS = 10_000


@function_tool
async def shell(command: str) -> str:
    """Run a command with bash, and return its status and what it writes."""
    process = await asyncio.create_subprocess_exec(
        *("bash", "-c", command),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    try:
        written, _ = await asyncio.wait_for(process.communicate(), COMMAND_TIMEOUT_S)
    except TimeoutError:
        process.kill()
        return f"it took longer than {COMMAND_TIMEOUT_S} s, and was ended"
    return f"status {process.returncode}\n{written.decode(errors='replace')[-MAX_OUTPUT_CHARS:]}"


def main() -> None:
    """Read the command line and the prompt, and let the agent work. An agent that has taken its turns has no answer."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--api", choices=["responses", "chat_completions"], default="responses")
    parser.add_argument("--max-turns", type=int, default=MAX_TURNS)
    parser.add_argument("--instructions", default=INSTRUCTIONS)
    given = parser.parse_args()
    set_tracing_disabled(True)  # or the SDK sends what it does to its maker
    set_default_openai_api(given.api)
    agent = Agent(name="shell", instructions=given.instructions, model=os.environ["OPENAI_MODEL"], tools=[shell])
    prompt = Path(os.environ["HARNESS_PROMPT"]).read_text(encoding="utf-8")
    try:
        answer = str(Runner.run_sync(agent, prompt, max_turns=given.max_turns).final_output)
    except MaxTurnsExceeded:
        answer = ""
    sys.stdout.write(json.dumps({"answer": answer}))


if __name__ == "__main__":
    main()
