// The levels of the affine format (ALGORITHM 2), as formats/affine/scale.py has them.
//
// Values are float32. No product and sum may become a fused multiply-add, which would give other numbers than the
// formula (build.py sets the compiler's flag).

#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>

namespace fractrain_fx {

// The smallest distance between levels, so that a constant tensor has a grid too.
constexpr double kSmallestScale = 1e-8;
// From this width on, differences of values in a range may overflow.
constexpr float kWide = 1e38f;
// The largest width of a range: its highest level, a few roundings above the high end, must not overflow.
constexpr float kReach = std::numeric_limits<float>::max() * (1.0f - 0x1p-20f);

// Values of 0 and 32 bits stay as they are.
constexpr bool is_rounded(int64_t bits) { return bits != 0 && bits != 32; }

// Distance between levels. Dividing in float64 and rounding to float32 gives the quotient of a division in float32.
inline float scale_of(float span, int64_t bits) {
  const double scale = static_cast<double>(span) / static_cast<double>((1LL << bits) - 1);
  return static_cast<float>(std::max(scale, kSmallestScale));
}

// Number of the highest level.
inline float top_of(int64_t bits) { return static_cast<float>((1LL << bits) - 1); }

}  // namespace fractrain_fx
