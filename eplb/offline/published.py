"""The cost model against what others have published: each figure, its source, what is predicted for it and the error.

Rows marked `fitted` set the constants of eplb/offline/cost.py; the others were not used for it. Where a source does not
say something that the model needs, `assumed` says what was taken. Nothing here was measured by us.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

from msgspec import Struct

from eplb.offline.cluster import make_cluster
from eplb.offline.cost import DEFAULT, Constants, Workload, balanced_part, links_ms, pause_s, step_cost
from eplb.offline.shapes import MODELS

Kind = Literal["step", "links", "ratio", "pause"]

_LMSYS_EP = "SGLang / LMSYS blog 2025-05-05, 96 H100"
_LMSYS_GB200 = "SGLang / LMSYS blog 2025-09-25, GB200"
_ANT = "Ant Group + SGLang, LMSYS blog 2025-09-26, H20"
_RTP = "RTP-LLM, DeepSeek replay report 2025"
_DAY6 = "DeepSeek, open-infra day 6, 2025-03-01"
_PROFILE = "DeepSeek profile-data, rates in the LMSYS blog 2025-05-05"
_DEEPEP = "DeepEP V1 README, H800 + CX7"


class Figure(Struct, frozen=True):
    """One published number of DeepSeek-V3/R1 and the case it belongs to. published: tokens/s per GPU."""

    name: str
    source: str
    published: float
    gpu: str
    num_gpus: int
    num_slots: int
    work: Workload
    balance: float  # assumed unless the source simulated perfect balance
    dtype: str = "fp8"
    tokens_per_row: float = 1.0  # output tokens per row that is computed: below 1 with speculation
    fitted: bool = False
    assumed: str = ""
    loaded: bool = True  # False: an average over a day, not a saturated run

    def predicted(self, constants: Constants = DEFAULT) -> float:
        """Tokens per second and GPU."""
        cluster = make_cluster(self.gpu, self.num_gpus)
        part = balanced_part(self.num_gpus, self.num_slots, self.balance)
        shape = MODELS["deepseek-v3"].with_dtype(self.dtype)
        return step_cost(cluster, shape, self.work, part, constants).tokens_per_s_per_gpu * self.tokens_per_row


def _decode(tokens: int, context: int, micro_batches: int = 2, fp8_cache: bool = False) -> Workload:
    return Workload("decode", tokens, context, micro_batches, fp8_cache)


def _prefill(tokens: int, length: int, micro_batches: int = 2, fp8_cache: bool = False) -> Workload:
    return Workload("prefill", tokens, length, micro_batches, fp8_cache)


_EVEN, _STALE = "", "balance after EPLB"
# Two tokens are verified per sequence and step, of which 1.85 are kept (the post says 1.8 to 1.9).
_MTP = 1.85 / 2

FIGURES = (
    Figure("decode EP128, batch 128", _PROFILE, 18598 / 8, "h800", 128, 2, _decode(128, 4096), 1.0, fitted=True),
    Figure("decode EP144, 20-22 tok/s per user", _DAY6, 14800 / 8, "h800", 144, 2, _decode(88, 4989), 0.74,
           assumed="batch 88 from the two rates; balance .74 (2 slots)"),
    Figure("decode EP144, 13,200 users at 20 tok/s", _RTP, 1850, "h800", 144, 2, _decode(92, 5120), 0.74,
           assumed="balance .74 (2 slots), 4K in + half of 2K out"),
    Figure("decode EP72, batch 256, 2K", _LMSYS_EP, 22282 / 8, "h100", 72, 4, _decode(256, 2050), 0.87, fitted=True,
           assumed="balance .87 after EPLB"),
    Figure("decode EP72, batch 128, 4K, slow attention", _LMSYS_EP, 17373 / 8, "h100", 72, 4, _decode(128, 4000), 0.87,
           assumed="balance .87 after EPLB"),
    Figure("decode 32 GPUs", "vLLM blog 2025-12-17, H200", 2200, "h200", 32, 9, _decode(128, 3000), 0.90,
           assumed="batch 128 and context 3000 (not published), balance .90"),
    Figure("decode EP16, batch 48, MTP", _ANT, 714, "h20", 16, 18, _decode(96, 4864, 1, True), 0.80,
           tokens_per_row=_MTP, assumed="balance .80 (the post: above .70), 288 slots"),
    Figure("decode EP16, batch 32, MTP", _ANT, 675, "h20", 16, 18, _decode(64, 4864, 1, True), 0.80,
           tokens_per_row=_MTP, fitted=True, assumed="balance .80 (the post: above .70), 288 slots"),
    Figure("decode EP16, batch 8, MTP", _ANT, 278, "h20", 16, 18, _decode(16, 4864, 1, True), 0.80,
           tokens_per_row=_MTP, assumed="balance .80 (the post: above .70), 288 slots"),
    Figure("decode EP32, batch 32, MTP", _ANT, 585, "h20", 32, 9, _decode(64, 4864, 1, True), 0.75,
           tokens_per_row=_MTP, assumed="balance .75 (the post: above .70), 288 slots"),
    Figure("decode EP32, batch 8, MTP", _ANT, 293, "h20", 32, 9, _decode(16, 4864, 1, True), 0.75,
           tokens_per_row=_MTP, assumed="balance .75 (the post: above .70), 288 slots"),
    Figure("decode EP48, BF16/FP8, June 2025", "SGLang / LMSYS blog 2025-06-16, GB200", 7583, "gb200", 48, 6,
           _decode(768, 2050, 1), 0.90, assumed="batch 768 as in September, balance .90; first kernels for this GPU"),
    Figure("decode EP48, BF16/FP8", _LMSYS_GB200, 9087, "gb200", 48, 6, _decode(768, 2050, 1), 0.90, fitted=True,
           assumed="balance .90; batch from its launch script"),
    Figure("decode EP48, FP8/NVFP4, batch 1408", _LMSYS_GB200, 13386, "gb200", 48, 6, _decode(1408, 2050, 1,
        True), 0.90,
           "nvfp4", assumed="balance .90"),
    Figure("decode 8 GPUs, NVFP4", "vLLM blog 2026-02-03, GB200", 10100, "gb200", 8, 32, _decode(512, 3000, 1,
        True), 0.95,
           "nvfp4", assumed="batch 512 (not published), balance .95"),
    Figure("prefill EP32, 16K tokens, 4K, even", _PROFILE, 62713 / 8, "h800", 32, 9, _prefill(16384, 4096),
        1.0, fitted=True),
    Figure("prefill EP32, 16K tokens, 4K, even", _LMSYS_EP, 59337 / 8, "h100", 32, 9, _prefill(16384, 4096), 1.0),
    Figure("prefill EP32, 16K tokens, 4K", _LMSYS_EP, 50302 / 8, "h100", 32, 9, _prefill(16384, 4096), 0.85,
           assumed="balance .85 after EPLB"),
    Figure("prefill EP32, 16K tokens, 2K", _LMSYS_EP, 54543 / 8, "h100", 32, 9, _prefill(16384, 2048), 0.85,
           assumed="balance .85 after EPLB"),
    Figure("prefill EP32, 16K tokens, 1K", _LMSYS_EP, 57674 / 8, "h100", 32, 9, _prefill(16384, 1024), 0.85,
           assumed="balance .85 after EPLB"),
    Figure("prefill EP32, two 4K prompts in 1.5 s", _RTP, 5333, "h800", 32, 9, _prefill(8192, 4096), 0.85,
           assumed="balance .85"),
    Figure("prefill EP32, without cache hits, 24 h", _DAY6, 73700 * (1 - 0.563) / 8, "h800", 32, 9,
        _prefill(16384, 4096), 0.85,
           assumed="balance .85; an average over day and night, not a full load", loaded=False),
    Figure("prefill 4 GPUs, BF16/FP8, 2K", _LMSYS_GB200, 18471, "gb200", 4, 64, _prefill(16384, 2000, 1), 0.97,
        fitted=True,
           assumed="balance .97"),
    Figure("prefill 2 GPUs, FP8/NVFP4, 2K", _LMSYS_GB200, 26156, "gb200", 2, 128, _prefill(16384, 2000, 1,
        True), 0.99, "nvfp4",
           assumed="balance .99"),
    Figure("prefill 2 GPUs, NVFP4, 2K", "vLLM blog 2026-02-03, GB200", 26200, "gb200", 2, 128, _prefill(32768,
        2048, 1, True),
           0.99, "nvfp4", assumed="32K tokens a step, balance .99"),
)  # fmt: skip

# ranks: microseconds of dispatch and combine of 128 tokens
LOW_LATENCY = {8: (77, 114), 16: (118, 195), 32: (155, 273), 64: (173, 314), 128: (192, 369), 256: (194, 360)}
# ranks: GB/s of dispatch and combine of 4096 tokens, of the bytes that DeepEP counts
NORMAL = {8: (153, 158), 16: (43, 43), 32: (58, 57), 64: (51, 50)}


def check(constants: Constants = DEFAULT) -> list[dict[str, Any]]:
    """One row per figure: kind, name, source, unit, published, predicted, error_percent, fitted, loaded, assumed."""
    rows = [
        _row("step", figure.name, figure.source, "tok/s/GPU", figure.published, figure.predicted(constants),
             figure.fitted, figure.assumed, figure.loaded)
        for figure in FIGURES
    ]  # fmt: skip
    return rows + _ratios(constants) + _links(constants) + _pauses(constants)


def summary(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Mean and greatest |error| in percent of the step rows that were saturated runs: all, and those not fitted."""
    step = [row for row in rows if row["kind"] == "step" and row["loaded"]]
    held_out = [row for row in step if not row["fitted"]]
    return {
        "figures": len(rows),
        "mean_abs_error_percent": _mean([abs(row["error_percent"]) for row in step]),
        "held_out_mean_abs_error_percent": _mean([abs(row["error_percent"]) for row in held_out]),
        "held_out_max_abs_error_percent": max(abs(row["error_percent"]) for row in held_out),
        "links_mean_abs_error_percent": _mean([abs(row["error_percent"]) for row in rows if row["kind"] == "links"]),
    }


