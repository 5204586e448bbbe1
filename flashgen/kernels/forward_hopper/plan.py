"""HopperNames: what the Gluon template for Hopper reads besides the KernelPlan."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

from flashgen.kernels.forward_hopper.shape import HopperShape, hopper_shape, segment_table
from flashgen.plan.code import codes_of
from flashgen.plan.kernel import KernelPlan
from flashgen.plan.mask_code import MaskCode, columns_end, mask_code, with_promise
from flashgen.symbolic.printer.code import Code, read_by
from flashgen.symbolic.printer.dialects import Gluon
from flashgen.symbolic.tables import RowTable
from flashgen.symbols import KV_IDX, Q_FIRST, H

#: Comparisons of the mask from which on column bitmasks pay in the steps. With one, an H200 took
#: 0.2 to 2% longer (causal, d=64 and 80); with two or three, 0.4 to 6% less.
LEAST_COMPARISONS = 2

#: Columns that a tile of the output is stored in.
OUT_COLUMNS = 128


#: Distances are what scores read most: cheaper than converting every position.
DIALECT = Gluon({KV_IDX - Q_FIRST: "_score_columns(scores, start_n - q_first, gl.float32)"})


@dataclass(frozen=True)
class Range:
    """The weights that a softmax computes with, in powers of 2.

    Attributes:
        first: the largest weight of a row's first tile of keys.
        raise_above: what the weights of a row may add up to before its reference is raised.
        most: what they may add up to at all: beyond, the tile of queries is computed again.
        usual: what is left of a sum where the reference is raised.
        steep: the spread of the scores in a row's first tile from which every step looks for new
            maxima. At half of that one step does, after tiles that hide keys.
        look: steps from one look at the sums to the next, at first.
        last_grows: whether the last step takes new maxima. It sees the first keys, where models
            put the one that all rows attend to, and little room is left for it.
    """

    first: int
    raise_above: int
    most: int
    usual: int
    steep: int
    look: int
    last_grows: bool = False


#: bfloat16 has the exponents of float32: the first weights leave room for others to be 2^152 times
#: as large, and values up to 2^38, or for others to be 2^-62 of them. float16 ends at 2^16, and
#: loses digits below 2^-14.
RANGES = {
    "bfloat16": Range(first=-64, raise_above=-40, most=88, usual=-56, steep=150, look=16),
    "float16": Range(first=0, raise_above=10, most=15, usual=8, steep=22, look=8, last_grows=True),
}


@dataclass(frozen=True)
class HopperNames:
    """What the kernel's functions hand to one another, as aggregates of these names."""

    plan: KernelPlan

    @cached_property
    def shape(self) -> HopperShape:
        """The structure of the kernel."""
        return hopper_shape(self.plan)

    @cached_property
    def segments(self) -> RowTable | None:
        """Whose segments tiles of queries start at; None where they start at each BLOCK_M."""
        return segment_table(self.plan)

    @cached_property
    def packs(self) -> bool:
        """Whether a tile may hold rows of several heads that share keys: nothing tells them apart.

        Its rows are then of as many heads as the launcher says, one head's after another's. Random
        numbers are a head's own, and lists and segments are of whole tiles of one.
        """
        if self.plan.listing or self.segments or self.plan.dropout:
            return False
        spec = self.plan.spec
        score = spec.score.traced if spec.score is not None else None
        parts = (spec.mask.traced, score, spec.normaliser.traced_sink)
        return not any(part is not None and H in part.sym.free_symbols for part in parts)

    @cached_property
    def call(self) -> tuple[str, ...]:
        """What holds for the whole call."""
        return (
            *(("PACKED",) if self.packs else ()),
            *("num_q_heads", "num_kv_heads", "q_len", "kv_len"),
            *("num_tiles_m", "num_tiles", "heads_together", "lse_rows"),
            "scale" if self.plan.reads_scale else "qk_scale",
            *(("threshold", "kept_scale", "seed") if self.plan.dropout else ()),
            *self.plan.kernel_arguments.names,
            *(("tiles_ptr",) if self.plan.listing else ()),
            *(("segment_tiles_ptr",) if self.segments else ()),
        )

    @cached_property
    def barriers(self) -> tuple[str, ...]:
        """Arrays of barriers: those of queries, of what steps multiply, of tiles of queries."""
        fused = ("kv_full", "kv_empty")
        steps = fused if self.shape.fused_kv_stages else ("k_full", "k_empty", "v_full", "v_empty")
        return ("q_full", "q_empty", *steps, "work_full", "work_empty")

    @cached_property
    def buffers(self) -> tuple[str, ...]:
        """What producer and consumers share."""
        hiding = ("hiding",) if self.plan.hidden.keys else ()
        growth = self.growth if self.plan.normaliser == "softmax" else ()
        return ("tiles", "barriers", "slots", *hiding, *growth)

    @cached_property
    def aggregates(self) -> dict[str, tuple[str, ...]]:
        """The fields of all of them, by the names of parameters; those of fields come last."""
        return {
            "call": self.call,
            "work": self.work,
            "place": ("slots", "q_count"),
            "queries": self.queries,
            "sources": ("q_descs", "k_descs", "v_descs", *("counter_ptr",) * self.counts),
            "results": ("out_descs", *("out_ptr",) * (self.segments is not None), "lse_ptr"),
            "buffers": self.buffers,
            "tiles": ("q_tiles", "k_tiles", "v_tiles", "out_tiles"),
            "barriers": self.barriers,
        }

    @cached_property
    def arguments(self) -> tuple[str, ...]:
        """The kernel's arguments ahead of the parameters'."""
        segments = self.segments is not None
        return (
            *self.descriptors,
            *(("out_ptr",) if segments else ()),
            *("lse_ptr", "counter_ptr"),
            *(("segment_tiles_ptr",) if segments else ()),
            *self.sizes,
            "scale" if self.plan.reads_scale else "qk_scale",
            *(("threshold", "kept_scale") if self.plan.dropout else ()),
        )

    @cached_property
    def sizes(self) -> tuple[str, ...]:
        """Those of them that are whole numbers."""
        tiles = () if self.segments else ("num_tiles_m", "num_tiles")
        heads = ("num_q_heads", "num_kv_heads")
        return (*heads, "q_len", "kv_len", *tiles, "heads_together", "lse_rows")

    @cached_property
    def queries(self) -> tuple[str, ...]:
        """What a consumer computes once for its queries, for all of their scores."""
        return tuple(a.name for a in self.plan.code.scalars + self.plan.code.rows)

    @cached_property
    def score_reads(self) -> tuple[str, ...]:
        """Of a tile's place and positions, what the score function depends on."""
        code = self.plan.code
        return _read((code.score, *codes_of(code.columns, code.elements)))

    @property
    def scores_read_kv_idx(self) -> bool:
        """Whether the score reads the keys' positions besides distances, or leaves them to masks.

        A column bitmask has its own.
        """
        code = self.plan.code
        if not self.mask_code.bitmasks:
            return code.score_reads_kv_idx
        return "kv_idx" in read_by((*codes_of(code.columns, code.elements), code.score), DIALECT)

    @cached_property
    def mask_reads(self) -> tuple[str, ...]:
        """Of a tile's place and positions, what the mask alone depends on."""
        code = self.plan.code
        tables = (read for table in code.tables for read in table.codes)
        names = _read((*code.conditions, *codes_of(code.masked), *tables))
        return tuple(name for name in names if name not in self.score_reads)

    @cached_property
    def promise_reads(self) -> tuple[str, ...]:
        """Of a tile's place and positions, what the mask depends on as it was written."""
        promise = self.plan.code.promise
        return _read(promise.conditions, "q_idx") if promise is not None else ()

    @cached_property
    def rows_read(self) -> tuple[str, ...]:
        """Of a tile's place and positions, what `queries` depend on."""
        return _read(codes_of(self.plan.code.scalars, self.plan.code.rows))

    @property
    def work(self) -> tuple[str, ...]:
        """What the producer finds out about a tile of queries."""
        online_max = ("online_max",) if self.plan.normaliser == "softmax" else ()
        return ("visits", *self.place, *self.runs, *online_max)

    @property
    def place(self) -> tuple[str, ...]:
        """Numbers that say where a tile of queries lies."""
        return ("batch", "head", "q_first", *(("q_last",) if self.segments else ()))

    @cached_property
    def runs(self) -> tuple[str, ...]:
        """Which tiles of keys a tile of queries visits, and which of them all its queries see."""
        tiles = self.plan.tiles
        if tiles.listed:
            return ("listed", "num_visits")
        if self.segments:
            places, ends = ["kv_first"], ["all_begin", "all_end"]
        elif tiles.from_key_0:
            places, ends = [], ["full_end"]
        elif len(tiles.runs) == 1:
            places, ends = ["kv_begin"], ["full_begin", "full_end"]
        else:
            places = [f"{name}{r.suffix}" for r in tiles.runs for name in ("kv_begin", "visits")]
            ends = [f"{name}{r.suffix}" for r in tiles.runs for name in ("full_begin", "full_end")]
        return tuple(places if self.skips else places + ends)

    @property
    def skips(self) -> bool:
        """Whether a consumer leaves out tiles of keys that its own queries do not see.

        That pays where a tile of queries is longer than one of keys. The producer then finds out
        for each consumer what it visits.
        """
        tiles = self.plan.tiles
        return self.shape.three_consumers and self.plan.masks and not tiles.listed and tiles.sorted

    @cached_property
    def own_visits(self) -> tuple[str, ...]:
        """A consumer that skips tiles: its first and last visit; keys that all its queries see."""
        if not self.skips:
            return ()
        tiles = self.plan.tiles
        ends = ("all_end",) if tiles.from_key_0 else ("all_begin", "all_end")
        return ("first", "last", *(f"{end}{run.suffix}" for run in tiles.runs for end in ends))

    @cached_property
    def own_visits_read(self) -> frozenset[str]:
        """Of q_first and q_last, those that `own_visits` depend on."""
        full = [end for run in self.plan.tiles.runs for end in (run.full_begin, run.full_end)]
        return self._ends_read((*full, *self._visits_from))

    @property
    def work_reads(self) -> frozenset[str]:
        """Of q_first and q_last, those that the visits of a tile of queries depend on."""
        tiles = self.plan.tiles
        if self.skips:
            return self._ends_read(self._visits_from)
        return frozenset({"q_last"} if tiles.read_q_last or tiles.reduce_rows else ())

    @property
    def _visits_from(self) -> tuple[Code | None, ...]:
        return tuple(x for run in self.plan.tiles.runs for x in (run.begin, run.end, run.condition))

    def _ends_read(self, codes: Iterable[Code | None]) -> frozenset[str]:
        if self.plan.tiles.reduce_rows:
            return frozenset({"q_first", "q_last"})
        return read_by(codes) & {"q_first", "q_last"}

    @property
    def counts(self) -> bool:
        """Whether programs take their tiles of queries from a counter.

        Elsewhere each has every so many of them: no tile takes longer than another. Of a window's,
        those where keys begin are shorter.
        """
        return self.plan.tiles.uneven or self.skips

    @property
    def shortest_last(self) -> bool:
        """Whether the shortest tiles of queries, of all heads, come after all others.

        They fill up the time of programs that wait for the last long ones. Shorter tiles are so
        many that a group of heads leaves little; of lists and segments none knows which are short.
        """
        known = not (self.plan.listing or self.segments)
        return known and self.shape.three_consumers and self.plan.bounds.longest_first != "even"

    @property
    def growth(self) -> tuple[str, ...]:
        """Where a softmax notes that weights have overflowed their range."""
        # A tile that ends by itself says so by the barrier that frees its numbers.
        return ("votes", "overflowed", *(("checked",) if self.shape.overlapped_tiles else ()))

    @property
    def lowers_last(self) -> bool:
        """Whether weights that the last step's alone overflow are lowered before they are used.

        float16 has no room for them until then. Of narrow heads it is more code than it is worth.
        """
        wide = max(self.plan.qk_head_dim, self.plan.v_head_dim) > 64
        return wide and RANGES[self.plan.torch_dtype].first < 0

    @cached_property
    def visits(self) -> str:
        """How many tiles of keys a tile of queries visits, in terms of `runs`."""
        tiles = self.plan.tiles
        if tiles.listed:
            return "num_visits"
        if self.segments:
            return "gl.cdiv(some_end - kv_first, BLOCK_N)"
        if tiles.from_key_0:
            return "kv_end"
        if len(tiles.runs) == 1:
            return "kv_end - kv_begin"
        return f"visits{tiles.runs[-1].suffix}"

    @cached_property
    def masks(self) -> bool:
        """Whether there is something to compute for a masked tile."""
        return bool(self.plan.code.conditions or self.plan.checks_kv_len)

    @cached_property
    def mask_code(self) -> MaskCode:
        """What a masked tile shows, pair by pair or by column bitmasks.

        Tables of blocks are read pair by pair.
        """
        code = self.plan.code
        of_keys = (columns_end("kv"),) * self.plan.checks_kv_len
        bitmasks = (None,) * len(code.bitmasks) if code.tables else code.bitmasks
        conditions = (*of_keys, *zip(code.conditions, bitmasks, strict=True))
        rows = ("q_idx", *(line.name for line in code.rows))
        least = LEAST_COMPARISONS + self.plan.checks_kv_len  # which hides in the last tile alone
        return mask_code(conditions, "kv_idx", rows, least=least)

    @property
    def promised_mask_code(self) -> MaskCode:
        """What is computed as column bitmasks: that, and the mask as it was written."""
        code = self.plan.code
        return (
            self.mask_code if code.tables else with_promise(self.mask_code, "q_idx", code.promise)
        )

    @cached_property
    def hidden_reads(self) -> tuple[str, ...]:
        """Of a tile's place and positions, what column bitmasks depend on."""
        return tuple(
            n for n in _read(self.mask_code.bitmasks) if n != "q_idx" or n in self.mask_code.rows
        )

    @property
    def changes_scores(self) -> bool:
        """Whether the softmax sees anything but the raw products."""
        return self.masks or bool(self.plan.code.score)

    @property
    def changes_steps(self) -> bool:
        """Whether scores change beyond a tile's first step, which holds the end of the keys."""
        return self.plan.masks or bool(self.plan.code.score)

    @property
    def steps_read_keys(self) -> bool:
        """Whether a step has to know which keys it is of."""
        return self.changes_steps or self.plan.dropout

    @property
    def splits_steps(self) -> bool:
        """Whether masked steps have code of their own: it pays where the special unit is busy."""
        return self.plan.masks and self.plan.code.uses_tanh and self.shape.splits

    @cached_property
    def descriptors(self) -> tuple[str, ...]:
        """The kernel's tensor descriptors."""
        qk, v = self.plan.qk_parts, self.plan.v_parts
        tensors = (("q", qk), ("k", qk), ("v", v), ("out", v))
        return tuple(f"{name}_desc{part.suffix}" for name, parts in tensors for part in parts)


def _read(codes: Iterable[Code | None], *others: str) -> tuple[str, ...]:
    """What code reads of a tile's place and positions; q_idx is made from q_first."""
    found = read_by(codes).union(others)
    if "q_idx" in found:
        found |= {"q_first"}
    return tuple(name for name in ("batch", "head", "q_first", "q_idx") if name in found)
