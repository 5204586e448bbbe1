"""The benchmark of the backward pass on the CPU: its cells, gradients, peers and bookkeeping."""

from __future__ import annotations

import re
from contextlib import contextmanager
from dataclasses import replace
from types import ModuleType

import pytest
import torch
from torch.nn.attention import SDPBackend

from benchmarks import accuracy, attentions, cells, command, measuring, passes, peers, record, table
from benchmarks.attentions import ATTENTIONS
from benchmarks.cells import BACKWARD, GRID, Cell
from benchmarks.inputs import make_inputs
from benchmarks.passes import BACKWARD_PASS, FORWARD_PASS, differentiated
from flashgen import AttentionSpec, Tensor, additive_bias, t5_bias
from flashgen.publish import Seal
from flashgen.reference import dropped
from support.variants import rendered_module

CPU = torch.device("cpu")
SMALL = {"WINDOW": 5, "DOCUMENT": 10, "PREFIX": 7, "CHUNK": 8, "SINKS": 2, "HEADS": 2, "CAP": 0.5}


@pytest.fixture
def small(monkeypatch):
    """Cells of one sequence that a CPU can do, of attentions that differ at such a length."""
    monkeypatch.setattr(cells, "TOKENS", 32)
    monkeypatch.setattr(cells, "WIDTH", 32)
    for name, value in SMALL.items():
        monkeypatch.setattr(attentions, name, value)
    monkeypatch.setattr(accuracy, "ROWS", 9)
    monkeypatch.setattr(peers, "DOCUMENT", 10)


def cell(attention="causal", seq_len=32, dtype="float32"):
    return Cell(f"{attention}_d16", attention, seq_len, 16, 16, dtype)


def row_of(cell):
    empty = {name: {} for name in ("ms", "tflops", "error", "unavailable")}
    return {"cell": cell.name, **empty}


def given_to(c):
    return c, ATTENTIONS[c.attention](c.seq_len, CPU), make_inputs(c, CPU)


def dense(cell, attention, inputs):
    """Attention as it is written down, to be differentiated by torch."""
    q, k, v = inputs
    shape = (cell.batch, cell.num_heads, cell.seq_len, cell.seq_len)
    b, h, i, j = (torch.arange(n).reshape(-1, *[1] * (3 - at)) for at, n in enumerate(shape))
    scores = q @ k.mT * q.shape[-1] ** -0.5
    if attention.score_mod:
        scores = attention.score_mod(scores, b, h, i, j)
    if attention.mask_mod:
        scores = scores.masked_fill(~attention.mask_mod(b, h, i, j), -torch.inf)
    return dropped(torch.softmax(scores, -1), attention.parameters) @ v


def peer(function):
    @contextmanager
    def entered(cell, attention, inputs):
        yield lambda: function(cell, attention, inputs)

    return entered


def gradients(name, entered, c):
    """What a peer's backward pass gives, and what that is in float64."""
    given = given_to(c)
    with torch.no_grad(), differentiated(name, entered)(*given) as call:
        return call(), accuracy.exact_gradients(*given)


def test_the_cells():
    assert BACKWARD[: len(GRID)] == GRID
    rest = BACKWARD[len(GRID) :]
    assert [c.attention for c in rest] == [
        "window",
        "documents",
        "softcap",
        "alibi_slopes",
        "dropout",
    ]
    assert all((c.seq_len, c.dtype, c.in_grid) == (16384, "bfloat16", False) for c in rest)
    assert all(c.title and c.qk_head_dim == 128 for c in rest[:-1])


def test_slopes_are_learned_for_the_heads_of_its_cell():
    [c] = [c for c in BACKWARD if c.attention == "alibi_slopes"]
    attention = ATTENTIONS[c.attention](8, CPU)
    assert attention.parameters["slopes"].shape == (c.num_heads,)
    assert attention.parameters["slopes"].requires_grad
    assert c.batch == 1


@pytest.mark.parametrize("name", ATTENTIONS)
def test_exact_gradients_are_those_of_torch(small, name):
    c, attention, inputs = given_to(cell(name))
    leaves = [x.double().requires_grad_() for x in inputs]
    learned = [attention.parameters[name] for name in attention.learned]
    out = dense(c, attention, leaves)
    grad_out = accuracy.make_gradient(c, CPU).double()
    expected = torch.autograd.grad(out, (*leaves, *learned), grad_out)
    found = accuracy.exact_gradients(c, attention, inputs)
    assert len(found) == 3 + len(attention.learned)
    assert accuracy.relative_error(expected, found) < 1e-6
    assert all(accuracy.relative_error(expected[:i], found[:i]) < 1e-6 for i in (1, 2, 3))


