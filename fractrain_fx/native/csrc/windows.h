// im2col: the values that a convolution's kernel covers at each place, as a row.

#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/Parallel.h>
#include <c10/util/accumulate.h>

#include <algorithm>
#include <cstdint>
#include <vector>

namespace fractrain_fx {

using at::Tensor;

// The sizes of a convolution at stride 1, whose input lies in memory as (samples, *sizes, channels).
struct Windows {
  int64_t samples, channels;
  at::IntArrayRef sizes, kernel, padding;
  std::vector<int64_t> places;

  Windows(int64_t samples, int64_t channels, at::IntArrayRef sizes, at::IntArrayRef kernel, at::IntArrayRef padding)
      : samples(samples), channels(channels), sizes(sizes), kernel(kernel), padding(padding) {
    TORCH_CHECK(sizes.size() == kernel.size() && sizes.size() == padding.size(),
                "expected a kernel size and a padding for each dimension");
    for (size_t i = 0; i < sizes.size(); ++i) places.push_back(sizes[i] + 2 * padding[i] - kernel[i] + 1);
    for (const int64_t count : places) TORCH_CHECK(count > 0, "the kernel is larger than its padded input");
  }
  int64_t rows() const { return samples * c10::multiply_integers(places); }
  int64_t length() const { return c10::multiply_integers(kernel) * channels; }
};

// Writes one row: the values under the kernel, channels innermost, and `around` for places outside the input.
template <class Value>
void put_row(const Value* x, const Windows& of, int64_t row, Value around, Value* out) {
  const int64_t dims = of.sizes.size(), last = dims - 1;
  int64_t place[3], rest = row;
  for (int64_t i = last; i >= 0; --i) {
    place[i] = rest % of.places[i] - of.padding[i];
    rest /= of.places[i];
  }
  const int64_t sample = rest, run = of.kernel[last], runs = c10::multiply_integers(of.kernel) / run;
  const int64_t from = std::clamp<int64_t>(-place[last], 0, run);
  const int64_t to = std::clamp<int64_t>(of.sizes[last] - place[last], from, run);
  for (int64_t each = 0; each < runs; ++each, out += run * of.channels) {
    int64_t at[3], left = each;
    bool inside = true;
    for (int64_t i = last - 1; i >= 0; --i) {
      at[i] = place[i] + left % of.kernel[i];
      left /= of.kernel[i];
      inside = inside && at[i] >= 0 && at[i] < of.sizes[i];
    }
    if (!inside) {
      std::fill_n(out, run * of.channels, around);
      continue;
    }
    int64_t line = sample;
    for (int64_t i = 0; i < last; ++i) line = line * of.sizes[i] + at[i];
    const Value* first = x + (line * of.sizes[last] + place[last]) * of.channels;
    std::fill_n(out, from * of.channels, around);
    std::copy(first + from * of.channels, first + to * of.channels, out + from * of.channels);
    std::fill_n(out + to * of.channels, (run - to) * of.channels, around);
  }
}

// All rows; around(sample) is the value outside the input of a sample.
template <class Value, class Around>
Tensor rows_of(const Value* x, const Windows& of, at::TensorOptions options, Around&& around) {
  Tensor rows = at::empty({of.rows(), of.length()}, options);
  Value* out = rows.mutable_data_ptr<Value>();
  const int64_t length = of.length(), each = of.rows() / of.samples;
  at::parallel_for(0, of.rows(), std::max<int64_t>(1, 16384 / length), [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) put_row(x, of, row, around(row / each), out + row * length);
  });
  return rows;
}

}  // namespace fractrain_fx
