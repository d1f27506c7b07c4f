/// @file
/// cuda_engine.cpp -- the whole CUDA engine, run by the emulator, against the double-precision reference: every kind of
/// stage, both sets of kernels, prompts in chunks, batches of unequal lengths, decode steps as graphs.
#include "catch.h"
#include "cuda_emulator.h"
#include "cuda_model.h"
//
#include "../kernels.cu"

namespace {

using namespace yocou;
using cuda_test::Model, cuda_test::Reference, cuda_test::Vec;

Config base(Index dim, Index heads, Index kv_heads, Index head_dim, Index ffn, std::vector<Stage> stages) {
  Config c;
  c.vocab_size = 257, c.dim = dim, c.heads = heads, c.kv_heads = kv_heads, c.head_dim = head_dim, c.ffn_dim = ffn;
  c.stages = std::move(stages);
  return c;
}
Stage window(Index layers, Index loops, Index W) { return {"self", layers, loops, Attention::window, W, true, false}; }
Stage full(Index layers, Index loops) { return {"full", layers, loops, Attention::full, 0, true, false}; }
Stage shared(Index layers, Index loops = 1, bool refresh = false) {
  return {"cross", layers, loops, Attention::shared, 0, false, refresh};
}
Config with_moe(Config c, Moe moe) {
  c.moe = moe, c.ffn_dim = 0;
  return c;
}

std::vector<int> random_tokens(Index n, Index vocab, unsigned seed) {
  std::mt19937 rng(seed);
  std::vector<int> t(std::size_t(n), 0);
  for (int& v : t) v = int(rng() % unsigned(vocab));
  return t;
}

/// Prefill plus decode in the terms of the accounting: FLOP of one sequence's rows p0 .. p1-1.
struct Formula {
  const Config& c;
  std::uint64_t layer(const Stage& s, Index p0, Index p1) const {
    std::uint64_t flops = 0;
    for (Index p = p0; p < p1; ++p) {
      const Index seen = s.attention == Attention::window ? std::min(p + 1, s.window) : p + 1;
      flops += std::uint64_t(4 * c.dim * c.q_dim() + 4 * c.q_dim() * seen);
      if (s.attention != Attention::shared) flops += std::uint64_t(4 * c.dim * c.kv_dim());
      flops += std::uint64_t(c.moe ? 2 * c.dim * c.moe->experts +
                                         6 * c.dim * (c.moe->active * c.moe->dim + c.moe->shared_dim)
                                   : 6 * c.dim * c.ffn_dim);
    }
    return flops;
  }
  /// A pass of rows p0 .. p1-1 of which the last `wanted` need logits.
  std::uint64_t pass(Index p0, Index p1, Index wanted) const {
    std::uint64_t flops = std::uint64_t(2 * c.dim * c.vocab_size * wanted);
    for (const Stage& s : c.stages)
      for (Index loop = 0; loop < s.loops; ++loop) {
        const bool is_shared = s.attention == Attention::shared;
        const bool early = is_shared && (!s.refresh_kv || loop + 1 == s.loops);
        if (is_shared && (loop == 0 || s.refresh_kv)) flops += std::uint64_t(4 * c.dim * c.kv_dim() * (p1 - p0));
        flops += std::uint64_t(s.layers) * layer(s, early ? p1 - wanted : p0, p1);
      }
    return flops;
  }
  Index cache(Index n, Index s) const {
    Index rows = 0;
    const Index paged = (n + 255) / 256 * 256;
    for (const Stage& g : c.stages)
      rows += g.attention == Attention::window ? g.layers * g.loops * g.window
              : g.attention == Attention::full ? g.layers * g.loops * paged
                                               : (g.refresh_kv ? g.loops : 1) * paged;
    return 2 * c.kv_dim() * s * rows;
  }
};

/// Runs passes and compares all logits that they return.
class Session {
 public:
  Session(const Model& m, const Rungs& rungs, const std::vector<std::vector<int>>& sequences, Dtype kv, Index max_rows)
      : m_(m), sequences_(sequences) {
    Index tokens = 0;
    for (const auto& s : sequences) tokens += Index(s.size());
    engine_ =
        std::make_unique<CudaEngine>(m.c, m.w, EngineOptions{kv, max_rows, tokens, Index(sequences.size())}, rungs);
    const Reference reference(m, /*rounded=*/true, kv == Dtype::f32);
    for (const auto& s : sequences) {
      expected_.push_back(reference.logits(s));
      slots_.push_back(engine_->open());
      for (const Vec& row : expected_.back())
        for (const double v : row) scale_ = std::max(scale_, std::abs(v));
    }
    done_.resize(sequences.size());
    kv_ = kv;
  }
  struct Part {
    std::size_t sequence;
    Index rows;
    Logits want = Logits::last;
  };
  void pass(const std::vector<Part>& parts) {
    std::vector<Segment> segments;
    Index wanted = 0;
    std::uint64_t flops = 0;
    for (const Part& p : parts) {
      segments.push_back(
          {slots_[p.sequence],
           std::span(sequences_[p.sequence]).subspan(std::size_t(done_[p.sequence]), std::size_t(p.rows)), p.want});
      const Index w = p.want == Logits::all ? p.rows : p.want == Logits::last;
      flops += Formula{m_.c}.pass(done_[p.sequence], done_[p.sequence] + p.rows, w), wanted += w;
    }
    std::vector<float> logits(std::size_t(wanted * m_.c.vocab_size), -1);
    const Counters before = engine_->counters;
    engine_->forward(segments, logits.data());
    CHECK((engine_->counters - before).flops == flops);
    const float* row = logits.data();
    Index bytes = 0;
    for (const Part& p : parts) done_[p.sequence] += p.rows;
    for (std::size_t s = 0; s < sequences_.size(); ++s) bytes += Formula{m_.c}.cache(done_[s], size_of(kv_));
    CHECK(engine_->cache_bytes() == bytes);
    for (const Part& p : parts) {
      const Index w = p.want == Logits::all ? p.rows : p.want == Logits::last;
      for (Index i = done_[p.sequence] - w; i < done_[p.sequence]; ++i)
        for (Index v = 0; v < m_.c.vocab_size; ++v, ++row) {
          const double error = std::abs(double(*row) - expected_[p.sequence][std::size_t(i)][std::size_t(v)]);
          worst_ = error >= worst_ ? error : worst_;
          if (!(error < limit())) {  // also when it is not a number
            CAPTURE(p.sequence, i, v, *row, expected_[p.sequence][std::size_t(i)][std::size_t(v)], limit());
            FAIL("logits differ");
          }
        }
    }
  }
  /// Both sides round the same values to BF16 but sum in different orders, so now and then a rounding falls the other
  /// way: 2^-8 of one activation, of which a layer has thousands. P, which only the fast kernels round, adds 2^-9 of
  /// its own. A wrong mask, head or position moves logits by several percent of the largest.
  double limit() const { return 0.02 * scale_; }
  double worst() const { return worst_ / scale_; }
  Index left(std::size_t s) const { return Index(sequences_[s].size()) - done_[s]; }