def test_the_worst_gradient_counts(small):
    c, attention, inputs = given_to(cell("alibi_slopes"))
    exact = accuracy.exact_gradients(c, attention, inputs)
    results = [torch.zeros(1, 2, 32, 16, dtype=torch.float64) for _ in range(3)]
    for result, x in zip(results, exact, strict=False):
        result[0] = x
    results.append(exact[3].clone())
    assert accuracy.relative_error(results, exact) == 0
    results[3] *= 1.5
    assert accuracy.relative_error(results, exact) == pytest.approx(0.5)
    results[1][0, 1] = torch.nan
    assert accuracy.relative_error(results, exact) != accuracy.relative_error(results, exact)


def test_what_several_sequences_learn_together_is_not_looked_at(small, monkeypatch):
    monkeypatch.setattr(cells, "TOKENS", 64)
    with pytest.raises(ValueError, match="of 2 sequences"):
        accuracy.exact_gradients(*given_to(cell("alibi_slopes")))


# --- peers ----------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:.*eager reference")
@pytest.mark.parametrize("c", BACKWARD[-5:], ids=lambda c: c.module)
def test_the_modules_compute_it(small, monkeypatch, c, tmp_path):
    """On a CPU by their reference, at the cell's own heads; what no module ships is built."""
    monkeypatch.setattr(cells, "TOKENS", 64)
    monkeypatch.setattr(cells, "WIDTH", 2048)
    monkeypatch.setattr(attentions, "HEADS", 16)
    monkeypatch.setattr(command, "BENCHMARK_MODULES", tmp_path)
    monkeypatch.setattr(peers, "BENCHMARK_MODULES", tmp_path)
    monkeypatch.setattr(command, "target", lambda: "sm_90")
    peers.load_module.cache_clear()
    command._build_missing_modules([c], BACKWARD_PASS)
    results, exact = gradients("flashgen", peers.flashgen, replace(c, seq_len=64))
    peers.load_module.cache_clear()
    assert len(results) == (4 if c.attention == "alibi_slopes" else 3)
    assert accuracy.relative_error(results, exact) < 2e-2


@pytest.mark.filterwarnings("ignore:.*eager reference")
def test_the_portable_peer_runs_no_gluon_kernel_and_leaves_no_trace(small, monkeypatch):
    module = peers.load_module("causal_d128")
    chooses = ("_runs_hopper", "_runs_hopper_backward")
    for name in chooses:
        monkeypatch.setattr(module, name, lambda q, k, v: True)
    monkeypatch.setattr(module, "_LAUNCHES", {"of Gluon": None})
    attention = attentions.Attention()
    c = replace(cell(), module="causal_d128")
    inputs = [torch.randn(1, 2, 32, 128, dtype=torch.bfloat16) for _ in range(3)]
    with peers.portable(c, attention, inputs) as call:
        assert not any(getattr(module, name)(*inputs) for name in chooses)
        assert module._LAUNCHES == {}
        module._LAUNCHES["portable"] = None
        assert torch.equal(call(), module.reference(*inputs))
    assert all(getattr(module, name)(*inputs) for name in chooses)
    assert module._LAUNCHES == {}


@pytest.mark.parametrize("name", ["full", "causal"])
def test_sdpa(small, name):
    sdpa = peers.sdpa(SDPBackend.FLASH_ATTENTION)
    results, exact = gradients("SDPA flash", sdpa, cell(name))
    assert accuracy.relative_error(results, exact) < 1e-5


def sequence_first(seen):
    """A peer of tensors (batch, seq, heads, head_dim) that notes them and its output's gradient."""

    @contextmanager
    def entered(cell, attention, inputs):
        tensors = [x.transpose(1, 2).contiguous() for x in inputs]
        seen.extend([*tensors, *inputs])

        def call():
            out = dense(cell, attention, [x.transpose(1, 2) for x in tensors])
            out = out.transpose(1, 2).contiguous()
            out.register_hook(lambda grad: seen.append(grad.is_contiguous()))
            return out.transpose(1, 2)

        yield call

    return entered


