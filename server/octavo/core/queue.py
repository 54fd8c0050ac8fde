"""Groups that wait, in order, and how much they are, known without a look at each."""

from __future__ import annotations

from bisect import bisect_left, insort

from octavo.core.group import Group


class Queue:
    """``groups`` in order: ``seats`` sequences, of which ``swapped`` have their blocks in the host tier, with
    ``tokens`` to compute before each of them draws.
    """

    def __init__(self) -> None:
        self.groups: list[Group] = []
        self.seats = self.swapped = self.tokens = 0
        self._counted: dict[Group, tuple[int, int, int]] = {}

    def __len__(self) -> int:
        return len(self.groups)

    def add(self, group: Group) -> None:
        insort(self.groups, group, key=Group.get_order)
        self._counted[group] = (0, 0, 0)
        self.recount(group)

    def remove(self, group: Group) -> None:
        del self.groups[bisect_left(self.groups, group.order, key=Group.get_order)]
        self._count(self._counted.pop(group), -1)

    def recount(self, group: Group) -> None:
        """Some of its sequences have ended."""
        self._count(self._counted[group], -1)
        counted = (group.seats, group.seats * group.swapped, group.tokens_left())
        self._counted[group] = counted
        self._count(counted, 1)

    def _count(self, counted: tuple[int, int, int], sign: int) -> None:
        seats, swapped, tokens = counted
        self.seats += sign * seats
        self.swapped += sign * swapped
        self.tokens += sign * tokens
