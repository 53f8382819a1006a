"""Tokenizer and training documents of the embedded story model.

The corpus is one text file of short stories separated by ``<|endoftext|>`` lines (plain or ``.xz``).
Two document forms are made from it, so that one small model both continues and answers:

* plain: ``<|bos|>{story}<|endoftext|>``
* chat: ``<|bos|>{system?}<|user|>{request}<|assistant|>{story}<|endoftext|>`` and further turns

The request of a chat document is synthesised from the story it asks for (names and frequent nouns found by
simple rules), because no instruction data exists for this corpus.

Shape letters: N windows, T tokens per window.
"""

from __future__ import annotations

import lzma
import random
import re
from collections import Counter
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

END, BOS, USER, ASSISTANT = "<|endoftext|>", "<|bos|>", "<|user|>", "<|assistant|>"
SPECIAL_TOKENS = [END, BOS, USER, ASSISTANT]
END_ID, BOS_ID, USER_ID, ASSISTANT_ID = range(4)

CHAT_TEMPLATE = (
    "{{ bos_token }}"
    "{% if tools %}{{ 'Tools:\\n' }}{% for tool in tools %}"
    "{{ (tool['function'] if tool['function'] is defined else tool) | tojson + '\\n' }}{% endfor %}"
    '{{ \'A call:\\n<tool_call>\\n{"name": NAME, "arguments": {...}}\\n</tool_call>\\n\' }}{% endif %}'
    "{% for message in messages %}"
    "{% if message['role'] == 'system' %}{{ message['content'] | trim }}"
    "{% elif message['role'] == 'tool' %}"
    "{{ '<|user|><tool_response>\\n' + (message['content'] | trim) + '\\n</tool_response>' }}"
    "{% elif message['role'] == 'assistant' %}{{ '<|assistant|>' + (message['content'] | default('', true) | trim) }}"
    "{% for call in message['tool_calls'] or [] %}"
    "{{ '\\n' if message['content'] or not loop.first else '' }}"
    "{{ '<tool_call>\\n{\"name\": ' + (call['function']['name'] | tojson) + ', \"arguments\": ' }}"
    "{{ call['function']['arguments'] if call['function']['arguments'] is string"
    " else call['function']['arguments'] | tojson }}"
    "{{ '}\\n</tool_call>' }}{% endfor %}{{ eos_token }}"
    "{% else %}{{ '<|user|>' + (message['content'] | trim) }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)

SYSTEM_PROMPTS = [
    "You are a helpful assistant.",
    "You are a kind storyteller.",
    "You tell short stories for children.",
    "You are a friendly assistant who writes simple stories.",
]

NAME_TEMPLATES = [
    "Tell me a story about {name}.",
    "Please tell me a story about {name}.",
    "Write a short story about {name}.",
    "Can you tell me a story about {name}?",
    "I want to hear about {name}.",
    "What happened to {name}?",
    "Hi! Tell me about {name}.",
]
NAME_NOUN_TEMPLATES = [
    "Tell me a story about {name} and the {noun}.",
    "Write a story about {name} and a {noun}.",
    "Please write a story where {name} finds a {noun}.",
    "Once upon a time there was {name}. Tell me a story with a {noun}.",
    "Can you write a short story about {name} with a {noun} in it?",
]
NOUN_TEMPLATES = [
    "Tell me a story about a {noun}.",
    "Write a story about the {noun} and the {other}.",
    "Write a story with the words {noun} and {other}.",
    "Please tell me a story with a {noun} and a {other}.",
    "Write a short story. Use the words: {noun}, {other}.",
    "Can you make up a story about a {noun}?",
    "I like the {noun}. Tell me a story!",
]
OPEN_TEMPLATES = [
    "Tell me a story.",
    "Hi! Tell me a story.",
    "Hello! Can you tell me a story?",
    "Please write a short story.",
    "Write a story for a child.",
    "Once upon a time",
    "Tell me a bedtime story, please.",
    "I am bored. Tell me something nice.",
]
AGAIN = [
    "Another one, please.",
    "Tell me one more story.",
    "Thank you! One more?",
    "I liked that. Tell me another story.",
]
SMALL_TALK = [
    ("Hi!", "Hello! What story do you want to hear?"),
    ("Hello!", "Hello! I like to tell stories. What should the story be about?"),
    ("Hi, how are you?", "I am very happy, thank you! Do you want to hear a story?"),
    ("How are you?", "I am fine, thank you! Do you want to hear a story?"),
    ("Who are you?", "I am Moesaic, a very small storyteller. I tell simple stories."),
    ("What is your name?", "My name is Moesaic. I tell simple stories."),
    ("What can you do?", "I can tell simple stories. Give me a name or a word, and I will start."),
    ("Good morning!", "Good morning! Do you want to hear a story?"),
]
THANKS = [
    ("Thank you!", "You are welcome! I am glad you liked it."),
    ("I liked the story.", "I am so glad! Thank you for listening."),
    ("Goodbye!", "Goodbye! Come back soon for another story."),
]

NOT_NAMES_TEXT = """
    The They She Her His He It But And One Once When Then So As In At On From After You We My Mom Mommy Dad Daddy Mama
    Papa Mum Mummy What Why Yes No Okay Look Thank Please Let Can Do How Who Where If That This There Every Everyone Don
    Wow Oh Hello Hi Hey Sure Of To For Suddenly Finally Now Just Not All Maybe Are Is Will Today Come Good Be Go Wait
    End Some Soon Both Their Even Grandma Grandpa Well Sorry Mr Mrs Miss Great Help Here Stop Ok Your
"""
NOT_NAMES = frozenset(NOT_NAMES_TEXT.split())
NOT_NOUNS_TEXT = """
    little big small day time lot bit way other same very good new best first next old great few long end special whole
    loud nice happy sad bad red blue green yellow pretty beautiful one two three name head hand hands eyes face mouth
    back side own right left most more last only kind brave tiny huge many much favorite careful different funny scary
    young shiny soft hard dark cold hot warm clever wise strong lovely loved white black brown pink purple bright round
    safe better perfect moment while mommy mom dad friend friends idea world inside
"""
NOT_NOUNS = frozenset(NOT_NOUNS_TEXT.split())
NAME_PATTERN = re.compile(r"(?<=[a-z,] )[A-Z][a-z]{2,}\b")
NOUN_PATTERN = re.compile(
    r"\b(?:a|an|the|his|her|their) ([a-z]{3,})\b(?=[.,!?]| (?:and|was|in|on|with|to|that|who|is)\b)"
)


def read_stories(path: Path) -> list[str]:
    """Read the corpus; each story is stripped, and fragments under 80 characters are dropped."""
    raw = path.read_bytes()
    text = (lzma.decompress(raw) if path.suffix == ".xz" else raw).decode("utf-8")
    stories = (story.strip() for story in text.split(END))
    return [story for story in stories if len(story) >= 80]


def train_tokenizer(stories: list[str], vocab_size: int) -> Tokenizer:
    """Train a byte-level BPE: every byte is in the alphabet, so no input is ever unknown."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(stories, trainer)
    # As DeepSeek-V3 does: a plain prompt gets the document start by itself; the chat template writes its own.
    tokenizer.post_processor = processors.TemplateProcessing(single=f"{BOS} $A", special_tokens=[(BOS, BOS_ID)])
    return tokenizer


def tokenizer_config(max_length: int) -> dict[str, object]:
    """The ``tokenizer_config.json`` next to the trained ``tokenizer.json``."""
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS,
        "eos_token": END,
        "pad_token": END,
        "add_bos_token": True,
        "add_eos_token": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": max_length,
        "chat_template": CHAT_TEMPLATE,
    }


def find_subjects(story: str) -> tuple[str | None, list[str]]:
    """Guess the main name (capitalised inside sentences, twice or more) and the frequent nouns of a story."""
    names = Counter(word for word in NAME_PATTERN.findall(story) if word not in NOT_NAMES)
    top = names.most_common(1)
    name = top[0][0] if top and top[0][1] >= 2 else None
    nouns = Counter(word for word in NOUN_PATTERN.findall(story) if word not in NOT_NOUNS)
    return name, [noun for noun, _ in nouns.most_common(4)]


def make_request(story: str, rng: random.Random) -> str:
    """Write a user request that the story answers."""
    name, nouns = find_subjects(story)
    noun, other = rng.sample(nouns, 2) if len(nouns) >= 2 else (None, None)
    choices = [OPEN_TEMPLATES]
    if name:
        choices += [NAME_TEMPLATES] * 3
    if noun:
        choices += [NOUN_TEMPLATES] * 3
    if name and noun:
        choices += [NAME_NOUN_TEMPLATES] * 3
    return rng.choice(rng.choice(choices)).format(name=name, noun=noun, other=other)


def chat_document(story: str, second: str | None, rng: random.Random) -> str:
    """One chat document around a story; some have a system text, small talk before it, or a further turn after it."""

    def turn(request: str, answer: str) -> str:
        return f"{USER}{request}{ASSISTANT}{answer}{END}"

    text = BOS + (rng.choice(SYSTEM_PROMPTS) if rng.random() < 0.1 else "")
    if rng.random() < 0.06:
        text += turn(*rng.choice(SMALL_TALK))
    text += turn(make_request(story, rng), story)
    if second is not None:
        text += turn(rng.choice(AGAIN) if rng.random() < 0.5 else make_request(second, rng), second)
    if rng.random() < 0.04:
        text += turn(*rng.choice(THANKS))
    return text


def make_documents(stories: list[str], epoch: int, seed: int) -> list[str]:
    """Half chat, half plain documents; the halves swap with each epoch, so no epoch repeats another's text."""
    rng = random.Random(f"{seed}/{epoch}")
    documents: list[str] = []
    index = 0
    while index < len(stories):
        if (index + epoch) % 2:
            documents.append(f"{BOS}{stories[index]}{END}")
            index += 1
            continue
        # A fifth of the chats ask for a second story, which teaches the model to go on after its first answer.
        take_second = rng.random() < 0.2 and index + 1 < len(stories)
        documents.append(chat_document(stories[index], stories[index + 1] if take_second else None, rng))
        index += 2 if take_second else 1
    return documents


def pack_windows(tokenizer: Tokenizer, documents: list[str], length: int, seed: int) -> np.ndarray:
    """Pack whole documents into windows by best fit, longest first; returns int16 ``[N, T]``, padded by END.

    A document longer than T is cut at T. Documents in one window can attend to those before them: the start
    token is what tells the model to forget, and a plain causal mask keeps the fast attention kernel.
    """
    rng = random.Random(seed)
    encoded = [item.ids[:length] for item in tokenizer.encode_batch_fast(documents, add_special_tokens=False)]
    rng.shuffle(encoded)
    encoded.sort(key=len, reverse=True)
    by_room: list[list[list[list[int]]]] = [[] for _ in range(length + 1)]
    for ids in encoded:
        room = next((room for room in range(len(ids), length) if by_room[room]), length)
        window = by_room[room].pop() if by_room[room] else []
        window.append(ids)
        by_room[room - len(ids)].append(window)
    windows = [window for bucket in by_room for window in bucket]
    rng.shuffle(windows)
    packed = np.full((len(windows), length), END_ID, dtype=np.int16)
    for row, window in zip(packed, windows, strict=True):
        rng.shuffle(window)
        ids = [token for document in window for token in document]
        row[: len(ids)] = ids
    return packed
