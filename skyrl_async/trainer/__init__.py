"""The training loop: train, weight update and validation stages, and the ``FullyAsyncTrainer`` that runs them."""

from skyrl_async.trainer.fully_async import FullyAsyncTrainer
from skyrl_async.trainer.run import Run

__all__ = ["FullyAsyncTrainer", "Run"]
