"""Tables that compare flashgen's figures without a GPU with measured ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from benchmarks.figures import Document, Row, geometric_mean
from benchmarks.markdown import header, line

#: A figure of the model, or the rate of its pick, is near if it is within this share.
NEAR = 0.1

#: Counted traffic: its place, its name in the account, its name in the figures.
LEVELS = (
    ("L2 and SMs, by the SMs", "l2", "sm"),
    ("L2 and SMs, by L2", "l2", "l2"),
    ("DRAM and L2", "dram", "dram"),
)

#: Further counters: the title, the run, the counter's name, bytes of its unit.
OTHERS = (
    ("between partitions of L2", "l2", "lts__t_sectors_srcunit_ltcfabric.sum", 32),
    ("all requests to L2", "l2", "lts__t_bytes.sum", 1),
    ("DRAM read, L2 cleared", "dram_cold", "dram__bytes_read.sum", 1),
    ("DRAM written, L2 cleared", "dram_cold", "dram__bytes_write.sum", 1),
)


def counters_table(document: Document) -> str:
    """Bytes of each call and level by the account and by counters, then other counters."""
    rows = document["cells"]
    env = document["environment"]
    machine = f"{env['gpu']}, driver {env['driver']}, ncu {env['ncu']}, triton {env['triton']}"
    columns = ["call", "bytes between", "read: account", "counted", "written: account", "counted"]
    lines = [
        f"MB that a call moves, by the account and by the counters, and the counters' sum over "
        f"the account's; {machine}, {env['date']}.",
        "",
        *header([*columns, "ratio"], left=2),
    ]
    ratios = []
    for row in rows:
        for level, accounted, counted in LEVELS:
            ratio = level_ratio(row, accounted, counted)
            ratios.append(ratio)
            shown = [
                _megabytes(row[source].get(f"{prefix}_{way}"))
                for way in ("read", "written")
                for source, prefix in (("account", accounted), ("figures", counted))
            ]
            lines.append(line([row["cell"], level, *shown, _share(ratio)]))
    near = sum(ratio is not None and abs(ratio - 1) <= NEAR for ratio in ratios)
    lines += ["", f"Within {NEAR:.0%}: {near} of {len(ratios)}. Other counters, in MB:", ""]
    lines += header(["call", *(other[0] for other in OTHERS)])
    for row in rows:
        values = [_other(row, *other[1:]) for other in OTHERS]
        lines.append(line([row["cell"], *map(_megabytes, values)]))
    if doubts := [*_doubts(document["protocol"])]:
        lines += ["", *doubts]
    return "\n".join(lines)


def level_ratio(row: Row, accounted: str, counted: str) -> float | None:
    """Counted bytes of a level, both ways, over the account; None if a counter is missing."""
    found = [row["figures"].get(f"{counted}_{way}") for way in ("read", "written")]
    if None in found:
        return None
    return float(
        sum(found) / sum(row["account"][f"{accounted}_{way}"] for way in ("read", "written"))
    )


def _doubts(protocol: Mapping[str, Any]) -> list[str]:
    """Remarks on how the traffic was counted."""
    found = []
    if any(n > 1 for n in protocol["dram"]["passes"]):
        found.append("DRAM was counted in several passes: L2 was not as the last call left it.")
    missing = sorted({name for run in protocol.values() for name in run["missing"]})
    if missing:
        found.append(f"Not known to this ncu: {', '.join(missing)}.")
    return found


def _other(row: Row, run: str, name: str, unit: int) -> float | None:
    values = row["counted"].get(run, {}).get(name)
    return unit * median(values) if values else None


def _megabytes(value: float | None) -> str:
    return "-" if value is None else f"{value / 1e6:,.1f}"


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def picks_table(document: Document) -> str:
    """The pick of each spec, the best measured configuration, and the ratio of their rates."""
    rows, env = document["cells"], document["environment"]
    kernels = {(row["spec"], row["form"]): row for row in rows}
    specs = list(dict.fromkeys(row["spec"] for row in rows))
    columns = ["spec", *("Gluon: pick", "best", "measured", "rate")]
    columns += ["portable: pick", "best", "measured", "rate", "module: rate"]
    lines = [
        "The model's pick and the best measured configuration, as BLOCK_M x BLOCK_N, warps and "
        "stages; how many candidates were measured; and the pick's rate over the best's, a "
        "geometric mean over the lengths. A module's pick is that of the kernel that it runs on "
        f"Hopper, its best the best of both. {env['gpu']}, triton {env['triton']}, {env['date']}.",
        "",
        *header(columns),
    ]
    shares: dict[str, list[float | None]] = {"Gluon kernels": [], "portable": [], "modules": []}
    for spec in specs:
        fields = [spec]
        of_spec = [
            kernels[key] for form in ("hopper", "portable") if (key := (spec, form)) in kernels
        ]
        for form, name in (("hopper", "Gluon kernels"), ("portable", "portable")):
            row = kernels.get((spec, form))
            if row is None:
                fields += ["-"] * 4
                continue
            share = pick_share([row])
            shares[name].append(share)
            looked_at = f"{row['looked_at']} of {row['candidates']}"
            fields += [_config(row["pick"]), _best(row), looked_at, _share(share)]
        module = pick_share(of_spec)
        shares["modules"].append(module)
        lines.append(line([*fields, _share(module)]))
    near = [
        f"{name} {sum(x is not None and x >= 1 - NEAR for x in of)} of {len(of)}"
        for name, of in shares.items()
    ]
    return "\n".join([*lines, "", f"Within {NEAR:.0%} of the best: {', '.join(near)}."])


def pick_share(rows: Sequence[Row]) -> float | None:
    """The rate of the first kernel's pick over the best of all; None before all are measured.

    rows: the kernels of a module, in the order that they are tried.
    """
    if any(row["looked_at"] < row["candidates"] or not row["measured"] for row in rows):
        return None
    if len({(row["gpu"], row["triton"], *row["lengths"]) for row in rows}) > 1:
        return None  # rates of two machines, or of two workloads
    picked = [m for m in rows[0]["measured"] if _config(m) == _config(rows[0]["pick"])]
    if not picked:
        return None
    best = max(_rate(m) for row in rows for m in row["measured"])
    return _rate(picked[0]) / best


def _rate(measured: Mapping[str, Any]) -> float:
    return geometric_mean(measured["tflops"])


def _best(row: Row) -> str:
    if not row["measured"]:
        return "-"
    return _config(max(row["measured"], key=_rate))


def _config(of: Mapping[str, Any]) -> str:
    """The four numbers of a configuration, without its figures."""
    return f"{of['BLOCK_M']} x {of['BLOCK_N']} w{of['num_warps']} s{of['num_stages']}"
