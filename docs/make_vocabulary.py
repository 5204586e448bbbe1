"""Makes docs/vocabulary.md and its pictures from what flashgen derives and renders now.

    python -m docs.make_vocabulary    writes them

What each entry declares, and who uses it, is said in `docs.vocabulary_entries`; everything else on
the page is printed by the plan of that declaration, or cut from its rendered kernel.
"""

from __future__ import annotations

import ast
import html
import inspect
import re
from collections.abc import Callable, Collection, Iterable, Iterator
from pathlib import Path
from typing import Any

import flashgen
from docs import kernel_lines
from docs.tile_pictures import BLOCK, checked_picture
from docs.vocabulary_entries import MASKS, NORMALISERS, SCORES, Entry, Shown
from flashgen import AttentionSpec, Normaliser, Score, causal, full
from flashgen.codegen.module import render_module
from flashgen.explain.svg import COLOURS, svg
from flashgen.masks import as_mask
from flashgen.normalisers import Linear
from flashgen.plan import KernelPlan, lower
from flashgen.symbolic.printer import plain_source
from flashgen.symbolic.tile_logic import tile_logic

FOLDER = Path(__file__).parent
PAGE = "vocabulary.md"

INTRODUCTION = """\
# Vocabulary

Every mask, score function and normaliser that flashgen ships, and what it makes of each. None of
them is special: each is a function like your own, and flashgen sees only what the function returns.
This page is made by `python -m docs.make_vocabulary`, and a test holds it and its pictures to what
the code does now.
"""

MASKS_INTRODUCTION = f"""\
## Masks

For each: a declaration, the condition traced from it, and the lines of the kernel that follow from
it. A tile is the queries from `q_first` to `q_last`. Some of them see the keys from `some_begin` to
before `some_end`, all of them those from `all_begin` to before `all_end`; a `begin` that is left
out is 0. The kernel visits the tiles that hold a key of the first range, and evaluates `visible`
unless all their keys are in the second. "Exact": every key of the first range is seen by some query
of the tile. Otherwise the range is a hull, sound but wider, and the part of the mask that made it
so is named, as `flashgen build` names it. Masks that read a table of blocks have no ranges: a small
kernel lists beforehand the tiles to visit, those that are `seen`, and whether each is seen in
`full`.

In the pictures dark elements are visible, by the mask's own function. A tile of {BLOCK} by {BLOCK}
is grey where the derived bounds skip it, blue where it is visited without the mask, orange where it
is masked, and red where it is visited for nothing.
"""

SCORES_INTRODUCTION = """\
## Score functions

`score` is `scale * (q @ k.T)`, as in FlexAttention. The softmax runs in base 2: what is taken to
the power of two is `scores * qk_scale`, less the row's maximum. So a positive factor of a score
function costs nothing, and neither does what it adds to a whole row (`shift`), which goes into the
log-sum-exp alone. The code shows first what runs once for each tile of queries, then the inner
loop. It is that of bfloat16; in float32, where the parts would round differently, only a plain
factor is split off.
"""

NORMALISERS_INTRODUCTION = """\
## Normalisers

How the scores s of a row become weights of the values. `return_lse=True` also returns the logarithm
of the sum of the row's unnormalised weights. `linear` has weights without scores.
"""


def pages() -> dict[str, str]:
    """The page and the pictures: paths in docs/ -> text."""
    files: dict[str, str] = {}
    columns = ("mask", "bounds", "guard for empty rows", *COLOURS)
    summary = [_row(columns), _row(["---"] * 3 + ["---:"] * len(COLOURS))]
    masks = [_mask_section(name, entry, files, summary) for name, entry in MASKS.items()]
    parts = [
        *(_unwrapped(INTRODUCTION), _contents(), _unwrapped(MASKS_INTRODUCTION)),
        *("\n".join([*summary, ""]), *masks),
        _unwrapped(SCORES_INTRODUCTION),
        *(_score_section(name, entry) for name, entry in SCORES.items()),
        _unwrapped(NORMALISERS_INTRODUCTION),
        *(_normaliser_section(name, entry) for name, entry in NORMALISERS.items()),
    ]
    return {PAGE: "\n".join(parts), **files}


def _row(cells: Iterable[str]) -> str:
    """A row of a table."""
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


def _unwrapped(text: str) -> str:
    """Paragraphs on a line each."""
    return re.sub(r"(?<=[^\n])\n(?=[^\n])", " ", text)


def declared(shown: Shown) -> Any:
    """What the last line of a declaration is, after the lines before it."""
    *statements, expression = shown.source.splitlines()
    names = {name: getattr(flashgen, name) for name in flashgen.__all__}
    exec("\n".join(statements), names)
    return eval(expression, names)


def _contents() -> str:
    """The names in groups, each linked to its section."""
    groups = {"Masks": MASKS, "Score functions": SCORES, "Normalisers": NORMALISERS}
    lines = [_row(["", ""]), _row(["---", "---"])]
    for group, entries in groups.items():
        links = ", ".join(f"[{name}](#{_anchor(name)})" for name in entries)
        lines.append(_row([group, links]))
    return "\n".join([*lines, ""])


def _anchor(heading: str) -> str:
    return re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-")


