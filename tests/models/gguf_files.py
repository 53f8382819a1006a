"""GGUF files for tests, written from the format's description, and their blocks read number by number."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from layers.gguf.header import KINDS, NUMBERS
from models.gguf.names import _EXPERTS, _IN_LAYER, _OUTSIDE

GgufWeight = tuple[str, tuple[int, ...], bytes]


def _text(text: str) -> bytes:
    data = text.encode()
    return struct.pack("<Q", len(data)) + data


def _value(value: Any) -> bytes:
    if isinstance(value, bool):
        return struct.pack("<I?", 7, value)
    if isinstance(value, int):
        return struct.pack("<Ii", 5, value)
    if isinstance(value, float):
        return struct.pack("<If", 6, value)
    if isinstance(value, str):
        return struct.pack("<I", 8) + _text(value)
    kind = struct.unpack("<I", _value(value[0])[:4])[0]
    return struct.pack("<IIQ", 9, kind, len(value)) + b"".join(_value(one)[4:] for one in value)


def write_gguf(path: Path, metadata: Mapping[str, Any], tensors: Mapping[str, GgufWeight]) -> None:
    head = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(metadata))
    head += b"".join(_text(name) + _value(value) for name, value in metadata.items())
    data = b""
    for name, (kind, shape, content) in tensors.items():
        sizes = struct.pack(f"<{len(shape)}Q", *shape[::-1])
        head += _text(name) + struct.pack("<I", len(shape)) + sizes + struct.pack("<IQ", NUMBERS[kind], len(data))
        data += content + bytes(-len(content) % 32)
    path.write_bytes(head + bytes(-len(head) % 32) + data)


def write_parts(
    path: Path, metadata: Mapping[str, Any], tensors: Mapping[str, GgufWeight], counts: list[int]
) -> list[Path]:
    """A file of this name in parts, as gguf-split writes them. counts: tensors of each; what is left is the last
    one's."""
    left, parts = list(tensors.items()), []
    for number, count in enumerate([*counts, len(tensors)]):
        said = {"split.no": number, "split.count": len(counts) + 1, "split.tensors.count": len(tensors)}
        part = path.with_name(f"{path.stem}-{number + 1:05d}-of-{len(counts) + 1:05d}.gguf")
        write_gguf(part, {**(metadata if number == 0 else {}), **said}, dict(left[:count]))
        left = left[count:]
        parts.append(part)
    return parts


def plain(weight: Tensor) -> GgufWeight:
    return "F32", tuple(weight.shape), weight.float().numpy().tobytes()


def q4_0(weight: Tensor) -> tuple[GgufWeight, Tensor]:
    """And what it stands for."""
    blocks = weight.float().reshape(-1, 32)
    most = blocks.gather(1, blocks.abs().argmax(1, keepdim=True))
    scale = (most / -8).half().float()
    code = (blocks / scale + 8).round().clamp(0, 15).to(torch.uint8)
    packed = code[:, :16] | code[:, 16:] << 4
    content = torch.cat((scale.half().view(torch.uint8), packed), 1).numpy().tobytes()
    return ("Q4_0", tuple(weight.shape), content), ((code.float() - 8) * scale).view(weight.shape)


def q8_0(weight: Tensor) -> tuple[GgufWeight, Tensor]:
    blocks = weight.float().reshape(-1, 32)
    scale = (blocks.abs().amax(1, keepdim=True) / 127).half().float()
    number = (blocks / scale).round().to(torch.int8)
    content = torch.cat((scale.half().view(torch.uint8), number.view(torch.uint8)), 1).numpy().tobytes()
    return ("Q8_0", tuple(weight.shape), content), (number.float() * scale).view(weight.shape)


