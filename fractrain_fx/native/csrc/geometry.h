// The sizes of a convolution, and which places of its input its kernel reads.

#pragma once

#include <ATen/core/Tensor.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <vector>

#include "transposed.h"

namespace fractrain_fx {

using at::Tensor;

// Sizes in up to three dimensions. A convolution of fewer has leading dimensions of size 1.
using Sizes = std::array<int64_t, 3>;

inline Sizes sizes_of(at::IntArrayRef given, int64_t missing) {
  TORCH_CHECK(given.size() >= 1 && given.size() <= 3, "expected 1 to 3 dimensions, not ", given.size());
  Sizes sizes;
  sizes.fill(missing);
  std::copy(given.begin(), given.end(), sizes.end() - given.size());
  return sizes;
}

inline int64_t product_of_sizes(const Sizes& sizes) { return sizes[0] * sizes[1] * sizes[2]; }

// Calls take(index, number) for each index of an array of these sizes, the last dimension innermost.
template <class Take>
void for_each_index(const Sizes& sizes, Take&& take) {
  int64_t number = 0;
  for (int64_t i = 0; i < sizes[0]; ++i) {
    for (int64_t j = 0; j < sizes[1]; ++j) {
      for (int64_t k = 0; k < sizes[2]; ++k) take(Sizes{i, j, k}, number++);
    }
  }
}

inline int64_t number_of(const Sizes& index, const Sizes& sizes) {
  return (index[0] * sizes[1] + index[1]) * sizes[2] + index[2];
}

// A convolution of `samples` images of `sizes` gives images of `places`.
struct Convolution {
  int64_t samples, inputs, outputs;
  Sizes sizes, kernel, stride, padding, dilation, places, padded;

  Convolution(int64_t samples, int64_t inputs, int64_t outputs, at::IntArrayRef given_sizes,
              at::IntArrayRef given_kernel, at::IntArrayRef given_stride, at::IntArrayRef given_padding,
              at::IntArrayRef given_dilation)
      : samples(samples),
        inputs(inputs),
        outputs(outputs),
        sizes(sizes_of(given_sizes, 1)),
        kernel(sizes_of(given_kernel, 1)),
        stride(sizes_of(given_stride, 1)),
        padding(sizes_of(given_padding, 0)),
        dilation(sizes_of(given_dilation, 1)) {
    for (int d = 0; d < 3; ++d) {
      const int64_t reach = dilation[d] * (kernel[d] - 1) + 1;
      padded[d] = sizes[d] + 2 * padding[d];
      TORCH_CHECK(padded[d] >= reach, "the kernel is larger than its padded input");
      places[d] = (padded[d] - reach) / stride[d] + 1;
    }
  }
  int64_t taps() const { return product_of_sizes(kernel); }
  int64_t rows() const { return samples * product_of_sizes(places); }
};

// Places of the output by the taps of the kernel that lie inside the image there. Most places are of one class.
struct Classes {
  std::vector<int64_t> of_place;            // class of each place of an image
  std::vector<std::vector<char>> inside;    // of each class: whether each tap lies inside

  explicit Classes(const Convolution& of) {
    std::array<std::vector<int64_t>, 3> kinds;
    std::array<std::vector<std::vector<char>>, 3> marks;
    for (int d = 0; d < 3; ++d) {
      for (int64_t place = 0; place < of.places[d]; ++place) {
        std::vector<char> mark;
        for (int64_t tap = 0; tap < of.kernel[d]; ++tap) {
          const int64_t at = place * of.stride[d] - of.padding[d] + tap * of.dilation[d];
          mark.push_back(at >= 0 && at < of.sizes[d]);
        }
        const auto known = std::find(marks[d].begin(), marks[d].end(), mark);
        kinds[d].push_back(known - marks[d].begin());
        if (known == marks[d].end()) marks[d].push_back(mark);
      }
    }
    Sizes counts;
    for (int d = 0; d < 3; ++d) counts[d] = static_cast<int64_t>(marks[d].size());
    for_each_index(of.places, [&](const Sizes& at, int64_t) {
      of_place.push_back(number_of({kinds[0][at[0]], kinds[1][at[1]], kinds[2][at[2]]}, counts));
    });
    for_each_index(counts, [&](const Sizes& at, int64_t) {
      std::vector<char> each;
      for_each_index(of.kernel, [&](const Sizes& tap, int64_t) {
        each.push_back(marks[0][at[0]][tap[0]] && marks[1][at[1]][tap[1]] && marks[2][at[2]][tap[2]]);
      });
      inside.push_back(each);
    });
  }
  int64_t count() const { return static_cast<int64_t>(inside.size()); }
};

// The values of images (samples, channels, *sizes) with the channels innermost in memory.
template <class T>
Tensor channels_innermost(const Tensor& images) {
  const Tensor turned = images.movedim(1, -1);
  if (turned.is_contiguous()) return turned;
  const Tensor from = images.contiguous();
  Tensor found = at::empty(turned.sizes(), images.options());
  const int64_t samples = images.size(0), channels = images.size(1);
  transpose_each(from.const_data_ptr<T>(), samples, channels, from.numel() / (samples * channels),
                 found.mutable_data_ptr<T>());
  return found;
}

}  // namespace fractrain_fx
