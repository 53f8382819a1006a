"""docs/models.md says of every architecture what the tests show, no more and no less."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import test_quantized_checkpoints as quantized
import test_varied_configs as varied

from front.chat.families import REASONING_PARSERS, TOOL_PARSERS
from models.gqa.families import ARCHITECTURES
from models.gqa.windows import no_windows
from models.registry import FAMILIES, WRAPPERS

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "models.md"
COLUMNS = ["architecture", "varied configurations", "ranks", "fewer bits", "windows", "drafts", "tools and reasoning"]
EVERY_FORM = "all forms"
SOME_FORMS = "FP8"


def rows() -> dict[str, list[str]]:
    """Architecture -> the other cells of its row in the table that begins with COLUMNS."""
    found: dict[str, list[str]] = {}
    inside = False
    for line in DOCUMENT.read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if cells == COLUMNS:
            inside = True
        elif inside and not line.startswith("|"):
            break
        elif inside and not set(line) <= set("|- "):
            for name in re.findall(r"`(\w+)`", cells[0]):
                found[name] = cells[1:]
    return found


TABLE = rows()
# Families with tests of their own (test_sparse_parity.py): varied, ranks, fewer bits.
SPARSE = dict.fromkeys(("DeepseekV32ForCausalLM", "GlmMoeDsaForCausalLM"), ("yes", "1, 2, 4", SOME_FORMS))
# The text part of a model with vision is tested as the model without.
SAME_AS = {
    "Kimi_K25ForConditionalGeneration": "KimiK25ForConditionalGeneration",
    "Qwen3_5MoeForConditionalGeneration": "Qwen3_5MoeForCausalLM",
    "Qwen3_5ForConditionalGeneration": "Qwen3_5ForCausalLM",
}
# Whose own layer drafts, as tests/speculation/test_mtp.py compares with transformers.
MTP = {
    "Glm4MoeForCausalLM", "DeepseekV3ForCausalLM", "DeepseekV32ForCausalLM", "GlmMoeDsaForCausalLM",
    "Qwen3NextForCausalLM", "Qwen3_5MoeForCausalLM", "Qwen3_5MoeForConditionalGeneration", "Qwen3_5ForCausalLM",
    "Qwen3_5ForConditionalGeneration",
}  # fmt: skip


def test_every_architecture_has_a_row() -> None:
    ours = {name for name, family in FAMILIES.items() if family.module.startswith("models.")}  # tests add some
    missing = {*ours, *WRAPPERS} ^ TABLE.keys()
    assert not missing, f"the table of docs/models.md and models/registry.py differ: {sorted(missing)}"


@pytest.mark.parametrize("architecture", sorted(TABLE))
def test_a_row_says_what_is_tested(architecture: str) -> None:
    said = dict(zip(COLUMNS[1:], TABLE[architecture], strict=True))
    assert ("`mtp`" in said["drafts"]) == (architecture in MTP), "tests/speculation/test_mtp.py"
    if architecture in SPARSE:
        assert (said["varied configurations"], said["ranks"], said["fewer bits"]) == SPARSE[architecture]
        return
    architecture = SAME_AS.get(architecture, architecture)
    tested = architecture in varied.FAMILIES
    assert said["varied configurations"] == ("yes" if tested else "fixed ones"), "tests/models/test_varied_configs.py"
    assert said["ranks"] == ("1, 2, 4" if architecture in varied.RANKED else "dense"), (
        "tests/models/test_varied_configs.py"
    )
    forms = EVERY_FORM if architecture in quantized.FAMILIES else SOME_FORMS if architecture in quantized.MORE else ""
    if architecture == "GptOssForCausalLM":
        forms = "MXFP4"
    assert said["fewer bits"] == (forms or "not tested"), "tests/models/test_quantized_checkpoints.py"
    family = ARCHITECTURES.get(architecture)
    slides = family is not None and family.windows is not no_windows
    assert said["windows"] == ("yes" if slides else "-"), "models/gqa/families.py"


@pytest.mark.parametrize("architecture", sorted(TABLE))
def test_parsers_are_those_that_there_are(architecture: str) -> None:
    cell = TABLE[architecture][-1]
    if cell == "chat template only":
        return
    calls, _, reasoning = cell.partition(";")
    assert set(re.findall(r"`(\w+)`", calls)) <= set(TOOL_PARSERS) and "`" in calls
    assert set(re.findall(r"`(\w+)`", reasoning)) <= set(REASONING_PARSERS)
