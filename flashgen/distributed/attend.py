"""context_parallel: a module's attention, with the sequence on several ranks."""

from __future__ import annotations

import os
import weakref
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from itertools import count
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from flashgen.distributed.agreement import TIMEOUT, agree, forget
from flashgen.distributed.costs import STRATEGIES, Machine, Sizes, choose, machine_of
from flashgen.distributed.dtensors import unwrapped
from flashgen.distributed.exchange import Exchange
from flashgen.distributed.forecast import Forecast, forecast
from flashgen.distributed.layout import Layout
from flashgen.distributed.passes import Strategy, run
from flashgen.distributed.plan import Ranges, make_layout, make_plan
from flashgen.distributed.seeds import check_seed, shared_seed
from flashgen.distributed.strategies import made
from flashgen.distributed.wholes import part_of, whole_of
from flashgen.distributed.work import Work

#: Plans that are kept.
PLANS = 64

_numbers = count()


def context_parallel(
    module: ModuleType,
    mesh: Any = None,
    *,
    balance: str | int = "auto",
    strategy: str = "auto",
    parts: int | None = None,
    keep: bool | None = None,
    machine: Machine | None = None,
    reduce_learned: bool = True,
    timeout: timedelta = TIMEOUT,
) -> ContextParallel:
    """A module's attention for sequences that are sharded over the ranks of a mesh.

    All ranks of the mesh call this, and what it returns, in the same order.

    Args:
        module: a generated module whose spec has ``forms=("dense", "mesh")``.
        mesh: a DeviceMesh of one dimension, as ``mesh["cp"]``; a process group; or None for all
            ranks.
        balance: how positions are given to ranks. ``"auto"``: by few cuts that share the visible
            pairs evenly, unless the rows that ranks then need of others cost more than that saves;
            a number: so many chunks for each rank; ``"contiguous"``: one run of positions for each
            rank; ``"zigzag"``: the first and the last of twice as many, and so on. All ranks have
            the same number of tokens, or one more or less.
        strategy: how keys come to queries: ``"all-to-all"`` of the rows that are needed;
            ``"all-gather"`` of all of them; ``"ring"``, those of one rank after another, which
            holds the fewest at once; ``"ulysses"``, where each rank computes some heads of the
            whole; ``"grid"``, where ranks of a group divide heads, and groups the sequence;
            ``"auto"``: what is predicted to be fastest, see `plan`.
        parts: of all-to-all and all-gather: in how many groups of heads the keys travel, one while
            the attention of another is computed, at most; None: as predicted to be fastest.
        keep: of all-to-all and all-gather: whether the keys of others are kept for the backward
            pass, which otherwise asks for them again; None: where they take no more memory than
            what is kept anyway.
        machine: rates that predictions go by; None: those of H100s, with as many ranks of a host
            as torchrun says in LOCAL_WORLD_SIZE, else 8.
        reduce_learned: whether gradients of learned tensors are added up over the ranks. Without it
            each rank has those by its own queries, as it has those of a model's other parameters:
            FSDP and DDP add these up.
        timeout: how long a rank waits for the others at the first call of a kind.

    Raises:
        TypeError: the module has no such form, or the mesh is none.
        ValueError: an unknown balance or strategy, or a mesh of several dimensions.
    """
    if not hasattr(module, "MESH"):
        name = getattr(module, "__name__", type(module).__name__)
        raise TypeError(
            f"module: {name} takes no offsets; build its spec with forms=('dense', 'mesh')"
        )
    if not (
        balance in ("auto", "contiguous", "zigzag")
        or (isinstance(balance, int) and not isinstance(balance, bool) and balance > 0)
    ):
        raise ValueError(
            f"balance: got {balance!r}; pass 'auto', 'contiguous', 'zigzag' or a number of chunks"
        )
    if strategy not in ("auto", *STRATEGIES):
        listed = ", ".join(map(repr, ("auto", *STRATEGIES)))
        raise ValueError(f"strategy: got {strategy!r}; pass one of {listed}")
    if parts is not None and parts < 1:
        raise ValueError(f"parts: got {parts}; pass a number of groups from 1 on, or None")
    group = _group(mesh)
    if machine is None:
        local = os.environ.get("LOCAL_WORLD_SIZE")
        machine = machine_of(dist.get_process_group_ranks(group), int(local) if local else None)
    how = How(strategy, parts, keep, machine, reduce_learned)
    return ContextParallel(module, group, balance, how, timeout)


@dataclass(frozen=True)
class How:
    """How tensors travel: the arguments of `context_parallel`."""

    strategy: str
    parts: int | None
    keep: bool | None
    machine: Machine
    reduce_learned: bool


