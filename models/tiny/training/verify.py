"""Checks and measures the shipped model: ``python -m models.tiny.training.verify [--corpus stories.txt.xz]``.

It prints the files' hashes, compares ``network.py`` with transformers in float32, prints the golden greedy
continuation, and measures how often the MTP layer's draft is what the main model would say (also on held-out
stories, with their loss and the load of the experts, if the corpus is given).

Shape letters: T tokens, V vocabulary, E experts.
"""

from __future__ import annotations

import argparse
import hashlib
import json
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor
from transformers import AutoTokenizer, DeepseekV3ForCausalLM
from transformers.modeling_layers import MtpModel

from models.tiny import CHECKPOINT
from models.tiny.training.data import END_ID, USER_ID, make_documents, pack_windows, read_stories
from models.tiny.training.export import read_model
from models.tiny.training.network import TinyDeepSeek
from models.tiny.training.train import HELD_OUT_STORIES, IGNORED, losses, targets_of

GOLDEN_PROMPT = "Once upon a time, there was a little girl named Lily. She had a"
GOLDEN_TOKENS = 48
STORY_PROMPTS = [
    "Once upon a time, there was a",
    "One day, a little boy named Tim",
    "Once upon a time, in a big forest, there lived a",
    "Lily and Ben were playing in the park.",
    "One day, a cat named",
]
CHAT_PROMPTS = [
    "Tell me a story about a dog named Max.",
    "Write a story with the words ball and park.",
    "Hi! Tell me a story.",
]


def print_files(directory: Path) -> None:
    """Name, size and sha256 of every file."""
    print("## Files")
    for path in sorted(directory.iterdir()):
        print(f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.stat().st_size:>9}  {path.name}")


def print_parameters(model: TinyDeepSeek) -> None:
    """Parameters by part, all and active per token (the embedding is a look-up and counts as stored only)."""
    s = model.shape
    routed = sum(layer.gate_up.numel() + layer.down.numel() for layer in model.moe_layers())
    total = sum(parameter.numel() for parameter in model.parameters())
    mtp = sum(parameter.numel() for parameter in model.mtp.parameters())
    idle_share = 1 - s.num_experts_per_tok / s.n_routed_experts
    mtp_moe = model.moe_layers()[-1]
    mtp_routed = mtp_moe.gate_up.numel() + mtp_moe.down.numel()
    embedding = model.embed_tokens.weight.numel()
    active = int(total - mtp - (routed - mtp_routed) * idle_share - embedding)
    active_mtp = int(mtp - mtp_routed * idle_share)
    print("## Parameters")
    print(f"total {total}, main {total - mtp}, MTP layer {mtp}, embedding {embedding}, head {embedding}")
    print(f"routed experts {routed} of all; active per token: main with head {active}, MTP layer {active_mtp}")


@torch.no_grad()
def greedy(model: TinyDeepSeek, prompt: list[int], count: int) -> tuple[list[int], float]:
    """Greedy continuation (it may end early), and the least gap between the two best logits on the way."""
    ids, gap = list(prompt), float("inf")
    for _ in range(count):
        best = model(torch.tensor([ids]))[0, -1].topk(2)
        gap = min(gap, float(best.values[0] - best.values[1]))
        ids.append(int(best.indices[0]))
        if ids[-1] in (END_ID, USER_ID):
            break
    return ids[len(prompt) :], gap


@torch.no_grad()
def draft_hits(model: TinyDeepSeek, windows: Tensor, first: int = 0) -> tuple[int, int]:
    """Drafts that equal the main model's next greedy choice, and drafts made, on ``[B, T]`` from place ``first`` on.

    At place i the draft is made from the state at i and the token at i+1; the main model judges it at i+1.
    """
    state, embedded = model.hidden(windows)
    draft = model.lm_head(model.mtp_hidden(state, embedded)).argmax(-1)[:, :-1]
    verdict = model.lm_head(state[:, 1:]).argmax(-1)[:, :-1]
    counted = targets_of(windows, 2) != IGNORED
    counted[:, :first] = False
    return int(((draft == verdict) & counted).sum()), int(counted.sum())


def load_reference(directory: Path) -> DeepseekV3ForCausalLM:
    """The same weights in transformers, float32."""
    # transformers knows the MTP layer of DeepSeek-V3 by its place 61; here it is the one after the last layer.
    layers = json.loads((directory / "config.json").read_text("utf-8"))["num_hidden_layers"]
    DeepseekV3ForCausalLM._keys_to_ignore_on_load_unexpected = [rf"model\.layers\.{layers}\."]
    reference: DeepseekV3ForCausalLM = DeepseekV3ForCausalLM.from_pretrained(directory, dtype=torch.float32)
    return reference


def generate(reference: DeepseekV3ForCausalLM, prompt: Tensor, count: int, sample: bool = False) -> list[int]:
    """Continuation of ``[1, T]`` by transformers, greedy or with the shipped sampling settings."""
    mask = torch.ones_like(prompt)
    made = reference.generate(  # type: ignore[misc]
        prompt, attention_mask=mask, do_sample=sample, max_new_tokens=count
    )
    continuation: list[int] = made[0, prompt.shape[1] :].tolist()
    return continuation


