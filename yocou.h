/// @file
/// yocou.h -- the page of definitions: what a model is, where it keeps what (Plan), in which order it runs
/// (run_stages()), and the one interface through which every command runs it. Behind it stand four rooms:
///
///   yocou.cpp       the model on the CPU, prefill and decode, the accounting
///   checkpoint.cpp  architectures, shapes, configs, files
///   kernels.cu      the model on a GPU
///   main.cpp        the machine and the commands
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
#include <algorithm>
#include <csignal>
#include <cstdint>
#include <cstdlib>
#include <functional>
#include <limits>
#include <memory>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <random>
#include <span>
#include <sstream>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

/// Everything of the program.
namespace yocou {

inline constexpr const char* version = "0.1.0";  ///< what `yocou --version` says
using Index = std::int64_t;  ///< sizes, positions and offsets: 64 bits from the first multiplication on
/// Rows of a block of a `full` or `shared` cache (the paged block of YOCO-U, Table 10).
inline constexpr Index block_rows = 256;

/// Bad input, one line: what, where, expected, found. The program prints it and exits with 1.
struct Error : std::runtime_error {
  using std::runtime_error::runtime_error;
};
/// Wrong use of the command line: exit status 2.
struct Usage : std::runtime_error {
  using std::runtime_error::runtime_error;
};

/// Throws Error with its arguments written one after another.
template <class... Word>
[[noreturn]] void fail(const Word&... word) {
  std::ostringstream line;
  (line << ... << word);
  throw Error(line.str());
}

extern volatile std::sig_atomic_t interrupted;  ///< set by SIGINT; every pass and every long loop looks at it
/// What stop_if_interrupted() throws.
struct Interrupted {};
/// Throws Interrupted once SIGINT has come.
inline void stop_if_interrupted() {
  if (interrupted) throw Interrupted{};
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

/// ParScale (arXiv 2505.10475): a token is P rows, each behind learned keys of its stream, weighted before the one
/// head.
struct Streams {
  Index count = 1;    ///< P
  Index prefix = 0;   ///< m: learned keys and values of a stream in each layer, before those of any position
  double smooth = 0;  ///< e: of the weights, e/P are the same for all streams
};

/// A model's shape; the fields are the checkpoint's keys.
struct Config {
  std::string arch = "custom";      ///< a label; `stages` decides
  Index vocab_size = 0, dim = 0;    ///< V, D
  Index heads = 0, kv_heads = 0;    ///< H, G
  Index head_dim = 0;               ///< dh
  Index ffn_dim = 0;                ///< F, when the FFN is dense
  std::optional<Moe> moe;           ///< when it is not
  double norm_eps = 1e-5;           ///< added to the mean square, inside the root
  double rope_theta = 10000;        ///< pair i turns by p * theta^(-2i/dh)
  bool rope_half = false;           ///< "rope_pairing": "half" pairs (i, i + dh/2), otherwise (2i, 2i + 1)
  double embed_scale = 1;           ///< X^0 = embed[token] * embed_scale
  bool tied_embeddings = false;     ///< the head is the embedding
  std::string tokenizer = "bytes";  ///< token = byte
  Streams streams;                  ///< P > 1 with full stages of one loop only
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

inline Index size_of(Dtype t) { return t == Dtype::f32 ? 4 : 2; }  ///< bytes of one number

/// A stored matrix [rows,cols], row-major, that somebody else owns (the mapped file, usually). y = x W^T.
struct Tensor {
  const void* data = nullptr;  ///< row 0
  Dtype dtype = Dtype::f32;    ///< of a number
  Index rows = 0, cols = 0;    ///< outputs and inputs of a product

  Index bytes() const { return rows * cols * size_of(dtype); }  ///< bytes of all rows
  /// Rows first .. first+count-1: one expert of a stack, one token's embedding.
  Tensor slice(Index first, Index count) const {
    return {static_cast<const char*>(data) + first * cols * size_of(dtype), dtype, count, cols};
  }
};

/// The three matrices of a SwiGLU: (silu(x gate^T) * (x up^T)) down^T. Experts are stacked by rows.
struct Ffn {
  Tensor gate, up;  ///< [F,D]; of E experts [E Fe,D]
  Tensor down;      ///< [D,F]; of E experts [E D,Fe]
};

/// The weights of one layer.
struct Layer {
  Tensor attn_norm;           ///< [D]
  Tensor wq;                  ///< [H dh,D]
  Tensor wk, wv;              ///< [G dh,D]; none in a shared stage
  Tensor prefix_k, prefix_v;  ///< [P m,G dh], with streams only
  Tensor wo;                  ///< [D,H dh]
  Tensor ffn_norm;            ///< [D]
  Ffn dense;                  ///< without moe
  Tensor router;              ///< [E,D]
  Ffn experts;                ///< the routed experts
  Ffn shared;                 ///< the expert that is always on, when Fs > 0
};

/// All weights of a model.
struct Weights {
  Tensor embed;                            ///< [V,D]
  std::vector<std::vector<Layer>> stages;  ///< [stage][layer]
  Tensor kv_norm;                          ///< [D], with a shared stage only, as the next
  Tensor kv_wk, kv_wv;                     ///< [G dh,D]: K^ = norm(X; kv_norm) kv_wk^T, V^ likewise
  Tensor norm;                             ///< [D], before the head
  Tensor mix_w1, mix_b1, mix_w2, mix_b2;   ///< [D,P D] [D] [P,D] [P], with streams only: the weights of a token's rows
  Tensor head;                             ///< [V,D]; a tied head is a view of embed
};

using Shape = std::vector<Index>;  ///< a tensor's shape as the checkpoint states it: 1 to 3 dimensions

/// What for_each_tensor() calls: visit(name, shape, tensor).
using TensorVisit = std::function<void(const std::string&, const Shape&, Tensor&)>;
/// Visits every tensor that the config asks for, in the order in which they are written: the one list that loads,
/// checks, counts, initialises and uploads weights (checkpoint.cpp).
void for_each_tensor(const Config& c, Weights& w, const TensorVisit& visit);
/// The same for weights that stay as they are.
void for_each_tensor(const Config& c, const Weights& w,
    const std::function<void(const std::string&, const Shape&, const Tensor&)>& visit);

// ---------------------------------------------------------------------------------------------------------------------
// The schedule, the same for every engine

// [plan]
/// What one (stage, loop, layer) keeps of a sequence.
enum class Keeps : std::uint8_t {
  ring,    ///< K and V of the last W positions
  blocks,  ///< K and V of all positions, in blocks of 256 rows
  global,  ///< K^, V^: blocks that every layer of the shared stage reads
};

/// One entry of what a sequence keeps.
struct Kept {
  Keeps what;    ///< the kind
  Index window;  ///< W of a ring, otherwise 0
};

/// One application of a layer.
struct Place {
  Index stage = 0, loop = 0, layer = 0;  ///< which; all from 0
  Index kept = 0;                        ///< the entry of Plan::kept that its queries read
};

/// Where a model keeps what: for every (stage, loop, layer) what it writes, and which entry its queries read. Window and
/// full stages keep rows of their own for every (loop, layer), for a position's keys differ from loop to loop; a shared
/// stage has one K^, V^ for all, or one a loop with refresh_kv.
struct Plan {
  /// One loop of a stage.
  struct Loop {
    Index stage, loop;  ///< which; both from 0
    bool projects;      ///< K^, V^ are first projected from the state that enters
    bool narrows;       ///< only rows whose logits are wanted go on from here: prefill's early stop
    Index first;        ///< the entry of layer 0
    Index stride;       ///< from a layer's entry to the next one's: 1, or 0 where all read the same
  };
  std::vector<Kept> kept;   ///< of a sequence
  std::vector<Loop> loops;  ///< in the order in which they run

  Plan() = default;
  /// The plan of a config.
  explicit Plan(const Config& c) {
    for (Index s = 0; s < std::ssize(c.stages); ++s) {
      const Stage& stage = c.stages[static_cast<std::size_t>(s)];
      const bool shared = stage.attention == Attention::shared, ring = stage.attention == Attention::window;
      const Keeps what = shared ? Keeps::global : ring ? Keeps::ring : Keeps::blocks;
      for (Index t = 0; t < stage.loops; ++t) {
        const bool projects = shared && (t == 0 || stage.refresh_kv);
        const Index entries = !shared ? stage.layers : projects ? 1 : 0;
        const Index first = std::ssize(kept) - (shared && !projects ? 1 : 0);
        const bool narrows = shared && t == (stage.refresh_kv ? stage.loops - 1 : 0);
        loops.push_back({s, t, projects, narrows, first, /*stride=*/shared ? 0 : 1});
        kept.insert(kept.end(), static_cast<std::size_t>(entries), Kept{what, stage.window});
      }
    }
  }
};
// [plan]

// [run-stages]
/// Runs a pass through all stages: USD(X), the self-decoder's layers T times over with the same weights; K^, V^ from the
/// state that leaves it; the cross-decoder. The same lines are the Transformer (one full stage), UT (looped), RINS (two
/// full stages) and the ablations. An engine supplies the operations:
///   project_global(loop)   K^, V^ [n,G dh] from the rows of X, appended to the global cache
///   keep_wanted_rows()     drops the rows whose logits nobody wants; false when none is left
///   layer(place)           X = one layer's application to X [n,D]
///   end_loop(loop)         rows whose state has come to rest leave X until the stage ends, where an engine halts
template <class Operations>
void run_stages(const Config& c, const Plan& plan, Operations&& engine) {
  for (const Plan::Loop& loop : plan.loops) {
    if (loop.projects) engine.project_global(loop);
    if (loop.narrows && !engine.keep_wanted_rows()) return;
    for (Index l = 0; l < c.stages[static_cast<std::size_t>(loop.stage)].layers; ++l)
      engine.layer(Place{loop.stage, loop.loop, l, loop.first + l * loop.stride});
    engine.end_loop(loop);
  }
}
// [run-stages]

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
  Index loop = 0, layer = 0;           ///< from 0
  std::span<const float> x;            ///< [n,D], the rows of the pass
  std::span<const Index> expert_load;  ///< [E] tokens sent to each expert in this application; empty when dense
  std::span<const Index> rows = {};    ///< [n] which of the pass's rows these are, where some have halted; empty: all
};

/// What an engine must be told when it is made.
struct EngineOptions {
  Dtype kv_dtype = Dtype::f32;  ///< type of a cached number
  Index max_rows = 1;           ///< most tokens that any one pass will have
  Index max_tokens = 1;         ///< most positions that all open sequences will hold together
  Index max_sequences = 1;      ///< most sequences open at a time
  double halt = 0;  ///< A: rows that a loop turns by a smaller angle / pi run no further loops; 0: none halts
};

/// A model that runs: the weights, the caches of the open sequences, and one operation. The commands know no other.
class Engine {
 public:
  virtual ~Engine() = default;
  /// Opens an empty sequence; its window rings are allocated here, blocks of 256 rows as it grows. Returns its number.
  virtual int open() = 0;
  virtual void close(int sequence) = 0;  ///< forgets a sequence and gives its memory back
  /// Runs every segment's tokens at the positions that follow its sequence, and appends to the caches.
  ///   logits  [rows,V] for the wanted positions, segment by segment; may be null when none is wanted
  /// A row's logits do not depend on what else is in the pass. Throws Error for a token outside 0 .. V-1 and for
  /// logits that are not finite.
  virtual void forward(std::span<const Segment> pass, float* logits) = 0;
  /// forward(), then one token for every wanted row, drawn where the logits lie: in the order of falling logits, the
  /// token at which the sum of the probabilities passes `u`, numbers in [0, 1), one a row.
  virtual void forward_sample(
      std::span<const Segment> pass, const Sampling&, std::span<const double> u, int* tokens) = 0;
  virtual Index cache_bytes() const = 0;  ///< bytes of cache allocated at this moment, all sequences together
  virtual Index global_rows() const = 0;  ///< rows of K^, V^ written, all sequences and caches together
  /// t_i: how many loops each position of an open sequence ran; empty without EngineOptions::halt.
  virtual std::span<const Index> loops_run(int /*sequence*/) const { return {}; }

  Counters counters;                                 ///< since the engine was made
  std::function<void(const Application&)> on_layer;  ///< called after every layer application, when set
};

/// The CPU engine (yocou.cpp). It keeps a copy of the config; the weights stay the caller's.
std::unique_ptr<Engine> make_cpu_engine(const Config&, const Weights&, const EngineOptions&);
#ifdef YOCOU_CUDA
/// The CUDA engine (kernels.cu). Throws Error when there is no suitable device.
std::unique_ptr<Engine> make_cuda_engine(const Config&, const Weights&, const EngineOptions&);
#endif

/// Allocates and touches what `batch` sequences of N tokens keep, calls `then` with the bytes that the arena counted
/// while they are held, and gives them back.
void hold_caches(const Config&, Dtype, Index N, Index batch, const std::function<void(Index bytes)>& then);
/// Runs a prompt in chunks; the last row's logits [V]. Chunks but the last want no logits: they stop below the
/// cross-decoder, and memory for activations is one chunk's, whatever N. Calls after(tokens done) after each chunk.
void prefill(Engine&, int sequence, std::span<const int> tokens, Index chunk, float* logits,
    const std::function<void(Index)>& after = {});
/// One decode step: each sequence's next token; logits [sequences,V].
void decode(Engine&, std::span<const int> sequences, std::span<const int> tokens, float* logits);
/// Runs tokens with all logits, chunk by chunk: use(first position, rows, logits [rows,V]). For scoring.
void forward_all(Engine&, const Config&, int sequence, std::span<const int> tokens, Index chunk,
    const std::function<void(Index, Index, const float*)>& use);

double cosine(std::span<const float>, std::span<const float>);  ///< of two states, in double; 1 if one of them is zero
int greedy(std::span<const float> logits);                      ///< the largest of logits [V]; ties: the lower id
/// One token for a row of logits [V] and a number u in [0, 1).
int draw(std::span<const float> logits, const Sampling&, double u);

/// A seeded source of draws.
struct Sampler : Sampling {
  std::mt19937_64 random;                                                     ///< the source
  double uniform() { return static_cast<double>(random() >> 11) * 0x1p-53; }  ///< the next number in [0, 1)
  /// One token for a row of logits [V].
  int operator()(std::span<const float> logits) { return draw(logits, *this, temperature == 0 ? 0 : uniform()); }
};

/// Numbers as they are stored, from float32: nearest, ties to even.
void narrow(const float* from, Index count, Dtype, void* to);
/// Numbers first .. first+count-1 of a tensor as float32.
void widen(const Tensor& from, Index first, Index count, float* to);

int thread_count();                    ///< threads that a parallel region gets; 1 in a build without OpenMP
void set_thread_count(Index threads);  ///< sets it

// ---------------------------------------------------------------------------------------------------------------------
// Costs

/// An unsigned integer of 128 bits that throws Error rather than wrap.
struct Exact {
  unsigned __int128 v = 0;  ///< the number
  /// The same number.
  Exact(Index n = 0) : v(static_cast<unsigned __int128>(n)) {}  // NOLINT: formulas read better with plain sizes in them
  friend Exact operator+(Exact, const Exact&);                  ///< the exact sum
  friend Exact operator*(Exact, const Exact&);                  ///< the exact product
  Exact& operator+=(const Exact& o) { return *this = *this + o; }      ///< adds
  auto operator<=>(const Exact&) const = default;                      ///< by value
  explicit operator double() const { return static_cast<double>(v); }  ///< to 53 bits
};
std::string to_string(Exact);  ///< all digits

/// A symbol of a formula, "D", and its number.
struct Factor {
  const char* symbol;  ///< "D", "6", "T"
  Exact value;         ///< 2560, 6, 3
};
/// A product of factors: one line of a bill.
struct Term {
  std::string of;               ///< what it pays for: "self: q"
  std::vector<Factor> factors;  ///< multiplied
  Exact value() const;          ///< the product
  std::string text() const;     ///< "2 D (H dh) T = 2 x 2560 x 2560 x 3 = 39321600"
};
using Bill = std::vector<Term>;  ///< a cost as a sum of products: it computes, and it explains itself
Exact total(const Bill&);        ///< the sum

Index paged_rows(Index N);  ///< rows of blocks that hold N tokens: blocks are allocated whole
/// The keys that the positions p0 .. p1-1 see together, at most W each (0: no bound).
Exact keys_seen(Index p0, Index p1, Index W);
Bill cache_bill(const Config&, Index N, Index s);  ///< bytes of cache of one sequence after N tokens, s bytes a number
/// FLOP of running positions p0 .. p1-1 of one sequence, of which the last `wanted` get logits.
Bill flops_bill(const Config&, Index p0, Index p1, Index wanted);
/// Stored elements, loops counted once, embedding and head left out; with so many of the E experts.
Bill params_bill(const Config&, Index experts);
/// Bytes that the decode step of a batch after N tokens must read: each weight once per loop that uses it (of E experts
/// at most min(E, batch x P x active)), the head, one embedding row a sequence, and every cached row that is seen; w bytes
/// a weight, s bytes a cached number.
Bill decode_bytes_bill(const Config&, Index N, Index batch, Index w, Index s);

/// FLOP of positions p0, p0+1, .. of one sequence that ran so many loops each; the last gets logits.
Exact halting_flops(Config, Index p0, std::span<const Index> loops_run);
Exact cache_bytes(const Config&, Index N, Index s);  ///< total(cache_bill())
Exact prefill_flops(const Config&, Index N);         ///< a prefill of N tokens: all positions, logits of the last
Exact decode_flops(const Config&, Index N);          ///< the decode step after N tokens
Exact decode_bytes(const Config&, Index N, Index batch, Index w, Index s);  ///< total(decode_bytes_bill())

inline constexpr Index N_limit = Index{1} << 40;  ///< tokens that costs answer for
/// The largest n in [0, limit] for which ok(n), where ok holds up to some n and not beyond.
Index largest(Index limit, const std::function<bool(Index)>& ok);
/// The smallest N from which on a prefill of `c` costs less than one of `other`; none when that is never.
std::optional<Index> crossover(const Config& c, const Config& other);

/// Stored elements; loops count once.
struct Params {
  Exact params;                                        ///< without embedding and head, norm gains included
  Exact active;                                        ///< the same with experts x active/experts
  Exact embed, head;                                   ///< V D; the head 0 when tied
  Exact all() const { return params + embed + head; }  ///< all that are stored
};
Params count_params(const Config&);  ///< counts a config's parameters by formula

// ---------------------------------------------------------------------------------------------------------------------
// Architectures, configs, files (checkpoint.cpp)

/// JSON with 128-bit integers, so that costs print exactly; keys stay in order.
using Json = nlohmann::basic_json<nlohmann::ordered_map, std::vector, std::string, bool, __int128, unsigned __int128>;
using Names = std::vector<std::string>;                      ///< words of any kind
std::string join(const Names&, const char* between = ", ");  ///< "a, b, c"
const std::string& name_of(Dtype);                           ///< "F32", "BF16", "F16"
/// JSON text that is valid UTF-8 whatever is in it; with `ascii`, control and other special characters are escaped.
std::string dump(const Json&, bool ascii = false);
std::string valid(const std::string& text);  ///< text with U+FFFD for what is not UTF-8
/// Parses JSON. Throws Error for a syntax error, a duplicate key, and nesting deeper than 32.
Json parse_json(std::string_view text, const std::string& where);
std::string quote(const Json&);  ///< a value from a file as it may be shown: quoted, escaped, not too long

/// As the low end of a range: all that is above 0.
inline constexpr double above_0 = std::numeric_limits<double>::denorm_min();
/// The numbers from low to high.
template <class T>
struct Range {
  T low, high;                                           ///< both of them in it
  bool has(T v) const { return v >= low && v <= high; }  ///< whether it holds v
  /// As a message says it: "an integer from 1 to 4096".
  std::string text() const {
    std::ostringstream s;
    s << (std::is_integral_v<T> ? "an integer" : "a number");
    if (static_cast<double>(low) == above_0) s << " above 0, at most " << high;
    else s << " from " << low << " to " << high;
    return s.str();
  }
};
inline constexpr Range<Index> sizes{1, std::numeric_limits<std::int32_t>::max()};  ///< what sizes of a model may be
inline constexpr Range<Index> counts{1, 4096};  ///< what numbers of layers and loops may be

/// A named architecture: its stages in terms of L and T, and its costs as the paper's Table 1 states them (those of
/// rins and upper-loop* in the same terms, by the formulas of the accounting).
struct Arch {
  /// One stage.
  struct Part {
    const char* name;                      ///< of the stage
    Attention attention;                   ///< what its queries read
    bool half;                             ///< L/2 layers, otherwise L
    bool looped = false, refresh = false;  ///< x T; refresh_kv
  };
  std::string name;                         ///< its label
  Index loops;                              ///< default T
  std::vector<Part> parts;                  ///< its stages
  const char *kv_cache, *prefill, *decode;  ///< big-O
  bool streams = false;                     ///< P of them

  /// Whether --window means anything.
  bool takes_window() const { return parts.front().attention == Attention::window; }
};
const std::vector<Arch>& archs();                ///< all of them
const Arch* find_arch(const std::string& name);  ///< the named one, or null
Index looped_stage(const Config&);  ///< the one marked x T, in a custom config by its loops above 1; -1: not one
/// Sets T of the stage that is marked x T; 0 keeps it. Returns its T, 1 when nothing loops. Throws Usage when there is
/// no such stage.
Index set_loops(Config&, Index T);

/// Overrides of a shape; 0: keep.
struct ShapeOptions {
  Index layers = 0, window = 0, loops = 0;               ///< L, W, T
  Index dim = 0, heads = 0, kv_heads = 0, head_dim = 0;  ///< D, H, G, dh
  Index ffn_dim = 0, vocab_size = 0;                     ///< F, V
  Index streams = 0;                                     ///< P
};
const Names& shape_names();  ///< names of the shapes
/// A shape as an architecture. Throws Usage for an unknown name and for an override that the architecture cannot take.
Config make_config(const std::string& shape, const std::string& arch, const ShapeOptions&);
/// The config of a checkpoint. Throws Error naming `path`, the key, what was expected and what was found.
Config read_config(const Json&, const std::string& path);
Json config_json(Config);  ///< the config as JSON, every key written out; what read_config() reads

/// A regular file, mapped read-only.
class MappedFile {
 public:
  explicit MappedFile(const std::string& path);  ///< throws Error naming the path
  MappedFile(const MappedFile&) = delete;
  ~MappedFile();
  std::string_view text() const { return {static_cast<const char*>(p_), size_}; }  ///< its bytes

 private:
  void* p_ = nullptr;     ///< where it is mapped
  std::size_t size_ = 0;  ///< its bytes
};

/// A tensor as the file's header lists it; offsets count from the end of the header.
struct StoredTensor {
  std::string name;          ///< as for_each_tensor() calls it
  Dtype dtype = Dtype::f32;  ///< of a number
  Shape shape;               ///< as stored
  Index begin = 0, end = 0;  ///< of its bytes
};

/// A model: config, weights, and whatever keeps the weights in memory.
struct Model {
  Config config;                                                    ///< its shape
  Weights weights;                                                  ///< views of the file, or of `memory`
  std::vector<StoredTensor> tensors;                                ///< of a checkpoint, in file order
  std::unique_ptr<MappedFile> file;                                 ///< of a checkpoint
  std::vector<std::unique_ptr<void, decltype(&std::free)>> memory;  ///< of random weights
};
Weights empty_weights(const Config&);  ///< layers of empty tensors, as many as the config asks for
/// A stored matrix: the leading dimensions are rows; [D] is one row.
Tensor as_matrix(const void* data, Dtype, const Shape&);
/// Opens a checkpoint. Throws Error, one line naming file, tensor, expected and found, for anything that is not exactly
/// a model.
Model load_model(const std::string& path);
Model random_model(const Config&, Dtype, std::uint64_t seed);  ///< a model of random weights in memory, for measuring
/// Writes a checkpoint of random weights, 1M numbers at a time.
void write_random_checkpoint(const Config&, Dtype, std::uint64_t seed, const std::string& path);

/// One line of a task file.
struct Task {
  std::string prompt, answer;  ///< what the model reads, what it should write
  std::string group;           ///< JSON of the field to group by
};
/// Reads JSON lines {"prompt","answer", ...}; `by` names the field to group by. Throws Error naming file and line.
std::vector<Task> read_tasks(std::string_view text, const std::string& path, const std::string& by);

/// The program (main.cpp): 0 done, 1 bad input or failed check, 2 usage, 130 interrupted; one line on stderr when not 0.
int run(std::vector<std::string> arguments);

}  // namespace yocou
