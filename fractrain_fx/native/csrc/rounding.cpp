// Rounding in one pass over memory, where plain operations take three and more (ALGORITHM 2).

#include <torch/library.h>

#include "rounding.h"

namespace fractrain_fx {
namespace {

enum Operand { kOut, kX, kLo, kScale, kTop, kOperands };

template <bool noisy, bool inside>
inline float rounded(float x, float lo, float scale, float top, uint32_t position, const Noise& noise) {
  return value_of<inside>(level<noisy>(x, lo, scale, top, position, noise), x, lo, scale);
}

// The innermost two dimensions, of any strides (in bytes). A highest level of 0 leaves values as they are.
template <bool noisy, bool inside>
void round_plane(char** data, const int64_t* strides, int64_t columns, int64_t rows, const Noise& noise) {
  constexpr int64_t size = sizeof(float);
  const bool dense = strides[kOut] == size && strides[kX] == size && strides[kTop] == 0;
  const bool same_grid = strides[kLo] == 0 && strides[kScale] == 0;
  const bool each_grid = strides[kLo] == size && strides[kScale] == size;
  for (int64_t row = 0; row < rows; ++row) {
    const auto at = [&](int which, int64_t column) {
      return reinterpret_cast<float*>(data[which] + row * strides[kOperands + which] + column * strides[which]);
    };
    float* out = at(kOut, 0);
    const float *x = at(kX, 0), *lo = at(kLo, 0), *scale = at(kScale, 0);
    const float top = *at(kTop, 0);
    const uint32_t position = static_cast<uint32_t>(x - noise.first);
    if (dense && top == 0.0f) {
      if (out != x) std::copy(x, x + columns, out);
    } else if (dense && same_grid) {
      const float low = *lo, step = *scale;
#pragma omp simd
      for (int64_t i = 0; i < columns; ++i) {
        out[i] = rounded<noisy, inside>(x[i], low, step, top, position + static_cast<uint32_t>(i), noise);
      }
    } else if (dense && each_grid) {
#pragma omp simd
      for (int64_t i = 0; i < columns; ++i) {
        out[i] = rounded<noisy, inside>(x[i], lo[i], scale[i], top, position + static_cast<uint32_t>(i), noise);
      }
    } else {
      for (int64_t i = 0; i < columns; ++i) {
        float* target = at(kOut, i);
        const float value = *at(kX, i), highest = *at(kTop, i);
        const uint32_t place = static_cast<uint32_t>(at(kX, i) - noise.first);
        *target = highest == 0.0f
                      ? value
                      : rounded<noisy, inside>(value, *at(kLo, i), *at(kScale, i), highest, place, noise);
      }
    }
  }
}

// Rounds values, which may be out itself, to bits in a range; writes nothing where rounding_of says so.
int64_t round_affine(const Tensor& given, const Tensor& bits, const Tensor& lo, const Tensor& span,
                     std::optional<int64_t> seed, bool inside, Tensor& out) {
  const Rounding how = rounding_of(given, bits, span, seed);
  if (how.outcome != kRounded) return how.outcome;
  auto iterator = iterator_of({&out}, how, lo);
  with_kinds(seed.has_value(), inside, [&](auto noisy, auto in) {
    iterator.for_each([&](char** data, const int64_t* strides, int64_t columns, int64_t rows) {
      round_plane<decltype(noisy)::value, decltype(in)::value>(data, strides, columns, rows, how.noise);
    });
  });
  return kRounded;
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(fractrain_fx, library) {
  library.def(
      "round_affine(Tensor x, Tensor bits, Tensor lo, Tensor span, int? seed, bool inside, *, "
      "Tensor(a!) out) -> int");
}

TORCH_LIBRARY_IMPL(fractrain_fx, CPU, library) { library.impl("round_affine", round_affine); }

}  // namespace fractrain_fx