def test_tensors_lie_as_the_peer_has_them(small):
    """Nobody copies them, nor the gradient, inside the time."""
    seen = []
    results, exact = gradients("FA4", sequence_first(seen), cell())
    assert accuracy.relative_error(results, exact) < 1e-5
    assert [x.data_ptr() for x in seen[:3]] == [x.data_ptr() for x in seen[3:6]]
    assert seen[6] is True
    assert all(x.shape == (1, 2, 32, 16) for x in results)


def test_varlen_attn_is_differentiated(small, monkeypatch):
    def varlen_attn(q, k, v, cu_q, cu_k, max_q, max_k, *, window_size):
        assert all(x.is_contiguous() and x.shape == (32, 2, 16) for x in (q, k, v))
        tensors = [x.transpose(0, 1)[None] for x in (q, k, v)]
        return dense(cell("documents"), ATTENTIONS["documents"](32, CPU), tensors)[0].transpose(
            0, 1
        )

    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", varlen_attn)
    results, exact = gradients("varlen_attn", peers.varlen, cell("documents"))
    assert accuracy.relative_error(results, exact) < 1e-5


def test_the_forward_pass_runs_once(small):
    calls = []

    def counted(*given):
        calls.append(1)
        return dense(*given)

    with torch.no_grad(), differentiated("flashgen", peer(counted))(*given_to(cell())) as call:
        first, second = call(), call()
    assert len(calls) == 1
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_the_benchmarks_own_modules_are_tuned_for_the_pass(monkeypatch):
    asked = []

    def build(paths, options, progress):
        asked.append(([path.stem for path in paths], options.kernels, options.tune))
        return ()

    monkeypatch.setattr(command, "build", build)
    monkeypatch.setattr(command, "target", lambda: "sm_90")
    command._build_missing_modules(BACKWARD, BACKWARD_PASS)
    command._build_missing_modules(GRID, FORWARD_PASS, tune=False)
    assert asked == [
        (
            ["full_d256", "alibi_slopes_d128"],
            ("hopper_backward", "backward_keys", "backward_queries"),
            True,
        ),
        (["full_d256"], ("hopper", "portable"), False),
    ]


def test_every_peer_is_there_for_both_passes():
    assert FORWARD_PASS.peers.keys() == BACKWARD_PASS.peers.keys() == peers.PEERS.keys()
    assert set(passes.SEQUENCE_FIRST) <= peers.PEERS.keys()


# --- measuring ------------------------------------------------------------------------------------


def measured(c, **functions):
    row = row_of(c)
    named = {name: differentiated(name, peer(f)) for name, f in functions.items()}
    measuring.measure(c, row, named, 0, CPU, {"ms": lambda call: 2.0}, BACKWARD_PASS)
    return row


