"""Peers' files: read from bytes written by hand from each format's description, written back, and what is refused.

The hand-written files do not come from our writers; where a writer is checked, the peer's own way of reading is spelt out.
"""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peer_files import MAP_LGS, MAP_LP, TWO, flat, load_in, placement_in, write
from safetensors.numpy import save_file

from eplb.offline.formats.registry import FORMATS, read_any, read_any_placement
from eplb.offline.formats.source import Hints, MissingHint
from eplb.offline.trace import TraceMeta, make_trace

# ---- SGLang ------------------------------------------------------------------------------------------------------


def test_sglang_recorder_in_stat_mode(tmp_path: Path) -> None:
    """logical_count is [buffered passes, all hidden layers, experts]; the dense layer 0 has zeros."""
    count = torch.tensor([[[0, 0, 0], [1, 2, 3]], [[0, 0, 0], [4, 0, 2]]], dtype=torch.int32)
    path = tmp_path / "expert_distribution_recorder_1.5.pt"
    torch.save({"rank": 0, "logical_count": count, "average_utilization_rate_over_window": None}, path)
    name, trace = load_in(path, Hints(top_k=2))
    assert name == "sglang"
    assert trace.load.tolist() == [[[1, 2, 3]], [[4, 0, 2]]]
    assert trace.layer_ids == (1,)
    assert trace.tokens.tolist() == [3, 3]


def test_sglang_recorder_per_pass(tmp_path: Path) -> None:
    """Physical counts of single passes, two ranks' share of pass 7 in one file."""
    first = {
        "forward_pass_id": 7,
        "rank": 0,
        "gatherer_key": "primary",
        "global_physical_count": torch.tensor([[1, 2, 3, 4]]),
    }
    more = {**first, "rank": 1, "global_physical_count": torch.tensor([[1, 0, 0, 0]])}
    later = {**first, "forward_pass_id": 9, "global_physical_count": torch.tensor([[0, 0, 0, 5]])}
    path = tmp_path / "recorder.pt"
    torch.save({"records": [later, first, more], "last_physical_to_logical_map": torch.tensor([[0, 1, 2, 0]])}, path)
    name, trace = load_in(path)
    assert name == "sglang"
    assert trace.load.tolist() == [[[1 + 1 + 4, 2, 3]], [[5, 0, 0]]]


def test_sglang_expert_location(tmp_path: Path) -> None:
    as_json = write(tmp_path / "location.json", json.dumps({"physical_to_logical_map": MAP_LP}))
    as_torch = tmp_path / "location.pt"
    torch.save({"physical_to_logical_map": torch.tensor(MAP_LP)}, as_torch)
    for path in (as_json, as_torch):
        found = placement_in(path)
        assert found.format == "sglang"
        assert found.placement and found.placement.placement.slot_to_expert.tolist() == MAP_LGS
        assert found.placement.placement.share[0].tolist() == pytest.approx(np.array([[0.5, 1], [1, 0.5]]), abs=1e-4)
    with pytest.raises(MissingHint, match="--ranks"):
        read_any(as_json, Hints())
    with pytest.raises(ValueError, match="4 slots cannot be shared evenly by 3 ranks"):
        read_any(as_json, Hints(ranks=3))


def test_sglang_counts_by_layer(tmp_path: Path) -> None:
    path = write(tmp_path / "counts.json", '{"model": "m", "logical_count": {"10": [1, 2], "9": [3, 4]}}')
    name, trace = load_in(path)
    assert (name, trace.layer_ids, trace.load.tolist()) == ("sglang", (9, 10), [[[3, 4], [1, 2]]])


@pytest.mark.parametrize("suffix", [".pt", ".json"])
def test_sglang_files_that_we_write(tmp_path: Path, suffix: str) -> None:
    """SGLang indexes rows by hidden layer, dense ones too, and wants a map for each."""
    path = tmp_path / f"location{suffix}"
    FORMATS["sglang"].write_placement(path, flat(layer_ids=(1, 3)))
    data = torch.load(path, weights_only=True) if suffix == ".pt" else json.loads(path.read_text())
    rows = [list(map(int, row)) for row in data["physical_to_logical_map"]]
    assert rows == [[0, 1, 2, 0], MAP_LP[0], [0, 1, 2, 0], MAP_LP[1]]
    again = read_any_placement(path, Hints(ranks=2, layers=(1, 3)))
    assert again.placement.slot_to_expert.tolist() == MAP_LGS
    assert again.layer_ids == (1, 3)

    counts = tmp_path / f"counts{suffix}"
    trace = make_trace([[[1, 2, 3], [4, 5, 6]]], TraceMeta(layer_ids=(1, 3)))
    FORMATS["sglang"].write_load(counts, trace)
    data = torch.load(counts, weights_only=True) if suffix == ".pt" else json.loads(counts.read_text())
    assert np.asarray(data["logical_count"]).tolist() == [[[0, 0, 0], [1, 2, 3], [0, 0, 0], [4, 5, 6]]]
    _, back = load_in(counts)
    assert (back.load.tolist(), back.layer_ids) == (trace.load.tolist(), (1, 3))


