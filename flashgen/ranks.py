"""explain_ranks: what ``flashgen explain --ranks`` says of a variant over a mesh, without a GPU.

Its figures are those of `ContextParallel.plan`: both come from `flashgen.distributed.forecast`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

import torch

from flashgen.compiling import cached
from flashgen.distributed.costs import Cost, Machine, Sizes
from flashgen.distributed.forecast import Forecast, forecast
from flashgen.distributed.plan import Ranges, make_layout
from flashgen.errors import FlashgenError
from flashgen.explain.account import Call
from flashgen.explain.call import Asked, described, longest, workload
from flashgen.explain.variant import valid_variants
from flashgen.forms.registry import why_no_form
from flashgen.loader import Variant
from flashgen.offsets import OFFSETS, WHOLE_LENGTHS
from flashgen.params import Tensor
from flashgen.plan import KernelPlan, lower
from flashgen.symbols import evaluate

#: Tokens of the usual sequence, and heads of its keys.
TOKENS, KV_HEADS = 131072, 8

#: The form's name, and with what a spec has it.
FORM, FORMS = "mesh", ("dense", "mesh")

#: The most ranks that are looked at.
MOST_RANKS = 4096


@dataclass(frozen=True)
class RanksAccount:
    """What a variant's call takes on several ranks.

    Attributes:
        variant, file: its name and file.
        call: shapes and numbers.
        ranks: their number.
        machine: the rates that predictions go by.
        strategy: the one that is chosen.
        why: in a sentence.
        costs: of each strategy that can compute the call.
        refused: why the others cannot.
        imbalance: the pairs of the most loaded rank over the mean.
        queries, keys, received, pairs: of each rank: its queries, the keys that they need, those of
            them that others send, and pairs of a query and a key of a head.
        picture: lines of the ranks over the mask.
    """

    variant: str
    file: str
    call: Call
    ranks: int
    machine: Machine
    strategy: str
    why: str
    costs: Mapping[str, Cost]
    refused: Mapping[str, str]
    imbalance: float
    queries: tuple[int, ...]
    keys: tuple[int, ...]
    received: tuple[int, ...]
    pairs: tuple[int, ...]
    picture: tuple[str, ...]


def explain_ranks(
    paths: Iterable[Path],
    target: str | None,
    asked: Asked,
    ranks: int,
    machine: Machine,
    strategy: str = "auto",
) -> Iterator[tuple[RanksAccount, Forecast]]:
    """The account of every variant that the spec files declare, whether or not it has the form.

    Raises:
        FlashgenError: the specs, the call or the ranks are wrong, or a variant cannot have the
            form or the strategy.
    """
    if not 1 <= ranks <= MOST_RANKS:
        raise FlashgenError(f"--ranks={ranks}: not a number of ranks; write 1 to {MOST_RANKS}")
    for variant in valid_variants(paths, target):
        yield explain_variant_ranks(variant, asked, ranks, machine, strategy)


def explain_variant_ranks(
    variant: Variant, asked: Asked, ranks: int, machine: Machine, strategy: str = "auto"
) -> tuple[RanksAccount, Forecast]:
    """The account of one variant whose spec is valid; see `explain_ranks`."""
    plan = lower(variant.spec, variant.name)
    where = f"{variant.file}: {variant.name}"
    spec = replace(variant.spec, forms=FORMS)
    if why := why_no_form(FORM, lower(spec, variant.name)):
        raise FlashgenError(f"{where}: cannot be computed over a mesh: {why}")
    if asked.kv_len not in (None, asked.q_len):
        raise FlashgenError(
            f"--kv-len={asked.kv_len}: a mesh has as many keys as queries; leave it out"
        )
    limit = longest(plan, asked)
    tokens = asked.q_len or min(TOKENS, limit or TOKENS)
    heads = asked.heads or (4 * KV_HEADS if limit is None else None)
    kv_heads = asked.kv_heads or (KV_HEADS if heads and heads % KV_HEADS == 0 else None)
    whole = {length.name for length in WHOLE_LENGTHS.values()} & {p.name for p in plan.params}
    numbers = asked.params + tuple((name, str(tokens)) for name in sorted(whole))
    usual = replace(
        asked, q_len=tokens, batch=asked.batch or 1, heads=heads, kv_heads=kv_heads, params=numbers
    )
    work = workload(plan, usual)
    values = dict(work.params)
    sizes = {
        "batch": work.batch,
        "num_q_heads": work.num_q_heads,
        "num_kv_heads": work.num_kv_heads,
        "q_len": tokens,
        "kv_len": tokens,
    }
    module = cached(spec)
    facts = module.MESH
    parameters = {
        plan.keyword(param.name): _made(plan, param, values[param.name], {**values, **sizes})
        for param in plan.params
        if plan.keyword(param.name) in facts["of_runs"]
    }
    call = Sizes(
        work.batch,
        work.num_q_heads,
        work.num_kv_heads,
        facts["head_dims"][0],
        facts["head_dims"][1],
        facts["itemsize"],
    )
    ranges = Ranges(module, tokens, tokens, parameters, work.batch, work.num_q_heads)
    layout = make_layout(ranges, ranks, "auto")
    try:
        found = forecast(module, tokens, layout, parameters, call, machine, strategy=strategy)
    except ValueError as error:
        raise FlashgenError(f"{where}: {error}") from error
    of_ranks, shown = found.plan, described(plan, work)
    account = RanksAccount(
        variant=variant.name,
        file=variant.file or "",
        call=replace(
            shown, params=tuple((name, x) for name, x in shown.params if name not in OFFSETS)
        ),
        ranks=ranks,
        machine=machine,
        strategy=found.choice.strategy,
        why=found.choice.why,
        costs=dict(found.choice.costs),
        refused=dict(found.choice.refused),
        imbalance=of_ranks.imbalance,
        queries=of_ranks.queries.lengths,
        keys=tuple(map(of_ranks.rows, range(ranks))),
        received=tuple(map(of_ranks.received, range(ranks))),
        pairs=of_ranks.pairs,
        picture=found.picture,
    )
    return account, found


def text_of(account: RanksAccount, found: Forecast) -> str:
    """An account as text."""
    call = account.call
    shown = [f"{account.variant} on {account.ranks} ranks", *(f"{n}: {x}" for n, x in call.params)]
    return "\n".join([*shown, "", str(found), ""])


def _made(plan: KernelPlan, param: Any, value: Any, sizes: Mapping[str, Any]) -> Any:
    """A parameter's value, for a tensor one of its usual elements."""
    if not isinstance(param, Tensor):
        return value
    numbers = {name: x for name, x in sizes.items() if isinstance(x, int | float)}
    shape = [1 if dim is None else int(evaluate(dim.sym, numbers)) for dim in param.dims]
    elements = [value[index] for index in product(*map(range, shape))]
    return torch.tensor(elements, dtype=getattr(torch, param.dtype)).reshape(shape)
