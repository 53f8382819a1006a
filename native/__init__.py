"""CPU kernels in C++, in one shared library with a plain C interface. Absent library = torch reference everywhere.

How to add a kernel
 1. native/src/NAME.cpp: `NATIVE_API void name(...)`, plain C types and pointers, all sizes as int64_t, the number of
    threads as its last argument (`team`, src/team.h, shares work among them; callers pass torch.get_num_threads()). No
    link against torch. Nothing is allocated per call but from `scratch` (src/scratch.h), which keeps its memory.
 2. One file per instruction set, NAME_avx2.cpp and so on, each with `#pragma GCC target(...)` before its includes (see
    src/experts_*.cpp); shared text goes into a header that all include inside an anonymous namespace. NAME.cpp chooses
    by vector_isa() at every call, and takes matrix tiles (src/tiles.h) where has_tiles(). In those files use no
    templates of the C++ standard library (src/native.h says why).
 3. Add the sources to `ext-modules` in pyproject.toml. `make native` builds in place; pip install builds too.
 4. Call it from the room that owns the arithmetic, through `function(name, *argument types)`, declared
    once at the top of a file (see moe_kernels/packed.py). Where `isa()` is NONE the torch path runs; a test compares
    the two with odd sizes, no rows, one row, thousands of rows, NaN in everything that must not be read, and for every
    isa up to best_isa().
 5. Its first line is `tape_note(name, its arguments...)` (src/tape.h), so that a step in which it runs can be recorded;
    or `tape_refuse("name")` where its arguments say more about a step than its number of rows.
 6. What it is declared as is part of the library's number: tests/native/test_interface.py says which one to write into
    src/interface.h and library.py. A library with another number is refused when it is opened, not run.
 7. src/selftest.cpp runs it under AddressSanitizer (tests/native).
"""

from native.choice import Choice, choose, fixed_order, has_whole_numbers, measured, parse
from native.features import Isa, best_isa, isa, limit_isa
from native.library import function, library, why_absent

__all__ = [
    "Choice",
    "Isa",
    "best_isa",
    "choose",
    "fixed_order",
    "function",
    "has_whole_numbers",
    "isa",
    "library",
    "limit_isa",
    "measured",
    "parse",
    "why_absent",
]
