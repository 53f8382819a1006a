"""The front's core: routing, splitting, text, stop strings, accounting."""

from __future__ import annotations

import itertools

import msgspec
import pytest
from front_parts import small_tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st

from front.collector import Collector
from front.front import Front
from front.messages import (
    Abort,
    AddRequest,
    Logprobs,
    Outputs,
    RankFailed,
    RankReady,
    RankStats,
    TokenOutput,
)
from front.outputs import Delta, Prompt
from front.params import SamplingParams
from front.routing import RequestRouter
from front.sampling_params import resolve, seeds

TOKENIZER = small_tokenizer()
EOS = 3


def make_prompt(request_id: str = "r", text: str = "The fox", **params) -> Prompt:
    token_ids = TOKENIZER.encode(text)
    return Prompt(
        request_id=request_id,
        token_ids=token_ids,
        params=resolve(SamplingParams(**{"max_tokens": 1000, **params}), TOKENIZER, len(token_ids), 2000),
        text=text,
    )


def make_front(num_ranks: int = 1) -> Front:
    ticks = itertools.count(100)
    return Front(num_ranks, TOKENIZER, block_size=16, clock=lambda: float(next(ticks)))


def outputs(*items: TokenOutput, rank: int = 0) -> Outputs:
    return Outputs(rank, list(items), RankStats(running=len(items)))


def feed(front: Front, sequence_id: int, token_ids: list[int], **fields) -> tuple[Delta | None, list]:
    work = front.on_message(outputs(TokenOutput(sequence_id, token_ids, **fields)))
    return (work.deltas[0][1] if work.deltas else None), work.messages


def encode(text: str) -> list[int]:
    return TOKENIZER.encode(text, add_special_tokens=False)


def test_one_request_from_start_to_end() -> None:
    front = make_front()
    prompt = make_prompt(max_tokens=50, temperature=0.5, seed=7, stop=("zzz",), bad_words=("tree",), n=1)
    [(rank, message)] = front.add(prompt)
    assert rank == 0 and message.token_ids == prompt.token_ids and message.prompt_len == len(prompt.token_ids)
    assert message.seed == 7 and message.eos_token_ids == TOKENIZER.eos_token_ids
    assert message.params.stop == () and message.params.bad_words == () and message.params.bad_words_token_ids
    assert message.params.max_tokens == 50 and message.params.temperature == 0.5
    ids = encode(" runs away")
    delta, messages = feed(front, message.request_id, ids[:1], num_cached_tokens=4)
    assert delta.num_cached_tokens == 4 and delta.token_ids == ids[:1] and not messages
    feed(front, message.request_id, ids[1:])
    delta, messages = feed(front, message.request_id, [EOS], finish_reason="stop")
    assert delta == Delta(0, "", [EOS], finish_reason="stop") and not messages
    assert front.num_requests == 0 and front.router.loads == [0]
    [record] = front.take_finished()
    assert record.num_output_tokens == len(ids) + 1 and record.num_prompt_tokens == len(prompt.token_ids)
    assert record.num_cached_tokens == 4 and record.finish_reasons == ("stop",) and record.params is prompt.params
    assert record.arrival < record.first_token < record.finish
    assert front.take_finished() == []


def test_text_of_the_stop_token() -> None:
    tail = encode(" x")
    for include, skip, expected in [(False, True, ""), (True, True, ""), (True, False, "<|im_end|>")]:
        front = make_front()
        prompt = make_prompt(include_stop_str_in_output=include, skip_special_tokens=skip)
        [(_, message)] = front.add(prompt)
        feed(front, message.request_id, tail)
        delta, _ = feed(front, message.request_id, [EOS], finish_reason="stop")
        assert delta.text == expected
    front = make_front()
    [(_, message)] = front.add(make_prompt(stop_token_ids=(tail[-1],)))
    delta, _ = feed(front, message.request_id, tail, finish_reason="stop", stop_reason=tail[-1])
    assert delta.stop_reason == tail[-1] and delta.token_ids == tail and delta.text == TOKENIZER.decode(tail[:-1])


@pytest.mark.parametrize("include", [False, True])
def test_stop_string_ends_the_sequence_and_its_rank(include: bool) -> None:
    front = make_front()
    [(_, message)] = front.add(make_prompt(stop=("wolf", "tree s"), include_stop_str_in_output=include))
    ids = encode("a hollow tree said")
    text = ""
    used = 0
    for token_id in ids:
        delta, messages = feed(front, message.request_id, [token_id])
        text += delta.text
        used += 1
        assert "tree" not in text or include
        if delta.finish_reason:
            break
    assert delta.finish_reason == "stop" and delta.stop_reason == "tree s"
    assert text == ("a hollow tree s" if include else "a hollow ")
    assert messages == [(0, Abort([message.request_id]))]
    assert feed(front, message.request_id, ids[:1]) == (None, [])  # what was under way is ignored
    [record] = front.take_finished()
    assert record.num_output_tokens == used


