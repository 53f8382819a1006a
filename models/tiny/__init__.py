"""The embedded default model: a small, trained DeepSeek-V3-shaped mixture of experts that writes simple stories.

``CHECKPOINT`` is an ordinary Hugging Face directory (config, tokenizer, weights). The training code beside it
needs torch and tokenizers; importing this package needs only the standard library.
"""

from pathlib import Path

CHECKPOINT: Path = Path(__file__).resolve().parent / "checkpoint"

__all__ = ["CHECKPOINT"]
