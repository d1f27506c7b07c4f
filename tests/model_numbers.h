/// @file
/// model_numbers.h -- part of model.cpp: numbers, products, the parts of a layer, the sampler.
#pragma once

namespace yocou::test {
namespace {

// ---------------------------------------------------------------------------------------------------------------------
// Numbers

TEST_CASE("storing rounds to the nearest, ties to even, and keeps NaN and infinity", "[numbers]") {
  const float inf = std::numeric_limits<float>::infinity(), nan = std::numeric_limits<float>::quiet_NaN();
  // BF16 keeps 8 bits of significand: between 1 (3f80) and 1 + 2^-7 (3f81) the middle is 1 + 2^-8.
  CHECK(bf16_bits(1.f) == 0x3f80);
  CHECK(bf16_bits(1.f + 0x1p-8f) == 0x3f80);             // a tie goes to the even one, down here
  CHECK(bf16_bits(1.f + 0x1p-7f + 0x1p-8f) == 0x3f82);   // and up here
  CHECK(bf16_bits(1.f + 0x1p-8f + 0x1p-23f) == 0x3f81);  // just above a tie
  CHECK(bf16_bits(1.f + 0x1p-8f - 0x1p-23f) == 0x3f80);
  CHECK(bf16_bits(-1.f - 0x1p-7f - 0x1p-8f) == 0xbf82);
  CHECK(bf16_bits(-0.f) == 0x8000);
  CHECK(bf16_bits(inf) == 0x7f80);
  CHECK(bf16_bits(-inf) == 0xff80);
  CHECK(bf16_bits(std::numeric_limits<float>::max()) == 0x7f80);  // beyond the largest BF16: infinity
  CHECK(std::isnan(to_float(Bf16{bf16_bits(nan)})));
  CHECK(std::isnan(to_float(Bf16{bf16_bits(std::bit_cast<float>(0x7f800001u))})));  // payload in the lost half only
  CHECK(std::isnan(to_float(Bf16{bf16_bits(std::bit_cast<float>(0xffffffffu))})));
  // F16 keeps 11 bits.
  CHECK(f16_bits(1.f + 0x1p-11f) == 0x3c00);
  CHECK(f16_bits(1.f + 0x1p-10f + 0x1p-11f) == 0x3c02);
  CHECK(f16_bits(1.f + 0x1p-11f + 0x1p-23f) == 0x3c01);
  CHECK(f16_bits(65504.f) == 0x7bff);
  CHECK(f16_bits(65520.f) == 0x7c00);  // the tie above the largest number
  CHECK(f16_bits(0x1p-24f) == 0x0001);
  CHECK(f16_bits(0x1p-25f) == 0x0000);
  CHECK(std::isnan(to_float(F16{f16_bits(nan)})));
}

TEST_CASE("every 16-bit pattern reads as what its bits say, one by one, eight by eight and as a tail", "[numbers]") {
  std::vector<std::uint16_t> bits(1 << 16);
  std::iota(bits.begin(), bits.end(), std::uint16_t{0});
  for (const Dtype t : {Dtype::bf16, Dtype::f16}) {
    const Tensor all{bits.data(), t, 1, 1 << 16};
    Index wrong = 0, first = -1;
    with_type(t, [&](auto num) {
      const auto* p = reinterpret_cast<const decltype(num)*>(bits.data());
      for (Index i = 0; i < 1 << 16; ++i) {
        const float one = to_float(p[i]);
        alignas(32) float eight[8], tail[8];
        Lanes::Map(eight) = load8(p + i / 8 * 8);
        Lanes::Map(tail) = load_tail(p + i / 8 * 8, i % 8 + 1);
        const double right = oracle::number(all, 0, i);
        const auto agrees = [&](float v) { return std::isnan(right) ? std::isnan(v) : v == right; };
        const bool zeros = std::all_of(tail + i % 8 + 1, tail + 8, [](float v) { return v == 0; });
        if (!(agrees(one) && agrees(eight[i % 8]) && (i % 8 == 7 || (agrees(tail[i % 8]) && zeros))))
          if (!wrong++) first = i;
        // a number that is stored again is the same number
        if (!std::isnan(right) && (t == Dtype::bf16 ? bf16_bits(one) : f16_bits(one)) != bits[i] && !wrong++) first = i;
      }
    });
    CAPTURE(name_of(t), first);
    CHECK(wrong == 0);
  }
}

TEST_CASE("exp_fast is within 2 ulp of e^x from -87 to 88", "[numbers]") {
  double worst = 0;
  float at = 0;
  const auto look = [&](float x) {
    const double right = std::exp(static_cast<double>(x)), unit = std::ldexp(1.0, std::ilogb(right) - 23);
    const double ulps = std::fabs(exp_fast(x) - right) / std::max(unit, 0x1p-149);
    if (!(ulps <= worst)) worst = ulps, at = x;
  };
  for (Index i = 0; i <= 1'000'000; ++i) look(-87.f + 175.f * static_cast<float>(i) / 1e6f);
  for (float x = 0x1p-40f; x < 1; x *= 1.01f) look(x), look(-x);
  CAPTURE(at, worst);
  CHECK(worst <= 2);
  CHECK(exp_fast(0.f) == 1.f);
  CHECK(exp_fast(-0.f) == 1.f);
}

TEST_CASE("exp_fast rises with x near 0 and where its parts meet", "[numbers]") {
  // Softmax and silu see it mostly at small arguments: there no value may be followed by a lower one.
  const auto rises = [](float from, int count) {
    float x = from, last = exp_fast(from);
    for (int i = 0; i < count; ++i) {
      x = std::nextafter(x, INFINITY);
      const float y = exp_fast(x);
      if (!(y >= last)) return false;
      last = y;
    }
    return true;
  };
  CHECK(rises(-0x1p-10f, 200'000));
  CHECK(rises(-0x1p-24f, 200'000));
  CHECK(rises(-1e-44f, 200'000));  // through the denormals and 0
  CHECK(rises(0x1p-24f, 200'000));
  CHECK(rises(0x1p-10f, 200'000));
}

TEST_CASE("exp_fast at its ends: 0 below, no less than at 88 above, NaN stays NaN", "[numbers]") {
  const float inf = std::numeric_limits<float>::infinity();
  CHECK(exp_fast(-inf) == 0);
  CHECK(exp_fast(-1e30f) == 0);
  CHECK(exp_fast(-88.f) == 0);
  CHECK(exp_fast(-87.f) > 0);
  CHECK(std::isfinite(exp_fast(88.f)));
  CHECK(exp_fast(inf) >= exp_fast(88.f));
  CHECK(exp_fast(100.f) >= exp_fast(88.f));
  CHECK(std::isnan(exp_fast(std::numeric_limits<float>::quiet_NaN())));
  Floats v(19, std::numeric_limits<float>::quiet_NaN());  // the same inside a vectorised loop
  v[3] = -inf, v[8] = 0, v[17] = inf;
  for (float& x : v) x = exp_fast(x);
  CHECK(v[3] == 0);
  CHECK(v[8] == 1);
  CHECK(v[17] >= exp_fast(88.f));
  CHECK(std::isnan(v[0]));
  CHECK(std::isnan(v[18]));
}

// ---------------------------------------------------------------------------------------------------------------------
// Products

/// The numbers v stored as `t`, and read back.
struct Stored {
  std::vector<char> bytes;
  Tensor tensor;
  Stored(const Floats& v, Dtype t, Index rows, Index cols) : bytes(v.size() * 4 + 4), tensor{nullptr, t, rows, cols} {
    tensor.data = bytes.data() + size_of(t);  // off alignment, as in a file
    with_type(t, [&](auto num) {
      auto* p = reinterpret_cast<decltype(num)*>(bytes.data() + size_of(t));
      for (std::size_t i = 0; i < v.size(); ++i) store(v[i], p + i);
    });
  }
};

TEST_CASE("products of awkward sizes equal a double loop, and a row's result is its own", "[products]") {
  const Index rows_of_x[] = {1, 2, 3, 4, 5, 6, 7, 8, 9, 191, 192, 193},
              rows_of_w[] = {1, 2, 3, 4, 5, 7, 63, 64, 65, 130};
  const Index depths[] = {1, 7, 8, 9, 63, 64, 65, 511, 512, 513, 1023, 1024, 1025, 2050};
  Index turn = 0;
  for (const Index K : depths)
    for (const Index m : rows_of_w)
      for (const Index n : rows_of_x) {
        ++turn;
        if (n * m * K > 300'000 && turn % 7) continue;  // of the large ones every seventh
        const Dtype type = static_cast<Dtype>(turn % 3);
        const bool add = turn / 3 % 2;
        const auto seed = static_cast<std::uint64_t>(turn);
        const Floats x = random_floats(n * K, seed), start = random_floats(n * m, seed + 1);
        const Stored w(random_floats(m * K, seed + 2), type, m, K);
        const Product product{x.data(), n, w.tensor, nullptr, add};
        Floats y(start);
        Counters count;
        Product now = product;
        now.y = y.data();
        multiply({&now, 1}, count);
        CAPTURE(n, m, K, name_of(type), add);
        Doubles numbers;
        for (Index i = 0; i < m * K; ++i) numbers.push_back(oracle::number(w.tensor, i / K, i % K));
        double most = -INFINITY, expected = 0;
        Index worst = 0;
        for (Index i = 0; i < n * m; ++i) {
          double sum = 0, size = 0;  // K products and K - 1 sums, and one more sum with `add`: each rounds once
          for (Index k = 0; k < K; ++k) {
            const double term = double{x[i / m * K + k]} * numbers[i % m * K + k];
            sum += term, size += std::fabs(term);
          }
          if (add) sum += start[i], size += std::fabs(start[i]);
          const double over = std::fabs(y[i] - sum) - static_cast<double>(K + 1) * rounding * size;
          if (!(over <= most)) most = over, worst = i, expected = sum;
        }
        CAPTURE(worst, y[worst], expected, most);
        CHECK(most <= 0);
        CHECK(count.flops == static_cast<std::uint64_t>(2 * n * m * K));
        CHECK(count.bytes == static_cast<std::uint64_t>(m * K * size_of(type)));
        for (const Index i : {Index{0}, n / 2, n - 1}) {  // alone, or among others: the same bits
          Floats alone(start.begin() + i * m, start.begin() + (i + 1) * m);
          Product one{x.data() + i * K, 1, w.tensor, alone.data(), add};
          multiply({&one, 1}, count);
          same(alone, std::span<const float>(y).subspan(i * m, m));
        }
      }
}

TEST_CASE("several products of one region, one of them empty", "[products]") {
  const Floats x = random_floats(5 * 9, 1);
  const Stored a(random_floats(3 * 9, 2), Dtype::f32, 3, 9), b(random_floats(4 * 9, 3), Dtype::bf16, 4, 9);
  Floats ya(15), yb(20), untouched(4, 8.f), alone_a(15), alone_b(20);
  Counters together, one;
  const Product all[] = {{x.data(), 5, a.tensor, ya.data()}, {x.data(), 0, b.tensor, untouched.data()},
      {x.data(), 5, b.tensor, yb.data()}};
  multiply(all, together);
  multiply(std::array{Product{x.data(), 5, a.tensor, alone_a.data()}}, one);
  multiply(std::array{Product{x.data(), 5, b.tensor, alone_b.data()}}, one);
  same(ya, alone_a);
  same(yb, alone_b);
  same(untouched, Floats(4, 8.f));
  CHECK(together.flops == 2 * 5 * 9 * (3 + 4));
  CHECK(together.flops == one.flops);
  CHECK(together.bytes == one.bytes);  // a product of no rows reads no weights
}

TEST_CASE("dot adds in one order", "[products]") {
  for (const Index n : {0, 1, 7, 8, 9, 16, 63, 100}) {
    const Floats a = random_floats(n, 1), b = random_floats(n, 2);
    double sum = 0, size = 0;
    for (Index i = 0; i < n; ++i) sum += double{a[i]} * b[i], size += std::fabs(double{a[i]} * b[i]);
    CAPTURE(n);
    CHECK(std::fabs(dot(a.data(), b.data(), n) - sum) <= static_cast<double>(n) * rounding * size);
  }
}

// ---------------------------------------------------------------------------------------------------------------------
// The parts of a layer

TEST_CASE("RMSNorm: epsilon inside the root, the gain applied, a row of zeros stays zero", "[norm]") {
  const Index D = 11, n = 3;
  for (const double eps : {1e-5, 1e-6, 1e-3, 0.0})
    for (const float size : {1.f, 1e-3f, 1e3f}) {
      Floats x = random_floats(n * D, 5, size);
      std::fill_n(x.begin() + D, D, 0.f);  // the row in the middle
      const Stored g(random_floats(D, 6), Dtype::bf16, 1, D);
      Floats y(x.size(), -1.f);
      rms_norm(x.data(), g.tensor, static_cast<float>(eps), n, y.data());
      Doubles right;
      for (Index i = 0; i < n; ++i)
        for (const double v : oracle::rms_norm(Doubles(x.begin() + i * D, x.begin() + (i + 1) * D), g.tensor, eps))
          right.push_back(v);
      CAPTURE(eps, size);
      close(y, right, static_cast<double>(D + 4) * rounding * largest_of(right));
      same(std::span<const float>(y).subspan(D, D), Floats(D, 0.f));
    }
  // by hand: x = (3, 4), mean square 12.5, eps 3.5: divided by 4
  const Floats x{3, 4}, gain{1, 2};
  Floats y(2);
  rms_norm(x.data(), Tensor{gain.data(), Dtype::f32, 1, 2}, 3.5f, 1, y.data());
  CHECK(y[0] == 0.75f);
  CHECK(y[1] == 2.f);
}

TEST_CASE("RoPE by hand: head_dim 4 at position 1 turns by 1 and by 0.01, in both pairings", "[rope]") {
  Config c = small_config({full(1, 1)});
  c.head_dim = 4, c.heads = c.kv_heads = 1;
  CHECK(oracle::angle(1, 0, 4, 10000) == 1.0);
  CHECK(std::fabs(oracle::angle(1, 1, 4, 10000) - 0.01) < 1e-17);
  Sequence sequence;
  const Slice slice{&sequence, 0, 1, 1, Logits::all};  // one row, at position 1
  const Doubles frequency{1, 0.01};
  Floats cosine(2), sine(2);
  rope_angles(frequency, {&slice, 1}, cosine.data(), sine.data());
  for (const bool half : {false, true}) {
    c.rope_half = half;
    const Index second = half ? 1 : 2;  // where the second pair begins
    Floats x(4, 0.f);
    x[0] = 1, x[second] = 1;  // the first number of each pair
    rope(c, 1, 1, cosine.data(), sine.data(), x.data());
    const Index apart = half ? 2 : 1;
    CAPTURE(half);
    CHECK(x[0] == static_cast<float>(std::cos(1.0)));
    CHECK(x[apart] == static_cast<float>(std::sin(1.0)));
    CHECK(x[second] == static_cast<float>(std::cos(0.01)));
    CHECK(x[second + apart] == static_cast<float>(std::sin(0.01)));
    Doubles by_oracle(4, 0.0);
    by_oracle[0] = by_oracle[second] = 1;
    close(x, oracle::rotate(c, by_oracle, 1), 2 * rounding);
  }
}

TEST_CASE("RoPE depends on differences of positions only, far positions included", "[rope]") {
  Config c = small_config({full(1, 1)});
  c.head_dim = 10, c.heads = c.kv_heads = 1;
  c.rope_half = GENERATE(false, true);
  const Index dh = c.head_dim;
  Doubles frequency;
  for (Index i = 0; i < dh / 2; ++i) frequency.push_back(std::pow(10000.0, -2.0 * static_cast<double>(i) / 10));
  const Floats q = random_floats(dh, 1), k = random_floats(dh, 2);
  const auto score = [&](Index at_q, Index at_k) {
    Sequence sequence;
    Floats x(q), y(k), cosine(dh / 2), sine(dh / 2);
    for (auto [v, p] : {std::pair{&x, at_q}, std::pair{&y, at_k}}) {
      const Slice slice{&sequence, 0, 1, p, Logits::all};
      rope_angles(frequency, {&slice, 1}, cosine.data(), sine.data());
      rope(c, 1, 1, cosine.data(), sine.data(), v->data());
    }
    double sum = 0, size = 0;
    for (Index d = 0; d < dh; ++d) sum += double{x[d]} * y[d], size += std::fabs(x[d]) * std::fabs(y[d]);
    return std::pair{sum, size};
  };
  for (const Index apart : {0, 1, 3, 100}) {
    const auto [near, size] = score(apart, 0);
    for (const Index shift : {1, 64, 1000, 1'000'000, 100'000'000}) {
      const double far = score(apart + shift, shift).first;
      // cos and sin are rounded once, the rotation rounds twice more, for both vectors; at positions near 10^8 an angle
      // in double is off by 10^8 2^-53
      const double limit = size * (8 * rounding + 4 * static_cast<double>(shift) * 0x1p-53);
      CAPTURE(apart, shift, near, far, limit);
      CHECK(std::fabs(near - far) <= limit);
    }
  }
  CHECK(std::fabs(score(3, 0).first - score(4, 0).first) > 1e-3);  // and they do depend on the difference
}

TEST_CASE("SwiGLU: silu(gate) * up, also where e^-x overflows", "[ffn]") {
  Floats gate{0, 1, -1, 20, -20, 88, -88, -200, 200, 1e-6f, -3}, up{1, 2, 3, 1, 1, 1, 1, 1, 1, 1, -2};
  const Floats x = gate;
  Doubles right;
  for (std::size_t i = 0; i < gate.size(); ++i)
    right.push_back(double{gate[i]} / (1 + std::exp(-double{gate[i]})) * up[i]);
  swiglu(gate.data(), up.data(), 1, std::ssize(gate));
  for (std::size_t i = 0; i < gate.size(); ++i) {
    // beyond 88 the exponential stands still: the value is as near 0 as that
    const double floor = 1.01 * std::exp(-88.0) * std::fabs(x[i] * up[i]);
    CAPTURE(i, gate[i], right[i], floor);
    CHECK(std::fabs(gate[i] - right[i]) <= 8 * rounding * std::fabs(right[i]) + floor);
  }
}

TEST_CASE("routing: softmax over all experts, the lower index on ties, normalised or not", "[moe]") {
  struct Case {
    Moe moe;
    Floats logits;
    std::vector<Index> chosen;
    Floats weight;
  };
  const float e1 = std::exp(1.f);
  const Case cases[] = {
      {{8, 2, 4, 0, false}, Floats(8, 0.f), {0, 1}, {0.125f, 0.125f}},  // all equal: 1/E each
      {{8, 2, 4, 0, true}, Floats(8, 0.f), {0, 1}, {0.5f, 0.5f}},
      {{4, 2, 4, 0, true}, {0, 1, 1, 1}, {1, 2}, {0.5f, 0.5f}},  // a tie at the last place
      {{4, 1, 4, 0, false}, {0, 5, 5, 0}, {1}, {std::exp(5.f) / (2 * std::exp(5.f) + 2)}},
      {{3, 3, 4, 0, false}, {0, 1, 0}, {1, 0, 2}, {e1 / (e1 + 2), 1 / (e1 + 2), 1 / (e1 + 2)}},
      {{3, 3, 4, 0, true}, {0, 1, 0}, {1, 0, 2}, {e1 / (e1 + 2), 1 / (e1 + 2), 1 / (e1 + 2)}},
      {{1, 1, 4, 0, false}, {-7}, {0}, {1}},
      {{2, 1, 4, 0, true}, {-1e4f, 1e4f}, {1}, {1}},  // no overflow
      {{5, 2, 4, 0, false}, {-1000, -1001, -1e30f, -1e30f, -1e30f}, {0, 1}, {e1 / (e1 + 1), 1 / (e1 + 1)}},
  };
  for (const Case& k : cases) {
    std::vector<Index> chosen(k.weight.size(), -1);
    Floats weight(k.weight.size());
    route(k.moe, k.logits.data(), chosen.data(), weight.data());
    CAPTURE(k.logits, k.moe.normalize, chosen, weight);
    CHECK(chosen == k.chosen);
    close(weight, widened(k.weight), static_cast<double>(k.moe.experts + 4) * rounding);
  }
}

// ---------------------------------------------------------------------------------------------------------------------
// The sampler

Sampler sampler(double temperature, Index top_k = 0, double top_p = 1, std::uint64_t seed = 1) {
  Sampler s;
  s.temperature = temperature, s.top_k = top_k, s.top_p = top_p;
  s.random.seed(seed);
  return s;
}

TEST_CASE("greedy takes the largest logit, the lower id on ties", "[sampler]") {
  CHECK(greedy(Floats{2, 4, 3}) == 1);
  CHECK(greedy(Floats{-5, -1, -1, -3}) == 1);
  CHECK(greedy(Floats{0, 0, 0}) == 0);
  CHECK(greedy(Floats{-3}) == 0);
  CHECK(greedy(Floats{-0.f, 0.f}) == 0);
}

TEST_CASE("tiny temperatures agree with temperature 0", "[sampler]") {
  for (const double temperature : {0.0, 5e-324, 1e-40, 1e-6}) {
    CAPTURE(temperature);
    Sampler s = sampler(temperature);
    for (int i = 0; i < 50; ++i) CHECK(s(Floats{2, 4, 3}) == 1);
  }
  Sampler hot = sampler(1e30);  // and a huge one is near uniform, not inf or NaN
  std::set<int> seen;
  for (int i = 0; i < 200; ++i) seen.insert(hot(Floats{2, 4, 3}));
  CHECK(seen.size() == 3);
}

/// Probabilities after temperature, top-k and top-p, by definition: renormalised after each step; of equal
/// probabilities the lower id goes first.
Doubles exact_probabilities(const Floats& logits, double temperature, Index top_k, double top_p) {
  std::vector<std::pair<double, Index>> order;
  for (std::size_t i = 0; i < logits.size(); ++i) order.emplace_back(-logits[i], static_cast<Index>(i));
  std::sort(order.begin(), order.end());
  if (top_k > 0 && top_k < std::ssize(order)) order.resize(static_cast<std::size_t>(top_k));
  double sum = 0, reached = 0;
  for (auto& [p, id] : order) sum += p = std::exp(-p / temperature);
  Doubles out(logits.size(), 0.0);
  for (const auto& [p, id] : order) {
    if (reached >= top_p * (1 - 1e-12)) break;
    reached += out[static_cast<std::size_t>(id)] = p / sum;
  }
  for (double& p : out) p /= reached;
  return out;
}

TEST_CASE("draws follow the exact probabilities of temperature, top-k and top-p", "[sampler]") {
  struct Case {
    double temperature;
    Index top_k;
    double top_p;
  };
  const Floats logits{1.f, 2.5f, -1.f, 2.f, 2.f, 0.f, -4.f};
  const Case cases[] = {{1, 0, 1}, {0.7, 0, 1}, {2, 0, 1}, {1, 1, 1}, {1, 3, 1}, {1, 100, 1}, {1, 0, 0.5},
      {0.7, 4, 0.8}, {1.5, 6, 0.99}, {1, 0, 1e-9}, {1, 0, 0.34}, {1, 0, 0.999}, {3, 2, 0.3}};
  const int draws = 20000;
  for (const Case& k : cases) {
    const Doubles p = exact_probabilities(logits, k.temperature, k.top_k, k.top_p);
    Sampler s = sampler(k.temperature, k.top_k, k.top_p, 12345);
    std::vector<int> count(logits.size());
    for (int i = 0; i < draws; ++i) ++count[static_cast<std::size_t>(s(logits))];
    for (std::size_t i = 0; i < p.size(); ++i) {
      // a binomial count: five standard deviations, which the 91 counts here all keep with probability 0.9999
      const double limit = 5 * std::sqrt(draws * p[i] * (1 - p[i]));
      CAPTURE(k.temperature, k.top_k, k.top_p, i, p[i], count[i], limit);
      if (p[i] == 0) CHECK(count[i] == 0);
      else CHECK(std::fabs(count[i] - draws * p[i]) <= limit + 1e-9);
    }
  }
}

TEST_CASE("top-p keeps the smallest set that reaches p", "[sampler]") {
  const Floats logits{std::log(0.5f), std::log(0.25f), std::log(0.125f), std::log(0.125f)};
  const auto kept = [&](double top_p, Index top_k = 0) {
    Sampler s = sampler(1, top_k, top_p);
    std::set<int> seen;
    for (int i = 0; i < 2000; ++i) seen.insert(s(logits));
    return seen;
  };
  CHECK(kept(0.49) == std::set<int>{0});
  CHECK(kept(0.51) == std::set<int>{0, 1});
  CHECK(kept(0.74) == std::set<int>{0, 1});
  CHECK(kept(0.76) == std::set<int>{0, 1, 2});  // of the two equal ones the lower id
  CHECK(kept(0.88) == std::set<int>{0, 1, 2, 3});
  CHECK(kept(1) == std::set<int>{0, 1, 2, 3});
  CHECK(kept(0.66, 2) == std::set<int>{0});  // of the two that top-k leaves, 0 has 2/3
  CHECK(kept(0.67, 2) == std::set<int>{0, 1});
}

TEST_CASE("the same seed draws the same tokens, another seed others", "[sampler]") {
  const Floats logits = random_floats(50, 9);
  const auto draw = [&](std::uint64_t seed) {
    Sampler s = sampler(1, 0, 1, seed);
    Tokens out;
    for (int i = 0; i < 200; ++i) out.push_back(s(logits));
    return out;
  };
  CHECK(draw(0) == draw(0));
  CHECK(draw(7) == draw(7));
  CHECK(draw(0) != draw(1));
  CHECK(draw(0) != draw(0xffffffffffffffffu));
}

}  // namespace
}  // namespace yocou::test
