"""What functions for FlexAttention capture: tensors, objects, modules, what could change unseen."""

import functools
import sys

import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask

from flashgen.errors import FlashgenError, MaskError
from flashgen.flex import flex_attention
from flashgen.integrations.captures import is_of_library
from support import flex_oracle
from support.flex_cases import HEADS, LENGTH, Case, draw
from support.flex_compare import attended, compare, qkv

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*run the eager reference"),
    pytest.mark.usefixtures("own_cache"),
]


class TestCapturedTensors:
    def test_of_int64_are_read_as_they_are_now(self):
        ids = torch.arange(LENGTH) // 7
        mask = lambda b, h, q, kv: ids[q] == ids[kv]  # noqa: E731
        inputs = qkv()
        for _ in range(2):
            block_mask = create_block_mask(mask, None, None, LENGTH, LENGTH, "cpu")
            out = flex_attention(*inputs, block_mask=block_mask)
            expected, _ = flex_oracle.attention(*inputs, mask_mod=mask)
            torch.testing.assert_close(out, expected.float(), rtol=1e-4, atol=1e-4)
            ids.copy_(torch.arange(LENGTH) // 3)

    def test_of_int64_that_an_array_shares(self):
        """numpy writes to it, which torch does not count."""
        array = torch.arange(LENGTH).numpy().copy()
        ids = torch.from_numpy(array)
        for _ in range(2):
            attended(lambda score, b, h, q, kv: score + ids[kv])
            array[:] = array[::-1].copy()

    def test_beyond_32_bits_are_refused(self):
        big = torch.arange(LENGTH) + 2**40
        with pytest.raises(MaskError, match=r"^big: .* exceeds 32 bits; subtract what"):
            flex_attention(*qkv(), lambda score, b, h, q, kv: score + big[kv])

    def test_of_float64_that_float32_rounds_by_much_are_refused(self):
        """Seconds since 1970, say, whose differences are compared."""
        seconds = 1.7e9 + torch.arange(LENGTH, dtype=torch.float64)
        with pytest.raises(MaskError, match=r"^seconds: .* too large for float32; subtract"):
            attended(lambda score, b, h, q, kv: score - (seconds[q] - seconds[kv]).abs())
        seconds -= 1.7e9
        seconds[0] = -torch.inf
        attended(lambda score, b, h, q, kv: score + seconds[kv] * 0.3)

    def test_of_other_dtypes_are_refused(self):
        table = draw(LENGTH).to(torch.complex64)
        with pytest.raises(FlashgenError, match=r"test_flex_captures\.py:\d+: "):
            flex_attention(*qkv(), lambda score, b, h, q, kv: score + table[kv])


class Slotted:
    """An object without a dict, and a method with a default."""

    __slots__ = ("factor", "table")

    def __init__(self, factor):
        self.factor, self.table = factor, draw(HEADS)

    def score_mod(self, score, b, h, q, kv, power=1):
        return score * self.factor + self.table[h] ** power


class OfAClass:
    """A tensor that instances share, and a property."""

    shared = torch.linspace(-1, 1, LENGTH)
    factor = 0.5

    @property
    def twice(self):
        return 2 * self.factor

    def score_mod(self, score, b, h, q, kv):
        return score * self.twice + self.shared[kv]


@pytest.mark.parametrize("held", [Slotted(0.5), OfAClass()], ids=lambda held: type(held).__name__)
def test_what_an_object_holds(fresh, held):
    compare(Case(held.score_mod), *qkv())
    held.factor = 2.0
    compare(Case(held.score_mod), *qkv())


def test_a_function_that_a_librarys_object_wraps(fresh):
    """torch.no_grad() as a decorator copies itself at each call."""
    power = draw(HEADS)
    compare(Case(torch.enable_grad()(lambda score, b, h, q, kv: score + power[h])), *qkv())


@pytest.mark.parametrize("name", ["token", "mine"])
def test_a_module_of_the_users_own(fresh, tmp_path, monkeypatch, name):
    """It is looked through, also if it has the name of one of Python's."""
    import importlib.util

    (tmp_path / f"{name}.py").write_text(
        "import torch\nWIDTH = 3\nBIAS = torch.arange(24.0)\n"
        "def score_mod(score, b, h, q, kv):\n    return score + WIDTH * BIAS[kv]\n"
    )
    spec = importlib.util.spec_from_file_location(name, tmp_path / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, name, module)
    spec.loader.exec_module(module)
    is_of_library.cache_clear()
    through = lambda score, b, h, q, kv: module.score_mod(score, b, h, q, kv) - module.WIDTH  # noqa: E731
    try:
        for _ in range(2):
            compare(Case(module.score_mod), *qkv())
            compare(Case(through), *qkv())
            module.WIDTH = 1
    finally:
        is_of_library.cache_clear()


class TestWhatCouldChangeUnseen:
    """Values that are read in ways other than by a name."""

    def test_an_attribute_of_a_function(self):
        def score_mod(score, b, h, q, kv):
            return score * score_mod.factor

        for score_mod.factor in (1, 2):
            attended(score_mod)

    def test_what_is_imported_when_it_runs(self, tmp_path, monkeypatch):
        (tmp_path / "imported_late.py").write_text("FACTOR = 1\n")
        monkeypatch.syspath_prepend(tmp_path)

        def score_mod(score, b, h, q, kv):
            from imported_late import FACTOR

            return score * FACTOR

        attended(score_mod)
        attended(score_mod)
        sys.modules["imported_late"].FACTOR = 3
        attended(score_mod)
        del sys.modules["imported_late"]

    def test_numbers_of_other_classes(self):
        import numpy as np

        class Steps(int):
            unit = "step"

        held = [Steps(2), np.float32(0.5), (1.0).__add__]

        def score_mod(score, b, h, q, kv):
            return score * held[0] + held[1] * (q - kv) + held[2](1.0)

        attended(score_mod)
        held[0], held[1] = Steps(3), np.float32(0.25)
        attended(score_mod)

    def test_a_dict_that_makes_what_is_missing(self):
        from collections import defaultdict

        held = defaultdict(lambda: 2, tables=[draw(HEADS)])

        def score_mod(score, b, h, q, kv):
            return score * held["factor"] + held["tables"][0][h]

        attended(score_mod)
        held["factor"] = 3
        attended(score_mod)

    def changing(self, score_mod, change):
        """What a score function computes while ``change`` sets a number to others."""
        for number in (1.0, 2.0, 3.0, 0.5):  # the second and later ones could be a Float
            change(number)
            attended(score_mod)

    @pytest.mark.parametrize("name", ["static", "of_class", "twice", "base", "meta", "described"])
    def test_what_a_class_has(self, fresh, name):
        class Described:
            def __get__(self, instance, owner):
                return self.held

        class Meta(type):
            meta = 1.0

        class Base:
            base = 1.0
            described = Described()

        class Held(Base, metaclass=Meta):
            @staticmethod
            def static():
                return factor_of_globals

            @classmethod
            def of_class(cls):
                return factor_of_globals

            @property
            def twice(self):
                return factor_of_globals

        def change(number):
            global factor_of_globals
            factor_of_globals = Base.base = Meta.meta = number
            vars(Base)["described"].held = number

        held = Held if name == "meta" else Held()
        score_mods = {
            "static": lambda score, b, h, q, kv: score * held.static() + Held.static() * q,
            "of_class": lambda score, b, h, q, kv: score * held.of_class(),
            "twice": lambda score, b, h, q, kv: score * held.twice,
            "base": lambda score, b, h, q, kv: score * Held.base,
            "meta": lambda score, b, h, q, kv: score * held.meta,
            "described": lambda score, b, h, q, kv: score * held.described,
        }
        self.changing(score_mods[name], change)

    @pytest.mark.parametrize("name", ["factor", "index", "times", "super"])
    def test_what_python_calls_without_a_name(self, fresh, name):
        class Base:
            def own(self, score):
                return score * factor_of_globals

        class Held(Base):
            def __getattr__(self, name):
                if name != "factor":
                    raise AttributeError(name)
                return vars(self)["numbers"][name]

            def __getitem__(self, at):
                return self.held[at]

            def __mul__(self, score):
                return score * factor_of_globals

            def own(self, score):
                return super().own(score) + 1

        def change(number):
            global factor_of_globals
            factor_of_globals = number
            vars(held).update(numbers={"factor": number}, held=[number])

        held = Held()
        score_mods = {
            "factor": lambda score, b, h, q, kv: score * held.factor,
            "index": lambda score, b, h, q, kv: score * held[0],
            "times": lambda score, b, h, q, kv: held * score,
            "super": lambda score, b, h, q, kv: held.own(score),
        }
        self.changing(score_mods[name], change)

    def test_a_tensor_that_a_static_method_reads(self, fresh):
        class Held:
            @staticmethod
            def times(score):
                return score * factor_of_globals

        def change(number):
            global factor_of_globals
            factor_of_globals = torch.tensor(number)

        self.changing(lambda score, b, h, q, kv: Held.times(score), change)

    @pytest.mark.parametrize("kind", ["deque", "UserDict", "dict"])
    def test_an_object_that_holds_more_than_attributes(self, fresh, kind):
        import collections

        class Deque(collections.deque):
            pass

        class Dict(dict):
            pass

        held = {"deque": Deque([0]), "UserDict": collections.UserDict(), "dict": Dict()}[kind]

        def change(number):
            if kind == "dict":
                held.factor = number
            else:
                held[0] = number

        factor = (lambda: held.factor) if kind == "dict" else (lambda: held[0])
        self.changing(lambda score, b, h, q, kv: score * factor(), change)

    def test_a_function_that_is_cached(self, fresh):
        def cached(function):
            function = functools.lru_cache(function)
            return lambda score, b, h, q, kv: function(score)

        attended(cached(lambda score: score * 2))
        attended(cached(lambda score: score * 3))

    def test_a_method_of_a_dict(self, fresh):
        held = {}
        get = held.get
        self.changing(
            lambda score, b, h, q, kv: score * get("factor"), lambda x: held.update(factor=x)
        )

    @pytest.mark.parametrize("read", ["getattr", "globals", "vars"])
    def test_a_name_that_is_composed(self, fresh, read):
        class Held:
            pass

        held, name = Held(), "factor_of_globals"

        def change(number):
            globals()[name] = held.factor_of_globals = number

        factor = {
            "getattr": lambda: getattr(held, name),
            "globals": lambda: globals()[name],
            "vars": lambda: vars(held)["factor_of_" + "GLOBALS".lower()],
        }[read]
        self.changing(lambda score, b, h, q, kv: score * factor(), change)

    def test_a_number_taken_out_of_a_tensor_is_refused(self):
        table = draw(HEADS)
        for taken in (
            lambda: table.tolist()[0],
            lambda: table.max().item(),
            lambda: float(table[0]),
        ):
            with pytest.raises(FlashgenError, match=r"test_flex_captures\.py:\d+"):
                flex_attention(*qkv(), lambda score, b, h, q, kv, taken=taken: score * taken())

    def test_a_tensor_that_is_written_to_is_refused(self):
        table = draw(HEADS)
        before = table.clone()
        with pytest.raises(FlashgenError):
            flex_attention(*qkv(), lambda score, b, h, q, kv: score + table.add_(1)[h])
        assert torch.equal(table, before)

    def test_a_maximum_of_a_tensor(self):
        table = draw(HEADS)

        def score_mod(score, b, h, q, kv):
            return score - table.max() + table[:2].sum() * table[h]

        attended(score_mod)
        table.mul_(-3)
        attended(score_mod)
