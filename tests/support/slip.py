"""A slip in a rendered source: a wrong text in the place of a right one."""

from __future__ import annotations

from collections.abc import Callable


def with_slip(right: str, wrong: str) -> Callable[[str], str]:
    """Puts a wrong text in the place of a right one; ValueError where there is none."""

    def edit(source: str) -> str:
        if right not in source:
            raise ValueError(f"the kernel no longer reads so: {right}")
        return source.replace(right, wrong)

    return edit
