/// @file
/// cuda_hardware_check.cu -- what only a Hopper GPU can tell: are the instructions' layouts what the emulator takes them
/// for, do the kernels answer right at large shapes, and how fast are they against what this chip can do.
///
///   usage: cuda_hardware_check right | few | speed [short] [dry]
///     right: results      few: those that a sanitizer can do in its time      speed: timings
///     dry: no device is asked for, every row says so, and the check still comes to its end
///
/// cuda_hardware_check.sh runs all of it in order. Compiled with YOCOU_EMULATE the same rows run at small sizes on the
/// emulator, so that a row that no longer fits the kernels is found without a GPU; its times mean nothing.
#ifdef YOCOU_EMULATE
#include "cuda_emulator.h"
#endif
#include "../kernels.cu"
//
#include <chrono>
#include <cstdio>
#include <iostream>
#include <random>
#include <set>

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

// --- sizes: those of YOCO-U 1.3B, or what an emulator can do

#ifdef YOCOU_EMULATE
constexpr Index D = 72, F = 100, V = 300, layers = 1, T = 2, W = 96, batch = 2, chunk = 160, Ki = 20, runs = 1,
                chunks = 2;
constexpr Index copied = 1 << 16, rotated = 1 << 12;
#else
constexpr Index D = 2560, F = 6912, V = 100352, layers = 10, T = 3, W = 512, batch = 32, chunk = 8192, Ki = 1024;
constexpr Index runs = 5, chunks = 8;
constexpr Index copied = Index(4) << 30;     // bytes of the roofs' buffers
constexpr Index rotated = Index(256) << 20;  // bytes of weights that a product goes through in turn: five times L2
#endif
constexpr Index H = 20, G = 4, DH = 128;

// --- rows

bool dry = false;
int rows = 0;
double read_roof = 0, flop_roof = 0;  // bytes and FLOP a second: measured first

/// One row: `work` prints it. Where there is no device the row says so; where work throws it says why, and the check goes
/// on.
template <class Work>
void row(const std::string& name, Work&& work) {
  ++rows;
  if (dry) return void(std::printf("  | %-58s | no device |\n", name.c_str()));
  try {
    work();
  } catch (const std::exception& e) {
    ++failures;
    std::printf("  | %-58s | FAILED: %s |\n", name.c_str(), e.what());
  }
  std::fflush(stdout);
}
void heading(const char* text, const char* columns) { std::printf("%s\n  %s\n", text, columns); }
void verdict(const std::string& name, bool right, const std::string& what) {
  std::printf("  | %-58s | %s |\n", name.c_str(), what.c_str());
  failures += !right;
}
/// The least time that this chip's roofs allow; 0 where they were not measured.
double floor_of(double bytes, double flops) {
  return std::max(read_roof > 0 ? bytes / read_roof : 0, flop_roof > 0 ? flops / flop_roof : 0);
}
constexpr const char* timing_columns =
    "| what                                                       |    time us |   floor us |  share |   GB/s | "
    "TFLOP/s |\n"
    "  |---|---|---|---|---|---|";
void timing(const std::string& name, double time, double bytes, double flops, double floor) {
  std::printf("  | %-58s | %10.1f | %10.1f | %5.1f%% | %6.0f | %7.1f |\n", name.c_str(), time * 1e6, floor * 1e6,
      100 * floor / time, bytes / time / 1e9, flops / time / 1e12);
}
/// An object that several rows use, made by a row of its own.
template <class U>
U& need(const std::unique_ptr<U>& p) {
  if (!p) fail("what it needs could not be made");
  return *p;
}

// --- device memory with random contents

/// fill -- numbers in (-scale, scale), the same for the same seed.     grid any     block 256     bytes 2 count
__global__ void __launch_bounds__(256) fill(bf16* p, Index count, float scale, uint32_t seed) {
  grid_wait();
  for (Index i = Index(blockIdx.x) * 256 + threadIdx.x; i < count; i += Index(gridDim.x) * 256) {
    uint32_t h = uint32_t(i) * 2654435761u ^ uint32_t(i >> 32) ^ seed * 0x9e3779b9u;
    h = (h ^ h >> 15) * 0x85ebca6bu;
    h = (h ^ h >> 13) * 0xc2b2ae35u;
    h ^= h >> 16;
    p[i] = __float2bfloat16((float(h >> 8) / 8388608.0f - 1) * scale);
  }
}
void fill_random(bf16* p, Index count, float scale, uint32_t seed, cudaStream_t stream = nullptr) {
  const Index blocks = std::min<Index>(ceil_div(count, 256), 4096);
  if (count) launch({dim3(unsigned(blocks)), {256}, stream}, fill, p, count, scale, seed);
}
Buffer<bf16> random_buffer(Index count, float scale = 1, uint32_t seed = 1) {
  Buffer<bf16> b(count);
  fill_random(b.get(), count, scale, seed);
  return b;
}
template <class U>
Buffer<U> upload(const std::vector<U>& host) {
  Buffer<U> device(Index(host.size()));
  CUDA_CHECK(cudaMemcpy(device.get(), host.data(), host.size() * sizeof(U), cudaMemcpyHostToDevice));
  return device;
}
template <class U>
std::vector<U> download(const U* device, Index count) {
  std::vector<U> host(std::size_t(count), U{});
  CUDA_CHECK(cudaDeviceSynchronize());
  CUDA_CHECK(cudaMemcpy(host.data(), device, host.size() * sizeof(U), cudaMemcpyDeviceToHost));
  return host;
}

