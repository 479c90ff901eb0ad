// The scales of the blocks of a tile, and how a tensor is cut into blocks: what rounding and counting share.

#pragma once

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>

#include <numeric>
#include <vector>

#include "block_layout.h"
#include "elements.h"

namespace fractrain_fx {

// Columns that are read together if each has a scale, and values if several columns share one: both stay in cache.
constexpr int64_t kColumns = 256, kValues = 4096;

// The bits of the largest size of some values.
inline int32_t largest_of(const float* x, int64_t count) {
  int32_t most = 0;
#pragma omp simd reduction(max : most)
  for (int64_t i = 0; i < count; ++i) {
    const int32_t size = bits_of(x[i]) & kSize;
    most = size > most ? size : most;
  }
  return most;
}

inline void enlarge(const float* x, int32_t count, int32_t* most) {
#pragma omp simd
  for (int32_t i = 0; i < count; ++i) {
    const int32_t size = bits_of(x[i]) & kSize;
    most[i] = size > most[i] ? size : most[i];
  }
}

// The bits of the largest size of all values.
inline int32_t largest_of(const Tensor& given) {
  const Tensor x = given.is_non_overlapping_and_dense() ? given : given.contiguous();
  const float* values = x.const_data_ptr<float>();
  return at::parallel_reduce(
      0, x.numel(), kGrain, 0,
      [&](int64_t begin, int64_t end, int32_t most) { return std::max(most, largest_of(values + begin, end - begin)); },
      [](int32_t one, int32_t other) { return std::max(one, other); });
}

// The groups of columns of a tile that share a scale.
struct Groups {
  int32_t size, count, columns;

  Groups(const Tile& tile, const BlockLayout& layout)
      : size(static_cast<int32_t>(std::min<int64_t>(layout.group, tile.columns))),
        count((tile.columns + size - 1) / size),
        columns(tile.columns) {}

  // Calls take(group, begin, columns) for each, with constant sizes, which make loops short.
  template <class Take>
  void each(Take&& take) const {
    for (int32_t i = 0, begin = 0; i < count; ++i, begin += size) {
      const int32_t held = std::min(size, columns - begin);
      held == 32 ? take(i, begin, 32) : held == 16 ? take(i, begin, 16) : take(i, begin, held);
    }
  }
};

// The bits of the largest size of each group's values; `most` begins with zeros.
inline void largest_of(const Tile& tile, const BlockLayout& layout, const Groups& groups, int32_t* most) {
  for_rows(tile, layout, [&](const float* x, const float*) {
    if (groups.size == 1) return enlarge(x, groups.columns, most);
    groups.each([&](int32_t i, int32_t begin, int32_t count) {
      most[i] = std::max(most[i], largest_of(x + begin, count));
    });
  });
}

// Blocks of up to `size` values along one or two cuts, each some dimensions laid end to end.
struct Cuts {
  std::vector<int64_t> first, second;
  int64_t size;

  // Without a piece, a block has all values along the first cut.
  Cuts(const Tensor& x, at::IntArrayRef first, at::IntArrayRef second, std::optional<int64_t> piece)
      : first(first.begin(), first.end()), second(second.begin(), second.end()), size(piece.value_or(1)) {
    if (piece) return;
    // All in one block, so in the order of memory.
    std::stable_sort(this->first.begin(), this->first.end(),
                     [&](int64_t a, int64_t b) { return x.stride(a) > x.stride(b); });
    for (const int64_t dim : this->first) size *= x.size(dim);
  }

  // The layout of values and results; nothing if a cut's dimensions do not lie evenly in both.
  std::optional<BlockLayout> layout(const Tensor& x, const Tensor& out, Scale scale) const {
    std::optional<BlockLayout> found = layout_of(x, out, first, second, size);
    if (found && scale == Scale::tensor) found->group = std::min(kValues, found->columns);
    return found;
  }

  // An order of all dimensions that lays those of each cut next to each other.
  std::vector<int64_t> order(int64_t dims) const {
    std::vector<int64_t> order(first);
    order.insert(order.end(), second.begin(), second.end());
    for (int64_t dim = dims - 1; dim >= 0; --dim) {
      if (std::find(order.begin(), order.end(), dim) == order.end()) order.insert(order.begin(), dim);
    }
    return order;
  }

  // The same cuts of a tensor whose dimensions have moved to these places.
  Cuts moved(const std::vector<int64_t>& places) const {
    Cuts other(*this);
    for (std::vector<int64_t>* dims : {&other.first, &other.second}) {
      for (int64_t& dim : *dims) dim = places[dim];
    }
    return other;
  }
};

// Where each dimension of an order lies in it.
inline std::vector<int64_t> places_of(const std::vector<int64_t>& order) {
  std::vector<int64_t> places(order.size());
  for (size_t i = 0; i < order.size(); ++i) places[order[i]] = static_cast<int64_t>(i);
  return places;
}

// Columns of a tile.
inline int64_t width_of(const BlockLayout& layout) {
  const int64_t group = layout.group;
  return group == 1 ? kColumns : group * std::clamp<int64_t>(kValues / group, 1, kColumns);
}

// What all blocks of a tensor have in common. Numbers of the element as `Grid` in formats/microscaling/elements.py has
// them.
inline Shared shared_by(const Tensor& x, at::ArrayRef<double> element, Scale scale, const Noise& noise) {
  const Element values(element[0], element[1], element[2], static_cast<int64_t>(element[3]));
  const bool whole = scale == Scale::e4m3 || scale == Scale::tensor;
  return shared_of(values, scale, noise, whole ? largest_of(x) : 0);
}

}  // namespace fractrain_fx
