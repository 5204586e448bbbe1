"""HopperBackward: further variables of the Gluon template of the backward pass."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

from flashgen.kernels.backward_hopper.learned import HopperLearned
from flashgen.kernels.backward_hopper.pairs import variable_of
from flashgen.kernels.backward_hopper.split import BLOCK_M, CALL, CONSUMERS
from flashgen.kernels.backward_hopper.visits import HopperVisits
from flashgen.kernels.backward_hopper.work import TileWork, longest_visit, tile_work
from flashgen.kernels.views import OF_SEQUENCE, GluonView
from flashgen.plan.backward import PAIR
from flashgen.plan.code import codes_of
from flashgen.plan.head_dims import Segment, halved
from flashgen.plan.hidden import HiddenRows
from flashgen.plan.mask_code import (
    Condition,
    MaskCode,
    columns_end,
    least_comparisons,
    mask_code,
    rows_end,
    with_promise,
)
from flashgen.plan.promise import UNORDERED
from flashgen.symbolic.hoisting import Assignment
from flashgen.symbolic.printer import triton_code
from flashgen.symbolic.printer.code import Code, gathered_by, read_by
from flashgen.symbolic.printer.dialects import Gluon
from flashgen.symbolic.varies_over import is_of_one_type
from flashgen.symbols import KV_IDX, KV_LEN, Q_FIRST, Q_IDX, Q_LEN

#: Distances are what scores read most; here queries are columns.
DIALECT = Gluon({Q_FIRST - Q_IDX: "-_query_columns(scores, 0, gl.float32)"})


@dataclass(frozen=True)
class HopperBackward(HopperLearned):
    """The aggregates that the kernel's functions pass to one another, by their fields.

    Attributes:
        backward: the backward pass.
        of_sequences: whether of packed sequences, whose tiles of keys come from a list.
        views: the parts of tensors that a sequence has: see `views_in_gluon`.
    """

    of_sequences: bool = False
    views: Mapping[str, GluonView] = field(default_factory=dict)

    @property
    def hidden(self) -> HiddenRows:
        """Rows that the kernel clears: behind a sequence's last row is another sequence."""
        hidden = self.backward.plan.hidden
        if not self.of_sequences:
            return hidden
        names = {"kv_idx": "key_rows", "q_idx": "query_rows"}
        of_keys, of_queries = (
            triton_code(idx < length, names) for idx, length in ((KV_IDX, KV_LEN), (Q_IDX, Q_LEN))
        )
        return replace(
            hidden,
            keys=(*hidden.keys, of_keys),
            queries=(*hidden.queries, of_queries),
            names=hidden.names | {KV_LEN.name, Q_LEN.name},
        )

    @property
    def checks_q_len(self) -> bool:
        """Whether a masked tile compares its queries with q_len."""
        return self.of_sequences or self.backward.checks_q_len

    @property
    def why_not(self) -> str:
        """Why a plan has no such kernel; ``""`` if it has one."""
        plan, backward = self.backward.plan, self.backward
        if plan.products and self.split:
            return "its weights are products of features, and two kernels split the pass"
        if plan.itemsize != 2:
            return f"{plan.torch_dtype}: its tiles are of 16-bit elements"
        if max(plan.qk_head_dim, plan.v_head_dim) > max(BLOCK_M):
            return f"its tiles have {max(BLOCK_M)} columns at most"
        if plan.dropout and self.has_roles and self.text.score_gradient:
            return "with dropout and a score gradient no consumer has all factors"
        if backward.leaves_products_out:
            return "its score function leaves the products out"
        return self.why_not_inputs(self.text)

    @property
    def counts_in_floats(self) -> bool:
        """Whether derivatives by inputs only add and multiply, so that positions may be float32."""
        partials = (partial.expr for partial in self.input_partials if partial is not None)
        return all(map(is_of_one_type, partials)) and not self.input_gradient_lines

    @property
    def grad_q_by(self) -> str:
        """What a consumer's share of dq is a half of: ``"queries"``, ``"columns"`` or ``"keys"``.

        A tile of 64 x 64 is the smallest product: there each consumer computes the part of dq from
        its own keys.
        """
        if self.block_m == 128:
            return "queries"
        return "columns" if self.width == 128 else "keys"

    @property
    def consumers_meet(self) -> bool:
        """Whether one consumer waits for results of the other."""
        return self.has_roles or not (self.split or self.in_turns or self.grad_q_by == "keys")

    @cached_property
    def visits(self) -> HopperVisits:
        """The tiles of queries that a tile of keys visits."""
        tiles = self.backward.q_tiles
        return HopperVisits(tiles, "q", masks=self.masks, differ=self.masks_queries)

    @property
    def values_ahead(self) -> bool:
        """Whether the next tile's values have a buffer of their own, as its keys do."""
        return (self.columns <= 96 or self.in_turns) and not self.split

    @property
    def grad_out_apart(self) -> bool:
        """Whether the output's gradient has its own barrier, for which scores do not wait.

        With it an H200 took 1 to 4% longer at d=64, and 1 to 2% less at d=128.
        """
        return self.width == 128 and not self.split

    @property
    def starts_dv_early(self) -> bool:
        """Whether registers hold dv's operand, the weights, beside the operands of ds.

        With dropout they do not: at d=128 an H200 took 21% less time without the early start.
        """
        return self.block_m == 64 and not self.backward.plan.dropout

    @property
    def shares(self) -> bool:
        """Whether all programs share the last tiles of keys: if all queries see all keys.

        All tiles then take the same time, and in the last round most programs could be idle. For a
        window, whose tiles are short, sharing costs more than it gains.
        """
        alike = not (self.masks_queries or self.of_sequences)
        return alike and not (self.split or self.text.input_gradients)

    @property
    def orders_heads(self) -> bool:
        """Whether the longest tiles come first over several heads, in a single pass.

        Tiles of packed sequences differ by the sequences' lengths, whatever the mask is.
        """
        return (self.of_sequences or self.backward.q_tiles.uneven) and not self.split

    @cached_property
    def divides(self) -> bool:
        """Whether tiles of keys of the last heads may be divided among programs: see `_divided`.

        If many queries see some tiles and few see others, a program that takes a long tile last
        makes all others wait. For packed sequences `_order_tiles` decides which tiles are divided.
        """
        if self.of_sequences or not self.orders_heads:
            return self.of_sequences
        return bool(self.longest_visit)

    @property
    def whole_gradients(self) -> tuple[str, ...]:
        """The gradients that some program, or consumer, has whole: the others are in parts."""
        return () if self.in_turns else ("grad_k", "grad_v")

    @property
    def floats_of_a_part(self) -> int:
        """Partial gradients of the keys and values of a part, or of one consumer's share of it."""
        return (128 if self.in_turns else 256) * self.columns

    @cached_property
    def longest_visit(self) -> str:
        """The queries that visit the longest tile of keys, in the launcher; empty if not known."""
        tiles = self.visits.tiles
        if self.backward.plan.block_lists:
            return str(Q_LEN)  # of a block that all lists have, as the first one often is
        if tiles.listed:
            return ""
        last = self.backward.q_bounds.longest_first == "last" and tiles.from_key_0
        return str(Q_LEN) if last else longest_visit(self.backward)

    @cached_property
    def queries_outside(self) -> bool:
        """Whether all query heads of a group visit a tile of queries before the next tile.

        Programs with tiles of the same head of keys then read the same queries at about the same
        time, from L2. Only if neither visits nor what is computed once for them differ by head.
        """
        once = codes_of(self.text.lines_of_head)
        codes = (*self.visits.bounds, *once, self.backward.gradient_scale)
        listing = self.backward.plan.listing
        by_head = listing is not None and listing.by_head
        return self.of_sequences and not by_head and "head" not in read_by(codes)

    @cached_property
    def work(self) -> TileWork:
        """How many tiles of queries a tile of keys of a sequence visits, nearly."""
        return tile_work(self.backward)

    @cached_property
    def call(self) -> tuple[str, ...]:
        """Values that are the same for the whole call."""
        ordered = ("heads_together",) * self.orders_heads
        divided = ("num_whole", "num_parts", "parts_together") * self.divides
        shared = ("num_tiles", "num_shared") * self.shares
        dropping = ("threshold", "kept_scale", "seed") * self.backward.plan.dropout
        names = (*self.backward.both_arguments.names, *self.listed)
        if self.of_sequences:
            same = tuple(name for name in CALL if name not in ("q_len", "kv_len"))
            listed = ("num_tiles_n", "parts_of_head", "list_ptr")
            return (*same, *listed, *ordered, "num_ordered", *names)
        return (*CALL, *ordered, *divided, *shared, *dropping, *names)

    @property
    def listed(self) -> tuple[str, ...]:
        """The lists of tiles; of packed sequences, with how many numbers each has room for."""
        reads = self.visits.reads
        return (*reads, *("tiles_width",) * (self.of_sequences and bool(reads)))

    @property
    def of_sequence(self) -> tuple[str, ...]:
        """The numbers of a tile's sequence that code of a tile may read."""
        return OF_SEQUENCE

    @property
    def work_tile(self) -> tuple[str, ...]:
        """The fields that identify a program's tile of keys, or its part of one."""
        of_tile = ("batch", "kv_head", "kv_first")
        if self.of_sequences:
            lengths = ("q_start", "q_len", "kv_start", "kv_len", "room", "rows_start")
            turned = ("turned",) * self.queries_outside
            slot = ("slot",) * self.visits.tiles.listed
            return (*of_tile, *lengths, *slot, "first_member", "end_member", "part", *turned)
        return (*of_tile, *("part", "num_parts") * self.divides)

    @property
    def results(self) -> tuple[str, ...]:
        """The results that the kernel writes."""
        sums = [*self.learned]
        sums += ["grad_k_ptr", "grad_v_ptr"] * self.of_sequences
        of_queries = () if self.split else ("grad_q",)
        names = (*of_queries, *self.whole_gradients, *("parts",) * self.divides)
        descriptors = "descs" if self.segmented else "desc"
        return (*(f"{name}_{descriptors}" for name in names), *sums)

    @property
    def learned_reads_tile(self) -> bool:
        """Whether an input gradient depends on the elements of such a tile."""
        return bool(self.tiled) and self.input_gradients_read(variable_of(self.tiled))

    @property
    def may_skip(self) -> bool:
        """Whether a call may leave out what is learned, as of tensors without ``requires_grad``.

        That is another kernel, which Triton compiles for the first such call.
        """
        return bool(self.text.input_gradients) and not (self.split or self.of_sequences)

    @property
    def arrives_in_ds(self) -> bool:
        """Whether such tiles arrive in buffers of ds, of a tensor that is passed as declared."""
        return self.tiled_in_ds and self.tiled_itemsize == 2

    @property
    def cleared(self) -> tuple[str, ...]:
        """Pointers to gradients of pairs, for whose hidden tiles the producer stores zeros.

        Where it does not know these tiles, the launcher clears all of the gradient.
        """
        return tuple(f"{item.variable}_ptr" for item in self.pairs) * self.visits.splits

    @cached_property
    def descriptors(self) -> tuple[str, ...]:
        """The parameters of the kernel that are descriptors, in their order."""
        of_queries, of_parts = ("grad_q",) * (not self.split), ("parts",) * self.divides
        results = (*of_queries, *self.whole_gradients, *of_parts)
        names = ("q", "k", "v", "grad_out", "rows", *results)
        return tuple(x for name in names for x in self._segments.get(name, (f"{name}_desc",)))

    @cached_property
    def descriptors_of_segments(self) -> dict[str, tuple[str, ...]]:
        """Where columns are in segments, the descriptors that each tuple holds."""
        return {f"{name}_descs": descs for name, descs in self._segments.items()}

    @cached_property
    def _segments(self) -> dict[str, tuple[str, ...]]:
        if not self.segmented:
            return {}
        of = {**dict.fromkeys(("q", "k", "grad_k"), self.qk_parts)}
        of |= dict.fromkeys(("v", "grad_out", "grad_v"), self.v_parts)
        found = {name: tuple(f"{name}_desc{x.suffix}" for x in parts) for name, parts in of.items()}
        for name in ("grad_q",) * (not self.split) + ("parts",) * self.divides:
            found[name] = tuple(f"{name}_desc_{width}" for width in self.sums_widths)
        return found

    @cached_property
    def sums_widths(self) -> tuple[int, ...]:
        """The widths of segments of sums in memory: at most 64 columns, what registers hold."""
        of_keys = (*self.qk_parts, *self.v_parts) if self.shares or self.divides else self.qk_parts
        return tuple(sorted({min(part.width, 64) for part in of_keys}, reverse=True))

    @property
    def grad_q_sums(self) -> tuple[int, ...]:
        """For each consumer the sums that its columns of dq are added to, in `sums_widths`."""
        return self.qk_sums if len(self.qk_parts) == CONSUMERS else self.qk_sums * CONSUMERS

    @property
    def qk_sums(self) -> tuple[int, ...]:
        """The sums that segments of the gradients of q and k are added to."""
        return self._sums_of(self.qk_parts)

    @property
    def v_sums(self) -> tuple[int, ...]:
        """The sums that segments of the gradient of v are added to."""
        return self._sums_of(self.v_parts)

    @property
    def sums_of_qk(self) -> tuple[tuple[int, int], ...]:
        """(first column, columns) of each segment of sums for q and k."""
        return halved(self.qk_parts)

    @property
    def sums_of_v(self) -> tuple[tuple[int, int], ...]:
        """(first column, columns) of each segment of sums for v."""
        return halved(self.v_parts)

    def _sums_of(self, parts: tuple[Segment, ...]) -> tuple[int, ...]:
        numbers = {width: number for number, width in enumerate(self.sums_widths)}
        return tuple(numbers[min(part.width, 64)] for part in parts)

    def input_gradients_read(self, name: str) -> bool:
        """Whether an input gradient depends on this position."""
        return name in read_by((*self.input_partials, *codes_of(self.input_gradient_lines)))

    @cached_property
    def input_gradient_lines(self) -> tuple[Assignment, ...]:
        """The values of a tile of queries that derivatives by inputs read."""
        names = self._lines_read(self.input_partials)
        return tuple(line for line in self.text.lines_of_tile if line.name in names)

    @cached_property
    def keys(self) -> tuple[str, ...]:
        """Values that a consumer computes once for its keys, or once a head, for all scores."""
        backward = self.backward
        code = self.text.code
        found = [] if self.split else ["head_row", "k_number"]
        if self.reads_kv_idx:
            found.append("kv_idx")
        if not backward.plan.reads_scale:
            found.append("qk_scale")
        if backward.gradient_scale:
            found.append("head_scale")
        read = read_by(self._codes).union(("qk_scale",) * code.scaled, self._reads_promise)
        return (*found, *(line.name for line in self.text.lines_of_head if line.name in read))

    @property
    def reads_kv_idx(self) -> bool:
        """Whether positions of keys are read."""
        lines = codes_of(self.text.lines_of_head)
        promised = self.text.code.promise is not None
        return promised or self.tiled_in_ds or "kv_idx" in read_by((*self._codes, *lines))

    @cached_property
    def conditions(self) -> tuple[Code, ...]:
        """The conditions of the mask: all hold for a visible pair."""
        return tuple(condition for condition, _ in self._conditions)

    @cached_property
    def mask_code(self) -> MaskCode:
        """Those conditions, pair by pair or by column bitmasks."""
        code = self.text.code
        rows = ("kv_idx", *(line.name for line in (*code.columns, *code.masked)))
        least = least_comparisons(self.block_m, scored=bool(code.score))
        return mask_code(self._conditions, "q_idx", rows, least=least, tables=code.bits)

    @property
    def promised_mask_code(self) -> MaskCode:
        """All column bitmasks: the mask's, and those of the mask as it was written."""
        return with_promise(self.mask_code, "kv_idx", self.text.code.promise)

    @cached_property
    def _conditions(self) -> tuple[Condition, ...]:
        """Each condition with its column bitmask."""
        of_queries = (columns_end("q"),) * self.checks_q_len
        of_keys = (rows_end("kv"),) * self.backward.checks_kv_len
        code = self.text.code
        return (*of_queries, *of_keys, *zip(code.conditions, code.bitmasks, strict=True))

    @property
    def masks(self) -> bool:
        """Whether a masked tile evaluates any condition."""
        return bool(self.conditions)

    @property
    def masks_queries(self) -> bool:
        """Whether a mask depends on the tile of queries: the end of the keys alone does not."""
        return self.checks_q_len or bool(self.text.code.conditions)

    @property
    def changes_scores(self) -> bool:
        """Whether the softmax reads anything but the raw products."""
        return self.masks or bool(self.text.code.score) or bool(self.partials)

    @cached_property
    def mask_lines(self) -> tuple[Assignment, ...]:
        """Assignments of a tile of queries that conditions alone read."""
        return tuple(a for a in self.text.lines_of_tile if a.name not in self._score_names)

    @cached_property
    def score_lines(self) -> tuple[Assignment, ...]:
        """Assignments of a tile of queries that the score, or its derivative, reads."""
        return tuple(a for a in self.text.lines_of_tile if a.name in self._score_names)

    @property
    def scores_read_q_idx(self) -> bool:
        """Whether the score reads the position of each query."""
        return "q_idx" in read_by((*self._score_codes, *codes_of(self.score_lines)))

    @property
    def shift_reads_positions(self) -> bool:
        """Whether the rows' shift of scores reads positions other than as distances."""
        return "offs_m" in read_by((self.text.code.shift,), DIALECT)

    @property
    def masks_read_q_idx(self) -> bool:
        """Whether the mask reads the position of each query, pair by pair."""
        return "q_idx" in read_by((*self.mask_code.pairs, *codes_of(self.mask_lines)))

    @cached_property
    def gathers(self) -> tuple[int, ...]:
        """The numbers of dimensions that tensors are indexed by."""
        lines = codes_of(self.text.lines_of_head)
        codes = (*self._codes, *lines, *self.visits.bounds, self.backward.gradient_scale)
        of_hidden = self.backward.plan.hidden.gathers
        of_pairs = (len(PAIR),) * self.tiled_in_ds
        return tuple(sorted({*gathered_by(codes), *of_hidden, *of_pairs}))

    @cached_property
    def _score_codes(self) -> tuple[Code | None, ...]:
        text, code = self.text, self.text.code
        lines = codes_of(code.elements, code.distances)
        partials = (item.partial for item in self.partials)
        return (*lines, code.score, text.score_gradient, code.shift, *partials)

    @cached_property
    def _codes(self) -> tuple[Code | None, ...]:
        """All code that is computed for a tile."""
        lines = codes_of(self.text.lines_of_tile)
        promise = self.text.code.promise
        of_promise = promise.conditions if promise is not None else ()
        return (*self._score_codes, *self.conditions, *lines, *self.input_partials, *of_promise)

    @property
    def _reads_promise(self) -> tuple[str, ...]:
        return (UNORDERED,) if self.text.code.promise is not None else ()

    @cached_property
    def _score_names(self) -> frozenset[str]:
        """Lines of a tile that the score reads."""
        return self._lines_read(self._score_codes)

    def _lines_read(self, codes: Iterable[Code | None]) -> frozenset[str]:
        """Lines of a tile that these read, by others or themselves."""
        lines = {line.name: line.code for line in self.text.lines_of_tile}
        found: set[str] = set()
        while new := (read_by(codes) & lines.keys()) - found:
            found |= new
            codes = [lines[name] for name in new]
        return frozenset(found)
