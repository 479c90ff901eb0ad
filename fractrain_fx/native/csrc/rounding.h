// Rounds one value, and holds the grid and the noise that a tensor is rounded by (ALGORITHM 2).

#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/SmallVector.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <optional>
#include <type_traits>
#include <vector>

#include "grid.h"

namespace fractrain_fx {

using at::Tensor;
using Yes = std::true_type;
using No = std::false_type;

// Noise, uniform in -0.5..0.5, hashed from a position and a seed; `hashed` in formats/noise.py is the same function.
inline float noise_at(uint32_t position, uint32_t low, uint32_t high) {
  uint32_t h = position ^ low;
  h = (h ^ (h >> 16)) * 0x7FEB352Du + high;
  h = (h ^ (h >> 15)) * 0x846CA68Bu;
  return static_cast<float>(static_cast<int32_t>(h) >> 8) * 0x1p-24f;
}

// The noise of a tensor. A value's position is its place in memory; where channels are innermost there, it is the place
// that the value would have in the usual order, so that both orders draw the same noise.
struct Noise {
  const float* first;  // the value at position 0
  uint32_t low, high;
  int64_t channels = 0, places = 1;  // of a sample, if channels are innermost; else 0 and 1

  uint32_t position(int64_t place) const {
    if (!channels) return static_cast<uint32_t>(place);
    const int64_t channel = place % channels, row = place / channels;
    return static_cast<uint32_t>((row / places * channels + channel) * places + row % places);
  }
};

// The number of the level that x is rounded to. noisy: noise is added before rounding.
template <bool noisy>
inline float level(float x, float lo, float scale, float top, uint32_t position, const Noise& noise) {
  float q = (x - lo) / scale;
  if constexpr (noisy) q += noise_at(position, noise.low, noise.high);
  q = q < 0.0f ? 0.0f : q;
  return std::rint(q > top ? top : q);
}

// The value of level q, which x was rounded to. inside: no value lies outside the range, so the range itself shows a
// NaN or infinite x.
template <bool inside>
inline float value_of(float q, float x, float lo, float scale) {
  float value = q * scale;
  value += lo;
  if constexpr (!inside) value += 0.0f * x;  // the clamp hides an infinite x; 0 * inf is NaN
  return value;
}

enum Outcome : int64_t { kUnrounded, kRounded, kRefused };

using Widths = c10::SmallVector<int64_t, 16>;

inline Widths widths_of(const Tensor& bits) {
  const bool is_int = bits.scalar_type() == at::kInt;
  const Tensor numbers = (is_int ? bits : bits.to(at::kLong)).contiguous();
  Widths widths(numbers.numel());
  is_int ? std::copy_n(numbers.const_data_ptr<int32_t>(), widths.size(), widths.begin())
         : std::copy_n(numbers.const_data_ptr<int64_t>(), widths.size(), widths.begin());
  return widths;
}

// In place of the number of the highest level: the values stay as they are, or become 0.
constexpr float kStay = 0.0f, kErased = -1.0f;

// How a tensor is rounded. Bits, low ends and widths of ranges broadcast against it.
struct Rounding {
  Outcome outcome;  // kUnrounded: no bits change a value; kRefused: differences of values in a range may overflow
  Widths widths;
  Tensor bits, lo, span;
  Tensor x;  // the values; with noise, a tensor in which each value has a position of its own
  Noise noise;
  float top_of_0;  // kStay or kErased, for values of 0 bits

