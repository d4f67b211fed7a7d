"""An agent as a program of its own: two turns over the endpoint, with nothing but the standard library.

Flows in: the task and the endpoint, in its environment. Flows out: requests. A request that fails ends it with a traceback.
"""

import json
import os
import sys
import urllib.request


def main() -> None:
    """Ask, ask once more, and end."""
    messages = json.load(sys.stdin)["messages"]
    for _ in range(2):
        body = json.dumps({"model": os.environ["OPENAI_MODEL"], "messages": messages}).encode()
        headers = {"Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}", "Content-Type": "application/json"}
        request = urllib.request.Request(f"{os.environ['OPENAI_BASE_URL']}/chat/completions", body, headers)
        with urllib.request.urlopen(request) as answer:
            reply = json.load(answer)["choices"][0]["message"]
        messages += [reply, {"role": "user", "content": "Once more."}]


if __name__ == "__main__":
    main()
