"""What the model has drafted at the end of a step, until the next one is scheduled. No torch here."""

from __future__ import annotations

from engine.request import Request


class ModelDrafts:
    """Implements engine.speculation.drafter.Drafter, with what the model has drafted at the end of the last step."""

    def __init__(self) -> None:
        self._drafts: dict[int, tuple[int, list[int]]] = {}  # request -> tokens that were known, drafts behind them

    def offer(self, request: Request, known: int, drafts: list[int]) -> None:
        """known: tokens of the request in front of them."""
        self._drafts[request.request_id] = (known, drafts)

    def propose(self, request: Request, limit: int) -> list[int]:
        known, drafts = self._drafts.get(request.request_id, (0, []))
        return drafts[:limit] if known == len(request.tokens) else []

    def observe(self, request: Request, num_accepted: int) -> None:
        """The next drafts come with the tokens."""

    def forget(self, request: Request) -> None:
        self._drafts.pop(request.request_id, None)
