"""A recording of expert loads over time, and its two native files: JSON lines (what the engine records) and .npz.

JSON lines: a header
    {"format": "moesaic-load", "version": 1, "model": "...", "layers": L, "experts": E, "ranks": G, "top_k": K,
     "layer_ids": [...], "source": "..."}
of which format, version, layers and experts must be there, then one record per line
    {"step": first step counted, "steps": how many, "tokens": routed in them by all ranks, "load": [[E numbers] * L]}.
.npz: the arrays load [T, L, E], step, steps and tokens [T], and the header as JSON text in `header`.

Legend: T records, L MoE layers, E logical experts, G ranks, K experts per token.
"""

from __future__ import annotations

import zipfile
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec import Struct, field

from eplb.offline.files import decode_json, open_file, read_arrays, replacing

FORMAT, VERSION = "moesaic-load", 1
# Reading tells how far it is: (bytes or records done, all of them).
Progress = Callable[[int, int], None]
Floats = npt.NDArray[np.floating[Any]]
Ints = npt.NDArray[np.int64]

_MAX_SIDE = 1 << 16  # layers or experts: far beyond any model, and small enough that a wrong number fails at once
_EXACT_IN_FLOAT32 = 1 << 24


class TraceMeta(Struct, frozen=True):
    """Where a trace comes from. 0 and "" mean that it is not known. layer_ids: the model's number of each row (MoE
    layers of DeepSeek-V3 begin at 3)."""

    model: str = ""
    ranks: int = 0
    top_k: int = 0
    source: str = ""
    layer_ids: tuple[int, ...] = ()


class Trace(Struct, frozen=True, eq=False):
    """load: float32 [T, L, E], or float64 where float32 would not be exact: tokens that each expert received (a token
    counts once for each of its K experts), finite and >= 0. step, steps, tokens: int64 [T]; tokens is 0 where it is not
    known.

    The arrays are made read-only, not copied. Raises ValueError, one line, when something does not fit.
    """

    load: Floats
    step: Ints
    steps: Ints
    tokens: Ints
    meta: TraceMeta = field(default=TraceMeta())

    def __post_init__(self) -> None:
        if self.load.ndim != 3 or 0 in self.load.shape:
            raise ValueError(
                f"load has shape {list(self.load.shape)}; it must be [records, layers, experts], none of them 0"
            )
        for name, values in (("step", self.step), ("steps", self.steps), ("tokens", self.tokens)):
            if values.shape != (len(self.load),):
                raise ValueError(f"{name} has shape {list(values.shape)}; there are {len(self.load)} records")
        if self.steps.min() < 1:
            raise ValueError(f"steps of record {int(self.steps.argmin())} is {self.steps.min()}; it must be 1 or more")
        if self.tokens.min() < 0:
            raise ValueError(
                f"tokens of record {int(self.tokens.argmin())} is {self.tokens.min()}; it must be 0 or more"
            )
        ids = self.meta.layer_ids
        if ids and len(ids) != self.num_layers:
            raise ValueError(f"layer_ids has {len(ids)} entries for {self.num_layers} layers")
        check_layer_ids(ids)
        for array in (self.load, self.step, self.steps, self.tokens):
            array.flags.writeable = False

    @property
    def num_records(self) -> int:
        return int(self.load.shape[0])

    @property
    def num_layers(self) -> int:
        return int(self.load.shape[1])

    @property
    def num_experts(self) -> int:
        return int(self.load.shape[2])

    @property
    def layer_ids(self) -> tuple[int, ...]:
        """The model's number of each layer; 0, 1, ... where the trace does not say."""
        return self.meta.layer_ids or tuple(range(self.num_layers))

    def window(self, start: int, stop: int) -> npt.NDArray[np.float64]:
        """Sum of the records start to stop - 1, float64 [L, E]."""
        if not 0 <= start < stop <= self.num_records:
            raise ValueError(f"records {start} to {stop} of a trace with {self.num_records}: there are none")
        # One record at a time: a float64 copy of a long window would be larger than the trace.
        total_LE: npt.NDArray[np.float64] = self.load[start].astype(np.float64)
        for load_LE in self.load[start + 1 : stop]:
            total_LE += load_LE
        return total_LE


def make_trace(
    load: npt.ArrayLike,
    meta: TraceMeta | None = None,
    step: Sequence[int] | Ints = (),
    steps: Sequence[int] | Ints = (),
    tokens: Sequence[int] | Ints = (),
    where: str = "load",
) -> Trace:
    """A checked Trace of load [T, L, E]; without `steps` each record counts one step, without `step` they follow each
    other.

    Raises ValueError, with `where` in front, when a load is negative or not a finite number, or a shape does not fit.
    """
    raw = np.asarray(load)
    if raw.dtype.kind not in "iufb":
        raise ValueError(f"{where}: the loads are {raw.dtype}, not numbers")
    if raw.ndim == 3:
        for index, load_LE in enumerate(raw):
            check_load(load_LE, f"{where}: record {index}")
    num = len(raw) if raw.ndim else 0
    try:
        steps_T = np.asarray(steps if len(steps) else [1] * num, dtype=np.int64)
        first_T = np.asarray(step, dtype=np.int64) if len(step) else np.cumsum(steps_T) - steps_T
        tokens_T = np.asarray(tokens if len(tokens) else [0] * num, dtype=np.int64)
        return Trace(narrow(raw), first_T, steps_T, tokens_T, meta or TraceMeta())
    except (ValueError, OverflowError) as error:
        raise ValueError(f"{where}: {error}") from None


