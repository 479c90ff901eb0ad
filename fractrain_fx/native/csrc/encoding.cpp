// Codes of rounded values, which products.cpp multiplies: the numbers of their levels, shifted to lie around 0
// (ALGORITHM 2).

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <torch/library.h>

#include <algorithm>
#include <cmath>
#include <tuple>

#include "layouts.h"
#include "ranges.h"

namespace fractrain_fx {
namespace {

enum Operand { kCode, kValue, kX, kLo, kScale, kTop, kOperands };

// Encodes contiguous values on one grid. Values that stay as they are or become 0 have code 0.
template <bool noisy, bool inside, bool values, class Code>
void encode_run(const float* x, Code* codes, float* out, int64_t count, const Grid& grid, const Noise& noise) {
  if (grid.top <= 0.0f) {
    std::fill_n(codes, count, Code{0});
    if (values && grid.top == kErased) {
      std::fill_n(out, count, 0.0f);
    } else if (values && out != x) {
      std::copy_n(x, count, out);
    }
    return;
  }
  const float lo = grid.lo, scale = grid.scale, top = grid.top, middle = (top + 1.0f) * 0.5f;
  in_noisy_parts<noisy>(x, count, noise, [=](int64_t first, int32_t part, uint32_t position, uint32_t step) {
    const float* from = x + first;
    Code* code = codes + first;
    float* to = values ? out + first : nullptr;
#pragma omp simd
    for (int32_t i = 0; i < part; ++i) {
      const float q = level<noisy>(from[i], lo, scale, top, position + static_cast<uint32_t>(i) * step, noise);
      code[i] = static_cast<Code>(static_cast<int32_t>(q - middle));
      if constexpr (values) to[i] = value_of<inside>(q, from[i], lo, scale);
    }
  });
}

// Encodes the innermost two dimensions, whose strides (in bytes) may be any.
template <bool noisy, bool inside, bool values, class Code>
void encode_plane(char** data, const int64_t* strides, int64_t columns, int64_t rows, const Noise& noise) {
  constexpr int64_t size = sizeof(float);
  const bool dense = strides[kCode] == sizeof(Code) && strides[kValue] == (values ? size : 0) && strides[kX] == size &&
                     strides[kTop] == 0 && strides[kLo] == 0 && strides[kScale] == 0;
  // The number of values on one grid: a row, or a single value.
  const int64_t step = dense ? columns : 1;
  for (int64_t row = 0; row < rows; ++row) {
    for (int64_t i = 0; i < columns; i += step) {
      const auto at = [&](int which) { return data[which] + row * strides[kOperands + which] + i * strides[which]; };
      const auto number = [&](int which) { return *reinterpret_cast<const float*>(at(which)); };
      encode_run<noisy, inside, values>(reinterpret_cast<const float*>(at(kX)), reinterpret_cast<Code*>(at(kCode)),
                                        reinterpret_cast<float*>(at(kValue)), step,
                                        {number(kLo), number(kScale), number(kTop)}, noise);
    }
  }
}

// Writes the codes of the values that round_affine gives, and those values too if `values` is there. Both have the
// sizes of `given`. Codes are the numbers of levels minus 2^(bits-1).
int64_t encode(const Tensor& given, const Tensor& bits, const Tensor& lo, const Tensor& span,
               std::optional<int64_t> seed, bool inside, bool erase, Tensor& codes,
               const std::optional<Tensor>& values) {
  const Rounding how = rounding_of(given, bits, lo, span, seed, erase);
  if (how.outcome == kRefused) return kRefused;
  if (how.outcome == kUnrounded) {
    codes.zero_();
    if (values) values->copy_(given);
    return kUnrounded;
  }
  const std::optional<Runs> runs = runs_of(how, {&codes, values ? &*values : &codes});
  with_kinds(seed.has_value(), inside, [&](auto is_noisy, auto is_inside) {
    constexpr bool noisy = decltype(is_noisy)::value, within = decltype(is_inside)::value;
    const auto run = [&](auto with_values, auto code) {
      using Code = decltype(code);
      constexpr bool both = decltype(with_values)::value;
      if (runs) {
        const float* x = how.x.const_data_ptr<float>();
        Code* target = codes.mutable_data_ptr<Code>();
        float* out = both ? values->mutable_data_ptr<float>() : nullptr;
        for_runs(*runs, [&](int64_t first, int64_t count, const Grid& grid) {
          encode_run<noisy, within, both>(x + first, target + first, both ? out + first : nullptr, count, grid,
                                          how.noise);
        });
        return;
      }
      const Tensor unused = both ? Tensor() : at::empty({1}, given.options()).expand(given.sizes());
      auto iterator = iterator_of({&codes, both ? &*values : &unused}, how);
      iterator.for_each([&](char** data, const int64_t* strides, int64_t columns, int64_t rows) {
        encode_plane<noisy, within, both, Code>(data, strides, columns, rows, how.noise);
      });
    };
    const auto with = [&](auto code) { values ? run(Yes{}, code) : run(No{}, code); };
    return codes.scalar_type() == at::kShort ? with(int16_t()) : with(int8_t());
  });
  return kRounded;
}

// Scale and zero of signed codes: value = scale * code + zero. The zero is NaN if the range is not finite. erase:
// values of 0 bits become 0, so their scale and zero are 0.
std::tuple<Tensor, Tensor> ends_of_codes(const Tensor& bits, const Tensor& lo, const Tensor& span, bool erase) {
  const int64_t count = std::max(bits.numel(), span.numel());
  const bool each_bits = bits.numel() == count, each_span = span.numel() == count;
  TORCH_CHECK((each_bits || bits.numel() == 1) && (each_span || span.numel() == 1) && lo.numel() == span.numel(),
              "expected as many ranges as bits, or one of either");
  const Widths widths = widths_of(bits);
  const Tensor lows = lo.contiguous(), spans = span.contiguous();
  Tensor scale = at::empty(each_span ? span.sizes() : bits.sizes(), spans.options());
  Tensor zero = at::empty_like(scale);
  const float *low_of = lows.const_data_ptr<float>(), *span_of = spans.const_data_ptr<float>();
  float *scale_at = scale.mutable_data_ptr<float>(), *zero_at = zero.mutable_data_ptr<float>();
  for (int64_t i = 0; i < count; ++i) {
    const int64_t width = widths[each_bits ? i : 0];
    const float wide = span_of[each_span ? i : 0];
    // Values of 0 bits are not rounded; counting them as 1 bit avoids a division by 0.
    const float step = scale_of(wide, std::max<int64_t>(1, width));
    const float middle = width ? (top_of(width) + 1.0f) * 0.5f : 1.0f;
    const bool erased = erase && width == 0;
    scale_at[i] = erased ? 0.0f : step;
    zero_at[i] = erased ? 0.0f : low_of[each_span ? i : 0] + step * middle + 0.0f * wide;
  }
  return {scale, zero};
}

std::tuple<Tensor, Tensor> code_ends(const Tensor& bits, const Tensor& lo, const Tensor& span) {
  return ends_of_codes(bits, lo, span, false);
}

// An operand as products.cpp takes it: the outcome, the codes, and their scales and zeros, one of each for the tensor
// or for each entry of its first dimension.
using Coded = std::tuple<int64_t, Tensor, Tensor, Tensor>;

Coded with_ends(const Tensor& x, const Tensor& bits, const Tensor& lo, const Tensor& span, std::optional<int64_t> seed,
                bool inside, bool erase, at::ScalarType type, const std::optional<Tensor>& values) {
  Tensor codes = at::empty_like(x, x.options().dtype(type));
  const int64_t outcome = encode(x, bits, lo, span, seed, inside, erase, codes, values);
  const auto [scale, zero] = ends_of_codes(bits, lo, span, erase);
  return {outcome, codes, scale.flatten(), zero.flatten()};
}

Coded coded_operand(const Tensor& x, const Tensor& bits, const Tensor& lo, const Tensor& span, bool inside) {
  return with_ends(x, bits, lo, span, {}, inside, false, at::kChar, {});
}

// The fewest bits, at most `bits`, that round values of a range of this width to the same levels, with noise too: levels
// lie at least kSmallestScale apart.
Tensor bits_in_use(const Tensor& bits, const Tensor& span) {
  const double levels = std::floor(static_cast<double>(*span.const_data_ptr<float>()) / kSmallestScale) + 3.0;
  if (!(levels < 1LL << 16)) return bits;
  const int64_t enough = static_cast<int64_t>(std::ceil(std::log2(levels)));
  Tensor fewer = at::empty(bits.sizes(), bits.options().dtype(at::kLong));
  const Widths widths = widths_of(bits);
  std::transform(widths.begin(), widths.end(), fewer.mutable_data_ptr<int64_t>(),
                 [=](int64_t each) { return is_rounded(each) ? std::min(each, enough) : each; });
  return fewer;
}

// Encodes a gradient, rounded with noise in its own range, and writes the rounded values if `values` is there. Values
// of 0 bits become 0.
Coded coded_gradient(const Tensor& g, const Tensor& bits, int64_t seed, bool wide, const std::optional<Tensor>& values) {
  const auto [lo, span] = measure(g, {});
  const Tensor used = wide ? bits_in_use(bits, span) : bits;
  return with_ends(g, used, lo, span, seed, true, true, wide ? at::kShort : at::kChar, values);
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(fractrain_fx, library) {
  library.def("code_ends(Tensor bits, Tensor lo, Tensor span) -> (Tensor, Tensor)");
  library.def(
      "coded_operand(Tensor x, Tensor bits, Tensor lo, Tensor span, bool inside) -> (int, Tensor, Tensor, Tensor)");
  library.def(
      "coded_gradient(Tensor g, Tensor bits, int seed, bool wide, *, Tensor(a!)? values) "
      "-> (int, Tensor, Tensor, Tensor)");
}

TORCH_LIBRARY_IMPL(fractrain_fx, CPU, library) {
  library.impl("code_ends", code_ends);
  library.impl("coded_operand", coded_operand);
  library.impl("coded_gradient", coded_gradient);
}

}  // namespace fractrain_fx
