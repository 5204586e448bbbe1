"""Words that terminal and page share: figures with units, and groups of configurations."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from flashgen.explain.account import Account, Call, Kernel, Subject, Work


def bytes_text(number: float) -> str:
    """In the largest unit of 10^3n bytes that leaves a whole number in front."""
    for unit in ("B", "kB", "MB", "GB"):
        said = f"{number:.0f}" if unit == "B" else f"{number:.3g}"
        if float(said) < 1000:
            return f"{said} {unit}"
        number /= 1000
    return f"{number:.3g} TB" if number < 1000 else f"{number:,.0f} TB"


def time_text(seconds: float) -> str:
    """In microseconds, milliseconds or seconds."""
    for unit, factor in (("us", 1e6), ("ms", 1e3)):
        said = f"{factor * seconds:.3g}"
        if float(said) < 1000:
            return f"{said} {unit}"
    return f"{seconds:.3g} s"


def call_text(account: Subject) -> str:
    """Shapes and dtype of the call."""
    call = account.call
    queries = f"{call.q_len:,} {'query' if call.q_len == 1 else 'queries'}"
    keys = f"{queries}, {call.kv_len:,} keys"
    return f"{call.batch} x {_heads(call)}, {keys}, {_width(account)}, {account.dtype}"


def heads_text(account: Subject) -> str:
    """Heads, their dimensions and dtype."""
    return f"{_heads(account.call)}, {_width(account)}, {account.dtype}"


def _heads(call: Call) -> str:
    if call.num_kv_heads == call.num_q_heads:
        return f"{call.num_q_heads} heads"
    return f"{call.num_q_heads} query heads, {call.num_kv_heads} key heads"


def _width(account: Subject) -> str:
    qk, v = account.head_dims
    return f"d={qk}" if qk == v else f"d={qk} of q and k, {v} of v"


def training_text(account: Account) -> str:
    """FLOPs and bytes of each way to compute a training step."""
    return "; ".join(
        f"{step.name} {step.flops / 1e9:,.1f} GFLOP and {bytes_text(step.bytes)}"
        for step in account.training
    )


def by_reason(kernel: Kernel) -> Iterable[tuple[str, list[str]]]:
    """Rejected configurations grouped by reason, as M x N, warps, stages."""
    grouped: dict[str, list[str]] = {}
    for rejection in kernel.rejected:
        c = rejection.config
        said = f"{c.BLOCK_M} x {c.BLOCK_N} w{c.num_warps} s{c.num_stages}"
        grouped.setdefault(rejection.reason, []).append(said)
    return grouped.items()


def first_of_each(works: Iterable[Work]) -> Iterator[Work]:
    """The works without repetition: kernels with equal work appear once."""
    seen = set()
    for work in works:
        if work.said not in seen:
            seen.add(work.said)
            yield work
