// Products of matrices of whole codes in tiles, block by block of what is summed over, and what is done to the sums.

#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/Parallel.h>

#include <cstdlib>
#include <numeric>
#include <utility>
#include <vector>

#include "packing.h"
#include "tasks.h"
#include "tiles.h"

#ifdef FRACTRAIN_FX_TILES

namespace fractrain_fx {

using at::Tensor;

// Steps of a tile whose operands fit into the innermost cache.
constexpr int64_t kSteps = 256;

// What is summed up in 16 bits and for fewer steps than this takes less time in 32.
constexpr int64_t kFewest = 3;

// The largest numbers of 16 and of 32 bits.
constexpr int64_t kMost16 = 32767, kMost32 = 2147483647;

// Tiles of one task: their operands fit into a cache of 512 KiB.
constexpr int64_t kTaskRows = 16, kTaskColumns = 16;

// Steps of several blocks whose operands, of the tiles of a task, fit into it too.
constexpr int64_t kChunk = 512;

// Products that are worth a thread.
constexpr int64_t kWork = 1 << 18;

// Panels that one task packs: together where rows lie side by side, as some lines of a cache are then read whole.
constexpr int64_t kPanels = 32;

// Numbers of 32 bits in a line of a cache.
constexpr int64_t kLine = 16;

// Packed numbers, in 32 bits, for which a thread keeps memory.
constexpr int64_t kKept = int64_t{1} << 22;

using Tile = void (*)(const int32_t*, const int32_t*, int64_t, int32_t*);

// How the steps of some rows of a are multiplied.
struct Pace {
  Tile tile;
  int32_t shift;    // what is taken from the numbers of a, so that bytes need no sign
  int64_t longest;  // steps that a tile may sum up at once
};

// The largest sum of two products of bytes of these ends, which need no sign, by bytes of this size at most.
inline int64_t pair_of(CodeEnds a, int64_t largest_b) {
  return std::max<int64_t>(1, 2 * (a.second - a.first) * largest_b);
}

inline Pace pace_of(CodeEnds a, int64_t largest_b) {
  const int64_t pair = pair_of(a, largest_b);
  if (kMost16 / pair < kFewest) return {tile_bytes, a.first, kSteps};
  return {tile_small_bytes, a.first, std::min(kSteps, kMost16 / pair)};
}

// How numbers of these ends are multiplied.
struct Way {
  int per;        // numbers in a step
  int64_t block;  // steps that are summed up as whole numbers
  int64_t largest_b;
  Pace pace;
};

inline Way way_of(CodeEnds a, CodeEnds b) {
  const auto largest = [](CodeEnds ends) { return std::max<int64_t>({1, std::abs(ends.first), std::abs(ends.second)}); };
  const int64_t largest_b = largest(b);
  if (a.second - a.first > 255 || std::abs(a.first) > 128 || pair_of(a, largest_b) > kMost16) {
    const int64_t steps = std::min(kSteps, kMost32 / (2 * largest(a) * largest_b));
    return {2, steps, largest_b, {tile_shorts, 0, steps}};
  }
  return {4, kSteps, largest_b, pace_of(a, largest_b)};
}

inline int64_t parts_of(int64_t whole, int64_t part) { return (whole + part - 1) / part; }

// Numbers whose products are summed up as whole numbers, and what that sum counts for.
struct Block {
  int64_t start, length;
  float factor;
  Way way;
};

// A run of numbers in blocks of like size.
inline void append(std::vector<Block>& blocks, int64_t start, int64_t length, float factor, const Way& way) {
  const int64_t most = way.per * way.block, count = parts_of(length, most);
  const int64_t each = parts_of(parts_of(length, way.per), count) * way.per;
  for (int64_t done = 0; done < length; done += each) {
    blocks.push_back({start + done, std::min(each, length - done), factor, way});
  }
}

// Whole numbers of a matrix, for each row (or column) and block of numbers, and their sums. Those of a are shifted.
template <int height, bool shifted>
struct Packed {
  const std::vector<Block>& blocks;
  int64_t count, panels, space;
  Tensor fresh;  // their memory, where it is not kept
  int32_t *steps, *sums;
  std::vector<Pace> paces;  // of each block and panel of a

