/// @file
/// model_sampler.cpp -- drawing a token from logits.
#include <set>

#include "fixtures.h"

namespace yocou::test {
namespace {

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
