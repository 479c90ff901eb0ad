// Multiplies images of codes by packed weights without im2col: tiles read the codes under the kernel where they lie.

#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>

#include <algorithm>
#include <cstdint>
#include <vector>

#include "packed.h"
#include "tasks.h"
#include "transposed.h"

#ifdef FRACTRAIN_FX_TILES

namespace fractrain_fx {

// The most codes of an image and of a weight whose products are summed in 32 bits.
constexpr int64_t kMostBytes = int64_t{1} << 17;

// Panels of rows and columns of one task.
constexpr int64_t kSweepRows = 16, kSweepColumns = std::max(1, 256 / kTileColumns);

// Some lines of a tile's walk that are summed in integers by one call.
struct Piece {
  int64_t place, steps, lines, line;  // bytes from the row's first code; steps; lines; bytes from a line to the next
  int64_t done;                       // steps before it
  bool flush;                         // whether sums become floats before it
};

// The pieces for taps that lie at `places` (in bytes), each of `steps` steps of 4 bytes. `call`: steps that one call of
// a tile may sum; `sum`: steps that 32 bits may hold.
inline std::vector<Piece> pieces_of(const std::vector<int64_t>& places, int64_t steps, int64_t call, int64_t sum) {
  std::vector<Piece> lines;
  int64_t done = 0;
  const int64_t most = std::min(call, sum);
  const auto add = [&](int64_t place, int64_t count) {
    for (int64_t part; count > 0; count -= part, place += 4 * part, done += part) {
      part = std::min(count, most);
      lines.push_back({place, part, 1, 0, done, false});
    }
  };
  for (size_t i = 0; i < places.size();) {
    size_t next = i + 1;
    while (next < places.size() && places[next] == places[next - 1] + 4 * steps) ++next;
    add(places[i], steps * static_cast<int64_t>(next - i));
    i = next;
  }
  std::vector<Piece> pieces;
  int64_t held = 0;
  for (const Piece& each : lines) {
    if (!pieces.empty()) {
      Piece& last = pieces.back();
      const int64_t line = each.place - (last.place + (last.lines - 1) * last.line);
      const bool fits = (last.lines + 1) * last.steps <= most && held + each.steps <= sum;
      if (last.steps == each.steps && fits && (last.lines == 1 || line == last.line)) {
        last.line = line;
        ++last.lines;
        held += each.steps;
        continue;
      }
    }
    const bool flush = held + each.steps > sum;
    pieces.push_back(each);
    pieces.back().flush = flush;
    held = (flush ? 0 : held) + each.steps;
  }
  return pieces;
}

// A weight, packed for tiles: for each panel of columns the steps of all taps.
struct PackedTaps {
  int64_t columns, panels, steps;  // steps of all taps
  Tensor memory;
  std::vector<int32_t> sums;  // of each column

