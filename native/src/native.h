// What every source file of the library shares. Nothing here may use the C++ standard library's templates: the files of one
// instruction set are compiled for it, and the linker may keep their copy of an inline function for all others.
#pragma once
#include <stddef.h>
#include <stdint.h>
#include <string.h>  // inside a namespace its functions would be calls: the compiler would not know them

#ifdef AVX512_FILE  // a file of that instruction set says so: GCC 12 does not, behind a pragma
#include <immintrin.h>
#endif

#define NATIVE_API extern "C" __attribute__((visibility("default")))

typedef uint16_t bf16;

// Instruction sets, each with all that the ones before it have (native/features.py has the same numbers).
enum Isa { ISA_NONE = 0, ISA_AVX2 = 1, ISA_AVX512 = 2, ISA_AVX512_BF16 = 3, ISA_AMX = 4 };

// The best one that may be used: the CPU's, unless native_limit_isa has lowered it.
NATIVE_API int native_isa(void);
NATIVE_API int native_best_isa(void);
NATIVE_API void native_limit_isa(int isa);

// What a kernel that runs uses of vector instructions: at most ISA_AVX512_BF16. With the limit ISA_NONE it is the CPU's best: what is
// packed already runs whatever the limit has become.
int vector_isa(void);
// Whether bfloat16 is multiplied on matrix tiles.
bool has_tiles(void);
bool has_vnni(void);  // products of bytes, AVX512-VNNI
