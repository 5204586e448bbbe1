"""The calls that kernels of shipped variants are tried with: a full set, and a fast one by pairs.

A trial is data. So the sweeps can run it on a kernel as it is, and the table of kills on a kernel
that `support.mutants` has made wrong.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Literal

from flashgen import Int
from flashgen.config import KernelConfig
from flashgen.kernels.backward_hopper.plan import HopperBackward
from flashgen.kernels.forward_hopper.space import hopper_space, rank_hopper
from flashgen.plan import lower
from flashgen.plan.backward import backward_plan
from support.cases import LAYOUTS, MIXED, Case, around_tiles, every_remainder
from support.pairs import LENGTHS, Row, all_pairs
from support.variants import gluon_specs, shipped_module, shipped_specs

#: Whose kernels: the forward or the backward pass, in Triton's interpreter or in Gluon's.
Kernel = Literal["forward", "backward", "forward_hopper", "backward_hopper"]

SPECS = shipped_specs()
GLUON = gluon_specs()
PLANS = {name: lower(spec, name) for name, spec in SPECS.items()}
#: The configurations of the Gluon forward kernel that a build may choose, best first.
CONFIGS = {name: rank_hopper(PLANS[name], hopper_space(PLANS[name]).candidates) for name in GLUON}
#: The tiles of the Gluon backward kernel, which are as they are.
HOPPER_BACKWARD = {name: HopperBackward(backward_plan(PLANS[name])) for name in GLUON}

#: Tiles of the portable kernels that the interpreter runs in little time, in both shapes.
TILES = ((32, 16), (16, 32))


@dataclass(frozen=True)
class Trial:
    """One call of one kernel of one shipped variant.

    Attributes:
        kernel: which one.
        spec: the variant's name.
        case: the call.
        config: the tiles; of the Gluon backward kernel they are as they are.
        tma: whether the portable kernels may read by descriptors.
        course: of Gluon kernels, which turns their roles take, the same for the same number.
    """

    kernel: Kernel
    spec: str
    case: Case
    config: KernelConfig
    tma: bool = False
    course: int = 0

    def __str__(self) -> str:
        tile = f"{self.config.BLOCK_M}x{self.config.BLOCK_N}x{self.config.num_stages}"
        course = f"-course{self.course}" * (self.course > 0)
        return f"{self.kernel}-{self.spec}-{tile}-{self.case}{'-tma' * self.tma}{course}"


def _tile(block_m: int, block_n: int, num_stages: int = 2) -> KernelConfig:
    return KernelConfig(block_m, block_n, num_warps=4, num_stages=num_stages)


def _alternating(
    kernel: Kernel, name: str, cases: Iterator[Case], tile: tuple[int, int], turn: int = 0
) -> Iterator[Trial]:
    """With descriptors for every other case."""
    for i, case in enumerate(cases):
        yield Trial(kernel, name, case, _tile(*tile), (i + turn) % 2 == 0)


# The full set, by what it goes through. Each part takes a kernel and a variant.


def _remainders(kernel: Kernel, name: str) -> Iterator[Trial]:
    """Every remainder of both lengths by both sides of a tile."""
    for turn, tile in enumerate(TILES):
        cases = every_remainder(*tile, equal_lengths=SPECS[name].equal_lengths)
        yield from _alternating(kernel, name, cases, tile, turn)


def _lengths(kernel: Kernel, name: str) -> Iterator[Trial]:
    """Lengths beside multiples of a tile's sides."""
    for turn, tile in enumerate(TILES):
        cases = around_tiles(*tile, equal_lengths=SPECS[name].equal_lengths)
        yield from _alternating(kernel, name, cases, tile, turn)


def _shipped_tiles(kernel: Kernel, name: str) -> Iterator[Trial]:
    """The same of the tiles that the module's configurations name."""
    shipped = shipped_module(name).CONFIGS.values()
    for m, n, tma in sorted({(x["BLOCK_M"], x["BLOCK_N"], x["USE_TMA"]) for x in shipped}):
        for case in around_tiles(m, n, equal_lengths=SPECS[name].equal_lengths):
            yield Trial(kernel, name, case, _tile(m, n), tma)


#: (batch, heads of q, of k and v).
HEADS = ((1, 2, 2), (2, 4, 2), (2, 4, 1), (1, 6, 2), (3, 1, 1))