def _mean(values: list[float]) -> float:
    return round(sum(values) / len(values), 2)


def _row(
    kind: Kind,
    name: str,
    source: str,
    unit: str,
    published: float,
    predicted: float,
    fitted: bool = False,
    assumed: str = "",
    loaded: bool = True,
) -> dict[str, Any]:
    error = round((predicted / published - 1) * 100, 1)
    return {
        "kind": kind,
        "name": name,
        "source": source,
        "unit": unit,
        "published": round(published, 2),
        "predicted": round(predicted, 2),
        "error_percent": error,
        "fitted": fitted,
        "loaded": loaded,
        "assumed": assumed,
    }


def _ratios(constants: Constants) -> list[dict[str, Any]]:
    """What balance and overlap are worth: the same case twice."""

    def rate(balance: float, micro_batches: int = 2, tokens: int = 16384) -> float:
        work = _prefill(tokens, 4096, micro_batches)
        return Figure("", "", 1, "h100", 32, 9, work, balance).predicted(constants)

    return [
        _row("ratio", "prefill EP32: EPLB over none", _LMSYS_EP, "x", 1.49, rate(0.85) / rate(1 / 2.56),
             assumed="without: imbalance 1.56 (TensorRT-LLM, EP32); with: balance .85"),
        _row("ratio", "prefill EP32: two micro-batches over one", _LMSYS_EP, "x", 1.31,
             rate(0.85, 2, 8192) / rate(0.85, 1, 8192), True, "the middle of 27 to 35 %; balance .85"),
        _row("ratio", "prefill EP32: perfect over real balance", _LMSYS_EP, "x", 59337 / 50302, rate(1.0) / rate(0.85),
             assumed="real balance .85"),
    ]  # fmt: skip


