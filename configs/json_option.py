"""Options whose value is a JSON object, or a file that holds one. Standard library only."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def json_object(name: str, text: str) -> tuple[dict[str, Any], str]:
    """The object, and what errors about it call it. `text` is the object, or the path of a file that holds it ("@"
    before the path is allowed). ValueError on one line that names the option."""
    where = name
    if not text.lstrip().startswith("{"):
        path = Path(text.removeprefix("@"))
        where = f"{name} {path}"
        try:
            text = path.read_text()
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "it is not text"
            raise ValueError(f"{where} is neither a JSON object nor a readable file: {reason}") from None
    try:
        values = json.loads(text)
    except (json.JSONDecodeError, RecursionError) as error:
        raise ValueError(f"{where} is not JSON: {error}") from None
    if not isinstance(values, dict):
        raise ValueError(f"{where} must be a JSON object, not {values!r:.100}")
    return values, where