class ContextParallel:
    """Attention over the ranks of a mesh: see `context_parallel`."""

    def __init__(
        self,
        module: ModuleType,
        group: Any,
        balance: str | int,
        how: How,
        timeout: timedelta,
    ) -> None:
        self.module, self.group, self.balance = module, group, balance
        self.ranks, self.rank = dist.get_world_size(group), dist.get_rank(group)
        self._how, self._timeout = how, timeout
        self._layout: Layout | None = None
        self._guessed: dict[Any, Layout] = {}
        self._works: OrderedDict[Any, tuple[tuple[weakref.ref[torch.Tensor], ...], Exchange]]
        self._works = OrderedDict()
        self._strategies: dict[Any, Strategy] = {}
        self._agreed: set[Any] = set()
        first = dist.get_process_group_ranks(group)[0]  # groups of a mesh may share a name
        self._name = f"{group.group_name}/{first}/{next(_numbers)}"
        self._agreements, self._connected = 0, False
        self._drops = "align" in module.MESH

    def __call__(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *,
        scale: float | None = None,
        **parameters: Any,
    ) -> torch.Tensor:
        """The output of this rank's queries, which see keys of all ranks; with gradients.

        Args:
            q: (batch, num_q_heads, tokens, head_dim): the shard of this rank, as `shard` gives it.
                Without a call of `shard` before, the whole has as many tokens on every rank.
                Or a DTensor of such shards, `Shard(2)` over the ranks of the mesh; over other
                dimensions of its mesh replicated, or sharded by batch entries or heads.
            k: (batch, num_kv_heads, tokens, head_dim), likewise.
            v: likewise.
            scale: as of the module's ``attention``.
            **parameters: those of the module's ``attention``, whole and the same on all ranks:
                tensors are indexed by positions in the whole. Gradients of tensors are those of
                the whole on every rank, unless ``reduce_learned`` is False. DTensors have to be
                replicated. With dropout, the seed of the first rank counts, whether given or drawn
                there.

        Returns:
            (batch, num_q_heads, tokens, head_dim of v) in q's dtype; a DTensor as q if q is one.

        Raises:
            Disagreement: ranks call with different shapes, dtypes, parameters or modules; or one
                of them with arguments that are refused.
        """
        out: torch.Tensor = self._attend(q, k, v, scale, parameters)
        return out

    def layout(self, length: int, **parameters: Any) -> Layout:
        """Where the positions of a sequence are, for these parameters.

        Args:
            length: of the whole.
            **parameters: those of the module's ``attention`` that its ranges read.
        """
        self._check_parameters(parameters)
        ranges = self._ranges(length, parameters)
        return make_layout(ranges, self.ranks, self.balance)

    def use(self, layout: Layout) -> None:
        """Lets calls follow a layout, as `shard` does with that of a tensor."""
        self._layout = layout

    def shard(self, x: torch.Tensor, dim: int, **parameters: Any) -> torch.Tensor:
        """This rank's part of a tensor of the whole, in the order that calls take.

        The first tensor of a batch decides the layout, and calls follow it until there is another:
        give the parameters that the module's ranges read, as the ids of documents. Further tensors
        of the same length, as labels and positions, come without.

        Args:
            x: of the whole sequence, the same on all ranks.
            dim: the dimension of its positions.
            **parameters: those of the module's ``attention`` that its ranges read.
        """
        length = x.shape[dim]
        if parameters or self._layout is None or self._layout.length != length:
            self._layout = self.layout(length, **parameters)
        return part_of(x, self._layout, self.rank, dim)

    def unshard(self, x: torch.Tensor, dim: int) -> torch.Tensor:
        """The whole of a tensor whose parts the ranks have, on each of them.

        Args:
            x: this rank's part, in the order of `shard`. It passes no gradient.
            dim: the dimension of its positions.

        Raises:
            RuntimeError: x needs a gradient.
            ValueError: x has another length than this rank's part.
        """
        if x.requires_grad and torch.is_grad_enabled():
            raise RuntimeError("unshard: passes no gradient; call it under torch.no_grad()")
        return whole_of(x, self._layout_of(x.shape[dim], {}), self.group, dim)

    def plan(
        self,
        q_len: int,
        kv_len: int | None = None,
        *,
        batch: int = 1,
        num_q_heads: int = 32,
        num_kv_heads: int | None = None,
        **parameters: Any,
    ) -> Forecast:
        """What will be sent and computed of a sequence, and by which strategy; its text says it.

        Args:
            q_len: queries of the whole.
            kv_len: its keys: as many.
            batch: entries of the batch.
            num_q_heads: heads of the queries.
            num_kv_heads: heads of the keys; None: as many.
            **parameters: those of the module's ``attention`` that its ranges read.

        Raises:
            ValueError: there are more or fewer keys than queries, or the strategy that was asked
                for cannot compute the call.
        """
        if kv_len not in (None, q_len):
            raise ValueError(f"kv_len: got {kv_len}; pass q_len, {q_len}, or leave it out")
        self._check_parameters(parameters)
        facts = self.module.MESH
        call = Sizes(
            batch,
            num_q_heads,
            num_q_heads if num_kv_heads is None else num_kv_heads,
            facts["head_dims"][0],
            facts["head_dims"][1],
            facts["itemsize"],
        )
        return forecast(
            self.module,
            q_len,
            self.layout(q_len, **parameters),
            parameters,
            call,
            self._how.machine,
            strategy=self._how.strategy,
            keep=self._how.keep,
            parts=self._how.parts,
        )

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _attend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        scale: float | None,
        parameters: dict[str, Any],
    ) -> torch.Tensor:
        problem, exchange, chosen, kind, seed, seeded = "", None, None, None, None, False
        try:
            self._check_parameters(parameters)
            q, k, v, parameters, kind = unwrapped(
                self.module, self.group, q, k, v, parameters, reduced=self._how.reduce_learned
            )
            if self._drops:
                seed = parameters.pop("seed", None)
                check_seed(seed)
                seeded = parameters.get("dropout_p", 0.0) > 0.0
            _check_shapes(q, k, v)
            layout = self._layout_of(q.shape[2], parameters)
            exchange = self._exchange(layout, q.shape[0], q.shape[1], parameters)
            further = ("seed",) if seeded else ()
            chosen = self._strategy(exchange, q, k, v, scale, parameters, further)
        except (TypeError, ValueError) as error:
            problem = f"{type(error).__name__}: {error}"
        self._agree(q, k, v, scale, parameters, exchange, problem)
        assert chosen is not None
        tensors = [x for x in parameters.values() if isinstance(x, torch.Tensor)]
        if seeded:
            tensors.append(shared_seed(seed, self.group, q.device))
        out = run(chosen, q, k, v, *tensors)
        return out if kind is None else kind.wrap(out)

    def _strategy(
        self,
        exchange: Exchange,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        scale: float | None,
        parameters: dict[str, Any],
        further: tuple[str, ...],
    ) -> Strategy:
        """What computes a call; kept for calls of the same sizes and numbers.

        Args:
            exchange: the rows that travel.
            q: this rank's queries.
            k: its keys.
            v: its values.
            scale: that of the call.
            parameters: those that the caller gives.
            further: names of tensors that the call gets besides.
        """
        tensors = tuple(n for n, x in parameters.items() if isinstance(x, torch.Tensor))
        numbers = {n: x for n, x in parameters.items() if n not in tensors}
        tensors += further
        sizes = Sizes(q.shape[0], q.shape[1], k.shape[1], q.shape[3], v.shape[3], q.element_size())
        key = exchange, sizes, scale, tuple(numbers.items()), tensors
        if key not in self._strategies:
            if len(self._strategies) >= PLANS:
                self._strategies.clear()
            how, lengths = self._how, self.module.MESH["whole_lengths"]
            choice = choose(
                how.strategy,
                self.module,
                exchange.plan,
                sizes,
                how.machine,
                keep=how.keep,
                parts=how.parts,
            )
            whole = dict.fromkeys(lengths, exchange.plan.queries.length)
            numbers_of_all = {**numbers, **whole}
            work = Work(self.module, exchange, scale, numbers_of_all, tensors, how.reduce_learned)
            self._strategies[key] = made(choice, work, sizes)
        return self._strategies[key]

    def _agree(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        scale: float | None,
        parameters: Mapping[str, Any],
        exchange: Exchange | None,
        problem: str,
    ) -> None:
        """Compares a call with those of the other ranks, if there was none like it before."""
        facts: dict[str, Any] = {"spec": self.module.MESH["spec"]}
        for name, x in (("q", q), ("k", k), ("v", v)):
            if isinstance(x, torch.Tensor):
                facts[f"{name}'s batch, heads and head_dim"] = (*x.shape[:2], *x.shape[3:])
                facts[f"{name}'s dtype"] = x.dtype
                facts[f"{name}'s requires_grad"] = x.requires_grad and torch.is_grad_enabled()
        facts |= {"balance": self.balance, **vars(self._how)}
        facts["scale"] = scale
        for name in sorted(parameters):
            value = parameters[name]
            if isinstance(value, torch.Tensor):
                needs = value.requires_grad and torch.is_grad_enabled()
                value = tuple(value.shape), value.dtype, needs
            facts[f"parameter {name}"] = value
        if exchange is not None:
            facts["length of the whole"] = exchange.plan.queries.length
            facts["plan"] = exchange.digest
        key = tuple(facts.items())
        if key in self._agreed and not problem:
            return
        number = self._agreements
        self._agreements += 1  # after an error, too: what was written for it is never read again
        agree(self.group, f"{self._name}/{number}", facts, problem, self._timeout)
        if number:  # all ranks have read the one before
            forget(self.group, f"{self._name}/{number - 1}")
        if not self._connected:
            # The first that a communicator does has to be of all ranks; rows may be of few.
            dist.all_reduce(torch.zeros(1, device=q.device), group=self.group)
            self._connected = True
        if len(self._agreed) >= 4 * PLANS:
            self._agreed.clear()
        self._agreed.add(key)

    def _exchange(
        self, layout: Layout, batch: int, num_q_heads: int, parameters: Mapping[str, Any]
    ) -> Exchange:
        """The exchange of rows for a call; kept, and found again by the tensors themselves."""
        read = [(name, parameters.get(name)) for name in self.module.MESH["of_runs"]]
        tensors = tuple(x for _, x in read if isinstance(x, torch.Tensor))
        sizes = (batch, num_q_heads) if self.module.MESH["by_head"] or tensors else ()
        key = (layout, sizes, tuple((name, known_by(x)) for name, x in read))
        known = self._works.get(key)
        if known is not None and all(ref() is x for ref, x in zip(known[0], tensors, strict=True)):
            self._works.move_to_end(key)
            return known[1]
        ranges = self._ranges(layout.length, parameters, batch, num_q_heads)
        exchange = Exchange(make_plan(ranges, layout, layout), self.rank, self.group)
        self._works[key] = tuple(map(weakref.ref, tensors)), exchange
        if len(self._works) > PLANS:
            self._works.popitem(last=False)
        return exchange

    def _ranges(
        self, length: int, parameters: Mapping[str, Any], batch: int = 1, num_q_heads: int = 1
    ) -> Ranges:
        return Ranges(self.module, length, length, parameters, batch, num_q_heads)

    def _layout_of(self, tokens: int, parameters: Mapping[str, Any]) -> Layout:
        """The layout of calls with so many tokens on this rank."""
        layout = self._layout
        if layout is None:
            read = self.module.MESH["of_runs"]
            key = tokens, *((name, known_by(parameters.get(name))) for name in read)
            if key not in self._guessed:
                self._guessed = {key: self.layout(tokens * self.ranks, **parameters)}
            layout = self._guessed[key]
        if layout.lengths[self.rank] != tokens:
            raise ValueError(
                f"this rank has {tokens} tokens; its shard of {layout.length} has "
                f"{layout.lengths[self.rank]}: pass what `shard` returns"
            )
        return layout

    def _check_parameters(self, parameters: Mapping[str, Any]) -> None:
        known = self.module.MESH["parameters"]
        for name in parameters:
            if name not in known:
                listed = ", ".join(known) or "none"
                raise TypeError(f"{name}: is no parameter of {self.module.__name__}: {listed}")


