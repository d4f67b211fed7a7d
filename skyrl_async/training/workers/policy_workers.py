"""``Policy`` over Ray: one actor per rank. A call goes to all of them and has a deadline.

Ray restarts no actor: a rank without its optimizer state is of no use. If one dies, is stopped or hangs, the call fails with an error that
says so. The whole group is closed then, and ``recovering`` starts another.
"""

import asyncio
import contextlib
import os
import uuid
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import ray
import torch
from ray.actor import ActorHandle
from ray.exceptions import NodeDiedError, RayActorError, RayError, RayTaskError, WorkerCrashedError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, SchedulingStrategyT

from skyrl_async.errors import ConfigError, DeadlineError, SkyRLAsyncError, TrainingError, WorkerDiedError
from skyrl_async.runtime.heartbeat import DEFAULT, Heartbeat, listening
from skyrl_async.training.backends.settings import TrainingSettings
from skyrl_async.training.protocol import SharedWeights
from skyrl_async.training.rank_process import is_lost_peer
from skyrl_async.training.workers.dispatch import PolicyOverRanks
from skyrl_async.training.workers.rank_actor import (
    CONCURRENCY_GROUPS,
    ProcessAddress,
    RankActor,
    end_processes,
    own_address,
    process_at,
)
from skyrl_async.weights.transfer_group import GroupPlace

_COLLECTIVE_GRACE_S = 60.0
"""How much longer a rank waits for another one than a call may take, so that a call past its deadline says so."""
_CAUSE_TIMEOUT_S = 10.0
"""A rank fails at once when another one dies; Ray reports that death a moment later, and it explains the failure."""


