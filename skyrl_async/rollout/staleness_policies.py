"""Treatment of groups older than the bound: one small object per ``trainer.staleness_policy``.

    wait      hold a group back while older ones need its place in the step: none passes the bound, the trainer waits
    mask      train groups at once, and mask tokens sampled under too old a version
    resample  train groups at once; abort a group that can no longer be trained in time, and requeue its prompt
    allow     train groups at once, and count the old ones

No I/O: the trainer acts on these decisions.
"""

from dataclasses import dataclass, replace

from skyrl_async.errors import ConfigError
from skyrl_async.rollout.staleness import _AsyncStalenessManager
from skyrl_async.types import Group, Trajectory


@dataclass(frozen=True, slots=True, kw_only=True)
class StalenessPolicy:
    """One treatment of groups older than the bound."""

    name: str
    holds_back: bool = False
    """A finished group waits while groups admitted before it may need its place in the step."""
    masks: bool = False
    """Tokens older than the bound are masked from the loss."""
    drops_groups: bool = False
    """Groups past the bound are dropped, and their prompts requeued."""

    @property
    def bounds_groups(self) -> bool:
        """Whether no group past the bound is ever trained."""
        return self.holds_back or self.drops_groups

    def may_train(self, group: Group, staleness: _AsyncStalenessManager, num_free: int) -> bool:
        """Whether a finished group may take one of the ``num_free`` places in the step."""
        return not self.holds_back or staleness.may_train(group.scheduled_version, num_free)

    def is_dropped(self, scheduled_version: int, staleness: _AsyncStalenessManager) -> bool:
        """Whether to drop an open group admitted at ``scheduled_version``, because it is past the bound."""
        return self.drops_groups and staleness.trained_version - scheduled_version > staleness.max_staleness_steps

    def masked_group(self, group: Group, version: int, max_staleness_steps: int) -> Group:
        """The group as it is trained at ``version``; with ``masks``, its tokens past the bound are masked.

        Masked tokens keep their place, log-probs and versions, as context of the tokens after them. Rewards, hence advantages, are
        of whole trajectories; importance ratios of whole rows exclude the masked tokens.
        """
        oldest = version - max_staleness_steps
        if not self.masks or all(min(t.versions, default=oldest) >= oldest for t in group.trajectories):
            return group
        return replace(group, trajectories=tuple(_masked(t, oldest) for t in group.trajectories))


def _masked(trajectory: Trajectory, oldest: int) -> Trajectory:
    """The trajectory without the tokens sampled before version ``oldest``."""
    mask = tuple(
        int(is_trained and version >= oldest)
        for is_trained, version in zip(trajectory.loss_mask, trajectory.versions, strict=True)
    )
    return replace(trajectory, loss_mask=mask)


_POLICIES = {
    policy.name: policy
    for policy in (
        StalenessPolicy(name="wait", holds_back=True),
        StalenessPolicy(name="mask", masks=True),
        StalenessPolicy(name="resample", drops_groups=True),
        StalenessPolicy(name="allow"),
    )
}


def staleness_policy(name: str) -> StalenessPolicy:
    """The policy called ``name``. Raises ``ConfigError`` listing the known ones."""
    if name not in _POLICIES:
        raise ConfigError(f"trainer.staleness_policy must be one of {', '.join(_POLICIES)}, got {name!r}")
    return _POLICIES[name]
