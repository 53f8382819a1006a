// Memory that a kernel works in, kept from call to call by the thread that called it.
#pragma once
#include <stddef.h>
#include <stdint.h>

// At least `bytes` bytes, aligned to 64; valid until this thread asks again. Their content is undefined.
uint8_t *scratch(size_t bytes);
