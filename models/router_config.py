"""How a model's experts are chosen, as its config.json says. Free of torch; models/routers.py makes the modules."""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

from models.fields import Fields

# softmax: of all experts in the model's dtype (Qwen, Mixtral). greedy, group_limited_greedy: softmax in float32
# (DeepSeek-V2). noaux_tc: sigmoid scores, and a bias that steers the choice only (DeepSeek-V3). softmax_bias: the same
# bias on a softmax (ERNIE).
RouterMethod = Literal["softmax", "greedy", "group_limited_greedy", "noaux_tc", "softmax_bias"]


class RouterConfig(Struct, frozen=True):
    """num_groups, topk_groups: experts are chosen within the best groups; 1: there are none. smallest_sum: weights are
    divided by their sum or by this, whichever is more (softmax_bias). logit_bias: the logits have a bias (softmax)."""

    method: RouterMethod
    experts_per_token: int
    num_groups: int = 1
    topk_groups: int = 1
    norm_topk_prob: bool = True
    routed_scaling_factor: float = 1.0
    smallest_sum: float = 0.0
    logit_bias: bool = False


def read_groups(fields: Fields, num_experts: int, default: int | None = None, fewest: int = 1) -> tuple[int, int]:
    """n_group and topk_group, checked. default: of both where they are absent; None: they must be there. fewest:
    experts that a group must have where not all groups are chosen."""
    num_groups = fields.integer("n_group") if default is None else fields.integer("n_group", default)
    topk_groups = fields.integer("topk_group") if default is None else fields.integer("topk_group", default)
    if num_experts % num_groups:
        raise fields.error("n_group", f"a divisor of the number of experts ({num_experts})")
    if topk_groups > num_groups:
        raise fields.error("topk_group", f"at most n_group ({num_groups})")
    if topk_groups < num_groups and num_experts // num_groups < fewest:
        raise fields.error("n_group", f"groups of at least {fewest} of the {num_experts} experts")
    return num_groups, topk_groups
