"""An agent of verifiers (Prime Intellect), over chat completions: its ``bash`` harness, or an environment of one's own.

``generator.harness_args``: ``['--play', 'FILE']`` (an environment: a function that
plays a task and returns its trace, as in ``examples/verifiers_env``).
"""

from skyrl_async.harnesses.install import PythonPackages
from skyrl_async.harnesses.openai_agents import read
from skyrl_async.harnesses.shipped import PROGRAMS, ShippedHarness, tool_call

HARNESS = ShippedHarness(
    name="verifiers",
    packages=PythonPackages(requirements=("verifiers==0.4.0",)),
    wire="/v1/chat/completions",
    command=f'"$HARNESS_BIN/python" "{PROGRAMS}/verifiers_agent.py"',
    read=read,
    check=("I write it.\n" + tool_call("bash", command="echo hello > out.txt"), "It is written."),
)
