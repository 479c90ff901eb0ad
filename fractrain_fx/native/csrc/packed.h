// Matrices of integer codes, packed block by block for tiles, and the tile that multiplies each block.

#pragma once

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>

#include <algorithm>
#include <cstdlib>
#include <numeric>
#include <vector>

#include "packing.h"
#include "packing_amx.h"
#include "tiles.h"

#ifdef FRACTRAIN_FX_TILES

namespace fractrain_fx {

using at::Tensor;

// Rows and columns of a tile of two packed matrices. With units for matrices, a step is four bytes in any case.
#ifdef FRACTRAIN_FX_UNITS
constexpr bool kUnits = true;
constexpr int kPanelRows = kUnitRows, kPanelColumns = kUnitColumns;
#else
constexpr bool kUnits = false;
constexpr int kPanelRows = kTileRows, kPanelColumns = kTileColumns;
#endif

// Steps for which the operands of one tile fit into the innermost cache.
constexpr int64_t kSteps = 256;

// Sums in 16 bits that can overflow after fewer steps than this take longer than sums in 32 bits.
constexpr int64_t kFewest = 3;

// The largest signed numbers of 16 and of 32 bits.
constexpr int64_t kMost16 = 32767, kMost32 = 2147483647;

// 32-bit numbers in a cache line.
constexpr int64_t kLine = 16;

// The most 32-bit numbers for which a thread keeps memory between products.
constexpr int64_t kKept = int64_t{1} << 22;

using Tile = void (*)(const void*, const void*, const Walk&, int32_t*);

// The tile that multiplies some rows of a, and how it is called.
struct Pace {
  Tile tile;
  int32_t shift;    // is subtracted from the codes of a, so that bytes need no sign
  int64_t longest;  // steps that one call of the tile may sum
};

// The largest sum of two products of a byte of a, shifted to need no sign, and a byte of b, of size largest_b at most.
inline int64_t pair_of(CodeEnds a, int64_t largest_b) {
  return std::max<int64_t>(1, 2 * (a.second - a.first) * largest_b);
}

inline Pace pace_of(CodeEnds a, int64_t largest_b) {
  const int64_t pair = pair_of(a, largest_b);
  if (!kPairsIn16Bits || kMost16 / pair < kFewest) return {tile_bytes, a.first, kSteps};
  return {tile_small_bytes, a.first, std::min(kSteps, kMost16 / pair)};
}

// How codes are multiplied, given the lowest and the highest of each matrix.
struct Way {
  int per;        // codes in a step
  int64_t block;  // steps that are summed in 32-bit integers
  int64_t largest_b;
  Pace pace;
};

inline Way way_of(CodeEnds a, CodeEnds b) {
  const auto largest = [](CodeEnds ends) { return std::max<int64_t>({1, std::abs(ends.first), std::abs(ends.second)}); };
  const int64_t largest_b = largest(b);
  const bool wide = kPairsIn16Bits && pair_of(a, largest_b) > kMost16;
  const bool bytes = kUnits ? a.first >= -128 && a.second <= 127 : a.second - a.first <= 255 && std::abs(a.first) <= 128;
  if (wide || !bytes) {
    const int64_t steps = std::min(kSteps, kMost32 / (2 * largest(a) * largest_b));
    return {2, steps, largest_b, {tile_shorts, 0, steps}};
  }
  return {4, kSteps, largest_b, pace_of(a, largest_b)};
}

inline int64_t parts_of(int64_t whole, int64_t part) { return (whole + part - 1) / part; }

// The lowest and the highest of some codes, found on all threads.
template <class Code>
CodeEnds ends(const Code* first, int64_t count) {
  constexpr int64_t kPart = 1 << 15;
  std::vector<CodeEnds> parts(parts_of(count, kPart));
  at::parallel_for(0, static_cast<int64_t>(parts.size()), 4, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) parts[i] = ends_of(first + i * kPart, std::min(kPart, count - i * kPart));
  });
  return std::accumulate(parts.begin(), parts.end(), parts[0], both);
}

// A part of the dimension that is summed over: products of its codes are summed in integers, and the sum times factor
// is added to the result.
struct Block {
  int64_t start, length;
  float factor;
  Way way;
};

// Splits a run of codes into blocks of about equal size.
inline void append(std::vector<Block>& blocks, int64_t start, int64_t length, float factor, const Way& way) {
  const int64_t most = way.per * way.block, count = parts_of(length, most);
  const int64_t each = parts_of(parts_of(length, way.per), count) * way.per;
  for (int64_t done = 0; done < length; done += each) {
    blocks.push_back({start + done, std::min(each, length - done), factor, way});
  }
}

