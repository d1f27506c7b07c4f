/// @file
/// cuda_hardware_check.cu -- everything that only a Hopper GPU can tell, in under 5 minutes: are the instructions'
/// layouts what the emulator takes them for, do the kernels answer right, how fast are they against their floors.
/// Build and run with cuda_hardware_check.sh. Weights are random; every timing prints the value, its floor, the share.
#include "../kernels.cu"
//
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <iostream>
#include <random>

namespace yocou {
namespace {
int failures = 0;
}
}  // namespace yocou
#define CAPTURE(...) (void)0
#define CHECK(condition) \
  if (!(condition)) ++failures, std::printf("  FAILED line %d: %s\n", __LINE__, #condition)
#define FAIL(text) return void((++failures, std::printf("  FAILED: %s\n", text)))
#include "cuda_session.h"

namespace yocou {
namespace {
/// Reaches into the engine: gives a sequence a length whose caches hold zeros. Timing does not care.
struct CudaEngineProbe {
  static void advance(CudaEngine& e, int sequence, Index length) {
    e.sequences_[std::size_t(sequence)].length = length;
  }
};

template <class T>
Buffer<T> upload(const std::vector<T>& host) {
  Buffer<T> device(Index(host.size()));
  CUDA_CHECK(cudaMemcpy(device.get(), host.data(), host.size() * sizeof(T), cudaMemcpyHostToDevice));
  return device;
}
template <class T>
std::vector<T> download(const Buffer<T>& device) {
  std::vector<T> host(std::size_t(device.count()));
  CUDA_CHECK(cudaMemcpy(host.data(), device.get(), host.size() * sizeof(T), cudaMemcpyDeviceToHost));
  return host;
}

// --- 1. layouts, in exact integers

/// Y [64,64] = A [64,64] B, B by TMA: K-major ([n][k] in memory), or MN-major ([k][n]); A in registers.
template <bool BMnMajor>
__global__ void __launch_bounds__(128)
    probe_wgmma(const __grid_constant__ CUtensorMap map, const bf16* a /*[64,64]*/, float* y /*[64,64]*/) {
  bf16* tile = shared_memory<bf16>();
  auto* bar = reinterpret_cast<uint64_t*>(tile + 4096);
  if (threadIdx.x == 0) mbar_init(bar, 1), mbar_fence_init();
  __syncthreads();  // the mbarrier: set up by thread 0, used by all
  if (threadIdx.x == 0) mbar_expect(bar, 8192), tma_load(tile, &map, 0, 0, bar);
  mbar_wait(bar, 0);
  const int warp = int(threadIdx.x) / 32, lane = int(threadIdx.x) % 32;
  uint32_t af[4][4];
  UNROLL for (int k = 0; k < 4; ++k) UNROLL for (int e = 0; e < 4; ++e) af[k][e] = *reinterpret_cast<const uint32_t*>(
      a + (16 * warp + lane / 4 + e % 2 * 8) * 64 + 16 * k + e / 2 * 8 + lane % 4 * 2);
  float d[32] = {};
  settle_registers(d);
  wgmma_fence();
  UNROLL for (int k = 0; k < 4; ++k)
      wgmma_rs<BMnMajor>(d, af[k], descriptor(tile + (BMnMajor ? k * 16 * 64 : k * 16)), true);
  wgmma_commit();
  wgmma_wait<0>();
  UNROLL for (int i = 0; i < 32; ++i)
      y[(16 * warp + lane / 4 + i / 2 % 2 * 8) * 64 + i / 4 * 8 + lane % 4 * 2 + i % 2] = d[i];
}

template <bool BMnMajor>
void probe(const char* name) {
  std::vector<bf16> a, b;
  for (int i = 0; i < 4096; ++i)
    a.push_back(__float2bfloat16(float(i * 7 % 11 - 5))), b.push_back(__float2bfloat16(float(i * 5 % 13 - 6)));
  const auto da = upload(a), db = upload(b);
  Buffer<float> y(4096);
  launch({dim3(1), 128, 8192 + 16}, probe_wgmma<BMnMajor>, tensor_map(db.get(), 64, 64), da.get(), y.get());
  const auto got = download(y);
  int wrong = 0;
  for (int r = 0; r < 64; ++r)
    for (int c = 0; c < 64; ++c) {
      float sum = 0;
      for (int k = 0; k < 64; ++k)
        sum += __bfloat162float(a[r * 64 + k]) * __bfloat162float(BMnMajor ? b[k * 64 + c] : b[c * 64 + k]);
      wrong += got[std::size_t(r * 64 + c)] != sum;
    }
  std::printf("  %-58s %s\n", name, wrong ? "WRONG" : "exact");
  failures += wrong != 0;
}

/// y = x W^T with small integers, by one of the product kernels: ldmatrix + mma, wgmma from shared memory, skinny.
template <class Kernel>
void probe_product(const char* name, Kernel kernel, dim3 grid, unsigned block, std::size_t shared, Index n) {
  const Index out = 200, in = 328;
  std::vector<bf16> x, w;
  for (Index i = 0; i < n * in; ++i) x.push_back(__float2bfloat16(float(i * 7 % 11 - 5)));
  for (Index i = 0; i < out * in; ++i) w.push_back(__float2bfloat16(float(i * 5 % 13 - 6)));
  const auto dx = upload(x), dw = upload(w);
  Buffer<float> y(n * out);
  launch({grid, block, shared}, kernel, dx.get(), dw.get(), in, y.get(), out, n, out, Groups{});
  const auto got = download(y);
  int wrong = 0;
  for (Index i = 0; i < n; ++i)
    for (Index o = 0; o < out; ++o) {
      float sum = 0;
      for (Index k = 0; k < in; ++k)
        sum += __bfloat162float(x[std::size_t(i * in + k)]) * __bfloat162float(w[std::size_t(o * in + k)]);
      wrong += got[std::size_t(i * out + o)] != sum;
    }
  std::printf("  %-58s %s\n", name, wrong ? "WRONG" : "exact");
  failures += wrong != 0;
}

void layouts() {
  std::puts("1. layouts, exact integers");
  probe<false>("TMA 128-byte swizzle, wgmma m64n64 K-major, A in registers");
  probe<true>("the same, B MN-major");
  probe_product("cp.async, ldmatrix, mma.m16n8k16 (product_tile)", product_tile<To::f32>, dim3(4, 2), 128, 49152, 70);
  probe_product(
      "cp.async, proxy fence, wgmma m64n128 (product_wgmma)", product_wgmma<To::f32>, dim3(2, 2), 256, 131072, 130);
  probe_product("weights in registers, mma (product_skinny)", product_skinny<To::f32, 4>, dim3(13, 1), 256, 16384, 30);
}

// --- 2. the engine against the reference

void engine() {
  std::puts("2. whole engine against double precision, general and fast kernels");
  for (const bool fast : {false, true}) {
    const Rungs rungs = fast ? Rungs{} : general();
    scenario(base(72, 2, 1, 64, 100, {window(1, 2, 5), shared(2)}), rungs);
    scenario(base(40, 6, 2, 128, 36, {window(1, 1, 70), shared(1)}), rungs, Dtype::bf16, 8);
    scenario(base(40, 2, 2, 64, 36, {full(1, 1)}), rungs, Dtype::bf16, 12);
    scenario(with_moe(base(72, 2, 1, 64, 0, {window(1, 1, 5), shared(1)}), {6, 2, 20, 12, true}), rungs);
    std::printf("  %s kernels: worst error %.4f of the largest logit, limit 0.02; failures so far %d\n",
        fast ? "fast" : "general", worst_error, failures);
  }
}

// --- timing

double peak_bytes = 0, peak_flops = 0;  // a second: what this chip can do, measured in step 4

/// Median seconds of `work`, 5 runs after one.
template <class Work>
double seconds(cudaStream_t stream, Work&& work) {
  cudaEvent_t begin, end;
  CUDA_CHECK(cudaEventCreate(&begin));
  CUDA_CHECK(cudaEventCreate(&end));
  std::vector<double> runs;
  for (int i = 0; i < 6; ++i) {
    CUDA_CHECK(cudaEventRecord(begin, stream));
    work();
    CUDA_CHECK(cudaEventRecord(end, stream));
    CUDA_CHECK(cudaEventSynchronize(end));
    float ms = 0;
    CUDA_CHECK(cudaEventElapsedTime(&ms, begin, end));
    if (i) runs.push_back(ms / 1000);
  }
  CUDA_CHECK(cudaEventDestroy(begin));
  CUDA_CHECK(cudaEventDestroy(end));
  std::sort(runs.begin(), runs.end());
  return runs[2];
}
void line(const std::string& what, double time, double floor) {
  std::printf(
      "  | %-46s | %9.1f us | %9.1f us | %5.1f%% |\n", what.c_str(), time * 1e6, floor * 1e6, 100 * floor / time);
}
void heading(const char* text) {
  std::printf("%s\n  | %-46s | %12s | %12s | %6s |\n  |---|---|---|---|\n", text, "what", "time", "floor", "share");
}

void ceilings() {
  std::puts("4. ceilings of this chip");
  const Index bytes = Index(4) << 30;
  Buffer<char> a(bytes, true), b(bytes, true);
  const double t = seconds(nullptr,
      [&] { CUDA_CHECK(cudaMemcpyAsync(b.get(), a.get(), std::size_t(bytes), cudaMemcpyDeviceToDevice, nullptr)); });
  peak_bytes = 2 * double(bytes) / t;
  std::printf("  copy: %.0f GB/s\n", peak_bytes / 1e9);
  Library library;
  for (const Index n : {4096, 6656, 8192})
    for (const auto& [out, in] :
        {std::pair<Index, Index>{3584, 2560}, {2560, 2560}, {13824, 2560}, {2560, 6912}, {1024, 2560}}) {
      const Buffer<bf16> x(n * in, true), w(out * in, true);
      Buffer<bf16> y(n * out);
      const Product p{x.get(), w.get(), in, y.get(), out, n, out, To::bf16};
      if (!library.run(p, nullptr)) return std::puts("  no cuBLASLt"), void();
      const double time = seconds(nullptr, [&] { library.run(p, nullptr); });
      const double rate = 2.0 * double(n) * double(out) * double(in) / time;
      peak_flops = std::max(peak_flops, rate);
      std::printf("  cuBLASLt %5d x %5d x %5d: %.0f TFLOP/s\n", int(n), int(out), int(in), rate / 1e12);
    }
}

void decode_products() {
  heading("5. decode products: skinny against cuBLASLt, weights rotating through more than L2");
  Library library;
  for (const auto& [out, in] : {std::pair<Index, Index>{3584, 2560}, {2560, 2560}, {13824, 2560}, {2560, 6912}})
    for (const Index n : {1, 8, 32}) {
      const Index copies = (Index(256) << 20) / (out * in * 2) + 1;
      const Buffer<bf16> x(32 * in, true), w(copies * out * in, true);
      Buffer<float> y(32 * out, true);
      const double floor = 2.0 * double(out * in) / peak_bytes;
      const std::string shape = std::to_string(n) + " x " + std::to_string(out) + " x " + std::to_string(in);
      const double own = seconds(nullptr, [&] {
        for (Index i = 0; i < copies; ++i) {
          const Launch l{dim3(unsigned(ceil_div(out, 16)), 1), 256, n <= 8 ? 4096ul : 16384ul};
          const bf16* wi = w.get() + i * out * in;
          if (n <= 8) launch(l, product_skinny<To::f32, 1>, x.get(), wi, in, y.get(), out, n, out, Groups{});
          else launch(l, product_skinny<To::f32, 4>, x.get(), wi, in, y.get(), out, n, out, Groups{});
        }
      });
      line("product_skinny " + shape, own / double(copies), floor);
      const double theirs = seconds(nullptr, [&] {
        for (Index i = 0; i < copies; ++i)
          library.run(Product{x.get(), w.get() + i * out * in, in, y.get(), out, n, out, To::f32}, nullptr);
      });
      line("cuBLASLt       " + shape, theirs / double(copies), floor);
    }
}

// --- kernels by themselves, at the 1.3B and 10B-MoE shapes

void csv(const std::string& kernel, const std::string& shape, double time, double bytes, double flops) {
  const double share = std::max(bytes / peak_bytes, peak_flops > 0 ? flops / peak_flops : 0) / time;
  std::printf("%s,%s,%.2f,%.0f,%.1f,%.3f\n", kernel.c_str(), shape.c_str(), time * 1e6, bytes / time / 1e9,
      flops / time / 1e12, share);
}
constexpr Index H = 20, G = 4, DH = 128, D = 2560;
constexpr std::size_t stage_bytes = 2 * 64 * DH * 2 + 16;

/// One new row per sequence, each of length N, against a ring (W > 0) or pages. `alone`: one block an SM.
void time_decode_attention(Index B, Index N, Index W, bool alone = false) {
  const Index seen = W ? W : N, pages = ceil_div(N, block_rows), rows = W ? B * G * W : B * pages * G * block_rows;
  const Index copies = W ? 8 : 1;  // rings of 8 layers, so that L2 does not hold them
  const Buffer<bf16> k(copies * rows * DH, true), v(copies * rows * DH, true), q(B * H * DH, true);
  std::vector<Row> row;
  std::vector<int> page;
  for (Index b = 0; b < B; ++b) row.push_back({0, int(N - 1), int(b), int(b), int(N)});
  for (Index i = 0; i < B * pages; ++i) page.push_back(int(i));
  const auto device_rows = upload(row);
  const auto device_pages = upload(page);
  const Index splits = ceil_div(seen, split_rows);
  const Buffer<float> part(B * H * splits * (DH + 2));
  const Buffer<bf16> out(B * H * DH);
  const unsigned s = unsigned(splits), b = unsigned(B);
  const double time = seconds(nullptr, [&] {
    for (Index i = 0; i < copies; ++i) {
      bf16 *ki = k.get() + i * rows * DH, *vi = v.get() + i * rows * DH;
      const Keys keys{W ? Keys::ring : Keys::paged, ki, vi, device_pages.get(), pages, 0, int(W), int(G)};
      launch({dim3(s, unsigned(G), b), 128, alone ? std::size_t(120000) : split_stages * stage_bytes}, attend_split<DH>,
          tensor_map(ki, rows, DH), tensor_map(vi, rows, DH), device_rows.get(), q.get(), H * DH, keys, int(H), 0.1f,
          part.get(), out.get(), H * DH);
      if (splits > 1)
        launch({dim3(unsigned(H), b), unsigned(DH)}, attend_merge<DH>, part.get(), device_rows.get(), int(W),
            int(splits), out.get(), H * DH);
    }
  });
  csv(std::string(W ? "attend_split ring" : "attend_split paged + attend_merge") + (alone ? " (1 block an SM)" : ""),
      std::to_string(B) + " x " + std::to_string(seen), time / double(copies), 4.0 * double(B * G * DH * seen),
      4.0 * double(B * H * DH * seen));
}

/// n rows of a prompt, behind n others, against a window; or the first n rows, against all before them.
void time_prefill_attention(Index n, Index W) {
  const Index rows = W ? G * (n + W) : ceil_div(n, block_rows) * G * block_rows;
  const Buffer<bf16> k(rows * DH, true), v(rows * DH, true), q(n * H * DH, true), out(n * H * DH);
  std::vector<Tile> tile;
  std::vector<int> page;
  for (Index i = 0; i < n; i += 64) tile.push_back({0, int(i)});
  for (Index i = 0; i < ceil_div(n, block_rows); ++i) page.push_back(int(i));
  const auto tiles = upload(tile);
  const auto pages = upload(page);
  const auto spans = upload(std::vector<Span>{{0, int(n), W ? int(n) : 0, 0}});
  const Keys keys{W ? Keys::recent : Keys::paged, k.get(), v.get(), pages.get(), pages.count(), n + W, int(W), int(G)};
  const auto k_map = tensor_map(k.get(), rows, DH), v_map = tensor_map(v.get(), rows, DH);
  const double time = seconds(nullptr, [&] {
    launch({dim3(unsigned(tiles.count()), unsigned(H)), 160, tile_stages * stage_bytes}, attend_tiles<DH>, k_map, v_map,
        tiles.get(), spans.get(), q.get(), H * DH, keys, int(H), 0.1f, out.get(), H * DH);
  });
  csv(W ? "attend_tiles window" : "attend_tiles full", std::to_string(n) + " rows W " + std::to_string(W), time,
      double(rows * DH * 4), 4.0 * double(H * DH * n) * (W ? double(W) : double(n + 1) / 2));
}

/// One product of 64 experts for n tokens that go to 8 each: gate and up (gathered rows), or down (sorted rows).
void time_experts(Index n, bool down) {
  const Index E = 64, active = 8, assigned = n * active, out = down ? D : 2048, in = down ? 1024 : D;
  const Buffer<bf16> x(assigned * in, true), w(E * out * in, true), y(assigned * out);
  std::vector<int> start{0}, order;
  for (Index e = 0; e < E; ++e) {
    for (Index i = e; i < assigned; i += E) order.push_back(int(i));
    start.push_back(int(order.size()));
  }
  const auto device_start = upload(start);
  const auto device_order = upload(order);
  const Groups groups{device_start.get(), int(E), down ? nullptr : device_order.get(), down ? 1 : int(active)};
  const bool skinny = n <= 64;
  const double time = seconds(nullptr, [&] {
    if (skinny)
      launch({dim3(unsigned(out / 16), unsigned(E)), 256, 4096}, product_skinny<To::bf16, 1>, x.get(), w.get(), in,
          y.get(), out, assigned, out, groups);
    else
      launch({dim3(unsigned(out / 128), unsigned(ceil_div(assigned, 128) + E)), 256, 131072}, product_wgmma<To::bf16>,
          x.get(), w.get(), in, y.get(), out, assigned, out, groups);
  });
  csv(skinny ? "product_skinny experts" : "product_wgmma experts",
      std::to_string(n) + " x 8 of 64; " + std::to_string(out) + " x " + std::to_string(in), time,
      2.0 * double(E * out * in), 2.0 * double(assigned * out * in));
}

void kernels() {
  std::puts("6. kernels by themselves; share: of the copy rate or of the best cuBLASLt rate of step 4, what binds");
  std::puts("kernel,shape,us,GB_s,TFLOP_s,share");
  time_decode_attention(32, 8192, 0), time_decode_attention(32, 65536, 0), time_decode_attention(1, 65536, 0);
  time_decode_attention(32, 65536, 0, /*alone=*/true);
  time_decode_attention(32, 8192, 512), time_decode_attention(1, 8192, 512);
  time_prefill_attention(8192, 512), time_prefill_attention(8192, 0);
  for (const Index n : {32, 8192}) time_experts(n, false), time_experts(n, true);
  const Index n = 8192, F = 6912;
  const Buffer<bf16> a(n * 2 * F, true), b(2 * F * D, true), y(n * 2 * F);
  const Buffer<float> x(n * D, true), gain(D, true), u(32, true);
  const Buffer<int> token(32);
  const auto one = [&](const char* name, const char* shape, double bytes, double flops, auto&& work) {
    csv(name, shape, seconds(nullptr, work), bytes, flops);
  };
  one("product_wgmma", "8192 x 13824 x 2560", 2.0 * double(2 * F * D), 2.0 * double(n * 2 * F * D), [&] {
    launch(
        {dim3(108, 64), 256, 131072}, product_wgmma<To::bf16>, a.get(), b.get(), D, y.get(), 2 * F, n, 2 * F, Groups{});
  });
  one("rms_norm", "8192 x 2560", 6.0 * double(n * D), 0, [&] {
    launch({dim3(unsigned(n)), 256, 128}, rms_norm, x.get(), nullptr, gain.get(), D, 1e-5f, y.get(), D);
  });
  one("swiglu", "8192 x 6912", 6.0 * double(n * F), 0, [&] {
    launch({dim3(unsigned(n), 27), 256}, swiglu, a.get(), 2 * F, F, y.get(), F);
  });
  const Index V = 100352;
  const Buffer<float> logits(32 * V, true);
  one("sample top-p 0.9", "32 x 100352", 4.0 * double(32 * V), 0, [&] {
    launch({dim3(32), 512, 128}, sample, logits.get(), int(V), 1.0f, 0, 0.9f, u.get(), token.get());
  });
}

// --- the 1.3B shape

/// All tensors are views of one block of random numbers: timing needs no more.
struct Shared13b {
  Config c;
  Weights w;
  std::vector<bf16> numbers;
  explicit Shared13b(bool small) {
    c.vocab_size = 100352, c.dim = 2560, c.heads = 20, c.kv_heads = 4, c.head_dim = 128, c.ffn_dim = 6912;
    c.stages = {window(10, 3, 512), shared(10)};
    if (small) c.stages[0].layers = c.stages[1].layers = 1;
    std::mt19937 rng(1);
    numbers.resize(std::size_t(c.vocab_size * c.dim));
    for (bf16& v : numbers) v = __float2bfloat16((float(rng() % 2001) - 1000) * 3e-5f);
    for (const auto& s : c.stages) w.stages.emplace_back(std::size_t(s.layers));
    for_each_tensor(c, w, [&](const std::string&, const Shape& shape, Tensor& t) {
      Index rows = 1;
      for (std::size_t i = 0; i + 1 < shape.size(); ++i) rows *= shape[i];
      t = {numbers.data(), Dtype::bf16, rows, shape.back()};
    });
  }
  double step_bytes(Index batch, Index N) const {  // weights, window and global caches that one decode step reads
    const double self = 10 * 68.8e6 * 3, cross = 10 * 66.2e6, head = double(c.vocab_size * c.dim);
    const double ring = 30.0 * 512, global = 10.0 * double(N);
    return 2 * (self + cross + head) + double(batch) * (ring + global) * 2 * double(c.kv_dim()) * 2;
  }
  double prefill_flops_per_token() const {
    return 2 * (10 * 68.8e6 * 3 + double(2 * c.dim * c.kv_dim())) + 30.0 * 4 * double(c.q_dim()) * 512;
  }
};

double wall(const std::function<void()>& work) {
  const auto begin = std::chrono::steady_clock::now();
  work();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

void model(bool short_run) {
  const Shared13b m(false);
  heading("7-8. the 1.3B shape (YOCO-U, T = 3, W = 512): decode steps with the token drawn on the device");
  const std::vector<std::pair<Index, Index>> cells{{1, 65536}, {32, 8192}, {32, 65536}, {32, 262144}};
  for (const auto& [batch, N] : cells) {
    if (short_run && batch * N > 32 * 65536) continue;
    for (const int mode : {0, 1, 2}) {  // plain stream, graph, graph + PDL
      if (mode != 2 && N != 8192) continue;
      Rungs rungs;
      rungs.graphs = mode > 0, rungs.pdl = mode == 2;
      CudaEngine e(m.c, m.w, {Dtype::bf16, batch, batch * (N + 16), batch}, rungs);
      std::vector<Segment> pass;
      std::vector<int> token(1, 5), out(std::size_t(batch), 0);
      std::vector<double> u(std::size_t(batch), 0.5);
      for (Index i = 0; i < batch; ++i) {
        pass.push_back({e.open(), token, Logits::last});
        CudaEngineProbe::advance(e, pass.back().sequence, N);
      }
      for (int i = 0; i < 3; ++i) e.forward_sample(pass, {}, u, out.data());
      const double time = wall([&] {
        for (int i = 0; i < 8; ++i) e.forward_sample(pass, {}, u, out.data());
      }) / 8;
      line("batch " + std::to_string(batch) + ", N " + std::to_string(N) +
               (mode == 0      ? ", plain"
                   : mode == 1 ? ", graph"
                               : ", graph + PDL"),
          time, m.step_bytes(batch, N) / peak_bytes);
      std::printf("    %.0f tok/s\n", double(batch) / time);
    }
  }
  heading("8. the 1.3B shape: prefill, floor at the best cuBLASLt rate of step 4");
  for (const Index N : {8192, 65536}) {
    CudaEngine e(m.c, m.w, {Dtype::bf16, 8192, N, 1}, {});
    const std::vector<int> tokens(8192, 7);
    std::vector<float> logits(std::size_t(m.c.vocab_size));
    for (int run = 0; run < 2; ++run) {
      const int s = e.open();
      const double time = wall([&] {
        for (Index at = 0; at < N; at += 8192) {
          const Segment part{s, tokens, at + 8192 == N ? Logits::last : Logits::none};
          e.forward({&part, 1}, logits.data());
        }
      });
      e.close(s);
      if (run == 0) continue;
      line("prefill of " + std::to_string(N), time, m.prefill_flops_per_token() * double(N) / peak_flops);
      std::printf("    %.0f tok/s\n", double(N) / time);
    }
  }
}

/// `only`: all; right: steps 1 and 2, for the sanitizers; short: without the largest case.
int check(const std::string& only) {
  try {
    int device = 0, major = 0, clock = 0;
    CUDA_CHECK(cudaGetDevice(&device));
    CUDA_CHECK(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device));
    CUDA_CHECK(cudaDeviceGetAttribute(&clock, cudaDevAttrClockRate, device));
    cudaDeviceProp properties;
    CUDA_CHECK(cudaGetDeviceProperties(&properties, device));
    std::printf("%s, %d SMs, %.0f MHz at most\n", properties.name, properties.multiProcessorCount, clock / 1000.0);
    if (major != 9) return std::puts("this check needs a Hopper GPU (compute capability 9.0)"), 2;
    layouts();
    engine();
    if (only != "right") ceilings(), decode_products(), kernels(), model(only == "short");
  } catch (const std::exception& e) {
    std::printf("FAILED: %s\n", e.what());
    return 1;
  }
  std::printf("%s\n", failures ? "FAILED" : "all results right");
  return failures != 0;
}

}  // namespace
}  // namespace yocou

int main(int argc, char** argv) { return yocou::check(argc > 1 ? argv[1] : "all"); }
