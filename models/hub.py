"""Where a model's files are: a directory, or the cache of huggingface_hub for a name such as Qwen/Qwen3-30B-A3B."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
PATTERNS = ["*.json", "*.safetensors", "*.jinja", "*.model", "*.tiktoken"]  # no code, and no weights in other formats
ANSWER_SECONDS = 10.0


def located(
    model: str, revision: str | None, download_dir: str | None, *, downloads: bool = True, what: str = "model"
) -> Path:
    """The directory of a model, or of a tokenizer (what). Of a name, what is in the cache; with `downloads` completed
    by a download where there is a network.

    ValueError: there is neither. revision: a branch, tag or commit; download_dir: the cache's place; both are for names
    only.
    """
    path = Path(model)
    if path.is_dir():
        if revision is not None:
            raise ValueError(f"revision {revision!r}: {model} is a directory, which has no revisions")
        return path
    if not HUB_NAME.fullmatch(model):
        kinds = "a directory, nor a .gguf file, nor a name such as Qwen/Qwen3-30B-A3B"
        raise ValueError(f"{what} {model!r} is not {kinds}")
    library = importlib.import_module("huggingface_hub")
    try:
        found = library.snapshot_download(
            model,
            revision=revision,
            cache_dir=download_dir,
            allow_patterns=PATTERNS,
            etag_timeout=ANSWER_SECONDS,
            local_files_only=not downloads,
        )
    except Exception as error:  # the library's own, the HTTP client's, the system's
        reason = " ".join(str(error).split())
        failed = f", and cannot be downloaded: {type(error).__name__}: {reason:.300}" if downloads else ""
        where = "is neither a directory nor in the cache of huggingface_hub"
        raise ValueError(f"{what} {model!r} {where}{failed}") from None
    return Path(found)
