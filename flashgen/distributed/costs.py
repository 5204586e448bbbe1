"""Costs: what a call will take by each strategy, from its plan and the machine's rates.

A prediction adds up, for each rank, its products, the bytes that reach or leave it over each kind
of link, its copies, and what each call takes besides. Of a pass it takes the slowest rank.
Transfers count in full, except those of a ring and of groups of heads, which travel while something
is computed.

Rates and factors are fitted to what all strategies took on 2 H100s, and checked on 4: see
`tests/unit/test_distributed_costs.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import ModuleType

import torch

from flashgen.distributed.plan import Plan, plan_of_groups
from flashgen.distributed.shares import shares, sizes_of_groups
from flashgen.distributed.shares import why_not as why_no_heads

#: Strategies, those first that are preferred among equals.
STRATEGIES = ("all-to-all", "ulysses", "all-gather", "ring", "grid")

#: What a further group of heads costs, as a share of the time of the products: more, smaller calls.
OF_A_GROUP = 0.01

#: How much longer products of chunks take than those of a whole, as a share: forward and backward.
OF_CHUNKS = 0.0, 0.033

#: How much faster than another a strategy has to be to be preferred to those before it.
BETTER = 0.995


@dataclass(frozen=True)
class Machine:
    """Rates that predictions go by; the defaults are of H100s.

    Attributes:
        ranks_per_host: how many ranks NVLink joins.
        within: bytes/s that a GPU sends, and as many that it receives, over NVLink by NCCL.
        between: the same between hosts: 400 Gb/s for each GPU.
        latency: seconds before the first byte of a step arrives.
        memory: bytes/s of copies, read and written.
        call: seconds that a call of the forward pass takes besides; of the backward pass, twice.
        forward: FLOP/s of the forward pass's kernels.
        backward: likewise of the backward pass's.
    """

    ranks_per_host: int = 8
    within: float = 305e9
    between: float = 45e9
    latency: float = 10e-6
    memory: float = 2.8e12
    call: float = 20e-6
    forward: float = 760e12
    backward: float = 605e12


def machine_of(ranks: Sequence[int], local: int | None) -> Machine:
    """The usual rates, for ranks of which some share a host.

    Args:
        ranks: their numbers in the whole job, in which those of a host follow one another.
        local: how many a host has, as torchrun says in LOCAL_WORLD_SIZE; None: unknown.
    """
    if not local:
        return Machine()
    hosts = [rank // local for rank in ranks]
    return Machine(ranks_per_host=hosts.count(hosts[0]))


@dataclass(frozen=True)
class Sizes:
    """Sizes of a call.

    Attributes:
        batch: entries.
        num_q_heads: heads of the queries.
        num_kv_heads: heads of the keys.
        head_dim: of queries and keys.
        v_head_dim: of values.
        itemsize: bytes of a number.
    """

    batch: int
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    v_head_dim: int
    itemsize: int = 2

    @property
    def row(self) -> int:
        """Bytes of a row of keys and values."""
        both = self.head_dim + self.v_head_dim
        return self.batch * self.num_kv_heads * both * self.itemsize

    @property
    def query(self) -> int:
        """Bytes of a position's queries."""
        return self.batch * self.num_q_heads * self.head_dim * self.itemsize

    @property
    def output(self) -> int:
        """Bytes of a position's output."""
        return self.batch * self.num_q_heads * self.v_head_dim * self.itemsize

    @property
    def flops(self) -> tuple[int, int]:
        """FLOPs of a pair of a query and a key, of all heads: forward and backward."""
        heads = 2 * self.batch * self.num_q_heads
        return (
            heads * (self.head_dim + self.v_head_dim),
            heads * (3 * self.head_dim + 2 * self.v_head_dim),
        )


@dataclass(frozen=True)
class Cost:
    """What a call takes by a strategy.

    Attributes:
        forward: seconds of the slowest rank.
        backward: likewise.
        linear: seconds of both passes, if all ranks shared the products of one evenly, and nothing
            else took time.
        received: bytes that a rank gets from others in both passes, at most.
        held: bytes of others' rows, or of others' heads, that a rank holds at once, at most.
        parts: groups of heads.
        keep: whether rows of others are kept for the backward pass.
        size: how many ranks give one another heads.
    """

    forward: float
    backward: float
    linear: float
    received: int
    held: int
    parts: int = 1
    keep: bool = True
    size: int = 1

    @property
    def share(self) -> float:
        """The share of linear of both passes."""
        return self.linear / (self.forward + self.backward)


