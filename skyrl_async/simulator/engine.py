"""A modelled engine: it takes virtual time and keeps every promise of the ``InferenceEngine`` seam, without a model.

What it samples is arbitrary; when, how many tokens and under which version is exact to the token.
"""

import asyncio
import heapq
import itertools
import math
from bisect import bisect_right
from collections.abc import AsyncGenerator, Callable, Collection
from dataclasses import KW_ONLY, dataclass, field, replace
from functools import cache

import numpy as np

from skyrl_async.columns import Logprobs, TokenIds, VersionSpans, repeated, token_ids
from skyrl_async.errors import PublishError
from skyrl_async.inference.prefix_index import PrefixIndex, prefixes_of
from skyrl_async.inference.protocol import CutOff, EngineLoad, pause_then_load
from skyrl_async.simulator.shared_machine import ENGINE_CORES, PUBLISH_CORES, SharedMachine, computing
from skyrl_async.simulator.shared_speed import ROUNDING, Call, SharedSpeed
from skyrl_async.types import EngineOutput, EngineRequest, FinishReason, PauseMode, WeightUpdate


@cache
def _sampled_columns(num_tokens: int) -> tuple[TokenIds, Logprobs]:
    """Token ids of ``num_tokens`` tokens and 100 more, and as many log-probs, of which all outputs are parts."""
    tokens: TokenIds = np.arange(num_tokens + 100, dtype=np.int32) % 100
    return token_ids(tokens), repeated(-1.0, len(tokens))


