"""Who goes first: scheduling policies, and the queue of waiting requests that follows one."""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from typing import Protocol

from jllm.engine.request import Request

Rank = tuple[int, ...]


class Policy(Protocol):
    """Ranks requests: the lowest rank is admitted first and preempted last.

    A rank never changes and no two requests have the same one, so the first request keeps its
    place until it is done, and everyone gets their turn among requests of the same kind.
    """

    def __call__(self, request: Request) -> Rank: ...


def fcfs(request: Request) -> Rank:
    """First come, first served."""
    return (request.arrival,)


def priority(request: Request) -> Rank:
    """Lower ``SamplingParams.priority`` first, then in order of arrival. A waiting request does
    not push out a running one; it only goes before others that wait."""
    return (request.params.priority, request.arrival)


POLICIES: dict[str, Policy] = {"fcfs": fcfs, "priority": priority}


class WaitingQueue:
    """Waiting requests by rank. Removal marks an entry, which is dropped when it comes up."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._heap: list[tuple[Rank, Request]] = []
        self._members: set[Request] = set()

    def __len__(self) -> int:
        return len(self._members)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._members)

    def __contains__(self, request: Request) -> bool:
        return request in self._members

    def push(self, request: Request) -> None:
        assert request not in self._members
        self._members.add(request)
        heapq.heappush(self._heap, (self._policy(request), request))

    def first(self) -> Request | None:
        while self._heap and self._heap[0][1] not in self._members:
            heapq.heappop(self._heap)
        return self._heap[0][1] if self._heap else None

    def pop(self) -> Request:
        request = self.first()
        assert request is not None
        heapq.heappop(self._heap)
        self._members.remove(request)
        return request

    def remove(self, request: Request) -> None:
        self._members.remove(request)
