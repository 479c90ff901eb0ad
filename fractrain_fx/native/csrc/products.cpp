// Products of matrices whose values are scale * code + zero, from products of integer codes. Those use the dot products
// of AVX-512, or AVX2's instructions that multiply and add pairs, which take more codes at once the smaller they are.

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/index_select.h>
#include <ATen/ops/zeros.h>
#include <torch/library.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <numeric>
#include <optional>
#include <tuple>
#include <vector>

#include "blocks.h"
#include "numbers.h"
#include "products.h"

namespace fractrain_fx {
namespace {

using at::Tensor;

#ifdef FRACTRAIN_FX_TILES

// Rows are sorted by their scales and zeros if runs of rows that share them are on average shorter than this.
constexpr int64_t kRun = 32;

void check_codes(const Tensor& a, const Tensor& b, int64_t inner_of_a, int64_t inner_of_b) {
  TORCH_CHECK(a.dim() == 2 && b.dim() == 2 && a.size(inner_of_a) == b.size(inner_of_b) && a.numel() > 0 &&
                  b.numel() > 0 && b.scalar_type() == at::kChar &&
                  (a.scalar_type() == at::kChar || a.scalar_type() == at::kShort),
              "expected matrices of codes (int8 or int16, and int8) that fit, not ", a.toString(), a.sizes(), " and ",
              b.toString(), b.sizes());
}

Tensor dense(const Tensor& codes) { return codes.is_non_overlapping_and_dense() ? codes : codes.contiguous(); }

// Calls run with a value of the type of the codes.
template <class Run>
Tensor with_code(const Tensor& codes, Run&& run) {
  return codes.scalar_type() == at::kShort ? run(int16_t()) : run(int8_t());
}

}  // namespace

Tensor code_product(const Tensor& given_a, const Tensor& a_scale, const Tensor& a_zero, const Tensor& given_b,
                    const Tensor& b_scale, const Tensor& b_zero, const std::optional<Tensor>& rows,
                    const std::optional<Tensor>& columns) {
  check_codes(given_a, given_b, 1, 0);
  const int64_t M = given_a.size(0), N = given_b.size(1);
  for (const auto& each : {std::optional(a_scale), std::optional(a_zero), rows}) check_numbers(each, M);
  for (const auto& each : {std::optional(b_scale), std::optional(b_zero), columns}) check_numbers(each, N);
  const Tensor a = dense(given_a), b = dense(given_b);
  const int64_t length = a.size(1);
  const Factor<int8_t> second{b.const_data_ptr<int8_t>(), N, length, b.stride(1), b.stride(0)};
  const auto finish_of = [&](const Left& left, const Right& right) {
    const Numbers scale(a_scale, M), zero(a_zero, M), row(rows, M), s(b_scale, N), z(b_zero, N), column(columns, N);
    Finish with;
    for (int64_t i = 0; i < left.count; ++i) {
      double sum = 0;
      for (int64_t k = 0; k < left.tasks(); ++k) sum += left.sum(k, i);
      const double whole = scale[i] * sum + length * static_cast<double>(zero[i]);
      with.rows.push_back({scale[i], zero[i], static_cast<float>(whole), row[i]});
    }
    for (int64_t j = 0; j < right.count; ++j) {
      double sum = 0;
      for (int64_t k = 0; k < right.tasks(); ++k) sum += right.sum(k, j);
      with.push(s[j], z[j], static_cast<float>(s[j] * sum), column[j]);
    }
    return with;
  };
  return with_code(a, [&](auto code) {
    using Code = decltype(code);
    const Factor<Code> first{a.const_data_ptr<Code>(), M, length, a.stride(0), a.stride(1)};
    std::vector<Block> blocks;
    append(blocks, 0, length, 1.0f, way_of(ends(first.data, a.numel()), ends(second.data, b.numel())));
    return product_of(first, second, blocks, finish_of);
  });
}

namespace {

// Scales and zeros of the rows that are summed over.
class RowEnds {
 public:
  RowEnds(const Tensor& g_scale, const Tensor& g_zero, const Tensor& x_scale, const Tensor& x_zero, int64_t rows)
      : g(g_scale, rows), zero_of_g(g_zero, rows), x(x_scale, rows), zero_of_x(x_zero, rows) {}

  const Numbers g, zero_of_g, x, zero_of_x;