// The packed codes of a matrix, and the sum of each row (or column) in each block. The codes of a are shifted.
template <int height, bool shifted>
struct Packed {
  const std::vector<Block>& blocks;
  int64_t count, panels, space;
  Tensor fresh;  // the memory, if it is too large to be kept
  int32_t *codes, *sums;
  std::vector<Pace> paces;  // of each block and panel of a

  Packed(int64_t rows, const std::vector<Block>& of)
      : blocks(of), count(rows), panels(parts_of(rows, height)), space(0), paces(shifted ? panels * tasks() : 0) {
    for (const Block& block : blocks) space = std::max(space, planes(block) * steps(block) * height);
    // An odd number of cache lines, so that panels do not all fall into the same few sets of the cache.
    space = (parts_of(space, kLine) | 1) * kLine;
    codes = memory(panels * tasks() * (space + height));
    sums = codes + panels * tasks() * space;
  }
  // A thread keeps memory of up to kKept numbers for its next product.
  int32_t* memory(int64_t size) {
    static thread_local Tensor kept = at::empty({0}, at::kInt);
    Tensor& used = size <= kKept ? kept : fresh;
    if (!used.defined() || used.numel() < size) used = at::empty({size}, at::kInt);
    return used.mutable_data_ptr<int32_t>();
  }
  // Steps of a row in a block, and how often they lie in memory: numbers of 16 bits as two planes of bytes.
  static int64_t steps(const Block& block) {
#ifdef FRACTRAIN_FX_UNITS
    return parts_of(block.length, kUnitBytes) * kUnitSteps;
#else
    return parts_of(block.length, block.way.per);
#endif
  }
  static int64_t planes(const Block& block) { return kUnits && shifted && block.way.per == 2 ? 2 : 1; }
  int64_t tasks() const { return static_cast<int64_t>(blocks.size()); }
  int32_t* at(int64_t b, int64_t panel) const { return codes + (b * panels + panel) * space; }
  int32_t* sums_at(int64_t b, int64_t panel) const { return sums + (b * panels + panel) * height; }
  const Pace& pace(int64_t b, int64_t panel) const { return paces[b * panels + panel]; }

  // Fills panels from `task` on, `most` at most, and returns how many.
  template <class Code>
  int64_t fill(const Factor<Code>& factor, int64_t task, int64_t most) {
    const int64_t b = task / panels, panel = task % panels, row = panel * height;
    const Way& way = blocks[b].way;
    const int64_t start = blocks[b].start, length = blocks[b].length;
    uint32_t* packed = reinterpret_cast<uint32_t*>(at(b, panel));
#ifdef FRACTRAIN_FX_UNITS
    if constexpr (shifted) {
      const auto run = way.per == 2 ? pack_rows<true, Code> : pack_rows<false, Code>;
      const int64_t plane = steps(blocks[b]) * height * 4;
      run(factor, row, start, length, reinterpret_cast<uint8_t*>(packed), plane, sums_at(b, panel));
      return 1;
    }
#endif
    const int per = kUnits ? 4 : way.per;
    int64_t filled = 0;
    int32_t shift = shifted ? way.pace.shift : 0;
    if (factor.next_row == 1) {
      const auto run = per == 2 ? pack_side_by_side<2, height, Code> : pack_side_by_side<4, height, Code>;
      filled = run(factor, row, std::min(most, panels - panel), start, length, shift, packed, space);
    }
    if constexpr (shifted) std::fill_n(&paces[task], std::max<int64_t>(1, filled), way.pace);
    if (filled == 0) {
      if constexpr (shifted) {
        // Samples of fewer bits have smaller codes, so more steps of their rows can be summed in 16 bits.
        if (way.per == 4 && way.pace.longest < kSteps && factor.next_in_row == 1) {
          const int64_t rows = std::min<int64_t>(height, count - row);
          paces[task] = pace_of(ends_of_rows(factor, row, rows, start, length), way.largest_b);
          shift = paces[task].shift;
        }
      }
      const auto run = per == 2 ? pack<2, height, Code> : pack<4, height, Code>;
      run(factor, row, start, length, shift, packed);
      filled = 1;
    }
    const auto sum = per == 2 ? sum_packed<2, height> : sum_packed<4, height>;
    for (int64_t i = 0; i < filled; ++i) {
      int32_t* sums_of = sums_at(b, panel + i);
      sum(packed + i * space, parts_of(length, per), !shifted, sums_of);
      for (int h = 0; h < height; ++h) sums_of[h] += static_cast<int32_t>(length * shift);
    }
    return filled;
  }
  int32_t sum(int64_t b, int64_t row) const { return sums_at(b, row / height)[row % height]; }
};

using Left = Packed<kPanelRows, true>;
using Right = Packed<kPanelColumns, false>;

}  // namespace fractrain_fx

#endif
