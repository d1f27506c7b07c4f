/// @file
/// main.cpp -- the program: what the machine can do, and the commands. Every command reads its options, runs a model
/// through the one interface of yocou.h, and prints.
#include <malloc.h>
#include <signal.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <Eigen/Core>
#include <cerrno>
#include <charconv>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iomanip>
#include <iostream>
#include <limits>
#include <map>
#include <nlohmann/json.hpp>
#include <numeric>
#include <set>

#include "yocou.h"

namespace yocou {

// =====================================================================================================================
// 1. The machine: memory, clocks, its measured limits

using Clock = std::chrono::steady_clock;
double seconds_since(Clock::time_point start) { return std::chrono::duration<double>(Clock::now() - start).count(); }

/// What follows `key` on the first line that begins with it, in a file of /proc or a control group; "" without one.
std::string line_of(const std::string& path, const std::string& key) {
  std::ifstream in(path);
  for (std::string line; std::getline(in, line);)
    if (line.starts_with(key)) return line.substr(key.size());
  return "";
}
/// The same as a number, or `otherwise`.
Index number_in(const std::string& path, const std::string& key, Index otherwise) {
  Index v = 0;
  return std::istringstream(line_of(path, key)) >> v ? v : otherwise;
}

/// Bytes that can still be allocated: the machine's, or the control group's if that is less, but for a twentieth that
/// is left to everything else.
Index available_memory() {
  Index available = number_in("/proc/meminfo", "MemAvailable:", 0) * 1024;
  std::filesystem::path group = line_of("/proc/self/cgroup", "0::");
  for (; group.has_relative_path(); group = group.parent_path()) {
    const std::string at = "/sys/fs/cgroup" + group.string();
    const Index limit = number_in(at + "/memory.max", "", std::numeric_limits<Index>::max());
    const Index used = number_in(at + "/memory.current", "", 0);
    const Index cached = number_in(at + "/memory.stat", "inactive_file ", 0);
    available = std::clamp<Index>(limit - used + std::min(used, cached), 0, available);
  }
  return available - available / 20;
}
/// Bytes of this process in RAM now.
Index resident_memory() { return number_in("/proc/self/status", "VmRSS:", 0) * 1024; }

/// Throws Error when `bytes` more will not fit; both figures are in the line.
void require_memory(const Exact& bytes, const std::string& what) {
  const Index available = available_memory();
  if (bytes > Exact(available))
    fail(what, " needs ", to_string(bytes), " bytes of memory, ", available, " are available");
}

/// About what an engine's buffers take for passes of n rows, logits included.
Exact activation_bytes(const Config& c, Index n, bool halts) {
  const Moe m = c.moe.value_or(Moe{});
  const Exact ffn = m.experts + Exact(m.active) * (c.dim + 2 * m.dim) + 2 * (m.shared_dim + c.ffn_dim);
  const Index s = halts ? looped_stage(c) : -1;  // whose K and V of all layers are kept for a pass
  const Exact kept = s < 0 ? Exact(0) : c.dim + 2 * Exact(c.stages[s].layers) * c.kv_dim();
  const Exact row = 2 * Exact(c.dim) + 2 * Exact(c.q_dim()) + 2 * Exact(c.kv_dim()) + c.head_dim + ffn + kept;
  const Exact prefixes = 2 * Exact(c.streams.count) * c.streams.prefix * c.kv_dim();
  return 4 * (n * (c.streams.count * row + c.vocab_size) + prefixes);
}

/// A progress line on stderr, for work of more than a second: redrawn on a terminal, every ten seconds elsewhere.
class Progress {
 public:
  Progress(const char* what, Index total) : what_(what), total_(total) {}
  void operator()(Index done) {
    const double t = seconds_since(start_), percent = 100 * static_cast<double>(done) / static_cast<double>(total_);
    if (t < next_) return;
    next_ = t + (terminal_ ? 0.2 : 10);
    std::fprintf(stderr, terminal_ ? "\r%s %3.0f%%, %.0f s\033[K" : "%s %.0f%%, %.0f s\n", what_, percent, t);
  }
  ~Progress() {
    if (terminal_ && next_ > 1) std::fputs("\r\033[K", stderr);
  }

 private:
  const char* what_;
  Index total_;
  Clock::time_point start_ = Clock::now();
  bool terminal_ = isatty(STDERR_FILENO);
  double next_ = 1;  ///< seconds after which the line is drawn next
};

/// What this machine can do at the current thread count, the best of several repetitions in two ways: the denominators
/// of attainment.
struct Limits {
  double gemm_gflops = 0;  ///< Eigen's SGEMM on 512 x 2048 x 2048: its own split, or a slice of columns a thread
  double read_gbs = 0;     ///< reading 256 MiB: one stream a thread, or four side by side
};

Limits measure_limits() {
  using Matrix = Eigen::Matrix<float, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;
  const Index n = 512, K = 2048, count = Index{64} << 20, piece = 1 << 16;
  const Matrix x = Matrix::Random(n, K), w = Matrix::Random(K, K);
  const std::vector<float> data(static_cast<std::size_t>(count), 1.f);
  Matrix y(n, K);
  Limits best;
  const auto fastest = [](double& best, double work, auto&& f) {
    const auto start = Clock::now();
    f();
    best = std::max(best, 1e-9 * work / seconds_since(start));
  };
  for (int i = 0; i < 16; ++i) {
    fastest(best.gemm_gflops, 2. * n * K * K, [&] {
      if (i % 2) return void(y.noalias() = x * w.transpose());
#pragma omp parallel for schedule(static)
      for (Index c = 0; c < K; c += 128) y.middleCols(c, 128).noalias() = x * w.middleRows(c, 128).transpose();
    });
    double sum = 0;
    fastest(best.read_gbs, 4. * count, [&] {
      double total = 0;
#pragma omp parallel for schedule(static) reduction(+ : total)
      for (Index at = 0; at < count; at += piece) {
        const Eigen::Map<const Eigen::ArrayXXf> part(&data[static_cast<std::size_t>(at)], piece / 4, 4);
        total += i % 2 ? part.sum() : (part.col(0) + part.col(1) + part.col(2) + part.col(3)).sum();
      }
      sum = total;
    });
    if (sum != count) fail("the bandwidth measurement read wrong values");
  }
  return best;
}

/// Compiler and CUDA of this build.
std::string build_name() {
#ifdef __clang__
  const std::string compiler = "clang " __clang_version__;
#else
  const std::string compiler = "g++ " __VERSION__;
#endif
#ifdef YOCOU_CUDA
  return compiler + ", CUDA " YOCOU_CUDA_VERSION;
#else
  return compiler + ", no CUDA";
#endif
}

// =====================================================================================================================
// 2. The command line: options in groups, each declared beside what it sets

/// The number that a text is, decimal and nothing else, if it lies in the range.
template <class T>
std::optional<T> parse_number(std::string_view text, const Range<T>& range) {
  T v{};
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), v);
  const bool good = error == std::errc() && end == text.data() + text.size() && range.has(v);
  return good ? std::optional(v) : std::nullopt;
}

/// The same for what the command line says: 16K is 16 x 2^10, 1M is 2^20.
template <class T>
std::optional<T> parse_scaled(std::string_view text, const Range<T>& range) {
  T scale = 1;
  if (text.ends_with('K') || text.ends_with('M')) scale = text.back() == 'K' ? 1 << 10 : 1 << 20, text.remove_suffix(1);
  const auto v = parse_number(text, Range<T>{0, range.high / scale});
  return v && range.has(*v * scale) ? std::optional(*v * scale) : std::nullopt;
}

/// The pieces of a list, "1,2,3".
Names split(const std::string& list) {
  Names pieces;
  std::istringstream in(list + ",");
  for (std::string piece; std::getline(in, piece, ',');) pieces.push_back(piece);
  return pieces;
}

/// Declares a number, or several with commas where To is a list. CLI11 alone would read 010 as 8 and cut off 2^64.
template <class N, class To>
CLI::Option* number(CLI::App& c, const std::string& name, To& to, const Range<N>& range, const std::string& help) {
  constexpr bool list = !std::is_same_v<To, N>;
  const CLI::callback_t read = [name, range, &to](const CLI::results_t& given) {
    std::vector<N> all;
    for (const std::string& piece : list ? split(given[0]) : given)
      if (const auto v = parse_scaled(piece, range)) all.push_back(*v);
      else
        throw CLI::ValidationError(
            name, "'" + given[0] + "' is not " + range.text() + (list ? ", or several: 1,2,3" : ""));
    if constexpr (list) to = all;
    else to = all[0];
    return true;
  };
  CLI::Option* option = c.add_option(name, read, help)->type_name(std::is_integral_v<N> ? "INT" : "FLOAT");
  std::string shown = dump(to);
  if (list) shown = shown.substr(1, shown.size() - 2);
  return shown == "0" ? option : option->default_str(shown);  // a 0 stands for what the help says
}

