"""What config.json says of routed experts, in the words of each family: the fields of GqaConfig. Free of torch."""

from __future__ import annotations

from typing import Any

from models.fields import Fields
from models.router_config import RouterConfig, RouterMethod, read_groups


def qwen_experts(fields: Fields, num_layers: int) -> dict[str, Any]:
    """Qwen3-MoE; Qwen2-MoE, which has a shared expert behind a gate."""
    name = "num_experts" if fields.has("num_experts") else "num_local_experts"  # transformers 5 writes the latter
    if not fields.has(name):
        raise fields.error("num_experts", "a whole number")
    num_experts = fields.integer(name, minimum=0)
    step = fields.integer("decoder_sparse_step", 1)
    mlp_only = fields.integers("mlp_only_layers", ())
    layers = tuple(l for l in range(num_layers) if l not in mlp_only and num_experts > 0 and (l + 1) % step == 0)
    if not layers:
        return {}
    return {
        "num_experts": num_experts,
        "moe_intermediate_size": fields.integer("moe_intermediate_size"),
        "router": RouterConfig(
            "softmax", _per_token(fields, name, num_experts), norm_topk_prob=fields.flag("norm_topk_prob", False)
        ),
        "moe_layers": layers,
        "shared_width": fields.integer("shared_expert_intermediate_size", 0, minimum=0),
        "has_shared_gate": fields.has("shared_expert_intermediate_size"),
    }


def mixtral_experts(fields: Fields, num_layers: int) -> dict[str, Any]:
    """Mixtral; MiniMax-M2, which scores by a sigmoid with a bias. Every layer has experts."""
    num_experts = fields.integer("num_local_experts")
    sigmoid = fields.text("scoring_func", "softmax") == "sigmoid" or fields.flag("use_routing_bias", False)
    if fields.first_of("architectures").startswith("MiniMax"):
        fields.only("scoring_func", None, "sigmoid")
        fields.only("shared_intermediate_size", None, 0)
        sigmoid = True
    per_token = _per_token(fields, "num_local_experts", num_experts)
    return {
        "num_experts": num_experts,
        "moe_intermediate_size": fields.integer("intermediate_size"),
        "router": RouterConfig("noaux_tc" if sigmoid else "softmax", per_token),
        "moe_layers": tuple(range(num_layers)),
    }


def deepseek_experts(fields: Fields, num_layers: int) -> dict[str, Any]:
    """GLM-4.5 and dots1, whose routing is DeepSeek-V3's; DeepSeek-MoE, whose routing is a softmax. The first layers
    have none."""
    glm, first_deepseek = (fields.first_of("architectures").startswith(name) for name in ("Glm", "DeepseekFor"))
    fields.only("moe_layer_freq", None, 1)
    # dots.llm1 has the name of the method in this field.
    fields.only("scoring_func", None, *(("softmax",) if first_deepseek else ("sigmoid", "noaux_tc")))
    fields.only("topk_method", None, "greedy" if first_deepseek else "noaux_tc")
    first = fields.integer("first_k_dense_replace", 1 if glm else 0, minimum=0)
    if glm and "n_routed_experts" not in fields.raw:
        raise fields.error("n_routed_experts", "a whole number, or null for a dense model")
    if not fields.has("n_routed_experts") or first >= num_layers:
        return {}
    num_experts = fields.integer("n_routed_experts")
    width = fields.integer("moe_intermediate_size")
    method: RouterMethod = "greedy" if first_deepseek else "noaux_tc"
    groups = (1, 1) if first_deepseek else read_groups(fields, num_experts, 1, fewest=2)
    if first_deepseek:
        fields.only("norm_topk_prob", None, False)
    return {
        "num_experts": num_experts,
        "moe_intermediate_size": width,
        "router": RouterConfig(
            method,
            _per_token(fields, "n_routed_experts", num_experts // groups[0] * groups[1]),
            *groups,
            norm_topk_prob=fields.flag("norm_topk_prob", glm),
            routed_scaling_factor=fields.number("routed_scaling_factor", 1.0),
        ),
        "moe_layers": tuple(range(first, num_layers)),
        "shared_width": width * fields.integer("n_shared_experts", 1 if glm else 0, minimum=0),
    }


def ernie_experts(fields: Fields, num_layers: int) -> dict[str, Any]:
    """ERNIE 4.5: some layers, by three fields."""
    fields.only("moe_gate", None, "topk", "topk_fused", "top2_fused")  # fused or not, the same experts
    num_experts = fields.integer("moe_num_experts", 64, minimum=0)
    first = fields.integer("moe_layer_start_index", 1, minimum=0)
    last = fields.integer("moe_layer_end_index", -1, minimum=-1)
    step = fields.integer("moe_layer_interval", 1)
    stop = num_layers if last < 0 else min(last + 1, num_layers)
    layers = tuple(l for l in range(first, stop) if (l + 1) % step == 0 and num_experts)
    if not layers:
        return {}
    width = fields.integer("moe_intermediate_size")
    per_token = fields.integer("moe_k", 6)
    if per_token > num_experts:
        raise fields.error("moe_k", f"at most moe_num_experts ({num_experts})")
    smallest = fields.positive("moe_norm_min", 1e-12)
    return {
        "num_experts": num_experts,
        "moe_intermediate_size": width,
        "router": RouterConfig("softmax_bias", per_token, smallest_sum=smallest),
        "moe_layers": layers,
        "shared_width": width * fields.integer("moe_num_shared_experts", 2, minimum=0),
    }


def gpt_oss_experts(fields: Fields, num_layers: int) -> dict[str, Any]:
    """gpt-oss: every layer; biases of the router and of the experts, and a gated activation with limits."""
    num_experts = fields.integer("num_local_experts")
    per_token = fields.integer("num_experts_per_tok", 4)
    if per_token > num_experts:
        raise fields.error("num_experts_per_tok", f"at most num_local_experts ({num_experts})")
    return {
        "num_experts": num_experts,
        "moe_intermediate_size": fields.integer("intermediate_size"),
        "router": RouterConfig("softmax", per_token, logit_bias=True),
        "moe_layers": tuple(range(num_layers)),
        "expert_biases": True,
        "activation": (fields.positive("swiglu_alpha", 1.702), fields.positive("swiglu_limit", 7.0), 1.0),
    }


def _per_token(fields: Fields, name: str, eligible: int) -> int:
    per_token = fields.integer("num_experts_per_tok")
    if per_token > eligible:
        raise fields.error("num_experts_per_tok", f"at most {name} ({eligible})")
    return per_token
