"""Tasks of a terminal: what the files that an agent leaves behind are worth.

Flows in: a prompt and a working directory. Flows out: a reward. Does not know the harness.
"""

from skyrl_async.generators.agent.reward import AgentEpisode
from skyrl_async.types import Prompt

SETTINGS = {"harness": "terminus-2"}
MAX_FILE_CHARS = 10_000


def reward(prompt: Prompt, episode: AgentEpisode) -> float:
    """The fraction of the row's ``tests`` (file name to text) that hold, up to white space at the ends."""
    tests: dict[str, str] = prompt.extras["tests"]
    return sum(_text(episode, name) == text.strip() for name, text in tests.items()) / len(tests)


def _text(episode: AgentEpisode, name: str) -> str | None:
    path = episode.working_dir / name
    if not path.is_file():  # nor a pipe, which would never end
        return None
    with path.open(errors="replace") as file:
        return file.read(MAX_FILE_CHARS).strip()
