"""Kills and freezes the processes of a real run one after another, at random and seeded, interrupts it, and checks what is left.

Flows in: how many faults, a seed, the roles to attack. Flows out: what became of each fault, and the audits. Does not know how a
run recovers.
"""

import contextlib
import json
import logging
import random
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from skyrl_async.engines.__main__ import ask
from skyrl_async.errors import InferenceError
from skyrl_async.tasks.tiny_policy import PolicySizes, build_tiny_policy
from skyrl_async.tasks.tokenizer import train_tokenizer
from tests.chaos.attacked_run import AttackedRun, Ending, Role
from tests.chaos.audit import Audit, audit
from tests.patience import PATIENCE_S

logger = logging.getLogger(__name__)

MINI_BATCH_SIZE = 2
MAX_STALENESS_STEPS = 2
KINDS = ("killed", "frozen")
DRAWN_GENERATORS = ("gym", "gym_http")
"""In process, token by token; over the endpoint."""
GENERATORS = (*DRAWN_GENERATORS, "agent")
"""The last one has a process per sample, over the endpoint."""
INTERRUPT_EVERY = 3
NUM_PROMPTS = 24
BOOTING = (Role.engine, Role.worker, Role.server)
"""Come up at the start of a run."""
_AGENT = Path(__file__).with_name("agent.py")
_BOOT_TIMEOUT_S = 600.0
_RECOVERY_TIMEOUT_S = 600.0
_MAX_DELAY_S = 3.0
_TRAINER_FROZEN_S = 3.0
_MOST_ENGINES = 3
_STEPS_AFTER = MAX_STALENESS_STEPS + 3
"""Steps that a run must complete after a fault to have survived it: more than it has groups for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One fault and what became of it."""

    role: Role
    is_freeze: bool
    """SIGSTOP for good instead of SIGKILL; the trainer, which nothing watches over, is let go again after 3 s."""
    at_step: int
    survived: bool
    """The run went on, by itself or (the trainer killed) when it was resumed."""
    seconds: float
    """Until ``_STEPS_AFTER`` more steps were complete."""
    is_interrupted: bool
    """Ctrl-C came upon it, and the run was resumed."""
    killed_coming_up: Role | None
    """What was killed then while the run came up again."""
    problems: dict[str, int]
    """What the audit found afterwards, and what processes and shared memory it left."""


