/// @file
/// cuda_kernels.cpp -- the kernels and the whole CUDA engine, run by the emulator, against the double-precision
/// reference: every kind of stage, both sets of kernels, prompts in chunks, batches of unequal lengths, decode steps as
/// graphs.
#include <fstream>
#include <iterator>
#include <numeric>
#include <regex>

#include "catch.h"
#include "cuda_emulator.h"
//
#include "../kernels.cu"
//
#include "cuda_session.h"

using namespace yocou;

TEST_CASE("cuda engine: every arch, general kernels", "[cuda]") {
  emu::configure(emu::schedule(GENERATE(0, 3)));
  const Index D = 72, H = 4, G = 2, dh = 24, F = 100;
  SECTION("yoco-u") { scenario(base(D, H, G, dh, F, {window(2, 2, 5), shared(2)}), general()); }
  SECTION("transformer") { scenario(base(D, H, G, dh, F, {full(2, 1)}), general()); }
  SECTION("rins") {
    auto stages = std::vector{full(1, 2), full(1, 1)};
    stages[1].name = "top";
    scenario(base(D, H, G, dh, F, stages), general());
  }
  SECTION("upper-loop") { scenario(base(D, H, G, dh, F, {window(1, 1, 5), shared(1, 2)}), general()); }
  SECTION("upper-loop-unshared, rotated, half pairing, F32 caches, tied") {
    Config c = base(D, H, G, dh, F, {window(1, 1, 5), shared(1, 2, true)});
    c.stages[1].rope = true, c.rope_half = true, c.tied_embeddings = true, c.embed_scale = 0.5;
    scenario(c, general(), Dtype::f32);
  }
  SECTION("moe") {
    scenario(with_moe(base(D, H, G, dh, 0, {window(1, 2, 5), shared(1)}), {6, 2, 20, 12, true}), general());
  }
}

TEST_CASE("cuda engine: fast kernels", "[cuda]") {
  emu::configure(emu::schedule(GENERATE(0, 1, 2, 3)));
  SECTION("head_dim 64") { scenario(base(72, 2, 1, 64, 100, {window(1, 2, 5), shared(2)}), {}); }
  SECTION("head_dim 128, groups of 3, a window of more than a tile") {
    scenario(base(40, 6, 2, 128, 36, {window(1, 1, 70), shared(1)}), {}, Dtype::bf16, 8);
  }
  SECTION("full") { scenario(base(40, 2, 2, 64, 36, {full(1, 1)}), {}, Dtype::bf16, 12); }
  SECTION("moe") { scenario(with_moe(base(72, 2, 1, 64, 0, {window(1, 1, 5), shared(1)}), {6, 2, 20, 0, false}), {}); }
  SECTION("moe, prefill of more than 32 rows an expert") {
    scenario(with_moe(base(40, 2, 1, 64, 0, {window(1, 1, 5), shared(1)}), {2, 2, 20, 0, false}), {}, Dtype::bf16, 4);
  }
  SECTION("own products only") {
    Rungs rungs;
    rungs.library = rungs.skinny = false;
    scenario(base(72, 2, 1, 64, 100, {window(1, 1, 5), shared(1)}), rungs);
  }
}

TEST_CASE("cuda engine: sizes off every tile", "[cuda]") {
  emu::configure(emu::schedule(0));
  const Index dh = GENERATE(1, 8, 24, 40, 80, 96);
  Config c = base(41, 3, 1, dh, 35, {window(1, 1, 3), shared(1)});
  c.vocab_size = 67;
  for (Stage& s : c.stages) s.rope = dh % 2 == 0 && s.attention == Attention::window;
  Rungs rungs = general();
  rungs.skinny = GENERATE(false, true);
  scenario(c, rungs);
}

TEST_CASE("cuda engine: windows at the edges of chunks and tiles", "[cuda]") {
  emu::configure(emu::schedule(0));
  const Index W = GENERATE(1, 4, 8, 9, 10, 64, 65);
  CAPTURE(W);
  scenario(base(24, 2, 1, 64, 20, {window(1, 2, W), shared(1)}), {}, Dtype::bf16, W > 32 ? 8 : 1);
}

