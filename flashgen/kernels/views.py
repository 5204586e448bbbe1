"""views_in_gluon: what a sequence sees of tensors, in the Gluon kernels for packed sequences."""

from __future__ import annotations

from dataclasses import dataclass

from flashgen.kernels.base import ViewOf
from flashgen.plan.arguments import KernelArguments

#: The numbers of a sequence that views read, and its number among all, ``batch``.
OF_SEQUENCE = ("q_start", "kv_start", "q_len", "kv_len")


@dataclass(frozen=True)
class GluonView:
    """A tensor as one sequence sees it: a tuple that gathers take, as text.

    Attributes:
        text: the tuple.
        reads: ``batch``, and the names in `OF_SEQUENCE`, that it reads.
    """

    text: str
    reads: tuple[str, ...]

    def __str__(self) -> str:
        return self.text


def views_in_gluon(arguments: KernelArguments, view_of: ViewOf) -> dict[str, GluonView]:
    """The view of each tensor of which a sequence has a part.

    It is made where it is used, from the tensor that `call` holds: its numbers take no registers
    from one tile to the next.
    """
    views = {}
    for tensor in arguments.tensors:
        view = view_of(tensor.name, tensor.name, held=f"call.{tensor.name}")
        if view.reads:
            numbers = ", ".join((view.pointer, *view.sizes, *view.strides))
            views[tensor.name] = GluonView(f"({numbers})", view.reads)
    return views
