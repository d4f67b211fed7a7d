"""The end of a run: what failed is what is raised, what hangs is named, and nobody waits for ever."""

import asyncio
import contextlib
import signal
import threading
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest

from skyrl_async import main
from skyrl_async.composition.closing import ClosingStack
from skyrl_async.errors import GenerationError
from skyrl_async.runtime import daemon_threads
from skyrl_async.runtime.shutdown import Interruption, Phase, ShutdownRequested
from skyrl_async.runtime.tasks import first_failure, run_together
from skyrl_async.simulator.clock import run_in_virtual_time
from tests.cpu.quick_config import config_of
from tests.patience import PATIENCE_S


async def test_a_part_that_cannot_be_ended_hides_no_error_and_keeps_no_other_from_ending() -> None:
    ended = []

    class Engine:
        async def close(self) -> None:
            raise ConnectionError("it is gone")

    async def close_policy() -> None:
        ended.append("policy")

    stack = ClosingStack()
    stack.push_async_callback(close_policy)
    stack.push_async_callback(Engine().close)
    with pytest.raises(ZeroDivisionError):
        async with stack:
            raise ZeroDivisionError
    assert ended == ["policy"]
    (failure,) = stack.failures
    assert failure.endswith("Engine.close failed: ConnectionError: it is gone")


class Gone(contextlib.AbstractAsyncContextManager[None]):
    async def __aexit__(self, *error: object) -> None:
        raise ConnectionError("it is gone")


@contextlib.asynccontextmanager
async def failing_beside_the_block() -> AsyncIterator[None]:
    try:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(fail_now())
            yield
    except BaseExceptionGroup as failures:
        raise first_failure(failures) from None


async def end_of(
    context: contextlib.AbstractAsyncContextManager[None], body: Callable[[], Awaitable[None]], stack: ClosingStack
) -> None:
    async with stack:
        await stack.enter_async_context(context)
        await body()


async def test_a_context_that_fails_at_its_end_hides_no_error() -> None:
    with pytest.raises(ZeroDivisionError):
        await end_of(Gone(), fail_now, stack := ClosingStack())
    assert stack.failures == ["ConnectionError: it is gone"]
    with pytest.raises(ConnectionError):
        await end_of(Gone(), lambda: asyncio.sleep(0), ClosingStack())


async def test_a_context_whose_failure_ends_the_block_is_what_the_block_fails_of() -> None:
    for consequence in (wait, fail_while_cancelled):
        with pytest.raises(ZeroDivisionError, match="root"):
            await end_of(failing_beside_the_block(), consequence, ClosingStack())


def test_a_part_that_hangs_is_named_when_its_time_is_up() -> None:
    async def hang() -> None:
        await asyncio.Event().wait()

    async def main() -> tuple[list[str], float]:
        stack = ClosingStack(timeout_s=15.0)
        async with stack:
            stack.push_async_callback(hang)
            stack.push_async_callback(hang)
        return stack.failures, asyncio.get_running_loop().time()

    failures, seconds = run_in_virtual_time(main())
    assert seconds == 30.0
    assert all(failure.endswith("hang did not end within 15 s") for failure in failures) and len(failures) == 2


