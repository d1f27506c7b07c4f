/// @file
/// cuda_faults.cpp -- tests of the emulator itself: small kernels with one planted bug each. A check that never fires
/// proves nothing: every bug must be caught under some schedule, and the same kernel without it under none.
#include "catch.h"
#include "cuda_emulator.h"

namespace {

using bf16 = __nv_bfloat16;

/// The schedules that the kernels' own tests run under.
const emu::Options schedules[] = {{false, 0}, {true, 0}, {false, 1}, {true, 2}, {false, 3}};

/// Device memory of a test.
struct Device {
  float* p = nullptr;
  explicit Device(std::size_t n, float first = 0, float step = 0) {
    void* v = nullptr;
    cudaMalloc(&v, n * 4);
    p = static_cast<float*>(v);
    if (step != 0 || first != 0)
      for (std::size_t i = 0; i < n; ++i) p[i] = first + step * float(i);
  }
  Device(const Device&) = delete;
  ~Device() { cudaFree(p); }
};

template <class... P, class... A>
void run(unsigned grid, unsigned block, std::size_t shared, void (*kernel)(P...), A... a) {
  if (shared > 48 * 1024)
    cudaFuncSetAttribute(
        reinterpret_cast<const void*>(kernel), cudaFuncAttributeMaxDynamicSharedMemorySize, int(shared));
  cudaLaunchConfig_t c{};
  c.gridDim = dim3(grid), c.blockDim = dim3(block), c.dynamicSmemBytes = shared;
  cudaLaunchKernelEx(&c, kernel, a...);
  cudaDeviceSynchronize();
}

/// How many of the schedules find something: a fault, or a result that is not right.
int caught(const std::function<bool()>& right) {
  int found = 0;
  for (const auto& o : schedules) {
    emu::configure(o);
    try {
      found += !right();
    } catch (const emu::Fault& f) {
      ++found;
      emu::default_stream.queue.clear(), emu::default_stream.capture.reset();
    }
  }
  emu::configure({});
  return found;
}
bool near(float a, float b) { return std::abs(a - b) <= 1e-3f * std::abs(b); }  // false for NaN

// --- shared memory and warp collectives

enum class Sum { right, no_barrier, divergent_barrier, no_second_barrier, partial_mask, mixed_collectives, early_exit };

/// Twice: the sum over the block, by warps and then over the warps, through the same shared memory.
template <Sum bug>
void block_sums(const float* x, float* y) {
  float* warps = shared_memory<float>();
  const unsigned warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  if (bug == Sum::early_exit && threadIdx.x == 70) return;
  for (int round = 0; round < 2; ++round) {
    float v = x[round * 256 + threadIdx.x];
    const unsigned mask = bug == Sum::partial_mask && warp == 3 ? 0xffffu : 0xffffffffu;
    for (int i = 16; i; i /= 2) {
      if (bug == Sum::mixed_collectives && lane == 5 && warp == 1 && i == 4) v += float(__ballot_sync(mask, 1));
      else v += __shfl_xor_sync(mask, v, i);
    }
    if (lane == 0) warps[warp] = v;
    if (bug != Sum::no_barrier && !(bug == Sum::divergent_barrier && warp == 7)) __syncthreads();
    float sum = 0;
    for (int i = 0; i < 8; ++i) sum += warps[i];
    y[round * 256 + threadIdx.x] = sum;
    if (bug != Sum::no_second_barrier) __syncthreads();
  }
}
template <Sum bug>
int sums() {
  return caught([] {
    Device x(512, 1, 1), y(512);
    run(1, 256, 8 * 4, block_sums<bug>, x.p, y.p);
    bool right = true;
    for (int i = 0; i < 512; ++i) right &= near(y.p[i], i < 256 ? 32896 : 98432);
    return right;
  });
}

// --- cp.async

enum class Async { right, no_wait, no_barrier, misaligned, outside, unfinished };

/// Reverses 4 x 128 numbers, a stage ahead of their use.
template <Async bug>
void reverse_copies(const float* x, float* y) {
  float* stage = shared_memory<float>();
  const unsigned t = threadIdx.x;
  const auto fetch = [&](unsigned s) {
    float* to = stage + s % 2 * 128 + t * 4;
    if (bug == Async::outside && s == 3 && t == 31) to += 4;
    cp_async16(to, x + s * 128 + t * 4 + (bug == Async::misaligned ? 1 : 0), true);
    cp_async_commit();
  };
  fetch(0);
  for (unsigned s = 0; s < 4; ++s) {
    if (s < 3) fetch(s + 1);
    if (bug == Async::no_wait) {
      if (s == 3) cp_async_wait<0>();
    } else if (bug != Async::unfinished) {
      s < 3 ? cp_async_wait<1>() : cp_async_wait<0>();
    } else {
      cp_async_wait<1>();
    }
    if (bug != Async::no_barrier) __syncthreads();
    for (int i = 0; i < 4; ++i) y[s * 128 + t * 4 + unsigned(i)] = stage[s % 2 * 128 + 127 - t * 4 - unsigned(i)];
    __syncthreads();
  }
}
template <Async bug>
int copies() {
  return caught([] {
    Device x(513, 1, 1), y(512);
    run(1, 32, 1024, reverse_copies<bug>, x.p, y.p);
    bool right = true;
    for (int i = 0; i < 512; ++i) right &= y.p[i] == float(i / 128 * 128 + 127 - i % 128 + 1);
    return right;
  });
}

// --- mbarrier and TMA

enum class Ring {
  right,
  few_bytes,
  many_bytes,
  no_init_barrier,
  no_init,
  early_release,
  extra_arrival,
  misaligned,
  bad_parity
};

CUtensorMap map_of(const bf16* p, cuuint64_t rows, cuuint64_t columns, cuuint64_t stride, cuuint32_t box_columns = 64,
    cuuint32_t box_rows = 64) {
  CUtensorMap map{};
  const cuuint64_t size[2] = {columns, rows}, strides[1] = {stride};
  const cuuint32_t box[2] = {box_columns, box_rows}, step[2] = {1, 1};
  emu_encode_tiled(&map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 2, const_cast<bf16*>(p), size, strides, box, step,
      CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_NONE,
      CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return map;
}

/// Sums 6 tiles of 64 x 64 numbers that a producer warp brings through a ring of 2 stages.
template <Ring bug>
void ring_sum(const CUtensorMap map, float* y) {
  bf16* stages = shared_memory<bf16>();
  auto* full = reinterpret_cast<std::uint64_t*>(stages + 2 * 4096);
  auto* empty = full + 2;
  if (bug != Ring::no_init && threadIdx.x == 40) {
    for (int i = 0; i < 2; ++i) mbar_init(full + i, 1), mbar_init(empty + i, 1);
    mbar_fence_init();
  }
  if (bug != Ring::no_init_barrier) __syncthreads();
  if (threadIdx.x == 32) {
    for (int j = 0; j < 6; ++j) {
      const int s = j % 2;
      if (j >= 2 && bug != Ring::early_release) mbar_wait(empty + s, unsigned(j / 2 - 1) & 1);
      mbar_expect(full + s, 8192 + (bug == Ring::many_bytes ? 16 : bug == Ring::few_bytes ? -16 : 0));
      tma_load(stages + s * 4096 + (bug == Ring::misaligned ? 64 : 0), &map, 0, 64 * j, full + s);
    }
  }
  if (threadIdx.x >= 32) return;
  float sum = 0;
  for (int j = 0; j < 6; ++j) {
    const int s = j % 2;
    mbar_wait(full + s, (unsigned(j / 2) & 1) ^ (bug == Ring::bad_parity));
    for (unsigned i = threadIdx.x; i < 4096; i += 32) sum += __bfloat162float(stages[s * 4096 + int(i)]);
    __syncwarp();
    if (threadIdx.x == 0 || (bug == Ring::extra_arrival && threadIdx.x == 9)) mbar_arrive(empty + s);
  }
  y[threadIdx.x] = sum;
}
template <Ring bug>
int rings() {
  return caught([] {
    Device x(6 * 64 * 64 / 2), y(32);
    auto* numbers = reinterpret_cast<bf16*>(x.p);
    for (int i = 0; i < 6 * 64 * 64; ++i) numbers[i] = __float2bfloat16(float(1 + i / 4096));
    run(1, 64, 2 * 8192 + 32, ring_sum<bug>, map_of(numbers, 6 * 64, 64, 128), y.p);
    float sum = 0;
    for (int i = 0; i < 32; ++i) sum += y.p[i];
    return near(sum, 4096 * 21);
  });
}

// --- wgmma

enum class Mma { right, no_wait, no_fence, no_proxy_fence, bad_stride, not_uniform, touched_early, bad_swizzle };

/// Y [64,64] = A [64,64] B^T [64,64], B written to shared memory by the threads themselves.
template <Mma bug>
void product(const bf16* a, const bf16* b, float* y) {
  bf16* tile = shared_memory<bf16>();
  const int t = int(threadIdx.x), warp = t / 32, lane = t % 32;
  for (int i = t; i < 4096; i += 128) {
    const int r = i / 64, c = i % 64, piece = c / 8 ^ (bug == Mma::bad_swizzle ? r / 8 % 8 : r % 8);
    tile[r * 64 + piece * 8 + c % 8] = b[i];
  }
  if (bug != Mma::no_proxy_fence) fence_proxy_async();
  __syncthreads();
  float d[32] = {};
  if (bug != Mma::no_fence) wgmma_fence();
  for (int k = 0; k < 4; ++k) {
    std::uint32_t af[4];
    for (int e = 0; e < 4; ++e) {
      const int row = 16 * warp + lane / 4 + e % 2 * 8, column = 16 * k + e / 2 * 8 + lane % 4 * 2;
      std::memcpy(&af[e], a + row * 64 + column, 4);
    }
    const std::uint64_t stride = bug == Mma::bad_stride ? 4096 : 1024;
    std::uint64_t desc =
        (shared_address(tile + 16 * k) >> 4) | std::uint64_t(1) << 16 | stride >> 4 << 32 | std::uint64_t(1) << 62;
    if (bug == Mma::not_uniform && t == 77) desc += 2;
    wgmma_rs<false>(d, af, desc, k > 0);
  }
  wgmma_commit();
  if (bug == Mma::touched_early) d[3] += 0;  // nothing changes, but the value is read
  const float early = d[3];
  if (bug != Mma::no_wait) wgmma_wait<0>();
  if (bug == Mma::touched_early) d[3] = early;
  for (int i = 0; i < 32; ++i) y[(16 * warp + lane / 4 + i / 2 % 2 * 8) * 64 + i / 4 * 8 + lane % 4 * 2 + i % 2] = d[i];
}
template <Mma bug>
int products() {
  return caught([] {
    Device a(2048), b(2048), y(4096);
    auto* A = reinterpret_cast<bf16*>(a.p);
    auto* B = reinterpret_cast<bf16*>(b.p);
    for (int i = 0; i < 4096; ++i)
      A[i] = __float2bfloat16(float(i * 7 % 11 - 5)), B[i] = __float2bfloat16(float(i * 5 % 13 - 6));
    run(1, 128, 8192, product<bug>, static_cast<const bf16*>(A), static_cast<const bf16*>(B), y.p);
    bool right = true;
    for (int r = 0; r < 64; ++r)
      for (int c = 0; c < 64; ++c) {
        float sum = 0;
        for (int k = 0; k < 64; ++k) sum += __bfloat162float(A[r * 64 + k]) * __bfloat162float(B[c * 64 + k]);
        right &= y.p[r * 64 + c] == sum;
      }
    return right;
  });
}

void store_one(float* p) { *p = 1; }
void touch_shared() { shared_memory<char>()[0] = 1; }

}  // namespace

TEST_CASE("emulator: clean kernels raise nothing", "[cuda][emulator]") {
  CHECK(sums<Sum::right>() == 0);
  CHECK(copies<Async::right>() == 0);
  CHECK(rings<Ring::right>() == 0);
  CHECK(products<Mma::right>() == 0);
}

TEST_CASE("emulator: planted bugs in kernels are caught", "[cuda][emulator]") {
  CHECK(sums<Sum::no_barrier>() > 0);
  CHECK(sums<Sum::no_second_barrier>() > 0);
  CHECK(sums<Sum::divergent_barrier>() > 0);
  CHECK(sums<Sum::partial_mask>() > 0);
  CHECK(sums<Sum::mixed_collectives>() > 0);
  CHECK(sums<Sum::early_exit>() > 0);
  CHECK(copies<Async::no_wait>() > 0);
  CHECK(copies<Async::no_barrier>() > 0);
  CHECK(copies<Async::misaligned>() > 0);
  CHECK(copies<Async::outside>() > 0);
  CHECK(copies<Async::unfinished>() > 0);
  CHECK(rings<Ring::few_bytes>() > 0);
  CHECK(rings<Ring::many_bytes>() > 0);
  CHECK(rings<Ring::no_init_barrier>() > 0);
  CHECK(rings<Ring::no_init>() > 0);
  CHECK(rings<Ring::early_release>() > 0);
  CHECK(rings<Ring::extra_arrival>() > 0);
  CHECK(rings<Ring::misaligned>() > 0);
  CHECK(rings<Ring::bad_parity>() > 0);
  CHECK(products<Mma::no_wait>() > 0);
  CHECK(products<Mma::touched_early>() > 0);
  CHECK(products<Mma::no_fence>() > 0);
  CHECK(products<Mma::no_proxy_fence>() > 0);
  CHECK(products<Mma::bad_stride>() > 0);
  CHECK(products<Mma::bad_swizzle>() > 0);
  CHECK(products<Mma::not_uniform>() > 0);
}

TEST_CASE("emulator: planted bugs on the host's side are caught", "[cuda][emulator]") {
  emu::configure({});
  Device x(4096);
  auto* p = reinterpret_cast<const bf16*>(x.p);
  CHECK_NOTHROW(map_of(p, 64, 64, 128));
  CHECK_THROWS_AS(map_of(p + 1, 63, 64, 128), emu::Fault);            // base
  CHECK_THROWS_AS(map_of(p, 64, 60, 120), emu::Fault);                // stride
  CHECK_THROWS_AS(map_of(p, 64, 64, 128, 128), emu::Fault);           // box wider than the swizzle
  CHECK_THROWS_AS(map_of(p, 64, 64, 128, 64, 512), emu::Fault);       // box higher than 256
  CHECK_THROWS_AS(run(1, 33, 0, store_one, x.p), emu::Fault);         // no whole warps
  CHECK_THROWS_AS(run(1, 2048, 0, store_one, x.p), emu::Fault);       // too many threads
  CHECK_THROWS_AS(run(0, 32, 0, store_one, x.p), emu::Fault);         // no blocks
  CHECK_THROWS_AS(run(1, 32, 300 * 1024, touch_shared), emu::Fault);  // more shared memory than there is
  CHECK_THROWS_AS(cudaFree(x.p + 1), emu::Fault);                     // not an allocation
  cudaLaunchConfig_t c{};
  c.gridDim = dim3(1), c.blockDim = dim3(32), c.dynamicSmemBytes = 49 * 1024;
  CHECK_THROWS_AS(cudaLaunchKernelEx(&c, touch_shared), emu::Fault);  // above 48 KB without asking
  c.dynamicSmemBytes = 0, c.gridDim = dim3(1, 70000);
  CHECK_THROWS_AS(cudaLaunchKernelEx(&c, touch_shared), emu::Fault);  // a grid dimension over 65,535
}

TEST_CASE("emulator: streams are late when they may be, graphs replay", "[cuda][emulator]") {
  emu::configure({/*late=*/true, /*seed=*/0});
  Device x(1, 5);
  cudaStream_t stream = nullptr;
  REQUIRE(cudaStreamCreateWithFlags(&stream, 0) == cudaSuccess);
  cudaLaunchConfig_t c{};
  c.gridDim = dim3(1), c.blockDim = dim3(32), c.stream = stream;
  cudaLaunchKernelEx(&c, store_one, x.p);
  CHECK(x.p[0] == 5);  // nobody has waited
  cudaStreamSynchronize(stream);
  CHECK(x.p[0] == 1);

  cudaGraph_t graph = nullptr;
  cudaGraphExec_t exec = nullptr;
  cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal);
  cudaMemsetAsync(x.p, 0, 4, stream);
  CHECK_THROWS_AS(cudaStreamSynchronize(stream), emu::Fault);  // not while it is recorded
  cudaStreamEndCapture(stream, &graph);
  cudaGraphInstantiate(&exec, graph, 0);
  cudaGraphDestroy(graph);
  CHECK(x.p[0] == 1);
  for (int i = 0; i < 2; ++i) {
    x.p[0] = 3;
    cudaGraphLaunch(exec, stream);
    cudaStreamSynchronize(stream);
    CHECK(x.p[0] == 0);
  }
  cudaGraphExecDestroy(exec);
  cudaStreamDestroy(stream);
  emu::configure({});
}
