// Counts what rounding in blocks has done to a tensor, in one pass over values and rounded values: for watched steps.

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <array>
#include <tuple>

#include "block_tiles.h"

namespace fractrain_fx {
namespace {

constexpr int32_t kExponents = 256;          // bins, the first of which is that of 2^-127
constexpr int32_t kInfinite = kExponent;     // the bits of infinity
constexpr double kModest[] = {1e-15, 1e15};  // as numerics/statistics.py has them

// A number whose order among integers is that of the values; NaN lies beyond both infinities.
inline int32_t order_of(int32_t bits) { return bits ^ ((bits >> 31) & kSize); }

struct Counts {
  double signal = 0, noise = 0;  // sums of squares
  int32_t lowest = std::numeric_limits<int32_t>::max(), highest = std::numeric_limits<int32_t>::min();
  int64_t nonzero = 0, underflowed = 0, clipped = 0, saturated = 0, blocks = 0;
  std::array<int64_t, kExponents> exponents{};

  void add(const Counts& other) {
    signal += other.signal;
    noise += other.noise;
    lowest = std::min(lowest, other.lowest);
    highest = std::max(highest, other.highest);
    nonzero += other.nonzero;
    underflowed += other.underflowed;
    clipped += other.clipped;
    saturated += other.saturated;
    blocks += other.blocks;
    for (int32_t i = 0; i < kExponents; ++i) exponents[i] += other.exponents[i];
  }

