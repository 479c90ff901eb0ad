// The product of two matrices whose values are scale * code + zero.

#pragma once

#include <ATen/core/Tensor.h>

#include <optional>

namespace fractrain_fx {

using at::Tensor;

// (a_scale * a + a_zero) @ (b_scale * b + b_zero) + rows + columns. Scales and zeros of a, and `rows`, are numbers of
// the rows of a; those of b, and `columns`, are numbers of the columns of b (numbers.h).
Tensor code_product(const Tensor& a, const Tensor& a_scale, const Tensor& a_zero, const Tensor& b,
                    const Tensor& b_scale, const Tensor& b_zero, const std::optional<Tensor>& rows,
                    const std::optional<Tensor>& columns);

}  // namespace fractrain_fx
