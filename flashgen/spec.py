"""AttentionSpec: what a user declares, and nothing that flashgen derives from it.

Declaring a spec checks nothing: `flashgen.validate` reports everything wrong with it at once.
Neither torch nor triton is imported here.
"""

from __future__ import annotations

import hashlib
from contextlib import suppress
from dataclasses import dataclass, field

from flashgen.arguments import ALIGNMENTS
from flashgen.budget.targets import DEFAULT_TARGETS
from flashgen.config import FORMS, KernelConfig
from flashgen.constants import Constant
from flashgen.declared import Param
from flashgen.dropout import DROPOUT
from flashgen.errors import MaskError
from flashgen.masks import Mask, as_mask, full
from flashgen.normalisers import Normaliser, softmax
from flashgen.offsets import DROPOUT_OFFSETS, with_offsets
from flashgen.params import dtype_name
from flashgen.scores import Score, as_score
from flashgen.tracing.expr import merged_params

DTYPES = ("float16", "bfloat16", "float32")
INPUT_PRECISIONS = ("tf32", "ieee")


@dataclass(frozen=True)
class Blocks:
    """Pins (one number) or choices (several) for the tile sizes; None lets flashgen try all.

    Attributes:
        BLOCK_M: query rows a program computes: powers of two from 16 to 256.
        BLOCK_N: key/value rows a loop step reads: powers of two from 16 to 256.
        num_warps: warps a program runs on: 1, 2, 4, 8 or 16.
        num_stages: depth of the software pipeline: 1 to 5.
    """

    BLOCK_M: int | tuple[int, ...] | None = None
    BLOCK_N: int | tuple[int, ...] | None = None
    num_warps: int | tuple[int, ...] | None = None
    num_stages: int | tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        """Takes a list for a tuple; judges nothing."""
        for name, value in vars(self).items():
            if isinstance(value, list):
                object.__setattr__(self, name, tuple(value))

    def choices(self, name: str) -> tuple[int, ...] | None:
        """What a number may be by name, ``"BLOCK_M"``; None where flashgen tries all."""
        value: int | tuple[int, ...] | None = getattr(self, name)
        return (value,) if isinstance(value, int) else value

    def admits(self, config: KernelConfig) -> bool:
        """Whether each number of ``config`` is its pin, or one of its choices."""
        return all(
            (choices := self.choices(name)) is None or number in choices
            for name, number in config.as_dict().items()
        )


