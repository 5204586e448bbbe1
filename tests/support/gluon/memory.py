"""Shared memory, global memory, and the barriers that say what is in them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import torch

from support.gluon.machine import Written, pause, program, role
from support.gluon.values import Block, Layout, of


class Shared:
    """A view of shared memory."""

    def __init__(self, data: torch.Tensor) -> None:
        self.data = data

    @property
    def handle(self) -> Shared:
        """Itself."""
        return self

    @property
    def shape(self) -> list[int]:
        """Of the view."""
        return list(self.data.shape)

    @functools.cached_property
    def addresses(self) -> range:
        """From its first byte to its last."""
        sides = zip(self.data.shape, self.data.stride(), strict=True)
        last = sum((size - 1) * stride for size, stride in sides)
        first = self.data.data_ptr()
        return range(first, first + (last + 1) * self.data.element_size())

    @property
    def dtype(self) -> torch.dtype:
        """Of its elements."""
        return self.data.dtype

    def index(self, number: Any) -> Shared:
        """One of the first dimension."""
        number = int(number)
        assert 0 <= number < self.shape[0], f"buffer {number} of {self.shape[0]}"
        return Shared(self.data[number])

    def slice(self, start: int, length: int, dim: int = 0) -> Shared:
        """Some of a dimension."""
        return Shared(self.data.narrow(dim, start, length))

    def permute(self, order: Sequence[int]) -> Shared:
        """Dimensions in another order."""
        return Shared(self.data.permute(*order))

    def reshape(self, shape: Sequence[int]) -> Shared:
        """Row-major, of the same memory."""
        return Shared(self.data.view(list(shape)))

    def reinterpret(self, dtype: torch.dtype, shape: Sequence[int], layout: Layout) -> Shared:
        """The same bytes as something else: what was in them means nothing any more."""
        data = self.data.reshape(-1).view(dtype)
        assert data.numel() == torch.Size(shape).numel(), f"{self.shape} as {dtype} {shape}"
        return Shared(data.view(list(shape)))

    def load(self, layout: Layout | None = None) -> Block:
        """What is in it; somebody has to have written whole numbers: NaN shows by itself."""
        if not self.data.is_floating_point():
            is_there = self.data != nobodys(self.data.dtype)
            assert is_there.all(), "read before it was written to"
        return Block(self.data.clone())

    def store(self, value: Block) -> None:
        """Puts a block there: TMA and matrix units see it after a fence.

        Where two roles write the same, as both clear the same rows, the fence of one will do.
        """
        assert value.shape == self.shape, f"{value.shape} into {self.shape}"
        assert value.data.dtype == self.data.dtype, f"{value.data.dtype} into {self.data.dtype}"
        is_there = torch.equal(_bits(self.data), _bits(value.data))
        there = {w for w in _unfenced() if w.addresses == self.addresses}
        if is_there:
            role().unfenced |= there  # whose fence it is does not matter
        else:
            self.data.copy_(value.data)
            role().unfenced -= there
            role().unfenced.add(Written(self.addresses))
        pause()


def _unfenced() -> set[Written]:
    return {w for one in program().roles for w in one.unfenced if not w.fenced}


def _bits(data: torch.Tensor) -> torch.Tensor:
    return data.view(_OF_SIZE[data.element_size()])


_OF_SIZE = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def nobodys(dtype: torch.dtype) -> Any:
    """What memory holds that nobody has written to: NaN, or an odd number.

    Not -1, which `max(0, x)` would hide.
    """
    if dtype.is_floating_point:
        return torch.nan
    return dtype == torch.bool or torch.iinfo(dtype).max // 3 * 2


def poison(data: torch.Tensor) -> None:
    """Fills with what gives itself away."""
    data.fill_(nobodys(data.dtype))


def fence() -> None:
    """What this role has written can be seen by TMA and matrix units."""
    for written in role().unfenced:
        written.fenced = True
    role().unfenced.clear()


def seen(shared: Shared) -> torch.Tensor:
    """What TMA and matrix units find in shared memory."""
    mine = shared.addresses
    for addresses in (written.addresses for written in _unfenced()):
        apart = mine.stop <= addresses.start or addresses.stop <= mine.start
        assert apart, "written to, and read without a fence"
    return shared.data


class Barrier:
    """An mbarrier: a phase ends when all have arrived, and all bytes that were announced."""

    def __init__(self) -> None:
        self.count = self.pending = self.bytes = self.phase = 0
        self.copies: list[Callable[[], None]] = []  # that wait for somebody to want them

    def change(self, arrivals: int, expected: int) -> None:
        """Of what the phase still needs."""
        assert self.count, "a barrier without a count"
        self.pending -= arrivals
        self.bytes += expected
        assert self.pending >= 0, "more arrivals than a phase has"
        if self.pending == self.bytes == 0:
            self.phase += 1
            self.pending = self.count

    def passed(self, parity: int) -> bool:
        """Whether the phase of this parity is over, once what is under way has arrived."""
        while self.copies:
            self.copies.pop(0)()
        return self.phase % 2 != parity


class Barriers:
    """Shared memory that holds barriers."""

    def __init__(self, count: int) -> None:
        self.barriers = [Barrier() for _ in range(count)]

    def index(self, number: Any) -> Barriers:
        """One of them."""
        one = Barriers(0)
        one.barriers = [self.barriers[int(number)]]
        return one

    @property
    def one(self) -> Barrier:
        """That of an array of one."""
        (barrier,) = self.barriers
        return barrier


class Descriptor:
    """What TMA reads or writes a tensor through, a tile at a time.

    Args:
        x: the tensor.
        shape, strides: in elements; the last stride is 1.
        block: a tile's shape.
        layout: of a tile in shared memory.
    """

    def __init__(
        self,
        x: torch.Tensor,
        shape: Sequence[int],
        strides: Sequence[int],
        block: Sequence[int],
        layout: Layout,
    ) -> None:
        steps = [stride * x.element_size() for stride in strides[:-1]]
        assert x.data_ptr() % 16 == 0 and all(s > 0 and s % 16 == 0 for s in steps), steps
        assert strides[-1] == 1 and all(side <= 256 for side in block), (strides, block)
        self.tensor = x.detach().as_strided(list(shape), list(strides))
        self.block, self.layout, self.padding = list(block), layout, "zero"
        size = torch.Size(block).numel() * x.element_size()
        self.block_type = SimpleNamespace(nbytes=size, shape=self.block)

    @property
    def handle(self) -> Descriptor:
        """Itself."""
        return self

    @property
    def dtype(self) -> torch.dtype:
        """Of the tensor's elements."""
        return self.tensor.dtype

    def _parts(self, place: Sequence[Any]) -> tuple[tuple[slice, ...], tuple[slice, ...]]:
        """Where a tile meets the tensor: in the tensor, and in the tile."""
        of_tensor, of_tile = [], []
        sides = zip(place, self.block, self.tensor.shape, strict=True)
        for first, side, size in ((int(f), b, s) for f, b, s in sides):
            begin, end = min(max(first, 0), size), max(min(first + side, size), 0)
            of_tensor.append(slice(begin, max(begin, end)))
            of_tile.append(slice(begin - first, max(begin, end) - first))
            if end <= begin:
                return (slice(0, 0),) * len(self.block), (slice(0, 0),) * len(self.block)
        return tuple(of_tensor), tuple(of_tile)

    def load(self, place: Sequence[Any]) -> torch.Tensor:
        """A tile: 0 where the tensor ends, or NaN."""
        of_tensor, of_tile = self._parts(place)
        there_is_none = {"zero": 0.0, "nan": torch.nan}[self.padding]
        tile = torch.full(self.block, there_is_none, dtype=self.tensor.dtype)
        tile[of_tile] = self.tensor[of_tensor]
        return tile

    def store(self, place: Sequence[Any], tile: torch.Tensor, *, add: bool = False) -> None:
        """Writes a tile, or adds it to what is there, as far as the tensor goes."""
        of_tensor, of_tile = self._parts(place)
        if add:
            self.tensor[of_tensor] += tile[of_tile]
        else:
            self.tensor[of_tensor] = tile[of_tile]


