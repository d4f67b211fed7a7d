"""What a core says of its load after each of its steps. vLLM's own loggers would also keep metrics for Prometheus, unread here."""

import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from skyrl_async.inference.protocol import EngineLoad, Iterations

if TYPE_CHECKING:
    from vllm.v1.engine import EngineCoreOutput
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.metrics.stats import SchedulerStats


class LoadCounter:
    """Adds up the statistics of one core's scheduler."""

    def __init__(self) -> None:
        self.load = EngineLoad()
        """Up to the core's last step."""
        self._busy_since: float | None = None
        """When the core's last step ended, if it went on with the next one at once."""
        self._loads: deque[tuple[float, float]] = deque(maxlen=8)
        """When weights were loaded last: from, to. What a load preempts is told with the core's next step."""

    def listen(self, llm: "AsyncLLM") -> None:
        """Count what comes from the core of ``llm``, which was made in ``reporting_cores``."""
        processor = llm.output_processor
        processor.update_scheduler_stats = partial(self._add, processor.update_scheduler_stats)
        processor.process_outputs = partial(self._add_preemptions, processor.process_outputs)

    def interrupt(self) -> None:
        """The core stands still: the time until its next step is not that step's."""
        self._busy_since = None

    @contextmanager
    def loading(self) -> Iterator[None]:
        """Weights are loaded in the block: the core preempts what it keeps, for no lack of room."""
        began = time.monotonic()
        yield
        self._loads.append((began, time.monotonic()))

    def _add_preemptions(self, pass_on: Any, outputs: "list[EngineCoreOutput]", *args: Any, **kwargs: Any) -> Any:
        """vLLM's own count, with its statistics of cached prefixes, is of lookups: none without a prefix cache, and with those of loads."""
        from vllm.v1.engine import EngineCoreEventType

        events = [event for output in outputs if output.events for event in output.events]
        times = [event.timestamp for event in events if event.type == EngineCoreEventType.PREEMPTED]
        if num := sum(not any(began <= at <= ended for began, ended in self._loads) for at in times):
            self.load = replace(self.load, num_preemptions=self.load.num_preemptions + num)
        return pass_on(outputs, *args, **kwargs)

    def _add(self, pass_on: Any, stats: "SchedulerStats | None") -> None:
        pass_on(stats)
        if stats is None:
            return
        before, cache = self.load, stats.prefix_cache_stats
        self.load = EngineLoad(
            num_waiting=stats.num_waiting_reqs,
            cache_use=stats.kv_cache_usage,
            num_prompt_tokens=before.num_prompt_tokens + cache.queries + cache.preempted_queries,
            num_cached_tokens=before.num_cached_tokens + cache.hits + cache.preempted_hits,
            num_preemptions=before.num_preemptions,
            **self._iterations(stats),
        )

    def _iterations(self, stats: "SchedulerStats") -> "dict[str, Iterations]":
        """Those up to this one, by kind. vLLM's own ``elapsed_ms`` lacks what is computed before it waits, on CPU the model itself."""
        found = {"decode": self.load.decode, "prefill": self.load.prefill}
        details, since, now = stats.iteration_details, self._busy_since, time.perf_counter()
        self._busy_since = now if stats.num_running_reqs else None
        if details is not None and since is not None:
            kind = "prefill" if details.num_ctx_requests else "decode"
            found[kind] += Iterations(
                num=1,
                seconds=now - since,
                num_requests=details.num_ctx_requests + details.num_generation_requests,
                num_prefills=details.num_ctx_requests,
                num_prefill_tokens=details.num_ctx_tokens,
            )
        return found


@contextmanager
def reporting_cores() -> Iterator[None]:
    """In this block vLLM starts cores that report, to frontends that do not log."""
    from vllm.v1.engine.core_client import EngineCoreClient

    original = EngineCoreClient.make_async_mp_client

    def make(*args: Any, log_stats: bool, **kwargs: Any) -> Any:
        return original(*args, log_stats=True, **kwargs)

    EngineCoreClient.make_async_mp_client = staticmethod(make)
    try:
        yield
    finally:
        EngineCoreClient.make_async_mp_client = staticmethod(original)
