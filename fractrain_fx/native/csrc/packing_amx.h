// Puts codes of 8 or 16 bits into the order in which tiles_amx.h reads the rows of a.

#pragma once

#include <algorithm>
#include <cstdint>

#include "packing.h"
#include "tiles_amx.h"
#include "transposed.h"

#ifdef FRACTRAIN_FX_UNITS

namespace fractrain_fx {

// Packs some codes of a row, at most as many as one instruction multiplies, and returns their sum. wide: codes that a
// byte does not hold are packed as two; the low one goes to `low`.
template <bool wide, class Code>
int32_t pack_line(const Code* first, int64_t count, uint8_t* out, uint8_t* low) {
  int32_t sum = 0;
  const auto pack_all = [&](int64_t all) {
#pragma omp simd reduction(+ : sum)
    for (int64_t i = 0; i < all; ++i) {
      const int32_t code = first[i];
      sum += code;
      out[i] = static_cast<uint8_t>(wide ? code >> 8 : code);
      if constexpr (wide) low[i] = static_cast<uint8_t>(code);
    }
  };
  if (count == kUnitBytes) {
    pack_all(kUnitBytes);
  } else {
    pack_all(count);
    std::fill(out + count, out + kUnitBytes, uint8_t{0});
    if constexpr (wide) std::fill(low + count, low + kUnitBytes, uint8_t{0});
  }
  return sum;
}

// Packs codes [start, start + length) of the rows from `row` on, with the sum of each row. `plane`: bytes from the high
// bytes of wide codes to the low ones. Rows that the factor lacks are 0.
template <bool wide, class Code>
void pack_rows(const Factor<Code>& factor, int64_t row, int64_t start, int64_t length, uint8_t* out, int64_t plane,
               int32_t* sums) {
  const int64_t rows = std::min<int64_t>(kUnitRows, factor.count - row);
  std::fill_n(sums, kUnitRows, 0);
  const auto line = [&](int64_t h, int64_t done, const Code* first) {
    uint8_t* to = out + (done / kUnitBytes * kUnitRows + h) * kUnitBytes;
    sums[h] += pack_line<wide>(first, std::min(kUnitBytes, length - done), to, to + plane);
  };
  if (rows < kUnitRows) std::fill_n(out, wide ? 2 * plane : plane, uint8_t{0});
  if (factor.next_in_row == 1) {
    for (int64_t h = 0; h < rows; ++h) {
      for (int64_t done = 0; done < length; done += kUnitBytes) line(h, done, factor.at(row + h, start + done));
    }
    return;
  }
  for (int64_t done = 0; done < length; done += kUnitBytes) {
    Code turned[kUnitRows * kUnitBytes];
    const int64_t count = std::min(kUnitBytes, length - done);
    transpose(factor.at(row, start + done), factor.next_in_row, count, rows, turned, kUnitBytes);
    for (int64_t h = 0; h < rows; ++h) line(h, done, turned + h * kUnitBytes);
  }
}

}  // namespace fractrain_fx

#endif
