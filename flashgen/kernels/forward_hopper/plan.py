"""HopperNames: further variables of the Gluon template for Hopper."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property

import sympy

from flashgen.kernels.forward_hopper.handed_steps import HandedSteps
from flashgen.kernels.forward_hopper.shape import (
    segment_table,
)
from flashgen.kernels.forward_hopper.weight_range import RANGES
from flashgen.kernels.views import OF_SEQUENCE
from flashgen.plan.classified import ClassifiedTiles
from flashgen.plan.code import codes_of
from flashgen.plan.hidden import HiddenRows
from flashgen.symbolic.printer import triton_code
from flashgen.symbolic.printer.code import Code, read_by
from flashgen.symbolic.printer.dialects import Gluon
from flashgen.symbolic.tables import RowTable
from flashgen.symbols import GROUP, KV_IDX, KV_LEN, Q_FIRST, FloorDiv, H

#: Columns that a tile of the output is stored in.
OUT_COLUMNS = 128


#: Distances are what scores read most: cheaper than converting every position.
DIALECT = Gluon({KV_IDX - Q_FIRST: "_score_columns(scores, start_n - q_first, gl.float32)"})


@dataclass(frozen=True)
class HopperNames(HandedSteps):
    """The aggregates that the kernel's functions pass to one another, by their fields."""

    @cached_property
    def segments(self) -> RowTable | None:
        """The table at whose segments tiles of queries start; None: they start at each BLOCK_M."""
        return None if self.of_sequences else segment_table(self.plan)

    @property
    def ragged(self) -> bool:
        """Whether the rows behind a tile's last query may belong to another tile."""
        return self.of_sequences or self.segments is not None

    @cached_property
    def of_sequence(self) -> dict[str, str]:
        """The numbers of a tile's sequence, each in words; of packed sequences only."""
        said = {
            "q_start": "first query of the sequence among all",
            "kv_start": "first key of the sequence among all",
            "q_len": "number of queries of the sequence",
            "kv_len": "number of keys of the sequence",
        }
        return said if self.of_sequences else {}

    @property
    def asked(self) -> frozenset[str]:
        """The numbers of a tile's sequence that consumers of a cache ask for."""
        reads = (self.score_reads, self.mask_reads, self.rows_read, self.promise_reads)
        others = (self.hidden_reads, self.lengths_of_rows, ("q_start", KV_LEN.name))
        return frozenset(name for names in (*reads, *others) for name in names)

    @cached_property
    def hidden(self) -> HiddenRows:
        """Rows that the kernel clears: behind a sequence's last key is another sequence."""
        hidden = self.plan.hidden
        if not self.of_sequences:
            return hidden
        inside = triton_code(KV_IDX < KV_LEN, {"kv_idx": "key_rows"})
        return replace(hidden, keys=(*hidden.keys, inside), names=hidden.names | {KV_LEN.name})

    @cached_property
    def packs(self) -> bool:
        """Whether a tile may hold rows of several heads that share keys.

        The variant must treat all heads alike that share keys. The launcher chooses the number of
        heads; a tile has one head's rows after another's. Dropout depends on the head, and other
        lists than those of chosen blocks, and segments, are for tiles of one head.
        """
        listed = self.plan.listing and not self.plan.block_lists
        if listed or self.plan.dropout or (self.ragged and not self.of_cache):
            return False
        spec = self.plan.spec
        score = spec.score.traced if spec.score is not None else None
        parts = (spec.mask.traced, score, spec.normaliser.traced_sink)
        alike = {FloorDiv(H, GROUP): sympy.Integer(0)} if self.plan.block_lists else {}
        exprs = (part.sym.xreplace(alike) for part in parts if part is not None)
        return not any(H in expr.free_symbols for expr in exprs)

    @cached_property
    def call(self) -> tuple[str, ...]:
        """Values that are the same for the whole call."""
        return (
            *(("PACKED",) if self.packs else ()),
            *(("PAGE_SIZE", "SPLIT") if self.of_cache else ()),
            *("num_q_heads", "num_kv_heads", *self.lengths),
            *("num_tiles_m", "num_tiles", "heads_together", "lse_rows"),
            "scale" if self.plan.reads_scale else "qk_scale",
            *(("threshold", "kept_scale", "seed") if self.plan.dropout else ()),
            *self.plan.kernel_arguments.names,
            *(("tiles_ptr",) if self.plan.listing else ()),
            *(("tiles_width",) if self.of_lists else ()),
            *self.lists,
            *self.of_pages,
        )

    @property
    def of_lists(self) -> bool:
        """Whether each tile of packed sequences has a list of tiles of keys."""
        return self.of_sequences and self.plan.classifies

    @property
    def lengths(self) -> tuple[str, ...]:
        """The lengths that are the same for the whole call."""
        return () if self.of_sequences else ("q_len", "kv_len")

    @property
    def lists(self) -> tuple[str, ...]:
        """The list of tiles, if there is one."""
        if self.of_sequences:
            return ("list_ptr", *(("places_ptr",) if self.of_cache else ()))
        return ("segment_tiles_ptr",) if self.segments else ()

    @property
    def of_pages(self) -> tuple[str, ...]:
        """The integers that give the pages of a cache, and in how many parts its keys are."""
        return ("stride_places", "num_places", "num_splits") if self.of_cache else ()

    @cached_property
    def barriers(self) -> tuple[str, ...]:
        """Arrays of barriers: for queries, for keys and values, for the tiles handed over."""
        fused = ("kv_full", "kv_empty")
        steps = fused if self.shape.fused_kv_stages else ("k_full", "k_empty", "v_full", "v_empty")
        return ("q_full", "q_empty", *steps, "work_full", "work_empty")

    @cached_property
    def buffers(self) -> tuple[str, ...]:
        """Shared memory of producer and consumers."""
        hiding = ("hiding",) if self.hidden.keys else ()
        growth = self.growth if self.plan.normaliser == "softmax" else ()
        visits = ("entries",) * self.hands_visits
        columns = (column.tiles for column in self.handed.columns)
        return ("tiles", "barriers", "slots", *visits, *columns, *hiding, *growth)

    @cached_property
    def aggregates(self) -> dict[str, tuple[str, ...]]:
        """The fields of all aggregates, by parameter names; those of fields come last."""
        return {
            "call": tuple(name for name in self.call if name not in self.views),
            "work": self.work,
            "place": ("slots", "q_count"),
            "queries": self.queries,
            "sources": ("q_descs", "k_descs", "v_descs", *("counter_ptr",) * self.counts),
            "results": ("out_descs", *("out_ptr",) * self.ragged, "lse_ptr"),
            "buffers": self.buffers,
            "tiles": ("q_tiles", "k_tiles", "v_tiles", "out_tiles"),
            "barriers": self.barriers,
        }

    @property
    def tile(self) -> tuple[str, ...]:
        """What tells a consumer which tile of queries it computes."""
        return (*(("PACKED",) if self.packs and self.ragged else ()), "slots", "q_count")

    @cached_property
    def arguments(self) -> tuple[str, ...]:
        """The kernel's arguments ahead of the parameters'."""
        return (
            *self.descriptors,
            *(("out_ptr",) if self.ragged else ()),
            *("lse_ptr", "counter_ptr"),
            *self.lists,
            *self.sizes,
            "scale" if self.plan.reads_scale else "qk_scale",
            *(("threshold", "kept_scale") if self.plan.dropout else ()),
        )

    @cached_property
    def sizes(self) -> tuple[str, ...]:
        """The arguments that are integers."""
        tiles = () if self.ragged else ("num_tiles_m", "num_tiles")
        heads = ("num_q_heads", "num_kv_heads")
        return (*heads, *self.lengths, *tiles, "heads_together", "lse_rows", *self.of_pages)

    @cached_property
    def queries(self) -> tuple[str, ...]:
        """Values that a consumer computes once for its queries, for all of their scores."""
        return tuple(a.name for a in self.plan.code.scalars + self.plan.code.rows)

    @cached_property
    def score_reads(self) -> tuple[str, ...]:
        """The place and positions of a tile that the score function reads."""
        code = self.plan.code
        return self._read((code.score, *codes_of(code.columns, code.elements)))

    @property
    def scores_read_kv_idx(self) -> bool:
        """Whether the score, or a mask without bitmasks, reads the keys' positions themselves.

        Distances do not count, and a column bitmask has its own positions.
        """
        code = self.plan.code
        if not self.mask_code.bitmasks:
            return code.score_reads_kv_idx
        return "kv_idx" in read_by((*codes_of(code.columns, code.elements), code.score), DIALECT)

    @cached_property
    def mask_reads(self) -> tuple[str, ...]:
        """The place and positions of a tile that only the mask reads."""
        code = self.plan.code
        tables = (read for table in code.tables for read in table.codes)
        of_keys = (KV_LEN.name,) * (self.plan.checks_kv_len and self.of_sequences)
        names = self._read((*code.conditions, *codes_of(self.handed.others), *tables), *of_keys)
        return tuple(name for name in names if name not in self.score_reads)

    @cached_property
    def promise_reads(self) -> tuple[str, ...]:
        """The place and positions of a tile that the mask as it was written reads."""
        promise = self.plan.code.promise
        return self._read(promise.conditions, "q_idx") if promise is not None else ()

    @cached_property
    def rows_read(self) -> tuple[str, ...]:
        """The place and positions of a tile that `queries` read."""
        return self._read(codes_of(self.plan.code.scalars, self.plan.code.rows))

    @property
    def end_reads_batch(self) -> bool:
        """Whether the end of a tile reads its batch entry, apart from its address."""
        return "batch" in self._read((self.plan.code.shift, self.plan.code.sink))

    @cached_property
    def lengths_of_rows(self) -> tuple[str, ...]:
        """The sequence's numbers, and its parts of tensors, that the end of a tile reads."""
        read = self._read((self.plan.code.shift, self.plan.code.sink))
        return tuple(x for x in read if x in self.of_sequence or x in self.views)

    def _read(self, codes: Iterable[Code | None], *others: str) -> tuple[str, ...]:
        """The place, parts of tensors and positions that code reads; q_idx is from q_first."""
        found = read_by(codes).union(others)
        found |= {name for x in found.intersection(self.views) for name in self.views[x].reads}
        if "q_idx" in found:
            found |= {"q_first"}
        known = ("batch", "head", *(OF_SEQUENCE if self.of_sequences else ()), *self.views)
        return tuple(name for name in (*known, "q_first", "q_idx") if name in found)

    @property
    def work(self) -> tuple[str, ...]:
        """The numbers that the producer computes for a tile of queries."""
        online_max = ("online_max",) if self.plan.normaliser == "softmax" else ()
        return ("visits", *self.place, *self.runs, *self._num_full, *online_max)

    @property
    def slots(self) -> tuple[str, ...]:
        """Those of them that it hands over to the consumers."""
        own = (*self.runs, *self._num_full) if self.hands_visits else ()
        return tuple(name for name in self.work if name not in own)

    @property
    def _num_full(self) -> tuple[str, ...]:
        """The number of visits without a mask, where consumers have to know it."""
        return ("num_full",) * (self.plan.tiles.separated and not self.hands_visits)

    @property
    def place(self) -> tuple[str, ...]:
        """The numbers that give the position of a tile of queries."""
        ends = ("q_last",) if self.ragged else ()
        part = ("split", "first_visit") if self.of_cache else ()
        return ("batch", "head", "q_first", *ends, *self.of_sequence, *part)

    @cached_property
    def runs(self) -> tuple[str, ...]:
        """The numbers that give the tiles of keys to visit, and the full ones among them."""
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
        """Whether a consumer skips tiles of keys that its own queries do not see.

        That pays if a tile of queries is longer than a tile of keys. The producer then computes the
        visits of each consumer.
        """
        tiles = self.plan.tiles
        return self.shape.three_consumers and self.plan.masks and not tiles.listed and tiles.sorted

    @property
    def shares_lists(self) -> bool:
        """Whether tiles of several heads' rows lie within the queries of a list of blocks."""
        return bool(self.plan.block_lists) and self.packs

    @property
    def rests(self) -> bool:
        """Whether a consumer may have no queries in a list's last tile: 64 of 8 heads fill 8.

        Lists are of blocks of queries, and blocks of keys are tiles, for registers.
        """
        listing = self.plan.listing
        if not (isinstance(listing, ClassifiedTiles) and self.shape.three_consumers):
            return False
        return self.shares_lists and listing.rows >= listing.tile and not listing.elements

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
        """The names among q_first and q_last that `own_visits` read."""
        full = [end for run in self.plan.tiles.runs for end in (run.full_begin, run.full_end)]
        return self._ends_read((*full, *self._visits_from))

    @property
    def work_reads(self) -> frozenset[str]:
        """The names among q_first and q_last that the visits of a tile of queries read."""
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

        Otherwise tiles take equally long, and a program has tiles at a fixed stride. A window's
        tiles are shorter where the keys begin.
        """
        return self.of_sequences or self.plan.tiles.uneven or self.skips

    @property
    def shortest_last(self) -> bool:
        """Whether the shortest tiles of queries, of all heads, come after all others.

        They fill the time of programs that would wait for the last long tiles. With smaller tiles
        a group of heads has so many that little time is left; with lists and segments the short
        tiles are not known.
        """
        known = not (self.plan.listing or self.ragged)
        return known and self.shape.three_consumers and self.plan.bounds.longest_first != "even"

    @property
    def growth(self) -> tuple[str, ...]:
        """Buffers in which a softmax notes that weights have overflowed their range."""
        # Without overlapped tiles the barrier that frees a tile's slot says that it was checked.
        return ("votes", "overflowed", *(("checked",) if self.shape.overlapped_tiles else ()))

    @property
    def lowers_last(self) -> bool:
        """Whether the last step's weights are scaled down if they alone overflow the range.

        float16 has no range for that. For narrow heads the code costs more than it gains.
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

    @property
    def tells_parts(self) -> bool:
        """Whether a masked visit knows what of each 64 keys 64 queries see: nothing, some or all.

        Where masked steps have code of their own, they are told no more than that they are masked.
        """
        listing = self.plan.listing
        told = isinstance(listing, ClassifiedTiles) and listing.parts_told > 0
        whole = self.shape.halves == 1 and not self.splits_steps
        return told and whole and not (self.of_sequences or self.packs)

    @cached_property
    def gathered_reads(self) -> tuple[str, ...]:
        """The place and positions of a tile that such bits read."""
        code = self.plan.code
        return self._read((*code.conditions, *codes_of(self.handed.others)), "kv_len", "q_idx")

    @cached_property
    def hidden_reads(self) -> tuple[str, ...]:
        """The place and positions of a tile that column bitmasks read."""
        return tuple(
            n
            for n in self._read((*self.mask_code.bitmasks, *self.own_codes))
            if n != "q_idx" or n in self.mask_code.rows
        )

    @property
    def splits_steps(self) -> bool:
        """Whether masked steps have separate code: that pays if the special unit is busy."""
        return self.plan.masks and self.plan.code.uses_tanh and self.shape.splits

    @cached_property
    def descriptors(self) -> tuple[str, ...]:
        """The kernel's tensor descriptors."""
        qk, v = self.plan.qk_parts, self.plan.v_parts
        tensors = (("q", qk), ("k", qk), ("v", v), ("out", v))
        return tuple(f"{name}_desc{part.suffix}" for name, parts in tensors for part in parts)
