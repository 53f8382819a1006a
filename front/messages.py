"""What travels between the front (HTTP, tokenizer, routing) and the ranks, as msgspec structs (msgpack over ZeroMQ).

Token positions are counted from the start of the prompt. Times are seconds of time.monotonic() on one machine.
"""

from __future__ import annotations

import os
from typing import Literal

import msgspec

from front.params import SamplingParams

FinishReason = Literal["stop", "length", "abort", "error"]
STEP_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)  # upper bounds of counts of steps
EXIT_WEIGHTS = 5  # exit code of a rank that was started again and whose weights are away, or are not those of the start
LogprobsMode = Literal["raw_logprobs", "processed_logprobs", "raw_logits", "processed_logits"]


# ---- front -> rank -----------------------------------------------------------------------------------------------


class AddRequest(msgspec.Struct, tag="add", frozen=True, kw_only=True, omit_defaults=True):
    """One sequence to continue (the front has already split n > 1 into n of these and chosen each one's seed).
    token_ids: prompt, then any output already released (a replay after a rank was lost); prompt_len says where output
    begins. params.max_tokens is resolved (never None) and counts from prompt_len. formers: ranks that had it last and
    have ended, what each called it, and how many of its tokens are certainly in that one's cache (cache/shared.py).
    """

    request_id: int
    token_ids: list[int]
    prompt_len: int
    params: SamplingParams
    seed: int
    eos_token_ids: tuple[int, ...] = ()
    priority: int = 0  # lower first; equal: arrival order
    cache_salt: str = ""
    arrival: float = 0.0
    formers: tuple[tuple[int, int, int], ...] = ()


class Abort(msgspec.Struct, tag="abort", frozen=True):
    request_ids: list[int]


class ResetPrefixCache(msgspec.Struct, tag="reset_prefix_cache", frozen=True):
    pass


class Shutdown(msgspec.Struct, tag="shutdown", frozen=True):
    """Leave together with the other ranks at the next agreed step. Running requests are dropped."""


class Membership(msgspec.Struct, tag="membership", frozen=True):
    """Who takes part from `epoch` on. The front sends it to every live rank; epochs only rise. A rank that loses a
    peer leaves its step and waits for one; if none is lost (one returns), ranks change over together after a step.
    process: the one that is told, as its RankReady says; another that is the rank by now takes no notice."""

    epoch: int
    alive: list[bool]
    process: int = 0  # any


class BalanceCommand(msgspec.Struct, tag="balance", frozen=True, kw_only=True):
    """To the lowest live rank, which leads the balancing; answered by one BalanceReply.
    kind: status, placement and load ask; plan computes and shows what would move; rebalance takes that plan; record
    writes the loads of every step to `path` until a record without a path comes.
    """

    command_id: int
    kind: Literal["status", "placement", "load", "plan", "rebalance", "record"]
    path: str | None = None


class ProfileCommand(msgspec.Struct, tag="profile", frozen=True, kw_only=True, omit_defaults=True):
    """start: record what this rank does when, from the next step on, at most `capacity` events (engine/timeline.py).
    stop: answered by one ProfilePart."""

    profile_id: int
    kind: Literal["start", "stop"]
    capacity: int = 0


FrontToRank = AddRequest | Abort | ResetPrefixCache | Shutdown | Membership | BalanceCommand | ProfileCommand


# ---- rank -> front -----------------------------------------------------------------------------------------------