class PolicyWorkers(PolicyOverRanks):
    """Implements ``training.protocol.SendingPolicy``. Made by ``start``; ``names`` are the actors' names in Ray, by rank."""

    def __init__(
        self, settings: TrainingSettings, actors: dict[str, ActorHandle], call_timeout_s: float, heartbeat: Heartbeat
    ) -> None:
        super().__init__(settings, num_ranks=len(actors))
        self._heartbeat = heartbeat
        self.names = tuple(actors)
        self._actors = list(actors.values())
        self._processes: dict[str, psutil.Process] = {}
        """Name -> its process, if that is on this machine."""
        self._call_timeout_s = call_timeout_s

    @classmethod
    async def start(
        cls,
        settings: TrainingSettings,
        *,
        num_workers: int,
        num_cpus_per_worker: float = 0.0,
        num_gpus_per_worker: float = 0.0,
        scheduling_strategies: Sequence[SchedulingStrategyT] | None = None,
        call_timeout_s: float = 1800.0,
        heartbeat: Heartbeat = DEFAULT,
        policy_path: Callable[[], Awaitable[Path]] | None = None,
        worker_name: str = "policy-worker",
        publishes: bool = False,
        loads_published: bool = False,
    ) -> "PolicyWorkers":
        """Start one actor per rank in the connected Ray, and load the policy on all of them.

        Args:
            settings: for every rank.
            num_workers: ranks, >= 1.
            num_cpus_per_worker: CPU slots that Ray reserves for each.
            num_gpus_per_worker: GPUs that Ray gives to each.
            scheduling_strategies: where Ray puts each rank; None leaves all, or one, to Ray.
            call_timeout_s: deadline of every call.
            heartbeat: a worker that leaves it unanswered during a call counts as dead.
            policy_path: returns the directory to load instead of ``settings.policy_path``, and may have to make it first; called once
                the workers' processes are up, on machines where they may run.
            worker_name: before the rank, in messages and in Ray.
            publishes: rank 0 writes weights to this machine's shared memory; without strategies, Ray is asked to put it here.
            loads_published: every rank reads weights there; each is put here likewise.

        Raises:
            ConfigError: a rank that ``publishes`` or ``loads_published`` is on another machine.
            PolicyError: the policy directory cannot be used.
            TrainingError: a worker did not come up.
            DeadlineError: the workers took longer than the deadline.
        """
        run_id = uuid.uuid4().hex[:8]
        actor_class = ray.remote(concurrency_groups=CONCURRENCY_GROUPS)(RankActor)
        here = own_address().node_id
        num_here = num_workers if loads_published else int(publishes)
        # Ray puts an actor that asks for no resources anywhere, unless it must be on a node. One that asks for more than this node has is
        # put elsewhere, and refused below with a message that says what to change.
        asks_for_resources = num_cpus_per_worker > 0 or num_gpus_per_worker > 0
        strategies = list(scheduling_strategies or [None] * num_workers)
        for rank in range(num_here):
            strategies[rank] = strategies[rank] or NodeAffinitySchedulingStrategy(here, soft=asks_for_resources)
        actors = {
            (name := f"{worker_name}-{rank}-{run_id}"): actor_class.options(
                name=name,
                num_cpus=num_cpus_per_worker,
                num_gpus=num_gpus_per_worker,
                scheduling_strategy=strategy,
                max_restarts=0,
                max_task_retries=0,
                runtime_env={"env_vars": environment_of(settings)},
            ).remote(settings, rank=rank, num_ranks=num_workers)
            for rank, strategy in zip(range(num_workers), strategies, strict=True)
        }
        workers = cls(settings, actors, call_timeout_s, heartbeat)
        try:
            nodes = await workers._boot()
            if elsewhere := [name for name, node in zip(workers.names[:num_here], nodes, strict=False) if node != here]:
                raise ConfigError(_must_be_here(elsewhere, publishes=publishes))
            await workers._rendezvous(nodes, await policy_path() if policy_path is not None else None)
        except BaseException:
            await workers.close()
            raise
        return workers

    async def _boot(self) -> list[str]:
        """Wait until every process is up; returns the ranks' nodes."""
        here = own_address()
        addresses: list[ProcessAddress] = await self._call_each("boot", [()] * self._num_ranks, is_up=False)
        for name, address in zip(self.names, addresses, strict=True):
            if (process := process_at(address, here)) is not None:
                self._processes[name] = process
        return [address.node_id for address in addresses]

    async def _rendezvous(self, nodes: Sequence[str], policy_path: Path | None) -> None:
        """Connect the ranks and load the policy. Every group meets at a port of its own, and never reaches what a dead one left open."""
        address = None
        if self._num_ranks > 1:
            host = await self._call_first("ip_address")
            address = (host, await self._call_first("open_store", host))
        path, num_on = None if policy_path is None else str(policy_path), Counter(nodes)
        shares = [None if "OMP_NUM_THREADS" in os.environ else num_on[node] for node in nodes]
        collective_timeout_s = self._call_timeout_s + _COLLECTIVE_GRACE_S
        await self._call_each("start", [(address, path, share, collective_timeout_s) for share in shares])

    async def open_transfer(self, num_receivers: int, backend: str, timeout_s: float) -> GroupPlace:
        """As ``SendingPolicy``."""
        place: GroupPlace = await self._call_first("open_transfer", num_receivers, backend, timeout_s)
        return place

    async def broadcast_weights(self, path: Path, bucket_bytes: int) -> None:
        """As ``SendingPolicy``."""
        await self._call_first("broadcast_weights", path, bucket_bytes)

    async def share_weights(self, version: int) -> SharedWeights:
        """As ``SendingPolicy``."""
        of_ranks: list[SharedWeights] = await self._call("share_weights", version)
        return {device: handles for shared in of_ranks for device, handles in shared.items()}

    async def unshare_weights(self) -> None:
        """As ``SendingPolicy``."""
        await self._call("unshare_weights")

    async def close(self) -> None:
        """End every worker, a frozen one too. Those of this machine are gone on return, their memory and ports free. Idempotent.

        On other machines Ray ends them: at once, or after 5 s if one is frozen.
        """
        for actor in self._actors:
            ray.kill(actor)
        processes, self._processes = self._processes, {}
        await end_processes(processes)

    async def _call_each(self, method: str, arguments: Sequence[tuple[Any, ...]], *, is_up: bool = True) -> list[Any]:
        """Call ``method`` on the first ranks, one per entry of ``arguments``. The first failure or the deadline ends the wait, and so does
        a worker that answers no heartbeat, unless it may not be up yet.
        """
        actors = self._actors[: len(arguments)]
        references = [getattr(actor, method).remote(*own) for actor, own in zip(actors, arguments, strict=True)]
        calls = {asyncio.wrap_future(r.future()): name for name, r in zip(self.names, references, strict=False)}
        try:
            async with self._listening(method, actors) if is_up else contextlib.nullcontext():
                await asyncio.wait(calls, timeout=self._call_timeout_s, return_when=asyncio.FIRST_EXCEPTION)
            if any(_is_lost_peer(error) for error in _failures(calls).values()):
                await asyncio.wait(calls, timeout=_CAUSE_TIMEOUT_S)
            if failures := _failures(calls):
                raise _as_our_error(failures, method) from next(iter(failures.values()))
            if unfinished := [name for call, name in calls.items() if not call.done()]:
                raise DeadlineError(
                    f"{', '.join(unfinished)} did not finish {method} within training.step_timeout_s="
                    f"{self._call_timeout_s:g} seconds; raise it, or look for a stuck worker in Ray's logs"
                )
            return [call.result() for call in calls]
        finally:
            for call in calls:
                call.cancel()

    def _listening(self, method: str, actors: Sequence[ActorHandle]) -> contextlib.AbstractAsyncContextManager[None]:
        """Ask for heartbeats while ``actors`` work on ``method``. Raises ``WorkerDiedError`` for one that does not answer."""

        def death_of(name: str) -> WorkerDiedError:
            return WorkerDiedError(f"{name} answered no heartbeat for {self._heartbeat.timeout_s:g} s in {method}")

        pings = {name: partial(_ping, actor) for name, actor in zip(self.names, actors, strict=False)}
        return listening(pings, self._heartbeat, death_of)