def test_a_torch_file_runs_no_code(tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> tuple[Any, ...]:
            return (print, ("executed",))

    path = tmp_path / "evil.pt"
    torch.save({"logical_count": Evil()}, path)
    with pytest.raises(ValueError, match="tensors and plain containers alone") as caught:
        read_any(path, Hints())
    assert "\n" not in str(caught.value)


# ---- TensorRT-LLM ------------------------------------------------------------------------------------------------


def test_trtllm_yaml(tmp_path: Path) -> None:
    text = (
        "initial_global_assignments:\n  4: [2, 1, 0, 2]\n  3: [0, 1, 2, 0]\nlayer_updates_per_iter: 0\nnum_slots: 4\n"
    )
    found = placement_in(write(tmp_path / "eplb.yaml", text))
    assert found.format == "trtllm"
    assert found.placement and found.placement.placement.slot_to_expert.tolist() == MAP_LGS
    assert found.placement.layer_ids == (3, 4)
    bad = write(tmp_path / "bad.yaml", text.replace("num_slots: 4", "num_slots: 5"))
    with pytest.raises(ValueError, match="layer 3 assigns 4 slots; num_slots is 5"):
        read_any(bad, TWO)


def test_trtllm_yaml_that_we_write(tmp_path: Path) -> None:
    path = tmp_path / "eplb.yaml"
    FORMATS["trtllm"].write_placement(path, flat(layer_ids=(3, 60)))
    lines = path.read_text().splitlines()
    assert "num_slots: 4" in lines
    assert "  3: [0, 1, 2, 0]" in lines
    assert "  60: [2, 1, 0, 2]" in lines
    assert read_any_placement(path, TWO).layer_ids == (3, 60)


def test_trtllm_statistics(tmp_path: Path) -> None:
    """A file per rank, a tensor per iteration and layer; ranks are added up."""
    write(tmp_path / "meta_info.json", '{"num_experts": 3, "num_experts_per_token": 2}')
    for rank in range(2):
        counts = {f"{i}_{layer}": np.array([rank, i, layer], dtype=np.int32) for i in (5, 6) for layer in (3, 4)}
        save_file(counts, tmp_path / f"rank{rank}.safetensors")
    save_file({"5_3": np.zeros((2, 2))}, tmp_path / "rank0_raw.safetensors")
    name, trace = load_in(tmp_path)
    assert name == "trtllm"
    assert trace.load.tolist() == [[[1, 10, 6], [1, 10, 8]], [[1, 12, 6], [1, 12, 8]]]
    assert (trace.layer_ids, trace.meta.top_k, trace.meta.ranks) == ((3, 4), 2, 2)
    save_file({"7_3": np.zeros(3)}, tmp_path / "rank2.safetensors")
    with pytest.raises(ValueError, match="not all there"):
        read_any(tmp_path, Hints())


# ---- vllm-ascend -------------------------------------------------------------------------------------------------


def ascend() -> dict[str, Any]:
    layers = [
        {"layer_id": 7 + layer, "device_count": 2,
         "device_list": [{"device_id": 1, "device_expert": MAP_LGS[layer][1]}, {"device_id": 0, "device_expert": MAP_LGS[layer][0]}]}
        for layer in range(2)
    ]  # fmt: skip
    return {"moe_layer_count": 2, "layer_list": layers}


def test_ascend_expert_map(tmp_path: Path) -> None:
    """Devices are taken by their id, whatever their order in the file; the file says how many there are."""
    found = placement_in(write(tmp_path / "map.json", json.dumps(ascend())), Hints())
    assert found.format == "vllm-ascend"
    assert found.placement and found.placement.placement.slot_to_expert.tolist() == MAP_LGS
    assert found.placement.layer_ids == (7, 8)


def test_ascend_expert_map_that_is_wrong(tmp_path: Path) -> None:
    for change, message in (
        (lambda data: data.update(moe_layer_count=3), "moe_layer_count is 3"),
        (lambda data: data["layer_list"][0].update(device_count=3), "layer 7 has 2 devices"),
        (lambda data: data["layer_list"][1]["device_list"][0].update(device_expert=[1]), "differ in length"),
        (lambda data: data["layer_list"][1].pop("layer_id"), "layer_id"),
        (lambda data: data.update(layer_list=[]), "layer_list is empty"),
    ):
        data = ascend()
        change(data)
        data["moe_layer_count"] = data["moe_layer_count"] if data["layer_list"] else 0
        with pytest.raises(ValueError, match=message):
            read_any(write(tmp_path / "map.json", json.dumps(data)), Hints())


def test_ascend_files_that_we_write(tmp_path: Path) -> None:
    path = tmp_path / "map.json"
    FORMATS["vllm-ascend"].write_placement(path, flat(layer_ids=(7, 8)))
    data = json.loads(path.read_text())
    # As the peer reads it: layers, then devices, in the order of the file.
    read = [[device["device_expert"] for device in layer["device_list"]] for layer in data["layer_list"]]
    assert (data["moe_layer_count"], data["layer_list"][0]["device_count"], read) == (2, 2, MAP_LGS)
    assert read_any_placement(path, Hints()).placement.slot_to_expert.tolist() == MAP_LGS

    table = tmp_path / "load.pt"
    FORMATS["vllm-ascend"].write_load(table, make_trace([[[1, 2, 3], [4, 5, 6]]]))
    assert torch.load(table, weights_only=True).tolist() == [[1, 2, 3], [4, 5, 6]]
    name, trace = load_in(table)
    assert (name, trace.load.tolist()) == ("vllm-ascend", [[[1, 2, 3], [4, 5, 6]]])
    with pytest.raises(ValueError, match="has 2 records; --sum"):
        FORMATS["vllm-ascend"].write_load(table, make_trace(np.ones((2, 2, 3))))


# ---- OmniInfer ---------------------------------------------------------------------------------------------------


def test_omniinfer_placement(tmp_path: Path) -> None:
    """[devices, layers, experts]; the layers differ in their number of slots, and a device may have fewer."""
    hosts = np.zeros((2, 2, 3), dtype=np.int32)
    hosts[0, 0, [0, 2]] = hosts[1, 0, [1, 2]] = 1
    hosts[0, 1, [0, 1]] = hosts[1, 1, [2]] = 1
    path = tmp_path / "placement.npy"
    np.save(path, hosts)
    found = placement_in(path, Hints())
    assert found.format == "omniinfer"
    assert found.placement and found.placement.placement.slot_to_expert.tolist() == [
        [[0, 2], [1, 2]],
        [[0, 1], [2, -1]],
    ]
    again = tmp_path / "again.npy"
    FORMATS["omniinfer"].write_placement(again, found.placement)
    assert (np.load(again) == hosts).all()


def test_omniinfer_layers_with_different_slots(tmp_path: Path) -> None:
    hosts = np.ones((2, 2, 2), dtype=np.int32)
    hosts[0, 1] = [1, 0]
    hosts[1, 1] = [0, 1]
    np.save(tmp_path / "placement.npy", hosts)
    file = read_any_placement(tmp_path / "placement.npy", Hints())
    assert file.slots == (2, 1)
    with pytest.raises(ValueError, match="layers have 1 to 2 per rank"):
        FORMATS["sglang"].write_placement(tmp_path / "x.json", file)


def test_omniinfer_has_no_expert_twice_on_a_device(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="twice: expert 0 on rank 0 in layer 0"):
        FORMATS["omniinfer"].write_placement(tmp_path / "x.npy", flat([[[0, 0], [1, 2]]], (0,)))


# ---- plain arrays, tables, ADRS, forks of vLLM -------------------------------------------------------------------


def test_plain_arrays(tmp_path: Path) -> None:
    loads = np.arange(12.0).reshape(2, 2, 3) + 0.5
    np.save(tmp_path / "load.npy", loads)
    np.save(tmp_path / "table.npy", loads[0])
    np.savez(tmp_path / "load.npz", counts=loads, other=np.ones(3))
    np.save(tmp_path / "map.npy", np.array([[0, 1, 2, -1], [2, 1, 0, 2]]))
    np.save(tmp_path / "full.npy", np.array(MAP_LGS))
    assert load_in(tmp_path / "load.npy")[1].load.tolist() == loads.tolist()
    assert load_in(tmp_path / "table.npy")[1].load.tolist() == [loads[0].tolist()]
    assert load_in(tmp_path / "load.npz")[0] == "npy"
    assert placement_in(tmp_path / "map.npy").placement.placement.slot_to_expert[0].tolist() == [[0, 1], [2, -1]]
    # Nothing but the caller can tell that these are ids.
    assert read_any(tmp_path / "full.npy", Hints()).trace is not None
    assert placement_in(tmp_path / "full.npy", Hints(), kind="placement").placement.slots == (2, 2)


def test_plain_arrays_that_we_write(tmp_path: Path) -> None:
    trace = make_trace([[[1, 2, 3], [4, 5, 6]]])
    FORMATS["npy"].write_load(tmp_path / "load.npy", trace)
    assert load_in(tmp_path / "load.npy")[1].load.tolist() == trace.load.tolist()
    FORMATS["npy"].write_placement(tmp_path / "map.npy", flat())
    assert np.load(tmp_path / "map.npy").tolist() == MAP_LGS
    assert placement_in(tmp_path / "map.npy", kind="placement").placement.placement.slot_to_expert.tolist() == MAP_LGS


def test_experts_that_every_token_chose(tmp_path: Path) -> None:
    """Five tokens, two layers, two experts each; one token has no second expert in layer 1."""
    ids = np.array(
        [[[0, 1], [2, 1]], [[0, 2], [2, -1]], [[1, 2], [0, 1]], [[0, 1], [0, 1]], [[2, 3], [3, 2]]], dtype=np.int16
    )
    np.save(tmp_path / "ids.npy", ids)
    torch.save(torch.from_numpy(ids), tmp_path / "ids.pt")
    for name in ("ids.npy", "ids.pt"):
        _, trace = load_in(tmp_path / name, Hints(record_tokens=3, experts=5), kind="ids")
        assert trace.load.tolist() == [[[2, 2, 2, 0, 0], [1, 2, 2, 0, 0]], [[1, 1, 1, 1, 0], [1, 1, 1, 1, 0]]]
        assert (trace.tokens.tolist(), trace.meta.top_k) == ([3, 2], 2)
    assert load_in(tmp_path / "ids.npy", kind="ids")[1].num_experts == 4
    with pytest.raises(ValueError, match=r"ids are -1 to 3; they must be -1 \(none\) to 2"):
        read_any(tmp_path / "ids.npy", Hints(experts=3), kind="ids")
    np.save(tmp_path / "bad.npy", ids.astype(float))
    with pytest.raises(ValueError, match="whole numbers"):
        read_any(tmp_path / "bad.npy", Hints(), kind="ids")


def test_tables_as_text(tmp_path: Path) -> None:
    with (tmp_path / "load.csv").open("w", newline="") as stream:
        csv.writer(stream).writerows([[1, 2, 3], [4, 5, 6]])
    assert load_in(tmp_path / "load.csv", Hints(steps=100))[1].steps.tolist() == [100]
    assert load_in(tmp_path / "load.csv")[1].load.tolist() == [[[1, 2, 3], [4, 5, 6]]]
    assert load_in(write(tmp_path / "load.json", "[[1, 2], [3, 4]]"))[1].load.tolist() == [[[1, 2], [3, 4]]]
    with pytest.raises(ValueError, match="no table of numbers"):
        read_any(write(tmp_path / "bad.csv", "a,b\n1,2\n"), Hints())


def test_adrs_history(tmp_path: Path) -> None:
    history = [{"logical_expert_load": [[1, 2.5], [3, 4]]}, {"logical_expert_load": [[0, 0], [1, 1]], "extra": 1}]
    name, trace = load_in(write(tmp_path / "expert-load.json", json.dumps({"load_history": history})))
    assert (name, trace.load.tolist()) == ("adrs", [[[1, 2.5], [3, 4]], [[0, 0], [1, 1]]])
    FORMATS["adrs"].write_load(tmp_path / "again.json", trace)
    data = json.loads((tmp_path / "again.json").read_text())
    assert [entry["logical_expert_load"] for entry in data["load_history"]] == trace.load.tolist()
    history[1]["logical_expert_load"] = [[1, 2]]
    with pytest.raises(ValueError, match=r"load_history\[1\] has shape \[1, 2\]; the first has \[2, 2\]"):
        read_any(write(tmp_path / "bad.json", json.dumps({"load_history": history})), Hints())


def test_forks_of_vllm(tmp_path: Path) -> None:
    data = {"version": 2, "model_maps": {"DeepseekV3ForCausalLM": {"physical_to_logical_map": MAP_LP}}}
    found = placement_in(write(tmp_path / "map.json", json.dumps(data)))
    assert found.format == "vllm"
    assert found.placement and found.placement.model == "DeepseekV3ForCausalLM"
    FORMATS["vllm"].write_placement(tmp_path / "again.json", found.placement)
    assert json.loads((tmp_path / "again.json").read_text()) == data
