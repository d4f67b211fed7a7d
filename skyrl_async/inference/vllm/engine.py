"""One vLLM engine in this process: tokens in, tokens with log-probs and policy versions out, on CPU or CUDA alike.

    generate / stream ──> AsyncLLM (frontend, this process) ──zmq──> engine core (a process of its own) ──> workers
    pause / load_weights / checksum ──────── utility calls, each with a deadline ───────┘

vLLM's errors become ours. Text, other engines, retries and Ray are unknown here. vLLM is imported in functions, never before ``start`` is
called.
"""

import asyncio
import contextlib
import logging
import os
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection
from dataclasses import replace
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TypeVar

import numpy as np

from skyrl_async.columns import Logprobs, TokenIds, column
from skyrl_async.errors import (
    EngineDeadError,
    EngineStartError,
    InferenceError,
    PublishError,
    RequestRefusedError,
)
from skyrl_async.inference.generation import belongs_to, check_prompt, joined
from skyrl_async.inference.policy_files import TOKENIZER_FILES, UpdateValidator, eos_token_ids, require_as_sent
from skyrl_async.inference.protocol import CutOff, EngineLoad
from skyrl_async.inference.vllm.adapter import AdapterSlot
from skyrl_async.inference.vllm.boot import VLLMEngineConfig, boot, is_core_killed
from skyrl_async.inference.vllm.load_counter import LoadCounter
from skyrl_async.inference.vllm.outcomes import first_failure, outcome_socket
from skyrl_async.inference.vllm.requests import engine_output, partial_output, versions_of, vllm_sampling_params
from skyrl_async.runtime.tasks import Changes, run_together
from skyrl_async.types import EngineOutput, EngineRequest, PauseMode, SamplingParams, WeightUpdate

if TYPE_CHECKING:
    from vllm.outputs import RequestOutput
    from vllm.v1.engine.async_llm import AsyncLLM

logger = logging.getLogger(__name__)

__all__ = ["VLLMEngine", "VLLMEngineConfig"]

T = TypeVar("T")