class Logprobs(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """For one position. ids/values: the chosen token first, then the top alternatives in falling order (the chosen one
    is not repeated away: it may appear twice). rank: the chosen token's place in the vocabulary, 1 is the most
    likely."""

    ids: list[int]
    values: list[float]
    rank: int


class TokenOutput(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """New tokens of one sequence. stop_reason: the stop token id that ended it (None for EOS or length).

    prompt_logprobs comes once, with the first output: one entry per prompt token, None for the first. num_accepted,
    num_rejected: drafts that turned out right and wrong. queued: seconds that it waited on its rank for its first
    step, with the first output; num_preemptions: how often it lost its blocks, with the last one.
    """

    request_id: int
    new_token_ids: list[int]
    finish_reason: FinishReason | None = None
    stop_reason: int | None = None
    logprobs: list[Logprobs] | None = None
    prompt_logprobs: list[Logprobs | None] | None = None
    num_cached_tokens: int = 0
    num_accepted: int = 0
    num_rejected: int = 0
    queued: float | None = None
    num_preemptions: int = 0


class RankStats(msgspec.Struct, frozen=True, array_like=True):
    """Gauges now, counters since start."""

    running: int = 0
    waiting: int = 0
    kv_blocks_used: int = 0
    kv_blocks_total: int = 0
    prefix_queries: int = 0  # tokens looked up
    prefix_hits: int = 0  # tokens found
    preemptions: int = 0
    steps: int = 0
    prompt_tokens: int = 0
    generation_tokens: int = 0
    dbo_steps: int = 0  # split in parts
    dbo_overlap: float = 0.0  # of the time that tokens were lately under way, the part not spent waiting for them
    spec_drafts: int = 0  # steps of a request with drafts
    spec_draft_tokens: int = 0
    spec_accepted_tokens: int = 0
    spec_accepted_per_pos: list[int] = []
    cached_tokens: int = 0  # of prompt_tokens, those that were found in the prefix cache
    num_step_tokens: int = 0  # computed in all steps, and the first ones of outputs: what was read and written
    prefill_interval: int = 1  # steps from one that lets prompts in to the next
    prefill_held_steps: int = 0  # in which prompts waited for that
    step_tokens: list[int] = []  # steps by these tokens: at most STEP_TOKENS[i]; the last entry: more
    taken_over: int = 0  # tokens that a lost rank had computed
    resumed: int = 0  # of steps that a loss broke off, and that went on where they were


class Outputs(msgspec.Struct, tag="outputs", frozen=True):
    rank: int
    outputs: list[TokenOutput]
    stats: RankStats
    time: float = 0.0


class RankReady(msgspec.Struct, tag="ready", frozen=True, kw_only=True):
    rank: int
    num_blocks: int
    block_size: int
    max_model_len: int
    vocab_size: int
    load_seconds: float
    bytes_read: int
    mapped_bytes: int = 0  # of weights that it shares with other ranks ...
    part: int = 0  # ... of this part of the server
    reasons: dict[str, str] = {}
    process: int = msgspec.field(default_factory=os.getpid)


class RankFailed(msgspec.Struct, tag="failed", frozen=True):
    """A rank cannot go on; it exits right after sending this, and RankLost for it follows from the supervisor."""

    rank: int
    error: str
    bad_input: bool = False  # it is about what it was given: a file, an option


class RankLost(msgspec.Struct, tag="lost", frozen=True):
    """From the supervisor, once for every process of a rank that ends, also of one that was still loading: it has ended
    (or hung, and was killed before this was said)."""

    rank: int
    reason: str
    time: float  # its last sign of life: when the kernel told of its end, or a hung one's last heartbeat
    process: int  # its process id, which tells this life of the rank from others
    intact: bool = True  # what it has left in memory can be relied on: it did not end for a fault in its own


class Waiting(msgspec.Struct, tag="waiting", frozen=True):
    """This rank cannot go on for a reason that may pass by itself: its weights cannot be read. "": it goes on."""

    rank: int
    reason: str


class WaitedFor(msgspec.Struct, frozen=True):
    """last_seen: seconds ago; None: there is no sign of it. where: in words. state: of its process; "": not known."""

    rank: int
    last_seen: float | None
    where: str
    state: str


class Wait(msgspec.Struct, frozen=True):
    """A rank that waits for others; rank -1: the front, whose loop stands still. step: of the epoch. kind: a part of a
    step (ep/recorder.py), or meeting. where: all of it in words."""

    rank: int
    epoch: int
    step: int
    layer: int
    kind: str
    seconds: float
    where: str
    waits_for: list[WaitedFor]


class Waits(msgspec.Struct, tag="waits", frozen=True):
    """From the supervisor: the waits that have passed the threshold and are not over."""

    waits: list[Wait]


class NoneLeft(msgspec.Struct, tag="none_left", frozen=True):
    """From the supervisor: no rank is left, and none will be started again."""

    reason: str


class Joined(msgspec.Struct, tag="joined", frozen=True, kw_only=True):
    """A rank has changed over to `epoch` and serves again. Seconds of its own work; experts and bytes it has read."""

    rank: int
    epoch: int
    agree_seconds: float
    repair_seconds: float
    experts_loaded: int
    bytes_read: int


class EpochLost(msgspec.Struct, tag="epoch_lost", frozen=True):
    """A rank has missed others in an exchange of `epoch`, has left it, and waits for a Membership. One is lost, or
    hangs, or a connection broke between two that are well (front/accusations.py)."""

    rank: int
    epoch: int
    reason: str


class BalanceStatus(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How the experts' load is spread, as the leading rank sees it. Balancedness is mean / max of the ranks' tokens, 1
    is best.

    One entry per MoE layer in the lists; the counters count since the leader's start.
    """

    rank: int
    epoch: int
    steps: int = 0  # observed
    window_balance: list[float] = []  # of the tokens of the last window together
    step_balance: list[float] = []  # mean over the steps of the last window
    lower_bound: list[float] = []  # the balancedness that no placement in these slots can exceed, same window
    age_steps: int = 0  # since the placement last changed (weights moved)
    reweights: int = 0
    moves: int = 0  # experts brought to a slot
    bytes_moved: int = 0
    failures: int = 0
    last_error: str = ""
    moving: int = 0  # experts that wait to be moved
    recording: str = ""  # path of the recording, "" when off


class BalanceReport(msgspec.Struct, tag="balance_report", frozen=True):
    """Unasked, at the end of every window and after a failure."""

    status: BalanceStatus


class BalanceReply(msgspec.Struct, tag="balance_reply", frozen=True, kw_only=True):
    """body: JSON of the answer; error: one line, "" when it went well. again: this rank does not lead now."""

    command_id: int
    body: bytes = b"{}"
    error: str = ""
    again: bool = False


class ProfilePart(msgspec.Struct, tag="profile_part", frozen=True, kw_only=True):
    """One rank's part of a profile. started False: it was not there when the profile began.

    events: as ep/recorder.py packs them; num_dropped: those that found no place. clock: equal for all that read the
    same one; host, network: of which machine, and of which network namespace on it.
    """

    profile_id: int
    rank: int
    started: bool
    events: bytes = b""
    num_dropped: int = 0
    host: str = ""
    clock: str = ""
    network: str = ""


RankToFront = (
    Outputs
    | RankReady
    | RankFailed
    | RankLost
    | Waiting
    | NoneLeft
    | Waits
    | Joined
    | EpochLost
    | BalanceReport
    | BalanceReply
    | ProfilePart
)

encoder = msgspec.msgpack.Encoder()
front_decoder = msgspec.msgpack.Decoder(RankToFront)
rank_decoder = msgspec.msgpack.Decoder(FrontToRank)
