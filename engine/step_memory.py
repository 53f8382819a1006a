"""The memory that the steps of one lane are read from, by eager steps and by captured graphs alike.

A step of so many tokens and sequences always lies in the same place, so a graph that was captured over one such step
reads every later one. On a CPU the host writes where the kernels read. On a GPU it writes to a twin, and one copy
brings the whole step over.

Legend: F fields, T tokens of the step, B sequences, N blocks per sequence; T and B with the padding where a step has
any.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from msgspec import Struct
from torch import Tensor

from engine.device import Upload

Ints = npt.NDArray[np.int64]

_ALIGNED = 8  # numbers, to a multiple of which fields begin: kernels are compiled for aligned memory


class Limits(NamedTuple):
    """Of the steps of one rank. num_tables, has_state: token groups of the cache, and whether there are state groups;
    scratch_blocks: of each table, where rows of padding write, (): block 0; scratch_record: the same of states."""

    max_num_seqs: int
    max_num_tokens: int  # of one step, padding included
    max_model_len: int  # of a sequence, its sampled tokens included
    block_size: int
    num_tables: int = 1
    has_state: bool = False
    scratch_blocks: tuple[int, ...] = ()
    scratch_record: int = 0
    max_drafts: int = 0  # of a step

    @property
    def max_decodes(self) -> int:
        """Tokens of a step that each attend for themselves: a sequence's last one, and the drafts behind it."""
        return max(self.max_num_seqs, min(self.max_num_seqs + self.max_drafts, self.max_num_tokens))

    @property
    def columns(self) -> int:
        """Blocks of the longest sequence."""
        return -(-self.max_model_len // self.block_size)

    @property
    def scratch(self) -> tuple[int, ...]:
        """scratch_blocks, one for each table."""
        return self.scratch_blocks or (0,) * self.num_tables


class Place(Struct, frozen=True):
    """Where steps of one shape lie. Host arrays have columns for padding too; tensors have not."""

    tokens_FT: Ints
    sequences_FB: Ints
    token_tensors: tuple[Tensor, ...]  # [T] each
    sequence_tensors: tuple[Tensor, ...]  # [B] each
    counters_FB: Ints  # in a step of decodes: all fields that count one further with every token
    end: int  # behind it in the memory


class StepMemory:
    """token_fields, sequence_fields: of each field what stands in rows of padding. first_counter: the first token
    field that counts on from step to step, as all behind it do and of the sequence fields the first. upload: None:
    kernels read what the host has written."""

    def __init__(
        self,
        limits: Limits,
        token_fields: Sequence[int],
        sequence_fields: Sequence[int],
        first_counter: int,
        device: torch.device,
        upload: Upload | None,
    ) -> None:
        max_tokens, max_sequences, columns = limits.max_num_tokens, limits.max_decodes, limits.columns
        num_tables = limits.num_tables
        self._token_padding_F1 = np.array(token_fields, dtype=np.int64)[:, None]
        self._sequence_padding_F1 = np.array(sequence_fields, dtype=np.int64)[:, None]
        self._scratch = limits.scratch
        assert len(self._scratch) == num_tables
        self._first_counter = first_counter
        self._upload = upload
        fields = len(token_fields) * _up(max_tokens) + len(sequence_fields) * _up(max_sequences)
        more = 2 * max_tokens + 5 * max_sequences + num_tables * max_sequences * columns
        size = fields if upload is None else fields + more + _ALIGNED * (8 + num_tables)
        self._flat = torch.zeros(size, dtype=torch.int64, device=device)
        self._host: Ints = self._flat.numpy() if upload is None else np.zeros(size, dtype=np.int64)
        self.tables = [
            torch.full((max_sequences, columns), block, dtype=torch.int64, device=device) for block in self._scratch
        ]
        self._places: dict[
            tuple[int, int], Place
        ] = {}  # of steps of decodes: by their number, with and without padding
        self._staged: list[tuple[Tensor, Ints]] = []  # (part of a table, what goes there)
        self._used = 0

    def place(self, num_tokens: int, num_sequences: int, rows: int = 0) -> Place:
        """Begin a step. rows: that it is padded to, or 0: tokens, and in a step of decodes sequences too."""
        rows = max(rows, num_tokens)
        if num_tokens != num_sequences:
            place = self._make(num_tokens, num_sequences, rows, num_sequences)
        else:
            key = num_tokens, rows
            found = self._places.get(key)
            place = self._places[key] = found or self._make(num_tokens, num_tokens, rows, rows)
        self._used = place.end
        self._staged.clear()
        return place

    def _make(self, num_tokens: int, num_sequences: int, token_rows: int, sequence_rows: int) -> Place:
        num_fields, num_more = len(self._token_padding_F1), len(self._sequence_padding_F1)
        wide, narrow = _up(token_rows), _up(sequence_rows)
        middle = num_fields * wide
        end = middle + num_more * narrow
        assert end <= len(self._host), "a step is larger than the buffers"
        tokens_FT = self._host[:middle].reshape(num_fields, wide)
        sequences_FB = self._host[middle:end].reshape(num_more, narrow)
        token_fields = self._flat[:middle].view(num_fields, wide)[:, :num_tokens].unbind()
        sequence_fields = self._flat[middle:end].view(num_more, narrow)[:, :num_sequences].unbind()
        first = self._first_counter * wide
        counters_FB = tokens_FT
        if wide == narrow:
            counters_FB = self._host[first : middle + wide].reshape(1 + num_fields - self._first_counter, wide)
        return Place(
            tokens_FT[:, :token_rows],
            sequences_FB[:, :sequence_rows],
            tuple(token_fields),
            tuple(sequence_fields),
            counters_FB[:, :num_sequences],
            end,
        )

    def scratch(self, num_tokens: int, num_sequences: int) -> Place:
        """A step that is nothing but padding; it is sent."""
        place = self.place(num_tokens, num_sequences)
        place.tokens_FT[:] = self._token_padding_F1
        place.sequences_FB[:] = self._sequence_padding_F1
        for index, block in enumerate(self._scratch):
            self.write_table(index, place, np.full((num_sequences, 1), block))
        self.send()
        return place

    def pad(self, place: Place) -> None:
        """Fill the rows behind the step's own."""
        place.tokens_FT[:, len(place.token_tensors[0]) :] = self._token_padding_F1
        place.sequences_FB[:, len(place.sequence_tensors[0]) :] = self._sequence_padding_F1

    def write_table(self, index: int, place: Place, table_BN: Ints) -> Tensor:
        """The blocks of the step's sequences: [B, N], a view of the index-th table."""
        (count, columns), rows = table_BN.shape, place.sequences_FB.shape[1]
        table, scratch = self.tables[index], self._scratch[index]
        if self._upload is None:
            there = table.numpy()
            there[:count, :columns] = table_BN
            there[count:rows, :1] = scratch
        elif rows and columns:
            padded = np.full((rows, columns), scratch)
            padded[:count] = table_BN
            self._staged.append((table[:rows, :columns], padded))
        return table[:count, :columns]

    def more(self, array: Ints) -> Tensor:
        """What else belongs to this step, of any shape; on a GPU valid after `send`."""
        if self._upload is None:
            return torch.from_numpy(array)
        first, end = self._used, self._used + array.size
        assert end <= len(self._host), "a step is larger than the buffers"
        self._host[first:end] = array.ravel()
        self._used = _up(end)
        return self._flat[first:end].view(array.shape)

    def send(self) -> None:
        """The step is complete. Tables travel last, for a step that goes on seldom changes them."""
        if self._upload is None:
            return
        used = self._used
        tables = [(part, self.more(padded)) for part, padded in self._staged]
        self._upload.send(self._host[: self._used], self._flat)
        for part, table in tables:
            part.copy_(table)
        self._staged.clear()
        self._used = used


def _up(size: int) -> int:
    return -(-size // _ALIGNED) * _ALIGNED