  const int32_t* at(int64_t panel) const { return memory.const_data_ptr<int32_t>() + panel * steps * kTileColumns; }
};

// Packs taps that are factors with the same sizes.
inline PackedTaps packed_taps(const std::vector<Factor<int8_t>>& taps, int64_t count, int64_t length, int per) {
  const int64_t each = parts_of(length, per), panels = parts_of(count, kTileColumns);
  const int64_t steps = each * static_cast<int64_t>(taps.size());
  PackedTaps found{count, panels, steps, at::empty({std::max<int64_t>(1, panels * steps * kTileColumns)}, at::kInt),
                   std::vector<int32_t>(panels * kTileColumns)};
  uint32_t* memory = reinterpret_cast<uint32_t*>(found.memory.mutable_data_ptr<int32_t>());
  at::parallel_for(0, panels, 1, [&](int64_t begin, int64_t end) {
    for (int64_t panel = begin; panel < end; ++panel) {
      uint32_t* out = memory + panel * steps * kTileColumns;
      for (const Factor<int8_t>& tap : taps) {
        const int64_t row = panel * kTileColumns;
        int64_t filled = 0;
        if (tap.next_row == 1) {
          const auto run = per == 2 ? pack_side_by_side<2, kTileColumns, int8_t> : pack_side_by_side<4, kTileColumns, int8_t>;
          filled = run(tap, row, 1, 0, length, 0, out, 0);
        }
        if (filled == 0) (per == 2 ? pack<2, kTileColumns, int8_t> : pack<4, kTileColumns, int8_t>)(tap, row, 0, length, 0, out);
        out += each * kTileColumns;
      }
      const auto sum = per == 2 ? sum_packed<2, kTileColumns> : sum_packed<4, kTileColumns>;
      if (steps) sum(out - steps * kTileColumns, steps, true, found.sums.data() + panel * kTileColumns);
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

// Sums of one tile, in integers and, if 32 bits may not hold them, in part in float.
struct TileSums {
  alignas(64) int32_t whole[kTileRows * kTileColumns];
  alignas(64) float part[kTileRows * kTileColumns];
  bool parts;

  void start(int32_t shift, const int32_t* each) {
    parts = false;
    for (int i = 0; i < kTileRows; ++i) {
#pragma omp simd
      for (int j = 0; j < kTileColumns; ++j) whole[i * kTileColumns + j] = shift * each[j];
    }
  }
  void flush() {
#pragma omp simd
    for (int i = 0; i < kTileRows * kTileColumns; ++i) {
      part[i] = static_cast<float>(whole[i]) + (parts ? part[i] : 0.0f);
      whole[i] = 0;
    }
    parts = true;
  }
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
           const Pace& pace, float* out, Apply&& apply) {
  constexpr int64_t kWidth = kSweepColumns * kTileColumns, kHeight = kSweepRows * kTileRows;
  constexpr int64_t kNext = kWidth + 16;  // rows do not all fall into the same few sets of the cache
  const char* codes = reinterpret_cast<const char*>(images.const_data_ptr<int8_t>());
  const int64_t M = rows.count(), N = w.columns, down = parts_of(M, kHeight), across = parts_of(N, kWidth);
  const int64_t places = static_cast<int64_t>(rows.from.size());
  const int64_t work = std::min(M, kHeight) * std::min(N, kWidth) * std::max<int64_t>(1, w.steps) * 4;
  share(down * across, std::max<int64_t>(1, (int64_t{1} << 18) / work), [&](int64_t task) {
    const int64_t top = task % down * kHeight, left = task / down * kWidth;
    const int64_t height = std::min(M - top, kHeight), right = std::min(N, left + kWidth);
    int64_t from[kHeight], to[kHeight], sample[kHeight], place[kHeight];
    for (int64_t i = 0, n = top / places, p = top % places; i < height; ++i) {
      from[i] = n * rows.from_image + rows.from[p];
      to[i] = n * rows.to_image + rows.to[p];
      sample[i] = n;
      place[i] = p;
      if (++p == places) p = 0, ++n;
    }
    alignas(64) float found[kHeight * kNext];
    TileSums sums;
    for (int64_t column = left; column < right; column += kTileColumns) {
      const int64_t panel = column / kTileColumns, count = std::min<int64_t>(kTileColumns, right - column);
      const int32_t* steps = w.at(panel);
      for (int64_t row = 0; row < height; row += kTileRows) {
        sums.start(pace.shift, w.sums.data() + column);
        Walk walk{0, 0, 4, 4 * kTileColumns, 0, 0, {}};
        for (int64_t i = 0; i < kTileRows; ++i) walk.row[i] = from[std::min(height - 1, row + i)] - from[row];
        for (const Piece& piece : pieces) {
          if (piece.flush) sums.flush();
          walk.steps = piece.steps;
          walk.lines = piece.lines;
          walk.a_line = piece.line - 4 * piece.steps;
          pace.tile(codes + from[row] + piece.place, steps + piece.done * kTileColumns, walk, sums.whole);
        }
        if (sums.parts) sums.flush();
        for (int64_t i = row; i < std::min(height, row + kTileRows); ++i) {
          float* results = rows.next == 1 ? out + to[i] + column : found + i * kNext + column - left;
          const int64_t at = (i - row) * kTileColumns;
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