def test_stop_string_cuts_the_tokens_of_the_same_step() -> None:
    front = make_front()
    [(_, message)] = front.add(make_prompt(stop=("!",), logprobs=0))
    ids = encode("no! more")
    at = next(place for place, token_id in enumerate(ids) if "!" in TOKENIZER.token_str(token_id))
    logprobs = [Logprobs([token_id], [-1.0], 1) for token_id in ids]
    delta, messages = feed(front, message.request_id, ids, logprobs=logprobs)
    assert delta.text == "no" and delta.token_ids == ids[: at + 1] and len(delta.logprobs) == at + 1
    assert delta.finish_reason == "stop" and messages


def test_stop_string_in_the_rank_s_last_output_sends_no_abort() -> None:
    front = make_front()
    [(_, message)] = front.add(make_prompt(stop=("!",)))
    delta, messages = feed(front, message.request_id, encode("no!"), finish_reason="length")
    assert (delta.text, delta.finish_reason, delta.stop_reason, messages) == ("no", "stop", "!", [])


def test_held_text_goes_out_at_the_end() -> None:
    front = make_front()
    [(_, message)] = front.add(make_prompt(stop=("tree sings",)))
    delta, _ = feed(front, message.request_id, encode("a tree"))
    assert delta.text == "a "
    delta, _ = feed(front, message.request_id, encode("🦊")[:2], finish_reason="length")
    assert delta.text == "tree\ufffd"


def test_stop_strings_wait_for_min_tokens() -> None:
    front = make_front()
    ids = encode("a b a b a")
    [(_, message)] = front.add(make_prompt(stop=("a",), min_tokens=2))
    texts = []
    for token_id in ids:
        delta, _ = feed(front, message.request_id, [token_id])
        texts.append(delta.text)
        if delta.finish_reason:
            break
    assert "".join(texts) == "a b "


def test_choices_share_a_rank_and_differ_in_seed() -> None:
    front = make_front(3)
    prompt = make_prompt(n=4, seed=5, prompt_logprobs=1)
    messages = front.add(prompt)
    assert len({rank for rank, _ in messages}) == 1
    assert [message.seed for _, message in messages] == seeds(5, 4)
    assert [message.params.prompt_logprobs for _, message in messages] == [1, None, None, None]
    assert all(message.params.n == 1 and message.params.seed is None for _, message in messages)
    ids = [message.request_id for _, message in messages]
    rank = messages[0][0]
    work = front.on_message(outputs(*[TokenOutput(item, [EOS], "stop", None) for item in ids[:3]], rank=rank))
    assert [delta.index for _, delta in work.deltas] == [0, 1, 2] and front.num_requests == 1
    work = front.on_message(outputs(TokenOutput(ids[3], [EOS], "length"), rank=rank))
    assert front.num_requests == 0 and front.router.loads == [0, 0, 0]
    assert front.take_finished()[0].finish_reasons == ("stop", "stop", "stop", "length")


def test_logprobs() -> None:
    front = make_front()
    prompt = make_prompt(logprobs=2, prompt_logprobs=1)
    [(_, message)] = front.add(prompt)
    half = encode("🦊")[0]
    delta, _ = feed(
        front,
        message.request_id,
        [half],
        logprobs=[Logprobs([half, 70, half], [-2.0, -1.0, -2.0], 2)],
        prompt_logprobs=[None, Logprobs([60, 61], [-3.0, float("-inf")], 9)],
    )
    [position] = delta.logprobs
    assert (position.chosen.token_id, position.chosen.logprob, position.chosen.rank) == (half, -2.0, 2)
    assert position.chosen.raw == TOKENIZER.token_bytes(half) and position.chosen.token == "\ufffd"
    assert [(top.token_id, top.rank) for top in position.top] == [(70, 1), (half, 2)]
    assert delta.prompt_logprobs[0] is None and delta.prompt_logprobs[1].chosen.rank == 9
    delta, _ = feed(front, message.request_id, [70], logprobs=[Logprobs([70], [-1.0], 1)])
    assert delta.prompt_logprobs is None and delta.logprobs[0].top == []


def test_abort() -> None:
    front = make_front(2)
    messages = front.add(make_prompt(n=2, stop=("fox runs",)))
    first, second = (message.request_id for _, message in messages)
    rank = messages[0][0]
    front.on_message(outputs(TokenOutput(first, [EOS], "stop"), TokenOutput(second, encode("a fox")), rank=rank))
    work = front.abort("r")
    assert work.deltas == [("r", Delta(1, "fox", [], finish_reason="abort"))]
    assert work.messages == [(rank, Abort([second]))]
    assert front.abort("r") == ([], []) and front.abort("unknown") == ([], [])
    assert front.router.loads == [0, 0] and front.take_finished()[0].finish_reasons == ("stop", "abort")


def test_a_request_id_is_used_once_at_a_time() -> None:
    front = make_front()
    front.add(make_prompt("same"))
    with pytest.raises(ValueError, match="request_id 'same' is in use"):
        front.add(make_prompt("same"))
    front.abort("same")
    front.add(make_prompt("same"))


