"""--enable-eplb and --eplb-config: what they say, what is refused, and what is decided."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec import structs
from test_resolve import MACHINE, MODEL

from configs.engine import EngineConfig, Plan
from configs.eplb import EplbConfig, check_eplb, parse_eplb_config
from configs.resolve import MEBI, resolve
from moesaic.options import engine_config


def test_a_json_object_or_a_file_with_one(tmp_path: Path) -> None:
    text = json.dumps({"window_size": 10, "min_gain": 0, "move_budget_mib": 1, "log_balancedness": True})
    wanted = EplbConfig(window_size=10, min_gain=0, move_budget_mib=1, log_balancedness=True)
    file = tmp_path / "eplb.json"
    file.write_text(text)
    for given in (text, str(file), f"@{file}", f"  {text}"):
        assert parse_eplb_config(given) == (wanted, None)
    assert parse_eplb_config("{}") == (EplbConfig(), None)


def test_names_of_vllm() -> None:
    options = parse_eplb_config('{"step_interval": 30, "num_redundant_experts": 4, "use_async": true}')
    assert options == (EplbConfig(move_interval=30), 4)


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"windowsize": 1}, "unknown field 'windowsize'; the fields are window_size"),
        ({"window_size": 0}, "window_size must be an integer from 1 to 1000000, not 0"),
        ({"window_size": 1.5}, "window_size"),
        ({"window_size": True}, "window_size"),
        ({"window_size": None}, "window_size"),
        ({"window_size": 10**9}, "window_size"),
        ({"memory_steps": 0}, "memory_steps"),
        ({"reweight_interval": -1}, "reweight_interval must be an integer from 0"),
        ({"move_interval": "5"}, "move_interval"),
        ({"move_interval": 5, "step_interval": 5}, "give one of them"),
        ({"move_budget_mib": 0}, "move_budget_mib must be a number of MiB above 0"),
        ({"move_budget_mib": float("inf")}, "move_budget_mib"),
        ({"min_gain": 1}, "min_gain must be a number in \\[0, 1\\)"),
        ({"min_gain": float("nan")}, "min_gain"),
        ({"placement": "/no/such/file"}, "placement must be a file"),
        ({"placement": 3}, "placement"),
        ({"log_balancedness": 1}, "log_balancedness must be true or false"),
        ({"num_redundant_experts": -1}, "num_redundant_experts"),
        ({"use_async": False}, "use_async"),
    ],
)
def test_refused_on_one_line_that_names_the_field(values: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says) as error:
        parse_eplb_config(json.dumps(values))
    assert "\n" not in str(error.value) and str(error.value).startswith("eplb_config")


@pytest.mark.parametrize(
    ("text", "says"), [("[1]", "neither"), ("no-file", "neither"), ("{", "not JSON"), ("{" * 99999, "not JSON")]
)
def test_what_is_no_json_object(text: str, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        parse_eplb_config(text)


def test_a_file_with_something_else(tmp_path: Path) -> None:
    file = tmp_path / "eplb.json"
    file.write_text("[]")
    with pytest.raises(ValueError, match=f"{file} must be a JSON object"):
        parse_eplb_config(str(file))
    file.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ValueError, match="it is not text"):
        parse_eplb_config(str(file))


@pytest.mark.parametrize(
    ("options", "model", "on", "reason"),
    [
        ({"enable_eplb": True, "data_parallel_size": 2}, {}, True, "64 spare slot"),
        ({"enable_eplb": True, "data_parallel_size": 2, "num_redundant_experts": 0}, {}, True, "without spare slots"),
        ({"enable_eplb": True}, {}, False, "one rank holds every expert.*ignored"),
        ({"enable_eplb": True, "data_parallel_size": 2}, {"num_experts": 0}, False, "dense.*ignored"),
        ({"data_parallel_size": 2}, {}, False, "off unless asked for"),
    ],
)
def test_on_where_there_is_something_to_balance(
    options: dict[str, Any], model: dict[str, Any], on: bool, reason: str
) -> None:
    plan = resolve(EngineConfig(**options), structs.replace(MODEL, **model), MACHINE)
    assert (plan.eplb is not None) == on
    assert re.search(reason, plan.reasons["eplb"])


def test_what_is_asked_for_is_decided_and_travels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "placement.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    eplb = EplbConfig(window_size=7, placement="placement.json")
    plan = resolve(EngineConfig(enable_eplb=True, eplb=eplb, data_parallel_size=2), MODEL, MACHINE)
    assert plan.eplb == structs.replace(eplb, placement=str(tmp_path / "placement.json"))
    assert msgspec.json.decode(msgspec.json.encode(plan), type=Plan) == plan


def test_a_configuration_of_what_is_off_is_refused() -> None:
    with pytest.raises(ValueError, match="--enable-eplb"):
        resolve(EngineConfig(eplb=EplbConfig(window_size=5), data_parallel_size=2), MODEL, MACHINE)
    with pytest.raises(ValueError, match="window_size"):
        resolve(EngineConfig(eplb=EplbConfig(window_size=0), enable_eplb=True), MODEL, MACHINE)
    with pytest.raises(ValueError, match="min_gain"):
        check_eplb(EplbConfig(min_gain=-1))


@pytest.mark.parametrize(("free", "enable_eplb", "slots"), [(4500, False, 16), (4500, True, 17), (3950, True, 16)])
def test_a_spare_slot_per_rank_where_memory_allows_no_more(free: int, enable_eplb: bool, slots: int) -> None:
    """A third of the free memory may be weights: 1637 MiB with room for a loss, 1356 with a spare slot, 1300 without."""
    model = structs.replace(MODEL, expert_bytes=900 * MEBI)
    config = EngineConfig(data_parallel_size=4, enable_eplb=enable_eplb, num_kv_blocks=1000)
    machine = structs.replace(MACHINE, free_memory=free * MEBI, shared_memory=False)
    plan = resolve(config, model, machine)
    assert plan.slots_per_rank == slots
    assert ("hot experts" in plan.reasons["slots_per_rank"]) == (slots == 17)


def _options(**changes: Any) -> dict[str, Any]:
    names = {"model": None, "model_option": None, "enable_expert_parallel": False, "data_parallel_size": 2}
    return {**names, "num_redundant_experts": None, "enable_eplb": True, "eplb_config": None, **changes}


def test_the_command_line() -> None:
    config = engine_config(_options(eplb_config='{"window_size": 3, "num_redundant_experts": 8}'))
    assert config.enable_eplb and config.eplb == EplbConfig(window_size=3) and config.num_redundant_experts == 8
    same = engine_config(_options(num_redundant_experts=8, eplb_config='{"num_redundant_experts": 8}'))
    assert same.num_redundant_experts == 8
    with pytest.raises(ValueError, match="give one of them"):
        engine_config(_options(num_redundant_experts=7, eplb_config='{"num_redundant_experts": 8}'))
    assert engine_config(_options()).eplb == EplbConfig()
