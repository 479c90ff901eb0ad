// Convolutions of codes: the output, and the gradient of the input.

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <algorithm>
#include <cstdint>
#include <numeric>
#include <optional>
#include <vector>

#include "fixed_point.h"
#include "geometry.h"
#include "images.h"
#include "numbers.h"
#include "sweep.h"

namespace fractrain_fx {
namespace {

#ifdef FRACTRAIN_FX_TILES

// Empty images (samples, channels, *sizes): with the channels innermost, or as torch lays them out by default.
Tensor empty_images(int64_t channels, const Tensor& like, at::IntArrayRef sizes, bool innermost) {
  std::vector<int64_t> shape{like.size(0), channels};
  shape.insert(shape.end(), sizes.begin(), sizes.end());
  if (!innermost) return at::empty(shape, at::kFloat);
  shape.erase(shape.begin() + 1);
  shape.push_back(channels);
  return at::empty(shape, at::kFloat).movedim(-1, 1);
}

at::IntArrayRef spatial(const Tensor& images) { return images.sizes().slice(2); }

// The sums of values of images at some distances from each place.
template <class T>
std::vector<T> sums_at(const std::vector<T>& values, int64_t samples, const std::vector<int64_t>& from,
                       const std::vector<int64_t>& apart) {
  const int64_t places = static_cast<int64_t>(from.size()), image = static_cast<int64_t>(values.size()) / samples;
  std::vector<T> found(samples * places);
  at::parallel_for(0, samples, std::max<int64_t>(1, 16384 / places), [&](int64_t begin, int64_t end) {
    for (int64_t n = begin; n < end; ++n) {
      for (const int64_t each : apart) {
        const T* value = values.data() + n * image + each;
        for (int64_t i = 0; i < places; ++i) found[n * places + i] += value[from[i]];
      }
    }
  });
  return found;
}

std::vector<int64_t> times(std::vector<int64_t> each, int64_t factor) {
  for (int64_t& one : each) one *= factor;
  return each;
}

Tensor code_convolution(const Tensor& x, const Tensor& x_scale, const Tensor& x_zero, const Tensor& w,
                        const Tensor& w_scale, const Tensor& w_zero, const std::optional<Tensor>& bias,
                        at::IntArrayRef stride, at::IntArrayRef padding, at::IntArrayRef dilation) {
  const Convolution of(x.size(0), x.size(1), w.size(0), spatial(x), spatial(w), stride, padding, dilation);
  check_images(x, at::kChar);
  check_images(w, at::kChar);
  TORCH_CHECK(w.size(1) == of.inputs && of.taps() * of.inputs <= kMostBytes, "expected ", of.inputs,
              " channels and a kernel of at most ", kMostBytes, " values, not ", w.sizes());
  for (const auto& each : {x_scale, x_zero}) check_numbers(each, of.samples);
  for (const auto& each : {std::optional(w_scale), std::optional(w_zero), bias}) check_numbers(each, of.outputs);
  const Tensor codes = channels_innermost<int8_t>(x), weight = channels_innermost<int8_t>(w);
  const int8_t* first = codes.const_data_ptr<int8_t>();
  const int8_t* second = weight.const_data_ptr<int8_t>();
  const Way way = way_of(both(ends(first, codes.numel()), {0, 0}), ends(second, weight.numel()));
  const int64_t size = 4 / way.per, C = of.inputs, O = of.outputs, taps = of.taps();

  // The places of an image, in the padded image.
  std::vector<int64_t> from, apart;
  for_each_index(of.places, [&](const Sizes& at, int64_t) {
    from.push_back(number_of({at[0] * of.stride[0], at[1] * of.stride[1], at[2] * of.stride[2]}, of.padded));
  });
  for_each_index(of.kernel, [&](const Sizes& tap, int64_t) {
    apart.push_back(number_of({tap[0] * of.dilation[0], tap[1] * of.dilation[1], tap[2] * of.dilation[2]}, of.padded));
  });
  const Frame frame{of.samples, of.sizes, of.padding, of.padded};
  const Tensor images = way.per == 4 ? framed<uint8_t, int8_t>(codes, frame, C, kUnits ? 0 : way.pace.shift)
                                     : framed<int16_t, int8_t>(codes, frame, C, 0);
  const std::vector<int32_t> sums = sums_at(channel_sums(first, frame, C), of.samples, from, apart);

  std::vector<Factor<int8_t>> factors;
  for (int64_t tap = 0; tap < taps; ++tap) factors.push_back({second + tap * C, O, C, taps * C, 1});
  const PackedTaps packed = packed_taps(factors, O, C, way);
  const int64_t most = way.per == 4 ? kMostBytes : way.block;
  const std::vector<Piece> pieces = pieces_of(apart, C, way, most);

  // The codes of the weight summed over the taps inside the image, for each class of places, times the scale.
  const Classes classes(of);
  const Numbers scale(x_scale, of.samples), zero(x_zero, of.samples), s(w_scale, O), z(w_zero, O), c(bias, O);
  std::vector<float> within(classes.count() * O);
  std::vector<int64_t> counts(classes.count());
  std::vector<int32_t> of_taps(taps * O);
  for (int64_t i = 0; i < O * taps; ++i) {
    of_taps[i % taps * O + i / taps] = std::accumulate(second + i * C, second + (i + 1) * C, int32_t{0});
  }
  for (int64_t k = 0; k < classes.count(); ++k) {
    std::vector<int32_t> sum(O);
    for (int64_t tap = 0; tap < taps; ++tap) {
      if (!classes.inside[k][tap]) continue;
      counts[k] += C;
      for (int64_t o = 0; o < O; ++o) sum[o] += of_taps[tap * O + o];
    }
    for (int64_t o = 0; o < O; ++o) within[k * O + o] = s[o] * static_cast<float>(sum[o]);
  }
  std::vector<float> scales(O), zeros(O), added(O);
  for (int64_t o = 0; o < O; ++o) scales[o] = s[o], zeros[o] = z[o], added[o] = c[o];

  const bool innermost = !x.is_contiguous();
  Tensor out = empty_images(O, x, at::IntArrayRef(of.places).slice(3 - spatial(x).size()), innermost);
  const int64_t places = product_of_sizes(of.places);
  SweptRows rows{times(from, C * size), {}, of.samples, product_of_sizes(of.padded) * C * size, places * O,
                 innermost ? 1 : places};
  for (int64_t i = 0; i < places; ++i) rows.to.push_back(innermost ? i * O : i);
  sweep(images, rows, packed, pieces, way, out.mutable_data_ptr<float>(),
        [&](int64_t n, int64_t place, int64_t column, int64_t count, const auto* products, float* y) {
          const int64_t k = classes.of_place[place];
          const float step = scale[n], lowest = zero[n];
          const double whole = static_cast<double>(step) * sums[n * places + place];
          const float sum = static_cast<float>(whole + counts[k] * static_cast<double>(lowest));
          const float *s_at = scales.data() + column, *z_at = zeros.data() + column, *c_at = added.data() + column;
          const float* t = within.data() + k * O + column;
#pragma omp simd
          for (int64_t j = 0; j < count; ++j) {
            const float product = static_cast<float>(products[j]);
            y[j] = product * (step * s_at[j]) + (sum * z_at[j] + lowest * t[j]) + c_at[j];
          }
        });
  return out;
}

// One dimension of the gradient of an input: the places `phase`, `phase` + stride, ... get products of the same taps.
struct Phase {
  int64_t count;                                   // places
  std::vector<std::pair<int64_t, int64_t>> taps;   // tap, and distance from a place's number to its gradient's
};

std::vector<Phase> phases_of(const Convolution& of, int d) {
  std::vector<Phase> phases;
  for (int64_t phase = 0; phase < std::min(of.stride[d], of.sizes[d]); ++phase) {
    Phase each{(of.sizes[d] - phase + of.stride[d] - 1) / of.stride[d], {}};
    for (int64_t tap = of.kernel[d] - 1; tap >= 0; --tap) {
      const int64_t at = phase + of.padding[d] - tap * of.dilation[d];
      if (at % of.stride[d] == 0) each.taps.emplace_back(tap, at / of.stride[d]);
    }
    phases.push_back(each);
  }
  return phases;
}

// The gradient of the input. g holds codes with scales and zeros of samples, or float values.
Tensor code_convolution_errors(const Tensor& g, const std::optional<Tensor>& g_scale,
                               const std::optional<Tensor>& g_zero, const Tensor& w, const Tensor& w_scale,
                               const Tensor& w_zero, at::IntArrayRef sizes, at::IntArrayRef stride,
                               at::IntArrayRef padding, at::IntArrayRef dilation) {
  const Convolution of(g.size(0), w.size(1), w.size(0), sizes, spatial(w), stride, padding, dilation);
  check_images(g, g.scalar_type());
  check_images(w, at::kChar);
  const int64_t C = of.inputs, O = of.outputs, taps = of.taps(), places = product_of_sizes(of.places);
  TORCH_CHECK(g.numel() == of.rows() * O, "expected gradients of ", of.rows(), " places, not ", g.sizes());
  const auto type = g.scalar_type();
  const Tensor turned = type == at::kFloat   ? channels_innermost<float>(g)
                        : type == at::kShort ? channels_innermost<int16_t>(g)
                                             : channels_innermost<int8_t>(g);
  const FixedPoint h = fixed_point_of(turned.view({-1, O}), g_scale, g_zero, w_scale, w_zero, places);
  const Tensor weight = channels_innermost<int8_t>(w);
  const int8_t* second = weight.const_data_ptr<int8_t>();
  const CodeEnds reach = ends(second, weight.numel());
  const int64_t largest = std::max<int64_t>({1, std::abs(reach.first), std::abs(reach.second)});
  const int64_t sum = std::max<int64_t>(1, std::min(kSteps, kMost32 / (2 * kMost16 * largest)));

  const Way way{2, sum, largest, {tile_shorts, 0, sum}};

  std::array<std::vector<Phase>, 3> phases;
  Frame frame{of.samples, of.places, {}, of.places};
  for (int d = 0; d < 3; ++d) {
    int64_t after = 0;
    phases[d] = phases_of(of, d);
    for (const Phase& phase : phases[d]) {
      for (const auto& [tap, apart] : phase.taps) {
        frame.before[d] = std::max(frame.before[d], -apart);
        after = std::max(after, phase.count - 1 + apart - (of.places[d] - 1));
      }
    }
    frame.framed[d] += frame.before[d] + after;
  }
  const Tensor images = framed<int16_t, int16_t>(h.codes, frame, O, 0);
  const std::vector<float> offsets = framed_numbers(h.offsets.const_data_ptr<float>(), frame);
  const float* units = h.units.const_data_ptr<float>();

  const bool innermost = !g.is_contiguous();
  Tensor out = empty_images(C, g, sizes, innermost);
  const int64_t all = product_of_sizes(of.sizes), image = product_of_sizes(frame.framed);
  const Sizes counts{static_cast<int64_t>(phases[0].size()), static_cast<int64_t>(phases[1].size()),
                     static_cast<int64_t>(phases[2].size())};
  for_each_index(counts, [&](const Sizes& number, int64_t) {
    const Phase &a = phases[0][number[0]], &b = phases[1][number[1]], &c = phases[2][number[2]];
    std::vector<int64_t> apart, from;
    std::vector<Factor<int8_t>> factors;
    for (const auto& [i, at_i] : a.taps) {
      for (const auto& [j, at_j] : b.taps) {
        for (const auto& [k, at_k] : c.taps) {
          apart.push_back((at_i * frame.framed[1] + at_j) * frame.framed[2] + at_k);
          factors.push_back({second + number_of({i, j, k}, of.kernel) * C, C, O, 1, taps * C});
        }
      }
    }
    const Sizes places_of_phase{a.count, b.count, c.count};
    SweptRows rows{{}, {}, of.samples, image * 2 * O, all * C, innermost ? 1 : all};
    for_each_index(places_of_phase, [&](const Sizes& at, int64_t) {
      Sizes framed_at, place;
      for (int d = 0; d < 3; ++d) {
        framed_at[d] = at[d] + frame.before[d];
        place[d] = number[d] + at[d] * of.stride[d];
      }
      from.push_back(number_of(framed_at, frame.framed));
      rows.to.push_back(number_of(place, of.sizes) * (innermost ? C : 1));
    });
    rows.from = times(from, 2 * O);
    const std::vector<float> offset = sums_at(offsets, of.samples, from, apart);
    const std::vector<Piece> pieces = pieces_of(apart, O, way, sum);
    const int64_t each = product_of_sizes(places_of_phase);
    sweep(images, rows, packed_taps(factors, C, O, way), pieces, way, out.mutable_data_ptr<float>(),
          [&](int64_t n, int64_t place, int64_t, int64_t count, const auto* products, float* y) {
            const float unit = units[n], more = offset[n * each + place];
#pragma omp simd
            for (int64_t j = 0; j < count; ++j) y[j] = static_cast<float>(products[j]) * unit + more;
          });
  });
  return out;
}

TORCH_LIBRARY_IMPL(fractrain_fx, CPU, library) {
  library.impl("code_convolution", code_convolution);
  library.impl("code_convolution_errors", code_convolution_errors);
}

#endif

}  // namespace

TORCH_LIBRARY_FRAGMENT(fractrain_fx, library) {
  library.def(
      "code_convolution(Tensor x, Tensor x_scale, Tensor x_zero, Tensor w, Tensor w_scale, Tensor w_zero, Tensor? bias, "
      "int[] stride, int[] padding, int[] dilation) -> Tensor");
  library.def(
      "code_convolution_errors(Tensor g, Tensor? g_scale, Tensor? g_zero, Tensor w, Tensor w_scale, Tensor w_zero, "
      "int[] sizes, int[] stride, int[] padding, int[] dilation) -> Tensor");
}

}  // namespace fractrain_fx