def why_not(strategy: str, module: ModuleType, sizes: Sizes, ranks: int) -> str:
    """Why a strategy cannot compute a call, as a clause; ``""`` where it can."""
    if strategy == "ring" and not module.MESH["merges"]:
        return "partial results with a sink of the normaliser cannot be merged"
    heads = sizes.num_q_heads, sizes.num_kv_heads
    if strategy == "ulysses":
        return why_no_heads(module, *heads, ranks)
    if strategy == "grid" and not sizes_of_groups(*heads, ranks):
        return f"{ranks} ranks have no groups that can divide {heads[0]}/{heads[1]} heads"
    if strategy == "grid":
        return why_no_heads(module, *heads, sizes_of_groups(*heads, ranks)[0])
    return ""


def keeps_rows(plan: Plan, sizes: Sizes) -> bool:
    """Whether rows are kept for the backward pass: if no rank's take more than what it saves."""
    saved = sizes.query + sizes.output + sizes.row
    ranks = range(plan.ranks)
    return all(plan.rows(r) * sizes.row <= plan.queries.lengths[r] * saved for r in ranks)


def predicted(
    strategy: str,
    plan: Plan,
    sizes: Sizes,
    machine: Machine,
    *,
    keep: bool | None = None,
    parts: int | None = None,
    by_head: bool = False,
    merges: bool = True,
) -> Cost:
    """The cost of a call by a strategy that can compute it.

    Args:
        strategy: one of `STRATEGIES`.
        plan: what all ranks compute.
        sizes: of the call.
        machine: rates.
        keep: whether rows are kept for the backward pass; None: see `keeps_rows`.
        parts: groups of heads, at most; None: as many as are best.
        by_head: whether there can be but one group.
        merges: whether results of several runs of keys can be merged.
    """
    if strategy == "ulysses":
        return _of_heads(plan, sizes, machine)
    if strategy == "ring":
        return _of_ring(plan, sizes, machine)
    if strategy == "grid":
        numbers = sizes_of_groups(sizes.num_q_heads, sizes.num_kv_heads, plan.ranks)
        grids = [_of_grid(plan, sizes, machine, n, merges, keep, parts) for n in numbers]
        return min(grids, key=lambda cost: cost.forward + cost.backward)
    keep = keeps_rows(plan, sizes) if keep is None else keep
    heads = sizes.num_kv_heads
    number = 1 if by_head else parts
    tried = [n for n in (range(1, number + 1) if number else (1, 2, 4, 8)) if heads % n == 0]
    costs = [
        _of_rows(plan, sizes, machine, strategy == "all-gather", keep, parts)
        for parts in (tried[-1:] if number else tried)
    ]
    return min(costs, key=lambda cost: cost.forward + cost.backward)


def _of_rows(
    plan: Plan, sizes: Sizes, machine: Machine, everything: bool, keep: bool, parts: int
) -> Cost:
    lengths = torch.tensor(plan.keys.lengths, dtype=torch.float64)
    rows = torch.tensor([plan.rows(r) for r in range(plan.ranks)], dtype=torch.float64)
    traffic = plan.traffic.double()
    if everything:
        rows = lengths.sum().expand(plan.ranks)
        traffic = lengths[:, None].expand(plan.ranks, plan.ranks)
    bring = _transfers(traffic * sizes.row, machine)
    back = _transfers(traffic.T * sizes.row, machine)
    chunks = torch.tensor([len(mine) for mine in plan.queries.chunks])
    calls = torch.tensor([parts * sum(map(len, mine)) for mine in plan.runs])
    # Runs of queries are put together, and own rows side by side; gradients are added up.
    copied = (chunks > 1) * lengths * sizes.output * 2
    packed = lengths * sizes.row * 2 + everything * rows * sizes.row * 2
    summed = rows * sizes.row * 5 + lengths * sizes.row * 4 + everything * rows * sizes.row * 2
    passes = []
    for number, (seconds, moved, bytes_) in enumerate(
        zip(
            _products_of_chunks(plan, sizes, machine),
            (bring, back if keep else back + bring),
            (copied + packed, 2 * copied + summed + (0 if keep else packed)),
            strict=True,
        )
    ):
        longer = seconds * (1 + OF_A_GROUP * (parts - 1))
        hidden = moved * (parts - 1) / parts
        besides = calls * machine.call * (1 + number) + bytes_ / machine.memory
        passes.append(moved / parts + torch.maximum(longer, hidden) + besides)
    received = (traffic.sum(0) - traffic.diagonal()) * sizes.row
    returned = (traffic.sum(1) - traffic.diagonal()) * sizes.row
    both = received * (1 if keep else 2) + returned
    held = rows * sizes.row / (1 if keep else parts)
    return replace(_cost(plan, sizes, machine, passes, both, held), parts=parts, keep=keep)


