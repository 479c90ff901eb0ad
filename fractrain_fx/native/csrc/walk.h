// Where a tile finds the steps that it multiplies.

#pragma once

#include <cstdint>

namespace fractrain_fx {

constexpr int kTileRows = 6;

// Lines of steps. Distances are in bytes; `a_line` and `b_line` are from the end of a line to the start of the next.
struct Walk {
  int64_t steps, lines, a_step, b_step, a_line, b_line;
  int64_t row[kTileRows];  // from the first row to each
};

}  // namespace fractrain_fx

// All lines of a walk; `step` multiplies one step of all rows.
#define FX_LINES(step)             \
  "2:\n\t"                         \
  "mov (%[walk]), %[steps]\n\t"    \
  ".p2align 5\n"                   \
  "1:\n\t" step                    \
  "add 16(%[walk]), %[a]\n\t"      \
  "add 24(%[walk]), %[b]\n\t"      \
  "dec %[steps]\n\t"               \
  "jnz 1b\n\t"                     \
  "add 32(%[walk]), %[a]\n\t"      \
  "add 40(%[walk]), %[b]\n\t"      \
  "dec %[lines]\n\t"               \
  "jnz 2b\n\t"

#define FX_OPERANDS                                                                             \
  : [a] "+r"(a), [b] "+r"(b), [steps] "=&r"(steps), [lines] "=&r"(lines)                        \
  : [walk] "r"(&walk), [r1] "r"(walk.row[1]), [r2] "r"(walk.row[2]), [r3] "r"(walk.row[3]),     \
    [r4] "r"(walk.row[4]), [r5] "r"(walk.row[5]), "[lines]"(walk.lines)
