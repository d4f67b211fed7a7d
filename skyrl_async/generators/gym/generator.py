"""The generator that plays skyrl_gym environments over ``generate()``: tokens in, tokens out, in process.

Flows in: group requests; a ``Sampler``; a chat renderer. Flows out: trajectories. Does not know engines or HTTP.
"""

from dataclasses import replace

from skyrl_async.chat import ChatRenderer
from skyrl_async.errors import PromptTooLongError
from skyrl_async.generators.gym.environment import EnvironmentFactory
from skyrl_async.generators.gym.episode import EpisodeRunner
from skyrl_async.generators.gym.turn import Turn, TurnRequest
from skyrl_async.rollout.generator import GroupRequest, keeps_samples
from skyrl_async.rollout.sampler import Sampler
from skyrl_async.types import Trajectory


class GymGenerator:
    """A ``Generator`` over environments of the skyrl_gym protocol, single- and multi-turn.

    Every trajectory holds the tokens that were sampled, never text tokenized again: each turn's prompt is the last
    turn's ids followed by what the chat template puts after them.
    """

    def __init__(
        self,
        sampler: Sampler,
        renderer: ChatRenderer,
        make_environment: EnvironmentFactory,
        *,
        max_turns: int = 8,
        max_trajectory_tokens: int | None = None,
        max_environment_threads: int = 32,
    ) -> None:
        """
        Args:
            make_environment: Makes an environment of a prompt's ``env_class`` and ``extras``.
            max_turns: Most turns of an episode, >= 1, whatever the environment says.
            max_trajectory_tokens: Most response tokens of an episode, the environment's included; None is bounded by
                the model's context only.
            max_environment_threads: Environment calls running at once, >= 1 (fast environments need none).
        """
        self._episodes = EpisodeRunner(
            _TokenTurnSampler(sampler, renderer),
            make_environment,
            max_turns=max_turns,
            max_trajectory_tokens=max_trajectory_tokens,
            max_environment_threads=max_environment_threads,
        )

    @keeps_samples
    async def generate(self, request: GroupRequest) -> tuple[Trajectory, ...]:
        """Return a trajectory per sample asked for. When some fail, the others are played to their end first.

        Raises ``PromptTooLongError`` when the first prompt leaves no room, and whatever environment and sampler raise.
        """
        return await self._episodes.run_group(request)


class _TokenTurnSampler:
    """Samples turns by token ids."""

    def __init__(self, sampler: Sampler, renderer: ChatRenderer) -> None:
        self._sampler = sampler
        self._renderer = renderer

    async def sample_turn(self, request: TurnRequest) -> Turn:
        if request.context_token_ids:
            prompt = self._renderer.render_next(request.messages, request.context_token_ids)
        else:
            prompt = self._renderer.render(request.messages)
        limit = min(self._sampler.max_model_len, request.max_total_tokens or self._sampler.max_model_len)
        room = limit - len(prompt)
        if room < 1:
            raise PromptTooLongError(len(prompt), limit)
        completion = await self._sampler.generate_tokens(
            prompt,
            replace(request.sampling, max_tokens=min(request.sampling.max_tokens, room)),
            session_id=request.session_id,
            priority=request.priority,
            generation=request.generation,
        )
        stop_string = self._renderer.stop_string(completion.token_ids, completion.text, request.sampling.stop)
        return Turn(
            completion=completion,
            stop_string=stop_string or "",
            text_ends=self._renderer.text_ends(completion.token_ids),
        )