class Attack:
    """A run under attack, in a directory of its own.

    Args:
        directory: an empty one.
        seed: of the choice of victims and moments.
        roles: to choose from.
        kinds: of faults: killed, frozen, or both.
        generator: one of ``GENERATORS``; None: of ``DRAWN_GENERATORS``, by the seed.
        interrupt_every: one of so many faults in a row, drawn by the seed, is followed by Ctrl-C, and by another kill while the run comes
            up again; 0: none. A trainer that was killed cannot be interrupted.
        has_market: before each fault an engine leaves with a warning, or another one comes: removed and added over the control socket.
        overrides: further ones for the run.
    """

    def __init__(
        self,
        directory: Path,
        *,
        seed: int,
        roles: Sequence[Role] = tuple(Role),
        kinds: Sequence[str] = KINDS,
        generator: str | None = None,
        interrupt_every: int = INTERRUPT_EVERY,
        has_market: bool = False,
        overrides: Sequence[str] = (),
    ) -> None:
        self._rng = random.Random(seed)
        self._interrupts = random.Random(f"interrupts-{seed}")
        self._boots = random.Random(f"boots-{seed}")
        self._boot_roles = [role for role in roles if role in BOOTING and "killed" in kinds]
        self._interrupt_every = interrupt_every
        self._market = random.Random(f"market-{seed}") if has_market else None
        self.num_traded: dict[str, int] = {"add": 0, "remove": 0}
        """Engines that came, and that left with a warning."""
        self.generator = generator or random.Random(f"generator-{seed}").choice(DRAWN_GENERATORS)
        self.ending: Ending | None = None
        """What the last Ctrl-C left; None before that."""
        self._kinds = [(role, kind == "frozen") for role in roles for kind in kinds]
        self._run_dir = directory / "run"
        self._uids = write_workplace(directory)
        self._run = AttackedRun([*overrides_of(directory, self.generator), *overrides], self._run_dir)

    def run(self, num_faults: int) -> Iterator[Fault]:
        """Start the run, and yield each fault once it is survived or not. At the end the run is interrupted: see ``ending``."""
        self._run.start()
        try:
            if not self._run.wait(lambda: self._run.step >= _STEPS_AFTER, _BOOT_TIMEOUT_S):
                raise RuntimeError(f"the run did not begin, see {self._run.output_path}")
            for (role, is_freeze), is_interrupted in zip(
                self._sequence(num_faults), self._interruptions(num_faults), strict=True
            ):
                yield self._attack(role, is_freeze, is_interrupted and (is_freeze or role is not Role.trainer))
            self._run.interrupt()
            self.ending = self._run.ending()
            logger.info("Ctrl-C at the end: %s", self.ending)
        finally:
            self._run.close()

    def audit(self) -> Audit:
        """Of the files as they are."""
        return audit(
            self._run_dir, uids=self._uids, mini_batch_size=MINI_BATCH_SIZE, max_staleness_steps=MAX_STALENESS_STEPS
        )

    @property
    def unsaved_steps(self) -> int:
        """Of the steps on record, how many the newest checkpoint lacks: none after Ctrl-C at the end."""
        return self._run.step - self.audit().steps

    def _sequence(self, num_faults: int) -> list[tuple[Role, bool]]:
        """Every kind of fault about equally often, in random order."""
        chosen: list[tuple[Role, bool]] = []
        while len(chosen) < num_faults:
            chosen += self._rng.sample(self._kinds, k=len(self._kinds))
        return chosen[:num_faults]

    def _interruptions(self, num_faults: int) -> list[bool]:
        """Whether Ctrl-C comes upon each fault."""
        every = self._interrupt_every
        chosen: list[bool] = []
        while len(chosen) < num_faults:
            chosen += self._interrupts.sample([True] + [False] * (every - 1), k=every) if every else [False]
        return chosen[:num_faults]

    def _attack(self, role: Role, is_freeze: bool, is_interrupted: bool) -> Fault:
        self._trade()
        time.sleep(self._rng.uniform(0, _MAX_DELAY_S))
        victim = self._strike(role, signal.SIGSTOP if is_freeze else signal.SIGKILL)
        step, started = self._run.step, time.monotonic()
        logger.info("step %d: %s %s %s", step, "freeze" if is_freeze else "kill", role, victim)
        if is_interrupted:
            time.sleep(self._interrupts.uniform(0, _MAX_DELAY_S))
            self._run.interrupt()
        problems: dict[str, int] = {}
        target, coming_up = step + _STEPS_AFTER, None
        if role is Role.trainer and is_freeze:
            time.sleep(_TRAINER_FROZEN_S)
            self._run.find(role, self._rng).send_signal(signal.SIGCONT)  # type: ignore[union-attr]
        elif role is Role.trainer:
            if left := self._run.wait_until_gone(PATIENCE_S):
                problems = {"processes_left": len(left)}
            self._run.resume()
        if is_interrupted:
            ending = self._run.ending()
            logger.info("Ctrl-C: %s", ending)
            problems = ending.problems()
            target = self._run.step + _STEPS_AFTER
            self._run.resume()
            coming_up = self._kill_coming_up()
        survived = victim is not None and self._run.wait(lambda: self._run.step >= target, _RECOVERY_TIMEOUT_S)
        seconds = time.monotonic() - started
        problems |= self.audit().problems()
        if not survived:
            self._start_over()
        return Fault(
            role=role,
            is_freeze=is_freeze,
            at_step=step,
            survived=survived,
            seconds=seconds,
            is_interrupted=is_interrupted,
            killed_coming_up=coming_up,
            problems=problems,
        )

    def _trade(self) -> None:
        """An engine comes or leaves, whichever can be and the seed draws; the last one that serves stays."""
        if self._market is None:
            return
        try:
            serving = [row["name"] for row in ask(self._run_dir, action="list") if row["serving"]]
            can = ["add"] * (len(serving) < _MOST_ENGINES) + ["remove"] * (len(serving) > 1)
            action = self._market.choice(can)
            ask(self._run_dir, action=action, name=self._market.choice(serving))
            self.num_traded[action] += 1
            logger.info("the market: %s, with %s serving before", action, ", ".join(serving))
        except InferenceError as error:
            logger.info("the market: %s", error)

    def _kill_coming_up(self) -> Role | None:
        """Kill a process of a run that boots, soon after it appears; its role, None where none may be killed."""
        if not self._boot_roles:
            return None
        role = self._boots.choice(self._boot_roles)
        victim = self._strike(role, signal.SIGKILL, delay_s=self._boots.uniform(0, _MAX_DELAY_S))
        logger.info("coming up: kill %s %s", role, victim)
        return role

    def _strike(self, role: Role, sign: signal.Signals, *, delay_s: float = 0.0) -> int | None:
        """Send a signal to one of the processes of a role, ``delay_s`` after there is one; its id, None when none appears."""
        struck: list[int] = []

        def try_once() -> bool:
            with contextlib.suppress(psutil.NoSuchProcess):
                if (victim := self._run.find(role, self._rng)) is not None:
                    time.sleep(delay_s)
                    victim.send_signal(sign)
                    struck.append(victim.pid)
            return bool(struck)

        self._run.wait(try_once, _RECOVERY_TIMEOUT_S)
        return struck[0] if struck else None

    def _start_over(self) -> None:
        """Take up a run that did not survive, so that the next fault finds one."""
        logger.warning("the run did not survive (exit code %s), see %s", self._run.exit_code, self._run.output_path)
        self._run.close()
        step = self._run.step
        self._run.resume()
        if not self._run.wait(lambda: self._run.step >= step + _STEPS_AFTER, _BOOT_TIMEOUT_S):
            raise RuntimeError(f"the run cannot be resumed, see {self._run.output_path}")


