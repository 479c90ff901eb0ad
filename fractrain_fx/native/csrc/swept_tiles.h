// The sums of tiles whose rows are places of images: the codes under the kernel, read where they lie.

#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

#include "packed.h"

#ifdef FRACTRAIN_FX_TILES

namespace fractrain_fx {

// The most rows of one task.
constexpr int64_t kSweptRows = kUnits ? 128 : 96;

// Codes of a step, and its bytes in the images. Units for matrices take four codes, also those of 16 bits.
inline int steps_per(const Way& way) { return kUnits ? 4 : way.per; }
inline int64_t bytes_of_step(const Way& way) { return steps_per(way) * 4 / way.per; }

// Some lines of a tile's walk that are summed in integers by one call.
struct Piece {
  int64_t place, steps, lines, line;  // bytes from the row's first code; steps; lines; bytes from a line to the next
  int64_t done;                       // steps before it
  bool flush;                         // whether sums become floats before it
};

// The pieces for taps that lie `apart` places from the first, each of some channels. `sum`: steps that 32 bits may hold.
inline std::vector<Piece> pieces_of(const std::vector<int64_t>& apart, int64_t channels, const Way& way, int64_t sum) {
  std::vector<int64_t> places;
  for (const int64_t each : apart) places.push_back(each * channels * 4 / way.per);
  const int64_t steps = parts_of(channels, steps_per(way)), bytes = bytes_of_step(way);
  std::vector<Piece> lines;
  int64_t done = 0;
  const int64_t most = kUnits ? std::numeric_limits<int64_t>::max() : std::min(way.pace.longest, sum);
  if (kUnits) sum = most;  // the tiles see to it
  const auto add = [&](int64_t place, int64_t count) {
    for (int64_t part; count > 0; count -= part, place += bytes * part, done += part) {
      part = std::min(count, most);
      lines.push_back({place, part, 1, 0, done, false});
    }
  };
  for (size_t i = 0; i < places.size();) {
    size_t next = i + 1;
    while (next < places.size() && places[next] == places[next - 1] + bytes * steps) ++next;
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

// Sums of one tile, in integers and, if 32 bits may not hold them, in part in float.
struct TileSums {
  alignas(64) int32_t whole[kPanelRows * kPanelColumns];
  alignas(64) float part[kPanelRows * kPanelColumns];
  bool parts;

  void start(int32_t shift, const int32_t* each) {
    parts = false;
    for (int i = 0; i < kPanelRows; ++i) {
#pragma omp simd
      for (int j = 0; j < kPanelColumns; ++j) whole[i * kPanelColumns + j] = shift * each[j];
    }
  }
  void flush() {
#pragma omp simd
    for (int i = 0; i < kPanelRows * kPanelColumns; ++i) {
      part[i] = static_cast<float>(whole[i]) + (parts ? part[i] : 0.0f);
      whole[i] = 0;
    }
    parts = true;
  }
};

#ifdef FRACTRAIN_FX_UNITS

// The tiles of one task. Its rows are put side by side first, because units for matrices read rows that lie equally far
// apart; each is read once for every 32 columns.
class SweptTiles {
 public:
  SweptTiles(const char* codes, const std::vector<Piece>& pieces, const Way& way, int64_t steps)
      : codes_(codes), pieces_(pieces), wide_(way.per == 2), blocks_(blocks_of(steps)), next_(row_of(steps)),
        longest_(wide_ ? std::max<int64_t>(1, 2 * way.block / kUnitBytes) : blocks_) {}

  // Rows of a task, whose bytes should fit into a cache of 512 KiB.
  static int64_t rows(const Way& way, int64_t steps) {
    const int64_t fit = (int64_t{1} << 19) / (row_of(steps) * (way.per == 2 ? 2 : 1));
    return std::clamp<int64_t>(fit / kPanelRows, 1, kSweptRows / kPanelRows) * kPanelRows;
  }

  void take(const int64_t* from, int64_t count) {
    const int64_t plane = parts_of(count, kPanelRows) * kPanelRows * next_, size = wide_ ? 2 * plane : plane;
    static thread_local std::vector<uint8_t> kept;
    if (static_cast<int64_t>(kept.size()) < size) kept.resize(size);
    high_ = kept.data();
    low_ = high_ + plane;
    for (int64_t row = 0; row < count; ++row) {
      int64_t done = row * next_;
      const int64_t end = done + blocks_ * kUnitBytes;
      for (const Piece& piece : pieces_) {
        const char* line = codes_ + from[row] + piece.place;
        for (int64_t i = 0; i < piece.lines; ++i, line += piece.line, done += 4 * piece.steps) {
          if (wide_) {
            part(line, 4 * piece.steps, high_ + done, low_ + done);
          } else {
            std::memcpy(high_ + done, line, 4 * piece.steps);
          }
        }
      }
      std::fill(high_ + done, high_ + end, uint8_t{0});
      if (wide_) std::fill(low_ + done, low_ + end, uint8_t{0});
    }
  }

  // The sums of the rows from `row` on, times a panel of columns.
  void sum(int64_t row, const int32_t* panel, const int32_t*, TileSums& sums) const {
    const UnitWalk walk{next_, kUnitBytes, 4 * kUnitColumns, 4 * kUnitColumns * kUnitSteps};
    sums.parts = false;
    for (int64_t done = 0; done < blocks_; done += longest_) {
      const int64_t count = std::min(longest_, blocks_ - done), at = row * next_ + done * kUnitBytes;
      const int32_t* columns = panel + done * kUnitSteps * kUnitColumns;
      multiply_units(high_ + at, wide_ ? low_ + at : nullptr, columns, walk, count, sums.whole);
      if (sums.parts || count < blocks_) sums.flush();
    }
  }

 private:
  static int64_t blocks_of(int64_t steps) { return std::max<int64_t>(1, parts_of(steps, kUnitSteps)); }
  // An odd number of cache lines, so that rows do not all fall into the same few sets of the cache.
  static int64_t row_of(int64_t steps) { return (blocks_of(steps) | 1) * kUnitBytes; }
  static void part(const char* line, int64_t count, uint8_t* high, uint8_t* low) {
    const int16_t* codes = reinterpret_cast<const int16_t*>(line);
#pragma omp simd
    for (int64_t i = 0; i < count; ++i) {
      high[i] = static_cast<uint8_t>(codes[i] >> 8);
      low[i] = static_cast<uint8_t>(codes[i]);
    }
  }

  const char* codes_;
  const std::vector<Piece>& pieces_;
  bool wide_;
  int64_t blocks_, next_, longest_;  // times 16 steps; bytes from a row to the next; blocks that 32 bits may sum
  uint8_t *high_ = nullptr, *low_ = nullptr;
};

#else

// The tiles of one task.
class SweptTiles {
 public:
  SweptTiles(const char* codes, const std::vector<Piece>& pieces, const Way& way, int64_t)
      : codes_(codes), pieces_(pieces), pace_(way.pace) {}

  static int64_t rows(const Way&, int64_t) { return kSweptRows; }

  void take(const int64_t* from, int64_t count) { from_ = from, count_ = count; }

  // The sums of the rows from `row` on, times a panel of columns; `each`: the sums of those columns.
  void sum(int64_t row, const int32_t* panel, const int32_t* each, TileSums& sums) const {
    sums.start(pace_.shift, each);
    Walk walk{0, 0, 4, 4 * kTileColumns, 0, 0, {}};
    for (int64_t i = 0; i < kTileRows; ++i) walk.row[i] = from_[std::min(count_ - 1, row + i)] - from_[row];
    for (const Piece& piece : pieces_) {
      if (piece.flush) sums.flush();
      walk.steps = piece.steps;
      walk.lines = piece.lines;
      walk.a_line = piece.line - 4 * piece.steps;
      pace_.tile(codes_ + from_[row] + piece.place, panel + piece.done * kTileColumns, walk, sums.whole);
    }
    if (sums.parts) sums.flush();
  }

 private:
  const char* codes_;
  const std::vector<Piece>& pieces_;
  const Pace& pace_;
  const int64_t* from_ = nullptr;
  int64_t count_ = 0;
};

#endif

}  // namespace fractrain_fx

#endif
