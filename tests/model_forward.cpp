/// @file
/// model_forward.cpp -- the whole forward pass against the oracle.
#include "fixtures.h"

namespace yocou::test {
namespace {

TEST_CASE("the oracle by hand: one token through a model that adds nothing", "[oracle][portable]") {
  // wo and w_down are zero, so X stays embed * scale: logits = norm(X) head^T.
  Config c = small_config({window(1, 2, 3), shared(1)});
  c.vocab_size = 2, c.dim = 2, c.embed_scale = 2, c.norm_eps = 3.5;
  Toy toy(c);
  for (const char* name : {"low.0.wo", "low.0.w_down", "top.0.wo", "top.0.w_down"})
    toy.set(name, [](Index, Index, float) { return 0.f; });
  toy.set("embed", [](Index r, Index k, float) { return r == 0 ? (k == 0 ? 1.5f : 2.f) : 0.f; });  // X = (3, 4)
  toy.set("norm", [](Index, Index k, float) { return static_cast<float>(k + 1); });                // (0.75, 2)
  toy.set("head", [](Index r, Index k, float) { return r == 0 ? (k == 0 ? 4.f : 0.f) : 0.5f; });
  const oracle::Matrix logits = oracle::forward(toy.c, toy.w, {0, 1}).logits;
  CHECK(logits[0] == Doubles{3, 1.375});
  CHECK(logits[1] == Doubles{0, 0});  // a row of zeros
  same(run_all(toy, {0, 1}), Floats{3, 1.375f, 0, 0});
}

TEST_CASE("the oracle by hand: routing", "[oracle]") {
  const Moe plain{8, 2, 4, 0, false}, normalized{8, 2, 4, 0, true};
  const Doubles zero(8, 0.0);
  CHECK(oracle::route(plain, zero) == Doubles{0.125, 0.125, 0, 0, 0, 0, 0, 0});
  CHECK(oracle::route(normalized, zero) == Doubles{0.5, 0.5, 0, 0, 0, 0, 0, 0});
  CHECK(oracle::round_bf16(1 + 0x1p-8) == 1);
  CHECK(oracle::round_bf16(-1 - 0x1p-7 - 0x1p-8) == -1 - 0x1p-6);
}

TEST_CASE("every arch of the paper, dense and MoE, equals the oracle", "[forward][portable]") {
  for (const std::string& arch : arch_names())
    for (const bool moe : {false, true}) {
      Config c = small_arch(arch);
      if (moe) c = with_moe(c, {5, 2, 7, 9, true});
      const Toy toy(c, 11);
      CAPTURE(arch, moe);
      for (const Index N : {1, 2, 23}) hold(toy, tokens_of(toy.c, N));
    }
}

TEST_CASE("every kind of stage by itself, with and without RoPE, equals the oracle", "[forward][portable]") {
  const std::vector<std::vector<Stage>> all = {
      {window(1, 1, 4)},
      {window(2, 3, 4)},
      {rope(window(1, 2, 4), false)},
      {full(1, 1)},
      {full(2, 2)},
      {rope(full(1, 2), false)},
      {shared(2)},
      {rope(shared(2), true)},
      {shared(1, 3)},
      {shared(2, 3, /*refresh=*/true)},
      {rope(shared(1, 2, /*refresh=*/true), true)},
      {window(1, 2, 6), full(1, 2), shared(1, 2)},
      {full(1, 1), window(1, 2, 3)},
      {window(1, 1, 3), rope(full(1, 1), false), rope(shared(1, 2), true)},
  };
  for (const std::vector<Stage>& stages : all)
    for (const bool half : {false, true}) {
      Config c = small_config(stages);
      c.rope_half = half;
      const Toy toy(c, 3);
      CAPTURE(brief(c));
      hold(toy, tokens_of(c, 21));
    }
}

TEST_CASE("windows of 1, smaller than, equal to and larger than N equal the oracle", "[forward][portable]") {
  for (const Index N : {1, 5, 33})
    for (const Index W : {Index{1}, Index{2}, N - 1, N, N + 1, Index{1000}}) {
      if (W < 1) continue;
      const Toy toy(small_config({window(2, 2, W), shared(1)}), 5);
      CAPTURE(N, W);
      hold(toy, tokens_of(toy.c, N));
    }
}

TEST_CASE("head counts, head widths and widths off the vector length equal the oracle", "[forward]") {
  struct Sizes {
    Index H, G, dh, D, F, V;
  };
  for (const Sizes& z : std::vector<Sizes>{{4, 2, 6, 36, 40, 29}, {14, 2, 10, 72, 100, 64}, {6, 6, 24, 36, 22, 257},
           {6, 1, 40, 100, 36, 67}, {2, 1, 80, 72, 100, 31}, {2, 2, 96, 100, 72, 30}, {1, 1, 2, 1, 1, 1},
           {3, 1, 4, 7, 9, 2}, {4, 4, 64, 64, 128, 128}})
    for (const bool half : {false, true}) {
      Config c = small_config({window(1, 2, 5), full(1, 1), rope(shared(1), half)});
      c.heads = z.H, c.kv_heads = z.G, c.head_dim = z.dh, c.dim = z.D, c.ffn_dim = z.F, c.vocab_size = z.V;
      c.rope_half = half;
      const Toy toy(c, 13);
      CAPTURE(brief(c));
      hold(toy, tokens_of(c, 19));
    }
}

TEST_CASE("an odd head_dim is fine where nothing rotates", "[forward]") {
  Config c = small_config({rope(window(1, 2, 4), false), rope(full(1, 1), false), shared(1)});
  c.head_dim = 7;
  const Toy toy(c);
  hold(toy, tokens_of(c, 20));
  same(run_all(toy, tokens_of(c, 20), {Dtype::f32, 3, 11}), run_all(toy, tokens_of(c, 20)));
}

TEST_CASE("dimensions beyond 512, where sums are cut, equal the oracle", "[forward]") {
  Config c = small_config({window(1, 1, 3), shared(1)});
  c.dim = 1030, c.ffn_dim = 2051, c.head_dim = 4;
  const Toy toy(c);
  hold(toy, tokens_of(c, 4));
}

TEST_CASE(
    "mixtures of experts equal the oracle: ties, one active, all active, shared expert or none", "[forward][moe]") {
  for (const Moe& moe : std::vector<Moe>{{8, 2, 7, 9, true}, {8, 2, 7, 9, false}, {8, 2, 7, 0, true},
           {5, 1, 6, 0, true}, {5, 1, 6, 3, false}, {4, 4, 5, 0, false}, {4, 4, 5, 2, true}, {1, 1, 8, 8, false}}) {
    Config c = with_moe(small_config({window(2, 2, 5), shared(2)}), moe);
    for (const bool ties : {false, true})
      for (const Index N : {1, 31, 32, 33}) {
        Toy toy(c, 17);
        if (ties)  // every router logit is 0: experts 0 .. active-1 for every token
          for (const char* name : {"low.0.router", "low.1.router", "top.0.router", "top.1.router"})
            toy.set(name, [](Index, Index, float) { return 0.f; });
        CAPTURE(moe.experts, moe.active, moe.shared_dim, moe.normalize, ties, N);
        hold(toy, tokens_of(c, N));
      }
  }
}

TEST_CASE("an expert that gets no token, and one that gets all", "[forward][moe]") {
  Toy toy(with_moe(small_config({full(1, 1), shared(1)}), {6, 2, 7, 0, true}), 19);
  for (const char* name :
      {"mid.0.router", "top.0.router"})  // 3 and 5 always tie at 0 with 1, 2, 4; 0 is above or below
    toy.set(name, [](Index e, Index, float v) { return e == 0 ? v : 0.f; });
  const Tokens tokens = tokens_of(toy.c, 33);
  hold(toy, tokens);
  const auto engine = make_cpu_engine(toy.c, toy.w, {Dtype::f32, 33, 33, 1});
  std::vector<std::vector<Index>> loads;
  engine->on_layer = [&](const Application& a) {
    if (a.stage >= 0) loads.emplace_back(a.expert_load.begin(), a.expert_load.end());
  };
  Floats logits(33 * 29);
  const Segment all{engine->open(), tokens, Logits::all};
  engine->forward({&all, 1}, logits.data());
  REQUIRE(loads.size() == 2);
  for (const auto& load : loads) {
    CAPTURE(load);
    CHECK(std::accumulate(load.begin(), load.end(), Index{0}) == 66);
    CHECK(load[1] == 33);  // the first of the tied ones: always
    CHECK(load[0] + load[2] == 33);
    CHECK(load[0] > 0);
    CHECK(load[2] > 0);
    CHECK(load[3] + load[4] + load[5] == 0);  // never
  }
}

TEST_CASE("norm_eps, embed_scale, rows of zeros, theta, tied head equal the oracle", "[forward]") {
  for (const double eps : {1e-5, 1e-6, 0.0})
    for (const double scale : {1.0, 1e-3, 4.0})
      for (const bool tied : {false, true}) {
        Config c = small_config({window(1, 2, 5), shared(1)});
        c.norm_eps = eps, c.embed_scale = scale, c.tied_embeddings = tied, c.rope_theta = tied ? 500 : 1e6;
        Toy toy(c, 23);
        toy.set("embed", [](Index r, Index, float v) { return r == 3 ? 0.f : v; });
        Tokens tokens = tokens_of(c, 17);
        tokens[0] = tokens[6] = tokens[16] = 3;
        CAPTURE(eps, scale, tied);
        const Floats found = hold(toy, tokens);
        CHECK(std::all_of(found.begin(), found.end(), [](float v) { return std::isfinite(v); }));
      }
  // the three epsilons give three results, or the case would show nothing
  Config c = small_config({window(1, 2, 5), shared(1)});
  c.embed_scale = 1e-3;
  std::vector<Floats> found;
  for (const double eps : {1e-5, 1e-6, 0.0}) c.norm_eps = eps, found.push_back(run_all(Toy(c, 23), tokens_of(c, 9)));
  CHECK(first_difference(found[0], found[1]) >= 0);
  CHECK(first_difference(found[1], found[2]) >= 0);
}

TEST_CASE("weights of each dtype, and mixed, equal the oracle", "[forward][portable]") {
  for (const std::optional<Dtype> dtype :
      {std::optional(Dtype::f32), std::optional(Dtype::bf16), std::optional(Dtype::f16), std::optional<Dtype>()})
    for (const bool moe : {false, true}) {
      Config c = small_config({window(2, 2, 5), full(1, 1), shared(1)});
      if (moe) c = with_moe(c, {4, 2, 11, 3, true});
      const Toy toy(c, 29, dtype);
      CAPTURE(dtype ? name_of(*dtype) : "mixed", moe);
      hold(toy, tokens_of(c, 19));
    }
}

TEST_CASE("sequences across a block boundary equal the oracle", "[forward]") {
  Config c = small_config({window(1, 2, 7), full(1, 1), shared(1)});
  c.dim = 8, c.heads = 2, c.kv_heads = 1, c.head_dim = 4, c.ffn_dim = 6, c.vocab_size = 11;
  const Toy toy(c, 31);
  for (const Index N : {255, 256, 257, 511, 512, 513}) {
    CAPTURE(N);
    hold(toy, tokens_of(c, N));
  }
}

TEST_CASE("BF16 caches round keys and values, and nothing else", "[forward][portable]") {
  for (const auto& stages : {std::vector{window(2, 2, 5), shared(1)}, std::vector{full(2, 1)},
           std::vector{window(1, 1, 3), rope(shared(1, 2, true), true)}}) {
    const Toy toy(small_config(stages), 37);
    const Tokens tokens = tokens_of(toy.c, 24);
    CAPTURE(brief(toy.c));
    const Floats rounded = hold(toy, tokens, Dtype::bf16), wide = run_all(toy, tokens);
    CHECK(first_difference(rounded, wide) >= 0);
    // beside the float32 caches: every application adds one rounding of K to the scores and one of V
    Index applications = 0;
    for (const Stage& s : stages) applications += s.layers * s.loops;
    const double most = largest_of(widened(wide));
    close(rounded, widened(wide), static_cast<double>(applications) * 4 * bf16_rounding * most);
    same(run_all(toy, tokens, {Dtype::bf16, 5, 13}), rounded);  // whole, chunked and step by step, still the same bits
  }
}

TEST_CASE("random configs: equal to the oracle, and the same bits however the tokens are fed", "[forward][random]") {
  std::mt19937_64 random(2604'01220);
  for (int i = 0; i < 300; ++i) {
    const Config c = random_config(random);
    const bool mixed = i % 3 == 2;
    const Toy toy(c, static_cast<std::uint64_t>(i), mixed ? std::nullopt : std::optional(Dtype::f32));
    const Index N = 1 + static_cast<Index>(random() % (i % 10 == 0 ? 150 : 40));
    const Tokens tokens = tokens_of(c, N, static_cast<std::uint64_t>(i));
    CAPTURE(i, N, brief(c));
    const Floats found = hold(toy, tokens);
    for (const Dtype kv : {Dtype::f32, Dtype::bf16}) {
      const Index K = 1 + static_cast<Index>(random() % static_cast<std::uint64_t>(N));
      const Index chunk = 1 + static_cast<Index>(random() % 40);
      const How how{kv, chunk, K};
      CAPTURE(chunk, K, name_of(kv));
      const Floats reference = kv == Dtype::f32 ? found : run_all(toy, tokens, {kv});
      same(run_all(toy, tokens, how), reference);
      same(run_last(toy, tokens, how), last_row(reference, c.vocab_size));
    }
  }
}

}  // namespace
}  // namespace yocou::test
