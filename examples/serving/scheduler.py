"""Scheduler: which tokens of which requests a step computes.

Continuous batching: a step decodes one token of each running request, and computes as much of new
prompts as its budget of tokens leaves. Requests join and leave at any step. If pages run out, the
latest request gives its pages back and begins anew later.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from .pages import Pages


@dataclass(eq=False)
class Request:
    """A prompt and what was generated.

    Attributes:
        prompt: its tokens.
        new: how many tokens to generate.
        arrival: when it arrives, by the server's clock.
        tokens: the prompt and what was generated so far.
        pages: where its keys and values are, in order.
        computed: how many of its tokens have keys in the cache.
        times: when each generated token was there.
    """

    prompt: list[int]
    new: int
    arrival: float = 0.0
    tokens: list[int] = field(default_factory=list)
    pages: list[int] = field(default_factory=list)
    computed: int = 0
    times: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.tokens = list(self.prompt)

    @property
    def generated(self) -> list[int]:
        """The new tokens."""
        return self.tokens[len(self.prompt) :]


@dataclass(frozen=True)
class Part:
    """What a step computes of a request: so many tokens from the first that has no key yet."""

    request: Request
    count: int

    @property
    def begin(self) -> int:
        """The number of keys before."""
        return self.request.computed

    @property
    def end(self) -> int:
        """The number of keys after."""
        return self.request.computed + self.count

    @property
    def tokens(self) -> list[int]:
        """The tokens themselves."""
        return self.request.tokens[self.begin : self.end]

    @property
    def is_last(self) -> bool:
        """Whether the next token follows from it."""
        return self.end == len(self.request.tokens)


class Scheduler:
    """The requests of a server.

    Attributes:
        waiting: requests that have no pages, in the order in which they are to begin.
        running: requests with pages, the earliest first.
        preempted: how often a running request had to give its pages back.
        shared: tokens that were not computed, since some page held their keys.
    """

    def __init__(self, pages: Pages, max_batch: int, max_tokens: int):
        """At most max_batch requests run at a time, and a step computes at most max_tokens."""
        self.pages, self.max_batch, self.max_tokens = pages, max_batch, max_tokens
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.preempted = self.shared = 0

    def add(self, request: Request) -> None:
        """A request for later, behind those that arrive earlier.

        Raises:
            ValueError: all pages together could not hold it.
        """
        most, keys = len(self.pages.users) * self.pages.size, len(request.prompt) + request.new - 1
        if not request.prompt or request.new < 1 or keys > most:
            raise ValueError(f"a request of {keys} keys; the cache holds 1 to {most}")
        self.waiting.append(request)

    def next(self, now: float) -> list[Part]:
        """The parts of the next step; none if no request has arrived."""
        parts: list[Part] = []
        budget, preempted = self.max_tokens, self.preempted
        for request in list(self.running):
            count = min(len(request.tokens) - request.computed, budget)
            if request not in self.running or count == 0:
                continue
            while not self._has_room(request, request.computed + count):
                latest = self.running[-1]
                self._preempt(latest)
                if latest is request:
                    break
            else:
                parts.append(Part(request, count))
                budget -= count
        self._fill(parts)
        if self.preempted > preempted:
            return parts
        while budget and self.waiting and len(self.running) < self.max_batch:
            request = self.waiting[0]
            if request.arrival > now:
                break
            # What this step writes for others counts: it is written before anybody reads.
            request.pages = self.pages.share(request.tokens)
            request.computed = len(request.pages) * self.pages.size
            count = min(len(request.tokens) - request.computed, budget)
            # Each running request may soon need a page more.
            if not self._has_room(request, request.computed + count, spare=len(self.running)):
                self._give_back(request)
                break
            self.shared += request.computed
            self.running.append(self.waiting.popleft())
            parts.append(Part(request, count))
            self._fill(parts[-1:])
            budget -= count
        return parts

    def finish(self, parts: list[Part], tokens: list[int], now: float) -> None:
        """Ends a step: tokens are those that follow the parts that are their requests' last."""
        following = iter(tokens)
        for part in parts:
            request, is_last = part.request, part.is_last
            request.computed = part.end
            if not is_last:
                continue
            request.tokens.append(next(following))
            request.times.append(now)
            if len(request.generated) == request.new:
                self.running.remove(request)
                self._give_back(request)

    def _has_room(self, request: Request, keys: int, spare: int = 0) -> bool:
        """Takes the pages that a request needs for so many keys, if others stay free."""
        missing = -(-keys // self.pages.size) - len(request.pages)
        if missing > 0 and missing + spare > len(self.pages.free):
            return False
        request.pages += [self.pages.take() for _ in range(missing)]
        return True

    def _fill(self, parts: list[Part]) -> None:
        """Notes the tokens of pages that become full."""
        for part in parts:
            if part.end // self.pages.size > part.begin // self.pages.size:
                self.pages.fill(part.request.pages, part.request.tokens[: part.end])

    def _preempt(self, request: Request) -> None:
        """Its tokens stay, and so may their keys, in pages that nobody takes before it is back."""
        self.running.remove(request)
        self._give_back(request)
        self.waiting.appendleft(request)
        self.preempted += 1

    def _give_back(self, request: Request) -> None:
        # The last page first: then the first ones, which most requests share, are taken last.
        self.pages.give_back(reversed(request.pages))
        request.pages, request.computed = [], 0
