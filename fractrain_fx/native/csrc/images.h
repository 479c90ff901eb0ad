// Images of codes with room around them, channels innermost.

#pragma once

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>

#include <algorithm>
#include <cstdint>
#include <vector>

#include "geometry.h"

namespace fractrain_fx {

// Bytes behind images that a tile may read; it multiplies them by 0.
constexpr int64_t kBehind = 512;

// Images of `sizes` inside frames of size `framed`, with `before` places before each.
struct Frame {
  int64_t samples;
  Sizes sizes, before, framed;

  // Lines of places along the last dimension, in an image.
  int64_t lines() const { return sizes[0] * sizes[1]; }
  // The place of the first value of a line in an image's frame.
  int64_t place_of(int64_t line) const {
    return number_of({line / sizes[1] + before[0], line % sizes[1] + before[1], before[2]}, framed);
  }
  // Calls take(line, place) for each line: its number in the images, and the place of its first value in the frames.
  template <class Take>
  void for_lines(int64_t sample, Take&& take) const {
    const int64_t start = sample * product_of_sizes(framed);
    for (int64_t line = 0; line < lines(); ++line) take(sample * lines() + line, start + place_of(line));
  }
};

inline void check_images(const Tensor& images, at::ScalarType type) {
  TORCH_CHECK(images.scalar_type() == type && images.dim() > 2 && images.dim() < 6 && images.numel() > 0,
              "expected images (samples, channels, and 1 to 3 sizes), not ", images.toString(), images.sizes());
}

// Codes minus shift, in images whose frames hold code 0 minus shift. The codes themselves if they need no frame, have that
// type and fill whole steps.
template <class T, class Code>
Tensor framed(const Tensor& given, const Frame& frame, int64_t channels, int32_t shift) {
  const bool same = sizeof(T) == sizeof(Code) && shift == 0;
  if (same && frame.framed == frame.sizes && channels % 4 == 0) return given;
  const Code* codes = given.const_data_ptr<Code>();
  const int64_t image = product_of_sizes(frame.framed) * channels, line = frame.sizes[2] * channels;
  const int64_t size = frame.samples * image * static_cast<int64_t>(sizeof(T));
  Tensor found = at::empty({size + kBehind}, at::kChar);
  T* out = reinterpret_cast<T*>(found.mutable_data_ptr<int8_t>());
  std::fill_n(found.mutable_data_ptr<int8_t>() + size, kBehind, int8_t{0});
  at::parallel_for(0, frame.samples, std::max<int64_t>(1, 65536 / image), [&](int64_t begin, int64_t end) {
    // Copies, because bytes that are written could change what a reference refers to, as far as a compiler knows.
    const int64_t count = line;
    const T less = static_cast<T>(shift);
    for (int64_t n = begin; n < end; ++n) {
      if (frame.framed != frame.sizes) std::fill_n(out + n * image, image, static_cast<T>(-less));
      frame.for_lines(n, [=](int64_t from, int64_t to) {
        const Code* x = codes + from * count;
        T* y = out + to * channels;
#pragma omp simd
        for (int64_t i = 0; i < count; ++i) y[i] = static_cast<T>(static_cast<T>(x[i]) - less);
      });
    }
  });
  return found;
}

// One number for each place; 0 in the frame.
inline std::vector<float> framed_numbers(const float* numbers, const Frame& frame) {
  std::vector<float> found(frame.samples * product_of_sizes(frame.framed));
  for (int64_t n = 0; n < frame.samples; ++n) {
    frame.for_lines(n, [&](int64_t from, int64_t to) {
      std::copy_n(numbers + from * frame.sizes[2], frame.sizes[2], found.data() + to);
    });
  }
  return found;
}

// The sum of the channels of each place.
inline std::vector<int32_t> channel_sums(const int8_t* codes, const Frame& frame, int64_t channels) {
  std::vector<int32_t> found(frame.samples * product_of_sizes(frame.framed));
  at::parallel_for(0, frame.samples, 1, [&](int64_t begin, int64_t end) {
    for (int64_t n = begin; n < end; ++n) {
      frame.for_lines(n, [&](int64_t from, int64_t to) {
        for (int64_t i = 0; i < frame.sizes[2]; ++i) {
          const int8_t* x = codes + (from * frame.sizes[2] + i) * channels;
          int32_t sum = 0;
#pragma omp simd reduction(+ : sum)
          for (int64_t c = 0; c < channels; ++c) sum += x[c];
          found[to + i] = sum;
        }
      });
    }
  });
  return found;
}

}  // namespace fractrain_fx
