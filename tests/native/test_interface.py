"""The library says from which declarations it was built, so that one that is older than the code is refused, not run."""

from __future__ import annotations

import ctypes
import re
import zlib
from pathlib import Path

import pytest

from native.library import INTERFACE, check_interface, library

SOURCES = Path(__file__).resolve().parents[2] / "native" / "src"
_DECLARED = re.compile(r"^NATIVE_API\b([^;{]*)", re.MULTILINE)


def checksum() -> int:
    """Of all functions that the library offers: what they return, their names and their arguments."""
    texts = (path.read_text() for path in SOURCES.iterdir() if path.suffix in (".cpp", ".h"))
    declared = {re.sub(r"\s+", "", found) for text in texts for found in _DECLARED.findall(text)}
    return zlib.crc32("\n".join(sorted(declared)).encode())


def test_the_number_is_that_of_the_declarations() -> None:
    written = re.search(r"#define NATIVE_INTERFACE (0x[0-9a-f]+)", (SOURCES / "interface.h").read_text())
    number = checksum()
    assert written is not None and int(written[1], 16) == INTERFACE == number, (
        f"declarations have changed: write {number:#010x} into native/src/interface.h and native/library.py"
    )


def test_a_library_of_other_declarations_is_refused() -> None:
    kernels = library()
    if kernels is None:
        pytest.skip("there is no library")
    check_interface(kernels)
    with pytest.raises(
        ImportError, match=f"interface {INTERFACE:#x}, not 0x1: it is older than the code; run `make native`"
    ):
        check_interface(kernels, 1)
    with pytest.raises(ImportError, match="interface without a number"):
        check_interface(ctypes.CDLL(None))
