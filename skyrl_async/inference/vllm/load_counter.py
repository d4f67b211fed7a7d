"""What a core says of its load after each of its steps. vLLM's own loggers would also keep metrics for Prometheus, unread here."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

from skyrl_async.inference.protocol import EngineLoad

if TYPE_CHECKING:
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.metrics.stats import SchedulerStats


class LoadCounter:
    """Adds up the statistics of one core's scheduler."""

    def __init__(self) -> None:
        self.load = EngineLoad()
        """Up to the core's last step."""

    def listen(self, llm: "AsyncLLM") -> None:
        """Count what comes from the core of ``llm``, which was made in ``reporting_cores``."""
        processor = llm.output_processor
        processor.update_scheduler_stats = partial(self._add, processor.update_scheduler_stats)

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
            num_preemptions=before.num_preemptions + cache.preempted_requests,
        )


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
