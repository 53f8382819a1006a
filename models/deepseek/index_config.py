"""The indexer of DeepSeek-V3.2 and GLM-5 as config.json describes it: which keys attention looks at. Free of torch."""

from __future__ import annotations

from msgspec import Struct

from models.fields import Fields

GLM_DSA = "GlmMoeDsaForCausalLM"
SPARSE = ("DeepseekV32ForCausalLM", GLM_DSA)  # architectures with an indexer
FP8_SCALE_BYTES = 4  # behind each key in FP8 (mla/index_keys.py)
_KINDS = {"F": "full", "S": "shared", "full": "full", "shared": "shared"}


class IndexConfig(Struct, frozen=True):
    """topk: the most keys that a query attends to. full_layers: those with an indexer; the others use what the last of
    these before them has chosen. interleave: rotated pairs of the checkpoint lie side by side."""

    topk: int
    num_heads: int
    head_dim: int
    interleave: bool
    full_layers: tuple[int, ...]

    @property
    def dims(self) -> tuple[int, int, int]:
        """Of mla.index.IndexShape."""
        return self.num_heads, self.head_dim, self.topk

    def key_bytes(self) -> int:
        """Of a key in FP8. Raises ValueError for a width that has none."""
        if self.head_dim % FP8_SCALE_BYTES:
            raise ValueError(f"index keys in FP8 need an index_head_dim that is a multiple of 4, not {self.head_dim}")
        return self.head_dim + FP8_SCALE_BYTES


def read_index(fields: Fields, architecture: str, num_layers: int, qk_rope_head_dim: int) -> IndexConfig | None:
    """None: every key is attended to. ConfigError for an indexer that cannot be computed."""
    if architecture not in SPARSE:
        return None
    head_dim = fields.integer("index_head_dim")
    if head_dim < qk_rope_head_dim or head_dim % 2:
        raise fields.error("index_head_dim", f"an even number of at least qk_rope_head_dim ({qk_rope_head_dim})")
    if not fields.integer("q_lora_rank", 0, minimum=0):
        raise fields.error("q_lora_rank", "above 0: the indexer's queries come from the latent of the queries")
    glm = architecture == GLM_DSA
    full = tuple(layer for layer, kind in enumerate(_kinds(fields, num_layers, glm)) if kind == "full")
    return IndexConfig(
        topk=fields.integer("index_topk"),
        num_heads=fields.integer("index_n_heads"),
        head_dim=head_dim,
        interleave=fields.flag("indexer_rope_interleave", glm),
        full_layers=full,
    )


def _kinds(fields: Fields, num_layers: int, glm: bool) -> list[str]:
    """ "full" or "shared" of each layer: indexer_types, index_topk_pattern (FSSF...), or index_topk_freq and
    index_skip_topk_offset."""
    if not glm:
        return ["full"] * num_layers
    name = "indexer_types" if fields.has("indexer_types") else "index_topk_pattern"
    if fields.has(name):
        given = fields.raw[name]
        kinds = [_KINDS.get(kind, "") for kind in given] if isinstance(given, list | str) else []
        if len(kinds) != num_layers or "" in kinds or kinds[0] != "full":
            raise fields.error(name, f'{num_layers} of "full" and "shared", the first of them "full"')
        return kinds
    frequency = max(fields.integer("index_topk_freq", 1, minimum=0), 1)
    offset = fields.integer("index_skip_topk_offset", 2, minimum=0)
    kinds = ["shared" if max(layer - offset + 1, 0) % frequency else "full" for layer in range(num_layers)]
    if kinds[0] != "full":
        raise fields.error("index_skip_topk_offset", "at least 1: the first layer has an indexer")
    return kinds
