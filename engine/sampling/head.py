"""The head of a step: of what it samples, and of prompts.

Legend: T tokens of the step, S sequences sampled, D hidden size, P rows whose logits are wanted, V vocabulary.
"""

from __future__ import annotations

from torch import Tensor

from engine.prepared import PreparedStep
from engine.sampling.logprobs import prompt_logprobs
from engine.sampling.sampling_table import SamplingTable
from front.messages import Logprobs, LogprobsMode
from layers.greedy import greedy
from models.base import CausalLM

PROMPT_ROWS_AT_ONCE = 256  # bounds the logits held for prompt_logprobs: [256, V] float32


class StepHead:
    """hidden_TD: of all tokens; hidden_SD: of those that are sampled. logits_SV: of these, what all ranks have computed
    together (ep/vocab_parallel.py); None: this rank computes its own when they are wanted, and for the best token alone
    they need not all be in memory."""

    def __init__(self, model: CausalLM, hidden_TD: Tensor, hidden_SD: Tensor, logits_SV: Tensor | None) -> None:
        self._model = model
        self._hidden_TD = hidden_TD
        self._hidden_SD = hidden_SD
        self._logits_SV = logits_SV

    def logits(self) -> Tensor:
        """[S, V], in the model's dtype."""
        return self._model.logits(self._hidden_SD) if self._logits_SV is None else self._logits_SV

    def greedy_tokens(self, num_valid_tokens: int) -> Tensor:
        """int64 [S]: of the first num_valid_tokens logits the largest, the first of equals."""
        if self._logits_SV is None:
            return self._model.greedy_tokens(self._hidden_SD, num_valid_tokens)
        return greedy(self._logits_SV[:, :num_valid_tokens])

    def prompt_logprobs(
        self, prepared: PreparedStep, mode: LogprobsMode, table: SamplingTable
    ) -> list[list[Logprobs] | None] | None:
        """One entry per entry of the schedule; None when no row asked. Always computed by this rank alone."""
        if not prepared.prompt_parts:
            return None
        found: list[list[Logprobs] | None] = [None] * prepared.num_entries
        for part in prepared.prompt_parts:
            values: list[Logprobs] = []
            for first in range(0, len(part.target_ids), PROMPT_ROWS_AT_ONCE):
                targets = part.target_ids[first : first + PROMPT_ROWS_AT_ONCE]
                start = part.first_logit + first
                hidden_PD = self._hidden_TD[prepared.logits_rows_P[start : start + len(targets)]]
                logits_PV = self._model.logits(hidden_PD).float()
                values += prompt_logprobs(logits_PV, targets, part.num_logprobs, mode, table.num_valid_tokens)
            found[part.entry] = [*(found[part.entry] or ()), *values]
        return found
