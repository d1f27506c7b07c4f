/// @file
/// kernels.cu -- the forward pass of yocou.cpp on a GPU. Weights are BF16, sums float32, the state X float32 (an
/// addition per sublayer and loop, L/2 x T deep: in BF16 its rounding would outgrow that of everything else, and it is
/// 2% of a prefill's bytes). Activations that enter a product are rounded to BF16 once.
///
/// Two rungs of each hot operation: a general one, for any size and any GPU from Ampere on, and a fast one that says in
/// its header what it needs. The engine chooses per model and number of rows; where the fast rung cannot run it says so
/// in one line on stderr.
///
///   | operation            | general          | fast                                                        |
///   |----------------------|------------------|-------------------------------------------------------------|
///   | y = x W^T            | product_tile     | product_skinny up to 32 rows, cuBLASLt, product_wgmma       |
///   | experts' products    | product_tile     | product_skinny for few rows an expert, product_wgmma        |
///   | attention, prefill   | attend           | attend_tiles: TMA + wgmma, window or paged                  |
///   | attention, one row   | attend           | attend_split + attend_merge: TMA + mma, ring or paged       |
///
/// The tests run this file on a CPU: it is compiled as C++ against an emulator of the instructions. So it keeps some
/// rules: PTX only in the section "Instructions"; launches only through launch(); shared memory only through
/// shared_memory(); waiting only inside wrappers; warp collectives by whole warps; blocks in any order.
#include <cuda.h>
#include <cuda_bf16.h>
#include <cuda_runtime_api.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <limits>
#include <map>

#include "yocou.h"
#ifndef YOCOU_EMULATE
#include <cublasLt.h>
#include <cuda_runtime.h>
#include <dlfcn.h>
#define UNROLL _Pragma("unroll")  // loops over registers: their indices must be constants
#endif

