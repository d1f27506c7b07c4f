/// @file
/// yocou.cpp -- Universal YOCO (arXiv 2604.01220) on the CPU, whole: a RoPE sliding-window self-decoder applied T times
/// with the same weights, one global cache K^, V^ written once, a NoPE cross-decoder that reads it, dense or
/// mixture-of-experts FFN. An architecture is a list of stages (yocou.h), so Transformer, YOCO, Universal Transformer,
/// RINS and the paper's ablations run through the same lines. It reads top to bottom:
///
///   the model     1 numbers   2 products   3 caches   4 attention   5 layer parts   6 the model   7 prefill, decode
///   the program   8 architectures   9 checkpoints   10 accounting   11 the machine   12 commands
///
/// It does not train, has no tokenizer beyond bytes, and needs x86-64-v3 (AVX2, FMA, F16C).
///
/// One promise shapes parts 2 to 5: a row's result is a function of that row alone. Every sum runs in an order fixed by
/// positions and widths, never by chunk, batch or thread, so whole-prompt, chunked, token-by-token and batched runs,
/// on any number of threads, give the same logits to the bit.
#include "yocou.h"

#include <fcntl.h>
#include <malloc.h>
#include <omp.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <Eigen/Core>
#include <algorithm>
#include <array>
#include <bit>
#include <cerrno>
#include <charconv>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iomanip>
#include <iostream>
#include <limits>
#include <map>
#include <nlohmann/json.hpp>
#include <numeric>
#include <random>
#include <set>