def _group(mesh: Any) -> Any:
    """The process group of a mesh."""
    if mesh is None:
        return dist.group.WORLD
    if isinstance(mesh, DeviceMesh):
        if mesh.ndim != 1:
            raise ValueError(f"mesh: has {mesh.ndim} dimensions; pass one of them, as mesh['cp']")
        return mesh.get_group()
    if isinstance(mesh, dist.ProcessGroup):
        return mesh
    raise TypeError(f"mesh: got {type(mesh).__name__}; pass a DeviceMesh or a process group")


def _check_shapes(q: Any, k: Any, v: Any) -> None:
    """What this package relies on; the module checks the rest."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not isinstance(x, torch.Tensor) or x.ndim != 4:
            got = f"{x.ndim} dimensions" if isinstance(x, torch.Tensor) else type(x).__name__
            raise TypeError(f"{name}: got {got}; pass (batch, heads, tokens, head_dim)")
    for name, x in (("k", k), ("v", v)):
        if x.shape[2] != q.shape[2]:
            raise ValueError(
                f"{name}: has {x.shape[2]} tokens, q has {q.shape[2]}; shard all three alike: "
                "as many keys as queries are served"
            )


def known_by(value: Any) -> Any:
    """What tells a parameter from another: a tensor itself, and whether it was written to."""
    return (id(value), value._version) if isinstance(value, torch.Tensor) else value
