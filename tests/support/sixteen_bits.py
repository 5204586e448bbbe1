"""bfloat16 in Triton's interpreter, which has no arithmetic of it: float32, rounded by the kernels.

A module of bfloat16 is run with tensors in float32 there, where `x.to(q.dtype)` changes nothing.
With its text edited each of these casts rounds to 8 bits, half to even, as a GPU does.
"""

from __future__ import annotations

import re

#: A cast to the dtype of a tensor of the call, or of one that a pointer points to.
CAST = re.compile(r"\.to\((\w+)\.dtype(\.element_ty)?\)")

ROUNDED = '''
@triton.jit
def _in_8_bits(x):
    """float32 numbers as bfloat16 has them."""
    bits = x.to(tl.float32).to(tl.int32, bitcast=True)
    bits += 0x7FFF + ((bits >> 16) & 1)
    return ((bits >> 16) << 16).to(tl.float32, bitcast=True)
'''


def in_16_bits(source: str) -> str:
    """The source with casts that round, for `edit_source`."""
    kernels, of_torch = source.index("\n@triton.jit"), source.index("\n# --- attention ")
    found, text = 0, source[kernels:of_torch]
    while cast := CAST.search(text):
        start, found = _start_of(text, cast.start()), found + 1
        text = f"{text[:start]}_in_8_bits({text[start : cast.start()]}){text[cast.end() :]}"
    if not found:
        raise ValueError("no kernel casts to the dtype of the call")
    return f"{source[:kernels]}\n{ROUNDED}\n{text}{source[of_torch:]}"


def _start_of(source: str, end: int) -> int:
    """Where the operand of a cast begins: a name, or what stands in brackets behind one."""
    at = end
    if source[at - 1] == ")":
        depth = 0
        while True:
            at -= 1
            depth += {")": 1, "(": -1}.get(source[at], 0)
            if depth == 0:
                break
    while re.match(r"[\w.]", source[at - 1]):
        at -= 1
    return at
