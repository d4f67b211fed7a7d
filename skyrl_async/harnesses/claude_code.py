"""Claude Code (Anthropic), over the Messages API.

Its sub-agents and its compaction are on, and all of its models are the policy.
"""

from skyrl_async.harnesses.install import NpmPackages
from skyrl_async.harnesses.shipped import ShippedHarness, read_result_line, tool_call

_MODELS = ("OPUS", "SONNET", "HAIKU", "FABLE")

HARNESS = ShippedHarness(
    name="claude-code",
    packages=NpmPackages(packages=("@anthropic-ai/claude-code@2.1.332",)),
    wire="/v1/messages",
    command=(
        '"$HARNESS_BIN/claude" --print --model "$ANTHROPIC_MODEL" --output-format stream-json --verbose '
        '--dangerously-skip-permissions < "$HARNESS_PROMPT"'
    ),
    variables={
        **{f"ANTHROPIC_DEFAULT_{name}_MODEL": "$ANTHROPIC_MODEL" for name in _MODELS},
        "CLAUDE_CODE_SUBAGENT_MODEL": "$ANTHROPIC_MODEL",
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        "CLAUDE_CODE_MAX_CONTEXT_TOKENS": "$SKYRL_MAX_MODEL_LEN",
        "CLAUDE_CODE_MAX_OUTPUT_TOKENS": "$HARNESS_MAX_TOKENS",
        "CLAUDE_CODE_TMPDIR": "$TMPDIR",
        "CLAUDE_CONFIG_DIR": "$HOME/.claude",
        "DISABLE_AUTOUPDATER": "1",
        "DISABLE_INSTALLATION_CHECKS": "1",
        "DISABLE_TELEMETRY": "1",
        "IS_SANDBOX": "1",  # or it refuses to go without permissions as root
    },
    read=read_result_line,
    check=(
        "I write it.\n" + tool_call("Bash", command="echo hello > out.txt", description="Writes it"),
        "It is written.",
    ),
)
