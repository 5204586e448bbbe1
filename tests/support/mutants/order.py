"""The Gluon kernels without one wait, arrival or fence: what keeps roles apart is needed."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator

from support.mutants.mutant import Mutant, source_of
from support.trials import Kernel

#: What keeps roles apart, at the start of a line.
SYNCHRONISES = re.compile(
    r" +(mbarrier\.(wait|arrive|expect)\(|fence_async_shared\(|tma\.store_wait\(|_(meet|wait_at"
    r"|ping_pong_wait|ping_pong_arrive|arrive_at|announce)\()"
)

#: The kernels that one is taken out of: (whose trials, the variant, the functions looked at; the
#: others are those of another kernel here).
KERNELS: dict[str, tuple[Kernel, str, str]] = {
    "forward": ("forward_hopper", "window_d128", ""),
    "forward, three consumers": ("forward_hopper", "causal_d128", "def _consumer("),
    "forward, no fused stages": ("forward_hopper", "causal_d64", "def _producer("),
    "backward": ("backward_hopper", "window_d128", ""),
    "parts": ("backward_hopper", "full_d128", "def _add_part("),
    "split": ("backward_hopper", "causal_d256", ""),
    "segments": ("backward_hopper", "causal_d80", "def _store_gradient"),
    "segments, sums": ("backward_hopper", "causal_d80", "def _add_sums("),
    "segments, split": ("backward_hopper", "causal_d192_v128", "def _store_segment("),
}

#: Those that nothing comes of here, in any kernel or in one, and why.
UNSEEN: dict[str | tuple[str, str], str] = {
    "mbarrier.wait(empty.index(slot), phase ^ 1)": "its role has waited already: to be read alone",
    ("forward", "mbarrier.wait(work_empty.index(slot), phase ^ 1)"): (
        "four stages later consumers have told it"
    ),
    "mbarrier.wait(keys_arrived, count // 2 % 2)": "copies into one buffer rarely pass each other",
}


def _statements(source: str, kernel: Kernel, within: str) -> Iterator[tuple[str, str]]:
    """(function, statement) of each synchronisation in a kernel's roles, in order."""
    lines = source.splitlines()
    starts = [i for i, line in enumerate(lines) if line.startswith("def ")]
    of_backward = next(i for i in starts if lines[i].startswith("def _next_stage("))
    for i, line in enumerate(lines):
        if not SYNCHRONISES.match(line) or (i < of_backward) != (kernel == "forward_hopper"):
            continue
        function = lines[max(start for start in starts if start < i)]
        if re.match(r"def _(attention|backward(_queries)?)_hopper\(", function):
            continue  # before there are roles
        if not function.startswith(within):
            continue
        end = i
        while (text := "\n".join(lines[i : end + 1])).count("(") != text.count(")"):
            end += 1
        yield function.removeprefix("def ").split("(")[0], text.strip()


def _mutants() -> Iterator[Mutant]:
    for form, (kernel, spec, within) in KERNELS.items():
        seen: Counter[tuple[str, str]] = Counter()
        for function, statement in _statements(source_of(spec, hopper=True), kernel, within):
            number = seen[function, statement]
            seen[function, statement] += 1
            words = " ".join(statement.partition("#")[0].split())
            if {words, (form, words)} & UNSEEN.keys():
                continue
            name = f"{form}, {function}: without {words}" + f" ({number})" * (number > 0)
            yield Mutant(name, kernel, spec, function, statement, "pass", number)


MUTANTS = list(_mutants())
