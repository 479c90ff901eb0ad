// Transposes matrices in memory: channels of images become innermost, or outermost again.

#pragma once

#include <ATen/Parallel.h>

#include <algorithm>
#include <cstdint>
#include <utility>
#include <vector>

#if defined(__SSE2__)
#include <immintrin.h>
#endif

namespace fractrain_fx {

// Values in a square block, whose rows are one vector each.
template <class T>
constexpr int64_t kSquare = 16 / static_cast<int64_t>(sizeof(T));

#if defined(__SSE2__)

// Interleaves the lower (upper) halves of two vectors of values of `size` bytes.
template <int size>
inline std::pair<__m128i, __m128i> interleaved(__m128i a, __m128i b) {
  if constexpr (size == 1) return {_mm_unpacklo_epi8(a, b), _mm_unpackhi_epi8(a, b)};
  if constexpr (size == 2) return {_mm_unpacklo_epi16(a, b), _mm_unpackhi_epi16(a, b)};
  return {_mm_unpacklo_epi32(a, b), _mm_unpackhi_epi32(a, b)};
}

// Transposes a square: interleaving the two halves of its rows, log2(side) times.
template <class T>
inline void transpose_square(const T* x, int64_t next_x, T* y, int64_t next_y) {
  constexpr int64_t side = kSquare<T>;
  __m128i rows[side], mixed[side];
  for (int64_t i = 0; i < side; ++i) rows[i] = _mm_loadu_si128(reinterpret_cast<const __m128i*>(x + i * next_x));
  for (int64_t done = 1; done < side; done *= 2) {
    for (int64_t i = 0; i < side / 2; ++i) {
      const auto [low, high] = interleaved<sizeof(T)>(rows[i], rows[i + side / 2]);
      mixed[2 * i] = low;
      mixed[2 * i + 1] = high;
    }
    std::copy_n(mixed, side, rows);
  }
  for (int64_t i = 0; i < side; ++i) _mm_storeu_si128(reinterpret_cast<__m128i*>(y + i * next_y), rows[i]);
}

#else

template <class T>
inline void transpose_square(const T* x, int64_t next_x, T* y, int64_t next_y) {
  for (int64_t i = 0; i < kSquare<T>; ++i) {
    for (int64_t j = 0; j < kSquare<T>; ++j) y[j * next_y + i] = x[i * next_x + j];
  }
}

#endif

// y[j][i] = x[i][j] for a matrix of `rows` rows of x; next_x and next_y are the distances of rows in x and in y.
template <class T>
void transpose(const T* x, int64_t next_x, int64_t rows, int64_t columns, T* y, int64_t next_y) {
  constexpr int64_t side = kSquare<T>;
  const int64_t down = rows / side * side, across = columns / side * side;
  for (int64_t j = 0; j < across; j += side) {
    for (int64_t i = 0; i < down; i += side) transpose_square(x + i * next_x + j, next_x, y + j * next_y + i, next_y);
  }
  // The columns that are left: a square reads on into the next rows, which the last ones do not have.
  const int64_t behind = (side + next_x - 1) / next_x;
  const int64_t whole = across < columns ? std::max<int64_t>(0, (rows - behind) / side * side) : 0;
  for (int64_t i = 0; i < whole; i += side) {
    T square[side * side];
    transpose_square(x + i * next_x + across, next_x, square, side);
    for (int64_t j = across; j < columns; ++j) std::copy_n(square + (j - across) * side, side, y + j * next_y + i);
  }
  const auto rest = [&](int64_t first_row, int64_t last_row, int64_t first, int64_t last) {
    for (int64_t i = first_row; i < last_row; ++i) {
      for (int64_t j = first; j < last; ++j) y[j * next_y + i] = x[i * next_x + j];
    }
  };
  rest(whole, down, across, columns);
  rest(down, rows, 0, columns);
}

// Transposes each of `count` matrices that follow one another.
template <class T>
void transpose_each(const T* x, int64_t count, int64_t rows, int64_t columns, T* y) {
  const int64_t size = rows * columns;
  at::parallel_for(0, count, std::max<int64_t>(1, 65536 / size), [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) transpose(x + i * size, columns, rows, columns, y + i * size, rows);
  });
}

// Transposes each of `count` matrices in place: large results then take no second memory.
template <class T>
void transpose_in_place(T* x, int64_t count, int64_t rows, int64_t columns) {
  const int64_t size = rows * columns;
  at::parallel_for(0, count, std::max<int64_t>(1, 65536 / size), [&](int64_t begin, int64_t end) {
    std::vector<T> turned(size);
    for (int64_t i = begin; i < end; ++i) {
      transpose(x + i * size, columns, rows, columns, turned.data(), rows);
      std::copy(turned.begin(), turned.end(), x + i * size);
    }
  });
}

}  // namespace fractrain_fx
