"""The benchmarks on the CPU: their attentions, their FLOPs, their peers and their bookkeeping."""

from __future__ import annotations

import math
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch.nn.attention import SDPBackend
from torch.nn.functional import scaled_dot_product_attention

from benchmarks import accuracy, attentions, cells, fa4, measuring, peers, record
from benchmarks.attentions import ATTENTIONS, Attention, visible_pairs
from benchmarks.cells import BACKWARD, DROPOUT, FORWARD, GRID, VARIANTS, Cell
from benchmarks.inputs import make_inputs
from benchmarks.passes import as_results
from flashgen.publish import Seal
from flashgen.reference import dropped

ROOT = Path(__file__).parents[2]
CPU = torch.device("cpu")
CELLS = (*FORWARD, *VARIANTS, *BACKWARD)
ONE = {"ms": lambda call: 1.0}


def cell(attention="causal", seq_len=32, dtype="float32", **fields):
    return Cell(f"{attention}_d16", attention, seq_len, 16, 16, dtype, **fields)


def row_of(cell):
    empty = {name: {} for name in ("ms", "tflops", "error", "unavailable")}
    return {"cell": cell.name, **empty}


@pytest.fixture
def small(monkeypatch):
    """Cells of a batch that a CPU can do, of attentions that differ at such lengths."""
    monkeypatch.setattr(cells, "TOKENS", 64)
    monkeypatch.setattr(cells, "WIDTH", 32)
    for name, value in {"WINDOW": 5, "DOCUMENT": 10, "PREFIX": 7, "CHUNK": 8, "SINKS": 2}.items():
        monkeypatch.setattr(attentions, name, value)
    monkeypatch.setattr(attentions, "CAP", 0.5)
    monkeypatch.setattr(attentions, "HEADS", 2)
    monkeypatch.setattr(attentions, "ROWS", 9)
    monkeypatch.setattr(accuracy, "ROWS", 9)
    for module in (fa4, peers):
        monkeypatch.setattr(module, "DOCUMENT", 10)


def peer(function):
    @contextmanager
    def entered(cell, attention, inputs):
        yield lambda: function(cell, attention, inputs)

    return entered


def dense(attention, shape):
    """The mask as a boolean matrix for each (batch, head)."""
    b, h, q, kv = (torch.arange(size).reshape(-1, *[1] * (3 - i)) for i, size in enumerate(shape))
    seen = torch.ones(shape, dtype=torch.bool)
    return seen & attention.mask_mod(b, h, q, kv) if attention.mask_mod else seen


def exact(cell, attention, inputs):
    """Of attentions without a score function."""
    shape = (cell.batch, cell.num_heads, cell.seq_len, cell.seq_len)
    return scaled_dot_product_attention(*inputs, attn_mask=dense(attention, shape))


def refusing(cell, attention, inputs):
    raise RuntimeError("No available kernel.\nAborting execution.")


# --- cells and attentions -------------------------------------------------------------------------


def test_the_grid():
    assert len(GRID) == 18
    assert {(c.qk_head_dim, c.attention, c.seq_len) for c in GRID} == {
        (d, mask, s)
        for d in (64, 128, 256)
        for mask in ("full", "causal")
        for s in (2048, 8192, 16384)
    }
    for c in GRID:
        assert c.in_grid and c.dtype == "bfloat16"
        assert c.batch * c.seq_len == 16384
        assert c.num_heads * c.qk_head_dim == 2048
    assert sum(c.in_grid for c in FORWARD) == len(GRID)


def test_the_variants():
    others = ("alibi_slopes", "dropout")
    assert [c.attention for c in VARIANTS] == [n for n in ATTENTIONS if n not in others]
    for c in VARIANTS:
        assert (c.batch, c.num_heads, c.seq_len, c.dtype) == (1, 16, 16384, "bfloat16")
        assert (c.qk_head_dim, c.v_head_dim) == (128, 128)
        assert c.title


@pytest.mark.parametrize("some", [FORWARD, VARIANTS, BACKWARD])
def test_names_are_unique(some):
    assert len({c.name for c in some}) == len(some)


def test_every_cell_has_a_spec():
    for c in CELLS:
        homes = [ROOT / "specs", ROOT / "benchmarks" / "specs"]
        assert any((home / f"{c.module}.py").exists() for home in homes), c.module


