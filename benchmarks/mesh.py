"""Attention over a device mesh: rates of both passes as a share of linear.

    torchrun --nproc-per-node 4 -m benchmarks.mesh [--json FILE] [--seconds S]

bfloat16, head_dim 128. Linear is the rate of one GPU in the same run, times the number of GPUs; a
time is that of the slowest rank, by CUDA events behind a collective, while the CPU is ahead: the
median of repetitions in turns. Beside `flashgen.distributed`, with each strategy, stand torch's
context parallel, with keys repeated for each head of queries, and what is written in sixty lines
with the same kernels: zigzag chunks of queries, an all-gather of keys, a call for each chunk, and a
reduce-scatter of gradients. Outputs and gradients are first compared with those of one GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from importlib import util
from pathlib import Path
from statistics import median
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist

from flashgen.distributed import context_parallel

HERE = Path(__file__).parent
NAMES = ("mesh_d128", "mesh_window_d128", "mesh_documents_d128")
DIM = 128

#: Cycles for which a GPU waits before it is measured, while the CPU issues what it is to do.
AHEAD = 8_000_000

Tensors = tuple[torch.Tensor, ...]


@dataclass(frozen=True)
class Case:
    """A call: its module, length and heads, and the parameters that are numbers."""

    module: str
    tokens: int
    num_q_heads: int
    num_kv_heads: int
    parameters: Mapping[str, int] = field(default_factory=dict)
    document: int = 0

    @property
    def title(self) -> str:
        """For a table."""
        mask = {"mesh_d128": "causal", "mesh_window_d128": "window 4,096"}.get(
            self.module, f"documents of {self.document:,}"
        )
        return f"{self.tokens:,} tokens, {self.num_q_heads}/{self.num_kv_heads} heads, {mask}"

    def inputs(self, device: torch.device) -> tuple[Tensors, dict[str, Any]]:
        """(q, k, v, grad_out) of the whole, the same on all ranks, and all parameters."""
        torch.manual_seed(self.tokens)
        heads = self.num_q_heads, self.num_kv_heads, self.num_kv_heads, self.num_q_heads
        made = tuple(
            torch.randn(1, n, self.tokens, DIM, device=device, dtype=torch.bfloat16) for n in heads
        )
        return made, {**self.parameters, **self.document_ids(device)}

    def document_ids(self, device: torch.device) -> dict[str, torch.Tensor]:
        """The parameter of a mask of documents, where it is one."""
        if not self.document:
            return {}
        spread = torch.Generator().manual_seed(1)
        ends = torch.rand(self.tokens, generator=spread) < 1 / self.document
        return {"document_ids": ends.cumsum(0).int()[None].to(device)}


CASES = (
    Case("mesh_d128", 131072, 32, 8),
    Case("mesh_d128", 131072, 16, 16),
    Case("mesh_d128", 32768, 32, 8),
    Case("mesh_window_d128", 131072, 32, 8),
    Case("mesh_documents_d128", 131072, 32, 8, document=4000),
    Case("mesh_d128", 65536, 32, 8),
)
CHECKED = (
    Case("mesh_d128", 4100, 8, 2),
    Case("mesh_window_d128", 4100, 8, 2, {"left": 300}),
    Case("mesh_documents_d128", 4100, 8, 2, document=500),
)
WAYS: dict[str, dict[str, Any]] = {
    "flashgen": {},
    "rows come again": {"strategy": "all-to-all", "keep": False},
    "two groups of heads": {"strategy": "all-to-all", "parts": 2},
    "all-gather": {"strategy": "all-gather"},
    "ring": {"strategy": "ring"},
    "ulysses": {"strategy": "ulysses"},
    "grid": {"strategy": "grid"},
}

#: The fewest ranks of a way: two groups of two.
FEWEST = {"grid": 4}


class AllGather:
    """The sixty lines: zigzag, all-gather, a call for each chunk, reduce-scatter."""

    def __init__(self, module: ModuleType, tokens: int, parameters: Mapping[str, Any]) -> None:
        self.module, self.parameters = module, parameters
        self.rank, self.ranks = dist.get_rank(), dist.get_world_size()
        self.chunk = tokens // (2 * self.ranks)
        self.chunks = self.rank, 2 * self.ranks - 1 - self.rank

    def shard(self, x: torch.Tensor) -> torch.Tensor:
        """This rank's two chunks."""
        return torch.cat([x[:, :, i * self.chunk : (i + 1) * self.chunk] for i in self.chunks], 2)

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        """All keys, in the order of their positions."""
        found = x.new_empty(self.ranks, *x.shape)
        dist.all_gather_into_tensor(found.flatten(0, 1), x.contiguous())
        first, second = found.split(self.chunk, dim=3)
        parts = [*first.unbind(0), *second.flip(0).unbind(0)]
        return torch.cat(parts, 2)

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[Any, ...]:
        """What `backward` needs: all keys, and the outputs of both chunks."""
        k, v = self.gather(k), self.gather(v)
        saved = []
        for i, mine in zip(self.chunks, q.split(self.chunk, 2), strict=True):
            end = (i + 1) * self.chunk
            at = {"q_offset": i * self.chunk, **self.parameters}
            keys, values = k[:, :, :end], v[:, :, :end]
            saved.append((*self.module.attention(mine, keys, values, return_lse=True, **at), at))
        return k, v, saved

    def backward(self, q: torch.Tensor, saved: tuple[Any, ...], grad_out: torch.Tensor) -> Tensors:
        """The gradients of this rank's queries, keys and values."""
        k, v, outs = saved
        grads, of_keys = [], [torch.zeros_like(k), torch.zeros_like(v)]
        chunks = (x.split(self.chunk, 2) for x in (q, grad_out))
        for i, mine, grad, (out, lse, at) in zip(self.chunks, *chunks, outs, strict=True):
            end = (i + 1) * self.chunk
            found = self.module.partial_gradients(
                mine, k[:, :, :end], v[:, :, :end], out, lse, grad, **at
            )
            grads.append(found[0])
            for total, x in zip(of_keys, found[1:], strict=True):
                total[:, :, :end] += x
        return torch.cat(grads, 2), *map(self.scatter, of_keys)

    def scatter(self, x: torch.Tensor) -> torch.Tensor:
        """The sum over ranks of this rank's rows."""
        parts = x.split(self.chunk, 2)
        order = [parts[j] for r in range(self.ranks) for j in (r, 2 * self.ranks - 1 - r)]
        packed = torch.stack(order)
        own = packed.new_empty(2, *packed.shape[1:])
        dist.reduce_scatter_tensor(own, packed)
        return torch.cat(own.unbind(0), 2)


