// Where the blocks of a tensor lie in memory: as rows of contiguous values.

#pragma once

#include <ATen/Parallel.h>
#include <ATen/TensorIterator.h>
#include <ATen/core/Tensor.h>
#include <c10/util/SmallVector.h>

#include <algorithm>
#include <cstdint>
#include <optional>
#include <utility>

#include "tasks.h"

namespace fractrain_fx {

using at::Tensor;

// Dimensions of a tensor that lie evenly in memory, with their stride in the values and in the results.
struct Axis {
  int64_t size = 1, from = 0, to = 0;

  bool contiguous() const { return from == 1 && to == 1; }
};

using Axes = c10::SmallVector<Axis, 6>;

// A block spans up to `piece` indices of each of both axes of rows, and up to `group` contiguous columns.
struct BlockLayout {
  Axes outer;  // what lies outside blocks
  Axis rows[2];
  int64_t piece = 1, columns = 1, group = 1;
};

// Adds an axis inside the last one, as a part of it where both lie evenly.
inline void append(Axes& axes, const Axis& axis) {
  if (axis.size == 1) return;
  if (!axes.empty() && axes.back().from == axis.size * axis.from && axes.back().to == axis.size * axis.to) {
    axes.back() = {axes.back().size * axis.size, axis.from, axis.to};
  } else {
    axes.push_back(axis);
  }
}

// The axis of dimensions that are laid end to end and cut into pieces; nothing if they do not lie evenly. Axes whose
// every index holds whole pieces go to `outside`.
inline std::optional<Axis> axis_of(const Tensor& x, const Tensor& out, at::IntArrayRef dims, int64_t piece,
                                   Axes& outside) {
  Axes axes;
  for (const int64_t dim : dims) append(axes, {x.size(dim), x.stride(dim), out.stride(dim)});
  if (axes.empty()) return Axis{};
  if (axes.size() > 1 && axes.back().size % piece != 0) return std::nullopt;
  outside.append(axes.begin(), axes.end() - 1);
  return axes.back();
}

// The blocks that span `piece` values along each of one or two cuts; nothing if a cut's dimensions do not lie evenly.
inline std::optional<BlockLayout> layout_of(const Tensor& x, const Tensor& out, at::IntArrayRef first,
                                            at::IntArrayRef second, int64_t piece) {
  Axes outside;
  const auto one = axis_of(x, out, first, piece, outside), other = axis_of(x, out, second, piece, outside);
  if (!one || !other) return std::nullopt;
  for (int64_t dim = 0; dim < x.dim(); ++dim) {
    const auto in = [dim](at::IntArrayRef dims) { return std::find(dims.begin(), dims.end(), dim) != dims.end(); };
    if (!in(first) && !in(second)) outside.push_back({x.size(dim), x.stride(dim), out.stride(dim)});
  }
  std::stable_sort(outside.begin(), outside.end(), [](const Axis& a, const Axis& b) { return a.from > b.from; });
  BlockLayout layout;
  for (const Axis& axis : outside) append(layout.outer, axis);
  layout.rows[0] = *one;
  layout.rows[1] = *other;
  layout.piece = piece;
  const auto within = std::find_if(std::begin(layout.rows), std::end(layout.rows),
                                   [](const Axis& axis) { return axis.size > 1 && axis.contiguous(); });
  if (within != std::end(layout.rows)) {
    layout.columns = std::exchange(*within, Axis{}).size;
    layout.group = std::min(piece, layout.columns);
    // Lines of whole blocks that lie one after the other are one line.
    while (layout.columns % layout.group == 0 && !layout.outer.empty() && layout.outer.back().from == layout.columns &&
           layout.outer.back().to == layout.columns) {
      layout.columns *= layout.outer.pop_back_val().size;
    }
    return layout;
  }
  const auto beside = std::find_if(layout.outer.begin(), layout.outer.end(),
                                   [](const Axis& axis) { return axis.contiguous(); });
  if (beside != layout.outer.end()) {
    layout.columns = beside->size;
    layout.outer.erase(beside);
  }
  return layout;
}

// Some columns of one piece of each axis of rows.
struct Tile {
  const float* from;
  float* to;
  int64_t rows[2];
  int32_t columns;
};

// Calls take(from, to) for each row of a tile: where its columns lie in the values and in the results.
template <class Take>
inline void for_rows(const Tile& tile, const BlockLayout& layout, Take&& take) {
  for (int64_t i = 0; i < tile.rows[0]; ++i) {
    for (int64_t j = 0; j < tile.rows[1]; ++j) {
      take(tile.from + i * layout.rows[0].from + j * layout.rows[1].from,
           tile.to + i * layout.rows[0].to + j * layout.rows[1].to);
    }
  }
}

// Calls take(tile) for all tiles of up to `width` columns, on all threads.
template <class Take>
void for_tiles(const BlockLayout& layout, int64_t width, const float* x, float* out, Take&& take) {
  // How many tiles lie along each axis, and the strides between them.
  Axes steps = layout.outer;
  for (const Axis& axis : layout.rows) {
    steps.push_back({(axis.size + layout.piece - 1) / layout.piece, axis.from * layout.piece, axis.to * layout.piece});
  }
  steps.push_back({(layout.columns + width - 1) / width, width, width});
  int64_t tiles = 1;
  for (const Axis& axis : steps) tiles *= axis.size;
  int64_t values = std::min(width, layout.columns);
  for (const Axis& axis : layout.rows) values *= std::min(layout.piece, axis.size);
  at::parallel_for(0, tiles, std::max<int64_t>(1, kGrain / values), [&](int64_t begin, int64_t end) {
    for (int64_t task = begin; task < end; ++task) {
      Tile tile{x, out, {}, 0};
      int64_t rest = task, index[3] = {};
      for (size_t i = steps.size(); i-- > 0;) {
        const int64_t place = rest % steps[i].size;
        rest /= steps[i].size;
        tile.from += place * steps[i].from;
        tile.to += place * steps[i].to;
        if (i + 3 >= steps.size()) index[i + 3 - steps.size()] = place;
      }
      for (int i = 0; i < 2; ++i) {
        tile.rows[i] = std::min(layout.piece, layout.rows[i].size - index[i] * layout.piece);
      }
      tile.columns = static_cast<int32_t>(std::min(width, layout.columns - index[2] * width));
      take(tile);
    }
  });
}

}  // namespace fractrain_fx
