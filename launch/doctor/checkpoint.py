"""Is the checkpoint whole, and how fast is it read?"""

from __future__ import annotations

import json
import os
import re
import time
from pathlib import Path

from launch.doctor.findings import Finding

READ_BYTES = 256 << 20
READ_SECONDS = 0.5
PIECE = 4 << 20
SLOW_LOAD_SECONDS = 600.0
MAX_HEADER_BYTES = 100 << 20


def complete(node: int, directory: Path) -> Finding:
    """Files that the index or their own names promise, and sizes that their headers promise."""
    if (directory / "gguf.json").exists():  # made of a GGUF file, which is checked as it is read
        return Finding("checkpoint", node, "ok", f"a GGUF file, as {directory}")
    wrong = _missing(directory)
    files = sorted(directory.glob("*.safetensors"))
    if not wrong and not files:
        wrong = [f"{directory}: no *.safetensors file"]
    wrong = wrong or [text for file in files if (text := _cut(file))]
    if wrong:
        more = f" (and {len(wrong) - 1} more)" if len(wrong) > 1 else ""
        return Finding("checkpoint", node, "broken", wrong[0] + more, f"copy {directory} again")
    size = sum(file.stat().st_size for file in files)
    return Finding("checkpoint", node, "ok", f"{len(files)} file(s) of weights, {size / 1e9:.2f} GB, whole")


def _missing(directory: Path) -> list[str]:
    wanted = {"config.json"}
    index = directory / "model.safetensors.index.json"
    try:
        if index.exists():
            wanted |= set(json.loads(index.read_text())["weight_map"].values())
    except (OSError, ValueError, KeyError, AttributeError) as error:
        return [f"{index.name}: {error}"]
    for file in directory.glob("*-of-*.safetensors"):
        match = re.fullmatch(r"(.*)-(\d+)-of-(\d+)\.safetensors", file.name)
        if match is not None:
            width = len(match[2])
            wanted |= {f"{match[1]}-{n:0{width}}-of-{match[3]}.safetensors" for n in range(1, int(match[3]) + 1)}
    if not any((directory / name).exists() for name in ("tokenizer.json", "tokenizer.model", "tiktoken.model")):
        wanted.add("tokenizer.json")
    return [f"{name} is missing in {directory}" for name in sorted(wanted) if not (directory / name).exists()]


def _cut(file: Path) -> str:
    """Why it does not hold what its header says; "": it does."""
    try:
        with file.open("rb") as data:
            length = int.from_bytes(data.read(8), "little")
            if not 2 <= length <= MAX_HEADER_BYTES:
                return f"{file.name}: no header of safetensors"
            header = json.loads(data.read(length))
        end = max((tensor["data_offsets"][1] for name, tensor in header.items() if name != "__metadata__"), default=0)
        size = file.stat().st_size
    except (OSError, ValueError, KeyError, TypeError) as error:
        return f"{file.name}: {error}"
    return "" if size == 8 + length + end else f"{file.name} has {size} bytes, its header says {8 + length + end}"


def read_speed(node: int, directory: Path) -> Finding:
    """Of what is not in memory already; says nothing of a checkpoint that lies there."""
    files = sorted((*directory.glob("*.safetensors"), *directory.glob("*.gguf")), key=lambda file: file.stat().st_size)
    total = sum(file.stat().st_size for file in files)
    if not files:
        return Finding("disk", node, "ok", "nothing to read")
    buffer, done, began = memoryview(bytearray(PIECE)), 0, time.perf_counter()
    with files[-1].open("rb", buffering=0) as data:
        data.seek(max(0, files[-1].stat().st_size // 2 - READ_BYTES // 2))
        os.posix_fadvise(data.fileno(), 0, 0, os.POSIX_FADV_SEQUENTIAL)
        while done < READ_BYTES and time.perf_counter() - began < READ_SECONDS and (got := data.readinto(buffer)):
            done += got
    speed = done / max(1e-9, time.perf_counter() - began)
    seconds = total / max(1.0, speed)
    text = f"{speed / 1e9:.2f} GB/s, {seconds:.0f} s for {total / 1e9:.2f} GB"
    if seconds > SLOW_LOAD_SECONDS:
        return Finding("disk", node, "slow", text, "copy the checkpoint to a local disk")
    return Finding("disk", node, "ok", text)
