"""views_in_gluon: what a sequence sees of tensors, in the Gluon kernels for packed sequences."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from flashgen.kernels.base import ViewOf
from flashgen.plan.arguments import KernelArguments

#: The numbers of a sequence that views read.
OF_SEQUENCE = ("q_start", "kv_start", "q_len", "kv_len")


def views_in_gluon(arguments: KernelArguments, view_of: ViewOf) -> dict[str, str]:
    """For each tensor of which a sequence has a part, that part as a tuple that gathers take.

    It is made where it is used, from the tensor that `call` holds: its numbers take no registers
    from one tile to the next.
    """
    views = {}
    for tensor in arguments.tensors:
        view = view_of(tensor.name, tensor.name, held=f"call.{tensor.name}")
        if view.is_part:
            numbers = ", ".join((view.pointer, *view.sizes, *view.strides))
            views[tensor.name] = f"({numbers})".replace("tl.int64", "gl.int64")
    return views


def read_by_views(views: Mapping[str, str], names: Iterable[str]) -> set[str]:
    """The numbers of a sequence that the views among these names read."""
    words = (re.findall(r"(?<!\.)\b\w+", views[name]) for name in names if name in views)
    return {word for found in words for word in found if word in ("batch", *OF_SEQUENCE)}
