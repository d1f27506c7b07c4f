/// @file
/// cuda_model.h -- random models for the tests of the CUDA engine, and what they should answer: the forward pass of a
/// whole sequence in double precision, without caches, written from the equations and sharing no code with the program.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstring>
#include <deque>
#include <random>
#include <vector>

#include "yocou.h"

namespace cuda_test {

using yocou::Attention, yocou::Config, yocou::Index, yocou::Tensor;
using Vec = std::vector<double>;

/// To the nearest BF16 number, ties to even.
inline double round16(double v) {
  const float f = float(v);
  std::uint32_t x;
  std::memcpy(&x, &f, 4);
  x = (x + 0x7fff + (x >> 16 & 1)) & 0xffff0000u;
  float y;
  return std::memcpy(&y, &x, 4), y;
}

/// A config with random weights that are BF16 numbers kept as F32: nothing is lost when they are uploaded.
struct SmallModel {
  Config c;
  yocou::Weights w;
  std::deque<std::vector<float>> storage;

  explicit SmallModel(const Config& config, unsigned seed = 1) : c(config) {
    std::mt19937 rng(seed);
    std::normal_distribution<double> normal;
    for (const auto& s : c.stages) w.stages.emplace_back(std::size_t(s.layers));
    yocou::for_each_tensor(c, w, [&](const std::string& name, const yocou::Shape& shape, Tensor& t) {
      const Index cols = shape.back();
      Index rows = 1;
      for (std::size_t i = 0; i + 1 < shape.size(); ++i) rows *= shape[i];
      auto& data = storage.emplace_back(std::size_t(rows * cols));
      const bool gain = shape.size() == 1, embed = name == "embed";
      for (float& v : data)
        v = float(round16(gain ? 1 + 0.1 * normal(rng) : normal(rng) * (embed ? 1 : 1.2 / std::sqrt(double(cols)))));
      t = {data.data(), yocou::Dtype::f32, rows, cols};
    });
    if (c.tied_embeddings) w.head = w.embed;
  }
};

/// Logits of every position of a sequence. With `rounded`, activations are rounded where the CUDA path rounds them.
class Reference {
 public:
  Reference(const SmallModel& m, bool rounded, bool f32_cache = false)
      : m_(m), c_(m.c), rounded_(rounded), f32_cache_(f32_cache) {}
  /// By position, how close a routing decision there or before came to falling the other way: the least difference
  /// between the last chosen expert's logit and the next one's. A rounding decides where it is tiny.
  std::vector<double> margins;

  std::vector<Vec> logits(const std::vector<int>& tokens) {
    margins.assign(tokens.size(), 1e9);
    std::vector<Vec> x;
    for (const int t : tokens) {
      Vec row(std::size_t(c_.dim));
      for (std::size_t i = 0; i < row.size(); ++i) row[i] = at(m_.w.embed, t, Index(i)) * c_.embed_scale;
      x.push_back(row);
    }
    std::vector<Vec> K, V;
    for (std::size_t s = 0; s < c_.stages.size(); ++s) {
      const auto& stage = c_.stages[s];
      const bool shared = stage.attention == Attention::shared;
      for (Index loop = 0; loop < stage.loops; ++loop) {
        if (shared && (loop == 0 || stage.refresh_kv)) {
          K.clear(), V.clear();
          for (std::size_t p = 0; p < x.size(); ++p) {
            const Vec n = norm(x[p], m_.w.kv_norm);
            K.push_back(rotated(times(m_.w.kv_wk, n), p, stage.rope)), V.push_back(times(m_.w.kv_wv, n));
            cached(K.back()), cached(V.back());
          }
        }
        for (const auto& l : m_.w.stages[s]) {
          std::vector<Vec> Q;
          if (!shared) K.clear(), V.clear();
          for (std::size_t p = 0; p < x.size(); ++p) {
            const Vec n = norm(x[p], l.attn_norm);
            Q.push_back(rotated(times(l.wq, n), p, stage.rope));
            rounding(Q.back());
            if (shared) continue;
            K.push_back(rotated(times(l.wk, n), p, stage.rope)), V.push_back(times(l.wv, n));
            cached(K.back()), cached(V.back());
          }
          for (std::size_t p = 0; p < x.size(); ++p) {
            Vec heads = attend(Q[p], K, V, Index(p), stage.attention == Attention::window ? stage.window : 0);
            rounding(heads);
            add(x[p], times(l.wo, heads, /*round=*/false));
            const Vec f = norm(x[p], l.ffn_norm);
            c_.moe ? moe(l, f, x[p], margins[p]) : add(x[p], swiglu(l.dense, f, 0, c_.ffn_dim));
          }
        }
      }
    }
    for (std::size_t p = 1; p < margins.size(); ++p) margins[p] = std::min(margins[p], margins[p - 1]);
    std::vector<Vec> out;
    for (const Vec& row : x) out.push_back(times(m_.w.head, norm(row, m_.w.norm), /*round=*/false));
    return out;
  }

