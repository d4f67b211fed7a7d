"""On-policy distillation: the teacher's log-probs of the student's own tokens in, an advantage per token out."""

from dataclasses import dataclass, replace

import numpy as np

from skyrl_async.columns import Advantages, Logprobs
from skyrl_async.errors import TrainingError
from skyrl_async.types import Group, Trajectory


@dataclass(frozen=True, slots=True, kw_only=True)
class Distillation:
    """Adds ``coef (log teacher - log student)`` to each sampled token's advantage, or with ``forward`` ``coef (teacher / student - 1)``.

    The mean of that times the token's score, given what is before the token, is ``-coef`` times the gradient of ``KL(student, teacher)`` at
    that place, the *reverse* divergence, which makes the student sure of what the teacher would say; with ``forward`` that of
    ``KL(teacher, student)``, after which it says all that the teacher might. What a token leads to later is not part of it ("On-policy
    distillation", Thinking Machines, 2025; both divergences on student samples: GKD, arXiv 2306.13649). It goes through the policy loss,
    with its importance weights and bounds.

    ``log student`` are the log-probs that were recomputed when the group was finished, if there are any, and the engine's otherwise. With
    stale tokens that is another policy, ``q``, than the one that is trained. Where importance weights correct them in full, the mean is
    ``-coef`` times the gradient of ``KL(student, teacher) - KL(student, q)``.
    """

    coef: float = 1.0
    """>= 0; 0 where the divergence is a term of the loss (``Objective.teacher_coef``)."""
    forward: bool = False
    ratio_clip: float | None = None
    """Largest ``teacher / student``, for ``forward``; None: no bound. With one, what the teacher likes more than that counts as that."""
    is_alone: bool = True
    """In place of the rewards' advantages, and without their weights; False: added to them."""

    def __call__(self, group: Group) -> Group:
        """Return the group with the teacher's share in its advantages. Raises ``TrainingError`` without ``teacher_logprobs``."""
        rows = group.trajectories
        advantages = tuple(self._of_row(*pair) for pair in zip(rows, group.advantages, strict=True))
        if self.is_alone:
            rows = tuple(row if row.token_weights is None else replace(row, token_weights=None) for row in rows)
        return replace(group, trajectories=rows, advantages=advantages)

    def _of_row(self, row: Trajectory, advantages: Advantages) -> Advantages:
        if not row.num_sampled_tokens:
            return advantages
        if row.teacher_logprobs is None:
            raise TrainingError(
                "trainer.algorithm.distillation needs trajectories with teacher_logprobs; some have none"
            )
        student = row.logprobs if row.old_logprobs is None else row.old_logprobs
        share = np.where(
            row.loss_mask, np.float32(self.coef) * self._towards(row.teacher_logprobs - student), np.float32(0)
        )
        found: Advantages = share if self.is_alone else advantages + share
        return found.astype(np.float32)

    def _towards(self, log_ratio: Logprobs) -> Logprobs:
        """The teacher's share, by token; what is not trained may be anything."""
        if not self.forward:
            return log_ratio
        most = np.inf if self.ratio_clip is None else np.log(self.ratio_clip)
        found: Logprobs = np.expm1(np.minimum(log_ratio, most))
        return found
