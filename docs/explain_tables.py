"""The sections of docs/explain.md that are tables: sizes of tiles, rooflines, longer sequences."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from flashgen.explain.account import Account, Work
from flashgen.explain.algorithms import STANDARD
from flashgen.explain.lengths import Series
from flashgen.explain.words import by_reason, bytes_text, time_text, training_text


def sizes(account: Account) -> Iterator[str]:
    """Which tiles are chosen, what they hold, and what speaks against others."""
    kernel = account.kernels[0]
    yield "## How large a tile is"
    yield (
        "Each tile of queries reads its keys anew, from L2, which holds them after the first time. "
        "The more queries a tile has, the less often that happens:"
    )
    kernels = account.works[-len(account.kernels) :]
    rows = [[w.name, w.tile, bytes_text(w.l2_read), unit_time(w, "L2")] for w in kernels]
    yield _table(("kernel", "queries x keys", "read from L2", "at its peak"), rows, right=2)
    yield f"What sets the limit is shared memory, and registers. With {kernel.config} a block holds"
    buffers = [[b.name, f"{b.bytes:,}", f"`{b.formula}`"] for b in kernel.buffers]
    total = ["total", f"{kernel.shared:,}", f"of {kernel.limit:,}"]
    yield _table(("buffer", "bytes", "formula"), [*buffers, total], right=1, of=1)
    yield (
        f"Of {kernel.looked_at} configurations that were looked at, {kernel.candidates} were left "
        f"to choose from, and that one was chosen ({kernel.chosen}). "
        + (
            f"The other {len(kernel.rejected)} were rejected, by these formulas and by what is "
            "known of registers:"
            if kernel.rejected
            else "None was rejected."
        )
    )
    if kernel.rejected:
        yield "\n".join(f"- {', '.join(these)}: {why}" for why, these in by_reason(kernel))


def reached(account: Account) -> Iterator[str]:
    """The roofline of each way to compute the call, and measured rates."""
    yield "## The roofline, and what is reached"
    yield (
        "Every unit at its peak rate, each by itself: the longest time is the least that a call "
        "can take."
    )
    rows = [
        [w.name, *map(time_text, w.seconds.values()), "does not fit" if w.problem else w.bound]
        for w in account.works
    ]
    units = tuple(account.works[0].seconds)
    yield _table(("", *units, "bound by"), rows, right=1, of=len(units))
    if account.measured:
        yield "Units wait for one another, so that a kernel takes longer. Measured:"
        measured = [
            [
                *(m.form, f"{m.batch} x {m.heads} heads, {m.length:,}"),
                *(f"{m.ms:.3g}", f"{m.tflops:.0f}", f"{m.roofline_ms:.3g}", f"{m.share:.0%}"),
                f"{m.gpu}, Triton {m.triton}",
            ]
            for m in account.measured
        ]
        columns = ("kernel", "call", "ms", "TFLOP/s", "roofline, ms", "reached", "on")
        yield _table(columns, measured, right=2, of=4)


def longer(series: Series) -> Iterator[str]:
    """The rooflines at other lengths, and the backward pass."""
    yield "## Longer sequences"
    yield (
        "Standard attention grows with the square of the length; what is visible need not. "
        "The rooflines:"
    )
    rows = []
    for x in series.accounts:
        standard, own = work_of(x, STANDARD.name), x.works[-1]
        times = (time_text(standard.roofline), time_text(own.roofline))
        factor = f"{standard.roofline / own.roofline:,.1f}"
        rows.append([f"{x.call.kv_len:,}", str(x.call.batch), f"{x.mask.share:.3%}"])
        rows[-1] += [*times, factor, own.bound]
    columns = ("keys", "batch", "visible", STANDARD.name, series.asked.works[-1].name, "factor")
    yield _table((*columns, "bound by"), rows, right=0, of=len(columns))
    yield (
        "The backward pass needs the weights again. Standard attention keeps them; FlashAttention "
        "keeps one number for each row, the log-sum-exp, and computes them anew, one product more. "
        f"Both passes of the call, between SMs and memory: "
        f"{training_text(series.asked)}."
    )


def work_of(account: Account, name: str) -> Work:
    """One way to compute the call."""
    return next(work for work in account.works if work.name == name)


def unit_time(work: Work, unit: str) -> str:
    """What a unit takes by itself."""
    return time_text(work.seconds[unit])


def _table(
    columns: Iterable[str], rows: Iterable[Iterable[str]], *, right: int, of: int = 2
) -> str:
    """A table; the columns from ``right`` on, as many as ``of``, are aligned to the right."""
    columns = tuple(columns)
    rule = ["---:" if right <= i < right + of else "---" for i in range(len(columns))]
    return "\n".join(f"| {' | '.join(row)} |" for row in (columns, rule, *rows))