namespace yocou {
namespace {
using bf16 = __nv_bfloat16;
using std::uint32_t, std::uint64_t;

// ---------------------------------------------------------------------------------------------------------------------
// Errors and launches

/// Runs a call of the runtime; throws Error with the expression, what the runtime says, and the line.
#define CUDA_CHECK(expression)                                                                        \
  do {                                                                                                \
    const cudaError_t status_ = (expression);                                                         \
    if (status_ != cudaSuccess)                                                                       \
      fail("CUDA: ", #expression, ": ", cudaGetErrorString(status_), " (kernels.cu:", __LINE__, ")"); \
  } while (0)

/// A line on stderr, once: the model runs, but not as it could.
void notice(const std::string& text) {
  static std::map<std::string, bool> told;
  if (!std::exchange(told[text], true)) std::fprintf(stderr, "yocou: %s\n", text.c_str());
}

/// The shape of a kernel's blocks; it stands beside the kernel, and every launch takes it from there.
struct Block {
  unsigned threads;
  std::size_t shared = 0;     ///< bytes
  int rows = 1, columns = 0;  ///< of the tile that a block owns; 0 columns: all
};

/// Where a kernel runs. `pdl`: it may start while the kernel before it still runs (programmatic dependent launch);
/// every kernel here calls grid_wait() before it touches memory, so that is always allowed.
struct Launch {
  dim3 grid;
  Block block;
  cudaStream_t stream = nullptr;
  bool pdl = false;
};

template <class... Parameter, class... Argument>
void launch(const Launch& l, void (*kernel)(Parameter...), const Argument&... argument) {
  if (l.grid.y > 65535 || l.grid.z > 65535)
    fail("CUDA: a launch of ", l.grid.x, " x ", l.grid.y, " x ", l.grid.z, " blocks; y and z go to 65,535");
  if (l.block.shared > 48 * 1024)
    CUDA_CHECK(cudaFuncSetAttribute(
        reinterpret_cast<const void*>(kernel), cudaFuncAttributeMaxDynamicSharedMemorySize, int(l.block.shared)));
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = l.grid;
  config.blockDim = dim3(l.block.threads);
  config.dynamicSmemBytes = l.block.shared;
  config.stream = l.stream;
  config.attrs = &attribute;
  config.numAttrs = l.pdl ? 1 : 0;
  CUDA_CHECK(cudaLaunchKernelEx(&config, kernel, Parameter(argument)...));
}

__host__ __device__ constexpr Index ceil_div(Index a, Index b) { return (a + b - 1) / b; }
/// Rows of BF16 matrices are padded with zeros to 16 bytes, so that every row can be read in 16-byte pieces.
__host__ __device__ constexpr Index padded(Index columns) { return ceil_div(columns, 8) * 8; }

// ---------------------------------------------------------------------------------------------------------------------
// Instructions (PTX ISA 8.5; section in brackets). The emulator supplies functions of the same names.

// clang-format off
#ifndef YOCOU_EMULATE
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define HOPPER_ASM(...) asm volatile(__VA_ARGS__)
#else
#define HOPPER_ASM(...) __trap()  // compiled for Ampere too, never chosen there
#endif

template <class T>
__device__ T* shared_memory() {
  extern __shared__ __align__(1024) unsigned char block_memory[];
  return reinterpret_cast<T*>(block_memory);
}
__device__ uint32_t shared_address(const void* p) { return uint32_t(__cvta_generic_to_shared(p)); }

/// Waits for the kernel before this one in the stream to end [griddepcontrol]; then lets the next one start early.
__device__ void grid_wait() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
__device__ void grid_launch() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
__device__ float fast_exp2(float x) {  // 2 ulp
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
/// 16 bytes, asked for here: a plain load the compiler would move down to where its number is used [ld.global].
__device__ uint4 load_here(const uint4* p) {
  uint4 v;
  asm volatile("ld.global.v4.u32 {%0,%1,%2,%3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p));
  return v;
}
/// 16 bytes to shared memory, or 16 zeros [cp.async].
__device__ void cp_async16(void* to, const void* from, bool valid) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;"
               :: "r"(shared_address(to)), "l"(from), "r"(valid ? 16 : 0) : "memory");
}
__device__ void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int Left>
__device__ void cp_async_wait() { asm volatile("cp.async.wait_group %0;" :: "n"(Left) : "memory"); }

/// Four 8x8 matrices; lane l names row l % 8 of matrix l / 8 [ldmatrix].
__device__ void ldmatrix(uint32_t (&r)[4], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(shared_address(row)) : "memory");
}
__device__ void ldmatrix_trans(uint32_t (&r)[4], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(shared_address(row)) : "memory");
}
/// D[16,8] += A[16,16] B[16,8] [mma.m16n8k16].
__device__ void mma_bf16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
/// An mbarrier completes a phase when `count` threads have arrived and all announced bytes are there [mbarrier].
__device__ void mbar_init(uint64_t* b, unsigned count) {
  HOPPER_ASM("mbarrier.init.shared::cta.b64 [%0], %1;" :: "r"(shared_address(b)), "r"(count) : "memory");
}
__device__ void mbar_fence_init() { HOPPER_ASM("fence.mbarrier_init.release.cluster;" ::: "memory"); }
__device__ void mbar_arrive(uint64_t* b) {
  HOPPER_ASM("mbarrier.arrive.shared::cta.b64 _, [%0];" :: "r"(shared_address(b)) : "memory");
}
__device__ void mbar_expect(uint64_t* b, unsigned bytes) {
  HOPPER_ASM("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" :: "r"(shared_address(b)), "r"(bytes) : "memory");
}
/// Waits until the phase of this parity has completed.
__device__ void mbar_wait(uint64_t* b, unsigned parity) {
  HOPPER_ASM("{\n.reg .pred done;\nagain:\nmbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
             "@!done bra again;\n}" :: "r"(shared_address(b)), "r"(parity) : "memory");
}
/// A box of a matrix to shared memory, from column x, row y; outside the matrix zeros [cp.async.bulk.tensor].
__device__ void tma_load(void* to, const CUtensorMap* map, int x, int y, uint64_t* b) {
  HOPPER_ASM("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];"
             :: "r"(shared_address(to)), "l"(map), "r"(x), "r"(y), "r"(shared_address(b)) : "memory");
}
__device__ void wgmma_fence() { HOPPER_ASM("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ void wgmma_commit() { HOPPER_ASM("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int Left>
__device__ void wgmma_wait() { HOPPER_ASM("wgmma.wait_group.sync.aligned %0;" :: "n"(Left) : "memory"); }

/// Keeps the compiler from moving work on accumulators past this point: past a wgmma_fence it would cost another fence.
template <int N>
__device__ void settle_registers(float (&d)[N]) {
  UNROLL for (int i = 0; i < N; ++i) asm volatile("" : "+f"(d[i]) :: "memory");
}
/// Makes this thread's writes to shared memory visible to wgmma, which reads it another way. Of shared memory alone: for
/// all memory it would wait for the whole GPU [fence.proxy].
__device__ void fence_proxy_async() { HOPPER_ASM("fence.proxy.async.shared::cta;" ::: "memory"); }

#define REGISTERS8(i) \
  "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), "+f"(d[i + 6]), "+f"(d[i + 7])

/// D[64,64] += A[64,16] B[16,64], A from registers, B from shared memory by descriptor: K-major, or MN-major
/// [wgmma.mma_async]. D must not be touched before wgmma_wait.
template <bool BMnMajor>
__device__ void wgmma_rs(float (&d)[32], const uint32_t (&a)[4], uint64_t b, bool accumulate) {
  HOPPER_ASM("{\n.reg .pred add;\nsetp.ne.b32 add, %37, 0;\n"
             "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 "
             "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,"
             "%28,%29,%30,%31}, {%32,%33,%34,%35}, %36, add, 1, 1, %38;\n}"
             : REGISTERS8(0), REGISTERS8(8), REGISTERS8(16), REGISTERS8(24)
             : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(int(accumulate)), "n"(int(BMnMajor)));
}
/// D[64,128] += A[64,16] B[16,128], both K-major in shared memory.
__device__ void wgmma_ss(float (&d)[64], uint64_t a, uint64_t b, bool accumulate) {
  HOPPER_ASM("{\n.reg .pred add;\nsetp.ne.b32 add, %66, 0;\n"
             "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 "
             "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,"
             "%28,%29,%30,%31,%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,%52,%53,"
             "%54,%55,%56,%57,%58,%59,%60,%61,%62,%63}, %64, %65, add, 1, 1, 0, 0;\n}"
             : REGISTERS8(0), REGISTERS8(8), REGISTERS8(16), REGISTERS8(24),
               REGISTERS8(32), REGISTERS8(40), REGISTERS8(48), REGISTERS8(56)
             : "l"(a), "l"(b), "r"(int(accumulate)));
}
#endif
// clang-format on

/// The descriptor of a wgmma operand in shared memory: 128-byte swizzle, 8 rows (a group) every 1,024 bytes
/// [matrix descriptor]. `leading`: bytes from one 64-wide slab of an MN-major operand to the next; not used with N = 64.
__device__ inline uint64_t descriptor(const void* p) {
  return uint64_t((shared_address(p) & 0x3ffff) >> 4) | uint64_t(1) << 16 | uint64_t(1024 >> 4) << 32 |
         uint64_t(1) << 62;
}

// ---------------------------------------------------------------------------------------------------------------------
// Small device functions

__device__ inline float to_float(float x) { return x; }
__device__ inline float to_float(bf16 x) { return __bfloat162float(x); }
template <class T>
__device__ T from_float(float x) {
  if constexpr (std::is_same_v<T, float>) return x;
  else return __float2bfloat16(x);
}
/// Two numbers in a register, the first in the low half.
__device__ inline uint32_t pack(float a, float b) {
  const uint32_t low = __bfloat16_as_ushort(__float2bfloat16(a)), high = __bfloat16_as_ushort(__float2bfloat16(b));
  return low | high << 16;
}
__device__ inline float2 unpack(uint32_t v) {
  return make_float2(__uint_as_float(v << 16), __uint_as_float(v & 0xffff0000u));
}
/// Sum or maximum over the warp, or over the four lanes that share a row of an accumulator; the same bits in every lane.
struct Sum {
  static constexpr float none = 0;
  template <class T>
  __device__ static T of(T a, T b) {
    return a + b;
  }
};
struct Max {
  static constexpr float none = -std::numeric_limits<float>::infinity();
  __device__ static float of(float a, float b) { return fmaxf(a, b); }
};
template <class Op, class T>
__device__ T warp_reduce(T v) {
  for (int i = 16; i; i /= 2) v = Op::of(v, __shfl_xor_sync(0xffffffffu, v, i));
  return v;
}
template <class Op>
__device__ float quad_reduce(float v) {
  for (int i = 1; i < 4; i *= 2) v = Op::of(v, __shfl_xor_sync(0xffffffffu, v, i));
  return v;
}
/// The same over the block; `scratch` holds 32 floats and may be reused after the next barrier.
template <class Op>
__device__ float block_reduce(float v, float* scratch) {
  const unsigned warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  v = warp_reduce<Op>(v);
  if (lane == 0) scratch[warp] = v;
  __syncthreads();  // written by lane 0 of each warp, read by all
  return warp_reduce<Op>(lane < blockDim.x / 32 ? scratch[lane] : Op::none);
}

inline constexpr float log2_e = 1.4426950408889634f;

/// What the kernels did: their blocks add to it as they run, each what it went over, so that the counted side of
/// `verify` is counted here too. Spread over places, for blocks that end together would queue for one.
struct Tally {
  static constexpr unsigned places = 32;
  unsigned long long flops[places], bytes[places];  ///< as in Counters
  unsigned long long global_rows;                   ///< rows of K^, V^ written
};
/// One thread of a block tells what the block did; `t` may be null.
__device__ inline void count(Tally* t, Index flops, Index bytes) {
  if (!t) return;
  const unsigned place = (blockIdx.x + 7 * blockIdx.y + 11 * blockIdx.z) % Tally::places;
  atomicAdd(&t->flops[place], static_cast<unsigned long long>(flops));
  if (bytes) atomicAdd(&t->bytes[place], static_cast<unsigned long long>(bytes));
}

/// What the kernels know of a row of the pass.
struct Row {
  int token, position, slot;  ///< slot: of the sequence, in the caches
  int segment, end;           ///< the segment's number, and the position after its last row
};
/// What they know of a segment's rows.
struct Span {
  int first, rows, position, slot;  ///< of its first row
};

/// Where the keys of a layer lie. Three layouts of K and V, each [..., dh]:
///   ring     [slot][G][W]        position p at p % W: what decode reads of a window stage
///   recent   [G][recent_rows]    the keys of a pass in order, each segment's after W rows for the ones before it
///   paged    [page][G][256]      through the sequence's page table
struct Keys {
  enum Layout { ring, recent, paged } layout;
  void *k, *v;
  const int* table;  ///< [slot][table_stride] page numbers
  Index table_stride;
  Index recent_rows;  ///< n + segments * W
  int window;         ///< W; 0: all positions
  int kv_heads;       ///< G

  /// The row of position p of head g; in `recent`, of the given segment.
  __device__ Index row(int slot, int g, int p, int segment, const Span& s) const {
    if (layout == ring) return (Index(slot) * kv_heads + g) * window + p % window;
    if (layout == recent) return g * recent_rows + s.first + Index(segment + 1) * window + (p - s.position);
    return (Index(table[slot * table_stride + p / block_rows]) * kv_heads + g) * block_rows + p % block_rows;
  }
};

// ---------------------------------------------------------------------------------------------------------------------
// Rows: embedding, norm, rotation and caches

/// embed_rows -- X[i,:] = embed[token,:] * scale.
///   grid   n     block 128: a thread owns every 128th column
///   bytes  n D (2 + 4)     bound HBM; one pass in 30 layer passes
inline constexpr Block embed_block{128};
__global__ void __launch_bounds__(embed_block.threads)
    embed_rows(const Row* rows, const bf16* embed /*[V,ld]*/, Index ld, Index D, float scale, float* x /*[n,D]*/) {
  grid_wait(), grid_launch();
  const Index i = blockIdx.x;
  for (Index c = threadIdx.x; c < D; c += embed_block.threads)
    x[i * D + c] = to_float(embed[rows[i].token * ld + c]) * scale;
}

/// gather_rows -- Y[i,:] = X[which[i],:]: the wanted rows enter the cross-decoder.
///   grid   m     block 128: a thread owns every 128th column     bytes 8 m D     bound HBM; prefill: m = 1 a sequence
inline constexpr Block gather_block{128};
__global__ void __launch_bounds__(gather_block.threads)
    gather_rows(const float* x /*[n,D]*/, const int* which, Index D, float* y /*[m,D]*/) {
  grid_wait(), grid_launch();
  const Index from = which[blockIdx.x], to = blockIdx.x;
  for (Index c = threadIdx.x; c < D; c += gather_block.threads) y[to * D + c] = x[from * D + c];
}

/// rms_norm -- Y[i,:] = X[i,:] * rsqrt(mean(X[i,:]^2) + eps) * gain, rounded once, to BF16; padding becomes 0.
/// Twin: rms_norm().
///   grid   n     block 256: a thread owns every 256th column; the second reading of the row hits L1
///   bytes  n D (4 + 2)     bound HBM
///   rung   one of one: fused into the next product it would save 6% of a decode layer's launches
inline constexpr Block norm_block{256, /*shared=*/32 * sizeof(float)};
__global__ void __launch_bounds__(norm_block.threads) rms_norm(const float* x /*[n,D]*/,
    const int* which /*or null: all*/, const float* gain /*[D]*/, Index D, float eps, bf16* y /*[n,ld]*/, Index ld) {
  grid_wait(), grid_launch();
  const float* row = x + (which ? which[blockIdx.x] : Index(blockIdx.x)) * D;
  float sum = 0;
  for (Index c = threadIdx.x; c < D; c += norm_block.threads) sum += row[c] * row[c];
  const float scale = 1 / sqrtf(block_reduce<Sum>(sum, shared_memory<float>()) / float(D) + eps);
  for (Index c = threadIdx.x; c < ld; c += norm_block.threads)
    y[blockIdx.x * ld + c] = __float2bfloat16(c < D ? row[c] * scale * gain[c] : 0.0f);
}

/// rope_table -- (cos, sin) of every row's angles, formed in double so that far positions stay right; once a pass, the
/// layers and loops share it. Twin: rope_angles().
///   grid   ceil(n dh/2 / 128)     block 128: a thread owns one angle     bytes 4 n dh     bound double arithmetic
inline constexpr Block angles_block{128};
__global__ void __launch_bounds__(angles_block.threads)
    rope_table(const Row* rows, Index n, int half /*dh/2*/, const double* frequency, float2* table /*[n,dh/2]*/) {
  grid_wait(), grid_launch();
  const Index i = Index(blockIdx.x) * angles_block.threads + threadIdx.x;
  if (i >= n * half) return;
  const double angle = rows[i / half].position * frequency[i % half];
  table[i] = make_float2(float(cos(angle)), float(sin(angle)));
}

/// history -- the keys before the pass, from the rings to the front of `recent`, before the pass overwrites them.
///   grid   (W, segments)     block 128: a block owns one position of one segment, all heads
///   bytes  segments 4 W G dh s
inline constexpr Block history_block{128};
template <class Kv>
__global__ void __launch_bounds__(history_block.threads) history(const Span* spans, Keys from, Keys to, int head_dim) {
  grid_wait(), grid_launch();
  const Span s = spans[blockIdx.y];
  const int p = s.position - 1 - int(blockIdx.x);
  if (p < 0) return;
  for (int i = int(threadIdx.x); i < from.kv_heads * head_dim; i += history_block.threads) {
    const int g = i / head_dim, c = i % head_dim;
    const Index a = from.row(s.slot, g, p, 0, s) * head_dim + c;
    const Index b = to.row(s.slot, g, p, int(blockIdx.y), s) * head_dim + c;
    static_cast<Kv*>(to.k)[b] = static_cast<const Kv*>(from.k)[a];
    static_cast<Kv*>(to.v)[b] = static_cast<const Kv*>(from.v)[a];
  }
}

/// What rotate_append does with a row [q | k | v] of the projections.
struct Append {
  Index ld;               ///< of the row
  int q_heads, kv_heads;  ///< heads of q in front (0 when only K^, V^ are projected), heads of k and of v (0: none)
  int head_dim;
  bool rotate, half;  ///< RoPE, and its pairing (i, i + dh/2) in place of (2i, 2i+1)
  bool to_cache, to_recent;
};

/// rotate_append -- RoPE on q in place and on k, then k and v into the caches: the ring keeps a segment's last W rows,
/// `recent` and pages keep all. Twins: rope() and append().
///   grid   (n, ceil((H + 2 G) dh/2 / 128))     block 128: a thread owns a pair, so that a decode step's 32 rows of the
///          1.3B shape are 448 blocks and not 32
///   bytes  n (4 H dh + 2 G dh (2 + s))     bound HBM
///   rung   one of one: the rotation and the append are one pass over the row
inline constexpr Block append_block{128, 0, 1, /*columns=*/128};
template <class Kv>
__global__ void __launch_bounds__(append_block.threads) rotate_append(const Row* rows, const Span* spans,
    const float2* table, bf16* qkv /*[n,ld]*/, Append a, Keys cache, Keys recent, Tally* tally) {
  grid_wait(), grid_launch();
  const Row r = rows[blockIdx.x];
  const Span s = spans[r.segment];
  bf16* row = qkv + Index(blockIdx.x) * a.ld;
  const int half = (a.head_dim + 1) / 2, heads = a.q_heads + 2 * a.kv_heads;
  const bool keep = a.to_cache && (cache.layout != Keys::ring || r.position + cache.window >= r.end);
  // K^ and V^ alone: a row of the global cache
  if (tally && blockIdx.y + threadIdx.x == 0 && keep && a.q_heads == 0) atomicAdd(&tally->global_rows, 1ull);
  const int i = int(blockIdx.y * append_block.columns + threadIdx.x), head = i / half, pair = i % half;
  if (head >= heads) return;
  const bool is_q = head < a.q_heads, is_v = head >= a.q_heads + a.kv_heads;
  const int first = a.half && a.rotate ? pair : 2 * pair;
  const int second = a.half && a.rotate ? pair + half : 2 * pair + 1;
  const bool lone = second >= a.head_dim;  // an odd head size, never rotated, has a last number without a partner
  bf16* h = row + head * a.head_dim;
  float x = to_float(h[first]), y = lone ? 0.0f : to_float(h[second]);
  if (a.rotate && !is_v) {
    const float2 turn = table[Index(blockIdx.x) * half + pair];
    const float turned = x * turn.x - y * turn.y;
    y = x * turn.y + y * turn.x, x = turned;
  }
  if (is_q) {
    if (a.rotate) h[first] = __float2bfloat16(x), h[second] = __float2bfloat16(y);
    return;
  }
  const int g = (head - a.q_heads) % a.kv_heads;
  const auto put = [&](const Keys& keys) {
    Kv* to = static_cast<Kv*>(is_v ? keys.v : keys.k) + keys.row(r.slot, g, r.position, r.segment, s) * a.head_dim;
    to[first] = from_float<Kv>(x);
    if (!lone) to[second] = from_float<Kv>(y);
  };
  if (keep) put(cache);
  if (a.to_recent) put(recent);
}

// ---------------------------------------------------------------------------------------------------------------------
// Products y = x W^T

/// Rows of x and y that belong together, and the weights they meet: all rows and one W, or per expert e the assignments
/// start[e] .. start[e+1] and W + e out ld.
struct Groups {
  const int* start = nullptr;  ///< [E+1]; null: one group of n rows
  int count = 1;               ///< E
  const int* order = nullptr;  ///< x's row of assignment i is order[i] / active; null: i
  int active = 1;

  /// The row of x that assignment i multiplies; -1 behind the last.
  __device__ Index source(Index i, Index end) const { return i >= end ? -1 : order ? order[i] / active : i; }
};

/// A tile of rows: `begin` .. at most `end`, of one group; `first` of the group's tiles or not.
struct GroupTile {
  Index group, begin, end;
  bool first;
  __device__ GroupTile(const Groups& g, Index n, Index tile, int height)
      : group(0), begin(tile * height), end(n), first(tile == 0) {
    if (!g.start) return;
    // groups have unknown numbers of tiles, ceil(n/height) + E at most in all: count until the tile's own group
    for (Index before = 0; group < g.count; ++group) {
      const Index start = g.start[group], rows = g.start[group + 1] - start, tiles = ceil_div(rows, height);
      if (tile < before + tiles) {
        begin = start + (tile - before) * height, end = start + rows, first = tile == before;
        return;
      }
      before += tiles;
    }
    begin = end;  // a spare block
  }
};

/// Counts a block's rows x outputs of a product; the weights only where they are met first.
__device__ inline void count_product(Tally* t, Index rows, Index outputs, Index in, bool first) {
  if (threadIdx.x == 0) count(t, 2 * rows * outputs * in, first ? 2 * outputs * in : 0);
}

enum class To : int { bf16, f32, add };  ///< y is BF16, float32, or float32 to be added to

template <To to>
__device__ void put_product(void* y, Index i, float v) {
  if constexpr (to == To::bf16) static_cast<bf16*>(y)[i] = __float2bfloat16(v);
  else if constexpr (to == To::f32) static_cast<float*>(y)[i] = v;
  else static_cast<float*>(y)[i] += v;
}

/// product_tile -- y = x W^T, tile by tile; the general kernel. Twin: multiply().
///   grid   (ceil(out/64), tiles of 64 rows): a block owns 64 rows x 64 outputs of one group
///   block  128 = 4 warps: a warp owns 32 x 32 as 2 x 4 tiles of mma.m16n8k16
///   shared 3 stages x (64 x 64 + 64 x 64) BF16 = 48 KB, filled by cp.async two steps ahead; 16-byte pieces of a row
///          are permuted by row % 8, so that ldmatrix meets no bank twice
///   bytes  x once per 64 outputs, W once per 64 rows     FLOP 2 n out in
///   bound  mma.sync reaches some 60% of the tensor cores' peak on Hopper; that is why cuBLASLt goes first
///   needs  rows padded to 8 columns with zeros
inline constexpr int tile_product_stages = 3;
inline constexpr Block tile_product_block{128, tile_product_stages * 2 * 64 * 64 * sizeof(bf16), 64, 64};
template <To to>
__global__ void __launch_bounds__(tile_product_block.threads)
    product_tile(const bf16* x /*[n,padded in]*/, const bf16* w /*[out,padded in]*/, Index in, void* y /*[n,ldy]*/,
        Index ldy, Index n, Index out, Groups groups, Tally* tally) {
  grid_wait(), grid_launch();
  constexpr int height = tile_product_block.rows, width = tile_product_block.columns, stages = tile_product_stages;
  const GroupTile rows(groups, n, blockIdx.y, height);
  const Index ld = padded(in), row0 = rows.begin, end = rows.end, out0 = Index(blockIdx.x) * width;
  if (row0 >= end) return;
  count_product(tally, min(end - row0, Index(height)), min(out - out0, Index(width)), in, rows.first);
  w += rows.group * out * ld;
  bf16* memory = shared_memory<bf16>();
  const int thread = int(threadIdx.x), warp = thread / 32, lane = thread % 32;
  constexpr int operand = height * 64, stage_size = 2 * operand;
  // thread t copies piece t % 8 of rows t / 8, + 16, + 32, + 48 of both operands
  const auto fetch = [&](Index step) {
    bf16* stage = memory + step % stages * stage_size;
    const Index column = step * 64 + thread % 8 * 8;
    for (int r = thread / 8; r < height; r += 16) {
      const Index xi = groups.source(row0 + r, end), o = out0 + r;
      bf16* to_x = stage + r * 64 + (thread % 8 ^ r % 8) * 8;
      cp_async16(to_x, x + xi * ld + column, xi >= 0 && column < ld);
      cp_async16(to_x + operand, w + o * ld + column, o < out && column < ld);
    }
  };
  float d[2][4][4] = {};
  const Index steps = ceil_div(ld, 64);
  const int m0 = warp / 2 * 32, n0 = warp % 2 * 32;
  for (Index s = 0; s < 2; ++s) {
    if (s < steps) fetch(s);
    cp_async_commit();  // an empty group too: the count below stays the same
  }
  for (Index s = 0; s < steps; ++s) {
    cp_async_wait<1>();
    __syncthreads();  // stage s: written by all, read by all; stage s - 1 has been read by all
    if (s + 2 < steps) fetch(s + 2);
    cp_async_commit();
    const bf16* a = memory + s % stages * stage_size;
    const bf16* b = a + operand;
    UNROLL for (int k = 0; k < 8; k += 2) {  // two pieces of 8 columns
      uint32_t af[2][4], bf[2][4];
      UNROLL for (int i = 0; i < 2; ++i) {
        const int ra = m0 + 16 * i + lane % 16, rb = n0 + 16 * i + lane / 16 * 8 + lane % 8;
        ldmatrix(af[i], a + ra * 64 + ((k + lane / 16) ^ ra % 8) * 8);
        ldmatrix(bf[i], b + rb * 64 + ((k + lane / 8 % 2) ^ rb % 8) * 8);
      }
      UNROLL for (int i = 0; i < 2; ++i) UNROLL for (int j = 0; j < 4; ++j)
          mma_bf16(d[i][j], af[i], bf[j / 2][j % 2 * 2], bf[j / 2][j % 2 * 2 + 1]);
    }
  }
  cp_async_wait<0>();
  UNROLL for (int i = 0; i < 2; ++i) UNROLL for (int j = 0; j < 4; ++j) UNROLL for (int e = 0; e < 4; ++e) {
    const Index r = row0 + m0 + 16 * i + lane / 4 + e / 2 * 8, o = out0 + n0 + 8 * j + lane % 4 * 2 + e % 2;
    if (r < end && o < out) put_product<to>(y, r * ldy + o, d[i][j][e]);
  }
}

/// product_wgmma -- y = x W^T on Hopper's tensor cores: prefill's experts, and all products where there is no cuBLASLt.
/// Twin: multiply().
///   grid   (ceil(out/128), tiles of 128 rows): a block owns 128 rows x 128 outputs of one group
///   block  256 = 2 warpgroups: each owns 64 rows x 128 outputs, 64 accumulators a thread
///   shared 4 stages x (128 x 64 + 128 x 64) BF16 = 128 KB. cp.async fills them two steps ahead, since TMA cannot gather
///          the rows of x that were sent to an expert; it lays pieces where the 128-byte swizzle wants them
///   bytes  x once per 128 outputs, W once per 128 rows     FLOP 2 n out in
///   bound  tensor cores: 64 FLOP a byte of L2, and a product's steps overlap the next one's copies
///   needs  rows padded to 8 columns with zeros
///   rung   product_tile's mma.sync reaches some 60% of the tensor cores' rate, and reads W twice as often
inline constexpr int wgmma_product_stages = 4;
inline constexpr Block wgmma_product_block{256, wgmma_product_stages * 2 * 128 * 64 * sizeof(bf16), 128, 128};
template <To to>
__global__ void __launch_bounds__(wgmma_product_block.threads)
    product_wgmma(const bf16* x /*[n,padded in]*/, const bf16* w /*[out,padded in]*/, Index in, void* y /*[n,ldy]*/,
        Index ldy, Index n, Index out, Groups groups, Tally* tally) {
  grid_wait(), grid_launch();
  constexpr int height = wgmma_product_block.rows, width = wgmma_product_block.columns;
  const GroupTile rows(groups, n, blockIdx.y, height);
  const Index ld = padded(in), row0 = rows.begin, end = rows.end, out0 = Index(blockIdx.x) * width;
  if (row0 >= end) return;
  count_product(tally, min(end - row0, Index(height)), min(out - out0, Index(width)), in, rows.first);
  w += rows.group * out * ld;
  bf16* memory = shared_memory<bf16>();
  const int thread = int(threadIdx.x), warpgroup = thread / 128, warp = thread / 32 % 4, lane = thread % 32;
  constexpr int stages = wgmma_product_stages, operand = height * 64;
  Index xi[4];  // the rows of x that this thread copies: thread t has piece t % 8 of rows t / 8, + 32, + 64, + 96
  UNROLL for (int j = 0; j < 4; ++j) xi[j] = groups.source(row0 + thread / 8 + 32 * j, end);
  const auto fetch = [&](Index step) {
    const Index column = step * 64 + thread % 8 * 8;
    UNROLL for (int j = 0; j < 4; ++j) {
      const int r = thread / 8 + 32 * j;
      bf16* to_x = memory + step % stages * 2 * operand + r * 64 + (thread % 8 ^ r % 8) * 8;
      cp_async16(to_x, x + xi[j] * ld + column, xi[j] >= 0 && column < ld);
      cp_async16(to_x + operand, w + (out0 + r) * ld + column, out0 + r < out && column < ld);
    }
  };
  float d[64] = {};
  const Index steps = ceil_div(ld, 64);
  for (Index s = 0; s < 2; ++s) {
    if (s < steps) fetch(s);
    cp_async_commit();
  }
  for (Index s = 0; s < steps; ++s) {
    cp_async_wait<1>();
    fence_proxy_async();
    __syncthreads();  // stage s: written by all, read by all; both warpgroups are done with step s - 2
    if (s + 2 < steps) fetch(s + 2);
    cp_async_commit();
    const bf16* a = memory + s % stages * 2 * operand + warpgroup * 64 * 64;
    const bf16* b = memory + s % stages * 2 * operand + operand;
    settle_registers(d);
    wgmma_fence();
    UNROLL for (int k = 0; k < 4; ++k) wgmma_ss(d, descriptor(a + k * 16), descriptor(b + k * 16), true);
    wgmma_commit();
    wgmma_wait<1>();  // step s - 1 is done, s runs on
  }
  wgmma_wait<0>();
  cp_async_wait<0>();
  UNROLL for (int i = 0; i < 64; ++i) {
    const Index r = row0 + warpgroup * 64 + 16 * warp + lane / 4 + i / 2 % 2 * 8,
                o = out0 + i / 4 * 8 + lane % 4 * 2 + i % 2;
    if (r < end && o < out) put_product<to>(y, r * ldy + o, d[i]);
  }
}

/// product_skinny -- y = x W^T for up to 8 Tiles rows: a decode step reads each weight once, so the weights' way to the
/// tensor cores is all that counts. Twin: multiply().
///   grid   (ceil(out/16), groups): a block owns 16 rows of W
///   block  256 = 8 warps, which share the columns: warp w owns every 8th piece of 32
///   shared a ring of 6 steps of weights, 48 KB: each thread fills it by cp.async for itself alone, 5 steps ahead, so no
///          barrier guards it; then the warps' sums, 4 KB a tile
///   regs   16 bytes of weights a lane are the M = 16 operand, the rows of x the N = 8 Tiles one. Both take the same 8
///          columns per lane: the sum over columns may run in any order, so nothing need be shuffled into the
///          instruction's layout. x comes one step ahead
///   bytes  W once: 2 out in; x again per 16 outputs, from L2     FLOP 2 n out in
///   bound  HBM up to n of about 32 (n FLOP a byte against some 200). In flight (computed): 40 KB of weights a block, 80 KB
///          an SM with two; loads to registers, which the compiler had moved down to their use, had been 16 KB
///   rung   product_tile would read 64 rows' worth of x and fill 1/2 to 1/64 of its tile
inline constexpr int skinny_stages = 6;
template <int Tiles>
inline constexpr Block skinny_product_block{
    256, skinny_stages * 2 * 256 * sizeof(uint4) + Tiles * 8 * 16 * 8 * sizeof(float), 8 * Tiles, 16};
template <To to, int Tiles>
__global__ void __launch_bounds__(skinny_product_block<Tiles>.threads)
    product_skinny(const bf16* x /*[n,padded in]*/, const bf16* w /*[out,padded in]*/, Index in, void* y /*[n,ldy]*/,
        Index ldy, Index n, Index out, Groups groups, Tally* tally) {
  constexpr int threads = skinny_product_block<Tiles>.threads, width = skinny_product_block<Tiles>.columns;
  constexpr int height = skinny_product_block<Tiles>.rows, ahead = skinny_stages - 1;
  const int warp = int(threadIdx.x) / 32, lane = int(threadIdx.x) % 32, g = lane / 4, t = lane % 4;
  const Index ld = padded(in), out0 = Index(blockIdx.x) * width, group = blockIdx.y, steps = ceil_div(ld, 256);
  w += (group * out + out0) * ld;
  uint4* ring = shared_memory<uint4>() + threadIdx.x;  // [stages][weight rows g and g + 8][threads]
  const auto column = [&](Index step) { return step * 256 + warp * 32 + t * 8; };
  const auto fetch = [&](Index step) {
    UNROLL for (int half = 0; half < 2; ++half) {
      const Index o = g + 8 * half, k = column(step);
      cp_async16(
          ring + (step % skinny_stages * 2 + half) * threads, w + o * ld + k, step < steps && k < ld && out0 + o < out);
    }
    cp_async_commit();
  };
  const auto fetch_first = [&] {
    for (Index step = 0; step < ahead; ++step) fetch(step);
  };
  // no kernel writes weights: they are asked for while the kernel before still runs. An expert's may not be needed
  if (!groups.start) fetch_first();
  grid_wait(), grid_launch();
  const Index begin = groups.start ? groups.start[group] : 0, end = groups.start ? groups.start[group + 1] : n;
  float* sums = reinterpret_cast<float*>(shared_memory<uint4>() + skinny_stages * 2 * threads);
  // [8 warps][Tiles][16 outputs][8 rows]
  for (Index row0 = begin; row0 < end; row0 += height) {
    count_product(tally, min(end - row0, Index(height)), min(out - out0, Index(width)), in, row0 == begin);
    if (groups.start || row0 > begin) fetch_first();
    Index xi[Tiles];
    UNROLL for (int j = 0; j < Tiles; ++j) xi[j] = groups.source(row0 + 8 * j + g, end);
    const auto load_x = [&](uint4(&piece)[Tiles], Index step) {
      const Index k = column(step);
      UNROLL for (int j = 0; j < Tiles; ++j) piece[j] =
          k < ld && xi[j] >= 0 ? load_here(reinterpret_cast<const uint4*>(x + xi[j] * ld + k)) : make_uint4(0, 0, 0, 0);
    };
    float d[Tiles][4] = {};
    uint4 now[Tiles], next[Tiles];
    load_x(now, 0);
    for (Index step = 0; step < steps; ++step) {
      fetch(step + ahead);  // behind the last step nothing but an empty group: the count below stays the same
      load_x(next, step + 1);
      cp_async_wait<ahead>();
      const uint4* weights = ring + step % skinny_stages * 2 * threads;
      const uint4 a0 = weights[0], a1 = weights[threads];
      const uint32_t first[4] = {a0.x, a1.x, a0.y, a1.y}, second[4] = {a0.z, a1.z, a0.w, a1.w};
      UNROLL for (int j = 0; j < Tiles; ++j) {
        mma_bf16(d[j], first, now[j].x, now[j].y);
        mma_bf16(d[j], second, now[j].z, now[j].w);
        now[j] = next[j];
      }
    }
    cp_async_wait<0>();
    UNROLL for (int j = 0; j < Tiles; ++j) UNROLL for (int e = 0; e < 4; ++e)
        sums[((warp * Tiles + j) * 16 + g + e / 2 * 8) * 8 + t * 2 + e % 2] = d[j][e];
    __syncthreads();  // partial sums: written by each warp, read by all
    for (int i = int(threadIdx.x); i < Tiles * 128; i += threads) {
      float sum = 0;
      for (int s = 0; s < 8; ++s) sum += sums[s * Tiles * 128 + i];
      const Index o = out0 + i / 8 % 16, r = row0 + i / 128 * 8 + i % 8;
      if (o < out && r < end) put_product<to>(y, r * ldy + o, sum);
    }
    __syncthreads();  // read by all before the next rows' sums are written
  }
}

/// swiglu -- Y[i,c] = silu(gate[i,c]) * up[i,c], both halves of one row [gate | up]; padding becomes 0. Twin: swiglu().
///   grid   (n, ceil(ld/1024))     block 128: a thread owns 8 numbers, 16 bytes each way (`up` one by one where F is no
///          multiple of 8: it then begins between two 16-byte pieces)
///   bytes  6 n F     bound HBM
inline constexpr Block swiglu_block{128, 0, 1, /*columns=*/1024};
__global__ void __launch_bounds__(swiglu_block.threads)
    swiglu(const bf16* gate_up /*[n,ldg]*/, Index ldg, Index F, bf16* y /*[n,ld]*/, Index ld) {
  grid_wait(), grid_launch();
  const Index i = blockIdx.x, c = Index(blockIdx.y) * swiglu_block.columns + threadIdx.x * 8;
  if (c >= ld) return;
  const bf16 *gate = gate_up + i * ldg + c, *up = gate + F;
  const auto up_pair = [&](int j) {
    return pack(c + j < F ? to_float(up[j]) : 0.0f, c + j + 1 < F ? to_float(up[j + 1]) : 0.0f);
  };
  const uint4 a = *reinterpret_cast<const uint4*>(gate);
  const uint4 b =
      F % 8 == 0 ? *reinterpret_cast<const uint4*>(up) : make_uint4(up_pair(0), up_pair(2), up_pair(4), up_pair(6));
  const auto silu = [](float v) { return v / (1 + fast_exp2(-v * log2_e)); };
  const auto pair = [&](uint32_t gates, uint32_t ups, int j) {
    const float2 z = unpack(gates), u = unpack(ups);
    return pack(c + j < F ? silu(z.x) * u.x : 0.0f, c + j + 1 < F ? silu(z.y) * u.y : 0.0f);
  };
  *reinterpret_cast<uint4*>(y + i * ld + c) =
      make_uint4(pair(a.x, b.x, 0), pair(a.y, b.y, 2), pair(a.z, b.z, 4), pair(a.w, b.w, 6));
}

// ---------------------------------------------------------------------------------------------------------------------
// Mixture of experts

/// route -- softmax over all E router logits in float32, the `active` largest (ties, judged on the logits: the lower
/// index), divided by their sum if `normalize`. Twin: route().
///   grid   ceil(n/4)     block 128 = 4 warps: a warp owns a row, a lane every 32nd expert
///   bytes  4 n E + 8 n active     the largest are found one after another: each is the next in the order (logit
///          falling, index rising), so nothing need be marked as taken
inline constexpr Block route_block{128, 0, /*rows=*/4};
__global__ void __launch_bounds__(route_block.threads) route(const float* logits /*[n,E]*/, Index n, int E, int active,
    bool normalize, int* expert /*[n,active]*/, float* weight /*[n,active]*/) {
  grid_wait(), grid_launch();
  const Index i = Index(blockIdx.x) * route_block.rows + threadIdx.x / 32;
  if (i >= n) return;
  const int lane = int(threadIdx.x) % 32;
  const float* row = logits + i * E;
  float last = INFINITY, top = 0, sum = 0, chosen = 0;
  int last_index = -1;
  for (int j = 0; j < active; ++j) {
    float best = -INFINITY;
    int index = E;
    for (int e = lane; e < E; e += 32) {
      const float v = row[e];
      const bool after = v < last || (v == last && e > last_index);
      if (after && (index == E || v > best)) best = v, index = e;
    }
    for (int b = 16; b; b /= 2) {
      const float v = __shfl_xor_sync(0xffffffffu, best, b);
      const int e = __shfl_xor_sync(0xffffffffu, index, b);
      if (e != E && (index == E || v > best || (v == best && e < index))) best = v, index = e;
    }
    if (index == E) index = j;  // logits that are not numbers: stay in range, the head's check will tell
    if (j == 0) {
      top = best;
      for (int e = lane; e < E; e += 32) sum += expf(row[e] - top);
      sum = warp_reduce<Sum>(sum);
    }
    last = best, last_index = index;
    const float p = expf(best - top) / sum;
    chosen += p;
    if (lane == 0) expert[i * active + j] = index, weight[i * active + j] = p;
  }
  if (normalize && lane == 0)
    for (int j = 0; j < active; ++j) weight[i * active + j] /= chosen;
}

/// sort_by_expert -- stable counting sort of the n active assignments; no atomics, so the order is always the same.
///   grid   E: block e finds how many assignments have a lower expert, then writes its own in order
///   block  256
///   bytes  8 E n active, from L2: 4 us for 8,192 rows of 8 (an estimate)
inline constexpr Block sort_block{256, /*shared=*/16 * sizeof(int)};
__global__ void __launch_bounds__(sort_block.threads) sort_by_expert(
    const int* expert, Index assignments, int* start /*[E+1]*/, int* order /*[n active]*/, int* place /*its inverse*/) {
  grid_wait(), grid_launch();
  const int e = int(blockIdx.x), warp = int(threadIdx.x) / 32, lane = int(threadIdx.x) % 32;
  int* counts = shared_memory<int>();  // [2][8]
  constexpr int threads = sort_block.threads;
  int lower = 0, upto = 0;
  for (Index i = threadIdx.x; i < assignments; i += threads) lower += expert[i] < e, upto += expert[i] <= e;
  lower = warp_reduce<Sum>(lower), upto = warp_reduce<Sum>(upto);
  if (lane == 0) counts[warp] = lower, counts[8 + warp] = upto;
  __syncthreads();  // the warps' counts: written by lane 0, read by all
  lower = upto = 0;
  for (int i = 0; i < 8; ++i) lower += counts[i], upto += counts[8 + i];
  if (threadIdx.x == 0) {
    start[e] = lower;
    if (e + 1 == int(gridDim.x)) start[e + 1] = upto;
  }
  __syncthreads();  // read by all before the counts are written again
  Index next = lower;
  for (Index base = 0; base < assignments; base += threads) {
    const Index i = base + threadIdx.x;
    const bool mine = i < assignments && expert[i] == e;
    const unsigned lanes = __ballot_sync(0xffffffffu, mine);
    if (lane == 0) counts[warp] = __popc(lanes);
    __syncthreads();  // this round's counts: written by lane 0, read by all
    Index at = next + __popc(lanes & ((1u << lane) - 1));
    for (int w = 0; w < 8; ++w) {
      if (w < warp) at += counts[w];
      next += counts[w];
    }
    if (mine) order[at] = int(i), place[i] = int(at);
    __syncthreads();  // read by all before the next round's counts
  }
}

/// combine -- X[i,:] += sum over the row's experts, in the order of their choice, of weight * Y[place,:].
///   grid   n     block 128: a thread owns every 128th column
///   bytes  n D (2 active + 8)     bound HBM
inline constexpr Block combine_block{128};
__global__ void __launch_bounds__(combine_block.threads) combine(const bf16* y /*[n active,ldy]*/, Index ldy,
    const int* place, const float* weight, int active, Index D, float* x /*[n,D]*/) {
  grid_wait(), grid_launch();
  const Index i = blockIdx.x;
  for (Index c = threadIdx.x; c < D; c += combine_block.threads) {
    float sum = 0;
    for (int j = 0; j < active; ++j) sum += weight[i * active + j] * to_float(y[place[i * active + j] * ldy + c]);
    x[i * D + c] += sum;
  }
}

// ---------------------------------------------------------------------------------------------------------------------
// Attention

/// attend -- one query row and head against the keys it sees; the general kernel. Twin: attention() over each layout.
///   grid   ceil(n H / 4)     block 128 = 4 warps: a warp owns one row and head
///   regs   per 32 keys a lane scores one; then the lane owns every 32nd number of the output, up to head_dim 256
///   bytes  K, V once per query head and row: H/G times, and n times, what attend_split and attend_tiles read
///   FLOP   4 dh a key
inline constexpr Block attend_block{128, /*shared=*/4 * 32 * sizeof(float), /*rows=*/4};
template <class Kv>
__global__ void __launch_bounds__(attend_block.threads)
    attend(const Row* rows, const Span* spans, const bf16* q /*[n,ldq]*/, Index ldq, Keys keys, Index n, int heads,
        int head_dim, float scale, bf16* out /*[n,ldo]*/, Index ldo, Tally* tally) {
  grid_wait(), grid_launch();
  const int warp = int(threadIdx.x) / 32, lane = int(threadIdx.x) % 32;
  const Index item = Index(blockIdx.x) * attend_block.rows + warp;
  if (item >= n * heads) return;
  const Index i = item / heads;
  const int h = int(item % heads), group = heads / keys.kv_heads, g = h / group;
  const Row r = rows[i];
  const Span s = spans[r.segment];
  float* p = shared_memory<float>() + warp * 32;
  const bf16* query = q + i * ldq + h * head_dim;
  const int first = keys.window ? max(0, r.position - keys.window + 1) : 0;
  float m = -INFINITY, l = 0, o[8] = {};
  Index seen = 0;
  for (int base = first; base <= r.position; base += 32) {
    const int key = base + lane;
    float score = -INFINITY;
    if (key <= r.position) {
      const Kv* k = static_cast<const Kv*>(keys.k) + keys.row(r.slot, g, key, r.segment, s) * head_dim;
      score = 0;
      for (int c = 0; c < head_dim; ++c) score += to_float(query[c]) * to_float(k[c]);
      score *= scale, ++seen;
    }
    const float highest = fmaxf(m, warp_reduce<Max>(score)),
                shrink = expf(m - highest);  // a key is always seen: finite
    p[lane] = expf(score - highest);
    l = l * shrink + warp_reduce<Sum>(p[lane]), m = highest;
    __syncwarp();  // p: written by each lane, read by all
    for (float& v : o) v *= shrink;
    for (int j = 0; j < 32 && base + j <= r.position; ++j) {
      const Kv* v = static_cast<const Kv*>(keys.v) + keys.row(r.slot, g, base + j, r.segment, s) * head_dim;
      UNROLL for (int c = 0; c < 8; ++c) if (c * 32 + lane < head_dim) o[c] += p[j] * to_float(v[c * 32 + lane]);
    }
    __syncwarp();  // p: read by all before it is written again
  }
  UNROLL for (int c = 0; c < 8; ++c) if (c * 32 + lane < head_dim) out[i * ldo + h * head_dim + c * 32 + lane] =
      __float2bfloat16(o[c] / l);
  seen = warp_reduce<Sum>(seen);
  // once a pass: a segment's first row meets all its keys, each later row one that no row before it has met
  const Index fresh = h % group ? 0 : r.position == s.position ? seen : 1;
  if (lane == 0) count(tally, 4 * seen * head_dim, 2 * fresh * head_dim * Index(sizeof(Kv)));
}

/// 64 rows of 64 BF16 numbers as TMA leaves them with the 128-byte swizzle: piece c of row r at c ^ r % 8.
__device__ inline const bf16* swizzled(const bf16* tile, int row, int piece) {
  return tile + row * 64 + (piece ^ row % 8) * 8;
}

/// A ring of tiles of 64 keys in shared memory: TMA brings tile after tile, its readers give each stage back. A stage is
/// K [64,DH], then V, each as slabs of 64 columns with the 128-byte swizzle.
template <int DH, int Stages>
struct KeyRing {
  static constexpr int slabs = DH / 64, slab = 64 * 64, stage_size = 2 * slabs * slab;
  static constexpr std::size_t bytes = Stages * (stage_size * sizeof(bf16) + 2 * sizeof(uint64_t));
  bf16* memory = shared_memory<bf16>();
  uint64_t* full = reinterpret_cast<uint64_t*>(memory + Stages * stage_size);  ///< [Stages] the tile has arrived
  uint64_t* empty = full + Stages;                                             ///< [Stages] all readers are done

  __device__ explicit KeyRing(unsigned readers) {
    if (threadIdx.x == 0) {
      for (int s = 0; s < Stages; ++s) mbar_init(full + s, 1), mbar_init(empty + s, readers);
      mbar_fence_init();
    }
    __syncthreads();  // the mbarriers: set up by thread 0, used by all
  }
  /// One thread asks for tile j, whose first key lies in this row of the cache, once the stage is free.
  __device__ void fetch(int j, const CUtensorMap& k_map, const CUtensorMap& v_map, Index row) const {
    if (j >= Stages) mbar_wait(empty + j % Stages, unsigned(j / Stages - 1) & 1);
    bf16* to = memory + j % Stages * stage_size;
    mbar_expect(full + j % Stages, stage_size * sizeof(bf16));
    for (int s = 0; s < slabs; ++s) {
      tma_load(to + s * slab, &k_map, 64 * s, int(row), full + j % Stages);
      tma_load(to + (slabs + s) * slab, &v_map, 64 * s, int(row), full + j % Stages);
    }
  }
  /// Waits for tile j; its K. V lies `slabs * slab` numbers behind it.
  __device__ const bf16* wait(int j) const {
    mbar_wait(full + j % Stages, unsigned(j / Stages) & 1);
    return memory + j % Stages * stage_size;
  }
  __device__ void release(int j) const { mbar_arrive(empty + j % Stages); }
};

/// The A operands of mma and wgmma from rows g and g + 8 of a matrix in device memory; a null row is zeros.
template <int DH>
__device__ void load_fragments(uint32_t (&a)[DH / 16][4], const bf16* low, const bf16* high) {
  const int t = int(threadIdx.x) % 4;
  UNROLL for (int k = 0; k < DH / 16; ++k) UNROLL for (int e = 0; e < 4; ++e) {
    const bf16* row = e % 2 ? high : low;
    a[k][e] = row ? *reinterpret_cast<const uint32_t*>(row + k * 16 + e / 2 * 8 + t * 2) : 0;
  }
}

/// Where an accumulator of 16 rows holds a lane's e-th number of row g (half 0) or g + 8 (half 1): columns 2 t, 2 t + 1
/// of each 8.
__host__ __device__ constexpr int place(int e, int half) { return e / 2 * 4 + half * 2 + e % 2; }

/// The running softmax of a lane's two rows, and its step: scores s [16,N], -infinity where masked, become
/// exp2(scale (s - highest so far)), and what was mixed before, o [16,DH], shrinks to the new highest.
struct Softmax {
  float highest[2] = {-INFINITY, -INFINITY}, sum[2] = {};

  template <int N, int DH>
  __device__ void step(float* s, float* o, int half, float scale) {
    float top = highest[half];
    UNROLL for (int e = 0; e < N / 4; ++e) top = fmaxf(top, s[place(e, half)]);
    top = quad_reduce<Max>(top);
    const float base = top == -INFINITY ? 0 : top * scale;  // no key of this row so far
    const float shrink = fast_exp2(highest[half] * scale - base);
    float added = 0;
    UNROLL for (int e = 0; e < N / 4; ++e) {
      float& v = s[place(e, half)];
      v = fast_exp2(v * scale - base), added += v;
    }
    sum[half] = sum[half] * shrink + added, highest[half] = top;
    UNROLL for (int e = 0; e < DH / 4; ++e) o[place(e, half)] *= shrink;
  }
};

/// Partial softmaxes of one query, each [DH numbers, m, l], weighted by exp2(m - max m): number c of their sum.
struct Partial {
  float highest, sum, value;
};
template <int DH>
__device__ Partial merge_partials(const float* row, int count, int stride, int c) {
  Partial all{-INFINITY, 0, 0};
  for (int i = 0; i < count; ++i) all.highest = fmaxf(all.highest, row[i * stride + DH]);
  for (int i = 0; i < count; ++i, row += stride) {
    const float factor = fast_exp2(row[DH] - all.highest);
    all.sum += factor * row[DH + 1], all.value += factor * row[c];
  }
  return all;
}

inline constexpr int split_rows = 512;  ///< keys that a block of attend_split owns: fixed, so that a row's result does
                                        ///< not depend on the batch it is in
inline constexpr int split_stages = 3;
inline constexpr int split_heads = 16;  ///< query heads of a KV head at most: the M of mma

/// attend_split -- one new row per sequence against 512 of its keys, in a ring or in pages; step 1 of 2 (then
/// attend_merge). Twin: attention() with one row.
///   grid   (S, G, n): a block owns one KV head and 512 keys of one row; S covers the longest sequence
///   block  128 = 4 warps: of each 64 keys a warp owns 16, with its own running max m, sum l and output o
///   regs   the R = H/G query heads of the KV head fill the M = 16 of mma.m16n8k16 with zeros: K and V are read once for
///          all of them, and the tensor cores' 3-fold spare work costs nothing here
///   shared 3 stages x (64 K + 64 V rows) = 96 KB at dh = 128, so two blocks share an SM and one's start hides behind
///          the other's reads; TMA fills them: one thread asks, mbarriers tell
///   bytes  K, V once: 4 G dh a key in BF16; writes S H (dh + 2) 4, 0.5% of it
///   bound  4 H dh FLOP a key = R FLOP a byte: HBM. N = 262,144, G = 4, dh = 128: 537 MB a layer and sequence
///   needs  dh = DH in {64, 128}, R <= 16, BF16 caches whose unwritten rows are finite (0 x NaN would be NaN)
///   rung   attend reads K and V once per query head, and through L1 only
template <int DH>
inline constexpr Block split_block{128, KeyRing<DH, split_stages>::bytes};
template <int DH>
__global__ void __launch_bounds__(split_block<DH>.threads) attend_split(const __grid_constant__ CUtensorMap k_map,
    const __grid_constant__ CUtensorMap v_map, const Row* rows, const bf16* q /*[n,ldq]*/, Index ldq, Keys keys,
    int heads, float scale_log2, float* partial /*[n,H,S,DH+2]*/, bf16* out /*[n,ldo]*/, Index ldo, Tally* tally) {
  grid_wait(), grid_launch();
  using KvRing = KeyRing<DH, split_stages>;
  const int warp = int(threadIdx.x) / 32, lane = int(threadIdx.x) % 32, g = lane / 4, t = lane % 4;
  const Index i = blockIdx.z;
  const int head = int(blockIdx.y), split = int(blockIdx.x), splits = int(gridDim.x), group = heads / keys.kv_heads;
  const Row r = rows[i];
  const int seen = keys.window ? min(r.position + 1, keys.window) : r.position + 1;
  const int begin = split * split_rows, end = min(seen, begin + split_rows);
  if (begin >= end) return;  // a graph's grid covers sequences that are longer
  if (threadIdx.x == 0) count(tally, 4 * Index(end - begin) * group * DH, 4 * Index(end - begin) * DH);
  const int tiles = (end - begin + 63) / 64;
  const KvRing ring(/*readers=*/4);
  const auto fetch = [&](int j) {
    const int p = begin + 64 * j;  // in a ring: the slot, whose order does not matter
    ring.fetch(j, k_map, v_map,
        keys.layout == Keys::ring ? (Index(r.slot) * keys.kv_heads + head) * keys.window + p
                                  : keys.row(r.slot, head, p, 0, Span{}));
  };
  if (threadIdx.x == 0)
    for (int j = 0; j < min(tiles, split_stages - 1); ++j) fetch(j);
  uint32_t qf[DH / 16][4];  // rows g and g + 8 of the group's queries
  const bf16* queries = q + i * ldq + Index(head) * group * DH;
  load_fragments<DH>(qf, g < group ? queries + g * DH : nullptr, g + 8 < group ? queries + (g + 8) * DH : nullptr);
  float o[DH / 8][4] = {};
  Softmax softmax;
  for (int j = 0; j < tiles; ++j) {
    if (threadIdx.x == 0 && j + split_stages - 1 < tiles) fetch(j + split_stages - 1);  // into what step j - 1 read
    __syncwarp();
    const bf16* K = ring.wait(j);
    const bf16* V = K + KvRing::slabs * KvRing::slab;
    float s[2][4] = {};  // 16 queries x 2 x 8 keys
    UNROLL for (int k = 0; k < DH / 16; ++k) {
      uint32_t kf[4];
      const int row = 16 * warp + lane / 16 * 8 + lane % 8;
      ldmatrix(kf, swizzled(K + k / 4 * KvRing::slab, row, k % 4 * 2 + lane / 8 % 2));
      mma_bf16(s[0], qf[k], kf[0], kf[1]);
      mma_bf16(s[1], qf[k], kf[2], kf[3]);
    }
    uint32_t pf[4];
    UNROLL for (int half = 0; half < 2; ++half) {  // query rows g and g + 8
      UNROLL for (int e = 0; e < 4; ++e) {
        const int key = begin + 64 * j + 16 * warp + e / 2 * 8 + t * 2 + e % 2;
        if (key >= end) s[e / 2][half * 2 + e % 2] = -INFINITY;
      }
      softmax.step<16, DH>(&s[0][0], &o[0][0], half, scale_log2);
      pf[half] = pack(s[0][half * 2], s[0][half * 2 + 1]), pf[half + 2] = pack(s[1][half * 2], s[1][half * 2 + 1]);
    }
    UNROLL for (int c = 0; c < DH / 16; ++c) {
      uint32_t vf[4];
      ldmatrix_trans(vf, swizzled(V + c / 4 * KvRing::slab, 16 * warp + lane % 16, c % 4 * 2 + lane / 16));
      mma_bf16(o[2 * c], pf, vf[0], vf[1]);
      mma_bf16(o[2 * c + 1], pf, vf[2], vf[3]);
    }
    __syncwarp();
    if (lane == 0) ring.release(j);
  }
  // the four warps' results meet in shared memory, where the stages were
  __syncthreads();                       // all stages have been read by all
  float* meet = shared_memory<float>();  // [4 warps][16 queries][DH + 2]
  UNROLL for (int half = 0; half < 2; ++half) {
    const float sum = quad_reduce<Sum>(softmax.sum[half]);
    float* row = meet + (warp * 16 + g + half * 8) * (DH + 2);
    UNROLL for (int c = 0; c < DH / 8; ++c) row[c * 8 + t * 2] = o[c][half * 2],
                                                            row[c * 8 + t * 2 + 1] = o[c][half * 2 + 1];
    if (t == 0) row[DH] = softmax.highest[half] * scale_log2, row[DH + 1] = sum;
  }
  __syncthreads();  // the warps' results: written by each, read by all
  for (int item = int(threadIdx.x); item < group * DH; item += split_block<DH>.threads) {
    const int h = item / DH, c = item % DH;
    const float* row = meet + h * (DH + 2);
    const Partial all = merge_partials<DH>(row, 4, 16 * (DH + 2), c);
    const Index qh = head * group + h;
    if (splits == 1) {
      out[i * ldo + qh * DH + c] = __float2bfloat16(all.value / all.sum);
    } else {
      float* to = partial + ((i * heads + qh) * splits + split) * (DH + 2);
      to[c] = all.value;
      if (c == 0) to[DH] = all.highest, to[DH + 1] = all.sum;
    }
  }
}

/// attend_merge -- the splits of a row and head, weighted by exp2(m - max m); step 2 of 2.
///   grid   (H, n)     block DH: a thread owns one number
///   bytes  reads n H S (DH + 2) 4     bound HBM, or L2 where the partial results still lie there
template <int DH>
inline constexpr Block merge_block{DH};
template <int DH>
__global__ void __launch_bounds__(merge_block<DH>.threads) attend_merge(
    const float* partial /*[n,H,S,DH+2]*/, const Row* rows, int window, int splits, bf16* out /*[n,ldo]*/, Index ldo) {
  grid_wait(), grid_launch();
  const Index h = blockIdx.x, i = blockIdx.y;
  const int c = int(threadIdx.x), position = rows[i].position;
  const int seen = window ? min(position + 1, window) : position + 1;
  const int used = (seen + split_rows - 1) / split_rows;
  const float* row = partial + (i * gridDim.x + h) * splits * (DH + 2);
  const Partial all = merge_partials<DH>(row, used, DH + 2, c);
  out[i * ldo + h * DH + c] = __float2bfloat16(all.value / all.sum);
}

inline constexpr int query_rows = 64;  ///< of a block of attend_tiles
inline constexpr int tile_stages = 2;
/// 64 query rows of one segment: what a block of attend_tiles owns.
struct QueryTile {
  int segment, first;  ///< first: row within the segment
};

/// attend_tiles -- 64 query rows of one head against the keys they see, window or all; prefill. Twin: attention().
///   grid   (tiles, H): a block owns one tile of queries and one head
///   block  160: a warpgroup of 128 computes, its warp w owning query rows 16 w .. 16 w + 15; warp 4 asks TMA for keys
///   regs   S [64,64] and O [64,DH] are wgmma accumulators; Q and P enter wgmma from registers (P has the accumulators'
///          layout already: no trip through shared memory), K as it lies and V as an MN-major operand: no transpose
///   shared 2 stages x (64 K + 64 V rows) = 64 KB at DH = 128; registers allow two blocks an SM (three at 64), so one's
///          softmax hides behind the other's products
///   bytes  K, V once per 64 queries and head: (64 + W) / 64 of them with a window     FLOP 4 DH (W + 64) a query run,
///          of which 4 DH W count
///   bound  tensor cores. W = 512: each query sees 512 of the 576 keys that its tile goes over, and a warp masks at most
///          3 of the 9 tiles of keys
///   needs  dh = DH in {64, 128}, BF16 keys in `recent` or paged layout, finite where unwritten
///   rung   attend reads every key once per query
template <int DH>
inline constexpr Block tiles_block{160, KeyRing<DH, tile_stages>::bytes, query_rows};
template <int DH>
__global__ void __launch_bounds__(tiles_block<DH>.threads) attend_tiles(const __grid_constant__ CUtensorMap k_map,
    const __grid_constant__ CUtensorMap v_map, const QueryTile* work, const Span* spans, const bf16* q /*[n,ldq]*/,
    Index ldq, Keys keys, int heads, float scale_log2, bf16* out /*[n,ldo]*/, Index ldo, Tally* tally) {
  grid_wait(), grid_launch();
  using KvRing = KeyRing<DH, tile_stages>;
  const int warp = int(threadIdx.x) / 32, lane = int(threadIdx.x) % 32, g = lane / 4, t = lane % 4;
  const QueryTile mine = work[blockIdx.x];
  const Span s = spans[mine.segment];
  const int h = int(blockIdx.y), group = heads / keys.kv_heads, head = h / group;
  const int q0 = s.position + mine.first, q1 = s.position + min(mine.first + query_rows, s.rows);  // the queries'
  const auto oldest = [&](int position) { return keys.window ? max(0, position - keys.window + 1) : 0; };
  // first key of the first tile of keys; pages, which have no window, begin at 0, so that no tile leaves its page
  const int k0 = oldest(q0), tiles = (q1 - k0 + 63) / 64;
  const KvRing ring(/*readers=*/128);
  if (warp == 4) {
    Index seen = 0;
    for (int p = q0 + lane; p < q1; p += 32) seen += p - oldest(p) + 1;
    seen = warp_reduce<Sum>(seen);
    if (lane > 0) return;
    // once a pass: a segment's first tile meets all its keys, each later tile those of its own rows for the first time
    const Index fresh = h % group ? 0 : mine.first ? q1 - q0 : q1 - k0;
    count(tally, 4 * seen * DH, 4 * fresh * DH);
    for (int j = 0; j < tiles; ++j) ring.fetch(j, k_map, v_map, keys.row(s.slot, head, k0 + 64 * j, mine.segment, s));
    return;
  }
  const int row = mine.first + 16 * warp + g;  // this lane's query rows: row and row + 8
  const auto query = [&](int i) { return i < s.rows ? q + (s.first + Index(i)) * ldq + h * DH : nullptr; };
  uint32_t qf[DH / 16][4];
  load_fragments<DH>(qf, query(row), query(row + 8));
  // S lives across the loop: set anew inside, its registers would be written between the fence and wgmma
  float S[32] = {}, o[KvRing::slabs][32] = {};
  Softmax softmax;
  for (int j = 0; j < tiles; ++j) {
    const bf16* K = ring.wait(j);
    const bf16* V = K + KvRing::slabs * KvRing::slab;
    settle_registers(S);
    wgmma_fence();
    UNROLL for (int k = 0; k < DH / 16; ++k)  // 16 columns are 32 bytes of the swizzled row
        wgmma_rs<false>(S, qf[k], descriptor(K + k / 4 * KvRing::slab + k % 4 * 16), k > 0);
    wgmma_commit();
    wgmma_wait<0>();
    const int key0 = k0 + 64 * j, p0 = q0 + 16 * warp;  // the first key, the position of the warp's first row
    const bool whole = key0 + 63 <= p0 && key0 >= oldest(p0 + 15);
    UNROLL for (int half = 0; half < 2; ++half) {
      const int position = p0 + g + half * 8;
      if (!whole) UNROLL for (int e = 0; e < 16; ++e) {
          const int key = key0 + t * 2 + e / 2 * 8 + e % 2;
          if (key > position || key < oldest(position)) S[place(e, half)] = -INFINITY;
        }
      softmax.step<64, DH>(S, &o[0][0], half, scale_log2);
    }
    uint32_t pf[4][4];  // the accumulators of keys 16 k .. 16 k + 15 are the A operand of step k
    UNROLL for (int k = 0; k < 4; ++k) UNROLL for (int e = 0; e < 4; ++e) pf[k][e] =
        pack(S[k * 8 + e * 2], S[k * 8 + e * 2 + 1]);
    UNROLL for (int i = 0; i < KvRing::slabs; ++i) settle_registers(o[i]);
    wgmma_fence();
    UNROLL for (int k = 0; k < 4; ++k) UNROLL for (int i = 0; i < KvRing::slabs; ++i)
        wgmma_rs<true>(o[i], pf[k], descriptor(V + i * KvRing::slab + k * 16 * 64), true);
    wgmma_commit();
    wgmma_wait<0>();
    ring.release(j);
  }
  UNROLL for (int half = 0; half < 2; ++half) {
    const float share = 1 / quad_reduce<Sum>(softmax.sum[half]);
    const int i = row + half * 8;
    if (i >= s.rows) continue;
    bf16* to = out + (s.first + Index(i)) * ldo + h * DH + t * 2;
    UNROLL for (int c = 0; c < DH / 8; ++c) {
      const float* v = o[c / 8] + c % 8 * 4 + half * 2;
      *reinterpret_cast<uint32_t*>(to + c * 8) = pack(v[0] * share, v[1] * share);
    }
  }
}

// ---------------------------------------------------------------------------------------------------------------------
// Logits

/// find_not_finite -- sets *flag when a logit is not a number or infinite.
///   grid   ceil(count / 4096)     block 256     bytes 4 count: read while they are in L2
inline constexpr Block finite_block{256, 0, 1, /*columns=*/4096};
__global__ void __launch_bounds__(finite_block.threads) find_not_finite(const float* logits, Index count, int* flag) {
  grid_wait(), grid_launch();
  bool bad = false;
  constexpr int owned = finite_block.columns;
  const Index begin = Index(blockIdx.x) * owned, end = begin + owned < count ? begin + owned : count;
  for (Index i = begin + threadIdx.x; i < end; i += finite_block.threads) bad |= !(fabsf(logits[i]) < INFINITY);
  if (bad) *flag = 1;  // whoever writes, writes the same
}

/// Numbers in the order of their floats, and back.
__device__ inline uint32_t sort_key(float v) {
  const uint32_t bits = __float_as_uint(v);
  return bits >> 31 ? ~bits : bits | 0x80000000u;
}
__device__ inline float from_sort_key(uint32_t key) { return __uint_as_float(key >> 31 ? key & 0x7fffffffu : ~key); }

/// How many of a row's logits have a certain digit in their sort key, and what they weigh, in shared memory. Weights are
/// integers of 2^-39 of the largest probability, in two halves of 32 bits, for which shared memory has atomics: a sum is
/// the same whatever the order, so draws repeat bit by bit.
struct Histogram {
  static constexpr int bins = 2048;  // 11 bits of the key: 11 + 11 + 10
  uint32_t count[bins], low[bins], high[bins];

  __device__ uint64_t weight(int bin) const { return uint64_t(high[bin]) << 32 | low[bin]; }
  __device__ void add(int bin, uint64_t w) {
    atomicAdd(&count[bin], 1u);
    const uint32_t part = uint32_t(w), before = atomicAdd(&low[bin], part);
    const uint32_t carried = uint32_t(w >> 32) + (before + part < before);
    if (carried) atomicAdd(&high[bin], carried);
  }
};
/// A sort key and what lies above it and at it.
struct Crossing {
  uint32_t key;
  uint32_t count_above, count;
  uint64_t weight_above, weight;
};
/// Shared memory of sample.
struct SampleMemory {
  Histogram all, some;  ///< by the first 11 bits of all keys; by later bits of those that begin alike
  Crossing crossing;
  uint64_t warps[2][16];  ///< a number of each warp: counts, weights
  float scratch[32];
};

/// sample -- a row's next token: temperature, then top-k, then top-p, then the token at which the sum of probabilities,
/// from the largest down, passes u. Twin: draw().
///   grid   n     block 512: thread t owns tokens t, t + 512, ..
///   shared two histograms of 24 KB
///   needs  V <= 2^24 (weights then fit 64 bits)
///   bytes  nothing is sorted: the key at which a count or a weight is reached is searched by radix, digit after digit,
///          each a histogram of the keys that begin like the ones found. The first digit's serves every search; so a draw
///          reads the row 6 to 10 times from L2, greedy 3 times (computed; a search bit by bit read it up to 140 times)
///   ties   the lower id first, in every step
inline constexpr Block sample_block{512, sizeof(SampleMemory)};
__global__ void __launch_bounds__(sample_block.threads) sample(const float* logits /*[n,V]*/, int V, float temperature,
    int top_k, float top_p, const double* u /*[n]*/, int* token /*[n]*/) {
  grid_wait(), grid_launch();
  constexpr int threads = sample_block.threads, bins = Histogram::bins, own = bins / threads;
  const float* row = logits + Index(blockIdx.x) * V;
  SampleMemory& memory = *shared_memory<SampleMemory>();
  const int thread = int(threadIdx.x), warp = thread / 32, lane = thread % 32;
  const auto key_of = [&](int i) { return sort_key(row[i] + 0.0f); };  // -0 is 0
  float highest = Max::none;
  for (int i = thread; i < V; i += threads) highest = fmaxf(highest, row[i]);
  highest = block_reduce<Max>(highest, memory.scratch);
  const float factor = temperature > 0 ? fminf(log2_e / temperature, 1e30f) : 0;
  const auto weight_of = [&](uint32_t key) {  // of logits that are not finite too, for which the head's check stands
    return uint64_t(fminf(fast_exp2((from_sort_key(key) - highest) * factor), 1.0f) * 0x1p39f);
  };
  // the histogram of the digit of `width` bits at `shift`, of the keys that agree with `prefix` above it
  const auto fill = [&](Histogram& h, uint32_t prefix, int shift, int width) {
    __syncthreads();  // what stood in the histogram has been read by all
    for (int i = thread; i < bins; i += threads) h.count[i] = h.low[i] = h.high[i] = 0;
    __syncthreads();  // empty: written by all, added to by all
    for (int i = thread; i < V; i += threads) {
      const uint32_t key = key_of(i);
      if (uint64_t(key) >> (shift + width) != uint64_t(prefix) >> (shift + width)) continue;
      h.add(int(key >> shift & ((1u << width) - 1)), weight_of(key));
    }
    __syncthreads();  // full: added to by all, read by all
  };
  // the bin, from the highest down, in which the count or the weight of all above and at it reaches `goal`
  const auto cross = [&](const Histogram& h, const Crossing& from, bool by_count, uint64_t goal, int shift) {
    uint64_t counts = 0, weights = 0;  // of this thread's bins, the highest first
    for (int j = 0; j < own; ++j) {
      const int bin = bins - 1 - (thread * own + j);
      counts += h.count[bin], weights += h.weight(bin);
    }
    uint64_t count = counts, weight = weights;  // and of all bins of the warp above them
    for (int b = 1; b < 32; b *= 2) {
      const uint64_t c = __shfl_up_sync(0xffffffffu, count, b), w = __shfl_up_sync(0xffffffffu, weight, b);
      if (lane >= b) count += c, weight += w;
    }
    if (lane == 31) memory.warps[0][warp] = count, memory.warps[1][warp] = weight;
    if (thread == 0) memory.crossing = from;  // where rows that are not numbers end
    __syncthreads();                          // the warps' sums: written by each, read by all
    count += from.count_above - counts, weight += from.weight_above - weights;
    for (int i = 0; i < warp; ++i) count += memory.warps[0][i], weight += memory.warps[1][i];
    for (int j = 0; j < own; ++j) {
      const int bin = bins - 1 - (thread * own + j);
      const uint64_t before = by_count ? count : weight, here = by_count ? h.count[bin] : h.weight(bin);
      if (before < goal && before + here >= goal)
        memory.crossing = {from.key | uint32_t(bin) << shift, uint32_t(count), h.count[bin], weight, h.weight(bin)};
      count += h.count[bin], weight += h.weight(bin);
    }
    __syncthreads();  // the crossing: written by one, read by all
    const Crossing found = memory.crossing;
    __syncthreads();  // read by all before it is written again
    return found;
  };
  const auto search = [&](bool by_count, uint64_t goal) {
    Crossing c = cross(memory.all, Crossing{}, by_count, goal, 21);
    for (const int shift : {10, 0}) {
      fill(memory.some, c.key, shift, shift ? 11 : 10);
      c = cross(memory.some, c, by_count, goal, shift);
    }
    return c;
  };
  // the token that has `skip` others of this key before it: every warp looks through a part of its own
  const auto put = [&](uint32_t key, uint32_t skip) {
    const int part = (V + 511) / 512 * 32, first = warp * part;
    const auto matches = [&](int i) { return __ballot_sync(0xffffffffu, i < V && key_of(i) == key); };
    uint32_t before = 0;
    for (int i = first; i < first + part; i += 32) before += __popc(matches(i + lane));
    if (lane == 0) memory.warps[0][warp] = before;
    __syncthreads();  // the warps' counts: written by each, read by all
    before = 0;
    for (int i = 0; i < warp; ++i) before += uint32_t(memory.warps[0][i]);
    for (int i = first; i < first + part; i += 32) {
      const unsigned lanes = matches(i + lane);
      if (lanes >> lane & 1 && before + __popc(lanes & ((1u << lane) - 1)) == skip) token[blockIdx.x] = i + lane;
      before += __popc(lanes);
    }
  };
  if (temperature == 0) return put(sort_key(highest + 0.0f), 0);
  fill(memory.all, 0, 21, 11);
  // what may be drawn: all above some key, and so many of those that equal it, weigh `mass` together
  uint64_t mass = 0;
  if (top_k > 0 && top_k < V) {
    const Crossing least = search(/*by_count=*/true, uint64_t(top_k));
    mass = least.weight_above + (uint64_t(top_k) - least.count_above) * weight_of(least.key);
  } else {
    const Crossing smallest = cross(memory.all, Crossing{}, /*by_count=*/true, uint64_t(V), 21);
    mass = smallest.weight_above + smallest.weight;
  }
  if (top_p < 1) {
    const uint64_t bound = uint64_t(ceil(double(top_p) * double(mass)));
    const Crossing cut = search(/*by_count=*/false, bound);
    const uint64_t each = weight_of(cut.key);
    mass = cut.weight_above + (each ? (bound - cut.weight_above + each - 1) / each * each : 0);
  }
  const uint64_t target = uint64_t(u[blockIdx.x] * double(mass)), last = mass ? mass - 1 : 0;
  const uint64_t goal = target < last ? target : last;  // a product in double may round up to the mass itself
  const Crossing drawn = search(/*by_count=*/false, goal + 1);
  const uint64_t each = weight_of(drawn.key);
  put(drawn.key, each ? uint32_t((goal - drawn.weight_above) / each) : 0);
}

// ---------------------------------------------------------------------------------------------------------------------
// Device memory, tensor maps, cuBLASLt

/// Memory of one owner, on the device, or `pinned` on the host: the device copies from there without a detour.
template <class T, bool pinned = false>
class Buffer {
 public:
  Buffer() = default;
  /// `clear`: set to zero; caches must be, since masked rows enter products as 0 x value.
  explicit Buffer(Index count, bool clear = false) : count_(count) {
    if (!count) return;
    void* p = nullptr;
    if ((pinned ? cudaMallocHost(&p, std::size_t(bytes())) : cudaMalloc(&p, std::size_t(bytes()))) != cudaSuccess)
      fail("CUDA: out of ", pinned ? "pinned host" : "device", " memory: ", bytes(), " bytes asked for");
    p_ = static_cast<T*>(p);
    if (clear) CUDA_CHECK(cudaMemsetAsync(p_, 0, std::size_t(bytes()), nullptr));
  }
  Buffer(Buffer&& o) noexcept : p_(std::exchange(o.p_, nullptr)), count_(o.count_) {}
  Buffer& operator=(Buffer&& o) noexcept {
    std::swap(p_, o.p_), std::swap(count_, o.count_);
    return *this;
  }
  ~Buffer() { pinned ? cudaFreeHost(p_) : cudaFree(p_); }
  T* get() const { return p_; }
  Index count() const { return count_; }
  Index bytes() const { return count_ * Index(sizeof(T)); }

 private:
  T* p_ = nullptr;
  Index count_ = 0;
};

/// How TMA sees a BF16 matrix [rows,columns] from which 64 x 64 boxes are read. The driver's function comes through the
/// runtime, so that the program does not link the driver.
CUtensorMap tensor_map(void* base, Index rows, Index columns) {
  void* function = nullptr;
  cudaDriverEntryPointQueryResult found{};
  CUDA_CHECK(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000, cudaEnableDefault, &found));
  if (found != cudaDriverEntryPointSuccess) fail("CUDA: the driver has no cuTensorMapEncodeTiled");
  const cuuint64_t size[2] = {cuuint64_t(columns), cuuint64_t(rows)}, stride[1] = {cuuint64_t(columns * 2)};
  const cuuint32_t box[2] = {64, 64}, step[2] = {1, 1};
  CUtensorMap map{};
  const CUresult status = reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(function)(&map,
      CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 2, base, size, stride, box, step, CU_TENSOR_MAP_INTERLEAVE_NONE,
      CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (status != CUDA_SUCCESS)
    fail("CUDA: cuTensorMapEncodeTiled: error ", int(status), " for [", rows, ",", columns, "]");
  return map;
}

/// The arguments of y = x W^T: x [n,ld], W [out,ld], y [n,ldy].
struct LtProduct {
  const bf16 *x, *w;
  Index ld;
  void* y;
  Index ldy, n, out;
  To to;
};

#ifdef YOCOU_EMULATE
using Library = emu::Library;  // a loop on the host
#else
#define YOCOU_CUBLASLT(call)                                                                            \
  call(cublasLtCreate) call(cublasLtDestroy) call(cublasLtMatmul) call(cublasLtMatmulDescInit_internal) \
      call(cublasLtMatmulDescSetAttribute) call(cublasLtMatrixLayoutInit_internal)                      \
          call(cublasLtMatmulAlgoGetHeuristic) call(cublasLtMatmulPreferenceInit_internal)              \
              call(cublasLtMatmulPreferenceSetAttribute)

/// cuBLASLt, opened on first use: linked, it would cost every start of the program 70 ms and 500 MB of dependency.
/// Row-major y = x W^T is column-major y^T = W x^T: its A is W (transposed), its B is x.
class Library {
 public:
  Library() {
    for (const char* name : {"libcublasLt.so.13", "libcublasLt.so.12", "libcublasLt.so"})
      if (!so_) so_ = dlopen(name, RTLD_NOW | RTLD_LOCAL);
    if (!so_) return;
    bool found = true;
#define YOCOU_LOAD(name) found &= (name##_ = reinterpret_cast<decltype(name##_)>(dlsym(so_, #name))) != nullptr;
    YOCOU_CUBLASLT(YOCOU_LOAD)
    if (found && cublasLtCreate_(&handle_) != CUBLAS_STATUS_SUCCESS) handle_ = nullptr;
    if (handle_) workspace_ = Buffer<char>(workspace_bytes);
  }
  Library(const Library&) = delete;
  ~Library() {
    if (handle_) cublasLtDestroy_(handle_);
  }  // the library stays open: unloading it is not safe while the driver may call into it

  bool found() const { return handle_; }
  /// False when there is no library or it knows no way: the caller then uses its own kernels.
  bool run(const LtProduct& p, cudaStream_t stream) {
    if (!handle_) return false;
    const cudaDataType_t type = p.to == To::bf16 ? CUDA_R_16BF : CUDA_R_32F;
    cublasLtMatmulDescOpaque_t desc;
    cublasLtMatrixLayoutOpaque_t a, b, c;
    const cublasOperation_t transposed = CUBLAS_OP_T;
    const auto check = [&](cublasStatus_t status) {
      if (status != CUBLAS_STATUS_SUCCESS) fail("cuBLASLt: error ", int(status), " for n = ", p.n, ", out = ", p.out);
    };
    check(cublasLtMatmulDescInit_internal_(&desc, sizeof desc, CUBLAS_COMPUTE_32F, CUDA_R_32F));
    check(cublasLtMatmulDescSetAttribute_(&desc, CUBLASLT_MATMUL_DESC_TRANSA, &transposed, sizeof transposed));
    check(cublasLtMatrixLayoutInit_internal_(&a, sizeof a, CUDA_R_16BF, uint64_t(p.ld), uint64_t(p.out), p.ld));
    check(cublasLtMatrixLayoutInit_internal_(&b, sizeof b, CUDA_R_16BF, uint64_t(p.ld), uint64_t(p.n), p.ld));
    check(cublasLtMatrixLayoutInit_internal_(&c, sizeof c, type, uint64_t(p.out), uint64_t(p.n), p.ldy));
    const auto key = std::array<Index, 5>{p.n, p.out, p.ld, p.ldy, Index(p.to)};
    auto found = algorithms_.find(key);
    if (found == algorithms_.end()) {
      cublasLtMatmulPreferenceOpaque_t preference;
      check(cublasLtMatmulPreferenceInit_internal_(&preference, sizeof preference));
      check(cublasLtMatmulPreferenceSetAttribute_(
          &preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &workspace_bytes, sizeof workspace_bytes));
      cublasLtMatmulHeuristicResult_t best{};
      int count = 0;
      const cublasStatus_t status =
          cublasLtMatmulAlgoGetHeuristic_(handle_, &desc, &a, &b, &c, &c, &preference, 1, &best, &count);
      if (status != CUBLAS_STATUS_NOT_SUPPORTED) check(status);  // then it knows no way
      found = algorithms_.emplace(key, std::pair{status == CUBLAS_STATUS_SUCCESS && count > 0, best.algo}).first;
    }
    if (!found->second.first) return false;
    const float one = 1, beta = p.to == To::add ? 1 : 0;
    check(cublasLtMatmul_(handle_, &desc, &one, p.w, &a, p.x, &b, &beta, p.y, &c, p.y, &c, &found->second.second,
        workspace_.get(), workspace_bytes, stream));
    return true;
  }

 private:
  static constexpr std::size_t workspace_bytes = 32 << 20;
  void* so_ = nullptr;
  cublasLtHandle_t handle_ = nullptr;
  Buffer<char> workspace_;
  std::map<std::array<Index, 5>, std::pair<bool, cublasLtMatmulAlgo_t>> algorithms_;
#define YOCOU_DECLARE(name) decltype(&name) name##_ = nullptr;
  YOCOU_CUBLASLT(YOCOU_DECLARE)
};
#endif

// ---------------------------------------------------------------------------------------------------------------------
// The engine

/// Which rungs to use; the tests try all.
struct Rungs {
  bool hopper = true;   ///< attend_split, attend_tiles, product_wgmma
  bool skinny = true;   ///< product_skinny
  bool library = true;  ///< cuBLASLt
  bool graphs = true;   ///< decode steps as captured graphs
  bool pdl = true;
};

/// A matrix on the device: BF16, rows padded to 8 columns.
struct Matrix {
  Buffer<bf16> data;
  Index rows = 0, columns = 0;
  Index ld() const { return padded(columns); }
};

/// A layer's weights on the device. Matrices with the same input lie together, so one product serves them.
struct DeviceLayer {
  Buffer<float> attn_norm, ffn_norm;
  Matrix qkv, wo;        ///< [(H+2G) dh,D] (a shared stage: [H dh,D])   [D,H dh]
  Matrix gate_up, down;  ///< dense: [2F,D] [D,F]
  Matrix router;         ///< [E,D]
  Matrix expert_gate_up, expert_down, shared_gate_up, shared_down;  ///< [E 2Fe,D] [E D,Fe] [2Fs,D] [D,Fs]
};

/// Rows of a pass on the device, and what the host knows of them.
struct Rows {
  Row* rows = nullptr;         ///< [n]
  Span* spans = nullptr;       ///< [segments]
  QueryTile* tiles = nullptr;  ///< [tile_count]
  float2* turns = nullptr;     ///< [n,dh/2] cos, sin of each row's angles
  Index n = 0, segments = 0, tile_count = 0;
  bool single = false;  ///< every segment has one row
};

/// What the device tells at the end of a pass.
struct Report {
  Tally tally;
  int not_finite;  ///< a logit is not a number, or infinite
};

class CudaEngine final : public Engine {
 public:
  CudaEngine(const Config& c, const Weights& w, const EngineOptions& o, const Rungs& rungs)
      : c_(c), o_(o), rungs_(rungs), plan_(c), tables_(table_bytes()) {
    if (c.head_dim > 256) fail("CUDA: head_dim is ", c.head_dim, "; the kernels take at most 256");
    if (o.max_tokens >= std::numeric_limits<int>::max()) fail("CUDA: ", o.max_tokens, " positions; at most 2^31 - 2");
    const Index rows = o.max_rows * (c.moe ? c.moe->active : 1);  // a grid has 65,535 blocks in y and z
    if (o.max_sequences > 65535 || rows > 4000000)
      fail("CUDA: ", o.max_sequences, " sequences, ", rows, " rows (x experts) a pass; at most 65,535 and 4,000,000");
    const Index groups = c.moe ? c.moe->experts : 0;  // each may end in a tile that is not full
    if (ceil_div(rows, tile_product_block.rows) + groups > 65535)
      fail("CUDA: ", rows, " rows (x experts) a pass for ", groups, " experts; rows / 64 + experts go to 65,535");
    if (o.kv_dtype == Dtype::f16) fail("CUDA: a cache holds f32 or bf16");
    fast_attention_ = rungs.hopper && o.kv_dtype == Dtype::bf16 && (c.head_dim == 64 || c.head_dim == 128);
    fast_decode_ = fast_attention_ && c.group() <= split_heads;
    if (rungs.library && !library_.found()) notice("cuBLASLt was not found: the program's own products run instead");
    if (rungs.hopper && !fast_attention_)
      notice("attention runs on the general kernel: the fast ones take BF16 caches and a head_dim of 64 or 128");
    else if (rungs.hopper && !fast_decode_)
      notice("attention of decode steps runs on the general kernel: the fast one takes 16 query heads a KV head");
    upload(w);
    allocate();
    CUDA_CHECK(cudaDeviceSynchronize());
    CUDA_CHECK(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking));  // last: nothing after it throws
  }
  ~CudaEngine() override {
    forget_graphs();
    cudaStreamSynchronize(stream_);
    cudaStreamDestroy(stream_);
  }
  int open() override {
    for (std::size_t i = 0; i < sequences_.size(); ++i)
      if (!sequences_[i].open) return sequences_[i] = {true, 0, {}}, int(i);
    fail("CUDA: ", o_.max_sequences, " sequences are open, no more were asked for");
  }
  void close(int sequence) override {
    Sequence& s = at(sequence);
    free_pages_.insert(free_pages_.end(), s.pages.rbegin(), s.pages.rend());
    s = {};
  }
  Index cache_bytes() const override {
    Index bytes = 0;
    for (const Sequence& s : sequences_)
      for (const Cache& c : caches_)
        if (s.open) bytes += c.piece_bytes() * (c.paged ? Index(s.pages.size()) : 1);
    return bytes;
  }
  Index global_rows() const override { return global_rows_; }

  void forward(std::span<const Segment> pass, float* logits) override;
  void forward_sample(
      std::span<const Segment> pass, const Sampling& how, std::span<const double> u, int* tokens) override;

  // the operations of run_stages()
  void project_global(const Plan::Loop& loop);
  bool keep_wanted_rows();
  void layer(const Place& place);
  void end_loop(const Plan::Loop&) {}  // every row runs every loop: --halt is the CPU's

 private:
  friend struct CudaEngineProbe;  // the hardware check moves sequences ahead without running them
  struct Sequence {
    bool open = false;
    Index length = 0;
    std::vector<int> pages;
  };
  /// One cache: K and V of the sequences' rings or of a pool of pages, and how TMA sees them.
  struct Cache {
    Buffer<char> k, v;
    Index pieces = 0;  ///< rings or pages, handed out one by one
    bool paged = false;
    CUtensorMap k_map{}, v_map{};
    /// Bytes of one ring or page, of what was allocated.
    Index piece_bytes() const { return (k.bytes() + v.bytes()) / pieces; }
  };

  Sequence& at(int sequence) {
    if (sequence < 0 || sequence >= Index(sequences_.size()) || !sequences_[std::size_t(sequence)].open)
      fail("CUDA: sequence ", sequence, " is not open");
    return sequences_[std::size_t(sequence)];
  }
  // --- setup
  void upload(const Weights& w);
  Buffer<float> upload_gain(const Tensor& t);
  Matrix upload_matrix(const std::vector<Tensor>& parts, Index columns);
  void allocate();
  Cache make_cache(Index pieces, Index rows, bool paged);
  Index table_bytes() const;
  // --- a pass
  void prepare(std::span<const Segment> pass);
  void check(std::span<const Segment> pass);
  template <class Take>
  void describe(std::span<const Segment> pass, Rows& r, bool only_wanted, Take&& take);
  void give_pages(std::span<const Segment> pass);
  void choose_splits(std::span<const Segment> pass);
  void start(float* logits);
  void finish(std::span<const Segment> pass);
  void embed();
  void show(const Place& place);
  void mix(const Place& place, const DeviceLayer& l);
  void moe(const DeviceLayer& l);
  void head(Index first, Index count);
  void forget_graphs() {
    for (auto& [key, g] : graphs_) cudaGraphExecDestroy(g.first);
    graphs_.clear();
  }
  // --- operations
  Launch grid(const Block& block, Index x, Index y = 1, Index z = 1) const {
    return {dim3(unsigned(x), unsigned(y), unsigned(z)), block, stream_, rungs_.pdl};
  }
  template <To to>
  void product(const bf16* x, const Matrix& w, void* y, Index ldy, Index n);
  template <To to>
  void grouped_product(const bf16* x, const Matrix& w, Index out, void* y, Index ldy, Index n, Groups groups);
  /// Between host and device, either way, in the order of the stream.
  void copy(void* to, const void* from, Index bytes) {
    CUDA_CHECK(cudaMemcpyAsync(to, from, std::size_t(bytes), cudaMemcpyDefault, stream_));
  }
  void norm(const float* x, const int* which, const Buffer<float>& gain, Index n) {
    launch(
        grid(norm_block, n), rms_norm, x, which, gain.get(), c_.dim, float(c_.norm_eps), normed_.get(), padded(c_.dim));
  }
  void ffn(const Matrix& gate_up, const Matrix& down);
  void activate(Index ldg, Index F, Index n);
  void append(const Rows& r, const Append& a, const Keys& cache, const Keys& recent);
  Keys keys_of(const Cache& cache, Keys::Layout layout, Index window, const Rows& r) const {
    return {layout, cache.k.get(), cache.v.get(), page_table_.get(), table_stride_, r.n + r.segments * window,
        int(window), int(c_.kv_heads)};
  }
  const Config c_;
  const EngineOptions o_;
  const Rungs rungs_;
  const Plan plan_;
  bool fast_attention_ = false, fast_decode_ = false;  ///< attend_tiles, attend_split
  cudaStream_t stream_ = nullptr;
  Library library_;
  // weights
  Matrix embed_, head_, global_kv_;
  Buffer<float> kv_norm_, norm_;
  std::vector<std::vector<DeviceLayer>> layers_;
  Buffer<double> frequency_;
  std::vector<Cache> caches_;  ///< by Plan::kept; the paged ones share each sequence's page table
  Cache recent_;
  std::vector<Sequence> sequences_;
  std::vector<int> free_pages_;
  Buffer<int> page_table_;
  Index table_stride_ = 0;  ///< pages of a sequence at most; 0: no paged stage
  // the pass: tables that the host writes and one copy brings to the device, then the activations
  Buffer<char, /*pinned=*/true> tables_;
  Buffer<char> device_tables_;
  Rows all_, wanted_;
  const Rows* rows_ = &all_;  ///< those that still run, and their state X [n,D]
  float* state_ = nullptr;
  int* wanted_index_ = nullptr;  ///< device: which of all rows are wanted
  Buffer<float2> turns_;
  Buffer<float> x_, wanted_x_, router_logits_, route_weight_, logits_, partial_;
  Buffer<bf16> normed_, qkv_, heads_out_, gate_up_, hidden_, expert_out_;
  Buffer<int> expert_, start_, order_, place_;
  Buffer<double> u_;  ///< what forward_sample draws with, and what it draws; with the host's ends of the copies
  Buffer<int> drawn_;
  Buffer<double, /*pinned=*/true> host_u_;
  Buffer<int, /*pinned=*/true> host_drawn_;
  Index head_rows_ = 0, split_count_ = 1;
  bool tracing_ = false;
  // counting: the kernels' side, and what the host's calls do (cuBLASLt's products, rows that enter the shared stage)
  Buffer<Report> report_;
  Buffer<Report, /*pinned=*/true> host_report_;
  Counters host_;
  Index global_rows_ = 0;
  /// By batch size and splits of the longest sequence; with what the host's calls did while it was captured.
  std::map<std::pair<Index, Index>, std::pair<cudaGraphExec_t, Counters>> graphs_;
};

/// Number i of a tensor.
float number(const Tensor& t, Index i) {
  const char* p = static_cast<const char*>(t.data) + i * size_of(t.dtype);
  const auto as = [p]<class T>(T v) { return std::memcpy(static_cast<void*>(&v), p, sizeof v), v; };
  if (t.dtype == Dtype::f32) return as(float());
  return t.dtype == Dtype::bf16 ? __bfloat162float(as(bf16())) : __half2float(as(__half()));
}

Buffer<float> CudaEngine::upload_gain(const Tensor& t) {
  std::vector<float> host;
  for (Index i = 0; i < t.rows * t.cols; ++i) host.push_back(number(t, i));
  Buffer<float> device(Index(host.size()));
  CUDA_CHECK(cudaMemcpy(device.get(), host.data(), std::size_t(device.bytes()), cudaMemcpyHostToDevice));
  return device;
}

/// The parts, one below the other, as BF16 with padded rows. Converted a few thousand rows at a time: loading must not
/// cost a second copy of the weights.
Matrix CudaEngine::upload_matrix(const std::vector<Tensor>& parts, Index columns) {
  Matrix m;
  m.columns = columns;
  for (const Tensor& t : parts) m.rows += t.rows;
  m.data = Buffer<bf16>(m.rows * m.ld());
  const Index step = std::max<Index>(1, (Index(16) << 20) / m.ld());
  std::vector<bf16> host(std::size_t(std::min(step, m.rows) * m.ld()), __float2bfloat16(0.0f));
  Index row = 0;
  for (const Tensor& part : parts)
    for (Index first = 0; first < part.rows; first += step) {
      const Tensor t = part.slice(first, std::min(step, part.rows - first));
      for (Index r = 0; r < t.rows; ++r) {
        bf16* to = host.data() + r * m.ld();  // the padding behind the columns is never written: it stays 0
        if (t.dtype == Dtype::bf16)
          std::memcpy(static_cast<void*>(to), static_cast<const bf16*>(t.data) + r * columns, std::size_t(columns) * 2);
        else
          for (Index c = 0; c < columns; ++c) to[c] = __float2bfloat16(number(t, r * columns + c));
      }
      CUDA_CHECK(cudaMemcpy(
          m.data.get() + row * m.ld(), host.data(), std::size_t(t.rows * m.ld()) * 2, cudaMemcpyHostToDevice));
      row += t.rows;
    }
  return m;
}

void CudaEngine::upload(const Weights& w) {
  const Index D = c_.dim;
  embed_ = upload_matrix({w.embed}, D);
  if (!c_.tied_embeddings) head_ = upload_matrix({w.head}, D);
  norm_ = upload_gain(w.norm);
  if (c_.has_shared()) kv_norm_ = upload_gain(w.kv_norm), global_kv_ = upload_matrix({w.kv_wk, w.kv_wv}, D);
  for (std::size_t s = 0; s < c_.stages.size(); ++s) {
    auto& stage = layers_.emplace_back();
    for (const Layer& l : w.stages[s]) {
      DeviceLayer& d = stage.emplace_back();
      d.attn_norm = upload_gain(l.attn_norm), d.ffn_norm = upload_gain(l.ffn_norm);
      d.qkv = l.wk.data ? upload_matrix({l.wq, l.wk, l.wv}, D) : upload_matrix({l.wq}, D);
      d.wo = upload_matrix({l.wo}, c_.q_dim());
      if (!c_.moe) {
        d.gate_up = upload_matrix({l.dense.gate, l.dense.up}, D), d.down = upload_matrix({l.dense.down}, c_.ffn_dim);
        continue;
      }
      const Moe& moe = *c_.moe;
      d.router = upload_matrix({l.router}, D);
      std::vector<Tensor> experts;
      for (Index e = 0; e < moe.experts; ++e) {
        experts.push_back(l.experts.gate.slice(e * moe.dim, moe.dim));
        experts.push_back(l.experts.up.slice(e * moe.dim, moe.dim));
      }
      d.expert_gate_up = upload_matrix(experts, D), d.expert_down = upload_matrix({l.experts.down}, moe.dim);
      if (moe.shared_dim) {
        d.shared_gate_up = upload_matrix({l.shared.gate, l.shared.up}, D);
        d.shared_down = upload_matrix({l.shared.down}, moe.shared_dim);
      }
    }
  }
  std::vector<double> f(std::size_t(std::max<Index>(c_.head_dim / 2, 1)));
  for (std::size_t i = 0; i < f.size(); ++i) f[i] = std::pow(c_.rope_theta, -2.0 * double(i) / double(c_.head_dim));
  frequency_ = Buffer<double>(Index(f.size()));
  CUDA_CHECK(cudaMemcpy(frequency_.get(), f.data(), std::size_t(frequency_.bytes()), cudaMemcpyHostToDevice));
}

/// `pieces` times `rows` rows of all KV heads.
CudaEngine::Cache CudaEngine::make_cache(Index pieces, Index piece_rows, bool paged) {
  Cache cache;
  cache.pieces = pieces, cache.paged = paged;
  const Index rows = pieces * piece_rows * c_.kv_heads, bytes = rows * c_.head_dim * size_of(o_.kv_dtype);
  cache.k = Buffer<char>(bytes, /*clear=*/true), cache.v = Buffer<char>(bytes, /*clear=*/true);
  if (fast_attention_ && rows) {
    if (rows >= std::numeric_limits<int>::max()) fail("CUDA: a cache of ", rows, " rows; at most 2^31 - 2");
    cache.k_map = tensor_map(cache.k.get(), rows, c_.head_dim);
    cache.v_map = tensor_map(cache.v.get(), rows, c_.head_dim);
  }
  return cache;
}

/// Rows, spans and tiles of all rows and of the wanted ones; the indices of the latter.
Index CudaEngine::table_bytes() const {
  const Index n = o_.max_rows, spans = o_.max_sequences, tiles = ceil_div(n, query_rows) + spans;
  return 2 * (n * Index(sizeof(Row)) + spans * Index(sizeof(Span)) + tiles * Index(sizeof(QueryTile))) + n * 4 + 256;
}

void CudaEngine::allocate() {
  const Index n = o_.max_rows, D = c_.dim;
  Index widest = 0;
  const Index pages = o_.max_tokens / block_rows + o_.max_sequences;  // every sequence may waste most of a page
  for (const Kept& kept : plan_.kept) {
    const bool ring = kept.what == Keeps::ring;
    caches_.push_back(ring ? make_cache(o_.max_sequences, kept.window, /*paged=*/false)
                           : make_cache(pages, block_rows, /*paged=*/true));
    if (ring) widest = std::max(widest, kept.window);
    else table_stride_ = ceil_div(o_.max_tokens, block_rows);
  }
  if (widest) recent_ = make_cache(1, n + o_.max_sequences * widest, /*paged=*/false);
  sequences_.resize(std::size_t(o_.max_sequences));
  for (Index i = pages; table_stride_ && i-- > 0;) free_pages_.push_back(int(i));
  page_table_ = Buffer<int>(std::max<Index>(1, o_.max_sequences * table_stride_), /*clear=*/true);
  device_tables_ = Buffer<char>(table_bytes());
  turns_ = Buffer<float2>(2 * n * std::max<Index>(1, c_.head_dim / 2));
  x_ = Buffer<float>(n * D), wanted_x_ = Buffer<float>(n * D);
  normed_ = Buffer<bf16>(n * padded(D));
  qkv_ = Buffer<bf16>(n * padded(c_.q_dim() + 2 * c_.kv_dim()));
  heads_out_ = Buffer<bf16>(n * padded(c_.q_dim()), /*clear=*/true);
  Index gate_up = n * padded(2 * c_.ffn_dim), hidden = n * padded(c_.ffn_dim);
  if (c_.moe) {
    const Index assigned = n * c_.moe->active;
    gate_up = std::max(assigned * padded(2 * c_.moe->dim), n * padded(2 * c_.moe->shared_dim));
    hidden = std::max(assigned * padded(c_.moe->dim), n * padded(c_.moe->shared_dim));
    expert_out_ = Buffer<bf16>(assigned * padded(D));
    router_logits_ = Buffer<float>(n * c_.moe->experts), route_weight_ = Buffer<float>(assigned);
    expert_ = Buffer<int>(assigned), order_ = Buffer<int>(assigned), place_ = Buffer<int>(assigned);
    start_ = Buffer<int>(c_.moe->experts + 1);
  }
  gate_up_ = Buffer<bf16>(gate_up), hidden_ = Buffer<bf16>(hidden);
  head_rows_ = std::min<Index>(n, 256);
  logits_ = Buffer<float>(head_rows_ * c_.vocab_size);
  u_ = Buffer<double>(head_rows_), drawn_ = Buffer<int>(head_rows_);
  host_u_ = Buffer<double, /*pinned=*/true>(head_rows_), host_drawn_ = Buffer<int, /*pinned=*/true>(head_rows_);
  report_ = Buffer<Report>(1, /*clear=*/true), host_report_ = Buffer<Report, /*pinned=*/true>(1);
}

// --- operations

template <To to>
void CudaEngine::product(const bf16* x, const Matrix& w, void* y, Index ldy, Index n) {
  if (n <= skinny_product_block<4>.rows && rungs_.skinny) return grouped_product<to>(x, w, w.rows, y, ldy, n, Groups{});
  if (rungs_.library && library_.found()) {
    if (library_.run(LtProduct{x, w.data.get(), w.ld(), y, ldy, n, w.rows, to}, stream_)) {
      host_.flops += uint64_t(2 * n) * uint64_t(w.rows * w.columns);  // cuBLASLt does not count: the call's sizes
      host_.bytes += uint64_t(2 * w.rows * w.columns);
      return;
    }
    notice("cuBLASLt knows no way for some products: the program's own run instead");
  }
  grouped_product<to>(x, w, w.rows, y, ldy, n, Groups{});
}

/// Per expert its own rows and weights; `n` rows in all groups together, which only the device can tell apart.
template <To to>
void CudaEngine::grouped_product(
    const bf16* x, const Matrix& w, Index out, void* y, Index ldy, Index n, Groups groups) {
  const Index count = w.rows / out;
  const auto run = [&](const Block& block, Index tiles, auto kernel) {
    launch(grid(block, ceil_div(out, block.columns), tiles), kernel, x, w.data.get(), w.columns, y, ldy, n, out, groups,
        &report_.get()->tally);
  };
  // an expert's share of the rows is not known here: 8 rows at a time suit a decode step, where it is about n / E
  const Block few = skinny_product_block<1>, some = skinny_product_block<4>;
  if (rungs_.skinny && n <= few.rows * count) return run(few, count, product_skinny<to, 1>);
  if (rungs_.skinny && n <= some.rows * count) return run(some, count, product_skinny<to, 4>);
  const auto tiles = [&](const Block& b) {
    return ceil_div(n, b.rows) + (groups.start ? count : 0);
  };                                                                                           // spare: the last
  if (rungs_.hopper) run(wgmma_product_block, tiles(wgmma_product_block), product_wgmma<to>);  // of a group is not full
  else run(tile_product_block, tiles(tile_product_block), product_tile<to>);
}

void CudaEngine::ffn(const Matrix& gate_up, const Matrix& down) {
  const Index n = rows_->n, F = down.columns, ldg = padded(2 * F);
  product<To::bf16>(normed_.get(), gate_up, gate_up_.get(), ldg, n);
  activate(ldg, F, n);
  product<To::add>(hidden_.get(), down, state_, c_.dim, n);
}

/// SwiGLU of n rows, from gate_up_ to hidden_.
void CudaEngine::activate(Index ldg, Index F, Index n) {
  launch(grid(swiglu_block, n, ceil_div(padded(F), swiglu_block.columns)), swiglu, gate_up_.get(), ldg, F,
      hidden_.get(), padded(F));
}

/// X += the experts' outputs and the shared expert's; the normed rows are in normed_.
void CudaEngine::moe(const DeviceLayer& l) {
  const Moe& m = *c_.moe;
  const Rows& r = *rows_;
  const Index assigned = r.n * m.active, ldg = padded(2 * m.dim), ldo = padded(c_.dim);
  product<To::f32>(normed_.get(), l.router, router_logits_.get(), m.experts, r.n);
  launch(grid(route_block, ceil_div(r.n, route_block.rows)), route, router_logits_.get(), r.n, int(m.experts),
      int(m.active), m.normalize, expert_.get(), route_weight_.get());
  launch(
      grid(sort_block, m.experts), sort_by_expert, expert_.get(), assigned, start_.get(), order_.get(), place_.get());
  const int E = int(m.experts);
  const Groups gathered{start_.get(), E, order_.get(), int(m.active)}, sorted{start_.get(), E, nullptr, 1};
  grouped_product<To::bf16>(normed_.get(), l.expert_gate_up, 2 * m.dim, gate_up_.get(), ldg, assigned, gathered);
  activate(ldg, m.dim, assigned);
  grouped_product<To::bf16>(hidden_.get(), l.expert_down, c_.dim, expert_out_.get(), ldo, assigned, sorted);
  launch(grid(combine_block, r.n), combine, expert_out_.get(), ldo, place_.get(), route_weight_.get(), int(m.active),
      c_.dim, state_);
  if (m.shared_dim) ffn(l.shared_gate_up, l.shared_down);
}

void CudaEngine::append(const Rows& r, const Append& a, const Keys& cache, const Keys& recent) {
  const Index pairs = (a.q_heads + 2 * a.kv_heads) * ((a.head_dim + 1) / 2);
  launch(grid(append_block, r.n, ceil_div(pairs, append_block.columns)),
      o_.kv_dtype == Dtype::bf16 ? rotate_append<bf16> : rotate_append<float>, r.rows, r.spans, r.turns, qkv_.get(), a,
      cache, recent, &report_.get()->tally);
}

/// X += Attention(a), a in normed_: q (and, in a window or full stage, k and v) to qkv_; rotates, appends, attends. The
/// one place where this engine asks for a stage's kind.
void CudaEngine::mix(const Place& place, const DeviceLayer& l) {
  const Stage& s = c_.stages[std::size_t(place.stage)];
  const Cache& cache = caches_[std::size_t(place.kept)];
  const Rows& r = *rows_;
  product<To::bf16>(normed_.get(), l.qkv, qkv_.get(), padded(l.qkv.rows), r.n);
  const bool shared = s.attention == Attention::shared, window = s.attention == Attention::window;
  const Index ld = padded(c_.q_dim() + (shared ? 0 : 2 * c_.kv_dim())), ldo = padded(c_.q_dim());
  const Index W = window ? s.window : 0;
  const bool recent = window && !r.single;  // single rows are appended first and then read the ring
  const Keys in_cache = keys_of(cache, window ? Keys::ring : Keys::paged, W, r);
  const Keys in_recent = keys_of(recent_, Keys::recent, W, r);
  const bool bf16_cache = o_.kv_dtype == Dtype::bf16;
  if (recent && W > 1)
    launch(grid(history_block, W - 1, r.segments), bf16_cache ? history<bf16> : history<float>, r.spans, in_cache,
        in_recent, int(c_.head_dim));
  const Append a{ld, int(c_.heads), shared ? 0 : int(c_.kv_heads), int(c_.head_dim), s.rope, c_.rope_half,
      /*to_cache=*/!shared, /*to_recent=*/recent};
  if (!shared || s.rope) append(r, a, in_cache, in_recent);
  const Keys& keys = recent ? in_recent : in_cache;
  const Cache& maps = recent ? recent_ : cache;
  const float scale = 1 / std::sqrt(float(c_.head_dim));
  Tally* tally = &report_.get()->tally;
  const auto general = [&] {
    launch(grid(attend_block, ceil_div(r.n * c_.heads, attend_block.rows)), bf16_cache ? attend<bf16> : attend<float>,
        r.rows, r.spans, qkv_.get(), ld, keys, r.n, int(c_.heads), int(c_.head_dim), scale, heads_out_.get(), ldo,
        tally);
  };
  const auto fast = [&]<int DH>(std::integral_constant<int, DH>) {
    if (r.single) {
      const Index splits = window ? ceil_div(W, split_rows) : split_count_;
      launch(grid(split_block<DH>, splits, c_.kv_heads, r.n), attend_split<DH>, maps.k_map, maps.v_map, r.rows,
          qkv_.get(), ld, keys, int(c_.heads), scale * log2_e, partial_.get(), heads_out_.get(), ldo, tally);
      if (splits > 1)
        launch(grid(merge_block<DH>, c_.heads, r.n), attend_merge<DH>, partial_.get(), r.rows, int(W), int(splits),
            heads_out_.get(), ldo);
    } else {
      launch(grid(tiles_block<DH>, r.tile_count, c_.heads), attend_tiles<DH>, maps.k_map, maps.v_map, r.tiles, r.spans,
          qkv_.get(), ld, keys, int(c_.heads), scale * log2_e, heads_out_.get(), ldo, tally);
    }
  };
  if (!(r.single ? fast_decode_ : fast_attention_)) general();
  else if (c_.head_dim == 64) fast(std::integral_constant<int, 64>{});
  else fast(std::integral_constant<int, 128>{});
  if (shared && place.layer == 0) host_.cross_positions += uint64_t(r.n);
  product<To::add>(heads_out_.get(), l.wo, state_, c_.dim, r.n);
}

// --- a pass

void CudaEngine::check(std::span<const Segment> pass) {
  Index n = 0, held = 0;
  for (const Sequence& s : sequences_) held += s.length;
  std::vector<char> seen(sequences_.size());
  for (const Segment& g : pass) {
    at(g.sequence);
    if (std::exchange(seen[std::size_t(g.sequence)], 1)) fail("CUDA: sequence ", g.sequence, " is in the pass twice");
    for (const int t : g.tokens)
      if (t < 0 || t >= c_.vocab_size) fail("token ", t, " is not in 0 .. ", c_.vocab_size - 1);
    n += Index(g.tokens.size());
  }
  if (n > o_.max_rows) fail("CUDA: a pass of ", n, " rows; at most ", o_.max_rows, " were asked for");
  if (table_stride_ && held + n > o_.max_tokens) fail("CUDA: caches for ", o_.max_tokens, " positions are full");
}

namespace {
/// Rows of a segment that the pass runs, or that want logits.
int rows_of(const Segment& g, bool only_wanted) {
  const int all = int(g.tokens.size());
  return !only_wanted || g.want == Logits::all ? all : g.want == Logits::last ? std::min(all, 1) : 0;
}
}  // namespace

/// Fills the tables of all rows, or of the wanted ones; take(count, host) gives a table's place on the device.
template <class Take>
void CudaEngine::describe(std::span<const Segment> pass, Rows& r, bool only_wanted, Take&& take) {
  r = {};
  r.turns = turns_.get() + (only_wanted ? o_.max_rows * (c_.head_dim / 2) : 0), r.single = true;
  for (const Segment& g : pass)
    if (const int rows = rows_of(g, only_wanted))
      ++r.segments, r.n += rows, r.tile_count += ceil_div(rows, query_rows), r.single &= rows == 1;
  Row* row;
  Span* span;
  QueryTile* tile;
  r.rows = take(r.n, row), r.spans = take(r.segments, span), r.tiles = take(r.tile_count, tile);
  int first = 0, segment = 0;
  for (const Segment& g : pass) {
    const int rows = rows_of(g, only_wanted), skipped = int(g.tokens.size()) - rows;
    if (!rows) continue;
    const int position = int(at(g.sequence).length) + skipped;
    for (int i = 0; i < rows; ++i)
      *row++ = {g.tokens[std::size_t(skipped + i)], position + i, g.sequence, segment, position + rows};
    for (int i = 0; i < rows; i += query_rows) *tile++ = {segment, i};
    *span++ = {first, rows, position, g.sequence};
    first += rows, ++segment;
  }
}

void CudaEngine::give_pages(std::span<const Segment> pass) {
  for (const Segment& g : pass) {
    Sequence& s = at(g.sequence);
    const Index needed = ceil_div(s.length + Index(g.tokens.size()), block_rows), had = Index(s.pages.size());
    if (!table_stride_ || needed <= had) continue;
    for (Index i = had; i < needed; ++i) s.pages.push_back(free_pages_.back()), free_pages_.pop_back();
    // the vector outlives the copy: the pass ends with a synchronisation
    copy(page_table_.get() + g.sequence * table_stride_ + had, s.pages.data() + had,
        (needed - had) * Index(sizeof(int)));
  }
}

/// Splits for the longest sequence, rounded up to four significant bits: a graph serves all lengths up to there, and
/// launches at most an eighth more blocks of attend_split than there are splits.
void CudaEngine::choose_splits(std::span<const Segment> pass) {
  Index longest = 1;
  for (const Segment& g : pass) longest = std::max(longest, at(g.sequence).length + Index(g.tokens.size()));
  const Index needed = ceil_div(longest, split_rows);
  Index step = 1;
  while (needed > 16 * step) step *= 2;
  split_count_ = ceil_div(needed, step) * step;
  Index splits = 1;
  for (const Kept& kept : plan_.kept)
    splits = std::max(splits, kept.what == Keeps::ring ? ceil_div(kept.window, split_rows) : split_count_);
  const Index size = splits > 1 ? std::min(o_.max_sequences, all_.n) * c_.heads * splits * (c_.head_dim + 2) : 0;
  if (fast_decode_ && size > partial_.count()) forget_graphs(), partial_ = {}, partial_ = Buffer<float>(size);
}

/// Checks the pass, gives pages to the growing sequences, and sends the tables of its rows.
void CudaEngine::prepare(std::span<const Segment> pass) {
  check(pass);
  Index used = 0;
  const auto take = [&]<class T>(Index count, T*& host) {  // the same place in both copies of the tables
    used = ceil_div(used, 16) * 16;
    host = reinterpret_cast<T*>(tables_.get() + used);
    T* device = reinterpret_cast<T*>(device_tables_.get() + used);
    used += count * Index(sizeof(T));
    return device;
  };
  describe(pass, all_, /*only_wanted=*/false, take);
  describe(pass, wanted_, /*only_wanted=*/true, take);
  int first = 0, *index;
  wanted_index_ = take(wanted_.n, index);
  for (const Segment& g : pass) {
    first += int(g.tokens.size());
    for (int back = rows_of(g, /*only_wanted=*/true); back > 0; --back) *index++ = first - back;
  }
  copy(device_tables_.get(), tables_.get(), used);
  give_pages(pass);
  choose_splits(pass);
}

/// X^0 of all rows, and the angles of all and of the wanted ones.
void CudaEngine::embed() {
  const Index half = c_.head_dim / 2;
  for (const Rows* r : {&all_, &wanted_})
    if (r->n && half)
      launch(grid(angles_block, ceil_div(r->n * half, Index(angles_block.threads))), rope_table, r->rows, r->n,
          int(half), frequency_.get(), r->turns);
  launch(grid(embed_block, all_.n), embed_rows, all_.rows, embed_.data.get(), embed_.ld(), c_.dim,
      float(c_.embed_scale), state_);
  show(Place{/*stage=*/-1});
}

/// K^, V^ of the rows, appended to the global cache.
void CudaEngine::project_global(const Plan::Loop& loop) {
  const Stage& s = c_.stages[std::size_t(loop.stage)];
  norm(state_, nullptr, kv_norm_, rows_->n);
  const Index ld = padded(2 * c_.kv_dim());
  product<To::bf16>(normed_.get(), global_kv_, qkv_.get(), ld, rows_->n);
  const Keys keys = keys_of(caches_[std::size_t(loop.first)], Keys::paged, 0, *rows_);
  const Append a{ld, /*q_heads=*/0, int(c_.kv_heads), int(c_.head_dim), s.rope, c_.rope_half, /*to_cache=*/true,
      /*to_recent=*/false};
  append(*rows_, a, keys, keys);
}

/// Only rows whose logits are wanted go on; false when there is none.
bool CudaEngine::keep_wanted_rows() {
  if (wanted_.n && wanted_.n != all_.n) {
    launch(grid(gather_block, wanted_.n), gather_rows, state_, wanted_index_, c_.dim, wanted_x_.get());
    state_ = wanted_x_.get(), rows_ = &wanted_;
  }
  return wanted_.n;
}

void CudaEngine::layer(const Place& place) {
  const DeviceLayer& l = layers_[std::size_t(place.stage)][std::size_t(place.layer)];
  norm(state_, nullptr, l.attn_norm, rows_->n);
  mix(place, l);
  norm(state_, nullptr, l.ffn_norm, rows_->n);
  c_.moe ? moe(l) : ffn(l.gate_up, l.down);
  show(place);
}

/// X for the tracer, if there is one.
void CudaEngine::show(const Place& place) {
  if (!tracing_) return;
  std::vector<float> host(std::size_t(rows_->n * c_.dim));
  std::vector<int> start(c_.moe && place.stage >= 0 ? std::size_t(c_.moe->experts) + 1 : 0);
  std::vector<Index> load;
  copy(host.data(), state_, std::ssize(host) * 4);
  if (!start.empty()) copy(start.data(), start_.get(), std::ssize(start) * 4);
  CUDA_CHECK(cudaStreamSynchronize(stream_));
  for (std::size_t e = 0; e + 1 < start.size(); ++e) load.push_back(start[e + 1] - start[e]);
  on_layer({place.stage, place.loop, place.layer, host, load});
}

/// Logits of `count` rows, from the first-th of the wanted.
void CudaEngine::head(Index first, Index count) {
  if (rows_ == &all_) norm(state_, wanted_index_ + first, norm_, count);  // all rows came up to here
  else norm(state_ + first * c_.dim, nullptr, norm_, count);
  product<To::f32>(normed_.get(), c_.tied_embeddings ? embed_ : head_, logits_.get(), c_.vocab_size, count);
  launch(grid(finite_block, ceil_div(count * c_.vocab_size, finite_block.columns)), find_not_finite, logits_.get(),
      count * c_.vocab_size, &report_.get()->not_finite);
}

/// Waits for the pass and adds up what it did. Throws when a logit was not finite.
void CudaEngine::finish(std::span<const Segment> pass) {
  const Report& told = *host_report_.get();
  copy(host_report_.get(), report_.get(), sizeof told);
  CUDA_CHECK(cudaStreamSynchronize(stream_));
  counters = host_;
  for (unsigned i = 0; i < Tally::places; ++i)
    counters.flops += told.tally.flops[i], counters.bytes += told.tally.bytes[i];
  global_rows_ = Index(told.tally.global_rows);
  for (const Segment& g : pass) at(g.sequence).length += Index(g.tokens.size());
  if (!told.not_finite) return;
  CUDA_CHECK(cudaMemsetAsync(&report_.get()->not_finite, 0, sizeof(int), stream_));
  fail("logits that are not finite: the model's numbers leave the range of the arithmetic");
}

/// Records what `body` launches. A body that throws leaves the stream as it was.
template <class Body>
cudaGraphExec_t record(cudaStream_t stream, Body&& body) {
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t exec = nullptr;
  CUDA_CHECK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeRelaxed));
  try {
    body();
  } catch (...) {
    cudaStreamEndCapture(stream, &graph);
    cudaGraphDestroy(graph);
    throw;
  }
  CUDA_CHECK(cudaStreamEndCapture(stream, &graph));
  const cudaError_t status = cudaGraphInstantiate(&exec, graph, 0);
  cudaGraphDestroy(graph);
  CUDA_CHECK(status);
  return exec;
}

