"""An environment of verifiers: what ``generator.harness=verifiers`` plays with ``--play``.

A game of guessing: the environment says higher or lower, and its rubric pays for finding the number and for each guess saved.

Flows in: a task, an agent that asks the policy, and where it runs. Flows out: the trace with the rubric's reward and metrics. Needs nothing
of skyrl_async.
"""

import re
from typing import Any

import verifiers.v1 as vf

LARGEST = 15
MAX_GUESSES = 5


class GuessData(vf.TaskData):
    """What an episode starts from."""

    number: int


class GuessTask(vf.Task[GuessData]):
    """A number to be found, and the rubric."""

    def guesses(self, trace: vf.Trace) -> list[float | None]:
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


def guess_of(text: str) -> float | None:
    """The last number in ``text``."""
    numbers = re.findall(r"\d+", text)
    return float(numbers[-1]) if numbers else None  # int() refuses thousands of digits


def hint(guess: float | None, number: int) -> str:
    """What the environment answers to a wrong guess."""
    if guess is None:
        return "I saw no number. Guess one."
    return "higher" if guess < number else "lower"


async def play(described: dict[str, Any], agent: vf.Agent, runtime: Any) -> vf.Trace:
    """One episode: guesses and hints until the number is found."""
    data = GuessData(prompt=described["messages"][-1]["content"], number=described["extras"]["number"])
    task = GuessTask(data)
    async with agent.interaction(task, runtime=runtime) as interaction:
        segment = await interaction.turn()
        for _ in range(MAX_GUESSES - 1):
            guess = guess_of(segment.last_reply)
            if segment.terminated or guess == task.data.number:
                break
            segment = await interaction.turn(hint(guess, task.data.number))
    return interaction.trace
