"""Traces and placements as files: round trips, and one line for everything that is wrong with them."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eplb.offline.placement_file import WHOLE, decode_placement, describe, encode_placement, quantize, read_placement
from eplb.offline.trace import Trace, TraceMeta, header_line, make_trace, read_trace, record_line, write_trace
from eplb.placement import Placement, linear_placement
from eplb.repair import even_shares

HEADER = '{"format":"moesaic-load","version":1,"layers":2,"experts":3}\n'


def record(**changes: object) -> str:
    values = {"step": 0, "steps": 1, "tokens": 4, "load": [[1, 2, 3], [4, 5, 6]], **changes}
    return json.dumps(values) + "\n"


def same(a: Trace, b: Trace) -> bool:
    columns = ((a.load, b.load), (a.step, b.step), (a.steps, b.steps), (a.tokens, b.tokens))
    return a.meta == b.meta and all(np.array_equal(x, y) and x.dtype == y.dtype for x, y in columns)


# ---- traces ------------------------------------------------------------------------------------------------------


def test_a_trace_written_by_hand(tmp_path: Path) -> None:
    path = tmp_path / "load.jsonl"
    header = '{"format":"moesaic-load","version":1,"model":"m","layers":2,"experts":3,"ranks":4,"top_k":2,"layer_ids":[3,4]}\n'
    path.write_text(header + record() + "\n" + record(step=20, steps=20, load=[[0, 0, 0.5], [0, 1, 0]]))
    trace = read_trace(path)
    assert trace.load.tolist() == [[[1, 2, 3], [4, 5, 6]], [[0, 0, 0.5], [0, 1, 0]]]
    assert (trace.step.tolist(), trace.steps.tolist(), trace.tokens.tolist()) == ([0, 20], [1, 20], [4, 4])
    assert trace.meta == TraceMeta("m", 4, 2, "", (3, 4))
    assert trace.window(0, 2).tolist() == [[1, 2, 3.5], [4, 6, 6]]


def test_what_a_recorder_writes_line_by_line_is_a_trace(tmp_path: Path) -> None:
    path = tmp_path / "load.jsonl"
    counts = np.array([[1, 0, 2], [3, 0, 0]])
    path.write_bytes(header_line(TraceMeta("m"), 2, 3) + record_line(7, 1, 3, counts))
    trace = read_trace(path)
    assert trace.load[0].tolist() == counts.tolist()
    assert trace.step.tolist() == [7]


@pytest.mark.parametrize("suffix", [".jsonl", ".npz"])
@given(
    load=st.lists(
        st.lists(st.lists(st.integers(0, 1 << 40), min_size=3, max_size=3), min_size=2, max_size=2),
        min_size=1,
        max_size=4,
    ),
    steps=st.integers(1, 100),
    divisor=st.sampled_from([1, 7]),
)
@settings(max_examples=25, deadline=None)
def test_both_forms_come_back_exactly(
    tmp_path_factory: pytest.TempPathFactory, suffix: str, load: list[list[list[int]]], steps: int, divisor: int
) -> None:
    path = tmp_path_factory.mktemp("trace") / f"load{suffix}"
    trace = make_trace(np.array(load) / divisor, TraceMeta("m", 8, 2, "by hand", (5, 9)), steps=[steps] * len(load))
    write_trace(path, trace)
    assert same(read_trace(path), trace)


def test_numbers_that_float32_would_round_stay_exact(tmp_path: Path) -> None:
    trace = make_trace([[[2**24 + 1, 0.1]]])
    assert trace.load.dtype == np.float64
    assert make_trace([[[2**24, 0.5]]]).load.dtype == np.float32
    assert make_trace([[[1e300]]]).load.item() == 1e300
    with pytest.raises(ValueError, match="here: "):
        make_trace([[[1]]], steps=[1 << 70], where="here")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is empty"),
        (HEADER, "no record"),
        ("hello\n", ":1: this is no header"),
        ('{"format":"other","version":1,"layers":2,"experts":3}\n', 'format is "other" version 1'),
        ('{"format":"moesaic-load","version":9,"layers":2,"experts":3}\n', "version 9"),
        ('{"format":"moesaic-load","version":1,"layers":0,"experts":3}\n', "layers is 0"),
        ('{"format":"moesaic-load","version":1,"layers":2}\n', "experts"),
        (HEADER + record(load=[[1, 2, 3]]), ":2: load has 1 rows; the header says 2 layers"),
        (HEADER + record() + record(load=[[1, 2, 3], [4, 5]]), ":3: load[1] has 2 numbers; the header says 3 experts"),
        (HEADER + record(load=[[1, 2, 3], [4, -5, 6]]), ":2: load[1][1] is -5.0"),
        (HEADER + record(load=[[1, 2, 3], [4, float("nan"), 6]]), ":2: load[1][1] is nan"),
        (HEADER + record(load=[[1, 2, 3], [4, float("inf"), 6]]), ":2: load[1][1] is inf"),
        (HEADER + record(load=[[1, 2, 3], [4, "x", 6]]), "$.load[1][1]"),
        (HEADER + record(steps=0), ":2: steps is 0"),
        (HEADER + record(tokens=-1), "tokens -1"),
        (HEADER + '{"step":0,"steps":1,"tokens":4}\n', "load"),
        (HEADER + record() + record()[:30], ":3: "),
        (HEADER.replace("}", ',"layer_ids":[1,1]}') + record(), "a layer twice"),
        (HEADER.replace("}", ',"layer_ids":[1]}') + record(), "layer_ids has 1 entries for 2 layers"),
    ],
)
def test_a_bad_trace_is_one_line_with_file_line_and_field(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "load.jsonl"
    path.write_text(text)
    with pytest.raises(ValueError) as caught:
        read_trace(path)
    assert str(path) in str(caught.value)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_line_that_was_cut_off_can_be_left_out(tmp_path: Path) -> None:
    path = tmp_path / "load.jsonl"
    path.write_text(HEADER + record() + record(step=1)[:-9])
    with pytest.raises(ValueError, match="cut off; --skip-cut-line"):
        read_trace(path)
    assert read_trace(path, skip_cut_line=True).num_records == 1
    # In the middle it is no cut: never left out.
    path.write_text(HEADER + record()[:-9] + "\n" + record())
    with pytest.raises(ValueError, match=":2:"):
        read_trace(path, skip_cut_line=True)


def test_a_damaged_npz_names_the_file(tmp_path: Path) -> None:
    path = tmp_path / "load.npz"
    write_trace(path, make_trace(np.ones((2, 2, 3))))
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match=str(path)):
        read_trace(path)
    np.savez(path, load=np.ones((1, 2, 3)))
    with pytest.raises(ValueError, match="header"):
        read_trace(path)


def test_nothing_is_left_behind_when_writing_fails(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="cannot be written"):
        write_trace(tmp_path / "no" / "such.jsonl", make_trace(np.ones((1, 1, 1))))
    assert list(tmp_path.iterdir()) == []


# ---- placements --------------------------------------------------------------------------------------------------


@st.composite
def placements(draw: st.DrawFn) -> Placement:
    layers, ranks, slots = draw(st.integers(1, 3)), draw(st.integers(1, 4)), draw(st.integers(1, 4))
    experts = draw(st.integers(1, ranks * slots))
    rng = np.random.default_rng(draw(st.integers(0, 1 << 16)))
    ids = np.full((layers, ranks * slots), -1)
    for row in ids:
        used = rng.integers(experts, ranks * slots + 1)
        row[:used] = np.append(np.arange(experts), rng.integers(0, experts, used - experts))
        rng.shuffle(row)
    ids = ids.reshape(layers, ranks, slots).astype(np.int32)
    share = np.where(ids >= 0, rng.random(ids.shape), 0.0)
    for ids_GS, share_GS in zip(ids, share, strict=True):
        total = np.bincount(ids_GS[ids_GS >= 0], weights=share_GS[ids_GS >= 0], minlength=experts)
        share_GS[ids_GS >= 0] /= total[ids_GS[ids_GS >= 0]]
    return Placement(
        draw(st.integers(0, 5)), experts, ids, share.astype(np.float32), (True,) * ranks, tuple(range(ranks))
    )


@given(placements())
@settings(max_examples=50, deadline=None)
def test_a_placement_comes_back_bit_by_bit(placement: Placement) -> None:
    file = describe(placement, "m", provenance={"trace": "x", "steps": 3})
    weights = quantize(placement.slot_to_expert, placement.share, placement.num_experts)
    for ids_GS, weights_GS in zip(placement.slot_to_expert, weights, strict=True):
        used = ids_GS >= 0
        assert set(np.bincount(ids_GS[used], weights=weights_GS[used])) == {WHOLE}
        assert not weights_GS[~used].any()
    assert np.abs(weights / WHOLE - placement.share).max() < 0.001
    back = decode_placement(encode_placement(file))
    assert back.placement.checksum() == file.placement.checksum()
    assert (back.placement.epoch, back.model, back.slots, back.layer_ids) == (
        placement.epoch,
        "m",
        file.slots,
        file.layer_ids,
    )
    assert back.provenance == {"trace": "x", "steps": 3}
    assert encode_placement(back) == encode_placement(file)


@pytest.mark.parametrize("copies", [1, 2, 3, 6, 7, 100])
def test_even_shares_stay_even_to_one_part(copies: int) -> None:
    ids = np.zeros((1, copies, 1), dtype=np.int32)
    weights = quantize(ids, even_shares(ids, 1), 1)
    assert weights.sum() == WHOLE
    assert int(weights.max()) - int(weights.min()) <= 1


def test_layers_with_different_numbers_of_slots() -> None:
    ids = np.array([[[0, 1], [2, 0]], [[0, -1], [1, -1]], [[2, -1], [1, -1]]], dtype=np.int32)
    with pytest.raises(ValueError, match="layer 1"):
        Placement(0, 3, ids, even_shares(ids, 3), (True, True))
    ids[1:, :, 1] = [[2, -1], [0, -1]]
    placement = Placement(0, 3, ids, even_shares(ids, 3), (True, True))
    with pytest.raises(ValueError, match=r"slots\[1\] is 1, but a slot beyond"):
        describe(placement, slots=(2, 1, 2))
    ids = np.array([[[0, 1], [2, 0]], [[0, -1], [1, -1]]], dtype=np.int32)
    two = Placement(0, 2, ids[1:], even_shares(ids[1:], 2), (True, True))
    file = describe(two, slots=(1,))
    assert b"[[0],[1]]" in encode_placement(file)
    back = decode_placement(encode_placement(file))
    assert back.placement.checksum() == file.placement.checksum()
    assert back.slots == (1,)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("format", "other", 'format is "other"'),
        ("layers", 3, "slots has 2 entries for 3 layers"),
        ("slots", [2, 0], "slots holds 0"),
        ("slots", [2, 3], "slot_to_expert[1][0] has 2 entries; slots[1] is 3"),
        ("ranks", 3, "slot_to_expert[0] has 2 ranks; ranks says 3"),
        ("layer_ids", [1], "layer_ids has 1 entries for 2 layers"),
        ("layer_ids", [1, 1], "a layer twice"),
        ("slot_to_expert", [[[0, 1], [2, 9]], [[0, 1], [2, 3]]], "ids from 0 to 9"),
        ("slot_to_expert", [[[0, 1], [2, 2]], [[0, 1], [2, 3]]], "no slot on a live rank"),
        ("slot_to_expert", [[[0, 1], [2, "x"]]], "$.slot_to_expert"),
        ("share_u16", [[[1, 1], [1, 1]], [[1, 1], [1, 1]]], "sum to 0.0000"),
        ("share_u16", [[[65536, 1], [1, 1]], [[1, 1], [1, 1]]], "holds 1 to 65536"),
        ("checksum", "0" * 16, "the file was changed"),
        ("failure_domains", [0], "failure_domains has 1 entries for 2 ranks"),
    ],
)
def test_a_bad_placement_is_one_line_with_file_and_field(tmp_path: Path, key: str, value: object, message: str) -> None:
    path = tmp_path / "placement.json"
    good = json.loads(encode_placement(describe(linear_placement(2, 4, 2))))
    path.write_text(json.dumps(good | {key: value}))
    with pytest.raises(ValueError) as caught:
        read_placement(path)
    assert str(path) in str(caught.value)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_placement_that_is_no_json(tmp_path: Path) -> None:
    path = tmp_path / "placement.json"
    for data in (b"", b"{", b"[1]", b"\xff\xfe"):
        path.write_bytes(data)
        with pytest.raises(ValueError, match=str(path)):
            read_placement(path)
    with pytest.raises(ValueError, match="cannot be read"):
        read_placement(tmp_path / "missing.json")