async def test_a_blocking_call_that_hangs_is_left_in_a_thread_that_no_exit_waits_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(daemon_threads, "_IDLE_S", 0.01)
    stack, released, threads = ClosingStack(timeout_s=0.05), threading.Event(), []

    def hang() -> None:
        threads.append(threading.current_thread())
        released.wait(timeout=PATIENCE_S)

    async with stack:
        stack.callback_in_thread("Ray", hang)
        stack.callback_in_thread("broken", lambda: 1 // 0)
    assert stack.threads.is_busy
    released.set()
    assert stack.failures == [
        "broken failed: ZeroDivisionError: integer division or modulo by zero",
        "Ray did not end within 0.05 s",
    ]
    assert threads[0].daemon
    threads[0].join(timeout=PATIENCE_S)
    assert not stack.threads.is_busy


async def root_cause(body: Callable[[], Awaitable[None]], *others: Callable[[], Awaitable[None]]) -> BaseException:
    """What is raised of a group whose body and tasks these are."""
    try:
        async with asyncio.TaskGroup() as tasks:
            for other in others:
                tasks.create_task(other())
            await asyncio.sleep(0)
            await body()
    except BaseExceptionGroup as failures:
        return first_failure(failures)
    raise AssertionError


async def wait() -> None:
    await asyncio.Event().wait()


async def fail_now() -> None:
    raise ZeroDivisionError("root")


async def fail_while_cancelled() -> None:
    try:
        await wait()
    finally:
        raise RuntimeError("consequence")


async def hide_the_cancellation() -> None:
    try:
        await wait()
    except asyncio.CancelledError:
        raise ConnectionError("consequence") from None


async def run_out_of_time() -> None:
    async with asyncio.timeout(0.01):
        await wait()


async def fail_in_a_group_of_its_own() -> None:
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(fail_now())
        await fail_while_cancelled()


async def fail_together() -> None:
    await run_together({"a": fail_while_cancelled(), "b": fail_now()})


@pytest.mark.parametrize("consequence", [fail_while_cancelled, hide_the_cancellation])
@pytest.mark.parametrize("cause", [fail_now, run_out_of_time, fail_in_a_group_of_its_own, fail_together])
@pytest.mark.parametrize("is_body", [True, False])
async def test_contract_8_the_root_cause_is_raised_and_not_what_others_made_of_their_cancellation(
    cause: Callable[[], Awaitable[None]], consequence: Callable[[], Awaitable[None]], is_body: bool
) -> None:
    found = await (root_cause(cause, consequence) if is_body else root_cause(consequence, cause))
    assert isinstance(found, TimeoutError if cause is run_out_of_time else ZeroDivisionError)
    printed = "".join(traceback.format_exception(found, chain=False))
    assert printed.count("Traceback") == 1 and "consequence" not in printed


class Interrupted:
    """A run under an ``Interruption`` in this thread, sent real signals; 8 s from the first one to the last resort but one."""

    def __init__(self, *phases: tuple[Phase, float]) -> None:
        self.phases = phases
        self.interruption = Interruption(8.0)

    def run(self, *signals: tuple[float, signal.Signals]) -> tuple[str, float]:
        """How the run ended, and when."""

        async def main() -> tuple[str, float]:
            loop = asyncio.get_running_loop()
            for at, number in signals:
                loop.call_later(at, signal.raise_signal, number)
            try:
                with self.interruption.attached():
                    return await self.play(), loop.time()
            except asyncio.CancelledError:
                asyncio.current_task().uncancel()  # type: ignore[union-attr]
                return "cancelled", loop.time()

        with self.interruption:
            return run_in_virtual_time(main())

    async def play(self) -> str:
        for phase, seconds in self.phases:
            self.interruption.enter(phase)
            try:
                async with self.interruption.shutdown.interruptible(wait_for_step=True):
                    await asyncio.sleep(seconds)
            except ShutdownRequested:
                await asyncio.sleep(1.0)
                return "saved"
        return "complete"


TRAINING = (Phase.TRAINING, 100.0)


@pytest.mark.parametrize(
    ("phases", "signals", "expected"),
    [
        ([(Phase.STARTING, 9.0), TRAINING], [3.0], ("cancelled", 3.0)),
        ([TRAINING], [3.0], ("saved", 8.0)),
        ([(Phase.TRAINING, 5.0)], [3.0], ("complete", 5.0)),
        ([TRAINING], [3.0, 4.0], ("cancelled", 4.0)),
        ([(Phase.FINISHING, 5.0)], [3.0], ("complete", 5.0)),
        ([(Phase.FINISHING, 5.0)], [3.0, 3.5], ("cancelled", 3.5)),
        ([(Phase.ENDING, 5.0)], [1.0, 2.0, 3.0], ("complete", 5.0)),
    ],
    ids=["boot", "left", "in time", "twice", "finishing", "finishing twice", "cleaning up"],
)
def test_what_signals_do_depends_on_the_phase(
    phases: list[tuple[Phase, float]], signals: list[float], expected: tuple[str, float]
) -> None:
    before = signal.getsignal(signal.SIGTERM)
    run = Interrupted(*phases)
    assert run.run(*((at, signal.SIGTERM) for at in signals)) == expected
    assert run.interruption.exit_code == 143
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_run_that_cannot_save_in_time_is_cancelled() -> None:
    class Stuck(Interrupted):
        async def play(self) -> str:
            self.interruption.enter(Phase.TRAINING)
            await asyncio.Event().wait()
            return "never"

    run = Stuck()
    assert run.run((3.0, signal.SIGINT)) == ("cancelled", 3.0 + 0.75 * 8.0)
    assert run.interruption.exit_code == 130


def test_two_signals_end_a_call_that_blocks_the_loop() -> None:
    class Blocked(Interrupted):
        async def play(self) -> str:
            signal.raise_signal(signal.SIGINT)
            with pytest.raises(KeyboardInterrupt):
                signal.raise_signal(signal.SIGINT)
            await asyncio.sleep(100)
            return "never"

    assert Blocked().run() == ("cancelled", 0.0)


@pytest.mark.parametrize("later", [RuntimeError("consequence"), asyncio.CancelledError(), KeyboardInterrupt()])
def test_a_run_says_what_it_failed_of_first_whatever_ended_it_then(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], later: BaseException
) -> None:
    async def fail(one_run: main._Run) -> None:
        one_run.interruption.shutdown.remember(GenerationError("the tool is broken"))
        raise later

    monkeypatch.setattr(main._Run, "execute", fail)
    assert main.run(config_of(f"trainer.output_dir={tmp_path}"), []) == 1
    assert "error: the tool is broken" in capsys.readouterr().err
