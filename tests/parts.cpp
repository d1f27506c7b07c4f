/// @file
/// parts.cpp -- the parts of the model that only yocou.cpp knows, each by itself: numbers, products, the parts of a layer,
/// caches, attention. The one unit that includes yocou.cpp; the others of this program get the model from here, and see
/// no more of it than yocou.h.
#include <sys/mman.h>

#include "../yocou.cpp"
#include "fixtures.h"

namespace yocou::test {
namespace {

// ---------------------------------------------------------------------------------------------------------------------
// Numbers

std::uint16_t bf16_bits(float v) {
  Bf16 b;
  store(v, &b);
  return b.bits;
}
std::uint16_t f16_bits(float v) {
  F16 h;
  store(v, &h);
  return h.bits;
}

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
  const Slice slice{&sequence, 0, 1, 1, Logits::all, 0, {}, 0, 1};  // one row, at position 1
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
      const Slice slice{&sequence, 0, 1, p, Logits::all, 0, {}, 0, 1};
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
// Caches

/// Row [G dh] that a position's key (or value) is given, so that a row read back says where it came from.
Floats labelled_row(const Config& c, Index p, bool value) {
  Floats row;
  for (Index e = 0; e < c.kv_dim(); ++e) row.push_back(static_cast<float>(p * 64 + e) * (value ? -1.f : 1.f));
  return row;
}

void append_labelled(const Config& c, Cache& cache, Index n, Index p0) {
  Floats K, V;
  for (Index p = p0; p < p0 + n; ++p)
    for (const float k : labelled_row(c, p, false)) K.push_back(k), V.push_back(-k);
  cache.append(K.data(), V.data(), n, p0);
}

/// Checks that positions first .. last-1 are read back, alone and in runs, for every head.
void holds_labelled(const Config& c, const Cache& cache, Index first, Index last, Index rows) {
  Index wrong = 0;
  for (Index g = 0; g < c.kv_heads; ++g)
    for (Index p = first; p < last;) {
      const Run run = cache.run(g, p, last);
      REQUIRE(run.count >= 1);
      REQUIRE(run.count == std::min(rows - p % rows, last - p));  // to the end of the block or of the wanted rows
      for (Index i = 0; i < run.count; ++i)
        for (Index d = 0; d < c.head_dim; ++d) {
          const float right = labelled_row(c, p + i, false)[g * c.head_dim + d];
          wrong += static_cast<const float*>(run.k)[i * run.stride + d] != right;
          wrong += static_cast<const float*>(run.v)[i * run.stride + d] != -right;
        }
      p += run.count;
    }
  CHECK(wrong == 0);
}

TEST_CASE("a ring holds the last W rows by absolute position, however they came", "[cache]") {
  const Config c = small_config({window(1, 1, 4)});
  for (const Index W : {1, 2, 4, 7})
    for (const Index step : {1, 2, 3, 4, 5, 9, 30}) {
      Arena arena;
      Cache ring(arena, c, Dtype::f32, W);
      const Index bytes = arena.live(Use::cache);
      for (Index p = 0; p < 30; p += step) {
        const Index n = std::min<Index>(step, 30 - p);
        ring.grow(p + n);
        append_labelled(c, ring, n, p);
        CAPTURE(W, step, p);
        holds_labelled(c, ring, std::max<Index>(0, p + n - W), p + n, W);
      }
      CHECK(arena.live(Use::cache) == bytes);  // it never grows
      CHECK(bytes == 2 * c.kv_dim() * W * 4);
    }
}

TEST_CASE("blocks of 256 rows, reached through the block table, grow with the tokens", "[cache]") {
  const Config c = small_config({full(1, 1)});
  for (const Index step : {1, 100, 256, 1000}) {
    Arena arena;
    Cache paged(arena, c, Dtype::f32, 0);
    CHECK(arena.live(Use::cache) == 0);
    const Index end = step == 1 ? 515 : 1000;
    for (Index p = 0; p < end; p += step) {
      const Index n = std::min(step, end - p);
      paged.grow(p + n);
      append_labelled(c, paged, n, p);
      if (arena.live(Use::cache) != 2 * c.kv_dim() * 4 * ((p + n + 255) / 256 * 256)) {
        CAPTURE(step, p);
        CHECK(arena.live(Use::cache) == 2 * c.kv_dim() * 4 * ((p + n + 255) / 256 * 256));
      }
    }
    CAPTURE(step);
    holds_labelled(c, paged, 0, end, 256);
  }
}

TEST_CASE("the arena counts every byte and comes back to zero", "[cache]") {
  Arena arena;
  {
    const Slab a(arena, 100, Use::cache);
    Slab b(arena, 7, Use::activation);
    CHECK(arena.live(Use::cache) == 100);
    CHECK(arena.live(Use::activation) == 7);
    CHECK(reinterpret_cast<std::uintptr_t>(a.data()) % 64 == 0);
    CHECK(std::all_of(static_cast<char*>(a.data()), static_cast<char*>(a.data()) + 100, [](char v) { return v == 0; }));
    Slab moved(std::move(b));
    CHECK(arena.live(Use::activation) == 7);
    moved = Slab(arena, 9, Use::activation);
    CHECK(arena.live(Use::activation) == 9);
    const Slab empty(arena, 0, Use::activation);
    CHECK(arena.live(Use::activation) == 9);
  }
  CHECK(arena.live(Use::cache) == 0);
  CHECK(arena.live(Use::activation) == 0);
  [[maybe_unused]] void* volatile refused = nullptr;  // volatile: clang would drop an allocation that nobody looks at
  CHECK_THROWS_AS(refused = arena.take(Index{1} << 50, Use::cache), Error);
  CHECK(arena.live(Use::cache) == 0);
}

TEST_CASE("an engine's cache bytes: rings when opened, blocks as it grows, nothing when closed", "[cache]") {
  for (const Dtype kv : {Dtype::f32, Dtype::bf16}) {
    const Toy toy(small_config({window(2, 3, 5), rope(full(1, 2), true), shared(3, 4)}));
    const Index row = 2 * toy.c.kv_dim() * size_of(kv);
    CpuEngine engine(toy.c, toy.w, {kv, 300, 2000, 3});
    CHECK(engine.cache_bytes() == 0);
    const int a = engine.open();
    CHECK(engine.cache_bytes() == 2 * 3 * 5 * row);
    const Tokens tokens = tokens_of(toy.c, 300);
    Floats logits(29);
    const Index activations = engine.arena().live(Use::activation);
    const auto append = [&](int sequence, Index n) {
      const Segment s{sequence, std::span(tokens).first(n), Logits::last};
      engine.forward({&s, 1}, logits.data());
    };
    append(a, 1);
    // full: 1 layer x 2 loops; shared: one, without factor T = 4 and without factor layers
    CHECK(engine.cache_bytes() == (30 + (2 + 1) * 256) * row);
    append(a, 255);
    CHECK(engine.cache_bytes() == (30 + 3 * 256) * row);
    CHECK(engine.global_rows() == 256);
    append(a, 1);
    CHECK(engine.cache_bytes() == (30 + 3 * 512) * row);
    CHECK(engine.global_rows() == 257);
    const int b = engine.open();
    append(b, 10);
    CHECK(engine.cache_bytes() == (60 + 3 * 768) * row);
    append(a, 300);
    CHECK(engine.arena().live(Use::activation) == activations);  // nothing else grows with N
    engine.close(a);
    CHECK(engine.cache_bytes() == (30 + 3 * 256) * row);
    CHECK(engine.open() == a);  // its number is free again
    engine.close(a), engine.close(b);
    CHECK(engine.cache_bytes() == 0);
  }
}

TEST_CASE("a refreshed shared stage has a cache per loop", "[cache]") {
  const Toy toy(small_config({window(1, 1, 3), shared(2, 3, /*refresh=*/true)}));
  CpuEngine engine(toy.c, toy.w, {Dtype::bf16, 8, 8, 1});
  const int a = engine.open();
  const Tokens tokens = tokens_of(toy.c, 5);
  Floats logits(29);
  prefill(engine, a, tokens, 8, logits.data());
  CHECK(engine.cache_bytes() == (3 + 3 * 256) * 2 * toy.c.kv_dim() * 2);
  CHECK(engine.global_rows() == 15);
}

TEST_CASE("caches beyond 4 GiB", "[.large]") {  // hidden: it touches 4.5 GiB. Run with: yocou_tests "[.large]"
  Config c = small_config({window(1, 1, 1)});
  c.kv_heads = 3, c.heads = 3, c.head_dim = 128;
  const Index W = 3'000'000;  // K and V of three heads: 2.3e9 numbers, the last head's V behind 2^31 of them
  Arena arena;
  Cache ring(arena, c, Dtype::bf16, W);
  const Floats K(static_cast<std::size_t>(c.kv_dim()), 3.f), V(static_cast<std::size_t>(c.kv_dim()), 5.f);
  ring.append(K.data(), V.data(), 1, W - 1);
  for (Index g = 0; g < 3; ++g) {
    const Run last = ring.run(g, W - 1, W), before = ring.run(g, W - 2, W - 1);
    CHECK(to_float(static_cast<const Bf16*>(last.k)[127]) == 3);
    CHECK(to_float(static_cast<const Bf16*>(last.v)[127]) == 5);
    CHECK(to_float(static_cast<const Bf16*>(before.v)[127]) == 0);
    CHECK(static_cast<const char*>(last.v) - static_cast<const char*>(ring.run(0, 0, 1).k) ==
          ((3 + g) * W + W - 1) * 128 * 2);
  }
}

// ---------------------------------------------------------------------------------------------------------------------
// Attention

/// One sequence's attention by itself: Q [n,H dh] at positions p0.., K and V [N,G dh] with N = p0 + n. In a window
/// stage (reach > 0) the pass's own keys are fresh and the older ones in a ring; otherwise all are in blocks.
struct Attend {
  Config c;
  Index p0 = 0, n = 0, reach = 0;
  Floats Q, K, V;
  Dtype kv = Dtype::f32;
  bool poison = false;  ///< fill every cached row that no position has been written to with NaN

