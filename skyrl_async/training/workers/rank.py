"""One rank of the policy: micro-batches in, gradients on a backend, steps, weights and checkpoints out.

Synchronous, and without Ray: ``PolicyWorkers`` runs one per actor, ``InProcessPolicy`` one in this process. Every method is collective over
the ranks, except ``open_store``, ``send_weights`` and those that share weights.
"""

import contextlib
import logging
import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException

from skyrl_async.algorithms.batching import Row, collate
from skyrl_async.algorithms.figures import merge_figures
from skyrl_async.columns import Logprobs, TokenIds, TopTokens, Values
from skyrl_async.errors import CheckpointError, ConfigError, TrainingError
from skyrl_async.training import rank_process
from skyrl_async.training.backends.assembly import (
    Reference,
    load_model,
    load_reference,
    make_backend,
    make_objective,
    make_token_logprobs,
    make_token_values,
)
from skyrl_async.training.backends.fsdp import FSDPBackend
from skyrl_async.training.backends.settings import TrainingSettings
from skyrl_async.training.backends.sharded import ShardedBackend
from skyrl_async.training.backends.state_files import failing_together, save_state
from skyrl_async.training.backends.token_logprobs import TokenLogprobs, batch_scores
from skyrl_async.training.backends.token_values import TokenValues, replace_head
from skyrl_async.training.export.hf_export import as_peft_directory, export_hf_directory, export_peft_directory
from skyrl_async.training.export.manifest import check_manifest, write_manifest
from skyrl_async.training.export.staging import DeviceCopies, Staging
from skyrl_async.training.protocol import LOGPROBS, SharedWeights
from skyrl_async.training.workers.bad_step import TrainedRows
from skyrl_async.training.workers.dispatch import MicroBatches, RankWork
from skyrl_async.training.workers.rank_losses import CriticLoss, PolicyLoss, RankLoss, opened
from skyrl_async.types import LogprobModel, RowLogprobs, WeightUpdate
from skyrl_async.weights.formats import WEIGHTS_FILE

logger = logging.getLogger(__name__)

NamedTensors = Iterator[tuple[str, torch.Tensor]]
_TOTAL = "total"
"""Key of the minimised loss among a micro-batch's figures. Only the rank itself reads it."""