def write_workplace(directory: Path) -> set[str]:
    """A tiny random policy and prompts with an environment that plays in processes; returns the prompts' uids."""
    sizes = PolicySizes(hidden_size=64, num_layers=2, num_heads=2, intermediate_size=128)
    build_tiny_policy(directory / "policy", sizes, train_tokenizer(["Extend 3248 until 0."]), seed=0)
    words = [f"word{i}" for i in range(NUM_PROMPTS)]
    rows = [{"uid": word, "prompt": [{"role": "user", "content": f"Spell {word}."}], "word": word} for word in words]
    (directory / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return set(words)


def overrides_of(directory: Path, generator: str) -> list[str]:
    """A run small enough to boot and step in seconds, with every part in a process of its own, that finds out about faults soon."""
    return [
        f"policy.path={directory / 'policy'}",
        "task=dataset",
        f"task.train_files=[{directory / 'prompts.jsonl'}]",
        "task.env_class=tests.chaos.environment:ChildEnv",
        f"generator.kind={generator}",
        *(_agent_overrides() if generator == "agent" else []),
        "server.enabled=true",
        "generator.n_samples_per_prompt=2",
        "generator.sampling.max_tokens=48",
        "generator.rollout_timeout_s=30",
        "engine.num_engines=2",
        "engine.max_model_len=256",
        "engine.max_num_seqs=32",
        "engine.call_timeout_s=10",
        "engine.heartbeat_interval_s=1",
        "engine.heartbeat_timeout_s=5",
        "trainer.algorithm.advantage_estimator=gae",
        "engine.max_restarts=1000",
        "engine.restart_backoff_s=0.1",
        "server.heartbeat_interval_s=1",
        "server.heartbeat_timeout_s=5",
        "server.max_restarts=1000",
        f"trainer.output_dir={directory / 'run'}",
        f"trainer.policy_mini_batch_size={MINI_BATCH_SIZE}",
        f"trainer.max_staleness_steps={MAX_STALENESS_STEPS}",
        "trainer.num_steps=1000000",
        "trainer.checkpoint_interval_steps=1",
        "trainer.logprob_probe_interval_steps=1",
        "trainer.eval_interval_steps=0",
        "training.heartbeat_interval_s=1",
        "training.heartbeat_timeout_s=10",
        "trainer.max_restarts=1000",
        "evaluation.num_prompts=0",
        "evaluation.sampling.max_tokens=48",
        "weight_sync.verify_checksums=true",
        "logging.tensorboard=false",
        f"cache_dir={directory / 'cache'}",
    ]


def _agent_overrides() -> list[str]:
    return [f"generator.command='{sys.executable} {_AGENT}'", "generator.agent_timeout_s=20"]
