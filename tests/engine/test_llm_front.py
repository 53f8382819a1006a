"""LLM over a fake set of ranks: order, errors, recovery. (tests/engine/test_llm.py has the real ones.)"""

from __future__ import annotations

import pytest
from front_parts import FakeRanks, small_tokenizer

from front.chat.events import Call, Message
from front.front import EngineFailed
from front.llm import LLM
from front.messages import Abort, AddRequest
from front.outputs import CompletionOutput, Progress
from front.params import SamplingParams

TOKENIZER = small_tokenizer()
ANSWER = TOKENIZER.encode(" lived in a tree. The end", add_special_tokens=False)
SCRIPT = [*ANSWER, 3]
WHOLE = SamplingParams(max_tokens=None)


def make_llm(size: int = 1, **options) -> tuple[LLM, FakeRanks]:
    ranks = FakeRanks(size, SCRIPT)
    return LLM(ranks, TOKENIZER, **options), ranks


@pytest.mark.parametrize("size", [1, 3])
def test_results_are_in_order(size: int) -> None:
    llm, ranks = make_llm(size)
    texts = [f"fox number {number}" for number in range(7)]
    seen: list[Progress] = []
    with llm:
        results = llm.generate(texts, WHOLE, progress=seen.append)
    assert [result.prompt for result in results] == texts
    assert [result.prompt_token_ids for result in results] == [TOKENIZER.encode(text) for text in texts]
    for result in results:
        [choice] = result.outputs
        assert choice.text == " lived in a tree. The end" and choice.finish_reason == "stop"
        assert choice.token_ids == SCRIPT and choice.cumulative_logprob is None
    assert seen[-1] == Progress(7, 7, 7 * len(SCRIPT)) and seen[0].num_finished == 0
    assert ranks.closed


def test_a_bar(capsys: pytest.CaptureFixture[str]) -> None:
    llm, _ = make_llm()
    llm.generate(["one", "two", "three"], WHOLE, use_tqdm=True)
    shown = capsys.readouterr()
    assert "3/3" in shown.err and "tokens/s" in shown.err and not shown.out
    llm.chat([{"role": "user", "content": "hi"}], WHOLE, use_tqdm=True)
    assert "1/1" in capsys.readouterr().err
    llm.generate(["one"], WHOLE, use_tqdm=False)
    assert capsys.readouterr() == ("", "")
    with pytest.raises(ValueError, match=r"use_tqdm must be True or False, not <class .*progress= takes a function"):
        llm.generate(["one"], WHOLE, use_tqdm=list)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="use_tqdm and progress"):
        llm.generate(["one"], WHOLE, use_tqdm=True, progress=print)


def test_kinds_of_prompts() -> None:
    llm, _ = make_llm()
    params = SamplingParams(max_tokens=2)
    assert [len(r.outputs) for r in llm.generate("one", params)] == [1]
    assert [r.prompt_token_ids for r in llm.generate([5, 6, 7], params)] == [[5, 6, 7]]
    assert [r.prompt_token_ids for r in llm.generate([[5], (6, 7)], params)] == [[5], [6, 7]]
    assert llm.generate([], params) == []
    each = [SamplingParams(max_tokens=1), SamplingParams(max_tokens=3)]
    assert [len(r.outputs[0].token_ids) for r in llm.generate(["a", "b"], each)] == [1, 3]
    assert len(llm.generate("default")[0].outputs[0].token_ids) == min(16, len(SCRIPT))


def test_chat() -> None:
    llm, _ = make_llm()
    one = [{"role": "user", "content": "hi"}]
    [result] = llm.chat(one, WHOLE)
    assert result.prompt == "user: hi\nassistant:"
    assert result.prompt_token_ids == TOKENIZER.encode("user: hi\nassistant:", add_special_tokens=False)
    assert len(llm.chat([one, [*one, *one]], WHOLE)) == 2
    [result] = llm.chat(one, WHOLE, chat_template="{{ x }}{{ messages[0].content }}", chat_template_kwargs={"x": "y"})
    assert result.prompt == "yhi"
    with pytest.raises(ValueError, match="one conversation or a list"):
        llm.chat([one[0], one])


