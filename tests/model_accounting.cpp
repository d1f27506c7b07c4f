/// @file
/// model_accounting.cpp -- the formulas against counting one by one, and against what ran.
#include <map>
#include <set>

#include "fixtures.h"

namespace yocou::test {
namespace {

using Wide = unsigned __int128;

// ---------------------------------------------------------------------------------------------------------------------
// Counting one by one: over tensors by name, positions, loops, layers and keys. Slow, and nothing to get wrong.

/// The shapes of a model's tensors by name.
std::map<std::string, Shape> shapes_of(const Config& c) {
  std::map<std::string, Shape> shapes;
  Weights w = empty_weights(c);
  for_each_tensor(c, w, [&](const std::string& name, const Shape& shape, Tensor&) { shapes[name] = shape; });
  return shapes;
}

Wide elements(const Shape& shape) {
  Wide n = 1;
  for (const Index d : shape) n *= static_cast<Wide>(d);
  return n;
}

/// FLOP of every matrix of layer `prefix` for one row: [out,in] takes 2 out in, a stack of experts counts the active.
Wide matrices(const Config& c, const std::map<std::string, Shape>& shapes, const std::string& prefix) {
  Wide sum = 0;
  for (const auto& [name, shape] : shapes)
    if (name.compare(0, prefix.size(), prefix) == 0) {
      if (shape.size() == 2) sum += 2 * elements(shape);
      if (shape.size() == 3) sum += 2 * static_cast<Wide>(c.moe->active * shape[1] * shape[2]);
    }
  return sum;
}

/// Every row of every pass of a run over the positions first .. last-1 of which the last `wanted` get logits.
Wide flops_by_counting(const Config& c, Index first, Index last, Index wanted = 1) {
  const auto shapes = shapes_of(c);
  Wide sum = 2 * static_cast<Wide>(wanted) * static_cast<Wide>(c.vocab_size) * static_cast<Wide>(c.dim);  // the head
  for (const Stage& s : c.stages)
    for (Index t = 0; t < s.loops; ++t)
      for (Index p = first; p < last; ++p) {
        const bool is_shared = s.attention == Attention::shared;
        if (is_shared && (t == 0 || s.refresh_kv))
          sum += 2 * (elements(shapes.at("kv.wk")) + elements(shapes.at("kv.wv")));
        if (is_shared && p < last - wanted && !(s.refresh_kv && t + 1 < s.loops)) continue;
        Wide keys = 0;
        for (Index j = 0; j <= p; ++j) keys += s.attention != Attention::window || j > p - s.window;
        for (Index l = 0; l < s.layers; ++l)
          sum += matrices(c, shapes, s.name + "." + std::to_string(l) + ".") +
                 4 * static_cast<Wide>(c.heads * c.head_dim) * keys;
      }
  return sum;
}

/// Rows of cache after N tokens, by asking every position where it goes.
Wide cache_rows_by_counting(const Config& c, Index N) {
  Wide rows = 0;
  for (const Stage& s : c.stages) {
    std::set<Index> blocks;
    for (Index p = 0; p < N; ++p) blocks.insert(p / 256);
    const Wide one = s.attention == Attention::window ? static_cast<Wide>(s.window) : 256 * blocks.size();
    for (Index t = 0; t < s.loops; ++t) {
      if (s.attention == Attention::shared) rows += t == 0 || s.refresh_kv ? one : 0;
      else
        for (Index l = 0; l < s.layers; ++l) rows += one;
    }
  }
  return rows;
}

/// Configs to cost: all archs, and random ones.
std::vector<Config> costed_configs() {
  std::vector<Config> all;
  std::mt19937_64 random(32);
  for (int i = 0; i < 60; ++i) all.push_back(random_config(random));
  for (const std::string& arch : arch_names()) {
    all.push_back(small_arch(arch));
    all.push_back(with_moe(small_arch(arch), {5, 2, 7, 9, true}));
  }
  return all;
}

TEST_CASE("keys seen: the formula equals counting", "[cost]") {
  for (const Index W : {0, 1, 2, 5, 64, 1000})
    for (const Index N : {1, 2, 4, 5, 6, 63, 64, 65, 300}) {
      Wide sum = 0;
      for (Index p = 0; p < N; ++p)
        for (Index j = 0; j <= p; ++j) sum += W == 0 || j > p - W;
      CAPTURE(W, N);
      CHECK(keys_seen(0, N, W).v == sum);
    }
  CHECK(keys_seen(0, 0, 0).v == 0);
  CHECK(keys_seen(0, 0, 4).v == 0);
}

TEST_CASE("cache bytes and FLOP by formula equal counting over positions, layers, loops and keys", "[cost]") {
  for (const Config& c : costed_configs())
    for (const Index N : {1, 2, 5, 64, 65, 255, 256, 257}) {
      if (N > 100 && c.stages.size() > 2) continue;
      CAPTURE(N, brief(c));
      for (const Index s : {1, 2, 4})
        CHECK(cache_bytes(c, N, s).v ==
              cache_rows_by_counting(c, N) * 2 * static_cast<Wide>(c.kv_heads * c.head_dim * s));
      CHECK(prefill_flops(c, N).v == flops_by_counting(c, 0, N));
      CHECK(decode_flops(c, N).v == flops_by_counting(c, N, N + 1));
    }
}

TEST_CASE("FLOP of a range of positions equal counting, and the ranges of a run add up to it", "[cost]") {
  for (const Config& c : costed_configs()) {
    CAPTURE(brief(c));
    const auto flops = [&](Index p0, Index p1, Index wanted) { return total(flops_bill(c, p0, p1, wanted)); };
    for (const auto& [p0, p1] : std::vector<std::pair<Index, Index>>{{0, 1}, {0, 7}, {1, 6}, {5, 70}, {64, 67}})
      for (const Index wanted : {Index{0}, Index{1}, (p1 - p0) / 2, p1 - p0}) {
        CAPTURE(p0, p1, wanted);
        CHECK(flops(p0, p1, wanted).v == flops_by_counting(c, p0, p1, wanted));
      }
    for (const Index N : {2, 5, 64, 300}) {
      CAPTURE(N);
      for (const Index cut : {Index{1}, N / 2, N - 1}) {  // a prefill in two chunks, of which the first wants nothing
        CHECK(flops(0, cut, 0) + flops(cut, N, 1) == prefill_flops(c, N));
        CHECK(flops(0, cut, cut) + flops(cut, N, N - cut) == flops(0, N, N));
      }
      Exact steps = prefill_flops(c, 1);
      for (Index i = 1; i < N; ++i) steps += decode_flops(c, i);
      CHECK(steps == flops(0, N, N));  // token by token every position gets its logits
    }
  }
}

/// Holds a bill against its total: every term says its numbers and their product.
void explains(const Bill& bill, Exact cost) {
  Exact sum = 0;
  for (const Term& t : bill) {
    const std::string text = t.text();
    CAPTURE(t.of, text);
    const std::size_t last = text.rfind(" = "), first = text.find(" = ");
    REQUIRE(first < last);
    CHECK(text.substr(last + 3) == to_string(t.value()));
    Exact product = 1;
    std::istringstream numbers(text.substr(first + 3, last - first - 3));
    Index factors = 0;
    for (std::string word; numbers >> word;)
      if (word != "x") product = product * Exact(std::stoll(word)), ++factors;
    CHECK(product == t.value());
    CHECK(factors == std::ssize(t.factors));
    CHECK(!t.of.empty());
    std::string symbols;
    for (const Factor& f : t.factors) symbols += (symbols.empty() ? "" : " ") + std::string(f.symbol);
    CHECK(text.substr(0, first) == symbols);
    sum += product;
  }
  CHECK(sum == cost);
}

TEST_CASE("bills explain themselves: every term ends in its value, and the values add up to the cost", "[cost]") {
  std::vector<Config> all = costed_configs();
  for (const char* shape : {"1.3b", "10b-moe"})
    for (const std::string& arch : arch_names()) all.push_back(make_config(shape, arch, {}));
  for (const Config& c : all)
    for (const Index N : {1, 257, 262144}) {
      CAPTURE(brief(c), N);
      explains(cache_bill(c, N, 2), cache_bytes(c, N, 2));
      explains(flops_bill(c, 0, N, 1), prefill_flops(c, N));
      explains(flops_bill(c, N, N + 1, 1), decode_flops(c, N));
      explains(decode_bytes_bill(c, N, 3, 2, 4), decode_bytes(c, N, 3, 2, 4));
      explains(params_bill(c, c.moe ? c.moe->experts : 0), count_params(c).params);
      explains(params_bill(c, c.moe ? c.moe->active : 0), count_params(c).active);
    }
  const Term t{"self: wq", {{"2", 2}, {"D", 2560}, {"T", 3}}};
  CHECK(t.text() == "2 D T = 2 x 2560 x 3 = 15360");
}

TEST_CASE("parameters by formula equal the elements of the tensors", "[cost]") {
  for (const Config& c : costed_configs()) {
    Wide params = 0, active = 0, embed = 0, head = 0;
    for (const auto& [name, shape] : shapes_of(c)) {
      if (name == "embed") embed = elements(shape);
      else if (name == "head") head = elements(shape);
      else {
        params += elements(shape);
        active += shape.size() == 3 ? static_cast<Wide>(c.moe->active * shape[1] * shape[2]) : elements(shape);
      }
    }
    const Params p = count_params(c);
    CAPTURE(brief(c));
    CHECK(p.params.v == params);
    CHECK(p.active.v == active);
    CHECK(p.embed.v == embed);
    CHECK(p.head.v == head);
  }
}

TEST_CASE("bytes of a decode step by formula equal counting tensors and rows", "[cost]") {
  for (const Config& c : costed_configs())
    for (const Index N : {1, 5, 64, 300})
      for (const Index batch : {1, 2, 7}) {
        const auto shapes = shapes_of(c);
        Wide numbers = static_cast<Wide>(batch * c.dim), rows = 0;  // an embedding row a sequence
        numbers += static_cast<Wide>(c.vocab_size * c.dim);         // the head, tied or not
        numbers += elements(shapes.at("norm"));
        for (const Stage& s : c.stages)
          for (Index t = 0; t < s.loops; ++t) {
            if (s.attention == Attention::shared && (t == 0 || s.refresh_kv))
              for (const char* name : {"kv_norm", "kv.wk", "kv.wv"}) numbers += elements(shapes.at(name));
            for (Index l = 0; l < s.layers; ++l) {
              const std::string prefix = s.name + "." + std::to_string(l) + ".";
              for (const auto& [name, shape] : shapes)
                if (name.compare(0, prefix.size(), prefix) == 0)
                  numbers += shape.size() == 3 ? elements(shape) / static_cast<Wide>(c.moe->experts) *
                                                     static_cast<Wide>(std::min(c.moe->experts, batch * c.moe->active))
                                               : elements(shape);
              for (Index j = 0; j <= N; ++j) rows += s.attention != Attention::window || j > N - s.window;
            }
          }
        CAPTURE(N, batch, brief(c));
        CHECK(decode_bytes(c, N, batch, 2, 4).v ==
              numbers * 2 + static_cast<Wide>(batch) * rows * 2 * static_cast<Wide>(c.kv_heads * c.head_dim) * 4);
      }
}

// ---------------------------------------------------------------------------------------------------------------------
// The counted side: what the operations and the arena really did

TEST_CASE("counted FLOP, bytes and rows equal the formulas: every arch, chunk, batch and decode length", "[cost]") {
  for (const std::string& arch : arch_names())
    for (const bool moe : {false, true})
      for (const Index batch : {1, 3})
        for (const auto& [N, chunk] : std::vector<std::pair<Index, Index>>{
                 {1, 512}, {4, 4}, {5, 2}, {6, 1}, {30, 7}, {64, 512}, {255, 64}, {256, 256}, {257, 100}}) {
          Config c = small_arch(arch);
          if (moe) c = with_moe(c, {5, 2, 7, 9, true});
          const Toy toy(c, 71, Dtype::bf16);
          for (const Dtype kv : {Dtype::f32, Dtype::bf16}) {
            if (N > 64 && (batch > 1 || (kv == Dtype::f32) == moe)) continue;  // of the long ones a quarter
            const Index s = size_of(kv);
            const auto engine = make_cpu_engine(toy.c, toy.w, {kv, 300, 1000, batch});
            Floats logits(static_cast<std::size_t>(batch * c.vocab_size));
            std::vector<int> sequences;
            for (Index b = 0; b < batch; ++b) {
              sequences.push_back(engine->open());
              prefill(*engine, sequences.back(), tokens_of(c, N, static_cast<std::uint64_t>(b)), chunk, logits.data());
            }
            CAPTURE(arch, moe, batch, N, chunk, s);
            const Wide B = static_cast<Wide>(batch);
            CHECK(B * prefill_flops(c, N).v == engine->counters.flops);
            CHECK(B * cache_bytes(c, N, s).v == static_cast<Wide>(engine->cache_bytes()));
            Index last_loops = 1;
            for (const Stage& stage : c.stages) {
              if (stage.attention != Attention::shared) continue;
              const Index copies = stage.refresh_kv ? stage.loops : 1;
              last_loops = stage.loops;
              CHECK(engine->global_rows() == batch * copies * N);
              CHECK(engine->counters.cross_positions ==
                    static_cast<std::uint64_t>(batch * (stage.refresh_kv ? (stage.loops - 1) * N + 1 : stage.loops)));
            }
            if (!c.has_shared()) {
              CHECK(engine->global_rows() == 0);
              CHECK(engine->counters.cross_positions == 0);
            }
            for (Index k = 0; k < 3; ++k) {
              const Counters before = engine->counters;
              decode(*engine, sequences, tokens_of(c, batch, static_cast<std::uint64_t>(k)), logits.data());
              const Counters step = engine->counters - before;
              CHECK(B * decode_flops(c, N + k).v == step.flops);
              CHECK(B * cache_bytes(c, N + k + 1, s).v == static_cast<Wide>(engine->cache_bytes()));
              if (c.has_shared()) CHECK(step.cross_positions == static_cast<std::uint64_t>(batch * last_loops));
            }
          }
        }
}

TEST_CASE("counted bytes of a dense decode step are the formula's less gains and embedding rows", "[cost]") {
  for (const std::string& arch : arch_names()) {
    const Toy toy(small_arch(arch), 73, Dtype::bf16);
    const Config& c = toy.c;
    const Index N = 40, batch = 2;
    const auto engine = make_cpu_engine(toy.c, toy.w, {Dtype::f32, N, 200, batch});
    Floats logits(static_cast<std::size_t>(batch * c.vocab_size));
    std::vector<int> sequences;
    for (Index b = 0; b < batch; ++b) {
      sequences.push_back(engine->open());
      prefill(*engine, sequences.back(), tokens_of(c, N), N, logits.data());
    }
    const Counters before = engine->counters;
    decode(*engine, sequences, tokens_of(c, batch), logits.data());
    Index gains = 1;  // the final norm's
    for (const Stage& s : c.stages) {
      gains += 2 * s.layers * s.loops;
      if (s.attention == Attention::shared) gains += s.refresh_kv ? s.loops : 1;
    }
    const Index uncounted = (gains + batch) * c.dim * 2;
    CAPTURE(arch);
    CHECK(static_cast<Index>((engine->counters - before).bytes) ==
          static_cast<Index>(decode_bytes(c, N, batch, 2, 4).v) - uncounted);
  }
}

// ---------------------------------------------------------------------------------------------------------------------
// Published and pinned numbers

TEST_CASE("the eleven published cache sizes come out exactly", "[cost]") {
  struct Cell {
    const char* arch;
    Index N, MB;
  };
  const Cell cells[] = {{"transformer", 16, 640}, {"transformer", 64, 2560}, {"transformer", 256, 10240},
      {"rins", 16, 1280}, {"rins", 64, 5120}, {"rins", 256, 20480}, {"yoco", 16, 42}, {"yoco", 256, 522},
      {"yoco-u", 16, 62}, {"yoco-u", 64, 158}, {"yoco-u", 256, 542}};
  for (const Cell& k : cells) {
    CAPTURE(k.arch, k.N);
    CHECK(cache_bytes(make_config("1.3b", k.arch, {}), k.N * 1024, 2).v == static_cast<Wide>(k.MB) << 20);
  }
  const Config yoco_u = make_config("1.3b", "yoco-u", {});
  CHECK(cache_bytes(yoco_u, 1, 2).v == 31'981'568);
  CHECK(cache_bytes(yoco_u, 256, 2).v == 31'981'568);
  CHECK(cache_bytes(yoco_u, 257, 2).v == 32'505'856);
}

TEST_CASE("presets are the spec's, overrides override, and usage errors are named", "[cost]") {
  const Config moe = make_config("10b-moe", "yoco-u", {});
  CHECK(count_params(moe).params.v / 100'000'000 == 105);  // 10.5B in all
  CHECK(count_params(moe).active.v / 100'000'000 == 17);   // 1.7B active
  CHECK(moe.moe->experts == 64);
  CHECK(moe.moe->normalize);
  CHECK(moe.ffn_dim == 0);
  const Config c = make_config("small", "yoco-u", {6, 100, 5});
  REQUIRE(c.stages.size() == 2);
  CHECK(c.dim == 512);
  CHECK(c.stages[0].layers == 3);
  CHECK(c.stages[0].window == 100);
  CHECK(c.stages[0].loops == 5);
  CHECK(c.stages[0].rope);
  CHECK(c.stages[1].layers == 3);
  CHECK(c.stages[1].attention == Attention::shared);
  CHECK(!c.stages[1].rope);
  CHECK(make_config("tiny", "ut", {}).stages[0].loops == 2);
  CHECK(make_config("tiny", "rins", {}).stages[0].loops == 3);
  CHECK(make_config("tiny", "upper-loop-unshared", {}).stages[1].refresh_kv);
  CHECK_THROWS_AS(make_config("tiny", "yoco-u", {5, 0, 0}), Usage);
  CHECK_NOTHROW(make_config("tiny", "ut", {5, 0, 0}));
  CHECK_THROWS_AS(make_config("tiny", "transformer", {0, 4, 0}), Usage);
  CHECK_THROWS_AS(make_config("tiny", "yoco", {0, 0, 2}), Usage);
  CHECK_THROWS_AS(make_config("huge", "yoco", {}), Usage);
  CHECK_THROWS_AS(make_config("tiny", "yoco-v", {}), Usage);
  for (const char* shape : {"1.3b", "10b-moe", "small", "tiny"})  // every one is a config that a file may hold
    for (const std::string& arch : arch_names()) {
      const Config made = make_config(shape, arch, {});
      CAPTURE(shape, arch);
      CHECK(brief(read_config(config_json(made), "here")) == brief(made));
    }
}

TEST_CASE("what a config says survives JSON", "[cost]") {
  std::mt19937_64 random(77);
  for (int i = 0; i < 100; ++i) {
    const Config c = random_config(random);
    CHECK(brief(read_config(config_json(c), "here")) == brief(c));
  }
}

TEST_CASE("the crossover N is right on both sides, and single", "[cost]") {
  for (const char* shape : {"tiny", "small", "1.3b"})
    for (const Index T : {1, 2, 3, 6})
      for (const std::string& arch : arch_names()) {
        const Config yoco_u = make_config(shape, "yoco-u", {0, 0, T}), other = make_config(shape, arch, {});
        const auto dearer = [&](Index N) { return prefill_flops(yoco_u, N) >= prefill_flops(other, N); };
        const std::optional<Index> answer = crossover(yoco_u, other);
        CAPTURE(shape, T, arch, answer.value_or(-1));
        const Index limit = 40000;
        if (!answer) {
          for (const Index N : {limit, Index{1} << 30, Index{1} << 40}) CHECK(dearer(N));
          continue;
        }
        const Index N = *answer;
        CHECK(!dearer(N));
        if (N > 1) CHECK(dearer(N - 1));
        Index wrong = 0;
        for (Index n = 1; n < limit; n += n < 2000 ? 1 : 37) wrong += dearer(n) != (n < N);
        CHECK(wrong == 0);
      }
}

TEST_CASE("largest() finds the edge wherever it lies", "[cost]") {
  for (const Index limit : {0, 1, 2, 3, 7, 8, 100})
    for (Index edge = 0; edge <= limit; ++edge) CHECK(largest(limit, [&](Index n) { return n <= edge; }) == edge);
  const Index far = Index{1} << 40;
  CHECK(largest(far, [](Index) { return true; }) == far);
  CHECK(largest(far, [](Index n) { return n == 0; }) == 0);
  // a budget: the N that it answers fits, one more does not
  const Config c = make_config("1.3b", "yoco-u", {});
  const Index budget = Index{80} << 30;
  const Exact weights = 2 * (count_params(c).params + count_params(c).embed + count_params(c).head);
  const auto fits = [&](Index N) { return weights + 32 * cache_bytes(c, N, 2) <= Exact(budget); };
  const Index N = largest(N_limit, fits);
  CHECK(N % 256 == 0);
  CHECK(fits(N));
  CHECK(!fits(N + 1));
}

TEST_CASE("Exact refuses to wrap, and 128 bits print in full", "[cost]") {
  const Exact two_64 = Exact(Index{1} << 62) * 4, two_127 = two_64 * (Index{1} << 62) * 2;
  CHECK(to_string(two_64) == "18446744073709551616");
  CHECK(to_string(two_64 + 1) == "18446744073709551617");
  CHECK(to_string(two_127) == "170141183460469231731687303715884105728");
  Exact largest_value;
  largest_value.v = ~Wide{0};
  CHECK(to_string(largest_value) == "340282366920938463463374607431768211455");
  CHECK(to_string(Exact(0)) == "0");
  CHECK(Json{{"n", two_64.v}}.dump() == R"({"n":18446744073709551616})");
  CHECK(Json{{"n", largest_value.v}}.dump() == R"({"n":340282366920938463463374607431768211455})");
  CHECK_THROWS_AS(two_127 + two_127, Error);
  CHECK_THROWS_AS(two_127 * 2, Error);
  CHECK_THROWS_AS(two_64 * two_64, Error);
  CHECK_THROWS_AS(largest_value + 1, Error);
  CHECK_NOTHROW(largest_value + 0);
  CHECK_NOTHROW(two_127 + (two_127 + 0) * 0);
  CHECK(keys_seen(0, Index{1} << 40, 0).v == ((Wide{1} << 80) + (Wide{1} << 40)) / 2);
  // the largest question that `cost` takes
  const Config c = make_config("1.3b", "transformer", {4096, 0, 0});
  CHECK(prefill_flops(c, N_limit).v > Wide{1} << 64);
}

}  // namespace
}  // namespace yocou::test
