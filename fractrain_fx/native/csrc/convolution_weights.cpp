// Convolutions of codes: the gradient of the weight. It sums over samples, whose codes lie side by side in one step, so
// that all taps read the same images.

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <algorithm>
#include <cstdint>
#include <tuple>
#include <vector>

#include "geometry.h"
#include "images.h"
#include "numbers.h"
#include "packed.h"
#include "samples.h"
#include "tasks.h"

namespace fractrain_fx {
namespace {

#ifdef FRACTRAIN_FX_TILES

// Bytes of both factors that are multiplied for all tiles before others are read: they fit into a cache of 1 MiB.
constexpr int64_t kCached = int64_t{1} << 19;

// Sums of the output's gradient: of all places, and of those where each tap lies inside the image, the latter times
// the zeros of x.
struct Sums {
  std::vector<double> all, of_taps;
};

template <class Code>
Sums sums_of(const Code* g, const std::vector<Kind>& kinds, const Convolution& of) {
  const Classes classes(of);
  const int64_t O = of.outputs, places = product_of_sizes(of.places), taps = of.taps();
  Sums found{std::vector<double>(O), std::vector<double>(taps * O)};
  std::vector<int64_t> sizes(classes.count());
  for (const int64_t k : classes.of_place) ++sizes[k];
  for (const Kind& kind : kinds) {
    // Whole numbers of each sample, whose sum has no order.
    const int64_t samples = static_cast<int64_t>(kind.samples.size()), size = classes.count() * O;
    std::vector<int32_t> some(samples * size);
    at::parallel_for(0, samples, std::max<int64_t>(1, 65536 / (places * O)), [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        for (int64_t place = 0; place < places; ++place) {
          const Code* values = g + (kind.samples[i] * places + place) * O;
          int32_t* to = some.data() + i * size + classes.of_place[place] * O;
#pragma omp simd
          for (int64_t o = 0; o < O; ++o) to[o] += values[o];
        }
      }
    });
    std::vector<double> sums(size);
    for (int64_t i = 0; i < samples; ++i) {
      for (int64_t j = 0; j < size; ++j) sums[j] += some[i * size + j];
    }
    for (int64_t k = 0; k < classes.count(); ++k) {
      const double count = static_cast<double>(sizes[k]) * kind.samples.size();
      for (int64_t o = 0; o < O; ++o) {
        double& sum = sums[k * O + o];
        sum = kind.g_scale * sum + kind.g_zero * count;
        found.all[o] += sum;
        sum *= kind.x_zero;
      }
      for (int64_t tap = 0; tap < taps; ++tap) {
        if (!classes.inside[k][tap]) continue;
        for (int64_t o = 0; o < O; ++o) found.of_taps[tap * O + o] += sums[k * O + o];
      }
    }
  }
  return found;
}

// Lines of places of one group that are multiplied by one call of a tile.
struct Part {
  int64_t group, a, b, steps, lines;  // steps from the group's first code of g and of x
};

// The parts of a group's sum, none of more than `most` steps.
std::vector<Part> parts_of_group(const Convolution& of, int64_t group, int64_t g_place, int64_t most) {
  std::vector<Part> parts;
  const int64_t width = std::min(of.places[2], most), height = std::max<int64_t>(1, most / of.places[2]);
  for (int64_t z = 0; z < of.places[0]; ++z) {
    for (int64_t y = 0; y < of.places[1]; y += height) {
      for (int64_t x = 0; x < of.places[2]; x += width) {
        const Sizes at{z * of.stride[0], y * of.stride[1], x * of.stride[2]};
        parts.push_back({group, number_of({z, y, x}, of.places) * g_place, number_of(at, of.padded) * of.inputs,
                         std::min(width, of.places[2] - x), std::min(height, of.places[1] - y)});
      }
    }
  }
  return parts;
}

// Parts of one kind that are summed in integers, for all tiles before other parts are.
struct Chunk {
  std::vector<Part> parts;
  int64_t kind;
};

std::vector<Chunk> chunks_of(const Convolution& of, const std::vector<Group>& groups, int64_t g_place, int64_t sum) {
  const int64_t most = std::clamp<int64_t>(kCached / (4 * g_place + 4 * kTileColumns), 1, sum);
  std::vector<Chunk> chunks;
  int64_t held = 0;
  for (size_t i = 0; i < groups.size(); ++i) {
    for (const Part& part : parts_of_group(of, static_cast<int64_t>(i), g_place, most)) {
      const int64_t steps = part.steps * part.lines;
      if (chunks.empty() || chunks.back().kind != groups[i].kind || held + steps > most) {
        chunks.push_back({{}, groups[i].kind});
        held = 0;
      }
      chunks.back().parts.push_back(part);
      held += steps;
    }
  }
  return chunks;
}

// The product of some panels of rows, `top` to `bottom` - 1, with one panel of columns, whose codes lie `at` steps from a
// place's first. The last panel of rows is always among them, because it holds the row of ones.
void multiply_panel(const Convolution& of, const uint32_t* g, const uint32_t* x, const std::vector<Chunk>& chunks,
                    const std::vector<Kind>& kinds, const Way& way, int64_t at, int64_t top, int64_t bottom, float* total,
                    double* added) {
  const int64_t O = of.outputs, A = O + 1, panels = parts_of(A, kTileRows);
  const int64_t g_image = product_of_sizes(of.places) * A, x_image = product_of_sizes(of.padded) * of.inputs;
  Walk walk{0, 0, 4 * A, 4 * of.stride[2] * of.inputs, 0, 0, {0, 4, 8, 12, 16, 20}};
  const Tile tile = way.per == 2 ? tile_shorts : tile_bytes;
  alignas(64) int32_t sums[kTileRows * kTileColumns], ones[kTileColumns] = {};
  for (const Chunk& chunk : chunks) {
    const Kind& kind = kinds[chunk.kind];
    const float factor = kind.g_scale * kind.x_scale;
    for (int64_t panel = panels - 1; panel >= top; panel = std::min(panel, bottom) - 1) {
      const bool last = panel == panels - 1;
      for (int i = 0; i < kTileRows; ++i) {
#pragma omp simd
        for (int j = 0; j < kTileColumns; ++j) sums[i * kTileColumns + j] = last ? 0 : way.pace.shift * ones[j];
      }
      for (const Part& part : chunk.parts) {
        walk.steps = part.steps;
        walk.lines = part.lines;
        walk.a_line = 4 * A * (of.places[2] - part.steps);
        walk.b_line = 4 * of.inputs * (of.stride[1] * of.padded[2] - of.stride[2] * part.steps);
        tile(g + part.group * g_image + part.a + panel * kTileRows, x + part.group * x_image + part.b + at, walk, sums);
      }
      const int64_t rows = std::min<int64_t>(kTileRows, O - panel * kTileRows);
      if (last) {
        // The row of ones sums the codes of x. Bytes of g are packed minus the shift.
        std::copy_n(sums + rows * kTileColumns, kTileColumns, ones);
        for (int j = 0; j < kTileColumns; ++j) {
          added[j] += static_cast<double>(kind.g_zero) * kind.x_scale * ones[j];
          for (int64_t i = 0; i < rows; ++i) sums[i * kTileColumns + j] += way.pace.shift * ones[j];
        }
      }
      float* to = total + panel * kTileRows * kTileColumns;
#pragma omp simd
      for (int64_t i = 0; i < rows * kTileColumns; ++i) to[i] += factor * static_cast<float>(sums[i]);
    }
  }
}

template <int per, class Code>
Tensor product_of_images(const Convolution& of, const Code* g, const int8_t* x, const std::vector<Kind>& kinds,
                         const Way& way, const Sums& sums) {
  const int64_t O = of.outputs, C = of.inputs, taps = of.taps();
  std::vector<Group> groups;
  for (size_t kind = 0; kind < kinds.size(); ++kind) {
    const auto& samples = kinds[kind].samples;
    for (size_t i = 0; i < samples.size(); ++i) {
      if (i % per == 0) groups.push_back({{-1, -1, -1, -1}, static_cast<int64_t>(kind)});
      groups.back().samples[i % per] = samples[i];
    }
  }
  const Tensor first = grouped<per>(g, groups, {of.samples, of.places, {}, of.places}, O, 1, way.pace.shift);
  const Tensor second = grouped<per>(x, groups, {of.samples, of.sizes, of.padding, of.padded}, C, 0, 0);
  const auto codes = [](const Tensor& each) { return reinterpret_cast<const uint32_t*>(each.const_data_ptr<int32_t>()); };
  const int64_t sum = per == 4 ? (int64_t{1} << 17) / per : way.block;
  const std::vector<Chunk> chunks = chunks_of(of, groups, O + 1, sum);

  // Columns that lie side by side: those of a line of taps, or of a single tap if taps lie apart.
  const int64_t run = of.dilation[2] == 1 ? of.kernel[2] : 1, each = parts_of(run * C, kTileColumns);
  Tensor found = at::empty({O, taps * C}, at::kFloat);
  float* out = found.mutable_data_ptr<float>();
  // If there are few columns, several threads take the rows of each.
  const int64_t panels = parts_of(O + 1, kTileRows), columns = taps / run * each;
  const int64_t parts = std::clamp<int64_t>(4 * at::get_num_threads() / columns, 1, std::max<int64_t>(1, panels / 8));
  share(columns * parts, 1, [&](int64_t index) {
    const int64_t task = index / parts, part = index % parts;
    const int64_t top = panels * part / parts, bottom = panels * (part + 1) / parts;
    const int64_t tap = task / each * run, from = task % each * kTileColumns;
    const int64_t count = std::min<int64_t>(kTileColumns, run * C - from);
    const Sizes place{tap / (of.kernel[1] * of.kernel[2]) * of.dilation[0],
                      tap / of.kernel[2] % of.kernel[1] * of.dilation[1], tap % of.kernel[2] * of.dilation[2]};
    std::vector<float> total(panels * kTileRows * kTileColumns);
    double added[kTileColumns] = {};
    multiply_panel(of, codes(first), codes(second), chunks, kinds, way, number_of(place, of.padded) * C + from, top,
                   bottom, total.data(), added);
    for (int64_t o = top * kTileRows; o < std::min(O, bottom * kTileRows); ++o) {
      float* to = out + (o * taps + tap) * C + from;
      for (int64_t j = 0, end; j < count; j = end) {  // columns of one tap
        const int64_t number = (from + j) / C;
        const double more = sums.of_taps[(tap + number) * O + o];
        end = std::min(count, (number + 1) * C - from);
#pragma omp simd
        for (int64_t i = j; i < end; ++i) {
          to[i] = total[o * kTileColumns + i] + static_cast<float>(added[i] + more);
        }
      }
    }
  });
  return found;
}

// The gradient of the weight, with its channels innermost in memory or as torch lays it out by default; and the sum of
// the output's gradient.
std::tuple<Tensor, Tensor> code_convolution_weight(const Tensor& g, const Tensor& g_scale, const Tensor& g_zero,
                                                   const Tensor& x, const Tensor& x_scale, const Tensor& x_zero,
                                                   at::IntArrayRef kernel, at::IntArrayRef stride,
                                                   at::IntArrayRef padding, at::IntArrayRef dilation, bool innermost) {
  const auto sizes = x.sizes().slice(2);
  const Convolution of(x.size(0), x.size(1), g.size(1), sizes, kernel, stride, padding, dilation);
  check_images(x, at::kChar);
  check_images(g, g.scalar_type() == at::kShort ? at::kShort : at::kChar);
  TORCH_CHECK(g.numel() == of.rows() * of.outputs, "expected gradients of ", of.rows(), " places, not ", g.sizes());
  for (const auto& each : {g_scale, g_zero, x_scale, x_zero}) check_numbers(each, of.samples);
  const std::vector<Kind> kinds = kinds_of(g_scale, g_zero, x_scale, x_zero, of.samples);
  const Tensor turned = channels_innermost<int8_t>(x);
  const int8_t* second = turned.const_data_ptr<int8_t>();
  const int64_t O = of.outputs, C = of.inputs, taps = of.taps();
  Tensor total = at::empty({O}, at::kFloat);
  const auto with = [&](auto code) {
    using Code = decltype(code);
    const Tensor gradient = channels_innermost<Code>(g);
    const Code* first = gradient.const_data_ptr<Code>();
    const Sums sums = sums_of(first, kinds, of);
    std::copy(sums.all.begin(), sums.all.end(), total.mutable_data_ptr<float>());
    const Way way = way_of(ends(first, gradient.numel()), ends(second, turned.numel()));
    const auto run = way.per == 2 ? product_of_images<2, Code> : product_of_images<4, Code>;
    return run(of, first, second, kinds, way, sums);
  };
  const Tensor found = g.scalar_type() == at::kShort ? with(int16_t()) : with(int8_t());
  std::vector<int64_t> shape{O};
  if (!innermost) {
    transpose_in_place(found.mutable_data_ptr<float>(), O, taps, C);
    shape.push_back(C);
  }
  shape.insert(shape.end(), kernel.begin(), kernel.end());
  if (!innermost) return {found.view(shape), total};
  shape.push_back(C);
  return {found.view(shape).movedim(-1, 1), total};
}

TORCH_LIBRARY_IMPL(fractrain_fx, CPU, library) { library.impl("code_convolution_weight", code_convolution_weight); }

#endif

}  // namespace

TORCH_LIBRARY_FRAGMENT(fractrain_fx, library) {
  library.def(
      "code_convolution_weight(Tensor g, Tensor g_scale, Tensor g_zero, Tensor x, Tensor x_scale, Tensor x_zero, "
      "int[] kernel, int[] stride, int[] padding, int[] dilation, bool innermost) -> (Tensor, Tensor)");
}

}  // namespace fractrain_fx