def copy_in(descriptor: Descriptor, place: Any, barrier: Barriers, tile: Shared) -> None:
    """Has TMA load a tile: until it has arrived, the buffer holds no numbers."""
    assert tile.shape == descriptor.block, f"{descriptor.block} into {tile.shape}"
    assert tile.data.dtype == descriptor.tensor.dtype, tile.data.dtype
    poison(tile.data)
    place = [int(x) for x in place]

    def arrive() -> None:
        tile.data.copy_(descriptor.load(place))
        barrier.one.change(0, -descriptor.block_type.nbytes)

    if program().late():
        barrier.one.copies.append(arrive)
    else:
        arrive()
    pause()


def copy_out(descriptor: Descriptor, place: Any, tile: Shared, *, add: bool = False) -> None:
    """Has TMA store a tile, or add it."""
    assert tile.shape == descriptor.block, f"{tile.shape} into {descriptor.block}"
    place = [int(x) for x in place]
    data = seen(tile)
    if program().late():
        role().stores.append(lambda: descriptor.store(place, data, add=add))
    else:
        descriptor.store(place, data.clone(), add=add)
        role().stores.append(lambda: None)
    pause()


def wait_for_stores(pendings: int) -> None:
    """Until so many at most have not been made."""
    stores = role().stores
    while len(stores) > pendings:
        stores.pop(0)()
    pause()


