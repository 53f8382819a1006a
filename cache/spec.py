"""What a model keeps of every sequence, as a value: declared by its config, without torch.

The planner's bytes, the memory, the block tables, the rules of the prefix cache, `moesaic explain` and whatever carries
a cache to another machine are derived from this one description. docs/add_a_cache_group.md shows how a model gets one.
"""

from __future__ import annotations

import math
from typing import Literal, NamedTuple

ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1, "uint8": 1}

Kind = Literal["paged", "window", "state"]


class Field(NamedTuple):
    """One tensor of a layer. shape: of one token's row (paged, window), or of one sequence's record (state)."""

    name: str
    shape: tuple[int, ...]
    dtype: str  # a key of ITEM_BYTES
    layers: tuple[int, ...] | None = None  # those of the group that keep it; None: all

    @property
    def num_bytes(self) -> int:
        """In one layer."""
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]

    def is_of(self, layer: int) -> bool:
        return self.layers is None or layer in self.layers


class CacheGroup(NamedTuple):
    """Layers that keep the same fields in the same way.

    paged: a row per token, found through a table of blocks. Writing a row of the same token again is harmless, so a
    step that was dropped is simply computed again. window: the same, but only the last `window` tokens are read: blocks
    behind them go back to the pool. state: a record of fixed size per sequence. A step reads one version of it and
    writes another, which becomes the current one when the step's tokens are released: a step that was dropped has
    changed nothing.
    """

    kind: Kind
    layers: tuple[int, ...]
    fields: tuple[Field, ...]
    window: int = 0  # tokens that a query sees, its own included; kind "window" only

    @property
    def row_bytes(self) -> int:
        """Bytes of one row (paged, window) or record (state) over all layers of the group."""
        return sum(
            field.num_bytes * (len(self.layers) if field.layers is None else len(field.layers)) for field in self.fields
        )

    def first_block(self, num_tokens: int, block_size: int) -> int:
        """The first block that the token behind num_tokens tokens sees (paged, window)."""
        return max(0, num_tokens - self.window + 1) // block_size if self.window else 0


CacheSpec = tuple[CacheGroup, ...]


class CachePlace(NamedTuple):
    """One field of one layer in memory. number: of the layer's fields; group: which of the spec it belongs to."""

    layer: int
    number: int
    field: Field
    group: int
    num_rows: int


def check_spec(spec: CacheSpec, num_layers: int) -> None:
    """Raises ValueError unless every layer is in one group at most and every group makes sense."""
    seen: set[int] = set()
    for group in spec:
        if (group.window > 0) != (group.kind == "window"):
            raise ValueError(f"cache group {group.kind}: window {group.window}, which only a window group has")
        for field in group.fields:
            if field.layers is not None and not set(field.layers) <= set(group.layers):
                raise ValueError(f"cache group {group.kind}: {field.name} is of layers that the group does not have")
        for layer in group.layers:
            if layer in seen or not 0 <= layer < num_layers:
                raise ValueError(f"cache group {group.kind}: layer {layer} of {num_layers} is unknown or in two groups")
            seen.add(layer)


def token_groups(spec: CacheSpec) -> list[CacheGroup]:
    """Those with a row per token, which have a block table each, in this order."""
    return [group for group in spec if group.kind != "state"]


def state_groups(spec: CacheSpec) -> list[CacheGroup]:
    return [group for group in spec if group.kind == "state"]


class CacheSizes(NamedTuple):
    """How much of every group there is. Each token group has blocks of its own, numbered from 0; records of all state
    groups have common numbers, and record 0 is what a sequence begins with: zeros that are never written."""

    block_size: int
    num_blocks: int  # of a paged group; of none: what bounds a sequence
    num_window_blocks: int = 0  # of a window group
    num_records: int = 0  # of a state group

    def blocks_of(self, group: CacheGroup) -> int:
        return self.num_window_blocks if group.kind == "window" else self.num_blocks

    def bytes_of(self, group: CacheGroup) -> int:
        """Over all layers of the group."""
        if group.kind == "state":
            return self.num_records * group.row_bytes
        return self.blocks_of(group) * self.block_size * group.row_bytes


def cache_sizes(
    spec: CacheSpec,
    block_size: int,
    num_blocks: int,
    max_num_seqs: int,
    max_num_batched_tokens: int,
    steps_in_flight: int = 1,
    num_checkpoints: int = 0,
) -> CacheSizes:
    """What so many blocks of the paged groups are accompanied by.

    Window groups get what all sequences may hold at once, so that they never run short: of each the window, one block
    that is begun and one that is left, and the tokens of the steps in flight and of the next. State groups get
    steps_in_flight + 1 versions for each sequence (what is current, and what each step in flight writes), the zeros,
    and num_checkpoints for the prefix cache."""
    window_blocks = 0
    for group in spec:
        if group.kind == "window":
            each = -(-group.window // block_size) + 2
            most = max_num_seqs * each + (steps_in_flight + 1) * -(-max_num_batched_tokens // block_size)
            window_blocks = max(window_blocks, min(num_blocks, most))
    records = 0
    if state_groups(spec):
        records = 1 + max_num_seqs * (steps_in_flight + 1) + num_checkpoints
    return CacheSizes(block_size, num_blocks, window_blocks, records)


def places_of(spec: CacheSpec, sizes: CacheSizes) -> list[CachePlace]:
    """Every field of every layer, in the order in which they lie in memory."""
    places: list[CachePlace] = []
    for index, group in enumerate(spec):
        rows = sizes.num_records if group.kind == "state" else sizes.blocks_of(group) * sizes.block_size
        for layer in group.layers:
            fields = [field for field in group.fields if field.is_of(layer)]
            places += [CachePlace(layer, number, field, index, rows) for number, field in enumerate(fields)]
    return places


def fixed_bytes(spec: CacheSpec, sizes: CacheSizes) -> int:
    """What does not grow with the number of paged blocks."""
    return sum(sizes.bytes_of(group) for group in spec if group.kind != "paged")


def bytes_per_token(spec: CacheSpec) -> int:
    """What each token of a long sequence costs: rows of the paged groups."""
    return sum(group.row_bytes for group in spec if group.kind == "paged")
