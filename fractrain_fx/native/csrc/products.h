// The product of two matrices of scale * code + zero.

#pragma once

#include <ATen/core/Tensor.h>

#include <optional>

namespace fractrain_fx {

using at::Tensor;

// (a_scale * a + a_zero) @ (b_scale * b + b_zero) + rows + columns. Scales and zeros of a are numbers of rows, those of
// b of columns; so is what is added.
Tensor code_product(const Tensor& a, const Tensor& a_scale, const Tensor& a_zero, const Tensor& b,
                    const Tensor& b_scale, const Tensor& b_zero, const std::optional<Tensor>& rows,
                    const std::optional<Tensor>& columns);

}  // namespace fractrain_fx
