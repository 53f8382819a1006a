// What was chosen among the ways to multiply rows of bfloat16 (choice.cpp); native/choice.py has the same fields.
#pragma once
#include "native.h"

enum { FEW_NARROW_ROWS = 1, FEW_BYTE_ROWS = 4, FEW_HALF_ROWS = 12 };

struct KernelChoice {
  int64_t products;     // instruction set of products by panels of bfloat16, or the limit if that is less
  int64_t narrow_rows;  // where that is ISA_AMX or ISA_AVX2, or with `whole`: with up to so many rows FP8 weights are widened in vector registers all the same
  int64_t byte_rows;    // with ISA_AMX up to so many rows are multiplied with INT8 weights as whole numbers; else as narrow_rows
  int64_t half_rows;    // the same of 4-bit weights, whatever the instruction set
  int64_t whole;        // not 0: with AVX512-VNNI and no matrix tiles any number of rows are whole numbers, of INT8 and of 4 bits, with the same sums
  int64_t fixed_order;  // not 0: the numbers of a sum are added in an order that does not depend on how many rows there are
};

const KernelChoice &kernel_choice(void);

// With up to how many rows of x_type panels of `format` (experts.h) are widened in vector registers. In a fixed order none, but where more
// rows have the same sums: those of bfloat16 with AVX2, or as whole numbers.
int64_t narrow_rows_of(int64_t x_type, int64_t format);
