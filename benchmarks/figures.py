"""Figures of committed results: rates, ratios and means of the rows of a file of results.

A figure is from one of two timings (benchmarks/README.md): ``"ms"``, the medians of do_bench, or
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
#: The peers in the order of tables; any other peer comes after them.
PEERS = (OWN, FA4, "SDPA cuDNN", RIVAL, "SDPA flash", "varlen_attn", f"{OWN}, portable")
TIMINGS = {"ms": "medians", "sustained_ms": "sustained"}

#: The inputs, by a name of `benchmarks.inputs`, of rows that do not name them.
NORMAL = "normal"
#: Keys of a document from `of_normal`: the rows with other inputs, and in each row, by timing,
#: flashgen's rate over its rate with normal inputs.
OTHERS, OF_NORMAL = "other_inputs", "of_normal"

Document = Mapping[str, Any]
Row = Mapping[str, Any]


def newest_results(folder: Path = RESULTS) -> dict[str, Document]:
    """The latest results in a folder for each benchmark.

    Among files of one date, the one with the last letter is the latest. A file without normal
    inputs adds its rows to the other inputs of a file with normal ones; see `of_normal`.
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
    """The inputs that a document's cells were measured with; old files do not name them."""
    names: Sequence[str] = document.get("inputs", [NORMAL])
    return names


def inputs_of(row: Row) -> str:
    """The name of a row's inputs."""
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
    """A row's rate over another row's, by each timing that both have."""
    both: Mapping[str, Mapping[str, list[float]]] = {
        timing: {OWN: row[timing].get(OWN, []), NORMAL: plain.get(timing, {}).get(OWN, [])}
        for timing in timings([row])
    }
    found = {timing: ratio(both, NORMAL, timing) for timing in both}
    return {timing: value for timing, value in found.items() if value is not None}


def timings(rows: Iterable[Row]) -> list[str]:
    """The timings of `TIMINGS` for which any row has figures."""
    held = list(rows)
    return [timing for timing in TIMINGS if any(row.get(timing) for row in held)]


def peers_of(rows: Iterable[Row]) -> list[str]:
    """Our own name and the peers that any row has a figure for, in the order of tables."""
    found = {peer for row in rows for peer in row["ms"]}
    return sorted(found, key=lambda peer: (PEERS.index(peer) if peer in PEERS else 9, peer))


def is_own(peer: str) -> bool:
    """Whether a figure belongs to flashgen, in any of its ways, not to a peer."""
    return peer.startswith(OWN)


def rates(row: Row, peer: str, timing: str = "ms") -> list[float]:
    """TFLOP/s on visible elements of each repetition; none if the peer has no figure."""
    found: list[float] = row.get(timing.replace("ms", "tflops"), {}).get(peer, [])
    return found


def rate(row: Row, peer: str, timing: str = "ms") -> float | None:
    """The mean of `rates`."""
    found = rates(row, peer, timing)
    return mean(found) if found else None


def ratio(row: Row, peer: str | None, timing: str = "ms") -> float | None:
    """How many times as fast as a peer, from times, which unlike rates are not rounded twice.

    None if one of the two has no figure.
    """
    ms: Mapping[str | None, list[float]] = row.get(timing, {})
    if not ms.get(OWN) or not ms.get(peer):
        return None
    return mean(ms[peer]) / mean(ms[OWN])


def best_peer(row: Row, timing: str = "ms") -> str | None:
    """The fastest peer; None without one."""
    times = row.get(timing, {}).items()
    others = {peer: mean(ms) for peer, ms in times if ms and not is_own(peer)}
    return min(others, key=lambda peer: others[peer]) if others else None


def best_fa4(row: Row, timing: str = "ms") -> str:
    """The faster of the ways in which FlashAttention 4 was called."""
    ways = {p: mean(ms) for p, ms in row.get(timing, {}).items() if p.startswith(FA4) and ms}
    return min(ways, key=lambda peer: ways[peer]) if ways else FA4


def of_causal(row: Row, rows: Iterable[Row], timing: str = "ms") -> float | None:
    """The rate of flashgen over its rate of plain causal attention among the same rows."""
    causal = next((other for other in rows if other["mask"] == "causal"), None)
    own, plain = rate(row, OWN, timing), rate(causal, OWN, timing) if causal else None
    return own / plain if own and plain else None


def geometric_mean(values: Sequence[float]) -> float:
    """The geometric mean of at least one positive number."""
    return math.exp(mean(math.log(value) for value in values))


def machine(document: Document) -> str:
    """The GPU, the libraries and the date of the figures."""
    env = document["environment"]
    libraries = [f"torch {env['torch']}", f"triton {env['triton']}", f"cuDNN {env['cudnn']}"]
    if "flash_attn_4" in env:
        libraries.append(f"flash-attn-4 {env['flash_attn_4']} (FA4)")
    return f"{env['gpu']}, {', '.join(libraries)}, {env['date']}"


def caption(document: Document) -> str:
    """The machine and the protocol of a document's figures, as a sentence without its full stop."""
    counts = [len(ms) for row in document["cells"] for ms in row["ms"].values()]
    least, most = min(counts), max(counts)
    repeats = str(most) if least == most else f"{least} to {most}"
    medians = "one median" if most == 1 else f"mean of {repeats} medians"
    if "sustained_ms" in timings(document["cells"]):
        medians += " and sustained timings" if most > 1 else " and one sustained timing"
    return f"{machine(document)}, {medians}"
