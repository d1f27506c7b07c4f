/// @file
/// cuda_session.h -- runs a CudaEngine through passes and compares its logits, FLOP and cache bytes with the reference.
/// For the emulated tests and for the hardware check, which give CHECK, CAPTURE and FAIL their meaning and include
/// kernels.cu first.
#pragma once
#include <random>

#include "cuda_model.h"

namespace yocou {
namespace {

using cuda_test::SmallModel, cuda_test::Reference, cuda_test::Vec;

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
      flops += std::uint64_t(
          c.moe ? 2 * c.dim * c.moe->experts + 6 * c.dim * (c.moe->active * c.moe->dim + c.moe->shared_dim)
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
  Session(const SmallModel& m, const Rungs& rungs, const std::vector<std::vector<int>>& sequences, Dtype kv, Index max_rows)
      : m_(m), sequences_(sequences) {
    Index tokens = 0;
    for (const auto& s : sequences) tokens += Index(s.size());
    engine_ =
        std::make_unique<CudaEngine>(m.c, m.w, EngineOptions{kv, max_rows, tokens, Index(sequences.size())}, rungs);
    Reference reference(m, /*rounded=*/true, kv == Dtype::f32);
    for (const auto& s : sequences) {
      expected_.push_back(reference.logits(s));
      margins_.push_back(reference.margins);
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
      segments.push_back({slots_[p.sequence],
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
      for (Index i = done_[p.sequence] - w; i < done_[p.sequence]; ++i) {
        const bool certain = margins_[p.sequence][std::size_t(i)] > 0.005;
        certain ? ++compared_ : ++skipped_;
        if (!certain) row += m_.c.vocab_size;
        for (Index v = 0; certain && v < m_.c.vocab_size; ++v, ++row) {
          const double error = std::abs(double(*row) - expected_[p.sequence][std::size_t(i)][std::size_t(v)]);
          worst_ = error >= worst_ ? error : worst_;
          if (!(error < limit())) {  // also when it is not a number
            CAPTURE(p.sequence, i, v, *row, expected_[p.sequence][std::size_t(i)][std::size_t(v)], limit());
            FAIL("logits differ");
          }
        }
      }
    }
  }
  /// Both sides round the same values to BF16 but sum in different orders, so now and then a rounding falls the other
  /// way: 2^-8 of one activation, of which a layer has thousands. P, which only the fast kernels round, adds 2^-9 of
  /// its own. A wrong mask, head or position moves logits by several percent of the largest.
  double limit() const { return 0.02 * scale_; }
  double worst() const { return worst_ / scale_; }
  /// Rows after a routing decision that a rounding may turn say nothing; most rows must say something.
  bool enough() const { return skipped_ <= compared_; }
  Index left(std::size_t s) const { return Index(sequences_[s].size()) - done_[s]; }

 private:
  const SmallModel& m_;
  const std::vector<std::vector<int>>& sequences_;
  std::unique_ptr<CudaEngine> engine_;
  std::vector<std::vector<Vec>> expected_;
  std::vector<std::vector<double>> margins_;
  std::vector<int> slots_;
  std::vector<Index> done_;
  double scale_ = 0, worst_ = 0;
  Index compared_ = 0, skipped_ = 0;
  Dtype kv_ = Dtype::bf16;
};

double worst_error = 0;  ///< of all scenarios, as a share of the largest logit

/// Three sequences: prefill in chunks, alone and together, with and without logits, then decode steps for all.
void scenario(const Config& c, const Rungs& rungs, Dtype kv = Dtype::bf16, Index scale = 1) {
  const SmallModel m(c);
  const std::vector<std::vector<int>> sequences{random_tokens(23 * scale + 6, c.vocab_size, 1),
      random_tokens(11 * scale + 6, c.vocab_size, 2), random_tokens(1 * scale + 4, c.vocab_size, 3)};
  Session s(m, rungs, sequences, kv, 32 * scale);
  s.pass({{0, 9 * scale, Logits::none}});
  s.pass({{0, 5 * scale, Logits::last}, {1, 11 * scale, Logits::all}, {2, 1, Logits::last}});
  s.pass(
      {{2, 1 * scale, Logits::none}, {0, 9 * scale, Logits::last}});  // the second segment has a full window behind it
  for (int i = 0; i < 3; ++i) s.pass({{1, 1}, {0, 1}, {2, 1}});
  s.pass({{0, 1}});
  s.pass({{1, 1, Logits::all}});
  s.pass({{0, 1}, {1, 1}});
  s.pass({{0, 1, Logits::none}, {1, 1}});  // a step of the same size that is no graph's
  CHECK(s.enough());
  worst_error = std::max(worst_error, s.worst());
}

Rungs general() { return {false, false, false, false, false}; }

}  // namespace
}  // namespace yocou
