// Puts codes of 8 or 16 bits into the order in which tiles.h reads them.

#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <utility>

namespace fractrain_fx {

// One factor of a product: its rows (columns, for the second factor), whose codes are summed over.
template <class Code>
struct Factor {
  const Code* data;
  int64_t count, length;          // number of rows, and of codes in each
  int64_t next_row, next_in_row;  // distance from a row to the next, and from a code to the next in its row

  const Code* at(int64_t row, int64_t place) const { return data + row * next_row + place * next_in_row; }
};

// One step: `count` codes minus shift, packed into 32 bits that hold `per`.
template <int per, class Code>
inline uint32_t step_of(const Code* first, int64_t next, int32_t shift, int64_t count = per) {
  constexpr int kBits = 32 / per;
  constexpr uint32_t kMask = per == 2 ? 0xFFFFu : 0xFFu;
  uint32_t step = 0;
  for (int64_t i = 0; i < count; ++i) {
    step |= (static_cast<uint32_t>(first[i * next] - shift) & kMask) << (kBits * i);
  }
  return step;
}

// One step of contiguous codes. 16-bit codes are never shifted.
template <int per, class Code>
inline uint32_t step_of_run(const Code* first, int32_t shift) {
  if constexpr (per * sizeof(Code) != sizeof(uint32_t)) {
    return step_of<per>(first, 1, shift);
  } else {
    uint32_t step;
    std::memcpy(&step, first, sizeof(step));
    if constexpr (per == 4) {
      // Subtracts shift from four bytes at once, with no borrow from one byte to the next.
      constexpr uint32_t kTops = 0x80808080u;
      const uint32_t less = (static_cast<uint32_t>(shift) & 0xFFu) * 0x01010101u;
      step = ((step | kTops) - (less & ~kTops)) ^ ((step ^ ~less) & kTops);
    }
    return step;
  }
}

// Packs codes [start, start + length) of the rows from `row` on into steps of a tile with `height` rows. Rows that the
// factor lacks are 0.
template <int per, int height, class Code>
void pack(const Factor<Code>& factor, int64_t row, int64_t start, int64_t length, int32_t shift, uint32_t* out) {
  const int64_t rows = std::min<int64_t>(height, factor.count - row), whole = length / per, rest = length % per;
  if (rows < height) std::fill_n(out, (whole + (rest > 0)) * height, 0u);
  if (factor.next_in_row == 1) {
    for (int64_t h = 0; h < rows; ++h) {
      const Code* first = factor.at(row + h, start);
      for (int64_t s = 0; s < whole; ++s) out[s * height + h] = step_of_run<per>(first + s * per, shift);
    }
  } else {
    for (int64_t s = 0; s < whole; ++s) {
      for (int64_t h = 0; h < rows; ++h) {
        out[s * height + h] = step_of<per>(factor.at(row + h, start + s * per), factor.next_in_row, shift);
      }
    }
  }
  for (int64_t h = 0; rest && h < rows; ++h) {
    const Code* first = factor.at(row + h, start + whole * per);
    out[whole * height + h] = step_of<per>(first, factor.next_in_row, shift, rest);
  }
}

// Rows that are read side by side for one tile, in whole vectors; rows beyond its height are not used.
constexpr int lanes_of(int height) { return (height + 7) / 8 * 8; }

// Packs several tiles whose rows lie side by side in memory, so that each cache line is read once. Tiles lie `next`
// apart in out. Returns how many were packed: all but those whose vectors would reach beyond the last row.
template <int per, int height, class Code>
int64_t pack_side_by_side(const Factor<Code>& factor, int64_t row, int64_t tiles, int64_t start, int64_t length,
                          int32_t shift, uint32_t* out, int64_t next) {
  const int64_t whole = length / per, rest = length % per, apart = factor.next_in_row;
  while (tiles > 0 && row + (tiles - 1) * height + lanes_of(height) > factor.count) --tiles;
  for (int64_t s = 0; s < whole + (rest > 0); ++s) {
    const Code* first = factor.at(row, start + s * per);
    for (int64_t t = 0; t < tiles; ++t, first += height) {
      uint32_t steps[lanes_of(height)];
      if (s < whole) {
#pragma omp simd
        for (int h = 0; h < lanes_of(height); ++h) steps[h] = step_of<per>(first + h, apart, shift);
      } else {
        for (int h = 0; h < height; ++h) steps[h] = step_of<per>(first + h, apart, shift, rest);
      }
      std::copy_n(steps, height, out + t * next + s * height);
    }
  }
  return tiles;
}

// The sum of the codes of a step: two signed 16-bit codes, or four unsigned bytes.
template <int per>
inline int32_t sum_of_step(uint32_t step) {
  if constexpr (per == 2) return (static_cast<int32_t>(step << 16) >> 16) + (static_cast<int32_t>(step) >> 16);
  const uint32_t pairs = (step & 0x00FF00FFu) + ((step >> 8) & 0x00FF00FFu);
  return static_cast<int32_t>((pairs & 0xFFFFu) + (pairs >> 16));
}

// The sum of each row of a packed tile. with_sign: bytes are signed; otherwise they were shifted to need no sign.
template <int per, int height>
void sum_packed(const uint32_t* steps, int64_t count, bool with_sign, int32_t* sums) {
  constexpr int kLanes = height % 8 ? 4 * height : height;  // whole vectors
  const uint32_t turned = per == 4 && with_sign ? 0x80808080u : 0u;
  int32_t found[kLanes] = {};
  const int64_t all = count * height;
  int64_t i = 0;
  for (; i + kLanes <= all; i += kLanes) {
#pragma omp simd
    for (int lane = 0; lane < kLanes; ++lane) found[lane] += sum_of_step<per>(steps[i + lane] ^ turned);
  }
  for (int lane = 0; i < all; ++i, ++lane) found[lane] += sum_of_step<per>(steps[i] ^ turned);
  const int32_t less = turned ? static_cast<int32_t>(128 * per * count) : 0;
  for (int h = 0; h < height; ++h) {
    sums[h] = -less;
    for (int lane = h; lane < kLanes; lane += height) sums[h] += found[lane];
  }
}

// The lowest and the highest of some codes.
using CodeEnds = std::pair<int32_t, int32_t>;

template <class Code>
CodeEnds ends_of(const Code* first, int64_t count) {
  constexpr int kLanes = 64;
  Code lows[kLanes], highs[kLanes];
  std::fill_n(lows, kLanes, first[0]);
  std::fill_n(highs, kLanes, first[0]);
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    for (int lane = 0; lane < kLanes; ++lane) {
      lows[lane] = first[i + lane] < lows[lane] ? first[i + lane] : lows[lane];
      highs[lane] = first[i + lane] > highs[lane] ? first[i + lane] : highs[lane];
    }
  }
  for (; i < count; ++i) {
    lows[0] = std::min(lows[0], first[i]);
    highs[0] = std::max(highs[0], first[i]);
  }
  return {*std::min_element(lows, lows + kLanes), *std::max_element(highs, highs + kLanes)};
}

inline CodeEnds both(CodeEnds a, CodeEnds b) {
  return {std::min(a.first, b.first), std::max(a.second, b.second)};
}

// The lowest and the highest of codes [start, start + length) of some rows, each of which is contiguous.
template <class Code>
CodeEnds ends_of_rows(const Factor<Code>& factor, int64_t row, int64_t rows, int64_t start, int64_t length) {
  CodeEnds found = ends_of(factor.at(row, start), length);
  for (int64_t h = 1; h < rows; ++h) found = both(found, ends_of(factor.at(row + h, start), length));
  return found;
}

}  // namespace fractrain_fx
