"""One step's worth of tokens, as tensors and host integers: what every layer of a model reads.

Legend: T tokens of the step, B sequences, N blocks per sequence (padded), P rows whose logits are wanted.
Sequences lie one after another in the token axis; those with exactly one query token come first ("decodes").
"""

from __future__ import annotations

from typing import NamedTuple

from msgspec import Struct
from msgspec.structs import replace
from torch import Tensor


class TableInput(NamedTuple):
    """Where a token group of the cache (cache/spec.py) has the tokens of this step and of its sequences."""

    slots_T: Tensor  # int64 [T], as StepInput.slots_T
    block_table_BN: Tensor  # int64 [B, N]; blocks behind a window are 0 too


class StateRuns(NamedTuple):
    """The sequences of a step as layers with states see them, where some have drafts: a token and its drafts, which
    attend each for itself, move a state together. All int64 on the host, of R sequences, in the order of the tokens.

    A run begins with the first kept_R inputs that the record it reads keeps, whose output is not wanted; then come its
    tokens, of which the last guesses_R are drafts. The state is written as it is before the drafts, with their inputs.
    """

    starts: Tensor  # [R + 1], on the token axis
    reads_R: Tensor
    writes_R: Tensor
    kept_R: Tensor
    guesses_R: Tensor


class StateInput(NamedTuple):
    """Records of the state groups (cache/records.py): what each sequence begins the step with, and where its end
    goes. runs: None: each sequence is a run without kept inputs and drafts."""

    reads_B: Tensor  # int64 [B]
    writes_B: Tensor  # int64 [B]
    runs: StateRuns | None = None


class Resumed(NamedTuple):
    """A step that goes on at the start of a layer, or behind the last one: those before have written to the cache."""

    layer: int
    residual_TD: Tensor


class StepInput(Struct, frozen=True):
    """slots_T and block_table_BN are those of the first token group; most models have no other."""

    token_ids_T: Tensor  # int64 [T]
    positions_T: Tensor  # int64 [T], position of each token in its sequence
    slots_T: Tensor  # int64 [T], row of the paged cache to write: block * block_size + offset
    query_starts: tuple[int, ...]  # B + 1 host ints: sequence b owns tokens query_starts[b]:query_starts[b+1]
    kv_lens: tuple[int, ...]  # B host ints: tokens in the cache after this step's are written (query included)
    kv_lens_B: Tensor  # int64 [B], the same on the device
    block_table_BN: Tensor  # int64 [B, N], block numbers of each sequence; entries past its length are 0
    num_decodes: int  # the first num_decodes sequences have one query token each
    block_size: int
    logits_rows_P: Tensor  # int64 [P], tokens whose logits are wanted
    more_tables: tuple[TableInput, ...] = ()  # of the other token groups
    state: StateInput | None = None  # None: no layer keeps one
    resumed: Resumed | None = None  # None: it begins at the embedding

    def of_group(self, index: int) -> StepInput:
        """The same step as attention over the index-th token group sees it."""
        if index == 0:
            return self
        slots_T, block_table_BN = self.more_tables[index - 1]
        return replace(self, slots_T=slots_T, block_table_BN=block_table_BN)

    def slots_of(self, index: int) -> Tensor:
        """`of_group(index).slots_T`."""
        return self.slots_T if index == 0 else self.more_tables[index - 1].slots_T

    @property
    def num_tokens(self) -> int:
        return self.query_starts[-1]

    @property
    def num_sequences(self) -> int:
        return len(self.kv_lens)