class Pointer:
    """Into a tensor's memory, all of it: what is read or written must lie there."""

    def __init__(self, memory: torch.Tensor, offset: Any) -> None:
        self.memory, self.offset = memory, offset

    @classmethod
    def to(cls, x: torch.Tensor) -> Pointer:
        """A tensor's first element."""
        size = x.untyped_storage().nbytes() // x.element_size()
        return cls(x.detach().as_strided((size,), (1,), 0), Block(torch.tensor(x.storage_offset())))

    @property
    def dtype(self) -> Any:
        """With that of its elements."""
        return SimpleNamespace(element_ty=self.memory.dtype)

    def __add__(self, offset: Any) -> Pointer:
        return Pointer(self.memory, self.offset + offset)

    def _all_places(self) -> torch.Tensor:
        """Those without a mask."""
        places = of(self.offset)
        if places.numel():
            least, most = map(int, places.aminmax())
            assert least >= 0 and most < self.memory.numel(), "outside of a tensor's memory"
        return places

    def _places(self, mask: Any) -> tuple[torch.Tensor, torch.Tensor]:
        places = of(self.offset)
        wanted = torch.ones_like(places, dtype=torch.bool) if mask is None else of(mask)
        places, wanted = torch.broadcast_tensors(places, wanted.to(torch.bool))
        inside = (places >= 0) & (places < self.memory.numel())
        assert bool((inside | ~wanted).all()), "outside of a tensor's memory"
        return places, wanted

    def load(self, mask: Any = None, other: Any = None) -> Block:
        """Elements where the mask holds."""
        if mask is None:
            found = self.memory[self._all_places()]
            return Block(found if found.ndim else found.clone())  # at one place it is a view
        places, wanted = self._places(mask)
        found = self.memory[torch.where(wanted, places, 0)] if self.memory.numel() else places
        if other is None:
            poison(other := torch.empty((), dtype=self.memory.dtype))
            return Block(torch.where(wanted, found, other))
        return Block(torch.where(wanted, found, of(other, self.memory.dtype)))

    def store(self, value: Any, mask: Any = None) -> None:
        """Writes where the mask holds."""
        places, wanted = self._places(mask)
        values = of(value, self.memory.dtype).expand(places.shape)
        self.memory[places[wanted]] = values[wanted]

    def atomic_add(self, value: Any, mask: Any = None, sem: str = "acq_rel") -> Block:
        """Adds where the mask holds; what was there before, at one place.

        Several elements may add to one place.
        """
        places, wanted = self._places(mask)
        before = self.memory[places].clone() if places.numel() == 1 else places
        values = of(value, self.memory.dtype).expand(places.shape)
        self.memory.index_add_(0, places[wanted].long(), values[wanted])
        return Block(before)