def _heads(kernel: Kernel, name: str) -> Iterator[Trial]:
    for heads in HEADS:
        for tma in (False, True):
            yield Trial(kernel, name, Case(37, 37, *heads), _tile(32, 16), tma)


def _layouts(kernel: Kernel, name: str) -> Iterator[Trial]:
    for layout in (*LAYOUTS, MIXED):
        for heads in ((1, 2, 1), (2, 4, 2)) if kernel == "backward" else ((2, 4, 2),):
            for tma in (False, True):
                yield Trial(kernel, name, Case(35, 35, *heads, layout), _tile(32, 16), tma)


def _scales(kernel: Kernel, name: str) -> Iterator[Trial]:
    for scale in (1e-3, 0.3, 2.0):
        yield Trial(kernel, name, Case(33, 33, scale=scale), _tile(32, 16))


def _params(kernel: Kernel, name: str) -> Iterator[Trial]:
    """Whole numbers from their least to more than there are keys."""
    hopper = kernel.endswith("hopper")
    for param in SPECS[name].params:
        if not isinstance(param, Int):
            continue
        values = (64, 100, 10**6) if hopper else (5, 16, 10**6)
        lengths = ((300, 300), (200, 330), (330, 200)) if hopper else (
            (40, 40), (17, 61), (61, 17), (1, 50)
        )  # fmt: skip
        for value in (param.min, param.min + 1, *values):
            for q_len, kv_len in lengths:
                if SPECS[name].equal_lengths and q_len != kv_len:
                    continue
                heads = (1, 2, 2) if hopper else (1, 1, 1)
                case = Case(q_len, kv_len, *heads, params={param.name: value})
                yield Trial(kernel, name, case, best_tile(kernel, name))


def best_tile(kernel: Kernel, name: str) -> KernelConfig:
    """The configuration that a trial takes which says nothing of tiles."""
    if kernel == "forward_hopper":
        return CONFIGS[name][0]
    if kernel == "backward_hopper":
        return _tile(HOPPER_BACKWARD[name].block_m, HOPPER_BACKWARD[name].block_n)
    return _tile(32, 16)


GLUON_HEADS = ((1, 1, 1), (2, 2, 1), (1, 4, 2), (1, 3, 3))
#: Those that TMA can read.
GLUON_LAYOUTS = ("contiguous", "transposed", "padded", "every_other_row", MIXED)


def _gluon_lengths(kernel: Kernel, name: str) -> Iterator[Trial]:
    """Beside multiples of the tiles' sides; heads and layouts take turns."""
    config, equal = best_tile(kernel, name), SPECS[name].equal_lengths
    edges = around_tiles(config.BLOCK_M, config.BLOCK_N, equal_lengths=equal)
    lengths = [(case.q_len, case.kv_len) for case in edges]
    lengths += [(600, 600)] + [(257, 450), (450, 257)] * (not equal)
    for i, both in enumerate(lengths):
        yield Trial(kernel, name, Case(*both, *GLUON_HEADS[i % 4], GLUON_LAYOUTS[i % 5]), config)


def _configurations(kernel: Kernel, name: str) -> Iterator[Trial]:
    """That a build may choose: tiles and stages of each kind."""
    for config in CONFIGS[name]:
        for length in (1, config.BLOCK_M + 1, 500):
            yield Trial(kernel, name, Case(length, length, 2, 4, 2), config)


#: Variants whose Gluon kernels are tried with every remainder: one of each structure.
EVERY_REMAINDER = ("causal_d128", "window_d128", "full_d64", "causal_d256")


def _gluon_remainders(kernel: Kernel, name: str) -> Iterator[Trial]:
    """By the sides of all tiles, which are of 64, 128 and 192; of gradients a third."""
    if name not in EVERY_REMAINDER:
        return
    every = 3 if kernel == "backward_hopper" else 1
    for r in range(0, CONFIGS[name][0].BLOCK_M, every):
        kv_len = 64 + r if SPECS[name].equal_lengths else 30 + 7 * r % 128
        yield Trial(kernel, name, Case(64 + r, kv_len), best_tile(kernel, name))


#: Of several tiles and of one, of more keys than queries, with rows and tiles that nobody sees; and
#: with weights that outgrow those of the first tile. In whatever turns, kernels have to be right.
_ROLES = (
    Case(500, 500, 1, 2, 1),
    Case(700, 700),
    Case(300, 900),
    Case(300, 900, params={"left": 50}),
    Case(700, 150),
    Case(600, 600, 2, 2, 2, scale=4.0),
)

