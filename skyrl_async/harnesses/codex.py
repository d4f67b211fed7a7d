"""Codex (OpenAI), over the Responses API.

Its sub-agents and its compaction are on. Web search is ignored by the endpoint. Approvals and its own sandbox are off: it runs with this
user's rights, as every agent does that is started by a command.
"""

from skyrl_async.harnesses.install import NpmPackages
from skyrl_async.harnesses.shipped import ShippedHarness, Transcript, json_lines, tool_call

_CONFIG = """\
model = "$OPENAI_MODEL"
model_provider = "policy"
model_context_window = $SKYRL_MAX_MODEL_LEN
model_auto_compact_token_limit = $HARNESS_COMPACT_TOKENS
approval_policy = "never"
sandbox_mode = "danger-full-access"
check_for_update_on_startup = false

[analytics]
enabled = false

[model_providers.policy]
name = "policy"
base_url = "$OPENAI_BASE_URL"
env_key = "OPENAI_API_KEY"
wire_api = "responses"
# A session at its cap answers 401, which is tried again like any other failure.
stream_max_retries = 2
"""


def read(stdout: str) -> Transcript:
    """Read the events of ``codex exec --json``."""
    answer, failure = None, None
    for event in json_lines(stdout):
        match event:
            case {"type": "item.completed", "item": {"type": "agent_message", "text": str(text)}}:
                answer = text
            case {"type": "turn.failed", "error": {"message": str(message)}}:
                failure = message
    return Transcript(answer=answer, failure=failure)


HARNESS = ShippedHarness(
    name="codex",
    packages=NpmPackages(packages=("@openai/codex@0.169.0",)),
    wire="/v1/responses",
    node=16,
    command='"$HARNESS_BIN/codex" exec --json --skip-git-repo-check --ephemeral - < "$HARNESS_PROMPT"',
    variables={"CODEX_HOME": "$HOME/.codex"},
    files={".codex/config.toml": _CONFIG},
    read=read,
    check=("I write it.\n" + tool_call("exec_command", cmd="echo hello > out.txt"), "It is written."),
)
