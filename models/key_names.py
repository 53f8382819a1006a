"""From the keys of a checkpoint to the names that models read, which are those of Qwen3-MoE and DeepSeek-V3 in Hugging
Face transformers. Free of torch.
"""

from __future__ import annotations

from msgspec import Struct
from msgspec.structs import replace


class KeyNames(Struct, frozen=True):
    """How a family's checkpoints call the same things.

    prefix: in front of every key of the language model, which the checkpoint has beside others. skipped: what keys
    begin with that are of parts which are not served (a vision tower). parts: pairs of (what stands in a key, what it
    is called here).
    """

    prefix: str = ""
    skipped: tuple[str, ...] = ()
    parts: tuple[tuple[str, str], ...] = ()

    def __call__(self, key: str) -> str | None:
        """The name that models read, or None where the key is of a part that is not served."""
        if key.startswith(self.skipped):
            return None
        name = key.removeprefix(self.prefix)
        for stored, own in self.parts:
            name = name.replace(stored, own)
        return name


PLAIN = KeyNames()
SHARED_EXPERT = (".mlp.shared_expert.", ".mlp.shared_experts.")
MIXTRAL = KeyNames(
    parts=(
        (".block_sparse_moe.e_score_correction_bias", ".mlp.gate.e_score_correction_bias"),
        (".block_sparse_moe.", ".mlp."),
        (".w1.", ".gate_proj."),
        (".w2.", ".down_proj."),
        (".w3.", ".up_proj."),
    )
)
LING = KeyNames(
    parts=(
        ("model.word_embeddings.", "model.embed_tokens."),
        (".attention.", ".self_attn."),
        (".self_attn.dense.", ".self_attn.o_proj."),
        (".mlp.gate.expert_bias", ".mlp.gate.e_score_correction_bias"),
    )
)
QWEN2_MOE = KeyNames(parts=(SHARED_EXPERT,))
QWEN3_NEXT = KeyNames(  # Qwen3.5 has vision, and the language model inside it
    parts=(("model.language_model.", "model."), SHARED_EXPERT), skipped=("model.visual.",)
)


def with_mtp(names: KeyNames, num_layers: int, num_mtp_layers: int) -> KeyNames:
    """Of checkpoints that have what drafts under `mtp.`: the first layer of it becomes the one behind the last."""
    layer = f"model.layers.{num_layers}."
    parts = (
        ("mtp.layers.0.", layer),
        ("mtp.fc.", f"{layer}eh_proj."),
        ("mtp.pre_fc_norm_embedding.", f"{layer}enorm."),
        ("mtp.pre_fc_norm_hidden.", f"{layer}hnorm."),
        ("mtp.norm.", f"{layer}shared_head.norm."),
    )
    further = tuple(f"mtp.layers.{index}." for index in range(1, num_mtp_layers))
    return replace(names, parts=(*names.parts, *parts), skipped=(*names.skipped, *further))


GPT_OSS = KeyNames(parts=((".mlp.router.", ".mlp.gate."),))
ERNIE = KeyNames(
    parts=((".mlp.moe_statics.e_score_correction_bias", ".mlp.gate.e_score_correction_bias"),),
    skipped=("model.mtp_",),
)
KIMI_WRAPPER = KeyNames(  # what transformers writes has blocks where the published checkpoints have layers
    prefix="language_model.",
    skipped=("vision_tower.", "mm_projector.", "multi_modal_projector.", "model.mm_projector.", "model.vision_tower."),
    parts=(("model.blocks.", "model.layers."),),
)
