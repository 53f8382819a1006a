"""What a rank says of its drafts in the record of each step (engine/speculation/gate.py)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

# Flags. Of a trial: the step is one, and is not measured; the trial alternates with what was chosen, or is of what
# promises to be better. The step has nothing but decodes; the rank has sequences that may have drafts.
TRYING, COLD_STEP, ALTERNATES, PROMISING, DECODES, LEADS = (1 << bit for bit in range(6))
TRIAL_FLAGS = TRYING | COLD_STEP | ALTERNATES | PROMISING


class Words(NamedTuple):
    """verify: drafts of a sequence in the next step; make: that the model makes in this one. num: one and the
    sequences; 0: of a rank that practises something else. accepted: drafts of this rank that were right, since the
    last step. Those of engine/speculation/rights.py follow."""

    verify: int
    make: int
    num: int
    flags: int
    accepted: int

    @classmethod
    def of(cls, said: Sequence[int]) -> Words:
        return cls(*said[:NUM_FIELDS])


NUM_FIELDS = len(Words._fields)


def leader_of(words: Sequence[Words]) -> Words | None:
    """Of the rank with most sequences, of those that may have drafts. None: there are no drafts, as no sequence may
    have any or a rank practises something else."""
    leader = max(words, key=lambda some: (some.flags & LEADS, some.num))
    return leader if leader.flags & LEADS and all(some.num for some in words) else None
