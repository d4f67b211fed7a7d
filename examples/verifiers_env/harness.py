# /// script
# requires-python = ">=3.11"
# dependencies = ["verifiers==0.4.0"]
# [tool.uv]
# exclude-newer = "2026-11-20T00:00:00Z"
# ///
"""An environment of verifiers, unmodified, played once: what ``generator.command`` runs.

A game of guessing: the environment says higher or lower, and its rubric pays for finding the number and for each guess saved.

Flows in: the task file, and the address, key and model of a session, all by the environment. Flows out: the rubric's reward and
metrics, as JSON. Needs nothing of skyrl_async.
"""

import asyncio
import json
import os
import re
from pathlib import Path

import verifiers.v1 as vf

LARGEST = 15
MAX_GUESSES = 5


class GuessData(vf.TaskData):
    """What an episode starts from."""

    number: int


class GuessTask(vf.Task[GuessData]):
    """A number to be found, and the rubric."""

    def guesses(self, trace: vf.Trace) -> list[int | None]:
        """The guess in each of the policy's turns; None where there is none."""
        said = [message.content or "" for message in trace.assistant_messages]
        return [guess_of(text) for text in said]

    @vf.reward(weight=1.0)
    async def found(self, trace: vf.Trace) -> float:
        """The last guess is the number."""
        guesses = self.guesses(trace)
        return float(bool(guesses) and guesses[-1] == self.data.number)

    @vf.reward(weight=0.2)
    async def saved(self, trace: vf.Trace) -> float:
        """Of the guesses allowed, the fraction not needed."""
        guesses = self.guesses(trace)
        return 1 - len(guesses) / MAX_GUESSES if guesses and guesses[-1] == self.data.number else 0.0

    @vf.metric
    async def num_guesses(self, trace: vf.Trace) -> float:
        """Turns of the policy."""
        return float(len(self.guesses(trace)))


def guess_of(text: str) -> int | None:
    """The last number in ``text``."""
    numbers = re.findall(r"\d+", text)
    return int(numbers[-1]) if numbers else None


def hint(guess: int | None, number: int) -> str:
    """What the environment answers to a wrong guess."""
    if guess is None:
        return "I saw no number. Guess one."
    return "higher" if guess < number else "lower"


async def play(task: GuessTask, agent: vf.Agent) -> vf.Trace:
    """One episode: guesses and hints until the number is found."""
    async with agent.interaction(task) as interaction:
        segment = await interaction.turn()
        for _ in range(MAX_GUESSES - 1):
            guess = guess_of(segment.last_reply)
            if segment.terminated or guess == task.data.number:
                break
            segment = await interaction.turn(hint(guess, task.data.number))
    return interaction.trace


def make_agent() -> vf.Agent:
    """The policy at the session's address, in verifiers' plain chat loop."""
    return vf.make_agent(
        vf.AgentConfig(
            model=os.environ["OPENAI_MODEL"],
            client=vf.EvalClientConfig(base_url=os.environ["OPENAI_BASE_URL"], api_key_var="OPENAI_API_KEY"),
            harness={"id": "null"},
            runtime=vf.SubprocessConfig(),
        )
    )


def main() -> None:
    """Play the task, and hand in what the rubric says."""
    described = json.loads(Path(os.environ["SKYRL_TASK_FILE"]).read_text())
    data = GuessData(prompt=described["messages"][-1]["content"], number=described["extras"]["number"])
    trace = asyncio.run(play(GuessTask(data), make_agent()))
    if not trace.ok:
        raise SystemExit(f"the episode failed: {trace.errors}")
    rubric = {"reward": trace.reward, "metrics": dict(trace.metrics)}
    Path(os.environ["SKYRL_RESULT_FILE"]).write_text(json.dumps({"output": json.dumps(rubric)}))


if __name__ == "__main__":
    main()