  Packed(int64_t rows, const std::vector<Block>& of)
      : blocks(of), count(rows), panels(parts_of(rows, height)), space(0), paces(shifted ? panels * tasks() : 0) {
    for (const Block& block : blocks) space = std::max(space, parts_of(block.length, block.way.per) * height);
    // An odd number of a cache's lines, so that panels do not all lie in the same few places of it.
    space = (parts_of(space, kLine) | 1) * kLine;
    steps = memory(panels * tasks() * (space + height));
    sums = steps + panels * tasks() * space;
  }
  // Each thread keeps some for its next product, unless it is much.
  int32_t* memory(int64_t size) {
    static thread_local Tensor kept = at::empty({0}, at::kInt);
    Tensor& used = size <= kKept ? kept : fresh;
    if (!used.defined() || used.numel() < size) used = at::empty({size}, at::kInt);
    return used.mutable_data_ptr<int32_t>();
  }
  int64_t tasks() const { return static_cast<int64_t>(blocks.size()); }
  int32_t* at(int64_t b, int64_t panel) const { return steps + (b * panels + panel) * space; }
  int32_t* sums_at(int64_t b, int64_t panel) const { return sums + (b * panels + panel) * height; }
  const Pace& pace(int64_t b, int64_t panel) const { return paces[b * panels + panel]; }