@torch.no_grad()
def compare_with_transformers(model: TinyDeepSeek, reference: DeepseekV3ForCausalLM, ids: list[int]) -> None:
    """Fail unless both give the same main states, MTP states, logits and greedy text."""
    made = generate(reference, torch.tensor([ids]), GOLDEN_TOKENS)
    same = made == greedy(model, ids, GOLDEN_TOKENS)[0]
    tokens = torch.tensor([ids + made])
    logits = float((reference(tokens).logits - model(tokens)).abs().max())
    state, embedded = model.hidden(tokens)
    places = torch.arange(1, tokens.shape[1]).unsqueeze(0)
    reference_state = reference.model(tokens).last_hidden_state[:, :-1]
    reference_mtp = MtpModel.from_pretrained(reference).forward_layer(
        0, reference_state, places, None, input_ids=tokens[:, 1:]
    )
    mtp = float((reference_mtp - model.mtp_hidden(state, embedded)).abs().max())
    print("## Against transformers (float32)")
    print(f"largest difference of logits {logits:.2e}, of MTP states {mtp:.2e}")
    print(f"greedy tokens {'equal' if same else 'DIFFERENT'}")
    if max(logits, mtp) > 1e-3 or not same:
        raise SystemExit("network.py and transformers disagree")


def print_golden(model: TinyDeepSeek, tokenizer: Tokenizer) -> None:
    """The fixed prompt and its greedy continuation as ids and text, and the drafts' hits on it."""
    prompt = tokenizer.encode(GOLDEN_PROMPT).ids
    made, gap = greedy(model, prompt, GOLDEN_TOKENS)
    print("## Golden greedy continuation (float32)")
    print(f"prompt: {GOLDEN_PROMPT!r}\nprompt ids: {prompt}\ncontinuation ids: {made}")
    print(f"text: {tokenizer.decode(made)!r}\nleast gap between the two best logits: {gap:.4f}")


def print_acceptance(model: TinyDeepSeek, reference: DeepseekV3ForCausalLM, tokenizer: Tokenizer) -> None:
    """MTP acceptance on greedy continuations of the story prompts: what greedy speculative decoding sees."""
    hits = drafts = 0
    for text in STORY_PROMPTS:
        prompt = tokenizer.encode(text).ids
        continuation = generate(reference, torch.tensor([prompt]), 200)
        hit, made = draft_hits(model, torch.tensor([prompt + continuation]), first=len(prompt) - 1)
        hits, drafts = hits + hit, drafts + made
    print(f"## MTP acceptance\non greedy text: {hits} of {drafts} drafts = {hits / drafts:.3f}")


@torch.no_grad()
def print_held_out(model: TinyDeepSeek, tokenizer: Tokenizer, corpus: Path) -> None:
    """Loss, MTP loss, acceptance and expert load on the stories that training never saw."""
    documents = make_documents(read_stories(corpus)[:HELD_OUT_STORIES], 0, 0)
    windows = torch.from_numpy(pack_windows(tokenizer, documents, 512, 0).astype(np.int64))
    totals, hits, drafts = np.zeros(2), 0, 0
    loads = [torch.zeros(model.shape.n_routed_experts) for _ in model.moe_layers()]
    for part in torch.split(windows, 8):
        main, mtp = losses(model, part)
        totals += np.array([float(main), float(mtp)]) * len(part)
        hit, made = draft_hits(model, part)
        hits, drafts = hits + hit, drafts + made
        for load, layer in zip(loads, model.moe_layers(), strict=True):
            load += layer.load
    print(f"## Held-out stories ({HELD_OUT_STORIES} stories, {drafts} drafts, float32)")
    print(f"loss {totals[0] / len(windows):.4f}, MTP loss {totals[1] / len(windows):.4f}")
    print(f"MTP acceptance on held-out text (each draft against the main model's choice): {hits / drafts:.3f}")
    for index, (load, layer) in enumerate(zip(loads, model.moe_layers(), strict=True)):
        share = load / load.mean()
        place = f"layer {model.shape.first_k_dense_replace + index}"
        bias = f"bias {float(layer.bias.min()):+.3f} .. {float(layer.bias.max()):+.3f}"
        print(f"{place}: load max/mean {float(share.max()):.3f}, min/mean {float(share.min()):.3f}, {bias}")


def print_samples(reference: DeepseekV3ForCausalLM, directory: Path, seed: int) -> None:
    """Sampled stories and chat answers with the shipped generation settings."""
    tokenizer = AutoTokenizer.from_pretrained(directory)
    prompts = [tokenizer(text).input_ids for text in STORY_PROMPTS]
    for text in CHAT_PROMPTS:
        turns = [{"role": "user", "content": text}]
        chat = str(tokenizer.apply_chat_template(turns, add_generation_prompt=True, tokenize=False))
        prompts.append(tokenizer(chat, add_special_tokens=False).input_ids)
    for index, prompt in enumerate(prompts):
        torch.manual_seed(seed + index)
        made = generate(reference, torch.tensor([prompt]), 300, sample=True)
        print(f"## Sample {index + 1}\n{tokenizer.decode(prompt + made)}\n")


def main() -> None:
    """Run all checks that the arguments ask for."""
    parser = argparse.ArgumentParser(description="Check and measure the embedded story model.")
    parser.add_argument("--checkpoint", type=Path, default=CHECKPOINT)
    parser.add_argument("--corpus", type=Path, help="the training corpus, for the measurements on held-out stories")
    parser.add_argument("--samples", action="store_true", help="print sampled stories and chat answers")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    model = read_model(arguments.checkpoint)
    tokenizer = Tokenizer.from_file(str(arguments.checkpoint / "tokenizer.json"))
    print_files(arguments.checkpoint)
    print_parameters(model)
    reference = load_reference(arguments.checkpoint)
    compare_with_transformers(model, reference, tokenizer.encode(GOLDEN_PROMPT).ids)
    print_golden(model, tokenizer)
    print_acceptance(model, reference, tokenizer)
    if arguments.corpus:
        print_held_out(model, tokenizer, arguments.corpus)
    if arguments.samples:
        print_samples(reference, arguments.checkpoint, arguments.seed)


if __name__ == "__main__":
    main()
