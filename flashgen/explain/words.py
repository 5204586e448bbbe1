"""Words that terminal and page share: figures with units, and groups of configurations."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from flashgen.explain.account import Account, Kernel, Subject, Work


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
    heads = f"{call.num_q_heads} heads"
    if call.num_kv_heads != call.num_q_heads:
        heads = f"{call.num_q_heads} query heads, {call.num_kv_heads} key heads"
    qk, v = account.head_dims
    width = f"d={qk}" if qk == v else f"d={qk} of q and k, {v} of v"
    queries = f"{call.q_len:,} {'query' if call.q_len == 1 else 'queries'}"
    return f"{call.batch} x {heads}, {queries}, {call.kv_len:,} keys, {width}, {account.dtype}"


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
