/// @file
/// fixtures.h -- what the tests of the model share: comparisons, small models, ways to run them. It knows the program by
/// yocou.h alone.
///
/// Two kinds of comparison. The engine promises that a row's logits do not depend on chunk, batch or threads to the
/// bit, so everything of that kind is compared with == (same()). Against double precision the limit is a formula,
/// terms x rounding x scale (close()); a NaN is over every limit.
#pragma once
#include <array>
#include <cmath>
#include <map>
#include <nlohmann/json.hpp>
#include <numeric>

#include "catch.h"
#include "oracle.h"
#include "yocou.h"

namespace yocou::test {

using Floats = std::vector<float>;
using Tokens = std::vector<int>;
using Doubles = std::vector<double>;

inline constexpr double rounding = 0x1p-24;      // of float32: half a unit in the last place of 1
inline constexpr double bf16_rounding = 0x1p-9;  // of BF16

// ---------------------------------------------------------------------------------------------------------------------
// Comparisons

/// Passes when every pair differs by no more than `limit`; says where the worst is.
inline void close(std::span<const float> actual, std::span<const double> expected, double limit) {
  REQUIRE(actual.size() == expected.size());
  std::size_t worst = 0;
  double most = -1;
  for (std::size_t i = 0; i < actual.size(); ++i) {
    const double difference = std::fabs(static_cast<double>(actual[i]) - expected[i]);
    const double counted = std::isnan(difference) ? INFINITY : difference;
    if (counted > most) most = counted, worst = i;
  }
  if (actual.empty()) return;
  const double found = actual[worst], wanted = expected[worst];
  CAPTURE(worst, found, wanted, most, limit);
  CHECK(most <= limit);
}

/// The first index at which the two differ, or -1. A NaN differs from everything.
inline Index first_difference(std::span<const float> a, std::span<const float> b) {
  if (a.size() != b.size()) return 0;
  for (std::size_t i = 0; i < a.size(); ++i)
    if (!(a[i] == b[i])) return static_cast<Index>(i);
  return -1;
}

/// Passes when the two are equal to the bit (zeros of either sign are equal).
inline void same(std::span<const float> actual, std::span<const float> expected) {
  REQUIRE(actual.size() == expected.size());
  const Index at = first_difference(actual, expected);
  const float found = at < 0 ? 0 : actual[at], wanted = at < 0 ? 0 : expected[at];
  CAPTURE(at, found, wanted);
  CHECK(at == -1);
}

inline double largest_of(std::span<const double> v) {
  double most = 0;
  for (const double x : v) most = std::max(most, std::fabs(x));
  return most;
}

inline Doubles flat(const oracle::Matrix& rows) {
  Doubles all;
  for (const Doubles& row : rows) all.insert(all.end(), row.begin(), row.end());
  return all;
}

inline Doubles widened(std::span<const float> v) { return Doubles(v.begin(), v.end()); }

/// How far float32 logits may lie from exact ones: every application of a layer, and the head, adds to the state a sum
/// of so many terms, each rounded once, and the norms keep relative errors as they are.
inline double limit_of(const Config& c, Index N, double scale) {
  Index applications = 1, terms = 2 * c.dim + 2 * c.q_dim();
  terms += c.moe ? c.moe->active * c.moe->dim + c.moe->shared_dim + c.moe->experts : c.ffn_dim;
  for (const Stage& s : c.stages) applications += s.layers * s.loops;
  return static_cast<double>(applications * (terms + N)) * rounding * scale;
}

inline Floats random_floats(std::size_t count, std::uint64_t seed, float spread = 1) {
  std::mt19937_64 random(seed);
  std::normal_distribution<float> normal(0, spread);
  Floats v(count);
  for (float& x : v) x = normal(random);
  return v;
}

// ---------------------------------------------------------------------------------------------------------------------
// Small models

inline const std::vector<std::string>& arch_names() {
  static const std::vector<std::string> names{
      "yoco-u", "yoco", "transformer", "ut", "rins", "upper-loop", "upper-loop-unshared"};
  return names;
}

inline Stage window(Index layers, Index loops, Index W) {
  return {"low", layers, loops, Attention::window, W, /*rope=*/true, /*refresh_kv=*/false};
}
inline Stage full(Index layers, Index loops) {
  return {"mid", layers, loops, Attention::full, 0, /*rope=*/true, /*refresh_kv=*/false};
}
inline Stage shared(Index layers, Index loops = 1, bool refresh = false) {
  return {"top", layers, loops, Attention::shared, 0, /*rope=*/false, refresh};
}
inline Stage rope(Stage s, bool on) { return s.rope = on, s; }

/// A small model of odd sizes: heads 4 over 2 KV heads, dh 6.
inline Config small_config(std::vector<Stage> stages) {
  Config c;
  c.vocab_size = 29, c.dim = 20, c.heads = 4, c.kv_heads = 2, c.head_dim = 6, c.ffn_dim = 22;
  c.stages = std::move(stages);
  return c;
}

/// A model of random weights: gains off 1, matrices large enough that attention and routing are far from uniform.
/// Without a dtype each tensor takes one of the three. Data begin off every alignment but their own, as in a file.
class Toy {
 public:
  Config c;
  Weights w;

