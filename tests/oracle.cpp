/// @file
/// oracle.cpp -- see oracle.h.
#include "oracle.h"

#include <algorithm>
#include <cmath>
#include <cstring>

namespace oracle {

using yocou::Attention;
using yocou::Config;
using yocou::Dtype;
using yocou::Index;
using yocou::Tensor;
using Vector = std::vector<double>;

double number(const Tensor& t, Index row, Index col) {
  const Index at = row * t.cols + col;
  if (t.dtype == Dtype::f32) {
    float v;
    std::memcpy(&v, static_cast<const char*>(t.data) + 4 * at, 4);
    return v;
  }
  std::uint16_t bits;
  std::memcpy(&bits, static_cast<const char*>(t.data) + 2 * at, 2);
  const int exponent_bits = t.dtype == Dtype::bf16 ? 8 : 5, fraction_bits = 15 - exponent_bits;
  const int bias = (1 << (exponent_bits - 1)) - 1;
  const int exponent = bits >> fraction_bits & ((1 << exponent_bits) - 1), fraction = bits & ((1 << fraction_bits) - 1);
  const double sign = bits >> 15 ? -1 : 1;
  if (exponent == (1 << exponent_bits) - 1) return fraction ? std::nan("") : sign * INFINITY;
  if (exponent == 0) return sign * std::ldexp(fraction, 1 - bias - fraction_bits);
  return sign * std::ldexp(fraction + (1 << fraction_bits), exponent - bias - fraction_bits);
}

double round_bf16(double v) {
  int exponent;
  const double m = std::frexp(v, &exponent);  // v = m 2^exponent, 1/2 <= |m| < 1; eight bits of m are kept
  return std::ldexp(std::nearbyint(std::ldexp(m, 8)), exponent - 8);
}

double angle(Index p, Index i, Index head_dim, double theta) {
  return static_cast<double>(p) / std::pow(theta, 2.0 * static_cast<double>(i) / static_cast<double>(head_dim));
}

Vector rotate(const Config& c, const Vector& v, Index p) {
  Vector out = v;
  for (Index i = 0; i < c.head_dim / 2; ++i) {
    const Index first = c.rope_half ? i : 2 * i, second = c.rope_half ? i + c.head_dim / 2 : 2 * i + 1;
    const double turn = angle(p, i, c.head_dim, c.rope_theta), a = v[first], b = v[second];
    out[first] = a * std::cos(turn) - b * std::sin(turn);
    out[second] = a * std::sin(turn) + b * std::cos(turn);
  }
  return out;
}

Vector rms_norm(const Vector& x, const Tensor& g, double eps) {
  double squares = 0;
  for (const double v : x) squares += v * v;
  Vector y(x.size(), 0.0);
  if (squares == 0) return y;
  for (std::size_t d = 0; d < x.size(); ++d)
    y[d] = x[d] / std::sqrt(squares / static_cast<double>(x.size()) + eps) * number(g, 0, static_cast<Index>(d));
  return y;
}

Vector route(const yocou::Moe& moe, const Vector& r) {
  std::vector<std::pair<double, Index>> order;  // best first; at equal logits the lower index
  for (Index e = 0; e < moe.experts; ++e) order.emplace_back(-r[e], e);
  std::sort(order.begin(), order.end());
  double all = 0, taken = 0;
  for (const double v : r) all += std::exp(v + order[0].first);
  Vector weight(r.size(), 0.0);
  for (Index k = 0; k < moe.active; ++k)
    taken += weight[order[k].second] = std::exp(order[0].first - order[k].first) / all;
  if (moe.normalize)
    for (double& v : weight) v /= taken;
  return weight;
}

namespace {

/// x W^T for rows first .. first+count-1 of W.
Vector times(const Vector& x, const Tensor& w, Index first, Index count) {
  Vector y(static_cast<std::size_t>(count), 0.0);
  for (Index r = 0; r < count; ++r)
    for (Index k = 0; k < w.cols; ++k) y[r] += x[k] * number(w, first + r, k);
  return y;
}
Vector times(const Vector& x, const Tensor& w) { return times(x, w, 0, w.rows); }

/// to += factor * what
void add(Vector& to, const Vector& what, double factor = 1) {
  for (std::size_t i = 0; i < to.size(); ++i) to[i] += factor * what[i];
}

/// SwiGLU of width F; `e` says which of a stack.
Vector swiglu(const Vector& f, const yocou::Ffn& w, Index F, Index e) {
  const Vector gate = times(f, w.gate, e * F, F), up = times(f, w.up, e * F, F);
  Vector inner(gate.size());
  for (std::size_t i = 0; i < inner.size(); ++i) inner[i] = gate[i] / (1 + std::exp(-gate[i])) * up[i];
  const Index D = static_cast<Index>(f.size());
  return times(inner, w.down, e * D, D);
}

/// Head h of a row of several heads.
Vector head_of(const Vector& row, Index h, Index dh) {
  return Vector(row.begin() + h * dh, row.begin() + (h + 1) * dh);
}

/// Every head of a row turned by position p.
Vector rotate_heads(const Config& c, const Vector& row, Index p) {
  Vector out;
  for (Index h = 0; h * c.head_dim < static_cast<Index>(row.size()); ++h) {
    const Vector turned = rotate(c, head_of(row, h, c.head_dim), p);
    out.insert(out.end(), turned.begin(), turned.end());
  }
  return out;
}

/// Keys and values of every position, as a stage's queries see them.
struct KeysValues {
  Matrix K, V;
};

KeysValues project(
    const Config& c, const Matrix& X, const Tensor& norm, const Tensor& wk, const Tensor& wv, bool rope, bool bf16) {
  KeysValues kv;
  for (std::size_t p = 0; p < X.size(); ++p) {
    const Vector a = rms_norm(X[p], norm, c.norm_eps);
    Vector k = times(a, wk), v = times(a, wv);
    if (rope) k = rotate_heads(c, k, static_cast<Index>(p));
    if (bf16)
      for (Vector* row : {&k, &v}) std::transform(row->begin(), row->end(), row->begin(), round_bf16);
    kv.K.push_back(k), kv.V.push_back(v);
  }
  return kv;
}

/// The learned rows of stream p that stand before those of any position.
KeysValues prefix_of(const Config& c, const yocou::Layer& layer, Index p) {
  KeysValues kv;
  for (Index j = 0; j < c.streams.prefix; ++j) {
    kv.K.emplace_back(), kv.V.emplace_back();
    for (Index k = 0; k < c.kv_heads * c.head_dim; ++k) {
      kv.K.back().push_back(number(layer.prefix_k, p * c.streams.prefix + j, k));
      kv.V.back().push_back(number(layer.prefix_v, p * c.streams.prefix + j, k));
    }
  }
  return kv;
}

/// The angle between two states over pi; 0 if one of them is zero.
double turn(const Vector& a, const Vector& b) {
  double ab = 0, aa = 0, bb = 0;
  for (std::size_t d = 0; d < a.size(); ++d) ab += a[d] * b[d], aa += a[d] * a[d], bb += b[d] * b[d];
  return aa * bb == 0 ? 0 : std::acos(std::clamp(ab / std::sqrt(aa * bb), -1.0, 1.0)) / M_PI;
}

/// The states of a sequence behind the last layer, in one of the streams. Adds to `result` what it says of how firmly.
Matrix states(const Config& c, const yocou::Weights& w, const std::vector<int>& tokens, bool bf16_cache, double halt,
    Index stream, Result& result) {
  Matrix X;
  for (const int token : tokens) {
    X.emplace_back();
    for (Index d = 0; d < c.dim; ++d) X.back().push_back(number(w.embed, token, d) * c.embed_scale);
  }
  const Index N = static_cast<Index>(X.size()), dh = c.head_dim;
  result.loops.assign(X.size(), 1);
  for (std::size_t s = 0; s < c.stages.size(); ++s) {
    const yocou::Stage& stage = c.stages[s];
    KeysValues global;
    std::vector<bool> halted(X.size(), false);
    std::vector<KeysValues> written(w.stages[s].size());  // by each layer in the loop before
    for (Index t = 0; t < stage.loops; ++t) {
      const Matrix before = X;
      if (stage.attention == Attention::shared && (t == 0 || stage.refresh_kv))
        global = project(c, X, w.kv_norm, w.kv_wk, w.kv_wv, stage.rope, bf16_cache);
      for (std::size_t l = 0; l < w.stages[s].size(); ++l) {
        const yocou::Layer& layer = w.stages[s][l];
        const bool is_shared = stage.attention == Attention::shared;
        KeysValues kv = is_shared ? global : project(c, X, layer.attn_norm, layer.wk, layer.wv, stage.rope, bf16_cache);
        for (Index j = 0; j < N; ++j)
          if (halted[j]) kv.K[j] = written[l].K[j], kv.V[j] = written[l].V[j];
        written[l] = kv;
        const KeysValues prefix = prefix_of(c, layer, stream);
        for (Index i = 0; i < N; ++i) {
          if (halted[i]) continue;
          Vector q = times(rms_norm(X[i], layer.attn_norm, c.norm_eps), layer.wq), mixed;
          if (stage.rope) q = rotate_heads(c, q, i);
          for (Index h = 0; h < c.heads; ++h) {
            const Index g = h / (c.heads / c.kv_heads);
            std::vector<std::pair<const Vector*, double>> scores;  // values that i sees, and their scores
            const auto see = [&](const Vector& K, const Vector& V) {
              double dot = 0;
              for (Index d = 0; d < dh; ++d) dot += q[h * dh + d] * K[g * dh + d];
              scores.emplace_back(&V, dot / std::sqrt(static_cast<double>(dh)));
            };
            for (Index j = 0; j < c.streams.prefix; ++j) see(prefix.K[j], prefix.V[j]);
            for (Index j = 0; j <= i; ++j)
              if (stage.attention != Attention::window || j > i - stage.window) see(kv.K[j], kv.V[j]);
            double most = -INFINITY, sum = 0;
            for (const auto& [V, score] : scores) most = std::max(most, score);
            for (const auto& [V, score] : scores) sum += std::exp(score - most);
            Vector head(static_cast<std::size_t>(dh), 0.0);
            for (const auto& [V, score] : scores) add(head, head_of(*V, g, dh), std::exp(score - most) / sum);
            mixed.insert(mixed.end(), head.begin(), head.end());
          }
          add(X[i], times(mixed, layer.wo));
          // K, V of this layer are already taken from X, so row i may go on through the FFN at once.
          const Vector f = rms_norm(X[i], layer.ffn_norm, c.norm_eps);
          if (!c.moe) {
            add(X[i], swiglu(f, layer.dense, c.ffn_dim, 0));
            continue;
          }
          const Vector r = times(f, layer.router), weight = route(*c.moe, r);
          for (Index e = 0; e < c.moe->experts; ++e)
            if (weight[e] > 0) add(X[i], swiglu(f, layer.experts, c.moe->dim, e), weight[e]);
          if (c.moe->shared_dim > 0) add(X[i], swiglu(f, layer.shared, c.moe->shared_dim, 0));
          Vector sorted = r;
          std::sort(sorted.rbegin(), sorted.rend());
          if (c.moe->active < c.moe->experts) {
            const double gap = sorted[c.moe->active - 1] - sorted[c.moe->active];
            if (gap > 0) result.router_gap = std::min(result.router_gap, gap);
          }
        }
      }
      for (Index i = 0; i < N && stage.loops > 1; ++i) {
        if (halted[i]) continue;
        result.loops[i] = t + 1;
        if (halt == 0 || t + 1 == stage.loops) continue;
        const double angle = turn(X[i], before[i]);
        halted[i] = angle < halt;
        result.halt_gap = std::min(result.halt_gap, std::fabs(angle - halt));
      }
    }
  }
  return X;
}

}  // namespace

Result forward(const Config& c, const yocou::Weights& w, const std::vector<int>& tokens, bool bf16_cache, double halt) {
  Result result;
  const Index P = c.streams.count;
  std::vector<Matrix> X;
  for (Index p = 0; p < P; ++p) X.push_back(states(c, w, tokens, bf16_cache, halt, p, result));
  for (std::size_t i = 0; i < tokens.size(); ++i) {
    Vector m, all;
    for (Index p = 0; p < P; ++p) {
      m = rms_norm(X[p][i], w.norm, c.norm_eps);
      all.insert(all.end(), m.begin(), m.end());
    }
    if (P > 1) {  // the streams' rows, weighted
      Vector hidden = times(all, w.mix_w1);
      for (Index d = 0; d < c.dim; ++d) hidden[d] += number(w.mix_b1, 0, d);
      for (double& v : hidden) v /= 1 + std::exp(-v);
      Vector weight = times(hidden, w.mix_w2);
      double sum = 0;
      for (Index p = 0; p < P; ++p) sum += weight[p] = std::exp(weight[p] + number(w.mix_b2, 0, p));
      std::fill(m.begin(), m.end(), 0.0);
      for (Index p = 0; p < P; ++p)
        add(m, Vector(all.begin() + p * c.dim, all.begin() + (p + 1) * c.dim),
            weight[p] / sum * (1 - c.streams.smooth) + c.streams.smooth / static_cast<double>(P));
    }
    result.logits.push_back(times(m, w.head));
    for (Index v = 0; v < c.vocab_size; ++v) {
      double size = 0;
      for (Index d = 0; d < c.dim; ++d) size += std::fabs(m[d] * number(w.head, v, d));
      result.scale = std::max(result.scale, size);
    }
  }
  return result;
}

}  // namespace oracle
