/// @file
/// oracle.h -- the model once more, for the tests: plain loops in double precision over the whole sequence, with no
/// cache, no batch, no early stop, no library, and nothing of yocou.cpp. It shares the structs of yocou.h and nothing
/// else; weights are decoded here by arithmetic on their bits.
#pragma once
#include "yocou.h"

namespace oracle {

using Matrix = std::vector<std::vector<double>>;  // [rows][cols]

/// What a forward pass says, and how firmly.
struct Result {
  Matrix logits;                    ///< [N,V]
  double scale = 0;                 ///< the largest sum of |terms| that makes a logit: what its rounding is relative to
  std::vector<yocou::Index> loops;  ///< [N] how many loops each position ran
  double halt_gap = 1;              ///< the smallest distance of an angle from the one that decides whether a row halts
  double router_gap = 1;  ///< the smallest difference above 0 between the last expert chosen and the first one left out
};

/// All logits of a sequence. With `bf16_cache` the keys and values are rounded as a BF16 cache rounds them; with `halt` a
/// row that a loop turns by less (over pi) runs no further ones.
Result forward(const yocou::Config& c, const yocou::Weights& w, const std::vector<int>& tokens, bool bf16_cache = false,
    double halt = 0);

/// Element (row, col) of a stored matrix.
double number(const yocou::Tensor& t, yocou::Index row, yocou::Index col);

/// The nearest BF16 number, ties to even.
double round_bf16(double v);

/// The angle by which pair i is turned at position p.
double angle(yocou::Index p, yocou::Index i, yocou::Index head_dim, double theta);

/// One head's vector turned by its position.
std::vector<double> rotate(const yocou::Config& c, const std::vector<double>& v, yocou::Index p);

/// x / sqrt(mean(x^2) + eps) * g; a row of zeros gives zeros whatever eps is.
std::vector<double> rms_norm(const std::vector<double>& x, const yocou::Tensor& g, double eps);

/// Weight of each of the E experts for router logits r: softmax over all, the `active` largest kept (ties: the lower
/// index), divided by their sum when `normalize`; 0 for the others.
std::vector<double> route(const yocou::Moe& moe, const std::vector<double>& r);

}  // namespace oracle
