"""What the matrices of a feature map have to be: findings on a spec with a linear normaliser."""

from __future__ import annotations

from collections.abc import Iterator

from flashgen.normalisers import Linear
from flashgen.plan.linear import WIDEST
from flashgen.spec import AttentionSpec

#: Columns of products, as head dimensions of kernels are.
COLUMNS = range(16, WIDEST + 1, 8)

#: What the first dimension of a matrix of each head may be, for q and for k.
OF_HEADS = {"q": ("num_q_heads", "num_kv_heads"), "k": ("num_kv_heads",)}

# A finding: a field, its value, the mistake, and what to write instead.
Finding = tuple[str, object, str, str]


def matrix_findings(spec: AttentionSpec, normaliser: Linear) -> Iterator[Finding]:
    """Whether vectors of q and k can be multiplied by the matrices of the feature map.

    Args:
        spec: the variant.
        normaliser: its normaliser, whose feature map has matrices.
    """
    head_dim, found = spec.qk_head_dim, set()
    for (of, heads), matrix in zip(OF_HEADS.items(), normaliser.feature_map.matrices, strict=True):
        of_heads, rows, columns = matrix.names[:-2], matrix.names[-2:-1], matrix.names[-1]
        fits = rows == (str(head_dim),) and columns.isdecimal()
        if not fits or of_heads not in ((), *((x,) for x in heads)):
            problem = f"vectors of {of} have {head_dim} elements, and are multiplied by {matrix!r}"
            shown = f"({head_dim}, columns)"
            remedy = f"declare it with dims {shown}, or ({heads[-1]!r}, {shown[1:]}"
            yield "normaliser", normaliser, problem, remedy
            return
        if int(columns) not in COLUMNS:
            problem = f"{matrix.name} has {columns} columns"
            yield "normaliser", normaliser, problem, f"write a multiple of 8 from 16 to {WIDEST}"
            return
        found.add(columns)
    if len(found) > 1:
        problem = f"products of q and of k have {' and '.join(sorted(found))} columns"
        yield "normaliser", normaliser, problem, "declare both matrices with as many"