TEST_CASE("cuda engine: windows longer than a split", "[cuda]") {
  emu::configure(emu::schedule(GENERATE(0, 3)));
  const Config c = base(24, 2, 1, 64, 20, {window(1, 1, 600), shared(1)});
  const SmallModel m(c);
  const std::vector<std::vector<int>> tokens{random_tokens(640, c.vocab_size, 1), random_tokens(40, c.vocab_size, 2)};
  Session s(m, {}, tokens, Dtype::bf16, 600);
  s.pass({{0, 510}, {1, 37}});
  for (int i = 0; i < 3; ++i) s.pass({{0, 1}, {1, 1}});  // 511, 512 and 513 keys
  s.pass({{0, 120, Logits::none}});
  for (int i = 0; i < 2; ++i) s.pass({{0, 1}});
  Session alone(m, {}, tokens, Dtype::bf16, 600);
  for (int i = 0; i < 2; ++i) alone.pass({{0, 1}}), alone.pass({{0, 1}, {1, 1}});  // the buffer of parts grows between
  alone.pass({{0, 600, Logits::none}});
  alone.pass({{0, 1}});  // a step like the ones before, of a sequence of two splits
}

TEST_CASE("cuda engine: page edges", "[cuda]") {
  const auto [fast, edge, order] =
      GENERATE(table<bool, Index, unsigned>({{true, 256, 0}, {true, 512, 3}, {true, 256, 2}, {false, 256, 0}}));
  emu::configure(emu::schedule(order));
  const Config c = base(24, 2, 2, 64, 20, {full(1, 1), shared(1)});
  const SmallModel m(c);
  const std::vector<std::vector<int>> tokens{random_tokens(edge + 3, c.vocab_size, 1),
      random_tokens(edge + 3, c.vocab_size, 2), random_tokens(edge + 3, c.vocab_size, 3)};
  Session s(m, fast ? Rungs{} : general(), tokens, Dtype::bf16, 3 * edge);
  s.pass({{0, edge - 1}, {1, edge}, {2, edge + 1}});  // so that the sequences' pages are mixed
  s.pass({{0, 1}, {1, 1}, {2, 1}});
  s.pass({{0, 1}, {1, 1}, {2, 1}});
  s.pass({{0, 2, Logits::all}, {1, 1}});
}

TEST_CASE("cuda engine: mixtures of experts at their edges", "[cuda]") {
  emu::configure(emu::schedule(0));
  const auto rungs = GENERATE(0, 1) ? Rungs{} : general();
  const auto run = [&](const Moe& moe, Index scale = 3) {
    scenario(with_moe(base(40, 2, 1, 64, 0, {window(1, 1, 5), shared(1)}), moe), rungs, Dtype::bf16, scale);
  };
  SECTION("every expert") { run({5, 5, 12, 0, true}); }
  SECTION("one of many: most have no token") { run({33, 1, 12, 9, false}, /*scale=*/1); }
  SECTION("one expert") { run({1, 1, 12, 9, true}); }
  SECTION("a router of zeros: the first experts, at 1 / E each") {
    Config c = with_moe(base(40, 2, 1, 64, 0, {window(1, 1, 5), shared(1)}), {8, 2, 12, 0, false});
    SmallModel m(c);
    for (auto& stage : m.w.stages)
      for (auto& l : stage) {
        auto& zeros = m.storage.emplace_back(std::size_t(8 * 40));
        l.router.data = zeros.data();
      }
    const std::vector<std::vector<int>> tokens{random_tokens(40, c.vocab_size, 1)};
    Session s(m, rungs, tokens, Dtype::bf16, 33);
    for (const Index n : {1, 31, 1, 2}) s.pass({{0, n, Logits::all}});
  }
}

