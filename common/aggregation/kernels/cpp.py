"""The trimmed mean as C++: straight-line code for one (n, f), or a loop over a table of comparators for any.

In both, a comparator is one vector minimum and one vector maximum, over as many columns as a vector has lanes; NaN has
become +inf before. Kept values are added up in float64, never as a total minus what is trimmed. The straight-line code
reads its rows once, holds what it can in registers, and takes a half to three quarters of the time of the table, which
is compiled once for all n and works in a buffer of 64 columns.
"""

from __future__ import annotations

from common.aggregation.kernels.network import Network

__all__ = ["straight_line_source", "table_source"]


def table_source() -> str:
    """C++ that applies whatever table it is given."""
    return _FRAME.replace("@KERNEL@", _TABLE)


def straight_line_source(net: Network) -> str:
    """C++ of this network alone; the table it is given is ignored."""
    lines = [
        f"fetch(rows + {wire} * stride); Vector v{wire} = read(rows + {wire} * stride);"
        for wire in range(net.num_wires)
    ]
    for c in net.comparators:
        low, high = f"minimum(v{c.low}, v{c.high})", f"maximum(v{c.low}, v{c.high})"
        if c.needs_low and c.needs_high:
            lines.append(f"{{ Vector t = {low}; v{c.high} = {high}; v{c.low} = t; }}")
        else:
            lines.append(f"v{c.low} = {low};" if c.needs_low else f"v{c.high} = {high};")
    lines += [f"add(v{wire}, one, other);" for wire in net.kept]
    return _FRAME.replace("@KERNEL@", _STRAIGHT_LINE.replace("@LINES@", "\n  ".join(lines)))


_FRAME = """\
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <new>
#include <thread>
#include <vector>

#if defined(__AVX512F__)
#include <immintrin.h>
#define BYTES 64
#elif defined(__AVX__)
#include <immintrin.h>
#define BYTES 32
#else
#define BYTES 16
#if defined(__SSE2__)
#include <immintrin.h>
#elif defined(__ARM_NEON)
#include <arm_neon.h>
#endif
#endif

typedef float Vector __attribute__((vector_size(BYTES)));
typedef float Unaligned __attribute__((vector_size(BYTES), aligned(4)));
typedef float Half __attribute__((vector_size(BYTES / 2)));
typedef double Double __attribute__((vector_size(BYTES)));

constexpr ptrdiff_t LANES = BYTES / 4;
constexpr ptrdiff_t COLUMNS = 64;     // of a block: four cache lines of every row
constexpr ptrdiff_t SHARE = 32 * 64;  // columns that a thread takes at a time

// A comparison and a selection would be two instructions on x86, where a minimum is one. Written for values that are
// not NaN; of two zeros of different sign either may be lost, which no sum can tell.
#if defined(__AVX512F__)
static inline Vector minimum(Vector a, Vector b) { return (Vector)_mm512_min_ps((__m512)a, (__m512)b); }
static inline Vector maximum(Vector a, Vector b) { return (Vector)_mm512_max_ps((__m512)a, (__m512)b); }
#elif defined(__AVX__)
static inline Vector minimum(Vector a, Vector b) { return (Vector)_mm256_min_ps((__m256)a, (__m256)b); }
static inline Vector maximum(Vector a, Vector b) { return (Vector)_mm256_max_ps((__m256)a, (__m256)b); }
#elif defined(__SSE2__)
static inline Vector minimum(Vector a, Vector b) { return (Vector)_mm_min_ps((__m128)a, (__m128)b); }
static inline Vector maximum(Vector a, Vector b) { return (Vector)_mm_max_ps((__m128)a, (__m128)b); }
#elif defined(__ARM_NEON)
static inline Vector minimum(Vector a, Vector b) { return (Vector)vminq_f32((float32x4_t)a, (float32x4_t)b); }
static inline Vector maximum(Vector a, Vector b) { return (Vector)vmaxq_f32((float32x4_t)a, (float32x4_t)b); }
#else
static inline Vector minimum(Vector a, Vector b) { return a < b ? a : b; }
static inline Vector maximum(Vector a, Vector b) { return a < b ? b : a; }
#endif

// A vector of a row, with NaN as +inf.
static inline Vector read(const float* p) {
  const Vector v = *(const Unaligned*)p, infinity = Vector{} + __builtin_inff();
#if defined(__SSE2__)
  return minimum(v, infinity);  // x86 gives the second operand when one is NaN
#else
  return v == v ? v : infinity;
#endif
}

static inline void add(Vector v, Double& one, Double& other) {
  Half halves[2];
  std::memcpy(halves, &v, sizeof v);
  one += __builtin_convertvector(halves[0], Double);
  other += __builtin_convertvector(halves[1], Double);
}

struct Task {
  const float* rows;
  ptrdiff_t n, row_stride, d;
  double* sums;   // the kept sums, or
  float* means;   // the kept sums over divisor
  double divisor;
  const int32_t* comparators;
  ptrdiff_t num_comparators;
  const int32_t* kept;
  ptrdiff_t num_kept;
};

// Columns column … column + width - 1 of row i, and zeros up to `columns`.
static void copy_row(const Task& task, ptrdiff_t i, ptrdiff_t column, ptrdiff_t width, float* to, ptrdiff_t columns) {
  std::memset(to, 0, columns * sizeof(float));
  std::memcpy(to, task.rows + i * task.row_stride + column, width * sizeof(float));
}

// The float64 sums of LANES columns, of which `width` exist.
static inline void write(const Task& task, ptrdiff_t column, ptrdiff_t width, Double one, Double other) {
  one += 0.0;  // -0.0 becomes 0.0: otherwise the sign of a zero would depend on the order of rows
  other += 0.0;
  const ptrdiff_t count = width < LANES ? width : LANES;
  if (task.sums != nullptr) {
    const Double sums[2] = {one, other};
    std::memcpy(task.sums + column, sums, count * sizeof(double));
  } else {
    const Half means[2] = {__builtin_convertvector(one / task.divisor, Half),
                           __builtin_convertvector(other / task.divisor, Half)};
    std::memcpy(task.means + column, means, count * sizeof(float));
  }
}

@KERNEL@
// Returns 0, or 1 if there is no memory for a block. A missing thread is no error: the others take its share.
extern "C" int byzuldp_trimmed(const float* rows, ptrdiff_t n, ptrdiff_t row_stride, ptrdiff_t d, double* sums,
                               float* means, const int32_t* comparators, ptrdiff_t num_comparators,
                               const int32_t* kept, ptrdiff_t num_kept, ptrdiff_t num_threads) {
  const Task task{rows, n, row_stride, d, sums, means, (double)num_kept, comparators, num_comparators, kept, num_kept};
  std::atomic<ptrdiff_t> next(0);
  std::atomic<ptrdiff_t> workers(0);
  auto work = [&] {
    char* memory = new (std::nothrow) char[n * COLUMNS * sizeof(float) + 64];
    if (memory == nullptr) return;
    workers++;
    float* buffer = (float*)(((uintptr_t)memory + 63) / 64 * 64);
    for (ptrdiff_t from; (from = next.fetch_add(SHARE)) < d;)
      run(task, from, from + SHARE < d ? from + SHARE : d, buffer);
    delete[] memory;
  };
  std::vector<std::thread> threads;
  try {
    for (ptrdiff_t k = 1; k < num_threads; k++) threads.emplace_back(work);
  } catch (...) {
  }
  work();
  for (auto& thread : threads) thread.join();
  return workers > 0 ? 0 : 1;
}
"""