/// Median seconds of `work`'s launches, replayed as one graph: as in a decode step, the host does not limit them.
template <class Work>
double seconds(cudaStream_t stream, Work&& work) {
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t exec = nullptr;
  work();  // what allocates or chooses an algorithm does so here
  CUDA_CHECK(cudaStreamSynchronize(stream));
  CUDA_CHECK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeRelaxed));
  work();
  CUDA_CHECK(cudaStreamEndCapture(stream, &graph));
  CUDA_CHECK(cudaGraphInstantiate(&exec, graph, 0));
  CUDA_CHECK(cudaGraphDestroy(graph));
  cudaEvent_t begin, end;
  CUDA_CHECK(cudaEventCreate(&begin));
  CUDA_CHECK(cudaEventCreate(&end));
  std::vector<double> times;
  for (Index i = 0; i < runs; ++i) {
    CUDA_CHECK(cudaEventRecord(begin, stream));
    CUDA_CHECK(cudaGraphLaunch(exec, stream));
    CUDA_CHECK(cudaEventRecord(end, stream));
    CUDA_CHECK(cudaEventSynchronize(end));
    float ms = 0;
    CUDA_CHECK(cudaEventElapsedTime(&ms, begin, end));
    times.push_back(ms / 1000);
  }
  CUDA_CHECK(cudaEventDestroy(begin));
  CUDA_CHECK(cudaEventDestroy(end));
  CUDA_CHECK(cudaGraphExecDestroy(exec));
  std::sort(times.begin(), times.end());
  return times[times.size() / 2];
}
double wall(const std::function<void()>& work) {
  const auto begin = std::chrono::steady_clock::now();
  work();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

// --- the engine from inside: the only place of this file that knows how it calls its kernels

/// An operation of a pass: how often it occurs, what it must move and compute, and how to run it for the i-th layer.
struct Operation {
  std::string name;
  Index count;  ///< a pass; 0: part of the operation above
  double bytes, flops;
  Index turns;  ///< layers that take turns, so that L2 does not hold what they read
  std::function<void(Index)> work;
  std::function<void(Index)> less = {};  ///< what work does besides: timed alone, and taken off
};

struct CudaEngineProbe {
  static cudaStream_t stream(CudaEngine& e) { return e.stream_; }
  static bool has_library(CudaEngine& e) { return e.library_.found(); }

  /// y = x W^T by the kernel that the engine's rungs choose.
  template <To to>
  static void product(CudaEngine& e, const bf16* x, const Matrix& w, void* y, Index n) {
    e.product<to>(x, w, y, w.rows, n);
  }
  /// Random keys and values in every cache: such that some keys stand out.
  static void fill_caches(CudaEngine& e) {
    uint32_t seed = 100;
    for (auto& cache : e.caches_) {
      fill_random(reinterpret_cast<bf16*>(cache.k.get()), cache.k.bytes() / 2, 3, ++seed);
      fill_random(reinterpret_cast<bf16*>(cache.v.get()), cache.v.bytes() / 2, 1, ++seed);
    }
    CUDA_CHECK(cudaDeviceSynchronize());
  }
  /// The sequence has this length, whatever its caches hold.
  static void place(CudaEngine& e, int sequence, Index length) { e.sequences_[std::size_t(sequence)].length = length; }
  /// The pass's tables, embeddings and angles; random rows in normed_, where each operation expects them.
  static void prepare(CudaEngine& e, std::span<const Segment> pass) {
    e.prepare(pass);
    on(e, /*wanted=*/false);
    e.embed();
    fill_random(e.normed_.get(), e.normed_.count(), 1, /*seed=*/7, e.stream_);
  }
  /// The next operations are for all rows, or for those whose logits are wanted.
  static void on(CudaEngine& e, bool wanted) {
    const bool few = wanted && e.wanted_.n != e.all_.n;
    e.rows_ = few ? &e.wanted_ : &e.all_;
    e.state_ = few ? e.wanted_x_.get() : e.x_.get();
  }
  /// Application i of a stage's layers, in the order in which they run, up to the addition to X.
  static void mix(CudaEngine& e, Index stage, Index i) {
    const Stage& s = e.c_.stages[std::size_t(stage)];
    const Index kept = s.attention == Attention::shared ? std::ssize(e.caches_) - 1 : i, layer = i % s.layers;
    e.mix(Place{stage, i / s.layers, layer, kept}, e.layers_[std::size_t(stage)][std::size_t(layer)]);
  }
  /// Its products, without what lies between them.
  static void mix_products(CudaEngine& e, Index stage, Index i) {
    const auto& layers = e.layers_[std::size_t(stage)];
    const DeviceLayer& l = layers[std::size_t(i) % layers.size()];
    e.product<To::bf16>(e.normed_.get(), l.qkv, e.qkv_.get(), padded(l.qkv.rows), e.rows_->n);
    e.product<To::add>(e.heads_out_.get(), l.wo, e.state_, e.c_.dim, e.rows_->n);
  }
  /// What the heads of a stage answer to the prepared pass, [n, H dh].
  static std::vector<bf16> attention(CudaEngine& e, Index stage) {
    mix(e, stage, 0);
    return download(e.heads_out_.get(), e.all_.n * e.c_.q_dim());
  }
  /// The experts' FFN of layer 0.
  static void moe(CudaEngine& e) { e.moe(e.layers_[0][0]); }

  /// Everything that one pass launches, up to its logits: B sequences, `count` new rows each, behind N positions. `e` may
  /// be null where nothing is run; its pass must be prepared, and all its buffers hold what a pass has left there.
  static std::vector<Operation> operations(const Config& c, CudaEngine* e, Index B, Index count, Index N) {
    const Index n = B * count, self = c.stages[0].layers, cross = c.stages[1].layers, loops = c.stages[0].loops;
    const Index window = c.stages[0].window, passes = loops * self + cross, q = c.q_dim(), kv = c.kv_dim();

    const auto product = [&](const std::string& name, Index times, Index m, Index out, Index in, auto work) {
      return Operation{name + ", " + std::to_string(m) + " x " + std::to_string(out) + " x " + std::to_string(in),
          times, 2.0 * double(out * in + m * (in + out)), 2.0 * double(m * out * in), self, work};
    };
    const auto layer = [e](std::size_t stage, Index i) -> const DeviceLayer& {
      return e->layers_[stage][std::size_t(i) % e->layers_[stage].size()];
    };
    const double seen = double(std::min(N + count, window)), global = double(N + count);
    const double ring_bytes = count == 1 ? double(B) * seen * 4 * double(kv) : double(n) * 4 * double(kv + q);
    return {
        {"rope_table, embed_rows", 1, 6.0 * double(n * c.dim), 0, 1, [=](Index) { on(*e, false), e->embed(); }},
        {"rms_norm", 2 * passes, 6.0 * double(n * c.dim), 0, self,
            [=](Index i) { e->norm(e->x_.get(), nullptr, layer(0, i).attn_norm, n); }},
        product("product q k v", loops * self, n, q + 2 * kv, c.dim,
            [=](Index i) {
              e->product<To::bf16>(e->normed_.get(), layer(0, i).qkv, e->qkv_.get(), padded(q + 2 * kv), n);
            }),
        {"attention, window, with rotate_append", loops * self, ring_bytes, 4.0 * double(n * q) * seen, loops * self,
            [=](Index i) { mix(*e, 0, i); }, [=](Index i) { mix_products(*e, 0, i); }},
        {"  of which rotate_append", 0, 4.0 * double(n * (q + 2 * kv)), 0, loops * self,
            [=](Index i) {
              const Keys keys = e->keys_of(e->caches_[std::size_t(i)], Keys::ring, window, e->all_);
              e->append(e->all_,
                  {padded(q + 2 * kv), int(c.heads), int(c.kv_heads), int(c.head_dim), true, false, true, false}, keys,
                  keys);
            }},
        product("product o, added to X", loops * self, n, c.dim, q,
            [=](Index i) { e->product<To::add>(e->heads_out_.get(), layer(0, i).wo, e->x_.get(), c.dim, n); }),
        {"ffn", loops * self, 2.0 * double(3 * c.dim * c.ffn_dim) + 6.0 * double(n * c.ffn_dim),
            6.0 * double(n * c.dim * c.ffn_dim), self, [=](Index i) { e->ffn(layer(0, i).gate_up, layer(0, i).down); }},
        product("  of which product gate up", 0, n, 2 * c.ffn_dim, c.dim,
            [=](Index i) {
              e->product<To::bf16>(e->normed_.get(), layer(0, i).gate_up, e->gate_up_.get(), padded(2 * c.ffn_dim), n);
            }),
        product("  of which product down, added to X", 0, n, c.dim, c.ffn_dim,
            [=](Index i) { e->product<To::add>(e->hidden_.get(), layer(0, i).down, e->x_.get(), c.dim, n); }),
        {"global K^ V^: norm, product, append", 1, 4.0 * double(c.dim * kv + n * kv), 4.0 * double(n * c.dim * kv), 1,
            [=](Index) { e->project_global(e->plan_.loops.back()); }},
        product("product q, shared stage", cross, B, q, c.dim,
            [=](Index i) { e->product<To::bf16>(e->normed_.get(), layer(1, i).qkv, e->qkv_.get(), padded(q), B); }),
        {"attention, shared", cross, double(B) * global * 4 * double(kv), 4.0 * double(B * q) * global, cross,
            [=](Index i) { on(*e, true), mix(*e, 1, i); }, [=](Index i) { on(*e, true), mix_products(*e, 1, i); }},
        product("product o, shared stage", cross, B, c.dim, q,
            [=](Index i) { e->product<To::add>(e->heads_out_.get(), layer(1, i).wo, e->x_.get(), c.dim, B); }),
        {"ffn, shared stage", cross, 2.0 * double(3 * c.dim * c.ffn_dim), 6.0 * double(B * c.dim * c.ffn_dim), cross,
            [=](Index i) { on(*e, true), e->ffn(layer(1, i).gate_up, layer(1, i).down); }},
        {"head: norm, product, find_not_finite", 1, 2.0 * double(c.vocab_size * c.dim) + 8.0 * double(B * c.vocab_size),
            2.0 * double(B * c.vocab_size * c.dim), 1, [=](Index) { on(*e, true), e->head(0, B); }},
    };
  }
};
using Probe = CudaEngineProbe;

// --- 1. layouts and products, in exact integers

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
void probe(const std::string& name) {
  std::vector<bf16> a, b;
  for (int i = 0; i < 4096; ++i)
    a.push_back(__float2bfloat16(float(i * 7 % 11 - 5))), b.push_back(__float2bfloat16(float(i * 5 % 13 - 6)));
  const auto da = upload(a), db = upload(b);
  Buffer<float> y(4096);
  launch({dim3(1), {128, 8192 + 16}}, probe_wgmma<BMnMajor>, tensor_map(db.get(), 64, 64), da.get(), y.get());
  const auto got = download(y.get(), 4096);
  int wrong = 0;
  for (int r = 0; r < 64; ++r)
    for (int c = 0; c < 64; ++c) {
      float sum = 0;
      for (int k = 0; k < 64; ++k)
        sum += __bfloat162float(a[r * 64 + k]) * __bfloat162float(BMnMajor ? b[k * 64 + c] : b[c * 64 + k]);
      wrong += got[std::size_t(r * 64 + c)] != sum;
    }
  verdict(name, wrong == 0, wrong ? std::to_string(wrong) + " of 4096 WRONG" : "exact");
}

/// The kernels for a product, each the choice of an engine with these rungs.
struct Kind {
  const char* name;
  Rungs rungs;
  Index most_rows;
};
std::vector<Kind> kinds() {
  return {{"product_tile", {.hopper = false, .skinny = false, .library = false}, chunk},
      {"product_wgmma", {.skinny = false, .library = false}, chunk}, {"cuBLASLt", {.skinny = false}, chunk},
      {"product_skinny", {.library = false}, 32}};
}
/// Engines of a model of no interest, by kind: for their products.
std::map<std::string, std::unique_ptr<CudaEngine>> engines;
CudaEngine& engine_for(const Kind& k) {
  static const SmallModel m(base(64, 2, 1, 64, 64, {window(1, 1, 64), shared(1)}));
  auto& e = engines[k.name];
  if (!e) e = std::make_unique<CudaEngine>(m.c, m.w, EngineOptions{Dtype::bf16, 1, 1, 1}, k.rungs);
  if (k.rungs.library && !Probe::has_library(*e)) fail("cuBLASLt was not found");
  return *e;
}
double dot(const std::vector<bf16>& x, Index i, const std::vector<bf16>& w, Index o, Index in, double* size) {
  double sum = 0;
  for (Index k = 0; k < in; ++k) {
    const double term =
        double(__bfloat162float(x[std::size_t(i * in + k)])) * __bfloat162float(w[std::size_t(o * in + k)]);
    sum += term, *size += std::abs(term);
  }
  return sum;
}

void layouts() {
  heading("1. layouts, exact integers", "| what | result |\n  |---|---|");
  const auto tma = [](const char* name, auto&& work) { row(name, [&] { work(name); }); };
  tma("TMA 128-byte swizzle, wgmma m64n64 K-major, A in registers", probe<false>);
  tma("the same, B MN-major", probe<true>);
  for (const Kind& k : kinds())
    for (const Index n : {3, 30, 70, 130}) {
      if (n > k.most_rows) continue;
      const Index out = 200, in = 328;
      const std::string name = std::string(k.name) + ", " + std::to_string(n) + " x 200 x 328";
      row(name, [&] {
        CudaEngine& e = engine_for(k);
        std::vector<bf16> x, w;
        for (Index i = 0; i < n * in; ++i) x.push_back(__float2bfloat16(float(i * 7 % 11 - 5)));
        for (Index i = 0; i < out * in; ++i) w.push_back(__float2bfloat16(float(i * 5 % 13 - 6)));
        const auto dx = upload(x);
        const Matrix matrix{upload(w), out, in};
        Buffer<float> y(n * out);
        Probe::product<To::f32>(e, dx.get(), matrix, y.get(), n);
        const auto got = download(y.get(), n * out);
        int wrong = 0;
        double size = 0;
        for (Index i = 0; i < n; ++i)
          for (Index o = 0; o < out; ++o) wrong += double(got[std::size_t(i * out + o)]) != dot(x, i, w, o, in, &size);
        verdict(name, wrong == 0, wrong ? std::to_string(wrong) + " WRONG" : "exact");
      });
    }
}

// --- 2. results at small and large shapes

void small_models() {
  heading("2. whole engine against double precision, small models", "| what | result |\n  |---|---|");
  for (const bool fast : {false, true}) {
    const Rungs rungs = fast ? Rungs{} : general();
    const auto model = [&](const std::string& what, const Config& c, Index scale = 1) {
      const std::string name = std::string(fast ? "fast" : "general") + " kernels, " + what;
      row(name, [&] {
        const int before = failures;
        worst_error = 0;
        scenario(c, rungs, Dtype::bf16, scale);
        verdict(name, true,
            (failures == before ? "" : "WRONG, ") + std::string("worst error ") + std::to_string(worst_error) +
                " of the largest logit, limit 0.02");
      });
    };
    model("window and shared stage, head_dim 64", base(72, 2, 1, 64, 100, {window(1, 2, 5), shared(2)}));
    model("head_dim 128, 3 query heads a KV head", base(40, 6, 2, 128, 36, {window(1, 1, 70), shared(1)}), 8);
    model("full stage", base(40, 2, 2, 64, 36, {full(1, 1)}), 12);
    model("experts", with_moe(base(72, 2, 1, 64, 0, {window(1, 1, 5), shared(1)}), {6, 2, 20, 12, true}));
  }
}

/// A model whose tensors are all views of one block of random numbers; gains are about 1.
struct LargeModel {
  Config c;
  Weights w;
  std::vector<bf16> numbers;
  std::vector<float> gains;
  explicit LargeModel(const Config& config) : c(config) {
    Index most = c.dim;
    for (const auto& s : c.stages) w.stages.emplace_back(std::size_t(s.layers));
    const auto size = [](const Shape& shape) {
      Index rows = 1;
      for (std::size_t i = 0; i + 1 < shape.size(); ++i) rows *= shape[i];
      return rows;
    };
    for_each_tensor(c, w,
        [&](const std::string&, const Shape& shape, Tensor&) { most = std::max(most, size(shape) * shape.back()); });
    std::mt19937 rng(1);
    numbers.resize(std::size_t(dry ? 0 : most));
    for (bf16& v : numbers) v = __float2bfloat16((float(rng() % 2001) - 1000) * 3e-5f);
    for (Index i = 0; i < c.dim; ++i) gains.push_back(0.9f + 0.0002f * float(rng() % 1001));
    for_each_tensor(c, w, [&](const std::string&, const Shape& shape, Tensor& t) {
      t = {numbers.data(), Dtype::bf16, size(shape), shape.back()};
      if (shape.size() == 1) t = {gains.data(), Dtype::f32, 1, shape.back()};
    });
  }
};
Config yoco_u(Index vocabulary, Index self, Index cross) {
  Config c = base(D, H, G, DH, F, {window(self, T, W), shared(cross)});
  c.vocab_size = vocabulary;
  return c;
}

void large_shapes() {
  heading("3. large shapes", "| what | result |\n  |---|---|");
  // 256 outputs spread over the result, in double precision. Each of the in/8 or fewer instructions that a sum passes
  // through rounds or truncates once, by at most 2^-23 of what the terms add up to without their signs.
  for (const Kind& k : kinds()) {
    const Index n = k.most_rows, out = 2 * F, in = D;
    const std::string name = std::string(k.name) + ", " + std::to_string(n) + " x " + std::to_string(out) + " x " +
                             std::to_string(in) + ", 256 outputs";
    row(name, [&] {
      CudaEngine& e = engine_for(k);
      const auto dx = random_buffer(n * in, 1, 1);
      const Matrix matrix{random_buffer(out * in, 1, 2), out, in};
      Buffer<float> y(n * out);
      Probe::product<To::f32>(e, dx.get(), matrix, y.get(), n);
      const auto got = download(y.get(), n * out);
      const auto x = download(dx.get(), n * in), w = download(matrix.data.get(), out * in);
      double worst = 0;
      for (Index s = 0; s < 256; ++s) {
        const Index i = (s * 7919 + n - 1) % n, o = (s * 104729 + out - 1) % out;
        double size = 0;
        const double expected = dot(x, i, w, o, in, &size);
        const double error = std::abs(got[std::size_t(i * out + o)] - expected) / (size * double(in / 8) / 8388608);
        worst = error <= worst ? worst : error;  // also when it is not a number
      }
      verdict(
          name, worst <= 1, "worst error " + std::to_string(worst) + " of the limit" + (worst <= 1 ? "" : ": WRONG"));
    });
  }
  // attention: the fast kernels against the general ones, which step 2 has compared with double precision
  const LargeModel m(yoco_u(/*vocabulary=*/64, 1, 1));
  const auto compare = [&](const std::string& name, Index stage, const std::vector<Index>& lengths, Index count) {
    row(name, [&] {
      std::vector<bf16> answers[2];
      Index tokens = 0;
      for (const Index length : lengths) tokens += length + count;
      const std::vector<int> token(std::size_t(count), 5);
      for (const bool fast : {false, true}) {
        CudaEngine e(m.c, m.w, {Dtype::bf16, Index(lengths.size()) * count, tokens, Index(lengths.size())},
            fast ? Rungs{} : general());
        Probe::fill_caches(e);
        std::vector<Segment> pass;
        for (const Index length : lengths) {
          pass.push_back({e.open(), token, Logits::all});
          Probe::place(e, pass.back().sequence, length);
        }
        Probe::prepare(e, pass);
        answers[fast] = Probe::attention(e, stage);
      }
      double worst = 0, largest = 0;
      for (std::size_t i = 0; i < answers[0].size(); ++i) {
        const double a = __bfloat162float(answers[0][i]), b = __bfloat162float(answers[1][i]);
        largest = std::max(largest, std::abs(a));
        worst = std::abs(a - b) <= worst ? worst : std::abs(a - b);
      }
      // P and the outputs are rounded to BF16: 2^-9 each of the largest; a lost or doubled key among those that stand
      // out is far more
      verdict(name, worst <= 0.02 * largest,
          "worst difference " + std::to_string(worst / largest) + " of the largest output, limit 0.02" +
              (worst <= 0.02 * largest ? "" : ": WRONG"));
    });
  };
  compare("attention, shared, one row behind 64K, 64K - 1 and 777", 1, {64 * Ki, 64 * Ki - 1, 777 * Ki / 1024 + 1}, 1);
  compare("attention, window, one row behind 8K, W - 1 and 3", 0, {8 * Ki, W - 1, 3}, 1);
  compare("attention, window, a quarter of a chunk behind a full ring", 0, {8 * Ki}, chunk / 4);
  compare("attention, shared, a quarter of a chunk behind 1000", 1, {1000 * Ki / 1024}, chunk / 4);
}

// --- 4. what the chip can do

/// read_all -- sums 16-byte pieces.     grid blocks x 512, 8 loads in flight a thread     bytes 16 count
__global__ void __launch_bounds__(512) read_all(const uint4* p, Index count, uint32_t* sink) {
  grid_wait();
  const Index threads = Index(gridDim.x) * 512;
  uint32_t sum = 0;
  for (Index i = Index(blockIdx.x) * 512 + threadIdx.x; i + 7 * threads < count; i += 8 * threads) {
    uint4 v[8];
    UNROLL for (int j = 0; j < 8; ++j) v[j] = load_here(p + i + j * threads);
    UNROLL for (int j = 0; j < 8; ++j) sum ^= v[j].x ^ v[j].y ^ v[j].z ^ v[j].w;
  }
  if (sum == 0x12345678) *sink = sum;  // so that the loads are needed
}

void roofs() {
  heading("4. roofs of this chip", "| what | rate |\n  |---|---|");
  const auto rate = [](const std::string& name, double value, const char* unit) {
    std::printf("  | %-58s | %.0f %s |\n", name.c_str(), value, unit);
  };
  cudaStream_t stream = nullptr;
  row("stream", [&] {
    CUDA_CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    std::printf("  | %-58s | made |\n", "stream");
  });
  row("copy, 4 GiB to 4 GiB", [&] {
    const auto a = random_buffer(copied / 2);
    const Buffer<bf16> b(copied / 2);
    CUDA_CHECK(cudaDeviceSynchronize());
    const double copy_roof = 2.0 * double(copied) / seconds(stream, [&] {
      CUDA_CHECK(cudaMemcpyAsync(b.get(), a.get(), std::size_t(copied), cudaMemcpyDeviceToDevice, stream));
    });
    rate("copy, read and written", copy_roof / 1e9, "GB/s");
  });
  row("read, 4 GiB", [&] {
    const auto a = random_buffer(copied / 2);
    const Buffer<uint32_t> sink(1);
    CUDA_CHECK(cudaDeviceSynchronize());
    const unsigned blocks = unsigned(std::min<Index>(copied / (16 * 8 * 512), 1024));
    read_roof = double(copied) / seconds(stream, [&] {
      launch({dim3(blocks), {512}, stream}, read_all, reinterpret_cast<const uint4*>(a.get()), copied / 16, sink.get());
    });
    rate("read: the floor of all that follows", read_roof / 1e9, "GB/s");
  });
  if (stream) cudaStreamDestroy(stream);
}

/// Products of the model, by each kernel; random weights that take turns. The first rows find the roof of arithmetic.
void products(bool brief) {
  heading("5. products, weights in turn through more than L2; floor: read roof or best cuBLASLt rate so far",
      timing_columns);
  const std::vector<std::pair<Index, Index>> shapes{{(H + 2 * G) * DH, D}, {D, H * DH}, {2 * F, D}, {D, F}};
  for (const Index n : brief ? std::vector<Index>{chunk, batch} : std::vector<Index>{chunk, chunk / 2, batch, 8, 1})
    for (const auto& shape : shapes)
      for (const char* name : {"cuBLASLt", "product_wgmma", "product_skinny"}) {
        const auto all = kinds();
        const Kind& k =
            *std::find_if(all.begin(), all.end(), [&](const Kind& a) { return a.name == std::string(name); });
        if (n > k.most_rows || (n <= 32 && k.name == std::string("product_wgmma"))) continue;
        const auto [out, in] = shape;
        const std::string what =
            "product " + std::to_string(n) + " x " + std::to_string(out) + " x " + std::to_string(in) + ", " + k.name;
        row(what, [&, out = out, in = in] {
          CudaEngine& e = engine_for(k);
          const Index copies = n > 32 ? 1 : rotated / (out * in * 2) + 1;
          const auto x = random_buffer(n * in, 1, 3);
          std::vector<Matrix> w;
          for (Index i = 0; i < copies; ++i) w.push_back({random_buffer(out * in, 0.03f, uint32_t(10 + i)), out, in});
          Buffer<bf16> y(n * out);
          CUDA_CHECK(cudaDeviceSynchronize());
          const double time = seconds(Probe::stream(e), [&] {
            for (const Matrix& m : w) Probe::product<To::bf16>(e, x.get(), m, y.get(), n);
          }) / double(copies);
          const double flops = 2.0 * double(n * out * in), bytes = 2.0 * double(out * in + n * (in + out));
          if (k.name == std::string("cuBLASLt")) flop_roof = std::max(flop_roof, flops / time);
          timing(what, time, bytes, flops, floor_of(bytes, flops));
        });
      }
  row("roof of arithmetic: the best of these", [&] {
    if (flop_roof <= 0) fail("no cuBLASLt: floors are those of the bytes alone");
    std::printf("  | %-58s | %.0f TFLOP/s |\n", "roof of arithmetic: the best of these", flop_roof / 1e12);
  });
}

// --- 6. passes of the 1.3B shape

/// Times every operation of the engine's prepared pass, and adds the pass up; `measured`: what the whole pass took.
void add_up(
    const Config& c, const std::unique_ptr<CudaEngine>& e, Index B, Index count, Index N, const char* only = "") {
  double total = 0, floors = 0, bytes = 0, flops = 0;
  const auto ops = Probe::operations(c, e.get(), B, count, N);
  for (const Operation& op : ops) {
    if (op.name.find(only) == std::string::npos) continue;
    const std::string name = op.name + (op.count ? ", " + std::to_string(op.count) + " a pass" : "");
    row(name, [&] {
      const auto timed = [&](const std::function<void(Index)>& work) {
        return seconds(Probe::stream(need(e)), [&] {
          for (Index i = 0; i < op.turns; ++i) work(i);
        }) / double(op.turns);
      };
      const double time = op.less ? timed(op.work) - timed(op.less) : timed(op.work);
      const double floor = floor_of(op.bytes, op.flops);
      timing(name, time, op.bytes, op.flops, floor);
      total += double(op.count) * time, floors += double(op.count) * floor;
      bytes += double(op.count) * op.bytes, flops += double(op.count) * op.flops;
    });
  }
  if (!*only)
    row("all of them, each as often as a pass has it",
        [&] { timing("all of them, each as often as a pass has it", total, bytes, flops, floors); });
}
double pass_floor(const Config& c, Index B, Index count, Index N, double* bytes, double* flops) {
  double floor = 0;
  for (const Operation& op : Probe::operations(c, nullptr, B, count, N)) {
    floor += double(op.count) * floor_of(op.bytes, op.flops);
    *bytes += double(op.count) * op.bytes, *flops += double(op.count) * op.flops;
  }
  return floor;
}

struct Decoder {
  std::unique_ptr<CudaEngine> e;
  std::vector<Segment> pass;
  std::vector<int> token{5};
  std::vector<int> out;
  std::vector<double> u;
  Decoder(const LargeModel& m, Index most, const Rungs& rungs) : out(std::size_t(batch)), u(std::size_t(batch), 0.5) {
    e = std::make_unique<CudaEngine>(m.c, m.w, EngineOptions{Dtype::bf16, batch, batch * (most + 256), batch}, rungs);
    Probe::fill_caches(*e);
    for (Index i = 0; i < batch; ++i) pass.push_back({e->open(), token, Logits::last});
  }
  std::span<const Segment> first(Index B, Index N) {  // the first B sequences, each of length N
    for (Index i = 0; i < batch; ++i) Probe::place(*e, pass[std::size_t(i)].sequence, i < B ? N : 0);
    return {pass.data(), std::size_t(B)};
  }
};
enum class Draw { none, greedy, top_p };

void decoding(const LargeModel& m, bool brief) {
  std::unique_ptr<Decoder> graph_pdl, graph, plain;
  const Index most = (brief ? 64 : 256) * Ki;
  const auto make = [&](std::unique_ptr<Decoder>& d, const char* name, Index positions, const Rungs& rungs) {
    row(name, [&] {
      const double time = wall([&] { d = std::make_unique<Decoder>(m, positions, rungs); });
      std::printf("  | %-58s | %10.1f |\n", name, time * 1e6);
    });
  };
  const auto step = [&](std::unique_ptr<Decoder>& d, const std::string& how, Index B, Index N, Draw draw) {
    const std::string name = "step, " + how + ", batch " + std::to_string(B) + ", N " + std::to_string(N);
    row(name, [&] {
      const auto pass = need(d).first(B, N);
      const Sampling sampling = draw == Draw::top_p ? Sampling{0.8, 0, 0.9} : Sampling{};
      const std::span<const double> u{d->u.data(), std::size_t(B)};
      const auto one = [&] {
        draw == Draw::none ? d->e->forward(pass, nullptr) : d->e->forward_sample(pass, sampling, u, d->out.data());
      };
      for (int i = 0; i < 3; ++i) one();
      const Index times = 8 * runs / 5 + 1;  // at most 12 positions in all: N - 16 stays below N
      const double time = wall([&] {
        for (Index i = 0; i < times; ++i) one();
      }) / double(times);
      double bytes = 0, flops = 0;
      const double floor = pass_floor(m.c, B, 1, N, &bytes, &flops);
      timing(name, time, bytes, flops, floor);
      std::printf("    %.0f tok/s\n", double(B) / time);
    });
  };
  heading("6. decode steps of YOCO-U 1.3B (T = 3, W = 512); N - 16 and N: a length past a power of two has more splits",
      timing_columns);
  make(graph_pdl, "engine made: graph, programmatic dependent launch", most, {});
  for (const Index N : {8 * Ki, 64 * Ki, 256 * Ki})
    for (const Index length : {N - 16, N})
      if (N <= most) step(graph_pdl, "greedy", batch, length, Draw::greedy);
  step(graph_pdl, "greedy", 1, 64 * Ki - 16, Draw::greedy);
  step(graph_pdl, "no token drawn", batch, 8 * Ki - 16, Draw::none);
  step(graph_pdl, "top-p 0.9 at temperature 0.8", batch, 8 * Ki - 16, Draw::top_p);
  heading("7. the operations of one such step, batch 32, N = 8K", timing_columns);
  const auto prepare = [&](Index B, Index N) {
    const std::string name = "pass prepared: batch " + std::to_string(B) + ", N " + std::to_string(N);
    row(name, [&] {
      Probe::prepare(*need(graph_pdl).e, graph_pdl->first(B, N));
      std::printf("  | %-58s | |\n", name.c_str());
    });
  };
  static const std::unique_ptr<CudaEngine> none;
  prepare(batch, 8 * Ki - 16);
  add_up(m.c, graph_pdl ? graph_pdl->e : none, batch, 1, 8 * Ki - 16);
  for (const auto& [B, N] : {std::pair<Index, Index>{batch, 64 * Ki - 16}, {1, 64 * Ki - 16}}) {
    prepare(B, N);
    add_up(m.c, graph_pdl ? graph_pdl->e : none, B, 1, N, "attention, shared");
  }
  graph_pdl.reset();
  if (brief) return;
  heading("8. the same step in other ways", timing_columns);
  make(graph, "engine made: graph, no dependent launch", 8 * Ki, {.pdl = false});
  step(graph, "graph only", batch, 8 * Ki - 16, Draw::greedy);
  graph.reset();
  make(plain, "engine made: launches one by one", 8 * Ki, {.graphs = false});
  step(plain, "launch by launch", batch, 8 * Ki - 16, Draw::greedy);
}

void prefill(const LargeModel& m, bool brief) {
  heading("9. prefill of YOCO-U 1.3B, chunks of 8,192", timing_columns);
  std::unique_ptr<CudaEngine> e;
  row("engine made", [&] {
    const double time = wall([&] {
      e = std::make_unique<CudaEngine>(m.c, m.w, EngineOptions{Dtype::bf16, chunk, chunks * chunk, 1}, Rungs{});
      if (!Probe::has_library(*e)) e.reset(), fail("cuBLASLt was not found");
    });
    std::printf("  | %-58s | %10.1f |\n", "engine made", time * 1e6);
  });
  const std::vector<int> tokens = random_tokens(chunk, m.c.vocab_size, 3);
  std::vector<float> logits(std::size_t(m.c.vocab_size));
  const auto prompt = [&](int s, Index count) {
    for (Index i = 0; i < count; ++i) {
      const Segment part{s, tokens, i + 1 == count ? Logits::last : Logits::none};
      e->forward({&part, 1}, logits.data());
    }
  };
  for (const Index count : brief ? std::vector<Index>{1} : std::vector<Index>{1, chunks}) {
    const std::string name = "prefill of " + std::to_string(count * chunk);
    row(name, [&] {
      double time = 0;
      for (int run = 0; run < (count == 1 ? 2 : 1); ++run) {  // the first is the warm-up
        const int s = need(e).open();
        time = wall([&] { prompt(s, count); });
        e->close(s);
      }
      double bytes = 0, flops = 0, floor = 0;
      for (Index i = 0; i < count; ++i) floor += pass_floor(m.c, 1, chunk, i * chunk, &bytes, &flops);
      timing(name, time, bytes, flops, floor);
      std::printf("    %.0f tok/s\n", double(count * chunk) / time);
    });
  }
  heading("10. the operations of the last chunk of 16,384", timing_columns);
  row("pass prepared", [&] {
    const int s = need(e).open();
    Probe::place(*e, s, chunk);
    const Segment part{s, tokens, Logits::last};
    Probe::prepare(*e, {&part, 1});
    std::printf("  | %-58s | |\n", "pass prepared");
  });
  add_up(m.c, e, 1, chunk, chunk);
}

/// What the 1.3B shape does not have: attention over all of a prompt, and experts (64 of 1,024, 8 active).
void others() {
  heading("11. full attention of a prompt; experts", timing_columns);
  const std::string full_name = "attention, full, " + std::to_string(chunk) + " rows";
  row(full_name, [&] {
    Config c = base(D, H, G, DH, F, {full(1, 1)});
    const LargeModel m(c);
    CudaEngine e(m.c, m.w, {Dtype::bf16, chunk, chunk, 1}, {});
    const std::vector<int> tokens = random_tokens(chunk, c.vocab_size, 3);
    const Segment part{e.open(), tokens, Logits::last};
    Probe::fill_caches(e);
    Probe::prepare(e, {&part, 1});
    const double time = seconds(Probe::stream(e), [&] { Probe::mix(e, 0, 0); }) -
                        seconds(Probe::stream(e), [&] { Probe::mix_products(e, 0, 0); });
    const double flops = 2.0 * double(H * DH * chunk) * double(chunk + 1), bytes = 4.0 * double(chunk * DH * (H + G));
    timing(full_name, time, bytes, flops, floor_of(bytes, flops));
  });
  constexpr Index E = 64, active = 8, Fe = F == 6912 ? 1024 : 40;
  for (const Index n : {batch, chunk}) {
    const std::string name = "experts' FFN, " + std::to_string(n) + " rows x 8 of 64";
    row(name, [&] {
      const LargeModel m(with_moe(base(D, H, G, DH, 0, {window(1, 1, W), shared(1)}), {E, active, Fe, 0, true}));
      CudaEngine e(m.c, m.w, {Dtype::bf16, n, n, 1}, {});
      const std::vector<int> tokens = random_tokens(n, m.c.vocab_size, 3);
      const Segment part{e.open(), tokens, Logits::last};
      Probe::prepare(e, {&part, 1});
      const double time = seconds(Probe::stream(e), [&] { Probe::moe(e); });
      const double flops = 6.0 * double(n * active * D * Fe), bytes = 6.0 * double(E * D * Fe);
      timing(name, time, bytes, flops, floor_of(bytes, flops));
    });
  }
}

int check(const std::set<std::string>& what) {
  dry = what.contains("dry");
  const bool brief = what.contains("short");
  int major = 0;
  if (!dry) {
    cudaDeviceProp properties{};
    if (cudaGetDeviceProperties(&properties, 0) != cudaSuccess) {
      std::puts("no device, or no driver for it: every row says so");
      dry = true;
    } else {
      std::printf("%s, %d SMs\n", properties.name, properties.multiProcessorCount);
      CUDA_CHECK(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, 0));
      if (major != 9) return std::puts("FAILED: this check needs a Hopper GPU (compute capability 9.0)"), 2;
    }
  }
  if (what.contains("right") || what.contains("few")) layouts(), small_models();
  if (what.contains("right")) large_shapes();
  engines.clear();
  if (what.contains("speed")) {
    roofs(), products(brief);
    engines.clear();
    const LargeModel m(yoco_u(V, layers, layers));
    decoding(m, brief), prefill(m, brief);
    if (!brief) others();
  }
  if (dry) std::printf("end of the check: %d rows, none run: no device\n", rows);
  else std::printf("end of the check: %d rows, %d failures\n", rows, failures);
  return failures ? 1 : dry && !what.contains("dry") ? 2 : 0;
}

}  // namespace
}  // namespace yocou

int main(int argc, char** argv) {
  try {
    return yocou::check({argv + 1, argv + argc});
  } catch (const std::exception& e) {
    std::printf("FAILED: %s\n", e.what());
    return 1;
  }
}
