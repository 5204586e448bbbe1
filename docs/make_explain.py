"""Makes docs/explain.md and its pictures: FlashAttention taught by the account of one spec.

    python -m docs.make_explain                        writes them, about specs/window_d128.py
    python -m docs.make_explain specs/mine.py mine.md  writes such a page about a spec of yours

Every figure, formula and picture is of the account that `flashgen explain` shows; the words between
them hold for any variant.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

from docs import kernel_lines
from docs.explain_tables import longer, reached, sizes, unit_time, work_of
from flashgen.explain.account import Account, Run, Work
from flashgen.explain.algorithms import FLASH_1, ONE_D, ONLINE, STANDARD, TWO_D
from flashgen.explain.call import Asked
from flashgen.explain.lengths import explain_lengths
from flashgen.explain.svg import svg_of
from flashgen.explain.words import bytes_text, call_text, time_text
from flashgen.loader import load
from flashgen.plan import lower

ROOT = Path(__file__).parents[1]
SPEC, PAGE = "specs/window_d128.py", "explain.md"

#: Keys of the first picture; the other one is of the call.
SHORT = 2048


def pages(spec: Path, out: Path, page: str = PAGE) -> dict[str, str]:
    """The page and its pictures: paths beside one another -> text.

    Args:
        spec: a file that declares one variant.
        out: the folder of the generated modules.
        page: the page's file name; the pictures lie in a folder named like it.

    Raises:
        FlashgenError: what is wrong with the spec.
        ValueError: the file declares several variants.
    """
    [variant] = load([spec])
    [series] = explain_lengths([spec], None, Asked(), out)
    account, source = series.asked, spec.read_text()
    folder = page.removesuffix(".md")
    short = next((x for x in series.accounts if x.call.kv_len >= SHORT), account)
    drawn = {f"{folder}/{x.call.kv_len}.svg": x for x in (short, account)}
    state = kernel_lines.of_state(lower(variant.spec, variant.name))
    parts = [
        *_introduction(account, source),
        *_problem(account),
        *_tiles(account),
        *_online(account, state),
        *_order(account),
        *_mask(account, drawn),
        *sizes(account),
        *reached(account),
        *longer(series),
        *_own(account),
    ]
    text = "\n\n".join(parts) + "\n"
    return {page: text, **{path: svg_of(x) for path, x in drawn.items()}}


def _introduction(account: Account, source: str) -> Iterator[str]:
    yield f"# FlashAttention, shown by {account.variant}"
    yield (
        "Why attention kernels are built as they are, shown by one spec. All figures, formulas and "
        "pictures are what `flashgen explain` says of it, without a GPU; "
        "`python -m docs.make_explain` writes this page, and "
        "`python -m docs.make_explain specs/mine.py mine.md` one about a spec of yours."
    )
    yield f"```python\n{source.strip()}\n```"
    given = "".join(f"; {name}: {value}" for name, value in account.call.params)
    yield f"The call: {call_text(account)}{given}. The GPU: {account.gpu} ({account.target})."


def _problem(account: Account) -> Iterator[str]:
    standard, once = work_of(account, STANDARD.name), work_of(account, ONE_D.name)
    call = account.call
    scores = call.batch * call.num_q_heads * call.q_len * call.kv_len
    yield "## The problem: scores"
    yield (
        "Attention computes, for each head, `S = scale * Q @ K.T`, a score for each pair of a "
        "query and a key; `P`, the softmax of each row of S; and `O = P @ V`. "
        f"Here there are {scores:,} scores. Q, K, V and O are in total "
        f"{bytes_text(once.dram_read + once.dram_written)}; they grow with the length, and the "
        "scores with its square."
    )
    yield (
        "Standard attention has a kernel for each of these steps, and each of them reads "
        f"or writes all scores, in DRAM: {bytes_text(standard.dram_read)} read and "
        f"{bytes_text(standard.dram_written)} written for {_flops(standard)}. That is "
        f"{standard.intensity:,.0f} FLOP for each byte, and an {account.gpu} can do "
        f"{account.crossover:,.0f} in the time that it takes to move one. The products alone would "
        f"take {unit_time(standard, 'compute')}; memory takes {unit_time(standard, 'memory')}."
    )


def _tiles(account: Account) -> Iterator[str]:
    rows, tiles = work_of(account, ONE_D.name), work_of(account, TWO_D.name)
    limit = account.kernels[0].limit
    yield "## Tiles"
    yield (
        f"An SM has shared memory of its own, of which a block gets {limit:,} B. Scores that are "
        f"made and used there cost DRAM nothing. With K and V whole beside {rows.tile} of scores "
        f"a block needs {rows.shared or 0:,} B, "
        + ("which does not fit." if rows.problem else "which fits, at this length.")
    )
    yield (
        f"Tiles of both queries and keys fit at any length, here {tiles.tile}. But a softmax "
        "divides by the sum over a whole row, and a tile has only a part of one: so the scores go "
        f"to DRAM and come back after all, {bytes_text(tiles.dram_read)} read and "
        f"{bytes_text(tiles.dram_written)} written."
    )


def _online(account: Account, state: str) -> Iterator[str]:
    online = work_of(account, ONLINE.name)
    yield "## Online softmax"
    yield (
        "The way out is to treat a part of a row as if it were all of it, and to correct that "
        "later. Each row keeps its maximum so far, the sum of its weights so far, and its output "
        "so far. When a later tile has a larger maximum, sum and output are multiplied by `alpha`, "
        "the exponential of the old maximum less the new one. At the end the output is divided by "
        "the sum."
    )
    if "alpha" in state:
        yield "These are the lines of the portable kernel, in base 2:"
        yield f"```python\n{state}\n```"
    else:
        yield "In this variant a weight depends on no other: its kernel needs none of that."
    if "alpha" in state and account.kernels[0].form == "hopper":
        yield (
            "The Gluon kernel goes a step further: weights are relative to the maximum of the "
            "first tile, and the few tiles in which scores outgrow it are computed again."
        )
    yield (
        "No score leaves the SM. DRAM sees Q, K and V once, "
        f"{bytes_text(online.dram_read)}, and the output, {bytes_text(online.dram_written)}: "
        f"{online.intensity:,.0f} FLOP for a byte. What takes longest is now {_bound(online)}."
    )


def _order(account: Account) -> Iterator[str]:
    first, own = work_of(account, FLASH_1.name), account.works[-1]
    yield "## Which loop is outside"
    yield (
        "FlashAttention-1 took a tile of keys and went over all queries. Then the output so far "
        "and its statistics are read and written for every tile of keys: over the tiles that this "
        f"kernel visits {bytes_text(first.dram_read)} read and {bytes_text(first.dram_written)} "
        "written. FlashAttention-2, and every kernel of flashgen, takes a tile of queries and goes "
        "over the keys. The output stays in registers until it is done: "
        f"{bytes_text(own.dram_read)} read and {bytes_text(own.dram_written)} written."
    )


def _mask(account: Account, drawn: dict[str, Account]) -> Iterator[str]:
    mask, online, own = account.mask, work_of(account, ONLINE.name), account.works[-1]
    visited = mask.tiles["masked"] + mask.tiles["unmasked"]
    yield "## What the mask hides"
    if mask.conditions:
        yield "A query sees the keys where"
        yield "```text\n" + "\n".join(mask.conditions) + "\n```"
    else:
        yield "A query sees every key."
    if mask.listed:
        yield "A small kernel lists the tiles to visit; `seen` and, without a mask, `full` are"
        yield "```text\n" + "\n".join(mask.listed) + "\n```"
    else:
        yield "From that flashgen derives, for the queries `q_first` to `q_last` of a tile, that"
        yield "```text\n" + "\n".join(line for run in mask.runs for line in _run(run)) + "\n```"
        yield (
            "Tiles of keys outside of the former are not visited; those inside of the latter are "
            "computed without the mask."
        )
    images = []
    for path, shown in drawn.items():
        small, tiles = shown.mask.picture, shown.mask.tiles
        said = ", ".join(f"{number:,} {kind}" for kind, number in tiles.items())
        size = f"{small.q_len:,} queries, {small.kv_len:,} keys"
        images.append(f'<img width="300" src="{path}" alt="{size}; tiles: {said}">')
    yield " ".join(images)
    names = " and ".join(f"{x.call.q_len:,}" for x in drawn.values())
    yield (
        f"{names} queries down, keys across: blue tiles are computed without the mask, orange ones "
        f"with it, grey ones not at all. In the call {mask.share:.3%} of the elements are visible, "
        f"and {visited:,} of {sum(mask.tiles.values()):,} tiles of a head are visited, "
        f"{mask.tiles['masked']:,} of them with the mask. Instead of {_flops(online)} there are "
        f"{_flops(own)}, and instead of {time_text(online.seconds['compute'])} products take "
        f"{time_text(own.seconds['compute'])}."
    )


def _run(run: Run) -> Iterator[str]:
    when = f", where {run.condition}" if run.condition else ""
    yield f"some see the keys from {run.begin} to before {run.end}{when}"
    yield f"all see those from {run.full_begin} to before {run.full_end}"


def _own(account: Account) -> Iterator[str]:
    yield "## Your own"
    path = account.file
    yield (
        "```console\n"
        f"$ flashgen explain {path}\n"
        f"$ flashgen explain {path} --q-len 4096 --kv-heads 2\n"
        f"$ flashgen explain {path} --html page.html\n"
        "```"
    )
    yield (
        "The last one writes this account as a page with a slider over the length. The formulas "
        "are those that prune the tuner's candidates; flashgen's docs/design/explain.md says "
        "which published figures they meet."
    )


def _bound(work: Work) -> str:
    return f"{work.bound}, {time_text(work.roofline)}"


def _flops(work: Work) -> str:
    return f"{work.flops / 1e9:,.1f} GFLOP"


def write(files: dict[str, str], folder: Path) -> None:
    """Writes them."""
    for path, text in files.items():
        (folder / path).parent.mkdir(exist_ok=True)
        (folder / path).write_text(text)


if __name__ == "__main__":
    spec, page = (Path(sys.argv[1]), Path(sys.argv[2])) if sys.argv[1:] else (Path(SPEC), None)
    at = page or Path(__file__).with_name(PAGE)
    write(pages(spec, Path("generated"), at.name), at.parent)