 private:
  const Model& m_;
  const std::vector<std::vector<int>>& sequences_;
  std::unique_ptr<CudaEngine> engine_;
  std::vector<std::vector<Vec>> expected_;
  std::vector<int> slots_;
  std::vector<Index> done_;
  double scale_ = 0, worst_ = 0;
  Dtype kv_ = Dtype::bf16;
};

/// Three sequences: prefill in chunks, alone and together, with and without logits, then decode steps for all.
void scenario(const Config& c, const Rungs& rungs, Dtype kv = Dtype::bf16, Index scale = 1) {
  const Model m(c);
  const std::vector<std::vector<int>> sequences{random_tokens(23 * scale + 4, c.vocab_size, 1),
                                                random_tokens(11 * scale + 4, c.vocab_size, 2),
                                                random_tokens(1 * scale + 4, c.vocab_size, 3)};
  Session s(m, rungs, sequences, kv, 32 * scale);
  s.pass({{0, 9 * scale, Logits::none}});
  s.pass({{0, 5 * scale, Logits::last}, {1, 11 * scale, Logits::all}, {2, 1, Logits::last}});
  s.pass({{0, 9 * scale, Logits::last}, {2, 1 * scale, Logits::none}});
  for (int i = 0; i < 3; ++i) s.pass({{1, 1}, {0, 1}, {2, 1}});
  s.pass({{0, 1}});
  s.pass({{1, 1, Logits::all}});
  WARN("worst error, of the largest logit: " << s.worst());
}

/// Everything at once and in order; everything as late as allowed; two shuffled orders.
emu::Options schedules(int i) {
  return i == 0   ? emu::Options{}
         : i == 1 ? emu::Options{/*late=*/true}
         : i == 2 ? emu::Options{/*late=*/false, /*seed=*/1}
                  : emu::Options{/*late=*/true, /*seed=*/2};
}

Rungs general() { return {false, false, false, false, false}; }

}  // namespace

TEST_CASE("cuda engine: every arch, general kernels", "[cuda]") {
  emu::configure(schedules(GENERATE(0, 3)));
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
  emu::configure(schedules(GENERATE(0, 1, 2, 3)));
  SECTION("head_dim 64") { scenario(base(72, 2, 1, 64, 100, {window(1, 2, 5), shared(2)}), {}); }
  SECTION("head_dim 128, groups of 3, a window of more than a tile") {
    scenario(base(40, 6, 2, 128, 36, {window(1, 1, 70), shared(1)}), {}, Dtype::bf16, 8);
  }
  SECTION("full") { scenario(base(40, 2, 2, 64, 36, {full(1, 1)}), {}, Dtype::bf16, 12); }
  SECTION("moe") { scenario(with_moe(base(72, 2, 1, 64, 0, {window(1, 1, 5), shared(1)}), {6, 2, 20, 0, false}), {}); }
}