def main() -> int:
    """Checks, measures, and shows the table on rank 0."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="file for the results")
    parser.add_argument(
        "--modules", type=Path, help="folder of modules built from benchmarks/specs"
    )
    parser.add_argument("--seconds", type=float, default=20.0, help="of each case")
    parser.add_argument("--profile", default="", help="cases whose kernels are shown")
    parser.add_argument("--cases", default="0,1,2,3,4,5", help="which of the cases")
    parser.add_argument("--ways", default=",".join(map(str, range(len(WAYS)))), help="which ways")
    parser.add_argument("--torch", default="2", help="cases of torch's context parallel")
    parser.add_argument("--checks-only", action="store_true", help="no timing")
    options = parser.parse_args()
    rank = int(os.environ["LOCAL_RANK"])
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    modules = load_modules(options.modules)
    ways = {
        name: way
        for number, (name, way) in enumerate(WAYS.items())
        if str(number) in options.ways.split(",") and dist.get_world_size() >= FEWEST.get(name, 1)
    }
    wrong: list[str] = []
    checked: set[str] = set()
    rows = []
    for number in map(int, options.cases.split(",")):
        case = CASES[number]
        if case.module not in checked:
            checked.add(case.module)
            [small] = [c for c in CHECKED if c.module == case.module]
            found = check(modules, small, device, ways)
            wrong += found
            if rank == 0:
                print(
                    "\n".join(found) or f"{case.module}: outputs and gradients are right",
                    flush=True,
                )
        if options.checks_only:
            continue
        module, profile = modules[case.module], str(number) in options.profile.split(",")
        rows.append(measure(module, case, device, options.seconds, ways, profile))
        if rank == 0:
            print(*lines(rows[-1]), sep="\n", flush=True)
    beside = {}
    for number in map(int, filter(None, options.torch.split(","))):
        case = CASES[number]
        beside[case.title] = beside_torch(modules[case.module], case, device, options.seconds)
        if rank == 0:
            print(*lines({"title": case.title, "ms": beside[case.title]}), sep="\n", flush=True)
    if rank == 0 and options.json:
        facts = {
            "benchmark": "mesh",
            "gpu": torch.cuda.get_device_name(),
            "gpus": dist.get_world_size(),
            "torch": torch.__version__,
            "nccl": ".".join(map(str, torch.cuda.nccl.version())),
            "wrong": wrong,
            "cells": rows,
            "beside torch's context parallel": beside,
        }
        options.json.write_text(json.dumps(facts, indent=1) + "\n")
    dist.destroy_process_group()
    return bool(wrong)


def load_modules(folder: Path | None) -> dict[str, ModuleType]:
    """The modules by their names; rank 0 builds them, if there is no folder of them."""
    if folder is None:
        folder = HERE / "generated"
        if dist.get_rank() == 0:
            from flashgen.build import Options, Progress, build

            specs = [HERE / "specs" / f"{name}.py" for name in NAMES]
            for _ in build(specs, Options(folder, ("sm_90",), tune=False), Progress()):
                pass
        dist.barrier()
    return {name: load(folder / f"{name}.py") for name in NAMES}


def load(path: Path) -> ModuleType:
    """The module of a file."""
    spec = util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def whole_lengths(module: ModuleType, case: Case) -> dict[str, int]:
    """The lengths that a call of the whole names."""
    return dict.fromkeys(module.MESH["whole_lengths"], case.tokens)


def check(
    modules: Mapping[str, ModuleType], case: Case, device: torch.device, ways: Mapping[str, Any]
) -> list[str]:
    """What differs from float32 by more than twice one GPU's error and two roundings."""
    module = modules[case.module]
    (q, k, v, grad_out), parameters = case.inputs(device)
    results = []
    for attention, dtype in ((module.reference, torch.float32), (module.attention, q.dtype)):
        given = [x.detach().to(dtype).requires_grad_() for x in (q, k, v)]
        out = attention(*given, **parameters, **whole_lengths(module, case))
        out.backward(grad_out.to(dtype))
        results.append([out.detach(), *(x.grad for x in given)])
    exact, alone = results
    problems = []
    for name, way in ways.items():
        for balance in ("auto", 3):
            attend = context_parallel(module, balance=balance, **way)
            ids = {n: x for n, x in parameters.items() if n in module.MESH["of_runs"]}
            given = [attend.shard(x, 2, **ids).requires_grad_() for x in (q, k, v)]
            out = attend(*given, **parameters)
            out.backward(attend.shard(grad_out, 2))
            found = [attend.unshard(x.detach(), 2) for x in (out, *(x.grad for x in given))]
            for what, a, b, c in zip(("out", "q", "k", "v"), exact, alone, found, strict=True):
                # Gradients of keys are sums of a few parts, each rounded to 8 bits.
                allowed = 2 * (b - a).abs().max() + 4e-3 * a.abs().max()
                error = (c - a).abs().max()
                if not error <= allowed:
                    problems.append(
                        f"{case.title}, {name}, {balance}: {what} is off by {error:.2g}, "
                        f"one GPU by {(b - a).abs().max():.2g}"
                    )
    return problems