  Index N() const { return p0 + n; }

  Floats operator()() const {
    const Index width = c.kv_dim(), far = std::numeric_limits<Index>::max() / 2;
    Arena arena;
    Sequence sequence;
    Cache& cache = sequence.caches.emplace_back(arena, c, kv, reach);
    const Index cached = reach ? p0 : N();
    cache.grow(N());
    if (poison) {
      const Floats nan(static_cast<std::size_t>(width), std::numeric_limits<float>::quiet_NaN());
      const Index rows = reach ? reach : paged_rows(N());
      for (Index p = 0; p < rows; ++p) cache.append(nan.data(), nan.data(), 1, p);
    }
    cache.append(K.data(), V.data(), cached, 0);
    const Slice slice{&sequence, 0, n, p0, Logits::all, 0, sequence.caches, 0, n};
    std::vector<Index> own(static_cast<std::size_t>(n));
    std::iota(own.begin(), own.end(), 0);
    const KvView view{0, reach ? reach : far, reach ? K.data() + p0 * width : nullptr,
        reach ? V.data() + p0 * width : nullptr, nullptr, nullptr, own.data()};
    const Index b = query_tile(c.group(), view.reach), rows = b * c.group(), dh = c.head_dim;
    AttentionScratch t(arena, rows, dh);
    if (poison) std::fill_n(t.q, rows * (2 * dh + key_tile + 2) + key_tile * dh, std::nanf(""));
    Floats O(static_cast<std::size_t>(n * c.q_dim()), std::nanf(""));
    flops = 0;
    const Index R = together ? together : c.group();
    for (Index h = 0; h < c.heads; h += R)
      for (Index i = 0; i < n; i += b)
        flops += attention_tile(c, slice, view, h, R, i, std::min(b, n - i), Q.data(), O.data(), t);
    return O;
  }
  Index together = 0;               ///< heads a tile takes, a divisor of a group's; 0: all of the group
  mutable std::uint64_t flops = 0;  ///< that the last call reported

