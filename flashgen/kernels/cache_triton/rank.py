"""rank_cache: the order in which configurations of the cache kernel are tried without a GPU.

Its time is that of reading keys and values, so what counts is the bytes that are on their way.
"""

from __future__ import annotations

from collections.abc import Sequence

from flashgen.budget.targets import get_target
from flashgen.config import KernelConfig
from flashgen.kernels.cache_triton.shared_memory import ENOUGH, bytes_ahead, programs_of_an_sm
from flashgen.plan import KernelPlan

#: Keys of a tile: fewer take more instructions a byte, more are shared out less evenly. On an H100
#: tiles of 128 were up to 2% faster than tiles of 64 in six of seven calls (docs/lab/cache.md).
USUAL_KEYS = 128


def rank_cache(
    plan: KernelPlan, target: str, candidates: Sequence[KernelConfig]
) -> list[KernelConfig]:
    """The candidates, most promising first."""
    architecture = get_target(target)

    def order(config: KernelConfig) -> tuple[int, int, int, int]:
        programs = programs_of_an_sm(plan, config, architecture)
        ahead = min(programs * bytes_ahead(plan, config), ENOUGH)
        return (-ahead, abs(config.BLOCK_N - USUAL_KEYS), programs, config.num_stages)

    return sorted(candidates, key=order)