@pytest.mark.tools
def test_answers_are_read_by_the_formats_of_the_template() -> None:
    written = '<think>Hm.</think>Look:<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
    ranks = FakeRanks(1, [*TOKENIZER.encode(written, add_special_tokens=False), 3])
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
    one = [{"role": "user", "content": "hi"}]
    template = "{% if tools %}<tool_call>{% endif %}{{ messages[0].content }}{# <think></think> #}"

    def chat(**more) -> CompletionOutput:
        [result] = llm.chat(one, params, **{"tools": tools, "chat_template": template, **more})
        return result.outputs[0]

    with LLM(ranks, TOKENIZER) as llm:
        params = WHOLE
        output = chat()
        assert output.text == written and output.finish_reason == "stop"
        assert output.message == Message("Look:", "Hm.", [Call(output.message.calls[0].id, "f", '{"a": 1}')])
        assert chat(tools=None).message == Message(written.partition("</think>")[2], "Hm.")
        assert chat(reasoning_parser="", tool_call_parser="").message is None
        assert chat(chat_template="{{ messages[0].content }}").message is None
        assert chat(chat_template="x", reasoning_parser="qwen3", tools=None).message.reasoning == "Hm."
        params = SamplingParams(max_tokens=None, stop=("ok:",))
        assert chat().message == Message("Lo", "Hm.") and chat().text == "<think>Hm.</think>Lo"
        for wrong, message in (
            ({"tools": [{"function": {}}]}, "tools must hold functions"),
            ({"tool_call_parser": "hermez"}, "tool_call_parser 'hermez' is none of"),
            ({"reasoning_parser": "none"}, "reasoning_parser 'none' is none of"),
        ):
            with pytest.raises(ValueError, match=message):
                chat(**wrong)


def test_choices_and_logprobs() -> None:
    llm, _ = make_llm()
    [result] = llm.generate("a", SamplingParams(max_tokens=3, n=3, logprobs=1))
    assert [choice.index for choice in result.outputs] == [0, 1, 2]
    for choice in result.outputs:
        assert choice.cumulative_logprob == -1.5 and len(choice.logprobs) == 3 and choice.finish_reason == "length"


def test_stop_string() -> None:
    llm, ranks = make_llm()
    [result] = llm.generate("a", SamplingParams(max_tokens=None, stop=("tree.",)))
    assert result.outputs[0].text == " lived in a " and result.outputs[0].stop_reason == "tree."
    assert isinstance(ranks.sent[-1][1], Abort)


def test_prompts_in_the_form_of_vllm() -> None:
    llm, _ = make_llm()
    params = SamplingParams(max_tokens=2)
    mixed = [
        "a b",
        {"prompt": "a b"},
        {"prompt_token_ids": [5, 6]},
        [5, 6],
        {"prompt": "c", "prompt_token_ids": [5, 6]},
    ]
    results = llm.generate(mixed, params)
    assert [result.prompt for result in results] == ["a b", "a b", None, None, "c"]
    first, *_, last = [result.prompt_token_ids for result in results]
    assert [result.prompt_token_ids for result in results] == [first, first, last, last, [5, 6]] and last == [5, 6]
    [alone] = llm.generate({"prompt_token_ids": [5, 6]}, params)
    assert alone.prompt_token_ids == [5, 6] and llm.generate([], params) == []


