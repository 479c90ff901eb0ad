// Multiplies packed matrices of integer codes, tile by tile and block by block of the dimension that is summed over,
// and applies scales, zeros and added terms to the sums.

#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/Parallel.h>

#include <algorithm>
#include <type_traits>
#include <utility>
#include <vector>

#include "packed.h"
#include "tasks.h"

#ifdef FRACTRAIN_FX_TILES

namespace fractrain_fx {

// Tiles of one task: their operands fit into a cache of 512 KiB.
constexpr int64_t kTaskRows = kUnits ? 4 : 16, kTaskColumns = 256 / kPanelColumns;

// Steps of several blocks for which the operands of a task's tiles fit into that cache too.
constexpr int64_t kChunk = 512;

// Multiplications that make it worth to wake a thread.
constexpr int64_t kWork = 1 << 18;

// Panels that one task packs. If rows lie side by side in memory, several panels together read whole cache lines.
constexpr int64_t kPanels = 32;

// Makes the result y from the product P of codes: y = scale * s * P + sum * z + zero * t + added + c.
struct Finish {
  struct Row {
    float scale, zero, sum, added;
  };
  std::vector<Row> rows;
  std::vector<float> s, z, t, c;  // of columns

  void push(float scale, float zero, float sum, float added) {
    s.push_back(scale);
    z.push_back(zero);
    t.push_back(sum);
    c.push_back(added);
  }
};

// Writes the sums of a tile, times factor, to rows of a result (first), or adds them to those.
template <bool first, class Sum>
void put(const Sum* sums, float factor, int64_t rows, int64_t columns, int64_t next, float* out) {
  for (int64_t i = 0; i < rows; ++i, sums += kPanelColumns, out += next) {
    const auto one = [&](int64_t j) {
      const float sum = factor * static_cast<float>(sums[j]);
      out[j] = first ? sum : out[j] + sum;
    };
    if (columns == kPanelColumns) {
#pragma omp simd
      for (int64_t j = 0; j < kPanelColumns; ++j) one(j);
    } else {
      for (int64_t j = 0; j < columns; ++j) one(j);
    }
  }
}

// The end of a run of blocks from `from` on whose packed codes fit into the cache together.
inline int64_t chunk_of(const std::vector<Block>& blocks, int64_t from, int64_t to) {
  int64_t steps = 0, k = from;
  do {
    steps += parts_of(blocks[k].length, blocks[k].way.per);
  } while (++k < to && steps + parts_of(blocks[k].length, blocks[k].way.per) <= kChunk);
  return k;
}

#ifdef FRACTRAIN_FX_UNITS

// The product of codes of one tile in one block.
inline void multiply_tile(const Left& a, const Right& b, int64_t k, int64_t m, int64_t n, int32_t* sums) {
  const int64_t steps = Left::steps(a.blocks[k]), count = steps / kUnitSteps;
  const int32_t *first = a.at(k, m), *second = b.at(k, n);
  const UnitWalk walk{kUnitBytes, kUnitRows * kUnitBytes, 4 * kUnitColumns, 4 * kUnitColumns * kUnitSteps};
  const int32_t* low = Left::planes(a.blocks[k]) == 2 ? first + steps * kPanelRows : nullptr;
  multiply_units(first, low, second, walk, count, sums);
}

#else

// A line of steps of packed matrices: the same step of all rows lies side by side.
inline Walk packed_walk() { return {1, 1, 4 * kPanelRows, 4 * kPanelColumns, 0, 0, {0, 4, 8, 12, 16, 20}}; }

// The product of codes of one tile in one block.
inline void multiply_tile(const Left& a, const Right& b, int64_t k, int64_t m, int64_t n, int32_t* sums) {
  const auto [tile, shift, longest] = a.pace(k, m);
  const int64_t steps = Left::steps(a.blocks[k]);
  const int32_t *first = a.at(k, m), *second = b.at(k, n), *each = b.sums_at(k, n);
  // Codes of a are packed minus the shift: each column's sum, times the shift, adds it back.
  for (int i = 0; i < kPanelRows; ++i) {
#pragma omp simd
    for (int j = 0; j < kPanelColumns; ++j) sums[i * kPanelColumns + j] = shift * each[j];
  }
  Walk walk = packed_walk();
  for (int64_t done = 0; done < steps; done += longest) {
    walk.steps = std::min(longest, steps - done);
    tile(first + done * kPanelRows, second + done * kPanelColumns, walk, sums);
  }
}

#endif

// Products of codes of some tiles, summed over some blocks.
inline void multiply(const Left& a, const Right& b, int64_t top, int64_t bottom, int64_t left,
                     int64_t right, int64_t from, int64_t to, float* out) {
  for (int64_t start = from, stop; start < to; start = stop) {
    stop = chunk_of(a.blocks, start, to);
    for (int64_t n = left; n < right; ++n) {
      for (int64_t m = top; m < bottom; ++m) {
        const int64_t row = m * kPanelRows, column = n * kPanelColumns;
        const auto put_out = [&](const auto* sums, float factor) {
          using Sum = std::remove_const_t<std::remove_pointer_t<decltype(sums)>>;
          const auto run = start == from ? put<true, Sum> : put<false, Sum>;
          run(sums, factor, std::min<int64_t>(kPanelRows, a.count - row),
              std::min<int64_t>(kPanelColumns, b.count - column), b.count, out + row * b.count + column);
        };
        alignas(64) int32_t sums[kPanelRows * kPanelColumns];
        multiply_tile(a, b, start, m, n, sums);
        if (stop == start + 1) {
          put_out(sums, a.blocks[start].factor);
          continue;
        }
        alignas(64) float total[kPanelRows * kPanelColumns];
        put<true>(sums, a.blocks[start].factor, kPanelRows, kPanelColumns, kPanelColumns, total);
        for (int64_t k = start + 1; k < stop; ++k) {
          multiply_tile(a, b, k, m, n, sums);
          put<false>(sums, a.blocks[k].factor, kPanelRows, kPanelColumns, kPanelColumns, total);
        }
        put_out(total, 1.0f);
      }
    }
  }
}

inline void finish(const Finish& with, int64_t top, int64_t bottom, int64_t left, int64_t right, int64_t columns,
                   float* out) {
  const float *s = with.s.data(), *z = with.z.data(), *t = with.t.data(), *c = with.c.data();
  for (int64_t i = top; i < bottom; ++i) {
    const auto [scale, zero, sum, added] = with.rows[i];
    float* y = out + i * columns;
#pragma omp simd
    for (int64_t j = left; j < right; ++j) y[j] = y[j] * (scale * s[j]) + (sum * z[j] + zero * t[j]) + (added + c[j]);
  }
}

// The product of two matrices of codes, block by block. finish_of(left, right) makes the Finish from the sums of codes.
template <class A, class FinishOf>
Tensor product_of(const Factor<A>& first, const Factor<int8_t>& second, const std::vector<Block>& blocks,
                  FinishOf&& finish_of) {
  const int64_t M = first.count, N = second.count;
  Left a(M, blocks);
  Right b(N, blocks);
  const int64_t lefts = a.panels * a.tasks(), rights = b.panels * b.tasks();
  share(parts_of(lefts + rights, kPanels), 1, [&](int64_t group) {
    const int64_t end = std::min(lefts + rights, (group + 1) * kPanels);
    for (int64_t task = group * kPanels; task < end;) {
      task += task < lefts ? a.fill(first, task, std::min(end, lefts) - task) : b.fill(second, task - lefts, end - task);
    }
  });
  const Finish with = finish_of(a, b);

  Tensor out = at::empty({M, N}, at::kFloat);
  float* found = out.mutable_data_ptr<float>();
  const int64_t down = parts_of(a.panels, kTaskRows), across = parts_of(b.panels, kTaskColumns);
  // If there are few tiles with long sums, each sum is split into parts for several threads.
  const int64_t threads = at::get_num_threads(), count = a.tasks();
  const int64_t parts = std::clamp<int64_t>(2 * threads / (down * across), 1, count);
  std::vector<float> partial(parts > 1 ? parts * M * N : 0);
  const int64_t work = std::min(M, kTaskRows * kPanelRows) * std::min(N, kTaskColumns * kPanelColumns) * first.length;
  const int64_t worth = std::max<int64_t>(1, kWork * parts / work);
  share(down * across * parts, worth, [&](int64_t task) {
    const int64_t part = task % parts, tile = task / parts;
    const int64_t top = tile % down * kTaskRows, left = tile / down * kTaskColumns;
    const int64_t bottom = std::min(a.panels, top + kTaskRows), right = std::min(b.panels, left + kTaskColumns);
    float* target = parts > 1 ? partial.data() + part * M * N : found;
    const Units units;
    multiply(a, b, top, bottom, left, right, count * part / parts, count * (part + 1) / parts, target);
    if (parts > 1) return;
    finish(with, top * kPanelRows, std::min(M, bottom * kPanelRows), left * kPanelColumns,
           std::min(N, right * kPanelColumns), N, found);
  });
  if (parts > 1) {
    at::parallel_for(0, M, std::max<int64_t>(1, 16384 / (N * parts)), [&](int64_t begin, int64_t end) {
      for (int64_t i = begin * N; i < end * N; ++i) {
        float sum = 0.0f;
        for (int64_t part = 0; part < parts; ++part) sum += partial[part * M * N + i];
        found[i] = sum;
      }
      finish(with, begin, end, 0, N, N, found);
    });
  }
  return out;
}

}  // namespace fractrain_fx

#endif