class PolicyRank:
    """One rank. Cheap to make; ``start`` loads the policy, together with the other ranks."""

    def __init__(self, settings: TrainingSettings, *, rank: int = 0, num_ranks: int = 1) -> None:
        self._settings = settings
        self._rank = rank
        self._num_ranks = num_ranks
        self._store: dist.Store | None = None
        self._staging = Staging()
        self._copies = DeviceCopies(torch.device(settings.device))
        outputs = "critic_values" if settings.is_critic else "policy_logprobs"
        self._trained_rows = TrainedRows(directory=settings.bad_step_dir, outputs=outputs)
        self._backend: ShardedBackend
        self._token_logprobs: TokenLogprobs
        """Set where the rank is of a policy."""
        self._token_values: TokenValues
        """Set where the rank is of a critic."""
        self._loss: RankLoss
        self._reference: Reference | None = None
        self._model_type: str

    def open_store(self, host: str) -> int:
        """Open the store where the ranks meet, in this process (rank 0); returns its port."""
        self._store = dist.TCPStore(host, 0, self._num_ranks, is_master=True, wait_for_workers=False)
        return int(self._store.port)

    def start(
        self,
        store_address: tuple[str, int] | None = None,
        policy_path: str | None = None,
        num_ranks_here: int | None = None,
        collective_timeout_s: float = 1800.0,
    ) -> None:
        """Join the other ranks and load the policy.

        Args:
            store_address: host and port of the store where the ranks meet; None for a single rank.
            policy_path: overrides the settings' path.
            num_ranks_here: ranks on this machine. On GPUs they share its cores for work on the host, such as an offloaded optimizer's
                steps; Ray gives an actor one thread. None: as many threads as ``OMP_NUM_THREADS`` says.
            collective_timeout_s: longest wait for another rank; a backstop, longer than the caller's own deadline.

        Raises:
            PolicyError: the policy directory cannot be used.
            ConfigError: the machine has no CUDA device and the settings ask for one.
        """
        if policy_path is not None:
            self._settings = replace(self._settings, policy_path=policy_path)
        is_on_gpu = self._settings.device == "cuda"
        if is_on_gpu and not torch.cuda.is_available():
            raise ConfigError(
                "training.device is cuda, but this machine has no usable CUDA device; set training.device=cpu"
            )
        device = torch.device("cuda", torch.cuda.current_device()) if is_on_gpu else torch.device("cpu")
        if num_ranks_here is not None and is_on_gpu:
            torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // num_ranks_here))
        if self._settings.is_deterministic and is_on_gpu:
            # Before the group is made: torch then has NCCL choose sums that repeat. An operation without a repeating kernel raises.
            torch.use_deterministic_algorithms(True)
        if store_address is not None and self._store is None:
            self._store = dist.TCPStore(*store_address, self._num_ranks, is_master=False)
        rank_process.join(
            rank=self._rank,
            num_ranks=self._num_ranks,
            store=self._store,
            device=device,
            timeout_s=collective_timeout_s,
        )
        try:
            self._build(device)
        except BaseException:
            rank_process.leave()
            raise

    def _build(self, device: torch.device) -> None:
        settings = self._settings
        rank_process.seed_all(settings.seed + self._rank)
        path, trust_remote_code = Path(settings.policy_path), settings.trust_remote_code
        model = load_model(path, trust_remote_code=trust_remote_code, needs_projection=not settings.is_critic)
        if settings.is_critic:
            replace_head(model, path, seed=settings.seed)
        self._model_type = str(model.config.model_type)
        self._device = device
        self._backend = make_backend(settings, device)
        built = self._backend.build(model)
        if settings.is_critic:
            self._token_values = make_token_values(built, settings)
            self._loss = CriticLoss(self._token_values, settings.value_clip)
        else:
            self._token_logprobs = make_token_logprobs(built, settings)
            self._reference = load_reference(settings, device, self._backend, self._token_logprobs)
            self._loss = PolicyLoss(
                self._token_logprobs, make_objective(settings), settings.temperature, self._reference
            )
        num_parameters = sum(math.prod(shape) for shape in self._backend.parameter_shapes().values())
        self._size = {
            "num_parameters": float(num_parameters),
            "device_memory_gb": rank_process.memory_bytes(device) / 1e9,
        }
        does = "trains" if settings.trains else "holds"
        logger.info("rank %d of %d %s %s: %d parameters", self._rank, self._num_ranks, does, path, num_parameters)

    def forward_backward(self, work: RankWork) -> dict[str, Any]:
        """Accumulate the gradient of this rank's summed loss; returns its figures (see ``losses.token_figures``).

        With ``TrainingSettings.returns_logprobs`` also ``LOGPROBS``: per row of all micro-batches, one value per sampled token.

        Raises:
            TrainingError: the loss is not finite on this rank or another. Every rank raises it, so that none is left waiting.
        """
        last = len(work.micro_batches) - 1
        if self._settings.trains:
            self._backend.skip_to(work.version)
        done = [self._run_micro_batch(rows, work, is_last=i == last) for i, rows in enumerate(work.micro_batches)]
        logprobs = [of_row for figures in done for of_row in figures.pop(LOGPROBS, ())]
        merged = merge_figures(done)
        self._refuse_unless_finite(merged.pop(_TOTAL, 0.0), sum(map(len, work.micro_batches)), work.version)
        return merged | ({LOGPROBS: logprobs} if self._settings.returns_logprobs else {})

    def _refuse_unless_finite(self, total: float, num_rows: int, version: int) -> None:
        """Raise on every rank if the loss is not finite on any: each can still write its rows. Collective."""
        of_ranks = torch.zeros(self._num_ranks, 2, dtype=torch.float64)
        of_ranks[self._rank] = torch.tensor([total, num_rows], dtype=torch.float64)
        dist.all_reduce(of_ranks)
        for rank, (loss, num) in enumerate(of_ranks.tolist()):
            if not math.isfinite(loss):
                raise TrainingError(
                    f"the loss of {num:.0f} rows at version {version} is {loss} on rank {rank}. {self._trained_rows.save()}"
                )

    def _run_micro_batch(self, rows: Sequence[Row], work: RankWork, *, is_last: bool) -> dict[str, Any]:
        batch = collate(rows, self._device, is_packed=self._settings.use_sample_packing)
        with contextlib.nullcontext() if work.has_gradient else torch.no_grad():
            loss = self._loss(batch, work)
        if work.has_gradient:
            self._require_training("take gradients")
            self._backend.backward(loss.total, is_last=is_last)
        if not rows:
            return {}
        self._trained_rows.add(rows, loss.outputs, work.version)
        returned = {LOGPROBS: _by_row(loss.outputs, rows)} if self._settings.returns_logprobs else {}
        return loss.figures() | {_TOTAL: loss.total.item()} | returned

    def step(self, denominator: float, lr_scale: float = 1.0) -> dict[str, float]:
        """Apply the accumulated gradients, divided by ``denominator``; returns ``grad_norm``, the step's ``lr``, and the size of model and
        device (``num_parameters``, ``device_memory_gb``). As ``Policy.step``.

        Raises:
            TrainingError: there are no tokens, or the gradient is not finite. Nothing is applied.
        """
        if denominator <= 0:
            raise TrainingError(
                f"a step needs a denominator > 0, got {denominator}: no trajectory of the mini-batch has a token that is trained: "
                "its answers are empty, or all of them were abandoned"
            )
        self._require_training("step")
        lr = self._backend.lr * lr_scale
        try:
            grad_norm = self._backend.step(float(denominator), lr_scale)
        except TrainingError as error:
            raise TrainingError(f"{error}. {self._trained_rows.save()}") from error
        finally:
            self._trained_rows.clear()
        return {"grad_norm": grad_norm, "lr": lr, **self._size}

    @torch.no_grad()
    def logprobs(self, token_ids: Sequence[int] | TokenIds) -> list[float]:
        """Log-prob in nats of each token after the first, at temperature 1: ``len(token_ids) - 1`` values."""
        if len(token_ids) < 2:
            return []
        ids = torch.tensor(token_ids, dtype=torch.int64, device=self._device)
        positions = torch.arange(len(token_ids) - 1, device=self._device)
        logprobs, _ = self._token_logprobs(ids.unsqueeze(0), positions, ids[1:], temperature=1.0)
        return [float(value) for value in logprobs.tolist()]

    def logprobs_of(self, micro_batches: MicroBatches, model: LogprobModel) -> RowLogprobs:
        """Log-probs of this rank's rows, and with ``TrainingSettings.num_top_tokens`` likeliest tokens: per row of all micro-batches, one
        value, or one line of tokens, per sampled token.
        """
        is_ref, found, top = model is LogprobModel.REF, list[Logprobs](), list[TopTokens]()
        num_top = self._settings.num_top_tokens
        with opened(self._reference) if is_ref else contextlib.nullcontext(self._token_logprobs) as forward:
            for rows in micro_batches:
                batch = collate(rows, self._device, is_packed=self._settings.use_sample_packing)
                scores = batch_scores(forward, batch, temperature=self._settings.temperature, num_top=num_top)
                found += _by_row(scores.logprobs, rows)
                of_rows = zip(_by_row(scores.top_ids.int(), rows), _by_row(scores.top_logprobs, rows), strict=True)
                top += [TopTokens(ids=ids, logprobs=logprobs) for ids, logprobs in of_rows if num_top]
        return RowLogprobs(values=tuple(found), version=0 if is_ref else self._backend.version, top=tuple(top))

    @torch.no_grad()
    def values_of(self, micro_batches: MicroBatches) -> RowLogprobs:
        """A critic's values of this rank's rows: per row of all micro-batches, one per sampled token."""
        found = list[Values]()
        for rows in micro_batches:
            batch = collate(rows, self._device, is_packed=self._settings.use_sample_packing)
            found += _by_row(self._token_values(batch.input_ids, batch.positions, row_lengths=batch.row_lengths), rows)
        return RowLogprobs(values=tuple(found), version=self._backend.version)

    def load_weights(self, update: WeightUpdate) -> None:
        """Replace the weights of a model that does not train. Raises ``TrainingError``; the previous version stays."""
        if self._settings.trains:
            raise TrainingError("workers that train take no weights from elsewhere")
        assert isinstance(self._backend, FSDPBackend)
        self._backend.load_weights(update)

    def gather_weights(self, version: int) -> int:
        """Copy all weights, or adapters alone, to rank 0's staging memory for ``send_weights``; returns their bytes (0 on other ranks).

        Tied parameters are copied once, under the name that Hugging Face keeps. If engines share the ranks' devices, every rank also keeps
        a copy on its own.
        """
        has_all = self._settings.published_adapter is None
        iterate = self._backend.iter_full_params if has_all else self._backend.iter_trained_params
        published = iterate(self._settings.torch_serve_dtype)
        with _gathering(published) as gathered:
            copying = self._copies.copying(version, gathered)
            with _gathering(copying if self._settings.shares_weights else gathered) as parameters:
                return self._staging.copy(version, parameters) if self._rank == 0 else 0

    def share_weights(self, version: int) -> SharedWeights:
        """Handles of the device copies gathered as ``version``; empty if there are none. Not collective."""
        return self._copies.share(version)

    def unshare_weights(self) -> None:
        """Free the device copies, once engines have loaded them. Not collective."""
        self._copies.unshare()

    def send_weights(self, version: int, directory: Path, bucket_bytes: int) -> WeightUpdate:
        """Write the gathered weights (rank 0 only; not collective). Any thread may call it, beside every other method."""
        if (adapter := self._settings.published_adapter) is None:
            return self._staging.write(version, directory, bucket_bytes)
        update = self._staging.write(version, directory, bucket_bytes, WEIGHTS_FILE)
        return as_peft_directory(update, adapter, base=self._settings.policy_path)

    def export_hf(self, directory: Path) -> None:
        """Write a Hugging Face directory (rank 0; the others only gather). If adapters train, it has a directory ``adapter``."""
        adapter, base = self._settings.adapter, self._settings.policy_path
        trained = iter(()) if adapter is None else self._backend.iter_trained_params()
        dtype = self._settings.torch_serve_dtype
        # On leaving, every rank gathers what is left of ``parameters`` first, then of ``adapters``.
        with _gathering(trained) as adapters, _gathering(self._backend.iter_full_params(dtype)) as parameters:
            if self._rank != 0:
                return
            export_hf_directory(parameters, source=Path(base), directory=directory, dtype=dtype)
            if adapter is not None:
                export_peft_directory(adapters, adapter, base=base, directory=directory / "adapter")

    def save(self, directory: Path) -> None:
        """Write everything under ``directory``, synced to disk; ``policy.json`` comes last and marks it complete.

        Raises:
            CheckpointError: this rank or another could not write. Every rank raises it, so that none is left waiting.
        """
        self._require_training("be saved")
        with failing_together():
            directory.mkdir(parents=True, exist_ok=True)
        with failing_together():
            self._backend.save(directory)
            save_state(rank_process.rng_state(), directory / f"rng_{self._rank}.pt")
        with failing_together():
            if self._rank == 0:
                shapes = self._backend.parameter_shapes()
                write_manifest(directory, model_type=self._model_type, shapes=shapes, num_ranks=self._num_ranks)

    def load(self, directory: Path) -> None:
        """Restore what ``save`` wrote, on any number of ranks. A rank without a saved random state keeps its own.

        Raises:
            CheckpointError: it is incomplete, damaged or of another model.
        """
        self._require_training("load a checkpoint")
        key = "trainer.critic.model.path" if self._settings.is_critic else "policy.path"
        check_manifest(directory, model_type=self._model_type, shapes=self._backend.parameter_shapes(), key=key)
        self._trained_rows.clear()
        try:
            self._backend.load(directory)
            rng_file = directory / f"rng_{self._rank}.pt"
            if rng_file.is_file():
                rank_process.restore_rng_state(torch.load(rng_file, weights_only=True))
        except CheckpointError:
            raise
        except (Exception, CheckpointException) as error:
            if rank_process.is_lost_peer(error):
                raise
            raise CheckpointError(
                f"checkpoint {directory} cannot be read: {error}; resume from another checkpoint"
            ) from error

    def _require_training(self, action: str) -> None:
        if not self._settings.trains:
            raise TrainingError(f"a model that does not train cannot {action} (rank {self._rank})")

    def close(self) -> None:
        """Leave the process group, and free the copies on the device."""
        self._backend.close()
        self._copies.close()


def _by_row(values: Tensor, rows: Sequence[Row]) -> list[Any]:
    """Values of a micro-batch's sampled tokens, row by row."""
    return (
        [of_row.numpy() for of_row in values.cpu().split([row.trajectory.num_sampled_tokens for row in rows])]
        if rows
        else []
    )


@contextlib.contextmanager
def _gathering(parameters: NamedTensors) -> Iterator[NamedTensors]:
    """Gather parameters to the last one, even if the block leaves early: the other ranks take part in each."""
    try:
        yield parameters
    finally:
        for _ in parameters:
            pass
