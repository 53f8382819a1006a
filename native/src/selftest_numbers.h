// Numbers that the programs of tests/native/test_sanitized.py compute with.
#pragma once

#include <cstring>

#include "experts.h"

namespace {

uint32_t state = 1;
float number() {
  state = state * 1664525 + 1013904223;
  return (float)(state >> 8) / (1 << 23) - 1;
}

bf16 rounded(float x) {
  uint32_t bits;
  memcpy(&bits, &x, 4);
  return (bf16)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}
float widened(bf16 x) {
  uint32_t bits = (uint32_t)x << 16;
  float y;
  memcpy(&y, &bits, 4);
  return y;
}

}  // namespace
