// The innermost loop of products of packed matrices for units that multiply whole tiles of bytes (AMX): 32 rows and 32
// columns, as four sums of 16 by 16.
//
// A step is four bytes, as in tiles.h. The steps of b lie as there: the same step of all columns side by side. Those of a
// lie tile by tile, 16 steps of each of 32 rows. Numbers of 16 bits are two planes of such tiles, 256 * high + low.

#pragma once

#include <cstdint>

#if defined(__AMX_TILE__) && defined(__AMX_INT8__)
#define FRACTRAIN_FX_UNITS 1

namespace fractrain_fx {

// Rows and columns of a tile, and steps that one instruction multiplies.
constexpr int kUnitRows = 32, kUnitColumns = 32;
constexpr int64_t kUnitSteps = 16;

// Bytes of the rows of a that one instruction multiplies.
constexpr int64_t kUnitBytes = 4 * kUnitSteps;

// While it lives, the thread's eight tile registers are 16 rows of 64 bytes.
class Units {
 public:
  Units() {
    struct alignas(64) Shapes {
      uint8_t palette = 1, others[15] = {};
      uint16_t bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
      uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
    };
    static constexpr Shapes kShapes;
    asm volatile("ldtilecfg %0" ::"m"(kShapes));
  }
  Units(const Units&) = delete;
  Units& operator=(const Units&) = delete;
  ~Units() { asm volatile("tilerelease"); }
};

// The sums of the products of `count` times 16 steps, at least once: 32 rows of 32.
#define FX_UNIT(name, multiply)                                                                              \
  inline void name(const void* a, const void* b, int64_t count, int32_t* out) {                              \
    asm volatile(                                                                                            \
        "tilezero %%tmm0\n\t"                                                                                \
        "tilezero %%tmm1\n\t"                                                                                \
        "tilezero %%tmm2\n\t"                                                                                \
        "tilezero %%tmm3\n\t"                                                                                \
        "1:\n\t"                                                                                             \
        "tileloadd (%[a], %[narrow]), %%tmm4\n\t"                                                            \
        "tileloadd (%[b], %[wide]), %%tmm6\n\t"                                                              \
        "tileloadd 64(%[b], %[wide]), %%tmm7\n\t" multiply " %%tmm6, %%tmm4, %%tmm0\n\t" multiply            \
        " %%tmm7, %%tmm4, %%tmm1\n\t"                                                                        \
        "tileloadd 1024(%[a], %[narrow]), %%tmm5\n\t" multiply " %%tmm6, %%tmm5, %%tmm2\n\t" multiply        \
        " %%tmm7, %%tmm5, %%tmm3\n\t"                                                                        \
        "add $2048, %[a]\n\t"                                                                                \
        "add $2048, %[b]\n\t"                                                                                \
        "dec %[count]\n\t"                                                                                   \
        "jnz 1b\n\t"                                                                                         \
        "tilestored %%tmm0, (%[out], %[wide])\n\t"                                                           \
        "tilestored %%tmm1, 64(%[out], %[wide])\n\t"                                                         \
        "tilestored %%tmm2, 2048(%[out], %[wide])\n\t"                                                       \
        "tilestored %%tmm3, 2112(%[out], %[wide])\n\t"                                                       \
        : [a] "+r"(a), [b] "+r"(b), [count] "+r"(count)                                                      \
        : [out] "r"(out), [narrow] "r"(int64_t{64}), [wide] "r"(int64_t{128})                                \
        : "memory", "cc");                                                                                   \
  }

// Bytes of a with a sign and without; those of b have one.
FX_UNIT(unit_signed, "tdpbssd")
FX_UNIT(unit_unsigned, "tdpbusd")

#undef FX_UNIT

}  // namespace fractrain_fx

#else

namespace fractrain_fx {

// Nothing to prepare.
struct Units {};

}  // namespace fractrain_fx

#endif