def measure(
    module: ModuleType,
    case: Case,
    device: torch.device,
    seconds: float,
    ways: Mapping[str, Any],
    profile: bool,
) -> dict[str, Any]:
    """Milliseconds of the forward pass and of both, on one GPU and on all, by each way."""
    (q, k, v, grad_out), parameters = case.inputs(device)
    calls: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {}

    def one(*inputs: torch.Tensor) -> torch.Tensor:
        lengths = whole_lengths(module, case)
        return module.attention(*inputs, **parameters, **lengths)

    calls["one GPU"] = passes(one, (q, k, v), grad_out)
    if case.module == "mesh_d128":
        gather = AllGather(module, case.tokens, parameters)
        mine = tuple(map(gather.shard, (q, k, v)))
        grad = gather.shard(grad_out)
        calls["sixty lines"] = (
            lambda: gather.forward(*mine),
            lambda: gather.backward(mine[0], gather.forward(*mine), grad),
        )
    sent: dict[str, dict[str, Any]] = {}
    for name, way in ways.items():
        attend = context_parallel(module, **way)
        ids = {n: x for n, x in parameters.items() if n in module.MESH["of_runs"]}
        given = tuple(attend.shard(x, 2, **ids) for x in (q, k, v))
        grads = attend.shard(grad_out, 2)

        def attention(*inputs: torch.Tensor, attend: Any = attend) -> torch.Tensor:
            return attend(*inputs, **parameters)

        calls[name] = passes(attention, given, grads)
        forecast = attend.plan(
            case.tokens, num_q_heads=case.num_q_heads, num_kv_heads=case.num_kv_heads, **ids
        )
        plan, cost = forecast.plan, forecast.choice.cost
        sent[name] = {
            "imbalance": round(plan.imbalance, 4),
            "received_rows": [plan.received(r) for r in range(plan.ranks)],
            "chunks": len(plan.queries.chunks[0]),
            "strategy": forecast.choice.strategy,
            "predicted_share": round(cost.share, 3),
            "predicted_ms": [
                round(1e3 * x, 3) for x in (cost.forward, cost.forward + cost.backward)
            ],
        }
    ms = in_turns(calls, device, seconds)
    if profile:
        for name in ("sixty lines", "flashgen"):
            if name in calls:
                show_kernels(f"{case.title}, {name}", calls[name][1])
    return {"case": asdict(case), "title": case.title, "ms": ms, "sent": sent}


