"""Varlen: packed sequences, ``varlen_attention`` of a module.

The kernels are those of the dense form in everything but where a tile is and where its results go:
masks, scores and bounds are in positions of a sequence, and ``b`` is the sequence. So a plan serves
both forms.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from flashgen.budget.targets import get_target
from flashgen.codegen.beside import beside
from flashgen.codegen.environment import render
from flashgen.config import KernelChoice
from flashgen.constants import Constant
from flashgen.forms.base import Form, Held
from flashgen.kernels.backward_hopper.plan import HopperBackward
from flashgen.kernels.base import Kernel, Needs, ViewOf
from flashgen.kernels.registry import kernels_of, module_order
from flashgen.params import Tensor
from flashgen.plan import KernelPlan
from flashgen.plan.backward import backward_plan
from flashgen.plan.constants import PACKED_SIZES as CONSTANT_SIZES
from flashgen.plan.constants import printed_constant
from flashgen.plan.int32_overflow import PACKED_SIZES
from flashgen.plan.score_gradient import input_elements
from flashgen.symbolic.printer import torch_source
from flashgen.symbols import BATCH, KV_LEN, Q_LEN, B, Load

#: Of a length that tokens take the place of: a sequence's first token, and the number of all tokens
#: in terms of a call's arguments and for a reader.
_TOTALS = {
    Q_LEN: ("q_start", "q.shape[0]", "total_q"),
    KV_LEN: ("kv_start", "k.shape[0]", "total_kv"),
}

#: Bytes of shared memory that the Gluon kernel takes at most besides those of the dense one: for
#: the lengths of a tile's sequence, and for notes of tiles with rows of another sequence.
MORE_SHARED = 256


@dataclass(frozen=True)
class SequenceView:
    """A tensor as one sequence sees it in a kernel: pointer, sizes and strides, as text.

    Attributes:
        pointer: to its first element.
        sizes: within which it is read.
        strides: of its dimensions.
        taken: the strides that a kernel takes as arguments.
        reads: the numbers of the sequence that these read; none where it sees all of the tensor.
    """

    pointer: str
    sizes: tuple[str, ...]
    strides: tuple[str, ...]
    taken: tuple[str, ...]
    reads: tuple[str, ...]


@dataclass(frozen=True)
class PackedTensor:
    """A declared tensor, as calls of packed sequences pass it.

    A tensor of the batch and of one length comes without its batch, and the tokens of all sequences
    in place of the length. Any other comes as it is declared, for the largest lengths.

    Attributes:
        name: the tensor's.
        dims: the declared sizes; None for any.
        batch: of one that comes packed, the axis of the batch; else None.
        tokens: the axis of the length, in the declared tensor.
    """

    name: str
    dims: tuple[Any, ...]
    batch: int | None
    tokens: int | None

    @property
    def packed(self) -> bool:
        """Whether it comes without its batch."""
        return self.batch is not None

    @property
    def passed(self) -> int | None:
        """The axis of the tokens in the tensor as it is passed."""
        if self.batch is None or self.tokens is None:
            return None
        return self.tokens - (self.batch < self.tokens)

    @property
    def start(self) -> str:
        """The name of a sequence's first token along the axis of tokens."""
        assert self.tokens is not None
        return _TOTALS[self.dims[self.tokens]][0]

    @property
    def sizes(self) -> tuple[str, ...]:
        """The sizes to check, as expressions of a call's arguments; ``"None"`` for any."""
        shown = ["None" if dim is None else torch_source(dim, PACKED_SIZES) for dim in self.dims]
        if self.batch is not None and self.tokens is not None:
            shown[self.tokens] = _TOTALS[self.dims[self.tokens]][1]
            del shown[self.batch]
        return tuple(shown)

    @property
    def shape(self) -> str:
        """These sizes for a reader."""
        names = {name: PACKED_SIZES[name] for name in ("batch", "q_len", "kv_len")}
        shown = ["any" if dim is None else torch_source(dim, names) for dim in self.dims]
        if self.batch is not None and self.tokens is not None:
            shown[self.tokens] = _TOTALS[self.dims[self.tokens]][2]
            del shown[self.batch]
        return f"({', '.join(shown)}{',' if len(shown) == 1 else ''})"

    @property
    def lengths(self) -> tuple[tuple[int, str], ...]:
        """Of one that is not packed, axes that a sequence reads a part of, and its length."""
        names = {Q_LEN: "q_len", KV_LEN: "kv_len"}
        if self.packed:
            return ()
        return tuple((i, names[dim]) for i, dim in enumerate(self.dims) if dim in names)

    @property
    def slices(self) -> tuple[str, ...]:
        """The index of the part that a sequence reads."""
        lengths = dict(self.lengths)
        return tuple(f":{lengths.get(i, '')}" for i in range(max(lengths) + 1))


