"""Reading a checkpoint directory: values, bytes, and every way in which one can be broken."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import Tensor

from layers.safetensors_file import RELEASED_AT_ONCE, SafetensorsFile
from layers.stored import BLOCK, StoredForm, StoredWeight
from layers.weights import INDEX, Checkpoint, CheckpointError


def save_sharded(path: Path, shards: list[dict[str, Tensor]]) -> None:
    weight_map = {}
    for number, shard in enumerate(shards):
        name = f"model-{number:05d}.safetensors"
        save_file(shard, path / name, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(shard, name))
    (path / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def read(checkpoint: Checkpoint, name: str, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    out = torch.empty(shape, dtype=dtype)
    checkpoint.read(name, out)
    return out


@pytest.fixture
def tensors() -> dict[str, Tensor]:
    return {
        "a": torch.randn(3, 5),
        "b": torch.randn(7).bfloat16(),
        "c": torch.arange(6),
        "more": torch.zeros(4),
        "none": torch.zeros(0, 4),
    }


@pytest.mark.parametrize("sharded", [False, True])
def test_values_dtypes_and_bytes(tmp_path: Path, tensors: dict[str, Tensor], sharded: bool) -> None:
    if sharded:
        first = ("a", "c", "none")
        save_sharded(tmp_path, [{name: tensors[name] for name in names} for names in (first, ("b", "more"))])
    else:
        save_file(tensors, tmp_path / "anything.safetensors")
    seen: list[tuple[int, int]] = []
    checkpoint = Checkpoint(tmp_path, progress=lambda done, total: seen.append((done, total)))
    assert set(checkpoint.names()) == set(tensors) and checkpoint.has("a") and not checkpoint.has("z")
    assert torch.equal(read(checkpoint, "a", 3, 5), tensors["a"])
    assert torch.equal(read(checkpoint, "a", 3, 5, dtype=torch.bfloat16), tensors["a"].bfloat16())
    assert torch.equal(read(checkpoint, "b", 7), tensors["b"].float())
    assert torch.equal(read(checkpoint, "c", 6, dtype=torch.int64), tensors["c"])
    assert checkpoint.bytes_read == 2 * 60 + 14 + 48
    with pytest.raises(CheckpointError, match="keys that this model does not use: more"):
        checkpoint.finish()
    checkpoint.skip("more")
    checkpoint.finish()
    assert seen[-1] == (60 + 14 + 48 + 16, 60 + 14 + 48 + 16)


def test_a_part_along_the_first_dimension(tmp_path: Path) -> None:
    whole = torch.randn(4, 3, 5)
    save_file({"experts": whole}, tmp_path / "model.safetensors")
    checkpoint = Checkpoint(tmp_path)
    out = torch.empty(3, 5)
    checkpoint.read("experts", out, 2)
    assert torch.equal(out, whole[2]) and checkpoint.bytes_read == 60
    checkpoint.finish()


def test_unaligned_tensors_are_read(tmp_path: Path) -> None:
    """The format does not promise alignment: here a float32 begins 3 bytes in."""
    values = torch.tensor([1.0, -2.0])
    header: dict[str, Any] = {
        "odd": {"dtype": "U8", "shape": [3], "data_offsets": [0, 3]},
        "f": {"dtype": "F32", "shape": [2], "data_offsets": [3, 11]},
    }
    raw = json.dumps(header).encode()
    raw += b" " * (-len(raw) % 8)
    (tmp_path / "x.safetensors").write_bytes(len(raw).to_bytes(8, "little") + raw + b"abc" + values.numpy().tobytes())
    assert torch.equal(read(Checkpoint(tmp_path), "f", 2), values)


def quantize(weight: Tensor) -> tuple[Tensor, Tensor]:
    """FP8 e4m3 with one float32 scale per 128 x 128 block, as DeepSeek-V3 checkpoints have it."""
    rows, columns = -(-weight.shape[0] // BLOCK), -(-weight.shape[1] // BLOCK)
    scale = torch.empty(rows, columns)
    out = torch.empty(weight.shape, dtype=torch.float8_e4m3fn)
    for i in range(rows):
        for j in range(columns):
            block = (slice(i * BLOCK, (i + 1) * BLOCK), slice(j * BLOCK, (j + 1) * BLOCK))
            scale[i, j] = weight[block].abs().max() / 448
            out[block] = (weight[block] / scale[i, j]).to(torch.float8_e4m3fn)
    return out, scale


def widen(weight: Tensor, scale: Tensor, out: Tensor) -> None:
    StoredWeight(weight, scale, StoredForm.FP8, tuple(weight.shape)).widen_into(out)


@settings(max_examples=15, deadline=None)
@given(rows=st.integers(1, 1300), columns=st.integers(1, 300))
def test_dequantized_blocks_equal_the_plain_formula(rows: int, columns: int) -> None:
    weight, scale = quantize(torch.randn(rows, columns))
    out = torch.empty(rows, columns)
    widen(weight, scale, out)
    row, column = torch.arange(rows) // BLOCK, torch.arange(columns) // BLOCK
    assert torch.equal(out, weight.float() * scale[row][:, column])


def test_fp8_keys_use_their_scales(tmp_path: Path) -> None:
    weight, scale = quantize(torch.randn(130, 200))
    save_file({"w.weight": weight, "w.weight_scale_inv": scale}, tmp_path / "m.safetensors")
    checkpoint = Checkpoint(tmp_path)
    expected = torch.empty(130, 200)
    widen(weight, scale, expected)
    assert torch.equal(read(checkpoint, "w.weight", 130, 200), expected)
    assert torch.equal(read(checkpoint, "w.weight", 130, 200, dtype=torch.bfloat16), expected.bfloat16())
    checkpoint.finish()
    other = Checkpoint(tmp_path)
    other.skip("w.weight")
    other.finish()
    assert other.bytes_read == 0


def test_fp8_with_a_scale_of_another_shape_or_none(tmp_path: Path) -> None:
    weight, scale = quantize(torch.randn(130, 200))
    save_file(
        {"w.weight": weight, "w.weight_scale_inv": scale[:1].clone(), "x": weight.clone()}, tmp_path / "m.safetensors"
    )
    checkpoint = Checkpoint(tmp_path)
    with pytest.raises(CheckpointError, match=r"w\.weight_scale_inv: expected shape \[2, 2\] or .*, got \[1, 2\]"):
        read(checkpoint, "w.weight", 130, 200)
    with pytest.raises(CheckpointError, match=r"x: .*e4m3fn without x_scale_inv"):
        read(checkpoint, "x", 130, 200)


# ---- broken checkpoints: one line that names the file or key ----


def error_of(path: Path) -> str:
    with pytest.raises(CheckpointError) as raised:
        Checkpoint(path)
    message = str(raised.value)
    assert "\n" not in message and str(path) in message
    return message


def test_wrong_shape_and_missing_key(tmp_path: Path, tensors: dict[str, Tensor]) -> None:
    save_file(tensors, tmp_path / "m.safetensors")
    checkpoint = Checkpoint(tmp_path)
    with pytest.raises(CheckpointError, match=r"m\.safetensors: a: expected shape \[5, 3\], got \[3, 5\]"):
        read(checkpoint, "a", 5, 3)
    with pytest.raises(CheckpointError, match="missing key nothing"):
        read(checkpoint, "nothing", 5)
    with pytest.raises(CheckpointError, match="missing key nothing"):
        checkpoint.skip("nothing")


def test_truncated_file(tmp_path: Path, tensors: dict[str, Tensor]) -> None:
    file = tmp_path / "m.safetensors"
    save_file(tensors, file)
    whole = file.read_bytes()
    for size in (0, 5, 40, len(whole) - 1):
        file.write_bytes(whole[:size])
        assert "m.safetensors" in error_of(tmp_path) and "cut short" in error_of(tmp_path)


@pytest.mark.parametrize(
    "header",
    [
        b"not json",
        b"[1, 2]",
        b'{"a": 3}',
        b'{"a": {"dtype": "F32", "shape": [1]}}',
        b'{"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, "x"]}}',
        b'{"a": {"dtype": "F32", "shape": [3], "data_offsets": [0, 4]}}',
        b'{"a": {"dtype": "F32", "shape": [1], "data_offsets": [-4, 0]}}',
        b'{"a": {"dtype": "F31", "shape": [1], "data_offsets": [0, 4]}}',
        b'{"a": {"dtype": "F32", "shape": 1, "data_offsets": [0, 4]}}',
        b"\xff\xfe",
    ],
)
def test_corrupt_header(tmp_path: Path, header: bytes) -> None:
    (tmp_path / "m.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + b"\0" * 4)
    assert "m.safetensors" in error_of(tmp_path)


def test_missing_shard_and_bad_indices(tmp_path: Path, tensors: dict[str, Tensor]) -> None:
    save_sharded(tmp_path, [{"a": tensors["a"]}, {"b": tensors["b"]}])
    (tmp_path / "model-00001.safetensors").rename(tmp_path / "hidden")
    assert "b: missing shard model-00001.safetensors" in error_of(tmp_path)
    save_file({"other": tensors["a"]}, tmp_path / "model-00001.safetensors")
    assert "b: not in this file" in error_of(tmp_path)
    for text in ("{", "[]", "{}", '{"weight_map": 3}', '{"weight_map": {"a": 3}}', '{"weight_map": {"a": "../a"}}'):
        (tmp_path / INDEX).write_text(text)
        assert INDEX in error_of(tmp_path)


def test_no_weights_no_directory_and_one_key_twice(tmp_path: Path, tensors: dict[str, Tensor]) -> None:
    assert "no *.safetensors" in error_of(tmp_path)
    assert "no such directory" in error_of(tmp_path / "nowhere")
    save_file(tensors, tmp_path / "one.safetensors")
    save_file(tensors, tmp_path / "two.safetensors")
    assert "also in one.safetensors" in error_of(tmp_path)


def test_what_was_read_is_let_go_of_in_large_pieces(tmp_path: Path) -> None:
    """Of the process's memory; a tensor that is still read comes in again."""
    path = tmp_path / "m.safetensors"
    save_file({f"t{index}": torch.full((8 << 20,), index, dtype=torch.uint8) for index in range(12)}, path)
    file = SafetensorsFile(path)

    def resident() -> int:
        """Bytes of the file that this process has mapped in."""
        _, _, rest = Path("/proc/self/smaps").read_text().partition(str(path))
        return 1024 * int(rest.partition("Rss:")[2].split()[0])

    most = 0
    for name in file.entries:
        assert (file.view(name) == int(name[1:])).all()
        most = max(most, resident())
        file.release(name)
    assert most <= RELEASED_AT_ONCE + (8 << 20) and 0 < resident() <= 4 * (8 << 20) + (1 << 20)
    file.release_all()
    assert resident() < 1 << 20
    assert (file.view("t3") == 3).all()