/// Declares a text.
CLI::Option* text(CLI::App& c, const std::string& name, auto& to, const std::string& help) {
  return c.add_option(name, to, help)->capture_default_str();
}
/// What a text that is given must be.
const CLI::Validator filled([](std::string& s) { return std::string(s.empty() ? "must not be empty" : ""); }, "");

/// A type of numbers as the command line calls it.
std::string option_name(Dtype t) {
  std::string name = name_of(t);
  std::ranges::transform(name, name.begin(), [](unsigned char ch) { return std::tolower(ch); });
  return name;
}
/// Declares a type of numbers, one of `types`.
CLI::Option* dtype(CLI::App& c, const char* name, auto& to, const std::vector<Dtype>& types, const char* help) {
  std::map<std::string, Dtype> named;
  for (const Dtype t : types) named[option_name(t)] = t;
  const auto read = [named, &to](const std::string& given) { to = named.at(given); };
  return c.add_option_function<std::string>(name, read, help)->check(CLI::IsMember(named));
}

inline constexpr Index batch_limit = Index{1} << 20;  ///< sequences
inline constexpr Range<Index> from_0{0, sizes.high}, lengths{1, N_limit}, batches{1, batch_limit}, many{1, 1'000'000};

/// Whether rows of a model can stop looping.
bool can_halt(const Config& c) {
  const Index s = looped_stage(c);
  return s >= 0 && c.stages[s].attention == Attention::window;
}

/// How a model runs.
struct RunOptions {
  std::string device = "cpu";
  Index given_chunk = 0, threads = 0;
  std::optional<Dtype> given_kv = {};
  double halt = 0;  // A; 0: nothing halts

  void declare(CLI::App& c) {
    text(c, "--device", device, "where it runs")->check(CLI::IsMember({"cpu", "cuda"}));
    number(c, "--chunk", given_chunk, sizes, "tokens a prefill pass (default 512, on cuda 8192)");
    number(c, "--threads", threads, Range<Index>{0, 1024}, "0, the default: as many as there are");
    dtype(c, "--kv-dtype", given_kv, {Dtype::f32, Dtype::bf16}, "type of cached numbers (default f32, on cuda bf16)");
  }
  void declare_halt(CLI::App& c) {
    number(c, "--halt", halt, Range<double>{above_0, 1},
        "rows that a loop turns by less than this, over pi, loop no more");
  }
  /// Throws Usage where --halt means nothing.
  void check_halt(const Config& c) const {
    if (halt > 0 && !can_halt(c)) throw Usage("--halt: arch '" + c.arch + "' has no window stage that alone is looped");
  }
  bool cuda() const { return device == "cuda"; }
  Index chunk() const { return given_chunk ? given_chunk : cuda() ? 8192 : 512; }
  Dtype kv_dtype() const { return given_kv.value_or(cuda() ? Dtype::bf16 : Dtype::f32); }
};

/// How results are printed.
struct PrintOptions {
  bool json = false, csv = false;
  void declare(CLI::App& c, bool rows = true) {
    CLI::Option* other = c.add_flag("--json", json, "JSON on stdout");
    if (rows) c.add_flag("--csv", csv, "CSV on stdout")->excludes(other);
  }
  bool table() const { return !json && !csv; }
};

/// A checkpoint that runs with T loops, or with a list of them in turn.
template <class Loops = Index>
struct CheckpointRun {
  std::string model = {};
  Loops loops = {0};  // 0: the file's
  RunOptions how = {};
  PrintOptions print = {};

  void declare(CLI::App& c, bool rows = true) {
    text(c, "MODEL", model, "a checkpoint (.safetensors)")->required();
    number(c, "--loops", loops, counts,
        std::is_same_v<Loops, Index> ? "T of the looped stage" : "T of the looped stage, one or several: 1,2,3");
    how.declare(c);
    how.declare_halt(c);
    print.declare(c, rows);
  }
  Model load() const {
    Model m = load_model(model);
    how.check_halt(m.config);
    return m;
  }
  /// The model of a command that reads text.
  Model load_text() const {
    Model m = load();
    if (m.config.vocab_size < 256) fail(model, ": byte text needs vocab_size >= 256, found ", m.config.vocab_size);
    return m;
  }
};

/// What is random.
struct RandomOptions {
  Dtype type = Dtype::bf16;
  std::uint64_t seed = 0;
  void declare(CLI::App& c, bool weights = true) {
    if (weights)
      dtype(c, "--dtype", type, {Dtype::f32, Dtype::bf16, Dtype::f16}, "of the random weights")
          ->default_str(option_name(type));
    number(c, "--seed", seed, Range<std::uint64_t>{0, ~std::uint64_t{0}}, "of what is random (default 0)");
  }
};

/// A shape in one or several architectures, or a config from a file.
struct ShapeGroup {
  std::string shape = {}, arch = {}, config = {};
  ShapeOptions over = {};
  CLI::Option* file = nullptr;           ///< --config
  std::vector<CLI::Option*> given = {};  ///< what a file leaves nothing to say for

  void declare(CLI::App& c, const std::string& how_many) {
    Names names;
    for (const Arch& a : archs()) names.push_back(a.name);
    given = {text(c, "--shape", shape, "D, L, H and so on")->check(CLI::IsMember(shape_names())),
        text(c, "--arch", arch, how_many + ": " + join(names, ","))->check(filled)};
    const auto replace = [&](const char* name, Index& to, const Range<Index>& range, const std::string& symbol) {
      given.push_back(number(c, name, to, range, symbol + ", in place of the shape's"));
    };
    replace("--layers", over.layers, counts, "L"), replace("--window", over.window, sizes, "W");
    replace("--dim", over.dim, sizes, "D"), replace("--heads", over.heads, sizes, "H");
    replace("--kv-heads", over.kv_heads, sizes, "G"), replace("--head-dim", over.head_dim, sizes, "dh");
    replace("--ffn-dim", over.ffn_dim, sizes, "F"), replace("--vocab", over.vocab_size, sizes, "V");
    file = text(c, "--config", config, "a file with a model's config in JSON, in place of a shape")->check(filled);
    number(c, "--loops", over.loops, counts, "T of the looped stage");
    given.push_back(number(c, "--streams", over.streams, Range<Index>{2, counts.high}, "P of parscale (default 2)"));
  }
  /// Throws Usage where both `one` and any of the others are given.
  static void exclude(const CLI::Option* one, const std::vector<CLI::Option*>& others) {
    for (const CLI::Option* o : others)
      if (one->count() && o->count()) throw Usage(one->get_name() + " excludes " + o->get_name());
  }
  /// The configs; without --arch those of all architectures that take the overrides.
  std::vector<Config> configs() const {
    std::vector<Config> all;
    exclude(file, given);
    if (!config.empty()) {
      all.push_back(read_config(parse_json(MappedFile(config).text(), config), config));
      set_loops(all[0], over.loops);
      return all;
    }
    if (!arch.empty())
      for (const std::string& name : split(arch)) all.push_back(make_config(shape, name, over));
    if (!arch.empty()) return all;
    std::string refused;
    for (const Arch& a : archs()) try {
        all.push_back(make_config(shape, a.name, over));
      } catch (const Usage& e) {
        refused = e.what();
      }
    if (all.empty()) throw Usage(refused);
    return all;
  }
};

/// What cost, verify and bench look at: a checkpoint, or shapes; at several numbers of tokens.
struct Subject {
  std::string model = {};
  ShapeGroup shapes;
  std::vector<Index> N;
  Index batch = 1;
  PrintOptions print = {};
  CLI::Option* checkpoint = nullptr;