#: With tiles of few keys, of which one outgrows all range: what the producer asks too early it
#: seldom asks too early elsewhere, and here not in all turns.
_OUTGROWN = {
    "window_d128": (
        Case(586, 586, 2, 2, 2, params={"left": 20}, outlier=200.0),
        Case(400, 400, 3, 2, 2, params={"left": 60}, outlier=200.0),
        Case(200, 200, 1, 1, 1, params={"left": 100}, outlier=200.0),
    ),
    "causal_d64": (
        Case(190, 190, 4, 4, 4, outlier=200.0),
        Case(300, 300, 4, 4, 4, outlier=200.0),
    ),
}

#: Variants whose kernels are tried in many turns: one of each structure.
IN_TURNS: dict[Kernel, tuple[str, ...]] = {
    "forward_hopper": ("window_d128", "causal_d128", "causal_d64"),
    "backward_hopper": ("window_d128", "full_d128", "causal_d256"),
}


def _turns(kernel: Kernel, name: str) -> Iterator[Trial]:
    """The roles of a Gluon kernel take other turns each time."""
    if name not in IN_TURNS[kernel]:
        return
    outgrown = _OUTGROWN.get(name, ()) if kernel == "forward_hopper" else ()
    spec, config = SPECS[name], best_tile(kernel, name)
    for course, case in enumerate([*2 * _ROLES, *16 * outgrown]):
        takes = {param.name for param in spec.params}
        fits = not spec.equal_lengths or case.q_len == case.kv_len
        if fits and set(case.params) <= takes:
            yield Trial(kernel, name, case, config, course=course)


Part = Callable[[Kernel, str], Iterator[Trial]]

#: The full set: kernel -> part -> its trials of a variant.
FULL: dict[Kernel, dict[str, Part]] = {
    "forward": {
        "remainders": _remainders,
        "shipped_tiles": _shipped_tiles,
        "heads": _heads,
        "layouts": _layouts,
        "scales": _scales,
        "params": _params,
    },
    "backward": {
        "lengths": _lengths,
        "heads": _heads,
        "layouts": _layouts,
        "scales": _scales,
        "params": _params,
    },
    "forward_hopper": {
        "turns": _turns,
        "lengths": _gluon_lengths,
        "params": _params,
        "configurations": _configurations,
        "remainders": _gluon_remainders,
    },
    "backward_hopper": {
        "turns": _turns,
        "lengths": _gluon_lengths,
        "params": _params,
        "remainders": _gluon_remainders,
    },
}


def full(kernel: Kernel) -> list[Trial]:
    """The full set of a kernel, over all shipped variants."""
    names = GLUON if kernel.endswith("hopper") else SPECS
    return [
        trial for name in names for part in FULL[kernel].values() for trial in part(kernel, name)
    ]


# The fast set: the same things, so that each two meet.


def _rows(specs: list[str], factors: dict[str, tuple[object, ...]]) -> list[Row]:
    """Of variants that take queries as many as keys alone, both lengths are of one kind."""

    def allowed(row: Row) -> bool:
        return (
            "kv_len" not in row
            or not SPECS[row["spec"]].equal_lengths
            or row["q_len"] == row["kv_len"]
        )

    kinds = tuple(LENGTHS)
    return all_pairs({"spec": specs, "q_len": kinds, "kv_len": kinds, **factors}, allowed)


def _of_row(row: Row, block_m: int, block_n: int) -> Case:
    """The call of a row, whose numbers are the least, a few and many in turn."""
    q_len, kv_len = LENGTHS[row["q_len"]](block_m), LENGTHS[row["kv_len"]](block_n)
    spec = SPECS[row["spec"]]
    ints = [param for param in spec.params if isinstance(param, Int)]
    few = {"default": None, "least": 0, "few": 3, "some": block_n + 5}[row["number"]]
    params = {} if few is None else {param.name: param.min + few for param in ints}
    kv_len = q_len if spec.equal_lengths else kv_len
    # Of one key torch's weights are exactly 1, whatever its scores: float32 is held to their error.
    scale = None if spec.dtype == "float32" and kv_len == 1 else row["scale"]
    return Case(q_len, kv_len, *row["heads"], row["layout"], scale, params)


_NUMBERS = ("default", "least", "few", "some")
_SCALES = (None, 0.3, 2.0)