def test_rates_count_five_products_for_two(small):
    c = cell()
    row = measured(c, flashgen=dense)
    flops = 2.5 * 2 * 2 * (32 * 33 // 2) * (16 + 16)
    assert row["gflop"] == round(flops / 1e9, 1)
    assert row["tflops"] == {"flashgen": [round(flops / 2.0 / 1e9, 1)]}
    assert row["error"]["flashgen"] < 1e-5
    assert "error_of_learned" not in row


def test_gradients_of_what_is_learned_are_judged_by_themselves(small):
    """One number for each head: a peer's chance must not make ours wrong."""
    row = measured(cell("alibi_slopes"), flashgen=dense, FlexAttention=dense)
    assert row["error_of_learned"].keys() == {"flashgen", "FlexAttention"}
    row["error"] = {"flashgen": 0.002, "FlexAttention": 0.002}
    for error, wrong in ((0.04, False), (0.06, True), (float("nan"), True)):
        row["error_of_learned"]["flashgen"] = error
        assert bool(accuracy.wrong_cells([row])) == wrong


class Wrong(torch.autograd.Function):
    """Its argument; the gradient of what it is not."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return 1.3 * grad


def wrong_slopes(cell, attention, inputs):
    """Right but for the gradient of the slopes."""
    slopes = attention.parameters["slopes"]
    wrong = Wrong.apply(slopes)

    def score_mod(score, b, h, q_idx, kv_idx):
        return score + wrong[h] * (kv_idx - q_idx)

    changed = attentions.Attention(attention.mask_mod, score_mod)
    return dense(cell, changed, inputs)


@pytest.mark.parametrize(
    "name, function",
    [
        ("causal", lambda c, a, qkv: dense(c, a, (qkv[0], Wrong.apply(qkv[1]), qkv[2]))),
        ("alibi_slopes", wrong_slopes),
    ],
)
def test_a_peer_with_a_wrong_gradient_is_noted_and_not_timed(small, name, function):
    row = measured(cell(name), flashgen=dense, FlexAttention=function)
    assert row["unavailable"] == {"FlexAttention": "ValueError: wrong output, 0.3 off"}
    assert set(row["ms"]) == set(row["error"]) == {"flashgen"}


def test_a_peer_without_gradients_is_noted(small):
    def detached(*given):
        return dense(*given).detach()

    row = measured(cell(), flashgen=dense, FlexAttention=detached)
    assert "does not require grad" in row["unavailable"]["FlexAttention"]


def test_memory_beyond_the_gradients(monkeypatch):
    grads = tuple(torch.empty(2, 2, 32, 16) for _ in range(3))
    total = sum(x.nbytes for x in grads)
    monkeypatch.setattr(measuring, "peak_bytes", lambda call: (total + 512, call()))
    assert measuring.extra_bytes(lambda: grads) == 512


def test_a_row_tells_the_kernels_that_run(monkeypatch):
    module = ModuleType("module")
    module.BACKWARD_OF_KEYS = {"sm_90": {"BLOCK_M": 64}}
    module.BACKWARD_OF_QUERIES = {"sm_90": {"BLOCK_M": 128}}
    monkeypatch.setattr(record, "target", lambda: "sm_90")
    digests = {"portable": "forward", "backward_keys": "k", "backward_queries": "q"}
    told = record._backward_kernels(module, Seal("s", "b", digests))
    assert told["kernel"] == {"keys": "k", "queries": "q"}
    assert record._backward_kernels(module, None)["kernel"] is None
    assert told["config"] == {"keys": {"BLOCK_M": 64}, "queries": {"BLOCK_M": 128}}
    # Where the module has it, the Gluon kernel does.
    module.BACKWARD_HOPPER = {"BLOCK_M": 32}
    told = record._backward_kernels(module, Seal("s", "b", {**digests, "hopper_backward": "g"}))
    assert told == {"form": "hopper_backward", "kernel": "g", "config": {"BLOCK_M": 32}}
    monkeypatch.setattr(record, "target", lambda: "sm_80")
    assert record._backward_kernels(module, None)["form"] == "portable"
    assert record.protocol(BACKWARD_PASS)["flops"] == f"2.5 * {record.protocol()['flops']}"


def test_a_row_tells_of_the_portable_kernel_beside_the_one_in_gluon(monkeypatch):
    """Of a bias of each pair that heads share, beside logarithms of distances."""
    shared = additive_bias(Tensor("bias", ("batch", 1, "q_len", "kv_len")))
    spec = AttentionSpec(64, score=t5_bias().then(shared))
    module = rendered_module(spec, hopper=True)
    monkeypatch.setattr(record, "target", lambda: "sm_90")
    digests = {"portable": "f", "backward_queries": "q", "hopper_backward": "g"}
    told = record._backward_kernels(module, Seal("s", "b", digests))
    assert told["form"] == "hopper_keys"
    assert told["kernel"] == {"Gluon over keys": "g", "portable over queries": "q"}
    assert told["config"]["Gluon over keys"] == module.BACKWARD_HOPPER
    assert told["config"]["portable over queries"] == module.BACKWARD_OF_QUERIES["sm_90"]
    shown = table._configuration(told["config"])
    assert re.fullmatch(r"Gluon over keys: BLOCK_M=.*; portable over queries: BLOCK_M=.*", shown)


def test_cells_are_chosen_by_parts_of_their_names(monkeypatch):
    def chosen(*words):
        monkeypatch.setattr("sys.argv", ["benchmarks.backward", "--json", "x.json", *words])
        options = command._arguments("backward", BACKWARD, None, 1)
        assert options.repeat == 1 and options.no_tune == ("--no-tune" in words)
        return [c.name for c in command._chosen(BACKWARD, options.cells)]

    assert chosen() == [c.name for c in BACKWARD]
    assert chosen("--no-tune", "--cells", "causal_d64 S=2048", "alibi") == [
        "causal_d64 S=2048",
        "alibi_slopes_d128 S=16384",
    ]
    with pytest.raises(SystemExit):
        chosen("--cells", "causal", "nothing")
