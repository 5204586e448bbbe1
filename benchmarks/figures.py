"""What committed results say: rates, ratios and means of the rows of a file of results.

A figure is by one of two timings (benchmarks/README.md): ``"ms"``, the medians of do_bench, or
``"sustained_ms"``. Files from before 2026-11-21 hold the first alone.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

RESULTS = Path(__file__).parent / "results"
OWN, RIVAL, FA4 = "flashgen", "FlexAttention", "FA4"
#: In the order of tables; any other peer comes after them.
PEERS = (OWN, FA4, "SDPA cuDNN", RIVAL, "SDPA flash", "varlen_attn", f"{OWN}, portable")
TIMINGS = {"ms": "medians", "sustained_ms": "sustained"}

#: What tensors hold, by a name of `benchmarks.inputs`, where a row of results does not say it.
NORMAL = "normal"
#: In a document that `of_normal` made: the rows with other inputs, and in each of them `OF_NORMAL`,
#: by timing, flashgen's rate over the one with normal inputs.
OTHERS, OF_NORMAL = "other_inputs", "of_normal"

Document = Mapping[str, Any]
Row = Mapping[str, Any]


def newest_results(folder: Path = RESULTS) -> dict[str, Document]:
    """Of each benchmark that a folder has results of, those with the latest date.

    Of one date, the latest is the one whose file has the last letter behind it. A file that has no
    normal inputs adds its rows to those of others that one with them shows; see `of_normal`.
    """
    found = [(path.stem, json.loads(path.read_text())) for path in sorted(folder.glob("*.json"))]

    def age(named: tuple[str, Document]) -> tuple[str, str]:
        date = str(named[1]["environment"]["date"])
        return date, named[0].rpartition(date)[2]

    by_benchmark: dict[str, list[Document]] = {}
    for _, document in sorted(found, key=age):
        by_benchmark.setdefault(document["benchmark"], []).append(document)
    return {name: _newest(documents) for name, documents in by_benchmark.items()}


def _newest(documents: Sequence[Document]) -> Document:
    whole = [document for document in documents if NORMAL in _inputs(document)]
    return of_normal((whole or documents)[-1], *documents)


def _inputs(document: Document) -> Sequence[str]:
    """Those that its cells were measured with; old files do not say."""
    names: Sequence[str] = document.get("inputs", [NORMAL])
    return names


def inputs_of(row: Row) -> str:
    """The name of what the tensors held."""
    name: str = row.get("inputs", NORMAL)
    return name


def of_normal(document: Document, *more: Document) -> Document:
    """A document with its rows of normal inputs as its cells, and all others in `OTHERS`.

    Rates with other inputs are compared with those of the same file alone: of the same run, on the
    same GPU. A run without normal inputs keeps its cells as they are.

    Args:
        document: whose cells are shown.
        more: all documents of the benchmark, the newest last, instead of this one alone: the
            newest row of each cell and each inputs is taken.
    """
    others = {name for one in (document, *more) for name in _inputs(one)} - {NORMAL}
    if not others or NORMAL not in _inputs(document):
        return document
    found: dict[tuple[Any, str], Row] = {}
    for one in more or (document,):
        plain = {row["cell"]: row for row in one["cells"] if inputs_of(row) == NORMAL}
        for row in one["cells"]:
            if inputs_of(row) != NORMAL:
                found[row["cell"], inputs_of(row)] = {
                    **row,
                    OF_NORMAL: _of_normal(row, plain.get(row["cell"], {})),
                }
    normal = [row for row in document["cells"] if inputs_of(row) == NORMAL]
    return {**document, "cells": normal, OTHERS: list(found.values())}


def _of_normal(row: Row, plain: Row) -> Mapping[str, float]:
    """A row's rate over that of another one, by each timing that both have."""
    both: Mapping[str, Mapping[str, list[float]]] = {
        timing: {OWN: row[timing].get(OWN, []), NORMAL: plain.get(timing, {}).get(OWN, [])}
        for timing in timings([row])
    }
    found = {timing: ratio(both, NORMAL, timing) for timing in both}
    return {timing: value for timing, value in found.items() if value is not None}


