"""What must be equal on all machines of a server: versions, checkpoint, and every choice but those of the machine
itself."""

from __future__ import annotations

import msgspec
from msgspec import structs

from configs.engine import Plan
from configs.versions import __version__, torch_version

# Fields of a plan that a machine decides for itself.
OWN = frozenset(
    {
        "model_path",
        "tokenizer_path",
        "served_model_names",
        "num_kv_blocks",
        "threads_per_rank",
        "native_kernels",
        "pin_ranks",
        "spin_threads",
        "rank_bytes",
        "weight_cache",
        "weight_key",
        "store_nodes",
        "max_ranks",
        "data_parallel_size_local",
        "checkpoint",  # `other_weights` compares it
        "reasons",
    }
)


def versions() -> dict[str, str]:
    return {"moesaic": __version__, "torch": torch_version()}


def other_weights(theirs: Plan, ours: Plan) -> str:
    """Which file of the checkpoint there is another one than here, by size and digest; "": none is."""
    there, here = (
        {name: (size, digest) for name, (size, _, _, digest) in plan.checkpoint.items()} for plan in (theirs, ours)
    )
    unlike = sorted(name for name in there.keys() | here.keys() if there.get(name) != here.get(name))
    if not unlike:
        return ""
    name = unlike[0]
    said = [
        f"{part[0]} bytes, digest {part[1]}" if part else "no such file" for part in (there.get(name), here.get(name))
    ]
    return f"model is another checkpoint there: {name} ({said[0]}) than on the head ({said[1]})"


def differences(theirs: Plan, ours: Plan) -> list[str]:
    """A line for each field that must be equal and is not. theirs: of the machine that wants to join."""
    there, here = _shared(theirs), _shared(ours)
    return [
        f"{name} is {there[name]!r} there and {here[name]!r} on the head" for name in here if there[name] != here[name]
    ]


def _shared(plan: Plan) -> dict[str, object]:
    """Where a machine remembers what it has measured, and has what drafts, is its own business too."""
    dbo = None if plan.dbo is None else structs.replace(plan.dbo, memory="")
    speculation = None if plan.speculation is None else structs.replace(plan.speculation, memory="", model="")
    values: dict[str, object] = msgspec.to_builtins(structs.replace(plan, dbo=dbo, speculation=speculation))
    return {name: value for name, value in values.items() if name not in OWN}
