"""Measurements on disk: what is written is read, and nothing else is believed."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from dbo.memory import Remembered, file_of, recall, remember
from dbo.threshold import NEVER, Crossover, Sample

SEEN = Remembered(
    Crossover(NEVER, 300), [Sample(64, 0.1, 1.0, 2.0)], [Sample(512, 0.5, 1.0, 0.7), Sample(256, 0.5, 1.0, 0.9)]
)


def test_what_is_remembered_is_recalled(tmp_path: Path) -> None:
    file = file_of(tmp_path / "not" / "there", {"model": "m", "ranks": 2})
    assert recall(file) is None
    remember(file, SEEN)
    assert recall(file) == SEEN and SEEN.check == SEEN.prefill[1]
    remember(file, SEEN._replace(crossover=Crossover(5, 6)))
    found = recall(file)
    assert found is not None and found.crossover == Crossover(5, 6)
    assert os.listdir(file.parent) == [file.name], "no temporary file stays"


def test_other_engines_have_other_files(tmp_path: Path) -> None:
    one = file_of(tmp_path, {"model": "m", "ranks": 2})
    assert one == file_of(tmp_path, {"ranks": 2, "model": "m"})
    assert one != file_of(tmp_path, {"model": "m", "ranks": 3}) != file_of(tmp_path, {"model": "m", "ranks": "3"})


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "{}",
        "\x00\xff",
        "[" * 100_000,
        json.dumps(SEEN._asdict())[:-20],
        json.dumps({**SEEN._asdict(), "crossover": [0, 5]}),
        json.dumps({**SEEN._asdict(), "crossover": [5]}),
        json.dumps({**SEEN._asdict(), "crossover": [5, "6"]}),
        json.dumps({**SEEN._asdict(), "crossover": [5.5, 6]}),
        json.dumps({**SEEN._asdict(), "decode": [[64, 0.1, 1.0]]}),
        json.dumps({**SEEN._asdict(), "decode": [[64, 0.1, 1.0, None]]}),
        json.dumps({**SEEN._asdict(), "prefill": [[64, 0.1, float("nan"), 1.0]]}),
        json.dumps({**SEEN._asdict(), "prefill": 7}),
    ],
)
def test_a_broken_file_is_as_none(tmp_path: Path, text: str) -> None:
    file = tmp_path / "dbo.json"
    file.write_text(text)
    assert recall(file) is None
    remember(file, SEEN)
    assert recall(file) == SEEN


def test_a_place_that_cannot_be_written_to_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError):
        remember(tmp_path / "file" / "dbo.json", SEEN)