PREDICATES = {
    "full": lambda q, k: True,
    "causal": lambda q, k: k <= q,
    "dropout": lambda q, k: k <= q,
    "window": lambda q, k: q - 5 <= k <= q,
    "documents": lambda q, k: k <= q and any(
        first <= k and q < first + 10 for first in range(0, 100, 10)
    ),
    "softcap": lambda q, k: k <= q,
    "alibi": lambda q, k: k <= q,
    "alibi_slopes": lambda q, k: k <= q,
    "prefix": lambda q, k: k <= q or k < 7,
    "chunked": lambda q, k: k <= q and any(
        first <= k and q < first + 8 for first in range(0, 100, 8)
    ),
    "sink_window": lambda q, k: q - 5 <= k <= q or k < min(2, q + 1),
}  # fmt: skip


@pytest.mark.parametrize("seq_len", [1, 2, 7, 64])
@pytest.mark.parametrize("name", ATTENTIONS)
def test_what_is_seen_and_counted(small, name, seq_len):
    attention = ATTENTIONS[name](seq_len, CPU)
    seen = [[PREDICATES[name](q, k) for k in range(seq_len)] for q in range(seq_len)]
    assert dense(attention, (1, 1, seq_len, seq_len))[0, 0].tolist() == seen
    assert visible_pairs(attention, seq_len, CPU) == sum(map(sum, seen))


