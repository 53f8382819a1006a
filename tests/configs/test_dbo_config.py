"""--enable-dbo and its thresholds: what is decided, why, and what is refused."""

from __future__ import annotations

from typing import Any

import click
import pytest
from click.testing import CliRunner
from msgspec import structs
from test_resolve import MACHINE, MODEL

from configs.dbo import DboPlan
from configs.engine import EngineConfig
from configs.resolve import resolve
from moesaic.options import engine_config, engine_options

DENSE = structs.replace(MODEL, num_experts=0, expert_bytes=0)


@pytest.mark.parametrize(
    ("options", "dbo", "reason"),
    [
        ({"data_parallel_size": 2}, DboPlan(), "where it pays"),
        ({"data_parallel_size": 1}, None, "one rank exchanges nothing"),
        ({"data_parallel_size": 2, "enable_dbo": "off"}, None, "as asked"),
        ({"data_parallel_size": 2, "enable_dbo": "on"}, DboPlan(decode_tokens=32, prefill_tokens=512), "as asked"),
        ({"enable_dbo": "on"}, DboPlan(decode_tokens=32, prefill_tokens=512), "as asked"),
        (
            {"enable_dbo": "on", "dbo_prefill_token_threshold": 7, "ubatch_size": 3},
            DboPlan(num_ubatches=3, decode_tokens=32, prefill_tokens=7),
            "as asked",
        ),
        (
            {"data_parallel_size": 2, "dbo_decode_token_threshold": 5},
            DboPlan(decode_tokens=5),
            "where it pays",
        ),
        (
            {"data_parallel_size": 2, "dbo_decode_token_threshold": 5, "dbo_prefill_token_threshold": 6},
            DboPlan(decode_tokens=5, prefill_tokens=6),
            "from as many tokens as asked",
        ),
    ],
)
def test_decided(options: dict[str, Any], dbo: DboPlan | None, reason: str) -> None:
    plan = resolve(EngineConfig(**options), MODEL, MACHINE)
    assert plan.dbo == dbo and reason in plan.reasons["dbo"]


def test_a_dense_model_ignores_it() -> None:
    plan = resolve(EngineConfig(data_parallel_size=2, enable_dbo="on"), DENSE, MACHINE)
    assert plan.dbo is None and plan.reasons["dbo"] == "a dense model exchanges nothing (--enable-dbo on is ignored)"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dbo_decode_token_threshold": 0}, "dbo_decode_token_threshold must be at least 1, not 0"),
        ({"dbo_prefill_token_threshold": -3}, "dbo_prefill_token_threshold must be at least 1, not -3"),
        ({"ubatch_size": 1}, "ubatch_size must be 2 to 8, not 1"),
        ({"ubatch_size": 9}, "ubatch_size must be 2 to 8, not 9"),
    ],
)
def test_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        resolve(EngineConfig(**options), MODEL, MACHINE)


@pytest.mark.parametrize(
    ("words", "mode", "model"),
    [
        ([], "auto", None),
        (["--enable-dbo"], "on", None),
        (["--enable-dbo", "--data-parallel-size", "2"], "on", None),
        (["--enable-dbo", "on"], "on", None),
        (["--enable-dbo=auto"], "auto", None),
        (["/model", "--enable-dbo", "off"], "off", "/model"),
        (["/model", "--enable-dbo"], "on", "/model"),
        (["--enable-dbo", "/model"], "on", "/model"),
        (["--enable-dbo", "off", "/model"], "off", "/model"),
        (["--enable-dbo", "--model", "/model"], "on", "/model"),
    ],
)
def test_the_flag(words: list[str], mode: str, model: str | None) -> None:
    seen: list[EngineConfig] = []

    @click.command()
    @engine_options
    def command(**options: Any) -> None:
        seen.append(engine_config(options))

    assert CliRunner().invoke(command, words, catch_exceptions=False).exit_code == 0
    assert (seen[0].enable_dbo, seen[0].model) == (mode, model)


@pytest.mark.parametrize("words", [["/model", "--enable-dbo", "yes"], ["--enable-dbo=yes", "/model"]])
def test_a_mode_that_there_is_not(words: list[str]) -> None:
    @click.command()
    @engine_options
    def command(**options: Any) -> None:
        raise AssertionError

    result = CliRunner().invoke(command, words)
    assert result.exit_code == 2 and "'--enable-dbo': 'yes' is none of auto, on, off" in result.output


def test_the_thresholds_have_vllms_names() -> None:
    seen: list[EngineConfig] = []

    @click.command()
    @engine_options
    def command(**options: Any) -> None:
        seen.append(engine_config(options))

    words = ["--dbo-decode-token-threshold", "8", "--dbo-prefill-token-threshold", "9", "--ubatch-size", "3"]
    CliRunner().invoke(command, words, catch_exceptions=False)
    config = seen[0]
    assert (config.dbo_decode_token_threshold, config.dbo_prefill_token_threshold, config.ubatch_size) == (8, 9, 3)
