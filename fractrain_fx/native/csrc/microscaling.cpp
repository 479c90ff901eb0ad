// Rounds a tensor to small numbers in blocks that share a scale (formats/microscaling), in one pass over memory.

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include "block_tiles.h"

namespace fractrain_fx {
namespace {

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
  const Groups groups(tile, layout);
  if (shared.scale != Scale::tensor) largest_of(tile, layout, groups, most);
  scales_of(shared, most, groups.count, down, up);
  for_rows(tile, layout, [&](const float* x, float* to) {
    const uint32_t position = static_cast<uint32_t>(to - first);
    if (groups.size == 1) {
      return round_each<noisy>(x, to, tile.columns, down, up, shared.element, position, shared.noise);
    }
    groups.each([&](int32_t i, int32_t begin, int32_t count) {
      const uint32_t place = position + static_cast<uint32_t>(begin);
      round_group<noisy>(x + begin, to + begin, count, down[i], up[i], shared.element, place, shared.noise);
    });
  });
}

template <bool noisy>
void round_tiles(const BlockLayout& layout, const Shared& shared, const float* x, float* out) {
  for_tiles(layout, width_of(layout), x, out,
            [&](const Tile& tile) { round_tile<noisy>(tile, layout, shared, out); });
}

void round_cuts(const Tensor& x, const Cuts& cuts, at::ArrayRef<double> element, Scale scale,
                std::optional<int64_t> seed, Tensor& out) {
  const std::optional<BlockLayout> layout = cuts.layout(x, out, scale);
  if (!layout) {
    const std::vector<int64_t> order = cuts.order(x.dim()), places = places_of(order);
    const Tensor turned = x.permute(order).contiguous();
    Tensor found = at::empty(turned.sizes(), turned.options());
    round_cuts(turned, cuts.moved(places), element, scale, seed, found);
    out.copy_(found.permute(places));
    return;
  }
  const uint64_t drawn = static_cast<uint64_t>(seed.value_or(0));
  const Noise noise{nullptr, static_cast<uint32_t>(drawn & 0x7FFFFFFF), static_cast<uint32_t>((drawn >> 31) & 0x7FFFFFFF)};
  const Shared shared = shared_by(x, element, scale, noise);
  const float* from = x.const_data_ptr<float>();
  float* to = out.mutable_data_ptr<float>();
  seed ? round_tiles<true>(*layout, shared, from, to) : round_tiles<false>(*layout, shared, from, to);
}

// Rounds values in blocks of up to `piece` values along one or two cuts, each some dimensions laid end to end; without a
// piece, of all values along them.
void round_blocks(const Tensor& x, at::IntArrayRef first, at::IntArrayRef second, std::optional<int64_t> piece,
                  at::ArrayRef<double> element, int64_t scale, std::optional<int64_t> seed, Tensor& out) {
  TORCH_CHECK(out.is_non_overlapping_and_dense() && element.size() == 4, "expected dense out and four numbers");
  round_cuts(x, Cuts(x, first, second, piece), element, static_cast<Scale>(scale), seed, out);
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(fractrain_fx, library) {
  library.def(
      "round_blocks(Tensor x, int[] first, int[] second, int? piece, float[] element, int scale, int? seed, *, "
      "Tensor(a!) out) -> ()");
}

TORCH_LIBRARY_IMPL(fractrain_fx, CPU, library) { library.impl("round_blocks", round_blocks); }

}  // namespace fractrain_fx