def _of_ring(plan: Plan, sizes: Sizes, machine: Machine) -> Cost:
    ranks, each = plan.ranks, torch.arange(plan.ranks)
    traffic = plan.traffic.double()
    shares = traffic / traffic.sum(0).clamp(min=1)
    chunks = torch.tensor([len(mine) for mine in plan.queries.chunks])
    outputs = torch.tensor(plan.queries.lengths) * sizes.output
    passes = []
    # Rows come, and backward as many gradients go the other way. Each step merges outputs of 16
    # bits in float32, or adds gradients in float32.
    for seconds, moved, of_outputs, of_rows in zip(
        _products_of_chunks(plan, sizes, machine), (1, 2), (9, 15), (0, 30), strict=True
    ):
        total = torch.zeros(ranks, dtype=torch.float64)
        for step in range(ranks):
            sender = (each - step) % ranks
            coming = torch.zeros_like(traffic)
            if step + 1 < ranks:
                after = (each - step - 1) % ranks
                coming[after, each] = traffic[after, each] * sizes.row * moved
            total += torch.maximum(seconds * shares[sender, each], _transfers(coming, machine))
            copied = of_outputs * outputs + of_rows * traffic[sender, each] * sizes.row
            total += copied / machine.memory if ranks > 1 else 0
            total += (traffic[sender, each] > 0) * chunks * moved * machine.call
        passes.append(total)
    received = (traffic.sum(0) - traffic.diagonal()) * sizes.row
    returned = (traffic.sum(1) - traffic.diagonal()) * sizes.row
    held = 2 * traffic.amax(0) * sizes.row
    return _cost(plan, sizes, machine, passes, 2 * received + returned, held)


def _of_heads(plan: Plan, sizes: Sizes, machine: Machine) -> Cost:
    moves, received, held = _moved_heads(plan, sizes, machine, plan.ranks)
    passes = [
        seconds.mean() + moved + number * machine.call
        for number, (seconds, moved) in enumerate(
            zip(_products(plan, sizes, machine), moves, strict=True), start=1
        )
    ]
    return replace(_cost(plan, sizes, machine, passes, received, held), size=plan.ranks)


