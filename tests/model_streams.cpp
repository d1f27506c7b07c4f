/// @file
/// model_streams.cpp -- ParScale's streams: against the oracle, against the plain model, between runs, and by count.
#include "fixtures.h"

namespace yocou::test {
namespace {

/// Layers of full attention with P streams of m prefix rows.
Config parscale(Index P, Index m, double smooth = 0.01, Index layers = 2) {
  Config c = small_config({full(layers, 1)});
  c.streams = {P, m, smooth};
  return c;
}
std::vector<Config> streamed() {
  return {parscale(2, 3), parscale(3, 1, 0), parscale(2, 48), parscale(4, 70, 0.5, 1),
      with_moe(parscale(3, 5), {5, 2, 7, 9, true})};
}

TEST_CASE(
    "streams equal the oracle: all dtypes, both caches, one prefix row and more than a tile of them", "[streams]") {
  std::uint64_t seed = 1;
  for (const Config& c : streamed())
    for (const Dtype kv : {Dtype::f32, Dtype::bf16})
      for (const Index N : {1, 2, 70}) {
        const Toy toy(c, seed++, /*dtype=*/std::nullopt);
        const Tokens tokens = tokens_of(c, N);
        const oracle::Result right = oracle::forward(toy.c, toy.w, tokens, kv == Dtype::bf16);
        // As hold() has it, with what is new: the prefix in every softmax, and a sum of P D terms before the head.
        double limit = limit_of(c, N + c.streams.prefix + c.streams.count * c.dim, right.scale);
        if (kv == Dtype::bf16) limit += 2 * bf16_rounding * right.scale / std::sqrt(static_cast<double>(c.head_dim));
        CAPTURE(brief(c), N, right.router_gap);
        close(run_all(toy, tokens, {kv}), flat(right.logits), limit);
      }
}

/// Gives `to` the numbers of those tensors of `from` that both have; of prefixes, those of as many streams as it has.
void copy_weights(Toy& to, const Toy& from) {
  std::map<std::string, Floats> numbers;
  for_each_tensor(from.c, from.w, [&](const std::string& name, const Shape&, const Tensor& t) {
    numbers[name].resize(static_cast<std::size_t>(t.rows * t.cols));
    widen(t, 0, t.rows * t.cols, numbers[name].data());
  });
  for_each_tensor(to.c, to.w, [&](const std::string& name, const Shape&, const Tensor& t) {
    if (numbers.count(name) && !name.starts_with("mix."))
      to.set(name, [&](Index r, Index k, float) { return numbers[name][static_cast<std::size_t>(r * t.cols + k)]; });
  });
}

TEST_CASE("P streams of equal prefixes, weighted alike, are one stream with that prefix", "[streams]") {
  for (const Index P : {2, 4}) {  // powers of two: weights of 1/P add up without rounding
    Toy equal(parscale(P, 3, /*smooth=*/0.5)), one(parscale(2, 3, /*smooth=*/0)), plain(small_config({full(2, 1)}));
    for (const std::string layer : {"mid.0.", "mid.1."})
      for (const std::string& name : {layer + "prefix_k", layer + "prefix_v"}) {
        Floats first;
        equal.set(name, [&](Index r, Index k, float v) {
          if (r < 3) first.push_back(v);
          return first[static_cast<std::size_t>(r % 3 * equal.c.kv_dim() + k)];
        });
      }
    equal.set("mix.w2", [](Index, Index, float) { return 0.f; });
    equal.set("mix.b2", [](Index, Index, float) { return 0.25f; });
    copy_weights(one, equal);
    one.set("mix.w2", [](Index, Index, float) { return 0.f; });
    one.set("mix.b2", [](Index, Index p, float) { return p == 0 ? 0.f : -1000.f; });  // all weight on stream 0
    copy_weights(plain, equal);
    const Tokens tokens = tokens_of(equal.c, 20);
    CAPTURE(P);
    same(run_all(equal, tokens), run_all(one, tokens));
    CHECK(first_difference(run_all(equal, tokens), run_all(plain, tokens)) == 0);  // the prefix does something
    one.set("mix.b2", [](Index, Index p, float) { return p == 0 ? -1000.f : 0.f; });
    one.set("mid.1.prefix_v", [](Index r, Index, float v) { return r < 3 ? v : -v; });  // of stream 1 alone
    CHECK(first_difference(run_all(equal, tokens), run_all(one, tokens)) == 0);
  }
}

TEST_CASE("streams: prefill of K and decode, chunks, batches and the early stop agree to the bit", "[streams]") {
  for (const Config& c : streamed()) {
    const Toy toy(c, 5);
    const Tokens tokens = tokens_of(c, 70);
    const Floats right = run_all(toy, tokens);
    CAPTURE(brief(c));
    for (const Index K : {1, 2, 63, 69, 70})
      for (const Index chunk : {1, 7, 64, 100}) {
        CAPTURE(K, chunk);
        same(run_all(toy, tokens, {Dtype::f32, chunk, K}), right);
        same(run_last(toy, tokens, {Dtype::f32, chunk, K}), last_row(right, c.vocab_size));
      }
    // A batch of unequal lengths, with all, last and no logits wanted in one pass.
    const auto engine = make_cpu_engine(c, toy.w, {Dtype::f32, 100, 200, 3});
    const Index V = c.vocab_size;
    const std::span<const int> all(tokens);
    const Segment pass[] = {{engine->open(), all.first(20), Logits::all}, {engine->open(), all.first(9), Logits::none},
        {engine->open(), all.first(31), Logits::last}};
    Floats logits(static_cast<std::size_t>(21 * V)), next(static_cast<std::size_t>(2 * V));
    engine->forward(pass, logits.data());
    same(std::span(logits).first(static_cast<std::size_t>(20 * V)), std::span(right).first(logits.size() - V));
    same(row(logits, 20, V), row(right, 30, V));
    const int two[] = {pass[1].sequence, pass[2].sequence}, tokens_of_two[] = {tokens[9], tokens[31]};
    decode(*engine, two, tokens_of_two, next.data());
    same(row(next, 0, V), row(right, 9, V));
    same(row(next, 1, V), row(right, 31, V));
  }
}

TEST_CASE("streams: counted FLOP, bytes and caches equal the formulas, and those equal counting", "[streams][cost]") {
  using Wide = unsigned __int128;
  std::vector<Config> configs = streamed();
  configs.push_back(make_config("tiny", "parscale", {.layers = 3, .streams = 5}));
  for (const Config& c : configs) {
    const auto [P, m, smooth] = c.streams;
    const Toy toy(c, 3, Dtype::bf16);
    Wide params = 0, once = 0, per_row = 0, at_the_end = 2 * static_cast<Wide>(c.dim * c.vocab_size);
    for_each_tensor(toy.c, toy.w, [&](const std::string& name, const Shape& shape, const Tensor& t) {
      const Wide size = static_cast<Wide>(t.rows * t.cols);
      const bool prefix = name.find("prefix") != std::string::npos, expert = name.find("experts") != std::string::npos;
      if (name == "embed" || name == "head") return;
      params += size;
      if (name.starts_with("mix.w")) at_the_end += 2 * size;
      else if (expert) per_row += 2 * size * c.moe->active / c.moe->experts;
      else if (shape.size() == 2) per_row += 2 * size;
      if (shape.size() == 1 && name != "mix.b1" && name != "mix.b2") once += size;
      CHECK(!(prefix && shape.size() != 3));
    });
    CAPTURE(brief(c));
    CHECK(count_params(c).params.v == params);
    for (const Index N : {1, 64, 257}) {
      Wide keys = 0;
      for (Index i = 0; i < N; ++i) keys += m + i + 1;
      const Wide layers = static_cast<Wide>(c.stages[0].layers), attention = 4 * layers * c.q_dim();
      CAPTURE(N);
      CHECK(prefill_flops(c, N).v == P * (per_row * N + attention * keys) + at_the_end);
      CHECK(decode_flops(c, N).v == P * (per_row + attention * (N + 1 + m)) + at_the_end);
      CHECK(cache_bytes(c, N, 4).v == P * layers * 2 * c.kv_dim() * 4 * static_cast<Wide>(paged_rows(N)));
      for (const Index batch : {1, 3}) {
        const auto engine = make_cpu_engine(toy.c, toy.w, {Dtype::f32, 100, 1000, batch});
        Floats logits(static_cast<std::size_t>(batch * c.vocab_size));
        std::vector<int> sequences;
        for (Index b = 0; b < batch; ++b) {
          sequences.push_back(engine->open());
          prefill(*engine, sequences.back(), tokens_of(c, N), 100, logits.data());
        }
        const Wide B = static_cast<Wide>(batch);
        CHECK(B * prefill_flops(c, N).v == engine->counters.flops);
        CHECK(B * cache_bytes(c, N, 4).v == static_cast<Wide>(engine->cache_bytes()));
        const Counters before = engine->counters;
        decode(*engine, sequences, tokens_of(c, batch), logits.data());
        const Counters step = engine->counters - before;
        CHECK(B * decode_flops(c, N).v == step.flops);
        if (c.moe) continue;  // which experts a step reads is the router's choice
        const Wide uncounted = 2 * (once + static_cast<Wide>(c.dim + P + batch * c.dim));  // gains, biases, embeddings
        CHECK(decode_bytes(c, N, batch, 2, 4).v == step.bytes + uncounted);
        hold_caches(c, Dtype::f32, N, batch,
            [&](Index bytes) { CHECK(B * cache_bytes(c, N, 4).v == static_cast<Wide>(bytes)); });
      }
    }
  }
}

TEST_CASE("a config says streams whole, on full stages of one loop, under labels that have them", "[streams]") {
  const Config made = make_config("tiny", "parscale", {});
  CHECK(made.streams.count == 2);
  CHECK(made.streams.prefix == 48);
  CHECK(made.streams.smooth == 0.01);
  CHECK(make_config("tiny", "parscale", {.streams = 7}).streams.count == 7);
  CHECK_THROWS_AS(make_config("tiny", "transformer", {.streams = 2}), Usage);
  CHECK_THROWS_AS(make_config("tiny", "parscale", {.loops = 2}), Usage);
  CHECK_THROWS_AS(make_config("tiny", "parscale", {.window = 8}), Usage);
  CHECK(brief(read_config(config_json(made), "here")) == brief(made));
  CHECK(!config_json(make_config("tiny", "transformer", {})).contains("streams"));
  const auto refused = [&](const std::string& pointer, const Json& value, const std::string& says) {
    Json j = config_json(made);
    const Json::json_pointer at(pointer);
    if (value.is_null()) j[at.parent_pointer()].erase(at.back());
    else j[at] = value;
    std::string line;
    try {
      read_config(j, "here");
    } catch (const Error& e) {
      line = e.what();
    }
    CAPTURE(pointer, line, says);
    CHECK(line.find(says) != std::string::npos);
  };
  refused("/streams", nullptr, "arch parscale needs the key \"streams\"");
  refused("/arch", "transformer", "arch transformer excludes the key \"streams\"");
  for (const char* key : {"count", "prefix", "smooth"})
    refused(std::string("/streams/") + key, nullptr, std::string("key \"") + key + "\" is missing");
  refused("/streams/count", 1, "\"count\" must be");
  refused("/streams/prefix", 0, "\"prefix\" must be");
  refused("/streams/smooth", 1, "\"smooth\" must be below 1");
  refused("/streams/smooth", -0.1, "\"smooth\" must be");
  refused("/streams/more", 1, "key \"more\" is unknown");
  refused("/stages/0/loops", 2, "full stages of one loop");
  Json j = config_json(made);
  j["arch"] = "custom";
  CHECK_NOTHROW(read_config(j, "here"));
  j["stages"][0]["attention"] = "window", j["stages"][0]["window"] = 4;
  CHECK_THROWS_AS(read_config(j, "here"), Error);
}

}  // namespace
}  // namespace yocou::test
