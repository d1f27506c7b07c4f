/// @file
/// yocou.h -- what the CPU program (yocou.cpp) and the CUDA kernels (kernels.cu) share: the shape of a model, its
/// weights, and the one interface through which every command runs it.
///
/// Symbols, the same in comments, formulas, tests and prose (the paper's where it has one):
///
///   | N   tokens of a sequence        | H   query heads            | E   experts                        |
///   | n   rows of one pass            | G   KV heads, G divides H  | F   FFN width (Fe expert, Fs shared)|
///   | D   width of the state X        | dh  head width             | V   vocabulary                     |
///   | L   distinct layers             | W   window, own row counted| s   bytes of a cached number       |
///   | T   loops of a stage            | R   = H/G heads a KV head  | p   absolute position, from 0      |
///
/// Shapes are written [rows,cols], row-major, outermost first. A cost line gives FLOP (2 x multiply-adds) and bytes.
/// Papers: YOCO-U = arXiv 2604.01220, YOCO = arXiv 2405.05254.
#pragma once
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <sstream>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

/// Everything of the program.
namespace yocou {

/// What `yocou --version` says.
inline constexpr const char* version = "0.1.0";

/// Sizes, positions and offsets: 64 bits from the first multiplication on.
using Index = std::int64_t;

/// Rows of a block of a `full` or `shared` cache (the paged block of YOCO-U, Table 10).
inline constexpr Index block_rows = 256;

/// Bad input, one line: what, where, expected, found. The program prints it and exits with 1.
struct Error : std::runtime_error {
  using std::runtime_error::runtime_error;
};

/// Throws Error with its arguments written one after another.
template <class... Part>
[[noreturn]] void fail(const Part&... part) {
  std::ostringstream line;
  (line << ... << part);
  throw Error(line.str());
}

// ---------------------------------------------------------------------------------------------------------------------
// A model's shape

// [one-stage]
/// What the queries of a stage read.
enum class Attention : std::uint8_t {
  window,  ///< own keys, the last W positions, the query's own included: the paper's efficient self-attention (ESA)
  full,    ///< own keys, all positions so far
  shared,  ///< the global K^, V^, projected once from the state that enters the stage: the cross-decoder
};

/// `layers` distinct layers in order, the whole run `loops` times on the same weights. The architecture is a list of
/// these: YOCO-U is {window, L/2 layers, T loops}, {shared, L/2 layers}.
struct Stage {
  std::string name;                       ///< prefix of the stage's tensors in the checkpoint
  Index layers = 0;                       ///< distinct layers
  Index loops = 1;                        ///< T: passes over them
  Attention attention = Attention::full;  ///< what the queries read
  Index window = 0;                       ///< W, on a window stage only
  bool rope = true;                       ///< rotate queries and keys; the default is false on `shared` (NoPE)
  bool refresh_kv = false;                ///< shared only: project K^, V^ afresh for each loop (an ablation)
};
// [one-stage]

// [moe]
/// Mixture of experts in place of the dense FFN (YOCO-U's main model: 64 experts, 8 active, one shared).
struct Moe {
  Index experts = 0;       ///< E
  Index active = 0;        ///< experts a token is sent to
  Index dim = 0;           ///< Fe, width of one expert
  Index shared_dim = 0;    ///< Fs, width of the expert that every token passes; 0: none
  bool normalize = false;  ///< divide the active experts' weights by their sum
};
// [moe]

/// A model's shape; the fields are the checkpoint's keys.
struct Config {
  std::string arch = "custom";      ///< a label; `stages` decides
  Index vocab_size = 0;             ///< V
  Index dim = 0;                    ///< D
  Index heads = 0;                  ///< H
  Index kv_heads = 0;               ///< G
  Index head_dim = 0;               ///< dh
  Index ffn_dim = 0;                ///< F, when the FFN is dense
  std::optional<Moe> moe;           ///< when it is not
  double norm_eps = 1e-5;           ///< added to the mean square, inside the root
  double rope_theta = 10000;        ///< pair i turns by p * theta^(-2i/dh)
  bool rope_half = false;           ///< "rope_pairing": "half" pairs (i, i + dh/2), otherwise (2i, 2i + 1)
  double embed_scale = 1;           ///< X^0 = embed[token] * embed_scale
  bool tied_embeddings = false;     ///< the head is the embedding
  std::string tokenizer = "bytes";  ///< token = byte
  std::vector<Stage> stages;        ///< run in this order