def check_layer_ids(ids: Sequence[int]) -> None:
    """ValueError unless every layer number is 0 or more and given once."""
    for layer in ids:
        if not 0 <= layer <= _MAX_SIDE:
            raise ValueError(f"layer_ids holds {layer}; it must be 0 to {_MAX_SIDE}")
    if len(set(ids)) != len(ids):
        raise ValueError("layer_ids holds a layer twice")


def check_load(load_LE: npt.NDArray[Any], where: str) -> None:
    """ValueError naming the first layer and expert (rows counted from 0) whose load is not finite or is negative."""
    good = np.isfinite(load_LE) & (load_LE >= 0)
    if not good.all():
        layer, expert = (int(i) for i in np.argwhere(~good)[0])
        raise ValueError(
            f"{where}: load[{layer}][{expert}] is {load_LE[layer, expert]}; it must be a finite number, 0 or more"
        )


def narrow(load: npt.NDArray[Any]) -> Floats:
    """float32 where that holds every value exactly, else float64."""
    if load.dtype == np.float32 or load.dtype == np.float16:
        return load.astype(np.float32, copy=False)
    if load.dtype.kind in "iub" and load.size and load.max() <= _EXACT_IN_FLOAT32:
        return load.astype(np.float32)
    as_float64 = load.astype(np.float64, copy=False)
    with np.errstate(over="ignore"):  # beyond float32 is not exact in it either
        as_float32 = as_float64.astype(np.float32)
    return as_float32 if np.array_equal(as_float32, as_float64) else as_float64


# ---- reading -----------------------------------------------------------------------------------------------------


class _Header(msgspec.Struct, omit_defaults=True):
    format: str
    version: int
    layers: int
    experts: int
    model: str = ""
    ranks: int = 0
    top_k: int = 0
    source: str = ""
    layer_ids: list[int] = []


class _Record(msgspec.Struct):
    step: int
    steps: int
    tokens: int
    load: list[list[float]]


def read_trace(path: str | Path, progress: Progress | None = None, skip_cut_line: bool = False) -> Trace:
    """Read either native form; which one is told by its first bytes.

    skip_cut_line: a last line that a recording left half written is dropped instead of refused.
    Raises ValueError, one line with file, line and field, for what cannot be read.
    """
    path = Path(path)
    with open_file(path) as stream:
        head = stream.read(4)
        stream.seek(0)
        if head.startswith(b"PK"):
            return _read_npz(path)
        return _read_lines(path, stream, progress, skip_cut_line)


def _read_lines(path: Path, stream: BinaryIO, progress: Progress | None, skip_cut_line: bool) -> Trace:
    size = path.stat().st_size
    header: _Header | None = None
    loads: list[Floats] = []
    columns: list[tuple[int, int, int]] = []
    done = 0
    for number, line in enumerate(stream, start=1):
        done += len(line)
        where = f"{path}:{number}"
        if not line.strip():
            continue
        if header is None:
            header = _header(line, where)
            continue
        try:
            record = _record(line, where, header)
        except ValueError as error:
            if line.endswith(b"\n") or done < size:
                raise
            if skip_cut_line:
                break
            raise ValueError(f"{error} (the last line is cut off; --skip-cut-line leaves it out)") from None
        loads.append(narrow(np.array(record.load, dtype=np.float64)))
        check_load(loads[-1], where)
        columns.append((record.step, record.steps, record.tokens))
        if progress:
            progress(done, size)
    if header is None:
        raise ValueError(f"{path} is empty; a trace begins with a header line")
    if not loads:
        raise ValueError(f"{path} has a header but no record")
    step, steps, tokens = (list(column) for column in zip(*columns, strict=True))
    return make_trace(np.stack(loads), _meta(header), step, steps, tokens, str(path))


def _header(line: bytes, where: str) -> _Header:
    return _check_header(decode_json(line, _Header, f"{where}: this is no header of a trace"), where)


def _check_header(header: _Header, where: str) -> _Header:
    if header.format != FORMAT or header.version != VERSION:
        raise ValueError(
            f'{where}: format is "{header.format}" version {header.version}; this reads "{FORMAT}" version {VERSION}'
        )
    for name, value in (("layers", header.layers), ("experts", header.experts)):
        if not 1 <= value <= _MAX_SIDE:
            raise ValueError(f"{where}: {name} is {value}; it must be 1 to {_MAX_SIDE}")
    if header.ranks < 0 or header.top_k < 0:
        raise ValueError(f"{where}: ranks is {header.ranks} and top_k {header.top_k}; they must be 0 or more")
    return header


