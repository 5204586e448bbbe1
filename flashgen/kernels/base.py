"""Kernel: the protocol of kernels for a build, tuning, explain and a published module.

A kernel is a folder here, a folder in templates, and a line in `flashgen.kernels.registry`. No
stage knows a kernel by name: a property that only some kernels have is a method with a default.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from flashgen.budget.targets import Target
from flashgen.budget.traffic import Workload
from flashgen.budget.usage import SramUsage
from flashgen.config import BackwardKernel, KernelChoice, KernelConfig
from flashgen.paths import template_dir
from flashgen.plan import KernelPlan

#: What a sequence sees of a tensor, from the name of a kernel's arguments and the tensor's name.
ViewOf = Callable[..., Any]


@dataclass(frozen=True)
class Space:
    """The configurations to choose from for one target.

    Attributes:
        candidates: configurations worth trying; empty where none fits.
        rejected: other configurations, each with the reason in words.
        why_not: why there are no candidates, in a few words; ``""`` where there are some, or where
            the reasons of the rejected ones suffice.
    """

    candidates: tuple[KernelConfig, ...]
    rejected: tuple[tuple[KernelConfig, str], ...]
    why_not: str = ""


@dataclass(frozen=True)
class Needs:
    """Parts of the module that a kernel's launcher needs; several kernels may share them.

    Attributes:
        gluon: Gluon's names, and descriptors of tiles for its kernels.
        sms: how many SMs the GPU has.
        counter: an int32 in device memory from which programs take tiles.
        l2: the bytes of L2 for heads that are computed side by side.
        tma_adds: TMA that adds tiles to memory.
        clears: a barrier for clearing rows of tiles in shared memory.
        reinterprets: shared memory as another shape or type.
    """

    gluon: bool = False
    sms: bool = False
    counter: bool = False
    l2: bool = False
    tma_adds: bool = False
    clears: bool = False
    reinterprets: bool = False

    def __or__(self, other: Needs) -> Needs:
        pairs = zip(vars(self).values(), vars(other).values(), strict=True)
        return Needs(*(one or two for one, two in pairs))


class Kernel(ABC):
    """A kernel of the forward pass, or one of the backward pass: `ForwardKernel`, `GradientKernel`.

    Attributes:
        name: the name of its folders, here and in templates.
        key: its name in tables, measured results and seals. Kernels may share a key if each plan
            has at most one of them.
        seal: the word before its digest in the first lines of a module.
        title: its name in a sentence, without an article.
        fallback: whether it serves every plan, and runs where no other kernel does.
        beside: keys of the kernels without which a module does not hold it.
        elsewhere: for a kernel that replaces others, when the replaced kernels run.
        form: the form of a call that it computes, of `flashgen.config.FORMS`.
        linear: whether it is of linear attention, which no other kernel computes.
    """

    name: ClassVar[str]
    key: ClassVar[str]
    seal: ClassVar[str]
    title: ClassVar[str]
    gradients: ClassVar[bool]
    fallback: ClassVar[bool] = False
    beside: ClassVar[tuple[str, ...]] = ()
    elsewhere: ClassVar[str] = ""
    form: ClassVar[str] = "dense"
    linear: ClassVar[bool] = False

    @property
    def templates(self) -> Path:
        """The folder that holds its folder of templates."""
        return template_dir()

    @property
    def launchers(self) -> str:
        """The folder of templates with its parts of a module; see `flashgen.codegen.module`."""
        return self.name

    def runs_on(self, target: str) -> bool:
        """Whether the kernel supports a target."""
        return True

    def why_not(self, plan: KernelPlan) -> str:
        """Why no configuration of the kernel serves a plan; ``""`` where one may."""
        return ""

    def replaces(self, plan: KernelPlan) -> tuple[str, ...]:
        """The keys of the kernels that it replaces."""
        return ()

    @abstractmethod
    def space(self, plan: KernelPlan, target: str) -> Space:
        """The configurations to choose from, on a target that it supports."""

    @abstractmethod
    def rank(
        self, plan: KernelPlan, target: str, candidates: Sequence[KernelConfig]
    ) -> Sequence[KernelConfig]:
        """The candidates, most promising first."""

    @abstractmethod
    def usage(self, plan: KernelPlan, config: KernelConfig, target: Target) -> SramUsage:
        """The shared memory of a block."""

    def worst_usage(self, plan: KernelPlan, config: KernelConfig, target: Target) -> SramUsage:
        """The shared memory for the worst strides: a configuration has to fit with it."""
        return self.usage(plan, config, target)

    @abstractmethod
    def source(self, plan: KernelPlan, before: Collection[str] = ()) -> str:
        """The functions of its source.

        Args:
            plan: what it computes.
            before: keys of the kernels whose functions precede these.
        """

    @abstractmethod
    def digest(self, plan: KernelPlan) -> str:
        """sha256 over its code, without comments and docstrings: the key of measurements."""

    def needs(self, plan: KernelPlan) -> Needs:
        """The parts of a module that its launcher needs."""
        return Needs()

    def names(self, plan: KernelPlan, choice: KernelChoice) -> Mapping[str, Any]:
        """The variables of its templates besides `plan`, whether or not a module holds it."""
        return {}

    def why_not_packed(self, plan: KernelPlan) -> str:
        """Why it has no functions for packed sequences; ``""`` if it has."""
        return "its tiles are of batches of equal lengths"

    def packed_source(self, plan: KernelPlan, view_of: ViewOf) -> str:
        """The functions for packed sequences, by names that the dense ones may have.

        Args:
            plan: what they compute.
            view_of: what a sequence sees of a tensor: see `flashgen.forms.varlen.view_of`.
        """
        raise NotImplementedError(self.why_not_packed(plan))

    def packed_needs(self, plan: KernelPlan) -> Needs:
        """What these functions need that the dense ones may do without."""
        return Needs()


class ForwardKernel(Kernel):
    """A kernel that computes the output and its log-sum-exp.

    Attributes:
        launcher: the function of a module that launches it.
        own: its name in explain beside the textbook algorithms.
    """

    gradients = False
    launcher: ClassVar[str]
    own: ClassVar[str]

    @abstractmethod
    def predict(
        self, plan: KernelPlan, config: KernelConfig, target: Target, work: Workload
    ) -> tuple[float, str]:
        """The modelled seconds of a call, and the unit that it waits for.

        The unit is a key of `flashgen.explain.kernels.WAITS`, or ``""`` where the model names none.
        """

    def launched(
        self, plan: KernelPlan, config: KernelConfig, target: Target, work: Workload
    ) -> tuple[KernelConfig, int]:
        """The launcher's choice for a call: a configuration, and how many heads share a tile."""
        return config, 1

    def visiting(self, plan: KernelPlan, config: KernelConfig) -> KernelConfig:
        """The configuration whose query rows visit only the keys that they see themselves."""
        return config

    def remarks(self, plan: KernelPlan) -> tuple[str, ...]:
        """The parts of this kernel that an account leaves out."""
        return ()


@dataclass(frozen=True)
class Timing:
    """How a kernel of the backward pass is timed alone.

    Attributes:
        launcher: the function of a module that launches a pass.
        configurations: how many configurations the launcher takes, including other kernels'.
        functions: the functions that the kernel may launch, in the order of the launches.
        others: functions of the pass that are disabled while the kernel is timed.
        makes: the tensors whose gradients it makes.
        products: the numbers of products as wide as q and k, and as wide as v. Rates count the
            products that a pass requires, so a recomputed product counts once.
    """

    launcher: str
    configurations: int
    functions: tuple[str, ...]
    others: tuple[str, ...]
    makes: tuple[BackwardKernel, ...]
    products: tuple[int, int]


class GradientKernel(Kernel):
    """A kernel that computes gradients: of keys and values, of queries, or of all.

    A spec's pins apply to the forward kernels only.
    """

    gradients = True

    @abstractmethod
    def timing(self, plan: KernelPlan) -> Timing:
        """How it is timed."""
