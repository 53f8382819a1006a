"""What `moesaic chat` knows between two answers: the messages, and how answers are drawn. Nothing here talks to a
server or a terminal."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

PARAMETERS: dict[str, type[int] | type[float] | type[str]] = {
    "temperature": float, "top_p": float, "min_p": float, "top_k": int, "max_tokens": int, "seed": int,
    "presence_penalty": float, "frequency_penalty": float, "repetition_penalty": float, "reasoning_effort": str,
}  # fmt: skip
HELP = """/help                      this
/reset                     forget the conversation; the system message and the parameters stay
/system [TEXT]             show the system message, or set it; /system - for none
/params [NAME=VALUE ...]   show the parameters, or set them; NAME= for the server's default
/save FILE                 write the conversation as JSON
/exit                      end, as Ctrl-D does
//TEXT                     send a message that begins with a slash
Ctrl-C stops an answer; Alt-Enter begins a new line."""


class Conversation:
    """messages: without the system message, in turns: user, assistant, user, ..."""

    def __init__(self, model: str, system: str | None, params: dict[str, Any]) -> None:
        self.model = model
        self.system = system
        self.params = {name: value for name, value in params.items() if value is not None}
        self.messages: list[dict[str, str]] = []

    def request(self) -> dict[str, Any]:
        """Of an answer to the last message."""
        system = [{"role": "system", "content": self.system}] if self.system else []
        return {"model": self.model, "messages": [*system, *self.messages], "stream": True, **self.params}

    def say(self, role: str, text: str) -> None:
        self.messages.append({"role": role, "content": text})

    def drop_oldest(self) -> bool:
        """The oldest turn goes, up to the next message of the user. False: only the last message is left."""
        later = [place for place, message in enumerate(self.messages) if message["role"] == "user" and place]
        if not later:
            return False
        del self.messages[: later[0]]
        return True

    def take_back(self) -> None:
        """The last message has no answer, and never was."""
        self.messages.pop()

    def command(self, line: str) -> str:
        """What a line with a slash in front does, in words. ValueError for one that cannot be done."""
        name, _, rest = line[1:].partition(" ")
        rest = rest.strip()
        if name == "help":
            return HELP
        if name == "reset":
            self.messages.clear()
            return "a new conversation"
        if name == "system":
            if rest:
                self.system = None if rest == "-" else rest
            return f"system: {self.system or 'none'}"
        if name == "params":
            for word in rest.split():
                self._set(word)
            return ", ".join(f"{key}={value}" for key, value in self.params.items()) or "the server's defaults"
        if name == "save":
            return self._save(rest)
        raise ValueError(f"/{name} is unknown; /help lists what there is")

    def _set(self, word: str) -> None:
        name, is_given, value = word.partition("=")
        if name not in PARAMETERS or not is_given:
            raise ValueError(f"/params takes NAME=VALUE, where NAME is one of {', '.join(PARAMETERS)}; not {word!r}")
        if not value:
            self.params.pop(name, None)
            return
        try:
            self.params[name] = PARAMETERS[name](value)
        except ValueError:
            kind = "an integer" if PARAMETERS[name] is int else "a number"
            raise ValueError(f"{name} must be {kind}, not {value!r}") from None

    def _save(self, path: str) -> str:
        if not path:
            raise ValueError("/save needs the name of a file")
        kept = self.request()
        del kept["stream"]
        try:
            Path(path).expanduser().write_text(json.dumps(kept, ensure_ascii=False, indent=2) + "\n")
        except OSError as error:
            raise ValueError(f"{path}: {error.strerror}") from None
        return f"{len(self.messages)} messages in {path}"
