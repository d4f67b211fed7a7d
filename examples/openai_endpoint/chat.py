"""Talks to the policy of a run while it trains, with the openai client.

Start a run that serves the endpoint, and ask it in another shell:

    uv run -m skyrl_async.main trainer.output_dir=outputs/served server.enabled=true
    uv run python examples/openai_endpoint/chat.py outputs/served "Extend 3248 until 0."
"""

import json
import sys
from pathlib import Path

from openai import OpenAI


def main() -> None:
    """Ask one question, and show under which policy versions its answer was sampled."""
    run_dir, question = sys.argv[1:]
    endpoint = json.loads((Path(run_dir) / "endpoint.json").read_text())
    client = OpenAI(base_url=endpoint["base_url"], api_key=endpoint["api_key"])
    reply = client.chat.completions.create(
        model=endpoint["model"],
        messages=[{"role": "user", "content": question}],
        max_completion_tokens=300,
        extra_body={"return_token_ids": True},
    )
    choice = reply.choices[0]
    print(choice.message.content)
    for span in choice.policy_versions:
        print(f"tokens {span['start']} to {span['end'] - 1}: policy version {span['version']}")


if __name__ == "__main__":
    main()
