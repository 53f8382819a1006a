"""Whatever the header of a weights file says, it is read or refused in one line that names the file and the key."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from layers.safetensors_file import SafetensorsFile
from layers.weights import CheckpointError

pytestmark = pytest.mark.attacks


def write(path: Path, header: bytes, data: bytes = bytes(16)) -> Path:
    path.write_bytes(len(header).to_bytes(8, "little") + header + data)
    return path


def refused(path: Path) -> str:
    with pytest.raises(CheckpointError) as raised:
        SafetensorsFile(path)
    message = str(raised.value)
    assert "\n" not in message and str(path) in message and len(message) < 1000
    message.encode()  # any terminal can show it
    return message


def entry(shape: Any, offsets: Any, dtype: Any = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


@pytest.mark.parametrize(
    ("entries", "says"),
    [
        ({"a": entry([-1, -1], [0, 4])}, "a: shape must be"),
        ({"a": entry([1 << 62, 0, 1 << 62], [0, 0])}, "a: shape must be"),
        ({"a": entry([1 << 64], [0, 4])}, "a: shape must be"),
        ({"a": entry([1] * 65, [0, 4])}, "a: shape must be at most 64"),
        ({"a": entry([True], [0, 4])}, "a: shape must be"),
        ({"a": entry([1.0], [0, 4])}, "a: shape must be"),
        ({"a": entry({"0": 1}, [0, 4])}, "a: shape must be"),
        ({"a": entry([1], [0, 4, 8])}, "a: data_offsets must be"),
        ({"a": entry([1], [-4, 0])}, "a: data_offsets must be"),
        ({"a": entry([1], ["0", "4"])}, "a: data_offsets must be"),
        ({"a": entry([1], [4, 0])}, "a: -4 bytes do not hold"),
        ({"a": entry([1], [16, 20])}, "a: file is cut short"),
        ({"a": entry([1], [0, 4], ["F32"])}, "a: unknown dtype"),
        ({"a": entry([2], [0, 8]), "b": entry([2], [4, 12])}, "b: its bytes are also those of a"),
        ({"a": entry([2], [0, 8]), "b": entry([2], [0, 8])}, "its bytes are also those of"),
        ({"a\nb": entry([1], [16, 20])}, r"'a\nb': file is cut short"),
        ({"\ud800": entry([1], [16, 20])}, r"'\ud800': file is cut short"),
        ({"a": 3}, "a: corrupt entry"),
    ],
)
def test_a_crafted_entry_is_refused_by_name(tmp_path: Path, entries: dict[str, Any], says: str) -> None:
    assert says in refused(write(tmp_path / "m.safetensors", json.dumps(entries).encode()))


@pytest.mark.parametrize(
    ("header", "says"),
    [
        (b"[" * 200_000, "RecursionError"),
        (b'{"a":' * 200_000, "RecursionError"),
        (b'{"a": {"dtype": "F32", "shape": [' + b"9" * 5000 + b'], "data_offsets": [0, 4]}}', "corrupt"),
        (b'{"a": 1, "a": 2}', "a: comes twice"),
        (b'{"a": {"dtype": "F32", "dtype": "F16", "shape": [], "data_offsets": [0, 4]}}', "dtype: comes twice"),
        (b"[]", "it is no object"),
        (b"null", "it is no object"),
        (b"", "corrupt"),
    ],
)
def test_a_crafted_header_is_refused(tmp_path: Path, header: bytes, says: str) -> None:
    assert says in refused(write(tmp_path / "m.safetensors", header))


def test_what_is_in_order_is_read(tmp_path: Path) -> None:
    entries = {
        "__metadata__": {"format": "pt"},
        "a": entry([2], [0, 8]),
        "nothing": entry([0, 5], [4, 4]),
        "b": entry([], [8, 12]),
    }
    file = SafetensorsFile(write(tmp_path / "m.safetensors", json.dumps(entries).encode()))
    assert {name: file.view(name).shape for name in file.entries} == {"a": (2,), "nothing": (0, 5), "b": ()}


NUMBERS = st.one_of(
    st.integers(-2, 20), st.sampled_from([1 << 31, 1 << 62, (1 << 63) - 1, 1 << 63, 1 << 200, 0.5, None, "1"])
)
VALUES = st.recursive(
    st.one_of(NUMBERS, st.booleans(), st.text(max_size=3)),
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(st.text(max_size=3), inner, max_size=3)),
    max_leaves=8,
)
ENTRIES = st.fixed_dictionaries(
    {
        "dtype": st.one_of(st.sampled_from(["F32", "U8", "F8_E4M3", "BF16", "F31"]), VALUES),
        "shape": st.one_of(st.lists(NUMBERS, max_size=5), VALUES),
        "data_offsets": st.one_of(st.lists(NUMBERS, min_size=2, max_size=2), VALUES),
    }
)
HEADERS = st.one_of(
    st.dictionaries(st.sampled_from(["a", "b", "__metadata__", ""]), st.one_of(ENTRIES, VALUES), max_size=4).map(
        lambda value: json.dumps(value).encode()
    ),
    st.binary(max_size=40),
)


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(header=HEADERS, data=st.integers(0, 40), claims=st.one_of(st.none(), st.integers(0, (1 << 64) - 1)))
@example(header=b'{"a":{"dtype":"U8","shape":[0,9223372036854775807],"data_offsets":[0,0]}}', data=0, claims=None)
def test_a_header_is_read_or_refused(tmp_path: Path, header: bytes, data: int, claims: int | None) -> None:
    """Nothing but CheckpointError, and what is taken can be read."""
    path = write(tmp_path / "m.safetensors", header, bytes(data))
    if claims is not None:  # the length of the header is what it likes
        path.write_bytes(claims.to_bytes(8, "little") + header + bytes(data))
    try:
        file = SafetensorsFile(path)
    except CheckpointError as error:
        assert str(path) in str(error) and "\n" not in str(error)
        return
    for name in file.entries:
        file.view(name).clone()
        file.release(name)
