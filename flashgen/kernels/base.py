"""Kernel: what a build, tuning, explain and a published module ask of every kernel.

A kernel is a folder here and one in templates, and its line in `flashgen.kernels.registry`. No
stage knows one by name: what only some kernels have is a question that others answer with a
default.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from flashgen.budget.targets import Target
from flashgen.budget.traffic import Workload
from flashgen.budget.usage import SramUsage
from flashgen.config import BackwardKernel, KernelChoice, KernelConfig
from flashgen.paths import template_dir
from flashgen.plan import KernelPlan


@dataclass(frozen=True)
class Space:
    """What to choose from for one target.

    Attributes:
        candidates: configurations worth trying; none where nothing fits.
        rejected: the others that were looked at, each with the reason in words.
        why_not: why there are no candidates, in a few words; ``""`` where there are some, or where
            the rejected ones say it all.
    """

    candidates: tuple[KernelConfig, ...]
    rejected: tuple[tuple[KernelConfig, str], ...]
    why_not: str = ""


@dataclass(frozen=True)
class Needs:
    """What a kernel's launcher needs of the module, which several kernels may share.

    Attributes:
        gluon: Gluon's names, and descriptors of tiles for its kernels.
        sms: how many SMs the GPU has.
        counter: an int32 in device memory that programs take their tiles from.
        l2: how much of L2 the heads may take that are computed side by side.
        tma_adds: TMA that adds tiles to what is in memory.
    """

    gluon: bool = False
    sms: bool = False
    counter: bool = False
    l2: bool = False
    tma_adds: bool = False

    def __or__(self, other: Needs) -> Needs:
        pairs = zip(vars(self).values(), vars(other).values(), strict=True)
        return Needs(*(one or two for one, two in pairs))


class Kernel(ABC):
    """A kernel of the forward pass, or one of the backward pass: `ForwardKernel`, `GradientKernel`.

    Attributes:
        name: of its folders, here and in templates.
        key: what tables, measured results and readers of a seal call it. Kernels of which each plan
            has one at most may share a key.
        seal: the word before its digest in the first lines of a module.
        title: what it is called in a sentence, without an article.
        fallback: whether it is there for every plan, and runs where no other kernel does.
        beside: keys of the kernels without which a module does not hold it.
        elsewhere: of a kernel that runs in the place of others, when those run.
    """

    name: ClassVar[str]
    key: ClassVar[str]
    seal: ClassVar[str]
    title: ClassVar[str]
    gradients: ClassVar[bool]
    fallback: ClassVar[bool] = False
    beside: ClassVar[tuple[str, ...]] = ()
    elsewhere: ClassVar[str] = ""

    @property
    def templates(self) -> Path:
        """The folder that holds its folder of templates."""
        return template_dir()

    @property
    def launchers(self) -> str:
        """The folder of templates with its parts of a module; see `flashgen.codegen.module`."""
        return self.name

    def runs_on(self, target: str) -> bool:
        """Whether it is for a target at all."""
        return True

    def why_not(self, plan: KernelPlan) -> str:
        """Why it does not serve a plan, whatever the configuration; ``""`` where it may."""
        return ""

    def replaces(self, plan: KernelPlan) -> tuple[str, ...]:
        """The keys of the kernels in whose place it runs."""
        return ()

    @abstractmethod
    def space(self, plan: KernelPlan, target: str) -> Space:
        """The configurations to choose from, on a target that it is for."""

    @abstractmethod
    def rank(
        self, plan: KernelPlan, target: str, candidates: Sequence[KernelConfig]
    ) -> Sequence[KernelConfig]:
        """The candidates, most promising first."""

    @abstractmethod
    def usage(self, plan: KernelPlan, config: KernelConfig, target: Target) -> SramUsage:
        """The shared memory of a block."""

    def worst_usage(self, plan: KernelPlan, config: KernelConfig, target: Target) -> SramUsage:
        """The same of tensors of the strides that need most: a configuration has to fit with it."""
        return self.usage(plan, config, target)

    @abstractmethod
    def source(self, plan: KernelPlan, before: Collection[str] = ()) -> str:
        """The functions of its source.

        Args:
            plan: what it computes.
            before: keys of the kernels whose functions stand before these.
        """

    @abstractmethod
    def digest(self, plan: KernelPlan) -> str:
        """sha256 over its code, without comments and docstrings: what a measurement is of."""

    def needs(self, plan: KernelPlan) -> Needs:
        """What its launcher needs of a module that holds it."""
        return Needs()

    def names(self, plan: KernelPlan, choice: KernelChoice) -> Mapping[str, Any]:
        """What its templates read besides `plan`, of a module that holds it or does without."""
        return {}


class ForwardKernel(Kernel):
    """A kernel that computes the output and its log-sum-exp.

    Attributes:
        launcher: the function of a module that launches it.
        own: what explain calls it beside the textbook's algorithms.
    """

    gradients = False
    launcher: ClassVar[str]
    own: ClassVar[str]

    @abstractmethod
    def predict(
        self, plan: KernelPlan, config: KernelConfig, target: Target, work: Workload
    ) -> tuple[float, str]:
        """Seconds of a call by the model that ranks candidates, and what it waits for.

        The latter is a key of `flashgen.explain.kernels.WAITS`, or ``""`` where the model does not
        say.
        """

    def launched(
        self, plan: KernelPlan, config: KernelConfig, target: Target, work: Workload
    ) -> tuple[KernelConfig, int]:
        """What the launcher makes of a call: a configuration, and how many heads share a tile."""
        return config, 1

    def visiting(self, plan: KernelPlan, config: KernelConfig) -> KernelConfig:
        """The configuration with the query rows that go by the keys which they alone see."""
        return config

    def remarks(self, plan: KernelPlan) -> tuple[str, ...]:
        """What an account leaves out, of this kernel."""
        return ()


@dataclass(frozen=True)
class Timing:
    """How a kernel of the backward pass is timed alone.

    Attributes:
        launcher: the function of a module that launches a pass.
        configurations: how many it takes, those of other kernels among them.
        functions: what the kernel can consist of, in the order of the launches.
        others: functions of a pass that are put out meanwhile.
        makes: whose gradients it makes.
        products: those as wide as q and k, and those as wide as v: rates are of what a pass has to
            do, so what is computed twice counts once.
    """

    launcher: str
    configurations: int
    functions: tuple[str, ...]
    others: tuple[str, ...]
    makes: tuple[BackwardKernel, ...]
    products: tuple[int, int]


class GradientKernel(Kernel):
    """A kernel that computes gradients: of keys and values, of queries, or of all.

    A spec's pins are of the forward kernels.
    """

    gradients = True

    @abstractmethod
    def timing(self, plan: KernelPlan) -> Timing:
        """How it is timed."""
