"""Compiling beforehand what Triton's autotuner tries, in several processes.

The autotuner compiles one configuration after the other, which takes minutes for a library with
hundreds of them. Here each process makes the same calls, but compiles a part of the configurations
of every autotuned kernel into Triton's cache on disk, and launches none of them. The process that
measures then finds all configurations compiled, and only times them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

import triton.testing
from triton.runtime.autotuner import Autotuner

#: Milliseconds for which the autotuner measures a configuration; Triton's are 25 and 100.
WARMUP_MS, REPETITION_MS = 5, 20


@contextmanager
def compiles_part(part: int, parts: int) -> Iterator[list[str]]:
    """Calls of autotuned kernels compile each ``parts``-th configuration, and launch nothing.

    What such kernels would write stays as it was: results are numbers without a meaning.

    Args:
        part: the first configuration that is compiled.
        parts: how many processes share the configurations.

    Yields:
        A line for each configuration that does not compile.
    """
    problems = list[str]()

    def compile_some(tuner: Any, *args: Any, **kwargs: Any) -> None:
        tuner.nargs = dict(zip(tuner.arg_names, args, strict=False))
        for config in tuner.prune_configs(kwargs)[part::parts]:
            try:
                tuner.fn.run(*args, **{**kwargs, "warmup": True}, **config.all_kwargs())
            except Exception as error:  # too much shared memory, say: the tuner skips it, too
                problems.append(f"{tuner.base_fn.__name__}, {config}: {type(error).__name__}")
        tuner.nargs = None

    with patch.object(Autotuner, "run", compile_some):
        yield problems


@contextmanager
def tunes_briefly() -> Iterator[None]:
    """The autotuner measures each configuration for a fifth of its usual time."""
    briefly = partial(triton.testing.do_bench, warmup=WARMUP_MS, rep=REPETITION_MS)
    # Not a property, which a patch could not undo: looked up on the class, by each tuner.
    with patch.object(Autotuner, "do_bench", staticmethod(briefly)):
        yield
