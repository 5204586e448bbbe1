"""The power of a GPU under sustained calls; needs nvidia-ml-py, which torch uses."""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import mean
from typing import Any

import torch

#: NVML gives the mean of the last second, so the load before has to be the same.
LOAD_SECONDS, READ_SECONDS = 1.2, 0.4


def watts(call: Callable[[], Any]) -> float:
    """The mean power of the current GPU, in W, under calls back to back.

    Raises:
        ModuleNotFoundError: nvidia-ml-py is not installed.
    """
    readings: list[float] = []
    start = time.perf_counter()
    while (elapsed := time.perf_counter() - start) < LOAD_SECONDS + READ_SECONDS:
        for _ in range(8):  # the queue of the GPU never runs dry
            call()
        if elapsed > LOAD_SECONDS:
            readings.append(torch.cuda.power_draw() / 1000)
    torch.cuda.synchronize()
    return mean(readings)
