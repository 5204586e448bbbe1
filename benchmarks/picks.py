"""The model's picks without a GPU, beside the best configurations measured on a GPU.

    python -m benchmarks.picks --json benchmarks/results/picks-h200.json
    python -m benchmarks.picks --measure --json benchmarks/results/picks-h200.json

The pick is the choice of `flashgen build --no-tune` if nothing was measured. The rates are from
generated/tuning and from the newest committed file of this benchmark, for the current kernels; the
first command needs no GPU. The second measures, on a Hopper GPU, every candidate of the forward
kernels with candidates that have not been tried: several processes compile them beforehand, and
each is timed closely. --keep also puts the results into generated/tuning, as a build does.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context
from typing import Any

from benchmarks.account_tables import picks_table
from benchmarks.figures import newest_results
from benchmarks.picked import (
    FORWARD_FORMS,
    OUT,
    Kernel,
    document_of,
    is_complete,
    kernel_of,
    kernels_of,
    known_results,
    result_for,
    row_of,
)
from benchmarks.script import make_parser, write_results
from flashgen.config import HOPPER
from flashgen.errors import TuneError
from flashgen.files import lock
from flashgen.kernels.registry import kernels_of as flashgen_kernels
from flashgen.place import Place
from flashgen.tuning.device import Gpu, detect_gpu
from flashgen.tuning.store import TuneResult, load_results, merged, save_results


def compile_all(kernels: Sequence[Kernel], jobs: int) -> None:
    """Compiles every candidate into the cache on disk, in so many processes."""
    tasks = [(k.plan.name, k.form, i) for k in kernels for i in range(len(k.space.candidates))]
    if jobs < 1 or not tasks:
        return
    try:
        with ProcessPoolExecutor(min(jobs, len(tasks)), get_context("spawn")) as pool:
            list(pool.map(compile_candidate, *zip(*tasks, strict=True)))
    except BrokenProcessPool as error:  # measuring compiles what is missing
        print(f"a compiling process died: {error}", file=sys.stderr)


def compile_candidate(name: str, form: str, number: int) -> None:
    """Compiles a candidate in this process, as measuring it would."""
    from flashgen.tuning.forward_bench import ForwardBench

    kernel = kernel_of(name, form)
    assert kernel is not None
    candidates = kernel.space.candidates
    bench = ForwardBench(kernel.plan, HOPPER, candidates, flashgen_kernels(kernel.plan)[form])
    bench.compile(candidates[number : number + 1])


def measured_on(gpu: Gpu, kernel: Kernel) -> TuneResult:
    """Every candidate's rates, each timed closely.

    Raises:
        TuneError: no candidate ran.
    """
    from flashgen.tuning.measure import measure

    space = kernel.space
    return measure(
        kernel.plan,
        gpu.target,
        gpu.name,
        space.candidates,
        space.rejected,
        kernel=flashgen_kernels(kernel.plan)[kernel.form],
        finalists=len(space.candidates),
    )


def keep(place: Place, result: TuneResult) -> None:
    """Adds a result to the results of builds; waits for a running build of the variant."""
    with lock(place.lock, on_wait=lambda: print(f"{place.name}: a build has the lock")):
        save_results(place.tuning, merged(load_results(place.tuning), [result]))


def main() -> int:
    """Ranks, measures if asked to, and shows the table."""
    options = _arguments()
    gpu = detect_gpu() if options.measure is not None else None
    if options.measure is not None and (gpu is None or gpu.target != HOPPER):
        print("benchmarks.picks --measure needs a Hopper GPU; there is none", file=sys.stderr)
        return 2
    newest = newest_results().get("picks")
    kernels = kernels_of()
    found = {
        (kernel.plan.name, kernel.form): result_for(kernel, known_results(kernel.plan.name, newest))
        for kernel in kernels
    }

    def write() -> dict[str, Any]:
        rows = [row_of(kernel, found[kernel.plan.name, kernel.form]) for kernel in kernels]
        document = document_of(rows)
        if options.json:
            write_results(document, options.json)
        return document

    if gpu is not None:
        asked = kernels_of(options.measure)
        wanted = [
            kernel
            for kernel in asked
            if kernel.form in options.forms
            if options.again or not is_complete(kernel, found[kernel.plan.name, kernel.form])
        ]
        started = time.perf_counter()
        compile_all(wanted, options.jobs)
        print(f"compiled in {time.perf_counter() - started:.0f} s", flush=True)
        for kernel in wanted:
            name = kernel.plan.name
            try:
                result = measured_on(gpu, kernel)
            except TuneError as error:
                print(error, file=sys.stderr)
                continue
            found[name, kernel.form] = result
            if options.keep:
                keep(Place(OUT, name), result)
            write()  # after every kernel: a run that is cut off keeps them
            seconds = time.perf_counter() - started
            print(f"{seconds:4.0f} s {name} {kernel.form}: {len(result.measured)}", flush=True)
    print(picks_table(write()))
    return 0


def _arguments() -> argparse.Namespace:
    parser = make_parser("picks", __doc__)
    parser.add_argument(
        "--measure", nargs="*", metavar="SPEC", help="measure these specs, or every shipped one"
    )
    parser.add_argument(
        "--forms",
        nargs="+",
        choices=FORWARD_FORMS,
        default=FORWARD_FORMS,
        help="the kernels that are measured",
    )
    parser.add_argument("--again", action="store_true", help="measure what is complete, too")
    parser.add_argument("--keep", action="store_true", help="put it into generated/tuning, too")
    parser.add_argument(
        "--jobs",
        type=int,
        default=max(1, (os.cpu_count() or 2) - 2),
        help="processes that compile beforehand; 0 compiles while measuring",
    )
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