  Index q_dim() const { return heads * head_dim; }      ///< H dh
  Index kv_dim() const { return kv_heads * head_dim; }  ///< G dh
  Index group() const { return heads / kv_heads; }      ///< R: query head h reads KV head floor(h / R)
  /// Whether there is a cross-decoder: the shared stage, if any, is the last.
  bool has_shared() const { return !stages.empty() && stages.back().attention == Attention::shared; }
};

// ---------------------------------------------------------------------------------------------------------------------
// Weights

/// How a number is stored. Weights come in all three; a cache holds f32 or bf16.
enum class Dtype : std::uint8_t { f32, bf16, f16 };

/// Bytes of one number.
inline Index size_of(Dtype t) { return t == Dtype::f32 ? 4 : 2; }

/// A stored matrix [rows,cols], row-major, that somebody else owns (the mapped file, usually). y = x W^T.
struct Tensor {
  const void* data = nullptr;  ///< row 0
  Dtype dtype = Dtype::f32;    ///< of a number
  Index rows = 0;              ///< outputs of a product
  Index cols = 0;              ///< inputs of a product

  /// Bytes of all rows.
  Index bytes() const { return rows * cols * size_of(dtype); }
  /// Rows first .. first+count-1: one expert of a stack, one token's embedding.
  Tensor slice(Index first, Index count) const {
    return {static_cast<const char*>(data) + first * cols * size_of(dtype), dtype, count, cols};
  }
};

/// The three matrices of a SwiGLU: (silu(x gate^T) * (x up^T)) down^T. Experts are stacked by rows.
struct Ffn {
  Tensor gate;  ///< [F,D]; of E experts [E Fe,D]
  Tensor up;    ///< the same
  Tensor down;  ///< [D,F]; of E experts [E D,Fe]
};

/// The weights of one layer.
struct Layer {
  Tensor attn_norm;  ///< [D]
  Tensor wq;         ///< [H dh,D]
  Tensor wk;         ///< [G dh,D]; none in a shared stage
  Tensor wv;         ///< the same
  Tensor wo;         ///< [D,H dh]
  Tensor ffn_norm;   ///< [D]
  Ffn dense;         ///< without moe
  Tensor router;     ///< [E,D]
  Ffn experts;       ///< the routed experts
  Ffn shared;        ///< the expert that is always on, when Fs > 0
};

/// All weights of a model.
struct Weights {
  Tensor embed;                            ///< [V,D]
  std::vector<std::vector<Layer>> stages;  ///< [stage][layer]
  Tensor kv_norm;                          ///< [D], with a shared stage only, as the next two
  Tensor kv_wk;                            ///< [G dh,D]: K^ = norm(X; kv_norm) kv_wk^T
  Tensor kv_wv;                            ///< [G dh,D]: V^ = norm(X; kv_norm) kv_wv^T
  Tensor norm;                             ///< [D], before the head
  Tensor head;                             ///< [V,D]; a tied head is a view of embed
};

/// A tensor's shape as the checkpoint states it: 1 to 3 dimensions.
using Shape = std::vector<Index>;

/// Calls visit(name, shape, tensor) for every tensor that the config asks for, in the order in which they are written.
/// The one list that loads, checks, counts, initialises and uploads weights. `w` is a Weights, const or not.
template <class W, class Visit>
void for_each_tensor(const Config& c, W& w, Visit&& visit) {
  const Index D = c.dim;
  const auto swiglu = [&](const std::string& name, auto& f, Index F, Index E) {
    const auto stacked = [E](Index a, Index b) { return E ? Shape{E, a, b} : Shape{a, b}; };
    visit(name + "w_gate", stacked(F, D), f.gate);
    visit(name + "w_up", stacked(F, D), f.up);
    visit(name + "w_down", stacked(D, F), f.down);
  };
  visit("embed", Shape{c.vocab_size, D}, w.embed);
  for (std::size_t s = 0; s < c.stages.size(); ++s)
    for (std::size_t i = 0; i < w.stages[s].size(); ++i) {
      auto& l = w.stages[s][i];
      const std::string name = c.stages[s].name + "." + std::to_string(i) + ".";
      visit(name + "attn_norm", Shape{D}, l.attn_norm);
      visit(name + "wq", Shape{c.q_dim(), D}, l.wq);
      if (c.stages[s].attention != Attention::shared) {
        visit(name + "wk", Shape{c.kv_dim(), D}, l.wk);
        visit(name + "wv", Shape{c.kv_dim(), D}, l.wv);
      }
      visit(name + "wo", Shape{D, c.q_dim()}, l.wo);
      visit(name + "ffn_norm", Shape{D}, l.ffn_norm);
      if (!c.moe) {
        swiglu(name, l.dense, c.ffn_dim, /*E=*/0);
      } else {
        visit(name + "router", Shape{c.moe->experts, D}, l.router);
        swiglu(name + "experts.", l.experts, c.moe->dim, c.moe->experts);
        if (c.moe->shared_dim) swiglu(name + "shared.", l.shared, c.moe->shared_dim, /*E=*/0);
      }
    }
  if (c.has_shared()) {
    visit("kv_norm", Shape{D}, w.kv_norm);
    visit("kv.wk", Shape{c.kv_dim(), D}, w.kv_wk);
    visit("kv.wv", Shape{c.kv_dim(), D}, w.kv_wv);
  }
  visit("norm", Shape{D}, w.norm);
  if (!c.tied_embeddings) visit("head", Shape{c.vocab_size, D}, w.head);
}

// ---------------------------------------------------------------------------------------------------------------------
// Running a model

/// Which positions of a segment need logits.
enum class Logits : std::uint8_t {
  none,  ///< a chunk that is not the prompt's last: nothing above the caches is computed
  last,  ///< prefill's end, or a decode step
  all,   ///< scoring: no early stop
};

/// One sequence's part of a pass: `tokens` are appended to sequence `sequence`.
struct Segment {
  int sequence = 0;             ///< what Engine::open() gave
  std::span<const int> tokens;  ///< ids, 0 .. V-1
  Logits want = Logits::last;   ///< logits of which of them
};

/// How the next token is drawn: temperature, then top-k, then top-p, renormalised after each.
struct Sampling {
  double temperature = 0;  ///< 0: greedy, the lower id on ties
  Index top_k = 0;         ///< the k largest logits; 0: all
  double top_p = 1;        ///< the smallest set of largest probabilities that reaches it
};

/// What the operations of an engine did, added up by the operations themselves; never computed from a formula.
struct Counters {
  std::uint64_t flops = 0;            ///< 2 x multiply-adds of matrix products and attention
  std::uint64_t bytes = 0;            ///< weights and cached rows read, once per pass that reads them
  std::uint64_t cross_positions = 0;  ///< rows that entered a pass of the shared stage
  /// What was done since `o`.
  Counters operator-(const Counters& o) const {
    return {flops - o.flops, bytes - o.bytes, cross_positions - o.cross_positions};
  }
};

/// The state after one application of a layer, shown to a tracer.
struct Application {
  Index stage = -1;                    ///< -1: the embeddings, X^0
  Index loop = 0;                      ///< from 0
  Index layer = 0;                     ///< in its stage, from 0
  std::span<const float> x;            ///< [n,D], the rows of the pass
  std::span<const Index> expert_load;  ///< [E] tokens sent to each expert in this application; empty when dense
};

/// What an engine must be told when it is made.
struct EngineOptions {
  Dtype kv_dtype = Dtype::f32;  ///< type of a cached number
  Index max_rows = 1;           ///< most rows that any one pass will have
  Index max_tokens = 1;         ///< most positions that all open sequences will hold together
  Index max_sequences = 1;      ///< most sequences open at a time
};

/// A model that runs: the weights, the caches of the open sequences, and one operation. The commands know no other.
class Engine {
 public:
  virtual ~Engine() = default;
  /// Opens an empty sequence; its window rings are allocated here, blocks of 256 rows as it grows. Returns its number.
  virtual int open() = 0;
  /// Forgets a sequence and gives its memory back.
  virtual void close(int sequence) = 0;
  /// Runs every segment's tokens at the positions that follow its sequence, and appends to the caches.
  ///   logits  [rows,V] for the wanted positions, segment by segment; may be null when none is wanted
  /// A row's logits do not depend on what else is in the pass. Throws Error for a token outside 0 .. V-1 and for
  /// logits that are not finite.
  virtual void forward(std::span<const Segment> pass, float* logits) = 0;
  /// forward(), then one token for every wanted row, drawn where the logits lie: in the order of falling logits, the
  /// token at which the sum of the probabilities passes `u`, numbers in [0, 1), one a row.
  virtual void forward_sample(
      std::span<const Segment> pass, const Sampling&, std::span<const double> u, int* tokens) = 0;
  /// Bytes of cache allocated at this moment, all sequences together.
  virtual Index cache_bytes() const = 0;
  /// Rows of K^, V^ written, all sequences and caches together.
  virtual Index global_rows() const = 0;

  Counters counters;                                 ///< since the engine was made
  std::function<void(const Application&)> on_layer;  ///< called after every layer application, when set
};

#ifdef YOCOU_CUDA
/// The CUDA engine (kernels.cu). Throws Error when there is no suitable device.
std::unique_ptr<Engine> make_cuda_engine(const Config&, const Weights&, const EngineOptions&);
#endif

}  // namespace yocou