@dataclass(eq=False)
class ModelledEngine:
    """An ``InferenceEngine`` in virtual time: token i of a generation is ``i % 100``, of log-prob -1.

    Its requests each run at ``tokens_per_second / (1 + n / half_speed_requests)`` with n running, as measured on real ones. More than
    ``max_num_seqs`` wait, and the smallest ``priority`` runs first.
    """

    name: str
    _: KW_ONLY
    num_tokens_of: Callable[[tuple[int, ...], int | None], int]
    """The prompt's last 64 token ids, seed -> tokens of the whole answer. What a request continues is no part of its prompt."""
    tokens_per_second: float = 100.0
    """Speed of a request alone in the engine."""
    half_speed_requests: float = 170.0
    """Requests at which each runs at half of that."""
    max_num_seqs: int | None = None
    """Most requests that run at a time; None: all."""
    prefill_seconds: float = 0.0
    """What each request takes before its first token, also one that is continued after an abort. No other progresses meanwhile."""
    prefill_tokens_per_second: float = math.inf
    """Tokens of prompts that are computed per second; what is cached of them is not."""
    prefill_chunk_tokens: float = math.inf
    """Tokens of prompts that an iteration computes, in which calls get one token: those whose prompts were computed before, and all when an
    update has made their prompts due again. Infinite: no call progresses in a prefill."""
    cache_tokens: int | None = None
    """Keys and values for which there is room: a call waits for that of its prompt. None: for all."""
    machine: SharedMachine | None = None
    """Where others compute too; None: a machine of its own."""
    engine_cores: float = ENGINE_CORES
    """Cores of that machine that it takes."""
    stage_seconds: float = 0.0
    """Duration of ``stage_weights``."""
    load_seconds: float = 0.0
    """Duration of ``load_weights``."""
    idle_stage_seconds: float | None = None
    idle_load_seconds: float | None = None
    """The same of an engine without a call; None: as long."""
    block_tokens: int = 16
    """Tokens per block of a stream; the larger, the faster is the simulation."""
    continues_aborted: bool = False
    """Whether it continues by itself what a pause aborts, as engines in processes of their own do."""
    num_sampled_tokens: int = field(default=0, init=False)
    """Sampled tokens of all calls that have ended."""
    fails_next_load: type[Exception] | None = field(default=None, init=False)
    """``PublishError`` refuses the next load; any other error kills the engine in it."""

    def __post_init__(self) -> None:
        self.max_model_len = 1 << 30
        self._shared = SharedSpeed(
            self.name,
            self.tokens_per_second,
            self.half_speed_requests,
            0.0
            if math.isinf(self.prefill_tokens_per_second)
            else self.prefill_tokens_per_second / self.prefill_chunk_tokens,
            self.machine,
            self.engine_cores,
        )
        self._calls: dict[Call, None] = {}
        self._waiting: list[tuple[int, int, Call]] = []
        """Heap of (priority, number of the call, call), some of which may have ended."""
        self._numbers = itertools.count()
        self._cache = PrefixIndex() if self.cache_tokens is None else PrefixIndex(self.cache_tokens)
        self._num_held = self._num_prompt_tokens = self._num_cached_tokens = 0
        self._version = 0
        self._served: list[tuple[float, int]] = [(0.0, 0)]
        """(progress, version that is served from there)."""
        self._cut_off = CutOff()

    @property
    def request_seconds(self) -> float:
        """Seconds that requests have run, added up over the requests."""
        _ = self._shared.progress
        return self._shared.request_seconds

    @property
    def idle_seconds(self) -> float:
        """Seconds without a request that runs."""
        _ = self._shared.progress
        return self._shared.idle_seconds

    async def generate(self, request: EngineRequest) -> EngineOutput:
        """Sample all, or up to an aborting pause."""
        call = self._begin(request)
        try:
            return await self._sampled(call, call.num_tokens)
        finally:
            self._end(call)

    async def stream(self, request: EngineRequest) -> AsyncGenerator[EngineOutput, None]:
        """Sample in blocks."""
        call = self._begin(request)
        try:
            block = None
            while block is None or block.finish_reason is None:
                block = await self._sampled(call, min(call.num_taken + self.block_tokens, call.num_tokens))
                self._shared.set_timer()  # for the others, while this one's reader takes its time
                yield block
        finally:
            self._end(call)

    async def partial_outputs(self, request_ids: Collection[str]) -> dict[str, EngineOutput]:
        """Every token that is complete by now."""
        self._cut_off.check()
        calls = {call.request.request_id: call for call in self._calls}
        return {i: self._partial_output(calls[i]) for i in request_ids if i in calls}

    async def pause(self, mode: PauseMode) -> None:
        """Stop sampling; in abort mode end every request in flight."""
        self._cut_off.check()
        self._shared.set_paused(True)
        if mode is PauseMode.ABORT and self.continues_aborted:
            self._requeue()
        elif mode is PauseMode.ABORT:
            self._abort(self._calls)

    async def resume(self) -> None:
        """Continue sampling."""
        self._cut_off.check()
        self._shared.set_paused(False)

    async def stage_weights(self, update: WeightUpdate) -> None:
        """Take the stage's time."""
        self._cut_off.check()
        with computing(self.machine, f"the update of {self.name}", PUBLISH_CORES) as slowdown:
            await asyncio.sleep(slowdown * self._unless_idle(self.stage_seconds, self.idle_stage_seconds))
        self._cut_off.check()

    async def load_weights(self, update: WeightUpdate) -> None:
        """Serve ``update.version`` after the load time."""
        self._cut_off.check()
        failure, self.fails_next_load = self.fails_next_load, None
        if failure is PublishError or not self._shared.is_paused:
            reason = "is not paused" if failure is None else "was told to refuse"
            raise PublishError(f"{self.name} {reason}")
        with computing(self.machine, f"the load of {self.name}", self.engine_cores) as slowdown:
            await asyncio.sleep(slowdown * self._unless_idle(self.load_seconds, self.idle_load_seconds))
        if failure is not None:
            self.kill()
        self._cut_off.check()
        self._version = update.version
        self._cache.clear()
        running = (call for call in self._calls if call.started < math.inf and not call.is_aborted)
        if prefill_seconds := sum(map(self._prefill, running)):
            self._shared.restart_prefill(prefill_seconds)
        self._served.append((self._shared.progress, update.version))

    async def switch_weights(self, update: WeightUpdate, mode: PauseMode) -> float:
        """Pause, load and resume."""
        return await pause_then_load(self, update, mode)

    async def version(self) -> int:
        """Served now."""
        self._cut_off.check()
        return self._version

    async def checksum(self) -> str:
        """Return the version: the model has no weights."""
        self._cut_off.check()
        return f"version-{self._version}"

    async def ping(self) -> EngineLoad:
        """Answer while alive."""
        self._cut_off.check()
        return EngineLoad(
            num_waiting=sum(call.started == math.inf for call in self._calls),
            cache_use=self._num_held / self.cache_tokens if self.cache_tokens else 0.0,
            num_prompt_tokens=self._num_prompt_tokens,
            num_cached_tokens=self._num_cached_tokens,
        )

    async def evict(self, request_ids: Collection[str] | None = None) -> None:
        """Requests in flight end, aborted."""
        self._cut_off.check()
        self._abort([c for c in self._calls if request_ids is None or c.request.request_id in request_ids])
        await asyncio.sleep(0)

    async def close(self) -> None:
        """End the engine."""
        self._cut_off.cut(f"{self.name} was killed")

    def kill(self) -> None:
        """From now on every call, and every request in flight, raises ``EngineDeadError``."""
        self._cut_off.cut(f"{self.name} was killed")
        for call in self._calls:
            call.wake()

    def _unless_idle(self, seconds: float, idle_seconds: float | None) -> float:
        return seconds if self._calls or idle_seconds is None else idle_seconds

    def _requeue(self) -> None:
        """Let all calls wait to run again, the earliest first, each with the tokens that it has."""
        for call in self._calls:
            if call.started < math.inf:
                self._num_held -= call.num_held
            call.kept = self._versions(call, 0, self._num_sampled(call))
            call.num_held = len(call.request.prompt_token_ids) + len(call.kept)
            call.num_aborts += 1
            call.started = math.inf
            if len(call.kept) >= call.awaited:
                call.wake()
        self._shared.stop_all()
        left = (call for call in self._calls if len(call.kept) < call.num_tokens)
        self._waiting = sorted((call.request.priority, next(self._numbers), call) for call in left)
        self._run_waiting()

    def _abort(self, calls: Collection[Call]) -> None:
        for call in calls:
            call.is_aborted = True
            call.wake()
        if all(call.is_aborted for call in self._calls):
            self._shared.restart_prefill(0.0)

    def _begin(self, request: EngineRequest) -> Call:
        self._cut_off.check()
        num_prompt_tokens = len(request.prompt_token_ids) - request.num_sampled_tokens
        prompt = tuple(request.prompt_token_ids[max(0, num_prompt_tokens - 64) : num_prompt_tokens].tolist())
        num_left = self.num_tokens_of(prompt, request.sampling.seed) - request.num_sampled_tokens
        longest = request.sampling.max_tokens
        end = FinishReason.STOP if num_left <= longest else FinishReason.LENGTH
        call = Call(request, min(num_left, longest), end, num_held=len(request.prompt_token_ids))
        self._calls[call] = None
        heapq.heappush(self._waiting, (request.priority, next(self._numbers), call))
        self._run_waiting()
        return call

    def _end(self, call: Call) -> None:
        self.num_sampled_tokens += self._num_sampled(call)
        del self._calls[call]
        if call.started < math.inf:
            self._num_held -= call.num_held
            self._shared.end()
            self._run_waiting()

    def _run_waiting(self) -> None:
        """Begin the calls for which there is room."""
        while self._waiting and (self.max_num_seqs is None or self._shared.num_running < self.max_num_seqs):
            call = self._waiting[0][2]
            if call not in self._calls or call.is_aborted:
                heapq.heappop(self._waiting)
                continue
            is_full = self.cache_tokens is not None and self._num_held + call.num_held > self.cache_tokens
            if is_full and self._num_held:
                return
            heapq.heappop(self._waiting)
            self._num_held += call.num_held
            self._shared.begin(call, self.prefill_seconds + self._prefill(call))

    def _prefill(self, call: Call) -> float:
        """Seconds to compute what is not cached of a call's prompt, which is cached from then on."""
        if self.prefill_tokens_per_second == math.inf:
            return 0.0
        computed = call.request.prompt_token_ids
        if len(call.kept):
            computed = np.concatenate([computed, self._tokens(call, 0, len(call.kept))[0]])
        prefixes, num_tokens = prefixes_of(computed), len(computed)
        num_cached = self._cache.num_cached(self.name, prefixes)
        self._cache.add(self.name, prefixes)
        self._num_prompt_tokens += num_tokens
        self._num_cached_tokens += num_cached
        return (num_tokens - num_cached) / self.prefill_tokens_per_second

    async def _sampled(self, call: Call, num_tokens: int) -> EngineOutput:
        """Tokens up to the ``num_tokens``-th of the call, from where it was last asked; fewer where it is aborted."""
        self._cut_off.check()
        if not call.is_aborted:
            await self._shared.wait_for(call, num_tokens)
            self._cut_off.check()
        start, end = call.num_taken, num_tokens
        if call.is_aborted:
            end = min(num_tokens, max(start, self._shared.tokens_of(call)))
        call.num_taken = end
        is_over = end >= call.num_tokens
        return self._output(call, start, end, call.end if is_over else FinishReason.ABORT if call.is_aborted else None)

    def _partial_output(self, call: Call) -> EngineOutput:
        num = self._num_sampled(call)
        so_far = self._output(call, 0, num, call.end if num == call.num_tokens else None)
        return replace(so_far, num_aborts=call.num_aborts)

    def _num_sampled(self, call: Call) -> int:
        """Tokens of the call so far."""
        if call.num_taken == call.num_tokens:
            return call.num_taken
        return max(call.num_taken, min(call.num_tokens, self._shared.tokens_of(call)))

    def _output(self, call: Call, start: int, end: int, finish_reason: FinishReason | None) -> EngineOutput:
        """Tokens ``start`` to ``end`` of a call."""
        tokens, logprobs = self._tokens(call, start, end)
        return EngineOutput(
            token_ids=tokens,
            logprobs=logprobs,
            versions=self._versions(call, start, end),
            finish_reason=finish_reason,
            num_aborts=0 if finish_reason is None else call.num_aborts,
        )

    def _tokens(self, call: Call, start: int, end: int) -> tuple[TokenIds, Logprobs]:
        first, num_tokens = (call.request.num_sampled_tokens + start) % 100, end - start
        tokens, logprobs = _sampled_columns(1 << num_tokens.bit_length())
        return tokens[first : first + num_tokens], logprobs[:num_tokens]

    def _versions(self, call: Call, start: int, end: int) -> VersionSpans:
        """Return the version served when each of the tokens ``start`` to ``end`` was complete."""
        num_kept = len(call.kept)
        if start < num_kept:
            since = self._versions(call, num_kept, max(num_kept, end))
            return VersionSpans.joined([call.kept[start:end], since])
        if call.started + start >= self._served[-1][0]:
            return VersionSpans.constant(self._served[-1][1], end - start)
        parts = []
        index = bisect_right(self._served, call.started + start, key=lambda served: served[0]) - 1
        while start < end:
            is_last = index + 1 == len(self._served)
            until = end if is_last else min(end, int(self._served[index + 1][0] - call.started + ROUNDING))
            parts.append(VersionSpans.constant(self._served[index][1], max(0, until - start)))
            start = max(start, until)
            index += 1
        return VersionSpans.joined(parts)
