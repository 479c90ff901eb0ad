// Products of matrices of scale * code + zero, from products of whole codes: on a CPU that has no units for bytes, by
// the instructions of AVX2 that multiply and add pairs. The smaller the codes, the more of them an instruction takes.

#include <ATen/core/Tensor.h>
#include <ATen/ops/zeros.h>
#include <torch/library.h>

#include <optional>
#include <vector>

#include "blocks.h"

namespace fractrain_fx {
namespace {

using at::Tensor;

#ifdef FRACTRAIN_FX_TILES

// One number, or one for each row or column; none is 0.
class Numbers {
 public:
  explicit Numbers(const std::optional<Tensor>& given)
      : first_(given ? given->const_data_ptr<float>() : &kNone), next_(given && given->numel() > 1) {}
  float operator[](int64_t i) const { return first_[next_ ? i : 0]; }

 private:
  static constexpr float kNone = 0.0f;
  const float* first_;
  bool next_;
};

void check_codes(const Tensor& a, const Tensor& b, int64_t inner_of_a, int64_t inner_of_b) {
  TORCH_CHECK(a.dim() == 2 && b.dim() == 2 && a.size(inner_of_a) == b.size(inner_of_b) && a.numel() > 0 &&
                  b.numel() > 0 && b.scalar_type() == at::kChar &&
                  (a.scalar_type() == at::kChar || a.scalar_type() == at::kShort),
              "expected matrices of codes, of int8 or int16 and of int8, not ", a.toString(), a.sizes(), " and ",
              b.toString(), b.sizes());
}

void check_numbers(const std::optional<Tensor>& each, int64_t count) {
  TORCH_CHECK(!each || (each->scalar_type() == at::kFloat && each->is_contiguous() &&
                        (each->numel() == 1 || each->numel() == count)),
              "expected one number or one for each of ", count, " rows or columns");
}

Tensor dense(const Tensor& codes) { return codes.is_non_overlapping_and_dense() ? codes : codes.contiguous(); }

// Runs with the type of codes.
template <class Run>
Tensor with_code(const Tensor& codes, Run&& run) {
  return codes.scalar_type() == at::kShort ? run(int16_t()) : run(int8_t());
}

// (a_scale * a + a_zero) @ (b_scale * b + b_zero) + rows + columns. Scales and zeros of a are one number or one for each
// row, those of b for each column; so are what is added.
Tensor code_product(const Tensor& given_a, const Tensor& a_scale, const Tensor& a_zero, const Tensor& given_b,
                    const Tensor& b_scale, const Tensor& b_zero, const std::optional<Tensor>& rows,
                    const std::optional<Tensor>& columns) {
  check_codes(given_a, given_b, 1, 0);
  for (const auto& each : {std::optional(a_scale), std::optional(a_zero), rows}) check_numbers(each, given_a.size(0));
  for (const auto& each : {std::optional(b_scale), std::optional(b_zero), columns}) check_numbers(each, given_b.size(1));
  const Tensor a = dense(given_a), b = dense(given_b);
  const int64_t length = a.size(1);
  const Factor<int8_t> second{b.const_data_ptr<int8_t>(), b.size(1), length, b.stride(1), b.stride(0)};
  const auto finish_of = [&](const Left& left, const Right& right) {
    const Numbers scale(a_scale), zero(a_zero), s(b_scale), z(b_zero), row(rows), column(columns);
    Finish with;
    for (int64_t i = 0; i < left.count; ++i) {
      double sum = 0;
      for (int64_t k = 0; k < left.tasks(); ++k) sum += left.sum(k, i);
      with.rows.push_back({scale[i], zero[i], static_cast<float>(scale[i] * sum + length * static_cast<double>(zero[i])), row[i]});
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
    const Factor<Code> first{a.const_data_ptr<Code>(), a.size(0), length, a.stride(0), a.stride(1)};
    const Way way = way_of(ends<Code>(a), ends<int8_t>(b));
    std::vector<Block> blocks;
    append(blocks, 0, length, 1.0f, way);
    return product_of(first, second, way, blocks, finish_of);
  });
}

// (g_scale * g + g_zero)^T @ (x_scale * x + x_zero), where scales and zeros are one number or one for each row, which is
// summed over. Rows that follow one another and have the same are multiplied together; those of g_scale 0 are left out.
Tensor code_product_of_rows(const Tensor& given_g, const Tensor& g_scale, const Tensor& g_zero, const Tensor& given_x,
                            const Tensor& x_scale, const Tensor& x_zero) {
  check_codes(given_g, given_x, 0, 0);
  const int64_t rows = given_g.size(0);
  for (const auto& each : {g_scale, g_zero, x_scale, x_zero}) check_numbers(each, rows);
  const Tensor g = dense(given_g), x = dense(given_x);
  const Numbers of_g(g_scale), zero_of_g(g_zero), of_x(x_scale), zero_of_x(x_zero);
  const Factor<int8_t> second{x.const_data_ptr<int8_t>(), x.size(1), rows, x.stride(1), x.stride(0)};
  const auto finish_of = [&](const Left& left, const Right& right) {
    Finish with;
    for (int64_t i = 0; i < left.count; ++i) {
      double sum = 0;
      for (int64_t k = 0; k < left.tasks(); ++k) {
        const auto [start, length, factor] = left.blocks[k];
        const double whole = static_cast<double>(of_g[start]) * left.sum(k, i) + length * static_cast<double>(zero_of_g[start]);
        sum += whole * zero_of_x[start];
      }
      with.rows.push_back({1.0f, 0.0f, 0.0f, static_cast<float>(sum)});
    }
    for (int64_t j = 0; j < right.count; ++j) {
      double sum = 0;
      for (int64_t k = 0; k < right.tasks(); ++k) {
        const int64_t start = right.blocks[k].start;
        sum += static_cast<double>(of_x[start]) * zero_of_g[start] * right.sum(k, j);
      }
      with.push(1.0f, 0.0f, 0.0f, static_cast<float>(sum));
    }
    return with;
  };
  return with_code(g, [&](auto code) {
    using Code = decltype(code);
    const Factor<Code> first{g.const_data_ptr<Code>(), g.size(1), rows, g.stride(1), g.stride(0)};
    const Way way = way_of(ends<Code>(g), ends<int8_t>(x));
    const auto alike = [&](int64_t i, int64_t j) {
      return of_g[i] == of_g[j] && zero_of_g[i] == zero_of_g[j] && of_x[i] == of_x[j] && zero_of_x[i] == zero_of_x[j];
    };
    std::vector<Block> blocks;
    for (int64_t start = 0, end; start < rows; start = end) {
      for (end = start + 1; end < rows && alike(start, end);) ++end;
      if (of_g[start] != 0.0f) append(blocks, start, end - start, of_g[start] * of_x[start], way);
    }
    if (blocks.empty()) return at::zeros({g.size(1), x.size(1)}, at::kFloat);
    return product_of(first, second, way, blocks, finish_of);
  });
}

constexpr bool kProducts = true;

#else

constexpr bool kProducts = false;

Tensor code_product(const Tensor&, const Tensor&, const Tensor&, const Tensor&, const Tensor&, const Tensor&,
                    const std::optional<Tensor>&, const std::optional<Tensor>&) {
  TORCH_CHECK(false, "products of codes were built for another processor");
}

Tensor code_product_of_rows(const Tensor&, const Tensor&, const Tensor&, const Tensor&, const Tensor&, const Tensor&) {
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
      "code_product_of_rows(Tensor g, Tensor g_scale, Tensor g_zero, Tensor x, Tensor x_scale, Tensor x_zero) -> Tensor");
  library.def("has_products() -> bool", has_products);
}

TORCH_LIBRARY_IMPL(fractrain_fx, CPU, library) {
  library.impl("code_product", code_product);
  library.impl("code_product_of_rows", code_product_of_rows);
}

}  // namespace fractrain_fx
