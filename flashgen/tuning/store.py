"""The measured results of one variant: ``generated/tuning/<name>.json``, committed, for people too.

A result belongs to a GPU, a Triton version, a form and its kernel's digest. A build elsewhere reads
and keeps it. A module's configurations depend on this file alone, never on the machine that renders
the module.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from flashgen.config import KernelConfig
from flashgen.errors import OutputError
from flashgen.files import ANOTHER_FOLDER, write_atomically
from flashgen.spec import Blocks

WIDTH = 140  # of a line of the file: a candidate fits on one

#: The form of results that name none: they are of the portable forward kernel.
UNNAMED = "portable"

Ending = Literal["complete", "time", "interrupt"]


@dataclass(frozen=True)
class Measurement:
    """One candidate's medians, an entry for each of the result's `lengths`.

    Attributes:
        config: the candidate.
        ms: milliseconds a call.
        tflops: TFLOP/s over the elements that the mask shows.
    """

    config: KernelConfig
    ms: tuple[float, ...]
    tflops: tuple[float, ...]


@dataclass(frozen=True)
class TuneResult:
    """What measuring one kernel on one GPU gave.

    Attributes:
        target: the GPU's architecture, ``"sm_90"``.
        gpu: the GPU as its driver names it, ``"NVIDIA H200"``.
        triton: the Triton version that compiled the candidates.
        kernel: the digest of the kernel's source.
        lengths: sequence lengths that every candidate was measured at.
        measured: the candidates that ran, best first; none if no tiles of a backward kernel fit.
        rejected: the candidates that did not run, each with the reason.
        ended: why measuring ended: every candidate looked at, time out, or an interrupt.
        form: the key of the kernel.
    """

    target: str
    gpu: str
    triton: str
    kernel: str
    lengths: tuple[int, ...]
    measured: tuple[Measurement, ...]
    rejected: tuple[tuple[KernelConfig, str], ...]
    ended: Ending
    form: str = UNNAMED

    @property
    def key(self) -> tuple[str, str, str]:
        """The key by which a newer result replaces an older one: GPU, Triton version and form."""
        return self.gpu, self.triton, self.form

    def has_measured(self, kernel: str, blocks: Blocks) -> bool:
        """Whether the result is for this kernel and has a candidate that ``blocks`` admits."""
        return self.kernel == kernel and any(blocks.admits(m.config) for m in self.measured)

    def settles(self, kernel: str, blocks: Blocks) -> bool:
        """Whether nothing is left to measure: a candidate has been measured, or none fits."""
        return self.has_measured(kernel, blocks) or (self.kernel == kernel and not self.measured)


def best_for(
    results: Iterable[TuneResult], target: str, kernel: str, blocks: Blocks
) -> tuple[TuneResult, Measurement] | None:
    """The result whose best candidate a module ships for this target, on every machine.

    Among results with a candidate that ``blocks`` admits, the newest Triton is preferred, then the
    highest rate at the longest length, then the first GPU by name.
    """
    admitted = [
        (result, next(m for m in result.measured if blocks.admits(m.config)))
        for result in results
        if result.target == target and result.has_measured(kernel, blocks)
    ]
    return min(
        admitted,
        key=lambda pair: (_newest_first(pair[0].triton), -pair[1].tflops[-1], pair[0].gpu),
        default=None,
    )


def _newest_first(version: str) -> tuple[int, ...]:
    numbers = [-int(part) for part in version.split("+")[0].split(".") if part.isdigit()]
    # The end sorts after any further number: 3.7.1 before 3.7, and 3.8.0 before 3.8.0rc1.
    return (*numbers, 1)


def merged(results: Iterable[TuneResult], new: Iterable[TuneResult]) -> tuple[TuneResult, ...]:
    """The results with the new ones; a new result replaces the old one with the same key."""
    by_key = {result.key: result for result in (*results, *new)}
    return tuple(by_key[key] for key in sorted(by_key))


def load_results(path: Path) -> tuple[TuneResult, ...]:
    """The results in a file; none where there is no file.

    Raises:
        OutputError: the file is there and is not what `save_results` writes.
    """
    try:
        document = json.loads(path.read_bytes())
        return tuple(result_of(fields) for fields in document["results"])
    except FileNotFoundError:
        return ()
    except OSError as error:
        raise OutputError(f"{path}: cannot be read: {error.strerror}; fix that") from error
    except (ValueError, KeyError, TypeError) as error:
        what = " ".join(f"{type(error).__name__}: {error}".split())
        raise OutputError(
            f"{path}: not a file of tuning results ({what}); "
            "restore it from version control, or delete it to choose anew"
        ) from error


def save_results(path: Path, results: Iterable[TuneResult], remedy: str = ANOTHER_FOLDER) -> None:
    """Writes the results, a candidate a line, with `fields_of` each.

    Raises:
        OutputError: the folder cannot be written.
    """
    document = {"results": [fields_of(result) for result in results]}
    write_atomically(path, _layout(document) + "\n", remedy)


def fields_of(result: TuneResult) -> dict[str, Any]:
    """A result as JSON, with figures rounded to the precision of measuring.

    A candidate's four numbers are beside its figures; the form `UNNAMED` is left out.
    """
    return {
        "target": result.target,
        "gpu": result.gpu,
        "triton": result.triton,
        **({} if result.form == UNNAMED else {"form": result.form}),
        "kernel": result.kernel,
        "ended": result.ended,
        "lengths": list(result.lengths),
        "measured": [
            {
                **m.config.as_dict(),
                "ms": [float(f"{ms:.4g}") for ms in m.ms],
                "tflops": [round(rate, 1) for rate in m.tflops],
            }
            for m in result.measured
        ],
        "rejected": [{**config.as_dict(), "reason": reason} for config, reason in result.rejected],
    }


def result_of(fields: Mapping[str, Any]) -> TuneResult:
    """The result from the fields of `fields_of`; other fields are ignored.

    Raises:
        KeyError: a field is missing.
        TypeError: a field has another type.
    """
    return TuneResult(
        target=fields["target"],
        gpu=fields["gpu"],
        triton=fields["triton"],
        kernel=fields["kernel"],
        ended=fields["ended"],
        lengths=tuple(fields["lengths"]),
        measured=tuple(
            Measurement(_config(row), tuple(row["ms"]), tuple(row["tflops"]))
            for row in fields["measured"]
        ),
        rejected=tuple((_config(row), row["reason"]) for row in fields["rejected"]),
        form=fields.get("form", UNNAMED),
    )


def _config(row: Mapping[str, Any]) -> KernelConfig:
    return KernelConfig(*(row[name] for name in KernelConfig.__dataclass_fields__))


def _layout(value: Any, indent: str = "") -> str:
    """JSON with every list and object on one line where it fits, else an entry a line."""
    line = json.dumps(value)
    if len(indent) + len(line) <= WIDTH or not isinstance(value, dict | list):
        return line
    deeper = indent + "  "
    if isinstance(value, dict):
        rows = [f"{json.dumps(key)}: {_layout(value[key], deeper)}" for key in value]
        opening, closing = "{", "}"
    else:
        rows = [_layout(entry, deeper) for entry in value]
        opening, closing = "[", "]"
    body = ",\n".join(deeper + row for row in rows)
    return f"{opening}\n{body}\n{indent}{closing}"
