"""The table of GPU limits: consistent in itself, and with what the compiler knows."""

import pytest

from flashgen.budget.targets import DEFAULT_TARGETS, KIB, TARGETS, get_target


def test_the_default_targets_are_the_architectures_that_people_have() -> None:
    assert DEFAULT_TARGETS == ("sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "gfx942")


@pytest.mark.parametrize(
    ("name", "kib"),
    [("sm_80", 163), ("sm_86", 99), ("sm_89", 99), ("sm_90", 227), ("sm_100", 227), ("gfx942", 64)],
)
def test_shared_memory_of_a_block(name: str, kib: int) -> None:
    assert get_target(name).max_shared == kib * KIB


@pytest.mark.parametrize("target", TARGETS.values(), ids=str)
class TestEveryTarget:
    def test_one_block_leaves_room_for_what_the_system_reserves(self, target) -> None:
        assert target.max_shared + target.reserved_shared == target.shared_per_sm

    def test_a_full_sm_has_registers_for_all_its_threads(self, target) -> None:
        assert target.registers_per_sm // target.max_threads_per_sm >= 32

    def test_the_matrix_rates_are_whole_instructions_a_clock(self, target) -> None:
        """Peak = operations a clock and SM, a power of two, times clock and SMs (within 3%)."""
        per_clock = target.peak_tflops("bf16") * 1e3 / target.clock_ghz / target.num_sms
        nearest = min((512, 1024, 2048, 4096, 8192), key=lambda n: abs(n - per_clock))
        assert per_clock == pytest.approx(nearest, rel=0.03)
        assert target.peak_tflops("fp16") == target.peak_tflops("bf16")
        assert target.peak_tflops("tf32") == pytest.approx(target.peak_tflops("bf16") / 2, rel=0.02)

    def test_the_name_is_the_compilers(self, target) -> None:
        assert target.name == (f"sm_{target.arch}" if target.backend == "cuda" else target.arch)


def test_only_targets_with_tma_have_it() -> None:
    assert [t.name for t in TARGETS.values() if t.has_tma] == ["sm_90", "sm_100"]


def test_an_unknown_target_lists_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"unknown target 'sm_70'; known: sm_80, .*gfx942"):
        get_target("sm_70")