  void declare(CLI::App& c) {
    checkpoint = text(c, "MODEL", model, "a checkpoint (.safetensors)");
    shapes.declare(c, shapes.arch.empty() ? "one or several (default all)" : "one or several");
    number(c, "-N", N, lengths, "tokens, one or several");
    number(c, "--batch", batch, batches, "sequences");
    print.declare(c);
  }
  /// The configs; of all architectures, without --arch, those that can run so.
  std::vector<Config> configs(const RunOptions& how = {}) const {
    ShapeGroup::exclude(checkpoint, shapes.given);
    ShapeGroup::exclude(checkpoint, {shapes.file});
    if (!model.empty()) {
      Config c = load_model(model).config;
      how.check_halt(c);
      set_loops(c, shapes.over.loops);
      return {c};
    }
    std::vector<Config> all = shapes.configs();
    const auto cannot = [&](const Config& c) {
      return (how.cuda() && c.streams.count > 1) || (how.halt > 0 && !can_halt(c));
    };
    if (shapes.arch.empty() && shapes.config.empty()) std::erase_if(all, cannot);
    if (all.empty()) throw Usage("no architecture takes all of these options");
    for (const Config& c : all) how.check_halt(c);
    return all;
  }
};

// =====================================================================================================================
// 3. Output

/// Results go to stdout through here: a full disk is an error, a reader that has gone ends the program quietly.
void put(std::string_view text) {
  if (std::fwrite(text.data(), 1, text.size(), stdout) == text.size() && std::fflush(stdout) == 0) return;
  if (errno == EPIPE) std::_Exit(0);
  fail("standard output: ", std::strerror(errno));
}

/// A value for people, on one line: integers in full, other numbers with four significant digits.
std::string cell(const Json& v) {
  std::ostringstream s;
  if (v.is_number_float()) s << std::setprecision(4) << v.get<double>();
  else s << (v.is_string() ? v.get<std::string>() : v.is_null() ? "-" : dump(v));
  std::string text = s.str();
  std::ranges::replace_if(
      text, [](unsigned char ch) { return ch < 32 || ch == 127; }, '?');
  return text;
}

/// A value for programs, quoted where CSV asks for it (RFC 4180).
std::string csv_cell(const Json& v) {
  std::string s = v.is_string() ? v.get<std::string>() : v.is_null() ? "" : dump(v);
  if (s.find_first_of(",\"\n") == std::string::npos) return s;
  for (std::size_t q = 0; (q = s.find('"', q)) != std::string::npos; q += 2) s.insert(q, 1, '"');
  return '"' + s + '"';
}

/// Prints rows of equal keys as JSON ({"rows":[...]} and `more`), CSV, or a table for people.
void put_rows(const std::vector<Json>& rows, const PrintOptions& o, Json more = Json::object()) {
  if (o.json) {
    more["rows"] = rows;
    return put(dump(more) + "\n");
  }
  if (rows.empty()) return;
  std::vector<Names> lines(1 + rows.size());
  for (const auto& [key, value] : rows[0].items()) lines[0].push_back(key);
  for (std::size_t r = 0; r < rows.size(); ++r)
    for (const Json& value : rows[r]) lines[1 + r].push_back(o.csv ? csv_cell(value) : cell(value));
  std::vector<std::size_t> width(lines[0].size());
  for (const Names& line : lines)
    for (std::size_t i = 0; i < line.size(); ++i) width[i] = std::max(width[i], line[i].size());
  std::string text;
  for (Names& line : lines) {
    for (std::size_t i = 0; i < line.size() && !o.csv; ++i)  // the first column stands at the left
      line[i].insert(i ? 0 : line[i].size(), width[i] - line[i].size(), ' ');
    text += join(line, o.csv ? "," : "  ") + "\n";
  }
  put(text);
}

/// Bytes for a terminal: whole characters as soon as they are complete, U+FFFD for what is not UTF-8.
class TerminalText {
 public:
  std::string operator()(char byte) {
    std::string out = (byte & 0xc0) == 0x80 ? "" : rest();  // a byte that does not go on with a character ends it
    pending_ += byte;
    const auto lead = static_cast<unsigned char>(pending_[0]);
    const std::size_t length = lead < 0xc0 ? 1 : lead < 0xe0 ? 2 : lead < 0xf0 ? 3 : 4;
    return pending_.size() < length ? out : out + rest();
  }
  std::string rest() { return valid(std::exchange(pending_, "")); }

 private:
  std::string pending_;
};

// =====================================================================================================================
// 4. Commands that run a model

/// A model set up to run: its engine, and a buffer for logits.
struct Session {
  const Config& config;
  const RunOptions& how;
  std::unique_ptr<Engine> engine = {};
  std::vector<float> logits = {};  ///< [sequences,V]

  /// For `sequences` sequences of up to `tokens` positions each, which begin as prompts of `prompt` tokens; Error when
  /// they do not fit the machine. Config and weights stay the caller's.
  Session(const Config& c, const Weights& w, const RunOptions& o, Index prompt, Index tokens, Index sequences = 1)
      : config(c), how(o) {
    if (o.threads) set_thread_count(o.threads);
    const Index rows = std::max(std::min(o.chunk(), prompt), sequences);
    const EngineOptions options{o.kv_dtype(), rows, tokens * sequences, sequences, o.halt};
    if (o.cuda()) {
      if (c.streams.count > 1 || o.halt > 0) fail("--device cuda: streams and --halt run on the CPU only");
#ifdef YOCOU_CUDA
      engine = make_cuda_engine(c, w, options);
#else
      fail("--device cuda: this yocou was built without CUDA");
#endif
    } else {
      const Exact caches = Exact(sequences) * cache_bytes(c, tokens, size_of(options.kv_dtype));
      require_memory(caches + activation_bytes(c, rows, o.halt > 0),
          "a run of " + std::to_string(tokens) + " tokens x " + std::to_string(sequences));
      engine = make_cpu_engine(c, w, options);
    }
    logits.resize(static_cast<std::size_t>(sequences * c.vocab_size));
  }

  /// Reads tokens, chunk by chunk, and draws the one that follows; calls after(tokens read) behind each chunk.
  int next(int sequence, std::span<const int> unread, Sampler& sampler, const std::function<void(Index)>& after) {
    const auto chunk = static_cast<std::size_t>(how.chunk());
    int drawn = 0;
    for (std::size_t begin = 0, end = 0; begin < unread.size(); begin = end) {
      stop_if_interrupted();
      end = std::min(begin + chunk, unread.size());
      const bool last = end == unread.size();
      const Segment part{sequence, unread.subspan(begin, end - begin), last ? Logits::last : Logits::none};
      const double u = last && sampler.temperature != 0 ? sampler.uniform() : 0;
      if (last) engine->forward_sample({&part, 1}, sampler, {&u, 1}, &drawn);
      else engine->forward({&part, 1}, nullptr);
      after(static_cast<Index>(end));
    }
    return drawn;
  }
};

/// The mean of the loops that positions ran.
double mean_loops(std::span<const Index> loops_run) {
  const Index sum = std::accumulate(loops_run.begin(), loops_run.end(), Index{0});
  return static_cast<double>(sum) / static_cast<double>(loops_run.size());
}

/// A text, or a file in its place.
struct TextOption {
  std::optional<std::string> text = {};
  std::string path = {};
  std::optional<MappedFile> file = {};

  /// What was given, of --NAME and --NAME-file one.
  std::string_view read(const std::string& name) {
    if (text.has_value() == !path.empty()) throw Usage("give either " + name + " or " + name + "-file");
    return text ? std::string_view(*text) : file.emplace(path).text();
  }
};

/// Bytes are tokens. Throws Error naming `what` when they are too few, or too many for the machine.
std::vector<int> bytes_to_tokens(std::string_view text, const std::string& what, std::size_t least = 1) {
  if (text.size() < least) fail(what, ": found ", text.size(), " bytes, the least is ", least);
  if (text.size() > 1 << 20) require_memory(5 * Exact(std::ssize(text)), what);
  const auto* bytes = reinterpret_cast<const unsigned char*>(text.data());
  return {bytes, bytes + text.size()};
}

/// `yocou generate`
struct Generate : CheckpointRun<> {
  TextOption prompt = {};
  Index n = 256;
  Sampling sampling = {};
  RandomOptions random = {};

  void declare(CLI::App& c) {
    text(c, "-p,--prompt", prompt.text, "a text");
    text(c, "--prompt-file", prompt.path, "a file, any bytes, in place of a text");
    number(c, "-n,--tokens", n, from_0, "tokens to add");
    number(c, "--temperature", sampling.temperature, Range<double>{0, 1e38}, "0, the default: the likeliest token");
    number(c, "--top-k", sampling.top_k, from_0, "draw from the k likeliest; 0, the default: from all");
    number(c, "--top-p", sampling.top_p, Range<double>{above_0, 1}, "draw from the smallest set of this probability");
    random.declare(c, /*weights=*/false);
    CheckpointRun::declare(c, /*rows=*/false);
  }

