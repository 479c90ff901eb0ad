// The levels of the affine format (ALGORITHM 2), as formats/affine/grid.py has them.
//
// All is float32, and nothing may be contracted to fused multiply-adds: the numbers are those of the formula.

#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>

namespace fractrain_fx {

// Levels lie at least this far apart, and differences inside a range so wide may overflow.
constexpr double kSmallestScale = 1e-8;
constexpr float kWide = 1e38f;
constexpr float kReach = std::numeric_limits<float>::max() * (1.0f - 0x1p-20f);

// Bits that leave values as they are.
constexpr bool is_rounded(int64_t bits) { return bits != 0 && bits != 32; }

// Distance between levels: divided in float64 and rounded to float32, which is the division in float32.
inline float scale_of(float span, int64_t bits) {
  const double scale = static_cast<double>(span) / static_cast<double>((1LL << bits) - 1);
  return static_cast<float>(std::max(scale, kSmallestScale));
}

// Number of the highest level.
inline float top_of(int64_t bits) { return static_cast<float>((1LL << bits) - 1); }

}  // namespace fractrain_fx