/// y = x W^T by one kernel, for rows gathered and grouped by expert, against double precision.
void check_product(int kernel, Index n, Index out, Index in, int experts, int active) {
  CAPTURE(kernel, n, out, in, experts, active);
  const Index ld = padded(in), assigned = n * active;
  std::mt19937 rng(unsigned(n * 31 + out * 7 + in));
  const auto random_matrix = [&](Index rows) {
    std::vector<bf16> m(std::size_t(rows * ld), __float2bfloat16(0.0f));
    for (Index r = 0; r < rows; ++r)
      for (Index c = 0; c < in; ++c) m[std::size_t(r * ld + c)] = __float2bfloat16(float(int(rng() % 257) - 128) / 64);
    return m;
  };
  const auto x = random_matrix(n), w = random_matrix(experts * out);
  std::vector<int> start{0}, order;  // assignments to experts, every third expert without any
  std::vector<std::vector<int>> of(std::size_t(experts), std::vector<int>{});
  for (Index i = 0; i < assigned; ++i) {
    const std::size_t e = rng() % unsigned(experts);
    of[experts > 2 && e % 3 == 1 ? 0 : e].push_back(int(i));
  }
  for (const auto& list : of) order.insert(order.end(), list.begin(), list.end()), start.push_back(int(order.size()));
  const auto to_device = [](const auto& host) {
    using T = std::decay_t<decltype(host[0])>;
    Buffer<T> device(Index(host.size()));
    std::memcpy(static_cast<void*>(device.get()), host.data(), host.size() * sizeof(T));
    return device;
  };
  const auto dx = to_device(x), dw = to_device(w);
  const auto dstart = to_device(start), dorder = to_device(order);
  const Buffer<float> y(assigned * out);
  const bool grouped = experts > 1;
  const Groups groups = grouped ? Groups{dstart.get(), experts, dorder.get(), active} : Groups{};
  const Buffer<Tally> tally(1, /*clear=*/true);
  const auto run = [&](const Block& block, Index tiles, auto product) {
    launch({dim3(unsigned(ceil_div(out, block.columns)), unsigned(tiles)), block}, product, dx.get(), dw.get(), in,
        y.get(), out, n, out, groups, tally.get());
  };
  const auto tiles = [&](const Block& block) { return ceil_div(assigned, block.rows) + (grouped ? experts : 0); };
  if (kernel == 0) run(tile_product_block, tiles(tile_product_block), product_tile<To::f32>);
  else if (kernel == 1) run(wgmma_product_block, tiles(wgmma_product_block), product_wgmma<To::f32>);
  else run(skinny_product_block<4>, experts, product_skinny<To::f32, 4>);
  CUDA_CHECK(cudaDeviceSynchronize());
  Index used = 0;
  for (std::size_t e = 0; e + 1 < start.size(); ++e) used += start[e] < start[e + 1];
  const auto total = [](const auto& places) { return std::accumulate(std::begin(places), std::end(places), 0ull); };
  CHECK(Index(total(tally.get()->flops)) == 2 * assigned * out * in);
  CHECK(Index(total(tally.get()->bytes)) == 2 * used * out * in);  // once each expert that has a row
  Index e = 0;
  for (Index i = 0; i < assigned; ++i) {
    while (i >= start[std::size_t(e) + 1] && grouped) ++e;
    const Index row = grouped ? order[std::size_t(i)] / active : i;
    for (Index o = 0; o < out; ++o) {
      double sum = 0, size = 0;
      for (Index k = 0; k < in; ++k) {
        const double term =
            double(to_float(x[std::size_t(row * ld + k)])) * double(to_float(w[std::size_t((e * out + o) * ld + k)]));
        sum += term, size += std::abs(term);
      }
      const double error = std::abs(double(y.get()[i * out + o]) - sum);  // a float32 sum of `in` terms in any order
      if (!(error <= double(in) * 0x1p-24 * size)) {
        CAPTURE(i, o, sum, y.get()[i * out + o]);
        FAIL("product differs");
      }
    }
  }
}

TEST_CASE("cuda products: every kernel, dense and by expert, off every tile", "[cuda]") {
  emu::configure(emu::schedule(GENERATE(0, 1, 2, 3)));
  const int kernel = GENERATE(0, 1, 2);
  check_product(kernel, 1, 1, 1, 1, 1);
  check_product(kernel, 17, 33, 72, 1, 1);
  check_product(kernel, 130, 129, 300, 1, 1);
  check_product(kernel, 70, 40, 136, 5, 2);
  check_product(kernel, 3, 20, 100, 7, 1);
}

TEST_CASE("kernels.cu: a kernel waits for the one before it before it does anything", "[cuda]") {
  // An early read looks fine in the emulator, which runs one kernel after another.
  std::ifstream file(YOCOU_SOURCE_DIR "/kernels.cu");
  const std::string text(std::istreambuf_iterator<char>(file), {});
  int kernels = 0;
  for (std::size_t at = 0; (at = text.find("\n__global__ ", at)) != std::string::npos || kernels == 0; ++kernels) {
    const std::size_t body = text.find(") {\n", at) + 4, wait = text.find("  grid_wait(), grid_launch();", body);
    const std::string name = text.substr(at, body - at), before = text.substr(body, wait - body);
    CAPTURE(name, before);
    // product_skinny first asks for weights, which no kernel writes; everything else is another kernel's
    if (name.find(" product_skinny(") == std::string::npos) CHECK(before.empty());
    else CHECK(!std::regex_search(before, std::regex("[^.\\w][xy]\\b|start\\[|order")));
    at = body;
  }
  CHECK(kernels == 19);
}

