/// @file
/// model_halting.cpp -- loops that halt: against the oracle, between runs to the bit, and by count.
#include "fixtures.h"

namespace yocou::test {
namespace {

/// Models whose first stage loops, with windows shorter and longer than chunks, dense and MoE, beside other stages.
std::vector<Config> looping() {
  return {small_config({window(2, 3, 4), shared(1)}), small_config({window(1, 4, 64), shared(2)}),
      with_moe(small_config({window(2, 3, 7), shared(1)}), {5, 2, 7, 9, true}),
      small_config({full(1, 1), window(2, 3, 5), rope(shared(1), true)}), small_config({window(2, 5, 1)})};
}

/// All logits, and the loops that each position ran.
struct Ran {
  Floats logits;
  std::vector<Index> loops;
  std::uint64_t flops = 0;
};
Ran run_halting(const Toy& toy, const Tokens& tokens, const How& how) {
  const Index N = std::ssize(tokens), K = std::min(how.prefill, N), V = toy.c.vocab_size;
  const auto engine = make_cpu_engine(toy.c, toy.w, {how.kv, std::min(how.chunk, K), N, 1, how.halt});
  const int sequence = engine->open();
  Ran ran{Floats(static_cast<std::size_t>(N * V)), {}};
  forward_all(*engine, toy.c, sequence, std::span(tokens).first(K), how.chunk,
      [&](Index first, Index n, const float* rows) { std::copy_n(rows, n * V, ran.logits.begin() + first * V); });
  for (Index i = K; i < N; ++i) decode(*engine, {&sequence, 1}, {&tokens[i], 1}, &ran.logits[i * V]);
  ran.loops.assign(engine->loops_run(sequence).begin(), engine->loops_run(sequence).end());
  ran.flops = engine->counters.flops;
  return ran;
}

/// Several A at which some rows halt and others do not.
std::vector<double> thresholds(const Toy& toy, const Tokens& tokens) {
  std::vector<double> good;
  for (const double A : {0.03, 0.06, 0.1, 0.15, 0.2, 0.3, 0.4}) {
    const Ran ran = run_halting(toy, tokens, {Dtype::f32, 64, 64, A});
    const auto [least, most] = std::ranges::minmax_element(ran.loops);
    if (*least < *most) good.push_back(A);
  }
  CHECK(!good.empty());
  return good;
}

TEST_CASE("halting equals the oracle: the loops that each position ran, and the logits", "[halt]") {
  std::uint64_t seed = 11;
  for (const Config& c : looping()) {
    const Toy toy(c, seed++, /*dtype=*/std::nullopt);
    const Tokens tokens = tokens_of(c, 24);
    Index held = 0;
    for (const double A : thresholds(toy, tokens)) {
      const oracle::Result right = oracle::forward(toy.c, toy.w, tokens, false, A);
      if (right.halt_gap < 1e-4) continue;  // an angle of float32 states errs by about 1e-6: this one decides by chance
      ++held;
      for (const Index chunk : {3, 24}) {
        const Ran ran = run_halting(toy, tokens, {Dtype::f32, chunk, 20, A});
        CAPTURE(brief(c), A, chunk, right.router_gap);
        CHECK(ran.loops == right.loops);
        close(ran.logits, flat(right.logits), limit_of(toy.c, std::ssize(tokens), right.scale));
      }
    }
    CAPTURE(brief(c));
    CHECK(held > 0);
  }
}

TEST_CASE("halting: prefill of K and decode, chunks and batches agree to the bit", "[halt]") {
  for (const Config& c : looping())
    for (const Dtype kv : {Dtype::f32, Dtype::bf16}) {
      const Toy toy(c, 4);
      const Tokens tokens = tokens_of(c, 40);
      const Index V = c.vocab_size;
      for (const double A : thresholds(toy, tokens)) {
        const Ran right = run_halting(toy, tokens, {kv, 40, 40, A});
        CAPTURE(brief(c), A);
        for (const Index K : {1, 29, 40})
          for (const Index chunk : {1, 5}) {
            CAPTURE(K, chunk);
            const Ran ran = run_halting(toy, tokens, {kv, chunk, K, A});
            same(ran.logits, right.logits);
            CHECK(ran.loops == right.loops);
            CHECK(ran.flops == right.flops);
            same(run_last(toy, tokens, {kv, chunk, K, A}), last_row(right.logits, V));
          }
        // One pass over parts of unequal lengths; a step of two sequences that halt apart.
        const auto engine = make_cpu_engine(c, toy.w, {kv, 100, 100, 3, A});
        const std::span<const int> all(tokens);
        const Segment pass[] = {{engine->open(), all.first(20), Logits::all},
            {engine->open(), all.first(9), Logits::none}, {engine->open(), all.first(31), Logits::last}};
        Floats logits(static_cast<std::size_t>(21 * V)), next(static_cast<std::size_t>(2 * V));
        engine->forward(pass, logits.data());
        same(std::span(logits).first(20 * V), std::span(right.logits).first(20 * V));
        same(row(logits, 20, V), row(right.logits, 30, V));
        const int two[] = {pass[2].sequence, pass[1].sequence}, tokens_of_two[] = {tokens[31], tokens[9]};
        decode(*engine, two, tokens_of_two, next.data());
        same(row(next, 0, V), row(right.logits, 31, V));
        same(row(next, 1, V), row(right.logits, 9, V));
        CHECK(std::ranges::equal(engine->loops_run(pass[2].sequence), std::span(right.loops).first(32)));
        CHECK(std::ranges::equal(engine->loops_run(pass[1].sequence), std::span(right.loops).first(10)));
      }
    }
}

TEST_CASE("A = 1 is the model with one loop, and a tiny A the model that never halts", "[halt]") {
  for (const Config& c : looping()) {
    const Toy toy(c, 2);
    const Tokens tokens = tokens_of(c, 40);
    Config once = toy.c;
    const Index T = set_loops(once, 0), stage = looped_stage(once);
    REQUIRE(stage >= 0);
    once.stages[stage].loops = 1;
    CAPTURE(brief(c));
    for (const How& how : {How{}, How{Dtype::f32, 6, 30}}) {
      const auto halting = [&](double A) { return run_halting(toy, tokens, {how.kv, how.chunk, how.prefill, A}); };
      const Ran one = halting(1), never = halting(1e-12);
      same(one.logits, run_all(once, toy.w, tokens, how));
      CHECK(std::ranges::count(one.loops, 1) == 40);
      same(never.logits, run_all(toy, tokens, how));
      CHECK(std::ranges::count(never.loops, T) == 40);
      CHECK(halting(0).loops.empty());
      const Toy short_one(once, 2);  // T = 1: nothing can halt
      const Ran alone = run_halting(short_one, tokens, {how.kv, how.chunk, how.prefill, 0.3});
      same(alone.logits, run_all(short_one, tokens, how));
      CHECK(std::ranges::count(alone.loops, 1) == 40);
    }
    // the formula at its ends is that of fixed T
    const std::vector<Index> ones(40, 1), all(40, T);
    CHECK(halting_flops(c, 0, ones) == prefill_flops(once, 40));
    CHECK(halting_flops(c, 0, all) == prefill_flops(c, 40));
    CHECK(halting_flops(c, 39, std::span(all).first(1)) == decode_flops(c, 39));
  }
}

TEST_CASE("a state of zeros has angle 0 and halts", "[halt]") {
  Toy toy(small_config({window(1, 3, 4), shared(1)}));
  toy.set("embed", [](Index r, Index, float v) { return r == 5 ? 0.f : v; });
  for (const char* name : {"low.0.wo", "low.0.w_down"}) toy.set(name, [](Index, Index, float) { return 0.f; });
  const Ran ran = run_halting(toy, {5, 5, 6}, {Dtype::f32, 3, 3, 1e-6});
  CHECK(ran.loops == std::vector<Index>{1, 1, 1});  // at a fixed point all rest, zeros too
  same(ran.logits, run_all(toy, {5, 5, 6}));
}

TEST_CASE("halting: counted FLOP equal the sum over positions; caches are those of T loops", "[halt][cost]") {
  for (const Config& c : looping()) {
    const Toy toy(c, 6, Dtype::bf16);
    for (const double A : thresholds(toy, tokens_of(c, 33)))
      for (const auto& [N, chunk] : std::vector<std::pair<Index, Index>>{{1, 1}, {5, 3}, {33, 33}, {33, 8}}) {
        const auto engine = make_cpu_engine(toy.c, toy.w, {Dtype::f32, 33, 100, 2, A});
        Floats logits(static_cast<std::size_t>(2 * c.vocab_size));
        std::vector<int> sequences;
        CAPTURE(brief(c), A, N, chunk);
        Exact formula = 0;
        for (const std::uint64_t b : {7, 8}) {
          sequences.push_back(engine->open());
          prefill(*engine, sequences.back(), tokens_of(c, N, b), chunk, logits.data());
          formula += halting_flops(c, 0, engine->loops_run(sequences.back()));
        }
        CHECK(formula.v == engine->counters.flops);
        CHECK((2 * cache_bytes(c, N, 4)).v == static_cast<unsigned>(engine->cache_bytes()));
        const Counters before = engine->counters;
        decode(*engine, sequences, tokens_of(c, 2), logits.data());
        formula = 0;
        for (const int s : sequences) formula += halting_flops(c, N, engine->loops_run(s).subspan(N));
        CHECK(formula.v == (engine->counters - before).flops);
      }
  }
}

TEST_CASE("a tracer sees the rows that ran, and which they are", "[halt]") {
  const Toy toy(small_config({window(2, 3, 4), shared(1)}), 4);
  const Tokens tokens = tokens_of(toy.c, 40);
  for (const double A : thresholds(toy, tokens)) {
    const auto engine = make_cpu_engine(toy.c, toy.w, {Dtype::f32, 40, 40, 1, A});
    const int sequence = engine->open();
    std::vector<std::vector<Index>> shown;
    engine->on_layer = [&](const Application& a) {
      std::vector<Index> rows(a.rows.begin(), a.rows.end());
      const std::size_t n = a.x.size() / static_cast<std::size_t>(toy.c.dim);
      if (a.rows.empty()) rows.resize(n), std::iota(rows.begin(), rows.end(), 0);
      CHECK(rows.size() == n);
      shown.push_back(rows);
    };
    Floats logits(static_cast<std::size_t>(40 * toy.c.vocab_size));
    const Segment all{sequence, tokens, Logits::all};
    engine->forward({&all, 1}, logits.data());
    const auto loops = engine->loops_run(sequence);
    REQUIRE(shown.size() == 8);  // the embeddings, 3 x 2, and the cross-decoder's
    for (Index t = 0; t < 3; ++t) {
      std::vector<Index> ran;
      for (Index i = 0; i < 40; ++i)
        if (loops[i] > t) ran.push_back(i);
      CHECK(shown[static_cast<std::size_t>(1 + 2 * t)] == ran);
      CHECK(shown[static_cast<std::size_t>(2 + 2 * t)] == ran);
    }
    CHECK(shown[7].size() == 40);
  }
}

TEST_CASE("the looped stage: by the label, or in a custom config the only one with loops above 1", "[halt]") {
  const auto custom = [](std::vector<Stage> stages) {
    Config c = small_config(std::move(stages));
    return looped_stage(c);
  };
  CHECK(looped_stage(small_arch("yoco-u", 1)) == 0);
  CHECK(looped_stage(small_arch("upper-loop", 2)) == 1);
  CHECK(looped_stage(small_arch("yoco")) == -1);
  CHECK(looped_stage(small_arch("transformer")) == -1);
  CHECK(custom({full(1, 1), window(1, 2, 4)}) == 1);
  CHECK(custom({full(1, 1), window(1, 1, 4)}) == -1);
  CHECK(custom({full(1, 2), window(1, 2, 4)}) == -1);
  Config c = small_config({window(1, 2, 4), shared(1)});
  CHECK(set_loops(c, 5) == 5);
  CHECK(c.stages[0].loops == 5);
}

}  // namespace
}  // namespace yocou::test