def timings(rows: Iterable[Row]) -> list[str]:
    """Those of `TIMINGS` that any row has figures by."""
    held = list(rows)
    return [timing for timing in TIMINGS if any(row.get(timing) for row in held)]


def peers_of(rows: Iterable[Row]) -> list[str]:
    """Our own name and the peers that any row has a figure for, in the order of tables."""
    found = {peer for row in rows for peer in row["ms"]}
    return sorted(found, key=lambda peer: (PEERS.index(peer) if peer in PEERS else 9, peer))


def is_own(peer: str) -> bool:
    """Whether a figure is of flashgen, in one way or another, and no peer's."""
    return peer.startswith(OWN)


def rates(row: Row, peer: str, timing: str = "ms") -> list[float]:
    """TFLOP/s on visible elements of each repetition; none where the peer has no figure."""
    found: list[float] = row.get(timing.replace("ms", "tflops"), {}).get(peer, [])
    return found


def rate(row: Row, peer: str, timing: str = "ms") -> float | None:
    """Their mean."""
    found = rates(row, peer, timing)
    return mean(found) if found else None


def ratio(row: Row, peer: str | None, timing: str = "ms") -> float | None:
    """How many times as fast as a peer: of times, which unlike rates have not been rounded twice.

    None where one of the two has no figure.
    """
    ms: Mapping[str | None, list[float]] = row.get(timing, {})
    if not ms.get(OWN) or not ms.get(peer):
        return None
    return mean(ms[peer]) / mean(ms[OWN])


def best_peer(row: Row, timing: str = "ms") -> str | None:
    """The quickest of the others; None where there is none."""
    times = row.get(timing, {}).items()
    others = {peer: mean(ms) for peer, ms in times if ms and not is_own(peer)}
    return min(others, key=lambda peer: others[peer]) if others else None


def best_fa4(row: Row, timing: str = "ms") -> str:
    """The quicker of the ways in which FlashAttention 4 was called."""
    ways = {p: mean(ms) for p, ms in row.get(timing, {}).items() if p.startswith(FA4) and ms}
    return min(ways, key=lambda peer: ways[peer]) if ways else FA4


def of_causal(row: Row, rows: Iterable[Row], timing: str = "ms") -> float | None:
    """The rate of flashgen over its rate of plain causal attention among the same rows."""
    causal = next((other for other in rows if other["mask"] == "causal"), None)
    own, plain = rate(row, OWN, timing), rate(causal, OWN, timing) if causal else None
    return own / plain if own and plain else None


def geometric_mean(values: Sequence[float]) -> float:
    """Of at least one positive number."""
    return math.exp(mean(math.log(value) for value in values))


def machine(document: Document) -> str:
    """What the figures belong to: the GPU, the libraries, the date."""
    env = document["environment"]
    libraries = [f"torch {env['torch']}", f"triton {env['triton']}", f"cuDNN {env['cudnn']}"]
    if "flash_attn_4" in env:
        libraries.append(f"flash-attn-4 {env['flash_attn_4']} (FA4)")
    return f"{env['gpu']}, {', '.join(libraries)}, {env['date']}"


def caption(document: Document) -> str:
    """That, and how the figures of its cells were taken, as a sentence without its stop."""
    counts = [len(ms) for row in document["cells"] for ms in row["ms"].values()]
    least, most = min(counts), max(counts)
    repeats = str(most) if least == most else f"{least} to {most}"
    medians = "one median" if most == 1 else f"mean of {repeats} medians"
    if "sustained_ms" in timings(document["cells"]):
        medians += " and sustained timings" if most > 1 else " and one sustained timing"
    return f"{machine(document)}, {medians}"
