"""One rank of the policy: micro-batches in, gradients on a ``TrainingBackend``, steps, weights and checkpoints out.

Synchronous, and free of Ray: ``PolicyWorkers`` runs one per actor, ``InProcessPolicy`` one in this process. Every
method but ``open_store``, ``send_weights`` and those that share weights is collective over the ranks.
"""

import contextlib
import logging
import math
import os
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from skyrl_async.algorithms.batching import MicroBatch, Row, collate
from skyrl_async.algorithms.losses import merge_figures, token_figures
from skyrl_async.algorithms.off_policy import sample_size_figures
from skyrl_async.errors import CheckpointError, ConfigError, TrainingError
from skyrl_async.training.backends import process_group
from skyrl_async.training.backends.assembly import (
    Reference,
    load_model,
    load_reference,
    make_backend,
    make_objective,
    make_token_logprobs,
)
from skyrl_async.training.backends.frozen import FrozenBackend
from skyrl_async.training.backends.optimizer import WarmupSchedule, make_optimizer
from skyrl_async.training.backends.settings import TrainingSettings
from skyrl_async.training.backends.state_files import save_state
from skyrl_async.training.backends.token_logprobs import Entropies, TokenLogprobs, batch_logprobs, row_logprobs
from skyrl_async.training.export.device_copies import DeviceCopies
from skyrl_async.training.export.hf_export import as_peft_directory, export_hf_directory, export_peft_directory
from skyrl_async.training.export.manifest import check_adapter, check_manifest, write_manifest
from skyrl_async.training.export.staging import Staging
from skyrl_async.training.protocol import TrainingBackend
from skyrl_async.training.rng import restore_rng_state, rng_state, seed_all, use_repeating_kernels
from skyrl_async.training.workers.bad_step import TrainedRows
from skyrl_async.training.workers.dispatch import LogprobWork, RankLogprobs, RankWork
from skyrl_async.types import LogprobModel, WeightUpdate

logger = logging.getLogger(__name__)

NamedTensors = Iterator[tuple[str, torch.Tensor]]
COLLECTIVE_TIMEOUT_S = 1800.0
"""Backstop inside a rank; the caller's own deadline is what users set."""
_TOTAL = "total"
"""Among a micro-batch's figures, what is minimised; it leaves no rank."""


