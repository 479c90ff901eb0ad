// The innermost loops of products of integer codes, for AVX-512's dot products: tiles of 6 rows and 64 columns.
//
// tiles.h says how operands are packed, and why the loops are in assembler.

#pragma once

#include <cstdint>

#include "walk.h"

namespace fractrain_fx {

constexpr int kTileColumns = 64;

// The instruction for bytes sums four products in 32 bits.
constexpr bool kPairsIn16Bits = false;

#define FX_EACH(run)                                                                                             \
  run(0, 0) run(1, 64) run(2, 128) run(3, 192) run(4, 256) run(5, 320) run(6, 384) run(7, 448) run(8, 512)       \
  run(9, 576) run(10, 640) run(11, 704) run(12, 768) run(13, 832) run(14, 896) run(15, 960) run(16, 1024)        \
  run(17, 1088) run(18, 1152) run(19, 1216) run(20, 1280) run(21, 1344) run(22, 1408) run(23, 1472)
#define FX_GET(n, place) "vmovdqu64 " #place "(%[out]), %%zmm" #n "\n\t"
#define FX_PUT(n, place) "vmovdqu64 %%zmm" #n ", " #place "(%[out])\n\t"

// One row: its step is multiplied by those of all columns, in zmm24 to zmm27.
#define FX_ROW(multiply, place, step, n0, n1, n2, n3)   \
  "vpbroadcastd " place ", %%zmm" #step "\n\t"          \
  multiply " %%zmm24, %%zmm" #step ", %%zmm" #n0 "\n\t" \
  multiply " %%zmm25, %%zmm" #step ", %%zmm" #n1 "\n\t" \
  multiply " %%zmm26, %%zmm" #step ", %%zmm" #n2 "\n\t" \
  multiply " %%zmm27, %%zmm" #step ", %%zmm" #n3 "\n\t"

#define FX_TILE(name, multiply)                                                                                   \
  inline void name(const void* a, const void* b, const Walk& walk, int32_t* out) {                                \
    int64_t steps, lines;                                                                                         \
    asm volatile(FX_EACH(FX_GET) FX_LINES(                                                                        \
        "vmovdqu64 (%[b]), %%zmm24\n\t"                                                                           \
        "vmovdqu64 64(%[b]), %%zmm25\n\t"                                                                         \
        "vmovdqu64 128(%[b]), %%zmm26\n\t"                                                                        \
        "vmovdqu64 192(%[b]), %%zmm27\n\t"                                                                        \
        FX_ROW(multiply, "(%[a])", 28, 0, 1, 2, 3) FX_ROW(multiply, "(%[a], %[r1])", 29, 4, 5, 6, 7)              \
        FX_ROW(multiply, "(%[a], %[r2])", 30, 8, 9, 10, 11) FX_ROW(multiply, "(%[a], %[r3])", 31, 12, 13, 14, 15) \
        FX_ROW(multiply, "(%[a], %[r4])", 28, 16, 17, 18, 19)                                                     \
        FX_ROW(multiply, "(%[a], %[r5])", 29, 20, 21, 22, 23)) FX_EACH(FX_PUT)                                    \
                 FX_OPERANDS, [out] "r"(out)                                                                      \
                 : "memory", "cc", "zmm0", "zmm1", "zmm2", "zmm3", "zmm4", "zmm5", "zmm6", "zmm7", "zmm8", "zmm9", \
                   "zmm10", "zmm11", "zmm12", "zmm13", "zmm14", "zmm15", "zmm16", "zmm17", "zmm18", "zmm19",      \
                   "zmm20", "zmm21", "zmm22", "zmm23", "zmm24", "zmm25", "zmm26", "zmm27", "zmm28", "zmm29",      \
                   "zmm30", "zmm31");                                                                             \
  }

// Each tile adds the products of at least one step to out, 6 rows of 64 sums.
// Steps of two 16-bit codes.
FX_TILE(tile_shorts, "vpdpwssd")
// Steps of four bytes, unsigned in a.
FX_TILE(tile_bytes, "vpdpbusd")
// The dot product sums in 32 bits already, so sums in 16 bits would gain nothing.
constexpr auto tile_small_bytes = tile_bytes;

#undef FX_EACH
#undef FX_GET
#undef FX_PUT
#undef FX_ROW
#undef FX_TILE

}  // namespace fractrain_fx