@dataclass(frozen=True)
class AttentionSpec:
    """One attention variant.

    Attributes:
        head_dim: elements of a head's query, key and value; ``(qk, v)`` where the value's differ.
        dtype: of q, k, v and the output: ``"float16"``, ``"bfloat16"`` or ``"float32"``, or torch's
            of that name.
        mask: which keys a query sees: one of `flashgen.masks`, or any function
            ``(b, h, q_idx, kv_idx) -> bool`` that traces.
        score: what becomes of ``scale * q·k`` before the softmax: one of `flashgen.scores`, or any
            function ``(score, b, h, q_idx, kv_idx) -> number`` that traces; None changes nothing.
        normaliser: how scores become weights: `softmax`, with or without a sink, or
            `sigmoid_attention`; or `linear`, whose weights are products of features.
        scale: factor on q·k; None is ``qk_head_dim ** -0.5``. The call's ``scale=`` overrides it.
        input_precision: for float32, how the matrix units read it: ``"ieee"`` (exact, slow) or
            ``"tf32"`` (10-bit mantissa). None is ``"ieee"``; other dtypes take None.
        blocks: tile sizes to pin or choose from.
        dropout: whether the call takes ``dropout_p``, which is rounded to a multiple of 2^-16, and
            ``seed``: weights are then dropped at random, and those that are kept are divided by the
            probability of that.
        deterministic: whether gradients are the same bits every time, also on Hopper, where the
            faster kernel of head dimensions up to 128 adds up those of q in any order. Without it a
            call chooses, by ``torch.use_deterministic_algorithms``.
        autocast: whether ``attention`` casts q, k and v where torch.autocast is enabled, as torch's
            SDPA does; the output is then of autocast's dtype.
        align: where q_idx counts from if there are more keys than queries: ``"top_left"``, from the
            first key, or ``"bottom_right"``, so that the last query is at the last key. It holds
            for mask and score, flashgen's and others; masks whose tables say what each query sees
            (`tree`, `block_sparse`) keep these. None leaves it to them.
        linformer: how many keys a call attends to: its matrices make them of all keys and values,
            Linformer (Wang et al. 2020, https://arxiv.org/abs/2006.04768); None attends to all.
        forms: what the module's functions take: ``"dense"``, a batch of equal lengths, which every
            module has; ``"varlen"``, packed sequences; ``"cache"``, a cache of keys and values;
            ``"mesh"``, parts of sequences whose whole is on several GPUs.
        targets: GPU architectures to choose a configuration for; see `flashgen.budget.targets`.
        name: the generated module's name; None takes the spec file's name.
    """

    head_dim: int | tuple[int, int]
    dtype: str = "bfloat16"
    mask: Mask = field(default_factory=full)
    score: Score | None = None
    normaliser: Normaliser = field(default_factory=softmax)
    scale: float | None = None
    input_precision: str | None = None
    blocks: Blocks = field(default_factory=Blocks)
    dropout: bool = False
    deterministic: bool = False
    autocast: bool = False
    align: str | None = None
    linformer: int | None = None
    forms: tuple[str, ...] = FORMS[:1]
    targets: tuple[str, ...] = DEFAULT_TARGETS
    name: str | None = None

    def __post_init__(self) -> None:
        """Takes a list for a tuple, a bare function for a mask or a score; judges nothing."""
        for name in ("head_dim", "forms", "targets"):
            if isinstance(getattr(self, name), list):
                object.__setattr__(self, name, tuple(getattr(self, name)))
        if isinstance(self.forms, tuple) and all(form in FORMS for form in self.forms):
            object.__setattr__(self, "forms", tuple(f for f in FORMS if f in self.forms))
        object.__setattr__(self, "dtype", dtype_name(self.dtype))
        if callable(self.mask) and not isinstance(self.mask, Mask):
            object.__setattr__(self, "mask", as_mask(self.mask))
        if callable(self.score) and not isinstance(self.score, Score):
            object.__setattr__(self, "score", as_score(self.score))
        if self.align in ALIGNMENTS[1:]:
            for name in ("mask", "score"):
                function = getattr(self, name)
                if isinstance(function, Mask | Score):
                    with suppress(MaskError):  # which `validate` reports
                        object.__setattr__(self, name, function.aligned(self.align))
        if isinstance(self.forms, tuple) and "mesh" in self.forms:
            for name in ("mask", "score"):
                function = getattr(self, name)
                if isinstance(function, Mask | Score):
                    object.__setattr__(self, name, with_offsets(function))

    @property
    def qk_head_dim(self) -> int:
        """Elements of a head's query and key."""
        return self.head_dim[0] if isinstance(self.head_dim, tuple) else self.head_dim

    @property
    def v_head_dim(self) -> int:
        """Elements of a head's value and output."""
        return self.head_dim[1] if isinstance(self.head_dim, tuple) else self.head_dim

    @property
    def params(self) -> tuple[Param, ...]:
        """What the call chooses: of mask, score and sink in the order of first use, then dropout.

        Raises:
            MaskError: one name is declared in two ways.
        """
        params = tuple(param for param in self.declared if not isinstance(param, Constant))
        return params + DROPOUT if self.dropout else params

    @property
    def constants(self) -> tuple[Constant, ...]:
        """The tensors that the generated module holds, in the order of first use.

        Raises:
            MaskError: one name is declared in two ways.
        """
        return tuple(param for param in self.declared if isinstance(param, Constant))

    @property
    def declared(self) -> tuple[Param, ...]:
        """What mask, score and sink mention, parameters and constants, and offsets of dropout.

        Raises:
            MaskError: one name is declared in two ways.
        """
        score = self.score.traced if self.score is not None else None
        offsets = DROPOUT_OFFSETS if self.moves_dropout else ()
        traced = (self.mask.traced, score, *self.normaliser.inputs, *offsets)
        return merged_params(expr for expr in traced if expr is not None)

    @property
    def moves_dropout(self) -> bool:
        """Whether weights are dropped by their places in a whole: see `flashgen.offsets`."""
        return self.dropout and "mesh" in self.forms

    @property
    def equal_lengths(self) -> bool:
        """Whether the mask or the score has a meaning only for ``q_len == kv_len``."""
        return self.mask.equal_lengths or (self.score is not None and self.score.equal_lengths)

    @property
    def unaligned(self) -> tuple[str, ...]:
        """The masks and score functions that are for these only, as they were written."""
        of_score = () if self.score is None else self.score.unaligned
        return tuple(dict.fromkeys((*self.mask.unaligned, *of_score)))

    @property
    def can_be_aligned(self) -> bool:
        """Whether `align` would give unequal lengths a meaning: natten_2d has none for them."""
        return self.mask.can_be_aligned

    def has_form(self, form: str) -> bool:
        """Whether the module has the functions of a form, ``"varlen"``."""
        return form in self.forms

    @property
    def digest(self) -> str:
        """sha256 over every field, functions by label and expression: equal in every process."""
        functions = {"mask": self.mask, "score": self.score, "normaliser": self.normaliser}
        shown = {name: f if f is None else (f.label, f.canonical) for name, f in functions.items()}
        fields = {**self.__dict__, **shown}
        # Those are younger than digests that files go by.
        for name in ("dropout", "deterministic", "autocast", "align", "linformer"):
            if not fields[name]:
                del fields[name]
        if self.forms == FORMS[:1]:  # likewise
            del fields["forms"]
        return hashlib.sha256(repr(sorted(fields.items())).encode()).hexdigest()
