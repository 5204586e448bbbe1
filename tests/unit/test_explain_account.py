"""The account of a variant: beside a brute-force count, the tuner's own figures, and as JSON."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from flashgen import (
    AttentionSpec,
    Blocks,
    Constant,
    Float,
    Int,
    Tensor,
    block_sparse,
    causal,
    dilated,
    document,
    full,
    sliding_window,
)
from flashgen.budget.targets import get_target
from flashgen.budget.traffic import Workload, traffic
from flashgen.config import KernelConfig
from flashgen.errors import FlashgenError
from flashgen.explain import visible
from flashgen.explain.call import Asked, named_values, workload
from flashgen.explain.document import from_json, to_json
from flashgen.explain.kernels import Chosen
from flashgen.explain.lengths import explain_lengths
from flashgen.explain.picture import picture_of
from flashgen.explain.variant import explain, explain_variant
from flashgen.explain.visible import visible_share
from flashgen.explain.works import measured
from flashgen.kernels.forward_hopper.shared_memory import visiting_rows
from flashgen.loader import Variant, load
from flashgen.place import Place
from flashgen.plan import lower
from flashgen.reference import visibility
from flashgen.symbols import evaluate
from flashgen.tuning.choose import choices, digests, search_spaces
from flashgen.tuning.store import Measurement, TuneResult, load_results, save_results
from support.variants import kernel_digest

ROOT = Path(__file__).parents[2]
SPECS, GENERATED = ROOT / "specs", ROOT / "generated"


def account(spec: AttentionSpec, target: str | None = None, **asked):
    return explain_variant(Variant("x", spec, "x.py"), target, Asked(**asked), Path("nowhere"))


def share(plan, work: Workload, block_m: int = 32, block_n: int = 16):
    """What is counted with the help of tiles of this size."""
    return visible_share(plan, work, picture_of(plan, work, KernelConfig(block_m, block_n, 4, 2)))


def shipped(name: str, **asked):
    [found] = explain([SPECS / f"{name}.py"], None, Asked(**asked), GENERATED)
    return found


LEFT = Int("left", 20)
MASKS = {
    "full": full(),
    "causal": causal(align="bottom_right"),
    "window": sliding_window(LEFT, 9, align="top_left"),
    "outside a window": ~sliding_window(LEFT, 9, align="top_left"),
    "two runs": (lambda b, h, q, k: (k < 10) | (q - k == 3) | (k > q + 20)),
    "not affine": (lambda b, h, q, k: (q * k) % 7 < 3),
    "tables": block_sparse([[1, 0, 1, 0, 1], [0, 1, 1, 0, 0]] * 5, 40) & causal(align="top_left"),
    "quotients": (lambda b, h, q, k: (q // 7 + k // 5) % 3 == (q ^ k) % 2),
    "dilated": dilated(3) & causal(align="top_left"),
}


@pytest.mark.parametrize("lengths", [(64, 64), (70, 170), (97, 33)], ids=str)
@pytest.mark.parametrize("name", MASKS)
def test_the_visible_share_is_that_of_the_elements(name, lengths) -> None:
    plan = lower(AttentionSpec(64, mask=MASKS[name]), "x")
    if plan.equal_lengths:
        lengths = (97, 97)
    seen = visibility(plan.spec.mask, 1, 1, *lengths, params={"left": 20})
    expected = seen.expand(1, 1, *lengths).double().mean().item()
    found = share(plan, workload(plan, Asked(*lengths)))
    assert found.share == pytest.approx(expected)
    assert found.rows_counted is None


def test_documents_are_counted_to_the_last_key() -> None:
    plan = lower(AttentionSpec(64, mask=document() & causal()), "x")
    work = workload(plan, Asked(q_len=2500, batch=1))
    ids = torch.arange(2500)[None] // 1000
    seen = visibility(plan.spec.mask, 1, 1, 2500, 2500, params={plan.params[0].name: ids})
    assert share(plan, work).share == pytest.approx(seen.double().mean().item())


def test_many_elements_are_counted_over_some_queries(monkeypatch) -> None:
    plan = lower(AttentionSpec(64, mask=MASKS["not affine"]), "x")
    work = Workload(1, 1, 1, 300, 300)
    whole = share(plan, work)
    monkeypatch.setattr(visible, "MOST_ELEMENTS", 304 * 300 // 4)
    some = share(plan, work)
    assert some.rows_counted == 75
    assert some.share == pytest.approx(whole.share, abs=0.02)


def test_a_mask_of_conditions_has_some_that_hold() -> None:
    table = Tensor("table", ("q_len", "kv_len"), "bool")
    plan = lower(AttentionSpec(64, mask=lambda b, h, q, k: table[q, k]), "x")
    found = share(plan, workload(plan, Asked(q_len=256)))
    assert found.share == pytest.approx(0.25, abs=0.02)


@pytest.mark.parametrize("name", ["window_d128", "causal_d64", "causal_fp32_d64", "full_d128"])
def test_kernels_are_those_that_a_build_publishes(name) -> None:
    found = shipped(name, q_len=2048)
    [variant] = load([SPECS / f"{name}.py"])
    plan = lower(variant.spec, name)
    spaces = search_spaces(plan)
    results = load_results(GENERATED / "tuning" / f"{name}.json")
    published = choices(plan, digests(plan, spaces), spaces, results)
    expected = {
        key: (published[key].configs["sm_90"], spaces[key]["sm_90"])
        for key in ("hopper", "portable")
        if published[key].configs
    }
    assert [kernel.form for kernel in found.kernels] == list(expected)
    assert found.without == published["hopper"].why_not
    for kernel in found.kernels:
        choice, space = expected[kernel.form]
        assert (kernel.config, kernel.shared) == (choice.config, choice.shared)
        how = "by model" if choice.source == "model" else "measured on NVIDIA H200"
        assert kernel.chosen.startswith(how)
        assert kernel.candidates == len(space.candidates)
        assert [(r.config, r.reason) for r in kernel.rejected] == list(space.rejected)
        assert sum(buffer.bytes for buffer in kernel.buffers) == kernel.shared <= kernel.limit
        assert all(buffer.formula and buffer.meaning for buffer in kernel.buffers)


def test_measured_rates_stand_beside_the_rooflines_of_their_calls(tmp_path: Path) -> None:
    # The shipped rates may be of kernels before today's: these say that they are of today's.
    variant = load([SPECS / "causal_d256.py"])[0]
    plan = lower(variant.spec, variant.name)
    own = digests(plan, search_spaces(plan))
    results = load_results(GENERATED / "tuning" / "causal_d256.json")
    today = [replace(result, kernel=own[result.form]) for result in results]
    save_results(Place(tmp_path, variant.name).tuning, today)
    found = explain_variant(variant, None, Asked(q_len=1024), tmp_path)
    assert {(m.form, m.length) for m in found.measured} == {
        (form, length) for form in ("hopper", "portable") for length in (2048, 16384)
    }
    for m in found.measured:
        assert m.batch * m.length == 16384
        assert m.share == m.roofline_ms / m.ms
        # FLOPs of the visible elements in the measured time, and in the least.
        assert 0 < m.share < 1
    # Alone in front of the matrix units: half of all elements, four FLOPs each and column.
    longest = next(m for m in found.measured if (m.form, m.length) == ("hopper", 16384))
    least = 8 * 16384**2 / 2 * 4 * 256 / (get_target("sm_90").peak_tflops("bf16") * 1e12)
    assert longest.bound == "compute"
    assert longest.roofline_ms == pytest.approx(1e3 * least, rel=0.02)


def test_what_was_measured_of_longer_constants_is_left_out() -> None:
    def rates(blocks: int) -> set[int]:
        table = [[True] * blocks] * blocks
        layout = Constant("layout", table, dims=(("q_len", 128), ("kv_len", 128)))
        plan = lower(AttentionSpec(128, mask=block_sparse(layout, 128)), "mine")
        digest = kernel_digest(plan)
        config = KernelConfig(64, 64, 4, 2)
        rate = Measurement(config, (1.0, 2.0), (300.0, 400.0))
        lengths = (2048, 16384)
        result = TuneResult("sm_90", "GPU", "3.6.0", digest, lengths, (rate,), (), "complete")
        chosen = Chosen({}, {}, {}, {"portable": digest}, "")
        return {m.length for m in measured(plan, "sm_90", chosen, [result])}

    assert rates(128) == {2048, 16384}
    assert rates(64) == {2048}


def test_the_kernels_work_is_what_the_tuner_counts() -> None:
    found = shipped("window_d128", q_len=4096, batch=2, heads=8, kv_heads=2)
    plan = lower(load([SPECS / "window_d128.py"])[0].spec, "window_d128")
    work = Workload(2, 8, 2, 4096, 4096, (("left", 1024),))
    hopper, own = found.kernels[0], found.works[-1]
    counted = traffic(plan, hopper.config, get_target("sm_90"), work)
    computed = traffic(plan, visiting_rows(plan, hopper.config), get_target("sm_90"), work)
    assert own.name == "this Gluon kernel"
    assert (own.flops, own.exponentials) == (computed.flops, computed.exponentials)
    assert 0.8 * counted.flops < own.flops < counted.flops
    assert own.l2_read + own.l2_written == counted.l2_bytes
    assert own.dram_read + own.dram_written == counted.dram_bytes
    tiles = found.mask.tiles
    assert 16 * tiles["unmasked"] == counted.full_tiles
    assert 16 * tiles["masked"] == counted.masked_tiles


def test_heads_that_share_keys_share_tiles_where_the_kernel_has_it_so() -> None:
    call = {"q_len": 1, "kv_len": 8192, "batch": 16, "heads": 32}
    grouped, apart = (shipped("full_d128", kv_heads=heads, **call) for heads in (8, 32))
    together, alone = (found.works[-1] for found in (grouped, apart))
    assert "rows of 4 heads" in together.said and "rows of" not in alone.said
    keys = 2 * 16 * 8 * 8192 * 128 * 2
    queries = 16 * 32 * 128 * 2
    assert together.l2_read == keys + queries
    assert alone.l2_read == 4 * keys + queries
    assert 4 * together.flops == alone.flops
    assert grouped.mask.picture.block_m == 32 and apart.mask.picture.block_m == 128
    assert 3 < apart.kernels[0].seconds / grouped.kernels[0].seconds < 4.5
    # Each head has tiles of its own in the portable kernel.
    portable = grouped.works[-2]
    assert portable.name == "this kernel" and portable.l2_read == alone.l2_read


def test_each_algorithm_is_bound_by_its_slowest_unit() -> None:
    found = account(AttentionSpec(64, mask=full(), targets=("sm_80",)), q_len=8192)
    works = {work.name: work for work in found.works}
    assert list(works) == [
        "standard", "1D tiling", "2D tiling", "online softmax", "FlashAttention-1", "this kernel",
    ]  # fmt: skip
    for work in works.values():
        assert work.roofline == max(work.seconds.values()) == work.seconds[work.bound]
        assert work.intensity == work.flops / (work.dram_read + work.dram_written)
    assert works["standard"].bound == works["2D tiling"].bound == "memory"
    assert works["this kernel"].bound in ("compute", "L2")
    assert "needs" in works["1D tiling"].problem
    assert not any(work.problem for work in works.values() if work.name != "1D tiling")
    # One product of a full square each: nothing is skipped, and nothing is computed twice.
    assert len({work.flops for work in works.values()}) == 1
    order = ["standard", "2D tiling", "FlashAttention-1", "this kernel"]
    moved = [works[name].dram_read + works[name].dram_written for name in order]
    assert moved == sorted(moved, reverse=True)


def test_a_short_call_has_room_for_all_keys() -> None:
    found = account(AttentionSpec(64, mask=full(), targets=("sm_80",)), q_len=256)
    one_d = next(work for work in found.works if work.name == "1D tiling")
    assert not one_d.problem and one_d.shared <= get_target("sm_80").max_shared
    assert one_d.tile.endswith(" rows")


def test_a_mask_skips_what_other_algorithms_compute() -> None:
    windowed = shipped("window_d128")
    standard, own = windowed.works[0], windowed.works[-1]
    assert own.flops / standard.flops == pytest.approx(windowed.mask.share, rel=0.15)
    steps = {step.name: step for step in windowed.training}
    assert steps["FlashAttention-1"].flops < 0.1 * steps["standard"].flops


def test_listed_tiles_are_counted_as_listed() -> None:
    layout = [[(i + j) % 4 == 0 for j in range(16)] for i in range(16)]
    spec = AttentionSpec(
        64,
        mask=block_sparse(layout, 64),
        targets=("sm_90",),
        blocks=Blocks(BLOCK_M=128, BLOCK_N=64),
    )
    found = account(spec, heads=1, batch=1)
    assert (found.call.q_len, found.call.kv_len) == (1024, 1024)
    assert found.mask.share == 0.25
    assert found.mask.tiles == {"skipped": 64, "masked": 64, "unmasked": 0}
    assert found.works[-1].flops == 64 * 4 * 128 * 64 * 64
    assert found.mask.listed and not found.mask.runs
    assert all(kernel.seconds is None for kernel in found.kernels)
    [note] = found.mask.notes
    assert note.startswith("tiles are listed once a call, by the table of blocks in layout[")


def test_what_bounds_could_not_follow_is_said() -> None:
    found = account(AttentionSpec(64, mask=MASKS["not affine"]), q_len=256)
    assert found.mask.notes[0].startswith(
        "no exact range of keys: not affine in q_idx and kv_idx: "
    )
    assert found.mask.tiles["skipped"] == found.mask.tiles["unmasked"] == 0
    assert found.mask.share < 0.6


def test_formulas_are_those_of_the_bounds() -> None:
    [run] = shipped("window_d128", q_len=1024).mask.runs
    assert run.begin == "max(0, q_first + kv_len - q_len - left)"
    assert run.full_end == "max(0, q_first + kv_len - q_len + 1)"


def test_another_target_than_the_specs_is_what_a_build_for_it_makes() -> None:
    spec = AttentionSpec(64, mask=causal(), targets=("sm_80",))
    assert account(spec, q_len=512).target == "sm_80"
    elsewhere = account(spec, "gfx942", q_len=512)
    assert (elsewhere.target, elsewhere.gpu) == ("gfx942", "MI300X")
    assert elsewhere.kernels[0].limit == 64 * 1024


@pytest.mark.parametrize("name", ["window_d128", "documents_d128", "causal_fp32_d64"])
def test_json_holds_all_of_an_account(name) -> None:
    found = shipped(name, q_len=3000)
    text = to_json([found, found])
    assert from_json(text) == [found, found]
    document = json.loads(text)
    assert document["schema"] == 1 and len(document["accounts"]) == 2
    assert document["accounts"][0]["mask"]["picture"]["rows"] == list(found.mask.picture.rows)


def test_json_of_another_schema_or_type_is_refused() -> None:
    document = json.loads(to_json([shipped("full_d64", q_len=512)]))
    with pytest.raises(ValueError, match="schema 2, not 1"):
        from_json(json.dumps({**document, "schema": 2}))
    document["accounts"][0]["variant"] = 5
    with pytest.raises(ValueError, match="5 is no str"):
        from_json(json.dumps(document))
    del document["accounts"][0]["variant"]
    with pytest.raises(ValueError, match="not the fields of"):
        from_json(json.dumps(document))


def test_shapes_and_numbers_are_those_asked_for() -> None:
    spec = AttentionSpec(64, mask=sliding_window(LEFT, 0, align="bottom_right"))
    wide = account(spec, q_len=300, kv_len=500, batch=3, heads=4, kv_heads=2)
    call = wide.call
    assert (call.batch, call.num_q_heads, call.num_kv_heads) == (3, 4, 2)
    assert (call.q_len, call.kv_len, call.params) == (300, 500, (("left", "20"),))
    narrow = account(spec, q_len=300, kv_len=500, params=(("left", "3"),))
    assert narrow.call.params == (("left", "3"),)
    assert narrow.mask.share == pytest.approx(4 / 500)


CAP = Float("cap", 30.0, above=0.0)
SLOPES = Constant("slopes", [0.5, 0.25, 0.125], dims=("num_q_heads",))


def capped(score, b, h, q, k):
    return score / CAP + SLOPES[h] * k


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        (
            {"params": (("right", "1"),)},
            "--param=right=1: x has no number of this name; write one of left, cap",
        ),
        ({"params": (("left", "x"),)}, "--param=left=x: not a whole number; write one"),
        (
            {"params": (("left", "-1"),)},
            "--param=left=-1: out of range; write a number from 0 to 2**30",
        ),
        (
            {"params": (("left", "1073741825"),)},
            "--param=left=1073741825: out of range; write a number from 0 to 2**30",
        ),
        ({"params": (("cap", "0"),)}, "--param=cap=0: not above 0; write a number that is"),
        ({"params": (("cap", "inf"),)}, "--param=cap=inf: not a finite number; write one"),
        ({"params": (("cap", "nan"),)}, "--param=cap=nan: not a finite number; write one"),
        (
            {"heads": 4},
            "--heads=4: constant 'slopes' of x is for 3; write --heads=3",
        ),
        (
            {"kv_heads": 2},
            "--kv-heads=2: 3 query heads cannot share them evenly; write a divisor of 3",
        ),
        (
            {"q_len": 64, "kv_len": 65},
            "--kv-len=65: the call has 64 queries, and in x sliding_window(left, 0) is for equal "
            "lengths only; rebuild the spec with align='top_left' or align='bottom_right', or "
            "leave --kv-len out",
        ),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_a_call_that_attention_would_refuse(asked, says) -> None:
    spec = AttentionSpec(64, mask=sliding_window(LEFT, 0), score=capped)
    with pytest.raises(FlashgenError) as caught:
        account(spec, **asked)
    assert str(caught.value) == says


def test_values_are_named() -> None:
    assert named_values(["left=5", "cap = 3"]) == (("left", "5"), ("cap", "3"))
    for wrong in ("left", "=5", "left="):
        with pytest.raises(FlashgenError, match="not NAME=VALUE; write --param left=512"):
            named_values([wrong])


def test_blocks_that_do_not_fit_are_refused_as_a_build_does() -> None:
    spec = AttentionSpec(
        256, mask=full(), blocks=Blocks(BLOCK_M=128, BLOCK_N=128, num_stages=3), targets=("sm_90",)
    )
    with pytest.raises(FlashgenError, match="SRAM budget exceeded on sm_90: needs"):
        account(spec)


def test_dropout_and_scores_cost_standard_attention_a_pass_each() -> None:
    bare = account(AttentionSpec(64, mask=full(), targets=("sm_90",)), q_len=512)
    more = account(
        AttentionSpec(
            64,
            mask=full(),
            score=lambda score, b, h, q, k: score + k,
            dropout=True,
            targets=("sm_90",),
        ),
        q_len=512,
    )
    scores = bare.call.batch * bare.call.num_q_heads * 512 * 512
    assert more.works[0].l2_read - bare.works[0].l2_read == 2 * 2 * scores
    assert more.works[0].l2_written - bare.works[0].l2_written == (2 * 2 + 1) * scores
    assert not more.without  # it has a Gluon kernel


def test_what_is_left_out_is_said() -> None:
    [cut, first] = shipped("documents_d128", q_len=2048).remarks
    assert "starts tiles of queries where segments begin" in cut
    assert first == "the mask differs between batch entries or heads; the first stands for all"
    assert not shipped("causal_d128", q_len=2048).remarks


def test_every_buffer_of_every_target_has_a_formula_that_is_read() -> None:
    spec = AttentionSpec((192, 128), mask=causal())
    for target in spec.targets:
        found = account(replace(spec, targets=(target,)), q_len=512)
        assert all(buffer.formula for kernel in found.kernels for buffer in kernel.buffers)


def test_the_masks_formula_evaluates_as_shown() -> None:
    plan = lower(AttentionSpec(64, mask=causal(align="top_left")), "x")
    [interval] = plan.bounds.intervals
    [run] = account(plan.spec, q_len=64).mask.runs
    at = {"q_first": 16, "q_last": 31, "kv_len": 64, "q_len": 64, "min": min, "max": max}
    assert eval(run.end, {}, at) == evaluate(interval.end, at) == 32


def test_made_keys_are_counted_as_many_as_there_are(tmp_path: Path) -> None:
    """Of a Linformer: its queries see the keys that matrices make, whatever the length."""
    file = tmp_path / "made.py"
    spec = 'AttentionSpec(64, linformer=256, targets=("sm_90",), name="made")'
    file.write_text(f"from flashgen import AttentionSpec\n\nspec = {spec}\n")
    [found] = explain([file], None, Asked(q_len=4096, heads=4, batch=2), GENERATED)
    assert found.call.kv_len == 256
    assert found.works[0].flops == 4 * 2 * 4 * 4096 * 256 * 64
    assert any("makes 256 keys" in remark for remark in found.remarks)
    [series] = explain_lengths([file], None, Asked(q_len=4096), GENERATED, (1024, 8192))
    assert [account.call.kv_len for account in series.accounts] == [256]
    with pytest.raises(FlashgenError, match="--kv-len=4096: queries of made see 256 keys"):
        next(explain([file], None, Asked(kv_len=4096), GENERATED))