def _must_be_here(names: Sequence[str], *, publishes: bool) -> str:
    if publishes:
        return (
            f"{', '.join(names)} runs on another machine than the trainer, which maps the weights that it publishes: start the trainer on "
            "a machine of the cluster that has the devices of a policy worker free"
        )
    return (
        f"{', '.join(names)} must run on the trainer's machine, where the weights are published that training.num_logp_workers load: set "
        "it to what that machine has devices for, or to 0, or have placement.groups put logp into the policy's group"
    )


def environment_of(settings: TrainingSettings) -> dict[str, str]:
    """Environment variables of a rank's process, beside the caller's."""
    if settings.device == "cpu":
        return {"OMP_NUM_THREADS": "1"}
    return {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"} if settings.is_deterministic else {}  # cuBLAS needs it to repeat


async def _ping(actor: ActorHandle) -> None:
    with contextlib.suppress(RayError):  # the call itself says why a worker is dead
        await actor.ping.remote()


def _failures(calls: Mapping["asyncio.Future[Any]", str]) -> dict[str, BaseException]:
    """The errors of the finished calls, by worker."""
    failed = {name: call.exception() for call, name in calls.items() if call.done()}
    return {name: error for name, error in failed.items() if error is not None}


def _is_lost_peer(error: BaseException) -> bool:
    return isinstance(error, RayTaskError) and is_lost_peer(error.cause)


def _as_our_error(failures: Mapping[str, BaseException], method: str) -> SkyRLAsyncError:
    """The error that explains the others: one of ours, a death, a lost peer, anything else, in this order."""
    for error in failures.values():
        if isinstance(error, RayTaskError) and isinstance(error.cause, SkyRLAsyncError):
            return error.cause
    deaths = {n: e for n, e in failures.items() if isinstance(e, RayActorError | WorkerCrashedError | NodeDiedError)}
    if deaths:
        why = _cause_of_death(next(iter(deaths.values())))
        return WorkerDiedError(f"{', '.join(deaths)} died in {method} ({why})")
    for name, error in failures.items():
        if isinstance(error, RayTaskError) and is_lost_peer(error.cause):
            return WorkerDiedError(f"{name} lost the other workers in {method}: {error.cause}")
    name, error = next(iter(failures.items()))
    if not isinstance(error, RayTaskError):
        return TrainingError(f"Ray failed in {method} of {name}: {error}")
    if isinstance(error.cause, torch.AcceleratorError):  # every later call of that process would fail, too
        return WorkerDiedError(f"the device of {name} failed in {method}: {error.cause}")
    return TrainingError(f"{name} failed in {method}: {error.cause!r}")


def _cause_of_death(error: BaseException) -> str:
    """The part of Ray's paragraph that says why."""
    reasons = [line for line in str(error).splitlines() if " is dead because " in line] or str(error).splitlines()
    return reasons[0].partition(" Some common causes include")[0].rstrip(". ")
