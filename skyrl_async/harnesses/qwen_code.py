"""Qwen Code (Alibaba), over chat completions.

Its sub-agents and its compaction are on. Its memory is off: the agent that keeps it works after the task, in a ``HOME`` that is deleted,
and would take half of a sample's weight.
"""

from skyrl_async.harnesses.install import NpmPackages
from skyrl_async.harnesses.shipped import ShippedHarness, read_result_line, tool_call

_SETTINGS = """\
{
  "general": {"disableAutoUpdate": true, "disableUpdateNag": true, "enableAutoUpdate": false},
  "privacy": {"usageStatisticsEnabled": false},
  "telemetry": {"enabled": false},
  "security": {"auth": {"selectedType": "openai"}},
  "tools": {"useRipgrep": false},
  "memory": {"enableManagedAutoMemory": false, "enableManagedAutoDream": false, "enableAutoSkill": false},
  "model": {
    "generationConfig": {"contextWindowSize": $SKYRL_MAX_MODEL_LEN, "samplingParams": {"max_tokens": $HARNESS_MAX_TOKENS}}
  }
}
"""

HARNESS = ShippedHarness(
    name="qwen-code",
    packages=NpmPackages(packages=("@qwen-code/qwen-code@0.24.4",)),
    wire="/v1/chat/completions",
    node=20,
    command='"$HARNESS_BIN/qwen" --yolo --output-format stream-json --auth-type openai < "$HARNESS_PROMPT"',
    variables={"QWEN_CODE_SUPPRESS_YOLO_WARNING": "1"},
    files={".qwen/settings.json": _SETTINGS},
    read=read_result_line,
    check=(
        "I write it.\n"
        + tool_call("run_shell_command", command="echo hello > out.txt", description="Writes it", is_background=False),
        "It is written.",
    ),
)
