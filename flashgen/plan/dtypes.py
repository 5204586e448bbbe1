"""Triton's names of dtypes, and their sizes."""

from __future__ import annotations

#: Triton's names of dtypes.
TRITON_DTYPES = {
    "float16": "fp16", "bfloat16": "bf16", "float32": "fp32", "int32": "i32", "bool": "i1",
}  # fmt: skip

#: Bytes of an element.
ITEMSIZES = {"bool": 1, "float16": 2, "bfloat16": 2, "int32": 4, "float32": 4}