TEST_CASE("kernels.cu: every twin that a kernel names is a function of the CPU's program", "[cuda]") {
  const auto read = [](const std::string& name) {
    std::ifstream file(YOCOU_SOURCE_DIR "/" + name);
    return std::string(std::istreambuf_iterator<char>(file), {});
  };
  const std::string kernels = read("kernels.cu"), program = read("yocou.cpp");
  const std::regex line("Twins?: ([^\n]*)"), name("(\\w+)\\(\\)");
  int twins = 0;
  for (std::sregex_iterator l(kernels.begin(), kernels.end(), line), end; l != end; ++l) {
    const std::string names = (*l)[1];
    CAPTURE(names);
    CHECK(std::regex_search(names, name));
    for (std::sregex_iterator n(names.begin(), names.end(), name); n != end; ++n, ++twins) {
      // a definition or a declaration: a type in front, at the start of a line or of a class's
      const std::regex definition("\n *(\\[\\[nodiscard\\]\\] )?[A-Za-z_][\\w:<>,&* ]* [&*]?" + (*n)[1].str() + "\\(");
      CAPTURE((*n)[1].str());
      CHECK(std::regex_search(program, definition));
    }
  }
  CHECK(twins == 13);
}

TEST_CASE("cuda engine: more rows wanted than the head takes at once", "[cuda]") {
  emu::configure(emu::schedule(0));
  const bool early_stop = GENERATE(false, true);
  const Config c =
      base(24, 2, 1, 64, 20, early_stop ? std::vector{window(1, 1, 5), shared(1)} : std::vector{window(1, 1, 5)});
  const SmallModel m(c);
  const std::vector<std::vector<int>> tokens{random_tokens(270, c.vocab_size, 1), random_tokens(5, c.vocab_size, 2)};
  Session s(m, {}, tokens, Dtype::bf16, 275);
  s.pass({{1, 5, Logits::none}, {0, 270, Logits::all}});
}

TEST_CASE("cuda experts: assignments are sorted stably", "[cuda]") {
  emu::configure(emu::schedule(GENERATE(0, 1, 2, 3)));
  const Index n = GENERATE(1, 256, 700);
  const int E = 5;
  const Buffer<int> expert(n), start(E + 1), order(n), place(n);
  std::vector<std::vector<int>> of(E);
  std::mt19937 rng(3);
  for (Index i = 0; i < n; ++i) {
    expert.get()[i] = int(rng() % 4) + 1;  // nothing for the first
    of[std::size_t(expert.get()[i])].push_back(int(i));
  }
  launch({dim3(E), sort_block}, sort_by_expert, expert.get(), n, start.get(), order.get(), place.get());
  CUDA_CHECK(cudaDeviceSynchronize());
  int at = 0;
  for (int e = 0; e < E; ++e) {
    CHECK(start.get()[e] == at);
    for (const int i : of[std::size_t(e)]) {
      if (order.get()[at] != i || place.get()[i] != at) FAIL("assignment " << i << " of expert " << e);
      ++at;
    }
  }
  CHECK(start.get()[E] == n);
}