def _meta(header: _Header) -> TraceMeta:
    return TraceMeta(header.model, header.ranks, header.top_k, header.source, tuple(header.layer_ids))


def _record(line: bytes, where: str, header: _Header) -> _Record:
    record: _Record = decode_json(line, _Record, where)
    if len(record.load) != header.layers:
        raise ValueError(f"{where}: load has {len(record.load)} rows; the header says {header.layers} layers")
    for layer, row in enumerate(record.load):
        if len(row) != header.experts:
            raise ValueError(f"{where}: load[{layer}] has {len(row)} numbers; the header says {header.experts} experts")
    if record.steps < 1 or record.tokens < 0:
        raise ValueError(f"{where}: steps is {record.steps} and tokens {record.tokens}; they must be at least 1 and 0")
    return record


def _read_npz(path: Path) -> Trace:
    arrays = read_arrays(path)
    missing = [name for name in ("header", "load", "step", "steps", "tokens") if name not in arrays]
    if missing:
        raise ValueError(f"{path} has no array {missing[0]}; a trace has load, step, steps, tokens and header")
    header = _header(str(arrays["header"]).encode(), str(path))
    load, step, steps, tokens = (arrays[name] for name in ("load", "step", "steps", "tokens"))
    for name in ("step", "steps", "tokens"):
        if arrays[name].dtype.kind not in "iu":
            raise ValueError(f"{path}: {name} holds {arrays[name].dtype}, not whole numbers")
    if load.shape[1:] != (header.layers, header.experts):
        raise ValueError(
            f"{path}: load has shape {list(load.shape)}; the header says {header.layers} layers, "
            f"{header.experts} experts"
        )
    return make_trace(load, _meta(header), step, steps, tokens, str(path))


# ---- writing -----------------------------------------------------------------------------------------------------


def header_line(meta: TraceMeta, num_layers: int, num_experts: int) -> bytes:
    """The first line of the JSON lines form, with its newline."""
    header = _Header(
        FORMAT, VERSION, num_layers, num_experts, meta.model, meta.ranks, meta.top_k, meta.source, list(meta.layer_ids)
    )
    return msgspec.json.encode(header) + b"\n"


def record_line(step: int, steps: int, tokens: int, load_LE: npt.NDArray[Any]) -> bytes:
    """One record of the JSON lines form, with its newline; load_LE: [L, E], whole numbers are written as such."""
    if load_LE.dtype.kind == "f" and np.array_equal(load_LE, np.rint(load_LE)):
        load_LE = load_LE.astype(np.int64)
    # float64 first: float32 would print with float32's digits, which other readers take for another number.
    rows = (load_LE.astype(np.float64) if load_LE.dtype.kind == "f" else load_LE).tolist()
    return msgspec.json.encode(_Record(step, steps, tokens, rows)) + b"\n"


def trace_lines(trace: Trace) -> Iterable[bytes]:
    """The JSON lines form, line by line."""
    yield header_line(trace.meta, trace.num_layers, trace.num_experts)
    for index in range(trace.num_records):
        step, steps, tokens = int(trace.step[index]), int(trace.steps[index]), int(trace.tokens[index])
        yield record_line(step, steps, tokens, trace.load[index])


def write_trace(path: str | Path, trace: Trace, progress: Progress | None = None) -> None:
    """Write .npz where the name ends so, else JSON lines. The file appears whole or not at all."""
    path = Path(path)
    with replacing(path) as stream:
        if path.suffix == ".npz":
            _write_npz(stream, trace)
            return
        for index, line in enumerate(trace_lines(trace)):
            stream.write(line)
            if progress:
                progress(index, trace.num_records)


def _write_npz(stream: BinaryIO, trace: Trace) -> None:
    """numpy's own writer compresses at a level that takes five times as long for the same size."""
    header = header_line(trace.meta, trace.num_layers, trace.num_experts).decode().strip()
    arrays = {"load": _packed(trace.load), "step": trace.step, "steps": trace.steps, "tokens": trace.tokens}
    with zipfile.ZipFile(stream, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
        for name, array in {"header": np.array(header), **arrays}.items():
            with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
                np.lib.format.write_array(member, array, allow_pickle=False)


def _packed(load: Floats) -> npt.NDArray[Any]:
    """The smallest whole numbers that hold the loads, or the loads themselves: a quarter of the file."""
    top = float(load.max())
    if top >= 2**53 or not np.array_equal(load, np.rint(load)):
        return load
    return load.astype(np.uint16 if top < 1 << 16 else np.uint32 if top < 1 << 32 else np.uint64)
