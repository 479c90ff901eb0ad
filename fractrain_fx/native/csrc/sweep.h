// Multiplies images of codes by packed weights without im2col: tiles read the codes under the kernel where they lie.

#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>

#include <algorithm>
#include <cstdint>
#include <vector>

#include "swept_tiles.h"
#include "tasks.h"
#include "transposed.h"

#ifdef FRACTRAIN_FX_TILES

namespace fractrain_fx {

// The most codes of an image and of a weight whose products are summed in 32 bits.
constexpr int64_t kMostBytes = int64_t{1} << 17;

// Panels of columns of one task.
constexpr int64_t kSweepColumns = std::max(1, 256 / kPanelColumns);

// A weight, packed for tiles: for each panel of columns the steps of all taps.
struct PackedTaps {
  int64_t columns, panels, steps;  // steps of all taps
  Tensor memory;
  std::vector<int32_t> sums;  // of each column

  const int32_t* at(int64_t panel) const { return memory.const_data_ptr<int32_t>() + panel * steps * kPanelColumns; }
};

// Packs taps that are factors with the same sizes.
inline PackedTaps packed_taps(const std::vector<Factor<int8_t>>& taps, int64_t count, int64_t length, const Way& way) {
  const int per = steps_per(way);
  const int64_t each = parts_of(length, per), panels = parts_of(count, kPanelColumns);
  const int64_t steps = each * static_cast<int64_t>(taps.size());
  // Behind the last panel units for matrices may read up to 16 steps, which they multiply by 0.
  PackedTaps found{count, panels, steps, at::empty({(panels * steps + 16) * kPanelColumns}, at::kInt),
                   std::vector<int32_t>(panels * kPanelColumns)};
  uint32_t* memory = reinterpret_cast<uint32_t*>(found.memory.mutable_data_ptr<int32_t>());
  at::parallel_for(0, panels, 1, [&](int64_t begin, int64_t end) {
    for (int64_t panel = begin; panel < end; ++panel) {
      uint32_t* out = memory + panel * steps * kPanelColumns;
      for (const Factor<int8_t>& tap : taps) {
        const int64_t row = panel * kPanelColumns;
        int64_t filled = 0;
        if (tap.next_row == 1) {
          const auto run = per == 2 ? pack_side_by_side<2, kPanelColumns, int8_t> : pack_side_by_side<4, kPanelColumns, int8_t>;
          filled = run(tap, row, 1, 0, length, 0, out, 0);
        }
        if (filled == 0) (per == 2 ? pack<2, kPanelColumns, int8_t> : pack<4, kPanelColumns, int8_t>)(tap, row, 0, length, 0, out);
        out += each * kPanelColumns;
      }
      const auto sum = per == 2 ? sum_packed<2, kPanelColumns> : sum_packed<4, kPanelColumns>;
      if (steps) sum(out - steps * kPanelColumns, steps, true, found.sums.data() + panel * kPanelColumns);
    }
  });
  return found;
}

// The rows of a product, which are places of images. Of each place: where its codes begin, in bytes, and where its
// results go.
struct SweptRows {
  std::vector<int64_t> from, to;
  int64_t samples, from_image, to_image;  // images, and the distance from one to the next
  int64_t next;                           // distance of the results of a row

  int64_t count() const { return samples * static_cast<int64_t>(from.size()); }
};

// Copies `rows` rows of `columns` values, which lie `next` apart, to where results go.
inline void put_apart(const float* values, int64_t next, int64_t rows, int64_t columns, const int64_t* to,
                      int64_t next_to, float* out) {
  for (int64_t row = 0, end; row < rows; row = end) {
    for (end = row + 1; end < rows && to[end] == to[end - 1] + 1;) ++end;
    if (end - row >= kSquare<float>) {
      transpose(values + row * next, next, end - row, columns, out + to[row], next_to);
      continue;
    }
    // Places that lie apart too: those of several rows, to write one channel after the other.
    for (end = row + 1; end < rows && to[end] != to[end - 1] + 1;) ++end;
    for (int64_t j = 0; j < columns; ++j) {
      for (int64_t i = row; i < end; ++i) out[to[i] + j * next_to] = values[i * next + j];
    }
  }
}

// The product of rows with packed taps. apply(sample, place, column, count, sums, results) makes results from sums.
template <class Apply>
void sweep(const Tensor& images, const SweptRows& rows, const PackedTaps& w, const std::vector<Piece>& pieces,
           const Way& way, float* out, Apply&& apply) {
  constexpr int64_t kWidth = kSweepColumns * kPanelColumns;
  constexpr int64_t kNext = kWidth + 16;  // rows do not all fall into the same few sets of the cache
  const char* codes = static_cast<const char*>(images.const_data_ptr());
  const int64_t tall = SweptTiles::rows(way, w.steps);
  const int64_t M = rows.count(), N = w.columns, down = parts_of(M, tall), across = parts_of(N, kWidth);
  const int64_t places = static_cast<int64_t>(rows.from.size());
  const int64_t work = std::min(M, tall) * std::min(N, kWidth) * std::max<int64_t>(1, w.steps) * 4;
  share(down * across, std::max<int64_t>(1, (int64_t{1} << 18) / work), [&](int64_t task) {
    const int64_t top = task % down * tall, left = task / down * kWidth;
    const int64_t height = std::min(M - top, tall), right = std::min(N, left + kWidth);
    int64_t from[kSweptRows], to[kSweptRows], sample[kSweptRows], place[kSweptRows];
    for (int64_t i = 0, n = top / places, p = top % places; i < height; ++i) {
      from[i] = n * rows.from_image + rows.from[p];
      to[i] = n * rows.to_image + rows.to[p];
      sample[i] = n;
      place[i] = p;
      if (++p == places) p = 0, ++n;
    }
    alignas(64) float found[kSweptRows * kNext];
    const Units units;
    SweptTiles tiles(codes, pieces, way, w.steps);
    tiles.take(from, height);
    TileSums sums;
    for (int64_t column = left; column < right; column += kPanelColumns) {
      const int64_t panel = column / kPanelColumns, count = std::min<int64_t>(kPanelColumns, right - column);
      for (int64_t row = 0; row < height; row += kPanelRows) {
        tiles.sum(row, w.at(panel), w.sums.data() + column, sums);
        for (int64_t i = row; i < std::min(height, row + kPanelRows); ++i) {
          float* results = rows.next == 1 ? out + to[i] + column : found + i * kNext + column - left;
          const int64_t at = (i - row) * kPanelColumns;
          if (sums.parts) {
            apply(sample[i], place[i], column, count, sums.part + at, results);
          } else {
            apply(sample[i], place[i], column, count, sums.whole + at, results);
          }
        }
      }
    }
    if (rows.next != 1) put_apart(found, kNext, height, right - left, to, rows.next, out + left * rows.next);
  });
}

}  // namespace fractrain_fx

#endif
