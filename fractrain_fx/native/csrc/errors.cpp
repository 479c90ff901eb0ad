// The gradient of the input of a linear layer. The weight's scales lie along the dimension that is summed over, so they
// are multiplied into the output's gradient, which is then encoded in 16 bits.

#include <ATen/ops/ones.h>
#include <ATen/ops/zeros.h>
#include <torch/library.h>

#include "fixed_point.h"
#include "products.h"

namespace fractrain_fx {
namespace {

// g @ (w_scale * w + w_zero), with one w_scale and one w_zero for each row of w.
Tensor error_product(const Tensor& g, const std::optional<Tensor>& g_scale, const std::optional<Tensor>& g_zero,
                     const Tensor& w, const Tensor& w_scale, const Tensor& w_zero) {
  const FixedPoint h = fixed_point_of(g, g_scale, g_zero, w_scale, w_zero, 1);
  const Tensor one = at::ones({1}, at::kFloat), none = at::zeros({1}, at::kFloat);
  return code_product(h.codes, h.units, none, w, one, none, h.offsets, {});
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(fractrain_fx, library) {
  library.def(
      "error_product(Tensor g, Tensor? g_scale, Tensor? g_zero, Tensor w, Tensor w_scale, Tensor w_zero) -> Tensor");
}

TORCH_LIBRARY_IMPL(fractrain_fx, CPU, library) { library.impl("error_product", error_product); }

}  // namespace fractrain_fx
