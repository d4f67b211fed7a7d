"""A key reaches its session and no other; what is closed accepts nothing; time and caps end sessions; memory stays flat."""

import gc
import logging
import tracemalloc
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, rule

from skyrl_async.config.schema.server import BranchPolicyName, ServerConfig
from skyrl_async.endpoint.sessions.session import Session, SessionState
from skyrl_async.endpoint.sessions.settings import (
    SessionLimits,
    SessionOutcome,
    SessionSampling,
    SessionSettings,
)
from skyrl_async.endpoint.sessions.store import SessionStore, front_end_of
from skyrl_async.errors import SessionClosedError, SessionNotFoundError, StateError
from skyrl_async.types import FinishReason, SamplingParams, Trajectory
from tests.cpu.session_trees import Policy, assistant, user


class Clock:
    """Time that a test moves."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


MakeStore = Callable[..., SessionStore]


@pytest.fixture
def make_store(clock: Clock) -> MakeStore:
    def make(max_finished: int = 1000, **limits: float) -> SessionStore:
        return SessionStore(
            SessionSettings(limits=SessionLimits(**limits)),  # type: ignore[arg-type]
            clock=clock,
            max_finished=max_finished,
        )

    return make


@pytest.fixture
def store(make_store: MakeStore) -> SessionStore:
    return make_store()


def finish(store: SessionStore, session_id: str, **outcome: Any) -> tuple[Trajectory, ...]:
    return store.finish(session_id, SessionOutcome(**outcome)).rows()


def say(session: Session, text: str = "b", **rest: object) -> None:
    """One request and its turn."""
    session.begin_request(0.0)
    Policy(session.tree).answer([user("a")], assistant(text), **rest)  # type: ignore[arg-type]
    session.end_request(0.0)


# Keys


def test_a_key_reaches_its_session_and_nothing_else_does(store: SessionStore) -> None:
    (one, key), (two, other) = store.create(), store.create()
    assert store.authenticate(key) is one and store.authenticate(other) is two
    secret = key.rpartition("-")[2]
    wrong = [
        "",
        "sk",
        secret,
        key[:-1],
        key + "0",
        key.upper(),
        f" {key}",
        key.replace(one.id, two.id),
        key.replace("sk-0", "sk-1"),
        f"sk-0-{one.id}-",
        f"sk-0-{one.id}-{'0' * len(secret)}",
        "sk-0--",
        "sk-0-\ud800-é",
    ]
    assert [store.authenticate(each) for each in wrong] == [None] * len(wrong)


def test_a_key_names_its_front_end(clock: Clock) -> None:
    store = SessionStore(SessionSettings(front_end=3), clock=clock)
    session, key = store.create()
    assert key.startswith(f"sk-3-{session.id}-")
    assert store.authenticate(key) is session
    assert front_end_of(key) == 3
    assert [front_end_of(text) for text in ("", "sk-secret", "a-b-c-d", "sk-²-c-d", "sk--1-c")] == [None] * 5


def test_no_key_is_kept_shown_or_logged(store: SessionStore, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG):
        session, key = store.create(label="group 3")
        say(session)
        store.authenticate(key), finish(store, session.id, reward=1.0), store.sweep(), store.delete(session.id)
    secret = key.rpartition("-")[2]
    session, key = store.create()
    everything = [repr(each) for each in (session, store, vars(session), vars(store))]
    assert secret not in caplog.text
    assert key.rpartition("-")[2] not in " ".join(everything)


# Finishing


def test_finishing_again_gives_the_first_rows_whatever_the_reward(store: SessionStore) -> None:
    session, key = store.create()
    say(session)
    first = finish(store, session.id, reward=1.0, metrics={"steps": 3.0})
    assert [(row.reward, row.metrics, row.is_abandoned) for row in first] == [(1.0, {"steps": 3.0}, False)]
    assert finish(store, session.id, reward=-1.0, is_abandoned=True) is first
    assert store.authenticate(key) is session
    assert store.statistics()["finished_total"] == 1


def test_a_finished_session_accepts_nothing_and_keeps_its_figures(store: SessionStore) -> None:
    session, _ = store.create()
    session.begin_request(0.0)
    tree = session.tree
    policy = Policy(tree)
    policy.answer([user("a")], assistant("b"))
    assert tree.newest[1] == (user("a"), assistant("b"))
    finish(store, session.id, reward=1.0)
    with pytest.raises(SessionClosedError, match=f"session {session.id} is finished; begin a new session"):
        session.begin_request(0.0)
    with pytest.raises(StateError, match="closed turn tree"):
        policy.answer([user("a")], assistant("late"))
    session.end_request(0.0)
    assert (session.num_turns, session.num_sampled_tokens, session.num_requests_open) == (1, 2, 0)
    assert tree.newest[1] == ()


@pytest.mark.parametrize("reward", [float("nan"), float("inf")])
def test_a_reward_that_is_no_number_leaves_the_session_open(store: SessionStore, reward: float) -> None:
    session, _ = store.create()
    with pytest.raises(ValueError, match="reward\n.*finite number"):
        finish(store, session.id, reward=reward)
    assert session.is_open


def test_the_store_decides_the_branch_policy(clock: Clock) -> None:
    store = SessionStore(SessionSettings(branches=BranchPolicyName.last), clock=clock)
    session, _ = store.create()
    say(session, "b"), say(session, "c")
    assert len(finish(store, session.id, reward=1.0)) == 1


def test_deleting_is_idempotent_and_ends_the_key(store: SessionStore) -> None:
    session, key = store.create()
    store.delete(session.id), store.delete(session.id), store.delete("never was")
    assert session.state is SessionState.DELETED
    assert store.authenticate(key) is None
    for attempt in (lambda: store.get(session.id), lambda: finish(store, session.id, reward=1.0)):
        with pytest.raises(SessionNotFoundError, match=f"there is no session '{session.id}'"):
            attempt()
    with pytest.raises(SessionClosedError, match="is deleted"):
        session.begin_request(0.0)
    with pytest.raises(SessionClosedError, match="is deleted"):
        session.finish(SessionOutcome(reward=1.0), SessionSettings())
    assert store.statistics()["deleted_total"] == 1


# Caps


def test_after_the_last_turn_the_next_request_is_refused(make_store: MakeStore) -> None:
    store = make_store(max_turns=2)
    session, _ = store.create()
    say(session), say(session)
    with pytest.raises(SessionClosedError, match=r"has sampled 2 turns, the most it may \(max_turns=2\)"):
        session.begin_request(0.0)
    assert session.is_open and session.num_requests_open == 0
    assert [row.is_truncated for row in finish(store, session.id, reward=1.0)] == [True, True]


def test_a_session_that_used_its_last_turn_and_asked_no_more_is_not_truncated(make_store: MakeStore) -> None:
    store = make_store(max_turns=1)
    session, _ = store.create()
    say(session)
    assert not finish(store, session.id, reward=1.0)[0].is_truncated


def test_sampled_tokens_are_capped(make_store: MakeStore) -> None:
    session, _ = make_store(max_tokens=5).create()
    say(session, num_tokens=4), say(session, num_tokens=3)
    with pytest.raises(SessionClosedError, match=r"has sampled 7 tokens, the most it may \(max_tokens=5\)"):
        session.begin_request(0.0)


def test_overflows_are_capped(store: SessionStore) -> None:
    session, _ = store.create()
    for _ in range(3):
        session.begin_request(0.0)
        session.count_overflow()
        session.end_request(0.0)
    assert session.num_overflows == 3
    with pytest.raises(SessionClosedError, match=r"overflowed the model's context 3 times, .*\(max_overflows=3\)"):
        session.begin_request(0.0)


def test_a_session_that_an_overflow_ended_is_truncated(store: SessionStore) -> None:
    (ended, _), (recovered, _) = store.create(), store.create()
    for session in (ended, recovered):
        say(session)
        session.count_overflow()
    say(recovered)
    assert {row.is_truncated for row in finish(store, ended.id, reward=1.0)} == {True}
    assert {row.is_truncated for row in finish(store, recovered.id, reward=1.0)} == {False}


def test_a_session_may_bring_limits_of_its_own(make_store: MakeStore) -> None:
    session, _ = make_store(max_turns=5).create(limits=SessionLimits(max_turns=1))
    say(session)
    with pytest.raises(SessionClosedError, match="max_turns=1"):
        session.begin_request(0.0)


# Time


def test_an_idle_session_expires_and_its_rows_are_abandoned(store: SessionStore, clock: Clock) -> None:
    session, key = store.create()
    say(session)
    clock.now = 599.0
    assert store.sweep() == []
    clock.now = 600.0
    assert store.sweep() == [session]
    assert store.sweep() == []
    with pytest.raises(SessionClosedError, match=r"has expired: it was idle for 600 s \(idle_timeout_s\)"):
        session.begin_request(600.0)
    assert store.authenticate(key) is session
    (row,) = finish(store, session.id, reward=1.0)
    assert row.is_abandoned and row.num_sampled_tokens == 0
    assert session.state is SessionState.FINISHED
    assert store.statistics()["expired_total"] == store.statistics()["finished_total"] == 1


def test_a_session_past_its_deadline_is_refused_and_abandoned_before_any_sweep(
    store: SessionStore, clock: Clock
) -> None:
    session, _ = store.create()
    say(session)
    clock.now = 700.0
    with pytest.raises(SessionClosedError, match="it was idle for 600 s"):
        session.begin_request(clock.now)
    assert finish(store, session.id, reward=1.0)[0].is_abandoned
    assert store.sweep() == []
    assert store.statistics()["expired_total"] == 1


def test_an_open_request_keeps_a_session_from_idling_but_not_from_its_lifetime(
    store: SessionStore, clock: Clock
) -> None:
    session, _ = store.create()
    session.begin_request(0.0)
    clock.now = 7199.0
    assert store.sweep() == []
    clock.now = 7200.0
    assert store.sweep() == [session]
    with pytest.raises(SessionClosedError, match=r"its lifetime of 7200 s is over \(lifetime_s\)"):
        session.begin_request(7200.0)
    session.end_request(7201.0)


def test_idle_time_counts_from_the_end_of_the_last_request(store: SessionStore, clock: Clock) -> None:
    session, _ = store.create()
    session.begin_request(100.0)
    session.begin_request(110.0)
    session.end_request(200.0)
    session.end_request(300.0)
    clock.now = 899.0
    assert store.sweep() == []
    clock.now = 900.0
    assert store.sweep() == [session]


def test_a_request_that_did_not_begin_cannot_end(store: SessionStore) -> None:
    session, _ = store.create()
    with pytest.raises(StateError, match="no request open"):
        session.end_request(0.0)


# What a session is made with


def test_the_trainer_s_sampling_replaces_the_harness_s() -> None:
    asked = SamplingParams(
        max_tokens=50,
        temperature=0.0,
        top_p=0.5,
        top_k=3,
        min_p=0.1,
        stop=("x",),
        presence_penalty=1.0,
        seed=3,
        ignore_eos=True,
    )
    applied = SessionSampling(temperature=0.9, top_p=0.95).applied_to(asked)
    assert applied == SamplingParams(max_tokens=50, temperature=0.9, top_p=0.95, stop=("x",))
    assert SessionSampling(max_tokens=20).applied_to(asked).max_tokens == 20
    assert SessionSampling(max_tokens=80).applied_to(asked).max_tokens == 50


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -1.0),
        ("temperature", float("nan")),
        ("temperature", "hot"),
        ("top_p", 0.0),
        ("top_k", 1.5),
        ("min_p", 2.0),
        ("max_tokens", 0),
    ],
)
def test_sampling_out_of_range_is_refused_by_name(field: str, value: object) -> None:
    with pytest.raises(ValueError, match=f"\n{field}\n"):
        SessionSampling(**{field: value})


def test_limits_are_those_of_the_configuration_unless_told_otherwise() -> None:
    server = ServerConfig()
    assert SessionLimits() == SessionLimits(
        max_turns=server.session_max_turns,
        max_tokens=server.session_max_tokens,
        idle_timeout_s=server.session_idle_timeout_s,
        lifetime_s=server.session_lifetime_s,
        max_concurrent_requests=server.max_concurrent_requests_per_session,
    )


# Memory


def test_finished_sessions_are_forgotten_in_the_order_of_closing(make_store: MakeStore, clock: Clock) -> None:
    store = make_store(max_finished=2)
    sessions = [store.create()[0] for _ in range(4)]
    finish(store, sessions[2].id, reward=1.0)
    clock.now = 600.0
    assert store.sweep() == [sessions[0], sessions[1], sessions[3]]
    for forgotten in (sessions[2], sessions[0]):
        with pytest.raises(SessionNotFoundError, match="2 others were closed since"):
            store.get(forgotten.id)
        assert forgotten.state is SessionState.DELETED
    assert store.get(sessions[1].id) is sessions[1]
    assert store.statistics()["forgotten_total"] == 2


def test_an_expired_session_that_is_finished_counts_as_closed_then(make_store: MakeStore, clock: Clock) -> None:
    store = make_store(max_finished=2)
    one, other = (store.create()[0] for _ in range(2))
    clock.now = 600.0
    store.sweep()
    finish(store, one.id, reward=1.0)
    finish(store, store.create()[0].id, reward=1.0)
    assert store.get(one.id) is one and other.state is SessionState.DELETED


def test_an_open_session_is_never_forgotten(make_store: MakeStore) -> None:
    store = make_store(max_finished=1)
    kept, key = store.create()
    for _ in range(10):
        finish(store, store.create()[0].id, reward=1.0)
    assert store.authenticate(key) is kept


@pytest.mark.slow
@pytest.mark.parametrize("end", ["deleted", "finished and never deleted", "left to expire"])
def test_memory_stays_flat_over_a_thousand_sessions(make_store: MakeStore, clock: Clock, end: str) -> None:
    store = make_store(max_finished=100)

    def play(num_sessions: int) -> int:
        for _ in range(num_sessions):
            session, _ = store.create()
            say(session, "b" * 1000)
            clock.now += 10.0
            if end == "left to expire":
                store.sweep()
            else:
                finish(store, session.id, reward=1.0)
            if end == "deleted":
                store.delete(session.id)
        gc.collect()
        return tracemalloc.get_traced_memory()[0]

    tracemalloc.start()
    try:
        sizes = [play(300) for _ in range(4)]
    finally:
        tracemalloc.stop()
    # A leak grows with every 300; a table that is doubled once does not.
    assert min(after - before for before, after in pairwise(sizes)) < 4_500, "less than 15 bytes for each"


# Any sequence of events


class StoreMachine(RuleBasedStateMachine):
    """A controller and several harnesses, with time passing."""

    keys = Bundle("keys")

    def __init__(self) -> None:
        super().__init__()
        self.clock = Clock()
        self.store = SessionStore(
            SessionSettings(limits=SessionLimits(idle_timeout_s=10, lifetime_s=50, max_turns=4)),
            clock=self.clock,
            max_finished=2,
        )
        self.session_of: dict[str, Session] = {}
        self.created: dict[Session, float] = {}
        self.active: dict[Session, float] = {}
        self.open_requests: dict[Session, int] = {}
        self.closed: list[Session] = []
        """Finished or expired, in the order of closing; the store may keep the last two only."""
        self.gone: set[Session] = set()
        self.rewarded: dict[Session, tuple] = {}

    @rule(target=keys)
    def create(self) -> str:
        session, key = self.store.create()
        assert session not in self.created
        self.session_of[key] = session
        self.created[session] = self.active[session] = self.clock.now
        self.open_requests[session] = 0
        return key

    @rule(seconds=st.integers(0, 7))
    def wait(self, seconds: int) -> None:
        self.clock.now += seconds

    @rule(key=keys)
    def begin_request(self, key: str) -> None:
        session = self.session_of[key]
        num_turns = session.num_turns
        may = session.is_open and not self.is_due(session) and num_turns < 4
        try:
            session.begin_request(self.clock.now)
        except SessionClosedError:
            assert not may
        else:
            assert may
            self.open_requests[session] += 1

    @rule(key=keys, is_answered=st.booleans())
    def end_request(self, key: str, is_answered: bool) -> None:
        session = self.session_of[key]
        if not self.open_requests[session]:
            return
        before = session.num_turns
        if is_answered and session.is_open:
            Policy(session.tree).answer([user("a")], assistant("b"), finish_reason=FinishReason.STOP)
            assert session.num_turns == before + 1
        session.end_request(self.clock.now)
        self.open_requests[session] -= 1
        self.active[session] = self.clock.now

    @rule(key=keys, reward=st.sampled_from([0.0, 1.0]))
    def finish(self, key: str, reward: float) -> None:
        session = self.session_of[key]
        if session in self.gone:
            with pytest.raises(SessionNotFoundError):
                finish(self.store, session.id, reward=reward)
            return
        state, is_due = session.state, self.is_due(session)
        found = finish(self.store, session.id, reward=reward)
        if state is SessionState.FINISHED:
            assert found is self.rewarded[session]
            return
        assert all(row.is_abandoned == (is_due or state is SessionState.EXPIRED) for row in found)
        assert sum(row.num_turns for row in found) == session.num_turns
        self.rewarded[session] = found
        self.close(session)

    @rule(key=keys)
    def delete(self, key: str) -> None:
        session = self.session_of[key]
        self.store.delete(session.id)
        self.gone.add(session)
        self.closed = [each for each in self.closed if each is not session]

    @rule()
    def sweep(self) -> None:
        due = [session for session in self.created if session.is_open and self.is_due(session)]
        assert self.store.sweep() == due
        for session in due:
            self.close(session)

    @invariant()
    def a_key_reaches_its_session_or_none(self) -> None:
        for key, session in self.session_of.items():
            assert self.store.authenticate(key) is (None if session in self.gone else session)

    @invariant()
    def the_store_holds_what_it_should_and_no_more(self) -> None:
        statistics = self.store.statistics()
        kept = [session for session in self.created if session not in self.gone]
        assert sum(statistics[f"{state}_sessions"] for state in ("open", "finished", "expired")) == len(kept)
        assert statistics["open_requests"] == sum(self.open_requests[session] for session in kept)
        assert statistics["created_total"] == len(self.created)

    def is_due(self, session: Session) -> bool:
        is_idle = not self.open_requests[session] and self.clock.now >= self.active[session] + 10
        return is_idle or self.clock.now >= self.created[session] + 50

    def close(self, session: Session) -> None:
        self.closed = [*(each for each in self.closed if each is not session), session]
        while len(self.closed) > 2:
            self.gone.add(self.closed.pop(0))


TestStoreMachine = pytest.mark.slow(StoreMachine.TestCase)
TestStoreMachine.settings = settings(stateful_step_count=50)
