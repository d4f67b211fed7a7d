"""OpenCode, over chat completions.

Its sub-agents and its compaction are on. It asks for a title beside its task, which becomes a side request.
"""

from skyrl_async.harnesses.install import NpmPackages
from skyrl_async.harnesses.shipped import ShippedHarness, Transcript, json_lines, tool_call

_CONFIG = """\
{
  "autoupdate": false,
  "share": "disabled",
  "model": "policy/$OPENAI_MODEL",
  "small_model": "policy/$OPENAI_MODEL",
  "enabled_providers": ["policy"],
  "permission": "allow",
  "provider": {
    "policy": {
      "npm": "@ai-sdk/openai-compatible",
      "options": {"baseURL": "$OPENAI_BASE_URL", "apiKey": "{env:OPENAI_API_KEY}"},
      "models": {"$OPENAI_MODEL": {"tool_call": true, "limit": {"context": $SKYRL_MAX_MODEL_LEN, "output": $HARNESS_MAX_TOKENS}}}
    }
  }
}
"""


def read(stdout: str) -> Transcript:
    """Read the events of ``opencode run --format json``."""
    answer, failure = None, None
    for event in json_lines(stdout):
        match event:
            case {"type": "text", "part": {"text": str(text)}}:
                answer = text
            case {"type": "error", "error": dict(error)}:
                inner = error.get("data")
                words = inner.get("message") if isinstance(inner, dict) else None
                failure = str(words or error.get("name") or error)
    return Transcript(answer=answer, failure=failure)


HARNESS = ShippedHarness(
    name="opencode",
    packages=NpmPackages(packages=("opencode-ai@1.18.33",)),
    wire="/v1/chat/completions",
    command='"$HARNESS_BIN/opencode" run --format json < "$HARNESS_PROMPT"',
    variables={
        "OPENCODE_DISABLE_AUTOUPDATE": "1",
        "OPENCODE_DISABLE_DEFAULT_PLUGINS": "1",
        "OPENCODE_DISABLE_LSP_DOWNLOAD": "1",
        "OPENCODE_DISABLE_MODELS_FETCH": "1",
    },
    files={".config/opencode/opencode.json": _CONFIG},
    read=read,
    check=(
        "I write it.\n" + tool_call("bash", command="echo hello > out.txt", description="Writes it"),
        "It is written.",
    ),
)
