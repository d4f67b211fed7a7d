"""``Policy`` over Ray: one actor per rank, each call sent to all of them and awaited with a deadline.

The only file here that knows Ray. Actors are never restarted: a rank without its optimizer state is of no use, so a
dead one ends the run, which resumes from its checkpoint.
"""

import asyncio
import uuid
from collections.abc import Awaitable, Sequence
from pathlib import Path
from typing import Any

import ray
from ray.actor import ActorHandle
from ray.exceptions import RayActorError, RayError, RayTaskError

from skyrl_async.algorithms.losses import merge_figures
from skyrl_async.errors import DeadlineError, SkyRLAsyncError, TrainingError
from skyrl_async.training.dispatch import split_work
from skyrl_async.training.rank import PolicyRank
from skyrl_async.training.settings import TrainingSettings
from skyrl_async.types import Trajectory, WeightUpdate


class _RankActor(PolicyRank):
    """A ``PolicyRank`` as a Ray actor."""

    def node_address(self) -> str:
        """Where the other ranks reach this one."""
        return str(ray.util.get_node_ip_address())


class PolicyWorkers:
    """Implements ``training.protocol.Policy``. Made by ``start``; ``names`` are its actors' names in Ray, by rank."""

    def __init__(self, settings: TrainingSettings, actors: dict[str, ActorHandle], *, call_timeout_s: float) -> None:
        self._settings = settings
        self.names = tuple(actors)
        self._actors = list(actors.values())
        self._call_timeout_s = call_timeout_s

    @classmethod
    async def start(
        cls,
        settings: TrainingSettings,
        *,
        num_workers: int,
        num_cpus_per_worker: float = 0.0,
        num_gpus_per_worker: float = 0.0,
        call_timeout_s: float = 1800.0,
        policy_path: Awaitable[Path] | None = None,
    ) -> "PolicyWorkers":
        """Start one actor per rank in the connected Ray, and load the policy on all of them.

        Args:
            settings: of every rank.
            policy_path: instead of ``settings.policy_path``, a directory that is being made: the workers' processes come up
                (some seconds of imports) while it is.
            num_workers: ranks, >= 1.
            num_cpus_per_worker: CPU slots Ray reserves for each.
            num_gpus_per_worker: GPUs Ray gives to each.
            call_timeout_s: deadline of every call, this one included.

        Raises:
            PolicyError: the policy directory cannot be used.
            TrainingError: a worker did not come up.
            DeadlineError: the workers took longer than ``call_timeout_s``.
        """
        run_id = uuid.uuid4().hex[:8]
        env_vars = {"OMP_NUM_THREADS": "1"} if settings.device == "cpu" else {}
        actor_class = ray.remote(_RankActor)
        names = [f"policy-worker-{rank}-{run_id}" for rank in range(num_workers)]
        actors = {
            name: actor_class.options(
                name=name,
                num_cpus=num_cpus_per_worker,
                num_gpus=num_gpus_per_worker,
                max_restarts=0,
                max_task_retries=0,
                runtime_env={"env_vars": env_vars},
            ).remote(settings, rank=rank, num_ranks=num_workers)
            for rank, name in enumerate(names)
        }
        workers = cls(settings, actors, call_timeout_s=call_timeout_s)
        try:
            await workers._rendezvous(await policy_path if policy_path is not None else None)
        except BaseException:
            workers._kill()
            raise
        return workers

    async def _rendezvous(self, policy_path: Path | None) -> None:
        address = None
        if len(self._actors) > 1:
            first = self._actors[:1]
            (host,) = await self._call("node_address", actors=first)
            (port,) = await self._call("open_store", host, actors=first)
            address = (host, port)
        await self._call("start", address, None if policy_path is None else str(policy_path))

    async def forward_backward(
        self, trajectories: Sequence[Trajectory], advantages: Sequence[float], version: int
    ) -> dict[str, float]:
        """See ``Policy``."""
        works = split_work(trajectories, advantages, version, settings=self._settings, num_ranks=len(self._actors))
        figures = await self._call_each("forward_backward", [(work,) for work in works])
        return {"num_tokens": 0.0} | merge_figures(figures)

    async def step(self, num_tokens: float) -> dict[str, float]:
        """See ``Policy``."""
        figures: list[dict[str, float]] = await self._call("step", num_tokens)
        return figures[0]

    async def logprobs(self, token_ids: Sequence[int]) -> list[float]:
        """See ``Policy``."""
        per_rank: list[list[float]] = await self._call("logprobs", list(token_ids))
        return per_rank[0]

    async def export_weights(self, version: int, directory: Path, bucket_bytes: int) -> WeightUpdate:
        """See ``Policy``."""
        updates = await self._call("export_weights", version, directory, bucket_bytes)
        assert isinstance(updates[0], WeightUpdate)
        return updates[0]

    async def save(self, directory: Path) -> None:
        """See ``Policy``."""
        await self._call("save", directory)

    async def load(self, directory: Path) -> None:
        """See ``Policy``."""
        await self._call("load", directory)

    async def export_hf(self, directory: Path) -> None:
        """See ``Policy``."""
        await self._call("export_hf", directory)

    async def close(self) -> None:
        """End every worker. Idempotent."""
        self._kill()

    def _kill(self) -> None:
        for actor in self._actors:
            ray.kill(actor)

    async def _call(self, method: str, *arguments: Any, actors: Sequence[ActorHandle] | None = None) -> list[Any]:
        actors = self._actors if actors is None else actors
        return await self._call_each(method, [arguments] * len(actors), actors=actors)

    async def _call_each(
        self, method: str, arguments: Sequence[tuple[Any, ...]], *, actors: Sequence[ActorHandle] | None = None
    ) -> list[Any]:
        """Call ``method`` on every actor with its own arguments; the first failure or the deadline ends the wait."""
        actors = self._actors if actors is None else actors
        references = [getattr(actor, method).remote(*own) for actor, own in zip(actors, arguments, strict=True)]
        try:
            async with asyncio.timeout(self._call_timeout_s):
                return list(await asyncio.gather(*references))
        except TimeoutError as error:
            raise DeadlineError(
                f"the policy workers did not finish {method} within training.step_timeout_s={self._call_timeout_s:g} "
                "seconds; raise it, or look for a stuck worker in Ray's logs"
            ) from error
        except RayError as error:
            raise _as_our_error(error, method) from error


def _as_our_error(error: RayError, method: str) -> SkyRLAsyncError:
    """The error a worker raised on purpose, or a ``TrainingError`` naming the call."""
    if isinstance(error, RayTaskError):
        if isinstance(error.cause, SkyRLAsyncError):
            return error.cause
        return TrainingError(f"a policy worker failed in {method}: {error.cause!r}")
    if isinstance(error, RayActorError):
        return TrainingError(
            f"a policy worker died in {method}: {str(error).splitlines()[0]}; resume with trainer.resume_mode=latest"
        )
    return TrainingError(f"Ray failed in {method} of the policy workers: {error}")
