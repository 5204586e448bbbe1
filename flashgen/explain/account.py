"""Account: the data that explain shows about one variant and one call, in every output form.

Plain data: numbers, text, and tuples of them, in stated units. `flashgen.explain.document` writes
it as JSON and reads it again.
"""

from __future__ import annotations

from dataclasses import dataclass

from flashgen.config import KernelConfig
from flashgen.explain.picture import Picture


class Timed:
    """What takes each unit of the target some time.

    Attributes:
        seconds: the time of each unit by itself, at its peak rate.
        bound: the unit that takes longest.
    """

    seconds: dict[str, float]
    bound: str

    @property
    def roofline(self) -> float:
        """The least time, in seconds."""
        return self.seconds[self.bound]


@dataclass(frozen=True)
class Call:
    """The call that the account is about.

    Attributes:
        batch: batch entries.
        num_q_heads, num_kv_heads: heads of a batch entry.
        q_len, kv_len: queries and keys of a head.
        params: the assumed values of parameters, in words.
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
        begin, end: the half-open run of keys that some of the queries see.
        full_begin, full_end: the half-open run of keys that all of the queries see.
        condition: when the run exists at all; ``""`` for always.
    """

    begin: str
    end: str
    full_begin: str
    full_end: str
    condition: str


@dataclass(frozen=True)
class MaskAccount:
    """The mask, and the bounds derived from it.

    Attributes:
        label: how the user wrote it.
        conditions: a key is visible if all of these hold; none for a mask that hides nothing.
        runs: the keys that a tile of queries visits; none where tiles are listed.
        listed: if a block table decides: when a tile is visited, and when it is unmasked.
        decided: if only the data knows: when a tile may be visited, and when it is unmasked, unless
            its elements decide.
        tables: the tables that the launcher makes for the bounds, in words.
        notes: which tiles without a visible key are visited, and why; or which part of the mask
            lists of tiles solve, and which algebra does.
        rows_can_be_empty: whether a query may see no key.
        share: the visible share of a head's elements.
        rows_counted: the queries whose visible keys were counted, if not all were.
        picture: what the kernel does with each tile; a cell may stand for several tiles.
        tiles: the numbers of a head's tiles that the kernel skips, masks and does not mask.
    """

    label: str
    conditions: tuple[str, ...]
    runs: tuple[Run, ...]
    listed: tuple[str, ...]
    decided: tuple[str, ...]
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
        name: the buffer's name.
        meaning: its contents, in plain words.
        formula: its bytes.
        bytes: the same as a number, with the padding before it.
    """

    name: str
    meaning: str
    formula: str
    bytes: int


@dataclass(frozen=True)
class Rejection:
    """A rejected configuration, and why."""

    config: KernelConfig
    reason: str


@dataclass(frozen=True)
class Kernel:
    """A kernel of the module, with the configuration that a build publishes.

    Attributes:
        form: ``"hopper"`` or ``"portable"``.
        config: the configuration.
        chosen: why it was chosen, in words.
        shared: bytes of shared memory of a block.
        limit: the most that the target allows.
        phase: the phase of the kernel that needs `shared` bytes.
        buffers: the buffers of this phase; they add up to `shared`.
        candidates: the number of configurations to choose from, this one included.
        rejected: the configurations that were rejected.
        seconds: the time of the call by the model that ranks candidates; None if the model does not
            know which tiles are visited.
        waits_for: what the kernel waits for, by the model; ``""`` if unknown.
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
class Work(Timed):
    """The work of one way to compute this call.

    Attributes:
        name: its name.
        said: what it does, in words.
        tile: queries and keys of a tile; ``""`` for none.
        shared: bytes of shared memory of its tiles, by the textbook's count; None for none.
        problem: why the target cannot do it; ``""`` if it can.
        flops: FLOPs of the products.
        exponentials: exponentials of the softmax.
        l2_read, l2_written: bytes between SMs and L2.
        dram_read, dram_written: bytes between L2 and DRAM.
        intensity: FLOPs for a byte of DRAM.
        seconds: the time of each unit of the target by itself, at its peak rate.
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


@dataclass(frozen=True)
class TrainingStep:
    """Forward and backward pass: FLOPs of products, bytes that SMs read and write."""

    name: str
    flops: int
    bytes: int


@dataclass(frozen=True)
class Measured:
    """A measured rate of a kernel, in the call that it was tuned on.

    Attributes:
        form: the kernel.
        gpu: the GPU's name by its driver.
        triton: the version that compiled it.
        length: queries and keys.
        batch, heads: batch entries and heads of the call.
        ms: milliseconds of a call.
        tflops: TFLOP/s on the visible elements.
        roofline_ms: the least that the call takes on the target.
        bound: the unit that sets the roofline.
        share: the reached share of the roofline.
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
class Subject:
    """What an account is about: one variant, one call, one target.

    Attributes:
        variant: its name.
        file: where it is declared.
        target: the architecture.
        gpu: the GPU of this architecture whose rates are used.
        dtype: the dtype of q, k and v.
        head_dims: head dimensions of queries and keys, and of values.
        call: the call.
    """

    variant: str
    file: str
    target: str
    gpu: str
    dtype: str
    head_dims: tuple[int, int]
    call: Call


@dataclass(frozen=True)
class Account(Subject):
    """The account of a dense call.

    Attributes:
        crossover: FLOPs for a byte of DRAM from which products take longer than memory.
        mask: what is visible, and what the kernel visits.
        kernels: those that the module holds for the target, the one that runs first.
        without: why the module has no Gluon kernel, for a target that could run one; else ``""``.
        works: other ways to compute the call, then this module's kernels.
        training: FLOPs and bytes of a training step, forward and backward.
        measured: the measured rates of each kernel at each length.
        remarks: what the account leaves out.
        weights: how linear attention makes them, and which algorithm it has and why; ``""`` for
            weights of scores.
    """

    crossover: float
    mask: MaskAccount
    kernels: tuple[Kernel, ...]
    without: str
    works: tuple[Work, ...]
    training: tuple[TrainingStep, ...]
    measured: tuple[Measured, ...]
    remarks: tuple[str, ...]
    weights: str = ""
