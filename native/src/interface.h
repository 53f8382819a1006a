// The number of the library's interface: a checksum of how its functions are declared (tests/native/test_interface.py says
// which, and fails when they have changed). native/library.py has the same, and refuses a library that was built with another.
#pragma once

#define NATIVE_INTERFACE 0x00591098