def test_states_of_ranks() -> None:
    front = make_front(2)
    ready = RankReady(rank=1, num_blocks=1, block_size=1, max_model_len=1, vocab_size=1, load_seconds=0.0, bytes_read=0)
    front.on_message(ready)
    assert front.ready == {1: ready}
    assert not front.members.started
    front.on_message(Outputs(1, [], RankStats(steps=9)))
    assert [stats.steps for stats in front.stats] == [0, 9]
    front.on_message(RankFailed(1, "no memory"))
    assert front.failed == "rank 1 failed: no memory"


# ---- routing ----


def test_requests_go_to_the_least_loaded_rank() -> None:
    router = RequestRouter(3, block_size=4)
    router.loads = [50, 20, 30]
    assert router.choose([1, 2, 3], "") == 1
    router.loads = [0, 0, 0]
    assert sorted(router.choose([1, 2, 3], "") for _ in range(3)) == [0, 1, 2]


def test_a_rank_may_be_wanted_while_it_takes_work() -> None:
    router = RequestRouter(3, block_size=4)
    router.loads = [50, 20, 30]
    assert router.choose([1, 2, 3], "", wanted=0) == 0
    router.open[0] = False
    assert router.choose([1, 2, 3], "", wanted=0) == 1


def test_a_known_prefix_decides_while_it_saves_more_than_the_imbalance() -> None:
    router = RequestRouter(2, block_size=4)
    prompt = list(range(40))
    home = router.choose(prompt, "")
    router.loads[home] = 30
    assert router.choose([*prompt[:33], 7, 8], "") == home  # 32 tokens are known there
    router.loads[home] = 33
    assert router.choose([*prompt[:33], 7, 8], "") != home  # and from now on they are known on both
    router.loads = [1, 1]
    router.loads[home] = 0
    assert router.choose(prompt[:35], "") == home
    router.loads[home] = 2
    assert router.choose(prompt[:35], "") != home
    router.loads[home] = 20
    other = 1 - home
    assert router.choose(prompt, "salt") == other  # another salt shares no KV
    router.forget_prefixes()
    router.loads[other] = 21
    assert router.choose(prompt[:35], "") == home


def test_what_the_router_remembers_is_bounded() -> None:
    router = RequestRouter(2, block_size=1, max_prefixes=10)
    for start in range(100):
        router.choose([start, start + 1, start + 2], "")
    assert len(router._prefix_to_ranks) <= 10


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_accounts_balance_whatever_happens(data: st.DataObject) -> None:
    """Random arrivals, tokens, ends and aborts: text and token counts agree, and nothing is left at the end."""
    front = make_front(2)
    live: dict[int, tuple[str, int, int]] = {}  # sequence -> request, index, rank
    collectors: dict[str, Collector] = {}
    names = itertools.count()
    text = encode("The little fox said: 🦊 über alles, end. ")

    def take(work) -> None:
        for request_id, delta in work.deltas:
            collectors[request_id].add(delta)
            if delta.finish_reason is not None:
                gone = [s for s, (r, index, _) in live.items() if r == request_id and index == delta.index]
                assert len(gone) == 1
                del live[gone[0]]

    for _ in range(data.draw(st.integers(1, 25))):
        action = data.draw(st.sampled_from(["add", "tokens", "tokens", "tokens", "abort"]))
        if action == "add":
            name = str(next(names))
            stop = data.draw(st.sampled_from([(), ("fox s",), ("end. The", ":")]))
            prompt = make_prompt(name, n=data.draw(st.integers(1, 3)), stop=stop)
            collectors[name] = Collector(prompt)
            for index, (rank, message) in enumerate(front.add(prompt)):
                live[message.request_id] = (name, index, rank)
        elif action == "abort" and collectors:
            take(front.abort(data.draw(st.sampled_from(sorted(collectors)))))
        elif action == "tokens" and live:
            sequence_id = data.draw(st.sampled_from(sorted(live)))
            name, index, rank = live[sequence_id]
            done = len(collectors[name].output().outputs[index].token_ids)
            count = data.draw(st.integers(1, 4))
            new = [text[(done + place) % len(text)] for place in range(count)]
            reason = data.draw(st.sampled_from([None, None, None, "length", "stop"]))
            if reason == "stop":
                new[-1] = EOS
            take(front.on_message(outputs(TokenOutput(sequence_id, new, reason), rank=rank)))
    for name in list(collectors):
        take(front.abort(name))

    assert not live and front.num_requests == 0 and front.router.loads == [0, 0]
    records = {record.request_id: record for record in front.take_finished()}
    assert records.keys() == collectors.keys()
    for name, collector in collectors.items():
        assert collector.finished and collector.num_output_tokens == records[name].num_output_tokens
        for choice in collector.output().outputs:
            whole = TOKENIZER.decode(choice.token_ids)
            if isinstance(choice.stop_reason, str):
                assert whole.startswith(choice.text + choice.stop_reason)
            else:
                assert choice.text == whole


def test_add_request_survives_the_wire() -> None:
    [(_, message)] = make_front().add(make_prompt(logit_bias={5: 1.0}, stop=("x",)))
    encoded = msgspec.msgpack.encode(message)
    assert msgspec.msgpack.decode(encoded, type=AddRequest) == message
