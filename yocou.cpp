/// @file
/// yocou.cpp -- Universal YOCO (arXiv 2604.01220) on the CPU, whole: a RoPE sliding-window self-decoder applied T times
/// with the same weights, one global cache K^, V^ written once, a NoPE cross-decoder that reads it, dense or
/// mixture-of-experts FFN. An architecture is a list of stages (yocou.h), so Transformer, YOCO, Universal Transformer,
/// RINS and the paper's ablations run through the same lines. It reads top to bottom:
///
///   1 numbers   2 products   3 caches   4 attention   5 layer parts   6 the model   7 prefill, decode   8 accounting
///
/// Architectures, configs and files are in checkpoint.cpp, the commands in main.cpp.
///
/// One promise shapes parts 2 to 5: a row's result is a function of that row alone. Every sum runs in an order fixed by
/// positions and widths, never by chunk, batch or thread, so whole-prompt, chunked, token-by-token and batched runs,
/// on any number of threads, give the same logits to the bit.
#include "yocou.h"

#ifdef _OPENMP
#include <omp.h>
#endif
#ifdef __F16C__
// Half precision in hardware, which Eigen 3.4 overlooks under GCC.
#define EIGEN_HAS_FP16_C
#endif

#include <Eigen/Core>
#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>

namespace yocou {

// =====================================================================================================================
// 1. Numbers: three storage types, float32 arithmetic, eight at a time

#ifdef _OPENMP
int thread_count() { return omp_get_max_threads(); }
int thread_number() { return omp_get_thread_num(); }
void set_thread_count(Index threads) { omp_set_num_threads(static_cast<int>(threads)); }
inline int this_thread() { return omp_get_thread_num(); }
#else  // one thread, and the pragmas mean nothing
int thread_count() { return 1; }
void set_thread_count(Index) {}
inline int this_thread() { return 0; }
#endif

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

void narrow(const float* from, Index count, Dtype type, void* to) {
  with_type(type, [&](auto num) {
    for (Index i = 0; i < count; ++i) store(from[i], static_cast<decltype(num)*>(to) + i);
  });
}

void widen(const Tensor& from, Index first, Index count, float* to) {
  with_type(from.dtype, [&](auto num) {
    for (Index i = 0; i < count; ++i) to[i] = to_float(static_cast<const decltype(num)*>(from.data)[first + i]);
  });
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

/// A register of `width` float32 numbers, as GCC and Clang spell it. Eigen fixes the width of its own when it is compiled;
/// the two loops that do nearly all the work, product_tile() and mix_tile(), take the processor's, found at start.
template <int width>
struct Register {
  using type __attribute__((vector_size(4 * width))) = float;
  using in_memory __attribute__((vector_size(4 * width), aligned(4), may_alias)) = float;
};

#ifdef __AVX__
inline constexpr int base_width = 8;
#else
inline constexpr int base_width = 4;
#endif
#if defined __x86_64__ && defined __gnu_linux__ && !defined __clang__
/// A function of which there are two: GCC translates it for AVX-512, too, and the loader picks.
#define YOCOU_EACH_PROCESSOR __attribute__((target_clones("arch=x86-64-v4", "default")))
inline const bool wide = __builtin_cpu_supports("x86-64-v4");
#else
/// The same where there is nothing to pick from: one.
#define YOCOU_EACH_PROCESSOR
inline constexpr bool wide = false;
#endif

std::string_view simd_name() {
#if defined __AVX__
  return wide ? "AVX-512" : "AVX2";
#elif defined __ARM_NEON
  return "NEON";
#elif defined __wasm_simd128__
  return "SIMD128";
#else
  return "scalar";
#endif
}

/// Calls f(width) with the numbers that a register of this processor holds: 4, 8 or 16.
template <class F>
inline void with_width(F&& f) {
  if (wide) f(std::integral_constant<int, 16>{});
  else f(std::integral_constant<int, base_width>{});
}

/// A tile of a product: up to `most_rows` rows of x by `columns` rows of w, as many sums as the registers hold.
template <int width>
inline constexpr int most_rows = width == 16 ? 4 : 3;
template <int width>
inline constexpr int columns = width == 16 ? 8 : 4;

/// Cuts n rows into tiles of `most`, two or one: calls f(rows, first). Four are two and two: one row alone would wait for
/// each of its sums.
template <int most, class F>
inline void for_tiles(Index n, F&& f) {
  Index i = 0;
  for (; n - i == most || n - i > 4; i += most) f(std::integral_constant<int, most>{}, i);
  for (; n - i >= 2; i += 2) f(std::integral_constant<int, 2>{}, i);
  if (i < n) f(std::integral_constant<int, 1>{}, i);
}

/// total [rows,columns] = x [rows,K] w^T, K a multiple of 8. Each of the sums is made in eight lanes, lane l of the
/// numbers k = l mod 8, whatever the width: a register of 16 holds the lanes of two columns, one of 4 half a column's.
/// w is a panel, which has for every eight k the eight numbers of each column one behind the other; or, `in_place`, it is
/// [columns,K] as stored. 2 rows columns FMA for rows + columns loads. `ahead`: rows of x (in place: of w) that are needed
/// next and are asked for now, since x streams from L2 and w from memory.
template <int rows, int width, bool in_place, class Num>
YOCOU_EACH_PROCESSOR void product_tile(
    const float* x, Index ldx, const Num* w, Index ldw, Index K, const void* ahead, float* total) {
  using V = typename Register<width>::type;
  using InMemory = typename Register<width>::in_memory;
  constexpr int m = columns<width>, registers = 8 * m / width, parts = width < 8 ? 8 / width : 1;
  V sum[rows][registers];
  for (int r = 0; r < rows; ++r)
    for (int j = 0; j < registers; ++j) sum[r][j] = V{};
  for (Index k = 0; k < K; k += 8) {
    V xs[rows][parts];
    for (int r = 0; r < rows; ++r)
      for (int i = 0; i < parts; ++i) {
        const float* from = x + r * ldx + k + i * width;
        if constexpr (width == 16) {
          const Register<8>::type eight = *reinterpret_cast<const Register<8>::in_memory*>(from);
          xs[r][i] = __builtin_shufflevector(eight, eight, 0, 1, 2, 3, 4, 5, 6, 7, 0, 1, 2, 3, 4, 5, 6, 7);
        } else {
          xs[r][i] = *reinterpret_cast<const InMemory*>(from);
        }
      }
    for (int j = 0; j < registers; ++j) {
      V ws;
      if constexpr (!in_place) ws = *reinterpret_cast<const InMemory*>(w + k * m + j * width);
      else
        for (int l = 0; l < width; ++l) ws[l] = to_float(w[j * width / 8 * ldw + k + j * width % 8 + l]);
      for (int r = 0; r < rows; ++r) sum[r][j] += xs[r][j % parts] * ws;
    }
    if constexpr (in_place)
      for (int c = 0; c < m; ++c) __builtin_prefetch(static_cast<const Num*>(ahead) + c * ldw + k, 0, 2);
    else
      for (int r = 0; r < rows; ++r) __builtin_prefetch(static_cast<const float*>(ahead) + r * ldx + k, 0, 3);
  }
  for (int r = 0; r < rows; ++r) {
    float lanes[8 * m];
    for (int j = 0; j < registers; ++j) *reinterpret_cast<InMemory*>(lanes + j * width) = sum[r][j];
    for (int c = 0; c < m; c += 4) {  // eight lanes to four, and those of four columns to one each
      Register<4>::type a[4];
      for (int i = 0; i < 4; ++i) {
        const Register<4>::in_memory* half = reinterpret_cast<const Register<4>::in_memory*>(lanes + 8 * (c + i));
        a[i] = half[0] + half[1];
      }
      const auto pairs = [](const Register<4>::type& p, const Register<4>::type& q) {
        return __builtin_shufflevector(p, q, 0, 2, 4, 6) + __builtin_shufflevector(p, q, 1, 3, 5, 7);
      };
      *reinterpret_cast<Register<4>::in_memory*>(total + r * m + c) = pairs(pairs(a[0], a[1]), pairs(a[2], a[3]));
    }
  }
}

/// y [rows,cols] = or += total [rows,m].
template <int m>
inline void put_totals(const float* total, int rows, Index cols, float* y, Index ldy, bool add) {
  for (int r = 0; r < rows; ++r, y += ldy, total += m)
    if (cols == m)
      for (int c = 0; c < m; ++c) y[c] = add ? y[c] + total[c] : total[c];
    else
      for (Index c = 0; c < cols; ++c) y[c] = add ? y[c] + total[c] : total[c];
}

/// y [n,m] (+)= x [n,K] w [m,K]^T on the calling thread. Many rows of x meet a panel: some rows of w in float32, in L1.
/// Few rows read w where it is, for widening would cost as much as the product; both give the same bits.
///   measured beside Eigen's SGEMM on the same sizes: docs/performance.md
template <int width, class Num>
void product_block(
    const float* x, Index ldx, Index n, const Num* w, Index ldw, Index m, Index K, float* y, Index ldy, bool add) {
  Index done = 0;  // columns
  if (n <= 6 && K % 8 == 0)
    for (constexpr int some = columns<base_width>; done + some <= m; done += some)
      for (Index k0 = 0; k0 < K; k0 += depth) {
        const Num* from = w + done * ldw + k0;
        const Num* ahead = w + std::min(done + some, m - some) * ldw + k0;
        for_tiles<most_rows<base_width>>(n, [&](auto rows, Index i) {
          float total[rows() * some];
          product_tile<rows(), base_width, /*in_place=*/true>(
              x + i * ldx + k0, ldx, from, ldw, std::min(depth, K - k0), ahead, total);
          put_totals<some>(total, rows(), some, y + i * ldy + done, ldy, add || k0 > 0);
        });
      }
  if (done == m) return;

  constexpr int some = columns<width>;
  alignas(64) float panel[some * depth];
  for (Index k0 = 0; k0 < K; k0 += depth) {  // x's block of K stays in L2
    const Index count = std::min(depth, K - k0), whole = count / 8 * 8, padded = (count + 7) / 8 * 8;
    for (Index c = done; c < m; c += some) {
      for (Index j = 0; j < some; ++j) {
        const Num* from = w + std::min(c + j, m - 1) * ldw + k0;
        const Num* ahead = w + std::min(c + j + some, m - 1) * ldw + k0;
        for (Index k = 0; k < whole; k += 8) {
          Lanes::Map(panel + k * some + 8 * j) = load8(from + k);
          __builtin_prefetch(ahead + k, 0, 2);  // while these are at work
        }
        if (whole < count) Lanes::Map(panel + whole * some + 8 * j) = load_tail(from + whole, count - whole);
      }
      for_tiles<most_rows<width>>(n, [&](auto rows, Index i) {
        const float *xs = x + i * ldx + k0, *ahead = x + (i + 2 * rows() <= n ? i + rows() : 0) * ldx + k0;
        Index ld = ldx;
        float zeros_behind[rows()][depth], total[rows() * some];
        if (whole < count) {
          for (int r = 0; r < rows(); ++r)
            std::fill(std::copy_n(xs + r * ldx, count, zeros_behind[r]), zeros_behind[r] + padded, 0.f);
          xs = ahead = zeros_behind[0];
          ld = depth;
        }
        product_tile<rows(), width, /*in_place=*/false>(xs, ld, panel, 0, count, ahead, total);
        put_totals<some>(total, rows(), std::min<Index>(some, m - c), y + i * ldy + c, ldy, add || k0 > 0);
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
enum class Use : std::uint8_t { cache, activation };

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
  std::array<Index, 2> live_{};
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

/// One sequence: how many tokens it holds, and its caches in the order of Plan::kept, stream after stream.
struct Sequence {
  Index length = 0;
  std::vector<Cache> caches;
  std::vector<Index> loops_run;  ///< of each position, where rows may halt
};

/// One stream of one sequence in the pass that is running: positions p0 .. p0+count-1, rows begin .. begin+count-1 of
/// the pass. Those that have not halted are rows first .. first+n-1 of X: all of them, as a rule.
struct Slice {
  Sequence* sequence;
  Index first, n, p0;
  Logits want;
  Index stream;             ///< 0 .. P-1
  std::span<Cache> caches;  ///< of the stream
  Index begin, count;
};

// =====================================================================================================================
// 4. Attention: one definition for window, full and shared, for a chunk and for a single new token

inline constexpr Index key_tile = 64;  ///< keys per step of the online softmax, at multiples of 64; part of the result

// [keys]
/// What attention reads: the learned keys of the slice's stream, the cache up to the pass's first position, and from
/// there on the pass's own fresh rows. A window stage must keep them apart, for in a ring the chunk's last rows
/// overwrite what its first queries still see; full and shared stages append first and read everything from the cache.
struct KvView {
  Index cache;                       ///< which of the slice's caches
  Index reach;                       ///< W; or more than any position: all
  const float *K, *V;                ///< [n,G dh], fresh, a row for each of the pass; null when everything is cached
  const float *prefix_K, *prefix_V;  ///< [P m,G dh], the first keys of each stream: no position, seen by every query
  const Index* row;                  ///< [n] which row of the pass a query is
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

/// Finds keys begin .. end-1 of KV head g, which count from the first of the prefix: learned rows, runs of the cache,
/// then the fresh rows.
void collect_runs(
    const Config& c, const Slice& slice, const KvView& kv, Index g, Index begin, Index end, std::vector<Run>& runs) {
  const Cache& cache = slice.caches[kv.cache];
  const Index m = c.streams.prefix, cached = m + (kv.K ? slice.p0 : slice.p0 + slice.count);
  const auto row = [&](Index i) { return (i * c.kv_heads + g) * c.head_dim; };
  runs.clear();
  for (Index j = begin; j < end; j += runs.back().count)
    if (j < m) {
      const Index first = row(slice.stream * m + j);
      runs.push_back({kv.prefix_K + first, kv.prefix_V + first, std::min(end, m) - j, c.kv_dim(), Dtype::f32});
    } else if (j < cached) {
      runs.push_back(cache.run(g, j - m, std::min(end, cached) - m));
    } else {
      const Index first = row(slice.begin + j - m - slice.p0);
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
YOCOU_EACH_PROCESSOR void mix_tile(
    const float* P, const float* values, Index stride, Index count, float* O, Index ldo, Index dh) {
  using V = typename Register<width>::type;
  using InMemory = typename Register<width>::in_memory;
  constexpr int registers = columns<width> * 8 / width;
  Index d = 0;
  for (; d + registers * width <= dh; d += registers * width) {
    V sum[rows][registers];
    for (int r = 0; r < rows; ++r)
      for (int i = 0; i < registers; ++i) sum[r][i] = *reinterpret_cast<const InMemory*>(O + r * ldo + d + i * width);
    for (Index j = 0; j < count; ++j)
      for (int i = 0; i < registers; ++i) {
        const V v = *reinterpret_cast<const InMemory*>(values + j * stride + d + i * width);
        for (int r = 0; r < rows; ++r) sum[r][i] += P[r * key_tile + j] * v;
      }
    for (int r = 0; r < rows; ++r)
      for (int i = 0; i < registers; ++i) *reinterpret_cast<InMemory*>(O + r * ldo + d + i * width) = sum[r][i];
  }
  if constexpr (width > base_width) {
    if (d < dh) mix_tile<rows, base_width>(P, values + d, stride, count, O + d, ldo, dh - d);
  } else {
    for (int r = 0; r < rows; ++r)
      for (Index j = 0; j < count; ++j)
        for (Index e = d; e < dh; ++e)
          O[r * ldo + e] = std::fma(P[r * key_tile + j], values[j * stride + e], O[r * ldo + e]);
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

  const auto own_key = [&](Index i) {  // the last that query i0 + i sees; keys count from the first of the prefix
    return c.streams.prefix + slice.p0 + kv.row[slice.first + i0 + i] - slice.begin;
  };
  const Index low = std::max<Index>(0, own_key(0) - kv.reach + 1), high = own_key(n - 1) + 1;  // of the whole tile
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
        const Index q = own_key(r / heads), from = std::clamp(q - kv.reach + 1, begin, end),
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
    const auto step = [](const Lanes& a, const Lanes& b) -> Lanes { return a / (1 + exp8(-a)) * b; };
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

double cosine(std::span<const float> a, std::span<const float> b) {
  double ab = 0, aa = 0, bb = 0;
  for (std::size_t d = 0; d < a.size(); ++d) {
    ab += double{a[d]} * b[d];
    aa += double{a[d]} * a[d];
    bb += double{b[d]} * b[d];
  }
  const double norms = std::sqrt(aa * bb);
  return norms > 0 ? std::clamp(ab / norms, -1.0, 1.0) : 1;
}

int greedy(std::span<const float> logits) {
  return static_cast<int>(std::max_element(logits.begin(), logits.end()) - logits.begin());
}

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

/// The CPU engine. Buffers are allocated once for `max_rows` rows, so a pass allocates nothing but new cache blocks.
class CpuEngine final : public Engine {
 public:
  CpuEngine(const Config& config, const Weights& weights, const EngineOptions& options)
      : c_(config), w_(weights), options_(options), plan_(config) {
    const Index n = options.max_rows * c_.streams.count, routed = c_.moe ? n * c_.moe->active : 0;
    const Index F = std::max(c_.moe ? c_.moe->shared_dim : c_.ffn_dim, Index{1});
    const auto floats = [&](Index count) { return Slab(arena_, count * 4, Use::activation); };
    x_ = floats(n * c_.dim), a_ = floats(n * c_.dim), q_ = floats(n * c_.q_dim()), o_ = floats(n * c_.q_dim());
    k_ = floats(n * c_.kv_dim()), v_ = floats(n * c_.kv_dim());
    cos_ = floats(n * c_.head_dim / 2 + 1), sin_ = floats(n * c_.head_dim / 2 + 1);
    gate_ = floats(n * F), up_ = floats(n * F);
    const Index prefixes = c_.streams.count * c_.streams.prefix * c_.kv_dim();
    prefix_k_ = floats(prefixes), prefix_v_ = floats(prefixes), mix_ = floats(n);
    row_.resize(n);
    if (options.halt > 0) state_ = floats(n * c_.dim);
    for (const Stage& s : c_.stages)
      if (options.halt > 0 && s.loops > 1)
        written_k_ = floats(s.layers * n * c_.kv_dim()), written_v_ = floats(s.layers * n * c_.kv_dim());
    if (c_.moe) {
      router_ = floats(n * c_.moe->experts), gathered_ = floats(routed * c_.dim);
      expert_gate_ = floats(routed * c_.moe->dim), expert_up_ = floats(routed * c_.moe->dim);
      weight_.resize(routed), chosen_.resize(routed), slot_.resize(routed), load_.resize(c_.moe->experts);
    }
    for (Index i = 0; i < c_.head_dim / 2; ++i)
      frequency_.push_back(std::pow(c_.rope_theta, -2.0 * static_cast<double>(i) / static_cast<double>(c_.head_dim)));
    Index rows = 1;
    for (const Stage& s : c_.stages) rows = std::max(rows, c_.group() * std::min(n, query_tile(c_.group(), reach(s))));
    for (int thread = 0; thread < thread_count(); ++thread) scratch_.emplace_back(arena_, rows, c_.head_dim);
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
    for (Index p = 0; p < c_.streams.count; ++p)
      for (const Kept& kept : plan_.kept) sequence->caches.emplace_back(arena_, c_, options_.kv_dtype, kept.window);
    const auto free = std::find(sequences_.begin(), sequences_.end(), nullptr);
    const auto number = free - sequences_.begin();
    if (free == sequences_.end()) sequences_.emplace_back();
    sequences_[number] = std::move(sequence);
    return static_cast<int>(number);
  }
  void close(int sequence) override {
    at(sequence);
    sequences_[sequence].reset();
  }
  Index cache_bytes() const override { return arena_.live(Use::cache); }
  Index global_rows() const override { return global_rows_; }
  std::span<const Index> loops_run(int sequence) const override { return sequences_.at(sequence)->loops_run; }
  const Arena& arena() const { return arena_; }

  // [forward]
  /// One pass: X^0 = embed(tokens), the stages in order (yocou.h), logits = RMSNorm(X) head^T.
  void forward(std::span<const Segment> pass, float* logits) override {
    begin(pass);
    embed(pass);
    run_stages(c_, plan_, *this);
    keep_wanted_rows();
    head(logits);
    for (const Segment& segment : pass) at(segment.sequence).length += std::ssize(segment.tokens);
  }
  // [forward]

  /// An open sequence; Error for any other number.
  Sequence& at(int sequence) {
    if (sequence < 0 || sequence >= std::ssize(sequences_) || !sequences_[sequence])
      fail("sequence ", sequence, " is not open");
    return *sequences_[sequence];
  }
  static Index reach(const Stage& s) { return s.window ? s.window : std::numeric_limits<Index>::max() / 2; }

  /// Fixes every row's position once for the pass, checks tokens, and makes room in the caches.
  void begin(std::span<const Segment> pass) {
    slices_.clear();
    rows_ = 0;
    for (const Segment& segment : pass) {
      Sequence& sequence = at(segment.sequence);
      const Index n = std::ssize(segment.tokens);
      for (int token : segment.tokens)
        if (token < 0 || token >= c_.vocab_size)
          fail("token ", token, " is outside the vocabulary 0..", c_.vocab_size - 1);
      const auto same = [&](const Slice& p) { return p.sequence == &sequence; };
      if (std::ranges::any_of(slices_, same)) throw std::logic_error("a sequence occurs twice in a pass");
      const Index P = c_.streams.count;
      if (rows_ + P * n > P * options_.max_rows)
        throw std::logic_error("a pass has more tokens than the engine was made for");
      for (Index p = 0; p < P; ++p, rows_ += n)
        slices_.push_back({&sequence, rows_, n, sequence.length, segment.want, p,
            std::span(sequence.caches).subspan(p * plan_.kept.size(), plan_.kept.size()), rows_, n});
    }
    for (const Slice& slice : slices_) {
      for (Cache& cache : slice.caches) cache.grow(slice.p0 + slice.n);
      if (options_.halt > 0) slice.sequence->loops_run.resize(slice.p0 + slice.n, 1);
    }
    std::iota(row_.begin(), row_.end(), 0);
  }

  /// X [n,D] = embed[token] * embed_scale, alike for each of P streams; the rows' angles are formed here too, the same
  /// in every loop.
  void embed(std::span<const Segment> pass) {
    float* x = x_.floats();
    const float scale = static_cast<float>(c_.embed_scale);
    for (const Segment& segment : pass)
      for (Index p = 0; p < c_.streams.count; ++p)
        for (int token : segment.tokens)
          with_type(w_.embed.dtype, [&](auto num) {
            const auto* row = static_cast<const decltype(num)*>(w_.embed.data) + token * c_.dim;
            for (Index d = 0; d < c_.dim; ++d) *x++ = to_float(row[d]) * scale;
          });
    form_angles();
    remember();
    show({}, /*embeddings=*/true);
  }
  void form_angles() {
    const auto rotates = [](const Stage& s) { return s.rope; };
    if (std::any_of(c_.stages.begin(), c_.stages.end(), rotates))
      rope_angles(frequency_, slices_, cos_.floats(), sin_.floats());
  }

  // [global-kv]
  /// K^ = RMSNorm(X) W_K, V^ = RMSNorm(X) W_V, [n,G dh] each, appended to the global cache: one row a token. 4 n D G dh
  /// FLOP. K^ carries no position (NoPE) unless the stage says rope.
  void project_global(const Plan::Loop& loop) {
    const Stage& stage = c_.stages[loop.stage];
    rms_norm(x_.floats(), w_.kv_norm, eps(), rows_, a_.floats());
    multiply({{a_.floats(), rows_, w_.kv_wk, k_.floats()}, {a_.floats(), rows_, w_.kv_wv, v_.floats()}});
    if (stage.rope) rope(c_, c_.kv_heads, rows_, cos_.floats(), sin_.floats(), k_.floats());
    append(loop.first, k_.floats(), v_.floats());
    global_rows_ += rows_;
  }
  // [global-kv]

  // [layer]
  /// One application of a layer: Y = Attention(RMSNorm(X)) + X, X' = FFN(RMSNorm(Y)) + Y, in place in X [n,D].
  void layer(const Place& place) {
    const Layer& w = w_.stages[place.stage][place.layer];
    rms_norm(x_.floats(), w.attn_norm, eps(), rows_, a_.floats());  // a [n,D]
    mix(place, w);
    rms_norm(x_.floats(), w.ffn_norm, eps(), rows_, a_.floats());
    if (c_.moe) mixture(w);
    else ffn(w.dense);
    show(place);
  }

  /// X += Attention(a): what mixes a row with those before it. The one place where the CPU asks for a stage's kind.
  void mix(const Place& place, const Layer& w) {
    const Stage& stage = c_.stages[place.stage];
    const Index n = rows_;
    float *x = x_.floats(), *a = a_.floats(), *q = q_.floats(), *k = k_.floats(), *v = v_.floats(), *o = o_.floats();

    KvView kv{place.kept, reach(stage), nullptr, nullptr, prefix_k_.floats(), prefix_v_.floats(), row_.data()};
    if (c_.streams.count > 1) load_prefixes(w);
    if (stage.attention == Attention::shared) {
      multiply({{a, n, w.wq, q}});  // q [n,H dh]  2 n D H dh FLOP
      if (place.layer == 0) counters.cross_positions += static_cast<std::uint64_t>(n);
    } else {
      multiply({{a, n, w.wq, q}, {a, n, w.wk, k}, {a, n, w.wv, v}});  // k, v [n,G dh]  + 4 n D G dh FLOP
      if (stage.rope) rope(c_, c_.kv_heads, n, cos_.floats(), sin_.floats(), k);
    }
    if (stage.rope) rope(c_, c_.heads, n, cos_.floats(), sin_.floats(), q);
    if (stage.attention == Attention::full) append(place.kept, k, v);
    if (stage.attention == Attention::window) {  // keys of this pass beside the ring:
      round_like_cache(k);                       // the same numbers it will hold
      round_like_cache(v);
      const bool halts = options_.halt > 0 && stage.loops > 1;
      kv.K = halts ? in_place(written_k_, place.layer, k) : k;
      kv.V = halts ? in_place(written_v_, place.layer, v) : v;
    }
    attention(kv, q, o);  // o [n,H dh]  4 H dh FLOP a key
    if (stage.attention == Attention::window) append(place.kept, kv.K, kv.V);
    multiply({{o, n, w.wo, x, /*add=*/true}});  // x += o wo^T  2 n D H dh FLOP
  }
  // [layer]

  /// The keys and values before those of any position, in float32: 2 P m G dh numbers, read once a pass for all
  /// sequences.
  void load_prefixes(const Layer& w) {
    for (const auto& [prefix, to] : {std::pair{&w.prefix_k, &prefix_k_}, {&w.prefix_v, &prefix_v_}}) {
      widen(*prefix, 0, prefix->rows * prefix->cols, to->floats());
      counters.bytes += static_cast<std::uint64_t>(prefix->bytes());
    }
  }

  /// O [n,H dh] of the pass: tiles of queries by heads by sequence, spread over the threads.
  void attention(const KvView& kv, const float* Q, float* O) {
    const Index b = query_tile(c_.group(), kv.reach);
    queries_.clear();
    Index work = 0;
    for (const Slice& slice : slices_) {
      if (slice.n == 0) continue;
      for (Index i = 0; i < slice.n; i += b) queries_.push_back({&slice, i});
      const Index seen = std::min(kv.reach, c_.streams.prefix + slice.p0 + slice.count);
      work += 4 * slice.n * seen * c_.q_dim();
      const Index cached = std::min(kv.K ? slice.p0 : slice.p0 + slice.count, kv.reach);
      counters.bytes += static_cast<std::uint64_t>(2 * cached * c_.kv_dim() * size_of(options_.kv_dtype));
    }
    // A task takes a group's R heads, which share each row of K and V; fewer where that would leave threads idle.
    Index heads = c_.group();
    const auto idle = [&] { return std::ssize(queries_) * c_.heads / heads < thread_count(); };
    while (c_.group() % heads || (heads > 1 && idle())) --heads;
    const Index tasks = c_.heads / heads;  // of some queries
    std::uint64_t flops = 0;
#pragma omp parallel for schedule(dynamic) if (work > small_work / 8) reduction(+ : flops)
    for (Index i = 0; i < std::ssize(queries_) * tasks; ++i) {
      const auto [slice, i0] = queries_[i / tasks];
      const Index n = std::min(b, slice->n - i0);
      flops += attention_tile(c_, *slice, kv, i % tasks * heads, heads, i0, n, Q, O, scratch_[this_thread()]);
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
  /// Drops the rows that nobody above needs and moves the others together; false when none is left. Of a prompt, its
  /// last row stays: the others have left their one row in K^, V^, and nothing later reads more of them.
  bool keep_wanted_rows() {
    Index kept = 0;
    std::size_t count = 0;
    for (const Slice& slice : slices_) {
      if (slice.want == Logits::none || slice.n == 0) continue;
      const Index skip = slice.want == Logits::last ? slice.n - 1 : 0, n = slice.n - skip;
      move_rows(slice.first + skip, n, kept);
      slices_[count++] = {slice.sequence, kept, n, slice.p0 + skip, slice.want, slice.stream, slice.caches,
          /*begin=*/kept, /*count=*/n};
      kept += n;
    }
    slices_.erase(slices_.begin() + static_cast<std::ptrdiff_t>(count), slices_.end());
    rows_ = kept;
    return kept > 0;
  }
  /// Moves rows of X and their angles.
  void move_rows(Index from, Index count, Index to) {
    const Index half = c_.head_dim / 2;
    for (const auto& [m, width] : {std::pair{&x_, c_.dim}, {&cos_, half}, {&sin_, half}})
      std::memmove(m->floats() + to * width, m->floats() + from * width, static_cast<std::size_t>(count * width * 4));
  }
  // [keep-rows]

  // [halt]
  /// Behind a loop: rows whose state it turned by less than A leave X, and with them the work of the loops that follow;
  /// behind the last one all are back. A row's own past decides, so it halts alike in any chunk, batch or step.
  void end_loop(const Plan::Loop& loop) {
    if (options_.halt == 0) return;
    const Index D = c_.dim, loops = c_.stages[loop.stage].loops;
    if (loops == 1) return remember();
    rows_ = 0;
    for (Slice& slice : slices_) {
      const Index first = std::exchange(slice.first, rows_), n = std::exchange(slice.n, 0);
      for (Index i = first; i < first + n; ++i) {
        const std::span<float> x(x_.floats() + i * D, D), before(state_.floats() + row_[i] * D, D);
        const bool rests = std::acos(cosine(x, before)) / M_PI < options_.halt;
        std::ranges::copy(x, before.begin());
        slice.sequence->loops_run[slice.p0 + row_[i] - slice.begin] = loop.loop + 1;
        if (rests) continue;
        move_rows(i, 1, rows_);
        row_[rows_++] = row_[i];
        ++slice.n;
      }
    }
    if (loop.loop + 1 < loops) return;
    rows_ = 0;
    for (Slice& slice : slices_) {
      slice.first = slice.begin, slice.n = slice.count;
      rows_ += slice.count;
    }
    std::iota(row_.begin(), row_.end(), 0);
    std::copy_n(state_.floats(), rows_ * D, x_.floats());
    form_angles();
  }

  /// Keeps the states [n,D] that enter a loop.
  void remember() {
    if (options_.halt > 0) std::copy_n(x_.floats(), rows_ * c_.dim, state_.floats());
  }

  /// A layer's K or V [n,G dh] in its place among all rows of the pass. Those that have halted still stand there as
  /// this layer wrote them in the last loop that they ran, whatever their ring has lost since: each later ring takes a
  /// copy.
  const float* in_place(Slab& written, Index layer, const float* rows) {
    const Index width = c_.kv_dim();
    float* all = written.floats() + layer * options_.max_rows * width;
    for (Index i = 0; i < rows_; ++i) std::copy_n(rows + i * width, width, all + row_[i] * width);
    return all;
  }
  // [halt]

  // [mix-streams]
  /// A token's P rows h_p of a [P n,D] become one of a [n,D], sum over p of w_p h_p. With y [n,P D] = the h_p side by
  /// side w [n,P] = softmax(silu(y w1^T + b1) w2^T + b2) (1 - e) + e/P: 2 P D^2 + 2 P D FLOP a token. X is free by now.
  void mix_streams() {
    const Index P = c_.streams.count, D = c_.dim;
    float *a = a_.floats(), *y = x_.floats(), *w = mix_.floats();
    for (Slice& slice : slices_) {
      const Index before = slice.first - slice.stream * slice.n;  // rows of the segments before this one, P a token
      for (Index i = 0; i < slice.n; ++i)
        std::copy_n(a + (slice.first + i) * D, D, y + (before + i * P + slice.stream) * D);
      slice.first = slice.begin = before / P;
    }
    std::erase_if(slices_, [](const Slice& slice) { return slice.stream > 0; });
    const Index n = rows_ /= P;
    for (Index i = 0; i < n; ++i) widen(w_.mix_b1, 0, D, a + i * D), widen(w_.mix_b2, 0, P, w + i * P);
    multiply({{y, n, w_.mix_w1, a, /*add=*/true}});  // [n,D]
    for (Index i = 0; i < n * D; ++i) a[i] /= 1 + exp_fast(-a[i]);
    multiply({{a, n, w_.mix_w2, w, /*add=*/true}});  // [n,P]
    const float e = static_cast<float>(c_.streams.smooth), equal = e / static_cast<float>(P);
    each_row(n, 4 * P * D, [&](Index i) {
      const std::span<float> weight(w + i * P, static_cast<std::size_t>(P));
      const float most = *std::ranges::max_element(weight);
      float sum = 0;
      for (float& v : weight) sum += v = std::exp(v - most);
      std::fill_n(a + i * D, D, 0.f);
      for (Index p = 0; p < P; ++p)
        for (Index d = 0; d < D; ++d)
          a[i * D + d] = std::fma(weight[p] / sum * (1 - e) + equal, y[(i * P + p) * D + d], a[i * D + d]);
    });
  }
  // [mix-streams]

  /// logits [rows,V] = RMSNorm(X; norm) head^T, 2 D V FLOP a row.
  void head(float* logits) {
    if (rows_ == 0) return;
    rms_norm(x_.floats(), w_.norm, eps(), rows_, a_.floats());
    if (c_.streams.count > 1) mix_streams();
    multiply({{a_.floats(), rows_, w_.head, logits}});
    for (Index i = 0; i < rows_ * c_.vocab_size; ++i)
      if (!std::isfinite(logits[i])) {
        const Slice& slice = *std::find_if(
            slices_.begin(), slices_.end(), [row = i / c_.vocab_size](const Slice& p) { return row < p.first + p.n; });
        fail("logit of token ", i % c_.vocab_size, " at position ", slice.p0 + i / c_.vocab_size - slice.first, " is ",
            logits[i], ", not a finite number: the weights hold NaN, infinity or too large values");
      }
  }

 private:
  float eps() const { return static_cast<float>(c_.norm_eps); }
  void multiply(std::initializer_list<Product> products) {
    yocou::multiply({products.begin(), products.size()}, counters);
  }
  void append(Index cache, const float* K, const float* V) {
    for (const Slice& s : slices_)
      s.caches[cache].append(K + s.begin * c_.kv_dim(), V + s.begin * c_.kv_dim(), s.count, s.p0);
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
  void show(const Place& place, bool embeddings = false) {
    if (!on_layer) return;
    const bool halted = std::ranges::any_of(slices_, [](const Slice& s) { return s.n < s.count; });
    on_layer({embeddings ? -1 : place.stage, place.loop, place.layer,
        {x_.floats(), static_cast<std::size_t>(rows_ * c_.dim)},
        c_.moe && !embeddings ? std::span<const Index>(load_) : std::span<const Index>(),
        std::span<const Index>(row_).first(halted ? rows_ : 0)});
  }

  struct Queries {
    const Slice* slice;
    Index first;
  };

  const Config c_;
  const Weights w_;
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
  Slab state_, written_k_, written_v_;                  // [n,D] before the loop, [layers,n,G dh] of a stage that halts
  std::vector<Index> row_;                              // [n] which row of the pass a row of X is
  Slab prefix_k_, prefix_v_, mix_;                      // [P m,G dh] of the layer that runs, the same, [n,P]
  std::vector<float> logits_;                           // of forward_sample
  std::vector<float> weight_;                           // [n,A]
  std::vector<Index> chosen_, slot_, load_, first_;     // [n,A] [n,A] [E] [E]
  std::vector<double> frequency_;                       // [dh/2] theta^(-2i/dh)
  std::vector<AttentionScratch> scratch_;               // one a thread
};

std::unique_ptr<Engine> make_cpu_engine(const Config& c, const Weights& w, const EngineOptions& o) {
  return std::make_unique<CpuEngine>(c, w, o);
}

void hold_caches(const Config& c, Dtype type, Index N, Index batch, const std::function<void(Index)>& then) {
  Arena arena;
  std::vector<Cache> caches;
  for (Index b = 0; b < batch * c.streams.count; ++b)
    for (const Kept& kept : Plan(c).kept) caches.emplace_back(arena, c, type, kept.window).grow(N);
  then(arena.live(Use::cache));
}

// =====================================================================================================================
// 7. Prefill, decode, sampling

volatile std::sig_atomic_t interrupted = 0;

// [prefill]
void prefill(Engine& engine, int sequence, std::span<const int> tokens, Index chunk, float* logits,
    const std::function<void(Index)>& after) {
  const Index N = std::ssize(tokens);
  for (Index i = 0, n = 0; i < N; i += n) {
    stop_if_interrupted();
    n = std::min(chunk, N - i);
    const Segment part{sequence, tokens.subspan(i, n), i + n == N ? Logits::last : Logits::none};
    engine.forward({&part, 1}, logits);
    if (after) after(i + n);
  }
}

void decode(Engine& engine, std::span<const int> sequences, std::span<const int> tokens, float* logits) {
  stop_if_interrupted();
  std::vector<Segment> pass;
  for (std::size_t i = 0; i < sequences.size(); ++i) pass.push_back({sequences[i], tokens.subspan(i, 1), Logits::last});
  engine.forward(pass, logits);
}
// [prefill]

void forward_all(Engine& engine, const Config& c, int sequence, std::span<const int> tokens, Index chunk,
    const std::function<void(Index, Index, const float*)>& use) {
  std::vector<float> logits(static_cast<std::size_t>(std::min(chunk, std::ssize(tokens)) * c.vocab_size));
  for (Index i = 0; i < std::ssize(tokens); i += chunk) {
    stop_if_interrupted();
    const Index n = std::min(chunk, std::ssize(tokens) - i);
    const Segment part{sequence, tokens.subspan(i, n), Logits::all};
    engine.forward({&part, 1}, logits.data());
    use(i, n, logits.data());
  }
}

// =====================================================================================================================
// 8. Accounting: the paper's costs as sums of products that explain themselves. They share no code with the counters of
// parts 2 to 6.

Exact operator+(Exact a, const Exact& b) {
  if (__builtin_add_overflow(a.v, b.v, &a.v)) fail("a cost exceeds 2^128");
  return a;
}
Exact operator*(Exact a, const Exact& b) {
  if (__builtin_mul_overflow(a.v, b.v, &a.v)) fail("a cost exceeds 2^128");
  return a;
}

std::string to_string(Exact e) {
  std::string digits;
  for (; e.v > 0 || digits.empty(); e.v /= 10) digits.insert(digits.begin(), static_cast<char>('0' + e.v % 10));
  return digits;
}

// [bill]
Exact Term::value() const {
  Exact product = 1;
  for (const Factor& f : factors) product = product * f.value;
  return product;
}

std::string Term::text() const {
  std::string symbols, numbers;
  for (const Factor& f : factors) {
    symbols += std::string(symbols.empty() ? "" : " ") + f.symbol;
    numbers += (numbers.empty() ? "" : " x ") + to_string(f.value);
  }
  return symbols + " = " + numbers + " = " + to_string(value());
}

Exact total(const Bill& bill) {
  Exact sum = 0;
  for (const Term& t : bill) sum += t.value();
  return sum;
}

using Factors = std::vector<Factor>;

/// Adds the terms of `part`, each named after what it belongs to and multiplied by `by`.
void add(Bill& to, const std::string& of, const Factors& by, const Bill& part) {
  for (const Term& t : part) {
    Term& term = to.emplace_back(Term{of + ": " + t.of, by});
    term.factors.insert(term.factors.end(), t.factors.begin(), t.factors.end());
  }
}
// [bill]

// [mixer-bill]
/// What the mixer of a stage keeps and costs: the one place where the accounting asks for a stage's kind.
struct Mixer {
  Bill layer;      ///< elements of a layer's matrices; each takes 2 FLOP a row
  Bill once;       ///< of matrices that belong to the stage, not to a layer: K^ and V^
  Factors copies;  ///< how many entries the stage keeps of a sequence, each of the rows below
  Index window;    ///< W: rows of an entry, and keys that a position sees at most; 0: all so far
  Index whole;     ///< loops that run at every position, wanted or not
};

Mixer mixer_of(const Config& c, const Stage& g) {
  const Factor D{"D", c.dim}, q{"(H dh)", c.q_dim()}, kv{"(G dh)", c.kv_dim()}, two{"2", 2};
  const Factor T{"T", g.loops}, layers{"layers", g.layers};
  Mixer m{{{"wq", {q, D}}}, {}, {T, layers}, 0, g.loops};
  if (c.streams.count > 1) m.copies.push_back({"P", c.streams.count});
  switch (g.attention) {
    case Attention::window: m.window = g.window; [[fallthrough]];
    case Attention::full: m.layer.push_back({"wk and wv", {two, kv, D}}); break;
    case Attention::shared:
      m.once = {{"K^ and V^", {two, kv, D}}};
      m.copies = {g.refresh_kv ? T : Factor{"1", 1}};
      m.whole = g.refresh_kv ? g.loops - 1 : 0;
  }
  m.layer.push_back({"wo", {D, q}});
  return m;
}
// [mixer-bill]

/// Elements of the matrices of a layer's FFN, `experts` of the routed experts counted.
Bill ffn_elements(const Config& c, const Factor& experts) {
  const Factor D{"D", c.dim}, three{"3", 3};
  if (!c.moe) return {{"SwiGLU", {three, D, {"F", c.ffn_dim}}}};
  Bill bill{{"router", {D, {"E", c.moe->experts}}}, {"experts", {three, D, experts, {"Fe", c.moe->dim}}}};
  if (c.moe->shared_dim) bill.push_back({"shared expert", {three, D, {"Fs", c.moe->shared_dim}}});
  return bill;
}
/// Elements of the matrices that weight a token's P rows.
Bill mix_elements(const Config& c) {
  const Factor D{"D", c.dim}, P{"P", c.streams.count};
  return c.streams.count > 1 ? Bill{{"w1", {P, D, D}}, {"w2", {P, D}}} : Bill{};
}
Factor active_experts(const Config& c) { return {"active", c.moe ? c.moe->active : 0}; }

// [cache-bytes]
Index paged_rows(Index N) { return (N + block_rows - 1) / block_rows * block_rows; }

Bill cache_bill(const Config& c, Index N, Index s) {
  Bill bill;
  for (const Stage& g : c.stages) {
    const Mixer m = mixer_of(c, g);
    const Factor rows = m.window ? Factor{"W", m.window} : Factor{"rows(N)", paged_rows(N)};
    add(bill, g.name, m.copies, {{"K and V", {{"2", 2}, {"(G dh)", c.kv_dim()}, {"s", s}, rows}}});
  }
  return bill;
}
Exact cache_bytes(const Config& c, Index N, Index s) { return total(cache_bill(c, N, s)); }
// [cache-bytes]

// [flops]
Exact keys_seen(Index p0, Index p1, Index W) {
  const auto up_to = [W](Index N) {  // by positions 0 .. N-1: N(N+1)/2, or W a position once the window is full
    const Index ramp = W ? std::min(N, W) : N;
    Exact sum = Exact(ramp) * (Exact(ramp) + 1);
    sum.v /= 2;
    return sum + Exact(N - ramp) * W;
  };
  Exact keys = up_to(p1);
  keys.v -= up_to(p0).v;
  return keys;
}

Bill flops_bill(const Config& c, Index p0, Index p1, Index wanted) {
  const Factor two{"2", 2}, q{"(H dh)", c.q_dim()};
  Bill bill;
  for (const Stage& g : c.stages) {
    const Mixer m = mixer_of(c, g);
    const auto loops = [&](const char* symbol, Index T, Index first) {  // T loops over the positions first .. p1-1
      if (T == 0) return;
      Factors by{{symbol, T}, {"layers", g.layers}};
      if (c.streams.count > 1) by.push_back({"P", c.streams.count});
      const Exact keys = keys_seen(first, p1, m.window) + Exact(p1 - first) * c.streams.prefix;
      add(bill, g.name, by, {{"attention", {{"4", 4}, q, {"keys", keys}}}});
      Factors rows = by;
      rows.insert(rows.end(), {{"rows", p1 - first}, two});
      add(bill, g.name, rows, m.layer);
      add(bill, g.name, rows, ffn_elements(c, active_experts(c)));
    };
    Factors projected = m.copies;
    projected.insert(projected.end(), {{"rows", p1 - p0}, two});
    add(bill, g.name, projected, m.once);
    loops(m.whole == g.loops ? "T" : "(T - 1)", m.whole, p0);
    loops(m.whole == 0 ? "T" : "1", g.loops - m.whole, p1 - wanted);  // prefill's early stop
  }
  add(bill, "mix", {{"rows", wanted}, two}, mix_elements(c));
  bill.push_back({"head", {{"rows", wanted}, two, {"D", c.dim}, {"V", c.vocab_size}}});
  return bill;
}
Exact prefill_flops(const Config& c, Index N) { return total(flops_bill(c, 0, N, /*wanted=*/1)); }
Exact decode_flops(const Config& c, Index N) { return total(flops_bill(c, N, N + 1, /*wanted=*/1)); }
// [flops]

// [halting-flops]
Exact halting_flops(Config c, Index p0, std::span<const Index> loops_run) {
  const Index stage = looped_stage(c), end = p0 + std::ssize(loops_run);
  Exact sum = 0;
  for (Index p = p0; p < end; ++p) {  // each position in a model of its own T
    if (stage >= 0) c.stages[stage].loops = loops_run[p - p0];
    sum += total(flops_bill(c, p, p + 1, /*wanted=*/p + 1 == end ? 1 : 0));
  }
  return sum;
}
// [halting-flops]

// [crossover]
Index largest(Index limit, const std::function<bool(Index)>& ok) {
  Index low = 0, high = limit + 1;
  while (high - low > 1) {
    const Index middle = low + (high - low) / 2;
    (ok(middle) ? low : high) = middle;
  }
  return low;
}

std::optional<Index> crossover(const Config& c, const Config& other) {
  const auto dearer = [&](Index N) { return N == 0 || prefill_flops(c, N) >= prefill_flops(other, N); };
  return dearer(N_limit) ? std::nullopt : std::optional(largest(N_limit, dearer) + 1);
}
// [crossover]

// [params]
/// Elements of one layer, gains and matrices.
Bill layer_elements(const Config& c, const Mixer& m, const Factor& experts) {
  Bill bill{{"norms", {{"2", 2}, {"D", c.dim}}}};
  if (const Streams& s = c.streams; s.count > 1)
    bill.push_back({"prefixes", {{"2", 2}, {"P", s.count}, {"m", s.prefix}, {"(G dh)", c.kv_dim()}}});
  bill.insert(bill.end(), m.layer.begin(), m.layer.end());
  const Bill ffn = ffn_elements(c, experts);
  bill.insert(bill.end(), ffn.begin(), ffn.end());
  return bill;
}
/// Elements of what belongs to a stage and not to a layer, gains and matrices.
Bill once_elements(const Config& c, const Mixer& m) {
  Bill bill = m.once;
  if (!bill.empty()) bill.push_back({"kv_norm", {{"D", c.dim}}});
  return bill;
}

/// Elements of what stands before the head: the gain, and with streams their mixing, biases included.
Bill end_elements(const Config& c) {
  Bill bill{{"norm", {{"D", c.dim}}}};
  add(bill, "mix", {}, mix_elements(c));
  if (c.streams.count > 1) bill.push_back({"mix: biases", {{"(D + P)", c.dim + c.streams.count}}});
  return bill;
}

Bill params_bill(const Config& c, Index experts) {
  Bill bill = end_elements(c);
  for (const Stage& g : c.stages) {
    const Mixer m = mixer_of(c, g);
    add(bill, g.name, {{"layers", g.layers}}, layer_elements(c, m, {"experts", experts}));
    add(bill, g.name, {}, once_elements(c, m));
  }
  return bill;
}

Params count_params(const Config& c) {
  const Exact embed = Exact(c.dim) * c.vocab_size;
  return {total(params_bill(c, c.moe ? c.moe->experts : 0)), total(params_bill(c, c.moe ? c.moe->active : 0)), embed,
      c.tied_embeddings ? 0 : embed};
}
// [params]

// [decode-bytes]
Bill decode_bytes_bill(const Config& c, Index N, Index batch, Index w, Index s) {
  const Factor D{"D", c.dim}, bytes{"bytes", w}, B{"batch", batch};
  const Index rows = batch * c.streams.count;
  const Factor experts{"min(E, batch P active)", c.moe ? std::min(c.moe->experts, rows * c.moe->active) : 0};
  Bill bill{{"head", {bytes, D, {"V", c.vocab_size}}}, {"embedding", {bytes, D, B}}};
  add(bill, "end", {bytes}, end_elements(c));
  for (const Stage& g : c.stages) {
    const Mixer m = mixer_of(c, g);
    const Factor T{"T", g.loops}, layers{"layers", g.layers}, seen{"keys", keys_seen(N, N + 1, m.window)};
    add(bill, g.name, {bytes, T, layers}, layer_elements(c, m, experts));
    if (!m.once.empty()) {
      Factors by = m.copies;
      by.push_back(bytes);
      add(bill, g.name, by, once_elements(c, m));
    }
    add(bill, g.name, {T, layers, {c.streams.count > 1 ? "(batch P)" : "batch", rows}},
        {{"K and V", {{"2", 2}, {"(G dh)", c.kv_dim()}, {"s", s}, seen}}});
  }
  return bill;
}
Exact decode_bytes(const Config& c, Index N, Index batch, Index w, Index s) {
  return total(decode_bytes_bill(c, N, batch, w, s));
}
// [decode-bytes]

}  // namespace yocou
