"""Generators that play skyrl_gym environments: a policy and an environment taking turns, assembled into training rows.

Flows in: group requests, environments, sampled turns. Flows out: trajectories whose ids, log-probs and versions are exactly those
sampled, with the environment's tokens masked. ``GymGenerator`` samples turns in process; ``skyrl_gym_http`` does it over HTTP.
"""

import hashlib
import logging
from abc import ABC, abstractmethod
from copy import deepcopy
from dataclasses import replace

from skyrl_async.chat import ChatRenderer
from skyrl_async.errors import GenerationError, PromptTooLongError
from skyrl_async.generators.gym.environment import CallThreads, EnvironmentCalls, EnvironmentFactory, max_turns_of
from skyrl_async.generators.gym.episode_state import EpisodeState, Turn, TurnRequest
from skyrl_async.rollout.generator import GroupRequest, keeps_samples, run_samples
from skyrl_async.rollout.group_state import SampleState
from skyrl_async.rollout.sampler import Sampler, record_tokens
from skyrl_async.runtime.progress import report
from skyrl_async.types import FinishReason, Trajectory

logger = logging.getLogger(__name__)

_ENVIRONMENT = -1
"""In place of a turn, the number of a sample's environment among its seeds."""


class EpisodeGenerator(ABC):
    """A ``Generator`` over environments of the skyrl_gym protocol, single- and multi-turn, however turns are sampled.

    Plays all samples of a prompt at once, each in an environment of its own.
    """

    def __init__(
        self, make_environment: EnvironmentFactory, *, max_turns: int = 8, max_trajectory_tokens: int | None = None
    ) -> None:
        """
        Args:
            make_environment: makes an environment of a prompt's ``env_class`` and ``extras``.
            max_turns: most turns of an episode, >= 1, whatever the environment says.
            max_trajectory_tokens: most response tokens of an episode, the environment's included; None is bounded by the model's context
                only.
        """
        self._make_environment = make_environment
        self._max_turns = max_turns
        self._max_trajectory_tokens = max_trajectory_tokens
        self._threads = CallThreads("environment")
        self._has_warned = False

    async def close(self, timeout_s: float = 10.0) -> None:
        """Wait until the environments of cancelled episodes are closed, each after its call in flight, at most so long."""
        if not await self._threads.closing.have_returned(timeout_s):
            logger.warning("some environments are not closed: a call has not returned in %g s", timeout_s)

    @abstractmethod
    async def sample_turn(self, request: TurnRequest) -> Turn:
        """A turn whose prompt begins with ``request.context_token_ids``. Raises ``PromptTooLongError`` without room."""

    @keeps_samples
    async def generate(self, request: GroupRequest) -> tuple[Trajectory, ...]:
        """Return one trajectory per sample asked for; the first failure is raised as it is, once the others are finished.

        Raises ``PromptTooLongError`` when the first prompt leaves no room, and whatever ``sample_turn`` and the environment raise.
        """
        return await run_samples(
            request,
            "episode",
            lambda index: self._play(request, index),
            lambda trajectory: (trajectory,),
            lambda rows: rows[0],
        )

    async def _play(self, request: GroupRequest, sample_index: int) -> Trajectory:
        prompt = request.prompt
        saved = request.sample_states.restore(sample_index)
        calls, state = self._calls(request, sample_index), EpisodeState()
        try:
            if saved is not None:
                calls, state = await self._restored(request, sample_index, saved, calls)
            request.sample_states.track(sample_index, state.sample_state)
            return await self._take_turns(request, sample_index, calls, state)
        except Exception as error:
            error.add_note(f"in environment {prompt.env_class!r}, prompt {prompt.uid!r}, sample {sample_index}")
            request.sample_states.fail(sample_index, state.lost_rows(), f"{type(error).__name__}: {error}")
            raise
        finally:
            calls.close()

    async def _restored(
        self, request: GroupRequest, sample_index: int, saved: SampleState, calls: EnvironmentCalls
    ) -> tuple[EnvironmentCalls, EpisodeState]:
        """The episode of a checkpoint in the environment given; where it cannot go on, one that begins in another."""
        try:
            state = EpisodeState.from_json(saved.state or {})
            if state.environment is not None:
                await calls.restore(state.environment)
            else:
                opening, _ = await calls.init(deepcopy(list(request.prompt.messages)))
                if opening != state.messages:
                    raise GenerationError(
                        "the environment opens the conversation otherwise than in the checkpoint, and has no restore()"
                    )
        except Exception as error:  # the environment is somebody else's: the episode begins anew, which is counted
            logger.warning("sample %d of %s begins anew: %r", sample_index, request.prompt.uid, error)
            request.sample_states.discard(sample_index)
            calls.close()
            return self._calls(request, sample_index), EpisodeState()
        record_tokens(state.num_delivered_tokens)
        return calls, state

    def _calls(self, request: GroupRequest, sample_index: int) -> EnvironmentCalls:
        """A fresh environment, which learns the most turns it will get and, unless the row says one, its sample's seed."""
        prompt = request.prompt
        extras = {
            "seed": derive_seed(request.seed, sample_index, _ENVIRONMENT),
            **deepcopy(prompt.extras),
            "max_turns": min(max_turns_of(prompt.extras, self._max_turns), self._max_turns),
        }
        return EnvironmentCalls(self._make_environment(prompt.env_class, extras), self._threads)

    async def _take_turns(
        self, request: GroupRequest, sample_index: int, calls: EnvironmentCalls, state: EpisodeState
    ) -> Trajectory:
        """Play to the end. ``state`` follows; whatever the environment does is in it only once all of it is known."""
        if state.messages is None:
            state.open(*await calls.init(deepcopy(list(request.prompt.messages))))
        while state.num_steps < self._max_turns:
            turn = state.turn or await self._sample_turn(request, sample_index, state)
            if turn is None:
                return state.builder.build(is_truncated=True, metrics=await calls.metrics())
            state.turn = turn
            outcome = await calls.step(turn.text, turn.completion.token_ids, turn=state.num_steps)
            is_last = outcome.is_done or state.num_steps + 1 == self._max_turns
            metrics = await calls.metrics() if is_last else {}
            action, num_kept = self._remembered(turn, outcome.postprocessed_action)
            state.add_turn(turn, num_kept, action, outcome)
            if is_last:
                is_truncated = num_kept is None and turn.completion.finish_reason is FinishReason.LENGTH
                return state.builder.build(is_truncated=is_truncated, metrics=metrics)
        # Only an episode of a checkpoint comes here, when generator.max_turns was lowered.
        return state.builder.build(is_truncated=False, metrics=await calls.metrics())

    async def _sample_turn(self, request: GroupRequest, sample_index: int, state: EpisodeState) -> Turn | None:
        """Sample a turn; None when a later turn finds no room."""
        max_tokens, budget, builder = request.sampling.max_tokens, self._max_trajectory_tokens, state.builder
        if budget is not None:
            max_tokens = min(max_tokens, budget - builder.num_response_tokens)
        if max_tokens < 1:
            return None
        report("generating", turn=state.num_steps + 1)
        is_first = state.num_steps == 0
        turn_request = TurnRequest(
            messages=tuple(state.messages or ()),
            context_token_ids=builder.token_ids,
            sampling=replace(
                request.sampling, max_tokens=max_tokens, seed=derive_seed(request.seed, sample_index, state.num_steps)
            ),
            max_total_tokens=None if is_first or budget is None else builder.num_prompt_tokens + budget,
            session_id=f"{request.prompt.uid}/{request.seed}/{sample_index}",
            priority=request.priority,
            generation=None if request.is_evaluation else state.generation,
        )
        try:
            turn = await self.sample_turn(turn_request)
        except PromptTooLongError:
            if is_first:
                raise
            return None
        request.sample_states.count_resampled(state.num_tokens_lost(turn.completion))
        return turn

    def _remembered(self, turn: Turn, postprocessed: str | None) -> tuple[str, int | None]:
        """The action as the conversation keeps it, and how many of its tokens.

        SkyRL tokenizes a postprocessed action anew and trains on tokens nobody sampled. Here an action shortened at its
        end keeps the fewest sampled tokens that spell it; one rewritten otherwise stays as it was sampled.
        """
        if postprocessed is None or postprocessed == turn.text:
            return turn.text, None
        num_kept = turn.num_tokens_covering(postprocessed)
        if num_kept is not None:
            return postprocessed, num_kept
        if not self._has_warned:
            self._has_warned = True
            logger.warning(
                "an environment rewrote an action (postprocessed_action) other than by shortening it; "
                "the sampled text is kept"
            )
        return turn.text, None


class GymGenerator(EpisodeGenerator):
    """Samples turns in process, over ``generate()``.

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
    ) -> None:
        super().__init__(make_environment, max_turns=max_turns, max_trajectory_tokens=max_trajectory_tokens)
        self._sampler = sampler
        self._renderer = renderer

    async def sample_turn(self, request: TurnRequest) -> Turn:
        if len(request.context_token_ids):
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


def derive_seed(seed: int, sample_index: int, turn_index: int) -> int:
    """A sampling seed in [0, 2**31) for one turn, distinct for all practical purposes and the same in every process."""
    digest = hashlib.blake2b(f"{seed}/{sample_index}/{turn_index}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 33
