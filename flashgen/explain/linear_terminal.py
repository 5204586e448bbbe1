"""The account of linear attention as text, in colour in a terminal or plain in a pipe."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from rich.console import Console, RenderableType
from rich.text import Text

from flashgen.explain.linear import LinearAccount, PackedChunks
from flashgen.explain.terminal import print_sections, simple_table
from flashgen.explain.words import bytes_text, call_text, time_text


def print_linear(console: Console, account: LinearAccount) -> None:
    """Prints an account, section by section."""
    print_sections(console, _sections(account))


def _sections(account: LinearAccount) -> Iterator[tuple[str, Iterable[RenderableType]]]:
    heading = f"{account.variant} on {account.target} ({account.gpu})"
    yield heading, map(Text, (call_text(account), f"Mask: {account.mask}"))
    yield f"Weights: {account.weights}", map(Text, _weights(account))
    for of_pass in account.passes:
        config = of_pass.config
        yield (
            f"Kernels of the {of_pass.name} pass: chunks of {config.BLOCK_M} rows, "
            f"{config.num_warps} warps, {config.num_stages} stages, {of_pass.chosen}",
            [
                Text(
                    f"{of_pass.shared:,} bytes of shared memory of {of_pass.limit:,}; "
                    f"{of_pass.candidates} configurations fit, {of_pass.rejected} do not"
                )
            ],
        )
    yield "Traffic and arithmetic", _traffic(account)
    yield "Softmax attention", map(Text, _softmax(account))


def _weights(account: LinearAccount) -> Iterator[str]:
    yield account.algorithm
    yield f"features: {account.feature_map}"
    state = bytes_text(account.state)
    yield f"{account.features} features of a vector; the state of a head takes {state}"
    if account.tiles > 1:
        yield f"a program holds one of {account.tiles} tiles of a state"
    if account.run is not None or account.of_ids:
        yield _runs(account)
    if account.packed is not None:
        yield from _packed(account.packed)
    if account.segments > 1:
        of_what = "a sequence" if account.packed is None else "all chunks"
        yield f"{account.segments} segments of {of_what}, each with a state of its own"


def _packed(packed: PackedChunks) -> Iterator[str]:
    sequences = packed.sequences
    yield (
        f"{sequences.count:,} sequences of {sequences.shortest:,} to {sequences.longest:,} "
        f"queries, {sequences.queries:,} in total, each with a state of its own"
    )
    yield (
        f"{packed.chunks:,} chunks of queries, of whose rows {packed.empty_rows:.1%} are empty; "
        f"padded to the longest, sequences have {packed.padded:,}"
    )


def _runs(account: LinearAccount) -> str:
    size = "" if account.run is None else f" of {account.run:,} positions"
    text = f"a state for each run{size}, reset where it ends"
    if not account.of_ids:
        return text
    return (
        f"{text}; all pairs of a sequence in which an id returns: "
        f"{account.pair_flops / 1e9:,.1f} GFLOP, if all do"
    )


def _traffic(account: LinearAccount) -> Iterator[RenderableType]:
    columns = ("GFLOP", "DRAM read", "written", "L2", "least time")
    table = simple_table("", *columns, "by", right=columns)
    for step in account.steps:
        sizes = map(bytes_text, (step.read, step.written, step.l2))
        flops, least = f"{step.flops / 1e9:,.1f}", time_text(step.roofline)
        table.add_row(step.name, flops, *sizes, least, step.bound)
    yield table
    yield Text()
    yield Text(
        f"One after the other: {time_text(account.roofline)} at the peak rates of the target. A "
        f"backward pass has {account.backward_flops / 1e9:,.1f} GFLOP."
    )


def _softmax(account: LinearAccount) -> Iterator[str]:
    softmax = account.softmax
    yield (
        f"{softmax.flops / 1e9:,.1f} GFLOP, and at least {time_text(softmax.roofline)}, limited by "
        f"{softmax.bound}"
    )
    if account.packed is not None:
        return
    if account.crossover is None:
        yield "It takes less time at any length, by these limits."
    else:
        yield f"It takes longer from a length of {account.crossover:,} on, by these limits."
