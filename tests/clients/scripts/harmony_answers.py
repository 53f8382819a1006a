"""Answers as openai-harmony writes them and as it reads them again: a JSON line each, {text, messages: [channel,
recipient, text]}. Arguments: how many, the seed."""

import json
import random
import sys

from openai_harmony import (
    Conversation,
    HarmonyEncodingName,
    Message,
    Role,
    StreamableParser,
    load_harmony_encoding,
)

WORDS = [
    "the",
    " dog",
    "\n",
    " to=functions.f",
    "analysis",
    " 12",
    "<",
    "|",
    "é",
    " 東京",
    "😀",
    "{",
    '"',
    " final",
    "<|",
    " json",
    "assistant",
]


def text_of(draw: random.Random) -> str:
    return "".join(draw.choices(WORDS, k=draw.randint(1, 12)))


def message_of(draw: random.Random, kind: str) -> Message:
    if kind != "call":
        text = text_of(draw)
        return Message.from_role_and_content(Role.ASSISTANT, text).with_channel(kind)
    arguments = json.dumps({"text": text_of(draw), "number": draw.randint(-5, 5)}, ensure_ascii=draw.random() < 0.5)
    call = Message.from_role_and_content(Role.ASSISTANT, arguments).with_channel("commentary")
    call = call.with_recipient(f"functions.{draw.choice(['f', 'get_weather', 'a.b', 'x-1'])}")
    return call.with_content_type("<|constrain|>json") if draw.random() < 0.7 else call


def main() -> None:
    encoding = load_harmony_encoding(HarmonyEncodingName.HARMONY_GPT_OSS)
    draw = random.Random(int(sys.argv[2]))
    for _ in range(int(sys.argv[1])):
        kinds = draw.choices(["analysis", "commentary", "call", "final"], k=draw.randint(1, 4))
        said = [message_of(draw, kind) for kind in kinds]
        tokens = encoding.render_conversation(Conversation.from_messages(said))
        begin = encoding.encode("<|start|>assistant", allowed_special="all")
        assert tokens[: len(begin)] == begin  # what the prompt ends with
        # A recipient behind the role belongs to the answer, and stands behind those two tokens.
        answer = tokens[len(begin) :]
        parser = StreamableParser(encoding, Role.ASSISTANT)
        for token in answer:
            parser.process(token)
        read = [[m.channel, m.recipient, "".join(part.text for part in m.content)] for m in parser.messages]
        print(json.dumps({"text": encoding.decode(answer), "messages": read}))


if __name__ == "__main__":
    main()
