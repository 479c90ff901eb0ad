// Convolutions at stride 1 as products of codes: what lies under the kernel at each place becomes a row.

#include <torch/library.h>

#include <optional>

#include "windows.h"

namespace fractrain_fx {
namespace {

// Rows of codes of 8 bits (samples, channels, *sizes), with one number around all samples, or one around each.
Tensor windows(const Tensor& given, at::IntArrayRef kernel, at::IntArrayRef padding, const Tensor& around) {
  TORCH_CHECK(given.scalar_type() == at::kChar && given.dim() > 2 && given.dim() < 6 && given.numel() > 0,
              "expected codes of 8 bits of 1 to 3 dimensions, not ", given.toString(), given.sizes());
  TORCH_CHECK(around.scalar_type() == at::kLong && (around.numel() == 1 || around.numel() == given.size(0)),
              "expected one number, or one for each sample");
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