TEST_CASE("cuda engine: weights stored as BF16 and F16", "[cuda]") {
  emu::configure(emu::schedule(0));
  const SmallModel m(base(40, 2, 1, 64, 36, {window(1, 1, 5), shared(1)}));
  const auto tokens = random_tokens(9, m.c.vocab_size, 1);
  const auto logits = [&](const Weights& w) {
    CudaEngine engine(m.c, w, {Dtype::bf16, 9, 9, 1}, {});
    std::vector<float> out(9 * std::size_t(m.c.vocab_size));
    const Segment part{engine.open(), tokens, Logits::all};
    engine.forward({&part, 1}, out.data());
    return out;
  };
  std::deque<std::vector<std::uint16_t>> storage;
  Weights as_bf16 = m.w, as_f16 = m.w;
  const auto convert = [&](Weights& w, Dtype type) {
    for_each_tensor(m.c, w, [&](const std::string&, const Shape&, Tensor& t) {
      const float* from = static_cast<const float*>(t.data);
      auto& to = storage.emplace_back();
      for (Index i = 0; i < t.rows * t.cols; ++i)
        to.push_back(type == Dtype::bf16 ? __bfloat16_as_ushort(__float2bfloat16(from[i]))
                                         : __half_as_ushort(__float2half(from[i])));
      t = {to.data(), type, t.rows, t.cols};
    });
  };
  convert(as_bf16, Dtype::bf16), convert(as_f16, Dtype::f16);
  const auto expected = logits(m.w);
  CHECK(logits(as_bf16) == expected);
  CHECK(logits(as_f16) == expected);  // these weights are numbers that F16 has too
}

TEST_CASE("cuda engine: runs repeat bit by bit, alone and in company", "[cuda]") {
  emu::configure(emu::schedule(0));
  const Config c = with_moe(base(40, 2, 1, 64, 0, {window(1, 2, 20), shared(1)}), {6, 2, 20, 8, true});
  const SmallModel m(c);
  const auto a = random_tokens(40, c.vocab_size, 1), b = random_tokens(30, c.vocab_size, 2);
  const auto last = [&](bool company) {
    CudaEngine engine(c, m.w, {Dtype::bf16, 64, 80, 2}, {});
    const int first = engine.open(), second = engine.open();
    std::vector<float> out(2 * std::size_t(c.vocab_size));
    for (int i = 0; i < 8; ++i) {
      std::vector<Segment> pass{{first, std::span(a).subspan(std::size_t(5 * i), 5), Logits::last}};
      if (company) pass.push_back({second, std::span(b).subspan(std::size_t(i), 1), Logits::last});
      engine.forward(pass, out.data());
    }
    return std::vector(out.begin(), out.begin() + c.vocab_size);
  };
  const auto expected = last(false);
  CHECK(last(false) == expected);
  CHECK(last(true) == expected);
}

TEST_CASE("cuda engine: sequences close and others open", "[cuda]") {
  emu::configure(emu::schedule(0));
  const Config c = base(24, 2, 2, 64, 20, {full(1, 1)});
  const SmallModel m(c);
  const auto tokens = random_tokens(300, c.vocab_size, 1);
  CudaEngine engine(c, m.w, {Dtype::bf16, 300, 300, 2}, {});
  std::vector<float> first(std::size_t(c.vocab_size)), again(first);
  for (int i = 0; i < 4; ++i) {
    const int s = engine.open();
    const Segment part{s, std::span(tokens).subspan(0, 257 + std::size_t(i % 2)), Logits::last};
    engine.forward({&part, 1}, (i == 1 ? first : again).data());
    CHECK(engine.cache_bytes() == 2 * 512 * 2 * 64 * 2);
    engine.close(s);
    CHECK(engine.cache_bytes() == 0);
  }
  CHECK(first == again);
}

TEST_CASE("cuda engine: what it refuses, in one line", "[cuda]") {
  emu::configure(emu::schedule(0));
  const Config c = base(24, 2, 2, 64, 20, {full(1, 1)});
  const SmallModel m(c);
  CudaEngine engine(c, m.w, {Dtype::bf16, 4, 8, 1}, {});
  const int s = engine.open();
  CHECK_THROWS_AS(engine.open(), Error);
  std::vector<float> out(std::size_t(c.vocab_size));
  const auto run = [&](std::vector<int> tokens, int sequence) {
    const Segment part{sequence, tokens, Logits::last};
    engine.forward({&part, 1}, out.data());
  };
  CHECK_THROWS_AS(run({1, 2, 3, 4, 5}, s), Error);  // more rows than asked for
  CHECK_THROWS_AS(run({257}, s), Error);            // not in the vocabulary
  CHECK_THROWS_AS(run({-1}, s), Error);
  CHECK_THROWS_AS(run({1}, 1), Error);  // not open
  CHECK_NOTHROW(run({1, 2, 3, 4}, s));
  CHECK_NOTHROW(run({1, 2, 3, 4}, s));
  CHECK_THROWS_AS(run({1}, s), Error);  // more positions than asked for
  const_cast<float*>(static_cast<const float*>(m.w.embed.data))[5] = std::numeric_limits<float>::infinity();
  CudaEngine broken(c, m.w, {Dtype::bf16, 4, 8, 1}, {});
  const int token = 0;
  const Segment part{broken.open(), {&token, 1}, Logits::last};
  CHECK_THROWS_AS(broken.forward({&part, 1}, out.data()), Error);  // logits that are no numbers
  broken.close(part.sequence);
  const int other = 1;
  const Segment next{broken.open(), {&other, 1}, Logits::last};
  CHECK_NOTHROW(broken.forward({&next, 1}, out.data()));  // which is forgotten
  emu::options.major = 7;
  CHECK_THROWS_AS(make_cuda_engine(c, m.w, {Dtype::bf16, 4, 8, 1}), Error);
  emu::options.major = 8;
  CHECK_NOTHROW(make_cuda_engine(c, m.w, {Dtype::bf16, 4, 8, 1}));
  emu::configure(emu::schedule(0));
}

