"""Talks to the policy of a run while it trains, with the openai client.

Start a run that serves the endpoint, and ask it in another shell:

    uv run -m skyrl_async.main trainer.output_dir=outputs/served server.enabled=true
    uv run python examples/openai_endpoint/chat.py outputs/served "Extend 3248 until 0."
"""

import argparse
import json
from pathlib import Path

from openai import OpenAI


def main() -> None:
    """Ask one question, and show under which policy versions its answer was sampled."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run_dir", type=Path, help="directory of a run that serves its endpoint")
    parser.add_argument("question")
    given = parser.parse_args()
    if not (file := given.run_dir / "endpoint.json").exists():
        parser.error(f"{file} is not there: the run has no endpoint (server.enabled=true), or has ended")
    endpoint = json.loads(file.read_text())
    client = OpenAI(base_url=endpoint["base_url"], api_key=endpoint["api_key"])
    reply = client.chat.completions.create(
        model=endpoint["model"],
        messages=[{"role": "user", "content": given.question}],
        max_completion_tokens=300,
        extra_body={"return_token_ids": True},
    )
    choice = reply.choices[0]
    print(choice.message.content)
    for span in choice.policy_versions:
        print(f"tokens {span['start']} to {span['end'] - 1}: policy version {span['version']}")


if __name__ == "__main__":
    main()
