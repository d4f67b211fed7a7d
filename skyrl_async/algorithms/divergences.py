"""Divergences between two distributions over the same outcomes, exact: sums over all outcomes, not estimates from the sampled one.

Arguments are log-probs in nats, (N, K) float32, whose exponentials sum to 1 along the last axis. Results are (N,), in nats, >= 0 but for
rounding.
"""

from collections.abc import Callable

from torch import Tensor

DivergenceFn = Callable[[Tensor, Tensor], Tensor]
"""(student, teacher) -> (N,) nats; its gradient flows to the student."""


def reverse_kl(student: Tensor, teacher: Tensor) -> Tensor:
    """``KL(student, teacher) = sum_k q_k (log q_k - log p_k)``, of student q and teacher p; MiniLLM (arXiv 2306.08543, section 2)."""
    return (student.exp() * (student - teacher)).sum(-1)


def forward_kl(student: Tensor, teacher: Tensor) -> Tensor:
    """``KL(teacher, student) = sum_k p_k (log p_k - log q_k)``; on the student's own samples, GKD (arXiv 2306.13649, section 3)."""
    return (teacher.exp() * (teacher - student)).sum(-1)


DIVERGENCES: dict[str, DivergenceFn] = {"reverse_kl": reverse_kl, "forward_kl": forward_kl}
"""By the name of ``trainer.algorithm.distillation.divergence``."""
