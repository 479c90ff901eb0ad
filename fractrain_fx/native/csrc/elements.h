// Rounds one value to a small floating-point number, and finds the scale that a block of them shares
// (formats/microscaling: elements.py and scales.py have the same arithmetic).

#pragma once

#include <c10/util/bit_cast.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>

#include "rounding.h"

namespace fractrain_fx {

inline int32_t bits_of(float x) { return c10::bit_cast<int32_t>(x); }
inline float float_of(int32_t bits) { return c10::bit_cast<float>(bits); }

constexpr int32_t kMantissa = 23;                // bits of a float32's mantissa
constexpr int32_t kExponent = 0xFF << kMantissa;  // the bits of its exponent
constexpr int32_t kSize = 0x7FFFFFFF;             // all bits but the sign: in their order sizes lie, NaN above infinity
constexpr int32_t kBias = 127;
constexpr float kTiny = 0x1p-126f;  // the smallest normal number; scales of float32 are no smaller

// The values of an element.
struct Element {
  int32_t smallest;  // bits of the smallest normal number, a power of two
  int32_t finer;     // a power of two less the distance of neighbours above it, in units of the exponent's bits
  float largest;
  int32_t top;  // exponent of the largest number

  Element(double relative, double smallest, double largest, int64_t top)
      : smallest(bits_of(static_cast<float>(smallest))),
        finer((kBias << kMantissa) - bits_of(static_cast<float>(relative))),
        largest(static_cast<float>(largest)),
        top(static_cast<int32_t>(top)) {}
};

// The nearest value of an element, ties to even; with noise, one of both neighbours. Means nothing for NaN and infinite
// values, whose blocks have the scale NaN.
template <bool noisy>
inline float element_of(float x, const Element& element, uint32_t position, const Noise& noise) {
  int32_t power = bits_of(x) & kExponent;  // of two: the one at or below |x|
  power = (power > element.smallest ? power : element.smallest) - element.finer;
  // Both are powers of two, so that the products are exact.
  const float step = float_of(power), inverse = float_of((2 * kBias << kMantissa) - power);
  float steps = x * inverse;
  if constexpr (noisy) steps += noise_at(position, noise.low, noise.high);
  const float rounded = std::rint(steps) * step;
  const float above = rounded < -element.largest ? -element.largest : rounded;
  return above > element.largest ? element.largest : above;
}

// Type of a block's scale: a power of two; an e4m3 number relative to one of the tensor; the largest value over the
// element's; the same, with one scale for the tensor.
enum class Scale : int64_t { e8m0, e4m3, float32, tensor };

// What every block of a tensor has in common.
struct Shared {
  Element element;
  Scale scale;
  Noise noise;
  float of_tensor = 0;   // scale of the tensor, if it has one
  float inverse = 0;     // 1 / of_tensor
  float least = 0;       // of relative scales
  float poison = 0;      // NaN if a value of the tensor is not finite and all blocks shall show it
  float reach = 0;       // the largest scale whose product with the largest number is finite

  // A little smaller where the element's largest number would become infinite.
  float capped(float up) const { return std::isinf(up * element.largest) ? reach : up; }
};

// Of a tensor whose largest size has these bits, where the scale depends on it.
inline Shared shared_of(const Element& element, Scale scale, const Noise& noise, int32_t largest) {
  Shared shared{element, scale, noise};
  const double reach = static_cast<double>(std::numeric_limits<float>::max()) * (1 - 0x1p-24);
  shared.reach = static_cast<float>(reach / element.largest);
  if (scale == Scale::e8m0 || scale == Scale::float32) return shared;
  const float most = float_of(largest);
  shared.poison = most * 0.0f;
  const float reaches = scale == Scale::e4m3 ? 448.0f * element.largest : element.largest;
  shared.of_tensor = std::max(most / reaches, kTiny);
  shared.inverse = 1.0f / shared.of_tensor;
  shared.least = std::max(kTiny / shared.of_tensor, 0x1p-6f);
  return shared;
}

// For each of `count` blocks, whose largest sizes have the bits `most`: the factors that bring values to the element's
// range and back. A block with a value that is not finite gets NaN as the latter.
inline void scales_of(const Shared& shared, const int32_t* most, int32_t count, float* down, float* up) {
  const float largest = shared.element.largest, poison = shared.poison, reach = shared.reach;
  if (shared.scale == Scale::e8m0) {
    const int32_t top = shared.element.top;
#pragma omp simd
    for (int32_t i = 0; i < count; ++i) {
      int32_t exponent = (most[i] >> kMantissa) - kBias - top;
      exponent = exponent < -127 ? -127 : exponent > 126 ? 126 : exponent;
      down[i] = float_of((kBias - exponent) << kMantissa);
      const int32_t bits = exponent < -126 ? 1 << 22 : (exponent + kBias) << kMantissa;
      up[i] = float_of(bits) + float_of(most[i]) * 0.0f;
    }
  } else if (shared.scale == Scale::e4m3) {
    const Element e4m3(0x1p-3, 0x1p-6, 448, 8);
    const float of_tensor = shared.of_tensor, inverse = shared.inverse, least = shared.least;
#pragma omp simd
    for (int32_t i = 0; i < count; ++i) {
      float relative = float_of(most[i]) / largest / of_tensor;
      relative = relative < least ? least : relative;
      relative = relative > e4m3.largest ? e4m3.largest : relative;
      relative = element_of<false>(relative, e4m3, 0, {nullptr, 0, 0});
      down[i] = inverse / relative;
      const float wide = of_tensor * relative;
      up[i] = (std::isinf(wide * largest) ? reach : wide) + poison;
    }
  } else if (shared.scale == Scale::float32) {
#pragma omp simd
    for (int32_t i = 0; i < count; ++i) {
      float wide = float_of(most[i]) / largest;
      wide = wide < kTiny ? kTiny : wide;
      down[i] = 1.0f / wide;
      up[i] = (std::isinf(wide * largest) ? reach : wide) + float_of(most[i]) * 0.0f;
    }
  } else {
    std::fill_n(down, count, shared.inverse);
    std::fill_n(up, count, shared.capped(shared.of_tensor) + poison);
  }
}

}  // namespace fractrain_fx
