"""An agent with a tool, for task=trail: it answers the policy's calls until the policy answers without one."""

import json
import os
from pathlib import Path

from openai import OpenAI

MAX_TURNS = 12


def look(signs: dict[str, int], arguments: str) -> str:
    """Run the tool; a policy may ask for anything."""
    try:
        return str(signs[str(json.loads(arguments)["at"])])
    except (KeyError, TypeError, ValueError):
        return "?"


def main() -> None:
    """Play one task to its end and print the last answer."""
    task = json.loads(Path(os.environ["SKYRL_TASK_FILE"]).read_text())
    client, model = OpenAI(), os.environ["OPENAI_MODEL"]
    messages, tools, signs = task["messages"], task["extras"]["tools"], task["extras"]["signs"]
    for _ in range(MAX_TURNS):
        reply = client.chat.completions.create(model=model, messages=messages, tools=tools).choices[0].message
        messages.append(reply.model_dump(exclude_none=True))
        for call in reply.tool_calls or []:
            result = look(signs, call.function.arguments)
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
        if not reply.tool_calls:
            break
    print(reply.content)


if __name__ == "__main__":
    main()