def beside_torch(
    module: ModuleType, case: Case, device: torch.device, seconds: float
) -> dict[str, list[float]]:
    """The same of torch's context parallel, beside one GPU and `flashgen.distributed`."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.experimental import context_parallel as torchs
    from torch.distributed.tensor.experimental._attention import set_rotate_method

    (q, k, v, grad_out), _ = case.inputs(device)
    group = case.num_q_heads // case.num_kv_heads
    attend = context_parallel(module)
    given = tuple(attend.shard(x, 2) for x in (q, k, v))
    calls = {
        "one GPU": passes(module.attention, (q, k, v), grad_out),
        "flashgen": passes(attend, given, attend.shard(grad_out, 2)),
    }
    mesh = init_device_mesh("cuda", (dist.get_world_size(),), mesh_dim_names=("cp",))
    inputs = q.clone(), *(x.repeat_interleave(group, 1) for x in (k, v))
    grad = grad_out.clone()
    buffers = [*inputs, grad]

    def attention(rotate: str) -> Callable[..., torch.Tensor]:
        def call(*inputs: torch.Tensor) -> torch.Tensor:
            set_rotate_method(rotate)
            with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.FLASH_ATTENTION):
                return torch.nn.functional.scaled_dot_product_attention(*inputs, is_causal=True)

        return call

    # The context shards its buffers, until it ends.
    with torchs(mesh, buffers=buffers, buffer_seq_dims=[2] * 4, no_restore_buffers=set(buffers)):
        for rotate in ("allgather", "alltoall"):
            calls[f"torch, {rotate}"] = passes(attention(rotate), inputs, grad)
        return in_turns(calls, device, seconds)


def passes(
    attention: Callable[..., torch.Tensor], inputs: Tensors, grad: torch.Tensor
) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """The forward pass, and both."""

    def both() -> None:
        given = [x.detach().requires_grad_() for x in inputs]
        attention(*given).backward(grad)

    def forward() -> None:
        with torch.no_grad():
            attention(*inputs)

    return forward, both


def in_turns(
    calls: Mapping[str, tuple[Callable[[], Any], Callable[[], Any]]],
    device: torch.device,
    seconds: float,
) -> dict[str, list[float]]:
    """The medians of both passes of each way, which take turns, every second time in reverse."""
    taken: dict[str, list[list[float]]] = {name: [[], []] for name in calls}
    rounds, number = 3, 0
    while number <= rounds:
        order = list(calls)[:: -1 if number % 2 else 1]
        begin = time.perf_counter()
        for name in order:
            for i, call in enumerate(calls[name]):
                ms = slowest(call, device)
                if number:
                    taken[name][i].append(ms)
        if number == 1:  # the slowest rank's, so that all repeat as often
            spent = torch.tensor(time.perf_counter() - begin, device=device)
            dist.all_reduce(spent, dist.ReduceOp.MAX)
            rounds = max(3, min(25, int(seconds / spent.item())))
        number += 1
    return {name: [median(each) for each in both] for name, both in taken.items()}


def slowest(call: Callable[[], Any], device: torch.device) -> float:
    """The slowest rank's milliseconds, from when all GPUs have begun, with CPUs ahead of them."""
    dist.barrier()
    torch.cuda.synchronize()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(AHEAD)
    worst = torch.zeros(1, device=device)
    dist.all_reduce(worst)
    begin.record()
    call()
    end.record()
    torch.cuda.synchronize()
    worst.fill_(begin.elapsed_time(end))
    dist.all_reduce(worst, dist.ReduceOp.MAX)
    return worst.item()


