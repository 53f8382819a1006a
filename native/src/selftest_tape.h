// The part of selftest.cpp for tapes and what is mostly on them. Included in its namespace's file.
#include <algorithm>

#include "rows.h"
#include "tape.h"

NATIVE_API void tape_new(Tape **tape);
NATIVE_API void tape_free(Tape *tape);
NATIVE_API void tape_begin(Tape *tape);
NATIVE_API void tape_end(Tape *tape, const char **refused);
NATIVE_API void tape_play(const Tape *tape, int threads, TapeStop *stop);
NATIVE_API void rows_add(int x_type, const void *x, void *y, int64_t rows, int64_t dim, int threads);
NATIVE_API void rows_copy(const void *x, void *y, int64_t rows, int64_t bytes, int threads);
NATIVE_API void rows_gather(const void *table, int64_t table_rows, const int64_t *ids, void *y, int64_t rows, int64_t bytes, int threads);
NATIVE_API void rows_rope(int x_type, const int64_t *positions, const float *frequency, float scale, void *cos, void *sin, int64_t rows,
                          int64_t planes, int threads);
NATIVE_API void rows_dots(int x_type, const void *x, int64_t x_stride, const float *w, const float *bias, float *y, int64_t rows,
                          int64_t inputs, int64_t outputs, int threads);

namespace {

// Small rows at the ends of their memory, on a tape, played with the threads of one crew.
void test_tape(int x_type, int64_t rows, int64_t dim, int threads) {
  const int64_t item = x_type == X_F32 ? 4 : 2, planes = (dim + 1) / 2;
  Rows x(x_type, rows, dim, dim);
  std::vector<float> weight(dim * dim, .5f), bias(dim), y(rows * dim), frequency(planes, .1f);
  std::vector<int64_t> ids, positions(rows, 3);
  for (int64_t i = 0; i < rows; i++) ids.push_back(rows - 1 - i);
  std::vector<uint8_t> taken(rows * dim * item), sum(rows * dim * item), cos(rows * 2 * planes * item), sin(rows * 2 * planes * item);
  Tape *tape;
  const char *refused;
  tape_new(&tape);
  tape_begin(tape);
  rows_gather(x.bytes.data(), rows, ids.data(), taken.data(), rows, dim * item, threads);
  rows_copy(taken.data(), sum.data(), rows, dim * item, threads);
  rows_add(x_type, taken.data(), sum.data(), rows, dim, threads);
  rows_dots(x_type, taken.data(), dim, weight.data(), bias.data(), y.data(), rows, dim, dim, threads);
  rows_rope(x_type, positions.data(), frequency.data(), 2, cos.data(), sin.data(), rows, planes, threads);
  for (int i = 0; i < 40; i++) rows_copy(x.bytes.data(), taken.data(), rows, dim * item, threads);  // the tape grows
  tape_end(tape, &refused);
  for (int round = 0; round < 3; round++) {
    ids.assign(rows, round < rows ? round : 0);
    std::fill(y.begin(), y.end(), 0.f);
    TapeStop stop = {};
    tape_play(tape, threads, &stop);
    for (int64_t t = 0; t < rows; t++) {
      float wanted = 0;
      for (int64_t d = 0; d < dim; d++) {
        wanted += .5f * x.value[ids[t]][d];
        expect_near(read(sum, x_type, t * dim + d), 2 * x.value[ids[t]][d], 0, "added");
      }
      for (int64_t d = 0; d < dim; d++) expect_near(y[t * dim + d], wanted, (float)dim, "dots");
    }
  }
  for (int64_t i = 0; i < rows * 2 * planes; i++) expect_near(read(cos, x_type, i), 2 * cosf(.3f), 1, "cos");
  tape_free(tape);
}

int test_tapes() {
  int count = 0;
  for (int threads : {1, 2, 3})
    for (int x_type : {X_F32, X_BF16})
      for (int64_t rows : {0, 1, 5, 700})
        for (int64_t dim : {1, 7, 32, 66}) test_tape(x_type, rows, dim, threads), count++;
  return count;
}

}  // namespace