  // A block with a scale, and whether it needs one beyond its type.
  void add_block(float up, bool beyond) {
    ++blocks;
    saturated += beyond;
    if (std::isfinite(up)) ++exponents[std::max(1, bits_of(up) >> kMantissa)];
  }
};

// Whether the scale that a block needs lies beyond its type (formats/microscaling/scales.py: `saturated`).
bool is_beyond(const Shared& shared, int32_t most) {
  const float largest = float_of(most);
  if (!(largest > 0)) return false;
  if (shared.scale == Scale::e8m0) {
    const int32_t exponent = (most >> kMantissa) - kBias - shared.element.top;
    return exponent < -127 || exponent > 126;
  }
  const float needed = largest / shared.element.largest;
  return shared.scale == Scale::e4m3 ? needed / shared.of_tensor < 0x1p-6f : needed < kTiny;
}

// Adds contiguous values, each with its scale, which ends at `largest` times the scale, and rounds to 0 up to `least`
// times the scale.
void add_row(const float* x, const float* rounded, const float* up, int32_t count, float largest, float least,
             Counts& counts) {
  double signal = 0, noise = 0;
  int32_t lowest = counts.lowest, highest = counts.highest, nonzero = 0, underflowed = 0, clipped = 0;
#pragma omp simd reduction(+ : signal, noise, nonzero, underflowed, clipped) reduction(min : lowest) \
    reduction(max : highest)
  for (int32_t i = 0; i < count; ++i) {
    const int32_t bits = bits_of(x[i]), place = order_of(bits);
    const float size = float_of(bits & kSize);
    const double value = x[i], error = x[i] - rounded[i];
    signal += value * value;
    noise += error * error;
    lowest = place < lowest ? place : lowest;
    highest = place > highest ? place : highest;
    nonzero += size != 0.0f;
    underflowed += (size != 0.0f) & (size <= up[i] * least);
    clipped += size > up[i] * largest;
  }
  counts.signal += signal;
  counts.noise += noise;
  counts.lowest = lowest;
  counts.highest = highest;
  counts.nonzero += nonzero;
  counts.underflowed += underflowed;
  counts.clipped += clipped;
}

void add_tile(const Tile& tile, const BlockLayout& layout, const Shared& shared, float least, Counts& counts) {
  int32_t most[kColumns] = {};
  float down[kColumns], up[kColumns], wide[kValues];
  const Groups groups(tile, layout);
  const bool several = shared.scale != Scale::tensor;
  if (several) largest_of(tile, layout, groups, most);
  scales_of(shared, most, groups.count, down, up);
  for (int32_t i = 0; several && i < groups.count; ++i) {
    if (most[i] || std::isnan(up[i])) counts.add_block(up[i], is_beyond(shared, most[i]));
  }
  // A group that is wider than `wide` has all columns of its tile.
  const int32_t held = std::min<int32_t>(groups.columns, kValues);
  const float* scales = up;
  if (groups.size > 1) {
    groups.each([&](int32_t i, int32_t begin, int32_t count) {
      std::fill_n(wide + begin, std::min(count, held), up[i]);
    });
    scales = wide;
  }
  for_rows(tile, layout, [&](const float* x, const float* rounded) {
    for (int32_t begin = 0; begin < groups.columns; begin += held) {
      const int32_t count = std::min(held, groups.columns - begin);
      add_row(x + begin, rounded + begin, scales, count, shared.element.largest, least, counts);
    }
  });
}

// The numbers of `Counts` in kernels/microscaling.py, and the number of blocks with a scale of each exponent.
std::tuple<Tensor, Tensor> results_of(const Counts& counts) {
  const bool nan = counts.highest > kInfinite || counts.lowest < order_of(kInfinite | ~kSize);
  const double lo = nan ? NAN : float_of(order_of(counts.lowest)), hi = nan ? NAN : float_of(order_of(counts.highest));
  const double size = std::max(std::abs(lo), std::abs(hi));
  // In units of the largest size where float32 may not hold the norms.
  const double unit = nan || (size > kModest[0] && size < kModest[1]) || size == 0 ? 1 : size;
  Tensor numbers = at::empty({9}, at::kDouble), exponents = at::empty({kExponents}, at::kLong);
  const double found[] = {std::sqrt(counts.signal) / unit,
                          std::sqrt(counts.noise) / unit,
                          lo,
                          hi,
                          static_cast<double>(counts.nonzero),
                          static_cast<double>(counts.underflowed),
                          static_cast<double>(counts.clipped),
                          static_cast<double>(counts.saturated),
                          static_cast<double>(counts.blocks)};
  std::copy(std::begin(found), std::end(found), numbers.mutable_data_ptr<double>());
  std::copy(counts.exponents.begin(), counts.exponents.end(), exponents.mutable_data_ptr<int64_t>());
  return {numbers, exponents};
}

std::tuple<Tensor, Tensor> count_cuts(const Tensor& x, const Tensor& rounded, const Cuts& cuts,
                                      at::ArrayRef<double> element, Scale scale) {
  const std::optional<BlockLayout> layout = cuts.layout(x, rounded, scale);
  if (!layout) {
    const std::vector<int64_t> order = cuts.order(x.dim());
    return count_cuts(x.permute(order).contiguous(), rounded.permute(order).contiguous(), cuts.moved(places_of(order)),
                      element, scale);
  }
  const Shared shared = shared_by(x, element, scale, {nullptr, 0, 0});
  const float least = static_cast<float>(element[1] * element[0] / 2);
  std::vector<Counts> of_threads(at::get_num_threads());
  float* results = const_cast<float*>(rounded.const_data_ptr<float>());  // tiles are for writing, and these are read
  for_tiles(*layout, width_of(*layout), x.const_data_ptr<float>(), results, [&](const Tile& tile) {
    add_tile(tile, *layout, shared, least, of_threads[at::get_thread_num()]);
  });
  Counts counts;
  for (const Counts& each : of_threads) counts.add(each);
  if (scale == Scale::tensor) {
    const int32_t most = largest_of(x);
    float down, up;
    scales_of(shared, &most, 1, &down, &up);
    if (most) counts.add_block(up, is_beyond(shared, most));
  }
  return results_of(counts);
}

// As round_blocks in microscaling.cpp, of values and the rounded values.
std::tuple<Tensor, Tensor> count_blocks(const Tensor& x, const Tensor& rounded, at::IntArrayRef first,
                                        at::IntArrayRef second, std::optional<int64_t> piece,
                                        at::ArrayRef<double> element, int64_t scale) {
  TORCH_CHECK(element.size() == 4 && x.sizes() == rounded.sizes(), "expected equal shapes and four numbers");
  return count_cuts(x, rounded, Cuts(x, first, second, piece), element, static_cast<Scale>(scale));
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(fractrain_fx, library) {
  library.def(
      "count_blocks(Tensor x, Tensor rounded, int[] first, int[] second, int? piece, float[] element, int scale) -> "
      "(Tensor, Tensor)");
}

TORCH_LIBRARY_IMPL(fractrain_fx, CPU, library) { library.impl("count_blocks", count_blocks); }

}  // namespace fractrain_fx
