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

// A square block is transposed by interleaving the two halves of its rows, log2(side) times.
template <class Vector, int side, class Load, class Interleave, class Store>
inline void transpose_rows(Load&& load, Interleave&& interleave, Store&& store) {
  Vector rows[side], mixed[side];
  for (int i = 0; i < side; ++i) rows[i] = load(i);
  for (int done = 1; done < side; done *= 2) {
    for (int i = 0; i < side / 2; ++i) interleave(rows[i], rows[i + side / 2], mixed[2 * i], mixed[2 * i + 1]);
    std::copy_n(mixed, side, rows);
  }
  for (int i = 0; i < side; ++i) store(i, rows[i]);
}

// Values in a row of the smallest square, which is one vector of 16 bytes.
template <class T>
constexpr int64_t kSquare = 16 / static_cast<int64_t>(sizeof(T));

#if defined(__SSE2__)

template <class T>
inline void transpose_square(const T* x, int64_t next_x, T* y, int64_t next_y) {
  transpose_rows<__m128i, kSquare<T>>(
      [&](int64_t i) { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(x + i * next_x)); },
      [](__m128i a, __m128i b, __m128i& low, __m128i& high) {
        if constexpr (sizeof(T) == 1) {
          low = _mm_unpacklo_epi8(a, b), high = _mm_unpackhi_epi8(a, b);
        } else if constexpr (sizeof(T) == 2) {
          low = _mm_unpacklo_epi16(a, b), high = _mm_unpackhi_epi16(a, b);
        } else {
          low = _mm_unpacklo_epi32(a, b), high = _mm_unpackhi_epi32(a, b);
        }
      },
      [&](int64_t i, __m128i row) { _mm_storeu_si128(reinterpret_cast<__m128i*>(y + i * next_y), row); });
}

#else

template <class T>
inline void transpose_square(const T* x, int64_t next_x, T* y, int64_t next_y) {
  for (int64_t i = 0; i < kSquare<T>; ++i) {
    for (int64_t j = 0; j < kSquare<T>; ++j) y[j * next_y + i] = x[i * next_x + j];
  }
}

#endif

#if defined(__AVX512F__)

// A row of a larger square is a whole cache line.
constexpr int64_t kLineSquare = 16;

inline void transpose_lines(const float* x, int64_t next_x, float* y, int64_t next_y) {
  const __m512i low_of = _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
  const __m512i high_of = _mm512_setr_epi32(8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
  transpose_rows<__m512, 16>([&](int64_t i) { return _mm512_loadu_ps(x + i * next_x); },
                             [&](__m512 a, __m512 b, __m512& low, __m512& high) {
                               low = _mm512_permutex2var_ps(a, low_of, b);
                               high = _mm512_permutex2var_ps(a, high_of, b);
                             },
                             [&](int64_t i, __m512 row) { _mm512_storeu_ps(y + i * next_y, row); });
}

#endif

// y[j][i] = x[i][j] for a matrix of `rows` rows of x; next_x and next_y are the distances of rows in x and in y.
template <class T>
void transpose(const T* x, int64_t next_x, int64_t rows, int64_t columns, T* y, int64_t next_y) {
  constexpr int64_t side = kSquare<T>;
#if defined(__AVX512F__)
  if constexpr (sizeof(T) == sizeof(float)) {
    const int64_t down = rows / kLineSquare * kLineSquare, across = columns / kLineSquare * kLineSquare;
    if (down > 0 && across > 0) {
      for (int64_t j = 0; j < across; j += kLineSquare) {
        for (int64_t i = 0; i < down; i += kLineSquare) {
          transpose_lines(x + i * next_x + j, next_x, y + j * next_y + i, next_y);
        }
      }
      if (across < columns) transpose(x + across, next_x, down, columns - across, y + across * next_y, next_y);
      if (down < rows) transpose(x + down * next_x, next_x, rows - down, columns, y + down, next_y);
      return;
    }
  }
#endif
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
