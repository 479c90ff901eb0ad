// Samples that are summed over: those with the same scales, and their codes side by side.

#pragma once

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>
#include <vector>

#include "images.h"
#include "numbers.h"

namespace fractrain_fx {

// Samples with the same scales and zeros.
struct Kind {
  float g_scale, g_zero, x_scale, x_zero;
  std::vector<int64_t> samples;

  bool is(const Kind& other) const {
    return std::memcmp(&g_scale, &other.g_scale, 4 * sizeof(float)) == 0;  // NaN equals itself
  }
};

// Samples whose gradient has scale 0 are left out.
inline std::vector<Kind> kinds_of(const Tensor& g_scale, const Tensor& g_zero, const Tensor& x_scale, const Tensor& x_zero,
                           int64_t samples) {
  const Numbers a(g_scale, samples), b(g_zero, samples), c(x_scale, samples), d(x_zero, samples);
  std::vector<Kind> kinds;
  for (int64_t n = 0; n < samples; ++n) {
    const Kind kind{a[n], b[n], c[n], d[n], {}};
    if (kind.g_scale == 0.0f) continue;
    auto known = std::find_if(kinds.begin(), kinds.end(), [&](const Kind& each) { return each.is(kind); });
    if (known == kinds.end()) known = kinds.insert(known, kind);
    known->samples.push_back(n);
  }
  return kinds;
}

// Samples whose codes lie side by side; -1 for none.
struct Group {
  std::array<int64_t, 4> samples;
  int64_t kind;
};

// Puts the codes, minus shift, of a place of several samples side by side. Samples that are not there have code 0.
template <int per, class Code>
void interleave(const std::array<const Code*, per>& from, int64_t count, int32_t shift, uint32_t* out) {
  constexpr int kBits = 32 / per;
  constexpr uint32_t kMask = per == 2 ? 0xFFFFu : 0xFFu;
#pragma omp simd
  for (int64_t i = 0; i < count; ++i) {
    uint32_t step = 0;
    for (int n = 0; n < per; ++n) step |= (static_cast<uint32_t>(from[n][i] - shift) & kMask) << (kBits * n);
    out[i] = step;
  }
}

// The codes of all groups. A place holds a step for each channel, and `more` steps of ones.
template <int per, class Code>
Tensor grouped(const Code* codes, const std::vector<Group>& groups, const Frame& frame, int64_t channels, int64_t more,
               int32_t shift) {
  const int64_t image = product_of_sizes(frame.framed) * (channels + more), count = static_cast<int64_t>(groups.size());
  const std::vector<int64_t> size{count * image + kBehind};
  Tensor found = frame.framed == frame.sizes ? at::empty(size, at::kInt) : at::zeros(size, at::kInt);
  uint32_t* memory = reinterpret_cast<uint32_t*>(found.mutable_data_ptr<int32_t>());
  std::fill_n(memory + count * image, kBehind, 0u);
  const std::vector<Code> nothing(channels, Code{0});
  const int64_t lines = frame.lines(), width = frame.sizes[2], step = channels + more;
  const int64_t worth = std::max<int64_t>(1, 16384 / (width * step));
  at::parallel_for(0, count * lines, worth, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const Group& group = groups[i / lines];
      const int64_t line = i % lines;
      uint32_t* out = memory + i / lines * image + frame.place_of(line) * step;
      for (int64_t j = 0; j < width; ++j, out += step) {
        std::array<const Code*, per> from;
        for (int n = 0; n < per; ++n) {
          const int64_t sample = group.samples[n], place = (sample * lines + line) * width + j;
          from[n] = sample < 0 ? nothing.data() : codes + place * channels;
        }
        interleave<per>(from, channels, shift, out);
        std::fill_n(out + channels, more, per == 2 ? 0x00010001u : 0x01010101u);
      }
    }
  });
  return found;
}

}  // namespace fractrain_fx