  void operator()() {
    const std::vector<int> prompt_tokens = bytes_to_tokens(prompt.read("--prompt"), "the prompt");
    Model m = load_text();
    set_loops(m.config, loops);
    const Index N = std::ssize(prompt_tokens);
    Session session(m.config, m.weights, how, N, N + n);
    const int sequence = session.engine->open();
    Sampler sampler{sampling, std::mt19937_64(random.seed)};
    const bool terminal = isatty(STDOUT_FILENO) && !print.json;
    TerminalText shown;
    std::string text;
    std::vector<int> tokens;
    Index prompted = 0, decoded = 0;
    double prompt_seconds = 0, decode_seconds = 0;
    try {
      Progress progress("prompt", N);
      auto start = Clock::now();
      int drawn = session.next(sequence, prompt_tokens, sampler, [&](Index done) {
        prompted = done, prompt_seconds = seconds_since(start);
        progress(done);
      });
      start = Clock::now();
      while (std::ssize(tokens) < n) {
        if (drawn > 255) fail("the model wrote token ", drawn, ", which is not a byte");
        tokens.push_back(drawn), text += static_cast<char>(drawn);
        if (!print.json) put(terminal ? shown(text.back()) : text.substr(text.size() - 1));
        if (std::ssize(tokens) == n) break;
        drawn = session.next(
            sequence, {&tokens.back(), 1}, sampler, [&](Index) { ++decoded, decode_seconds = seconds_since(start); });
      }
    } catch (const Interrupted&) {     // what was written and measured so far still counts
    } catch (const std::exception&) {  // its line is not to begin behind the text
      if (terminal && !text.empty()) put(shown.rest() + "\n");
      throw;
    }
    if (terminal) put(shown.rest() + "\n");
    const Index bytes = session.engine->cache_bytes();
    const double loops_run = how.halt > 0 ? mean_loops(session.engine->loops_run(sequence)) : 0;
    Json result = {
        {"text", text}, {"tokens", tokens}, {"seed", random.seed}, {"prompt_tokens", prompted}, {"cache_bytes", bytes}};
    if (how.halt > 0) result["mean_loops"] = loops_run;
    if (print.json) put(dump(result) + "\n");
    const auto rate = [](Index count, double seconds) {
      return cell(static_cast<double>(count) / std::max(seconds, 1e-9)) + " tok/s";
    };
    const std::string decoding = decoded ? ", " + rate(decoded, decode_seconds) : "";
    std::cerr << "prompt " << prompted << " tokens, " << rate(prompted, prompt_seconds) << "; decode " << decoded
              << " steps" << decoding << "; cache " << bytes << " bytes; "
              << (how.halt > 0 ? "mean loops " + cell(loops_run) + "; " : "") << "seed " << random.seed << "\n";
    stop_if_interrupted();
  }
};

/// -log2 p(token) under a row of logits [V], in double.
double surprise(std::span<const float> logits, int token) {
  const double max = *std::max_element(logits.begin(), logits.end());
  double sum = 0;
  for (const float l : logits) sum += std::exp(l - max);
  return (max - logits[static_cast<std::size_t>(token)]) / std::log(2.0) + std::log2(sum);
}

/// `yocou score`: row t-1 predicts token t, so a file of N bytes gives N-1 predictions.
struct Score : CheckpointRun<std::vector<Index>> {
  std::string path = {};
  bool by_position = false;

  void declare(CLI::App& c) {
    CheckpointRun::declare(c);
    text(c, "FILE", path, "text, any bytes")->required();
    c.add_flag("--by-position", by_position, "also by position, in doubling ranges; as CSV only so");
  }

  void operator()() const {
    Model m = load_text();
    const MappedFile file(path);
    const std::vector<int> tokens = bytes_to_tokens(file.text(), path, 2);
    const Index N = std::ssize(tokens), V = m.config.vocab_size;
    std::vector<Json> rows, positions;
    const Config stored = m.config;
    for (const Index given : loops) {
      m.config = stored;  // at T = 1 a custom config no longer says which stage is looped
      const Index T = set_loops(m.config, given);
      Session session(m.config, m.weights, how, N, N);
      const int sequence = session.engine->open();
      std::vector<double> bits(static_cast<std::size_t>(N - 1));
      Progress progress("score", N);
      const auto use = [&](Index first, Index n, const float* logits) {
        for (Index i = first; i < std::min(first + n, N - 1); ++i)
          bits[i] = surprise({logits + (i - first) * V, static_cast<std::size_t>(V)}, tokens[i + 1]);
        progress(first + n);
      };
      forward_all(*session.engine, m.config, sequence, tokens, how.chunk(), use);
      const auto mean = [&](Index from, Index to) {
        return std::accumulate(bits.begin() + from, bits.begin() + to, 0.0) / static_cast<double>(to - from);
      };
      const double all = mean(0, N - 1);
      rows.push_back({{"loops", T}, {"predictions", N - 1}, {"bits_per_byte", all}, {"perplexity", std::exp2(all)}});
      if (how.halt > 0) rows.back()["mean_loops"] = mean_loops(session.engine->loops_run(sequence));
      for (Index from = 1; from < N; from *= 2) {  // by position of the byte predicted, in doubling ranges
        const Index to = std::min(2 * from, N);
        positions.push_back({{"loops", T}, {"from", from}, {"to", to - 1}, {"bits_per_byte", mean(from - 1, to - 1)}});
      }
    }
    if (!by_position) return put_rows(rows, print);
    if (!print.csv) put_rows(rows, print, {{"by_position", positions}});  // of two tables, CSV has the one asked for
    if (!print.csv && !print.json) put("\n");
    if (!print.json) put_rows(positions, print);
  }
};

/// Token ids below V, separated by commas or white space; `where` names them in messages.
std::vector<int> read_tokens(std::string_view list, Index V, const std::string& where) {
  require_memory(6 * Exact(std::ssize(list)), where);
  std::string spaced(list);
  std::ranges::replace(spaced, ',', ' ');
  std::istringstream in(std::move(spaced));
  std::vector<int> tokens;
  for (std::string word; in >> word;) {
    const auto token = parse_number(word, Range<int>{0, static_cast<int>(V - 1)});
    if (!token) fail(where, ": expected token ids from 0 to ", V - 1, ", found ", quote(word));
    tokens.push_back(*token);
  }
  if (tokens.empty()) fail(where, ": no tokens");
  return tokens;
}

/// `yocou logits`
struct LogitRows : CheckpointRun<> {
  TextOption list = {};
  Index prefilled = 0;
  bool last = false;

  void declare(CLI::App& c) {
    text(c, "--tokens", list.text, "token ids: 1,2,3");
    text(c, "--tokens-file", list.path, "a file of token ids, separated by commas or white space");
    number(c, "--prefill", prefilled, sizes, "tokens run as prefill, the rest one by one (default all)");
    c.add_flag("--last", last, "the last position only, prefilled with the early stop");
    CheckpointRun::declare(c, /*rows=*/false);
  }

  void operator()() {
    const std::string_view words = list.read("--tokens");
    Model m = load();
    set_loops(m.config, loops);
    const Index V = m.config.vocab_size;
    const std::vector<int> tokens = read_tokens(words, V, list.text ? "--tokens" : list.path);
    const Index N = std::ssize(tokens), K = prefilled ? prefilled : N;
    if (K > N) throw Usage("--prefill: " + std::to_string(K) + " of " + std::to_string(N) + " tokens");
    Session session(m.config, m.weights, how, K, N);
    Engine& engine = *session.engine;
    const int sequence = engine.open();
    const char *open = "", *between = " ", *close = "\n";  // of a row
    if (print.json) put("{\"tokens\":" + dump(tokens) + ",\"logits\":["), open = "[", between = ",", close = "]";
    const auto show = [&](Index, Index n, const float* rows) {
      std::ostringstream text;
      text << std::setprecision(9);
      for (Index i = 0; i < n; ++i) {
        for (Index v = 0; v < V; ++v) text << (v ? between : open) << rows[i * V + v];
        text << close;
        if (print.json) open = ",[";
      }
      put(text.str());
    };
    float* row = session.logits.data();
    const std::span<const int> prompt = std::span(tokens).first(static_cast<std::size_t>(K));
    if (last) prefill(engine, sequence, prompt, how.chunk(), row);
    else forward_all(engine, m.config, sequence, prompt, how.chunk(), show);
    for (Index i = K; i < N; ++i) {
      decode(engine, {&sequence, 1}, {&tokens[static_cast<std::size_t>(i)], 1}, row);
      if (!last) show(i, 1, row);
    }
    if (last) show(N - 1, 1, row);
    const Json ran(engine.loops_run(sequence));
    if (print.json) put("]" + (how.halt > 0 ? ",\"loops\":" + dump(ran) : "") + "}\n");
  }
};

