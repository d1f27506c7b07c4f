/// @file
/// model_attention.h -- part of model.cpp: caches, the arena, and attention taken by itself.
#pragma once

namespace yocou::test {
namespace {

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
    const Slice slice{&sequence, 0, n, p0, Logits::all};
    const KvView view{
        0, reach ? reach : far, reach ? K.data() + p0 * width : nullptr, reach ? V.data() + p0 * width : nullptr};
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

}  // namespace
}  // namespace yocou::test