def _mask_section(name: str, entry: Entry, files: dict[str, str], summary: list[str]) -> str:
    """The section; its pictures go into `files`, a row for each into `summary`."""
    parts = _heading(name, entry)
    for shown in entry.shown:
        mask = as_mask(declared(shown))
        plan = lower(AttentionSpec(64, mask=mask), "shown")
        image = f"vocabulary/{shown.picture}.svg"
        logic = tile_logic(plan.predicate)  # of masks that read block tables
        drawn = checked_picture(mask, logic or plan.bounds, *shown.lengths, shown.values)
        title = html.escape(mask.label, quote=False)
        files[image] = svg(drawn.tiles, title, drawn.seen.tolist())
        tiles = drawn.tiles.counts
        facts = (
            "listed" if plan.listing else "exact" if plan.bounds.exact else "hull",
            "yes" if plan.bounds.rows_can_be_empty else "no",
            *(str(tiles[kind]) for kind in COLOURS),
        )
        summary.append(_row([f"`{shown.source.splitlines()[-1]}`", *facts]))
        counts = ", ".join(f"{tiles[kind]} {kind}" for kind in COLOURS)
        given = ", ".join(f"{k}={v}" for k, v in shown.values.items() if isinstance(v, int))
        lengths = "{} queries, {} keys".format(*shown.lengths) + (f", {given}" if given else "")
        parts += [
            f'<img align="right" width="220" src="{image}" alt="{lengths}; tiles: {counts}">\n',
            _code(shown.source),
            _predicate(plan) + "\n",
            _code(kernel_lines.of_mask(plan)),
            _verdict(plan),
            '<br clear="right">\n',
        ]
    return "\n".join(parts)


def _predicate(plan: KernelPlan) -> str:
    return f"Seen: `{plain_source(plan.predicate.expr)}`" if plan.masks else "Seen: all."


def _verdict(plan: KernelPlan) -> str:
    """Exact or hull, whether a row can be empty, and the tables that are made for the call."""
    bounds = plan.bounds
    tables = [
        f"Made once a call: {described}."
        for table in plan.row_tables
        for described in _described(plan, table.name)
    ]
    notes = "; ".join(map(_as_code, bounds.diagnostics)) + "."
    exact = "Exact." if bounds.exact else ("" if plan.listing else "A hull: ") + notes
    exact = exact[0].upper() + exact[1:]
    empty = (
        "It is not certain that every query sees a key: the kernel has a guard."
        if bounds.rows_can_be_empty
        else "Every query sees a key, so the kernel has no guard."
    )
    return " ".join([exact, empty, *tables]) + "\n"


def _as_code(note: str) -> str:
    """A note with the part of the mask that it ends in as code."""
    says, _, part = note.partition(": ")
    return f"{says}: `{part}`" if part else says


def _described(plan: KernelPlan, table: str) -> Iterator[str]:
    """What the rendered module's docstring says about a table."""
    docstring = ast.get_docstring(ast.parse(render_module(plan, {}))) or ""
    for line in docstring.splitlines():
        if line.startswith(f"{table}["):
            yield f"`{line.replace(' is ', '` is ', 1).rstrip('.')}"


def _score_section(name: str, entry: Entry) -> str:
    parts = _heading(name, entry)
    for shown in entry.shown:
        score: Score = declared(shown)
        mask = causal() if score.equal_lengths else full()
        plan = lower(AttentionSpec(64, mask=mask, score=score), "shown")
        parts += [
            _code(shown.source),
            f"`{plan.code.comment}`\n",
            _code(kernel_lines.of_score(plan)),
        ]
    return "\n".join(parts)


def _normaliser_section(name: str, entry: Entry) -> str:
    parts = _heading(name, entry)
    for shown in entry.shown:
        normaliser: Normaliser = declared(shown)
        is_linear = isinstance(normaliser, Linear)
        mask = causal() if is_linear else flashgen.sliding_window(8, 0, align="bottom_right")
        plan = lower(AttentionSpec(64, mask=mask, normaliser=normaliser), "shown")
        lines = kernel_lines.of_features if is_linear else kernel_lines.of_state
        parts += [_code(shown.source), shown.said + "\n", _code(lines(plan))]
    return "\n".join(parts)


def _heading(name: str, entry: Entry) -> list[str]:
    """The heading, and of a function its signature and the first line of its docstring."""
    function = getattr(flashgen, name, None)
    said = []
    if function is not None:
        summary = inspect.getdoc(function).split("\n\n")[0].replace("\n", " ").replace("``", "`")
        said = [f"`{name}{_signature(function)}`: {summary}"]
    return [f"### {name}\n", " ".join([*said, entry.users]).strip() + "\n"]


def _signature(function: Callable[..., Any]) -> str:
    """A function's arguments and defaults, without their types."""
    signature = inspect.signature(function)
    bare = [p.replace(annotation=p.empty) for p in signature.parameters.values()]
    return str(inspect.Signature(bare))


def _code(source: str) -> str:
    return f"```python\n{source.strip()}\n```\n"


def write(files: dict[str, str], folder: Path = FOLDER) -> None:
    """Writes them, and removes pictures that nothing shows any more."""
    (folder / "vocabulary").mkdir(exist_ok=True)
    for old in _strangers(folder, files):
        old.unlink()
    for path, text in files.items():
        (folder / path).write_text(text)


def _strangers(folder: Path, files: Collection[str]) -> list[Path]:
    pictures = (folder / "vocabulary").glob("*.svg")
    return [path for path in pictures if path.relative_to(folder).as_posix() not in files]


if __name__ == "__main__":
    write(pages())
