"""An agent of the OpenAI Agents SDK with a shell as its tool, over the Responses API.

``generator.harness_args``: ``['--api', 'chat_completions']``, ``['--max-turns', '20']``, ``['--instructions', '...']``. An agent with tools
of its own is a ``generator.command``, as in ``examples/openai_agents``.
"""

import json

from skyrl_async.harnesses.install import PythonPackages
from skyrl_async.harnesses.shipped import PROGRAMS, ShippedHarness, Transcript, tool_call


def read(stdout: str) -> Transcript:
    """Read the answer, which is all that it prints."""
    try:
        return Transcript(answer=str(json.loads(stdout)["answer"]))
    except (ValueError, LookupError, TypeError):
        return Transcript()


HARNESS = ShippedHarness(
    name="openai-agents",
    packages=PythonPackages(requirements=("openai-agents==0.24.0",)),
    wire="/v1/responses",
    command=f'"$HARNESS_BIN/python" "{PROGRAMS}/openai_agents.py"',
    read=read,
    check=("I write it.\n" + tool_call("shell", command="echo hello > out.txt"), "It is written."),
)
