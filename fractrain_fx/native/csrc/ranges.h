// The lowest and the highest value of a block of memory, and the range between them (ALGORITHM 2).

#pragma once

#include <ATen/core/Tensor.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <tuple>

#include "grid.h"

namespace fractrain_fx {

// Lanes of the search, each of which finds the lowest and the highest of its values.
constexpr int kLanes = 32;

struct Ends {
  float lo, hi;
};

// The lowest and the highest of some values; both are NaN if any value is NaN.
inline Ends ends_of(const float* block, int64_t count) {
  float lows[kLanes], highs[kLanes], bads[kLanes];
  std::fill_n(lows, kLanes, block[0]);
  std::fill_n(highs, kLanes, block[0]);
  std::fill_n(bads, kLanes, 0.0f);
  const auto take = [&](int lane, float each) {
    lows[lane] = each < lows[lane] ? each : lows[lane];
    highs[lane] = each > highs[lane] ? each : highs[lane];
    bads[lane] += 0.0f * each;
  };
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    for (int lane = 0; lane < kLanes; ++lane) take(lane, block[i + lane]);
  }
  for (; i < count; ++i) take(0, block[i]);
  for (int half = kLanes / 2; half > 0; half /= 2) {
    for (int lane = 0; lane < half; ++lane) {
      lows[lane] = lows[lane + half] < lows[lane] ? lows[lane + half] : lows[lane];
      highs[lane] = highs[lane + half] > highs[lane] ? highs[lane + half] : highs[lane];
      bads[lane] += bads[lane + half];
    }
  }
  const auto missing = [](float each) { return std::isnan(each); };
  if (missing(bads[0]) && std::any_of(block, block + count, missing)) {
    return {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::quiet_NaN()};
  }
  return {lows[0], highs[0]};
}

// The width of a range, which is finite for finite values. `hi - hi` is NaN for an infinite end, so an infinite
// range is not clamped to a finite one.
inline float width_of(const Ends& ends) {
  const float span = ends.hi - ends.lo;
  return span < kWide ? span : std::min(span, kReach) + (ends.hi - ends.hi) + (ends.lo - ends.lo);
}

// The low end and the width of one range for all values, or of one for each entry of the first dimension, in the given
// shape (measure in formats/affine/format.py).
std::tuple<at::Tensor, at::Tensor> measure(const at::Tensor& given, at::IntArrayRef shape);

}  // namespace fractrain_fx