/// `yocou eval`
struct Eval : CheckpointRun<std::vector<Index>> {
  /// How tasks went: one, or several together.
  struct Tally {
    Index count = 0, correct = 0;       ///< of tasks
    std::vector<Index> loops_run = {};  ///< of their positions, with --halt
  };
  std::string path = {}, by = {};

  void declare(CLI::App& c) {
    CheckpointRun::declare(c);
    text(c, "TASKS", path, "JSON lines {\"prompt\",\"answer\", ...}")->required();
    text(c, "--by", by, "field to group by")->check(filled);
  }

  void operator()() const {
    Model m = load_text();
    const MappedFile file(path);
    require_memory(4 * Exact(std::ssize(file.text())), path);
    const std::vector<Task> tasks = read_tasks(file.text(), path, by);
    constexpr Index together = 64;  // tasks in a batch, if their prompts fit one chunk
    Index longest = 0, prompts = 0, correct = 0;
    for (const Task& t : tasks)
      longest = std::max(longest, std::ssize(t.prompt) + std::ssize(t.answer)), prompts += std::ssize(t.prompt);
    std::vector<Json> rows;
    const Config stored = m.config;
    for (const Index given : loops) {
      m.config = stored;  // at T = 1 a custom config no longer says which stage is looped
      const Index T = set_loops(m.config, given);
      Session session(m.config, m.weights, how, prompts, longest, std::min(together, std::ssize(tasks)));
      std::vector<Tally> went(tasks.size());
      Progress progress("eval", std::ssize(tasks));
      for (Index first = 0, last = 0; first < std::ssize(tasks); first = last) {
        for (Index sum = 0; last < std::ssize(tasks) && last - first < together; ++last)
          if ((sum += std::ssize(tasks[last].prompt)) > how.chunk() && last > first) break;
        answer(session, std::span(tasks).subspan(first, last - first), &went[first]);
        progress(last);
      }
      std::map<Json, Tally> groups;
      for (std::size_t i = 0; i < tasks.size(); ++i) {
        Tally& group = groups[Json::parse(tasks[i].group)];
        group.count += went[i].count, group.correct += went[i].correct, correct += went[i].correct;
        group.loops_run.insert(group.loops_run.end(), went[i].loops_run.begin(), went[i].loops_run.end());
      }
      for (const auto& [name, group] : groups) {
        rows.push_back({{"loops", T}, {"group", name}, {"count", group.count}, {"correct", group.correct},
            {"accuracy", static_cast<double>(group.correct) / static_cast<double>(group.count)}});
        if (how.halt > 0) rows.back()["mean_loops"] = mean_loops(group.loops_run);
      }
    }
    const Index total = std::ssize(tasks) * std::ssize(loops);
    put_rows(rows, print, {{"accuracy", static_cast<double>(correct) / static_cast<double>(total)}, {"count", total}});
  }

  /// Greedy completions of some tasks, prompts and decode steps batched.
  static void answer(Session& session, std::span<const Task> tasks, Tally* went) {
    Engine& engine = *session.engine;
    std::vector<float>& logits = session.logits;
    const std::size_t V = static_cast<std::size_t>(session.config.vocab_size), count = tasks.size();
    std::vector<std::vector<int>> prompts;
    std::vector<Segment> pass;
    for (const Task& t : tasks) {
      prompts.push_back(bytes_to_tokens(t.prompt, "a prompt"));
      pass.push_back({engine.open(), prompts.back(), Logits::last});
    }
    if (count == 1) prefill(engine, pass[0].sequence, prompts[0], session.how.chunk(), logits.data());
    else engine.forward(pass, logits.data());
    std::vector<std::string> written(count);
    std::vector<std::size_t> open(count);  // tasks whose answers are not complete; row i of the logits is open[i]'s
    std::iota(open.begin(), open.end(), 0);
    while (!open.empty()) {
      std::vector<int> next, who;
      std::size_t row = 0;
      std::erase_if(open, [&](std::size_t i) {
        const int token = greedy({&logits[row++ * V], V});
        if (token > 255) return true;
        written[i] += static_cast<char>(token);
        if (written[i].size() == tasks[i].answer.size()) return true;
        next.push_back(token), who.push_back(pass[i].sequence);
        return false;
      });
      if (!open.empty()) decode(engine, who, next, logits.data());
    }
    for (std::size_t i = 0; i < count; ++i) {
      const auto ran = engine.loops_run(pass[i].sequence);
      went[i] = {1, written[i] == tasks[i].answer, {ran.begin(), ran.end()}};
      engine.close(pass[i].sequence);
    }
  }
};

/// `yocou trace`: what each application of a layer does to the state, means over the prompt's positions (Figure 8).
struct Trace : CheckpointRun<> {
  std::string prompt = {};

  void declare(CLI::App& c) {
    CheckpointRun::declare(c);
    text(c, "-p,--prompt", prompt, "a text")->required();
  }

  void operator()() const {
    Model m = load_text();
    set_loops(m.config, loops);
    const Config& c = m.config;
    const std::vector<int> tokens = bytes_to_tokens(prompt, "the prompt");
    struct Sums {
      Index stage, loop, layer, rows = 0;
      double norm = 0, angle = 0, loop_cosine = 0;
      std::vector<Index> load = {};
    };
    std::vector<Sums> applications;
    std::vector<float> before, loop_before;  // the states after the application before, and after the loop before
    std::size_t next = 0;
    const Index D = c.dim, N = std::ssize(tokens);
    Session session(c, m.weights, how, N, N);
    const auto ends_loop = [&](const auto& a) { return a.stage >= 0 && a.layer + 1 == c.stages[a.stage].layers; };
    session.engine->on_layer = [&](const Application& a) {
      if (a.stage < 0) {  // a chunk begins
        next = 0;
        before.assign(a.x.begin(), a.x.end());
        loop_before = before;
      }
      if (next == applications.size()) applications.push_back({a.stage, a.loop, a.layer});
      Sums& sums = applications[next++];
      sums.load.resize(a.expert_load.size());
      std::ranges::transform(a.expert_load, sums.load, sums.load.begin(), std::plus<>());
      const Index n = std::ssize(a.x) / D;
      sums.rows += n;
      for (Index i = 0; i < n; ++i) {
        const Index at = (a.rows.empty() ? i : a.rows[i]) * D;  // its place among all rows of the pass
        const std::span<const float> x = a.x.subspan(i * D, D);
        const std::span<float> old(&before[at], D), loop_old(&loop_before[at], D);
        sums.norm += std::sqrt(std::inner_product(x.begin(), x.end(), x.begin(), 0.0) / static_cast<double>(D));
        if (a.stage >= 0) sums.angle += std::acos(cosine(x, old)) / M_PI;
        if (a.loop > 0 && ends_loop(a)) sums.loop_cosine += cosine(x, loop_old);
        std::ranges::copy(x, old.begin());
        if (ends_loop(a)) std::ranges::copy(x, loop_old.begin());
      }
    };
    forward_all(*session.engine, c, session.engine->open(), tokens, how.chunk(), [](Index, Index, const float*) {});
    std::vector<Json> rows;
    for (const Sums& a : applications) {
      const auto mean = [&](double sum, bool there) {
        return there && a.rows > 0 ? Json(sum / static_cast<double>(a.rows)) : Json();
      };
      Json load;  // share of the tokens' choices; one cell in a table
      Names words;
      for (const Index l : a.load) {
        const double share = static_cast<double>(l) / static_cast<double>(std::max<Index>(1, a.rows * c.moe->active));
        load.push_back(share), words.push_back(cell(std::round(share * 1000) / 1000));
      }
      if (!print.json && !words.empty()) load = join(words, " ");
      rows.push_back({{"application", std::ssize(rows)}, {"stage", a.stage < 0 ? "embed" : c.stages[a.stage].name},
          {"loop", a.loop}, {"layer", a.layer}, {"norm", mean(a.norm, true)},
          {"angular_distance", mean(a.angle, a.stage >= 0)},
          {"loop_cosine", mean(a.loop_cosine, a.loop > 0 && ends_loop(a))}, {"router_load", load}});
      if (how.halt > 0) rows.back()["rows"] = a.rows;
    }
    put_rows(rows, print);
  }
};

