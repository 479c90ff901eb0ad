// The order in which the values of a tensor are visited, given where they and their results lie in memory.

#pragma once

#include <ATen/ExpandUtils.h>
#include <ATen/Parallel.h>
#include <ATen/TensorIterator.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>

#include <algorithm>
#include <cstdint>
#include <initializer_list>
#include <optional>
#include <utility>
#include <vector>

#include "places.h"
#include "rounding.h"
#include "tasks.h"

namespace fractrain_fx {

// Values in memory as equally long runs, each with its own grid; one run if all values have one grid.
struct Runs {
  int64_t length;
  std::vector<Grid> grids;
};

// The runs of a dense tensor whose results have the same strides. It must have one grid, or one for each entry of a
// first dimension that is outermost in memory. Most tensors do, and a TensorIterator would cost small ones more than
// their rounding.
inline std::optional<Runs> runs_of(const Rounding& how, std::initializer_list<const Tensor*> results) {
  const Tensor& x = how.x;
  if (!x.is_non_overlapping_and_dense()) return std::nullopt;
  for (const Tensor* result : results) {
    if (result->strides() != x.strides()) return std::nullopt;
  }
  std::vector<Grid> grids = grids_of(how);
  const int64_t count = static_cast<int64_t>(grids.size());
  if (count == 0 || (count > 1 && x.stride(0) * count != x.numel())) return std::nullopt;
  return Runs{x.numel() / count, std::move(grids)};
}

// Calls take(first, count, grid) for parts of runs on all threads: index of the first value, number of values, grid.
template <class Take>
void for_runs(const Runs& runs, Take&& take) {
  const int64_t count = static_cast<int64_t>(runs.grids.size());
  at::parallel_for(0, count * runs.length, kGrain, [&](int64_t begin, int64_t end) {
    while (begin < end) {
      const int64_t run = begin / runs.length, stop = std::min(end, (run + 1) * runs.length);
      take(begin, stop - begin, runs.grids[run]);
      begin = stop;
    }
  });
}

// Values and results whose dimensions lie in different order in memory, except for the innermost, which is contiguous
// in both.
struct Rows {
  Places places;
  int64_t entries;  // index of the outer dimension whose entries have a grid each; -1 if there is one grid
  std::vector<Grid> grids;
};

inline std::optional<Rows> rows_of(const Rounding& how, const Tensor& out) {
  std::vector<Grid> grids = grids_of(how);
  if (grids.empty()) return std::nullopt;
  const bool several = grids.size() > 1;
  std::optional<Places> places = places_of(how.x, out, 0, several ? 0 : -1);
  if (!places) return std::nullopt;
  int64_t entries = -1;
  for (size_t i = 0; several && i < places->outer.size(); ++i) {
    if (places->outer[i].dim == 0) entries = static_cast<int64_t>(i);
  }
  return Rows{std::move(*places), entries, std::move(grids)};
}

// Calls take(from, to, count, grid) for each row on all threads: places in memory of its first value and of that
// value's result, number of values, and grid.
template <class Take>
void for_rows(const Rows& rows, Take&& take) {
  const int64_t length = rows.places.length, worth = std::max<int64_t>(1, kGrain / length);
  at::parallel_for(0, rows.places.count, worth, [&](int64_t begin, int64_t end) {
    for_places(rows.places, begin, end, [&](int64_t from, int64_t to, const auto& index) {
      take(from, to, length, rows.grids[rows.entries < 0 ? 0 : index[rows.entries]]);
    });
  });
}

// Iterates over the results, and over the values, low end, scale and highest level that they come from, of any strides.
// A single result must have the type of the values.
inline at::TensorIterator iterator_of(std::initializer_list<const Tensor*> results, const Rounding& how) {
  Tensor top = at::empty(how.bits.sizes(), how.span.options());
  std::transform(how.widths.begin(), how.widths.end(), top.mutable_data_ptr<float>(),
                 [&](int64_t each) { return how.top(each); });
  const auto sizes = at::infer_size(how.span.sizes(), how.bits.sizes());
  const Tensor spans = how.span.expand(sizes).contiguous(), widths = how.bits.to(at::kLong).expand(sizes).contiguous();
  Tensor scale = at::empty(sizes, how.span.options());
  const float* wide = spans.const_data_ptr<float>();
  std::transform(wide, wide + spans.numel(), widths.const_data_ptr<int64_t>(), scale.mutable_data_ptr<float>(),
                 [](float span, int64_t bits) { return is_rounded(bits) ? scale_of(span, bits) : 1.0f; });
  at::TensorIteratorConfig config;
  config.check_all_same_dtype(results.size() == 1).set_check_mem_overlap(false).resize_outputs(false);
  for (const Tensor* result : results) config.add_output(*result);
  return config.add_const_input(how.x)
      .add_const_input(how.lo)
      .add_owned_const_input(scale)
      .add_owned_const_input(top)
      .build();
}

}  // namespace fractrain_fx
