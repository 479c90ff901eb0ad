// Numbers that belong to the rows or columns of a matrix: scales, zeros, added terms.

#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/Exception.h>

#include <cstdint>
#include <optional>
#include <vector>

namespace fractrain_fx {

using at::Tensor;

// One number for all rows (or columns), one for each, or one for each of several equally long runs. If no numbers are
// given, all are 0.
class Numbers {
 public:
  Numbers(const std::optional<Tensor>& given, int64_t count)
      : first_(given ? given->const_data_ptr<float>() : &kNone), next_(given && given->numel() > 1) {
    if (!next_ || given->numel() == count) return;
    const int64_t run = count / given->numel();
    spread_.resize(count);
    for (int64_t i = 0; i < count; ++i) spread_[i] = first_[i / run];
    first_ = spread_.data();
  }
  Numbers(const Numbers&) = delete;
  Numbers& operator=(const Numbers&) = delete;
  float operator[](int64_t i) const { return first_[next_ ? i : 0]; }

 private:
  static constexpr float kNone = 0.0f;
  const float* first_;
  bool next_;
  std::vector<float> spread_;
};

inline void check_numbers(const std::optional<Tensor>& each, int64_t count) {
  TORCH_CHECK(!each || (each->scalar_type() == at::kFloat && each->is_contiguous() && each->numel() > 0 &&
                        count % each->numel() == 0),
              "expected one number, or one for each run of equal length, in contiguous float32, for ", count,
              " rows or columns");
}

}  // namespace fractrain_fx
