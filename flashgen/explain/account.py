"""Account: the data that explain shows about one variant and one call, in every output form.

Plain data: numbers, text, and tuples of them, in stated units. `flashgen.explain.document` writes
it as JSON and reads it again.
"""

from __future__ import annotations

from dataclasses import dataclass

from flashgen.config import KernelConfig
from flashgen.explain.picture import Picture


@dataclass(frozen=True)
class Call:
    """The call that is accounted for.

    Attributes:
        batch: entries.
        num_q_heads, num_kv_heads: of each.
        q_len, kv_len: queries and keys of each.
        params: what parameters are taken to be, in words.
    """

    batch: int
    num_q_heads: int
    num_kv_heads: int
    q_len: int
    kv_len: int
    params: tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Run:
    """One run of keys that the tile of queries q_first to q_last visits, as formulas.

    Attributes:
        begin, end: some of the queries see keys from the one to before the other.
        full_begin, full_end: all of them see these.
        condition: when the run exists at all; ``""`` for always.
    """

    begin: str
    end: str
    full_begin: str
    full_end: str
    condition: str


@dataclass(frozen=True)
class MaskAccount:
    """The mask, and what was derived from it.

    Attributes:
        label: how the user wrote it.
        conditions: a key is seen where all of these hold; none for a mask that hides nothing.
        runs: the keys that a tile of queries visits; none where tiles are listed.
        listed: where a table of blocks tells the tiles: when one is visited, and when unmasked.
        tables: what the launcher makes for the bounds, in words.
        notes: where tiles are visited that the mask does not show, and why.
        rows_can_be_empty: whether a query may see no key.
        share: of a head's elements those that are visible.
        rows_counted: the queries whose visible keys were counted, where not all of them were.
        picture: what the kernel does with each tile, in cells of several where there are many.
        tiles: of a head, how many the kernel skips, masks and does not mask.
    """

    label: str
    conditions: tuple[str, ...]
    runs: tuple[Run, ...]
    listed: tuple[str, ...]
    tables: tuple[str, ...]
    notes: tuple[str, ...]
    rows_can_be_empty: bool
    share: float
    rows_counted: int | None
    picture: Picture
    tiles: dict[str, int]


@dataclass(frozen=True)
class Buffer:
    """A buffer in shared memory.

    Attributes:
        name: the buffer's.
        meaning: what it is, in plain words.
        formula: its bytes.
        bytes: the same as a number, with what is skipped before it.
    """

    name: str
    meaning: str
    formula: str
    bytes: int


@dataclass(frozen=True)
class Rejection:
    """A configuration that is not tried, and why."""

    config: KernelConfig
    reason: str


@dataclass(frozen=True)
class Kernel:
    """A kernel of the module, with the configuration that a build publishes.

    Attributes:
        form: ``"hopper"`` or ``"portable"``.
        config: the configuration.
        chosen: on what grounds, in words.
        shared: bytes of shared memory of a block.
        limit: what the target gives one.
        phase: of the kernel, the one that needs so much.
        buffers: those of this phase; they add up to `shared`.
        candidates: how many configurations there were to choose from, this one among them.
        rejected: those that were looked at besides, and rejected.
        seconds: of the call, by the model that ranks candidates; None where the model does not see
            which tiles are visited.
        waits_for: what the model says the kernel waits for; ``""`` where it does not say.
    """

    form: str
    config: KernelConfig
    chosen: str
    shared: int
    limit: int
    phase: str
    buffers: tuple[Buffer, ...]
    candidates: int
    rejected: tuple[Rejection, ...]
    seconds: float | None
    waits_for: str

    @property
    def looked_at(self) -> int:
        """Configurations that were rejected, or left to choose from."""
        return len(self.rejected) + self.candidates


@dataclass(frozen=True)
class Work:
    """The work of one way to compute this call.

    Attributes:
        name: what it is called.
        said: what it does, in words.
        tile: queries and keys of a tile; ``""`` for none.
        shared: bytes of shared memory of its tiles, by the textbook's count; None for none.
        problem: why the target cannot do it; ``""`` where it can.
        flops: of the products.
        exponentials: of the softmax.
        l2_read, l2_written: bytes between SMs and L2.
        dram_read, dram_written: bytes between L2 and DRAM.
        intensity: FLOPs for a byte of DRAM.
        seconds: what each unit of the target takes by itself, at its peak rate.
        bound: the unit that takes longest: the roofline.
    """

    name: str
    said: str
    tile: str
    shared: int | None
    problem: str
    flops: int
    exponentials: int
    l2_read: int
    l2_written: int
    dram_read: int
    dram_written: int
    intensity: float
    seconds: dict[str, float]
    bound: str

    @property
    def roofline(self) -> float:
        """Seconds that it takes at least."""
        return self.seconds[self.bound]


@dataclass(frozen=True)
class TrainingStep:
    """Both passes: FLOPs of products, bytes that SMs read and write."""

    name: str
    flops: int
    bytes: int


@dataclass(frozen=True)
class Measured:
    """A measured rate of a kernel, in the call that it was tuned on.

    Attributes:
        form: the kernel.
        gpu: as its driver names it.
        triton: the version that compiled it.
        length: queries and keys.
        batch, heads: of the call.
        ms: milliseconds of a call.
        tflops: over the elements that the mask shows.
        roofline_ms: the least that the call takes on the target.
        bound: the unit that sets it.
        share: of the roofline, what is reached.
    """

    form: str
    gpu: str
    triton: str
    length: int
    batch: int
    heads: int
    ms: float
    tflops: float
    roofline_ms: float
    bound: str
    share: float


@dataclass(frozen=True)
class Account:
    """One variant, one call, one target.

    Attributes:
        variant: its name.
        file: where it is declared.
        target: the architecture.
        gpu: the product of it whose rates are taken.
        dtype: of q, k and v.
        head_dims: of queries and keys, and of values.
        call: what is accounted for.
        crossover: FLOPs for a byte of DRAM from which products take longer than memory.
        mask: what is visible, and what the kernel visits.
        kernels: those that the module holds for the target, the one that runs first.
        without: why the module has no Gluon kernel for a target that could; ``""`` otherwise.
        works: other ways to compute the call, then this module's kernels.
        training: what a step moves, forward and backward.
        measured: rates that were measured, of each kernel at each length.
        remarks: what is not in the account.
    """

    variant: str
    file: str
    target: str
    gpu: str
    dtype: str
    head_dims: tuple[int, int]
    call: Call
    crossover: float
    mask: MaskAccount
    kernels: tuple[Kernel, ...]
    without: str
    works: tuple[Work, ...]
    training: tuple[TrainingStep, ...]
    measured: tuple[Measured, ...]
    remarks: tuple[str, ...]