// =====================================================================================================================
// 5. Commands that count and measure

/// `yocou cost`
struct Cost : Subject {
  Index kv_bytes = 2, memory = 0;
  bool explained = false;

  Cost() : Subject{{}, {"1.3b"}, {16384, 65536, 262144}} {}
  void declare(CLI::App& c) {
    Subject::declare(c);
    number(c, "--kv-bytes", kv_bytes, Range<Index>{1, 8}, "bytes of a cached number");
    c.add_option("--memory", memory, "a budget like 80GB: the largest N and batch that fit beside 2-byte weights")
        ->transform(CLI::Validator(memory_size, ""));
    CLI::Option* explain = c.add_flag("--explain", explained, "each formula with its numbers, term by term");
    for (const char* other : {"--json", "--csv", "--memory"}) explain->excludes(c.get_option(other));
  }

  /// "80GB", "24GiB", "512MB", or bytes, as bytes. MB and GB are 2^20 and 2^30 bytes, as in the paper's tables.
  static std::string memory_size(std::string& text) {
    static const std::map<std::string, double> units{
        {"", 1}, {"B", 1}, {"MB", 0x1p20}, {"MiB", 0x1p20}, {"GB", 0x1p30}, {"GiB", 0x1p30}};
    const std::size_t digits = text.find_last_of("0123456789") + 1;
    const auto number = parse_number(std::string_view(text).substr(0, digits), Range<double>{0, 0x1p60});
    const auto unit = units.find(text.substr(digits));
    const double bytes = number && unit != units.end() ? *number * unit->second : 0;
    if (!(bytes >= 1 && bytes <= 0x1p60)) return "expected a size like 80GB, found '" + text + "'";
    text = std::to_string(static_cast<Index>(bytes));
    return "";
  }

  /// Prints the formulas of a config with their numbers, down to the totals.
  void explain(const Config& c, Index n) const {
    const auto print = [&](const std::string& what, Index sequences, const Bill& bill) {
      std::size_t width = 0;
      for (const Term& term : bill) width = std::max(width, term.of.size());
      std::string lines = what + "\n";
      for (const Term& term : bill)
        lines += "  " + term.of + std::string(width + 2 - term.of.size(), ' ') + term.text() + "\n";
      const Exact sum = total(bill);
      lines += "  total " + to_string(sum);
      if (sequences > 1) lines += ", of " + std::to_string(sequences) + " sequences " + to_string(sequences * sum);
      put(lines + "\n\n");
    };
    put(c.arch + ", N = " + std::to_string(n) + ", batch " + std::to_string(batch) + "\n\n");
    print("cache bytes of a sequence, s bytes a number", batch, cache_bill(c, n, kv_bytes));
    print("FLOP of a prefill", batch, flops_bill(c, 0, n, /*wanted=*/1));
    print("FLOP of the decode step behind it", batch, flops_bill(c, n, n + 1, /*wanted=*/1));
    print("bytes that this step reads, of the whole batch", 1, decode_bytes_bill(c, n, batch, /*w=*/2, kv_bytes));
    print("parameters without embedding and head", 1, params_bill(c, c.moe ? c.moe->experts : 0));
  }

  void operator()() const {
    if (explained) {
      for (const Config& c : configs())
        for (const Index n : N) explain(c, n);
      return;
    }
    const Index B = batch, s = kv_bytes;
    const bool table = print.table();
    std::optional<Config> yoco_u;  // the reference of the ratios, in the same shape
    ShapeOptions over = shapes.over;
    over.streams = 0;  // which it has not
    if (model.empty() && shapes.config.empty() && over.layers % 2 == 0)
      yoco_u = make_config(shapes.shape, "yoco-u", over);
    std::vector<Json> rows, orders;
    for (const Config& c : configs()) {
      const Params p = count_params(c);
      const Arch* arch = find_arch(c.arch);
      if (arch)
        orders.push_back({{"arch", arch->name}, {"KV cache", arch->kv_cache}, {"prefill", arch->prefill},
            {"decode, a step", arch->decode}});
      for (const Index n : N) {
        Json& row = rows.emplace_back();
        // One column of all three kinds of output: its key in JSON and CSV; its title in a table, "" where that does
        // without; and the unit in which a table counts, 0 for numbers as they are.
        const auto add = [&](const char* key, const char* title, double unit, const Json& v) {
          if (!table) row[key] = v;
          else if (*title) row[title] = unit ? Json(v.get<double>() / unit) : v;
        };
        const Exact kv = B * cache_bytes(c, n, s), prefill = B * prefill_flops(c, n), step = B * decode_flops(c, n);
        add("arch", "arch", 0, c.arch), add("N", "N", 0, n), add("batch", "", 0, B);
        add("cache_bytes", "KV MB", 0x1p20, kv.v);
        add("prefill_flops", "prefill TFLOP", 1e12, prefill.v);
        add("decode_flops", "decode GFLOP", 1e9, step.v);
        add("params", "params M", 1e6, p.params.v), add("active_params", "active M", 1e6, p.active.v);
        add("embed_params", "", 0, p.embed.v), add("head_params", "", 0, p.head.v);
        add("decode_bytes", "decode GB", 1e9, decode_bytes(c, n, B, /*w=*/2, s).v);
        if (yoco_u) {
          const auto ratio = [B](const Exact& a, const Exact& b) { return double(a) / double(B * b); };
          const auto from = crossover(*yoco_u, c);
          add("cache_ratio", "KV x", 0, ratio(kv, cache_bytes(*yoco_u, n, s)));
          add("prefill_ratio", "prefill x", 0, ratio(prefill, prefill_flops(*yoco_u, n)));
          add("decode_ratio", "decode x", 0, ratio(step, decode_flops(*yoco_u, n)));
          add("prefill_crossover_N", "yoco-u cheaper from", 0, from ? Json(*from) : Json());
        }
        if (memory) {  // weights in two bytes, and the caches
          const auto fits = [&](Index b, Index n) { return 2 * p.all() + b * cache_bytes(c, n, s) <= Exact(memory); };
          add("max_N", "max N", 0, largest(N_limit, [&](Index n) { return fits(B, n); }));
          add("max_batch", "max batch", 0, largest(batch_limit, [&](Index b) { return fits(b, n); }));
        }
        if (!arch) continue;
        add("kv_big_o", "", 0, arch->kv_cache), add("prefill_big_o", "", 0, arch->prefill);
        add("decode_big_o", "", 0, arch->decode);
      }
    }
    put_rows(rows, print);
    if (!table) return;
    put("\nKV MB = 2^20 bytes, " + std::to_string(s) + " a number; batch " + std::to_string(B) +
        "; x: relative to yoco-u\n\n");
    put_rows(orders, print);
  }
};

/// Tokens that mean nothing, for measuring.
std::vector<int> random_tokens(const Config& c, Index n, Index seed) {
  std::mt19937_64 random(static_cast<std::uint64_t>(seed));
  std::vector<int> tokens(static_cast<std::size_t>(n));
  for (int& t : tokens) t = static_cast<int>(random() % static_cast<std::uint64_t>(c.vocab_size));
  return tokens;
}

/// What verify and bench have in common.
struct Measured : Subject {
  Index steps = 4;
  RandomOptions random = {};
  RunOptions how = {};

  void declare(CLI::App& c) {
    Subject::declare(c);
    number(c, "--steps", steps, many, "decode steps after each prefill");
    how.declare(c);
    random.declare(c);
  }
  /// The weights for one of the configs: the checkpoint's, or random ones.
  Model with_weights(const Config& c) const {
    if (model.empty()) require_memory(count_params(c).all() * size_of(random.type), "a model of random weights");
    Model m = model.empty() ? random_model(c, random.type, random.seed) : load_model(model);
    m.config = c;
    return m;
  }
};

/// One phase of an experiment: what it took, and what is held behind it.
struct Phase {
  double seconds;
  Counters work;
  Index cache_bytes, global_rows;
  std::vector<std::vector<Index>> loops_run;  ///< of each sequence's positions so far, with --halt
};