def packed_tensor(tensor: Tensor | Constant) -> PackedTensor:
    """A declared tensor, as calls of packed sequences pass it."""
    dims = tuple(None if dim is None else dim.sym for dim in tensor.dims)
    lengths = [i for i, dim in enumerate(dims) if dim in _TOTALS]
    others = (dim for dim in dims if dim is not None and dim not in _TOTALS)
    of_expressions = any(dim.free_symbols & set(_TOTALS) for dim in others)
    batches = [i for i, dim in enumerate(dims) if dim == BATCH]
    if len(batches) == 1 and len(lengths) == 1 and not of_expressions:
        return PackedTensor(tensor.name, dims, batches[0], lengths[0])
    return PackedTensor(tensor.name, dims, None, None)


def packed_tensors(plan: KernelPlan) -> dict[str, PackedTensor]:
    """All tensors of a plan: parameters and constants."""
    tensors = (x for x in (*plan.params, *plan.spec.constants) if isinstance(x, Tensor))
    return {tensor.name: packed_tensor(tensor) for tensor in tensors}


def packed_arguments(plan: KernelPlan) -> dict[str, Any]:
    """The variables of a form's checks: tensors, large integers and constants, packed."""
    return {
        "packed": packed_tensors(plan),
        "packed_integers": plan.large_integers_with(PACKED_SIZES),
        "packed_constants": [printed_constant(x, CONSTANT_SIZES) for x in plan.spec.constants],
    }


def view_of(
    tensors: Mapping[str, PackedTensor], variable: str, name: str, held: str = ""
) -> SequenceView:
    """What a kernel reads of a tensor, or adds to of its gradient.

    Args:
        tensors: `packed_tensors`.
        variable: what the kernel's arguments begin with: the tensor's name, or that of a gradient.
        name: the tensor's.
        held: in Gluon, a tuple that holds the pointer, sizes and strides.
    """
    tensor = tensors[name]
    axes = range(len(tensor.dims))
    taken = tuple(f"{variable}_stride_{i}" for i in axes)
    sizes = [f"{name}_size_{i}" for i in axes]
    pointer = f"{variable}_ptr"
    if held:
        pointer, sizes = f"{held}[0]", [f"{held}[{1 + i}]" for i in axes]
        taken = tuple(f"{held}[{1 + len(axes) + i}]" for i in axes)
    strides = list(taken)
    reads = [length for _, length in tensor.lengths]
    for i, length in tensor.lengths:
        # The padding, and a broken sequence, may have more queries than max_q_len.
        sizes[i] = f"min(q_len, {sizes[i]})" if length == "q_len" else length
    if tensor.batch is not None and tensor.tokens is not None:
        int64 = "gl.int64" if held else "tl.int64"
        pointer += f" + {tensor.start}.to({int64}) * {taken[tensor.tokens]}"
        sizes[tensor.batch], strides[tensor.batch] = "batch + 1", "0"
        sizes[tensor.tokens] = {"q_start": "q_len", "kv_start": "kv_len"}[tensor.start]
        reads = ["batch", tensor.start, sizes[tensor.tokens]]
    return SequenceView(pointer, tuple(sizes), tuple(strides), taken, tuple(reads))


def views_of(plan: KernelPlan) -> ViewOf:
    """What a sequence sees of each tensor of a plan."""
    return partial(view_of, packed_tensors(plan))


