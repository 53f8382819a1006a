"""Options that several verbs share."""

from __future__ import annotations

import re
from pathlib import Path

import click
from msgspec import structs

from eplb.offline.placement_file import PlacementFile
from eplb.offline.shapes import MODELS, load_shape
from moesaic.eplb.common import with_options
from moesaic.options import Bytes


class Layers(click.ParamType[tuple[int, ...]]):
    """Layers of the model: 3-60, or 3,7,9-11."""

    name = "layers"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, ...]:
        if isinstance(value, tuple):
            return value
        layers: list[int] = []
        for part in str(value).split(","):
            bounds = re.fullmatch(r"\s*(\d{1,5})(?:-(\d{1,5}))?\s*", part)
            if bounds is None:
                self.fail(f"{value!r} is not a list of layers such as 3-60 or 3,7,9-11", param, ctx)
            first, last = int(bounds[1]), int(bounds[2] or bounds[1])
            if last < first:
                self.fail(f"{part.strip()} ends before it begins", param, ctx)
            layers += range(first, last + 1)
        return tuple(sorted(set(layers)))


# What a peer's file may leave open.
hint_options = with_options(
    click.option("--ranks", type=click.IntRange(1), default=None, help="Ranks that share the slots of a layer."),
    click.option("--model", default="", help="The model's name, to be written into the file."),
    click.option("--top-k", type=click.IntRange(1), default=None, help="Experts per token, where known."),
    click.option("--layers", type=Layers(), default=(), help="Keep these layers of the model only: 3-60 or 3,5."),
)
node_options = with_options(
    click.option("--ranks", type=click.IntRange(1), help="Ranks, where a peer's file does not say it."),
    click.option("--ranks-per-node", type=click.IntRange(1), help="Nodes, where the file names no failure domains."),
    click.option("--model", default="", help="Named shape or config.json that gives it; default: the file's model."),
    click.option("--expert-bytes", "bytes_each", type=Bytes(), help="Size of one expert of one layer, e.g. 42Mi."),
)


def expert_bytes(model: str, bytes_each: int | None) -> float | None:
    """Bytes of an expert: as given, else of a model whose shape is known, else None. ValueError for a path that is
    no model."""
    if bytes_each is not None or not model:
        return bytes_each
    if model in MODELS or Path(model).exists():
        return load_shape(model).expert_bytes
    return None


def with_nodes(file: PlacementFile, ranks_per_node: int | None) -> PlacementFile:
    """The same with failure domains of so many ranks each; unchanged when None. ValueError when the file names other
    ones."""
    if ranks_per_node is None:
        return file
    placement = file.placement
    domains = tuple(rank // ranks_per_node for rank in range(placement.num_ranks))
    if placement.failure_domains and placement.failure_domains != domains:
        raise ValueError("--ranks-per-node contradicts the failure domains in the file")
    return structs.replace(file, placement=structs.replace(placement, failure_domains=domains))
