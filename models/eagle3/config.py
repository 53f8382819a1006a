"""What is said of an EAGLE-3 drafter: a layer that was trained beside a model, with a checkpoint of its own, and drafts
for it (arXiv 2503.01840). Free of torch.

Its config.json is that of the authors (`LlamaForCausalLMEagle3`), or of the speculators library, which has the layer's
own fields in a section.
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct, structs

from cache.spec import CacheSpec, Field
from layers.rope_parameters import RopeParameters
from models.facts import ModelFacts
from models.fields import Fields
from models.shared_fields import read_rope

SECTION = "eagle3"  # of the config.json of a model that is served with one (models/eagle3/directory.py)
ARCHITECTURES = ("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM")


class Eagle3Config(Struct, frozen=True):
    """layers: at whose start it sees the model's residual stream, in order; the number of layers: behind the last.
    norm_before_residual: its own residual stream begins with the norm of what it sees, not with that. norm_before_fc:
    all that it sees has one norm, before it is projected; fc_norm: each of it has one. norm_output: it drafts further
    from what its last norm gives, not from what went in. own_embedding, own_head: its checkpoint has one; else it uses
    the model's. maps_tokens: its head's tokens are some of the model's."""

    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope: RopeParameters
    layers: tuple[int, ...]
    vocab_size: int
    draft_vocab_size: int
    attention_bias: bool
    norm_before_residual: bool
    norm_before_fc: bool
    fc_norm: bool
    norm_output: bool
    own_embedding: bool
    own_head: bool
    maps_tokens: bool


def with_drafter(facts: ModelFacts, fields: Fields) -> ModelFacts:
    """The same model with what drafts for it, if its config.json has that section. ConfigError, one line, where it
    does not fit."""
    if not fields.has(SECTION):
        return facts
    section = fields.section(SECTION)
    config = parse(section.section("config"), section.raw.get("tensors") or (), facts)
    with_it: ModelFacts = structs.replace(facts, eagle3=config)  # type: ignore[type-var]
    with_it.cache_spec("float32")  # which has to have room for it
    return with_it


def parse(fields: Fields, tensors: Sequence[str], facts: ModelFacts) -> Eagle3Config:
    """fields: its config.json; tensors: what its checkpoint has; facts: of the model. Raises ConfigError."""
    inner, by_default = fields, False
    if fields.has("speculators_model_type"):
        fields.only("speculators_model_type", "eagle3")
        inner, by_default = fields.section("transformer_layer_config"), True
        inner.only("model_type", None, "llama")
    else:
        fields.only("architectures", *([name] for name in ARCHITECTURES))
    inner.only("num_hidden_layers", 1)
    inner.only("hidden_act", None, "silu")
    inner.only("mlp_bias", None, False)
    fields.only("parallel_drafting", None, False)
    for of_model, holder, name in (
        (facts.hidden_size, inner, "hidden_size"),
        (facts.hidden_size, fields, "target_hidden_size"),
        (facts.vocab_size, inner, "vocab_size"),
    ):
        if holder.integer(name, of_model) != of_model:
            raise holder.error(name, f"{of_model}, which the model has")
    num_heads = inner.integer("num_attention_heads")
    num_kv_heads = inner.integer("num_key_value_heads", num_heads)
    if num_heads % num_kv_heads:
        raise inner.error("num_key_value_heads", f"a divisor of num_attention_heads ({num_heads})")
    head_dim = inner.integer("head_dim", facts.hidden_size // num_heads, minimum=2)
    if head_dim % 2:
        raise inner.error("head_dim", "an even number")
    draft_vocab_size = fields.integer("draft_vocab_size", facts.vocab_size)
    if draft_vocab_size > facts.vocab_size:
        raise fields.error("draft_vocab_size", f"at most the model's {facts.vocab_size}")
    residual_is_normed = fields.flag("norm_before_residual", by_default)
    more = fields.section("eagle_config") if fields.has("eagle_config") else fields  # where some have the rest
    more.only("use_aux_hidden_state", None, True)
    before_fc = more.flag("norm_before_fc", fields.flag("norm_before_fc", False))
    if before_fc and not residual_is_normed:
        raise fields.error("norm_before_fc", "false where norm_before_residual is false")
    names = {name.removeprefix("model.") for name in tensors}
    if draft_vocab_size != facts.vocab_size and not {"lm_head.weight", "d2t"} <= names:
        raise fields.error("draft_vocab_size", f"{facts.vocab_size} of a checkpoint without lm_head.weight and d2t")
    return Eagle3Config(
        hidden_size=facts.hidden_size,
        intermediate_size=inner.integer("intermediate_size"),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        rms_norm_eps=inner.positive("rms_norm_eps", 1e-6),
        rope=read_rope(inner, head_dim, inner.integer("max_position_embeddings", facts.max_position_embeddings)),
        layers=_layers(fields, more, facts.num_layers),
        vocab_size=facts.vocab_size,
        draft_vocab_size=draft_vocab_size,
        attention_bias=inner.flag("attention_bias", False),
        norm_before_residual=residual_is_normed,
        norm_before_fc=before_fc,
        fc_norm=fields.flag("fc_norm", False),
        norm_output=fields.flag("norm_output", False),
        own_embedding="embed_tokens.weight" in names,
        own_head="lm_head.weight" in names,
        maps_tokens="d2t" in names,
    )


def _layers(fields: Fields, more: Fields, num_layers: int) -> tuple[int, ...]:
    """As vLLM counts them; where nothing is said, from 0 on the layer 2, the middle one and the last but two."""
    name = "eagle_aux_hidden_state_layer_ids"
    holder = fields if fields.has(name) else more
    layers = tuple(sorted(set(holder.integers(name, (2, num_layers // 2, num_layers - 3)))))
    if not layers or not 0 <= layers[0] <= layers[-1] <= num_layers:
        raise holder.error(name, f"numbers of layers from 0 to {num_layers}")
    fields.only("num_aux_hidden_states", None, len(layers))
    return layers


def with_rows(spec: CacheSpec, config: Eagle3Config | None, layer: int, dtype: str) -> CacheSpec:
    """The cache with the keys and values of what drafts, as those of this layer, if there is one. ValueError: all
    layers of the model look back a window only."""
    if config is None:
        return spec
    at = next((at for at, group in enumerate(spec) if group.kind != "state"), None)
    if at is None or spec[at].kind != "paged":
        raise ValueError("an EAGLE-3 drafter needs a model with a layer that attends to everything")
    first = spec[at]
    own = [field if field.layers is not None else field._replace(layers=first.layers) for field in first.fields]
    shape = (config.num_kv_heads, config.head_dim)
    own += [Field(name, shape, dtype, (layer,)) for name in ("draft_key", "draft_value")]
    with_it = first._replace(layers=(*first.layers, layer), fields=tuple(own))
    return (*spec[:at], with_it, *spec[at + 1 :])
