"""generation_config.json as the source of sampling defaults."""

from __future__ import annotations

from pathlib import Path

import pytest

from front.model_defaults import model_defaults
from front.params import SamplingParams


def test_recommended_values_replace_the_defaults(tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text(
        '{"temperature": 0.6, "top_k": 20, "do_sample": true, "max_new_tokens": 9}'
    )
    assert model_defaults(tmp_path) == SamplingParams(temperature=0.6, top_k=20)


def test_no_file_means_no_opinion(tmp_path: Path) -> None:
    assert model_defaults(tmp_path) == SamplingParams()


@pytest.mark.parametrize("text", ['{"temperature": "warm"}', '{"temperature": 9}', "{", "[]"])
def test_a_bad_file_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "generation_config.json").write_text(text)
    with pytest.raises(ValueError, match=r"generation_config\.json"):
        model_defaults(tmp_path)