/// Launches a pass. Its first rows' logits are in logits_, and all of them, where wanted, on their way to `logits`.
void CudaEngine::start(float* logits) {
  tracing_ = bool(on_layer);
  rows_ = &all_, state_ = x_.get();
  const auto body = [&] {  // everything up to the first rows' logits
    embed();
    run_stages(c_, plan_, *this);
    if (wanted_.n) head(0, std::min(head_rows_, wanted_.n));
  };
  const bool step = all_.single && wanted_.n == all_.n && all_.n <= head_rows_;
  if (step && rungs_.graphs && !tracing_) {
    const auto key = std::pair{all_.n, split_count_};
    auto found = graphs_.find(key);
    if (found == graphs_.end()) {
      const Counters before = host_;
      const cudaGraphExec_t exec = record(stream_, body);
      found = graphs_.emplace(key, std::pair{exec, host_ - before}).first;
      host_ = before;
    }
    CUDA_CHECK(cudaGraphLaunch(found->second.first, stream_));
    const Counters& did = found->second.second;
    host_.flops += did.flops, host_.bytes += did.bytes, host_.cross_positions += did.cross_positions;
  } else {
    body();
  }
  for (Index first = 0; first < wanted_.n; first += head_rows_) {
    const Index count = std::min(head_rows_, wanted_.n - first);
    if (first) head(first, count);
    if (logits) copy(logits + first * c_.vocab_size, logits_.get(), count * c_.vocab_size * 4);
  }
}

