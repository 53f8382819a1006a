// 16 rows of a matrix, all of them there, into their places in a panel of experts.h: transposed in registers of 16 bytes, which every
// CPU has. Rows are taken in pieces of a cache line: their distance is often a power of two, and then few of them fit into the cache.
#pragma once
#include <stdint.h>
#include <string.h>

namespace {

typedef uint16_t Pairs8 __attribute__((vector_size(16)));
typedef uint32_t Pairs4 __attribute__((vector_size(16)));
typedef int8_t Bytes16 __attribute__((vector_size(16)));

enum { LINE = 64, AHEAD = 256 };  // the latter: bytes of a row that are asked for early; the processor loses track of 16 rows

template <class T> inline T load16(const uint8_t *at) {
  T x;
  memcpy(&x, at, 16);
  return x;
}

// Codes of 8 inputs, the first in the lowest bits, as a lane of a panel has them. T: uint32_t, or several.
template <class T> inline T lane_of(T codes) {
  T even = codes & 0x0f0f0f0f, odd = codes >> 4 & 0x0f0f0f0f;
  even = (even | even >> 4) & 0x00ff00ff, odd = (odd | odd >> 4) & 0x00ff00ff;
  return ((even | even >> 8) & 0xffff) | (odd | odd >> 8) << 16;
}

// n words of 4 bytes (a multiple of 4) of each row: pairs of bfloat16, or codes; word p of row i goes to `to + p * step + i * 4`.
template <bool CODES> inline void place_words(const uint8_t *rows, int64_t stride, int64_t n, int64_t step, uint8_t *to) {
  for (int64_t p0 = 0; p0 < n; p0 += 16) {
    alignas(64) uint8_t tile[16][LINE];
    int64_t count = n - p0 < 16 ? n - p0 : 16;
    for (int i = 0; i < 16; i++) {
      const uint8_t *from = rows + i * stride + p0 * 4;
      if (count == 16) memcpy(tile[i], from, LINE);
      else memcpy(tile[i], from, count * 4);
      __builtin_prefetch(from + AHEAD);
    }
    for (int64_t p = 0; p < count; p += 4)
      for (int i = 0; i < 16; i += 4) {
        Pairs4 a = load16<Pairs4>(tile[i] + p * 4), b = load16<Pairs4>(tile[i + 1] + p * 4);
        Pairs4 c = load16<Pairs4>(tile[i + 2] + p * 4), d = load16<Pairs4>(tile[i + 3] + p * 4);
        if (CODES) a = lane_of(a), b = lane_of(b), c = lane_of(c), d = lane_of(d);
        Pairs4 ab = __builtin_shuffle(a, b, (Pairs4){0, 4, 1, 5}), cd = __builtin_shuffle(c, d, (Pairs4){0, 4, 1, 5});
        Pairs4 ab2 = __builtin_shuffle(a, b, (Pairs4){2, 6, 3, 7}), cd2 = __builtin_shuffle(c, d, (Pairs4){2, 6, 3, 7});
        Pairs4 out[4] = {__builtin_shuffle(ab, cd, (Pairs4){0, 1, 4, 5}), __builtin_shuffle(ab, cd, (Pairs4){2, 3, 6, 7}),
                         __builtin_shuffle(ab2, cd2, (Pairs4){0, 1, 4, 5}), __builtin_shuffle(ab2, cd2, (Pairs4){2, 3, 6, 7})};
        for (int at = 0; at < 4; at++) memcpy(to + (p0 + p + at) * step + i * 4, &out[at], 16);
      }
  }
}

// Bytes of two's complement as sign and magnitude; -128 becomes -127.
inline Bytes16 sign_and_magnitude(Bytes16 x) {
  Bytes16 sign = x >> 7, size = (x ^ sign) - sign;
  size -= size >> 7 & 1;  // 128, which is no magnitude: 127
  return size | (sign & (int8_t)0x80);
}

// n bytes (a multiple of 16) of each row; the pair of bytes p of row i goes to `to + p * 128 + i / 4 * 16 + i % 4 * 2`.
inline void place_bytes(const uint8_t *rows, int64_t stride, int64_t n, bool is_signed, uint8_t *to) {
  for (int64_t k0 = 0; k0 < n; k0 += LINE) {
    alignas(64) uint8_t tile[16][LINE];
    int64_t count = n - k0 < LINE ? n - k0 : (int64_t)LINE;
    for (int i = 0; i < 16; i++) {
      if (count == LINE) memcpy(tile[i], rows + i * stride + k0, LINE);
      else memcpy(tile[i], rows + i * stride + k0, count);
    }
    for (int64_t k = 0; k < count; k += 16)
      for (int half = 0; half < 2; half++) {
        Pairs8 x[8], y[8];
        for (int i = 0; i < 8; i++) {
          Bytes16 row = load16<Bytes16>(tile[half * 8 + i] + k);
          x[i] = (Pairs8)(is_signed ? sign_and_magnitude(row) : row);
        }
        const Pairs8 low = {0, 8, 1, 9, 2, 10, 3, 11}, high = {4, 12, 5, 13, 6, 14, 7, 15};
        // Rows i and i + 4 are interleaved, three times: then register p has number p of all rows.
        for (int turn = 0; turn < 3; turn++) {
          for (int i = 0; i < 4; i++) {
            y[2 * i] = __builtin_shuffle(x[i], x[i + 4], low);
            y[2 * i + 1] = __builtin_shuffle(x[i], x[i + 4], high);
          }
          for (int i = 0; i < 8; i++) x[i] = y[i];
        }
        for (int p = 0; p < 8; p++) {
          uint8_t *at = to + ((k0 + k) / 2 + p) * 128 + half * 32;
          memcpy(at, &x[p], 8);
          memcpy(at + 16, (const uint8_t *)&x[p] + 8, 8);
        }
      }
  }
}

}  // namespace