  float top(int64_t each) const { return is_rounded(each) ? top_of(each) : each == 0 ? top_of_0 : kStay; }
};

inline Rounding rounding_of(const Tensor& given, const Tensor& bits, const Tensor& low, const Tensor& wide,
                            std::optional<int64_t> seed, bool erase = false) {
  const Widths widths = widths_of(bits);
  const auto changes = [erase](int64_t each) { return is_rounded(each) || (erase && each == 0); };
  if (std::none_of(widths.begin(), widths.end(), changes)) return {kUnrounded, {}, {}, {}, {}, {}, {}, kStay};
  const Tensor lo = low.contiguous(), span = wide.contiguous();
  const float* spans = span.const_data_ptr<float>();
  const auto modest = [](float each) { return each < kWide; };
  if (!std::all_of(spans, spans + span.numel(), modest)) return {kRefused, {}, {}, {}, {}, {}, {}, kStay};
  // Noise is hashed from positions in memory, which values of a tensor that is not dense may share.
  const Tensor x = !seed || given.is_non_overlapping_and_dense() ? given : given.contiguous();
  const uint64_t drawn = static_cast<uint64_t>(seed.value_or(0));
  Noise noise{x.const_data_ptr<float>(), static_cast<uint32_t>(drawn & 0x7FFFFFFF),
              static_cast<uint32_t>((drawn >> 31) & 0x7FFFFFFF)};
  if (seed && !x.is_contiguous() && x.is_contiguous(at::MemoryFormat::ChannelsLast)) {
    noise.channels = x.size(1);
    noise.places = x.size(2) * x.size(3);
  }
  return {kRounded, widths, bits, lo, span, x, noise, erase ? kErased : kStay};
}

// The levels of some values: the lowest, the distance between two, and the number of the highest.
struct Grid {
  float lo, scale, top;
};

// One grid for all values, or one for each entry of the first dimension; none if bits or ranges broadcast otherwise.
inline std::vector<Grid> grids_of(const Rounding& how) {
  const Tensor& x = how.x;
  if (how.lo.numel() != how.span.numel()) return {};
  int64_t count = 1;
  for (const Tensor* each : {&how.bits, &how.span}) {
    if (each->numel() == 1) continue;
    count = x.size(0);
    if (each->dim() != x.dim() || each->numel() != count || each->size(0) != count) return {};
  }
  const float *lo = how.lo.const_data_ptr<float>(), *span = how.span.const_data_ptr<float>();
  const bool each_span = how.span.numel() > 1, each_width = how.widths.size() > 1;
  std::vector<Grid> grids(count);
  for (int64_t i = 0; i < count; ++i) {
    const int64_t place = each_span ? i : 0, bits = how.widths[each_width ? i : 0];
    grids[i] = {lo[place], is_rounded(bits) ? scale_of(span[place], bits) : 1.0f, how.top(bits)};
  }
  return grids;
}

// Calls take(first, count) for parts of some values, each so small that 32 bits can count it: with 64 bits, a loop that
// also counts positions for noise takes a third longer. `take` has to capture by copy: a byte that it writes might be
// part of anything captured by reference, and the compiler would not vectorise the loop.
template <class Take>
void in_parts(int64_t count, Take&& take) {
  constexpr int64_t kMost = int64_t{1} << 30;
  for (int64_t first = 0; first < count; first += kMost) {
    take(first, static_cast<int32_t>(std::min(kMost, count - first)));
  }
}

// Calls take(first, count, position, step) for parts of some values in memory, as in_parts does; the noise of value i of
// a part has the position `position + i * step`.
template <bool noisy, class Take>
void in_noisy_parts(const float* x, int64_t count, const Noise& noise, Take&& take) {
  const int64_t place = noisy ? x - noise.first : 0;
  if (!noisy || !noise.channels) {
    return in_parts(count, [=](int64_t first, int32_t part) {
      take(first, part, static_cast<uint32_t>(place + first), uint32_t{1});
    });
  }
  for (int64_t first = 0, part; first < count; first += part) {
    part = std::min(count - first, noise.channels - (place + first) % noise.channels);
    take(first, static_cast<int32_t>(part), noise.position(place + first), static_cast<uint32_t>(noise.places));
  }
}

// Calls run with two types, each Yes or No: whether noise is added, and whether all values lie inside the range.
template <class Run>
void with_kinds(bool noisy, bool inside, Run&& run) {
  const auto with_noise = [&](auto kind) { inside ? run(kind, Yes{}) : run(kind, No{}); };
  noisy ? with_noise(Yes{}) : with_noise(No{});
}

}  // namespace fractrain_fx
