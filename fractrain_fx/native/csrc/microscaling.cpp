// Rounds a tensor to small numbers in blocks that share a scale (formats/microscaling), in one pass over memory.

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <numeric>
#include <vector>

#include "block_layout.h"
#include "elements.h"

namespace fractrain_fx {
namespace {

// Columns that are rounded together if each has a scale, and values if several columns share one: both stay in cache.
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

// Rounds contiguous values, each of which has its own scale.
template <bool noisy>
void round_each(const float* x, float* to, int32_t count, const float* down, const float* up, const Element element,
                uint32_t position, const Noise noise) {
#pragma omp simd
  for (int32_t i = 0; i < count; ++i) {
    to[i] = element_of<noisy>(x[i] * down[i], element, position + static_cast<uint32_t>(i), noise) * up[i];
  }
}

// The same with one scale.
template <bool noisy>
inline void round_group(const float* x, float* to, int32_t count, float down, float up, const Element element,
                        uint32_t position, const Noise noise) {
#pragma omp simd
  for (int32_t i = 0; i < count; ++i) {
    to[i] = element_of<noisy>(x[i] * down, element, position + static_cast<uint32_t>(i), noise) * up;
  }
}

template <bool noisy>
void round_tile(const Tile& tile, const BlockLayout& layout, const Shared& shared, const float* first) {
  int32_t most[kColumns] = {};
  float down[kColumns], up[kColumns];
  const int32_t columns = tile.columns, group = static_cast<int32_t>(std::min<int64_t>(layout.group, columns));
  const int32_t groups = (columns + group - 1) / group;
  // Constant sizes of groups, which make loops short.
  const auto for_groups = [&](auto&& take) {
    for (int32_t i = 0, begin = 0; i < groups; ++i, begin += group) {
      const int32_t count = std::min(group, columns - begin);
      count == 32 ? take(i, begin, 32) : count == 16 ? take(i, begin, 16) : take(i, begin, count);
    }
  };
  if (shared.scale != Scale::tensor) {
    for_rows(tile, layout, [&](const float* x, float*) {
      if (group == 1) return enlarge(x, columns, most);
      for_groups([&](int32_t i, int32_t begin, int32_t count) {
        most[i] = std::max(most[i], largest_of(x + begin, count));
      });
    });
  }
  scales_of(shared, most, groups, down, up);
  for_rows(tile, layout, [&](const float* x, float* to) {
    const uint32_t position = static_cast<uint32_t>(to - first);
    if (group == 1) return round_each<noisy>(x, to, columns, down, up, shared.element, position, shared.noise);
    for_groups([&](int32_t i, int32_t begin, int32_t count) {
      const uint32_t place = position + static_cast<uint32_t>(begin);
      round_group<noisy>(x + begin, to + begin, count, down[i], up[i], shared.element, place, shared.noise);
    });
  });
}

template <bool noisy>
void round_tiles(const BlockLayout& layout, const Shared& shared, const float* x, float* out) {
  const int64_t group = layout.group;
  const int64_t width = group == 1 ? kColumns : group * std::clamp<int64_t>(kValues / group, 1, kColumns);
  for_tiles(layout, width, x, out, [&](const Tile& tile) { round_tile<noisy>(tile, layout, shared, out); });
}

// The bits of the largest size of all values.
int32_t largest_of(const Tensor& given) {
  const Tensor x = given.is_non_overlapping_and_dense() ? given : given.contiguous();
  const float* values = x.const_data_ptr<float>();
  return at::parallel_reduce(
      0, x.numel(), kGrain, 0,
      [&](int64_t begin, int64_t end, int32_t most) { return std::max(most, largest_of(values + begin, end - begin)); },
      [](int32_t one, int32_t other) { return std::max(one, other); });
}

// The same values with the dimensions of each cut next to each other.
std::vector<int64_t> order_of(const Tensor& x, at::IntArrayRef first, at::IntArrayRef second) {
  std::vector<int64_t> order(first.begin(), first.end());
  order.insert(order.end(), second.begin(), second.end());
  for (int64_t dim = x.dim() - 1; dim >= 0; --dim) {
    if (std::find(order.begin(), order.end(), dim) == order.end()) order.insert(order.begin(), dim);
  }
  return order;
}

// Rounds values in blocks of up to `piece` values along one or two cuts, each some dimensions laid end to end; without a
// piece, of all values along them. Numbers of the element as `Grid` in formats/microscaling/elements.py has them.
void round_blocks(const Tensor& x, at::IntArrayRef first, at::IntArrayRef second, std::optional<int64_t> piece,
                  at::ArrayRef<double> element, int64_t scale, std::optional<int64_t> seed, Tensor& out) {
  TORCH_CHECK(out.is_non_overlapping_and_dense() && element.size() == 4, "expected dense out and four numbers");
  std::vector<int64_t> dims(first.begin(), first.end());
  int64_t size = piece.value_or(1);
  if (!piece) {
    // All in one block, so in the order of memory.
    std::stable_sort(dims.begin(), dims.end(), [&](int64_t a, int64_t b) { return x.stride(a) > x.stride(b); });
    for (const int64_t dim : dims) size *= x.size(dim);
  }
  std::optional<BlockLayout> layout = layout_of(x, out, dims, second, size);
  if (!layout) {
    const std::vector<int64_t> order = order_of(x, dims, second);
    std::vector<int64_t> places(order.size()), one(dims.size()), other(second.size());
    for (size_t i = 0; i < order.size(); ++i) places[order[i]] = static_cast<int64_t>(i);
    std::transform(dims.begin(), dims.end(), one.begin(), [&](int64_t dim) { return places[dim]; });
    std::transform(second.begin(), second.end(), other.begin(), [&](int64_t dim) { return places[dim]; });
    const Tensor turned = x.permute(order).contiguous();
    Tensor found = at::empty(turned.sizes(), turned.options());
    round_blocks(turned, one, other, size, element, scale, seed, found);
    out.copy_(found.permute(places));
    return;
  }
  const uint64_t drawn = static_cast<uint64_t>(seed.value_or(0));
  const Noise noise{nullptr, static_cast<uint32_t>(drawn & 0x7FFFFFFF), static_cast<uint32_t>((drawn >> 31) & 0x7FFFFFFF)};
  const Element values(element[0], element[1], element[2], static_cast<int64_t>(element[3]));
  const Scale kind = static_cast<Scale>(scale);
  if (kind == Scale::tensor) layout->group = std::min(kValues, layout->columns);
  const bool whole = kind == Scale::e4m3 || kind == Scale::tensor;
  const Shared shared = shared_of(values, kind, noise, whole ? largest_of(x) : 0);
  const float* from = x.const_data_ptr<float>();
  float* to = out.mutable_data_ptr<float>();
  seed ? round_tiles<true>(*layout, shared, from, to) : round_tiles<false>(*layout, shared, from, to);
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(fractrain_fx, library) {
  library.def(
      "round_blocks(Tensor x, int[] first, int[] second, int? piece, float[] element, int scale, int? seed, *, "
      "Tensor(a!) out) -> ()");
}

TORCH_LIBRARY_IMPL(fractrain_fx, CPU, library) { library.impl("round_blocks", round_blocks); }

}  // namespace fractrain_fx
