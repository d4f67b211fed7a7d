"""An agent for the default task: any program that talks to an OpenAI endpoint. Each run of it is one sample.

The trainer starts it with the task and the endpoint in its environment, records what is sampled for it, and asks the task's
environment for the reward.
"""

import json
import os
from pathlib import Path

from openai import OpenAI


def main() -> None:
    """Ask once and print the answer."""
    task = json.loads(Path(os.environ["SKYRL_TASK_FILE"]).read_text())
    client = OpenAI()  # reads OPENAI_BASE_URL and OPENAI_API_KEY
    reply = client.chat.completions.create(model=os.environ["OPENAI_MODEL"], messages=task["messages"])
    print(reply.choices[0].message.content)


if __name__ == "__main__":
    main()