class Varlen(Form):
    """Packed sequences, of any lengths."""

    name = "varlen"

    def why_not(self, plan: KernelPlan) -> str:
        """Why a plan cannot have the form, as a clause; ``""`` where it can."""
        if plan.listing is not None and not plan.classifies:
            return "'varlen' has no lists of tiles, which a mask with a table of blocks needs"
        if plan.looks_rows_up:
            sorted_ones = ", ".join(
                param.name
                for param in plan.spec.declared
                if isinstance(param, Tensor) and param.sorted
            )
            return f"'varlen' has no row tables, which {sorted_ones} with sorted=True needs"
        for tensor in packed_tensors(plan).values():
            if tensor.batch is not None and not _is_own(plan, tensor):
                return (
                    f"'varlen' packs {tensor.name}, so that a sequence can only read its own part "
                    "of it, by b"
                )
        sink = plan.spec.normaliser.traced_sink
        if sink is not None and sink.sym.free_symbols & {Q_LEN, KV_LEN}:
            return "'varlen' has no sink that depends on a length"
        if plan.spec.deterministic and input_elements(plan):
            learned = input_elements(plan)[0].derivative.tensor
            return f"'varlen' adds up the gradient of {learned} in any order"
        return ""

    def source(self, plan: KernelPlan, held: Held) -> str:
        """The kernel that lists tiles, and the portable kernels of both passes."""
        texts = [render("varlen/tiles.py.jinja", plan=plan)]
        if plan.classifies:
            of_sequence = views_of(plan)
            texts += [
                render(f"tiles_triton/{name}.py.jinja", plan=plan, varlen=True, view_of=of_sequence)
                for name in ("classify", "lists")
            ]
        texts += [
            kernel.packed_source(plan, views_of(plan))
            for kernel in dense_kernels(plan, held)
            if not kernel.needs(plan).gluon
        ]
        return "\n\n".join(dict.fromkeys(texts))

    def gluon_source(self, plan: KernelPlan, held: Held) -> str:
        """The Gluon kernels that serve packed sequences."""
        known: list[str] = []
        for number, kernel in enumerate(dense_kernels(plan, held)):
            if kernel.needs(plan).gluon:
                before = [k.key for k in dense_kernels(plan, held)[:number]]
                known.append(kernel.source(plan, before))
        texts: list[str] = []
        for kernel in packed_gluon(plan, held):
            text = kernel.packed_source(plan, views_of(plan))
            texts.append(beside(text, "\n".join([*known, *texts]), "_varlen"))
        return "\n\n".join(texts)

    def needs(self, plan: KernelPlan, held: Held) -> Needs:
        """The Gluon kernels take tiles from a counter, and clear rows of other sequences."""
        gluon = packed_gluon(plan, held)
        if not gluon:
            return Needs()
        needs = Needs(counter=True, clears=True, l2=any(kernel.gradients for kernel in gluon))
        for kernel in gluon:
            needs |= kernel.packed_needs(plan)
        return needs

    def names(self, plan: KernelPlan, held: Held) -> Mapping[str, Any]:
        """Arguments as they are packed, and the backward pass."""
        arguments = packed_arguments(plan)
        packed, integers, constants = arguments.values()
        checked = [size for tensor in packed.values() for size in tensor.sizes]
        checked += [integer.bound for integer in integers]
        checked += [limit.size for constant in constants for limit in constant.limits]
        lengths = ("max_q_len", "max_kv_len")
        return arguments | {
            "keyed_lengths": [
                x for x in lengths if plan.classifies or any(x in size for size in checked)
            ],
            "packed_backward": backward_plan(plan, packed=True),
            "packed_gluon": any(not k.gradients for k in packed_gluon(plan, held)),
            "packed_gluon_backward": _backward_names(plan, held),
            "reads_batch": plan.reads_torch("b") or plan.dropout,
        }


def why_no_gluon(plan: KernelPlan) -> str:
    """Why no Gluon kernel serves packed sequences; ``""`` if one may.

    Rows that a mask hides by their position alone are not known to these kernels; tensors of which
    a sequence has a part are, where tiles are listed. A sequence without keys would need the sink.
    """
    if plan.hidden.keys or plan.hidden.queries:
        return "the mask hides rows by their position alone"
    read = {tensor.name for tensor in plan.kernel_arguments.tensors}
    parts = [t.name for t in packed_tensors(plan).values() if t.packed or t.lengths]
    if read.intersection(parts) and not plan.classifies:
        return "sequences read parts of tensors"
    if plan.dropout or plan.sink_torch:
        return "dropout" if plan.dropout else "the sink"
    return ""


def packed_gluon(plan: KernelPlan, held: Held) -> list[Kernel]:
    """The Gluon kernels of a module that serve packed sequences too."""
    if why_no_gluon(plan):
        return []
    return [
        kernel
        for kernel in dense_kernels(plan, held)
        if kernel.needs(plan).gluon and not kernel.why_not_packed(plan)
        if _has_room(held[kernel.key])
    ]


def _backward_names(plan: KernelPlan, held: Held) -> HopperBackward | None:
    """The variables of the backward pass's Gluon kernel; None without one."""
    if not any(kernel.gradients for kernel in packed_gluon(plan, held)):
        return None
    return HopperBackward(backward_plan(plan), of_sequences=True)


def dense_kernels(plan: KernelPlan, held: Held) -> list[Kernel]:
    """The dense form's kernels of a module in the order of their functions."""
    kernels = kernels_of(plan)
    keys = [key for key in module_order() if key in held and kernels[key].form == "dense"]
    return [kernels[key] for key in sorted(keys, key=lambda key: not kernels[key].fallback)]


def _has_room(choice: KernelChoice) -> bool:
    return all(
        chosen.shared + MORE_SHARED <= get_target(target).max_shared
        for target, chosen in choice.configs.items()
    )


def _is_own(plan: KernelPlan, tensor: PackedTensor) -> bool:
    """Whether every element that is read of a packed tensor is of the own sequence."""
    spec = plan.spec
    traced = [spec.mask.traced, spec.normaliser.traced_sink]
    traced += [spec.score.traced] if spec.score is not None else []
    loads = (load for expr in traced if expr is not None for load in expr.sym.atoms(Load))
    indices = (load.args[1:] for load in loads if load.args[0].name == tensor.name)
    return all(index[tensor.batch] == B for index in indices)