void CudaEngine::forward(std::span<const Segment> pass, float* logits) {
  prepare(pass);
  if (!all_.n) return;
  start(logits);
  finish(pass);
}

void CudaEngine::forward_sample(
    std::span<const Segment> pass, const Sampling& how, std::span<const double> u, int* tokens) {
  prepare(pass);
  if (wanted_.n > head_rows_ || c_.vocab_size > 1 << 24)
    fail("CUDA: ", wanted_.n, " rows are too many to draw from at once");
  if (!all_.n) return;
  start(nullptr);
  if (!wanted_.n) return finish(pass);
  std::copy(u.begin(), u.end(), host_u_.get());
  copy(u_.get(), host_u_.get(), wanted_.n * Index(sizeof(double)));
  launch(grid(sample_block, wanted_.n), sample, logits_.get(), int(c_.vocab_size), float(how.temperature),
      int(std::min<Index>(how.top_k, c_.vocab_size)), float(how.top_p), u_.get(), drawn_.get());
  copy(host_drawn_.get(), drawn_.get(), wanted_.n * Index(sizeof(int)));
  finish(pass);
  std::copy_n(host_drawn_.get(), wanted_.n, tokens);
}

}  // namespace

std::unique_ptr<Engine> make_cuda_engine(const Config& c, const Weights& w, const EngineOptions& o) {
  int devices = 0, device = 0, major = 0;
  if (const cudaError_t status = cudaGetDeviceCount(&devices); status != cudaSuccess || devices == 0)
    fail("--device cuda: no device, or no driver for it: ", cudaGetErrorString(status));
  CUDA_CHECK(cudaGetDevice(&device));
  CUDA_CHECK(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device));
  if (major < 8) fail("--device cuda: the device's compute capability is ", major, ".x; 8.0 (Ampere) is the least");
  if (major != 9) notice("compute capability " + std::to_string(major) + ".x: Hopper's fast kernels cannot run here");
  Rungs rungs;
  rungs.hopper = rungs.pdl = major == 9;
  return std::make_unique<CudaEngine>(c, w, o, rungs);
}

}  // namespace yocou