def gguf_names(tensors: Mapping[str, Tensor], heads: Mapping[str, int]) -> dict[str, Tensor]:
    """A checkpoint's weights by GGUF's names; heads: those whose rows are to lie in pairs."""
    outside = {theirs: ours for ours, theirs in _OUTSIDE.items()}
    inside = {theirs: ours for ours, theirs in _IN_LAYER.items()}
    found: dict[str, Tensor] = {}
    experts: dict[str, dict[int, Tensor]] = {}
    for name, tensor in tensors.items():
        if name in outside:
            found[outside[name]] = tensor
            continue
        _, _, layer, rest = name.split(".", 3)
        stem, _, kind = rest.rpartition(".")
        if rest == "mlp.gate.e_score_correction_bias":
            found[f"blk.{layer}.exp_probs_b.bias"] = tensor
        elif stem.startswith("mlp.experts."):
            _, _, expert, part = stem.split(".")
            ours = next(ours for ours, theirs in _EXPERTS.items() if theirs == part)
            experts.setdefault(f"blk.{layer}.{ours}.weight", {})[int(expert)] = tensor
        else:
            ours = inside[stem]
            if ours in heads:  # of each head the first rows and the others in turns
                tensor = tensor.view(heads[ours], 2, -1, tensor.shape[1]).transpose(1, 2).reshape(tensor.shape)
            found[f"blk.{layer}.{ours}.{kind}"] = tensor
    stacked = {name: torch.stack([parts[i] for i in range(len(parts))]) for name, parts in experts.items()}
    return found | stacked


def tokenizer_metadata(directory: Path) -> dict[str, Any]:
    """Of a tokenizer.json with merges of bytes."""
    raw = json.loads((directory / "tokenizer.json").read_text())
    vocab = raw["model"]["vocab"]
    tokens = sorted(vocab, key=vocab.__getitem__)
    special = {token["id"] for token in raw["added_tokens"]}
    config = json.loads((directory / "tokenizer_config.json").read_text())
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3 if number in special else 1 for number in range(len(tokens))],
        "tokenizer.ggml.merges": [" ".join(merge) for merge in raw["model"]["merges"]],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 0,
        "tokenizer.ggml.add_bos_token": True,
        **({"tokenizer.chat_template": config["chat_template"]} if "chat_template" in config else {}),
    }


def numbers_of(kind: str, block: bytes) -> list[float]:
    """What a block stands for, as the format's description says it, number by number."""

    def half(at: int) -> float:
        value: float = struct.unpack_from("<e", block, at)[0]
        return value

    size, num_bytes = KINDS[kind]
    assert len(block) == num_bytes
    if kind == "Q8_0":
        return [half(0) * struct.unpack_from("<b", block, 2 + i)[0] for i in range(32)]
    if kind in ("Q4_0", "Q4_1", "Q5_0", "Q5_1"):
        least, at = (half(2), 4) if kind.endswith("1") else (None, 2)
        fifth = 0
        if kind.startswith("Q5"):
            fifth, at = struct.unpack_from("<I", block, at)[0], at + 4
        found = []
        for i in range(32):
            code = block[at + i % 16] >> (4 if i >= 16 else 0) & 15
            if kind.startswith("Q5"):
                code |= (fifth >> i & 1) << 4
            offset = 0 if least is not None else 16 if kind.startswith("Q5") else 8
            found.append(half(0) * (code - offset) + (least or 0.0))
        return found
    if kind == "Q6_K":
        return [half(208) * _q6(block, i) for i in range(256)]
    return [_k(kind, block, i, half(0), half(2)) for i in range(size)]


def _q6(block: bytes, i: int) -> int:
    half, quarter, at = i // 128, i % 128 // 32, i % 32
    low = block[64 * half + 32 * (quarter % 2) + at] >> (4 if quarter >= 2 else 0) & 15
    high = block[128 + 32 * half + at] >> (2 * quarter) & 3
    scale: int = struct.unpack_from("<b", block, 192 + i // 16)[0]
    return scale * ((low | high << 4) - 32)


def _k(kind: str, block: bytes, i: int, d: float, dmin: float) -> float:
    group, q = i // 32, block[4:16]
    if group < 4:
        scale, least = q[group] & 63, q[group + 4] & 63
    else:
        scale = q[group + 4] & 15 | (q[group - 4] >> 6) << 4
        least = q[group + 4] >> 4 | (q[group] >> 6) << 4
    low = 16 if kind == "Q4_K" else 48
    code = block[low + 32 * (group // 2) + i % 32] >> (4 if group % 2 else 0) & 15
    if kind == "Q5_K":
        code |= (block[16 + i % 32] >> group & 1) << 4
    return d * scale * code - dmin * least
