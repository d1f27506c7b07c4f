/// @file
/// model_properties.cpp -- what must hold between runs of the program, no oracle needed.
#include <map>

#include "fixtures.h"

namespace yocou::test {
namespace {

/// The kinds of model that most properties are checked on.
std::vector<Config> kinds() {
  std::vector<Config> all;
  for (const std::string& arch : arch_names()) all.push_back(small_arch(arch));
  all.push_back(small_config({window(1, 2, 4), full(1, 2), rope(shared(2, 2, /*refresh=*/true), true)}));
  all.push_back(small_config({shared(2)}));
  all.push_back(with_moe(small_arch("yoco-u"), {5, 2, 7, 9, true}));
  all.push_back(with_moe(small_config({full(2, 1)}), {6, 3, 5, 0, false}));
  return all;
}

// ---------------------------------------------------------------------------------------------------------------------
// The architectures as values

TEST_CASE("a window of N or more equals full attention", "[property]") {
  const Index N = 70;
  for (const auto& [layers, loops] : std::vector<std::pair<Index, Index>>{{1, 1}, {2, 3}}) {
    const Toy toy(small_config({full(layers, loops), shared(1)}));
    const Tokens tokens = tokens_of(toy.c, N);
    const Floats right = run_all(toy, tokens);
    for (const Index W : {N - 1, N, N + 1, Index{1000}}) {
      Config c = toy.c;
      c.stages[0].attention = Attention::window, c.stages[0].window = W;
      for (const How& how : {How{}, How{Dtype::f32, 7, 40}}) {
        const Floats found = run_all(c, toy.w, tokens, how);
        CAPTURE(layers, loops, W);
        if (W >= N) same(found, right);
        else CHECK(first_difference(found, right) / c.vocab_size == N - 1);  // one short: the last row, and only it
      }
    }
  }
}

TEST_CASE("T loops equal T copies of the layers unrolled", "[property][portable]") {
  for (const bool moe : {false, true})
    for (const Attention attention : {Attention::window, Attention::full, Attention::shared})
      for (const Index T : {1, 2, 3, 5}) {
        Stage looped_stage = attention == Attention::window ? window(2, T, 4)
                             : attention == Attention::full ? full(2, T)
                                                            : shared(2, T);
        std::vector<Stage> stages{looped_stage};
        if (attention != Attention::shared) stages.push_back(shared(1));
        Config c = small_config(stages);
        if (moe) c = with_moe(c, {4, 2, 6, 5, true});
        const Toy toy(c);
        Config unrolled = c;
        Weights copies = toy.w;  // views of the same numbers
        unrolled.stages[0].layers = 2 * T, unrolled.stages[0].loops = 1;
        copies.stages[0].clear();
        for (Index t = 0; t < T; ++t)
          copies.stages[0].insert(copies.stages[0].end(), toy.w.stages[0].begin(), toy.w.stages[0].end());
        const Tokens tokens = tokens_of(c, 30);
        CAPTURE(moe, T, static_cast<int>(attention));
        same(run_all(toy, tokens), run_all(unrolled, copies, tokens));
        same(run_all(toy, tokens, {Dtype::f32, 4, 9}), run_all(unrolled, copies, tokens, {Dtype::f32, 30, 1}));
      }
}

TEST_CASE("loops do something, and set_loops sets them", "[property]") {
  for (const char* arch : {"yoco-u", "ut", "rins", "upper-loop", "upper-loop-unshared"}) {
    Toy toy(small_arch(arch));
    const Tokens tokens = tokens_of(toy.c, 12);
    std::vector<Floats> by_T;
    for (const Index T : {1, 2, 3, 5}) {
      set_loops(toy.c, T);
      CAPTURE(arch, T);
      hold(toy, tokens);
      by_T.push_back(run_all(toy, tokens));
      same(run_all(toy, tokens, {Dtype::f32, 1 << 20, 1}), by_T.back());
    }
    for (std::size_t i = 1; i < by_T.size(); ++i) CHECK(first_difference(by_T[i], by_T[i - 1]) >= 0);
  }
  for (const char* arch : {"yoco", "transformer", "custom"}) {
    Config c = small_arch("yoco");
    c.arch = arch;
    CHECK_THROWS_AS(set_loops(c, 2), Usage);
  }
}

TEST_CASE("with T = 1 YOCO-U is YOCO, UT and RINS are the Transformer, and the upper loops are one", "[property]") {
  const auto alike = [](const char* looped_arch, const char* plain, std::string first_stage_only = "") {
    const Toy toy(small_arch(looped_arch, 1));
    Config c = small_arch(plain);
    Weights w = toy.w;
    if (!first_stage_only.empty()) {  // RINS has its layers in two stages
      w.stages[0].insert(w.stages[0].end(), w.stages[1].begin(), w.stages[1].end());
      w.stages.pop_back();
    }
    const Tokens tokens = tokens_of(c, 21);
    CAPTURE(looped_arch, plain);
    same(run_all(toy, tokens), run_all(c, w, tokens));
    for (const Index N : {1, 5, 300}) {
      CHECK(cache_bytes(toy.c, N, 2) == cache_bytes(c, N, 2));
      CHECK(prefill_flops(toy.c, N) == prefill_flops(c, N));
      CHECK(decode_flops(toy.c, N) == decode_flops(c, N));
      CHECK(count_params(toy.c).params == count_params(c).params);
    }
  };
  alike("yoco-u", "yoco");
  alike("ut", "transformer");
  alike("rins", "transformer", "split");
  alike("upper-loop", "yoco");
  alike("upper-loop-unshared", "yoco");
}

TEST_CASE(
    "upper-loop and upper-loop-unshared agree at T = 1 and differ at T = 2, from the first row on", "[property]") {
  for (const Index T : {1, 2}) {
    const Toy toy(small_arch("upper-loop", T));
    const Config c = small_arch("upper-loop-unshared", T);
    const Tokens tokens = tokens_of(c, 15);
    const Floats once = run_all(toy, tokens), refreshed = run_all(c, toy.w, tokens);
    if (T == 1) same(once, refreshed);
    else CHECK(first_difference(once, refreshed) / c.vocab_size == 0);
  }
}

TEST_CASE("rope: false is the default of a shared stage and no one else's", "[property]") {
  Toy toy(small_config({window(2, 1, 6), shared(2)}));
  const Tokens tokens = tokens_of(toy.c, 20);
  const Floats right = run_all(toy, tokens);
  Config c = toy.c;
  c.stages[1].rope = true;  // at position 0 nothing turns; there one key is seen anyway
  CHECK(first_difference(run_all(c, toy.w, tokens), right) / c.vocab_size == 1);
  c = toy.c;
  c.stages[0].rope = false;
  CHECK(first_difference(run_all(c, toy.w, tokens), right) / c.vocab_size == 1);
  c = toy.c;
  c.rope_half = true;  // the other pairing: equal at position 0, different after
  CHECK(first_difference(run_all(c, toy.w, tokens), right) / c.vocab_size == 1);
  const auto stage = [](const std::string& text) {
    Json j = config_json(small_config({shared(1)}));
    j["stages"] = Json::parse(text);
    return read_config(j, "here").stages[0];
  };
  CHECK(!stage(R"([{"name":"a","layers":1,"attention":"shared"}])").rope);
  CHECK(stage(R"([{"name":"a","layers":1,"attention":"shared","rope":true}])").rope);
  CHECK(stage(R"([{"name":"a","layers":1,"attention":"window","window":3}])").rope);
  CHECK(stage(R"([{"name":"a","layers":1,"attention":"full"}])").rope);
  CHECK(!stage(R"([{"name":"a","layers":1,"attention":"full","rope":false}])").rope);
}

TEST_CASE("embed_scale scales the embedding and nothing else", "[property]") {
  for (const bool tied : {false, true}) {
    Config c = small_config({window(1, 2, 4), shared(1)});
    c.tied_embeddings = tied;
    c.embed_scale = 4;
    const Toy toy(c);
    Toy scaled(c);
    scaled.set("embed", [](Index, Index, float v) { return v * 4; });
    scaled.c.embed_scale = 1;
    const Tokens tokens = tokens_of(c, 20);
    const Floats found = run_all(toy, tokens);
    Floats right = run_all(scaled, tokens);
    if (tied)  // the head is the embedding as stored, not as scaled
      for (float& v : right) v /= 4;
    same(found, right);
  }
}

TEST_CASE("a tied head equals a copy of the embedding", "[property]") {
  for (const bool moe : {false, true}) {
    Config c = small_config({window(1, 2, 4), shared(1)});
    if (moe) c = with_moe(c, {4, 2, 6, 5, true});
    c.tied_embeddings = true;
    const Toy toy(c);
    Config untied = c;
    untied.tied_embeddings = false;
    Weights w = toy.w;
    const std::vector<char> copy(
        static_cast<const char*>(w.embed.data), static_cast<const char*>(w.embed.data) + w.embed.bytes());
    w.head.data = copy.data();
    same(run_all(toy, tokens_of(c, 12)), run_all(untied, w, tokens_of(c, 12)));
    CHECK(toy.w.head.data == toy.w.embed.data);  // one copy held
  }
}

// ---------------------------------------------------------------------------------------------------------------------
// One pass, chunks, steps, batches, threads

TEST_CASE("prefill of K tokens and then decode equals one pass, for every K", "[property]") {
  for (const Config& c : kinds()) {
    const Toy toy(c);
    const Tokens tokens = tokens_of(c, 40);
    const Floats right = run_all(toy, tokens);
    for (Index K = 1; K <= 40; ++K) {
      CAPTURE(brief(c), K);
      same(run_all(toy, tokens, {Dtype::f32, 1 << 20, K}), right);
      same(run_last(toy, tokens, {Dtype::f32, 1 << 20, K}), last_row(right, c.vocab_size));
    }
  }
}

TEST_CASE("chunks of every size equal one pass", "[property]") {
  for (const Config& c : kinds()) {
    const Toy toy(c);
    const Tokens tokens = tokens_of(c, 128);
    for (const Dtype kv : {Dtype::f32, Dtype::bf16}) {
      const Floats right = run_all(toy, tokens, {kv});
      for (const Index chunk : {1, 2, 3, 5, 7, 33, 64, 65, 127, 128}) {
        CAPTURE(brief(c), chunk);
        same(run_all(toy, tokens, {kv, chunk}), right);
        same(run_last(toy, tokens, {kv, chunk}), last_row(right, c.vocab_size));
      }
    }
  }
}

TEST_CASE("prompts at and about multiples of a block, then three steps", "[property]") {
  Index turn = 0;
  for (const Config& c : kinds()) {
    const Toy toy(c);
    const Tokens all = tokens_of(c, 516);
    const Floats right = run_all(toy, all);
    for (const Index N : {255, 256, 257, 511, 512, 513}) {
      const Tokens tokens(all.begin(), all.begin() + N + 3);
      CAPTURE(brief(c), N);
      const Index chunk = turn % 3 == 0 ? N : 64;
      if (++turn % 2)
        same(run_all(toy, tokens, {Dtype::f32, chunk, N}),
            std::span<const float>(right).first(tokens.size() * c.vocab_size));
      else same(run_last(toy, tokens, {Dtype::f32, chunk, N}), row(right, N + 2, c.vocab_size));
    }
    ++turn;  // the next kind takes the other half of the cases
  }
}

TEST_CASE("prompts about the ring's length, 20 greedy tokens, equal recomputing all for every token",
    "[property][portable]") {
  for (const Index W : {1, 4})
    for (const Index N : {1, 3, 4, 5, 7, 8, 9, 33}) {
      const Toy toy(small_config({window(2, 3, W), shared(2)}), 41);
      const Index V = toy.c.vocab_size;
      Tokens again = tokens_of(toy.c, N);
      const Tokens prompt = again;
      Tokens written;
      for (int i = 0; i < 20; ++i) {
        written.push_back(greedy(last_row(run_all(toy, again), V)));
        again.push_back(written.back());
      }
      const auto engine = make_cpu_engine(toy.c, toy.w, {Dtype::f32, N, N + 20, 1});
      const int sequence = engine->open();
      const Index bytes = engine->cache_bytes();
      Floats logits(static_cast<std::size_t>(V));
      prefill(*engine, sequence, prompt, N, logits.data());
      Tokens found{greedy(logits)};
      while (found.size() < 20) {
        decode(*engine, {&sequence, 1}, {&found.back(), 1}, logits.data());
        found.push_back(greedy(logits));
      }
      CAPTURE(W, N);
      CHECK(found == written);
      CHECK(engine->cache_bytes() - bytes == 256 * 2 * toy.c.kv_dim() * 4);  // the global block; the rings as before
    }
}

TEST_CASE("a batch equals its sequences alone, whatever their lengths and however a pass is composed",
    "[property][portable]") {
  for (const Config& c : kinds()) {
    const Toy toy(c);
    const Index V = c.vocab_size;
    const Index lengths[] = {1, 40, 7, 64, 23};
    std::vector<Tokens> tokens;
    std::vector<Floats> right;
    for (const Index N : lengths) {
      tokens.push_back(tokens_of(c, N + 4, static_cast<std::uint64_t>(N)));
      right.push_back(run_all(toy, tokens.back()));
    }
    const auto engine = make_cpu_engine(toy.c, toy.w, {Dtype::f32, 200, 400, 5});
    std::vector<int> sequences;
    for (std::size_t b = 0; b < 5; ++b) sequences.push_back(engine->open());
    CAPTURE(brief(c));
    // pass 1: a part of every prompt, each wanting something else; pass 2: the rest, beside one that already decodes
    std::vector<Index> done(5, 0);
    std::mt19937_64 random(5);
    while (true) {
      std::vector<Segment> pass;
      std::vector<std::pair<std::size_t, Index>> rows;  // sequence and position of every row of logits
      for (std::size_t b = 0; b < 5; ++b) {
        const Index left = lengths[b] + 4 - done[b];
        if (left == 0) continue;
        const Index n = done[b] < lengths[b] ? std::min<Index>(left, static_cast<Index>(random() % 20)) : 1;
        const Logits want = static_cast<Logits>(random() % 3);
        pass.push_back({sequences[b], std::span(tokens[b]).subspan(done[b], n), want});
        if (want == Logits::last && n > 0) rows.emplace_back(b, done[b] + n - 1);
        if (want == Logits::all)
          for (Index i = 0; i < n; ++i) rows.emplace_back(b, done[b] + i);
        done[b] += n;
      }
      if (pass.empty()) break;
      Floats logits(rows.size() * static_cast<std::size_t>(V) + 1, -77.f);
      engine->forward(pass, logits.data());
      Floats expected;
      for (const auto& [b, p] : rows)
        expected.insert(expected.end(), right[b].begin() + p * V, right[b].begin() + (p + 1) * V);
      expected.push_back(-77.f);  // nothing is written behind the wanted rows
      same(logits, expected);
    }
  }
}

TEST_CASE("a closed sequence leaves nothing to the next one", "[property]") {
  for (const Config& c : kinds()) {
    const Toy toy(c);
    const Tokens first = tokens_of(c, 50, 1), second = tokens_of(c, 20, 2);
    const auto engine = make_cpu_engine(toy.c, toy.w, {Dtype::f32, 50, 100, 2});
    Floats logits(static_cast<std::size_t>(c.vocab_size));
    const int other = engine->open();
    prefill(*engine, other, first, 50, logits.data());
    for (int i = 0; i < 3; ++i) {
      const int a = engine->open();
      prefill(*engine, a, first, 50, logits.data());
      engine->close(a);
      const int b = engine->open();
      CHECK(a == b);
      prefill(*engine, b, second, 7, logits.data());
      same(logits, last_row(run_all(toy, second), c.vocab_size));
      engine->close(b);
    }
    const Tokens next{3};
    decode(*engine, {&other, 1}, next, logits.data());  // and the one beside them has noticed nothing
    Tokens all = first;
    all.push_back(3);
    same(logits, last_row(run_all(toy, all), c.vocab_size));
  }
}

TEST_CASE("an engine keeps its own copy of the config", "[property][portable]") {
  for (const Config& kind : kinds()) {
    const Toy toy(kind);
    const Tokens tokens = tokens_of(kind, 30);
    const Floats right = run_last(toy, tokens);
    Config c = kind;
    const auto engine = make_cpu_engine(c, toy.w, {Dtype::f32, 30, 30, 1});
    for (Stage& s : c.stages) s.loops += 3, s.layers += 1, s.window *= 2;  // the caller's: caches that nobody has made
    c.vocab_size = 1, c.dim = 1, c.head_dim = 2, c.norm_eps = 1;
    const int sequence = engine->open();
    Floats logits(static_cast<std::size_t>(kind.vocab_size));
    prefill(*engine, sequence, std::span(tokens).first(20), 30, logits.data());
    for (std::size_t i = 20; i < 30; ++i) decode(*engine, {&sequence, 1}, {&tokens[i], 1}, logits.data());
    CAPTURE(brief(kind));
    same(logits, right);
    CHECK(Exact(engine->cache_bytes()) == cache_bytes(kind, 30, 4));
  }
}

TEST_CASE("a sequence that is not open is refused in one line by everything that takes one", "[property]") {
  const Toy toy(small_arch("yoco-u"));
  const Tokens tokens = tokens_of(toy.c, 12);
  const Floats right = run_all(toy, tokens);
  const auto engine = make_cpu_engine(toy.c, toy.w, {Dtype::f32, 24, 100, 4});
  const int open = engine->open(), closed = engine->open();
  engine->close(closed);
  Floats logits(static_cast<std::size_t>(3 * toy.c.vocab_size));
  Tokens drawn(3);
  const Doubles u(3, 0.5);
  const Index bytes = engine->cache_bytes();
  for (std::size_t i = 0; i < tokens.size(); ++i) {
    for (const int number : {closed, closed + 1, -1, 1 << 30}) {
      const std::string line = "sequence " + std::to_string(number) + " is not open";
      const Segment bad{number, tokens, Logits::last}, good{open, std::span(tokens).subspan(i), Logits::last};
      const Segment before[] = {bad, good}, behind[] = {good, bad};
      CHECK_THROWS_WITH(engine->close(number), line);
      for (const std::span<const Segment> pass :
          {std::span(&bad, 1), std::span<const Segment>(before), std::span<const Segment>(behind)}) {
        CHECK_THROWS_WITH(engine->forward(pass, logits.data()), line);
        CHECK_THROWS_WITH(engine->forward_sample(pass, {}, std::span(u).first(pass.size()), drawn.data()), line);
      }
    }
    decode(*engine, {&open, 1}, {&tokens[i], 1}, logits.data());  // what was refused has left no trace
    same(std::span(logits).first(toy.c.vocab_size), row(right, static_cast<Index>(i), toy.c.vocab_size));
  }
  CHECK(engine->open() == closed);
  engine->close(closed);
  CHECK(engine->cache_bytes() > bytes);  // the open one's block alone
  engine->close(open);
  CHECK(engine->cache_bytes() == 0);
}

TEST_CASE("any number of threads gives the same bits, at sizes where threads work", "[property][threads]") {
  const int before = thread_count();
  for (const bool moe : {false, true}) {
    Config c = small_config({window(1, 2, 100), full(1, 1), shared(1)});
    c.dim = 130, c.heads = 6, c.kv_heads = moe ? 2 : 1, c.head_dim = 36, c.ffn_dim = 300, c.vocab_size = 257;
    if (moe) c = with_moe(c, {6, 2, 150, 100, true});
    const Toy toy(c, 43, std::nullopt);
    const Tokens tokens = tokens_of(c, 640);
    std::vector<Floats> found;
    for (const int threads : {1, 2, 3, 5}) {
      set_thread_count(threads);
      for (const How& how : {How{Dtype::bf16}, How{Dtype::bf16, 123, 630}}) found.push_back(run_all(toy, tokens, how));
    }
    set_thread_count(before);
    CAPTURE(moe);
    for (std::size_t i = 1; i < found.size(); ++i) same(found[i], found[0]);
  }
}

// ---------------------------------------------------------------------------------------------------------------------
// Who sees whom

TEST_CASE("a changed future token changes nothing before it", "[property][causal]") {
  for (const Config& c : kinds()) {
    const Toy toy(c);
    const Index N = 70;
    const Tokens tokens = tokens_of(c, N);
    const Floats before = run_all(toy, tokens);
    for (const Index at : {1, 15, 16, 31, 33, 47, 64, 69}) {
      Tokens changed = tokens;
      changed[at] = static_cast<int>((changed[at] + 1) % c.vocab_size);
      const Floats after = run_all(toy, changed);
      CAPTURE(brief(c), at);
      CHECK(first_difference(before, after) / c.vocab_size == at);  // nothing before, and the row itself at once
      const Floats chunked = run_all(toy, changed, {Dtype::f32, 9});
      CHECK(first_difference(before, chunked) / c.vocab_size == at);
    }
  }
}

/// The last row that a changed token 0 changes, and whether all rows up to it change.
std::pair<Index, bool> reached_from_0(const Toy& toy, Index N, const How& how = {}) {
  const Index V = toy.c.vocab_size;
  const Tokens tokens = tokens_of(toy.c, N);
  Tokens changed = tokens;
  changed[0] = static_cast<int>((changed[0] + 1) % V);
  const Floats a = run_all(toy, tokens, how), b = run_all(toy, changed, how);
  Index last = -1, count = 0;
  for (Index i = 0; i < N; ++i)
    if (first_difference(row(a, i, V), row(b, i, V)) >= 0) last = i, ++count;
  return {last, count == last + 1};
}

TEST_CASE("m applications of a window reach back exactly m (W - 1) positions", "[property][window][portable]") {
  for (const Index W : {1, 2, 4, 7})
    for (const auto& [layers, loops] : std::vector<std::pair<Index, Index>>{{1, 1}, {3, 1}, {1, 3}, {2, 2}}) {
      const Index m = layers * loops, reach = m * (W - 1), N = reach + 6;
      Config c = small_config({window(layers, loops, W)});
      const Toy toy(c, 47);
      for (const How& how : {How{}, How{Dtype::f32, 3}, How{Dtype::f32, 1 << 20, 1}, How{Dtype::bf16, 5}}) {
        CAPTURE(W, layers, loops);
        CHECK(reached_from_0(toy, N, how) == std::pair{reach, true});
      }
    }
  // as the pitfall has it: one application with W 4 changes 0..3 of 12; three change 0..9
  CHECK(reached_from_0(Toy(small_config({window(1, 1, 4)})), 12).first == 3);
  CHECK(reached_from_0(Toy(small_config({window(3, 1, 4)})), 12).first == 9);
  CHECK(reached_from_0(Toy(small_config({window(1, 3, 4)})), 12).first == 9);
}

TEST_CASE("what the windows no longer reach is still seen through the global cache", "[property][window]") {
  const Toy alone(small_config({window(2, 3, 3)})), yoco_u(small_config({window(2, 3, 3), shared(1)}));
  CHECK(reached_from_0(alone, 40).first == 12);
  CHECK(reached_from_0(yoco_u, 40) == std::pair<Index, bool>{39, true});
  // and a full stage sees all
  CHECK(reached_from_0(Toy(small_config({full(1, 1)})), 40) == std::pair<Index, bool>{39, true});
}

TEST_CASE("shifting all positions: nothing in a NoPE stage, rounding in a RoPE stage", "[property]") {
  // Text behind junk longer than the windows' whole reach: rows that see text only must not know where it begins.
  for (const bool turns : {false, true}) {
    const Config c = small_config({rope(window(1, 3, 5), turns)});
    const Toy toy(c, 53);
    const Index V = c.vocab_size, reach = 3 * 4, n = 40;
    const Tokens text = tokens_of(c, n, 1);
    const auto behind = [&](Index junk) {
      Tokens all = tokens_of(c, junk, static_cast<std::uint64_t>(100 + junk));
      all.insert(all.end(), text.begin(), text.end());
      const Floats logits = run_all(toy, all);
      return Floats(logits.begin() + (junk + reach) * V, logits.end());
    };
    const Floats plain = behind(0);
    const double most = largest_of(widened(plain));
    for (const Index junk : {1, 13, 64, 128, 1000}) {
      CAPTURE(turns, junk);
      const Floats found = behind(junk);
      if (!turns && junk % 64 == 0)
        same(found, plain);  // softmax steps lie at multiples of 64, so here even bits agree
      // an angle rounds once to float32, the rotation once more: like two more terms of every score
      else close(found, widened(plain), 2 * limit_of(c, n, most));
      if (turns) CHECK(first_difference(found, plain) >= 0);
    }
  }
  // The shared stage has no positions at all: the last row sees a set of tokens.
  for (const bool turns : {false, true}) {
    const Toy toy(small_config({rope(shared(1), turns)}), 59);
    Tokens tokens = tokens_of(toy.c, 100);
    const Floats before = run_last(toy, tokens);
    std::reverse(tokens.begin(), tokens.end() - 1);
    const Floats after = run_last(toy, tokens);
    const double most = largest_of(widened(before)), limit = 2 * limit_of(toy.c, 100, most);
    if (!turns) close(after, widened(before), limit);
    else {
      double difference = 0;
      for (std::size_t i = 0; i < after.size(); ++i)
        difference = std::max(difference, std::fabs(static_cast<double>(after[i]) - before[i]));
      CHECK(difference > 100 * limit);
    }
  }
}

TEST_CASE("zeroing one KV head's values silences the query heads that read it, and no others", "[property]") {
  for (const auto& heads : std::vector<std::pair<Index, Index>>{{4, 2}, {14, 2}, {6, 6}, {6, 1}, {6, 3}})
    for (const Attention attention : {Attention::window, Attention::full, Attention::shared}) {
      const Index H = heads.first, G = heads.second;
      Config c = small_config({attention == Attention::window ? window(1, 2, 6)
                               : attention == Attention::full ? full(1, 2)
                                                              : shared(1, 2)});
      c.heads = H, c.kv_heads = G;
      const Index dh = c.head_dim;
      const Tokens tokens = tokens_of(c, 20);
      const Floats before = run_all(Toy(c), tokens);
      const std::string stage = c.stages[0].name + ".0.";
      for (Index g = 0; g < G; ++g) {
        Toy no_values(c), no_output(c);
        no_values.set(attention == Attention::shared ? "kv.wv" : stage + "wv",
            [&](Index r, Index, float v) { return r / dh == g ? 0.f : v; });
        no_output.set(stage + "wo", [&](Index, Index k, float v) {  // columns of the heads h with floor(h / (H/G)) = g
          const Index h = k / dh;
          return h >= g * (H / G) && h < (g + 1) * (H / G) ? 0.f : v;
        });
        CAPTURE(H, G, g, static_cast<int>(attention));
        const Floats found = run_all(no_values, tokens);
        same(found, run_all(no_output, tokens));
        CHECK(first_difference(found, before) >= 0);
      }
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// Experts

TEST_CASE("a mixture of one expert equals a dense model", "[property][moe]") {
  for (const bool normalize : {false, true})
    for (const auto& stages : {std::vector{window(2, 2, 4), shared(1)}, std::vector{full(2, 1)}}) {
      const Config dense = small_config(stages);
      const Toy toy(dense, 61);
      const Config c = with_moe(dense, {1, 1, dense.ffn_dim, 0, normalize});
      Toy mixture(c, 62);
      Weights w = mixture.w;  // router from here, everything else from the dense model
      w.embed = toy.w.embed, w.head = toy.w.head, w.norm = toy.w.norm;
      w.kv_norm = toy.w.kv_norm, w.kv_wk = toy.w.kv_wk, w.kv_wv = toy.w.kv_wv;
      for (std::size_t s = 0; s < stages.size(); ++s)
        for (std::size_t l = 0; l < w.stages[s].size(); ++l) {
          const Tensor router = w.stages[s][l].router;
          w.stages[s][l] = toy.w.stages[s][l];
          w.stages[s][l].router = router;
          w.stages[s][l].experts = toy.w.stages[s][l].dense;
        }
      const Tokens tokens = tokens_of(c, 25);
      same(run_all(c, w, tokens), run_all(toy, tokens));
    }
}

TEST_CASE("a shared expert alone equals a dense model when the routed ones write nothing", "[property][moe]") {
  const Config dense = small_config({window(1, 2, 4), shared(1)});
  const Toy toy(dense, 63);
  const Config c = with_moe(dense, {4, 2, 6, dense.ffn_dim, true});
  Toy mixture(c, 64);
  for (const char* name : {"low.0.experts.w_down", "top.0.experts.w_down"})
    mixture.set(name, [](Index, Index, float) { return 0.f; });
  Weights w = toy.w;
  for (std::size_t s = 0; s < 2; ++s) {
    w.stages[s][0].router = mixture.w.stages[s][0].router;
    w.stages[s][0].experts = mixture.w.stages[s][0].experts;
    w.stages[s][0].shared = toy.w.stages[s][0].dense;
  }
  same(run_all(c, w, tokens_of(c, 25)), run_all(toy, tokens_of(c, 25)));
}

TEST_CASE("permuting the experts, router rows along, changes nothing but the order of a sum", "[property][moe]") {
  for (const bool normalize : {false, true}) {
    const Moe moe{6, 3, 7, 4, normalize};
    const Config c = with_moe(small_config({window(2, 2, 5), shared(1)}), moe);
    const Toy toy(c, 67);
    Toy permuted(c, 67);
    const Index order[] = {4, 2, 5, 0, 1, 3};
    for (const std::string layer : {"low.0.", "low.1.", "top.0."}) {
      std::map<std::string, Floats> old;
      for_each_tensor(c, toy.w, [&](const std::string& name, const Shape&, const Tensor& t) {
        old[name].assign(static_cast<const float*>(t.data), static_cast<const float*>(t.data) + t.rows * t.cols);
      });
      const auto rearrange = [&](const std::string& name, Index rows, Index cols) {  // blocks of `rows` rows
        permuted.set(layer + name,
            [&](Index r, Index k, float) { return old[layer + name][(order[r / rows] * rows + r % rows) * cols + k]; });
      };
      rearrange("router", 1, c.dim);
      rearrange("experts.w_gate", moe.dim, c.dim);
      rearrange("experts.w_up", moe.dim, c.dim);
      rearrange("experts.w_down", c.dim, moe.dim);
    }
    const Tokens tokens = tokens_of(c, 30);
    const Floats before = run_all(toy, tokens), after = run_all(permuted, tokens);
    CAPTURE(normalize);
    close(after, widened(before), 2 * limit_of(c, 30, largest_of(widened(before))));
    Toy wrong(c, 67);  // the router alone permuted: other experts
    wrong.set("low.0.router", [&](Index e, Index k, float) {
      return static_cast<const float*>(toy.w.stages[0][0].router.data)[order[e] * c.dim + k];
    });
    CHECK(first_difference(run_all(wrong, tokens), before) / c.vocab_size <= 1);
  }
}

// ---------------------------------------------------------------------------------------------------------------------
// The early stop, bad numbers

TEST_CASE("prefill runs the shared stage for the last position only, and all rows when all are wanted", "[property]") {
  for (const bool refresh : {false, true})
    for (const Index T : {1, 3}) {
      const Toy toy(small_config({window(1, 1, 3), shared(2, T, refresh)}));
      const Tokens tokens = tokens_of(toy.c, 30);
      Floats logits(30 * 29);
      const auto engine = make_cpu_engine(toy.c, toy.w, {Dtype::f32, 30, 64, 2});
      const auto rows = [&](int sequence, Index n, Logits want) {
        const std::uint64_t before = engine->counters.cross_positions;
        const Segment s{sequence, std::span(tokens).first(n), want};
        engine->forward({&s, 1}, logits.data());
        return static_cast<Index>(engine->counters.cross_positions - before);
      };
      CAPTURE(refresh, T);
      const int a = engine->open(), b = engine->open();
      CHECK(rows(a, 10, Logits::none) == (refresh ? (T - 1) * 10 : 0));
      CHECK(rows(a, 20, Logits::last) == (refresh ? (T - 1) * 20 + 1 : T));
      CHECK(rows(a, 1, Logits::last) == T);
      CHECK(rows(b, 30, Logits::all) == T * 30);
    }
}

TEST_CASE("rows of a failed pass beyond a sequence's length are never read", "[property][cache]") {
  // Token 28's embedding is NaN. A pass that meets it throws, its NaN keys already behind the good ones in the cache;
  // the sequence's length has not moved, so those rows are as unwritten as fresh memory.
  for (const auto& stages : {std::vector{window(1, 2, 400), full(1, 1), shared(1, 2)},
           std::vector{full(1, 2), rope(shared(1, 2, true), true)}})
    for (const Dtype kv : {Dtype::f32, Dtype::bf16}) {
      Toy toy(small_config(stages));
      const Index V = 29;
      toy.set("embed", [](Index r, Index, float v) { return r == 28 ? std::nanf("") : v; });
      Tokens tokens = tokens_of(toy.c, 80);
      for (int& t : tokens) t = t == 28 ? 0 : t;
      const Floats right = run_all(toy, tokens, {kv});
      const auto engine = make_cpu_engine(toy.c, toy.w, {kv, 300, 400, 1});
      const int sequence = engine->open();
      const Tokens poison(250, 28);
      Floats logits(static_cast<std::size_t>(V));
      for (Index i = 0; i < 80;) {
        const Segment bad{sequence, poison, Logits::last};
        CHECK_THROWS_AS(engine->forward({&bad, 1}, logits.data()), Error);
        const Index n = i < 60 ? 7 : 1;
        const Segment good{sequence, std::span(tokens).subspan(i, std::min(n, 80 - i)), Logits::last};
        engine->forward({&good, 1}, logits.data());
        i += std::ssize(good.tokens);
        CAPTURE(i, brief(toy.c));
        same(logits, row(right, i - 1, V));
      }
    }
}

TEST_CASE("logits that are not finite, and tokens outside the vocabulary, are refused", "[property]") {
  Toy toy(small_config({window(1, 1, 3), shared(1)}));
  Floats logits(5 * 29);
  const auto message = [&](const Tokens& tokens, Logits want) -> std::string {
    const auto engine = make_cpu_engine(toy.c, toy.w, {Dtype::f32, 5, 5, 1});
    const Segment s{engine->open(), tokens, want};
    try {
      engine->forward({&s, 1}, logits.data());
    } catch (const Error& e) {
      return e.what();
    }
    return "";
  };
  CHECK(message({0, 28}, Logits::all) == "");
  CHECK(message({0, 29}, Logits::none).find("token 29 is outside the vocabulary 0..28") == 0);
  CHECK(message({-1}, Logits::none).find("token -1 is outside") == 0);
  toy.set("head", [](Index r, Index, float v) { return r == 5 ? INFINITY : v; });
  CHECK(message({0, 1, 2}, Logits::last).find("logit of token 5 at position 2 is") == 0);
  CHECK(message({0, 1, 2}, Logits::all).find("logit of token 5 at position 0 is") == 0);
  CHECK(message({0, 1, 2}, Logits::none) == "");
}

TEST_CASE("tokens drawn inside the engine are those drawn from its logits", "[property][sampler][portable]") {
  for (const double temperature : {0.0, 0.8}) {
    const Toy toy(small_arch("yoco-u"));
    Sampling how;
    how.temperature = temperature, how.top_k = 9, how.top_p = 0.9;
    const auto engine = make_cpu_engine(toy.c, toy.w, {Dtype::f32, 60, 100, 2}),
               twin = make_cpu_engine(toy.c, toy.w, {Dtype::f32, 60, 100, 2});
    const Tokens a = tokens_of(toy.c, 20, 1), b = tokens_of(toy.c, 7, 2);
    Segment pass[] = {{engine->open(), a, Logits::last}, {engine->open(), b, Logits::all}};
    CHECK(twin->open() == pass[0].sequence);
    CHECK(twin->open() == pass[1].sequence);
    for (int i = 0; i < 5; ++i) {
      const Index rows = i == 0 ? 8 : 2;
      Doubles u;
      for (Index r = 0; r < rows; ++r) u.push_back(static_cast<double>(r * 5 + i) / 41);
      Tokens drawn(static_cast<std::size_t>(rows), -1), right;
      Floats logits(static_cast<std::size_t>(rows * toy.c.vocab_size));
      engine->forward_sample(pass, how, u, drawn.data());
      twin->forward(pass, logits.data());
      for (Index r = 0; r < rows; ++r) right.push_back(draw(row(logits, r, toy.c.vocab_size), how, u[r]));
      CAPTURE(temperature, i);
      CHECK(drawn == right);
      pass[0].tokens = std::span(a).subspan(static_cast<std::size_t>(i), 1);
      pass[1].tokens = std::span(b).subspan(static_cast<std::size_t>(i), 1);
    }
  }
}

}  // namespace
}  // namespace yocou::test
