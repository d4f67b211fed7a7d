"""The groups that are admitted and neither trained nor given up: counted as they come and go, never by looking at all of them.

Flows in: groups that open and close. Flows out: how many there are of each policy version, and the first of them. Does not know
the capacity rule, nor whether a group is running or finished.
"""

from collections import Counter, OrderedDict
from collections.abc import Mapping
from types import MappingProxyType


class OpenGroups:
    """A change or a question costs the same with ten thousand groups open as with ten."""

    def __init__(self) -> None:
        self._version_of: OrderedDict[int, int] = OrderedDict()
        self._num_of_version: Counter[int] = Counter()

    def __len__(self) -> int:
        return len(self._version_of)

    @property
    def num_of_version(self) -> Mapping[int, int]:
        """Scheduled version -> open groups, without the versions that have none."""
        return MappingProxyType(self._num_of_version)

    def add(self, index: int, scheduled_version: int) -> None:
        """The group admitted as number ``index``, after all those added before, is open from now on."""
        assert not self._version_of or next(reversed(self._version_of)) < index, (
            "groups are added in order of admission"
        )
        self._version_of[index] = scheduled_version
        self._num_of_version[scheduled_version] += 1

    def remove(self, index: int) -> None:
        """It is trained, or given up."""
        version = self._version_of.pop(index)
        self._num_of_version[version] -= 1
        if not self._num_of_version[version]:
            del self._num_of_version[version]

    def first_index(self) -> int | None:
        """The smallest admission index that is open."""
        return next(iter(self._version_of), None)
