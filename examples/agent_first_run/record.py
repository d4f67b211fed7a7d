"""Records how Terminus-2 talks with a policy: ``python -m examples.agent_first_run.record`` writes ``recorded.jsonl``.

A scripted policy plays puzzles through the real harness: Harbor, the sandbox, tmux, the endpoint. What the harness says to it is kept, word
for word, and is what the warm start imitates.
"""

import argparse
import asyncio
import json
import re
import secrets
import tempfile
from collections.abc import Sequence
from pathlib import Path

from examples.agent_first_run.make import RECORDED, Puzzle, write_task
from examples.scripted_policy import make_app
from skyrl_async.config.schema.generator import GeneratorConfig, HarborConfig
from skyrl_async.config.schema.run import Config
from skyrl_async.endpoint.server.serve import start_server
from skyrl_async.generators.agent.generator import AgentGenerator
from skyrl_async.generators.agent.settings import make_agent_generator
from skyrl_async.harbor.tasks import load_tasks
from skyrl_async.harbor.trials import VerifierReward, harbor_harness
from skyrl_async.rollout.generator import GroupRequest
from skyrl_async.tasks.registry import make_environment
from skyrl_async.types import SamplingParams

AGENT_KWARGS = {"max_turns": 6, "tmux_pane_height": 4, "enable_summarize": False}
"""Of Terminus-2: few turns, a terminal of few lines, and no summaries, since all of it fits."""
SECONDS = 0.3
"""How long the policy asks the harness to wait for the output of a command."""
NOTES, CODE = ("482", "735", "916"), "295"
MAX_ANSWER_TOKENS = 512
_TURN = re.compile(r"<\|im_start\|>(\w+)\n(.*?)<\|im_end\|>", re.DOTALL)


class Player:
    """A script that reads ``num_looks`` notes of a puzzle and then writes the number that it has seen last; keeps the conversation."""

    def __init__(self, puzzle: Puzzle, num_looks: int) -> None:
        self.written = [*puzzle.notes, puzzle.code][num_looks]
        self.messages: list[dict[str, str]] = []
        self.puzzle = puzzle
        self.num_looks = num_looks

    def __call__(self, conversation: str) -> str:
        turns = [{"role": role, "content": text} for role, text in _TURN.findall(conversation)]
        num_said = sum(turn["role"] == "assistant" for turn in turns)
        if num_said < self.num_looks:
            said = _turn(f"cat {self.puzzle.notes[num_said]}\n")
        elif num_said == self.num_looks:
            said = _turn(f"echo {self.written} > code\n", is_complete=True)
        else:
            said = _turn(is_complete=True)
        self.messages = [*turns, {"role": "assistant", "content": said}]
        return said


def _turn(*keystrokes: str, is_complete: bool = False) -> str:
    """An answer as Terminus-2 asks for it."""
    commands = [{"keystrokes": keys, "duration": SECONDS} for keys in keystrokes]
    answer = {"analysis": "", "plan": "", "commands": commands}
    return json.dumps(answer | ({"task_complete": True} if is_complete else {}))


def plays() -> list[Player]:
    """Return a player per puzzle and number of looks."""
    puzzles = [Puzzle(NOTES[:num_notes], CODE) for num_notes in range(1, len(NOTES) + 1)]
    return [Player(puzzle, num_looks) for puzzle in puzzles for num_looks in range(len(puzzle.notes) + 1)]


async def record(players: Sequence[Player], python: str | None) -> None:
    """Have them play, one after the other. Raises ``RuntimeError`` if a trial does not earn what it should."""
    playing, key = list(players[:1]), secrets.token_urlsafe(8)
    settings = GeneratorConfig(
        harness="terminus-2",
        agent_timeout_s=60.0,
        harbor=HarborConfig(agent_kwargs=dict(AGENT_KWARGS), python=python),
    )
    harness, settings = harbor_harness(settings, Path(Config().cache_dir).expanduser(), None)  # noqa: ASYNC240
    app = make_app(lambda conversation: playing[0](conversation), controller_key=key)
    async with start_server(app) as (host, port):
        generator = make_agent_generator(
            settings,
            urls=[f"http://{host}:{port}"],
            controller_key=key,
            make_environment=make_environment,
            harness=harness,
            reward_source=VerifierReward(),
        )
        try:
            for player in players:
                playing[:] = [player]
                await _play(player, generator)
        finally:
            await generator.close()


async def _play(player: Player, generator: AgentGenerator) -> None:
    with tempfile.TemporaryDirectory() as directory:
        write_task(player.puzzle, Path(directory) / "task")
        (prompt,) = load_tasks(Path(directory), "directory")
        sampling = SamplingParams(max_tokens=MAX_ANSWER_TOKENS)
        (row,) = await generator.generate(GroupRequest(prompt=prompt, num_samples=1, sampling=sampling))
    if row.reward != float(player.written == player.puzzle.code):
        raise RuntimeError(f"{player.puzzle} earned {row.reward:g} with {player.written}: {player.messages}")


def main() -> None:
    """Write the file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--python", help="of an environment with Harbor; default: one that is made and kept")
    players = plays()
    asyncio.run(record(players, parser.parse_args().python))
    rows = [
        {
            "notes": player.puzzle.notes,
            "code": player.puzzle.code,
            "num_looks": player.num_looks,
            "messages": player.messages,
        }
        for player in players
    ]
    RECORDED.write_text("".join(json.dumps(row) + "\n" for row in rows))


if __name__ == "__main__":
    main()
