// The innermost loops of products of integer codes, for AVX2: tiles of 6 rows and 16 columns.
//
// Operands come packed in steps of 32 bits: two 16-bit codes or four 8-bit codes that follow one another in a row of a
// or a column of b. The same step of all rows of a tile lies side by side, and so does that of all its columns.
//
// The loops are in assembler because compilers keep moving the twelve sums to memory and back: with intrinsics, the
// code of g++ 12 takes 1.4 times as long.

#pragma once

#include <cstdint>

#include "walk.h"

#if defined(__AVX2__) && defined(__x86_64__) && defined(__GNUC__)
#define FRACTRAIN_FX_TILES 1

#ifdef __AVX512VNNI__

#include "tiles_vnni.h"

#else

namespace fractrain_fx {

constexpr int kTileColumns = 16;

// The instruction for bytes sums two products in 16 bits.
constexpr bool kPairsIn16Bits = true;

#define FX_ZERO(n) "vpxor %%ymm" #n ", %%ymm" #n ", %%ymm" #n "\n\t"
#define FX_ZEROS                                                                                             \
  FX_ZERO(0) FX_ZERO(1) FX_ZERO(2) FX_ZERO(3) FX_ZERO(4) FX_ZERO(5) FX_ZERO(6) FX_ZERO(7) FX_ZERO(8) FX_ZERO(9) \
  FX_ZERO(10) FX_ZERO(11)

// One row: its step is multiplied by those of all columns, in ymm12 and ymm13.
#define FX_ROW(multiply, widen, add, place, left, right) \
  "vpbroadcastd " place ", %%ymm14\n\t"                  \
  multiply " %%ymm12, %%ymm14, %%ymm15\n\t"              \
  multiply " %%ymm13, %%ymm14, %%ymm14\n\t"              \
  widen                                                  \
  add " %%ymm15, %%ymm" #left ", %%ymm" #left "\n\t"     \
  add " %%ymm14, %%ymm" #right ", %%ymm" #right "\n\t"

#define FX_STEP(multiply, widen, add)                                                             \
  "vmovdqu (%[b]), %%ymm12\n\t"                                                                   \
  "vmovdqu 32(%[b]), %%ymm13\n\t"                                                                 \
  FX_ROW(multiply, widen, add, "(%[a])", 0, 1) FX_ROW(multiply, widen, add, "(%[a], %[r1])", 2, 3) \
  FX_ROW(multiply, widen, add, "(%[a], %[r2])", 4, 5)                                             \
  FX_ROW(multiply, widen, add, "(%[a], %[r3])", 6, 7)                                             \
  FX_ROW(multiply, widen, add, "(%[a], %[r4])", 8, 9)                                             \
  FX_ROW(multiply, widen, add, "(%[a], %[r5])", 10, 11)

// Adds one vector of sums to those in memory.
#define FX_PUT(n, place, prepare)                  \
  prepare(n)                                       \
  "vpaddd " #place "(%[out]), %%ymm" #n ", %%ymm" #n "\n\t" \
  "vmovdqu %%ymm" #n ", " #place "(%[out])\n\t"
#define FX_PUTS(prepare)                                                                          \
  FX_PUT(0, 0, prepare) FX_PUT(1, 32, prepare) FX_PUT(2, 64, prepare) FX_PUT(3, 96, prepare)      \
  FX_PUT(4, 128, prepare) FX_PUT(5, 160, prepare) FX_PUT(6, 192, prepare) FX_PUT(7, 224, prepare) \
  FX_PUT(8, 256, prepare) FX_PUT(9, 288, prepare) FX_PUT(10, 320, prepare) FX_PUT(11, 352, prepare)
#define FX_AS_IT_IS(n)
#define FX_PAIRS(n) "vpmaddwd %[ones], %%ymm" #n ", %%ymm" #n "\n\t"
#define FX_WIDEN                               \
  "vpmaddwd %[ones], %%ymm15, %%ymm15\n\t"     \
  "vpmaddwd %[ones], %%ymm14, %%ymm14\n\t"

#define FX_TILE(name, multiply, widen, add, prepare)                                                              \
  inline void name(const void* a, const void* b, const Walk& walk, int32_t* out) {                                \
    int64_t steps, lines;                                                                                         \
    asm volatile(FX_ZEROS FX_LINES(FX_STEP(multiply, widen, add)) FX_PUTS(prepare)                                \
                 FX_OPERANDS, [out] "r"(out), [ones] "m"(kOnes)                                                   \
                 : "memory", "cc", "ymm0", "ymm1", "ymm2", "ymm3", "ymm4", "ymm5", "ymm6", "ymm7", "ymm8", "ymm9", \
                   "ymm10", "ymm11", "ymm12", "ymm13", "ymm14", "ymm15");                                         \
  }

struct alignas(32) Ones {
  int16_t each[16];
};
constexpr Ones kOnes{{1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1}};

// Each tile adds the products of at least one step to out, 6 rows of 16 sums.
// Steps of two 16-bit codes, whose products are summed in 32 bits.
FX_TILE(tile_shorts, "vpmaddwd", "", "vpaddd", FX_AS_IT_IS)
// Steps of four bytes, unsigned in a. The sum of two products has to fit into 16 bits.
FX_TILE(tile_bytes, "vpmaddubsw", FX_WIDEN, "vpaddd", FX_AS_IT_IS)
// The same, summed in 16 bits over all steps, which the sums of pairs have to fit into.
FX_TILE(tile_small_bytes, "vpmaddubsw", "", "vpaddw", FX_PAIRS)

#undef FX_ZERO
#undef FX_ZEROS
#undef FX_ROW
#undef FX_STEP
#undef FX_PUT
#undef FX_PUTS
#undef FX_AS_IT_IS
#undef FX_PAIRS
#undef FX_WIDEN
#undef FX_TILE

}  // namespace fractrain_fx

#endif

#endif