TEST_CASE("cuda engine: a launch that fails, in a graph or not, leaves the engine usable", "[cuda]") {
  const bool late = GENERATE(false, true);
  const Config c = base(24, 2, 2, 64, 20, {full(1, 1)});
  const SmallModel m(c);
  const auto tokens = random_tokens(4, c.vocab_size, 1);
  const auto run = [&](int fail_launch) {  // a prompt, then a step; the second launch of each is refused first
    emu::configure({late, /*seed=*/0});
    CudaEngine engine(c, m.w, {Dtype::bf16, 4, 8, 1}, {});
    const int s = engine.open();
    std::vector<float> logits(std::size_t(c.vocab_size));
    for (const std::size_t n : {3, 1}) {
      const Segment part{s, std::span(tokens).subspan(n == 1 ? 3 : 0, n), Logits::last};
      emu::options.fail_launch = fail_launch;
      if (fail_launch) CHECK_THROWS_AS(engine.forward({&part, 1}, logits.data()), Error);
      engine.forward({&part, 1}, logits.data());
    }
    return logits;
  };
  CHECK(run(2) == run(0));
}

TEST_CASE("cuda engine: more blocks than a grid has", "[cuda]") {
  emu::configure(emu::schedule(0));
  const SmallModel m(with_moe(base(8, 1, 1, 8, 0, {full(1, 1)}), {4096, 1, 1, 0, false}));
  CHECK_THROWS_AS(CudaEngine(m.c, m.w, {Dtype::bf16, 4000000, 1, 1}, general()), Error);
  CHECK_THROWS_AS(launch({dim3(1, 65536), gather_block}, gather_rows, nullptr, nullptr, Index(1), nullptr), Error);
}

TEST_CASE("cuda engine: tokens drawn on the device", "[cuda]") {
  emu::configure({/*late=*/true, /*seed=*/1});
  const Config c = base(24, 2, 2, 64, 20, {full(1, 1)});
  const SmallModel m(c);
  const auto a = random_tokens(7, c.vocab_size, 1), b = random_tokens(7, c.vocab_size, 2);
  CudaEngine engine(c, m.w, {Dtype::bf16, 8, 14, 2}, {}), twin(c, m.w, {Dtype::bf16, 8, 14, 2}, {});
  for (CudaEngine* e : {&engine, &twin}) e->open(), e->open();
  for (Index i = 0; i < 7; i += i ? 1 : 4) {
    const Index n = i ? 1 : 4;
    const std::vector<Segment> pass{{0, std::span(a).subspan(std::size_t(i), std::size_t(n)), Logits::last},
        {1, std::span(b).subspan(std::size_t(i), std::size_t(n)), Logits::last}};
    std::vector<float> logits(2 * std::size_t(c.vocab_size));
    std::vector<int> tokens(2, -1);
    twin.forward(pass, logits.data());
    engine.forward_sample(pass, {}, std::vector<double>{0.2, 0.7}, tokens.data());
    for (std::size_t r = 0; r < 2; ++r) {
      const auto row = logits.begin() + std::ptrdiff_t(r) * c.vocab_size;
      CHECK(tokens[r] == std::max_element(row, row + c.vocab_size) - row);
    }
  }
}

