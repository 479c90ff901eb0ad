// Where the values of two tensors of one shape lie in memory, if their dimensions are in different order there.

#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/SmallVector.h>

#include <algorithm>
#include <cstdint>
#include <optional>

namespace fractrain_fx {

using at::Tensor;

// Rows of values that are contiguous in both tensors.
struct Places {
  struct Dimension {
    int64_t size, from, to;  // number of entries, stride in the first and in the second tensor
    int64_t dim;             // which dimension of the tensors it is
  };
  int64_t length = 1, count = 1;         // values in a row, and number of rows
  c10::SmallVector<Dimension, 6> outer;  // dimensions outside the rows, by stride in the first tensor
};

// The rows over dimension `first` and those after it; nothing if a row would hold a single value. Dimension `apart`
// (-1: none) stays outside the rows. Most callers have heads of attention. Rows follow the memory of the first tensor,
// which the processor then reads ahead.
inline std::optional<Places> places_of(const Tensor& from, const Tensor& to, int64_t first, int64_t apart) {
  Places places;
  for (int64_t dim = first; dim < from.dim(); ++dim) {
    if (from.size(dim) > 1) places.outer.push_back({from.size(dim), from.stride(dim), to.stride(dim), dim});
  }
  std::stable_sort(places.outer.begin(), places.outer.end(), [](const auto& a, const auto& b) { return a.from > b.from; });
  while (!places.outer.empty()) {
    const auto& last = places.outer.back();
    if (last.from != places.length || last.to != places.length || last.dim == apart) break;
    places.length *= last.size;
    places.outer.pop_back();
  }
  if (places.length == 1 && !places.outer.empty()) return std::nullopt;
  for (const auto& each : places.outer) places.count *= each.size;
  return places;
}

// Calls take(from, to, index) for rows begin to end - 1: where the row begins in the first and in the second tensor,
// and its index in each outer dimension.
template <class Take>
void for_places(const Places& places, int64_t begin, int64_t end, Take&& take) {
  const int64_t depth = static_cast<int64_t>(places.outer.size());
  c10::SmallVector<int64_t, 6> index(depth);
  int64_t from = 0, to = 0;
  for (int64_t dim = depth - 1, rest = begin; dim >= 0; --dim) {
    const auto& each = places.outer[dim];
    index[dim] = rest % each.size;
    rest /= each.size;
    from += index[dim] * each.from;
    to += index[dim] * each.to;
  }
  for (int64_t row = begin; row < end; ++row) {
    take(from, to, index);
    for (int64_t dim = depth - 1; dim >= 0; --dim) {
      const auto& each = places.outer[dim];
      from += each.from;
      to += each.to;
      if (++index[dim] < each.size) break;
      index[dim] = 0;
      from -= each.size * each.from;
      to -= each.size * each.to;
    }
  }
}

}  // namespace fractrain_fx