def test_what_the_variants_show_at_their_size():
    counts = {c.attention: visible_pairs(ATTENTIONS[c.attention](4096, CPU), 4096, CPU)
              for c in VARIANTS}  # fmt: skip
    triangle = [n * (n + 1) // 2 for n in range(4097)]
    windowed = 1025 * 4096 - triangle[1024]
    assert counts == {
        "full": 4096**2,
        "causal": triangle[4096],
        "window": windowed,
        "documents": 4 * triangle[1000] + triangle[96],
        "softcap": triangle[4096],
        "alibi": triangle[4096],
        "prefix": 4096**2,
        "chunked": 2 * triangle[2048],
        "sink_window": windowed + sum(min(4, max(0, q - 1024)) for q in range(4096)),
    }


@pytest.mark.parametrize("name", ["alibi", "alibi_slopes"])
def test_the_slopes_are_those_of_the_paper(name):
    """Of 16 heads: 2 ** -0.5, 2 ** -1 ... 2 ** -8."""
    score_mod = ATTENTIONS[name](8, CPU).score_mod
    heads = torch.arange(16)
    biases = score_mod(torch.tensor(1.0), 0, heads, torch.tensor(7), torch.tensor(3))
    expected = [1 - 4 * 2 ** (-8 * (head + 1) / 16) for head in range(16)]
    torch.testing.assert_close(biases.detach(), torch.tensor(expected))


def test_flops_of_known_cells():
    wide = next(c for c in FORWARD if c.module == "causal_d192_v128")
    assert wide.flops(7) == 2 * 1 * 10 * 7 * (192 + 128)
    short = next(c for c in GRID if c.name == "full_d128 S=8192")
    assert short.flops(8192**2) == 4 * 2 * 16 * 8192 * 8192 * 128


@pytest.mark.parametrize("name", ATTENTIONS)
def test_exact_heads_are_what_torch_computes(small, name):
    c = cell(name)
    attention, inputs = ATTENTIONS[name](32, CPU), make_inputs(c, CPU)
    shape = (c.batch, c.num_heads, 32, 32)
    q, k, v = (x.double() for x in inputs)
    scores = q @ k.mT / 4
    distance = torch.arange(32)[None, :] - torch.arange(32)[:, None]
    if name == "softcap":
        scores = 0.5 * torch.tanh(scores / 0.5)
    if name.startswith("alibi"):
        scores = scores + 2.0 ** (-0.5 * torch.arange(1, 3))[:, None, None] * distance
    scores = scores.masked_fill(~dense(attention, shape), -math.inf)
    out = dropped(torch.softmax(scores, -1), attention.parameters) @ v
    assert accuracy.relative_error([out], accuracy.exact_heads(c, attention, inputs)) < 1e-6


# --- peers ----------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore")  # eager FlexAttention says that it is slow
@pytest.mark.parametrize("name", [name for name in ATTENTIONS if name != "dropout"])
def test_flex_attention_computes_it(small, name, monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)
    peers.compiled_flex.cache_clear()
    c = cell(name, seq_len=128)
    monkeypatch.setattr(cells, "TOKENS", 128)
    attention, inputs = ATTENTIONS[name](128, CPU), make_inputs(c, CPU)
    with torch.no_grad(), peers.flex(c, attention, inputs) as call:
        error = accuracy.relative_error(
            as_results(call()), accuracy.exact_heads(c, attention, inputs)
        )
    peers.compiled_flex.cache_clear()
    assert error < 1e-6


@pytest.mark.filterwarnings("ignore:.*eager reference")
@pytest.mark.parametrize("c", (*VARIANTS, DROPOUT), ids=lambda c: c.module)
def test_the_modules_compute_it(small, monkeypatch, c):
    """On a CPU by their reference, whose parameters are those of the kernel."""
    monkeypatch.setattr(cells, "TOKENS", 64)
    monkeypatch.setattr(cells, "WIDTH", 2048)
    c = replace(c, seq_len=64)
    attention, inputs = ATTENTIONS[c.attention](64, CPU), make_inputs(c, CPU)
    with peers.flashgen(c, attention, inputs) as call:
        error = accuracy.relative_error(
            as_results(call()), accuracy.exact_heads(c, attention, inputs)
        )
    assert error < 5e-3


def test_peers_of_the_cells():
    by_module = {c.module: peers.peers_of(c) for c in CELLS}
    own = ("flashgen", "FlexAttention")
    assert by_module["causal_d128"] == (*own, "SDPA cuDNN", "SDPA flash")
    assert by_module["causal_fp32_d64"] == (*own, "SDPA efficient")
    assert by_module["documents_d128"] == (*own, "varlen_attn")
    assert by_module["softcap_d128"] == by_module["window_d128"] == own
    assert by_module["dropout_causal_d64"] == ("flashgen", "SDPA cuDNN", "SDPA flash")
    for c in CELLS:
        assert set(peers.peers_of(c, with_fa4=True)) <= set(peers.PEERS)
        assert ("FA4" in peers.peers_of(c, with_fa4=True)) == (
            c.dtype != "float32" and c.attention != "dropout"
        )
        assert ("FA4 mask_mod" in peers.peers_of(c, with_fa4=True)) == (c.attention == "chunked")


@pytest.mark.parametrize("name", ["SDPA cuDNN", "varlen_attn"])
def test_a_peer_refuses_what_it_does_not_have(small, name):
    with (
        pytest.raises(NotImplementedError, match="no chunked"),
        peers.PEERS[name](cell("chunked"), Attention(), ()),
    ):
        pass


def test_varlen_attn_is_given_the_documents(small, monkeypatch):
    given = []

    def varlen_attn(q, k, v, cu_q, cu_k, max_q, max_k, *, window_size):
        given.extend([cu_q.tolist(), cu_k.tolist(), max_q, max_k, window_size, q.shape])
        return q

    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", varlen_attn)
    monkeypatch.setattr(cells, "TOKENS", 32)
    c = cell("documents")
    inputs = make_inputs(c, CPU)
    with peers.varlen(c, ATTENTIONS["documents"](32, CPU), inputs) as call:
        assert torch.equal(call(), inputs[0])
    assert given == [[0, 10, 20, 30, 32], [0, 10, 20, 30, 32], 10, 10, (-1, 0), (32, 2, 16)]


# --- measuring ------------------------------------------------------------------------------------


def test_measure_keeps_every_repetition_and_reverses_every_second(small):
    order = []

    def named(name):
        def function(cell, attention, inputs):
            order.append(name)
            return exact(cell, attention, inputs)

        return peer(function)

    c = cell()
    row = row_of(c)
    pair = {"flashgen": named("flashgen"), "FlexAttention": named("FlexAttention")}
    times = iter([0.5, 1.0, 2.0, 4.0])
    again = iter([0.6, 1.2, 2.4, 4.8])
    timers = {"ms": lambda call: (call(), next(times))[1], "sustained_ms": lambda call: next(again)}
    for repetition in range(2):
        measuring.measure(c, row, pair, repetition, CPU, timers)
    there, back = ["flashgen", "FlexAttention"], ["FlexAttention", "flashgen"]
    assert order == there + there + back  # once for the errors, and then timed
    assert row["ms"] == {"flashgen": [0.5, 4.0], "FlexAttention": [1.0, 2.0]}
    assert row["sustained_ms"] == {"flashgen": [0.6, 4.8], "FlexAttention": [1.2, 2.4]}
    flops = 2 * 2 * 2 * (32 * 33 // 2) * (16 + 16)
    assert row["tflops"]["flashgen"] == [round(flops / ms / 1e9, 1) for ms in (0.5, 4.0)]
    assert row["sustained_tflops"]["flashgen"] == [round(flops / ms / 1e9, 1) for ms in (0.6, 4.8)]
    assert (row["visible_pairs"], row["gflop"]) == (32 * 33 // 2, round(flops / 1e9, 1))
    assert set(row["error"]) == set(pair)


def test_a_peer_that_refuses_is_noted_and_left_out(small):
    c = cell()
    row = row_of(c)
    calls = []
    both = {
        "flashgen": peer(exact),
        "SDPA flash": peer(lambda *given: (calls.append(1), refusing(*given))),
    }
    for repetition in range(2):
        measuring.measure(c, row, both, repetition, CPU, ONE)
    assert row["unavailable"] == {"SDPA flash": "RuntimeError: No available kernel."}
    assert len(calls) == 1
    assert row["ms"] == {"flashgen": [1.0, 1.0]}


def test_flashgen_may_not_refuse(small):
    with pytest.raises(RuntimeError, match="No available kernel"):
        measuring.measure(cell(), row_of(cell()), {"flashgen": peer(refusing)}, 0, CPU, ONE)


def test_a_wrong_output_is_found(small):
    c = cell()
    rows = []
    for error in (0.0, 0.05, math.nan):
        rows.append(row_of(c) | {"cell": f"off by {error}"})
        rounded = peer(lambda *given: exact(*given).bfloat16())
        wrong = peer(lambda *given, error=error: exact(*given) * (1 + error))
        both = {"flashgen": wrong, "FlexAttention": rounded}
        measuring.measure(c, rows[-1], both, 0, CPU, ONE)
    assert accuracy.wrong_cells(rows) == ["off by 0.05", "off by nan"]


def test_with_dropout_peers_drop_other_weights_and_are_timed_all_the_same(small):
    c = cell("dropout")
    row = row_of(c)

    def own(cell, attention, inputs):
        shape = (cell.batch, cell.num_heads, cell.seq_len, cell.seq_len)
        scores = (inputs[0] @ inputs[1].mT / 4).masked_fill(~dense(attention, shape), -math.inf)
        return dropped(torch.softmax(scores, -1), attention.parameters) @ inputs[2]

    both = {"flashgen": peer(own), "SDPA flash": peers.sdpa(SDPBackend.MATH)}
    measuring.measure(c, row, both, 0, CPU, ONE)
    assert set(row["error"]) == {"flashgen"} and row["error"]["flashgen"] < 1e-6
    assert not row["unavailable"] and set(row["ms"]) == set(both)
    assert accuracy.wrong_cells([row]) == []


def test_a_peer_that_computes_something_else_is_noted_and_not_timed(small):
    c = cell()
    row = row_of(c)
    both = {"flashgen": peer(exact), "FA4": peer(lambda *given: exact(*given) * 1.5)}
    measuring.measure(c, row, both, 0, CPU, ONE)
    assert row["unavailable"] == {"FA4": "ValueError: wrong output, 0.5 off"}
    assert set(row["ms"]) == set(row["error"]) == {"flashgen"}


def test_extra_memory_is_what_is_no_output(monkeypatch):
    out = torch.empty(2, 2, 32, 16)
    monkeypatch.setattr(measuring, "peak_bytes", lambda call: (out.nbytes + 512, call()))
    assert measuring.extra_bytes(lambda: out) == 512


@pytest.mark.parametrize(
    "gpu, form", [("sm_90", "hopper"), ("sm_80", "portable"), ("sm_120", "portable")]
)
def test_a_row_tells_the_kernel_that_runs(gpu, form, monkeypatch):
    module = ModuleType("module")
    module.CONFIGS = {"sm_80": {"BLOCK_M": 64}, "sm_90": {"BLOCK_M": 128}}
    module.HOPPER_CONFIG = {"BLOCK_M": 192}
    monkeypatch.setattr(record, "target", lambda: gpu)
    told = record._kernel(
        module, Seal("s", "b", {"portable": "portable digest", "hopper": "gluon digest"})
    )
    assert told["form"] == form
    assert told["kernel"] == ("gluon digest" if form == "hopper" else "portable digest")
    assert told["config"] == {"sm_80": {"BLOCK_M": 64}, "sm_90": {"BLOCK_M": 192}}.get(gpu)
    del module.HOPPER_CONFIG
    assert record._kernel(module, None)["form"] == "portable"