TEST_CASE("cuda engine: a tracer sees every application", "[cuda]") {
  emu::configure(emu::schedule(0));
  const Config c = with_moe(base(40, 2, 1, 64, 0, {window(2, 2, 20), shared(1)}), {6, 2, 20, 8, true});
  const SmallModel m(c);
  const auto tokens = random_tokens(7, c.vocab_size, 1);
  CudaEngine engine(c, m.w, {Dtype::bf16, 7, 7, 1}, {});
  std::vector<std::array<Index, 3>> seen;
  engine.on_layer = [&](const Application& a) {
    seen.push_back({a.stage, a.loop, a.layer});
    CHECK(a.x.size() == 7 * 40);
    if (a.stage >= 0) CHECK(std::accumulate(a.expert_load.begin(), a.expert_load.end(), Index(0)) == 7 * 2);
  };
  const Segment part{engine.open(), tokens, Logits::all};
  std::vector<float> out(7 * std::size_t(c.vocab_size));
  engine.forward({&part, 1}, out.data());
  CHECK(seen == std::vector<std::array<Index, 3>>{{-1, 0, 0}, {0, 0, 0}, {0, 0, 1}, {0, 1, 0}, {0, 1, 1}, {1, 0, 0}});
}

namespace {
/// What the program's own sampler draws, in double: sort, cut, walk.
int drawn(const std::vector<float>& logits, double temperature, int top_k, double top_p, double u) {
  std::vector<int> order(logits.size());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(
      order.begin(), order.end(), [&](int a, int b) { return logits[std::size_t(a)] > logits[std::size_t(b)]; });
  if (temperature == 0) return order[0];
  if (top_k > 0 && top_k < int(order.size())) order.resize(std::size_t(top_k));
  std::vector<double> p;
  double sum = 0, kept = 0;
  for (const int i : order)
    p.push_back(std::exp((double(logits[std::size_t(i)]) - double(logits[std::size_t(order[0])])) / temperature)),
        sum += p.back();
  std::size_t count = 0;
  while (count < p.size() && kept < top_p * sum) kept += p[count++];
  double left = u * kept;
  for (std::size_t i = 0; i < count; ++i)
    if ((left -= p[i]) < 0) return order[i];
  return order[count - 1];
}
}  // namespace

TEST_CASE("cuda sampling: what the sorted walk draws", "[cuda]") {
  emu::configure(emu::schedule(GENERATE(0, 3)));
  const Index V = GENERATE(1, 257, 1100), rows = 3;
  const bool coarse = GENERATE(false, true);  // many ties
  const auto [temperature, top_k, top_p] = GENERATE(table<float, int, float>(
      {{0, 0, 1}, {1, 0, 1}, {0.7f, 5, 1}, {1.3f, 0, 0.6f}, {1, 40, 0.9f}, {1e-40f, 0, 1}, {1, 1, 0.5f}}));
  CAPTURE(V, coarse, temperature, top_k, top_p);
  std::mt19937 rng(unsigned(V) + 5);
  std::normal_distribution<float> normal;
  const Buffer<float> logits(rows * V);
  const Buffer<double> u(rows);
  const Buffer<int> token(rows);
  for (Index i = 0; i < rows * V; ++i) logits.get()[i] = coarse ? float(int(rng() % 5)) - 2 : 3 * normal(rng);
  for (Index i = 0; i < rows; ++i) u.get()[i] = i == 0 ? 0 : double(rng() % 1000) / 1000;
  launch({dim3(unsigned(rows)), sample_block}, sample, logits.get(), int(V), temperature, top_k, top_p, u.get(),
      token.get());
  CUDA_CHECK(cudaDeviceSynchronize());
  for (Index i = 0; i < rows; ++i) {
    const std::vector<float> row(logits.get() + i * V, logits.get() + (i + 1) * V);
    // a draw that falls on the border between two tokens may fall on either side: float32 sums of up to V terms
    const double slack = 1e-5, at = u.get()[i];
    const double t = std::max(double(temperature), temperature > 0 ? 1e-30 : 0.0);
    const int low = drawn(row, t, top_k, double(top_p), std::max(0.0, at - slack));
    const int middle = drawn(row, t, top_k, double(top_p), at);
    const int high = drawn(row, t, top_k, double(top_p), std::min(1.0, at + slack));
    const int got = token.get()[i];
    CAPTURE(i, at, low, middle, high, got);
    CHECK((got == low || got == middle || got == high));
  }
}