class VLLMEngine:
    """An ``InferenceEngine`` around vLLM's own ``AsyncLLM``. Use ``await VLLMEngine.start(config)``."""

    def __init__(self, config: VLLMEngineConfig, llm: "AsyncLLM") -> None:
        self.name = config.name
        """Name from the config."""
        self.max_model_len = int(llm.model_config.max_model_len)
        """Longest prompt plus answer in tokens."""
        self._config = config
        self._llm = llm
        self._counter = LoadCounter()
        self._counter.listen(llm)
        self._stop_token_ids = list(eos_token_ids(config.policy_dir))
        self._validator = UpdateValidator(config.policy_dir, config.adapter_rank)
        self._adapter = AdapterSlot(llm, config.adapter_rank) if config.adapter_rank else None
        self._version = config.version
        self._pause_mode: PauseMode | None = None
        self._may_be_paused = False
        self._is_switching = False
        """Requests wait to be sent to the core meanwhile: to send those that the pause aborts takes longer than to load."""
        self._control_lock = asyncio.Lock()
        self._requests: dict[str, bool] = {}
        """Engine calls in flight -> whether each can be continued."""
        self._changes = Changes()
        self._cut_off = CutOff()
        self._staged: WeightUpdate | None = None
        """The update that was prepared and checked last, if none was checked since."""
        self._received: dict[str, str] = {}
        """Path of the trainer's file -> path of its broadcast copy in this engine's memory."""

    @classmethod
    async def start(cls, config: VLLMEngineConfig) -> Self:
        """Boot the engine. Blocks the event loop while it boots, and leaves vLLM's environment variables set.

        Raises ``EngineStartError``, or ``EngineDeadError`` if its core was killed; then no process is left.
        """
        # No local variable holds the AsyncLLM: vLLM's imports keep tracebacks, and thereby this frame, for ever.
        try:
            return await cls(config, boot(config))._started()
        except Exception as error:
            failure = EngineDeadError if is_core_killed(error) else EngineStartError
            raise failure(f"engine {config.name} did not come up: {type(error).__name__}: {error}") from error

    async def _started(self) -> Self:
        """Watch the core processes, so that a death is noticed at once; label the weights."""
        loop = asyncio.get_running_loop()
        for process in self._core_processes():
            loop.add_reader(process.sentinel, self._kill, f"its core process {process.pid} died")
        await self._control("label the weights", self._llm.update_weight_version, str(self._version))
        if self._adapter is not None:
            await self._control("make room for an adapter", self._adapter.open)
        return self

    async def generate(self, request: EngineRequest) -> EngineOutput:
        """``InferenceEngine.generate``."""
        async with contextlib.aclosing(self._run(request, streams=False)) as outputs:
            async for output in outputs:
                completion = output.outputs[0]
                versions = versions_of(completion.weight_versions)
                return engine_output(completion, versions, request.sampling.num_top_logprobs, output.num_cached_tokens)
        raise self._kill("a request ended without an output")

    async def stream(self, request: EngineRequest) -> AsyncGenerator[EngineOutput, None]:
        """``InferenceEngine.stream``. The first block is a single token, unless the request sets the interval."""
        num_sent = 0
        tracked: Any = None
        held: EngineOutput | None = None
        async with contextlib.aclosing(self._run(request, streams=True)) as outputs:
            async for output in outputs:
                completion = output.outputs[0]
                if completion.finish_reason is None:
                    tracked = tracked or self._request_state(request.request_id)
                    spans = tracked._weight_version_spans()
                else:
                    spans = completion.weight_versions
                num_total = num_sent + len(completion.token_ids)
                versions = versions_of(spans)[num_sent:num_total]
                num_top_logprobs = request.sampling.num_top_logprobs
                block = engine_output(completion, versions, num_top_logprobs, output.num_cached_tokens)
                if request.stream_interval and num_sent == 0 and block.finish_reason is None:
                    held = block  # vLLM sends the first token at once, which a request that sets the interval does not need
                else:
                    yield block if held is None else joined([held, block])
                    held = None
                num_sent = num_total

    async def partial_outputs(self, request_ids: Collection[str]) -> dict[str, EngineOutput]:
        """``InferenceEngine.partial_outputs``; the tokens that the core has handed to the frontend."""
        self._cut_off.check()
        open_ids = self._llm.output_processor.external_req_ids
        return {i: partial_output(self._request_state(i)) for i in request_ids if i in open_ids}

    async def pause(self, mode: PauseMode) -> None:
        """``InferenceEngine.pause``. All requests are kept while one is in the engine that cannot be continued."""
        async with self._control_lock:
            await self._pause(mode)

    async def _pause(self, mode: PauseMode) -> None:
        if not all(self._requests.values()):
            mode = PauseMode.KEEP
        if self._pause_mode is mode:
            return
        self._may_be_paused = True
        # AsyncLLM.pause_generation is this call and a sleep of 20 ms; the acknowledgement is the core's.
        core = self._llm.engine_core
        await self._control("pause", core.pause_scheduler_async, mode=mode.value, clear_cache=False)
        self._pause_mode = mode
        self._counter.interrupt()

    async def resume(self) -> None:
        """``InferenceEngine.resume``. It waits for every pause begun before, cancelled or not."""
        async with self._control_lock:
            if not self._may_be_paused:
                return
            self._pause_mode = None
            await self._control("resume", self._llm.resume_generation)
            self._may_be_paused = False

    async def connect_transfer(self, init_info: dict[str, Any]) -> None:
        """Prepare to receive in the trainer's process group (``init_info``: its place, and this engine's ``rank``)."""
        await self._on_workers("connect the weight transfer", "connect_transfer", init_info)

    async def receive_weights(self, update: WeightUpdate, keep: Collection[str]) -> None:
        """Receive a broadcast of the update's file, beside generation and without a deadline; it is loaded from the copy received.

        Files received before are dropped unless in ``keep``, by the trainer's paths. Raises ``PublishError`` if the broadcast breaks off;
        then a new group must be connected.
        """
        source = update.path
        self._received = {path: own for path, own in self._received.items() if path in keep and path != source}
        answers = await self._in_worker_threads("receive weights", update, None, source, sorted(keep))
        path = next((path for path in answers if path is not None), None)
        if path is None:
            raise PublishError(
                f"engine {self.name} cannot receive weights {update.version}: connect the transfer first"
            )
        self._received[source] = path

    def _as_received(self, update: WeightUpdate) -> WeightUpdate:
        """The update with the path of the received copy instead of the trainer's."""
        path = self._received.get(update.path)
        if path is None:
            return update
        if self._adapter is not None and update.adapter is not None:
            path = self._adapter.as_directory(update, path, base=self._config.policy_dir)
        return replace(update, path=path)

    async def stage_weights(self, update: WeightUpdate) -> None:
        """``InferenceEngine.stage_weights``. Only all weights, on a CPU, are prepared."""
        if self._config.device != "cpu" or self._adapter is not None:
            return
        update, self._staged = self._as_received(update), None
        timeout_s = self._config.call_timeout_s
        await self._in_worker_threads("stage weights", update, timeout_s, update.path, update.load_bucket_bytes)
        self._validator.check(update)
        self._staged = update

    async def load_weights(self, update: WeightUpdate) -> None:
        """``InferenceEngine.load_weights``."""
        async with self._control_lock:
            self._cut_off.check()
            if self._pause_mode is None:
                raise PublishError(
                    f"engine {self.name} is not paused; pause it before loading weights {update.version}"
                )
            await self._load_checked(await self._checked(update))

    async def switch_weights(self, update: WeightUpdate, mode: PauseMode) -> float:
        """``InferenceEngine.switch_weights``. A refused update never pauses the engine."""
        async with self._control_lock:
            self._cut_off.check()
            checked = await self._checked(update)
            self._is_switching = True
            try:
                asked = time.monotonic()  # the clock of a Ray actor's loop (uvloop) has milliseconds, and is old
                await self._pause(mode)
                acknowledge_seconds = time.monotonic() - asked
                await self._load_checked(checked)
                return acknowledge_seconds
            finally:
                self._is_switching = False
                self._changes.notify()

    async def _checked(self, update: WeightUpdate) -> WeightUpdate:
        """The update as this engine loads it, after all checks. Raises ``PublishError``."""
        update, staged, self._staged = self._as_received(update), self._staged, None
        if update != staged:
            self._validator.check(update)
        if update.is_compared:
            await asyncio.to_thread(require_as_sent, update)
        if self._adapter is not None:
            left_out = await self._control("compare layers", self._adapter.layers_without_adapters, update)
            if left_out:
                raise PublishError(
                    f"engine {self.name} cannot adapt {left_out[0]} (and {len(left_out) - 1} more layers): name them in "
                    "policy.lora.exclude_modules, or set policy.lora.publish=merged"
                )
        return update

    async def _load_checked(self, update: WeightUpdate) -> None:
        try:
            with self._counter.loading():
                await self._control(f"load weights {update.version}", self._load, update)
        except asyncio.CancelledError:
            self._kill(f"cancelled while loading weights {update.version}")
            raise
        self._validator.accept(update)
        self._version = update.version

    async def _load(self, update: WeightUpdate) -> None:
        arguments = (update.path, update.load_bucket_bytes, update.shared)
        loading = (
            self._adapter.load(update) if self._adapter else self._llm.collective_rpc("load_update", args=arguments)
        )
        await run_together(  # in this order, without a round trip between them: the engine is paused
            {
                "load": loading,
                "label": self._llm.update_weight_version(str(update.version)),
                # Requests frozen by pause(keep) are preempted, so that they recompute their cache under the new weights.
                "drop-prefixes": self._llm.reset_prefix_cache(reset_running_requests=True),
                "drop-encodings": self._llm.reset_encoder_cache(),
            }
        )

    async def version(self) -> int:
        """``InferenceEngine.version``."""
        self._cut_off.check()
        return self._version

    async def checksum(self) -> str:
        """``InferenceEngine.checksum``; one digest over all workers."""
        timeout_s = self._config.checksum_timeout_s
        async with self._control_lock:  # so that no heartbeat is awaited beside it
            digests = await self._call_core(timeout_s, "checksum", self._llm.collective_rpc, "weight_digest")
        return "+".join(digests)

    async def statistics(self) -> dict[str, int]:
        """Requests inside the engine, and its process ids."""
        self._cut_off.check()
        return {
            "num_requests": self._llm.get_num_unfinished_requests(),
            "process_id": os.getpid(),
            "core_process_id": int(self._core_processes()[0].pid or 0),
        }

    async def ping(self) -> EngineLoad:
        """``InferenceEngine.ping``. Returns at once during a control call, which has a deadline of its own."""
        self._cut_off.check()
        if not self._control_lock.locked():
            await self._control("a heartbeat", self._llm.engine_core.is_scheduler_paused_async)
        return self._counter.load

    async def evict(self, request_ids: Collection[str] | None = None) -> None:
        """``InferenceEngine.evict``. Calls that continue one of the requests are ended too."""
        await self._changes.until(lambda: not self._is_switching)  # after the requests that wait for the same
        self._cut_off.check()
        resumable = [name for name, is_resumable in self._requests.items() if is_resumable]
        if request_ids is not None:
            await self._llm.abort([name for name in resumable if belongs_to(name, request_ids)])
            return
        await self._llm.abort(resumable)
        await self._changes.until(lambda: not self._requests)

    async def close(self) -> None:
        """``InferenceEngine.close``."""
        self._kill("closed")

    async def _run(
        self, request: EngineRequest, *, streams: bool, scores_prompt: bool = False
    ) -> "AsyncGenerator[RequestOutput, None]":
        """Yield vLLM's outputs of one request, and raise its errors as ours."""
        from vllm.exceptions import VLLMClientError
        from vllm.inputs import tokens_input
        from vllm.v1.engine.exceptions import EngineDeadError as CoreDeadError
        from vllm.v1.engine.exceptions import EngineGenerateError

        await self._changes.until(lambda: not self._is_switching)
        self._cut_off.check()
        size = self._llm.model_config.get_vocab_size()
        check_prompt(self.name, request.prompt_token_ids, max_model_len=self.max_model_len, vocabulary_size=size)
        if request.sampling.structured is not None and self._llm.model_config.skip_tokenizer_init:
            raise RequestRefusedError(
                f"engine {self.name} cannot constrain an answer to a grammar: {self._config.policy_dir} has no tokenizer "
                f"(none of {', '.join(TOKENIZER_FILES)})"
            )
        prompt = tokens_input(request.prompt_token_ids.tolist())
        self._requests[request.request_id] = request.sampling.is_resumable
        try:
            params = vllm_sampling_params(
                request,
                streams=streams,
                stop_token_ids=self._stop_token_ids,
                stream_interval=self._config.stream_interval,
            )
            if scores_prompt:  # a cached prefix would have no log-probs
                params.prompt_logprobs, params.skip_reading_prefix_cache = 0, True
            lora = None if self._adapter is None else self._adapter.lora_request
            calls = self._llm.generate(prompt, params, request.request_id, lora_request=lora, priority=request.priority)
            async with contextlib.aclosing(calls) as outputs:
                async for output in outputs:
                    yield output
        except CoreDeadError as error:
            raise self._kill("its core process died") from error
        except (VLLMClientError, EngineGenerateError) as error:
            if self._cut_off.reason is not None:
                raise EngineDeadError(self._cut_off.reason) from error
            refusal = RequestRefusedError if isinstance(error, VLLMClientError) else InferenceError
            raise refusal(f"engine {self.name} refused request {request.request_id}: {error}") from error
        finally:
            self._requests.pop(request.request_id, None)
            self._changes.notify()

    async def prompt_logprobs(self, request_id: str, token_ids: TokenIds) -> Logprobs:
        """(T - 1,) log-prob in nats of each token after the first, computed as a prompt, at temperature 1 and without truncation.

        Raises as ``generate``.
        """
        sampling = SamplingParams(max_tokens=1)
        request = EngineRequest(request_id=request_id, prompt_token_ids=token_ids, sampling=sampling)
        async for output in self._run(request, streams=False, scores_prompt=True):
            found = output.prompt_logprobs or ()
        pairs = zip(token_ids.tolist()[1:], found[1:], strict=True)
        return column([position[token].logprob for token, position in pairs], np.float32)

    async def write_layer_outputs(self, request_id: str, token_ids: TokenIds, path: Path) -> None:
        """Write what each decoder layer computes of a prompt, as ``LayerOutputs`` keeps it, to a safetensors file.

        No other request may run meanwhile. Raises as ``generate``.
        """
        await self._on_workers("record layers", "record_layers")
        await self.prompt_logprobs(request_id, token_ids)  # reads no cached prefix
        await self._on_workers("write layers", "write_layers", str(path))

    def _request_state(self, request_id: str) -> Any:
        """The frontend's record of a running request. Only a request's last output has its tokens' versions."""
        processor = self._llm.output_processor
        return processor.request_states[processor.external_req_ids[request_id][0]]

    async def _on_workers(self, what: str, method: str, *args: Any) -> list[Any]:
        """The answers of a method of ``WorkerExtension`` on every worker."""
        return await self._control(what, self._llm.collective_rpc, method, args=args)

    async def _in_worker_threads(
        self, what: str, update: WeightUpdate, timeout_s: float | None, *args: Any
    ) -> list[Any]:
        """Call the method ``what``, which goes on in a thread where its answer is not None; return the answers once all threads have ended.

        Raises ``PublishError`` if one fails.
        """
        with outcome_socket() as outcomes:
            answers = await self._on_workers(what, what.replace(" ", "_"), *args, outcomes.getsockname())
            num_threads = sum(answer is not None for answer in answers)
            failed = await self._call_core(timeout_s, what, first_failure, outcomes, num_threads)
        if failed is not None:
            raise PublishError(f"engine {self.name} cannot {what} {update.version}: {failed}")
        return answers

    async def _control(self, what: str, call: Callable[..., Awaitable[T]], *args: Any, **kwargs: Any) -> T:
        """Await a control call of the core, within its deadline."""
        return await self._call_core(self._config.call_timeout_s, what, call, *args, **kwargs)

    async def _call_core(
        self, timeout_s: float | None, what: str, call: Callable[..., Awaitable[T]], *args: Any, **kwargs: Any
    ) -> T:
        """Await a call of the core; end it when the core dies, since vLLM would leave it pending for ever.

        After any failure the core's state is unknown, and the engine is dead.
        """
        try:
            async with asyncio.timeout(timeout_s):
                with self._cut_off.block():
                    return await call(*args, **kwargs)
        except TimeoutError as error:
            raise self._kill(f"no answer to {what} within {timeout_s or 0:g} s (engine.call_timeout_s)") from error
        except Exception as error:
            raise self._kill(f"{what} failed: {error}") from error

    def _core_processes(self) -> list[BaseProcess]:
        manager = self._llm.engine_core.resources.engine_manager
        return list(manager.processes) if manager is not None else []

    def _kill(self, reason: str) -> EngineDeadError:
        """Kill the core, fail all calls that wait for it, and return the error to raise. Idempotent."""
        if self._cut_off.reason is None:
            logger.info("engine %s ends: %s", self.name, reason)
            self._cut_off.cut(f"engine {self.name} is gone: {reason}")
            loop = asyncio.get_running_loop()
            for process in self._core_processes():
                loop.remove_reader(process.sentinel)
                process.kill()
            if self._adapter is not None:
                self._adapter.close()
            self._llm.shutdown()
            # If vLLM's own watch over the core has begun the shutdown, it leaves the sockets for this loop to close later; the end of
            # their context, which vLLM leaves to the garbage collector, waits for that.
            self._llm.engine_core.resources()
            self._llm.engine_core.ctx._shadow_obj.destroy(linger=0)
            self._llm.output_processor.propagate_error(EngineDeadError(self._cut_off.reason))
        return EngineDeadError(self._cut_off.reason)
