"""mini-swe-agent, over chat completions, with bash alone.

``generator.harness_args`` for models without tools: ``['--config', 'mini_textbased.yaml', '--model-class', 'litellm_textbased']``.
"""

import json

from skyrl_async.harnesses.install import PythonPackages
from skyrl_async.harnesses.shipped import ShippedHarness, Transcript, tool_call

_END = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"


def read(stdout: str) -> Transcript:
    """Read its trajectory. At its step limit it has submitted nothing, and is judged for its work so far."""
    try:
        info = json.loads(stdout)["info"]
        return Transcript(answer=str(info.get("submission") or ""))
    except (ValueError, LookupError, TypeError):
        return Transcript()


HARNESS = ShippedHarness(
    name="mini-swe-agent",
    # litellm imports mcp with tools without asking for it.
    packages=PythonPackages(requirements=("mini-swe-agent==2.4.6", "litellm[mcp]")),
    wire="/v1/chat/completions",
    # Its log is standard error, its trajectory standard output; the arguments of a run come after "mini".
    command=(
        """sh -c '"$HARNESS_BIN/mini" --agent-class default --cost-limit 0 --model "openai/$OPENAI_MODEL" --model-class litellm """
        """--config mini.yaml --config agent.step_limit=40 --output "$HOME/trajectory.json" --task "$(cat "$HARNESS_PROMPT")" """
        """"$@" >&2 && cat "$HOME/trajectory.json"' mini"""
    ),
    variables={
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",  # or it asks the internet for prices first
        "MSWEA_CONFIGURED": "true",
        "MSWEA_COST_TRACKING": "ignore_errors",
        "MSWEA_GLOBAL_CONFIG_DIR": "$HOME/mini",
        "MSWEA_SILENT_STARTUP": "1",
    },
    read=read,
    check=(
        "I write it.\n" + tool_call("bash", command="echo hello > out.txt"),
        "It is written.\n" + tool_call("bash", command=f"{_END}; echo It is written."),
    ),
)