  explicit Toy(Config config, std::uint64_t seed = 1, std::optional<Dtype> dtype = Dtype::f32)
      : c(std::move(config)), w(empty_weights(c)) {
    std::mt19937_64 random(seed);
    std::normal_distribution<float> normal;
    for_each_tensor(c, w, [&](const std::string& name, const Shape& shape, Tensor& t) {
      const Dtype type = dtype ? *dtype : static_cast<Dtype>(random() % 3);
      t = as_matrix(nullptr, type, shape);
      std::vector<char>& memory = memory_[name];
      memory.resize(static_cast<std::size_t>(t.bytes() + size_of(type)));
      t.data = memory.data() + size_of(type);
      const float spread = shape.size() == 1 ? 0.3f : 1.5f / std::sqrt(static_cast<float>(shape.back()));
      const float base = shape.size() == 1 ? 1.f : 0.f;
      set(name, t, [&](Index, Index, float) { return base + spread * normal(random); });
    });
    if (c.tied_embeddings) w.head = w.embed;
  }
  Toy(const Toy&) = delete;

  /// Rewrites the tensor of that name: f(row, column, old value).
  template <class F>
  void set(const std::string& name, F&& f) {
    bool found = false;
    for_each_tensor(c, w, [&](const std::string& n, const Shape&, const Tensor& t) {
      if (n == name) found = true, set(name, t, f);
    });
    REQUIRE(found);
  }