 private:
  static double at(const Tensor& t, Index r, Index c) { return static_cast<const float*>(t.data)[r * t.cols + c]; }
  static void add(Vec& a, const Vec& b) {
    for (std::size_t i = 0; i < a.size(); ++i) a[i] += b[i];
  }
  void rounding(Vec& v) const {
    if (rounded_)
      for (double& d : v) d = round16(d);
  }
  void cached(Vec& v) const {
    if (!f32_cache_) rounding(v);
  }
  Vec times(const Tensor& w, const Vec& x, bool round = true, Index first = 0, Index rows = -1) const {
    Vec y(std::size_t(rows < 0 ? w.rows : rows));
    for (std::size_t r = 0; r < y.size(); ++r)
      for (std::size_t i = 0; i < x.size(); ++i) y[r] += at(w, first + Index(r), Index(i)) * x[i];
    if (round) rounding(y);
    return y;
  }
  Vec norm(const Vec& x, const Tensor& gain) const {
    double sum = 0;
    for (const double v : x) sum += v * v;
    const double scale = 1 / std::sqrt(sum / double(x.size()) + c_.norm_eps);
    Vec y(x.size());
    for (std::size_t i = 0; i < y.size(); ++i) y[i] = x[i] * scale * at(gain, 0, Index(i));
    rounding(y);
    return y;
  }
  Vec rotated(Vec v, std::size_t p, bool rotate) const {
    const Index dh = c_.head_dim, half = dh / 2;
    if (rotate)
      for (std::size_t h = 0; h < v.size() / std::size_t(dh); ++h)
        for (Index i = 0; i < half; ++i) {
          const double angle = double(p) * std::pow(c_.rope_theta, -2.0 * double(i) / double(dh));
          double& a = v[h * std::size_t(dh) + std::size_t(c_.rope_half ? i : 2 * i)];
          double& b = v[h * std::size_t(dh) + std::size_t(c_.rope_half ? i + half : 2 * i + 1)];
          const double x = a, y = b;
          a = x * std::cos(angle) - y * std::sin(angle), b = x * std::sin(angle) + y * std::cos(angle);
        }
    return v;
  }
  Vec attend(const Vec& q, const std::vector<Vec>& K, const std::vector<Vec>& V, Index p, Index window) const {
    Vec out(q.size());
    const Index dh = c_.head_dim;
    for (Index h = 0; h < c_.heads; ++h) {
      const std::size_t g = std::size_t(h / c_.group() * dh), qh = std::size_t(h * dh);
      const Index first = window ? std::max<Index>(0, p - window + 1) : 0;
      Vec s;
      for (Index j = first; j <= p; ++j) {
        double dot = 0;
        for (std::size_t i = 0; i < std::size_t(dh); ++i) dot += q[qh + i] * K[std::size_t(j)][g + i];
        s.push_back(dot / std::sqrt(double(dh)));
      }
      const double top = *std::max_element(s.begin(), s.end());
      double sum = 0;
      for (double& v : s) sum += v = std::exp(v - top);
      for (std::size_t j = 0; j < s.size(); ++j)
        for (std::size_t i = 0; i < std::size_t(dh); ++i) out[qh + i] += s[j] / sum * V[std::size_t(first) + j][g + i];
    }
    return out;
  }
  Vec swiglu(const yocou::Ffn& f, const Vec& x, Index expert, Index F, bool round = false) const {
    Vec a = times(f.gate, x, true, expert * F, F), b = times(f.up, x, true, expert * F, F);
    for (std::size_t i = 0; i < a.size(); ++i) a[i] = a[i] / (1 + std::exp(-a[i])) * b[i];
    rounding(a);
    return times(f.down, a, round, expert * c_.dim, c_.dim);
  }
  void moe(const yocou::Layer& l, const Vec& f, Vec& x, double& margin) const {
    const auto& m = *c_.moe;
    const Vec r = times(l.router, f, /*round=*/false);
    std::vector<std::size_t> order(r.size());
    for (std::size_t i = 0; i < order.size(); ++i) order[i] = i;
    std::stable_sort(order.begin(), order.end(), [&](std::size_t a, std::size_t b) { return r[a] > r[b]; });
    const std::size_t A = std::size_t(m.active);
    if (A < order.size() && r[order[0]] != r[order[A]]) margin = std::min(margin, r[order[A - 1]] - r[order[A]]);
    double all = 0, chosen = 0;
    for (const double v : r) all += std::exp(v - r[order[0]]);
    for (std::size_t j = 0; j < A; ++j) chosen += std::exp(r[order[j]] - r[order[0]]) / all;
    for (std::size_t j = 0; j < A; ++j) {
      Vec y = swiglu(l.experts, f, Index(order[j]), m.dim, /*round=*/true);
      const double p = std::exp(r[order[j]] - r[order[0]]) / all / (m.normalize ? chosen : 1);
      for (double& v : y) v *= p;
      add(x, y);
    }
    if (m.shared_dim) add(x, swiglu(l.shared, f, 0, m.shared_dim));
  }

  const SmallModel& m_;
  const Config& c_;
  const bool rounded_, f32_cache_;
};

}  // namespace cuda_test