namespace yocou {

// =====================================================================================================================
// 1. Numbers: three storage types, float32 arithmetic, eight at a time

inline constexpr float infinity = std::numeric_limits<float>::infinity();

struct Bf16 {
  std::uint16_t bits;  ///< the upper half of a float32
};
struct F16 {
  std::uint16_t bits;  ///< IEEE half
};

inline float to_float(float v) { return v; }
inline float to_float(Bf16 v) { return std::bit_cast<float>(std::uint32_t{v.bits} << 16); }
inline float to_float(F16 v) { return static_cast<float>(std::bit_cast<Eigen::half>(v)); }

/// Nearest value, ties to even; a NaN stays a NaN.
inline void store(float v, float* to) { *to = v; }
inline void store(float v, Bf16* to) {
  const auto bits = std::bit_cast<std::uint32_t>(v);
  to->bits = static_cast<std::uint16_t>(std::isnan(v) ? (bits >> 16 | 0x40) : (bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}
inline void store(float v, F16* to) { *to = std::bit_cast<F16>(Eigen::half(v)); }

/// Eight numbers: the unit of arithmetic, one register of AVX2 or two of NEON. What is summed is summed in eight lanes.
using Lanes = Eigen::Array<float, 8, 1>;

template <class Num>
inline Lanes load8(const Num* p) {
  Lanes v;
  for (int i = 0; i < 8; ++i) v[i] = to_float(p[i]);
  return v;
}
inline Lanes load8(const float* p) { return Lanes::Map(p); }
inline Lanes load8(const F16* p) {
  return Eigen::Map<const Eigen::Array<Eigen::half, 8, 1>>(reinterpret_cast<const Eigen::half*>(p)).cast<float>();
}

/// The last `count` < 8 numbers of a row, zeros behind.
template <class Num>
inline Lanes load_tail(const Num* p, Index count) {
  Num v[8] = {};
  std::copy_n(p, count, v);
  return load8(v);
}

/// Calls f with a value of the type that `t` names: the only place where a stored type becomes a C++ type.
template <class F>
inline decltype(auto) with_type(Dtype t, F&& f) {
  switch (t) {
    case Dtype::f32: return f(float{});
    case Dtype::bf16: return f(Bf16{});
    default: return f(F16{});
  }
}

/// e^x by Eigen, which goes no lower than about e^-88: below -87 it is exactly 0 here, so that what is masked weighs
/// nothing and no product meets a denormal. NaN for NaN.
inline Lanes exp8(const Lanes& x) {
  Lanes e = x.exp();
  for (int i = 0; i < 8; ++i) e[i] = x[i] < -87 ? 0 : e[i];
  return e;
}
inline float exp_fast(float x) { return exp8(Lanes::Constant(x))[0]; }

/// a . b over n numbers.
inline float dot(const float* a, const float* b, Index n) {
  Lanes sum = Lanes::Zero();
  Index i = 0;
  for (; i + 8 <= n; i += 8) sum += load8(a + i) * load8(b + i);
  if (i < n) sum += load_tail(a + i, n - i) * load_tail(b + i, n - i);
  return sum.sum();
}

// =====================================================================================================================
// 2. Products: y = x W^T, and nothing else, carries the model's weights

// [product]
/// One product of a parallel region: y [n,m] = x [n,K] w^T, or += with `add`; w [m,K]. 2 n m K FLOP.
struct Product {
  const float* x;
  Index n;
  Tensor w;
  float* y;
  bool add = false;
};
// [product]

inline constexpr Index depth = 512;  ///< columns of K summed in registers before y is touched; part of the result
inline constexpr Index strip = 64;   ///< rows of w that one thread takes at a time
inline constexpr Index panel = 192;  ///< rows of x that pass over a strip together: 192 x 512 x 4 B stay in L2
inline constexpr Index small_work = 1 << 22;  ///< FLOP of products (an eighth elsewhere) under which threads cost more,
inline constexpr Index small_read = 1 << 18;  ///< provided that no more bytes of weights than this are read

/// A register of `width` numbers, as compilers spell it: Eigen chooses its registers when it is compiled, these two inner
/// loops when the program starts.
template <int width>
struct Register {
  using type __attribute__((vector_size(4 * width))) = float;
  using anywhere __attribute__((vector_size(4 * width), aligned(4), may_alias)) = float;  ///< in memory
};

#ifdef __AVX__
inline constexpr int narrow = 8;
#else
inline constexpr int narrow = 4;
#endif
#if defined __x86_64__ && defined __gnu_linux__ && !defined __clang__
#define YOCOU_CLONES __attribute__((target_clones("arch=x86-64-v4", "default")))
inline const bool wide = __builtin_cpu_supports("x86-64-v4");
#else
#define YOCOU_CLONES
inline constexpr bool wide = false;
#endif

/// Calls f(width) with the numbers that a register of this processor holds.
template <class F>
inline void with_width(F&& f) {
  if (wide) f(std::integral_constant<int, 16>{});
  else f(std::integral_constant<int, narrow>{});
}

template <int width>
inline constexpr int most_rows = width == 16 ? 4 : 3;
template <int width>
inline constexpr int columns = width == 16 ? 8 : 4;

/// Cuts n rows into tiles of `most`, two or one: calls f(rows, i). Four are two and two: one
/// row alone would wait for each of its sums.
template <int most, class F>
inline void for_tiles(Index n, F&& f) {
  Index i = 0;
  for (; n - i == most || n - i > 4; i += most) f(std::integral_constant<int, most>{}, i);
  for (; n - i >= 2; i += 2) f(std::integral_constant<int, 2>{}, i);
  if (i < n) f(std::integral_constant<int, 1>{}, i);
}

/// (a0 + a1, a2 + a3, b0 + b1, b2 + b3)
inline Register<4>::type pairs(Register<4>::type a, Register<4>::type b) {
  return __builtin_shufflevector(a, b, 0, 2, 4, 6) + __builtin_shufflevector(a, b, 1, 3, 5, 7);
}

template <int rows, int width>
YOCOU_CLONES void product_tile(
    const float* x, Index ldx, const float* ws, Index K, float* y, Index ldy, Index cols, bool add) {
  using V = typename Register<width>::type;
  using Eight = typename Register<8>::type;
  constexpr int registers = columns<width> * 8 / width, parts = width < 8 ? 8 / width : 1;
  V sum[rows][registers] = {};
  for (Index k = 0; k < K; k += 8, ws += 8 * columns<width>) {
    V xs[rows][parts];
    for (int r = 0; r < rows; ++r)
      for (int i = 0; i < parts; ++i) {
        const float* from = x + r * ldx + k + i * width;
        if constexpr (width == 16) {
          const Eight one = *reinterpret_cast<const Register<8>::anywhere*>(from);
          xs[r][i] = __builtin_shufflevector(one, one, 0, 1, 2, 3, 4, 5, 6, 7, 0, 1, 2, 3, 4, 5, 6, 7);
        } else {
          xs[r][i] = *reinterpret_cast<const typename Register<width>::anywhere*>(from);
        }
      }
    for (int j = 0; j < registers; ++j) {
      const V w = *reinterpret_cast<const typename Register<width>::anywhere*>(ws + j * width);
      for (int r = 0; r < rows; ++r) sum[r][j] += xs[r][j % parts] * w;
    }
  }
  using Four = Register<4>::type;
  alignas(64) float lanes[columns<width> * 8];
  for (int r = 0; r < rows; ++r) {
    for (int j = 0; j < registers; ++j)
      *reinterpret_cast<typename Register<width>::anywhere*>(lanes + j * width) = sum[r][j];
    Four total[columns<width> / 4];
    for (int c = 0; c < columns<width>; c += 4) {
      Four half[4];
      for (int i = 0; i < 4; ++i) {
        const Register<4>::anywhere* lane = reinterpret_cast<const Register<4>::anywhere*>(lanes + (c + i) * 8);
        half[i] = lane[0] + lane[1];
      }
      total[c / 4] = pairs(pairs(half[0], half[1]), pairs(half[2], half[3]));
    }
    float* to = y + r * ldy;
    if (cols == columns<width>) {
      for (int c = 0; c < columns<width>; c += 4) {
        Register<4>::anywhere* four = reinterpret_cast<Register<4>::anywhere*>(to + c);
        *four = add ? *four + total[c / 4] : total[c / 4];
      }
    } else {
      for (Index c = 0; c < cols; ++c) to[c] = add ? to[c] + total[c / 4][c % 4] : total[c / 4][c % 4];
    }
  }
}

template <int width, class Num>
void product_block(
    const float* x, Index ldx, Index n, const Num* w, Index ldw, Index m, Index K, float* y, Index ldy, bool add) {
  alignas(64) float wide_w[columns<width> * depth];
  const Index step =
      n <= 3 ? columns<width> : m;  // few rows: stream rows of w to their end; many: keep x's block of K in L2
  for (Index c0 = 0; c0 < m; c0 += step)
    for (Index k0 = 0; k0 < K; k0 += depth) {
      const Index count = std::min(depth, K - k0), whole = count / 8 * 8;
      for (Index c = c0; c < std::min(m, c0 + step); c += columns<width>) {
        for (Index j = 0; j < columns<width>; ++j) {
          const Num* from = w + std::min(c + j, m - 1) * ldw + k0;
          const Num* next =
              w + std::min(c + j + columns<width>, m - 1) * ldw + k0;  // asked for while these are at work
          float* to = wide_w + 8 * j;
          for (Index k = 0; k < whole; k += 8) {
            Lanes::Map(to + k * columns<width>) = load8(from + k);
            __builtin_prefetch(next + k, 0, 2);
          }
          if (whole < count) Lanes::Map(to + whole * columns<width>) = load_tail(from + whole, count - whole);
        }
        const Index cols = std::min<Index>(columns<width>, m - c);
        for_tiles<most_rows<width>>(n, [&](auto rows, Index i) {
          const float* xs = x + i * ldx + k0;
          Index ld = ldx;
          float padded[rows()][depth];
          if (whole < count) {  // an odd K: the rows again, zeros behind
            for (int r = 0; r < rows(); ++r)
              std::fill(std::copy_n(xs + r * ldx, count, padded[r]), padded[r] + whole + 8, 0.f);
            xs = padded[0];
            ld = depth;
          }
          product_tile<rows(), width>(xs, ld, wide_w, count, y + i * ldy + c, ldy, cols, add || k0 > 0);
        });
      }
    }
}

/// Runs several products in one parallel region (q, k and v; gate and up; all experts), cut into strips of w and
/// panels of x. Adds what it did to `count`.
void multiply(std::span<const Product> products, Counters& count) {
  std::uint64_t flops = 0;
  Index work = 0, read = 0;
  for (const Product& p : products) {
    work += 2 * p.n * p.w.rows * p.w.cols;
    read += p.n > 0 ? p.w.bytes() : 0;
  }
  count.bytes += static_cast<std::uint64_t>(read);
#pragma omp parallel if (work > small_work || read > small_read) reduction(+ : flops)
  for (const Product& p : products) {
    const Index strips = (p.w.rows + strip - 1) / strip, panels = (p.n + panel - 1) / panel, K = p.w.cols;
#pragma omp for schedule(dynamic) nowait
    for (Index i = 0; i < strips * panels; ++i) {
      const Index c = i % strips * strip, m = std::min(strip, p.w.rows - c);
      const Index r = i / strips * panel, n = std::min(panel, p.n - r);
      with_width([&](auto width) {
        with_type(p.w.dtype, [&](auto num) {
          product_block<width()>(p.x + r * K, K, n, static_cast<const decltype(num)*>(p.w.data) + c * K, K, m, K,
              p.y + r * p.w.rows + c, p.w.rows, p.add);
        });
      });
      flops += static_cast<std::uint64_t>(2 * n * m * K);
    }
  }
  count.flops += flops;
}

// =====================================================================================================================
// 3. Caches: rings of W rows and blocks of 256, every byte from one counting arena

/// What a piece of memory is for.
enum class Use : std::uint8_t { cache, activation, weights };

/// Hands out zeroed, 64-byte aligned memory and keeps count of it, so that what is really allocated can be asked for at
/// any moment. The pages are touched when handed out: counted bytes are resident bytes.
class Arena {
 public:
  /// Throws Error when the machine refuses.
  void* take(Index bytes, Use use) {
    const Index size = (bytes + 63) / 64 * 64;
    void* p = std::aligned_alloc(64, static_cast<std::size_t>(std::max<Index>(size, 64)));
    if (!p) fail("out of memory: ", bytes, " bytes more were refused, ", live(Use::cache), " bytes of cache are held");
    std::memset(p, 0, static_cast<std::size_t>(size));
    live_[static_cast<int>(use)] += bytes;
    return p;
  }
  void give(void* p, Index bytes, Use use) {
    std::free(p);
    live_[static_cast<int>(use)] -= bytes;
  }
  /// Bytes handed out and not given back.
  Index live(Use use) const { return live_[static_cast<int>(use)]; }

 private:
  std::array<Index, 3> live_{};
};

/// Owned memory from an arena.
class Slab {
 public:
  Slab() = default;
  Slab(Arena& arena, Index bytes, Use use) : arena_(&arena), p_(arena.take(bytes, use)), bytes_(bytes), use_(use) {}
  Slab(Slab&& o) noexcept : arena_(o.arena_), p_(std::exchange(o.p_, nullptr)), bytes_(o.bytes_), use_(o.use_) {}
  Slab& operator=(Slab&& o) noexcept {
    std::swap(arena_, o.arena_);
    std::swap(p_, o.p_);
    std::swap(bytes_, o.bytes_);
    std::swap(use_, o.use_);
    return *this;
  }
  ~Slab() {
    if (p_) arena_->give(p_, bytes_, use_);
  }
  void* data() const { return p_; }
  float* floats() const { return static_cast<float*>(p_); }

 private:
  Arena* arena_ = nullptr;
  void* p_ = nullptr;
  Index bytes_ = 0;
  Use use_ = Use::activation;
};

/// A run of rows that lie one behind the other: K and V of one head, `count` rows, `stride` numbers apart.
struct Run {
  const void *k, *v;
  Index count, stride;
  Dtype dtype;
};

/// Keys and values of one (loop, layer) of one sequence, or the sequence's K^, V^.
///   ring    one block of W rows; position p lives in row p mod W
///   paged   blocks of 256 rows through a block table; position p lives in row p mod 256 of block p / 256
/// so both are "row p mod rows of block": a ring has one block only. A block holds K [G,rows,dh], then V [G,rows,dh].
class Cache {
 public:
  Cache(Arena& arena, const Config& c, Dtype dtype, Index window)
      : arena_(&arena),
        heads_(c.kv_heads),
        dim_(c.head_dim),
        rows_(window ? window : block_rows),
        ring_(window > 0),
        dtype_(dtype) {
    if (ring_) grow(1);
  }

  // [ring-and-blocks]
  /// Makes room for positions 0 .. tokens-1.
  void grow(Index tokens) {
    while (static_cast<Index>(blocks_.size()) < (ring_ ? 1 : (tokens + rows_ - 1) / rows_))
      blocks_.emplace_back(*arena_, 2 * heads_ * rows_ * dim_ * size_of(dtype_), Use::cache);
  }

  /// The cached rows of head g from position p on, at most up to `end`.
  Run run(Index g, Index p, Index end) const {
    const char* k = key(g, p);
    return {k, k + keys_bytes(), std::min(rows_ - p % rows_, end - p), dim_, dtype_};
  }

  /// Writes rows K, V [n,G dh] of positions p0 .. p0+n-1; a ring keeps the last W of them.
  void append(const float* K, const float* V, Index n, Index p0) {
    for (Index i = ring_ ? std::max<Index>(0, n - rows_) : 0; i < n; ++i)
      for (Index g = 0; g < heads_; ++g) {
        char* row = key(g, p0 + i);
        with_type(dtype_, [&](auto num) {
          auto* k = reinterpret_cast<decltype(num)*>(row);
          auto* v = reinterpret_cast<decltype(num)*>(row + keys_bytes());
          for (Index d = 0; d < dim_; ++d) {
            store(K[(i * heads_ + g) * dim_ + d], k + d);
            store(V[(i * heads_ + g) * dim_ + d], v + d);
          }
        });
      }
  }
  // [ring-and-blocks]

 private:
  /// Where the key of head g and position p lies.
  char* key(Index g, Index p) const {
    return static_cast<char*>(blocks_[ring_ ? 0 : p / rows_].data()) + (g * rows_ + p % rows_) * dim_ * size_of(dtype_);
  }
  Index keys_bytes() const { return heads_ * rows_ * dim_ * size_of(dtype_); }  ///< a block's K: V lies that far behind

  Arena* arena_;
  Index heads_, dim_, rows_;
  bool ring_;
  Dtype dtype_;
  std::vector<Slab> blocks_;
};

/// One sequence: how many tokens it holds, and its caches in the order of Plan::cache().
struct Sequence {
  Index length = 0;
  std::vector<Cache> caches;
};

/// One sequence's rows in the pass that is running: rows first .. first+n-1 of X, at positions p0 .. p0+n-1.
struct Slice {
  Sequence* sequence;
  Index first, n, p0;
  Logits want;
};

// =====================================================================================================================
// 4. Attention: one definition for window, full and shared, for a chunk and for a single new token

inline constexpr Index key_tile = 64;  ///< keys per step of the online softmax, at multiples of 64; part of the result

// [keys]
/// What attention reads: the cache up to the pass's first position, and from there on the pass's own fresh rows. A window
/// stage must keep them apart, for in a ring the chunk's last rows overwrite what its first queries still see; full and
/// shared stages append first and read everything from the cache.
struct KvView {
  Index cache;         ///< which of the sequence's caches
  Index reach;         ///< W; or more than any position: all
  const float *K, *V;  ///< [n,G dh], fresh; null when everything is cached
};
// [keys]

/// Scratch of one thread for tiles of up to `rows` rows: what is carried from step to step, and what a step makes.
struct AttentionScratch {
  AttentionScratch(Arena& arena, Index rows, Index dh)
      : memory(arena, 4 * (rows * (2 * dh + key_tile + 2) + key_tile * dh), Use::activation),
        q(memory.floats()),
        o(q + rows * dh),
        max(o + rows * dh),
        sum(max + rows),
        scores(sum + rows),
        values(scores + rows * key_tile) {}
  Slab memory;
  float *q, *o, *max, *sum;  ///< [rows,dh] scaled queries, [rows,dh] output, [rows] running m, [rows] running l
  float *scores, *values;    ///< [rows,64] S, then P; [64,dh] V in float32
  std::vector<Run> runs;     ///< where the step's keys lie
};

/// Finds positions begin .. end-1 of KV head g: runs of the cache, then the fresh rows.
void collect_runs(
    const Config& c, const Slice& slice, const KvView& kv, Index g, Index begin, Index end, std::vector<Run>& runs) {
  const Cache& cache = slice.sequence->caches[kv.cache];
  const Index cached = kv.K ? slice.p0 : slice.p0 + slice.n;
  runs.clear();
  for (Index j = begin; j < end; j += runs.back().count)
    if (j < cached) {
      runs.push_back(cache.run(g, j, std::min(end, cached)));
    } else {
      const Index first = ((slice.first + j - slice.p0) * c.kv_heads + g) * c.head_dim;
      runs.push_back({kv.K + first, kv.V + first, end - j, c.kv_dim(), Dtype::f32});
    }
}

/// S [rows,count] = q [rows,dh] K^T for the keys of a run, some at a time while their V is on its way.
template <int width>
void score_run(const float* q, Index rows, const Run& run, Index dh, float* S) {
  with_type(run.dtype, [&](auto num) {
    using Num = decltype(num);
    for (Index j = 0; j < run.count; j += columns<width>) {
      const Index keys = std::min<Index>(columns<width>, run.count - j);
      const Num* v = static_cast<const Num*>(run.v) + j * run.stride;
      for (Index i = 0; i < keys; ++i)
        for (Index e = 0; e < dh; e += 64 / sizeof(Num)) __builtin_prefetch(v + i * run.stride + e, 0, 2);
      product_block<width>(q, dh, rows, static_cast<const Num*>(run.k) + j * run.stride, run.stride, keys, dh, S + j,
          key_tile, /*add=*/false);
    }
  });
}

// [softmax]
/// One step of a row's online softmax: its 64 scores become P = e^(s - m), exactly 0 outside from .. to-1; the running
/// maximum m and the sum l move on, and with them o [dh], which was weighed against the old maximum.
void softmax_step(float* scores, Index from, Index to, float& max, float& sum, float* o, Index dh) {
  std::fill(scores, scores + from, -infinity);
  std::fill(scores + to, scores + key_tile, -infinity);
  if (from == to) return std::fill_n(scores, key_tile, 0.f), void();
  Lanes top = Lanes::Constant(max), l = Lanes::Zero();
  for (Index j = 0; j < key_tile; j += 8) top = top.max(load8(scores + j));
  const float m = top.maxCoeff(), shrink = exp_fast(max - m);
  for (Index j = 0; j < key_tile; j += 8) {
    const Lanes p = exp8(load8(scores + j) - m);
    Lanes::Map(scores + j) = p;
    l += p;
  }
  sum = sum * shrink + l.sum();
  max = m;
  if (shrink != 1)
    for (Index e = 0; e < dh; ++e) o[e] *= shrink;
}
// [softmax]

/// O [rows,dh] += P [rows,j] V [j,dh], j in order: sums of some rows by 32 (64) numbers in registers.
template <int rows, int width>
YOCOU_CLONES void mix_tile(const float* P, const float* V, Index stride, Index count, float* O, Index ldo, Index dh) {
  using R = typename Register<width>::type;
  using Anywhere = typename Register<width>::anywhere;
  constexpr int registers = columns<width> * 8 / width;
  Index d = 0;
  for (; d + registers * width <= dh; d += registers * width) {
    R sum[rows][registers];
    for (int r = 0; r < rows; ++r)
      for (int i = 0; i < registers; ++i) sum[r][i] = *reinterpret_cast<const Anywhere*>(O + r * ldo + d + i * width);
    for (Index j = 0; j < count; ++j)
      for (int i = 0; i < registers; ++i) {
        const R v = *reinterpret_cast<const Anywhere*>(V + j * stride + d + i * width);
        for (int r = 0; r < rows; ++r) sum[r][i] += P[r * key_tile + j] * v;
      }
    for (int r = 0; r < rows; ++r)
      for (int i = 0; i < registers; ++i) *reinterpret_cast<Anywhere*>(O + r * ldo + d + i * width) = sum[r][i];
  }
  if constexpr (width > narrow) {
    if (d < dh) mix_tile<rows, narrow>(P, V + d, stride, count, O + d, ldo, dh - d);
  } else {
    for (int r = 0; r < rows; ++r)
      for (Index j = 0; j < count; ++j)
        for (Index e = d; e < dh; ++e)
          O[r * ldo + e] = std::fma(P[r * key_tile + j], V[j * stride + e], O[r * ldo + e]);
  }
}

/// O [rows,dh] += P [rows,count] V for the values of a run, in float32 first.
template <int width>
void mix_run(const float* P, Index rows, const Run& run, float* values, float* O, Index dh) {
  const float* V = values;
  Index stride = dh;
  with_type(run.dtype, [&](auto num) {
    const auto* v = static_cast<const decltype(num)*>(run.v);
    if constexpr (std::is_same_v<decltype(num), float>) {
      V = v;
      stride = run.stride;
    } else {
      for (Index j = 0; j < run.count; ++j)
        for (Index e = 0; e < dh; ++e) values[j * dh + e] = to_float(v[j * run.stride + e]);
    }
  });
  for_tiles<most_rows<width>>(rows,
      [&](auto tile, Index r) { mix_tile<tile(), width>(P + r * key_tile, V, stride, run.count, O + r * dh, dh, dh); });
}

/// Queries per tile: about 96 rows of Q a tile with the R heads of a group stacked, but no more than a quarter of the
/// window, since a tile of B queries reads W + B - 1 keys.
inline Index query_tile(Index R, Index reach) {
  return std::clamp<Index>(96 / R, 1, std::max<Index>(16, std::min<Index>(reach, 1024) / 4));
}

/// `heads` query heads from h0 on, all of one KV head g, queries i0 .. i0+n-1 of a slice: O = softmax(Q K^T / sqrt(dh)) V,
/// query at position p over positions max(0, p-reach+1) .. p.
///   Q, O   [n,H dh] of the pass, `heads` neighbouring heads of a row used
///   cost   4 heads dh FLOP per (query, admitted key); reads each K, V row once for all rows of the tile
/// Online softmax: per row the running maximum m, the sum l of e^(s-m) and O; a step of 64 keys rescales l and O by
/// e^(m_old - m_new). Returns the FLOP of the keys admitted.
std::uint64_t attention_tile(const Config& c, const Slice& slice, const KvView& kv, Index h0, Index heads, Index i0,
    Index n, const float* Q, float* O, AttentionScratch& t) {
  const Index dh = c.head_dim, rows = n * heads, g = h0 / c.group();
  const float scale = static_cast<float>(1 / std::sqrt(static_cast<double>(dh)));
  const auto of_pass = [&](Index i) { return ((slice.first + i0 + i) * c.heads + h0) * dh; };

  for (Index i = 0; i < n; ++i)  // gather [rows,dh]; a query's heads are neighbours
    for (Index e = 0; e < heads * dh; ++e) t.q[i * heads * dh + e] = Q[of_pass(i) + e] * scale;
  std::fill_n(t.o, rows * dh, 0.f);
  std::fill_n(t.max, rows, -infinity);
  std::fill_n(t.sum, rows, 0.f);

  const Index p = slice.p0 + i0, low = std::max<Index>(0, p - kv.reach + 1), high = p + n;  // keys of the whole tile
  std::uint64_t admitted = 0;
  with_width([&](auto width) {
    for (Index j0 = low / key_tile * key_tile; j0 < high; j0 += key_tile) {
      const Index begin = std::max(low, j0), end = std::min(high, j0 + key_tile);
      collect_runs(c, slice, kv, g, begin, end, t.runs);
      float* column = t.scores + begin - j0;
      for (const Run& run : t.runs) {
        score_run<width()>(t.q, rows, run, dh, column);
        column += run.count;
      }
      for (Index r = 0; r < rows; ++r) {
        const Index q = p + r / heads, from = std::clamp(q - kv.reach + 1, begin, end),
                    to = std::max(std::min(end, q + 1), from);
        softmax_step(t.scores + r * key_tile, from - j0, to - j0, t.max[r], t.sum[r], t.o + r * dh, dh);
        admitted += static_cast<std::uint64_t>(to - from);
      }
      column = t.scores + begin - j0;
      for (const Run& run : t.runs) {
        mix_run<width()>(column, rows, run, t.values, t.o, dh);
        column += run.count;
      }
    }
  });
  for (Index i = 0; i < n; ++i)
    for (Index e = 0; e < heads * dh; ++e) O[of_pass(i) + e] = t.o[i * heads * dh + e] / t.sum[i * heads + e / dh];
  return 4 * admitted * static_cast<std::uint64_t>(dh);
}

// =====================================================================================================================
// 5. The parts of a layer: RMSNorm, RoPE, SwiGLU, routing; drawing a token

/// Runs f(row) for n rows of about `cost` FLOP each, on all threads when that pays.
template <class F>
inline void each_row(Index n, Index cost, F&& f) {
#pragma omp parallel for schedule(static) if (n * cost > small_work / 8)
  for (Index i = 0; i < n; ++i) f(i);
}

// [rms-norm]
/// y [n,D] = x * rsqrt(mean(x^2) + eps) * g, g [D]. In float32, rounded twice an element: x r, then g.
void rms_norm(const float* x, const Tensor& g, float eps, Index n, float* y) {
  const Index D = g.rows * g.cols;
  with_type(g.dtype, [&](auto num) {
    const auto* gain = static_cast<const decltype(num)*>(g.data);
    each_row(n, 4 * D, [&](Index i) {
      const float mean = dot(x + i * D, x + i * D, D) / static_cast<float>(D) + eps;
      // A row of zeros stays zero even with eps = 0; one beyond float32 becomes NaN, which the logits then show.
      const float r = mean > 0 && mean < infinity ? 1 / std::sqrt(mean) : mean - mean;
      for (Index d = 0; d < D; ++d) y[i * D + d] = x[i * D + d] * r * to_float(gain[d]);
    });
  });
}
// [rms-norm]

// [rope]
/// cos and sin [n,dh/2] of p * frequency_i, frequency_i = theta^(-2i/dh), for the rows' positions p: in double, so that
/// far positions stay right.
void rope_angles(std::span<const double> frequency, std::span<const Slice> slices, float* cosine, float* sine) {
  const Index half = std::ssize(frequency);
  for (const Slice& slice : slices)
    each_row(slice.n, 40 * half, [&](Index i) {
      for (Index j = 0; j < half; ++j) {
        const double angle = static_cast<double>(slice.p0 + i) * frequency[j];
        cosine[(slice.first + i) * half + j] = static_cast<float>(std::cos(angle));
        sine[(slice.first + i) * half + j] = static_cast<float>(std::sin(angle));
      }
    });
}

/// Rotates the pairs of x [n,heads,dh] in place: (a, b) -> (a cos - b sin, a sin + b cos). Pairs are (2i, 2i+1), or
/// (i, i + dh/2) with rope_pairing "half".
void rope(const Config& c, Index heads, Index n, const float* cosine, const float* sine, float* x) {
  const Index half = c.head_dim / 2, apart = c.rope_half ? half : 1, step = c.rope_half ? 1 : 2;
  each_row(n, 3 * heads * c.head_dim, [&](Index i) {
    for (Index h = 0; h < heads; ++h)
      for (Index j = 0; j < half; ++j) {
        float* pair = x + (i * heads + h) * c.head_dim + j * step;
        const float a = pair[0], b = pair[apart], cs = cosine[i * half + j], sn = sine[i * half + j];
        pair[0] = std::fma(a, cs, -b * sn);
        pair[apart] = std::fma(a, sn, b * cs);
      }
  });
}
// [rope]

// [swiglu]
/// gate [n,F] = silu(gate) * up, silu(x) = x / (1 + e^-x).
void swiglu(float* gate, const float* up, Index n, Index F) {
  each_row(n, 20 * F, [&](Index i) {
    float* g = gate + i * F;
    const float* u = up + i * F;
    const auto step = [](const Lanes& a, const Lanes& b) -> Lanes {
      const Lanes e = exp8(-a.abs());  // never above 1: silu(x) = x / (1 + e^-x), or x e^x / (1 + e^x) where x < 0
      return a * (a < 0).select(e, 1) / (1 + e) * b;
    };
    Index f = 0;
    for (; f + 8 <= F; f += 8) Lanes::Map(g + f) = step(load8(g + f), load8(u + f));
    const Lanes rest = step(load_tail(g + f, F - f), load_tail(u + f, F - f));
    std::copy_n(rest.data(), F - f, g + f);
  });
}
// [swiglu]

// [route]
/// One token's experts: softmax over all E of the router's logits, the `active` largest (ties: the lower index), their
/// weights divided by their sum when `normalize`. chosen, weight: [active].
void route(const Moe& moe, const float* logits, Index* chosen, float* weight) {
  const float max = *std::max_element(logits, logits + moe.experts);
  float all = 0, taken = 0;
  for (Index e = 0; e < moe.experts; ++e) all += std::exp(logits[e] - max);
  for (Index k = 0; k < moe.active; ++k) {
    Index best = -1;
    for (Index e = 0; e < moe.experts; ++e)
      if ((best < 0 || logits[e] > logits[best]) && std::find(chosen, chosen + k, e) == chosen + k) best = e;
    chosen[k] = best;
    taken += weight[k] = std::exp(logits[best] - max) / all;
  }
  if (moe.normalize)
    for (Index k = 0; k < moe.active; ++k) weight[k] /= taken;
}
// [route]

/// The largest of logits [V]; ties: the lower id.
int greedy(std::span<const float> logits) {
  return static_cast<int>(std::max_element(logits.begin(), logits.end()) - logits.begin());
}

/// One token for a row of logits [V] and a number u in [0, 1).
int draw(std::span<const float> logits, const Sampling& how, double u) {
  if (how.temperature == 0) return greedy(logits);
  std::vector<int> order(logits.size());
  std::iota(order.begin(), order.end(), 0);
  const auto before = [&](int a, int b) { return logits[a] != logits[b] ? logits[a] > logits[b] : a < b; };
  const Index keep = how.top_k ? std::min<Index>(how.top_k, std::ssize(order)) : std::ssize(order);
  std::partial_sort(order.begin(), order.begin() + keep, order.end(), before);
  std::vector<double> p(static_cast<std::size_t>(keep));
  double sum = 0, kept = 0;
  for (Index i = 0; i < keep; ++i)  // a difference of logits first: a tiny temperature then gives 0, never inf - inf
    sum += p[i] = std::exp((double{logits[order[i]]} - logits[order[0]]) / how.temperature);
  Index count = 0;
  while (count < keep && kept < how.top_p * sum) kept += p[count++];
  u *= kept;
  for (Index i = 0; i < count; ++i)
    if ((u -= p[i]) < 0) return order[i];
  return order[count - 1];  // the subtractions' rounding left a trace of u
}

// =====================================================================================================================
// 6. The model

// [plan]
/// Where each (stage, loop, layer) keeps its keys: the caches of a sequence, in order.
struct Plan {
  struct Entry {
    Index window;  ///< W of a ring, 0 for blocks
    bool global;   ///< K^, V^
  };
  std::vector<Entry> caches;
  std::vector<Index> first;  ///< of each stage

  explicit Plan(const Config& c) {
    for (const Stage& s : c.stages) {
      first.push_back(static_cast<Index>(caches.size()));
      const bool shared = s.attention == Attention::shared;  // one cache and no factor T, unless refreshed
      const Index count = shared ? (s.refresh_kv ? s.loops : 1) : s.layers * s.loops;
      caches.insert(caches.end(), count, Entry{s.window, shared});
    }
  }
};
// [plan]

/// The CPU engine. Buffers are allocated once for `max_rows` rows, so a pass allocates nothing but new cache blocks.
class CpuEngine final : public Engine {
 public:
  CpuEngine(const Config& config, const Weights& weights, const EngineOptions& options)
      : c_(config), w_(weights), options_(options), plan_(config) {
    const Index n = options.max_rows, routed = c_.moe ? n * c_.moe->active : 0;
    const Index F = std::max(c_.moe ? c_.moe->shared_dim : c_.ffn_dim, Index{1});
    const auto floats = [&](Index count) { return Slab(arena_, count * 4, Use::activation); };
    x_ = floats(n * c_.dim), a_ = floats(n * c_.dim), q_ = floats(n * c_.q_dim()), o_ = floats(n * c_.q_dim());
    k_ = floats(n * c_.kv_dim()), v_ = floats(n * c_.kv_dim());
    cos_ = floats(n * c_.head_dim / 2 + 1), sin_ = floats(n * c_.head_dim / 2 + 1);
    gate_ = floats(n * F), up_ = floats(n * F);
    if (c_.moe) {
      router_ = floats(n * c_.moe->experts), gathered_ = floats(routed * c_.dim);
      expert_gate_ = floats(routed * c_.moe->dim), expert_up_ = floats(routed * c_.moe->dim);
      weight_.resize(routed), chosen_.resize(routed), slot_.resize(routed), load_.resize(c_.moe->experts);
    }
    for (Index i = 0; i < c_.head_dim / 2; ++i)
      frequency_.push_back(std::pow(c_.rope_theta, -2.0 * static_cast<double>(i) / static_cast<double>(c_.head_dim)));
    Index rows = 1;
    for (const Stage& s : c_.stages) rows = std::max(rows, c_.group() * std::min(n, query_tile(c_.group(), reach(s))));
    for (int thread = 0; thread < omp_get_max_threads(); ++thread) scratch_.emplace_back(arena_, rows, c_.head_dim);
  }

  void forward_sample(
      std::span<const Segment> pass, const Sampling& how, std::span<const double> u, int* tokens) override {
    logits_.resize(u.size() * static_cast<std::size_t>(c_.vocab_size));
    forward(pass, logits_.data());
    for (std::size_t i = 0; i < u.size(); ++i)
      tokens[i] = draw(std::span(logits_).subspan(i * c_.vocab_size, c_.vocab_size), how, u[i]);
  }

  int open() override {
    auto sequence = std::make_unique<Sequence>();
    for (const Plan::Entry& e : plan_.caches) sequence->caches.emplace_back(arena_, c_, options_.kv_dtype, e.window);
    const auto free = std::find(sequences_.begin(), sequences_.end(), nullptr);
    const auto number = free - sequences_.begin();
    if (free == sequences_.end()) sequences_.emplace_back();
    sequences_[number] = std::move(sequence);
    return static_cast<int>(number);
  }
  void close(int sequence) override { sequences_[sequence].reset(); }
  Index cache_bytes() const override { return arena_.live(Use::cache); }
  Index global_rows() const override { return global_rows_; }
  const Arena& arena() const { return arena_; }

  // [forward]
  /// One pass: X^0 = embed(tokens), the stages in order, logits = RMSNorm(X) head^T.
  void forward(std::span<const Segment> pass, float* logits) override {
    begin(pass);
    embed(pass);
    for (Index s = 0; s < std::ssize(c_.stages); ++s)
      if (c_.stages[s].attention == Attention::shared) cross_decoder(s);
      else universal_self_decoder(s);
    keep_wanted_rows();
    head(logits);
    for (const Segment& segment : pass) sequences_[segment.sequence]->length += std::ssize(segment.tokens);
  }
  // [forward]

 private:
  static Index reach(const Stage& s) { return s.window ? s.window : std::numeric_limits<Index>::max() / 2; }

  /// Fixes every row's position once for the pass, checks tokens, and makes room in the caches.
  void begin(std::span<const Segment> pass) {
    slices_.clear();
    rows_ = 0;
    for (const Segment& segment : pass) {
      Sequence& sequence = *sequences_[segment.sequence];
      const Index n = std::ssize(segment.tokens);
      for (int token : segment.tokens)
        if (token < 0 || token >= c_.vocab_size)
          fail("token ", token, " is outside the vocabulary 0..", c_.vocab_size - 1);
      const auto same = [&](const Slice& p) { return p.sequence == &sequence; };
      if (std::ranges::any_of(slices_, same)) throw std::logic_error("a sequence occurs twice in a pass");
      if (rows_ + n > options_.max_rows) throw std::logic_error("a pass has more rows than the engine was made for");
      slices_.push_back({&sequence, rows_, n, sequence.length, segment.want});
      rows_ += n;
    }
    for (const Slice& slice : slices_)
      for (Cache& cache : slice.sequence->caches) cache.grow(slice.p0 + slice.n);
  }

  /// X [n,D] = embed[token] * embed_scale; the rows' angles are formed here too, the same in every loop.
  void embed(std::span<const Segment> pass) {
    float* x = x_.floats();
    const float scale = static_cast<float>(c_.embed_scale);
    for (const Segment& segment : pass)
      for (int token : segment.tokens)
        with_type(w_.embed.dtype, [&](auto num) {
          const auto* row = static_cast<const decltype(num)*>(w_.embed.data) + token * c_.dim;
          for (Index d = 0; d < c_.dim; ++d) *x++ = to_float(row[d]) * scale;
        });
    const auto rotates = [](const Stage& s) { return s.rope; };
    if (std::any_of(c_.stages.begin(), c_.stages.end(), rotates))
      rope_angles(frequency_, slices_, cos_.floats(), sin_.floats());
    show(-1, 0, 0);
  }

  // [universal-self-decoder]
  /// USD(X): the stage's layers, T times over with the same weights. Each (loop, layer) has a cache of its own, for a
  /// position's keys differ from loop to loop; a position's angle does not. Window stages reach T x layers x (W-1)
  /// positions back in all. The same lines are the Transformer (full, T = 1), UT (full, T) and both halves of RINS.
  void universal_self_decoder(Index s) {
    const Stage& stage = c_.stages[s];
    for (Index t = 0; t < stage.loops; ++t)
      for (Index l = 0; l < stage.layers; ++l) layer(s, t, l, plan_.first[s] + t * stage.layers + l);
  }
  // [universal-self-decoder]

  // [cross-decoder]
  /// The cross-decoder: K^, V^ are projected once from the state X that enters, then every layer of every loop reads
  /// them. Prefill stops here for all rows whose logits nobody wants: they have left their one row in the cache, and
  /// nothing later reads more of them. With refresh_kv each loop's state feeds a cache, so only the last can stop early.
  void cross_decoder(Index s) {
    const Stage& stage = c_.stages[s];
    for (Index t = 0; t < stage.loops; ++t) {
      const Index cache = plan_.first[s] + (stage.refresh_kv ? t : 0);
      if (t == 0 || stage.refresh_kv) global_kv(stage, cache);
      if (t == (stage.refresh_kv ? stage.loops - 1 : 0)) keep_wanted_rows();
      counters.cross_positions += static_cast<std::uint64_t>(rows_);
      for (Index l = 0; l < stage.layers; ++l) layer(s, t, l, cache);
    }
  }
  // [cross-decoder]

  // [global-kv]
  /// K^ = RMSNorm(X) W_K, V^ = RMSNorm(X) W_V, [n,G dh] each, appended to the global cache: one row a token. 4 n D G dh
  /// FLOP. K^ carries no position (NoPE) unless the stage says rope.
  void global_kv(const Stage& stage, Index cache) {
    rms_norm(x_.floats(), w_.kv_norm, eps(), rows_, a_.floats());
    multiply({{a_.floats(), rows_, w_.kv_wk, k_.floats()}, {a_.floats(), rows_, w_.kv_wv, v_.floats()}});
    if (stage.rope) rope(c_, c_.kv_heads, rows_, cos_.floats(), sin_.floats(), k_.floats());
    append(cache);
    global_rows_ += rows_;
  }
  // [global-kv]

  // [layer]
  /// One application of a layer: Y = Attention(RMSNorm(X)) + X, X' = FFN(RMSNorm(Y)) + Y, in place in X [n,D].
  void layer(Index s, Index t, Index l, Index cache) {
    const Stage& stage = c_.stages[s];
    const Layer& w = w_.stages[s][l];
    const Index n = rows_;
    float *x = x_.floats(), *a = a_.floats(), *q = q_.floats(), *k = k_.floats(), *v = v_.floats(), *o = o_.floats();

    rms_norm(x, w.attn_norm, eps(), n, a);  // a [n,D]
    KvView kv{cache, reach(stage), nullptr, nullptr};
    if (stage.attention == Attention::shared) {
      multiply({{a, n, w.wq, q}});  // q [n,H dh]  2 n D H dh FLOP
    } else {
      multiply({{a, n, w.wq, q}, {a, n, w.wk, k}, {a, n, w.wv, v}});  // k, v [n,G dh]  + 4 n D G dh FLOP
      if (stage.rope) rope(c_, c_.kv_heads, n, cos_.floats(), sin_.floats(), k);
    }
    if (stage.rope) rope(c_, c_.heads, n, cos_.floats(), sin_.floats(), q);
    if (stage.attention == Attention::full) append(cache);
    if (stage.attention == Attention::window) {  // keys of this pass beside the ring:
      round_like_cache(k), round_like_cache(v);  // the same numbers it will hold
      kv.K = k;
      kv.V = v;
    }
    attention(kv, q, o);  // o [n,H dh]  4 H dh FLOP a key
    if (stage.attention == Attention::window) append(cache);
    multiply({{o, n, w.wo, x, /*add=*/true}});  // x += o wo^T  2 n D H dh FLOP

    rms_norm(x, w.ffn_norm, eps(), n, a);
    if (c_.moe) mixture(w);
    else ffn(w.dense);
    show(s, t, l);
  }
  // [layer]

  /// O [n,H dh] of the pass: tiles of queries by heads by sequence, spread over the threads.
  void attention(const KvView& kv, const float* Q, float* O) {
    const Index b = query_tile(c_.group(), kv.reach);
    queries_.clear();
    Index work = 0;
    for (const Slice& slice : slices_) {
      for (Index i = 0; i < slice.n; i += b) queries_.push_back({&slice, i});
      const Index seen = std::min(kv.reach, slice.p0 + slice.n);
      work += 4 * slice.n * seen * c_.q_dim();
      const Index cached = std::min(kv.K ? slice.p0 : slice.p0 + slice.n, kv.reach);
      counters.bytes += static_cast<std::uint64_t>(2 * cached * c_.kv_dim() * size_of(options_.kv_dtype));
    }
    // A task takes a group's R heads, which share each row of K and V; fewer where that would leave threads idle.
    Index R = c_.group();
    const auto idle = [&] { return std::ssize(queries_) * c_.heads / R < omp_get_max_threads(); };
    while (c_.group() % R || (R > 1 && idle())) --R;
    const Index tasks = c_.heads / R;  // a tile
    std::uint64_t flops = 0;
#pragma omp parallel for schedule(dynamic) if (work > small_work / 8) reduction(+ : flops)
    for (Index i = 0; i < std::ssize(queries_) * tasks; ++i) {
      const auto [slice, i0] = queries_[i / tasks];
      flops += attention_tile(
          c_, *slice, kv, i % tasks * R, R, i0, std::min(b, slice->n - i0), Q, O, scratch_[omp_get_thread_num()]);
    }
    counters.flops += flops;
  }

  // [ffn]
  /// X += (silu(a gate^T) * (a up^T)) down^T: 6 n D F FLOP.
  void ffn(const Ffn& f) {
    multiply({{a_.floats(), rows_, f.gate, gate_.floats()}, {a_.floats(), rows_, f.up, up_.floats()}});  // [n,F]
    swiglu(gate_.floats(), up_.floats(), rows_, f.gate.rows);
    multiply({{gate_.floats(), rows_, f.down, x_.floats(), /*add=*/true}});
  }
  // [ffn]

  // [mixture]
  /// X += sum over the token's experts of weight_e * SwiGLU_e(a), plus the shared expert at weight 1:
  /// n (2 D E + 6 D (active Fe + Fs)) FLOP. Tokens are grouped by expert, so an expert's weights are read once a pass;
  /// a token's experts are summed in the order of its routing, so the grouping leaves no trace in the result.
  void mixture(const Layer& w) {
    const Moe& moe = *c_.moe;
    const Index n = rows_, A = moe.active, D = c_.dim, Fe = moe.dim;
    float *a = a_.floats(), *x = x_.floats(), *in = gathered_.floats(), *gate = expert_gate_.floats();
    multiply({{a, n, w.router, router_.floats()}});  // [n,E]
    std::fill(load_.begin(), load_.end(), 0);
    for (Index i = 0; i < n; ++i) {
      route(moe, router_.floats() + i * moe.experts, &chosen_[i * A], &weight_[i * A]);
      for (Index k = 0; k < A; ++k) ++load_[chosen_[i * A + k]];
    }
    std::vector<Index>& next = first_;  // counting sort by expert
    next.assign(load_.size(), 0);
    std::exclusive_scan(load_.begin(), load_.end(), next.begin(), Index{0});
    for (Index i = 0; i < n * A; ++i) {
      slot_[i] = next[chosen_[i]]++;
      std::copy_n(a + i / A * D, D, in + slot_[i] * D);  // in [n A,D]
    }
    products_.clear();
    for (Index e = 0, at = 0; e < moe.experts; at += load_[e++]) {
      const auto add = [&](const Tensor& m, float* y) { products_.push_back({in + at * D, load_[e], m, y}); };
      if (load_[e] == 0) continue;
      add(w.experts.gate.slice(e * Fe, Fe), gate + at * Fe);
      add(w.experts.up.slice(e * Fe, Fe), expert_up_.floats() + at * Fe);
    }
    yocou::multiply(products_, counters);
    swiglu(gate, expert_up_.floats(), n * A, Fe);
    products_.clear();
    for (Index e = 0, at = 0; e < moe.experts; at += load_[e++])  // the rows of `in` are free again
      if (load_[e]) products_.push_back({gate + at * Fe, load_[e], w.experts.down.slice(e * D, D), in + at * D});
    yocou::multiply(products_, counters);
    each_row(n, 2 * A * D, [&](Index i) {
      for (Index k = 0; k < A; ++k) {
        const float* from = in + slot_[i * A + k] * D;
        const float weight = weight_[i * A + k];
        for (Index d = 0; d < D; ++d) x[i * D + d] = std::fma(weight, from[d], x[i * D + d]);
      }
    });
    if (moe.shared_dim) ffn(w.shared);
  }
  // [mixture]

  // [keep-rows]
  /// Drops the rows that nobody above needs and moves the others together. Of a prompt, its last row stays.
  void keep_wanted_rows() {
    Index kept = 0;
    std::size_t count = 0;
    for (const Slice slice : slices_) {
      if (slice.want == Logits::none || slice.n == 0) continue;
      const Index skip = slice.want == Logits::last ? slice.n - 1 : 0, half = c_.head_dim / 2;
      const auto move = [&](Slab& m, Index width) {
        float* to = m.floats() + kept * width;
        std::memmove(
            to, m.floats() + (slice.first + skip) * width, static_cast<std::size_t>((slice.n - skip) * width * 4));
      };
      move(x_, c_.dim), move(cos_, half), move(sin_, half);
      slices_[count++] = {slice.sequence, kept, slice.n - skip, slice.p0 + skip, slice.want};
      kept += slice.n - skip;
    }
    slices_.resize(count);
    rows_ = kept;
  }
  // [keep-rows]

  /// logits [rows,V] = RMSNorm(X; norm) head^T, 2 D V FLOP a row.
  void head(float* logits) {
    if (rows_ == 0) return;
    rms_norm(x_.floats(), w_.norm, eps(), rows_, a_.floats());
    multiply({{a_.floats(), rows_, w_.head, logits}});
    for (Index i = 0; i < rows_ * c_.vocab_size; ++i)
      if (!std::isfinite(logits[i])) {
        const Slice& slice = *std::find_if(
            slices_.begin(), slices_.end(), [row = i / c_.vocab_size](const Slice& p) { return row < p.first + p.n; });
        fail("logit of token ", i % c_.vocab_size, " at position ", slice.p0 + i / c_.vocab_size - slice.first, " is ",
            logits[i], ", not a finite number: the weights hold NaN, infinity or too large values");
      }
  }

  float eps() const { return static_cast<float>(c_.norm_eps); }
  void multiply(std::initializer_list<Product> products) {
    yocou::multiply({products.begin(), products.size()}, counters);
  }
  void append(Index cache) {
    for (const Slice& p : slices_)
      p.sequence->caches[cache].append(
          k_.floats() + p.first * c_.kv_dim(), v_.floats() + p.first * c_.kv_dim(), p.n, p.p0);
  }
  /// Rounds rows [n,G dh] to the type of the caches.
  void round_like_cache(float* rows) const {
    if (options_.kv_dtype == Dtype::bf16)
      for (Index i = 0; i < rows_ * c_.kv_dim(); ++i) {
        Bf16 b;
        store(rows[i], &b);
        rows[i] = to_float(b);
      }
  }
  void show(Index stage, Index loop, Index layer) {
    if (!on_layer) return;
    const bool routed = c_.moe && stage >= 0;
    on_layer({stage, loop, layer, {x_.floats(), static_cast<std::size_t>(rows_ * c_.dim)},
        routed ? std::span<const Index>(load_) : std::span<const Index>()});
  }

  struct Queries {
    const Slice* slice;
    Index first;
  };

  const Config& c_;
  const Weights& w_;
  EngineOptions options_;
  Plan plan_;
  Arena arena_;
  std::vector<std::unique_ptr<Sequence>> sequences_;
  Index global_rows_ = 0;

  // The pass that is running
  std::vector<Slice> slices_;
  std::vector<Queries> queries_;
  std::vector<Product> products_;
  Index rows_ = 0;
  Slab x_, a_, q_, k_, v_, o_, cos_, sin_, gate_, up_;  // [n,D] [n,D] [n,H dh] [n,G dh] .. [n,dh/2] .. [n,F]
  Slab router_, gathered_, expert_gate_, expert_up_;    // [n,E] [n A,D] [n A,Fe] [n A,Fe]
  std::vector<float> logits_;                           // of forward_sample
  std::vector<float> weight_;                           // [n,A]
  std::vector<Index> chosen_, slot_, load_, first_;     // [n,A] [n,A] [E] [E]
  std::vector<double> frequency_;                       // [dh/2] theta^(-2i/dh)
  std::vector<AttentionScratch> scratch_;               // one a thread
};

// =====================================================================================================================
// 7. Prefill, decode, sampling

/// Set by SIGINT; every pass and every long loop looks at it.
volatile sig_atomic_t interrupted = 0;
struct Interrupted {};
void stop_if_interrupted() {
  if (interrupted) throw Interrupted{};
}

// [prefill]
/// Runs a prompt in chunks; the last row's logits [V]. Chunks but the last want no logits: they stop below the
/// cross-decoder, and memory for activations is one chunk's, whatever N. Calls after(tokens done) behind each chunk.
void prefill(Engine& engine, int sequence, std::span<const int> tokens, Index chunk, float* logits,
    const std::function<void(Index)>& after = {}) {
  const Index N = std::ssize(tokens);
  for (Index i = 0, n = 0; i < N; i += n) {
    stop_if_interrupted();
    n = std::min(chunk, N - i);
    const Segment part{sequence, tokens.subspan(i, n), i + n == N ? Logits::last : Logits::none};
    engine.forward({&part, 1}, logits);
    if (after) after(i + n);
  }
}

/// One decode step: each sequence's next token; logits [sequences,V].
void decode(Engine& engine, std::span<const int> sequences, std::span<const int> tokens, float* logits) {
  stop_if_interrupted();
  std::vector<Segment> pass;
  for (std::size_t i = 0; i < sequences.size(); ++i) pass.push_back({sequences[i], tokens.subspan(i, 1), Logits::last});
  engine.forward(pass, logits);
}
// [prefill]

/// Runs tokens with all logits, chunk by chunk: use(first position, rows, logits [rows,V]). For scoring.
template <class Use>
void forward_all(Engine& engine, const Config& c, int sequence, std::span<const int> tokens, Index chunk, Use&& use) {
  std::vector<float> logits(static_cast<std::size_t>(std::min(chunk, std::ssize(tokens)) * c.vocab_size));
  for (Index i = 0; i < std::ssize(tokens); i += chunk) {
    stop_if_interrupted();
    const Index n = std::min(chunk, std::ssize(tokens) - i);
    const Segment part{sequence, tokens.subspan(i, n), Logits::all};
    engine.forward({&part, 1}, logits.data());
    use(i, n, logits.data());
  }
}

/// A seeded source of draws.
struct Sampler : Sampling {
  std::mt19937_64 random;

  double uniform() { return static_cast<double>(random() >> 11) * 0x1p-53; }  ///< in [0, 1)
  int operator()(std::span<const float> logits) { return draw(logits, *this, temperature == 0 ? 0 : uniform()); }
};

// =====================================================================================================================
// 8. Architectures: every system of the paper as a value

/// Wrong use of the command line: exit status 2.
struct Usage : std::runtime_error {
  using std::runtime_error::runtime_error;
};

/// A named architecture: its stages in terms of L and T, and its costs as the paper's Table 1 states them (those of
/// rins and upper-loop* in the same terms, by the formulas of part 10).
struct Arch {
  struct Part {
    const char* name;
    Attention attention;
    bool half;             ///< L/2 layers, otherwise L
    bool looped = false;   ///< x T
    bool refresh = false;  ///< refresh_kv
  };
  std::string name;
  Index loops;  ///< default T
  std::vector<Part> parts;
  const char *kv_cache, *prefill, *decode;  ///< big-O

  bool takes_loops() const { return parts.front().looped || parts.back().looped; }
  bool takes_window() const { return parts.front().attention == Attention::window; }
};

// clang-format off
const std::vector<Arch>& archs() {
  using enum Attention;
  // [archs]
  static const std::vector<Arch> all = {
    {"yoco-u",      3, {{"self", window, true, true}, {"cross", shared, true}},
                       "O((N + W T L) D)",   "O(L/2 T N D)",         "O(L/2 (N + W T) D)"},
    {"yoco",        1, {{"self", window, true}, {"cross", shared, true}},
                       "O((N + W L) D)",     "O(L/2 N D)",           "O(L/2 (N + W) D)"},
    {"transformer", 1, {{"layers", full, false}},
                       "O(L N D)",           "O(L N^2 D)",           "O(L N D)"},
    {"ut",          2, {{"layers", full, false, true}},
                       "O(L T N D)",         "O(L T N^2 D)",         "O(L T N D)"},
    {"rins",        3, {{"loop", full, true, true}, {"final", full, true}},
                       "O(L/2 (T + 1) N D)", "O(L/2 (T + 1) N^2 D)", "O(L/2 (T + 1) N D)"},
    {"upper-loop",  3, {{"self", window, true}, {"cross", shared, true, true}},
                       "O((N + W L) D)",     "O(L/2 N D)",           "O(L/2 (T N + W) D)"},
    {"upper-loop-unshared", 3, {{"self", window, true}, {"cross", shared, true, true, true}},
                       "O((T N + W L) D)",   "O(L/2 T N^2 D)",       "O(L/2 (T N + W) D)"},
  };
  // [archs]
  return all;
}
// clang-format on

/// The named architecture, or null.
const Arch* find_arch(const std::string& name) {
  const auto it = std::ranges::find(archs(), name, &Arch::name);
  return it == archs().end() ? nullptr : &*it;
}

/// Sets T of the stage that the architecture marks x T; 0 keeps it. Returns its T, 1 when nothing loops. Throws Usage
/// when there is no such stage.
Index set_loops(Config& c, Index T) {
  const Arch* arch = find_arch(c.arch);
  for (std::size_t s = 0; arch && s < arch->parts.size(); ++s)
    if (arch->parts[s].looped) return T ? c.stages[s].loops = T : c.stages[s].loops;
  if (T) throw Usage("--loops: arch '" + c.arch + "' has no looped stage");
  return 1;
}

/// Overrides of a shape; 0: keep.
struct ShapeOptions {
  Index layers = 0, window = 0, loops = 0;
};

/// A shape as an architecture. F and V of 1.3b are not published and chosen here. Throws Usage for an unknown name and
/// for an override that the architecture cannot take.
Config make_config(const std::string& shape, const std::string& arch_name, const ShapeOptions& o) {
  // clang-format off
  static const struct { std::string name; Index D, L, H, G, dh, F, V, W; } shapes[] = {
    {"1.3b",    2560, 20, 20, 4, 128, 6912, 100352, 512},
    {"10b-moe", 2560, 20, 20, 4, 128,    0, 100352, 512},
    {"small",    512,  8,  4, 1, 128, 1408,    256, 512},
    {"tiny",     128,  4,  2, 1,  64,  352,    256,  64}};
  // clang-format on
  const Arch* arch = find_arch(arch_name);
  const auto* p = std::ranges::find_if(shapes, [&](const auto& s) { return s.name == shape; });
  if (!arch) throw Usage("--arch: no architecture '" + arch_name + "'");
  if (p == std::end(shapes)) throw Usage("--shape: no shape '" + shape + "'");
  if (o.window && !arch->takes_window()) throw Usage("--window: arch '" + arch_name + "' has no window stage");
  Config c;
  c.arch = arch_name;
  c.vocab_size = p->V, c.dim = p->D, c.heads = p->H, c.kv_heads = p->G, c.head_dim = p->dh, c.ffn_dim = p->F;
  if (!p->F) c.moe = Moe{64, 8, 1024, 1024, true};
  const Index L = o.layers ? o.layers : p->L, W = o.window ? o.window : p->W;
  for (const Arch::Part& part : arch->parts) {
    if (part.half && L % 2)
      throw Usage("--layers: arch '" + arch_name + "' halves its layers, " + std::to_string(L) + " is odd");
    c.stages.push_back({part.name, part.half ? L / 2 : L, part.looped ? arch->loops : 1, part.attention,
        part.attention == Attention::window ? W : 0, /*rope=*/part.attention != Attention::shared, part.refresh});
  }
  set_loops(c, o.loops);
  return c;
}

// =====================================================================================================================
// 9. Checkpoints: a config and tensors in one .safetensors file, mapped, never copied; every byte of it is doubted

/// JSON with 128-bit integers, so that costs print exactly; keys stay in order.
using Json = nlohmann::basic_json<nlohmann::ordered_map, std::vector, std::string, bool, __int128, unsigned __int128>;

/// JSON text that is valid UTF-8 whatever is in it; with `ascii`, control and other special characters are escaped.
std::string dump(const Json& j, bool ascii = false) { return j.dump(-1, ' ', ascii, Json::error_handler_t::replace); }

/// Text with U+FFFD for what is not UTF-8.
std::string valid(const std::string& text) { return Json::parse(dump(text)).get<std::string>(); }

/// A value from a file as it may be shown: quoted, escaped, not too long.
std::string quote(const Json& v) {
  const std::string s = dump(v, /*ascii=*/true);
  return s.size() > 120 ? s.substr(0, 120) + "..." : s;
}

/// Parses JSON. Throws Error for a syntax error, a duplicate key, and nesting deeper than 32.
Json parse_json(std::string_view text, const std::string& where) {
  std::vector<std::set<std::string>> keys;
  std::size_t values = 0;  // bounds that no real model comes near: an ordered object looks its keys up one by one
  using Event = Json::parse_event_t;
  const auto check = [&](int depth, Event event, Json& value) {
    if (depth > 32) fail(where, ": JSON nested deeper than 32");
    if (++values > 2'000'000) fail(where, ": JSON of more than 2000000 values");
    if (event == Event::key && keys.back().size() == 65'536) fail(where, ": more than 65536 keys in one object");
    if (event == Event::object_start) keys.emplace_back();
    if (event == Event::object_end) keys.pop_back();
    if (event == Event::key && !keys.back().insert(value.get<std::string>()).second)
      fail(where, ": duplicate key ", quote(value));
    return true;
  };
  try {
    return Json::parse(text, check);
  } catch (const Json::exception& e) {
    const std::string_view what = e.what();
    fail(where, ": not valid JSON: ", what.substr(what.find(']') + 2).substr(0, 160));
  }
}

using Names = std::vector<std::string>;  ///< words of any kind
/// "a, b, c".
std::string join(const Names& names, const char* between = ", ") {
  std::string all;
  for (std::size_t i = 0; i < names.size(); ++i) all += (i ? between : "") + names[i];
  return all;
}

/// As the low end of a range: all that is above 0.
inline constexpr double above_0 = std::numeric_limits<double>::denorm_min();
/// The numbers from low to high.
template <class T>
struct Range {
  T low, high;
  bool has(T v) const { return v >= low && v <= high; }
  /// As a message says it: "an integer from 1 to 4096".
  std::string text() const {
    std::ostringstream s;
    s << (std::is_integral_v<T> ? "an integer" : "a number");
    if (static_cast<double>(low) == above_0) s << " above 0, at most " << high;
    else s << " from " << low << " to " << high;
    return s.str();
  }
};
inline constexpr Range<Index> sizes{1, std::numeric_limits<std::int32_t>::max()}, counts{1, 4096};
inline const Names attention_names{"window", "full", "shared"}, dtype_names{"F32", "BF16", "F16"};
const std::string& name_of(Dtype t) { return dtype_names[static_cast<std::size_t>(t)]; }

/// An object's fields, read or written by the same calls. Reading throws Error for what is missing, of the wrong kind,
/// out of range, or left over. A field may be missing when the value it would set is a good one already: its default.
class Fields {
 public:
  explicit Fields(Json& to) : to_(&to) {}
  Fields(const Json& from, std::string where) : where_(std::move(where)) {
    if (!from.is_object()) fail(where_, ": expected an object, found ", from.type_name());
    from.get_to(left_);
  }
  /// What has not been taken yet of what is read.
  bool has(const std::string& key) const { return left_.count(key) > 0; }
  Json take(const std::string& key) {
    if (!has(key)) fail(where_, ": key \"", key, "\" is missing");
    return left_.extract(key).mapped();
  }
  template <class T>
  void number(const std::string& key, T& value, const Range<T>& range) {
    field(key, value, range.text(), [&](const Json& v) {
      if constexpr (std::is_floating_point_v<T>) return v.is_number() && range.has(v.get<T>());
      else return v.is_number_integer() && v.get<__int128>() == v.get<T>() && range.has(v.get<T>());
    });
  }
  void flag(const std::string& key, bool& value, bool otherwise) {
    if (!to_) value = otherwise;
    field(key, value, "true or false", [](const Json& v) { return v.is_boolean(); });
  }
  /// A string: any, or one of `names`.
  void text(const std::string& key, std::string& value, const Names& names = {}) {
    field(key, value, names.empty() ? "a string" : "one of " + join(names), [&](const Json& v) {
      return v.is_string() && (names.empty() || std::ranges::count(names, v.get<std::string>()) > 0);
    });
  }
  /// An enumeration whose values `names` lists in their order. It may not be missing.
  template <class T>
  void choice(const std::string& key, T& value, const Names& names) {
    std::string name = to_ ? names[static_cast<std::size_t>(value)] : "";
    text(key, name, names);
    value = static_cast<T>(std::ranges::find(names, name) - names.begin());
  }
  /// A list of objects, at least one; visit(Fields&, value) deals with the fields of each.
  template <class T, class Visit>
  void objects(const std::string& key, std::vector<T>& values, Visit&& visit) {
    Json list = to_ ? Json(Json::array_t(values.size())) : take(key);
    if (!list.is_array() || list.empty()) fail(where_, ": \"", key, "\" must list at least one object");
    values.resize(list.size());
    for (std::size_t i = 0; i < values.size(); ++i) {
      Fields f = to_ ? Fields(list[i]) : Fields(list[i], where_ + ": " + key + "[" + std::to_string(i) + "]");
      visit(f, values[i]);
      f.done();
    }
    if (to_) (*to_)[key] = list;
  }
  /// An object within.
  Fields inside(const std::string& key) { return to_ ? Fields((*to_)[key]) : Fields(take(key), where_ + ": " + key); }
  /// Every key must have been taken.
  void done() const {
    if (!left_.empty()) fail(where_, ": key ", quote(left_.begin()->first), " is unknown, or out of place here");
  }

 private:
  template <class T, class Good>
  void field(const std::string& key, T& value, const std::string& expected, Good&& good) {
    if (to_) (*to_)[key] = value;
    if (to_ || (!has(key) && good(Json(value)))) return;
    const Json v = take(key);
    if (!good(v)) fail(where_, ": \"", key, "\" must be ", expected, ", found ", quote(v));
    v.get_to(value);
  }
  Json* to_ = nullptr;                ///< what is written
  std::map<std::string, Json> left_;  ///< what is read and has not been taken
  std::string where_;
};

/// The fields of a stage, read or written: those that its attention has a use for.
void stage_fields(Fields& f, Stage& s) {
  f.text("name", s.name);
  f.number("layers", s.layers, counts);
  f.number("loops", s.loops, counts);
  f.choice("attention", s.attention, attention_names);
  const bool shared = s.attention == Attention::shared;
  if (s.attention == Attention::window) f.number("window", s.window, sizes);
  f.flag("rope", s.rope, /*otherwise=*/!shared);
  if (shared) f.flag("refresh_kv", s.refresh_kv, /*otherwise=*/false);
}

/// The fields of a config.
void config_fields(Fields& f, Config& c) {
  Names labels{"custom"};
  for (const Arch& a : archs()) labels.push_back(a.name);
  f.text("arch", c.arch, labels);
  f.number("vocab_size", c.vocab_size, sizes);
  f.number("dim", c.dim, sizes);
  f.number("heads", c.heads, sizes);
  f.number("kv_heads", c.kv_heads, sizes);
  f.number("head_dim", c.head_dim, sizes);
  if (c.moe || f.has("moe")) {
    Moe& moe = c.moe ? *c.moe : c.moe.emplace();
    Fields m = f.inside("moe");
    m.number("experts", moe.experts, sizes);
    m.number("active", moe.active, sizes);
    m.number("dim", moe.dim, sizes);
    m.number("shared_dim", moe.shared_dim, {0, sizes.high});
    m.flag("normalize", moe.normalize, /*otherwise=*/false);
    m.done();
  } else {
    f.number("ffn_dim", c.ffn_dim, sizes);
  }
  std::string pairing = c.rope_half ? "half" : "interleaved";
  f.number("norm_eps", c.norm_eps, {0, 1e38});  // these are float32 later
  f.number("rope_theta", c.rope_theta, {above_0, 1e38});
  f.text("rope_pairing", pairing, {"interleaved", "half"});
  f.number("embed_scale", c.embed_scale, {0, 1e38});
  f.flag("tied_embeddings", c.tied_embeddings, /*otherwise=*/false);
  f.text("tokenizer", c.tokenizer, {"bytes"});
  f.objects("stages", c.stages, stage_fields);
  c.rope_half = pairing == "half";
}

/// The config of a checkpoint. Throws Error naming `path`, the key, what was expected and what was found.
Config read_config(const Json& json, const std::string& path) {
  const std::string where = path + ": config";
  Config c;
  c.arch = "";  // there is no default
  Fields f(json, where);
  config_fields(f, c);
  if (c.moe && f.has("ffn_dim")) fail(where, ": \"ffn_dim\" and \"moe\" exclude each other");
  f.done();
  if (c.moe && c.moe->active > c.moe->experts)
    fail(where, ": moe: ", c.moe->active, " active experts of ", c.moe->experts);
  if (c.heads % c.kv_heads) fail(where, ": heads ", c.heads, " is not a multiple of kv_heads ", c.kv_heads);
  std::set<std::string> names{"kv"};  // the global cache's prefix
  for (const Stage& s : c.stages) {
    const std::string at = where + ": stage " + quote(s.name);
    const auto odd = [](unsigned char ch) { return ch < 32 || ch >= 127 || ch == '.'; };
    if (s.name.empty() || std::ranges::any_of(s.name, odd))
      fail(at, ": a stage's name is printable ASCII, not empty, and has no dot");
    if (!names.insert(s.name).second) fail(at, ": another stage, or the global cache, has this name");
    if (s.rope && c.head_dim % 2) fail(at, ": head_dim ", c.head_dim, " is odd, RoPE needs pairs");
    if (s.attention == Attention::shared && &s != &c.stages.back()) fail(at, ": the one shared stage must be the last");
  }
  const auto fits = [](const Arch::Part& p, const Stage& s) {
    return p.attention == s.attention && p.refresh == s.refresh_kv && (p.looped || s.loops == 1);
  };
  const Arch* arch = find_arch(c.arch);  // a label promises its stages
  if (arch && !std::equal(arch->parts.begin(), arch->parts.end(), c.stages.begin(), c.stages.end(), fits))
    fail(where, ": \"arch\" says ", c.arch, ", the stages do not; \"custom\" fits any stages");
  return c;
}

/// The config as JSON, every key written out; what read_config() reads.
Json config_json(Config c) {
  Json j;
  Fields f(j);
  config_fields(f, c);
  return j;
}

/// A regular file, mapped read-only. What changes under a running program is not protected: a file that is cut short
/// ends the program with one line (main()), one that is rewritten in place changes the weights; replacing it by
/// rename is safe.
class MappedFile {
 public:
  explicit MappedFile(const std::string& path) {
    const int fd = ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    if (fd < 0) fail(path, ": ", std::strerror(errno));
    struct stat info {};
    const bool regular = fstat(fd, &info) == 0 && S_ISREG(info.st_mode);
    size_ = regular ? static_cast<std::size_t>(info.st_size) : 0;
    if (size_ > 0) p_ = ::mmap(nullptr, size_, PROT_READ, MAP_PRIVATE, fd, 0);
    const int error = errno;
    ::close(fd);
    if (!regular) fail(path, ": not a regular file");
    if (p_ == MAP_FAILED) fail(path, ": cannot be mapped: ", std::strerror(error));
  }
  MappedFile(const MappedFile&) = delete;
  ~MappedFile() {
    if (p_) ::munmap(p_, size_);
  }
  std::string_view text() const { return {static_cast<const char*>(p_), size_}; }

 private:
  void* p_ = nullptr;
  std::size_t size_ = 0;
};

/// A tensor as the file's header lists it; offsets count from the end of the header.
struct StoredTensor {
  std::string name;
  Dtype dtype = Dtype::f32;
  Shape shape;
  Index begin = 0, end = 0;
};

/// A model: config, weights, and whatever keeps the weights in memory.
struct Model {
  Config config;
  Weights weights;
  std::vector<StoredTensor> tensors;  ///< of a checkpoint, in file order
  std::unique_ptr<MappedFile> file;   ///< of a checkpoint
  std::unique_ptr<Arena> arena;       ///< of random weights
  std::vector<Slab> slabs;
};

/// A stored matrix: the leading dimensions are rows; [D] is one row.
Tensor as_matrix(const void* data, Dtype dtype, const Shape& shape) {
  const Index rows = std::accumulate(shape.begin(), shape.end() - 1, Index{1}, std::multiplies<>());
  return {data, dtype, rows, shape.back()};
}

/// Layers of empty tensors, as many as the config asks for.
Weights empty_weights(const Config& c) {
  Weights w;
  for (const Stage& s : c.stages) w.stages.emplace_back(static_cast<std::size_t>(s.layers));
  return w;
}

/// The header's entry of a tensor that the config asks for: dtype, shape and offsets agree, and lie in the `data` bytes
/// behind the header. Throws Error naming the tensor, expected and found.
StoredTensor read_tensor(
    const Json& entry, const std::string& name, const Shape& shape, Index data, const std::string& where) {
  Fields f(entry, where);
  StoredTensor t{name, Dtype::f32, shape, 0, 0};
  f.choice("dtype", t.dtype, dtype_names);
  const Json found = f.take("shape"), offsets = f.take("data_offsets");
  f.done();
  if (found != Json(shape)) fail(where, ": expected shape ", dump(shape), ", found ", quote(found));
  Index bytes = size_of(t.dtype);
  for (const Index d : shape)
    if (__builtin_mul_overflow(bytes, d, &bytes) || bytes > data)
      fail(where, ": shape ", dump(shape), " takes more than the file's ", data, " bytes of data");
  const auto offset = [&](const Json& v) { return v.is_number_integer() && v >= 0 && v <= data; };
  if (!offsets.is_array() || offsets.size() != 2 || !offset(offsets[0]) || !offset(offsets[1]))
    fail(where, ": \"data_offsets\" must be two integers from 0 to the file's ", data, ", found ", quote(offsets));
  offsets[0].get_to(t.begin), offsets[1].get_to(t.end);
  if (t.end - t.begin != bytes)
    fail(where, ": shape ", dump(shape), " ", name_of(t.dtype), " takes ", bytes, " bytes, data_offsets ",
        dump(offsets), " give ", t.end - t.begin);
  return t;
}

/// Opens a checkpoint. The weights are views of the mapped file. Throws Error, one line naming file, tensor, expected
/// and found, for anything that is not exactly a model: its tensors cover the data without gap or overlap.
Model load_model(const std::string& path) {
  Model m;
  m.file = std::make_unique<MappedFile>(path);
  const std::string_view file = m.file->text();
  std::uint64_t length = 0;
  constexpr std::size_t limit = 100'000'000;
  if (file.size() < 8) fail(path, ": a safetensors file has at least 8 bytes, found ", file.size());
  std::memcpy(&length, file.data(), 8);
  if (length > std::min(file.size() - 8, limit))
    fail(path, ": the header claims ", length, " bytes; ", file.size() - 8, " follow in the file, ", limit,
        " are the limit");
  const Json header = parse_json(file.substr(8, length), path + ": header");
  const std::string_view numbers = file.substr(8 + length);
  if (!header.is_object()) fail(path, ": header: expected an object, found ", header.type_name());
  auto stored = header.get<std::map<std::string, Json>>();
  const Json meta = stored["__metadata__"];
  stored.erase("__metadata__");
  if (!meta.is_object() || !meta.contains("yocou") || !meta["yocou"].is_string())
    fail(path, ": no __metadata__ with a string \"yocou\", the config; not a yocou checkpoint");
  m.config = read_config(parse_json(meta["yocou"].get<std::string>(), path + ": config"), path);
  Index layers = 0;
  for (const Stage& s : m.config.stages) layers += s.layers;
  if (layers > std::ssize(stored))
    fail(path, ": the config has ", layers, " layers, the file only ", stored.size(), " tensors");
  m.weights = empty_weights(m.config);
  for_each_tensor(m.config, m.weights, [&](const std::string& name, const Shape& shape, Tensor& t) {
    const std::string where = path + ": tensor " + quote(name);
    const auto node = stored.extract(name);
    if (!node) fail(where, ": expected shape ", dump(shape), ", found none in the file");
    const StoredTensor& s = m.tensors.emplace_back(read_tensor(node.mapped(), name, shape, std::ssize(numbers), where));
    t = as_matrix(numbers.data() + s.begin, s.dtype, shape);
    if ((8 + length + s.begin) % size_of(s.dtype))
      fail(where, ": its data is not aligned to ", size_of(s.dtype), " bytes");
  });
  if (!stored.empty())
    fail(path, ": tensor ", quote(stored.begin()->first), " is not in the config",
        stored.begin()->first == "head" ? ": tied_embeddings makes embed the head" : "");
  std::ranges::sort(m.tensors, {}, &StoredTensor::begin);
  Index at = 0;
  for (const StoredTensor& t : m.tensors) {
    if (t.begin != at)
      fail(path, ": tensor ", quote(t.name), ": data begins at ", t.begin, ", expected ", at,
          t.begin < at ? ", overlap" : ", gap");
    at = t.end;
  }
  if (at != std::ssize(numbers)) fail(path, ": the tensors end at ", at, ", the data at ", numbers.size());
  if (m.config.tied_embeddings) m.weights.head = m.weights.embed;
  return m;
}

/// Random numbers first .. first+count-1 of a tensor: gains 1, matrices uniform with variance 1/fan_in. A function of
/// (seed, tensor, index) alone, so it does not depend on threads or on how the tensor is cut.
void random_numbers(
    std::uint64_t seed, std::uint64_t tensor, const Shape& shape, Dtype dtype, Index first, Index count, void* out) {
  const bool gain = shape.size() == 1;
  const float range = static_cast<float>(std::sqrt(3.0 / static_cast<double>(shape.back())));
  const std::uint64_t stream = (seed * 0x9e3779b97f4a7c15u) ^ (tensor * 0xd1342543de82ef95u);
  with_type(dtype, [&](auto num) {
    each_row(count, 64, [&, to = static_cast<decltype(num)*>(out)](Index i) {
      std::uint64_t z = stream + static_cast<std::uint64_t>(first + i) * 0x9e3779b97f4a7c15u;  // splitmix64
      z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
      z = (z ^ z >> 27) * 0x94d049bb133111ebu;
      const float u = static_cast<float>((z ^ z >> 31) >> 40) * 0x1p-23f - 1.f;  // [-1, 1)
      store(gain ? 1.f : u * range, to + i);
    });
  });
}

/// A file that appears under its name only when it is whole: written beside it, then renamed. Throws Error when the
/// disk does not take it.
class OutputFile {
 public:
  explicit OutputFile(const std::string& path) : path_(path), beside_(path + ".part" + std::to_string(getpid())) {
    std::error_code none;
    const auto there = std::filesystem::status(path, none);
    if (exists(there) && !is_regular_file(there)) fail(path, ": exists and is not a regular file");
    check(out_ = std::fopen(beside_.c_str(), "wbx"));
  }
  OutputFile(const OutputFile&) = delete;
  void write(const void* data, std::size_t bytes) { check(std::fwrite(data, 1, bytes, out_) == bytes); }
  void commit() {
    check(std::fflush(out_) == 0 && fsync(fileno(out_)) == 0);
    check(std::fclose(std::exchange(out_, nullptr)) == 0 && std::rename(beside_.c_str(), path_.c_str()) == 0);
  }
  ~OutputFile() {
    if (out_) std::fclose(out_);
    std::remove(beside_.c_str());  // nothing after a commit
  }

 private:
  void check(bool good) const {
    if (!good) fail(path_, ": cannot be written: ", std::strerror(errno));
  }
  std::string path_, beside_;
  std::FILE* out_ = nullptr;
};

/// Writes a checkpoint of random weights, 1M numbers at a time.
void write_random_checkpoint(const Config& c, Dtype dtype, std::uint64_t seed, const std::string& path) {
  Json header;
  header["__metadata__"] = {{"format", "pt"}, {"yocou", config_json(c).dump()}};  // pt: transformers' mark for PyTorch
  Weights w = empty_weights(c);
  Index at = 0;
  for_each_tensor(c, w, [&](const std::string& name, const Shape& shape, Tensor&) {
    const Index begin = std::exchange(at, at + as_matrix(nullptr, dtype, shape).bytes());
    header[name] = {{"dtype", name_of(dtype)}, {"shape", shape}, {"data_offsets", {begin, at}}};
  });
  std::string text = header.dump();
  text.resize((text.size() + 7) / 8 * 8, ' ');
  OutputFile file(path);
  const std::uint64_t length = text.size();
  file.write(&length, 8);
  file.write(text.data(), text.size());
  std::vector<char> buffer;
  std::uint64_t number = 0;
  for_each_tensor(c, w, [&](const std::string&, const Shape& shape, Tensor&) {
    const Tensor t = as_matrix(nullptr, dtype, shape);
    for (Index i = 0, count = t.rows * t.cols; i < count; i += 1 << 20) {
      const Index n = std::min<Index>(1 << 20, count - i);
      buffer.resize(static_cast<std::size_t>(n * size_of(dtype)));
      random_numbers(seed, number, shape, dtype, i, n, buffer.data());
      file.write(buffer.data(), buffer.size());
      stop_if_interrupted();
    }
    ++number;
  });
  file.commit();
}

// =====================================================================================================================
// 10. Accounting: the paper's costs as exact formulas. They share no code with the counters of parts 2 to 6.

/// An unsigned integer of 128 bits that refuses to wrap.
struct Exact {
  unsigned __int128 v = 0;
  Exact(Index n = 0) : v(static_cast<unsigned __int128>(n)) {}  // NOLINT: formulas read better with plain sizes in them
  friend Exact operator+(Exact a, const Exact& b) {
    if (__builtin_add_overflow(a.v, b.v, &a.v)) fail("a cost exceeds 2^128");
    return a;
  }
  friend Exact operator*(Exact a, const Exact& b) {
    if (__builtin_mul_overflow(a.v, b.v, &a.v)) fail("a cost exceeds 2^128");
    return a;
  }
  Exact& operator+=(const Exact& o) { return *this = *this + o; }
  auto operator<=>(const Exact&) const = default;
  explicit operator double() const { return static_cast<double>(v); }
};
std::string to_string(Exact e) { return Json(e.v).dump(); }

// [cache-bytes]
/// Rows of a paged cache that hold N tokens: blocks are allocated whole.
Index paged_rows(Index N) { return (N + block_rows - 1) / block_rows * block_rows; }

/// Cache bytes of one sequence of N tokens, s bytes a number: 2 G dh s x rows (spec: window stages W rows per layer and
/// loop, full stages all rows per layer and loop, a shared stage all rows once, no factor T).
Exact cache_bytes(const Config& c, Index N, Index s) {
  Exact rows = 0;
  for (const Stage& g : c.stages) {
    if (g.attention == Attention::window) rows += Exact(g.layers) * g.loops * g.window;
    if (g.attention == Attention::full) rows += Exact(g.layers) * g.loops * paged_rows(N);
    if (g.attention == Attention::shared) rows += Exact(g.refresh_kv ? g.loops : 1) * paged_rows(N);
  }
  return rows * 2 * c.kv_heads * c.head_dim * s;
}
// [cache-bytes]

// [flops]
/// FLOP of one layer at one position that sees `keys` keys, without own k, v.
Exact layer_flops(const Config& c, const Exact& keys) {
  const Exact D = c.dim, q = Exact(c.heads) * c.head_dim;
  const Exact ffn = c.moe ? 2 * D * c.moe->experts + 6 * D * (Exact(c.moe->active) * c.moe->dim + c.moe->shared_dim)
                          : 6 * D * c.ffn_dim;
  return 2 * D * q + 4 * q * keys + 2 * q * D + ffn;
}
/// FLOP of k and v, or of K^ and V^, at one position.
Exact kv_flops(const Config& c) { return 4 * Exact(c.dim) * c.kv_heads * c.head_dim; }
Exact head_flops(const Config& c) { return 2 * Exact(c.dim) * c.vocab_size; }

/// The sum over positions 0 .. N-1 of the keys each sees: N(N+1)/2, or W a position once the window is full.
Exact keys_seen(Index N, Index W) {
  const Index ramp = W ? std::min(N, W) : N;
  Exact sum = Exact(ramp) * (Exact(ramp) + 1);
  sum.v /= 2;
  return sum + Exact(N - ramp) * W;
}

/// FLOP of a prefill of N tokens of one sequence: window and full stages and K^, V^ at every position, shared layers at
/// the last only (with refresh_kv all loops but the last at every position), one head.
Exact prefill_flops(const Config& c, Index N) {
  Exact sum = head_flops(c);
  for (const Stage& g : c.stages) {
    const Exact fixed = layer_flops(c, 0), per_key = 4 * Exact(c.heads) * c.head_dim;
    if (g.attention != Attention::shared) {
      sum += Exact(g.layers) * g.loops * ((fixed + kv_flops(c)) * N + per_key * keys_seen(N, g.window));
    } else {
      const Index whole = g.refresh_kv ? g.loops - 1 : 0;  // passes over every position
      sum += Exact(g.refresh_kv ? g.loops : 1) * kv_flops(c) * N;
      sum += Exact(whole) * g.layers * (fixed * N + per_key * keys_seen(N, 0));
      sum += Exact(g.loops - whole) * g.layers * layer_flops(c, N);
    }
  }
  return sum;
}

/// FLOP of the decode step after N tokens: position N sees N + 1 keys, or min(N + 1, W).
Exact decode_flops(const Config& c, Index N) {
  Exact sum = head_flops(c);
  for (const Stage& g : c.stages) {
    const bool shared = g.attention == Attention::shared;
    sum += Exact(g.layers) * g.loops * layer_flops(c, g.window ? std::min(N + 1, g.window) : N + 1);
    sum += (shared ? Exact(g.refresh_kv ? g.loops : 1) : Exact(g.layers) * g.loops) * kv_flops(c);
  }
  return sum;
}
// [flops]

// [decode-bytes]
/// Elements of one layer of a stage, with so many of the E experts.
Exact layer_params(const Config& c, const Stage& g, Index experts) {
  const Exact D = c.dim, q = Exact(c.heads) * c.head_dim, kv = Exact(c.kv_heads) * c.head_dim;
  const Exact own = g.attention == Attention::shared ? Exact(0) : 2 * kv * D;
  const Exact ffn =
      c.moe ? D * c.moe->experts + 3 * D * (Exact(experts) * c.moe->dim + c.moe->shared_dim) : 3 * D * c.ffn_dim;
  return 2 * D + 2 * q * D + own + ffn;
}
/// Elements of kv_norm, kv.wk and kv.wv.
Exact kv_params(const Config& c) { return Exact(c.dim) * (1 + 2 * Exact(c.kv_heads) * c.head_dim); }

/// Bytes that a decode step of a batch after N tokens must read: each weight once per loop that uses it (of E experts
/// at most min(E, batch x active)), the head, one embedding row a sequence, and every cached row that is seen; w bytes
/// a weight, s bytes a cached number.
Exact decode_bytes(const Config& c, Index N, Index batch, Index w, Index s) {
  const Index experts = c.moe ? std::min(c.moe->experts, batch * c.moe->active) : 0;
  Exact weights = Exact(c.dim) * (Exact(c.vocab_size) + 1 + batch), rows = 0;
  for (const Stage& g : c.stages) {
    const Exact passes = Exact(g.layers) * g.loops;
    weights += passes * layer_params(c, g, experts);
    if (g.attention == Attention::shared) weights += Exact(g.refresh_kv ? g.loops : 1) * kv_params(c);
    rows += passes * (g.window ? std::min(N + 1, g.window) : N + 1);
  }
  return weights * w + Exact(batch) * rows * 2 * c.kv_heads * c.head_dim * s;
}
// [decode-bytes]

/// Stored elements; loops count once.
struct Params {
  Exact params;  ///< without embedding and head, norm gains included
  Exact active;  ///< the same with experts x active/experts
  Exact embed, head;

  Exact all() const { return params + embed + head; }
};
Params count_params(const Config& c) {
  const Exact once = c.dim + (c.has_shared() ? kv_params(c) : 0), embed = Exact(c.dim) * c.vocab_size;
  Params p{once, once, embed, c.tied_embeddings ? 0 : embed};
  for (const Stage& g : c.stages) {
    p.params += g.layers * layer_params(c, g, c.moe ? c.moe->experts : 0);
    p.active += g.layers * layer_params(c, g, c.moe ? c.moe->active : 0);
  }
  return p;
}

/// The largest n in [0, limit] for which ok(n), where ok holds up to some n and not beyond.
template <class Ok>
Index largest(Index limit, Ok&& ok) {
  Index low = 0, high = limit + 1;
  while (high - low > 1) (ok(low + (high - low) / 2) ? low : high) = low + (high - low) / 2;
  return low;
}

// =====================================================================================================================
// 11. The machine: memory, clocks, its measured limits

using Clock = std::chrono::steady_clock;
double seconds_since(Clock::time_point start) { return std::chrono::duration<double>(Clock::now() - start).count(); }

/// What follows `key` on the first line that begins with it, in a file of /proc or a control group; "" without one.
std::string line_of(const std::string& path, const std::string& key) {
  std::ifstream in(path);
  for (std::string line; std::getline(in, line);)
    if (line.starts_with(key)) return line.substr(key.size());
  return "";
}
/// The same as a number, or `otherwise`.
Index number_in(const std::string& path, const std::string& key, Index otherwise) {
  Index v = 0;
  return std::istringstream(line_of(path, key)) >> v ? v : otherwise;
}

/// Bytes that can still be allocated: the machine's, or the control group's if that is less, but for a twentieth that
/// is left to everything else.
Index available_memory() {
  Index available = number_in("/proc/meminfo", "MemAvailable:", 0) * 1024;
  std::filesystem::path group = line_of("/proc/self/cgroup", "0::");
  for (; group.has_relative_path(); group = group.parent_path()) {
    const std::string at = "/sys/fs/cgroup" + group.string();
    const Index limit = number_in(at + "/memory.max", "", std::numeric_limits<Index>::max());
    const Index used = number_in(at + "/memory.current", "", 0);
    const Index cached = number_in(at + "/memory.stat", "inactive_file ", 0);
    available = std::clamp<Index>(limit - used + std::min(used, cached), 0, available);
  }
  return available - available / 20;
}
/// Bytes of this process in RAM now.
Index resident_memory() { return number_in("/proc/self/status", "VmRSS:", 0) * 1024; }

/// Throws Error when `bytes` more will not fit; both figures are in the line.
void require_memory(const Exact& bytes, const std::string& what) {
  const Index available = available_memory();
  if (bytes > Exact(available))
    fail(what, " needs ", to_string(bytes), " bytes of memory, ", available, " are available");
}

/// About what an engine's buffers take for passes of n rows, logits included.
Exact activation_bytes(const Config& c, Index n) {
  const Moe m = c.moe.value_or(Moe{});
  const Exact ffn = m.experts + Exact(m.active) * (c.dim + 2 * m.dim) + 2 * (m.shared_dim + c.ffn_dim);
  return 4 * Exact(n) *
         (2 * Exact(c.dim) + 2 * Exact(c.q_dim()) + 2 * Exact(c.kv_dim()) + c.head_dim + c.vocab_size + ffn);
}

/// A model of random weights in memory, for measuring.
Model random_model(const Config& c, Dtype dtype, std::uint64_t seed) {
  require_memory(count_params(c).all() * size_of(dtype), "a model of random weights");
  Model m;
  m.config = c;
  m.weights = empty_weights(c);
  m.arena = std::make_unique<Arena>();
  for_each_tensor(c, m.weights, [&](const std::string&, const Shape& shape, Tensor& t) {
    stop_if_interrupted();
    t = as_matrix(nullptr, dtype, shape);
    const auto number = static_cast<std::uint64_t>(m.slabs.size());
    t.data = m.slabs.emplace_back(*m.arena, t.bytes(), Use::weights).data();
    random_numbers(seed, number, shape, dtype, 0, t.rows * t.cols, m.slabs.back().data());
  });
  if (c.tied_embeddings) m.weights.head = m.weights.embed;
  return m;
}

/// A progress line on stderr, for work of more than a second: redrawn on a terminal, every ten seconds elsewhere.
class Progress {
 public:
  Progress(const char* what, Index total) : what_(what), total_(total) {}
  void operator()(Index done) {
    const double t = seconds_since(start_), percent = 100 * static_cast<double>(done) / static_cast<double>(total_);
    if (t < next_) return;
    next_ = t + (terminal_ ? 0.2 : 10);
    std::fprintf(stderr, terminal_ ? "\r%s %3.0f%%, %.0f s\033[K" : "%s %.0f%%, %.0f s\n", what_, percent, t);
  }
  ~Progress() {
    if (terminal_ && next_ > 1) std::fputs("\r\033[K", stderr);
  }

 private:
  const char* what_;
  Index total_;
  Clock::time_point start_ = Clock::now();
  bool terminal_ = isatty(STDERR_FILENO);
  double next_ = 1;  ///< seconds after which the line is drawn next
};

/// What this machine can do at the current thread count, the best of several repetitions in two ways: the denominators
/// of attainment.
struct Limits {
  double gemm_gflops = 0;  ///< Eigen's SGEMM on 512 x 2048 x 2048: its own split, or a slice of columns a thread
  double read_gbs = 0;     ///< reading 256 MiB: one stream a thread, or four side by side
};

Limits measure_limits() {
  using Matrix = Eigen::Matrix<float, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;
  const Index n = 512, K = 2048, count = Index{64} << 20, piece = 1 << 16;
  const Matrix x = Matrix::Random(n, K), w = Matrix::Random(K, K);
  const std::vector<float> data(static_cast<std::size_t>(count), 1.f);
  Matrix y(n, K);
  Limits best;
  const auto fastest = [](double& best, double work, auto&& f) {
    const auto start = Clock::now();
    f();
    best = std::max(best, 1e-9 * work / seconds_since(start));
  };
  for (int i = 0; i < 16; ++i) {
    fastest(best.gemm_gflops, 2. * n * K * K, [&] {
      if (i % 2) return void(y.noalias() = x * w.transpose());
#pragma omp parallel for schedule(static)
      for (Index c = 0; c < K; c += 128) y.middleCols(c, 128).noalias() = x * w.middleRows(c, 128).transpose();
    });
    double sum = 0;
    fastest(best.read_gbs, 4. * count, [&] {
      double total = 0;
#pragma omp parallel for schedule(static) reduction(+ : total)
      for (Index at = 0; at < count; at += piece) {
        const Eigen::Map<const Eigen::ArrayXXf> part(&data[static_cast<std::size_t>(at)], piece / 4, 4);
        total += i % 2 ? part.sum() : (part.col(0) + part.col(1) + part.col(2) + part.col(3)).sum();
      }
      sum = total;
    });
    if (sum != count) fail("the bandwidth measurement read wrong values");
  }
  return best;
}

/// Compiler and CUDA of this build.
std::string build_name() {
#ifdef __clang__
  const std::string compiler = "clang " __clang_version__;
#else
  const std::string compiler = "g++ " __VERSION__;
#endif
#ifdef YOCOU_CUDA
  return compiler + ", CUDA " YOCOU_CUDA_VERSION;
#else
  return compiler + ", no CUDA";
#endif
}

// =====================================================================================================================
// 12. Commands

/// Every option of every command, with the defaults that they share; a command reads those it has.
struct Options {
  std::string model = {}, file = {}, prompt_file = {}, tokens_file = {}, by = {}, shape = {}, arch = {}, out = {};
  std::optional<std::string> prompt = {}, tokens = {};
  std::string device = "cpu", kv_dtype = {}, dtype = "bf16";
  std::vector<Index> N = {}, loops_list = {0};
  Index n = 256, loops = 0, layers = 0, window = 0, chunk = 0, threads = 0, prefill = 0, top_k = 0;
  Index batch = 1, kv_bytes = 2, memory = 0, runs = 3, steps = 4;
  std::uint64_t seed = 0;
  double temperature = 0, top_p = 1;
  bool json = false, csv = false, last = false, by_position = false, allocate_only = false;
};

/// Results go to stdout through here: a full disk is an error, a reader that has gone ends the program quietly.
void put(std::string_view text) {
  if (std::fwrite(text.data(), 1, text.size(), stdout) == text.size() && std::fflush(stdout) == 0) return;
  if (errno == EPIPE) std::_Exit(0);
  fail("standard output: ", std::strerror(errno));
}

/// A value for people, on one line: integers in full, other numbers with four significant digits.
std::string cell(const Json& v) {
  std::ostringstream s;
  if (v.is_number_float()) s << std::setprecision(4) << v.get<double>();
  else s << (v.is_string() ? v.get<std::string>() : v.is_null() ? "-" : dump(v));
  std::string text = s.str();
  std::ranges::replace_if(
      text, [](unsigned char ch) { return ch < 32 || ch == 127; }, '?');
  return text;
}

/// A value for programs, quoted where CSV asks for it (RFC 4180).
std::string csv_cell(const Json& v) {
  std::string s = v.is_string() ? v.get<std::string>() : v.is_null() ? "" : dump(v);
  if (s.find_first_of(",\"\n") == std::string::npos) return s;
  for (std::size_t q = 0; (q = s.find('"', q)) != std::string::npos; q += 2) s.insert(q, 1, '"');
  return '"' + s + '"';
}

/// Prints rows of equal keys as JSON ({"rows":[...]} and `more`), CSV, or a table for people.
void put_rows(const std::vector<Json>& rows, const Options& o, Json more = Json::object()) {
  if (o.json) {
    more["rows"] = rows;
    return put(dump(more) + "\n");
  }
  if (rows.empty()) return;
  std::vector<Names> lines(1 + rows.size());
  for (const auto& [key, value] : rows[0].items()) lines[0].push_back(key);
  for (std::size_t r = 0; r < rows.size(); ++r)
    for (const Json& value : rows[r]) lines[1 + r].push_back(o.csv ? csv_cell(value) : cell(value));
  std::vector<std::size_t> width(lines[0].size());
  for (const Names& line : lines)
    for (std::size_t i = 0; i < line.size(); ++i) width[i] = std::max(width[i], line[i].size());
  std::string text;
  for (Names& line : lines) {
    for (std::size_t i = 0; i < line.size() && !o.csv; ++i)  // the first column stands at the left
      line[i].insert(i ? 0 : line[i].size(), width[i] - line[i].size(), ' ');
    text += join(line, o.csv ? "," : "  ") + "\n";
  }
  put(text);
}

Dtype dtype_of(const std::string& name) {
  return name == "bf16" ? Dtype::bf16 : name == "f16" ? Dtype::f16 : Dtype::f32;
}

/// An engine for `sequences` sequences of up to `tokens` positions each, which begin as prompts of `prompt` tokens,
/// after checking that they fit the machine.
std::unique_ptr<Engine> make_engine(const Model& m, const Options& o, Index prompt, Index tokens, Index sequences = 1) {
  if (o.threads) omp_set_num_threads(static_cast<int>(o.threads));
  const Index rows = std::max(std::min(o.chunk, prompt), sequences);
  const EngineOptions options{dtype_of(o.kv_dtype), rows, tokens * sequences, sequences};
  if (o.device == "cuda") {
#ifdef YOCOU_CUDA
    return make_cuda_engine(m.config, m.weights, options);
#else
    fail("--device cuda: this yocou was built without CUDA");
#endif
  }
  const Exact caches = Exact(sequences) * cache_bytes(m.config, tokens, size_of(options.kv_dtype));
  require_memory(caches + activation_bytes(m.config, rows),
      "a run of " + std::to_string(tokens) + " tokens x " + std::to_string(sequences));
  return std::make_unique<CpuEngine>(m.config, m.weights, options);
}

/// The model of a command that reads text, with --loops T.
Model load_text_model(const Options& o) {
  Model m = load_model(o.model);
  if (m.config.vocab_size < 256) fail(o.model, ": byte text needs vocab_size >= 256, found ", m.config.vocab_size);
  set_loops(m.config, o.loops);
  return m;
}

/// What --NAME TEXT or --NAME-file FILE gives, one of the two; `file` keeps it.
std::string_view text_or_file(const std::string& option, const std::optional<std::string>& text,
    const std::string& path, std::optional<MappedFile>& file) {
  if (text.has_value() == !path.empty()) throw Usage("give either " + option + " or " + option + "-file");
  return text ? std::string_view(*text) : file.emplace(path).text();
}

/// Bytes are tokens. Throws Error naming `what` when they are too few, or too many for the machine.
std::vector<int> bytes_to_tokens(std::string_view text, const std::string& what, std::size_t least = 1) {
  if (text.size() < least) fail(what, ": found ", text.size(), " bytes, the least is ", least);
  if (text.size() > 1 << 20) require_memory(5 * Exact(std::ssize(text)), what);
  const auto* bytes = reinterpret_cast<const unsigned char*>(text.data());
  return {bytes, bytes + text.size()};
}

/// Bytes for a terminal: whole characters as soon as they are complete, U+FFFD for what is not UTF-8.
class TerminalText {
 public:
  std::string operator()(char byte) {
    std::string out = (byte & 0xc0) == 0x80 ? "" : rest();  // a byte that does not go on with a character ends it
    pending_ += byte;
    const auto lead = static_cast<unsigned char>(pending_[0]);
    const std::size_t length = lead < 0xc0 ? 1 : lead < 0xe0 ? 2 : lead < 0xf0 ? 3 : 4;
    return pending_.size() < length ? out : out + rest();
  }
  std::string rest() { return valid(std::exchange(pending_, "")); }

 private:
  std::string pending_;
};

/// `yocou generate`
void generate(const Options& o) {
  std::optional<MappedFile> file;
  const auto prompt = bytes_to_tokens(text_or_file("--prompt", o.prompt, o.prompt_file, file), "the prompt");
  const Model m = load_text_model(o);
  const Index N = std::ssize(prompt);
  const auto engine = make_engine(m, o, N, N + o.n);
  const int sequence = engine->open();
  std::vector<float> logits(static_cast<std::size_t>(m.config.vocab_size));
  Sampler sample{{o.temperature, o.top_k, o.top_p}, std::mt19937_64(o.seed)};
  const bool terminal = isatty(STDOUT_FILENO) && !o.json;
  TerminalText shown;
  std::string text;
  std::vector<int> tokens;
  Index prompted = 0, decoded = 0;
  double prompt_seconds = 0, decode_seconds = 0;
  try {
    Progress progress("prompt", N);
    auto start = Clock::now();
    prefill(*engine, sequence, prompt, o.chunk, logits.data(), [&](Index done) {
      prompted = done, prompt_seconds = seconds_since(start);
      progress(done);
    });
    start = Clock::now();
    while (std::ssize(tokens) < o.n) {
      stop_if_interrupted();
      int next = 0;
      if (tokens.empty()) {
        next = sample(logits);
      } else {
        const Segment step{sequence, {&tokens.back(), 1}, Logits::last};
        const double u = sample.temperature == 0 ? 0 : sample.uniform();
        engine->forward_sample({&step, 1}, sample, {&u, 1}, &next);
        ++decoded, decode_seconds = seconds_since(start);
      }
      if (next > 255) fail("the model wrote token ", next, ", which is not a byte");
      tokens.push_back(next), text += static_cast<char>(next);
      if (!o.json) put(terminal ? shown(text.back()) : text.substr(text.size() - 1));
    }
  } catch (const Interrupted&) {     // what was written and measured so far still counts
  } catch (const std::exception&) {  // its line is not to begin behind the text
    if (terminal && !text.empty()) put(shown.rest() + "\n");
    throw;
  }
  if (terminal) put(shown.rest() + "\n");
  if (o.json)
    put(dump({{"text", text}, {"tokens", tokens}, {"seed", o.seed}, {"prompt_tokens", prompted},
            {"cache_bytes", engine->cache_bytes()}}) +
        "\n");
  const auto rate = [](Index count, double seconds) {
    return cell(static_cast<double>(count) / std::max(seconds, 1e-9)) + " tok/s";
  };
  const std::string decoding = decoded ? ", " + rate(decoded, decode_seconds) : "";
  std::cerr << "prompt " << prompted << " tokens, " << rate(prompted, prompt_seconds) << "; decode " << decoded
            << " steps" << decoding << "; cache " << engine->cache_bytes() << " bytes; seed " << o.seed << "\n";
  stop_if_interrupted();
}

/// -log2 p(token) under a row of logits [V], in double.
double surprise(std::span<const float> logits, int token) {
  const double max = *std::max_element(logits.begin(), logits.end());
  double sum = 0;
  for (const float l : logits) sum += std::exp(l - max);
  return (max - logits[static_cast<std::size_t>(token)]) / std::log(2.0) + std::log2(sum);
}

/// `yocou score`: row t-1 predicts token t, so a file of N bytes gives N-1 predictions.
void score(const Options& o) {
  Model m = load_text_model(o);
  const MappedFile file(o.file);
  const std::vector<int> tokens = bytes_to_tokens(file.text(), o.file, 2);
  const Index N = std::ssize(tokens), V = m.config.vocab_size;
  std::vector<Json> rows, positions;
  for (const Index given : o.loops_list) {
    const Index T = set_loops(m.config, given);
    const auto engine = make_engine(m, o, N, N);
    std::vector<double> bits(static_cast<std::size_t>(N - 1));
    Progress progress("score", N);
    forward_all(*engine, m.config, engine->open(), tokens, o.chunk, [&](Index first, Index n, const float* logits) {
      for (Index i = first; i < std::min(first + n, N - 1); ++i)
        bits[i] = surprise({logits + (i - first) * V, static_cast<std::size_t>(V)}, tokens[i + 1]);
      progress(first + n);
    });
    const auto mean = [&](Index from, Index to) {
      return std::accumulate(bits.begin() + from, bits.begin() + to, 0.0) / static_cast<double>(to - from);
    };
    const double all = mean(0, N - 1);
    rows.push_back({{"loops", T}, {"predictions", N - 1}, {"bits_per_byte", all}, {"perplexity", std::exp2(all)}});
    for (Index from = 1; from < N; from *= 2) {  // by position of the byte predicted, in doubling ranges
      const Index to = std::min(2 * from, N);
      positions.push_back({{"loops", T}, {"from", from}, {"to", to - 1}, {"bits_per_byte", mean(from - 1, to - 1)}});
    }
  }
  if (!o.by_position) return put_rows(rows, o);
  if (!o.csv) put_rows(rows, o, {{"by_position", positions}});  // of two tables, CSV has the one that was asked for
  if (!o.csv && !o.json) put("\n");
  if (!o.json) put_rows(positions, o);
}

/// The number that a text is, decimal and nothing else, if it lies in the range.
template <class T>
std::optional<T> parse_number(std::string_view text, const Range<T>& range) {
  T v{};
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), v);
  const bool good = error == std::errc() && end == text.data() + text.size() && range.has(v);
  return good ? std::optional(v) : std::nullopt;
}

/// Token ids below V, separated by commas or white space; `where` names them in messages.
std::vector<int> read_tokens(std::string_view list, Index V, const std::string& where) {
  require_memory(6 * Exact(std::ssize(list)), where);
  std::string spaced(list);
  std::ranges::replace(spaced, ',', ' ');
  std::istringstream in(std::move(spaced));
  std::vector<int> tokens;
  for (std::string word; in >> word;) {
    const auto token = parse_number(word, Range<int>{0, static_cast<int>(V - 1)});
    if (!token) fail(where, ": expected token ids from 0 to ", V - 1, ", found ", quote(word));
    tokens.push_back(*token);
  }
  if (tokens.empty()) fail(where, ": no tokens");
  return tokens;
}

/// `yocou logits`
void logits(const Options& o) {
  std::optional<MappedFile> file;
  const std::string_view list = text_or_file("--tokens", o.tokens, o.tokens_file, file);
  Model m = load_model(o.model);
  set_loops(m.config, o.loops);
  const Index V = m.config.vocab_size;
  const std::vector<int> tokens = read_tokens(list, V, file ? o.tokens_file : "--tokens");
  const Index N = std::ssize(tokens), K = o.prefill ? o.prefill : N;
  if (K > N) throw Usage("--prefill: " + std::to_string(K) + " of " + std::to_string(N) + " tokens");
  const auto engine = make_engine(m, o, K, N);
  const int sequence = engine->open();
  const char *open = "", *between = " ", *close = "\n";  // of a row
  if (o.json) put("{\"tokens\":" + dump(tokens) + ",\"logits\":["), open = "[", between = ",", close = "]";
  const auto print = [&](Index, Index n, const float* rows) {
    std::ostringstream text;
    text << std::setprecision(9);
    for (Index i = 0; i < n; ++i) {
      for (Index v = 0; v < V; ++v) text << (v ? between : open) << rows[i * V + v];
      text << close;
      if (o.json) open = ",[";
    }
    put(text.str());
  };
  std::vector<float> row(static_cast<std::size_t>(V));
  const std::span<const int> prompt = std::span(tokens).first(static_cast<std::size_t>(K));
  if (o.last) prefill(*engine, sequence, prompt, o.chunk, row.data());
  else forward_all(*engine, m.config, sequence, prompt, o.chunk, print);
  for (Index i = K; i < N; ++i) {
    decode(*engine, {&sequence, 1}, {&tokens[static_cast<std::size_t>(i)], 1}, row.data());
    if (!o.last) print(i, 1, row.data());
  }
  if (o.last) print(N - 1, 1, row.data());
  if (o.json) put("]}\n");
}

/// One line of a task file.
struct Task {
  std::string prompt, answer;
  std::string group;  ///< JSON of the field to group by
};

/// Reads JSON lines {"prompt","answer", ...}; `by` names the field to group by. Throws Error naming file and line.
std::vector<Task> read_tasks(std::string_view text, const std::string& path, const std::string& by) {
  require_memory(4 * Exact(std::ssize(text)), path);
  std::vector<Task> tasks;
  Index number = 0;
  for (std::size_t at = 0, end; at < text.size(); at = end + 1) {
    end = std::min(text.size(), text.find('\n', at));
    const std::string_view line = text.substr(at, end - at);
    const std::string where = path + ":" + std::to_string(++number);
    if (line.find_first_not_of(" \t\r") == std::string_view::npos) continue;
    const Json json = parse_json(line, where);
    Fields f(json, where);
    Task& t = tasks.emplace_back();
    t.group = by.empty() ? "null" : dump(Fields(f).take(by));
    f.text("prompt", t.prompt);
    f.text("answer", t.answer);
    if (t.prompt.empty() || t.answer.empty()) fail(where, ": \"prompt\" and \"answer\" must not be empty");
  }
  if (tasks.empty()) fail(path, ": no tasks");
  return tasks;
}

/// Greedy completions of some tasks, prompts and decode steps batched. right[i] = 1 for an exact match.
void answer_batch(Engine& engine, const Config& c, std::span<const Task> tasks, Index chunk, char* right) {
  const std::size_t V = static_cast<std::size_t>(c.vocab_size), count = tasks.size();
  std::vector<float> logits(count * V);
  std::vector<std::vector<int>> prompts;
  std::vector<Segment> pass;
  for (const Task& t : tasks) {
    prompts.push_back(bytes_to_tokens(t.prompt, "a prompt"));
    pass.push_back({engine.open(), prompts.back(), Logits::last});
  }
  if (count == 1) prefill(engine, pass[0].sequence, prompts[0], chunk, logits.data());
  else engine.forward(pass, logits.data());
  std::vector<std::string> written(count);
  std::vector<std::size_t> open(count);  // tasks whose answers are not complete; row i of the logits is task open[i]'s
  std::iota(open.begin(), open.end(), 0);
  while (!open.empty()) {
    std::vector<int> next, who;
    std::size_t row = 0;
    std::erase_if(open, [&](std::size_t i) {
      const int token = greedy({&logits[row++ * V], V});
      if (token > 255) return true;
      written[i] += static_cast<char>(token);
      if (written[i].size() == tasks[i].answer.size()) return true;
      next.push_back(token), who.push_back(pass[i].sequence);
      return false;
    });
    if (!open.empty()) decode(engine, who, next, logits.data());
  }
  for (std::size_t i = 0; i < count; ++i) right[i] = written[i] == tasks[i].answer, engine.close(pass[i].sequence);
}

/// `yocou eval`
void eval(const Options& o) {
  Model m = load_text_model(o);
  const MappedFile file(o.file);
  const std::vector<Task> tasks = read_tasks(file.text(), o.file, o.by);
  constexpr Index together = 64;  // tasks in a batch, if their prompts fit one chunk
  Index longest = 0, prompts = 0, correct = 0;
  for (const Task& t : tasks)
    longest = std::max(longest, std::ssize(t.prompt) + std::ssize(t.answer)), prompts += std::ssize(t.prompt);
  std::vector<Json> rows;
  for (const Index given : o.loops_list) {
    const Index T = set_loops(m.config, given);
    const auto engine = make_engine(m, o, prompts, longest, std::min(together, std::ssize(tasks)));
    std::vector<char> right(tasks.size());
    Progress progress("eval", std::ssize(tasks));
    for (Index first = 0, last = 0; first < std::ssize(tasks); first = last) {
      for (Index sum = 0; last < std::ssize(tasks) && last - first < together; ++last)
        if ((sum += std::ssize(tasks[last].prompt)) > o.chunk && last > first) break;
      answer_batch(*engine, m.config, std::span(tasks).subspan(first, last - first), o.chunk, &right[first]);
      progress(last);
    }
    std::map<Json, std::pair<Index, Index>> tally;  // by group: tasks, and those answered right
    for (std::size_t i = 0; i < tasks.size(); ++i) {
      auto& [count, good] = tally[Json::parse(tasks[i].group)];
      ++count, good += right[i], correct += right[i];
    }
    for (const auto& [group, counted] : tally) {
      const auto [count, good] = counted;
      rows.push_back({{"loops", T}, {"group", group}, {"count", count}, {"correct", good},
          {"accuracy", static_cast<double>(good) / static_cast<double>(count)}});
    }
  }
  const Index total = std::ssize(tasks) * std::ssize(o.loops_list);
  put_rows(rows, o, {{"accuracy", static_cast<double>(correct) / static_cast<double>(total)}, {"count", total}});
}

/// `yocou trace`: what each application of a layer does to the state, means over the prompt's positions (Figure 8).
void trace(const Options& o) {
  const Model m = load_text_model(o);
  const Config& c = m.config;
  const std::vector<int> prompt = bytes_to_tokens(*o.prompt, "the prompt");
  struct Sums {
    Index stage, loop, layer;
    double norm = 0, angle = 0, loop_cosine = 0;
    std::vector<Index> load = {};
  };
  std::vector<Sums> applications;
  std::vector<float> before, loop_before;  // the states after the application before, and after the loop before
  std::size_t next = 0;
  const Index D = c.dim, N = std::ssize(prompt);
  const auto engine = make_engine(m, o, N, N);
  const auto dot = [D](const float* a, const float* b) { return std::inner_product(a, a + D, b, 0.0); };
  const auto cosine = [&](const float* a, const float* b) {
    const double norms = std::sqrt(dot(a, a) * dot(b, b));
    return norms > 0 ? std::clamp(dot(a, b) / norms, -1.0, 1.0) : 1.0;
  };
  const auto ends_loop = [&](const auto& a) { return a.stage >= 0 && a.layer + 1 == c.stages[a.stage].layers; };
  engine->on_layer = [&](const Application& a) {
    if (a.stage < 0) next = 0;  // a chunk begins
    if (next == applications.size()) applications.push_back({a.stage, a.loop, a.layer});
    Sums& sums = applications[next++];
    sums.load.resize(a.expert_load.size());
    std::ranges::transform(a.expert_load, sums.load, sums.load.begin(), std::plus<>());
    for (Index i = 0; i < std::ssize(a.x); i += D) {
      sums.norm += std::sqrt(dot(&a.x[i], &a.x[i]) / static_cast<double>(D));
      if (a.stage >= 0) sums.angle += std::acos(cosine(&a.x[i], &before[i])) / M_PI;
      if (a.loop > 0 && ends_loop(a)) sums.loop_cosine += cosine(&a.x[i], &loop_before[i]);
    }
    before.assign(a.x.begin(), a.x.end());
    if (ends_loop(a)) loop_before = before;
  };
  forward_all(*engine, c, engine->open(), prompt, o.chunk, [](Index, Index, const float*) {});
  std::vector<Json> rows;
  for (const Sums& a : applications) {
    const auto mean = [N](double sum, bool there) { return there ? Json(sum / static_cast<double>(N)) : Json(); };
    Json load;  // share of the tokens' choices; one cell in a table
    Names words;
    for (const Index l : a.load) {
      const double share = static_cast<double>(l) / static_cast<double>(N * c.moe->active);
      load.push_back(share), words.push_back(cell(std::round(share * 1000) / 1000));
    }
    if (!o.json && !words.empty()) load = join(words, " ");
    rows.push_back(
        {{"application", std::ssize(rows)}, {"stage", a.stage < 0 ? "embed" : c.stages[a.stage].name}, {"loop", a.loop},
            {"layer", a.layer}, {"norm", mean(a.norm, true)}, {"angular_distance", mean(a.angle, a.stage >= 0)},
            {"loop_cosine", mean(a.loop_cosine, a.loop > 0 && ends_loop(a))}, {"router_load", load}});
  }
  put_rows(rows, o);
}

/// What cost, verify and bench work on: a checkpoint's config, or a shape in one or several architectures; without
/// --arch in all that take the overrides.
std::vector<Config> configs_of(const Options& o) {
  if (!o.model.empty()) {
    Config c = load_model(o.model).config;
    set_loops(c, o.loops);
    return {c};
  }
  Names names;
  for (const Arch& a : archs())
    if (o.arch.empty() && (!o.loops || a.takes_loops()) && (!o.window || a.takes_window())) names.push_back(a.name);
  std::istringstream given(o.arch);
  for (std::string name; std::getline(given, name, ',');) names.push_back(name);
  std::vector<Config> all;
  for (const std::string& name : names) all.push_back(make_config(o.shape, name, {o.layers, o.window, o.loops}));
  return all;
}

/// The weights for one of them: the checkpoint's, or random ones.
Model model_of(const Config& c, const Options& o) {
  Model m = o.model.empty() ? random_model(c, dtype_of(o.dtype), o.seed) : load_model(o.model);
  m.config = c;
  return m;
}

inline constexpr Index N_limit = Index{1} << 40;      ///< tokens that cost answers for
inline constexpr Index batch_limit = Index{1} << 20;  ///< sequences

// [crossover]
/// The smallest N from which on a prefill of `c` costs less than one of `other`; null when that is never.
Json crossover(const Config& c, const Config& other) {
  const auto dearer = [&](Index N) { return N == 0 || prefill_flops(c, N) >= prefill_flops(other, N); };
  return dearer(N_limit) ? Json() : Json(largest(N_limit, dearer) + 1);
}
// [crossover]

/// `yocou cost`
void cost(const Options& o) {
  const Index s = o.kv_bytes, B = o.batch;
  std::optional<Config> yoco_u;  // the reference of the ratios, in the same shape
  if (o.model.empty() && o.layers % 2 == 0) yoco_u = make_config(o.shape, "yoco-u", {o.layers, o.window, o.loops});
  std::vector<Json> rows, orders;
  for (const Config& c : configs_of(o)) {
    const Params p = count_params(c);
    const Arch* arch = find_arch(c.arch);
    if (arch)
      orders.push_back({{"arch", arch->name}, {"KV cache", arch->kv_cache}, {"prefill", arch->prefill},
          {"decode, a step", arch->decode}});
    for (const Index N : o.N) {
      const Exact kv = B * cache_bytes(c, N, s), prefill = B * prefill_flops(c, N), step = B * decode_flops(c, N);
      Json row = {{"arch", c.arch}, {"N", N}, {"batch", B}, {"cache_bytes", kv.v}, {"prefill_flops", prefill.v},
          {"decode_flops", step.v}, {"params", p.params.v}, {"active_params", p.active.v}, {"embed_params", p.embed.v},
          {"head_params", p.head.v}, {"decode_bytes", decode_bytes(c, N, B, /*weight bytes=*/2, s).v}};
      if (yoco_u) {
        const auto ratio = [B](const Exact& a, const Exact& b) { return double(a) / double(B * b); };
        row["cache_ratio"] = ratio(kv, cache_bytes(*yoco_u, N, s));
        row["prefill_ratio"] = ratio(prefill, prefill_flops(*yoco_u, N));
        row["decode_ratio"] = ratio(step, decode_flops(*yoco_u, N));
        row["prefill_crossover_N"] = crossover(*yoco_u, c);
      }
      if (o.memory) {  // weights in two bytes, and the caches
        const auto fits = [&](Index b, Index n) { return 2 * p.all() + b * cache_bytes(c, n, s) <= Exact(o.memory); };
        row["max_N"] = largest(N_limit, [&](Index n) { return fits(B, n); });
        row["max_batch"] = largest(batch_limit, [&](Index b) { return fits(b, N); });
      }
      if (arch)
        row["kv_big_o"] = arch->kv_cache, row["prefill_big_o"] = arch->prefill, row["decode_big_o"] = arch->decode;
      rows.push_back(std::move(row));
    }
  }
  if (o.json || o.csv) return put_rows(rows, o);
  using Column = std::tuple<const char*, const char*, double>;  // key, title, unit
  static const std::vector<Column> columns{{"arch", "arch", 0}, {"N", "N", 0}, {"params", "params M", 1e6},
      {"active_params", "active M", 1e6}, {"cache_bytes", "KV MB", 0x1p20}, {"prefill_flops", "prefill TFLOP", 1e12},
      {"decode_flops", "decode GFLOP", 1e9}, {"decode_bytes", "decode GB", 1e9}, {"cache_ratio", "KV x", 0},
      {"prefill_ratio", "prefill x", 0}, {"decode_ratio", "decode x", 0},
      {"prefill_crossover_N", "yoco-u cheaper from", 0}, {"max_N", "max N", 0}, {"max_batch", "max batch", 0}};
  std::vector<Json> table(rows.size());
  for (std::size_t i = 0; i < rows.size(); ++i)
    for (const auto& [key, title, unit] : columns)
      if (rows[i].contains(key)) table[i][title] = unit ? Json(rows[i][key].get<double>() / unit) : rows[i][key];
  put_rows(table, o);
  put("\nKV MB = 2^20 bytes, " + std::to_string(s) + " a number; batch " + std::to_string(B) +
      "; x: relative to yoco-u\n\n");
  put_rows(orders, o);
}

/// Tokens that mean nothing, for measuring.
std::vector<int> random_tokens(const Config& c, Index n, Index seed) {
  std::mt19937_64 random(static_cast<std::uint64_t>(seed));
  std::vector<int> tokens(static_cast<std::size_t>(n));
  for (int& t : tokens) t = static_cast<int>(random() % static_cast<std::uint64_t>(c.vocab_size));
  return tokens;
}

/// One comparison of `verify`.
Json check(const char* quantity, const Config& c, Index N, const Exact& formula, Index measured) {
  return {{"quantity", quantity}, {"arch", c.arch}, {"N", N}, {"formula", formula.v}, {"measured", measured},
      {"equal", formula == Exact(measured)}};
}

/// Really runs a prefill of N tokens and `steps` decode steps and holds what the operations and the arena counted
/// against the formulas.
void verify_run(const Model& m, const Options& o, Index N, std::vector<Json>& rows) {
  const Config& c = m.config;
  const Index B = o.batch, s = size_of(dtype_of(o.kv_dtype));
  const auto engine = make_engine(m, o, N, N + o.steps, B);
  const auto flops = [&] { return static_cast<Index>(engine->counters.flops); };
  const auto add = [&](const char* quantity, Index n, const Exact& formula, Index measured) {
    rows.push_back(check(quantity, c, n, B * formula, measured));
  };
  std::vector<int> sequences;
  std::vector<float> logits(static_cast<std::size_t>(B * c.vocab_size));
  Exact cross = 0, global = 0, rings = 0;  // rows through the cross-decoder, rows of K^, V^ a token, bytes of the rings
  for (const Stage& g : c.stages) {
    if (g.attention == Attention::window) rings += Exact(g.layers) * g.loops * g.window * 2 * c.kv_dim() * s;
    if (g.attention != Attention::shared) continue;
    cross = g.refresh_kv ? Exact(g.loops - 1) * N + 1 : Exact(g.loops);
    global = g.refresh_kv ? g.loops : 1;
  }
  for (Index b = 0; b < B; ++b) sequences.push_back(engine->open());
  add("ring_bytes", 0, rings, engine->cache_bytes());  // an empty sequence holds its rings, whole, and no block
  for (Index b = 0; b < B; ++b) prefill(*engine, sequences[b], random_tokens(c, N, b), o.chunk, logits.data());
  add("cache_bytes_prefill", N, cache_bytes(c, N, s), engine->cache_bytes());
  add("prefill_flops", N, prefill_flops(c, N), flops());
  add("cross_positions", N, cross, static_cast<Index>(engine->counters.cross_positions));
  add("global_rows", N, global * N, engine->global_rows());
  for (Index k = 0; k < o.steps; ++k) {
    const Index before = flops();
    decode(*engine, sequences, random_tokens(c, B, k), logits.data());
    add("decode_flops", N + k, decode_flops(c, N + k), flops() - before);
  }
  add("cache_bytes_decode", N + o.steps, cache_bytes(c, N + o.steps, s), engine->cache_bytes());
  add("global_rows", N + o.steps, global * (N + o.steps), engine->global_rows());
}

/// Allocates the caches of N tokens, touched, without weights or tokens. A cell that does not fit is a row that says so.
Json verify_allocation(const Config& c, const Options& o, Index N) {
  const Dtype dtype = dtype_of(o.kv_dtype);
  const Exact formula = o.batch * cache_bytes(c, N, size_of(dtype));
  malloc_trim(0);  // what earlier cells have freed goes back to the system, so that the growth is this cell's
  const Index available = available_memory(), before = resident_memory();
  const bool fits = formula <= Exact(available);
  Arena arena;
  std::vector<Cache> caches;
  for (Index b = 0; fits && b < o.batch; ++b)
    for (const Plan::Entry& e : Plan(c).caches) caches.emplace_back(arena, c, dtype, e.window).grow(N);
  Json row = check("cache_bytes_prefill", c, N, formula, arena.live(Use::cache));
  if (!fits) row["measured"] = row["equal"] = nullptr;
  row["note"] = fits ? "resident memory grew by " + std::to_string(resident_memory() - before)
                     : "does not fit: " + std::to_string(available) + " bytes are available";
  return row;
}

/// `yocou verify`
void verify(const Options& o) {
  const std::vector<Config> configs = configs_of(o);
  std::vector<Json> rows;
  Progress progress("verify", std::ssize(configs) * std::ssize(o.N));
  Index done = 0;
  for (const Config& c : configs) {
    std::optional<Model> m;
    if (!o.allocate_only) {
      m = model_of(c, o);
      Index stored = 0;
      for_each_tensor(c, m->weights, [&](const std::string& name, const Shape&, const Tensor& t) {
        if (name != "embed" && name != "head") stored += t.rows * t.cols;
      });
      rows.push_back(check("params", c, 0, count_params(c).params, stored));
    }
    for (const Index N : o.N) {
      if (m) verify_run(*m, o, N, rows);
      else rows.push_back(verify_allocation(c, o, N));
      progress(++done);
    }
  }
  const auto having = [&](const Json& equal) {
    return std::ranges::count_if(rows, [&](const Json& row) { return row["equal"] == equal; });
  };
  const auto unequal = having(false);
  put_rows(rows, o, {{"resident_bytes", resident_memory()}});
  if (!o.json && !o.csv)
    put("\n" + std::to_string(rows.size()) + " comparisons, " + std::to_string(unequal) + " differ, " +
        std::to_string(having(nullptr)) + " did not fit; the process holds " + std::to_string(resident_memory()) +
        " bytes in memory now: caches, weights and buffers, the program and its libraries, and freed memory\n");
  for (const Json& row : rows)
    if (row["equal"] == false)
      fail("verify: ", unequal, " rows differ, the first ", cell(row["quantity"]), " of ", cell(row["arch"]),
          " at N = ", cell(row["N"]), ": formula ", cell(row["formula"]), ", measured ", cell(row["measured"]));
}

/// The runs of one phase of a cell of `bench`: prefill, or decode.
struct Phase {
  const char* name;
  Index tokens;  ///< of one run
  std::vector<double> seconds = {};
  Counters work = {};  ///< of the last run

  template <class Run>
  void time(const Engine& engine, Run&& run) {
    const Counters before = engine.counters;
    const auto start = Clock::now();
    run();
    seconds.push_back(seconds_since(start));
    work = engine.counters - before;
  }
};

/// One cell of `bench`: `runs` times a prefill of the batch and decode steps, after which rows says how fast they were.
/// Calls prefilled(tokens) behind every chunk.
void bench_run(const Model& m, const Options& o, Index N, const Limits& limits, std::vector<Json>& rows,
    const std::function<void(Index)>& prefilled) {
  const Config& c = m.config;
  const Index B = o.batch;
  const auto engine = make_engine(m, o, N, N + o.steps + 1, B);
  std::vector<float> logits(static_cast<std::size_t>(B * c.vocab_size));
  Index kv = 0;
  Phase prefills{"prefill", B * N}, decodes{"decode", B * o.steps};
  std::vector<int> sequences;
  const auto step = [&](Index k) { decode(*engine, sequences, random_tokens(c, B, k), logits.data()); };
  try {
    for (Index i = 0; i < o.runs; ++i) {
      prefills.time(*engine, [&] {
        for (Index b = 0; b < B; ++b) {
          sequences.push_back(engine->open());
          prefill(*engine, sequences.back(), random_tokens(c, N, b), o.chunk, logits.data(),
              [&, before = Index{0}](Index done) mutable { prefilled(done - std::exchange(before, done)); });
        }
      });
      kv = engine->cache_bytes();
      step(1);  // warm
      decodes.time(*engine, [&] {
        for (Index k = 0; k < o.steps; ++k) step(k);
      });
      for (const int sequence : sequences) engine->close(sequence);
      sequences.clear();
    }
  } catch (const Interrupted&) {  // the runs that ended still count
  }
  for (Phase* p : {&prefills, &decodes}) {
    std::vector<double>& t = p->seconds;
    if (t.empty()) continue;
    std::ranges::sort(t);
    const double median = (t[t.size() / 2] + t[(t.size() - 1) / 2]) / 2;
    const double gflops = 1e-9 * static_cast<double>(p->work.flops) / median, of_gemm = gflops / limits.gemm_gflops;
    const double gbs = 1e-9 * static_cast<double>(p->work.bytes) / median, of_read = gbs / limits.read_gbs;
    rows.push_back({{"arch", c.arch}, {"N", N}, {"batch", B}, {"phase", p->name},
        {"tok_s", static_cast<double>(p->tokens) / median}, {"spread", (t.back() - t.front()) / median},
        {"gflop_s", gflops}, {"gb_s", gbs}, {"attainment", std::max(of_gemm, of_read)}, {"of_gemm", of_gemm},
        {"of_read", of_read}, {"kv_bytes", kv}});
  }
}

/// `yocou bench`
void bench(const Options& o) {
  const std::vector<Config> configs = configs_of(o);
  if (o.threads) omp_set_num_threads(static_cast<int>(o.threads));
  const Limits limits = measure_limits();
  std::vector<Json> rows;
  const Index cells = std::accumulate(o.N.begin(), o.N.end(), Index{0}) * std::ssize(configs);
  Progress progress("bench", cells * o.runs * o.batch);
  Index done = 0;
  for (const Config& c : configs) {
    if (interrupted) break;
    const Model m = model_of(c, o);
    for (const Index N : o.N)
      if (!interrupted) bench_run(m, o, N, limits, rows, [&](Index tokens) { progress(done += tokens); });
  }
  const std::string cpu = line_of("/proc/cpuinfo", "model name\t: ");
  const Json machine = {{"cpu", cpu.empty() ? "unknown" : cpu}, {"threads", omp_get_max_threads()},
      {"build", build_name()}, {"version", version}, {"device", o.device},
      {"weights", o.model.empty() ? o.dtype : "as stored"}, {"kv_dtype", o.kv_dtype}, {"chunk", o.chunk},
      {"gemm_gflop_s", limits.gemm_gflops}, {"read_gb_s", limits.read_gbs}};
  if (!o.json) put("# " + dump(machine) + "\n");
  put_rows(rows, o, {{"machine", machine}});
  stop_if_interrupted();
}

/// `yocou init`
void init(const Options& o) {
  const Config c = make_config(o.shape, o.arch, {o.layers, o.window, o.loops});
  write_random_checkpoint(c, dtype_of(o.dtype), o.seed, o.out);
}

/// `yocou show`
void show(const Options& o) {
  const Model m = load_model(o.model);
  const Json config = config_json(m.config);
  std::vector<Json> tensors;
  for (const StoredTensor& t : m.tensors)
    tensors.push_back({{"name", t.name}, {"dtype", name_of(t.dtype)}, {"shape", t.shape}, {"bytes", t.end - t.begin}});
  if (o.json) return put(dump({{"config", config}, {"tensors", tensors}}) + "\n");
  put(config.dump(2) + "\n\n");
  put_rows(tensors, o);
  const Params p = count_params(m.config);
  put("\n" + std::to_string(tensors.size()) + " tensors, " + std::to_string(m.tensors.back().end) +
      " bytes; parameters " + to_string(p.params) + " (active " + to_string(p.active) + "), embedding " +
      to_string(p.embed) + ", head " + to_string(p.head) + "\n");
}

/// A command: what it is called, says and does. Its options hold its own defaults until the command line is read.
struct Command {
  std::string name, help, example;
  void (*run)(const Options&);
  Options options = {};
};

std::vector<Command> all_commands() {
  const std::string austen = "data/austen.safetensors ", cups = "data/cups-random.safetensors ";
  return {
      {"generate", "Continue a text, streaming it", austen + "-p \"It was\" -n 200 --temperature 0.8", generate},
      {"score", "Bits per byte and perplexity", austen + "data/austen-heldout.txt --loops 1,2,3", score},
      {"eval", "Accuracy of greedy completions", cups + "data/cups.jsonl --by moves --loops 1,3", eval},
      {"logits", "Logits of given tokens, every position", austen + "--tokens 72,101,108 --json", logits},
      {"trace", "What each layer application does to the state", austen + "-p \"It was a dark night\"", trace},
      {"cost", "Parameters, cache bytes and FLOPs by formula", "--arch yoco-u,transformer -N 16384,262144", cost,
          {.shape = "1.3b", .N = {16384, 65536, 262144}}},
      {"verify", "Allocate and run, and compare with the formulas", "--shape tiny -N 1,64,257 --batch 2", verify,
          {.shape = "tiny", .N = {1, 63, 64, 65, 255, 256, 257, 300}}},
      {"bench", "Speed, beside the machine's measured limits", "--arch yoco-u,transformer -N 1024,4096", bench,
          {.shape = "small", .arch = "yoco-u", .N = {1024, 4096, 16384}}},
      {"init", "Write a checkpoint of random weights", "--shape tiny -o tiny.safetensors", init, {.arch = "yoco-u"}},
      {"show", "Config, tensors, shapes, dtypes, sizes", austen, show},
  };
}

/// "80GB", "24GiB", "512MB", or bytes, as bytes. MB and GB are 2^20 and 2^30 bytes, as in the paper's tables.
std::string memory_size(std::string& text) {
  static const std::map<std::string, double> units{
      {"", 1}, {"B", 1}, {"MB", 0x1p20}, {"MiB", 0x1p20}, {"GB", 0x1p30}, {"GiB", 0x1p30}};
  const std::size_t digits = text.find_last_of("0123456789") + 1;
  const auto number = parse_number(std::string_view(text).substr(0, digits), Range<double>{0, 0x1p60});
  const auto unit = units.find(text.substr(digits));
  const double bytes = number && unit != units.end() ? *number * unit->second : 0;
  if (!(bytes >= 1 && bytes <= 0x1p60)) return "expected a size like 80GB, found '" + text + "'";
  text = std::to_string(static_cast<Index>(bytes));
  return "";
}

/// Declares the command line: an option's name, range and help, and the commands that take it, live here alone.
void declare(CLI::App& app, std::vector<Command>& commands) {
  for (const Command& c : commands)
    app.add_subcommand(c.name, c.help)->footer("Example: yocou " + c.name + " " + c.example);
  const auto each = [&](const std::string& takers, auto&& use) {  // use(subcommand, options) for each that is named
    for (Command& c : commands)
      if (takers.find(c.name) != std::string::npos) use(*app.get_subcommand(c.name), c.options);
  };
  const auto require = [&](const std::string& takers, const char* name) {
    each(takers, [&](CLI::App& c, Options&) { c.get_option(name)->required(); });
  };
  const auto flag = [&](const std::string& takers, const char* name, bool Options::*to, const char* help) {
    each(takers, [&](CLI::App& c, Options& o) { c.add_flag(name, o.*to, help); });
  };
  const auto text = [&](const std::string& takers, const char* name, auto Options::*to, const std::string& help,
                        const CLI::Validator& check = {}) {
    each(
        takers, [&](CLI::App& c, Options& o) { c.add_option(name, o.*to, help)->capture_default_str()->check(check); });
  };
  // One number, or several with commas where T is a list. CLI11 alone would read 010 as 8 and cut off 2^64.
  const auto number = [&](const std::string& takers, const std::string& name, auto Options::*to, const auto& range,
                          const char* help) {
    using N = std::remove_cv_t<decltype(range.low)>;
    constexpr bool list = !std::is_same_v<std::decay_t<decltype(std::declval<Options>().*to)>, N>;
    each(takers, [&](CLI::App& c, Options& o) {
      const CLI::callback_t read = [=, &value = o.*to](const CLI::results_t& given) {
        std::vector<N> all;
        std::istringstream pieces(given[0] + ",");
        for (std::string piece; std::getline(pieces, piece, ',');)
          if (const auto v = parse_number(piece, range); v && (list || all.empty())) all.push_back(*v);
          else
            throw CLI::ValidationError(
                name, "'" + given[0] + "' is not " + range.text() + (list ? ", or several: 1,2,3" : ""));
        if constexpr (list) value = all;
        else value = all[0];
        return true;
      };
      std::string shown = dump(o.*to);
      if (list) shown = shown.substr(1, shown.size() - 2);
      auto* option = c.add_option(name, read, help)->type_name(std::is_integral_v<N> ? "INT" : "FLOAT");
      if (shown != "0") option->default_str(shown);
    });
  };
  const CLI::Validator filled([](std::string& s) { return std::string(s.empty() ? "must not be empty" : ""); }, "");
  const CLI::IsMember shapes({"1.3b", "10b-moe", "small", "tiny"}), devices({"cpu", "cuda"});
  const CLI::IsMember kv_dtypes({"f32", "bf16"}), dtypes({"f32", "bf16", "f16"});
  const Range<Index> from_0{0, sizes.high}, Ns{1, N_limit}, batches{1, batch_limit}, many{1, 1'000'000};
  const Range<double> temperatures{0, 1e38}, shares{above_0, 1};
  const Range<std::uint64_t> seeds{0, std::numeric_limits<std::uint64_t>::max()};
  const std::string running = "generate score eval logits trace verify bench", random = "verify bench init",
                    shaped = "cost " + random, costed = "cost verify bench", rows = "score eval trace " + costed;
  Names names;
  for (const Arch& a : archs()) names.push_back(a.name);

  text(rows + " generate logits show", "MODEL", &Options::model, "a checkpoint (.safetensors)");
  text("score", "FILE", &Options::file, "text, any bytes");
  text("eval", "TASKS", &Options::file, "JSON lines {\"prompt\",\"answer\", ...}");
  text("eval", "--by", &Options::by, "field to group by", filled);
  text("generate trace", "-p,--prompt", &Options::prompt, "a text");
  text("generate", "--prompt-file", &Options::prompt_file, "a file, any bytes, in place of a text");
  number("generate", "-n,--tokens", &Options::n, from_0, "tokens to add");
  number("generate", "--temperature", &Options::temperature, temperatures, "0, the default: the likeliest token");
  number("generate", "--top-k", &Options::top_k, from_0, "draw from the k likeliest; 0, the default: from all");
  number("generate", "--top-p", &Options::top_p, shares, "draw from the smallest set of this probability");
  text("logits", "--tokens", &Options::tokens, "token ids: 1,2,3");
  text("logits", "--tokens-file", &Options::tokens_file, "a file of token ids, separated by commas or white space");
  number("logits", "--prefill", &Options::prefill, sizes, "tokens run as prefill, the rest one by one (default all)");
  flag("logits", "--last", &Options::last, "the last position only, prefilled with the early stop");
  text(shaped, "--shape", &Options::shape, "D, L, H and so on", shapes);
  text(shaped, "--arch", &Options::arch, "one or several (init: one; cost, verify: default all): " + join(names, ","),
      filled);
  number(shaped, "--layers", &Options::layers, counts, "L, in place of the shape's");
  number(shaped, "--window", &Options::window, sizes, "W, in place of the shape's");
  number(shaped + " generate logits trace", "--loops", &Options::loops, counts, "T of the looped stage");
  number("score eval", "--loops", &Options::loops_list, counts, "T of the looped stage, one or several: 1,2,3");
  number(costed, "-N", &Options::N, Ns, "tokens, one or several");
  number(costed, "--batch", &Options::batch, batches, "sequences");
  number("cost", "--kv-bytes", &Options::kv_bytes, Range<Index>{1, 8}, "bytes of a cached number");
  each("cost", [](CLI::App& c, Options& o) {
    c.add_option("--memory", o.memory, "a budget like 80GB: the largest N and batch that fit beside 2-byte weights")
        ->transform(CLI::Validator(memory_size, ""));
  });
  number("verify bench", "--steps", &Options::steps, many, "decode steps after each prefill");
  number("bench", "--runs", &Options::runs, Range<Index>{1, 1000}, "runs, of which the median counts");
  flag("verify", "--allocate-only", &Options::allocate_only, "allocate the caches of N tokens, run nothing");
  text(running, "--device", &Options::device, "where it runs", devices);
  number(running, "--chunk", &Options::chunk, sizes, "tokens a prefill pass (default 512, on cuda 8192)");
  number(running, "--threads", &Options::threads, Range<Index>{0, 1024}, "0, the default: as many as there are");
  text(running, "--kv-dtype", &Options::kv_dtype, "type of cached numbers (default f32, on cuda bf16)", kv_dtypes);
  text(random, "--dtype", &Options::dtype, "of the random weights", dtypes);
  number(random + " generate", "--seed", &Options::seed, seeds, "of what is random (default 0)");
  text("init", "-o,--output", &Options::out, "file to write", filled);
  flag("score", "--by-position", &Options::by_position, "also by position, in doubling ranges; as CSV only so");
  flag(rows + " generate logits show", "--json", &Options::json, "JSON on stdout");
  flag(rows, "--csv", &Options::csv, "CSV on stdout");

  require("generate score eval logits trace show", "MODEL");
  require("score", "FILE"), require("eval", "TASKS"), require("trace", "--prompt");
  require("init", "--shape"), require("init", "--output");
  each(rows, [](CLI::App& c, Options&) { c.get_option("--csv")->excludes(c.get_option("--json")); });
  each(costed, [](CLI::App& c, Options&) {
    for (const char* shape : {"--shape", "--arch", "--layers", "--window"})
      c.get_option("MODEL")->excludes(c.get_option(shape));
  });
}

/// The program: 0 done, 1 bad input or failed check, 2 usage, 130 interrupted. One line on stderr when it is not 0.
int run(std::vector<std::string> arguments) {
  const auto complain = [](const std::string& what, int status) {
    std::cerr << "yocou: " << cell(valid(what.substr(0, 500))) << (what.size() > 500 ? "..." : "") << std::endl;
    return status;
  };
  CLI::App app("Universal YOCO: the full forward pass, its caches and its costs", "yocou");
  try {
    std::vector<Command> commands = all_commands();
    declare(app, commands);
    app.require_subcommand(0, 1);
    app.set_version_flag("--version", std::string("yocou ") + version + " (" + build_name() + ")");
    const auto empty = std::ranges::find(arguments, "--prompt=");  // CLI11 takes it for a missing value
    if (empty != arguments.end()) *empty = "", arguments.insert(empty, "--prompt");
    std::ranges::reverse(arguments);
    app.parse(arguments);
    for (auto& [name, help, example, run, o] : commands) {
      if (!app.got_subcommand(name)) continue;
      if (!o.chunk) o.chunk = o.device == "cuda" ? 8192 : 512;
      if (o.kv_dtype.empty()) o.kv_dtype = o.device == "cuda" ? "bf16" : "f32";
      run(o);
      return 0;
    }
    throw Usage("no command is given, see yocou --help");
  } catch (const CLI::ParseError& e) {
    if (e.get_exit_code() != 0) return complain(e.what(), 2);
    app.exit(e);  // --help, --version
    return std::cout.flush() ? 0 : complain("standard output cannot be written", 1);
  } catch (const Usage& e) {
    return complain(e.what(), 2);
  } catch (const Interrupted&) {
    return 130;
  } catch (const std::bad_alloc&) {
    return complain("out of memory", 1);
  } catch (const std::exception& e) {
    return complain(e.what(), 1);
  }
}

}  // namespace yocou

#ifndef YOCOU_NO_MAIN
/// Runs before anything that was compiled for x86-64-v3.
__attribute__((constructor(101), target("arch=x86-64"))) static void check_processor() {
  __builtin_cpu_init();
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("bmi2")) return;
  static const char line[] = "yocou: this processor lacks AVX2, FMA or BMI2; yocou needs x86-64-v3\n";
  [[maybe_unused]] const auto written = write(STDERR_FILENO, line, sizeof line - 1);
  _exit(1);
}

int main(int argc, char** argv) {
  struct sigaction action {};
  action.sa_handler = [](int) { yocou::interrupted = 1; };
  action.sa_flags = static_cast<int>(SA_RESETHAND);  // a second Ctrl-C ends the program at once
  sigaction(SIGINT, &action, nullptr);
  action.sa_handler = [](int) {  // a mapped file was cut short under us
    static const char line[] = "yocou: a file that is being read was truncated\n";
    [[maybe_unused]] const auto written = write(STDERR_FILENO, line, sizeof line - 1);
    _exit(1);
  };
  sigaction(SIGBUS, &action, nullptr);
  return yocou::run({argv + 1, argv + argc});
}
#endif
