// How the values of a tensor are gone over, by where they and their results lie in memory.

#pragma once

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

namespace fractrain_fx {

// Values in memory as runs of one length, each with its own grid, or all with one.
struct Runs {
  int64_t length;
  std::vector<Grid> grids;
};

// Most tensors are runs, with their results in the same order: those with one grid, of whatever dimensions, and those
// with one for each entry of a first dimension that is outermost in memory. A plan of strides would cost small tensors
// more than their rounding.
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

// Calls take with parts of runs on all threads: index of the first value, how many they are, and their grid.
template <class Take>
void for_runs(const Runs& runs, Take&& take) {
  const int64_t count = static_cast<int64_t>(runs.grids.size());
  at::parallel_for(0, count * runs.length, at::internal::GRAIN_SIZE, [&](int64_t begin, int64_t end) {
    while (begin < end) {
      const int64_t run = begin / runs.length, stop = std::min(end, (run + 1) * runs.length);
      take(begin, stop - begin, runs.grids[run]);
      begin = stop;
    }
  });
}

// Values and their results in memory of different orders, which share the innermost dimension.
struct Rows {
  Places places;
  int64_t entries;  // the outer dimension that has the grids, where there is more than one
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

// Calls take with rows on all threads: index of the first value in memory, that of its result, how many, and their grid.
template <class Take>
void for_rows(const Rows& rows, Take&& take) {
  const int64_t length = rows.places.length, worth = std::max<int64_t>(1, at::internal::GRAIN_SIZE / length);
  at::parallel_for(0, rows.places.count, worth, [&](int64_t begin, int64_t end) {
    for_places(rows.places, begin, end, [&](int64_t from, int64_t to, const auto& index) {
      take(from, to, length, rows.grids[rows.entries < 0 ? 0 : index[rows.entries]]);
    });
  });
}

// Goes over one or more results and what they are rounded from, of any strides: values, low end, scale, highest level.
// One result alone has to have their type.
inline at::TensorIterator iterator_of(std::initializer_list<const Tensor*> results, const Rounding& how) {
  Tensor top = at::empty(how.bits.sizes(), how.span.options());
  std::transform(how.widths.begin(), how.widths.end(), top.mutable_data_ptr<float>(),
                 [&](int64_t each) { return how.top(each); });
  const Tensor scale = how.span.div(top.clamp_min(1.0)).clamp_min_(kSmallestScale);
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