def _of_grid(
    plan: Plan,
    sizes: Sizes,
    machine: Machine,
    size: int,
    merges: bool,
    keep: bool | None,
    parts: int | None,
) -> Cost:
    groups = plan_of_groups(plan, size, merges)
    heads = max(1, sizes.num_kv_heads // size)
    mine = replace(sizes, num_q_heads=sizes.num_q_heads // size, num_kv_heads=heads)
    hosts = replace(machine, ranks_per_host=max(1, machine.ranks_per_host // size))
    rows = predicted("all-to-all", groups, mine, hosts, keep=keep, parts=parts)
    moves, received, held = _moved_heads(plan, sizes, machine, size)
    forward, backward = (float(x.max()) for x in moves)
    return replace(
        rows,
        forward=rows.forward + forward,
        backward=rows.backward + backward,
        received=rows.received + int(received.max()),
        held=rows.held + int(held.max()),
        size=size,
    )


def _moved_heads(
    plan: Plan, sizes: Sizes, machine: Machine, size: int
) -> tuple[list[torch.Tensor], torch.Tensor, torch.Tensor]:
    """What ranks take that give one another heads, in groups of so many.

    Returns:
        The seconds of each rank, forward and backward; the bytes that it receives in both passes,
        and those of heads that it holds.
    """
    divided = shares(sizes.num_q_heads, sizes.num_kv_heads, size) * (plan.ranks // size)
    of_k = torch.tensor([s.of_k.stop - s.of_k.start for s in divided], dtype=torch.float64)
    lengths = torch.tensor(plan.queries.lengths, dtype=torch.float64)
    keys = of_k / max(1, sizes.num_kv_heads) * sizes.row
    groups = torch.arange(plan.ranks) // size
    together = groups[:, None] == groups
    into = together * lengths[:, None] * (sizes.query / size + keys)
    back = together * lengths * sizes.output / size
    copies = lengths * (sizes.query + sizes.row + sizes.output) * 5 / machine.memory
    moved = _transfers(into, machine) + _transfers(back, machine)
    again = _transfers(into.T, machine) + _transfers(back.T, machine)
    each = into + into.T + back + back.T
    received = each.sum(0) - each.diagonal()
    return [moved + copies, again + 2 * copies], received, into.sum(0)


def _products(plan: Plan, sizes: Sizes, machine: Machine) -> tuple[torch.Tensor, torch.Tensor]:
    """Seconds of each rank's products, forward and backward."""
    pairs = torch.tensor(plan.pairs, dtype=torch.float64)
    forward, backward = sizes.flops
    return pairs * forward / machine.forward, pairs * backward / machine.backward


def _products_of_chunks(plan: Plan, sizes: Sizes, machine: Machine) -> list[torch.Tensor]:
    """The same, where ranks compute chunks of queries with some of the keys."""
    return [
        seconds * (1 + longer if plan.ranks > 1 else 1)
        for seconds, longer in zip(_products(plan, sizes, machine), OF_CHUNKS, strict=True)
    ]


def _transfers(sent: torch.Tensor, machine: Machine) -> torch.Tensor:
    """Seconds of each rank for a step in which ranks send one another bytes."""
    hosts = torch.arange(len(sent)) // machine.ranks_per_host
    same = hosts[:, None] == hosts
    others = ~torch.eye(len(sent), dtype=torch.bool)
    seconds = []
    for links, rate in ((same & others, machine.within), (~same, machine.between)):
        moved = sent * links
        seconds.append(torch.maximum(moved.sum(0), moved.sum(1)) / rate)
    longest = torch.maximum(*seconds)
    return longest + (longest > 0) * machine.latency


def _cost(
    plan: Plan,
    sizes: Sizes,
    machine: Machine,
    passes: list[torch.Tensor],
    received: torch.Tensor,
    held: torch.Tensor,
) -> Cost:
    forward, backward = (max(float(seconds.max()), 1e-9) for seconds in passes)
    linear = sum(float(x.mean()) for x in _products(plan, sizes, machine))
    return Cost(forward, backward, linear, int(received.max()), int(held.max()))


@dataclass(frozen=True)
class Choice:
    """The strategy of a call, and what speaks for it.

    Attributes:
        strategy: its name.
        costs: of each strategy that can compute the call.
        refused: why the others cannot.
        asked: whether the user has named it.
    """

    strategy: str
    costs: Mapping[str, Cost]
    refused: Mapping[str, str]
    asked: bool

    @property
    def cost(self) -> Cost:
        """That of the strategy."""
        return self.costs[self.strategy]

    @property
    def why(self) -> str:
        """In a sentence."""
        if self.asked:
            return f"{self.strategy}, as asked for"
        others = [cost for name, cost in self.costs.items() if name != self.strategy]
        if not others:
            return f"{self.strategy}: nothing else can compute the call"
        name, best = min(
            ((n, c) for n, c in self.costs.items() if n != self.strategy),
            key=lambda each: each[1].forward + each[1].backward,
        )
        return (
            f"{self.strategy}: predicted {self.cost.share:.3f} of linear, {name} {best.share:.3f}"
        )


def choose(
    asked: str,
    module: ModuleType,
    plan: Plan,
    sizes: Sizes,
    machine: Machine,
    *,
    keep: bool | None = None,
    parts: int | None = None,
) -> Choice:
    """The strategy of a call: that which is asked for, or for ``"auto"`` the fastest predicted.

    Raises:
        ValueError: the strategy that is asked for cannot compute the call.
    """
    refused = {
        name: why for name in STRATEGIES if (why := why_not(name, module, sizes, plan.ranks))
    }
    if asked in refused:
        raise ValueError(f"strategy: {asked!r} cannot compute this call: {refused[asked]}")
    facts = {name: module.MESH[name] for name in ("by_head", "merges")}
    costs = {
        name: predicted(name, plan, sizes, machine, keep=keep, parts=parts, **facts)
        for name in STRATEGIES
        if name not in refused
    }
    if asked != "auto":
        return Choice(asked, costs, refused, asked=True)
    best, *others = costs
    for name in others:
        both = costs[name].forward + costs[name].backward
        if both < BETTER * (costs[best].forward + costs[best].backward):
            best = name
    return Choice(best, costs, refused, asked=False)