def show_kernels(title: str, call: Callable[[], Any]) -> None:
    """What the GPU of rank 0 runs in both passes: begin, milliseconds, stream and name."""
    dist.barrier()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as found:
        call()
        torch.cuda.synchronize()
    if dist.get_rank():
        return
    kernels = [e for e in found.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    kernels.sort(key=lambda e: e.time_range.start)
    first = kernels[0].time_range.start
    print(f"kernels of {title}: begin, ms, name")
    for e in kernels:
        if e.time_range.elapsed_us() >= 15:
            begin = (e.time_range.start - first) / 1000
            print(f"  {begin:9.3f} {e.time_range.elapsed_us() / 1000:8.3f} {e.name[:70]}")
    print(flush=True)


def lines(row: Mapping[str, Any]) -> list[str]:
    """The table of a case: milliseconds, and shares of linear: forward, backward, together."""
    ranks = dist.get_world_size()
    forward, both = row["ms"]["one GPU"]
    found = [
        f"{row['title']}, {ranks} GPUs: ms forward, together; share of linear f / b / together"
    ]
    for name, (mine, all_) in row["ms"].items():
        shares = (
            forward / mine / ranks,
            (both - forward) / (all_ - mine) / ranks,
            both / all_ / ranks,
        )
        shown = "" if name == "one GPU" else " / ".join(f"{share:.3f}" for share in shares)
        how = row.get("sent", {}).get(name, {})
        shown += f"  predicted {how['predicted_share']}, {how['strategy']}" if how else ""
        found.append(f"  {name:<20} {mine:9.3f} {all_:9.3f}  {shown}")
    return found + [f"  {how}" for how in list(row.get("sent", {}).values())[:1]]


if __name__ == "__main__":
    sys.exit(main())
