"""What the GPUs of a mesh do when: products and transfers of both passes, as a picture.

    torchrun --nproc-per-node 2 -m benchmarks.mesh_timeline --json FILE [--case 2] [--ways 0,2,4]
    python -m benchmarks.mesh_timeline --draw FILE       writes docs/pictures/mesh_timeline.svg

The first command keeps the kernels that torch's profiler has seen, on each rank from the end of a
collective that all have begun with. Beside them stands how much of the time of transfers a product
runs, too: a transfer's time has that in which a rank waits for another one.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.mesh import CASES, WAYS, load_modules, passes
from flashgen.distributed import context_parallel

PICTURE = Path(__file__).parent.parent / "docs" / "pictures" / "mesh_timeline.svg"

#: Kinds of kernels, by what their names begin with; the others are "rest".
KINDS = {
    "_attention": "forward products",
    "_backward_hopper": "backward products",
    "_backward_of": "backward products",
    "ncclDevKernel": "transfers",
}
#: Colours that are legible on white and on black.
COLOURS = {
    "forward products": "#3b82c4",
    "backward products": "#e8590c",
    "transfers": "#5a9e3a",
    "rest": "#8a8f98",
}
INK = "#808488"

#: A kernel: its kind, when it begins, and how long it takes, in microseconds.
Kernel = tuple[str, float, float]


def kind_of(name: str) -> str:
    """The kind of a kernel."""
    return next((kind for start, kind in KINDS.items() if name.startswith(start)), "rest")


def traced(call: Callable[[], Any], device: torch.device) -> list[tuple[str, Kernel]]:
    """The kernels of a call, with their names, by their begin, from when all ranks began."""
    dist.barrier()
    torch.cuda.synchronize()
    one = torch.zeros(1, device=device)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        torch.cuda._sleep(20_000_000)  # the CPU is ahead
        dist.all_reduce(one)
        call()
        torch.cuda.synchronize()
    seen = sorted(
        (e.start_ns() / 1e3, e.duration_ns() / 1e3, e.name())
        for e in profile.profiler.kineto_results.events()  # type: ignore[union-attr]
        if e.device_type() == torch.autograd.DeviceType.CUDA
    )
    first = next(i for i, (_, _, name) in enumerate(seen) if kind_of(name) == "transfers")
    zero = seen[first][0] + seen[first][1]
    return [
        (name, (kind_of(name), round(begin - zero, 1), round(spent, 1)))
        for begin, spent, name in seen[first + 1 :]
    ]


def overlap(kernels: Iterable[Kernel]) -> float:
    """The share of the time of transfers in which products run; 1.0 where there are none."""
    found = {True: [], False: []}  # type: dict[bool, list[tuple[float, float]]]
    for kind, begin, spent in kernels:
        if kind != "rest":
            found[kind == "transfers"].append((begin, begin + spent))
    transfers, products = (_union(found[which]) for which in (True, False))
    total = sum(end - begin for begin, end in transfers)
    both = sum(
        max(0.0, min(end, last) - max(begin, first))
        for begin, end in transfers
        for first, last in products
    )
    return both / total if total else 1.0


def _union(spans: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    joined: list[tuple[float, float]] = []
    for begin, end in sorted(spans):
        if joined and begin <= joined[-1][1]:
            joined[-1] = joined[-1][0], max(joined[-1][1], end)
        else:
            joined.append((begin, end))
    return joined


def main() -> int:
    """Traces, or draws."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.mesh_timeline", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--json", type=Path, help="file for the kernels")
    parser.add_argument("--draw", type=Path, help="file of kernels to draw")
    parser.add_argument("--modules", type=Path, help="as of benchmarks.mesh")
    parser.add_argument("--case", type=int, default=2, help="which of benchmarks.mesh's cases")
    parser.add_argument("--ways", default="0,2,4", help="which of its ways")
    options = parser.parse_args()
    if options.draw:
        PICTURE.write_text(draw(json.loads(options.draw.read_text())))
        return 0
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    modules = load_modules(options.modules)
    numbers = [int(x) for x in options.ways.split(",")]
    found = trace(modules, options.case, numbers, device)
    if dist.get_rank() == 0:
        print(*lines(found), sep="\n", flush=True)
        if options.json:
            options.json.write_text(json.dumps(found) + "\n")
    dist.destroy_process_group()
    return 0