  // Fills panels from one task on: how many.
  template <class Code>
  int64_t fill(const Factor<Code>& factor, int64_t task, int64_t most) {
    const int64_t b = task / panels, panel = task % panels, row = panel * height;
    const Way& way = blocks[b].way;
    const int64_t start = blocks[b].start, length = blocks[b].length;
    uint32_t* packed = reinterpret_cast<uint32_t*>(at(b, panel));
    int64_t filled = 0;
    int32_t shift = shifted ? way.pace.shift : 0;
    if (factor.next_row == 1) {
      const auto run = way.per == 2 ? pack_side_by_side<2, height, Code> : pack_side_by_side<4, height, Code>;
      filled = run(factor, row, std::min(most, panels - panel), start, length, shift, packed, space);
    }
    if constexpr (shifted) std::fill_n(&paces[task], std::max<int64_t>(1, filled), way.pace);
    if (filled == 0) {
      if constexpr (shifted) {
        // Rows of samples with fewer bits than others need not be summed up in 32 bits as often.
        if (way.per == 4 && way.pace.longest < kSteps && factor.next_in_row == 1) {
          const int64_t rows = std::min<int64_t>(height, count - row);
          paces[task] = pace_of(ends_of_rows(factor, row, rows, start, length), way.largest_b);
          shift = paces[task].shift;
        }
      }
      const auto run = way.per == 2 ? pack<2, height, Code> : pack<4, height, Code>;
      run(factor, row, start, length, shift, packed);
      filled = 1;
    }
    const auto sum = way.per == 2 ? sum_packed<2, height> : sum_packed<4, height>;
    for (int64_t i = 0; i < filled; ++i) {
      int32_t* sums_of = sums_at(b, panel + i);
      sum(packed + i * space, parts_of(length, way.per), !shifted, sums_of);
      for (int h = 0; h < height; ++h) sums_of[h] += static_cast<int32_t>(length * shift);
    }
    return filled;
  }
  int32_t sum(int64_t b, int64_t row) const { return sums_at(b, row / height)[row % height]; }
};

using Left = Packed<kTileRows, true>;
using Right = Packed<kTileColumns, false>;

// What has to be done to a product of codes: y = scale * s * P + sum * z + zero * t + added + c.
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

// What a tile summed up: put to, or added to, rows of a result.
template <bool first, class Sum>
void put(const Sum* sums, float factor, int64_t rows, int64_t columns, int64_t next, float* out) {
  for (int64_t i = 0; i < rows; ++i, sums += kTileColumns, out += next) {
    const auto one = [&](int64_t j) {
      const float sum = factor * static_cast<float>(sums[j]);
      out[j] = first ? sum : out[j] + sum;
    };
    if (columns == kTileColumns) {
#pragma omp simd
      for (int64_t j = 0; j < kTileColumns; ++j) one(j);
    } else {
      for (int64_t j = 0; j < columns; ++j) one(j);
    }
  }
}

// Blocks from one on whose packed numbers fit into caches: the first after them.
inline int64_t chunk_of(const std::vector<Block>& blocks, int64_t from, int64_t to) {
  int64_t steps = 0, k = from;
  do {
    steps += parts_of(blocks[k].length, blocks[k].way.per);
  } while (++k < to && steps + parts_of(blocks[k].length, blocks[k].way.per) <= kChunk);
  return k;
}

// The product of codes of one tile in one block.
inline void multiply_tile(const Left& a, const Right& b, int64_t k, int64_t m, int64_t n, int32_t* sums) {
  const auto [tile, shift, longest] = a.pace(k, m);
  const int64_t steps = parts_of(a.blocks[k].length, a.blocks[k].way.per);
  const int32_t *first = a.at(k, m), *second = b.at(k, n), *each = b.sums_at(k, n);
  // From what each column needs for the shift of a.
  for (int i = 0; i < kTileRows; ++i) {
#pragma omp simd
    for (int j = 0; j < kTileColumns; ++j) sums[i * kTileColumns + j] = shift * each[j];
  }
  for (int64_t done = 0; done < steps; done += longest) {
    tile(first + done * kTileRows, second + done * kTileColumns, std::min(longest, steps - done), sums);
  }
}

// Products of codes of some tiles, summed over some blocks.
inline void multiply(const Left& a, const Right& b, int64_t top, int64_t bottom, int64_t left,
                     int64_t right, int64_t from, int64_t to, float* out) {
  for (int64_t start = from, stop; start < to; start = stop) {
    stop = chunk_of(a.blocks, start, to);
    for (int64_t n = left; n < right; ++n) {
      for (int64_t m = top; m < bottom; ++m) {
        alignas(32) int32_t sums[kTileRows * kTileColumns];
        alignas(32) float total[kTileRows * kTileColumns];
        for (int64_t k = start; k < stop; ++k) {
          multiply_tile(a, b, k, m, n, sums);
          const auto run = k == start ? put<true, int32_t> : put<false, int32_t>;
          run(sums, a.blocks[k].factor, kTileRows, kTileColumns, kTileColumns, total);
        }
        const int64_t row = m * kTileRows, column = n * kTileColumns;
        const auto run = start == from ? put<true, float> : put<false, float>;
        run(total, 1.0f, std::min<int64_t>(kTileRows, a.count - row),
            std::min<int64_t>(kTileColumns, b.count - column), b.count, out + row * b.count + column);
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

// The lowest and the highest of some numbers, found on all threads.
template <class Code>
CodeEnds ends(const Code* first, int64_t count) {
  constexpr int64_t kPart = 1 << 15;
  std::vector<CodeEnds> parts(parts_of(count, kPart));
  at::parallel_for(0, static_cast<int64_t>(parts.size()), 4, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) parts[i] = ends_of(first + i * kPart, std::min(kPart, count - i * kPart));
  });
  return std::accumulate(parts.begin(), parts.end(), parts[0], both);
}

// The product of codes in blocks, finished by what finish_of makes of their sums.
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
  // Few tiles with long sums are shared out by parts of the sums.
  const int64_t threads = at::get_num_threads(), count = a.tasks();
  const int64_t parts = std::clamp<int64_t>(2 * threads / (down * across), 1, count);
  std::vector<float> partial(parts > 1 ? parts * M * N : 0);
  const int64_t work = std::min(M, kTaskRows * kTileRows) * std::min(N, kTaskColumns * kTileColumns) * first.length;
  const int64_t worth = std::max<int64_t>(1, kWork * parts / work);
  share(down * across * parts, worth, [&](int64_t task) {
    const int64_t part = task % parts, tile = task / parts;
    const int64_t top = tile % down * kTaskRows, left = tile / down * kTaskColumns;
    const int64_t bottom = std::min(a.panels, top + kTaskRows), right = std::min(b.panels, left + kTaskColumns);
    float* target = parts > 1 ? partial.data() + part * M * N : found;
    multiply(a, b, top, bottom, left, right, count * part / parts, count * (part + 1) / parts, target);
    if (parts > 1) return;
    finish(with, top * kTileRows, std::min(M, bottom * kTileRows), left * kTileColumns,
           std::min(N, right * kTileColumns), N, found);
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