_STRAIGHT_LINE = """\
static inline void fetch(const float* p) { __builtin_prefetch(p + 64); }

static inline __attribute__((always_inline)) void group(const float* rows, ptrdiff_t stride, Double& one,
                                                        Double& other) {
  @LINES@
}

static void run(const Task& task, ptrdiff_t from, ptrdiff_t to, float* buffer) {
  for (ptrdiff_t column = from; column < to; column += LANES) {
    const float* rows = task.rows + column;
    ptrdiff_t stride = task.row_stride;
    if (to - column < LANES) {
      for (ptrdiff_t i = 0; i < task.n; i++) copy_row(task, i, column, to - column, buffer + i * LANES, LANES);
      rows = buffer;
      stride = LANES;
    }
    Double one{}, other{};
    group(rows, stride, one, other);
    write(task, column, to - column, one, other);
  }
}
"""

_TABLE = """\
static void run(const Task& task, ptrdiff_t from, ptrdiff_t to, float* buffer) {
  for (ptrdiff_t column = from; column < to; column += COLUMNS) {
    const ptrdiff_t width = to - column < COLUMNS ? to - column : COLUMNS;
    for (ptrdiff_t i = 0; i < task.n; i++) {
      float padded[COLUMNS];
      const float* row = task.rows + i * task.row_stride + column;
      if (width < COLUMNS) {
        copy_row(task, i, column, width, padded, COLUMNS);
        row = padded;
      }
      for (ptrdiff_t v = 0; v < COLUMNS; v += LANES) *(Vector*)(buffer + i * COLUMNS + v) = read(row + v);
    }
    for (ptrdiff_t c = 0; c < task.num_comparators; c++) {
      float* low = buffer + task.comparators[2 * c] * COLUMNS;
      float* high = buffer + task.comparators[2 * c + 1] * COLUMNS;
      for (ptrdiff_t v = 0; v < COLUMNS; v += LANES) {
        const Vector a = *(Vector*)(low + v), b = *(Vector*)(high + v);
        *(Vector*)(low + v) = minimum(a, b);
        *(Vector*)(high + v) = maximum(a, b);
      }
    }
    for (ptrdiff_t v = 0; v < width; v += LANES) {
      Double one{}, other{};
      for (ptrdiff_t k = 0; k < task.num_kept; k++) add(*(Vector*)(buffer + task.kept[k] * COLUMNS + v), one, other);
      write(task, column + v, width - v, one, other);
    }
  }
}
"""