class PolicyRank:
    """Made cheaply, then started together with the other ranks."""

    def __init__(self, settings: TrainingSettings, *, rank: int = 0, num_ranks: int = 1) -> None:
        self._settings = settings
        self._rank = rank
        self._num_ranks = num_ranks
        self._store: dist.Store | None = None
        self._staging = Staging()
        self._copies = DeviceCopies(torch.device(settings.device)) if settings.shares_weights else None
        self._trained_rows = TrainedRows()
        self._objective = make_objective(settings)
        self._backend: TrainingBackend
        self._token_logprobs: TokenLogprobs
        self._reference: Reference | None = None
        self._model_type: str

    def open_store(self, host: str) -> int:
        """Open the store where the ranks meet, in this process (rank 0); return its port."""
        store = dist.TCPStore(host, 0, self._num_ranks, is_master=True, wait_for_workers=False)
        self._store = store
        return int(store.port)

    def start(
        self,
        store_address: tuple[str, int] | None = None,
        policy_path: str | None = None,
        num_ranks_here: int | None = None,
    ) -> None:
        """Join the other ranks at ``store_address`` (host, port) and load the policy (of ``policy_path``, where given).

        Ray gives an actor one thread. On GPUs, what is computed on the host, such as an offloaded optimizer's steps, takes a part of the
        machine's cores, which it shares with the other ranks among ``num_ranks_here``; None: as many as ``OMP_NUM_THREADS`` says.

        Raises:
            PolicyError: the policy directory cannot be used.
            ConfigError: CUDA was asked for where there is none.
        """
        if policy_path is not None:
            self._settings = replace(self._settings, policy_path=policy_path)
        if self._settings.device == "cuda" and not torch.cuda.is_available():
            raise ConfigError(
                "training.device is cuda, but this machine has no usable CUDA device; set training.device=cpu"
            )
        device = (
            torch.device("cuda", torch.cuda.current_device())
            if self._settings.device == "cuda"
            else torch.device("cpu")
        )
        if num_ranks_here is not None and device.type == "cuda":
            torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // num_ranks_here))
        if self._settings.is_deterministic and device.type == "cuda":
            use_repeating_kernels()  # before there is a group: torch keeps NCCL from sums that do not repeat when it makes one
        if store_address is not None and self._store is None:
            self._store = dist.TCPStore(*store_address, self._num_ranks, is_master=False)
        process_group.join(
            rank=self._rank,
            num_ranks=self._num_ranks,
            store=self._store,
            device=device,
            timeout_s=COLLECTIVE_TIMEOUT_S,
        )
        try:
            self._build(device)
        except BaseException:
            process_group.leave()
            raise

    def _build(self, device: torch.device) -> None:
        settings = self._settings
        seed_all(settings.seed + self._rank)
        model = load_model(Path(settings.policy_path), trust_remote_code=settings.trust_remote_code)
        self._model_type = str(model.config.model_type)
        self._device = device
        self._backend = make_backend(settings, device)
        module = self._backend.build(
            lambda: model,
            lambda parameters: make_optimizer(parameters, settings),
            lambda optimizer: WarmupSchedule(optimizer, settings),
        )
        self._token_logprobs = make_token_logprobs(module, settings)
        self._reference = load_reference(settings, device, self._backend, self._token_logprobs)
        num_parameters = sum(math.prod(shape) for shape in self._backend.parameter_shapes().values())
        logger.info(
            "rank %d of %d %s %s: %d parameters",
            self._rank,
            self._num_ranks,
            "trains" if settings.trains else "holds",
            settings.policy_path,
            num_parameters,
        )

    def forward_backward(self, work: RankWork) -> dict[str, float]:
        """Accumulate the gradient of this rank's summed loss; return its figures (see ``losses.token_figures``).

        Raises:
            TrainingError: the loss is not finite, on this rank or another: every rank says so, none is left waiting, and none can step any
                more.
        """
        figures = []
        for index, rows in enumerate(work.micro_batches):
            is_last = index == len(work.micro_batches) - 1
            figures.append(self._run_micro_batch(rows, work, is_last=is_last))
        merged = merge_figures(figures)
        self._refuse_unless_finite(merged.pop(_TOTAL, 0.0), sum(map(len, work.micro_batches)), work.version)
        return merged

    def _refuse_unless_finite(self, total: float, num_rows: int, version: int) -> None:
        """Every rank refuses the loss of any, so that each still can write its rows. Collective."""
        of_ranks = torch.zeros(self._num_ranks, 2, dtype=torch.float64)
        of_ranks[self._rank] = torch.tensor([total, num_rows], dtype=torch.float64)
        dist.all_reduce(of_ranks)
        for rank, (loss, num) in enumerate(of_ranks.tolist()):
            if not math.isfinite(loss):
                raise TrainingError(
                    f"the loss of {num:.0f} rows at version {version} is {loss} on rank {rank}. {self._save_trained_rows()}"
                )

    def _save_trained_rows(self) -> str:
        """Where what the ranks trained since the last step can be studied, a sentence. Collective: none goes on before all have written."""
        if self._settings.bad_step_dir is None:
            return "Nobody asked for the step's rows"
        path = failure = None
        try:
            path = self._trained_rows.write(Path(self._settings.bad_step_dir), self._rank)
        except OSError as error:
            failure = f"those of rank {self._rank} could not be written: {error}"
        of_ranks: list[tuple[str | None, str | None]] = [(None, None)] * self._num_ranks
        dist.all_gather_object(of_ranks, (path, failure))
        paths = [path for path, _ in of_ranks if path is not None]
        where = f"are in {' and '.join(paths)}" if paths else "are lost"
        failures = [failure for _, failure in of_ranks if failure is not None]
        return "; ".join([f"The step's rows, with their log-probs and advantages, {where}", *failures])

    def _run_micro_batch(self, rows: Sequence[Row], work: RankWork, *, is_last: bool) -> dict[str, float]:
        batch = collate(rows, self._device, is_packed=self._settings.use_sample_packing)
        ref_logprobs = batch.ref_logprobs
        if work.runs_reference:
            with self._held_reference() as reference:
                ref_logprobs = batch_logprobs(reference, batch, temperature=self._settings.temperature)
        with contextlib.nullcontext() if work.has_gradient else torch.no_grad():
            logprobs, entropies = self._token_logprobs(
                batch.input_ids,
                batch.positions,
                batch.targets,
                temperature=self._settings.temperature,
                entropies=Entropies.GRADIENTS if self._objective.entropy_coef else Entropies.VALUES,
                row_lengths=batch.row_lengths,
            )
            loss = self._objective(logprobs, batch, ref_logprobs, entropies)
        if work.has_gradient:
            self._backend.backward(loss.total, is_last=is_last)
        if not rows:
            return {}
        self._trained_rows.add(rows, logprobs, work.version)
        lags = _token_lags(batch, work.version)
        figures = token_figures(loss.tokens, logprobs.detach(), batch.behavior_logprobs, lags)
        figures |= sample_size_figures(logprobs, batch, lags)
        if loss.corrected is not None:
            figures |= loss.corrected.figures(lags)
        figures["entropy_sum"] = entropies.detach().double().sum().item()
        return figures | loss.figures() | {_TOTAL: loss.total.item()}

    def step(self, denominator: float) -> dict[str, float]:
        """Apply what is accumulated, divided by ``denominator``; return ``grad_norm`` and the ``lr`` it was applied with.

        Raises:
            TrainingError: there are no tokens, or the gradient is not finite; nothing is applied.
        """
        if denominator <= 0:
            raise TrainingError(
                f"a step needs a denominator > 0, got {denominator}: no trajectory of the mini-batch has a token that is trained: "
                "its answers are empty, or all of them were abandoned"
            )
        lr = self._backend.lr
        try:
            grad_norm = self._backend.step(denominator=float(denominator), max_grad_norm=self._settings.max_grad_norm)
        except TrainingError as error:
            raise TrainingError(f"{error}. {self._save_trained_rows()}") from error
        finally:
            self._trained_rows.clear()
        return {"grad_norm": grad_norm, "lr": lr}

    @torch.no_grad()
    def logprobs(self, token_ids: Sequence[int]) -> list[float]:
        """Log-prob in nats of each token after the first, at temperature 1: ``len(token_ids) - 1`` values."""
        if len(token_ids) < 2:
            return []
        ids = torch.tensor(token_ids, dtype=torch.int64, device=self._device)
        positions = torch.arange(len(token_ids) - 1, device=self._device)
        logprobs, _ = self._token_logprobs(ids.unsqueeze(0), positions, ids[1:], temperature=1.0)
        return [float(value) for value in logprobs.tolist()]

    def logprobs_of(self, work: LogprobWork) -> RankLogprobs:
        """This rank's part of ``Policy.logprobs_of``."""
        is_ref = work.model is LogprobModel.REF
        with self._held_reference() if is_ref else contextlib.nullcontext(self._token_logprobs) as model:
            values = row_logprobs(
                model,
                work.micro_batches,
                device=self._device,
                temperature=self._settings.temperature,
                is_packed=self._settings.use_sample_packing,
            )
        return RankLogprobs(micro_batches=values, version=0 if is_ref else self._backend.version)

    def _held_reference(self) -> contextlib.AbstractContextManager[TokenLogprobs]:
        if self._reference is None:
            raise TrainingError("these workers hold no reference model; give them one, or ask workers that have it")
        return self._reference()

    def load_weights(self, update: WeightUpdate) -> None:
        """Replace the weights of a model that does not train. Raises ``TrainingError``; the version before stays."""
        if not isinstance(self._backend, FrozenBackend):
            raise TrainingError("workers that train take no weights from elsewhere")
        self._backend.load_weights(update)

    def gather_weights(self, version: int) -> int:
        """Copy what is published to rank 0's staging memory, which ``send_weights`` reads; returns its bytes (0 on other ranks).

        Tied parameters are copied once, under the name that Hugging Face keeps. Where engines share the ranks' devices, every rank
        keeps a copy on its own too.
        """
        is_whole = self._settings.published_adapter is None
        published = self._backend.iter_full_params() if is_whole else self._backend.iter_trained_params()
        serve_dtype = self._settings.torch_serve_dtype
        with _gathering(published) as parameters:
            if self._copies is not None:
                parameters = self._copies.copying(version, parameters, serve_dtype=serve_dtype)
            if self._rank == 0:
                return self._staging.copy(version, parameters, serve_dtype=serve_dtype)
            if self._copies is not None:
                deque(parameters, maxlen=0)
            return 0

    def share_weights(self, version: int) -> dict[str, dict[str, Any]]:
        """Key of this rank's device -> name -> handle of what was gathered as ``version``; empty where no copy is there. Not collective."""
        handles = self._copies.share(version) if self._copies is not None else {}
        return {self._copies.key: handles} if self._copies is not None and handles else {}

    def unshare_weights(self) -> None:
        """Engines have loaded what was shared. Not collective."""
        if self._copies is not None:
            self._copies.unshare()

    def send_weights(self, version: int, directory: Path, bucket_bytes: int) -> WeightUpdate:
        """Write what was gathered (rank 0 only; not collective). Any thread may call it, beside every other method."""
        update = self._staging.write(version, directory, bucket_bytes)
        adapter = self._settings.published_adapter
        return update if adapter is None else as_peft_directory(update, adapter, base=self._settings.policy_path)

    def export_hf(self, directory: Path) -> None:
        """Write a Hugging Face directory (rank 0; the others only gather), with ``adapter`` in it where adapters train."""
        lora, base = self._settings.lora, self._settings.policy_path
        trained = iter(()) if lora is None else self._backend.iter_trained_params()
        # The last is gathered first, on every rank.
        with _gathering(trained) as adapters, _gathering(self._backend.iter_full_params()) as parameters:
            if self._rank != 0:
                return
            dtype = self._settings.torch_serve_dtype
            export_hf_directory(parameters, source=Path(base), directory=directory, dtype=dtype)
            if lora is not None:
                export_peft_directory(adapters, lora.adapter, base=base, directory=directory / "adapter")

    def save(self, directory: Path) -> None:
        """Write everything under ``directory``, synced to disk; ``policy.json`` comes last and says it is whole.

        Raises:
            CheckpointError: it could not be written, on this rank or another; then every rank says so and none waits.
        """
        with self._failing_together():
            directory.mkdir(parents=True, exist_ok=True)
        with self._failing_together():
            self._backend.save(directory)
            save_state(rng_state(), directory / f"rng_{self._rank}.pt")
        with self._failing_together():
            if self._rank == 0:
                write_manifest(
                    directory,
                    model_type=self._model_type,
                    shapes=self._backend.parameter_shapes(),
                    num_ranks=self._num_ranks,
                )

    @contextlib.contextmanager
    def _failing_together(self) -> Iterator[None]:
        """What fails on one rank is a ``CheckpointError`` on all; on return every rank is done."""
        failure: BaseException | None = None
        try:
            yield
        except (Exception, CheckpointException) as error:
            failure = error
        reasons: list[str | None] = [None] * self._num_ranks
        dist.all_gather_object(reasons, None if failure is None else _reason(failure, self._rank))
        failed = [f"rank {rank}: {reason}" for rank, reason in enumerate(reasons) if reason is not None]
        if failed or failure is not None:
            raise CheckpointError(failed[0] if failed else repr(failure)) from failure

    def load(self, directory: Path) -> None:
        """Restore what ``save`` wrote, on any number of ranks where the backend reshards; a rank that had no random state keeps its own.

        Raises:
            CheckpointError: it is incomplete, damaged or of another model.
        """
        check_manifest(directory, model_type=self._model_type, shapes=self._backend.parameter_shapes())
        if self._settings.lora is None:
            check_adapter(directory, None)
        self._trained_rows.clear()
        try:
            self._backend.load(directory)
            rng_file = directory / f"rng_{self._rank}.pt"
            if rng_file.is_file():
                restore_rng_state(torch.load(rng_file, weights_only=True))
        except CheckpointError:
            raise
        except (Exception, CheckpointException) as error:
            if process_group.is_lost_peer(error):
                raise
            raise CheckpointError(
                f"checkpoint {directory} cannot be read: {error}; resume from another checkpoint"
            ) from error

    def close(self) -> None:
        """Leave the process group; nothing is shared any more."""
        self._backend.close()
        if self._copies is not None:
            self._copies.close()


@contextlib.contextmanager
def _gathering(parameters: NamedTensors) -> Iterator[NamedTensors]:
    """Full parameters, gathered to the last one even where nothing is done with them, or that fails: the other ranks take part."""
    try:
        yield parameters
    finally:
        for _ in parameters:
            pass


def _token_lags(batch: MicroBatch, version: int) -> torch.Tensor:
    """(N,) int64: versions between sampling and training; never negative."""
    return (version - batch.versions).clamp(min=0)


def _reason(failure: BaseException, rank: int) -> str | None:
    """The first line of the error beneath torch's, which tells every rank when one fails; None where another one did."""
    if isinstance(failure, CheckpointException):
        if rank not in failure.failures:
            return None
        failure, _ = failure.failures[rank]
    return f"{type(failure).__name__}: {str(failure).strip().splitlines()[0] if str(failure).strip() else 'no reason'}"