@pytest.mark.parametrize(
    ("prompts", "params", "message"),
    [
        (["ok", ""], None, None),
        (["ok", "x" * 2000], None, "prompt 1: maximum context length is 256 tokens; the prompt has"),
        ([[5], [10**6]], None, "prompt 1: token ids must be integers from 0 to"),
        ([[5], []], None, "prompt 1: prompt must hold at least one token"),
        (["a", 5], None, "prompts must be one text, texts, .*; they hold 5"),
        ([{}], None, "a prompt has prompt, prompt_token_ids, or both; one has neither"),
        ({"prompt": "a", "multi_modal_data": {}}, None, "one has the unknown field 'multi_modal_data'"),
        ({"prompt": 5}, None, "they hold {'prompt': 5}"),
        ({"prompt": "a", "prompt_token_ids": "a"}, None, "they hold {'prompt': 'a', 'prompt_token_ids': 'a'}"),
        (b"abc", None, "prompts must be one text, .*, not bytes"),
        ([True, 1], None, "they hold True"),
        (["a"], [5], "sampling_params must be SamplingParams, not int"),
        (["a", "b"], [SamplingParams()], "one for all or one per prompt: 1 for 2"),
        ("a", SamplingParams(temperature=-1), "^temperature must be from 0 to 2"),
        (["a", "b"], SamplingParams(logprobs=21), "prompt 0: logprobs must be"),
    ],
)
def test_bad_prompts_are_refused_before_anything_is_sent(prompts, params, message: str | None) -> None:
    llm, ranks = make_llm()
    if message is None:  # BOS alone is a prompt
        assert len(llm.generate(prompts, params)) == 2
        return
    with pytest.raises(ValueError, match=message):
        llm.generate(prompts, params)
    assert ranks.sent == []


def test_failed_rank() -> None:
    llm, ranks = make_llm(2)
    ranks.fail(1, "out of memory")
    assert llm.generate("a", WHOLE)[0].outputs[0].token_ids == SCRIPT
    ranks.paused = True
    ranks.fail(0, "out of memory")
    ranks.none_left("out of memory")
    with pytest.raises(EngineFailed, match="all ranks are lost: out of memory"):
        llm.generate(["a", "b"])
    with pytest.raises(EngineFailed, match="out of memory"):
        llm.generate("a")


def test_lost_rank() -> None:
    llm, ranks = make_llm(2)

    def lose(progress: Progress) -> None:
        if progress.num_output_tokens == 8:
            ranks.lose(0, "killed")

    results = llm.generate(["a", "b", "c", "d"], WHOLE, progress=lose)
    assert [result.outputs[0].token_ids for result in results] == [SCRIPT] * 4
    ranks.lose(1, "killed")
    ranks.none_left("no more tries")
    with pytest.raises(EngineFailed, match="all ranks are lost: no more tries"):
        llm.generate("a")


def test_silence_is_bounded() -> None:
    llm, ranks = make_llm(silence_timeout=0.05)
    ranks.paused = True
    with pytest.raises(EngineFailed, match=r"no rank has sent anything for 0\.05 s"):
        llm.generate("a")
    ranks.paused = False
    assert llm.generate("a", WHOLE)[0].outputs[0].text == " lived in a tree. The end"


def test_ready_is_bounded() -> None:
    ranks = FakeRanks(2, SCRIPT)
    ranks.queue = ranks.queue[:1]
    with pytest.raises(TimeoutError, match=r"ranks \[1\] were not ready within 0.05 s"):
        LLM(ranks, TOKENIZER, ready_timeout=0.05)
    assert ranks.closed


def test_interrupt_aborts_and_the_next_call_works() -> None:
    llm, ranks = make_llm(2)

    def interrupt(progress: Progress) -> None:
        if progress.num_output_tokens > 4:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        llm.generate(["a", "b", "c"], WHOLE, progress=interrupt)
    started = {m.request_id for _, m in ranks.sent if isinstance(m, AddRequest)}
    aborted = {i for _, m in ranks.sent if isinstance(m, Abort) for i in m.request_ids}
    assert started == aborted
    assert llm.generate("a", WHOLE)[0].outputs[0].text == " lived in a tree. The end"


def test_closed() -> None:
    llm, _ = make_llm()
    llm.close()
    llm.close()
    with pytest.raises(EngineFailed, match="closed"):
        llm.generate("a")
