"""The trace of a run: its rows, its parts, and what remains of old ones."""

import asyncio
import json
import logging
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from skyrl_async.metrics.trace import Trace
from skyrl_async.metrics.trace_parts import Span, TraceParts, read_spans, trace_end


class Clock:
    """Time that goes on only when told to."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def events(directory: Path, number: int = 1) -> list[dict[str, Any]]:
    return json.loads((directory / f"{number:06}.json").read_text())


def spans(path: Path) -> list[dict[str, Any]]:
    return [event for event in events(path) if event["ph"] == "X"]


def test_a_trace_is_a_json_array_with_named_processes_and_threads(tmp_path: Path) -> None:
    clock = Clock()
    with closing(Trace(tmp_path, clock)) as trace:
        with trace.span("train", "trainer", step=1) as args:
            clock.now += 0.25
            args["num_tokens"] = 7
        trace.past_span("publish", "engine-0/load", 100.0, 100.5, version=1)
    span = next(event for event in events(tmp_path) if event["ph"] == "X")
    assert (span["name"], span["ts"], span["dur"], span["args"]) == ("train", 0, 250_000, {"step": 1, "num_tokens": 7})
    names = [
        (event["name"], event["args"]["name"])
        for event in events(tmp_path)
        if event["name"] in ("process_name", "thread_name")
    ]
    assert set(names) == {
        ("process_name", "run"),
        ("process_name", "engine-0"),
        ("thread_name", "trainer"),
        ("thread_name", "load"),
    }


def test_a_span_inside_another_shares_its_row_and_lies_within_it(tmp_path: Path) -> None:
    clock = Clock()
    with closing(Trace(tmp_path, clock)) as trace, trace.span("outer", "publish"):
        clock.now += 1
        with trace.span("inner", "publish"):
            clock.now += 1
        clock.now += 1
    inner, outer = spans(tmp_path)
    assert inner["tid"] == outer["tid"]
    assert (outer["ts"], outer["dur"], inner["ts"], inner["dur"]) == (0, 3_000_000, 1_000_000, 1_000_000)


async def test_spans_of_concurrent_tasks_get_rows_of_their_own_and_rows_are_reused(tmp_path: Path) -> None:
    clock = Clock()
    trace = Trace(tmp_path, clock)
    both_are_open = asyncio.Barrier(2)

    async def group(uid: str) -> None:
        with trace.span("group", "generation", uid=uid):
            await both_are_open.wait()
            with trace.span("turn", "generation", uid=uid):
                clock.now += 1
                await both_are_open.wait()

    for _ in range(3):
        async with asyncio.TaskGroup() as tasks:
            for uid in ("a", "b"):
                tasks.create_task(group(uid), name=uid)
    trace.close()
    drawn = spans(tmp_path)
    assert len(drawn) == 12
    assert len({span["tid"] for span in drawn}) == 2
    assert_rows_nest(drawn)


@given(moves=st.lists(st.tuples(st.integers(0, 4), st.booleans()), max_size=60))
def test_spans_on_a_row_never_overlap_without_nesting(
    moves: list[tuple[int, bool]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    path, clock = tmp_path_factory.mktemp("trace"), Clock()

    async def run() -> None:
        """Five tasks, each opening or closing its innermost span when told to."""
        trace = Trace(path, clock)

        async def task(orders: asyncio.Queue[bool], done: asyncio.Event, depth: int = 0) -> None:
            while True:
                is_opening = await orders.get()
                clock.now += 1
                done.set()
                if not is_opening and depth > 0:
                    return
                if is_opening:
                    with trace.span(f"depth {depth}", "track"):
                        await task(orders, done, depth + 1)

        orders = [asyncio.Queue[bool]() for _ in range(5)]
        done = asyncio.Event()
        tasks = [asyncio.create_task(task(queue, done), name=f"task-{i}") for i, queue in enumerate(orders)]
        for index, is_opening in moves:
            done.clear()
            orders[index].put_nowait(is_opening)
            await done.wait()
            await asyncio.sleep(0)
        for one in tasks:
            one.cancel()
            clock.now += 1
            await asyncio.wait([one])
        trace.close()

    asyncio.run(run())
    assert_rows_nest(spans(path) if any(path.iterdir()) else [])


def assert_rows_nest(drawn: list[dict[str, Any]]) -> None:
    """Two spans on a row are either apart or one inside the other."""
    for one in drawn:
        for other in drawn:
            if one is other or one["tid"] != other["tid"]:
                continue
            begin, end = one["ts"], one["ts"] + one["dur"]
            other_begin, other_end = other["ts"], other["ts"] + other["dur"]
            is_apart = end <= other_begin or other_end <= begin
            is_inside = (begin >= other_begin and end <= other_end) or (other_begin >= begin and other_end <= end)
            assert is_apart or is_inside, (one, other)


def test_a_part_that_was_never_closed_needs_only_its_bracket_and_reads_without_its_last_torn_line(
    tmp_path: Path,
) -> None:
    trace = Trace(tmp_path, Clock())
    for name in ("first", "second"):
        with trace.span(name, "trainer"):
            pass
    assert trace._parts is not None
    asyncio.run(trace._parts.flush())
    part = tmp_path / "000001.json"
    assert len(json.loads(part.read_text() + "]")) == 6
    part.write_text(part.read_text()[:-5])
    assert [span.name for span in read_spans(tmp_path)] == ["first"]
    trace.close()


def test_events_of_other_programs_are_left_out(tmp_path: Path) -> None:
    trace = Trace(tmp_path / "trace", Clock())
    with trace.span("own", "trainer"):
        pass
    trace.close()
    span = {"ph": "X", "name": "other", "ts": 1, "dur": 1, "tid": 1}
    others = ({"ph": "X"}, {"name": "of no kind"}, span | {"ts": "1.5"}, span | {"args": []}, span | {"tid": "main"})
    lines = "".join(f"{json.dumps(event)},\n" for event in others)
    (tmp_path / "trace" / "000000.json").write_text(f"[\n{lines}")
    (tmp_path / "trace" / "000002.json").write_text(f"[\n{lines}")
    assert [span.name for span in read_spans(tmp_path)] == ["own"]
    assert trace_end(tmp_path) == 0.0


def test_every_part_opens_alone_with_the_names_of_all_rows(tmp_path: Path) -> None:
    clock = Clock()
    with closing(Trace(tmp_path, clock, max_bytes=16_000)) as trace:
        trace.past_span("load", "engine-0/load", 100.0, 101.0)
        for _ in range(45):
            clock.now += 1
            trace.past_span("step", "training", clock.now - 1, clock.now)
    for number in range(1, 5):
        names = {event["args"]["name"] for event in events(tmp_path, number) if event["name"].endswith("_name")}
        assert names == {"run", "training", "engine-0", "load"}
        assert (tmp_path / f"{number:06}.json").stat().st_size < 1_200
    drawn = list(read_spans(tmp_path))
    assert drawn[0] == Span(track="engine-0/load", lane=1, name="load", begin=0.0, end=1.0, args={})
    assert [span.begin for span in drawn[1:]] == [float(second) for second in range(len(drawn) - 1)]
    assert [span.begin for span in read_spans(tmp_path, 5.5, 7.0)] == [5.0, 6.0]


def test_a_copy_beside_the_parts_is_none_of_them(tmp_path: Path) -> None:
    for name in ("a", "b"):
        with closing(Trace(tmp_path, Clock())) as trace:
            trace.past_span(name, "training", 100.0, 101.0)
        (tmp_path / "000001-closed.json").write_bytes((tmp_path / "000001.json").read_bytes())
    assert [span.name for span in read_spans(tmp_path)] == ["a", "b"]


def test_where_the_names_of_rows_alone_fill_a_part_the_newest_spans_are_written(tmp_path: Path) -> None:
    with closing(Trace(tmp_path, Clock(), max_bytes=32_000)) as trace:
        for number in range(20):
            trace.past_span("load", f"engines/engine-{number}", 100.0, 101.0)
    assert "engines/engine-19" in {span.track for span in read_spans(tmp_path)}


def test_a_resumed_run_adds_parts_on_the_same_axis_of_time(tmp_path: Path) -> None:
    for monotonic, unix in ((100.0, 5_000.0), (7.0, 5_060.0), (7.0, 4_000.0)):
        with closing(TraceParts(tmp_path, lambda now=monotonic: now, 10**6, wall_clock=lambda now=unix: now)) as parts:
            parts.add_name({"ph": "M", "name": "thread_name", "tid": 1, "args": {"track": "publish", "lane": 1}})
            parts.add_span(monotonic + 1, monotonic + 2, {"ph": "X", "name": "send", "tid": 1})
    assert [path.name for path in sorted(tmp_path.iterdir())] == ["000001.json", "000002.json", "000003.json"]
    assert [span.begin for span in read_spans(tmp_path)] == [1.0, 61.0, 1.0]
    assert [events(tmp_path, number)[0]["args"]["unix_s"] for number in (1, 2, 3)] == [5_000.0] * 3


class AtOnce:
    """Threads whose calls have ended when they are submitted."""

    def __init__(self, name: str) -> None:
        pass

    def submit(self, call: Callable[..., None], *args: Any) -> Future[None]:
        future: Future[None] = Future()
        future.set_result(call(*args))
        return future


def test_after_30_000_steps_the_trace_is_within_its_limit_and_thinned_with_age(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("skyrl_async.runtime.disk_writer.DaemonThreads", AtOnce)
    monkeypatch.setattr("skyrl_async.metrics.trace_parts._WRITE_INTERVAL_S", 0.0)
    monkeypatch.setattr("skyrl_async.metrics.trace_parts._LINES_PER_TURN", 10**9)
    caplog.set_level(logging.INFO, "skyrl_async.metrics.trace_parts")
    clock, max_bytes, largest = Clock(), 600_000, 0
    with closing(Trace(tmp_path, clock, max_bytes)) as trace:
        for step in range(1, 30_001):
            clock.now += 1
            trace.past_span("optimizer_step", "training", clock.now - (0.9 if step % 100 == 0 else 0.5), clock.now)
            if step % 1_000 == 0:
                trace.past_span("checkpoint", "checkpoints", clock.now - 1e-3, clock.now)
                trace.moment("death", "training")
                largest = max(largest, sum(path.stat().st_size for path in tmp_path.iterdir()))
    assert max_bytes / 2 < largest <= max_bytes
    old, new = Counter(), Counter()
    for span in read_spans(tmp_path):
        (new if span.begin > 27_000 else old)[span.name, round(span.end - span.begin, 1)] += 1
    assert new["optimizer_step", 0.5] == 2_970
    assert old["optimizer_step", 0.9] >= 240 and old["checkpoint", 0.0] >= 24 <= old["death", 0.0]
    assert old["optimizer_step", 0.5] < 0.2 * 30_000
    assert all(json.loads(part.read_text()) for part in tmp_path.iterdir())
    assert [record.getMessage() for record in caplog.records] == [
        f"{tmp_path} reaches logging.trace_max_gb: old parts keep only long spans, or go"
    ]


ENDLESS = """
import itertools, pathlib, sys, time
from skyrl_async.metrics.trace import Trace
trace = Trace(pathlib.Path(sys.argv[1]), time.monotonic, 400_000)
for number in itertools.count():
    with trace.span("step", "training"):
        pass
    if number % 1_000 == 0:
        print(number, flush=True)
"""


def test_a_process_killed_while_parts_are_thinned_leaves_whole_ones_and_the_next_goes_on(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", ENDLESS, str(tmp_path)], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            parts = sorted(tmp_path.glob("*.json"))
            if int(line) > 10_000 and (parts[0].stem > "000001" or parts[0].stat().st_size < 10_000):
                process.kill()
                break
    *whole, newest = sorted(tmp_path.glob("*.json"))
    assert all(json.loads(part.read_text()) for part in whole)
    num_spans = len(list(read_spans(tmp_path)))
    with closing(Trace(tmp_path, Clock())) as trace, trace.span("resumed", "training"):
        pass
    assert sorted(tmp_path.glob("*.json"))[-1].stem == f"{int(newest.stem) + 1:06}"
    assert len(list(read_spans(tmp_path))) == num_spans + 1
