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
#include <immintrin.h>
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
inline float to_float(F16 v) { return _cvtsh_ss(v.bits); }

/// Nearest value, ties to even; a NaN stays a NaN.
inline void store(float v, float* to) { *to = v; }
inline void store(float v, Bf16* to) {
  const auto bits = std::bit_cast<std::uint32_t>(v);
  to->bits = static_cast<std::uint16_t>(std::isnan(v) ? (bits >> 16 | 0x40) : (bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}
inline void store(float v, F16* to) { to->bits = _cvtss_sh(v, _MM_FROUND_TO_NEAREST_INT); }

inline __m256 load8(const float* p) { return _mm256_loadu_ps(p); }
inline __m256 load8(const Bf16* p) {
  const __m128i bits = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16));
}
inline __m256 load8(const F16* p) { return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))); }

/// The last `count` < 8 numbers of a row, zeros behind.
template <class Num>
inline __m256 load_tail(const Num* p, Index count) {
  Num v[8] = {};
  std::memcpy(v, p, static_cast<std::size_t>(count) * sizeof(Num));
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

/// e^x within 2 ulp for x <= 88 (larger x count as 88), 0 below -87, NaN for NaN. Our own, so that an element's value
/// depends neither on its place in a loop nor on a compiler's or a library's choice.
inline __m256 exp8(__m256 x) {
  const auto c = [](float v) { return _mm256_set1_ps(v); };
  const __m256 y = _mm256_blendv_ps(x, c(88), _mm256_cmp_ps(x, c(88), _CMP_GT_OQ));
  const __m256 shifted =
      _mm256_fmadd_ps(y, c(1.44269504f), c(12582912));   // + 1.5 * 2^23 rounds y / ln 2 to an integer n
  const __m256 n = _mm256_sub_ps(shifted, c(12582912));  // whose low bits `shifted` then ends in
  const __m256 r = _mm256_fmadd_ps(n, c(1.43241612e-6f), _mm256_fmadd_ps(n, c(-0.693148613f), y));  // y - n ln 2
  __m256 e = c(1.f / 5040);
  for (const float k : {1.f / 720, 1.f / 120, 1.f / 24, 1.f / 6, 0.5f, 1.f, 1.f}) e = _mm256_fmadd_ps(e, r, c(k));
  const __m256i power =
      _mm256_add_epi32(_mm256_slli_epi32(_mm256_castps_si256(shifted), 23), _mm256_set1_epi32(0x3f800000));
  return _mm256_andnot_ps(_mm256_cmp_ps(x, c(-87), _CMP_LT_OQ), _mm256_mul_ps(e, _mm256_castsi256_ps(power)));
}
inline float exp_fast(float x) { return _mm256_cvtss_f32(exp8(_mm256_set1_ps(x))); }

/// The four sums of four 8-lane accumulators, always in this order of additions.
inline __m128 reduce4(const __m256 (&a)[4]) {
  const __m256 pairs = _mm256_hadd_ps(_mm256_hadd_ps(a[0], a[1]), _mm256_hadd_ps(a[2], a[3]));
  return _mm_add_ps(_mm256_castps256_ps128(pairs), _mm256_extractf128_ps(pairs, 1));
}

/// The largest of eight numbers.
inline float max8(__m256 v) {
  __m128 m = _mm_max_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
  m = _mm_max_ps(m, _mm_movehl_ps(m, m));
  return _mm_cvtss_f32(_mm_max_ss(m, _mm_movehdup_ps(m)));
}

/// a . b over n numbers.
inline float dot(const float* a, const float* b, Index n) {
  __m256 sum[4] = {};
  Index i = 0;
  for (; i + 8 <= n; i += 8) sum[0] = _mm256_fmadd_ps(load8(a + i), load8(b + i), sum[0]);
  if (i < n) sum[0] = _mm256_fmadd_ps(load_tail(a + i, n - i), load_tail(b + i, n - i), sum[0]);
  return _mm_cvtss_f32(reduce4(sum));
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

inline constexpr Index depth = 1024;  ///< columns of K summed in registers before y is touched; part of the result
inline constexpr Index strip = 64;    ///< rows of w that one thread takes at a time
inline constexpr Index panel = 192;   ///< rows of x that pass over a strip together: 192 x 1024 x 4 B stay in L2
inline constexpr Index small_work = 1 << 22;  ///< FLOP under which a second thread costs more than it brings,
inline constexpr Index small_read = 1 << 19;  ///< provided that no more bytes of weights are read

/// R rows of x against 4 rows of w, both along K: R x 4 sums in registers, 4R FMA for R + 4 loads. y [R,cols], cols <= 4.
/// Registers they are only while every index into `sum` is a constant after unrolling: one variable index, even on a
/// path never taken, and the compiler keeps all twelve in memory. What is needed next is asked for ahead of time: many
/// rows of x stream from L2, and where x is few rows, w streams from memory (float32 rows come fast enough by themselves).
template <int R, class Num>
inline void product_tile(
    const float* x, Index ldx, const Num* w, Index ldw, Index K, float* y, Index ldy, Index cols, bool add) {
  __m256 sum[R][4] = {};
  const auto step = [&sum](const float* xk, Index ldxk, const Num* wk, Index ldwk) {
    __m256 xs[R];
    for (int r = 0; r < R; ++r) xs[r] = load8(xk + r * ldxk);
    for (int c = 0; c < 4; ++c) {
      const __m256 ws = load8(wk + c * ldwk);
      for (int r = 0; r < R; ++r) sum[r][c] = _mm256_fmadd_ps(xs[r], ws, sum[r][c]);
    }
  };
  Index k = 0;
  for (; k + 8 <= K; k += 8) {
    step(x + k, ldx, w + k, ldw);
    if (R == 3)
      for (int r = 0; r < R; ++r) _mm_prefetch(x + (r + R) * ldx + k, _MM_HINT_T0);
    else if (sizeof(Num) == 2)
      for (int c = 0; c < 4; ++c) _mm_prefetch(w + (c + 4) * ldw + k, _MM_HINT_T1);
  }
  if (k < K) {  // the last columns, zeros behind
    float xk[R][8] = {};
    Num wk[4][8] = {};
    for (int r = 0; r < R; ++r) std::copy_n(x + r * ldx + k, K - k, xk[r]);
    for (int c = 0; c < 4; ++c) std::copy_n(w + c * ldw + k, K - k, wk[c]);
    step(xk[0], 8, wk[0], 8);
  }
  __m128 total[R];
  for (int r = 0; r < R; ++r) total[r] = reduce4(sum[r]);
  for (int r = 0; r < R; ++r) {
    float* to = y + r * ldy;
    if (cols == 4) _mm_storeu_ps(to, add ? _mm_add_ps(total[r], _mm_loadu_ps(to)) : total[r]);
    else
      for (Index c = 0; c < cols; ++c) to[c] = add ? total[r][c] + to[c] : total[r][c];
  }
}

/// y [n,m] (+)= x [n,K] w [m,K]^T on the calling thread. Both operands are read along K, so nothing is repacked; from
/// 7 rows of x on, 4 rows of w are first turned into float32 in L1, where every row of x meets them.
///   measured beside Eigen's SGEMM on the same sizes: docs/performance.md
template <class Num>
void product_block(
    const float* x, Index ldx, Index n, const Num* w, Index ldw, Index m, Index K, float* y, Index ldy, bool add) {
  alignas(64) float wide[4 * depth];
  const Index step = n <= 3 ? 4 : m;  // few rows: stream 4 rows of w to their end; many: keep x's block of K in L2
  for (Index c0 = 0; c0 < m; c0 += step)
    for (Index k0 = 0; k0 < K; k0 += depth) {
      const Index width = std::min(depth, K - k0);
      for (Index c = c0; c < std::min(m, c0 + step); c += 4) {
        const Index cols = std::min<Index>(4, m - c);
        const auto rows = [&](const auto* ws, Index ld) {
          const float* xs = x + k0;
          float* ys = y + c;
          const bool more = add || k0 > 0;
          Index i = 0;
          for (; i + 3 <= n; i += 3) product_tile<3>(xs + i * ldx, ldx, ws, ld, width, ys + i * ldy, ldy, cols, more);
          if (n - i == 2) product_tile<2>(xs + i * ldx, ldx, ws, ld, width, ys + i * ldy, ldy, cols, more);
          if (n - i == 1) product_tile<1>(xs + i * ldx, ldx, ws, ld, width, ys + i * ldy, ldy, cols, more);
        };
        if (n <= 6 && cols == 4) {
          rows(w + c * ldw + k0, ldw);
        } else {
          for (Index j = 0; j < 4; ++j) {
            float* to = wide + j * depth;
            if (j >= cols) {
              std::fill_n(to, width, 0.f);
              continue;
            }
            const Num* from = w + (c + j) * ldw + k0;
            Index k = 0;
            for (; k + 8 <= width; k += 8) {
              _mm256_store_ps(to + k, load8(from + k));
              _mm_prefetch(from + 4 * ldw + k, _MM_HINT_T1);  // the next four rows, while these are at work
            }
            for (; k < width; ++k) to[k] = to_float(from[k]);
          }
          rows(static_cast<const float*>(wide), depth);
        }
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
      with_type(p.w.dtype, [&](auto num) {
        product_block(p.x + r * K, K, n, static_cast<const decltype(num)*>(p.w.data) + c * K, K, m, K,
            p.y + r * p.w.rows + c, p.w.rows, p.add);
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
    std::swap(arena_, o.arena_), std::swap(p_, o.p_), std::swap(bytes_, o.bytes_), std::swap(use_, o.use_);
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
    const Index row = p % rows_;
    const char* block = static_cast<const char*>(blocks_[ring_ ? 0 : p / rows_].data());
    const char* k = block + (g * rows_ + row) * dim_ * size_of(dtype_);
    return {k, k + heads_ * rows_ * dim_ * size_of(dtype_), std::min(rows_ - row, end - p), dim_, dtype_};
  }

  /// Writes rows K, V [n,G dh] of positions p0 .. p0+n-1; a ring keeps the last W of them.
  void append(const float* K, const float* V, Index n, Index p0) {
    for (Index i = ring_ ? std::max<Index>(0, n - rows_) : 0; i < n; ++i)
      for (Index g = 0; g < heads_; ++g) {
        const Run to = run(g, p0 + i, p0 + i + 1);
        with_type(dtype_, [&](auto num) {
          using Num = decltype(num);
          auto* k = static_cast<Num*>(const_cast<void*>(to.k));
          auto* v = static_cast<Num*>(const_cast<void*>(to.v));
          for (Index d = 0; d < dim_; ++d) {
            store(K[(i * heads_ + g) * dim_ + d], k + d);
            store(V[(i * heads_ + g) * dim_ + d], v + d);
          }
        });
      }
  }
  // [ring-and-blocks]

 private:
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
struct Part {
  Sequence* sequence;
  Index first, n, p0;
  Logits want;
};

// =====================================================================================================================
// 4. Attention: one definition for window, full and shared, for a chunk and for a single new token

inline constexpr Index key_tile = 64;  ///< keys per step of the online softmax, at multiples of 64; part of the result

/// O [R,dh] += P [R,j] V [j,dh] for R rows of P, j in order. `v` rows are `stride` numbers apart.
template <int R, class Num>
inline void mix_tile(const float* P, Index ldp, const Num* v, Index stride, Index count, float* O, Index dh) {
  Index d = 0;
  for (; d + 32 <= dh; d += 32) {  // 4R sums in registers, 4 + R loads for 4R FMA
    __m256 sum[R][4];
    for (int r = 0; r < R; ++r)
      for (int c = 0; c < 4; ++c) sum[r][c] = load8(O + r * dh + d + 8 * c);
    for (Index j = 0; j < count; ++j) {
      __m256 vs[4];
      for (int c = 0; c < 4; ++c) vs[c] = load8(v + j * stride + d + 8 * c);
      for (int r = 0; r < R; ++r) {
        const __m256 p = _mm256_broadcast_ss(P + r * ldp + j);
        for (int c = 0; c < 4; ++c) sum[r][c] = _mm256_fmadd_ps(p, vs[c], sum[r][c]);
      }
    }
    for (int r = 0; r < R; ++r)
      for (int c = 0; c < 4; ++c) _mm256_storeu_ps(O + r * dh + d + 8 * c, sum[r][c]);
  }
  for (int r = 0; r < R; ++r)
    for (Index j = 0; j < count; ++j)
      for (Index e = d; e < dh; ++e)
        O[r * dh + e] = std::fma(P[r * ldp + j], to_float(v[j * stride + e]), O[r * dh + e]);
}

// [keys]
/// What attention reads: the cache up to position `cached`, and from there on the pass's own fresh rows. A window stage
/// must keep them apart, for in a ring the chunk's last rows overwrite what its first queries still see; full and
/// shared stages append first and have cached = all.
struct Keys {
  Index cache;         ///< which of the sequence's caches
  Index reach;         ///< W; or more than any position: all
  const float *K, *V;  ///< [n,G dh], fresh; null when everything is cached
};
// [keys]

/// Scratch of one thread: the gathered queries, the output, the scores and a widened tile of V.
struct AttentionScratch {
  Slab memory;
  float *q, *o, *s, *v, *max, *sum;
};

/// Queries per tile: about 96 rows of Q a tile with the R heads of a group stacked, but no more than a quarter of the
/// window, since a tile of B queries reads W + B - 1 keys.
inline Index query_tile(Index R, Index reach) {
  return std::clamp<Index>(96 / R, 1, std::max<Index>(16, std::min<Index>(reach, 1024) / 4));
}

/// The R = H/G query heads of KV head g, queries i0 .. i0+b-1 of a part: O = softmax(Q K^T / sqrt(dh)) V, query at
/// position p over positions max(0, p-reach+1) .. p.
///   Q, O   [n,H dh] of the pass, R neighbouring heads of a row used
///   cost   4 R dh FLOP per (query, admitted key); reads each K, V row once for all R b rows of the tile
/// Online softmax: per row the running maximum m, the sum l of e^(s-m) and O; a step of 64 keys rescales l and O by
/// e^(m_old - m_new). Returns the FLOP of the keys admitted.
std::uint64_t attention_tile(const Config& c, const Part& part, const Keys& keys, Index g, Index i0, Index b,
    const float* Q, float* O, AttentionScratch& t) {
  const Index R = c.group(), dh = c.head_dim, rows = b * R, H = c.heads;
  const float scale = static_cast<float>(1 / std::sqrt(static_cast<double>(dh)));
  const Cache& cache = part.sequence->caches[keys.cache];
  const Index cached = keys.K ? part.p0 : part.p0 + part.n;

  for (Index i = 0; i < b; ++i) {  // gather [b R,dh]; a row's R heads are neighbours
    const float* from = Q + ((part.first + i0 + i) * H + g * R) * dh;
    for (Index e = 0; e < R * dh; ++e) t.q[i * R * dh + e] = from[e] * scale;
  }
  std::fill_n(t.o, rows * dh, 0.f);
  std::fill_n(t.max, rows, -infinity);
  std::fill_n(t.sum, rows, 0.f);

  const Index p = part.p0 + i0, low = std::max<Index>(0, p - keys.reach + 1), high = p + b;  // keys of the whole tile
  std::uint64_t admitted = 0;
  for (Index t0 = low / key_tile * key_tile; t0 < high; t0 += key_tile) {
    const Index begin = std::max(low, t0), end = std::min(high, t0 + key_tile);
    const auto each_run = [&](auto&& use) {  // use(run, offset of its first key in the tile)
      for (Index j = begin; j < end;) {
        Run run;
        if (j < cached) {
          run = cache.run(g, j, std::min(end, cached));
        } else {
          const Index row = ((part.first + j - part.p0) * c.kv_heads + g) * dh;
          run = {keys.K + row, keys.V + row, end - j, c.kv_dim(), Dtype::f32};
        }
        use(run, j - t0);
        j += run.count;
      }
    };
    each_run([&](const Run& run, Index at) {  // S [rows,64] = Q K^T
      with_type(run.dtype, [&](auto num) {
        product_block(t.q, dh, rows, static_cast<const decltype(num)*>(run.k), run.stride, run.count, dh, t.s + at,
            key_tile, /*add=*/false);
      });
    });
    // [softmax]
    for (Index r = 0; r < rows; ++r) {  // S becomes P; keys outside the row's own window become e^-inf = 0
      const Index q = p + r / R;
      const Index from = std::clamp(q - keys.reach + 1, begin, end) - t0,
                  to = std::max(std::min(end, q + 1) - t0, from);
      float* s = t.s + r * key_tile;
      std::fill(s, s + from, -infinity);
      std::fill(s + to, s + key_tile, -infinity);
      if (from == to) {
        std::fill(s, s + key_tile, 0.f);
        continue;
      }
      __m256 top = _mm256_set1_ps(t.max[r]);
      for (int j = 0; j < key_tile; j += 8) top = _mm256_max_ps(load8(s + j), top);
      const float m = max8(top), shrink = exp_fast(t.max[r] - m);
      __m256 l[4] = {};
      for (int j = 0; j < key_tile; j += 8) {
        const __m256 e = exp8(_mm256_sub_ps(load8(s + j), _mm256_set1_ps(m)));
        _mm256_storeu_ps(s + j, e);
        l[j / 8 % 4] = _mm256_add_ps(l[j / 8 % 4], e);
      }
      l[0] = _mm256_add_ps(_mm256_add_ps(l[0], l[1]), _mm256_add_ps(l[2], l[3]));
      l[1] = l[2] = l[3] = _mm256_setzero_ps();
      t.sum[r] = std::fma(t.sum[r], shrink, _mm_cvtss_f32(reduce4(l)));
      t.max[r] = m;
      if (shrink != 1.f)
        for (Index e = 0; e < dh; ++e) t.o[r * dh + e] *= shrink;
      admitted += static_cast<std::uint64_t>(to - from);
    }
    // [softmax]
    each_run([&](const Run& run, Index at) {  // O += P V
      with_type(run.dtype, [&](auto num) {
        using Num = decltype(num);
        const auto mix = [&](const auto* v, Index stride) {
          const float* P = t.s + at;
          Index r = 0;
          for (; r + 3 <= rows; r += 3) mix_tile<3>(P + r * key_tile, key_tile, v, stride, run.count, t.o + r * dh, dh);
          for (; r < rows; ++r) mix_tile<1>(P + r * key_tile, key_tile, v, stride, run.count, t.o + r * dh, dh);
        };
        const auto* v = static_cast<const Num*>(run.v);
        if (std::is_same_v<Num, float> || rows <= 6) return mix(v, run.stride);
        for (Index j = 0; j < run.count; ++j)
          for (Index e = 0; e < dh; ++e) t.v[j * dh + e] = to_float(v[j * run.stride + e]);
        mix(t.v, dh);
      });
    });
  }
  for (Index r = 0; r < rows; ++r) {
    const float inverse = 1 / t.sum[r];
    float* to = O + ((part.first + i0 + r / R) * H + g * R + r % R) * dh;
    for (Index e = 0; e < dh; ++e) to[e] = t.o[r * dh + e] * inverse;
  }
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
/// y [n,D] = x * rsqrt(mean(x^2) + eps) * g, g [D]. In float32, rounded once per element.
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
void rope_angles(std::span<const double> frequency, std::span<const Part> parts, float* cosine, float* sine) {
  const Index half = std::ssize(frequency);
  for (const Part& part : parts)
    each_row(part.n, 40 * half, [&](Index i) {
      for (Index j = 0; j < half; ++j) {
        const double angle = static_cast<double>(part.p0 + i) * frequency[j];
        cosine[(part.first + i) * half + j] = static_cast<float>(std::cos(angle));
        sine[(part.first + i) * half + j] = static_cast<float>(std::sin(angle));
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
    const auto step = [](__m256 a, __m256 b) {
      const __m256 one = _mm256_set1_ps(1), e = exp8(_mm256_sub_ps(_mm256_setzero_ps(), a));
      return _mm256_mul_ps(_mm256_div_ps(a, _mm256_add_ps(one, e)), b);
    };
    Index f = 0;
    for (; f + 8 <= F; f += 8) _mm256_storeu_ps(g + f, step(load8(g + f), load8(u + f)));
    alignas(32) float rest[8];
    _mm256_store_ps(rest, step(load_tail(g + f, F - f), load_tail(u + f, F - f)));
    std::copy_n(rest, F - f, g + f);
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
    for (int thread = 0; thread < omp_get_max_threads(); ++thread) {
      AttentionScratch t{
          floats(rows * (2 * c_.head_dim + key_tile + 2) + key_tile * c_.head_dim), {}, {}, {}, {}, {}, {}};
      t.q = t.memory.floats(), t.o = t.q + rows * c_.head_dim, t.s = t.o + rows * c_.head_dim;
      t.v = t.s + rows * key_tile, t.max = t.v + key_tile * c_.head_dim, t.sum = t.max + rows;
      scratch_.push_back(std::move(t));
    }
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
    parts_.clear();
    rows_ = 0;
    for (const Segment& segment : pass) {
      Sequence& sequence = *sequences_[segment.sequence];
      const Index n = std::ssize(segment.tokens);
      for (int token : segment.tokens)
        if (token < 0 || token >= c_.vocab_size)
          fail("token ", token, " is outside the vocabulary 0..", c_.vocab_size - 1);
      const auto same = [&](const Part& p) { return p.sequence == &sequence; };
      if (std::ranges::any_of(parts_, same)) throw std::logic_error("a sequence occurs twice in a pass");
      if (rows_ + n > options_.max_rows) throw std::logic_error("a pass has more rows than the engine was made for");
      parts_.push_back({&sequence, rows_, n, sequence.length, segment.want});
      rows_ += n;
    }
    for (const Part& part : parts_)
      for (Cache& cache : part.sequence->caches) cache.grow(part.p0 + part.n);
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
      rope_angles(frequency_, parts_, cos_.floats(), sin_.floats());
    show(-1, 0, 0);
  }

  // [universal-self-decoder]
  /// USD(X): the stage's layers, T times over with the same weights. Each (loop, layer) has a cache of its own, for a
  /// position's keys differ from loop to loop; a position's angle does not. Window stages reach T L (W-1) positions
  /// back in all. The same lines are the Transformer (full, T = 1), UT (full, T) and both halves of RINS.
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
    Keys keys{cache, reach(stage), nullptr, nullptr};
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
      keys.K = k, keys.V = v;
    }
    attention(keys, q, o);  // o [n,H dh]  4 H dh FLOP a key
    if (stage.attention == Attention::window) append(cache);
    multiply({{o, n, w.wo, x, /*add=*/true}});  // x += o wo^T  2 n D H dh FLOP

    rms_norm(x, w.ffn_norm, eps(), n, a);
    if (c_.moe) mixture(w);
    else ffn(w.dense);
    show(s, t, l);
  }
  // [layer]

  /// O [n,H dh] of the pass: tiles of queries by KV head by sequence, spread over the threads.
  void attention(const Keys& keys, const float* Q, float* O) {
    const Index b = query_tile(c_.group(), keys.reach), G = c_.kv_heads;
    tiles_.clear();
    Index work = 0;
    for (const Part& part : parts_) {
      for (Index i = 0; i < part.n; i += b) tiles_.push_back({&part, i});
      const Index seen = std::min(keys.reach, part.p0 + part.n);
      work += 4 * part.n * seen * c_.q_dim();
      const Index cached = std::min(keys.K ? part.p0 : part.p0 + part.n, keys.reach);
      counters.bytes += static_cast<std::uint64_t>(2 * cached * c_.kv_dim() * size_of(options_.kv_dtype));
    }
    std::uint64_t flops = 0;
#pragma omp parallel for schedule(dynamic) if (work > small_work) reduction(+ : flops)
    for (Index i = 0; i < std::ssize(tiles_) * G; ++i) {
      const auto [part, i0] = tiles_[i / G];
      flops +=
          attention_tile(c_, *part, keys, i % G, i0, std::min(b, part->n - i0), Q, O, scratch_[omp_get_thread_num()]);
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
    std::size_t parts = 0;
    for (Part part : parts_) {
      if (part.want == Logits::none || part.n == 0) continue;
      const Index skip = part.want == Logits::last ? part.n - 1 : 0, half = c_.head_dim / 2;
      const auto move = [&](Slab& m, Index width) {
        float* to = m.floats() + kept * width;
        std::memmove(
            to, m.floats() + (part.first + skip) * width, static_cast<std::size_t>((part.n - skip) * width * 4));
      };
      move(x_, c_.dim), move(cos_, half), move(sin_, half);
      parts_[parts++] = {part.sequence, kept, part.n - skip, part.p0 + skip, part.want};
      kept += part.n - skip;
    }
    parts_.resize(parts);
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
        const Part& part = *std::find_if(
            parts_.begin(), parts_.end(), [row = i / c_.vocab_size](const Part& p) { return row < p.first + p.n; });
        fail("logit of token ", i % c_.vocab_size, " at position ", part.p0 + i / c_.vocab_size - part.first, " is ",
            logits[i], ", not a finite number: the weights hold NaN, infinity or too large values");
      }
  }

  float eps() const { return static_cast<float>(c_.norm_eps); }
  void multiply(std::initializer_list<Product> products) {
    yocou::multiply({products.begin(), products.size()}, counters);
  }
  void append(Index cache) {
    for (const Part& p : parts_)
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

  struct Tile {
    const Part* part;
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
  std::vector<Part> parts_;
  std::vector<Tile> tiles_;
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
  const char* name;
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
  const auto it = std::find_if(archs().begin(), archs().end(), [&](const Arch& a) { return a.name == name; });
  return it == archs().end() ? nullptr : &*it;
}

/// The stage that the architecture marks x T, or null.
Stage* looped_stage(Config& c) {
  const Arch* arch = find_arch(c.arch);
  for (std::size_t s = 0; arch && s < arch->parts.size(); ++s)
    if (arch->parts[s].looped) return &c.stages[s];
  return nullptr;
}

/// Sets T of the looped stage; 0 keeps it. Throws Usage when there is none.
void set_loops(Config& c, Index T) {
  Stage* stage = looped_stage(c);
  if (T && !stage) throw Usage("--loops: arch '" + c.arch + "' has no looped stage");
  if (T) stage->loops = T;
}

/// Overrides of a shape; 0: keep.
struct ShapeOptions {
  Index layers = 0, window = 0, loops = 0;
};

/// A shape (1.3b, 10b-moe, small, tiny) as an architecture. F and V of 1.3b are not published and chosen here.
/// Throws Usage for an unknown name and for an override that the architecture cannot take.
Config make_config(const std::string& shape, const std::string& arch_name, const ShapeOptions& o) {
  struct Preset {
    const char* name;
    Index D, L, H, G, dh, F, V, W;
  };
  static const Preset presets[] = {{"1.3b", 2560, 20, 20, 4, 128, 6912, 100352, 512},
      {"10b-moe", 2560, 20, 20, 4, 128, 0, 100352, 512}, {"small", 512, 8, 4, 1, 128, 1408, 256, 512},
      {"tiny", 128, 4, 2, 1, 64, 352, 256, 64}};
  const Arch* arch = find_arch(arch_name);
  const auto* p =
      std::find_if(std::begin(presets), std::end(presets), [&](const Preset& q) { return q.name == shape; });
  if (!arch) throw Usage("--arch: no architecture '" + arch_name + "'");
  if (p == std::end(presets)) throw Usage("--shape: no shape '" + shape + "'");
  if (o.window && !arch->takes_window()) throw Usage("--window: arch '" + arch_name + "' has no window stage");
  const Index L = o.layers ? o.layers : p->L;
  Config c;
  c.arch = arch_name;
  c.vocab_size = p->V, c.dim = p->D, c.heads = p->H, c.kv_heads = p->G, c.head_dim = p->dh, c.ffn_dim = p->F;
  if (!p->F) c.moe = Moe{64, 8, 1024, 1024, true};
  for (const Arch::Part& part : arch->parts) {
    if (part.half && L % 2)
      throw Usage("--layers: arch '" + arch_name + "' halves its layers, " + std::to_string(L) + " is odd");
    const Index window = part.attention == Attention::window ? (o.window ? o.window : p->W) : 0;
    c.stages.push_back({part.name, part.half ? L / 2 : L, part.looped ? arch->loops : 1, part.attention, window,
        /*rope=*/part.attention != Attention::shared, part.refresh});
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

/// Reads an object's fields one by one and refuses what is missing, of the wrong kind, out of range, or left over.
class Fields {
 public:
  Fields(const Json& object, std::string where) : object_(object), where_(std::move(where)) {
    if (!object.is_object()) fail(where_, ": expected an object, found ", object.type_name());
  }
  const Json* find(const std::string& key) {
    known_.insert(key);
    const auto it = object_.find(key);
    return it == object_.end() ? nullptr : &*it;
  }
  const Json& need(const std::string& key) {
    const Json* value = find(key);
    if (!value) fail(where_, ": key \"", key, "\" is missing");
    return *value;
  }
  Index integer(const std::string& key, Index low, Index high, std::optional<Index> otherwise = {}) {
    const auto good = [=](const Json& v) {
      return v.is_number_integer() && v.get<__int128>() >= low && v.get<__int128>() <= high;
    };
    return get(key, "an integer from " + std::to_string(low) + " to " + std::to_string(high), good, otherwise);
  }
  double number(const std::string& key, double low, double otherwise) {  // held as float32 later
    const auto good = [=](const Json& v) { return v.is_number() && v.get<double>() >= low && v.get<double>() <= 1e38; };
    return get<double>(key, low > 0 ? "a number above 0, at most 1e38" : "a number from 0 to 1e38", good, otherwise);
  }
  bool flag(const std::string& key, std::optional<bool> otherwise = {}) {
    return get(
        key, "true or false", [](const Json& v) { return v.is_boolean(); }, otherwise);
  }
  std::string text(const std::string& key, const std::optional<std::string>& otherwise = {}) {
    return get(
        key, "a string", [](const Json& v) { return v.is_string(); }, otherwise);
  }
  /// Index of the key's value in `names`.
  std::size_t one_of(
      const std::string& key, const std::vector<std::string>& names, const std::optional<std::string>& otherwise = {}) {
    std::string list;
    for (const std::string& n : names) list += (list.empty() ? "" : ", ") + n;
    const auto place = [&](const std::string& v) { return std::find(names.begin(), names.end(), v) - names.begin(); };
    const auto good = [&](const Json& v) { return v.is_string() && place(v.get<std::string>()) < std::ssize(names); };
    return static_cast<std::size_t>(place(get(key, "one of " + list, good, otherwise)));
  }
  /// Every key must have been asked for.
  void done() const {
    for (const auto& [key, value] : object_.items())
      if (!known_.count(key)) fail(where_, ": unknown key ", quote(key));
  }
  const std::string& where() const { return where_; }

 private:
  template <class T, class Good>
  T get(const std::string& key, const std::string& expected, Good&& good, const std::optional<T>& otherwise) {
    if (otherwise && !find(key)) return *otherwise;
    const Json& v = need(key);
    if (!good(v)) fail(where_, ": \"", key, "\" must be ", expected, ", found ", quote(v));
    return v.get<T>();
  }
  const Json& object_;
  std::string where_;
  std::set<std::string> known_;
};

inline constexpr Index most = std::numeric_limits<std::int32_t>::max();  ///< bound of every size in a config
inline const std::vector<std::string> attention_names{"window", "full", "shared"};
inline const std::vector<std::string> dtype_names{"F32", "BF16", "F16"};

/// One stage of a config.
Stage read_stage(const Json& json, const std::string& where) {
  Fields f(json, where);
  Stage s;
  s.name = f.text("name");
  const auto control = [](unsigned char ch) { return ch < 32 || ch >= 127; };
  if (s.name.empty() || s.name == "kv" || s.name.find('.') != std::string::npos || std::ranges::any_of(s.name, control))
    fail(where, ": a stage's name is printable ASCII, not empty, has no dot and is not \"kv\", found ", quote(s.name));
  s.layers = f.integer("layers", 1, 4096);
  s.loops = f.integer("loops", 1, 4096, 1);
  s.attention = static_cast<Attention>(f.one_of("attention", attention_names));
  const bool shared = s.attention == Attention::shared;
  if (s.attention == Attention::window) s.window = f.integer("window", 1, most);
  else if (f.find("window")) fail(where, ": \"window\" belongs on a window stage only");
  s.rope = f.flag("rope", !shared);
  if (shared) s.refresh_kv = f.flag("refresh_kv", false);
  else if (f.find("refresh_kv")) fail(where, ": \"refresh_kv\" belongs on a shared stage only");
  f.done();
  return s;
}

/// The config of a checkpoint. Throws Error naming `where`, the key, what was expected and what was found.
Config read_config(const Json& json, const std::string& where) {
  Fields f(json, where + ": config");
  Config c;
  std::vector<std::string> labels{"custom"};
  for (const Arch& a : archs()) labels.push_back(a.name);
  c.arch = labels[f.one_of("arch", labels)];
  c.vocab_size = f.integer("vocab_size", 1, most);
  c.dim = f.integer("dim", 1, most);
  c.heads = f.integer("heads", 1, most);
  c.kv_heads = f.integer("kv_heads", 1, most);
  c.head_dim = f.integer("head_dim", 1, most);
  c.norm_eps = f.number("norm_eps", 0, 1e-5);
  c.rope_theta = f.number("rope_theta", std::numeric_limits<double>::min(), 10000);
  c.rope_half = f.one_of("rope_pairing", {"interleaved", "half"}, "interleaved") == 1;
  c.embed_scale = f.number("embed_scale", 0, 1);
  c.tied_embeddings = f.flag("tied_embeddings", false);
  f.one_of("tokenizer", {"bytes"}, "bytes");
  if (const Json* moe = f.find("moe")) {
    Fields m(*moe, f.where() + ": moe");
    c.moe = Moe{m.integer("experts", 1, most), m.integer("active", 1, most), m.integer("dim", 1, most),
        m.integer("shared_dim", 0, most, 0), m.flag("normalize", false)};
    m.done();
    if (c.moe->active > c.moe->experts) fail(m.where(), ": ", c.moe->active, " active experts of ", c.moe->experts);
    if (f.find("ffn_dim")) fail(f.where(), ": \"ffn_dim\" and \"moe\" exclude each other");
  } else {
    c.ffn_dim = f.integer("ffn_dim", 1, most);
  }
  if (c.heads % c.kv_heads) fail(f.where(), ": heads ", c.heads, " is not a multiple of kv_heads ", c.kv_heads);
  const Json& stages = f.need("stages");
  if (!stages.is_array() || stages.empty()) fail(f.where(), ": \"stages\" must be a list of at least one stage");
  std::set<std::string> names;
  for (const Json& stage : stages) {
    const std::string at = f.where() + ": stage " + std::to_string(c.stages.size());
    const Stage s = read_stage(stage, at);
    if (!names.insert(s.name).second) fail(at, ": two stages are named ", quote(s.name));
    if (s.rope && c.head_dim % 2) fail(at, ": head_dim ", c.head_dim, " is odd, RoPE needs pairs");
    if (c.has_shared()) fail(at, ": follows a shared stage; the one shared stage is the last");
    c.stages.push_back(s);
  }
  f.done();
  if (const Arch* arch = find_arch(c.arch)) {  // a label promises its stages
    const auto fits = [](const Arch::Part& p, const Stage& s) {
      return p.attention == s.attention && p.refresh == s.refresh_kv && (p.looped || s.loops == 1);
    };
    if (!std::equal(arch->parts.begin(), arch->parts.end(), c.stages.begin(), c.stages.end(), fits))
      fail(f.where(), ": \"arch\" says ", c.arch, ", the stages do not; \"custom\" fits any stages");
  }
  return c;
}

/// The config as JSON, every key written out; what read_config() reads.
Json config_json(const Config& c) {
  Json j;
  j["arch"] = c.arch, j["vocab_size"] = c.vocab_size, j["dim"] = c.dim;
  j["heads"] = c.heads, j["kv_heads"] = c.kv_heads, j["head_dim"] = c.head_dim;
  if (const auto& m = c.moe) {
    Json& moe = j["moe"];
    moe["experts"] = m->experts, moe["active"] = m->active, moe["dim"] = m->dim;
    moe["shared_dim"] = m->shared_dim, moe["normalize"] = m->normalize;
  } else {
    j["ffn_dim"] = c.ffn_dim;
  }
  j["norm_eps"] = c.norm_eps, j["rope_theta"] = c.rope_theta, j["rope_pairing"] = c.rope_half ? "half" : "interleaved";
  j["embed_scale"] = c.embed_scale, j["tied_embeddings"] = c.tied_embeddings, j["tokenizer"] = c.tokenizer;
  for (const Stage& s : c.stages) {
    Json g;
    g["name"] = s.name, g["layers"] = s.layers, g["loops"] = s.loops;
    g["attention"] = attention_names[static_cast<std::size_t>(s.attention)];
    if (s.window) g["window"] = s.window;
    g["rope"] = s.rope;
    if (s.attention == Attention::shared) g["refresh_kv"] = s.refresh_kv;
    j["stages"].push_back(g);
  }
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
    size_ = regular ? info.st_size : 0;
    if (size_ > 0) p_ = ::mmap(nullptr, static_cast<std::size_t>(size_), PROT_READ, MAP_PRIVATE, fd, 0);
    const int error = errno;
    ::close(fd);
    if (!regular) fail(path, ": not a regular file");
    if (p_ == MAP_FAILED) fail(path, ": cannot be mapped: ", std::strerror(error));
  }
  MappedFile(const MappedFile&) = delete;
  ~MappedFile() {
    if (p_) ::munmap(p_, static_cast<std::size_t>(size_));
  }
  Index size() const { return size_; }
  std::string_view text() const { return {static_cast<const char*>(p_), static_cast<std::size_t>(size_)}; }

 private:
  void* p_ = nullptr;
  Index size_ = 0;
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

std::string shape_text(const Shape& shape) {
  std::string s;
  for (const Index d : shape) s += (s.empty() ? "[" : ",") + std::to_string(d);
  return s + "]";
}

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

/// One entry of a header, checked in itself: dtype, shape and offsets agree and lie in `data` bytes.
StoredTensor read_tensor(
    const std::string& name, const Json& entry, const std::string& path, Index header, Index data) {
  Fields f(entry, path + ": tensor " + quote(name));
  StoredTensor t{name, static_cast<Dtype>(f.one_of("dtype", dtype_names)), {}, 0, 0};
  const Json &shape = f.need("shape"), &offsets = f.need("data_offsets");
  f.done();
  const auto within = [](const Json& v, Index low, Index high) {
    return v.is_number_integer() && v.get<__int128>() >= low && v.get<__int128>() <= high;
  };
  if (!shape.is_array() || shape.empty() || shape.size() > 3) fail(f.where(), ": \"shape\" must list 1 to 3 sizes");
  Index bytes = size_of(t.dtype);
  for (const Json& d : shape) {
    if (!within(d, 1, std::numeric_limits<Index>::max()))
      fail(f.where(), ": \"shape\" must hold integers of at least 1, found ", quote(d));
    t.shape.push_back(d.get<Index>());
    if (__builtin_mul_overflow(bytes, t.shape.back(), &bytes) || bytes > data)
      fail(f.where(), ": shape ", shape_text(t.shape), " takes more than the file's ", data, " bytes of data");
  }
  if (!offsets.is_array() || offsets.size() != 2 || !within(offsets[0], 0, data) || !within(offsets[1], 0, data))
    fail(f.where(), ": \"data_offsets\" must be two integers from 0 to the file's ", data, ", found ", quote(offsets));
  t.begin = offsets[0].get<Index>(), t.end = offsets[1].get<Index>();
  if (t.end - t.begin != bytes)
    fail(f.where(), ": shape ", shape_text(t.shape), " ", dtype_names[static_cast<std::size_t>(t.dtype)], " takes ",
        bytes, " bytes, data_offsets [", t.begin, ",", t.end, "] give ", t.end - t.begin);
  if ((header + t.begin) % size_of(t.dtype))
    fail(f.where(), ": its data is not aligned to ", size_of(t.dtype), " bytes");
  return t;
}

/// Reads the header and checks it against the file: the tensors cover the data without gap or overlap. Returns them in
/// file order, and the config as JSON. Throws Error naming file, tensor, expected and found.
std::vector<StoredTensor> read_header(const MappedFile& file, const std::string& path, Json& config) {
  std::uint64_t length = 0;
  if (file.size() < 8) fail(path, ": a safetensors file has at least 8 bytes, found ", file.size());
  std::memcpy(&length, file.text().data(), 8);
  const Index behind = file.size() - 8, limit = 100'000'000;
  if (length > static_cast<std::uint64_t>(std::min(behind, limit)))
    fail(path, ": the header claims ", length, " bytes; ", behind, " follow in the file, ", limit, " are the limit");
  const Json header = parse_json(file.text().substr(8, length), path + ": header");
  if (!header.is_object()) fail(path, ": header: expected an object, found ", header.type_name());
  const auto meta = header.find("__metadata__");
  if (meta == header.end() || !meta->is_object() || !meta->contains("yocou") || !meta->at("yocou").is_string())
    fail(path, ": no __metadata__ with a string \"yocou\", the config; not a yocou checkpoint");
  config = parse_json(meta->at("yocou").get_ref<const std::string&>(), path + ": config");
  const Index start = 8 + static_cast<Index>(length), data = file.size() - start;
  std::vector<StoredTensor> tensors;
  for (const auto& [name, entry] : header.items())
    if (name != "__metadata__") tensors.push_back(read_tensor(name, entry, path, start, data));
  std::sort(tensors.begin(), tensors.end(), [](const auto& a, const auto& b) { return a.begin < b.begin; });
  Index at = 0;
  for (const StoredTensor& t : tensors) {
    if (t.begin != at)
      fail(path, ": tensor ", quote(t.name), ": data begins at ", t.begin, ", expected ", at,
          t.begin < at ? ", overlap" : ", gap");
    at = t.end;
  }
  if (at != data)
    fail(path, ": the tensors end at ", at, ", the data at ", data, ": truncated, or with bytes left over");
  return tensors;
}

/// Opens a checkpoint. The weights are views of the mapped file. Throws Error, one line, for anything that is not
/// exactly a model.
Model load_model(const std::string& path) {
  Model m;
  m.file = std::make_unique<MappedFile>(path);
  Json config;
  m.tensors = read_header(*m.file, path, config);
  m.config = read_config(config, path);
  Index layers = 0;
  for (const Stage& s : m.config.stages) layers += s.layers;
  if (layers > std::ssize(m.tensors))
    fail(path, ": the config has ", layers, " layers, the file only ", m.tensors.size(), " tensors");
  m.weights = empty_weights(m.config);
  std::map<std::string, const StoredTensor*> stored;
  for (const StoredTensor& t : m.tensors) stored[t.name] = &t;
  const char* data = m.file->text().data() + m.file->size() - (m.tensors.empty() ? 0 : m.tensors.back().end);
  for_each_tensor(m.config, m.weights, [&](const std::string& name, const Shape& shape, Tensor& t) {
    const auto it = stored.find(name);
    const std::string found = it == stored.end() ? "none in the file" : shape_text(it->second->shape);
    if (it == stored.end() || it->second->shape != shape)
      fail(path, ": tensor ", quote(name), ": expected shape ", shape_text(shape), ", found ", found);
    t = as_matrix(data + it->second->begin, it->second->dtype, shape);
    stored.erase(it);
  });
  if (!stored.empty()) {
    const std::string& name = stored.begin()->first;
    fail(path, ": tensor ", quote(name), " is not in the config",
        name == "head" ? ": tied_embeddings makes embed the head" : "");
  }
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
    struct stat info {};
    if (::stat(path.c_str(), &info) == 0 && !S_ISREG(info.st_mode)) fail(path, ": exists and is not a regular file");
    out_ = std::fopen(beside_.c_str(), "wbx");
    if (!out_) fail(path_, ": cannot be written: ", std::strerror(errno));
  }
  OutputFile(const OutputFile&) = delete;
  void write(const void* data, std::size_t bytes) { check(std::fwrite(data, 1, bytes, out_) == bytes); }
  void commit() {
    check(std::fflush(out_) == 0 && fsync(fileno(out_)) == 0);
    check(std::fclose(std::exchange(out_, nullptr)) == 0);
    check(std::rename(beside_.c_str(), path_.c_str()) == 0);
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
  header["__metadata__"]["format"] = "pt";  // transformers' mark: loadable by PyTorch
  header["__metadata__"]["yocou"] = config_json(c).dump();
  Weights w = empty_weights(c);
  Index at = 0;
  for_each_tensor(c, w, [&](const std::string& name, const Shape& shape, Tensor&) {
    Json& entry = header[name];
    entry["dtype"] = dtype_names[static_cast<std::size_t>(dtype)];
    entry["shape"] = shape;
    entry["data_offsets"] = {at, at + as_matrix(nullptr, dtype, shape).bytes()};
    at = entry["data_offsets"][1].get<Index>();
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
  Exact operator+(const Exact& o) const {
    return checked(o, [](auto a, auto b, auto* r) { return __builtin_add_overflow(a, b, r); });
  }
  Exact operator*(const Exact& o) const {
    return checked(o, [](auto a, auto b, auto* r) { return __builtin_mul_overflow(a, b, r); });
  }
  Exact& operator+=(const Exact& o) { return *this = *this + o; }
  friend Exact operator*(Index a, const Exact& b) { return Exact(a) * b; }
  auto operator<=>(const Exact&) const = default;
  explicit operator double() const { return static_cast<double>(v); }

 private:
  template <class Op>
  Exact checked(const Exact& o, Op op) const {
    Exact r;
    if (op(v, o.v, &r.v)) fail("a cost exceeds 2^128");
    return r;
  }
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

/// Stored elements; loops count once.
struct Params {
  Exact params;  ///< without embedding and head, norm gains included
  Exact active;  ///< the same with experts x active/experts
  Exact embed, head;
};
Params count_params(const Config& c) {
  const Exact D = c.dim, q = Exact(c.heads) * c.head_dim, kv = Exact(c.kv_heads) * c.head_dim;
  Params p{D, D, D * c.vocab_size, c.tied_embeddings ? Exact(0) : D * c.vocab_size};
  if (c.has_shared()) p.params += D + 2 * kv * D, p.active += D + 2 * kv * D;
  for (const Stage& g : c.stages) {
    const Exact own = 2 * D + 2 * q * D + (g.attention == Attention::shared ? Exact(0) : 2 * kv * D);
    const auto with_ffn = [&](Index experts) {
      return own + (c.moe ? D * c.moe->experts + 3 * D * (Exact(experts) * c.moe->dim + c.moe->shared_dim)
                          : 3 * D * c.ffn_dim);
    };
    p.params += g.layers * with_ffn(c.moe ? c.moe->experts : 0);
    p.active += g.layers * with_ffn(c.moe ? c.moe->active : 0);
  }
  return p;
}

// [decode-bytes]
/// Bytes that a decode step of a batch after N tokens must read: each weight once per loop that uses it (of E experts
/// at most min(E, batch x active)), the head, one embedding row a sequence, and every cached row that is seen; w bytes
/// a weight, s bytes a cached number.
Exact decode_bytes(const Config& c, Index N, Index batch, Index w, Index s) {
  const Exact D = c.dim, q = Exact(c.heads) * c.head_dim, kv = Exact(c.kv_heads) * c.head_dim;
  Exact weights = D * c.vocab_size + D + Exact(batch) * D, rows = 0;
  for (const Stage& g : c.stages) {
    const bool shared = g.attention == Attention::shared;
    const Exact passes = Exact(g.layers) * g.loops;
    const Exact ffn =
        c.moe ? D * c.moe->experts +
                    3 * D * (Exact(std::min(c.moe->experts, batch * c.moe->active)) * c.moe->dim + c.moe->shared_dim)
              : 3 * D * c.ffn_dim;
    weights += passes * (2 * D + 2 * q * D + ffn + (shared ? Exact(0) : 2 * kv * D));
    if (shared) weights += Exact(g.refresh_kv ? g.loops : 1) * (D + 2 * kv * D);
    rows += passes * (g.window ? std::min(N + 1, g.window) : N + 1);
  }
  return weights * w + Exact(batch) * rows * 2 * kv * s;
}
// [decode-bytes]

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

/// The number behind `key` in a /proc or cgroup file, or -1.
Index number_in(const std::string& path, const std::string& key) {
  std::ifstream in(path);
  for (std::string line; std::getline(in, line);)
    if (line.starts_with(key)) {
      Index v = -1;
      return std::istringstream(line.substr(key.size())) >> v ? v : -1;
    }
  return -1;
}

/// Bytes that can still be allocated: the machine's, or the control group's if that is less, but for a twentieth that
/// is left to everything else.
Index available_memory() {
  Index available = number_in("/proc/meminfo", "MemAvailable:") * 1024;
  std::string group;
  std::ifstream in("/proc/self/cgroup");
  for (std::string line; std::getline(in, line);)
    if (line.starts_with("0::")) group = line.substr(3);
  for (std::filesystem::path p = group; p.has_relative_path(); p = p.parent_path()) {
    const std::string at = "/sys/fs/cgroup" + p.string();
    const Index limit = number_in(at + "/memory.max", ""), used = number_in(at + "/memory.current", "");
    const Index cached = std::max<Index>(0, number_in(at + "/memory.stat", "inactive_file "));
    if (limit >= 0 && used >= 0) available = std::min(available, std::max<Index>(0, limit - used + cached));
  }
  return available - available / 20;
}

/// Throws Error when `bytes` more will not fit; both figures are in the line.
void require_memory(const Exact& bytes, const std::string& what) {
  const Index available = available_memory();
  if (bytes > Exact(available))
    fail(what, " needs ", to_string(bytes), " bytes of memory, ", available, " are available");
}

/// About what an engine's buffers take for passes of n rows, logits included.
Exact activation_bytes(const Config& c, Index n) {
  Exact row = Exact(2) * c.dim + 2 * Exact(c.q_dim()) + 2 * Exact(c.kv_dim()) + c.head_dim + c.vocab_size;
  if (const auto& m = c.moe)
    row += Exact(m->experts) + Exact(m->active) * (Exact(c.dim) + 2 * Exact(m->dim)) + 2 * Exact(m->shared_dim);
  else row += 2 * Exact(c.ffn_dim);
  return row * n * 4;
}

/// A model of random weights in memory, for measuring.
Model random_model(const Config& c, Dtype dtype, std::uint64_t seed) {
  const Params p = count_params(c);
  require_memory((p.params + p.embed + p.head) * size_of(dtype), "a model of random weights");
  Model m;
  m.config = c;
  m.weights = empty_weights(c);
  m.arena = std::make_unique<Arena>();
  for_each_tensor(c, m.weights, [&](const std::string&, const Shape& shape, Tensor& t) {
    stop_if_interrupted();
    t = as_matrix(nullptr, dtype, shape);
    const auto number = static_cast<std::uint64_t>(m.slabs.size());
    m.slabs.emplace_back(*m.arena, t.bytes(), Use::weights);
    t.data = m.slabs.back().data();
    random_numbers(seed, number, shape, dtype, 0, t.rows * t.cols, m.slabs.back().data());
  });
  if (c.tied_embeddings) m.weights.head = m.weights.embed;
  return m;
}

/// Bytes of this process in RAM now.
Index resident_memory() { return number_in("/proc/self/status", "VmRSS:") * 1024; }

/// A progress line on stderr, for work of more than a second: redrawn on a terminal, every ten seconds elsewhere.
class Progress {
 public:
  explicit Progress(const char* what) : what_(what) {}
  void operator()(Index done, Index total) {
    const double t = seconds_since(start_);
    if (t < next_) return;
    next_ = t + (terminal_ ? 0.2 : 10);
    const double percent = 100 * static_cast<double>(done) / static_cast<double>(total);
    std::fprintf(stderr, terminal_ ? "\r%s %3.0f%%, %.0f s\033[K" : "%s %.0f%%, %.0f s\n", what_, percent, t);
    shown_ = true;
  }
  ~Progress() {
    if (shown_ && terminal_) std::fputs("\r\033[K", stderr);
  }

 private:
  const char* what_;
  Clock::time_point start_ = Clock::now();
  bool terminal_ = isatty(STDERR_FILENO), shown_ = false;
  double next_ = 1;
};

/// What this machine can do at the current thread count: the denominators of attainment.
struct Limits {
  double gemm_gflops = 0;  ///< Eigen's SGEMM on 512 x 2048 x 2048, the best of several
  double read_gbs = 0;     ///< reading 256 MiB, the best of several loops and repetitions
};

Limits measure_limits() {
  using Matrix = Eigen::Matrix<float, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;
  const Index n = 512, K = 2048, count = Index{64} << 20, piece = 1 << 16;
  const Matrix x = Matrix::Random(n, K), w = Matrix::Random(K, K);
  Matrix y(n, K);
  Limits best;
  const auto fastest = [](double& best, double work, auto&& f) {
    const auto start = Clock::now();
    f();
    best = std::max(best, work / seconds_since(start));
  };
  for (int i = 0; i < 8; ++i) {
    fastest(best.gemm_gflops, 2e-9 * n * K * K, [&] { y.noalias() = x * w.transpose(); });
    fastest(
        best.gemm_gflops, 2e-9 * n * K * K, [&] {  // a slice of columns a thread: sometimes better than its own split
#pragma omp parallel for schedule(static)
          for (Index c = 0; c < K; c += 128) y.middleCols(c, 128).noalias() = x * w.middleRows(c, 128).transpose();
        });
  }
  const std::vector<float> data(static_cast<std::size_t>(count), 1.f);
  double sink = 0;
  for (int i = 0; i < 12; ++i)
    fastest(
        best.read_gbs, 4e-9 * static_cast<double>(count), [&, streams = i % 2 ? 4 : 1] {  // streams read side by side
          double total = 0;
#pragma omp parallel for schedule(static) reduction(+ : total)
          for (Index at = 0; at < count; at += piece) {
            __m256 sum[4] = {};
            const Index apart = piece / streams, step = 32 / streams;
            for (Index k = 0; k < apart; k += step)
              for (int s = 0; s < 4; ++s)
                sum[s] = _mm256_add_ps(
                    sum[s], load8(&data[static_cast<std::size_t>(at + (streams == 4 ? s * apart + k : k + 8 * s))]));
            total += _mm_cvtss_f32(reduce4(sum));
          }
          sink += total;
        });
  if (!(sink > 0)) fail("the bandwidth measurement read wrong values");
  return best;
}

std::string cpu_name() {
  std::ifstream in("/proc/cpuinfo");
  for (std::string line; std::getline(in, line);)
    if (line.starts_with("model name")) return line.substr(line.find(": ") + 2);
  return "unknown";
}

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

/// Every option of every command; a command binds those it has.
struct Options {
  std::string model, prompt, prompt_file, file, tokens, tokens_file, shape, arch, out, memory, by;
  std::string device = "cpu", kv_dtype, dtype = "bf16", loops_list, N_list;
  Index n = 256, chunk = 0, threads = 0, prefill = 0, batch = 1, kv_bytes = 2, runs = 3, steps = 4, top_k = 0;
  std::uint64_t seed = 0;
  double temperature = 0, top_p = 1;
  ShapeOptions shape_options;
  bool json = false, csv = false, last = false, by_position = false, allocate_only = false;
};

/// Results go to stdout through here: a full disk is an error, a reader that has gone ends the program quietly.
void put(std::string_view text) {
  if (std::fwrite(text.data(), 1, text.size(), stdout) == text.size() && std::fflush(stdout) == 0) return;
  if (errno == EPIPE) std::_Exit(0);
  fail("standard output: ", std::strerror(errno));
}

/// A value for people: integers in full, other numbers with four significant digits.
std::string cell(const Json& v) {
  if (v.is_string()) return v.get<std::string>();
  if (v.is_null()) return "-";
  if (!v.is_number_float()) return dump(v);
  std::ostringstream s;
  s << std::setprecision(4) << v.get<double>();
  return s.str();
}

/// Prints rows of equal keys as JSON ({"rows":[...]} and `more`), CSV, or a table for people.
void put_rows(const std::vector<Json>& rows, const Options& o, Json more = Json::object()) {
  if (o.json) {
    more["rows"] = rows;
    return put(dump(more) + "\n");
  }
  if (rows.empty()) return;
  std::vector<std::vector<std::string>> lines(1);
  for (const auto& [key, value] : rows[0].items()) lines[0].push_back(key);
  for (const Json& row : rows) {
    lines.emplace_back();
    for (const auto& [key, value] : row.items())
      lines.back().push_back(o.csv && !value.is_string() ? (value.is_null() ? "" : dump(value)) : cell(value));
  }
  std::vector<std::size_t> width(lines[0].size());
  for (const auto& line : lines)
    for (std::size_t i = 0; i < std::min(width.size(), line.size()); ++i) width[i] = std::max(width[i], line[i].size());
  std::string text;
  for (auto& line : lines) {
    for (std::size_t i = 0; i < line.size(); ++i) {
      std::string& s = line[i];
      const auto control = [](unsigned char ch) { return ch < 32 || ch == 127; };
      if (!o.csv) std::ranges::replace_if(s, control, '?');
      if (o.csv && s.find_first_of(",\"\n") != std::string::npos) {  // RFC 4180
        for (std::size_t q = 0; (q = s.find('"', q)) != std::string::npos; q += 2) s.insert(q, 1, '"');
        s = '"' + s + '"';
      }
      const std::string pad(o.csv ? 0 : width[i] - s.size(), ' ');
      text += (i == 0 ? "" : o.csv ? "," : "  ") + (i == 0 ? s + pad : pad + s);
    }
    text += "\n";
  }
  put(text);
}

/// "1,2,3" as integers within [low, high]. Throws Usage naming the option.
std::vector<Index> integers(const std::string& text, const char* option, Index low, Index high) {
  std::vector<Index> out;
  for (std::size_t at = 0; at <= text.size();) {
    const std::size_t end = std::min(text.size(), text.find(',', at));
    Index v = 0;
    const auto [stop, error] = std::from_chars(text.data() + at, text.data() + end, v);
    if (error != std::errc() || stop != text.data() + end || v < low || v > high)
      throw Usage(std::string(option) + ": expected integers from " + std::to_string(low) + " to " +
                  std::to_string(high) + ", separated by commas, found '" + text + "'");
    out.push_back(v);
    at = end + 1;
  }
  return out;
}

Dtype dtype_of(const std::string& name) {
  return name == "bf16" ? Dtype::bf16 : name == "f16" ? Dtype::f16 : Dtype::f32;
}
Dtype kv_dtype(const Options& o) {
  return o.kv_dtype.empty() ? (o.device == "cuda" ? Dtype::bf16 : Dtype::f32) : dtype_of(o.kv_dtype);
}

/// An engine for `sequences` sequences of up to `tokens` positions each, after checking that they fit the machine.
std::unique_ptr<Engine> make_engine(const Model& m, const Options& o, Index max_rows, Index tokens, Index sequences) {
  if (o.threads) omp_set_num_threads(static_cast<int>(o.threads));
  const EngineOptions options{kv_dtype(o), max_rows, tokens * sequences, sequences};
  if (o.device == "cuda") {
#ifdef YOCOU_CUDA
    return make_cuda_engine(m.config, m.weights, options);
#else
    fail("--device cuda: this yocou was built without CUDA");
#endif
  }
  const Exact caches = Exact(sequences) * cache_bytes(m.config, tokens, size_of(options.kv_dtype));
  require_memory(caches + activation_bytes(m.config, max_rows),
      "a run of " + std::to_string(tokens) + " tokens x " + std::to_string(sequences));
  return std::make_unique<CpuEngine>(m.config, m.weights, options);
}

/// Bytes are tokens. `what` is named when they would not fit the machine.
std::vector<int> bytes_to_tokens(std::string_view text, const std::string& what) {
  if (text.size() > 1 << 20) require_memory(5 * Exact(std::ssize(text)), what);
  std::vector<int> tokens(text.size());
  std::transform(text.begin(), text.end(), tokens.begin(), [](char c) { return static_cast<unsigned char>(c); });
  return tokens;
}

/// A model that text can be given to, with --loops T.
Model load_text_model(const Options& o) {
  Model m = load_model(o.model);
  if (m.config.vocab_size < 256) fail(o.model, ": byte text needs vocab_size >= 256, found ", m.config.vocab_size);
  set_loops(m.config, o.shape_options.loops);
  return m;
}

/// The values of T to run a model at: those of --loops 1,2,3, or its own.
std::vector<Index> loops_of(const Options& o) {
  return o.loops_list.empty() ? std::vector<Index>{0} : integers(o.loops_list, "--loops", 1, 4096);
}
Index current_loops(Config& c) { return looped_stage(c) ? looped_stage(c)->loops : 1; }

/// Shows bytes on a terminal: whole characters as soon as they are complete, U+FFFD for what is not UTF-8.
class TerminalText {
 public:
  std::string operator()(char byte) {
    pending_ += byte;
    std::string out;
    while (!pending_.empty()) {
      const auto lead = static_cast<unsigned char>(pending_[0]);
      const std::size_t length = lead < 0x80   ? 1
                                 : lead < 0xc2 ? 0
                                 : lead < 0xe0 ? 2
                                 : lead < 0xf0 ? 3
                                 : lead < 0xf5 ? 4
                                               : 0;
      std::size_t good = std::min<std::size_t>(length, 1);  // bytes that begin a character
      while (good && good < std::min(length, pending_.size()) && follows(lead, good, pending_[good])) ++good;
      if (good && good < length && good == pending_.size()) break;  // incomplete so far
      out += good && good == length ? pending_.substr(0, good) : "\uFFFD";
      pending_.erase(0, std::max<std::size_t>(good, 1));
    }
    return out;
  }
  std::string rest() const { return pending_.empty() ? "" : "\uFFFD"; }

 private:
  /// Whether a byte may stand at place `at` behind `lead`: overlong forms, surrogates and > U+10FFFF may not.
  static bool follows(unsigned char lead, std::size_t at, char ch) {
    const auto byte = static_cast<unsigned char>(ch);
    const int low = at > 1 ? 0x80 : lead == 0xe0 ? 0xa0 : lead == 0xf0 ? 0x90 : 0x80;
    const int high = at > 1 ? 0xbf : lead == 0xed ? 0x9f : lead == 0xf4 ? 0x8f : 0xbf;
    return byte >= low && byte <= high;
  }
  std::string pending_;
};

/// `yocou generate`
int generate(const Options& o) {
  const Model m = load_text_model(o);
  const std::unique_ptr<MappedFile> file =
      o.prompt_file.empty() ? nullptr : std::make_unique<MappedFile>(o.prompt_file);
  const std::vector<int> prompt = bytes_to_tokens(file ? file->text() : std::string_view(o.prompt), "the prompt");
  if (prompt.empty()) fail("the prompt is empty: there is nothing to continue");
  const Index N = std::ssize(prompt);
  const auto engine = make_engine(m, o, std::min(o.chunk, N), N + o.n, 1);
  const int sequence = engine->open();
  std::vector<float> logits(static_cast<std::size_t>(m.config.vocab_size));
  Sampler sample{{o.temperature, o.top_k, o.top_p}, std::mt19937_64(o.seed)};
  const bool terminal = isatty(STDOUT_FILENO);
  TerminalText shown;
  std::string text;
  std::vector<int> tokens;
  Index prompted = 0, decoded = 0;
  double prompt_seconds = 0, decode_seconds = 0;
  try {
    Progress progress("prompt");
    auto start = Clock::now();
    prefill(*engine, sequence, prompt, o.chunk, logits.data(), [&](Index done) {
      prompted = done, prompt_seconds = seconds_since(start);
      progress(done, N);
    });
    start = Clock::now();
    while (std::ssize(tokens) < o.n) {
      stop_if_interrupted();
      if (tokens.empty()) {
        tokens.push_back(sample(logits));
      } else {
        const Segment step{sequence, {&tokens.back(), 1}, Logits::last};
        const double u = sample.temperature == 0 ? 0 : sample.uniform();
        int next = 0;
        engine->forward_sample({&step, 1}, sample, {&u, 1}, &next);
        tokens.push_back(next);
        ++decoded, decode_seconds = seconds_since(start);
      }
      if (tokens.back() > 255) fail("the model wrote token ", tokens.back(), ", which is not a byte");
      text += static_cast<char>(tokens.back());
      if (!o.json) put(terminal ? shown(text.back()) : text.substr(text.size() - 1));
    }
  } catch (const Interrupted&) {  // what was written and measured so far still counts
  }
  if (o.json)
    put(dump({{"text", text}, {"tokens", tokens}, {"seed", o.seed}, {"prompt_tokens", prompted},
            {"cache_bytes", engine->cache_bytes()}}) +
        "\n");
  else if (terminal) put(shown.rest() + "\n");
  std::ostringstream line;
  const auto rate = [](Index count, double seconds) { return static_cast<double>(count) / std::max(seconds, 1e-9); };
  line << std::setprecision(4) << "prompt " << prompted << " tokens, " << rate(prompted, prompt_seconds)
       << " tok/s; decode " << decoded << " steps";
  if (decoded) line << ", " << rate(decoded, decode_seconds) << " tok/s";
  line << "; cache " << engine->cache_bytes() << " bytes; seed " << o.seed << "\n";
  std::fputs(line.str().c_str(), stderr);
  stop_if_interrupted();
  return 0;
}

/// -log2 p(token) under a row of logits [V], in double.
double surprise(std::span<const float> logits, int token) {
  const double max = *std::max_element(logits.begin(), logits.end());
  double sum = 0;
  for (const float l : logits) sum += std::exp(l - max);
  return (max - logits[static_cast<std::size_t>(token)]) / std::log(2.0) + std::log2(sum);
}

/// `yocou score`: row t-1 predicts token t, so a file of N bytes gives N-1 predictions.
int score(const Options& o) {
  Model m = load_text_model(o);
  const MappedFile file(o.file);
  const std::vector<int> tokens = bytes_to_tokens(file.text(), o.file);
  const Index N = std::ssize(tokens), V = m.config.vocab_size;
  if (N < 2) fail(o.file, ": scoring needs at least 2 bytes, found ", N);
  std::vector<Json> rows, positions;
  for (const Index T : loops_of(o)) {
    set_loops(m.config, T);
    const auto engine = make_engine(m, o, std::min(o.chunk, N), N, 1);
    std::vector<double> bits(static_cast<std::size_t>(N - 1));
    Progress progress("score");
    forward_all(*engine, m.config, engine->open(), tokens, o.chunk, [&](Index first, Index n, const float* logits) {
      for (Index i = first; i < std::min(first + n, N - 1); ++i)
        bits[i] = surprise({logits + (i - first) * V, static_cast<std::size_t>(V)}, tokens[i + 1]);
      progress(first + n, N);
    });
    const auto mean = [&](Index from, Index to) {
      return std::accumulate(bits.begin() + from, bits.begin() + to, 0.0) / static_cast<double>(to - from);
    };
    const Index loops = current_loops(m.config);
    const double all = mean(0, N - 1);
    rows.push_back({{"loops", loops}, {"predictions", N - 1}, {"bits_per_byte", all}, {"perplexity", std::exp2(all)}});
    for (Index from = 1; from < N; from *= 2) {  // by position of the byte predicted, in doubling ranges
      const Index to = std::min(2 * from, N);
      positions.push_back(
          {{"loops", loops}, {"from", from}, {"to", to - 1}, {"bits_per_byte", mean(from - 1, to - 1)}});
    }
  }
  put_rows(rows, o, o.by_position ? Json{{"by_position", positions}} : Json::object());
  if (o.by_position && !o.json) put("\n"), put_rows(positions, o);
  return 0;
}

/// `yocou logits`
int logits(const Options& o) {
  Model m = load_model(o.model);
  set_loops(m.config, o.shape_options.loops);
  if (o.tokens.empty() == o.tokens_file.empty()) throw Usage("logits: give either --tokens or --tokens-file");
  const std::unique_ptr<MappedFile> file =
      o.tokens_file.empty() ? nullptr : std::make_unique<MappedFile>(o.tokens_file);
  const std::string_view list = file ? file->text() : o.tokens;
  const std::string where = file ? o.tokens_file : "--tokens", separators = ", \t\r\n\v\f";
  require_memory(2 * Exact(std::ssize(list)), where);
  std::vector<int> tokens;
  for (std::size_t at = 0; (at = list.find_first_not_of(separators, at)) != std::string_view::npos;) {
    const std::size_t end = std::min(list.size(), list.find_first_of(separators, at));
    int token = -1;
    const auto [stop, error] = std::from_chars(list.data() + at, list.data() + end, token);
    if (error != std::errc() || stop != list.data() + end || token < 0 || token >= m.config.vocab_size)
      fail(where, ": expected token ids from 0 to ", m.config.vocab_size - 1, ", found ",
          quote(std::string(list.substr(at, end - at))));
    tokens.push_back(token);
    at = end;
  }
  const Index N = std::ssize(tokens), V = m.config.vocab_size, K = o.prefill ? o.prefill : N;
  if (N == 0) fail(where, ": no tokens");
  if (K > N) throw Usage("--prefill: " + std::to_string(K) + " of " + std::to_string(N) + " tokens");
  const auto engine = make_engine(m, o, std::min(o.chunk, K), N, 1);
  const int sequence = engine->open();
  if (o.json) put("{\"tokens\":" + dump(tokens) + ",\"logits\":[");
  bool first = true;
  const auto print = [&](Index, Index n, const float* rows) {
    std::ostringstream text;
    text << std::setprecision(9);
    for (Index i = 0; i < n; ++i, first = false) {
      text << (o.json ? (first ? "[" : ",[") : "");
      for (Index v = 0; v < V; ++v) text << (v == 0 ? "" : o.json ? "," : " ") << rows[i * V + v];
      text << (o.json ? "]" : "\n");
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
  return 0;
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
    tasks.push_back({f.text("prompt"), f.text("answer"), by.empty() ? "null" : dump(f.need(by))});
    if (tasks.back().prompt.empty() || tasks.back().answer.empty())
      fail(where, ": \"prompt\" and \"answer\" must not be empty");
  }
  if (tasks.empty()) fail(path, ": no tasks");
  return tasks;
}

/// Greedy completions of some tasks, prompts and decode steps batched. right[i] = 1 for an exact match.
void answer_batch(Engine& engine, const Config& c, std::span<const Task> tasks, Index chunk, char* right) {
  const std::size_t V = static_cast<std::size_t>(c.vocab_size), count = tasks.size();
  std::vector<float> logits(count * V);
  std::vector<std::vector<int>> prompts;
  std::vector<std::string> written(count);
  std::vector<int> sequences;
  std::vector<Segment> pass;
  for (const Task& t : tasks)
    prompts.push_back(bytes_to_tokens(t.prompt, "a prompt")), sequences.push_back(engine.open());
  for (std::size_t i = 0; i < count; ++i) pass.push_back({sequences[i], prompts[i], Logits::last});
  if (count == 1) prefill(engine, sequences[0], prompts[0], chunk, logits.data());
  else engine.forward(pass, logits.data());
  std::vector<std::size_t> open(count);  // tasks whose answers are not complete; row i of the logits is task open[i]'s
  std::iota(open.begin(), open.end(), 0);
  while (!open.empty()) {
    std::vector<int> next, who;
    std::vector<std::size_t> still;
    for (std::size_t row = 0; row < open.size(); ++row) {
      const std::size_t i = open[row];
      const int token = greedy({logits.data() + row * V, V});
      if (token < 256) written[i] += static_cast<char>(token);
      if (token > 255 || written[i].size() == tasks[i].answer.size()) continue;
      still.push_back(i), next.push_back(token), who.push_back(sequences[i]);
    }
    if (!still.empty()) decode(engine, who, next, logits.data());
    open = still;
  }
  for (std::size_t i = 0; i < count; ++i) right[i] = written[i] == tasks[i].answer, engine.close(sequences[i]);
}

/// `yocou eval`
int eval(const Options& o) {
  Model m = load_text_model(o);
  const MappedFile file(o.file);
  const std::vector<Task> tasks = read_tasks(file.text(), o.file, o.by);
  constexpr Index together = 64;  // tasks in a batch, if their prompts fit one chunk
  Index longest = 0, sum = 0;
  for (const Task& t : tasks)
    longest = std::max(longest, std::ssize(t.prompt) + std::ssize(t.answer)), sum += std::ssize(t.prompt);
  std::vector<Json> rows;
  Index total = 0, correct = 0;
  for (const Index T : loops_of(o)) {
    set_loops(m.config, T);
    const auto engine =
        make_engine(m, o, std::max(std::min(o.chunk, sum), together), longest, std::min(together, std::ssize(tasks)));
    std::vector<char> right(tasks.size());
    Progress progress("eval");
    for (std::size_t first = 0, last = 0; first < tasks.size(); first = last) {
      for (Index rows = 0; last < tasks.size() && std::ssize(tasks) && last - first < together; ++last)
        if ((rows += std::ssize(tasks[last].prompt)) > o.chunk && last > first) break;
      answer_batch(*engine, m.config, std::span(tasks).subspan(first, last - first), o.chunk, right.data() + first);
      progress(static_cast<Index>(last), std::ssize(tasks));
    }
    std::vector<std::string> groups;  // in the order of the file
    std::map<std::string, std::pair<Index, Index>> tally;
    for (std::size_t i = 0; i < tasks.size(); ++i) {
      if (!tally.count(tasks[i].group)) groups.push_back(tasks[i].group);
      ++tally[tasks[i].group].first, tally[tasks[i].group].second += right[i];
    }
    for (const std::string& g : groups) {
      const auto [count, good] = tally[g];
      rows.push_back({{"loops", current_loops(m.config)}, {"group", Json::parse(g)}, {"count", count},
          {"correct", good}, {"accuracy", static_cast<double>(good) / static_cast<double>(count)}});
      total += count, correct += good;
    }
  }
  put_rows(rows, o, {{"accuracy", static_cast<double>(correct) / static_cast<double>(total)}, {"count", total}});
  return 0;
}

/// `yocou trace`: what each application of a layer does to the state, means over the prompt's positions (Figure 8).
int trace(const Options& o) {
  const Model m = load_text_model(o);
  const Config& c = m.config;
  const std::vector<int> prompt = bytes_to_tokens(o.prompt, "the prompt");
  if (prompt.empty()) fail("the prompt is empty: there is nothing to trace");
  struct Sums {
    Index stage, loop, layer;
    double norm, angle, loop_cosine;
    std::vector<Index> load;
  };
  std::vector<Sums> applications;
  std::vector<float> before, loop_before;  // the states after the application before, and after the loop before
  std::size_t next = 0;
  const Index D = c.dim, N = std::ssize(prompt);
  const auto engine = make_engine(m, o, std::min(o.chunk, N), N, 1);
  const auto dot = [D](const float* a, const float* b) { return std::inner_product(a, a + D, b, 0.0); };
  const auto cosine = [&](const float* a, const float* b) {
    const double norms = std::sqrt(dot(a, a) * dot(b, b));
    return norms > 0 ? std::clamp(dot(a, b) / norms, -1.0, 1.0) : 1.0;
  };
  const auto ends_later_loop = [&](const Sums& a) { return a.loop > 0 && a.layer + 1 == c.stages[a.stage].layers; };
  engine->on_layer = [&](const Application& a) {
    if (a.stage < 0) next = 0;
    if (next == applications.size())
      applications.push_back({a.stage, a.loop, a.layer, 0, 0, 0, std::vector<Index>(a.expert_load.size())});
    Sums& sums = applications[next++];
    std::ranges::transform(a.expert_load, sums.load, sums.load.begin(), std::plus<>());
    for (Index i = 0; i < std::ssize(a.x); i += D) {
      sums.norm += std::sqrt(dot(&a.x[i], &a.x[i]) / static_cast<double>(D));
      if (a.stage >= 0) sums.angle += std::acos(cosine(&a.x[i], &before[i])) / M_PI;
      if (ends_later_loop(sums)) sums.loop_cosine += cosine(&a.x[i], &loop_before[i]);
    }
    before.assign(a.x.begin(), a.x.end());
    if (a.stage >= 0 && a.layer + 1 == c.stages[a.stage].layers) loop_before = before;
  };
  forward_all(*engine, c, engine->open(), prompt, o.chunk, [](Index, Index, const float*) {});
  std::vector<Json> rows;
  for (const Sums& a : applications) {
    const auto mean = [N](double sum, bool there) { return there ? Json(sum / static_cast<double>(N)) : Json(); };
    Json load;  // share of the tokens' choices; one cell in a table
    for (const Index l : a.load) load.push_back(static_cast<double>(l) / static_cast<double>(N * c.moe->active));
    std::string loads;
    for (const Json& l : load) loads += (loads.empty() ? "" : " ") + cell(std::round(l.get<double>() * 1000) / 1000);
    rows.push_back({{"application", std::ssize(rows)}, {"stage", a.stage < 0 ? "embed" : c.stages[a.stage].name},
        {"loop", a.loop}, {"layer", a.layer}, {"norm", mean(a.norm, true)},
        {"angular_distance", mean(a.angle, a.stage >= 0)}, {"loop_cosine", mean(a.loop_cosine, ends_later_loop(a))},
        {"router_load", o.json || load.is_null() ? load : Json(loads)}});
  }
  put_rows(rows, o);
  return 0;
}

/// What cost, verify and bench work on: a checkpoint, or a shape in one or several architectures.
struct Subject {
  Config config;
  std::optional<Model> model;  ///< of the checkpoint; random weights are made when needed

  const Model& get(const Options& o) {
    if (!model) model = random_model(config, dtype_of(o.dtype), o.seed);
    return *model;
  }
};

std::vector<Subject> subjects(const Options& o, const std::string& shape, const std::string& default_archs) {
  std::vector<Subject> out;
  const ShapeOptions& s = o.shape_options;
  if (!o.model.empty()) {
    if (!o.shape.empty() || !o.arch.empty() || s.layers || s.window)
      throw Usage("give either a MODEL or --shape, --arch, --layers, --window");
    Model m = load_model(o.model);
    set_loops(m.config, s.loops);
    const Config c = m.config;
    out.push_back({c, std::move(m)});
    return out;
  }
  std::istringstream names(o.arch.empty() ? default_archs : o.arch);
  for (std::string name; std::getline(names, name, ',');) {
    const Arch* a = find_arch(name);  // of the default ones, those that take the overrides
    if (o.arch.empty() && ((s.loops && !a->takes_loops()) || (s.window && !a->takes_window()))) continue;
    out.push_back({make_config(o.shape.empty() ? shape : o.shape, name, s), {}});
  }
  return out;
}

std::string all_archs() {
  std::string names;
  for (const Arch& a : archs()) names += (names.empty() ? "" : ",") + std::string(a.name);
  return names;
}

/// "80GB", "24GiB", "512MB", or bytes. MB and GB are 2^20 and 2^30 bytes, as in the paper's tables.
Index memory_size(const std::string& text) {
  char* unit = nullptr;
  const double number = std::strtod(text.c_str(), &unit);
  const std::map<std::string, double> units{
      {"", 1}, {"B", 1}, {"MB", 1 << 20}, {"MiB", 1 << 20}, {"GB", 1 << 30}, {"GiB", 1 << 30}};
  const double bytes = units.count(unit) ? number * units.at(unit) : -1;
  if (!(bytes >= 1 && bytes <= 0x1p60)) throw Usage("--memory: expected a size like 80GB, found '" + text + "'");
  return static_cast<Index>(bytes);
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
int cost(const Options& o) {
  std::vector<Subject> all = subjects(o, "1.3b", all_archs());
  std::optional<Config> yoco_u;  // the reference of the ratios, in the same shape
  if (o.model.empty() && o.shape_options.layers % 2 == 0)
    yoco_u = make_config(o.shape.empty() ? "1.3b" : o.shape, "yoco-u", o.shape_options);
  const Index memory = o.memory.empty() ? 0 : memory_size(o.memory), s = o.kv_bytes, B = o.batch;
  std::vector<Json> rows, table, orders;
  for (const Subject& subject : all) {
    const Config& c = subject.config;
    const Params p = count_params(c);
    const Arch* arch = find_arch(c.arch);
    if (arch)
      orders.push_back({{"arch", arch->name}, {"KV cache", arch->kv_cache}, {"prefill", arch->prefill},
          {"decode, a step", arch->decode}});
    for (const Index N : integers(o.N_list.empty() ? "16384,65536,262144" : o.N_list, "-N", 1, N_limit)) {
      const Exact kv = Exact(B) * cache_bytes(c, N, s), prefill = Exact(B) * prefill_flops(c, N),
                  step = Exact(B) * decode_flops(c, N);
      const Exact read = decode_bytes(c, N, B, /*weight bytes=*/2, s);
      Json row = {{"arch", c.arch}, {"N", N}, {"batch", B}, {"cache_bytes", kv.v}, {"prefill_flops", prefill.v},
          {"decode_flops", step.v}, {"params", p.params.v}, {"active_params", p.active.v}, {"embed_params", p.embed.v},
          {"head_params", p.head.v}, {"decode_bytes", read.v}};
      const auto in = [](const Exact& v, double unit) { return static_cast<double>(v) / unit; };
      Json line = {{"arch", c.arch}, {"N", N}, {"params M", in(p.params, 1e6)}, {"active M", in(p.active, 1e6)},
          {"KV MB", in(kv, 0x1p20)}, {"prefill TFLOP", in(prefill, 1e12)}, {"decode GFLOP", in(step, 1e9)},
          {"decode GB", in(read, 1e9)}};
      if (yoco_u) {
        line["KV x"] = row["cache_ratio"] = in(kv, static_cast<double>(Exact(B) * cache_bytes(*yoco_u, N, s)));
        line["prefill x"] = row["prefill_ratio"] =
            in(prefill, static_cast<double>(Exact(B) * prefill_flops(*yoco_u, N)));
        line["decode x"] = row["decode_ratio"] = in(step, static_cast<double>(Exact(B) * decode_flops(*yoco_u, N)));
        line["yoco-u cheaper from"] = row["prefill_crossover_N"] = crossover(*yoco_u, c);
      }
      if (memory) {  // weights in two bytes, and the caches
        const Exact weights = 2 * (p.params + p.embed + p.head);
        const auto fits = [&](Index batch, Index n) {
          return weights + Exact(batch) * cache_bytes(c, n, s) <= Exact(memory);
        };
        line["max N"] = row["max_N"] = fits(B, 0) ? largest(N_limit, [&](Index n) { return fits(B, n); }) : 0;
        line["max batch"] = row["max_batch"] =
            fits(1, N) ? largest(batch_limit, [&](Index b) { return fits(b, N); }) : 0;
      }
      if (arch)
        row["kv_big_o"] = arch->kv_cache, row["prefill_big_o"] = arch->prefill, row["decode_big_o"] = arch->decode;
      rows.push_back(std::move(row)), table.push_back(std::move(line));
    }
  }
  if (o.json || o.csv) return put_rows(rows, o), 0;
  put_rows(table, o);
  put("\nKV MB = 2^20 bytes, " + std::to_string(s) + " a number; batch " + std::to_string(B) +
      "; x: relative to yoco-u\n\n");
  put_rows(orders, o);
  return 0;
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
  const Index B = o.batch, s = size_of(kv_dtype(o));
  const auto engine = make_engine(m, o, std::max(std::min(o.chunk, N), B), N + o.steps, B);
  const auto flops = [&] { return static_cast<Index>(engine->counters.flops); };
  const auto add = [&](const char* quantity, Index n, const Exact& formula, Index measured) {
    rows.push_back(check(quantity, c, n, formula, measured));
  };
  std::vector<int> sequences;
  std::vector<float> logits(static_cast<std::size_t>(B * c.vocab_size));
  Exact cross = 0, global = 0, rings = 0;  // rows through the cross-decoder, rows of K^, V^ a token, bytes of the rings
  for (const Stage& g : c.stages) {
    if (g.attention == Attention::window) rings += Exact(B) * g.layers * g.loops * g.window * 2 * c.kv_dim() * s;
    if (g.attention != Attention::shared) continue;
    cross = Exact(B) * (g.refresh_kv ? Exact(g.loops - 1) * N + 1 : Exact(g.loops));
    global = Exact(B) * (g.refresh_kv ? g.loops : 1);
  }
  for (Index b = 0; b < B; ++b) sequences.push_back(engine->open());
  add("ring_bytes", 0, rings, engine->cache_bytes());  // an empty sequence holds its rings, whole, and no block
  for (Index b = 0; b < B; ++b) prefill(*engine, sequences[b], random_tokens(c, N, b), o.chunk, logits.data());
  add("cache_bytes_prefill", N, Exact(B) * cache_bytes(c, N, s), engine->cache_bytes());
  add("prefill_flops", N, Exact(B) * prefill_flops(c, N), flops());
  add("cross_positions", N, cross, static_cast<Index>(engine->counters.cross_positions));
  add("global_rows", N, global * N, engine->global_rows());
  for (Index k = 0; k < o.steps; ++k) {
    const Index before = flops();
    decode(*engine, sequences, random_tokens(c, B, k), logits.data());
    add("decode_flops", N + k, Exact(B) * decode_flops(c, N + k), flops() - before);
  }
  add("cache_bytes_decode", N + o.steps, Exact(B) * cache_bytes(c, N + o.steps, s), engine->cache_bytes());
  add("global_rows", N + o.steps, global * (N + o.steps), engine->global_rows());
}

/// Allocates the caches of N tokens, touched, without weights or tokens. A cell that does not fit is a row that says so.
Json verify_allocation(const Config& c, const Options& o, Index N) {
  const Exact formula = Exact(o.batch) * cache_bytes(c, N, size_of(kv_dtype(o)));
  malloc_trim(0);  // what earlier cells have freed goes back to the system, so that the growth is this cell's
  const Index available = available_memory(), before = resident_memory();
  Arena arena;
  std::vector<Cache> caches;
  if (formula <= Exact(available))
    for (Index b = 0; b < o.batch; ++b)
      for (const Plan::Entry& e : Plan(c).caches) caches.emplace_back(arena, c, kv_dtype(o), e.window).grow(N);
  Json row = check("cache_bytes_prefill", c, N, formula, arena.live(Use::cache));
  row["note"] = "resident memory grew by " + std::to_string(resident_memory() - before);
  if (formula > Exact(available)) {
    row["measured"] = row["equal"] = nullptr;
    row["note"] = "does not fit: " + std::to_string(available) + " bytes are available";
  }
  return row;
}

/// `yocou verify`
int verify(const Options& o) {
  const std::vector<Index> Ns = integers(o.N_list.empty() ? "1,63,64,65,255,256,257,300" : o.N_list, "-N", 1, N_limit);
  std::vector<Subject> all = subjects(o, "tiny", all_archs());
  std::vector<Json> rows;
  Progress progress("verify");
  Index done = 0;
  for (Subject& subject : all) {
    const Config& c = subject.config;
    if (!o.allocate_only) {
      Index stored = 0;
      for_each_tensor(c, subject.get(o).weights, [&](const std::string& name, const Shape&, const Tensor& t) {
        if (name != "embed" && name != "head") stored += t.rows * t.cols;
      });
      rows.push_back(check("params", c, 0, count_params(c).params, stored));
    }
    for (const Index N : Ns) {
      if (o.allocate_only) rows.push_back(verify_allocation(c, o, N));
      else verify_run(subject.get(o), o, N, rows);
      progress(++done, std::ssize(all) * std::ssize(Ns));
    }
    if (o.model.empty()) subject.model.reset();
  }
  const auto differs = [](const Json& row) { return row["equal"] == false; };
  const auto unequal = std::ranges::count_if(rows, differs);
  put_rows(rows, o, {{"resident_bytes", resident_memory()}});
  if (!o.json && !o.csv)
    put("\n" + std::to_string(rows.size()) + " comparisons, " + std::to_string(unequal) + " differ, " +
        std::to_string(std::ranges::count_if(rows, [](const Json& row) { return row["equal"].is_null(); })) +
        " did not fit; the process holds " + std::to_string(resident_memory()) +
        " bytes in memory now: caches, weights and buffers, the program and its libraries, and freed memory\n");
  if (unequal) {
    const Json& row = *std::ranges::find_if(rows, differs);
    fail("verify: ", unequal, " rows differ, the first ", cell(row["quantity"]), " of ", cell(row["arch"]),
        " at N = ", cell(row["N"]), ": formula ", cell(row["formula"]), ", measured ", cell(row["measured"]));
  }
  return 0;
}

/// Seconds of several runs, their middle and how far they lie apart.
struct Timing {
  std::vector<double> seconds;
  double median() const {
    std::vector<double> v = seconds;
    std::ranges::sort(v);
    return (v[v.size() / 2] + v[(v.size() - 1) / 2]) / 2;
  }
  double spread() const { return (std::ranges::max(seconds) - std::ranges::min(seconds)) / median(); }
};

/// One cell of `bench`: `runs` times a prefill of the batch and decode steps, after which rows says how fast they were.
void bench_run(const Model& m, const Options& o, Index N, const Limits& limits, std::vector<Json>& rows,
    const std::function<void(Index)>& progress) {
  const Config& c = m.config;
  const Index B = o.batch;
  const auto engine = make_engine(m, o, std::max(std::min(o.chunk, N), B), N + o.steps + 1, B);
  std::vector<float> logits(static_cast<std::size_t>(B * c.vocab_size));
  Index kv = 0;
  const auto add = [&](const char* phase, const Timing& t, Index tokens, const Counters& count) {
    if (t.seconds.empty()) return;
    const double gflops = 1e-9 * static_cast<double>(count.flops) / t.median(),
                 gbs = 1e-9 * static_cast<double>(count.bytes) / t.median();
    const double of_gemm = gflops / limits.gemm_gflops, of_read = gbs / limits.read_gbs;
    rows.push_back({{"arch", c.arch}, {"N", N}, {"batch", B}, {"phase", phase},
        {"tok_s", static_cast<double>(tokens) / t.median()}, {"spread", t.spread()}, {"gflop_s", gflops}, {"gb_s", gbs},
        {"attainment", std::max(of_gemm, of_read)}, {"of_gemm", of_gemm}, {"of_read", of_read}, {"kv_bytes", kv}});
  };
  Timing prefills, decodes;
  Counters prefilled, decoded;
  const auto run = [&] {
    std::vector<int> sequences;
    const Counters before = engine->counters;
    auto start = Clock::now();
    for (Index b = 0; b < B; ++b) {
      sequences.push_back(engine->open());
      prefill(*engine, sequences.back(), random_tokens(c, N, b), o.chunk, logits.data(),
          [&](Index done) { progress((b * N + done) / B); });
    }
    prefills.seconds.push_back(seconds_since(start));
    prefilled = engine->counters - before;
    kv = engine->cache_bytes();
    decode(*engine, sequences, random_tokens(c, B, 1), logits.data());  // warm
    const Counters warm = engine->counters;
    start = Clock::now();
    for (Index k = 0; k < o.steps; ++k) decode(*engine, sequences, random_tokens(c, B, k), logits.data());
    decodes.seconds.push_back(seconds_since(start));
    decoded = engine->counters - warm;
    for (const int sequence : sequences) engine->close(sequence);
  };
  try {
    for (Index i = 0; i < o.runs; ++i) run();
  } catch (const Interrupted&) {  // the runs that ended still count
  }
  add("prefill", prefills, B * N, prefilled);
  add("decode", decodes, B * o.steps, decoded);
}

/// `yocou bench`
int bench(const Options& o) {
  const std::vector<Index> Ns = integers(o.N_list.empty() ? "1024,4096,16384" : o.N_list, "-N", 1, N_limit);
  std::vector<Subject> all = subjects(o, "small", "yoco-u");
  if (o.threads) omp_set_num_threads(static_cast<int>(o.threads));
  const Limits limits = measure_limits();
  std::vector<Json> rows;
  Progress progress("bench");
  const Index sum = std::accumulate(Ns.begin(), Ns.end(), Index{0}) * o.runs * std::ssize(all);
  Index before = 0;  // tokens of the cells that are done
  for (Subject& subject : all) {
    for (const Index N : Ns) {
      if (interrupted) break;
      Index done = 0, run = 0;
      bench_run(subject.get(o), o, N, limits, rows, [&](Index tokens) {
        run += tokens < std::exchange(done, tokens);
        progress(before + run * N + tokens, sum);
      });
      before += N * o.runs;
    }
    if (o.model.empty()) subject.model.reset();
  }
  const Json machine = {{"cpu", cpu_name()}, {"threads", omp_get_max_threads()}, {"build", build_name()},
      {"version", version}, {"device", o.device}, {"weights", o.model.empty() ? o.dtype : "as stored"},
      {"kv_dtype", kv_dtype(o) == Dtype::bf16 ? "bf16" : "f32"}, {"chunk", o.chunk},
      {"gemm_gflop_s", limits.gemm_gflops}, {"read_gb_s", limits.read_gbs}};
  if (!o.json) put("# " + dump(machine) + "\n");
  put_rows(rows, o, {{"machine", machine}});
  stop_if_interrupted();
  return 0;
}

/// `yocou init`
int init(const Options& o) {
  write_random_checkpoint(
      make_config(o.shape, o.arch.empty() ? "yoco-u" : o.arch, o.shape_options), dtype_of(o.dtype), o.seed, o.out);
  return 0;
}

/// `yocou show`
int show(const Options& o) {
  const Model m = load_model(o.model);
  std::vector<Json> tensors;
  for (const StoredTensor& t : m.tensors)
    tensors.push_back({{"name", t.name}, {"dtype", dtype_names[static_cast<std::size_t>(t.dtype)]}, {"shape", t.shape},
        {"bytes", t.end - t.begin}});
  if (o.json) return put(dump({{"config", config_json(m.config)}, {"tensors", tensors}}) + "\n"), 0;
  put(config_json(m.config).dump(2) + "\n\n");
  put_rows(tensors, o);
  const Params p = count_params(m.config);
  put("\n" + std::to_string(tensors.size()) + " tensors, " + std::to_string(m.tensors.back().end) +
      " bytes; parameters " + to_string(p.params) + " (active " + to_string(p.active) + "), embedding " +
      to_string(p.embed) + ", head " + to_string(p.head) + "\n");
  return 0;
}

/// Declares the command line: an option's name, help, default and check live here and nowhere else.
void declare(CLI::App& app, Options& o, std::function<int()>& chosen) {
  const auto whole = [](auto low, auto high) {  // decimal digits only: CLI11 alone would read 010 as 8 and cut off 2^64
    return CLI::Validator(
        [=](std::string& s) {
          auto v = low;
          const auto [end, error] = std::from_chars(s.data(), s.data() + s.size(), v);
          const bool good = error == std::errc() && end == s.data() + s.size() && v >= low && v <= high;
          s = good ? std::to_string(v) : s;
          return good ? ""
                      : "'" + s + "' is not an integer from " + std::to_string(low) + " to " + std::to_string(high);
        },
        "");
  };
  const auto number = [](const char* range, auto good) {
    return CLI::Validator(
        [=](std::string& s) {
          char* end = nullptr;
          const double v = std::strtod(s.c_str(), &end);
          return !s.empty() && !*end && std::isfinite(v) && good(v) ? "" : "'" + s + "' is not a number " + range;
        },
        "");
  };
  const CLI::Validator filled([](std::string& s) { return std::string(s.empty() ? "must not be empty" : ""); }, "");
  const auto any_seed = whole(std::uint64_t{0}, std::numeric_limits<std::uint64_t>::max());
  const auto command = [&](const char* name, const char* help, const char* example, int (*run)(const Options&)) {
    CLI::App* c = app.add_subcommand(name, help);
    c->footer(std::string("Example: yocou ") + name + " " + example);
    c->callback([&o, &chosen, run] { chosen = [&o, run] { return run(o); }; });
    return c;
  };
  const auto model = [&](CLI::App* c, bool required) {
    c->add_option("MODEL", o.model, "a checkpoint (.safetensors)")->required(required);
  };
  const auto loops = [&](CLI::App* c) {
    c->add_option("--loops", o.shape_options.loops, "T of the looped stage")->transform(whole(Index{1}, Index{4096}));
  };
  const auto loops_list = [&](CLI::App* c) {
    c->add_option("--loops", o.loops_list, "T of the looped stage, one or several: 1,2,3")->check(filled);
  };
  const auto shape = [&](CLI::App* c, const std::string& otherwise, const char* archs_help) {
    c->add_option("--shape", o.shape, "1.3b, 10b-moe, small or tiny" + otherwise)
        ->check(CLI::IsMember({"1.3b", "10b-moe", "small", "tiny"}));
    c->add_option("--arch", o.arch, std::string(archs_help) + ": " + all_archs())->check(filled);
    c->add_option("--layers", o.shape_options.layers, "L, in place of the shape's")
        ->transform(whole(Index{1}, Index{4096}));
    c->add_option("--window", o.shape_options.window, "W, in place of the shape's")->transform(whole(Index{1}, most));
    loops(c);
  };
  const auto running = [&](CLI::App* c) {
    c->add_option("--device", o.device, "cpu or cuda")->capture_default_str()->check(CLI::IsMember({"cpu", "cuda"}));
    c->add_option("--chunk", o.chunk, "tokens a prefill pass (default 512, on cuda 8192)")
        ->transform(whole(Index{1}, most));
    c->add_option("--threads", o.threads, "0: as many as the machine has")
        ->capture_default_str()
        ->transform(whole(Index{0}, Index{1024}));
    c->add_option("--kv-dtype", o.kv_dtype, "type of cached numbers, f32 or bf16 (default f32, on cuda bf16)")
        ->check(CLI::IsMember({"f32", "bf16"}));
  };
  const auto json = [&](CLI::App* c) { return c->add_flag("--json", o.json, "JSON on stdout"); };
  const auto rows = [&](CLI::App* c) { c->add_flag("--csv", o.csv, "CSV on stdout")->excludes(json(c)); };
  const auto dtype = [&](CLI::App* c) {
    c->add_option("--seed", o.seed, "of the random weights")->capture_default_str()->transform(any_seed);
    c->add_option("--dtype", o.dtype, "of the random weights: f32, bf16 or f16")
        ->capture_default_str()
        ->check(CLI::IsMember({"f32", "bf16", "f16"}));
  };
  const auto sizes = [&](CLI::App* c, const std::string& Ns) {
    c->add_option("-N", o.N_list, "tokens, one or several (default " + Ns + ")")->check(filled);
    c->add_option("--batch", o.batch, "sequences")->capture_default_str()->transform(whole(Index{1}, batch_limit));
  };

  auto* c = command("generate", "Continue a text, streaming it",
      "data/austen.safetensors -p \"It was\" -n 200 --temperature 0.8", generate);
  model(c, true), loops(c), running(c), json(c);
  auto* prompt = c->add_option_group("prompt", "What to continue");
  prompt->add_option("-p,--prompt", o.prompt, "a text");
  prompt->add_option("--prompt-file", o.prompt_file, "a file, any bytes")->check(filled);
  prompt->require_option(1);
  c->add_option("-n,--tokens", o.n, "tokens to add")->capture_default_str()->transform(whole(Index{0}, most));
  c->add_option("--temperature", o.temperature, "0: always the likeliest token")
      ->capture_default_str()
      ->check(number("of at least 0", [](double v) { return v >= 0; }));
  c->add_option("--top-k", o.top_k, "draw from the k likeliest; 0: all")
      ->capture_default_str()
      ->transform(whole(Index{0}, most));
  c->add_option("--top-p", o.top_p, "draw from the smallest set of this probability")
      ->capture_default_str()
      ->check(number("above 0, at most 1", [](double v) { return v > 0 && v <= 1; }));
  c->add_option("--seed", o.seed, "of the sampler")->capture_default_str()->transform(any_seed);

  c = command("score", "Bits per byte and perplexity of a text",
      "data/austen.safetensors data/austen-heldout.txt --loops 1,2,3", score);
  model(c, true), loops_list(c), running(c), rows(c);
  c->add_option("FILE", o.file, "text, any bytes")->required();
  c->add_flag("--by-position", o.by_position, "also by position, in doubling ranges");

  c = command("eval", "Exact-match accuracy of greedy completions",
      "data/cups.safetensors data/cups.jsonl --by moves --loops 1,3", eval);
  model(c, true), loops_list(c), running(c), rows(c);
  c->add_option("TASKS", o.file, "JSON lines {\"prompt\",\"answer\", ...}")->required();
  c->add_option("--by", o.by, "field to group by")->check(filled);

  c = command(
      "logits", "Logits of given tokens, every position", "data/austen.safetensors --tokens 72,101,108 --json", logits);
  model(c, true), loops(c), running(c), json(c);
  c->add_option("--tokens", o.tokens, "token ids: 1,2,3");
  c->add_option("--tokens-file", o.tokens_file, "a file of token ids, separated by commas or white space");
  c->add_option("--prefill", o.prefill, "run so many tokens as prefill, the rest one by one (default all)")
      ->transform(whole(Index{1}, most));
  c->add_flag("--last", o.last, "the last position only, prefilled with the early stop");

  c = command("trace", "What each layer application does to the state",
      "data/austen.safetensors -p \"It was a dark night\"", trace);
  model(c, true), loops(c), running(c), rows(c);
  c->add_option("-p,--prompt", o.prompt, "a text")->required();

  c = command("cost", "Parameters, cache bytes and FLOPs by formula",
      "--shape 1.3b --arch yoco-u,transformer -N 16384,262144", cost);
  model(c, false), shape(c, " (default 1.3b)", "one or several, default all"), sizes(c, "16384,65536,262144"), rows(c);
  c->add_option("--kv-bytes", o.kv_bytes, "bytes of a cached number")
      ->capture_default_str()
      ->transform(whole(Index{1}, Index{8}));
  c->add_option("--memory", o.memory, "a budget like 80GB: the largest N and batch that fit beside 2-byte weights")
      ->check(filled);

  c = command(
      "verify", "Allocate and run, and compare with the formulas", "--shape tiny -N 1,64,257 --batch 2", verify);
  model(c, false), shape(c, " (default tiny)", "one or several, default all"), running(c),
      sizes(c, "1,63,64,65,255,256,257,300"), dtype(c), rows(c);
  c->add_option("--steps", o.steps, "decode steps after the prefill")
      ->capture_default_str()
      ->transform(whole(Index{1}, Index{1000000}));
  c->add_flag("--allocate-only", o.allocate_only, "allocate the caches of N tokens, run nothing");

  c = command("bench", "Prefill and decode speed beside the machine's measured limits",
      "--shape small --arch yoco-u,transformer -N 1024,4096", bench);
  model(c, false), shape(c, " (default small)", "one or several, default yoco-u"), running(c),
      sizes(c, "1024,4096,16384"), dtype(c), rows(c);
  c->add_option("--steps", o.steps, "decode steps a run")
      ->capture_default_str()
      ->transform(whole(Index{1}, Index{1000000}));
  c->add_option("--runs", o.runs, "runs, of which the median counts")
      ->capture_default_str()
      ->transform(whole(Index{1}, Index{1000}));

  c = command("init", "Write a checkpoint of random weights", "--shape tiny --arch yoco-u -o tiny.safetensors", init);
  shape(c, "", "default yoco-u"), dtype(c);
  c->get_option("--shape")->required();
  c->add_option("-o,--output", o.out, "file to write")->required()->check(filled);

  c = command("show", "Config, tensors, shapes, dtypes, sizes", "data/austen.safetensors", show);
  model(c, true), json(c);
}

/// The program: 0 done, 1 bad input or failed check, 2 usage, 130 interrupted. One line on stderr when it is not 0.
int run(std::vector<std::string> arguments) {
  const auto complain = [](const std::string& what, int status) {
    TerminalText valid;
    std::string line;
    for (const char ch : what.substr(0, 500))
      line += valid(static_cast<unsigned char>(ch) < 32 || ch == 127 ? '?' : ch);
    std::fprintf(stderr, "yocou: %s%s\n", line.c_str(), what.size() > 500 ? "..." : "");
    return status;
  };
  CLI::App app("Universal YOCO: the full forward pass, its caches and its costs", "yocou");
  Options options;
  std::function<int()> chosen;
  try {
    app.require_subcommand(1);
    app.set_version_flag("--version", std::string("yocou ") + version + " (" + build_name() + ")");
    declare(app, options, chosen);
    const auto named = [&](const CLI::App* a) { return a->get_name() == arguments[0]; };
    if (!arguments.empty() && !arguments[0].starts_with('-') && app.get_subcommands(named).empty())
      throw Usage("no command '" + arguments[0] + "', see yocou --help");
    const auto empty = std::ranges::find(arguments, "--prompt=");  // CLI11 takes it for a missing value
    if (empty != arguments.end()) *empty = "", arguments.insert(empty, "--prompt");
    std::ranges::reverse(arguments);
    app.parse(arguments);
    if (!options.chunk) options.chunk = options.device == "cuda" ? 8192 : 512;
    return chosen();
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