/// What verify and bench do: open as many sequences as the session is for, prefill N tokens of each, and run decode
/// steps; then close them. Appends a phase each for opening, the prefills and every step; calls after(tokens) behind
/// every chunk of a prefill.
void experiment(
    Session& session, Index N, Index steps, std::vector<Phase>& phases, const std::function<void(Index)>& after) {
  Engine& engine = *session.engine;
  const Config& c = session.config;
  const Index B = std::ssize(session.logits) / c.vocab_size;
  std::vector<int> sequences;
  const auto phase = [&](auto&& work) {
    const Counters before = engine.counters;
    const auto start = Clock::now();
    work();
    const double seconds = seconds_since(start);
    phases.push_back({seconds, engine.counters - before, engine.cache_bytes(), engine.global_rows(), {}});
    for (const int sequence : sequences) {
      const auto ran = engine.loops_run(sequence);
      phases.back().loops_run.emplace_back(ran.begin(), ran.end());
    }
  };
  phase([&] {
    for (Index b = 0; b < B; ++b) sequences.push_back(engine.open());
  });
  phase([&] {
    for (Index b = 0; b < B; ++b)
      prefill(engine, sequences[b], random_tokens(c, N, b), session.how.chunk(), session.logits.data(),
          [&, before = Index{0}](Index done) mutable { after(done - std::exchange(before, done)); });
  });
  for (Index k = 0; k < steps; ++k)
    phase([&] { decode(engine, sequences, random_tokens(c, B, k), session.logits.data()); });
  for (const int sequence : sequences) engine.close(sequence);
}

/// `yocou verify`
struct Verify : Measured {
  bool allocate_only = false;

  Verify() : Measured{{{}, {"tiny"}, {1, 63, 64, 65, 255, 256, 257, 300}}} {}
  void declare(CLI::App& c) {
    Measured::declare(c);
    how.declare_halt(c);
    c.add_flag("--allocate-only", allocate_only, "allocate the caches of N tokens, run nothing");
  }

  void operator()() const {
    const std::vector<Config> all = configs(how);
    std::vector<Json> rows;
    Progress progress("verify", std::ssize(all) * std::ssize(N));
    Index done = 0;
    for (const Config& c : all) {
      std::optional<Model> m;
      if (!allocate_only) {
        m = with_weights(c);
        Index stored = 0;
        for_each_tensor(c, m->weights, [&](const std::string& name, const Shape&, const Tensor& t) {
          if (name != "embed" && name != "head") stored += t.rows * t.cols;
        });
        rows.push_back(comparison("params", c, 0, count_params(c).params, stored));
      }
      for (const Index n : N) {
        if (m) compare_run(*m, n, rows);
        else rows.push_back(compare_allocation(c, n));
        progress(++done);
      }
    }
    const auto having = [&](const Json& equal) {
      return std::ranges::count_if(rows, [&](const Json& row) { return row["equal"] == equal; });
    };
    const auto unequal = having(false);
    put_rows(rows, print, {{"resident_bytes", resident_memory()}});
    if (print.table())
      put("\n" + std::to_string(rows.size()) + " comparisons, " + std::to_string(unequal) + " differ, " +
          std::to_string(having(nullptr)) + " did not fit; the process holds " + std::to_string(resident_memory()) +
          " bytes in memory now: caches, weights and buffers, the program and its libraries, and freed memory\n");
    for (const Json& row : rows)
      if (row["equal"] == false)
        fail("verify: ", unequal, " rows differ, the first ", cell(row["quantity"]), " of ", cell(row["arch"]),
            " at N = ", cell(row["N"]), ": formula ", cell(row["formula"]), ", measured ", cell(row["measured"]));
  }

  static Json comparison(const char* quantity, const Config& c, Index N, const Exact& formula, Index measured) {
    return {{"quantity", quantity}, {"arch", c.arch}, {"N", N}, {"formula", formula.v}, {"measured", measured},
        {"equal", formula == Exact(measured)}};
  }

  /// Runs a prefill of N tokens and decode steps, and holds what the operations and the arena counted against the
  /// formulas.
  void compare_run(const Model& m, Index N, std::vector<Json>& rows) const {
    const Config& c = m.config;
    const Index B = batch, s = size_of(how.kv_dtype());
    const auto add = [&](const char* quantity, Index n, const Exact& formula, auto measured) {
      rows.push_back(comparison(quantity, c, n, B * formula, static_cast<Index>(measured)));
    };
    Exact cross = 0, global = 0, rings = 0;  // rows through the cross-decoder, of K^, V^ a token, bytes of the rings
    for (const Stage& g : c.stages) {
      if (g.attention == Attention::window) rings += Exact(g.layers) * g.loops * g.window * 2 * c.kv_dim() * s;
      if (g.attention != Attention::shared) continue;
      cross = g.refresh_kv ? Exact(g.loops - 1) * N + 1 : Exact(g.loops);
      global = g.refresh_kv ? g.loops : 1;
    }
    Session session(c, m.weights, how, N, N + steps, B);
    std::vector<Phase> phases;
    experiment(session, N, steps, phases, [](Index) {});
    const Phase &opened = phases[0], &prefilled = phases[1], &end = phases.back();
    add("ring_bytes", 0, rings, opened.cache_bytes);  // an empty sequence holds its rings, whole, and no block
    add("cache_bytes_prefill", N, cache_bytes(c, N, s), prefilled.cache_bytes);
    const auto add_flops = [&](const char* quantity, Index p0, Index n, const Exact& each, std::uint64_t measured) {
      Exact formula = 0;  // of positions p0 .. p0+n-1; where rows may halt, by the loops that they ran
      for (const std::vector<Index>& ran : end.loops_run)
        formula += how.halt > 0 ? halting_flops(c, p0, std::span(ran).subspan(p0, n)) : each;
      rows.push_back(comparison(quantity, c, p0 == 0 ? n : p0, formula, static_cast<Index>(measured)));
    };
    add_flops("prefill_flops", 0, N, prefill_flops(c, N), prefilled.work.flops);
    add("cross_positions", N, cross, prefilled.work.cross_positions);
    add("global_rows", N, global * N, prefilled.global_rows);
    for (Index k = 0; k < steps; ++k)
      add_flops("decode_flops", N + k, 1, decode_flops(c, N + k), phases[static_cast<std::size_t>(2 + k)].work.flops);
    add("cache_bytes_decode", N + steps, cache_bytes(c, N + steps, s), end.cache_bytes);
    add("global_rows", N + steps, global * (N + steps), end.global_rows);
  }

  /// Allocates the caches of N tokens, touched, without weights or tokens. A cell that does not fit says so.
  Json compare_allocation(const Config& c, Index N) const {
    const Exact formula = batch * cache_bytes(c, N, size_of(how.kv_dtype()));
    malloc_trim(0);  // what earlier cells have freed goes back to the system, so that the growth is this cell's
    const Index available = available_memory(), before = resident_memory();
    const bool fits = formula <= Exact(available);
    Index held = 0, grown = 0;
    if (fits)
      hold_caches(c, how.kv_dtype(), N, batch, [&](Index bytes) {
        held = bytes;
        grown = resident_memory() - before;
      });
    Json row = comparison("cache_bytes_prefill", c, N, formula, held);
    if (!fits) row["measured"] = row["equal"] = nullptr;
    row["note"] = fits ? "resident memory grew by " + std::to_string(grown)
                       : "does not fit: " + std::to_string(available) + " bytes are available";
    return row;
  }
};

/// `yocou bench`
struct Bench : Measured {
  Index runs = 3;

  Bench() : Measured{{{}, {"small", "yoco-u"}, {1024, 4096, 16384}}} {}
  void declare(CLI::App& c) {
    Measured::declare(c);
    number(c, "--runs", runs, Range<Index>{1, 1000}, "runs, of which the median counts");
  }

  void operator()() const {
    const std::vector<Config> all = configs(how);
    if (how.threads) set_thread_count(how.threads);
    const Limits limits = measure_limits();
    std::vector<Json> rows;
    const Index tokens = std::accumulate(N.begin(), N.end(), Index{0}) * std::ssize(all) * runs * batch;
    Progress progress("bench", tokens);
    Index done = 0;
    try {
      for (const Config& c : all) {
        const Model m = with_weights(c);
        for (const Index n : N) measure(m, n, limits, rows, [&](Index more) { progress(done += more); });
      }
    } catch (const Interrupted&) {  // the rows that are there still count
    }
    const std::string cpu = line_of("/proc/cpuinfo", "model name\t: ");
    const Json machine = {{"cpu", cpu.empty() ? "unknown" : cpu}, {"threads", thread_count()}, {"build", build_name()},
        {"version", version}, {"device", how.device},
        {"weights", model.empty() ? option_name(random.type) : "as stored"}, {"kv_dtype", option_name(how.kv_dtype())},
        {"chunk", how.chunk()}, {"gemm_gflop_s", limits.gemm_gflops}, {"read_gb_s", limits.read_gbs}};
    if (!print.json) put("# " + dump(machine) + "\n");
    put_rows(rows, print, {{"machine", machine}});
    stop_if_interrupted();
  }

