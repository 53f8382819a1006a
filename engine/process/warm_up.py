"""What a rank does between having loaded and saying that it is ready, so that no request waits for what is slow at its
first time.

The ranks of one machine that start together first wait for each other: each says so in a file when it has loaded. What
bounds that wait is the life of those that are still loading (engine/process/heartbeat.py). Then they meet, capture
graphs if there are to be any, and practise: requests of every kind are computed as any others are, and forgotten. So
kernels are compiled, memory has been touched, and modules that are imported at their first use are there. One that
comes to others at work practises alone, before it meets them: they go on meanwhile. Last come the lessons that
companions ask for, such as how long steps with drafts take (engine/speculation/gate.py).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

from engine.process.heartbeat import beat_once, last_beat
from engine.process.places import Places
from engine.rank import Rank
from front.messages import Abort, AddRequest, RankReady
from front.params import SamplingParams

LOOK_SECONDS = 0.02
# A rank that gives no sign of life for so long is not waited for; the monitor has ended it by then.
SILENT_SECONDS = 15.0
SAMPLED_TOKENS = 8  # of the prompts whose every token's probability is asked for
LESSON_TOKENS = 128  # of a request in a lesson, at most

_GREEDY = SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True)
_DRAWN = SamplingParams(temperature=0.8, top_p=0.9, top_k=20, min_p=0.01, max_tokens=2, ignore_eos=True)
_EVERYTHING = SamplingParams(
    temperature=0.8,
    top_p=0.9,
    presence_penalty=0.1,
    frequency_penalty=0.1,
    repetition_penalty=1.1,
    min_tokens=1,
    stop_token_ids=(0,),
    logit_bias={0: 1.0},
    bad_words_token_ids=((0, 1),),
    logprobs=2,
    prompt_logprobs=1,
    max_tokens=2,
)


def warm_up(
    rank: Rank,
    places: Places,
    own: int,
    size: int,
    practised: bool = False,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """own, size: this rank and the number of all, in the first epoch. practised: it has done so alone. A peer that is
    lost is dealt with as at any other time: the rank is then without an epoch, and waits to be told of one."""
    beat_once(places.file(f"loaded-{own}"))
    last_sign = clock()
    missing = set(range(size)) - {own}
    while missing and clock() - last_sign < SILENT_SECONDS:
        missing = {other for other in missing if last_beat(places.file(f"loaded-{other}")) is None}
        beats = [last_beat(places.file(f"loading-{other}")) for other in missing]
        last_sign = max([last_sign, *(beat for beat in beats if beat is not None)])
        if missing:
            sleep(LOOK_SECONDS)
    while rank.forming:
        rank.step()
        sleep(LOOK_SECONDS if rank.forming else 0.0)
    if not practised:
        practise(rank)
    take_lessons(rank)


def practise(rank: Rank, alone: bool = False) -> None:
    """Have the rank compute what requests may ask for. alone: it has not met the others; otherwise all of them do this
    at the same time."""
    with rank.practising(alone):
        for batch in _batches(rank.ready, rank.practice_tokens):
            _compute(rank, batch, lambda: True)


def take_lessons(rank: Rank) -> None:
    """Have the rank, which has met the others, compute what its companions ask for; all do this at the same time."""
    with rank.practising(alone=False):
        for lesson in rank.lessons():
            _compute(rank, _greedy(rank.ready, lesson.num_requests), lesson.goes_on, others=not lesson.num_requests)


def _compute(rank: Rank, batch: list[AddRequest], goes_on: Callable[[], bool], others: bool = False) -> None:
    """others: they have requests, and this one goes with them."""
    open_ids = {message.request_id for message in batch}
    for message in batch:
        rank.submit(message)
    while (open_ids or others) and rank.serving and goes_on():
        open_ids -= {output.request_id for output in rank.step() if output.finish_reason is not None}
    rank.submit(Abort(list(open_ids)))  # a peer was lost, or it is enough


def _greedy(ready: RankReady, num: int) -> list[AddRequest]:
    """So many, or as many as there is room for; []: there is none."""
    if not num:
        return []
    length = min(LESSON_TOKENS, ready.max_model_len, (ready.num_blocks - 1) * ready.block_size // num)
    if length < 2:
        return []
    prompt = min(SAMPLED_TOKENS, length - 1)
    params = SamplingParams(temperature=0.0, max_tokens=length - prompt, ignore_eos=True)
    return [_request(ready, index, prompt, params) for index in range(num)]


def _batches(ready: RankReady, num_tokens: int) -> Iterator[list[AddRequest]]:
    """Prompts of so many tokens and greedy ones behind them, whose steps are recorded or captured; then all that
    sampling knows. At once where the tokens are few: each pass reads the weights outside of the experts."""
    longest = min(ready.max_model_len - 4, (ready.num_blocks - 1) * ready.block_size)
    if longest < 1:
        return
    lengths = [longest] * (num_tokens // longest) + [num_tokens % longest or 1]
    greedy = [_request(ready, index, length, _GREEDY) for index, length in enumerate(lengths)]
    short = min(longest, SAMPLED_TOKENS, num_tokens)
    kinds = enumerate((_DRAWN, _EVERYTHING), len(greedy))
    sampled = [_request(ready, index, short, params) for index, params in kinds]
    yield from [greedy + sampled] if num_tokens < SAMPLED_TOKENS else [greedy, sampled]


def _request(ready: RankReady, index: int, length: int, params: SamplingParams) -> AddRequest:
    token_ids = [(7919 * (index * length + at) + 1) % ready.vocab_size for at in range(length)]
    return AddRequest(request_id=-1 - index, token_ids=token_ids, prompt_len=length, params=params, seed=index)
