// Rounds a tensor in one pass over memory; torch's operations take three or more (ALGORITHM 2).

#include <torch/library.h>

#include <algorithm>
#include <optional>

#include "layouts.h"

namespace fractrain_fx {
namespace {

enum Operand { kOut, kX, kLo, kScale, kTop, kOperands };

template <bool noisy, bool inside>
inline float rounded(float x, float lo, float scale, float top, uint32_t position, const Noise& noise) {
  return value_of<inside>(level<noisy>(x, lo, scale, top, position, noise), x, lo, scale);
}

// Rounds contiguous values on one grid.
template <bool noisy, bool inside>
void round_run(const float* x, float* out, int64_t count, const Grid& grid, const Noise& noise) {
  if (grid.top <= 0.0f) {
    if (out != x) std::copy_n(x, count, out);
    return;
  }
  const float lo = grid.lo, scale = grid.scale, top = grid.top;
  in_noisy_parts<noisy>(x, count, noise, [=](int64_t first, int32_t part, uint32_t position, uint32_t step) {
    const float* from = x + first;
    float* to = out + first;
#pragma omp simd
    for (int32_t i = 0; i < part; ++i) {
      to[i] = rounded<noisy, inside>(from[i], lo, scale, top, position + static_cast<uint32_t>(i) * step, noise);
    }
  });
}

// Rounds the innermost two dimensions, whose strides (in bytes) may be any.
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
    const uint32_t position = noise.position(x - noise.first);
    if (dense && (same_grid || top <= 0.0f)) {
      round_run<noisy, inside>(x, out, columns, {*lo, *scale, top}, noise);
    } else if (dense && each_grid && !noise.channels) {
#pragma omp simd
      for (int64_t i = 0; i < columns; ++i) {
        out[i] = rounded<noisy, inside>(x[i], lo[i], scale[i], top, position + static_cast<uint32_t>(i), noise);
      }
    } else {
      for (int64_t i = 0; i < columns; ++i) {
        float* target = at(kOut, i);
        const float value = *at(kX, i), highest = *at(kTop, i);
        const uint32_t place = noise.position(at(kX, i) - noise.first);
        *target =
            highest == kStay ? value : rounded<noisy, inside>(value, *at(kLo, i), *at(kScale, i), highest, place, noise);
      }
    }
  }
}

// Rounds values, which may be out itself, and returns the outcome; out is written only if that is kRounded.
int64_t round_affine(const Tensor& given, const Tensor& bits, const Tensor& lo, const Tensor& span,
                     std::optional<int64_t> seed, bool inside, Tensor& out) {
  const Rounding how = rounding_of(given, bits, lo, span, seed);
  if (how.outcome != kRounded) return how.outcome;
  const std::optional<Runs> runs = runs_of(how, {&out});
  const std::optional<Rows> rows = runs ? std::nullopt : rows_of(how, out);
  with_kinds(seed.has_value(), inside, [&](auto is_noisy, auto is_inside) {
    constexpr bool noisy = decltype(is_noisy)::value, within = decltype(is_inside)::value;
    const float* x = how.x.const_data_ptr<float>();
    float* target = out.mutable_data_ptr<float>();
    if (runs) {
      for_runs(*runs, [&](int64_t first, int64_t count, const Grid& grid) {
        round_run<noisy, within>(x + first, target + first, count, grid, how.noise);
      });
    } else if (rows) {
      for_rows(*rows, [&](int64_t from, int64_t to, int64_t count, const Grid& grid) {
        round_run<noisy, within>(x + from, target + to, count, grid, how.noise);
      });
    } else {
      iterator_of({&out}, how).for_each([&](char** data, const int64_t* strides, int64_t columns, int64_t rows) {
        round_plane<noisy, within>(data, strides, columns, rows, how.noise);
      });
    }
  });
  return kRounded;
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(fractrain_fx, library) {
  library.def(
      "round_affine(Tensor x, Tensor bits, Tensor lo, Tensor span, int? seed, bool inside, *, Tensor(a!) out) -> int");
}

TORCH_LIBRARY_IMPL(fractrain_fx, CPU, library) { library.impl("round_affine", round_affine); }

}  // namespace fractrain_fx