  /// The experiment `runs` times; rows of how fast its two phases were, also when Ctrl-C ends it early.
  void measure(const Model& m, Index n, const Limits& limits, std::vector<Json>& rows,
      const std::function<void(Index)>& after) const {
    Session session(m.config, m.weights, how, n, n + 1 + steps, batch);
    std::vector<Phase> phases;  // of a run: opening, prefill, a warm step, the steps that count
    try {
      for (Index i = 0; i < runs; ++i) experiment(session, n, 1 + steps, phases, after);
    } catch (const Interrupted&) {  // what ended still counts
    }
    const auto report = [&](const char* name, Index first, Index count, Index tokens) {
      std::vector<double> t;  // seconds of each run
      Counters work;          // of one
      for (Index i = first; i + count <= std::ssize(phases); i += 3 + steps) {
        t.push_back(0), work = {};
        for (Index k = i; k < i + count; ++k)
          t.back() += phases[k].seconds, work.flops += phases[k].work.flops, work.bytes += phases[k].work.bytes;
      }
      if (t.empty()) return;
      std::ranges::sort(t);
      const double median = (t[t.size() / 2] + t[(t.size() - 1) / 2]) / 2;
      const double gflops = 1e-9 * static_cast<double>(work.flops) / median, of_gemm = gflops / limits.gemm_gflops;
      const double gbs = 1e-9 * static_cast<double>(work.bytes) / median, of_read = gbs / limits.read_gbs;
      rows.push_back({{"arch", m.config.arch}, {"N", n}, {"batch", batch}, {"phase", name},
          {"tok_s", static_cast<double>(tokens) / median}, {"spread", (t.back() - t.front()) / median},
          {"gflop_s", gflops}, {"gb_s", gbs}, {"attainment", std::max(of_gemm, of_read)}, {"of_gemm", of_gemm},
          {"of_read", of_read}, {"kv_bytes", phases[1].cache_bytes}});
    };
    report("prefill", 1, 1, batch * n);
    report("decode", 3, steps, batch * steps);
    stop_if_interrupted();
  }
};

/// `yocou init`
struct Init {
  ShapeGroup shapes{{}, "yoco-u"};
  RandomOptions random = {};
  std::string out = {};

  void declare(CLI::App& c) {
    shapes.declare(c, "one");
    random.declare(c);
    text(c, "-o,--output", out, "file to write")->check(filled)->required();
  }
  void operator()() const {
    if (shapes.shape.empty() && shapes.config.empty()) throw Usage("give either --shape or --config");
    const std::vector<Config> configs = shapes.configs();
    if (configs.size() != 1) throw Usage("--arch: one architecture, found " + std::to_string(configs.size()));
    write_random_checkpoint(configs[0], random.type, random.seed, out);
  }
};

/// `yocou show`
struct Show {
  std::string model = {};
  PrintOptions print = {};

  void declare(CLI::App& c) {
    text(c, "MODEL", model, "a checkpoint (.safetensors)")->required();
    print.declare(c, /*rows=*/false);
  }
  void operator()() const {
    const Model m = load_model(model);
    const Json config = config_json(m.config);
    std::vector<Json> tensors;
    for (const StoredTensor& t : m.tensors)
      tensors.push_back(
          {{"name", t.name}, {"dtype", name_of(t.dtype)}, {"shape", t.shape}, {"bytes", t.end - t.begin}});
    if (print.json) return put(dump({{"config", config}, {"tensors", tensors}}) + "\n");
    put(config.dump(2) + "\n\n");
    put_rows(tensors, print);
    const Params p = count_params(m.config);
    put("\n" + std::to_string(tensors.size()) + " tensors, " + std::to_string(m.tensors.back().end) +
        " bytes; parameters " + to_string(p.params) + " (active " + to_string(p.active) + "), embedding " +
        to_string(p.embed) + ", head " + to_string(p.head) + "\n");
  }
};

// =====================================================================================================================
// 6. The program

/// Adds a command, which runs when the whole command line has been read.
template <class Command>
void add(CLI::App& app, const std::string& name, const std::string& help, const std::string& example) {
  CLI::App* c = app.add_subcommand(name, help);
  const auto command = std::make_shared<Command>();
  command->declare(*c);
  c->footer("Example: yocou " + name + " " + example);
  c->final_callback([command] { (*command)(); });
}

int run(std::vector<std::string> arguments) {
  const auto complain = [](const std::string& what, int status) {
    std::cerr << "yocou: " << cell(valid(what.substr(0, 500))) << (what.size() > 500 ? "..." : "") << std::endl;
    return status;
  };
  CLI::App app("Universal YOCO: the full forward pass, its caches and its costs", "yocou");
  const std::string austen = "data/austen.safetensors ", cups = "data/cups-random.safetensors ";
  add<Generate>(app, "generate", "Continue a text, streaming it", austen + "-p \"It was\" -n 200 --temperature 0.8");
  add<Score>(app, "score", "Bits per byte and perplexity", austen + "data/austen-heldout.txt --loops 1,2,3");
  add<Eval>(app, "eval", "Accuracy of greedy completions", cups + "data/cups.jsonl --by moves --loops 1,3");
  add<LogitRows>(app, "logits", "Logits of given tokens, every position", austen + "--tokens 72,101,108 --json");
  add<Trace>(app, "trace", "What each layer application does to the state", austen + "-p \"It was a dark night\"");
  add<Cost>(app, "cost", "Parameters, cache bytes and FLOPs by formula", "--arch yoco-u,transformer -N 16384,262144");
  add<Verify>(app, "verify", "Allocate and run, and compare with the formulas", "--shape tiny -N 1,64,257 --batch 2");
  add<Bench>(app, "bench", "Speed, beside the machine's measured limits", "--arch yoco-u,transformer -N 1024,4096");
  add<Init>(app, "init", "Write a checkpoint of random weights", "--shape tiny -o tiny.safetensors");
  add<Show>(app, "show", "Config, tensors, shapes, dtypes, sizes", austen);
  app.require_subcommand(0, 1);
  app.set_version_flag("--version", std::string("yocou ") + version + " (" + build_name() + ")");
  try {
    const auto empty = std::ranges::find(arguments, "--prompt=");  // CLI11 takes it for a missing value
    if (empty != arguments.end()) *empty = "", arguments.insert(empty, "--prompt");
    std::ranges::reverse(arguments);
    app.parse(arguments);
    if (app.get_subcommands().empty()) throw Usage("no command is given, see yocou --help");
    return 0;
  } catch (const CLI::ParseError& e) {
    if (e.get_exit_code() != 0) return complain(e.what(), 2);
    app.exit(e);  // --help, --version
    return std::cout.flush() ? 0 : complain("standard output cannot be written", 1);
  } catch (const Usage& e) {
    return complain(e.what(), 2);
  } catch (const Interrupted&) {
    return 130;
  } catch (const std::bad_alloc&) {
    return complain("out of memory", 1);
  } catch (const std::exception& e) {
    return complain(e.what(), 1);
  }
}

}  // namespace yocou

#ifndef YOCOU_NO_MAIN
#ifdef __x86_64__
/// Runs before anything that was compiled for x86-64-v3.
__attribute__((constructor(101), target("arch=x86-64"))) static void check_processor() {
  __builtin_cpu_init();
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("bmi2")) return;
  static const char line[] = "yocou: this processor lacks AVX2, FMA or BMI2; yocou needs x86-64-v3\n";
  [[maybe_unused]] const auto written = write(STDERR_FILENO, line, sizeof line - 1);
  _exit(1);
}
#endif

int main(int argc, char** argv) {
  struct sigaction action {};
  action.sa_handler = [](int) { yocou::interrupted = 1; };
  action.sa_flags = static_cast<int>(SA_RESETHAND);  // a second Ctrl-C ends the program at once
  sigaction(SIGINT, &action, nullptr);
  action.sa_handler = [](int) {  // a mapped file was cut short under us
    static const char line[] = "yocou: a file that is being read was truncated\n";
    [[maybe_unused]] const auto written = write(STDERR_FILENO, line, sizeof line - 1);
    _exit(1);
  };
  sigaction(SIGBUS, &action, nullptr);
  return yocou::run({argv + 1, argv + argc});
}
#endif
