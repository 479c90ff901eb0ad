// The random Hadamard transform along a dimension (formats/microscaling/hadamard.py), in one pass over memory.

#include <ATen/Parallel.h>
#include <ATen/TensorIterator.h>
#include <ATen/core/Tensor.h>
#include <torch/library.h>

#include <cmath>

#include "block_layout.h"
#include "rounding.h"

namespace fractrain_fx {
namespace {

// Columns that are transformed together, and the most rows: their copies stay in a core's first cache.
constexpr int64_t kColumns = 128, kRows = 128;

// Sums and differences of rows, by Sylvester's construction of the matrix.
inline void transform(float (*rows)[kColumns], int64_t width) {
  for (int64_t half = 1; half < width; half *= 2) {
    for (int64_t first = 0; first < width; first += 2 * half) {
      for (int64_t row = first; row < first + half; ++row) {
        float *one = rows[row], *other = rows[row + half];
#pragma omp simd
        for (int64_t i = 0; i < kColumns; ++i) {
          const float sum = one[i] + other[i], difference = one[i] - other[i];
          one[i] = sum;
          other[i] = difference;
        }
      }
    }
  }
}

// Every `width` neighbours along a dimension of x times Hadamard's matrix, whose columns have random signs. Out is longer
// than x where zeros fill the last of them up.
void rotate(const Tensor& x, int64_t dim, int64_t width, int64_t seed, Tensor& out) {
  TORCH_CHECK(width <= kRows && out.size(dim) == (x.size(dim) + width - 1) / width * width, "expected room in out");
  const std::optional<BlockLayout> layout = layout_of(x, out, dim, {}, width);
  TORCH_CHECK(layout && layout->group == 1, "expected other dimensions inside this one");
  const uint64_t drawn = static_cast<uint64_t>(seed);
  const uint32_t low = static_cast<uint32_t>(drawn & 0x7FFFFFFF), high = static_cast<uint32_t>((drawn >> 31) & 0x7FFFFFFF);
  float signs[kRows];
  for (int64_t row = 0; row < width; ++row) signs[row] = noise_at(static_cast<uint32_t>(row), low, high) < 0 ? -1 : 1;
  const float scale = static_cast<float>(std::sqrt(1.0 / static_cast<double>(width)));
  const float* from = x.const_data_ptr<float>();
  for_tiles(*layout, kColumns, from, out.mutable_data_ptr<float>(), [&](const Tile& tile) {
    float rows[kRows][kColumns];
    const int64_t present = tile.rows[0], step = layout->rows[0].from;
    for (int64_t row = 0; row < width; ++row) {
      const float *values = tile.from + row * step, sign = signs[row];
      const int32_t count = row < present ? tile.columns : 0;
      for (int32_t i = 0; i < count; ++i) rows[row][i] = values[i] * sign;
      std::fill(rows[row] + count, rows[row] + kColumns, 0.0f);
    }
    transform(rows, width);
    for (int64_t row = 0; row < width; ++row) {
      float* to = tile.to + row * layout->rows[0].to;
      for (int32_t i = 0; i < tile.columns; ++i) to[i] = rows[row][i] * scale;
    }
  });
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(fractrain_fx, library) {
  library.def("rotate(Tensor x, int dim, int width, int seed, *, Tensor(a!) out) -> ()");
}

TORCH_LIBRARY_IMPL(fractrain_fx, CPU, library) { library.impl("rotate", rotate); }

}  // namespace fractrain_fx
