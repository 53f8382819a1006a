"""Lines from a terminal, with the arrow keys, a history, and several lines in one message (Alt-Enter)."""

from __future__ import annotations

import sys

from prompt_toolkit import PromptSession
from prompt_toolkit.completion import WordCompleter
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
from prompt_toolkit.output import create_output


class Lines:
    """prompt_toolkit's editor. The history lives as long as the program: what is said to a model is written nowhere."""

    def __init__(self, commands: list[str]) -> None:
        bindings = KeyBindings()

        @bindings.add("escape", "enter")
        def _(event: KeyPressEvent) -> None:
            event.current_buffer.insert_text("\n")

        self._session: PromptSession[str] = PromptSession(
            key_bindings=bindings,
            completer=WordCompleter(commands, sentence=True),
            complete_while_typing=False,
            prompt_continuation="  ",
            output=create_output(stdout=sys.stdout),
        )

    def ask(self, prompt: str) -> str:
        """EOFError at Ctrl-D, KeyboardInterrupt at Ctrl-C."""
        return self._session.prompt(prompt)
