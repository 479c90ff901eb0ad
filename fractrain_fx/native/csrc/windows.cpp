// Convolutions at stride 1 as products of codes: the codes under the kernel at each place become a row.

#include <torch/library.h>

#include <optional>

#include "windows.h"

namespace fractrain_fx {
namespace {

// The rows of 8-bit codes (samples, channels, *sizes). `around` holds the code outside the input, one for all samples
// or one for each.
Tensor windows(const Tensor& given, at::IntArrayRef kernel, at::IntArrayRef padding, const Tensor& around) {
  TORCH_CHECK(given.scalar_type() == at::kChar && given.dim() > 2 && given.dim() < 6 && given.numel() > 0,
              "expected int8 codes (samples, channels, and 1 to 3 sizes), not ", given.toString(), given.sizes());
  TORCH_CHECK(around.scalar_type() == at::kLong && (around.numel() == 1 || around.numel() == given.size(0)),
              "expected one int64 code around all samples, or one for each sample");
  const Tensor x = given.movedim(1, -1).contiguous(), numbers = around.contiguous();
  const Windows of(x.size(0), x.size(-1), x.sizes().slice(1, x.dim() - 2), kernel, padding);
  const int64_t *number = numbers.const_data_ptr<int64_t>(), next = numbers.numel() > 1;
  const auto each = [&](int64_t sample) { return static_cast<int8_t>(number[sample * next]); };
  return rows_of(x.const_data_ptr<int8_t>(), of, x.options(), each);
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(fractrain_fx, library) {
  library.def("windows(Tensor x, int[] kernel, int[] padding, Tensor around) -> Tensor");
}

TORCH_LIBRARY_IMPL(fractrain_fx, CPU, library) { library.impl("windows", windows); }

}  // namespace fractrain_fx