def _links(constants: Constants) -> list[dict[str, Any]]:
    shape = MODELS["deepseek-v3"]
    rows = []
    for ranks, published in LOW_LATENCY.items():
        predicted = links_ms(make_cluster("h800", ranks), shape, "decode", 128, constants=constants)
        for what, known, ms in zip(("dispatch", "combine"), published, predicted, strict=True):
            name = f"low-latency {what} EP{ranks}, 128 tokens"
            rows.append(_row("links", name, _DEEPEP, "us", known, ms * 1e3, fitted=True))
    for ranks, published in NORMAL.items():
        cluster = make_cluster("h800", ranks)
        predicted = links_ms(cluster, shape, "prefill", 4096, constants=constants)
        # Counted: copies per node, or per GPU inside one node; the README counts those that stay as well.
        places = 8 if ranks == 8 else min(4, ranks // 8)
        copies = places * (1 - (1 - 1 / places) ** shape.experts_per_token)
        for what, known, ms, size in zip(("dispatch", "combine"), published, predicted, (7392, 14336), strict=True):
            name = f"normal {what} EP{ranks}, 4096 tokens"
            rows.append(_row("links", name, _DEEPEP, "GB/s", known, 4096 * copies * size / ms / 1e6, fitted=True))
    return rows


def _pauses(constants: Constants) -> list[dict[str, Any]]:
    """What a synchronous re-plan of nearly all slots stops."""
    cases: list[tuple[str, str, float, Callable[[], float], bool]] = [
        ("re-plan, 32 GB200, R1-NVFP4", "vLLM issue 43219: mean of 22 rebalances", 0.91,
         lambda: pause_s(make_cluster("gb200", 32), MODELS["deepseek-v3"].with_dtype("nvfp4"), 0.95 * 9 * 58,
             58, constants), True),
        ("re-plan of one layer, H100 EP32", "SGLang issue 7879: about 20 ms a layer", 0.020,
         lambda: pause_s(make_cluster("h100", 32), MODELS["deepseek-v3"], 0.95 * 9, 1, constants), False),
    ]  # fmt: skip
    return [
        _row("pause", name, source, "s", known, predict(), fitted, "95 % of 9 slots a rank move")
        for name, source, known, predict, fitted in cases
    ]
