"""What benchmarks.units repeats is what its names say, whatever ptxas makes of it."""

from __future__ import annotations

import pytest
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource

from benchmarks import beside, units
from flashgen.config import HOPPER
from support.compiling.report import report_of

#: Of a pair of elements: instructions by their names in machine code.
OF_A_PAIR = {
    "exp2": {"MUFU": 2},
    "tanh": {"MUFU": 2},
    "tanh, exp2": {"MUFU": 4},
    "pack two": {"F2FP": 1},
    "exp2, pack two": {"MUFU": 2, "F2FP": 1},
    "softmax": {"FFMA": 2, "MUFU": 2, "F2FP": 1, "FADD": 1},
    "softcap and softmax": {"FMUL": 2, "MUFU": 4, "FFMA": 2, "F2FP": 1, "FADD": 1},
}


@pytest.mark.parametrize("name", units.SEQUENCES)
def test_machine_code(name: str) -> None:
    signature = {"values": "*fp32", "cycles": "*i32"}
    constants = {
        "ROUNDS": units.ROUNDS,
        "SIZE": 32 * units.WARPS * units.ELEMENTS,
        "SEQUENCE": units.asm(units.SEQUENCES[name]),
    }
    source = ASTSource(units._repeat, signature | dict.fromkeys(constants, "constexpr"), constants)
    found = report_of(source, HOPPER, {"num_warps": units.WARPS}).opcodes
    pairs = units.ELEMENTS // 2
    # The loop may be unrolled, by as much for all.
    (times,) = {found[code] / (count * pairs) for code, count in OF_A_PAIR[name].items()}
    assert times >= 1 and times == int(times)
    for code in {"MUFU", "F2FP", "FFMA", "FMUL", "FADD"} - OF_A_PAIR[name].keys():
        assert found[code] == 0
    # Each element reads the clock twice, and nothing is put away meanwhile.
    assert found["CS2R"] + found["S2UR"] >= 2 * units.ELEMENTS
    assert found["STL"] == found["LDL"] == 0


def test_products_and_weights_are_on_their_way_together() -> None:
    signature = {"cycles": "*i32", "products": "i32", "tiles": "i32", "SEQUENCE": "constexpr"}
    name = "softcap and softmax"
    constants = {"SEQUENCE": units.asm(units.SEQUENCES[name])}
    source = GluonASTSource(beside._both, signature, constants)
    found = report_of(source, HOPPER, {"num_warps": 4}).opcodes
    # Eight pieces of the queries' columns and four of the keys; each group weighs by itself.
    assert found["HGMMA"] % 12 == 0 < found["HGMMA"]
    pairs = beside.GROUPS * 64 * 64 // 128 // 2
    for code, count in OF_A_PAIR[name].items():
        if code.startswith("MUFU"):
            assert found[code] % (count * pairs) == 0 < found[code]
    assert found["STL"] == found["LDL"] == 0
    # One wait in the loop, for what came two before: products are not waited for one by one.
    assert found["WARPGROUP"] < found["HGMMA"]


def test_the_table() -> None:
    environment = {"gpu": "G", "torch": "1", "triton": "2", "cudnn": "3", "date": "2026-01-31"}
    rates = {"exp2": 16.0, "tanh": 8.0}
    document = {"environment": environment, "rates": rates, "beside": {}}
    table = units.units_table(document)
    assert "| exp2 | 16.00 | 256 |" in table and "| tanh | 8.00 | 512 |" in table
    assert "products" not in table
    document["beside"] = {"exp2": {"alone": 257.1, "beside": 380.0, "products": 516.4}}
    assert "| exp2 | 257 | 380 | 516 |" in units.units_table(document)
