"""Repositories with a bug: what a repair is worth.

Flows in: a prompt and what the agent left behind. Flows out: a reward. Does not know the harness.
"""

import json
import os
import subprocess
import sys

from skyrl_async.generators.agent.reward import AgentEpisode
from skyrl_async.types import Prompt

SETTINGS = {"harness": "mini-swe-agent"}
CHECK_TIMEOUT_S = 20.0

_EVALUATE = """
import importlib, json, sys
repo, module, expressions = json.loads(sys.stdin.read())
sys.path.insert(0, repo)
names = vars(importlib.import_module(module))
print(json.dumps([repr(eval(expression, dict(names))) for expression in expressions]))
"""


def reward(prompt: Prompt, episode: AgentEpisode) -> float:
    """1.0 when every expression of the row's ``tests`` has the value that stands there, else 0.0.

    The agent's code runs in a process of its own, which is asked for values and is not told the right ones: code that makes a
    test succeed by other means than being right has nothing to work on. It sees nothing of this process's environment, but has this
    user's rights.
    """
    tests: dict[str, str] = prompt.extras["tests"]
    asked = [str(episode.working_dir), prompt.extras["module"], list(tests)]
    try:
        done = subprocess.run(
            [sys.executable, "-I", "-c", _EVALUATE],
            input=json.dumps(asked),
            env={"PATH": os.environ["PATH"]},
            capture_output=True,
            text=True,
            timeout=CHECK_TIMEOUT_S,
            check=True,
        )
        found = json.loads(done.stdout.strip().splitlines()[-1])
    except (subprocess.SubprocessError, ValueError, IndexError):
        return 0.0
    return float(found == list(tests.values()))
