"""Masks that only the data knows: both passes, beside FlexAttention and FlashAttention 4.

    python -m benchmarks.tiles [--json FILE] [--fa4] [--jobs N] [--limit-seconds N]

bfloat16, head_dim 128, one sequence, 16 heads. Several processes compile kernels, and stand still
while a cell is measured. Results are first compared with dense attention in float32. Each timing is
taken twice, the second time with the implementations in reverse order: the median of calls that
wait in the GPU's queue. Tiles of flashgen are made beforehand, or in the call; FlexAttention has a
BlockMask, made by a compiled create_block_mask, whose time is reported. Forward passes keep what
gradients need. The most important of the cells whose kernels are compiled is measured next, without
the peers that are late, if need be; none begins that would not end in time; results are written
after each.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch._functorch.config
from torch.nn.attention.flex_attention import create_block_mask

from benchmarks.accuracy import WRONG
from benchmarks.compiling import FA4_CACHE
from benchmarks.early import Early, Task
from benchmarks.figures import FA4, OWN, RIVAL
from benchmarks.forms import build_own
from benchmarks.measuring import noted
from benchmarks.peers import compiled_flex, load_module
from benchmarks.record import environment
from benchmarks.script import make_parser, sees_gpu, tell, write_results
from benchmarks.tile_cells import BLOCK, CELLS, HEAD_DIM, Data, TileCell, data_of
from benchmarks.tile_tables import tiles_table
from benchmarks.timing import queued_ms
from benchmarks.turns import Plan, Turn, turns, with_room
from flashgen.errors import first_line

#: The file of the modules' specs; causal attention is shipped.
SPECS = "tiles_d128"

#: Rows of scores that the reference holds at once, and queries of the smallest tile.
ROWS, FEWEST_QUERIES = 1024, 16

SMALL = f"{RIVAL}, blocks of {BLOCK}"

Tensors = tuple[torch.Tensor, ...]
#: An implementation with what its kernels depend on: mask, heads of keys, and perhaps the length.
Kernels = tuple[str, str, int, int]
Timer = Callable[[Callable[[], Any]], float]


@dataclass(frozen=True)
class Way:
    """An implementation on the tensors of a cell.

    Attributes:
        inputs: q, k and v in its layout.
        call: the forward pass, with tiles ready; it gives the output in the layout of q.
        make: makes its tiles; None if it has none, or if theirs is not measured.
        made: the forward pass with tiles made in the call; None if `make` and `call` say it.
    """

    inputs: Tensors
    call: Callable[[], torch.Tensor]
    make: Callable[[], Any] | None = None
    made: Callable[[], torch.Tensor] | None = None


def inputs_of(cell: TileCell, device: torch.device) -> tuple[Tensors, torch.Tensor]:
    """q, k and v, (1, heads, length, head_dim), and a gradient of the output."""
    torch.manual_seed(0)
    heads = (cell.heads, cell.kv_heads, cell.kv_heads)
    qkv = tuple(_normal(count, cell.length, device).requires_grad_() for count in heads)
    return qkv, _normal(cell.heads, cell.length, device)


def _normal(heads: int, length: int, device: torch.device) -> torch.Tensor:
    return torch.randn(1, heads, length, HEAD_DIM, dtype=torch.bfloat16, device=device)


def flashgen(cell: TileCell, data: Data, qkv: Tensors) -> Way:
    """The module's own calls; without `tiles`, it has bounds that are exact."""
    module = load_module(cell.module)

    def made() -> torch.Tensor:
        out: torch.Tensor = module.attention(*qkv, **data.parameters)
        return out

    if not hasattr(module, "tiles"):
        return Way(qkv, made)

    def make() -> Any:
        return module.tiles(*qkv[:2], **data.parameters)

    tiles = make()

    def ready() -> torch.Tensor:
        out: torch.Tensor = module.attention(*qkv, **data.parameters, tiles=tiles)
        return out

    return Way(qkv, ready, make, made)


def flex(cell: TileCell, data: Data, qkv: Tensors, block: int = 128) -> Way:
    """FlexAttention and the making of its BlockMask, each compiled; Triton kernels."""
    heads = cell.heads if data.heads > 1 else None

    def make() -> Any:
        sizes = (None, heads, cell.length, cell.length)
        return compiled_block_mask()(
            data.mask_mod, *sizes, device=qkv[0].device.type, BLOCK_SIZE=block
        )

    mask = make()
    given: dict[str, Any] = {"block_mask": mask}
    if cell.kv_heads != cell.heads:
        given["enable_gqa"] = True
    return Way(qkv, lambda: compiled_flex()(*qkv, **given), make)


@cache
def compiled_block_mask() -> Callable[..., Any]:
    """create_block_mask under torch.compile, for each shape and mask."""
    compiled: Callable[..., Any] = torch.compile(create_block_mask, dynamic=False)
    return compiled