  // The four numbers of a row as bits, so that NaN equals itself in a comparison.
  std::array<uint32_t, 4> of(int64_t row) const {
    const std::array<float, 4> numbers{g[row], zero_of_g[row], x[row], zero_of_x[row]};
    std::array<uint32_t, 4> bits;
    std::memcpy(bits.data(), numbers.data(), sizeof(bits));
    return bits;
  }
  // The number of rows from `start` on that have the same scales and zeros.
  int64_t alike(int64_t start, int64_t rows) const {
    const auto first = of(start);
    int64_t end = start + 1;
    while (end < rows && of(end) == first) ++end;
    return end - start;
  }
};

// An order that puts rows with the same scales and zeros together; nothing if they lie in long runs already.
std::optional<Tensor> better_order(const RowEnds& ends, int64_t rows) {
  int64_t runs = 0;
  for (int64_t start = 0; start < rows; start += ends.alike(start, rows)) ++runs;
  if (runs == 1 || runs * kRun <= rows) return {};
  Tensor order = at::empty({rows}, at::kLong);
  int64_t* first = order.mutable_data_ptr<int64_t>();
  std::iota(first, first + rows, 0);
  std::stable_sort(first, first + rows, [&](int64_t i, int64_t j) { return ends.of(i) < ends.of(j); });
  return order;
}

// The results of code_product_of_rows, with the rows in the order in which they lie.
std::tuple<Tensor, Tensor> product_in_order(const Tensor& g, const Tensor& x, const RowEnds& of) {
  const int64_t rows = g.size(0);
  Tensor sums = at::zeros({g.size(1)}, at::kFloat);
  const Factor<int8_t> second{x.const_data_ptr<int8_t>(), x.size(1), rows, x.stride(1), x.stride(0)};
  const auto finish_of = [&](const Left& left, const Right& right) {
    Finish with;
    float* sum_of = sums.mutable_data_ptr<float>();
    for (int64_t i = 0; i < left.count; ++i) {
      double sum = 0, of_x = 0;
      for (int64_t k = 0; k < left.tasks(); ++k) {
        const int64_t at = left.blocks[k].start;
        const double of_codes = static_cast<double>(of.g[at]) * left.sum(k, i);
        const double part = of_codes + left.blocks[k].length * static_cast<double>(of.zero_of_g[at]);
        sum += part;
        of_x += part * of.zero_of_x[at];
      }
      sum_of[i] = static_cast<float>(sum);
      with.rows.push_back({1.0f, 0.0f, 0.0f, static_cast<float>(of_x)});
    }
    for (int64_t j = 0; j < right.count; ++j) {
      double sum = 0;
      for (int64_t k = 0; k < right.tasks(); ++k) {
        const int64_t at = right.blocks[k].start;
        sum += static_cast<double>(of.x[at]) * of.zero_of_g[at] * right.sum(k, j);
      }
      with.push(1.0f, 0.0f, 0.0f, static_cast<float>(sum));
    }
    return with;
  };
  const Tensor found = with_code(g, [&](auto code) {
    using Code = decltype(code);
    const Factor<Code> first{g.const_data_ptr<Code>(), g.size(1), rows, g.stride(1), g.stride(0)};
    // The lowest and highest codes of a run of rows decide how it is multiplied, if the run is contiguous; otherwise
    // those of all rows do.
    std::optional<Way> common;
    if (first.next_row != 1 || second.next_row != 1) {
      common = way_of(ends(first.data, g.numel()), ends(second.data, x.numel()));
    }
    const auto way = [&](int64_t start, int64_t length) {
      const auto of = [&](const auto& factor) { return ends(factor.at(0, start), length * factor.count); };
      return common ? *common : way_of(of(first), of(second));
    };
    std::vector<Block> blocks;
    for (int64_t start = 0, length; start < rows; start += length) {
      length = of.alike(start, rows);
      if (of.g[start] != 0.0f) append(blocks, start, length, of.g[start] * of.x[start], way(start, length));
    }
    if (blocks.empty()) return at::zeros({g.size(1), x.size(1)}, at::kFloat);
    return product_of(first, second, blocks, finish_of);
  });
  return {found, sums};
}

// (g_scale * g + g_zero)^T @ (x_scale * x + x_zero), and the sum of the rows of g_scale * g + g_zero. Scales and zeros
// are numbers of the rows, which are summed over. Rows with the same scales and zeros are multiplied together; rows
// whose g_scale is 0 are left out.
std::tuple<Tensor, Tensor> code_product_of_rows(const Tensor& g, const Tensor& g_scale, const Tensor& g_zero,
                                                const Tensor& x, const Tensor& x_scale, const Tensor& x_zero) {
  check_codes(g, x, 0, 0);
  for (const auto& each : {g_scale, g_zero, x_scale, x_zero}) check_numbers(each, g.size(0));
  const int64_t rows = g.size(0);
  const RowEnds of(g_scale, g_zero, x_scale, x_zero, rows);
  const auto order = better_order(of, rows);
  if (!order) return product_in_order(dense(g), dense(x), of);
  const auto sorted = [&](const Numbers& each) {
    Tensor numbers = at::empty({rows}, at::kFloat);
    const int64_t* place = order->const_data_ptr<int64_t>();
    std::transform(place, place + rows, numbers.mutable_data_ptr<float>(), [&](int64_t row) { return each[row]; });
    return numbers;
  };
  const Tensor a = sorted(of.g), b = sorted(of.zero_of_g), c = sorted(of.x), d = sorted(of.zero_of_x);
  return product_in_order(g.index_select(0, *order), x.index_select(0, *order), RowEnds(a, b, c, d, rows));
}

constexpr bool kProducts = true;

#else

}  // namespace

Tensor code_product(const Tensor&, const Tensor&, const Tensor&, const Tensor&, const Tensor&, const Tensor&,
                    const std::optional<Tensor>&, const std::optional<Tensor>&) {
  TORCH_CHECK(false, "products of codes were built for another processor");
}

namespace {

constexpr bool kProducts = false;

std::tuple<Tensor, Tensor> code_product_of_rows(const Tensor&, const Tensor&, const Tensor&, const Tensor&,
                                                const Tensor&, const Tensor&) {
  TORCH_CHECK(false, "products of codes were built for another processor");
}

#endif

bool has_products() { return kProducts; }

}  // namespace

TORCH_LIBRARY_FRAGMENT(fractrain_fx, library) {
  library.def(
      "code_product(Tensor a, Tensor a_scale, Tensor a_zero, Tensor b, Tensor b_scale, Tensor b_zero, Tensor? rows, "
      "Tensor? columns) -> Tensor");
  library.def(
      "code_product_of_rows(Tensor g, Tensor g_scale, Tensor g_zero, Tensor x, Tensor x_scale, Tensor x_zero) "
      "-> (Tensor, Tensor)");
  library.def("has_products() -> bool", has_products);
}

TORCH_LIBRARY_IMPL(fractrain_fx, CPU, library) {
  library.impl("code_product", code_product);
  library.impl("code_product_of_rows", code_product_of_rows);
}

}  // namespace fractrain_fx