  /// The definition, in double.
  Doubles right() const {
    const Index dh = c.head_dim, width = c.kv_dim();
    Doubles O;
    for (Index i = 0; i < n; ++i)
      for (Index h = 0; h < c.heads; ++h) {
        const Index g = h / (c.heads / c.kv_heads), p = p0 + i, first = reach ? std::max<Index>(0, p - reach + 1) : 0;
        Doubles score, mixed(static_cast<std::size_t>(dh), 0.0);
        for (Index j = first; j <= p; ++j) {
          double s = 0;
          for (Index d = 0; d < dh; ++d) s += double{Q[(i * c.heads + h) * dh + d]} * K[j * width + g * dh + d];
          score.push_back(s / std::sqrt(static_cast<double>(dh)));
        }
        const double most = *std::max_element(score.begin(), score.end());
        double sum = 0;
        for (double& s : score) sum += s = std::exp(s - most);
        for (Index j = first; j <= p; ++j)
          for (Index d = 0; d < dh; ++d) mixed[d] += score[j - first] / sum * V[j * width + g * dh + d];
        O.insert(O.end(), mixed.begin(), mixed.end());
      }
    return O;
  }
};

Attend random_attention(
    Index H, Index G, Index dh, Index p0, Index n, Index reach, std::uint64_t seed = 1, float spread = 1) {
  Attend a;
  a.c = small_config({reach ? window(1, 1, reach) : full(1, 1)});
  a.c.heads = H, a.c.kv_heads = G, a.c.head_dim = dh;
  a.p0 = p0, a.n = n, a.reach = reach;
  a.Q = random_floats(n * a.c.q_dim(), seed, spread);
  a.K = random_floats(a.N() * a.c.kv_dim(), seed + 1);
  a.V = random_floats(a.N() * a.c.kv_dim(), seed + 2);
  return a;
}

/// A score is a sum of dh terms, so it is off by dh + 4 roundings of its largest size, and the exponential carries that
/// over, above and below the line; then two sums of N terms. All of it times |V|.
double attention_limit(const Attend& a) {
  float q = 0, k = 0, v = 0;
  for (const float x : a.Q) q = std::max(q, std::fabs(x));
  for (const float x : a.K) k = std::max(k, std::fabs(x));
  for (const float x : a.V) v = std::max(v, std::fabs(x));
  const double dh = static_cast<double>(a.c.head_dim), N = static_cast<double>(a.N());
  const double score = std::sqrt(dh) * q * k;
  return 2 * rounding * v * ((dh + 4) * score + N + 8);
}

TEST_CASE("attention by definition: window and full, prefill and decode, every width and group", "[attention]") {
  struct Heads {
    Index H, G, dh;
  };
  const Heads heads[] = {{4, 2, 6}, {14, 2, 10}, {6, 6, 24}, {6, 1, 40}, {1, 1, 80}, {2, 1, 96}, {1, 1, 1}, {97, 1, 2},
      {3, 3, 64}, {8, 2, 33}};
  const std::pair<Index, Index> spans[] = {{0, 1}, {0, 2}, {0, 33}, {0, 65}, {5, 1}, {63, 1}, {64, 1}, {64, 64},
      {65, 70}, {255, 1}, {255, 3}, {256, 1}, {3, 40}, {511, 4}, {130, 2}, {0, 140}, {17, 100}};
  for (const Heads& h : heads)
    for (const auto& [p0, n] : spans)
      for (const Index reach : {0, 1, 3, 16, 64, 65, 100, 1000}) {
        if (p0 + n > 200 && (h.dh > 24 || reach == 65)) continue;
        const Attend a = random_attention(h.H, h.G, h.dh, p0, n, reach, static_cast<std::uint64_t>(h.H * 31 + p0));
        CAPTURE(h.H, h.G, h.dh, p0, n, reach);
        const Floats O = a();
        close(O, a.right(), attention_limit(a));
        std::uint64_t keys = 0;
        for (Index p = p0; p < p0 + n; ++p)
          for (Index j = 0; j <= p; ++j) keys += reach == 0 || j > p - reach;
        CHECK(a.flops == keys * 4 * static_cast<std::uint64_t>(a.c.q_dim()));
      }
}

TEST_CASE("a group's heads by themselves or together: the same bits", "[attention]") {
  for (const auto& [p0, n] : {std::pair<Index, Index>{300, 1}, {70, 2}, {0, 90}})
    for (const Index reach : {0, 65})
      for (const Dtype kv : {Dtype::f32, Dtype::bf16}) {
        Attend a = random_attention(12, 2, 40, p0, n, reach);
        a.kv = kv;
        const Floats all = a();
        const std::uint64_t flops = a.flops;
        for (const Index together : {1, 2, 3}) {
          CAPTURE(p0, n, reach, together);
          a.together = together;
          same(a(), all);
          CHECK(a.flops == flops);
        }
      }
}

TEST_CASE("attention reads positions written, never rows allocated: NaN elsewhere changes nothing", "[attention]") {
  for (const Dtype kv : {Dtype::f32, Dtype::bf16})
    for (const Index reach : {0, 1, 4, 100, 300})
      for (const auto& [p0, n] : std::vector<std::pair<Index, Index>>{
               {0, 1}, {0, 5}, {3, 1}, {3, 2}, {99, 1}, {100, 30}, {255, 1}, {255, 2}, {256, 1}, {250, 20}}) {
        Attend a = random_attention(4, 2, 10, p0, n, reach);
        a.kv = kv;
        const Floats clean = a();
        a.poison = true;
        CAPTURE(reach, p0, n);
        same(a(), clean);
      }
}

TEST_CASE("attention over BF16 caches equals attention over the same numbers in float32", "[attention]") {
  for (const Index reach : {0, 9, 70})
    for (const auto& [p0, n] : std::vector<std::pair<Index, Index>>{{0, 40}, {70, 1}, {70, 20}, {254, 4}}) {
      Attend a = random_attention(6, 2, 24, p0, n, reach);
      for (Floats* v : {&a.K, &a.V})
        for (float& x : *v) x = to_float(Bf16{bf16_bits(x)});
      const Floats wide = a();
      a.kv = Dtype::bf16;
      CAPTURE(reach, p0, n);
      same(a(), wide);
    }
}

TEST_CASE("a query that sees one key returns its value", "[attention]") {
  for (const Index reach : {0, 1}) {
    const Attend a = random_attention(4, 2, 6, 0, reach ? 20 : 1, reach);
    const Floats O = a();
    Floats right;
    for (Index i = 0; i < a.n; ++i)
      for (Index h = 0; h < 4; ++h)
        for (Index d = 0; d < 6; ++d) right.push_back(a.V[i * 12 + h / 2 * 6 + d]);
    same(O, right);
  }
}

TEST_CASE("equal scores average the past", "[attention]") {
  for (const Index reach : {0, 7}) {
    Attend a = random_attention(4, 2, 6, 60, 12, reach);
    std::fill(a.K.begin(), a.K.end(), 0.f);
    Doubles mean;
    for (Index i = 0; i < a.n; ++i)
      for (Index h = 0; h < 4; ++h)
        for (Index d = 0; d < 6; ++d) {
          const Index p = a.p0 + i, first = reach ? p - reach + 1 : 0;
          double sum = 0;
          for (Index j = first; j <= p; ++j) sum += a.V[j * 12 + h / 2 * 6 + d];
          mean.push_back(sum / static_cast<double>(p - first + 1));
        }
    // two sums of at most N float32 terms
    float most = 0;
    for (const float v : a.V) most = std::max(most, std::fabs(v));
    close(a(), mean, 2 * static_cast<double>(a.N()) * rounding * most);
  }
}

TEST_CASE("very large scores pick one key, rising or falling with its position", "[attention]") {
  for (const Index reach : {0, 20})
    for (const float sign : {1.f, -1.f}) {
      Attend a = random_attention(1, 1, 4, 0, 150, reach);
      for (Index i = 0; i < a.n; ++i)
        for (Index d = 0; d < 4; ++d) {
          a.Q[i * 4 + d] = d == 0 ? 2e4f : 0.f;
          a.K[i * 4 + d] = d == 0 ? sign * static_cast<float>(i) : 0.f;  // scores 1e4 apart, up to 1.5e6
        }
      Floats right;
      for (Index i = 0; i < a.n; ++i)
        for (Index d = 0; d < 4; ++d)
          right.push_back(a.V[(sign > 0 ? i : reach ? std::max<Index>(0, i - reach + 1) : 0) * 4 + d]);
      CAPTURE(reach, sign);
      same(a(), right);
    }
}

TEST_CASE("query head h reads KV head floor(h / (H/G))", "[attention]") {
  for (const auto& [H, G] : std::vector<std::pair<Index, Index>>{{4, 2}, {14, 2}, {6, 6}, {6, 1}, {6, 3}, {6, 2}}) {
    Attend a = random_attention(H, G, 6, 10, 30, 0);
    for (Index j = 0; j < a.N(); ++j)
      for (Index g = 0; g < G; ++g)
        for (Index d = 0; d < 6; ++d)
          a.V[(j * G + g) * 6 + d] = static_cast<float>(g + 1);  // a head's values are its name
    Doubles right;
    for (Index i = 0; i < a.n; ++i)
      for (Index h = 0; h < H; ++h) right.insert(right.end(), 6, static_cast<double>(h * G / H + 1));
    CAPTURE(H, G);
    close(a(), right, 2 * static_cast<double>(a.N()) * rounding * static_cast<double>(G));
  }
}

TEST_CASE("attention without positions: NoPE sees a set, so the order of the past is nothing to it", "[attention]") {
  Attend a = random_attention(4, 2, 6, 149, 1, 0);
  const Doubles before = a.right();
  const Floats first = a();
  std::mt19937_64 random(3);
  std::vector<Index> order(150);
  std::iota(order.begin(), order.end(), Index{0});
  std::shuffle(order.begin(), order.end(), random);
  const Floats K = a.K, V = a.V;
  for (Index j = 0; j < 150; ++j) {
    std::copy_n(K.begin() + order[j] * 12, 12, a.K.begin() + j * 12);
    std::copy_n(V.begin() + order[j] * 12, 12, a.V.begin() + j * 12);
  }
  close(a(), widened(first), 2 * attention_limit(a));
  close(a(), before, attention_limit(a));
}

// ---------------------------------------------------------------------------------------------------------------------
// The head and the embedding, held against their parts

TEST_CASE("a tracer sees X^0 and every application in order, and the last one is what the head reads", "[property]") {
  const Toy toy(with_moe(small_config({window(2, 3, 4), shared(2, 2)}), {4, 2, 5, 0, true}));
  CpuEngine engine(toy.c, toy.w, {Dtype::f32, 9, 9, 1});
  std::vector<std::array<Index, 3>> seen;
  Floats last;
  engine.on_layer = [&](const Application& a) {
    seen.push_back({a.stage, a.loop, a.layer});
    last.assign(a.x.begin(), a.x.end());
    CHECK(std::ssize(a.x) == 9 * toy.c.dim);
    CHECK(std::accumulate(a.expert_load.begin(), a.expert_load.end(), Index{0}) == (a.stage < 0 ? 0 : 18));
    if (a.stage < 0) {  // X^0 is the embedding
      const auto* e = static_cast<const float*>(toy.w.embed.data);
      same(a.x.first(3), std::span(e + tokens_of(toy.c, 9)[0] * toy.c.dim, 3));
    }
  };
  Floats logits(9 * 29), right(9 * 29);
  const Tokens tokens = tokens_of(toy.c, 9);
  const Segment all{engine.open(), tokens, Logits::all};
  engine.forward({&all, 1}, logits.data());
  std::vector<std::array<Index, 3>> order{{-1, 0, 0}};
  for (Index t = 0; t < 3; ++t) order.push_back({0, t, 0}), order.push_back({0, t, 1});
  for (Index t = 0; t < 2; ++t) order.push_back({1, t, 0}), order.push_back({1, t, 1});
  CHECK(seen == order);
  Floats normed(last.size());
  Counters count;
  rms_norm(last.data(), toy.w.norm, 1e-5f, 9, normed.data());
  multiply(std::array{Product{normed.data(), 9, toy.w.head, right.data()}}, count);
  same(logits, right);
}

/// Zeros by the gigabyte that take memory only where they are written.
struct Sparse {
  std::size_t bytes;
  void* p;
  explicit Sparse(std::size_t n)
      : bytes(n), p(mmap(nullptr, n, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0)) {}
  ~Sparse() { munmap(p, bytes); }
};

TEST_CASE("tensors beyond 2^31 elements are addressed right", "[property][large]") {
  Config c = small_config({window(1, 1, 3)});
  c.vocab_size = 2'000'000'000, c.dim = 4;
  Config little = c;
  little.vocab_size = 2;
  const Toy toy(little);
  const Sparse memory(static_cast<std::size_t>(c.vocab_size * c.dim * 2));  // 16 GB of addresses, BF16
  if (memory.p == MAP_FAILED) return;                                       // a machine that grants no such mapping
  Weights w = toy.w;
  w.embed = {memory.p, Dtype::bf16, c.vocab_size, c.dim};
  const int tokens[] = {1, 1'999'999'999, 536'870'912, 1'073'741'824};  // the last two begin at 2^31 and 2^32
  for (std::size_t i = 0; i < 4; ++i)
    for (Index d = 0; d < 4; ++d)
      store(static_cast<float>(i * 10 + d + 1), static_cast<Bf16*>(memory.p) + Index{tokens[i]} * 4 + d);
  CpuEngine engine(c, w, {Dtype::f32, 4, 4, 1});
  Floats x;
  engine.on_layer = [&](const Application& a) {
    if (a.stage < 0) x.assign(a.x.begin(), a.x.end());
  };
  const Segment s{engine.open(), tokens, Logits::none};
  engine.forward({&s, 1}, nullptr);
  same(x, Floats{1, 2, 3, 4, 11, 12, 13, 14, 21, 22, 23, 24, 31, 32, 33, 34});
  // a stack of experts: slice and product behind 2^31 elements
  const Tensor stack{memory.p, Dtype::bf16, c.vocab_size, c.dim};
  const Tensor two = stack.slice(1'999'999'998, 2);
  const Floats one(4, 1.f);
  Floats y(2);
  Counters count;
  multiply(std::array{Product{one.data(), 1, two, y.data()}}, count);
  same(y, Floats{0, 11 + 12 + 13 + 14});
}

}  // namespace
}  // namespace yocou::test