def trace(modules: Any, number: int, ways: Sequence[int], device: torch.device) -> dict[str, Any]:
    """The kernels of both passes of a case, by each way, on each rank."""
    case = CASES[number]
    (q, k, v, grad_out), parameters = case.inputs(device)
    module, traces = modules[case.module], {}
    for name in (list(WAYS)[i] for i in ways):
        attend = context_parallel(module, **WAYS[name])
        ids = {n: x for n, x in parameters.items() if n in module.MESH["of_runs"]}
        given = tuple(attend.shard(x, 2, **ids) for x in (q, k, v))

        def attention(*inputs: torch.Tensor, attend: Any = attend) -> torch.Tensor:
            return attend(*inputs, **parameters)

        both = passes(attention, given, attend.shard(grad_out, 2))[1]
        for _ in range(3):
            both()
        mine = traced(both, device)
        every: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(every, [kernel for _, kernel in mine])
        traces[name] = every
    return {
        "benchmark": "mesh_timeline",
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "title": case.title,
        "traces": traces,
    }


def lines(found: dict[str, Any]) -> Iterable[str]:
    """A line for each way and rank: the milliseconds of each kind, and what overlaps."""
    yield f"{found['title']}, {found['gpu']}, torch {found['torch']}: ms of both passes"
    for name, ranks in found["traces"].items():
        for rank, kernels in enumerate(ranks):
            end = max(begin + spent for _, begin, spent in kernels)
            of = {
                kind: sum(spent for each, _, spent in kernels if each == kind) / 1e3
                for kind in COLOURS
            }
            sums = ", ".join(f"{kind} {ms:.3f}" for kind, ms in of.items())
            yield (
                f"  {name:<20} rank {rank}: {end / 1e3:.3f}; {sums}; "
                f"{overlap(map(tuple, kernels)):.2f} of transfers beside products"
            )


def draw(found: dict[str, Any]) -> str:
    """The picture as SVG: for each way and rank a line of products and rest, and one of transfers.

    Args:
        found: as `trace` returns it.
    """
    left, width, high, gap = 150, 640, 9, 5
    last = max(b + s for ranks in found["traces"].values() for mine in ranks for _, b, s in mine)
    body, y = [], 26
    for name, ranks in found["traces"].items():
        body.append(f'<text x="4" y="{y + 8}" font-weight="bold">{name}</text>')
        for rank, kernels in enumerate(ranks):
            for line, label in enumerate((f"rank {rank}: kernels", "transfers")):
                body.append(f'<text x="{left - 6}" y="{y + 8}" text-anchor="end">{label}</text>')
                for kind, begin, spent in kernels:
                    if (kind == "transfers") != (line == 1) or spent * width < 0.1 * last:
                        continue
                    x, wide = left + begin / last * width, spent / last * width
                    body.append(
                        f'<rect x="{x:.1f}" y="{y}" width="{wide:.1f}" height="{high}" '
                        f'fill="{COLOURS[kind]}"/>'
                    )
                y += high + 1
            share = overlap(map(tuple, kernels))
            body.append(f'<text x="{left + width + 6}" y="{y - 6}">{share:.0%} of transfers</text>')
            y += gap
        y += gap
    ticks = [last * i / 4 for i in range(5)]
    for at in ticks:
        x = left + at / last * width
        body.append(f'<text x="{x:.1f}" y="{y + 8}" text-anchor="middle">{at / 1e3:.1f} ms</text>')
    y += 22
    x = left
    for kind, colour in COLOURS.items():
        body.append(f'<rect x="{x}" y="{y - 8}" width="9" height="9" fill="{colour}"/>')
        body.append(f'<text x="{x + 13}" y="{y}">{kind}</text>')
        x += 130
    title = f"Both passes: {found['title']}, {found['gpu']}; transfers beside products at the right"
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{left + width + 110}" height="{y + 8}" '
        f'font-family="sans-serif" font-size="9" fill="{INK}">'
    )
    return "\n".join([head, f'<text x="4" y="12" font-size="10">{title}</text>', *body, "</svg>\n"])


if __name__ == "__main__":
    sys.exit(main())
