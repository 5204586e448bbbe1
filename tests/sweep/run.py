"""Runs a trial of `support.trials` on a module, and holds what comes of it to float64."""

from __future__ import annotations

from types import ModuleType

from support.gluon import start_over
from support.trials import SPECS, Trial
from support.variants import shipped_module
from sweep.backward import check_backward
from sweep.hopper import check_hopper, check_hopper_backward, shipped
from sweep.launch import check_kernel


def check_trial(trial: Trial, module: ModuleType | None = None) -> None:
    """Fails unless the kernel is right.

    Args:
        trial: the call.
        module: whose kernel; None is the shipped variant's as it is. Its Gluon kernels run on the
            CPU, where their roles take the turns that the trial says.
    """
    spec, case, config = SPECS[trial.spec], trial.case, trial.config
    if trial.kernel.endswith("hopper"):
        module = module or shipped(trial.spec)
        start_over(trial.course)
        if trial.kernel == "forward_hopper":
            check_hopper(module, spec, case, config)
        else:
            check_hopper_backward(module, spec, case)
        return
    check = check_kernel if trial.kernel == "forward" else check_backward
    module = module or shipped_module(trial.spec)
    check(module, spec, case, BLOCK_M=config.BLOCK_M, BLOCK_N=config.BLOCK_N, USE_TMA=trial.tma)