def fa4(cell: TileCell, data: Data, qkv: Tensors) -> Way:
    """FlashAttention 4: causal by its argument, others by a mask function and tables of blocks."""
    from flash_attn.cute import flash_attn_func  # type: ignore[import-not-found]

    inputs = tuple(x.detach().transpose(1, 2).contiguous().requires_grad_() for x in qkv)
    given: dict[str, Any] = {"causal": True}
    if cell.mask != "causal":
        from benchmarks import fa4_mods

        heads = cell.heads if data.heads > 1 else None
        blocks, turned = fa4_mods.both_blocks_of(
            data.mask_mod, cell.length, qkv[0].device, heads, compiled_block_mask()
        )
        given = {
            "mask_mod": fa4_mods.DECIDED[cell.mask](cell.heads // data.heads),
            "aux_tensors": list(data.aux) or None,
            "block_sparse_tensors": blocks,
            "block_sparse_tensors_bwd": turned,
        }

    def call() -> torch.Tensor:
        found = flash_attn_func(*inputs, **given)
        out: torch.Tensor = found[0] if isinstance(found, tuple) else found
        return out

    return Way(inputs, call)


def peers_of(cell: TileCell, with_fa4: bool) -> dict[str, Callable[[TileCell, Data, Tensors], Way]]:
    """The implementations of a cell by name."""
    found: dict[str, Callable[[TileCell, Data, Tensors], Way]] = {OWN: flashgen, RIVAL: flex}
    if cell.small:
        found[SMALL] = lambda cell, data, qkv: flex(cell, data, qkv, BLOCK)
    if with_fa4:
        found[FA4] = fa4
    return found


def exact(cell: TileCell, data: Data, qkv: Tensors, grad_out: torch.Tensor) -> list[Tensors]:
    """Dense float32 attention with its gradients, of the first and the last head of keys.

    Each is (heads of q that share the keys, or 1; length, head_dim): the output, the gradients of
    q, k and v. A query without keys has an output of zeros.
    """
    group = cell.heads // cell.kv_heads
    return [
        _exact(cell, data, qkv, grad_out, slice(head * group, (head + 1) * group), head)
        for head in (0, cell.kv_heads - 1)
    ]


def _exact(
    cell: TileCell, data: Data, qkv: Tensors, grad_out: torch.Tensor, of: slice, head: int
) -> Tensors:
    q, grad = (x[0, of].detach().float() for x in (qkv[0], grad_out))
    k, v = (x[0, head].detach().float().requires_grad_() for x in qkv[1:])
    at = torch.arange(cell.length, device=q.device)
    heads = torch.arange(of.start, of.stop, device=q.device)[:, None, None]
    outs, grads_q, sums = [], [], [torch.zeros_like(k), torch.zeros_like(v)]
    for rows in at.split(ROWS):
        part = q[:, rows].requires_grad_()
        seen = data.mask_mod(0, heads, rows[:, None], at)
        with torch.enable_grad():
            scores = (part @ k.T * HEAD_DIM**-0.5).masked_fill(~seen, -torch.inf)
            weights = scores.softmax(-1).masked_fill(~seen.any(-1, keepdim=True), 0.0)
            out = weights @ v
            found = torch.autograd.grad(out, (part, k, v), grad[:, rows])
        outs.append(out.detach())
        grads_q.append(found[0])
        sums = [total + x for total, x in zip(sums, found[1:], strict=True)]
    return torch.cat(outs, 1), torch.cat(grads_q, 1), sums[0][None], sums[1][None]


def error_of(results: Tensors, expected: list[Tensors]) -> float:
    """The largest relative error, by norms, of the heads that are expected; NaN if not finite."""
    if not all(torch.isfinite(x).all() for x in results):
        return float("nan")
    errors = []
    for first, of_head in zip((True, False), expected, strict=True):
        for x, e in zip(results, of_head, strict=True):
            mine = x[0, : len(e)] if first else x[0, -len(e) :]
            errors.append(float((mine.float() - e).norm() / e.norm()))
    return max(errors)


def seen_tiles(cell: TileCell, data: Data, device: torch.device) -> tuple[int, torch.Tensor]:
    """Visible pairs of all heads, and which small tiles of each kind of head hold one.

    The latter are bool (kinds of heads, tiles of `FEWEST_QUERIES`, tiles of `BLOCK` keys).
    """
    length = cell.length
    if length % ROWS:
        raise ValueError(f"{cell.name}: a length that {ROWS} does not divide")
    at = torch.arange(length, device=device)
    pairs, kinds = 0, []
    for kind in range(data.heads):
        head = torch.tensor(kind * (cell.heads // data.heads), device=device)
        found = []
        for rows in at.split(ROWS):
            seen = data.mask_mod(0, head, rows[:, None], at).expand(len(rows), length)
            pairs += int(seen.sum())
            small = seen.view(-1, FEWEST_QUERIES, length // BLOCK, BLOCK)
            found.append(small.any(-1).any(1))
        kinds.append(torch.cat(found))
    return pairs * (cell.heads // data.heads), torch.stack(kinds)


def visited(cell: TileCell, tiles: torch.Tensor, block_m: int, block_n: int) -> int:
    """Elements, of all heads, of the tiles of a kernel that hold a visible pair."""
    down, across = block_m // FEWEST_QUERIES, max(block_n // BLOCK, 1)
    kinds, rows, columns = tiles.shape
    padded = torch.nn.functional.pad(tiles, (0, -columns % across, 0, -rows % down))
    seen = padded.view(kinds, -1, down, padded.shape[2] // across, across).any(-1).any(2)
    return int(seen.sum()) * block_m * block_n * (cell.heads // kinds)


def tiles_of(module: ModuleType, qkv: Tensors) -> dict[str, tuple[int, int]]:
    """Queries and keys of a Gluon kernel's tiles in each pass."""
    forward, backward = module.HOPPER_CONFIG, module.BACKWARD_HOPPER
    packed = 1
    if hasattr(module, "_heads_of_a_list"):  # a tile has rows of several heads
        packed = module._heads_of_a_list(*qkv[:2])
    return {
        "ms": (forward["BLOCK_M"] // packed, forward["BLOCK_N"]),
        "backward_ms": (backward["BLOCK_M"], backward["BLOCK_N"]),
    }


def new_row(cell: TileCell) -> dict[str, Any]:
    """A cell before its measurement."""
    named = {"cell": cell.name, "mask": cell.mask, "reference": cell.reference}
    sizes = {"seq_len": cell.length, "heads": cell.heads, "kv_heads": cell.kv_heads}
    keys = ("visited", "error", "ms", "backward_ms", "made_ms", "making_ms", "unavailable")
    return named | sizes | {"visible": 0} | {key: {} for key in keys}


def measure(
    cell: TileCell,
    row: dict[str, Any],
    device: torch.device,
    *,
    with_fa4: bool,
    without: Collection[str] = (),
    time_ms: Timer = queued_ms,
) -> None:
    """Adds the figures of every implementation, but those of `without`, to a row.

    One that raises, or whose results are wrong, is noted with the reason, flashgen too: the run
    goes on, and ends with status 1.
    """
    torch._functorch.config.donated_buffer = False  # a graph serves several backward passes
    data = data_of(cell, device)
    qkv, grad_out = inputs_of(cell, device)
    row["visible"], small = seen_tiles(cell, data, device)
    sizes = tiles_of(load_module(cell.module), qkv)
    row["visited"] = {key: visited(cell, small, *size) for key, size in sizes.items()}
    expected = exact(cell, data, qkv, grad_out)
    ways: dict[str, Way] = {}
    peers = {name: x for name, x in peers_of(cell, with_fa4).items() if name not in without}
    for name, peer in peers.items():
        with noted(row, name, own=True):
            ways[name] = peer(cell, data, qkv)
            _check(row, name, ways[name], grad_out, expected)
    for order in (1, -1):
        for name in list(ways)[::order]:
            if name not in row["unavailable"]:
                with noted(row, name, own=True):
                    _time(row, name, ways[name], grad_out, time_ms)


def _check(
    row: dict[str, Any], name: str, way: Way, grad_out: torch.Tensor, expected: list[Tensors]
) -> None:
    """Compares results with the reference; a peer with wrong gradients keeps the forward pass."""
    calls = {name: way.call}
    if way.made is not None:
        calls[f"{name}, made"] = way.made
    for of, call in calls.items():
        out = call()
        error = error_of((_like(out.detach(), grad_out),), [x[:1] for x in expected])
        if not error <= WRONG:
            raise ValueError(f"wrong output, {error:.2g} off")
        try:
            grads = torch.autograd.grad(out, way.inputs, _like(grad_out, out))
            results = tuple(_like(x, grad_out) for x in grads)
            error = max(error, error_of(results, [x[1:] for x in expected]))
            if not error <= WRONG:
                raise ValueError(f"wrong gradients, {error:.2g} off")
        except Exception as problem:
            if name == OWN:
                raise
            row["unavailable"][f"{name}, backward"] = first_line(problem)
        row["error"][of] = float(f"{error:.3g}")


def _like(x: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """With the heads where the other has them: before the sequence, or behind it."""
    return x if x.shape[2] == other.shape[2] or x.shape[1] == other.shape[1] else x.transpose(1, 2)


def _time(row: dict[str, Any], name: str, way: Way, grad_out: torch.Tensor, time_ms: Timer) -> None:
    timed: dict[str, Callable[[], Any]] = {"ms": way.call}
    if f"{name}, backward" not in row["unavailable"]:
        out = way.call()
        grad = _like(grad_out, out).contiguous()
        timed["backward_ms"] = lambda: torch.autograd.grad(out, way.inputs, grad, retain_graph=True)
    if way.made is not None:
        timed["made_ms"] = way.made
    if way.make is not None:
        timed["making_ms"] = way.make
    for key, call in timed.items():
        row[key].setdefault(name, []).append(float(f"{time_ms(call):.4g}"))


def prepare(name: str, cell: TileCell, with_fa4: bool, device_type: str = "cuda") -> str:
    """Calls one implementation in a process of its own; returns its error."""
    device = torch.device(device_type)
    torch._functorch.config.donated_buffer = False  # part of cache keys
    try:
        data = data_of(cell, device)
        qkv, grad_out = inputs_of(cell, device)
        way = peers_of(cell, with_fa4)[name](cell, data, qkv)
        for call in (way.call, way.made):
            if call is not None:
                out = call()
                torch.autograd.grad(out, way.inputs, _like(grad_out, out).contiguous())
    except Exception as error:
        return first_line(error)
    return ""


def tasks_of(cells: Sequence[TileCell], with_fa4: bool) -> list[Task]:
    """What is compiled: our own kernels of all cells, then those of each cell's peers."""
    found: dict[Kernels, Task] = {}
    for cell in cells:
        for name in peers_of(cell, with_fa4):
            key = kernels_of(name, cell)
            found.setdefault(key, Task(key, prepare, (name, cell, with_fa4)))
    return sorted(found.values(), key=lambda task: task.arguments[0] != OWN)


def plan_of(cell: TileCell, with_fa4: bool) -> Plan[TileCell]:
    """A cell with the keys of the tasks that it needs."""
    keys = {name: [kernels_of(name, cell)] for name in peers_of(cell, with_fa4)}
    return Plan(cell, keys.pop(OWN), keys)


def kernels_of(name: str, cell: TileCell) -> Kernels:
    """What has kernels of its own: FlexAttention's depend on the sizes."""
    return name, cell.mask, cell.kv_heads, cell.length if name.startswith(RIVAL) else 0


def run(
    cells: Sequence[TileCell],
    early: Early,
    document: dict[str, Any],
    device: torch.device,
    *,
    with_fa4: bool,
    path: Path | None,
) -> None:
    """Measures cells into a document, which is written after each.

    Args:
        cells: the most important first.
        early: processes with their tasks, and the limit.
        document: the results, with an empty list of cells, which are there in the order of these.
        device: where.
        with_fa4: whether FlashAttention 4 is measured.
        path: a file for the results, or None.
    """
    rows: dict[int, dict[str, Any]] = {}
    for turn in turns([plan_of(cell, with_fa4) for cell in cells], early):

        def measured(turn: Turn[TileCell] = turn) -> dict[str, Any]:
            row = new_row(turn.cell) | {"unavailable": dict(turn.without)}
            if OWN not in turn.without:
                with noted(row, OWN, own=True):
                    measure(turn.cell, row, device, with_fa4=with_fa4, without=turn.without)
            return row

        row = with_room(early, measured)
        rows[turn.number] = row
        document["cells"] = [rows[number] for number in sorted(rows)]
        if device.type == "cuda":
            torch.cuda.empty_cache()
        print(f"{early.passed:4.0f} s {row}", flush=True)
        if path:
            write_results(document, path)
    for number, cell in enumerate(cells):
        if number not in rows:
            print(f"no time left for {cell.name}", file=sys.stderr, flush=True)


def main() -> int:
    """Measures, and shows the table."""
    began = time.perf_counter()
    parser = make_parser("tiles", __doc__, with_fa4=True)
    parser.add_argument(
        "--jobs", type=int, default=6, help="processes that compile meanwhile, or 0"
    )
    parser.add_argument("--limit-seconds", type=float, default=240.0, help="of the whole run")
    parser.add_argument("--cells", nargs="+", default=[""], help="cells with these in their names")
    options = parser.parse_args()
    if not sees_gpu("tiles"):
        return 2
    device = torch.device("cuda")
    cells = [cell for cell in CELLS if any(part in cell.name for part in options.cells)]
    build_own(SPECS)
    os.environ[FA4_CACHE] = "1"
    document: dict[str, Any] = {"benchmark": "tiles", "environment": environment(device)}
    document["cells"] = []
    tasks = tasks_of(cells, options.fa4)
    with Early(tasks, options.jobs, options.limit_seconds, began) as early:
        run(cells, early, document, device, with_fa4=options.fa4, path=options.json)
    tell(document, tiles_table, options.json)
    return 1 if any(OWN in row["unavailable"] for row in document["cells"]) else 0


if __name__ == "__main__":
    sys.exit(main())
