// Products of bands of rows and panels, with matrix tiles as plain loops (-DTILE_MODEL): what is read and in which order is tested on any
// CPU, and the sanitizers see it. The memory is of just the size that experts.h says.
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

#include <vector>

#include "selftest_numbers.h"

namespace {

int failures = 0, cases = 0;

struct Inputs {
  int64_t rows, depth, stride;  // the last in numbers
  std::vector<bf16> a, panel;
  Inputs(int64_t rows, int64_t depth, int64_t gap) : rows(rows), depth(depth), stride((depth + TILE_K - 1) / TILE_K * TILE_K + gap) {
    a.resize((rows - 1) * stride + stride - gap, 0x7fc0);  // NaN between the rows
    for (int64_t m = 0; m < rows; m++)
      for (int64_t k = 0; k < stride - gap; k++) a[m * stride + k] = k < depth ? rounded(number()) : 0;
    for (int64_t i = 0; i < depth * PANEL; i++) panel.push_back(rounded(number()));
  }
  // The product of row m and column j, from k0 to k1.
  double product(int64_t m, int64_t j, int64_t k0, int64_t k1) const {
    double sum = 0;
    for (int64_t k = k0; k < k1; k++) sum += (double)widened(a[m * stride + k]) * widened(panel[k / 2 * 2 * PANEL + 2 * j + k % 2]);
    return sum;
  }
  double product(int64_t m, int64_t j) const { return product(m, j, 0, depth); }
};

void expect(const std::vector<float> &c, int64_t m, int64_t j, double wanted, const char *what) {
  float got = c[m * PANEL + j];
  if (fabs(got - wanted) <= 1e-4 * (1 + fabs(wanted))) return;
  if (failures++ < 5) printf("%s: row %d column %d: %g instead of %g\n", what, (int)m, (int)j, got, wanted);
}

void test_plain(int64_t rows, int64_t depth, int64_t gap) {
  Inputs in(rows, depth, gap);
  std::vector<float> c(rows * PANEL, NAN);
  for (int times = 1; times <= 2; times++) {
    Ahead ahead = {};
    bands_amx->plain((const uint8_t *)in.a.data(), in.stride * 2, rows, (const uint8_t *)in.panel.data(), depth, times > 1, &ahead, c.data());
    for (int64_t m = 0; m < rows; m++)
      for (int64_t j = 0; j < PANEL; j++) expect(c, m, j, times * in.product(m, j), "plain");
  }
  bands_amx->release();
  cases++;
}

void test_scaled(int64_t rows, int64_t depth) {
  Inputs in(rows, depth, 0);
  std::vector<float> c(rows * PANEL, NAN);
  int64_t num_blocks = (depth + K_BLOCK - 1) / K_BLOCK;
  std::vector<uint8_t> blocks(num_blocks * PANEL * 4 + depth * PANEL * 2);
  std::vector<float> scale;
  uint8_t *at = blocks.data();
  for (int64_t k = 0; k < depth; k += K_BLOCK) {
    int64_t bytes = (depth - k < K_BLOCK ? depth - k : (int64_t)K_BLOCK) * PANEL * 2;
    for (int j = 0; j < PANEL; j++) scale.push_back(number());
    memcpy(at, scale.data() + scale.size() - PANEL, PANEL * 4), at += PANEL * 4;
    memcpy(at, in.panel.data() + k * PANEL, bytes), at += bytes;
  }
  for (int times = 1; times <= 2; times++) {
    Ahead ahead = {};
    bands_amx->scaled((const uint8_t *)in.a.data(), in.stride * 2, rows, blocks.data(), depth, times > 1, &ahead, c.data());
    for (int64_t m = 0; m < rows; m++)
      for (int64_t j = 0; j < PANEL; j++) {
        double sum = 0;
        for (int64_t k = 0; k < depth; k += K_BLOCK) sum += in.product(m, j, k, k + K_BLOCK < depth ? k + K_BLOCK : depth) * scale[k / K_BLOCK * PANEL + j];
        expect(c, m, j, times * sum, "scaled");
      }
  }
  bands_amx->release();
  cases++;
}

void test_far() {
  alignas(64) float c[3 * PANEL];
  alignas(64) bf16 y[3 * PANEL];
  void *to[3] = {y + 2 * PANEL, y, y + PANEL};
  for (float &x : c) x = number();
  bands_amx->far(c, 3, to);
  for (int m = 0; m < 3; m++)
    for (int j = 0; j < PANEL; j++)
      if (((bf16 *)to[m])[j] != rounded(c[m * PANEL + j]) && failures++ < 5) printf("far: row %d column %d\n", m, j);
  cases++;
}

}  // namespace

int main() {
  test_far();
  for (int64_t rows : {1, 2, 15, 16, 17, 31, 32, 33, 47, 48, 49, 64, 95, 96})
    for (int64_t depth : {2, 30, 32, 34, 128, 510, 546, 1030}) {
      test_plain(rows, depth, depth % 3 * 16);
      test_scaled(rows, depth);
    }
  printf("%d cases, %d numbers wrong\n", cases, failures);
  return failures != 0;
}