@functools.cache
def portable_rows() -> list[tuple[str, Case, KernelConfig, bool]]:
    """(variant, call, tiles, descriptors) of the portable kernels' fast set."""
    factors = {
        "layout": (*LAYOUTS, MIXED),
        "heads": ((1, 1, 1), *HEADS),
        "tile": TILES,
        "tma": (False, True),
        "number": _NUMBERS,
        "scale": _SCALES,
    }
    rows = _rows(list(SPECS), factors)
    return [
        (row["spec"], _of_row(row, *row["tile"]), _tile(*row["tile"]), row["tma"]) for row in rows
    ]


@functools.cache
def gluon_rows() -> list[tuple[str, Row]]:
    """(variant, row) of the Gluon kernels' fast set."""
    factors = {
        "layout": GLUON_LAYOUTS,
        "heads": (*GLUON_HEADS, (1, 4, 1)),
        "tile": (0, 1, 2, 3),
        "stages": (2, 3, 4),
        "number": _NUMBERS,
        "scale": (None, 2.0),
    }
    return [(row["spec"], row) for row in _rows(list(GLUON), factors)]


def _gluon_config(row: Row) -> KernelConfig:
    """The row's tile and stages among those that a build may choose; as many stages as fit."""
    configs = CONFIGS[row["spec"]]
    tiles = sorted({(config.BLOCK_M, config.BLOCK_N) for config in configs})
    tile = tiles[row["tile"] % len(tiles)]
    of_tile = [config for config in configs if tile == (config.BLOCK_M, config.BLOCK_N)]
    fitting = [config for config in of_tile if config.num_stages <= row["stages"]]
    return max(fitting or of_tile, key=lambda config: config.num_stages)


@functools.cache
def fast(kernel: Kernel) -> list[Trial]:
    """The fast set of a kernel, over all shipped variants."""
    if kernel in ("forward", "backward"):
        return [Trial(kernel, *row) for row in portable_rows()] + EXTRA[kernel]
    trials = []
    for name, row in gluon_rows():
        config = _gluon_config(row) if kernel == "forward_hopper" else best_tile(kernel, name)
        case = _of_row(row, config.BLOCK_M, config.BLOCK_N)
        # Three tiles and a part take long on the CPU, and the third shows nothing new.
        case = replace(case, q_len=min(case.q_len, 500), kv_len=min(case.kv_len, 500))
        trials.append(Trial(kernel, name, case, config))
    return list(dict.fromkeys(trials)) + EXTRA[kernel]


#: What pairs leave out, and a mutant shows to be needed.
EXTRA: dict[Kernel, list[Trial]] = {
    "forward": [
        # Where the unmasked keys begin one behind a tile's first, and end with a tile's last.
        Trial("forward", "window_d128", Case(1, 50, params={"left": 16}), _tile(32, 16)),
        Trial("forward", "window_d128", Case(21, 51), _tile(32, 16), tma=True),
        # Where what lies behind the last query would see one tile of keys more.
        Trial("forward", "window_d128", Case(39, 40), _tile(32, 16)),
        # Keys and values of several heads that lie in memory otherwise.
        Trial("forward", "window_d128", Case(37, 37, 2, 4, 2, MIXED), _tile(32, 16)),
    ],
    "backward": [
        # The same of queries that see keys, and of both ends.
        Trial("backward", "window_d128", Case(32, 32), _tile(32, 16)),
        Trial("backward", "window_d128", Case(1, 50, params={"left": 5}), _tile(32, 16)),
        Trial("backward", "window_d128", Case(40, 40, params={"left": 1}), _tile(32, 16)),
        Trial("backward", "window_d128", Case(40, 40, params={"left": 16}), _tile(32, 16)),
        Trial("backward", "window_d128", Case(37, 37, 2, 4, 2, MIXED), _tile(32, 16)),
        Trial("backward", "window_d128", Case(64, 1), _tile(32, 16)),
    ],
    "forward_hopper": [
        # Consumers that skip tiles; and tiles computed again, of which the producer asks too early
        # in these turns.
        Trial("forward_hopper", "window_d128", _ROLES[0], CONFIGS["window_d128"][0]),
        Trial(
            "forward_hopper",
            "window_d128",
            _OUTGROWN["window_d128"][1],
            CONFIGS["window_d128"][0],
        ),
        Trial("forward_hopper", "causal_d64", _OUTGROWN["causal_d64"][1], CONFIGS["causal_d64"][0]),
    ],
    "backward_hopper": [],
}