 private:
  template <class F>
  void set(const std::string& name, const Tensor& t, F&& f) {
    Floats numbers(static_cast<std::size_t>(t.rows * t.cols));
    widen(t, 0, std::ssize(numbers), numbers.data());
    for (Index r = 0, at = 0; r < t.rows; ++r)
      for (Index k = 0; k < t.cols; ++k, ++at) numbers[at] = f(r, k, numbers[at]);
    narrow(numbers.data(), std::ssize(numbers), t.dtype, memory_[name].data() + size_of(t.dtype));
  }
  std::map<std::string, std::vector<char>> memory_;
};

inline Config with_moe(Config c, const Moe& moe) {
  c.ffn_dim = 0;
  c.moe = moe;
  return c;
}

inline Tokens tokens_of(const Config& c, Index n, std::uint64_t seed = 7) {
  std::mt19937_64 random(seed);
  Tokens tokens(static_cast<std::size_t>(n));
  for (int& t : tokens) t = static_cast<int>(random() % static_cast<std::uint64_t>(c.vocab_size));
  return tokens;
}

// ---------------------------------------------------------------------------------------------------------------------
// Ways to run a model

struct How {
  Dtype kv = Dtype::f32;
  Index chunk = 1 << 20;
  Index prefill = 1 << 20;  ///< so many tokens in chunks, the rest one by one
  double halt = 0;
};

/// All logits [N,V] of a sequence, by one engine of its own.
inline Floats run_all(const Config& c, const Weights& w, const Tokens& tokens, const How& how = {}) {
  const Index N = std::ssize(tokens), K = std::min(how.prefill, N), V = c.vocab_size;
  const auto engine = make_cpu_engine(c, w, {how.kv, std::max<Index>(1, std::min(how.chunk, K)), N, 1, how.halt});
  const int sequence = engine->open();
  Floats out(static_cast<std::size_t>(N * V));
  forward_all(*engine, c, sequence, std::span(tokens).first(K), how.chunk,
      [&](Index first, Index n, const float* rows) { std::copy_n(rows, n * V, out.begin() + first * V); });
  for (Index i = K; i < N; ++i) decode(*engine, {&sequence, 1}, {&tokens[i], 1}, &out[i * V]);
  return out;
}
inline Floats run_all(const Toy& toy, const Tokens& tokens, const How& how = {}) {
  return run_all(toy.c, toy.w, tokens, how);
}

/// The last row's logits [V] as `generate` gets them: prefill of how.prefill tokens with the early stop, then decode.
inline Floats run_last(const Toy& toy, const Tokens& tokens, const How& how = {}) {
  const Index N = std::ssize(tokens), K = std::min(how.prefill, N);
  const auto engine = make_cpu_engine(toy.c, toy.w, {how.kv, std::min(how.chunk, K), N, 1, how.halt});
  const int sequence = engine->open();
  Floats out(static_cast<std::size_t>(toy.c.vocab_size));
  prefill(*engine, sequence, std::span(tokens).first(K), how.chunk, out.data());
  for (Index i = K; i < N; ++i) decode(*engine, {&sequence, 1}, {&tokens[i], 1}, out.data());
  return out;
}

inline std::span<const float> row(const Floats& logits, Index i, Index V) {
  return std::span(logits).subspan(static_cast<std::size_t>(i * V), static_cast<std::size_t>(V));
}
inline std::span<const float> last_row(const Floats& logits, Index V) { return std::span(logits).last(V); }

/// Holds a model against the oracle; returns the logits.
inline Floats hold(const Toy& toy, const Tokens& tokens, Dtype kv = Dtype::f32) {
  const oracle::Result right = oracle::forward(toy.c, toy.w, tokens, kv == Dtype::bf16);
  const Doubles expected = flat(right.logits);
  const Floats found = run_all(toy, tokens, {kv});
  const double gap = right.router_gap;
  double limit = limit_of(toy.c, std::ssize(tokens), right.scale);
  // A key or value that lies within float32's rounding of the middle between two BF16 numbers may go the other way: one
  // element of a row of K or V then moves by a unit of BF16, and with it at most 1/sqrt(dh) of a score, or of the head.
  if (kv == Dtype::bf16) limit += 2 * bf16_rounding * right.scale / std::sqrt(static_cast<double>(toy.c.head_dim));
  CAPTURE(gap);  // a gap near the rounding of float32 would explain a large difference: another expert
  close(found, expected, limit);
  return found;
}

/// One of the seven archs at small sizes: L 4 (2 + 2), W 5.
inline Config small_arch(const std::string& arch, Index loops = 0) {
  Config c = make_config("tiny", arch, {});
  const Config sizes = small_config({});
  c.vocab_size = sizes.vocab_size, c.dim = sizes.dim, c.heads = sizes.heads, c.kv_heads = sizes.kv_heads;
  c.head_dim = sizes.head_dim, c.ffn_dim = sizes.ffn_dim;
  for (Stage& s : c.stages) s.window = s.window ? 5 : 0;
  if (loops) set_loops(c, loops);
  return c;
}

/// Any config that a checkpoint may hold, in small.
inline Config random_config(std::mt19937_64& random) {
  const auto one_of = [&](std::initializer_list<Index> v) { return *(v.begin() + random() % v.size()); };
  const auto coin = [&] { return random() % 2 == 0; };
  Config c;
  const std::pair<Index, Index> heads[] = {{4, 2}, {14, 2}, {6, 6}, {6, 1}, {1, 1}, {3, 3}, {8, 2}};
  std::tie(c.heads, c.kv_heads) = heads[random() % std::size(heads)];
  c.head_dim = c.heads > 6 ? one_of({4, 6, 10}) : one_of({2, 6, 8, 10, 16, 24, 34, 40});
  c.vocab_size = one_of({1, 5, 29, 64, 67});
  c.dim = one_of({7, 8, 20, 36, 72});
  c.norm_eps = std::array{1e-5, 1e-6, 1e-3, 0.0}[random() % 4];
  c.rope_theta = std::array{10000.0, 500.0, 1.0}[random() % 3];
  c.rope_half = coin();
  c.embed_scale = std::array{1.0, 4.5, 1e-3}[random() % 3];
  c.tied_embeddings = coin();
  if (coin()) {
    c.ffn_dim = one_of({1, 9, 22, 40, 100});
  } else {
    const Index E = one_of({1, 2, 5, 8});
    c.moe = Moe{E, 1 + static_cast<Index>(random() % static_cast<std::uint64_t>(E)), one_of({1, 7, 16}),
        one_of({0, 0, 5, 12}), coin()};
  }
  const Index own = one_of({0, 1, 1, 2});
  for (Index i = 0; i < own; ++i) {
    Stage s = coin() ? window(one_of({1, 2}), one_of({1, 2, 3}), one_of({1, 2, 5, 16, 64, 200}))
                     : full(one_of({1, 2}), one_of({1, 2}));
    s.rope = random() % 4 != 0;
    s.name += std::to_string(i);
    c.stages.push_back(s);
  }
  if (own == 0 || coin()) c.stages.push_back(rope(shared(one_of({1, 2}), one_of({1, 1, 2, 3}), coin()), coin()));
  return c;
}

/// A config in a line, for messages.
inline std::string brief(const Config& c) { return config_json(c).dump(); }

}  // namespace yocou::test
