// The innermost loop of products for units that multiply whole tiles of bytes (AMX): 32 rows and 32 columns, as four sums
// of 16 by 16, which stay in registers.
//
// A step is four bytes, as in tiles.h. The steps of a row of a lie one after the other, and so does the same step of all
// columns of b. Numbers of 16 bits are two planes of bytes, 256 * high + low.

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

// Where the steps lie that are multiplied, in bytes: from a row of a (a step of b) to the next, and from 16 steps to the
// next 16.
struct UnitWalk {
  int64_t a_row, a_next, b_step, b_next;
};

#define FX_UNITS(name, multiply)                                                                             \
  inline void name(const void* a, const void* b, const UnitWalk& walk, int64_t count, int32_t* out) {        \
    const void* below = static_cast<const char*>(a) + 16 * walk.a_row;                                       \
    asm volatile("tilezero %tmm0\n\ttilezero %tmm1\n\ttilezero %tmm2\n\ttilezero %tmm3");                      \
    asm volatile(                                                                                            \
        "1:\n\t"                                                                                             \
        "tileloadd (%[a], %[row]), %%tmm4\n\t"                                                               \
        "tileloadd (%[b], %[step]), %%tmm6\n\t"                                                              \
        "tileloadd 64(%[b], %[step]), %%tmm7\n\t" multiply " %%tmm6, %%tmm4, %%tmm0\n\t" multiply            \
        " %%tmm7, %%tmm4, %%tmm1\n\t"                                                                        \
        "tileloadd (%[below], %[row]), %%tmm5\n\t" multiply " %%tmm6, %%tmm5, %%tmm2\n\t" multiply           \
        " %%tmm7, %%tmm5, %%tmm3\n\t"                                                                        \
        "add %[a_next], %[a]\n\t"                                                                            \
        "add %[a_next], %[below]\n\t"                                                                        \
        "add %[b_next], %[b]\n\t"                                                                            \
        "dec %[count]\n\t"                                                                                   \
        "jnz 1b"                                                                                             \
        : [a] "+r"(a), [below] "+r"(below), [b] "+r"(b), [count] "+r"(count)                                 \
        : [row] "r"(walk.a_row), [step] "r"(walk.b_step), [a_next] "r"(walk.a_next), [b_next] "r"(walk.b_next) \
        : "memory", "cc");                                                                                   \
    asm volatile(                                                                                            \
        "tilestored %%tmm0, (%[out], %[row])\n\t"                                                            \
        "tilestored %%tmm1, 64(%[out], %[row])\n\t"                                                          \
        "tilestored %%tmm2, 2048(%[out], %[row])\n\t"                                                        \
        "tilestored %%tmm3, 2112(%[out], %[row])"                                                            \
        ::[out] "r"(out), [row] "r"(int64_t{4 * kUnitColumns})                                               \
        : "memory");                                                                                         \
  }

// The products of `count` times 16 steps, at least one: 32 rows of 32 sums. Bytes of a have a sign or none; those of b have
// one.
FX_UNITS(multiply_signed, "tdpbssd")
FX_UNITS(multiply_unsigned, "tdpbusd")

#undef FX_UNITS

// The sums of the products of bytes (low is null) or of numbers of 16 bits. 256 * high alone may need a bit more than the
// number, so both parts are added without sign.
inline void multiply_units(const void* high, const void* low, const void* b, const UnitWalk& walk, int64_t count,
                           int32_t* sums) {
  multiply_signed(high, b, walk, count, sums);
  if (low == nullptr) return;
  alignas(64) int32_t more[kUnitRows * kUnitColumns];
  multiply_unsigned(low, b, walk, count, more);
#pragma omp simd
  for (int i = 0; i < kUnitRows * kUnitColumns; ++i) {
    sums[i] = static_cast<int32_t>((static_cast<uint32_t>(sums[i]) << 8) + static_cast<uint32_t>(more[i]));
  }
}

}  // namespace fractrain_fx

#else

namespace fractrain_fx {

// Nothing to prepare.
struct Units {};

}  // namespace fractrain_fx

#endif
