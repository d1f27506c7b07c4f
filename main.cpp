/// @file
/// main.cpp -- the program: what the machine can do, and the commands. Every command reads its options, runs a model
/// through the one interface of yocou.h, and prints.
#include <malloc.h>
#include <signal.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <Eigen/Core>
#include <array>
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
// 2. Commands

/// Every option of every command, with the defaults that they share; a command reads those it has.
struct Options {
  std::string model = {}, file = {}, prompt_file = {}, tokens_file = {}, by = {}, shape = {}, arch = {}, out = {};
  std::optional<std::string> prompt = {}, tokens = {};
  std::string device = "cpu", kv_dtype = {}, dtype = "bf16";
  std::vector<Index> N = {}, loops_list = {0};
  Index n = 256, loops = 0, layers = 0, window = 0, streams = 0, chunk = 0, threads = 0, prefill = 0, top_k = 0;
  Index batch = 1, kv_bytes = 2, memory = 0, runs = 3, steps = 4;
  std::uint64_t seed = 0;
  double temperature = 0, top_p = 1, halt = 0;
  bool json = false, csv = false, last = false, by_position = false, allocate_only = false;
};

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
void put_rows(const std::vector<Json>& rows, const Options& o, Json more = Json::object()) {
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

Dtype dtype_of(const std::string& name) {
  return name == "bf16" ? Dtype::bf16 : name == "f16" ? Dtype::f16 : Dtype::f32;
}

/// An engine for `sequences` sequences of up to `tokens` positions each, which begin as prompts of `prompt` tokens,
/// after checking that they fit the machine.
std::unique_ptr<Engine> make_engine(const Model& m, const Options& o, Index prompt, Index tokens, Index sequences = 1) {
  if (o.threads) set_thread_count(o.threads);
  const Index rows = std::max(std::min(o.chunk, prompt), sequences);
  const EngineOptions options{dtype_of(o.kv_dtype), rows, tokens * sequences, sequences, o.halt};
  if (o.device == "cuda") {
    if (m.config.streams.count > 1 || o.halt > 0) fail("--device cuda: streams and --halt run on the CPU only");
#ifdef YOCOU_CUDA
    return make_cuda_engine(m.config, m.weights, options);
#else
    fail("--device cuda: this yocou was built without CUDA");
#endif
  }
  const Exact caches = Exact(sequences) * cache_bytes(m.config, tokens, size_of(options.kv_dtype));
  require_memory(caches + activation_bytes(m.config, rows, o.halt > 0),
      "a run of " + std::to_string(tokens) + " tokens x " + std::to_string(sequences));
  return make_cpu_engine(m.config, m.weights, options);
}

/// Throws Usage where --halt means nothing.
void check_halt(const Config& c, const Options& o) {
  const Index s = looped_stage(c);
  if (o.halt > 0 && (s < 0 || c.stages[s].attention != Attention::window))
    throw Usage("--halt: arch '" + c.arch + "' has no window stage that alone is looped");
}

/// The mean of the loops that positions ran.
Json mean_loops(std::span<const Index> loops_run) {
  return static_cast<double>(std::accumulate(loops_run.begin(), loops_run.end(), Index{0})) /
         static_cast<double>(loops_run.size());
}

/// The model of a command that reads text, with --loops T.
Model load_text_model(const Options& o) {
  Model m = load_model(o.model);
  if (m.config.vocab_size < 256) fail(o.model, ": byte text needs vocab_size >= 256, found ", m.config.vocab_size);
  check_halt(m.config, o);
  set_loops(m.config, o.loops);
  return m;
}

/// What --NAME TEXT or --NAME-file FILE gives, one of the two; `file` keeps it.
std::string_view text_or_file(const std::string& option, const std::optional<std::string>& text,
    const std::string& path, std::optional<MappedFile>& file) {
  if (text.has_value() == !path.empty()) throw Usage("give either " + option + " or " + option + "-file");
  return text ? std::string_view(*text) : file.emplace(path).text();
}

/// Bytes are tokens. Throws Error naming `what` when they are too few, or too many for the machine.
std::vector<int> bytes_to_tokens(std::string_view text, const std::string& what, std::size_t least = 1) {
  if (text.size() < least) fail(what, ": found ", text.size(), " bytes, the least is ", least);
  if (text.size() > 1 << 20) require_memory(5 * Exact(std::ssize(text)), what);
  const auto* bytes = reinterpret_cast<const unsigned char*>(text.data());
  return {bytes, bytes + text.size()};
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

/// `yocou generate`
void generate(const Options& o) {
  std::optional<MappedFile> file;
  const auto prompt = bytes_to_tokens(text_or_file("--prompt", o.prompt, o.prompt_file, file), "the prompt");
  const Model m = load_text_model(o);
  const Index N = std::ssize(prompt);
  const auto engine = make_engine(m, o, N, N + o.n);
  const int sequence = engine->open();
  std::vector<float> logits(static_cast<std::size_t>(m.config.vocab_size));
  Sampler sample{{o.temperature, o.top_k, o.top_p}, std::mt19937_64(o.seed)};
  const bool terminal = isatty(STDOUT_FILENO) && !o.json;
  TerminalText shown;
  std::string text;
  std::vector<int> tokens;
  Index prompted = 0, decoded = 0;
  double prompt_seconds = 0, decode_seconds = 0;
  try {
    Progress progress("prompt", N);
    auto start = Clock::now();
    prefill(*engine, sequence, prompt, o.chunk, logits.data(), [&](Index done) {
      prompted = done, prompt_seconds = seconds_since(start);
      progress(done);
    });
    start = Clock::now();
    while (std::ssize(tokens) < o.n) {
      stop_if_interrupted();
      int next = 0;
      if (tokens.empty()) {
        next = sample(logits);
      } else {
        const Segment step{sequence, {&tokens.back(), 1}, Logits::last};
        const double u = sample.temperature == 0 ? 0 : sample.uniform();
        engine->forward_sample({&step, 1}, sample, {&u, 1}, &next);
        ++decoded, decode_seconds = seconds_since(start);
      }
      if (next > 255) fail("the model wrote token ", next, ", which is not a byte");
      tokens.push_back(next), text += static_cast<char>(next);
      if (!o.json) put(terminal ? shown(text.back()) : text.substr(text.size() - 1));
    }
  } catch (const Interrupted&) {     // what was written and measured so far still counts
  } catch (const std::exception&) {  // its line is not to begin behind the text
    if (terminal && !text.empty()) put(shown.rest() + "\n");
    throw;
  }
  if (terminal) put(shown.rest() + "\n");
  const Json loops = o.halt > 0 ? mean_loops(engine->loops_run(sequence)) : Json();
  Json result = {{"text", text}, {"tokens", tokens}, {"seed", o.seed}, {"prompt_tokens", prompted},
      {"cache_bytes", engine->cache_bytes()}};
  if (o.halt > 0) result["mean_loops"] = loops;
  if (o.json) put(dump(result) + "\n");
  const auto rate = [](Index count, double seconds) {
    return cell(static_cast<double>(count) / std::max(seconds, 1e-9)) + " tok/s";
  };
  const std::string decoding = decoded ? ", " + rate(decoded, decode_seconds) : "";
  std::cerr << "prompt " << prompted << " tokens, " << rate(prompted, prompt_seconds) << "; decode " << decoded
            << " steps" << decoding << "; cache " << engine->cache_bytes() << " bytes; "
            << (o.halt > 0 ? "mean loops " + cell(loops) + "; " : "") << "seed " << o.seed << "\n";
  stop_if_interrupted();
}

/// -log2 p(token) under a row of logits [V], in double.
double surprise(std::span<const float> logits, int token) {
  const double max = *std::max_element(logits.begin(), logits.end());
  double sum = 0;
  for (const float l : logits) sum += std::exp(l - max);
  return (max - logits[static_cast<std::size_t>(token)]) / std::log(2.0) + std::log2(sum);
}

/// `yocou score`: row t-1 predicts token t, so a file of N bytes gives N-1 predictions.
void score(const Options& o) {
  Model m = load_text_model(o);
  const MappedFile file(o.file);
  const std::vector<int> tokens = bytes_to_tokens(file.text(), o.file, 2);
  const Index N = std::ssize(tokens), V = m.config.vocab_size;
  std::vector<Json> rows, positions;
  const Config stored = m.config;
  for (const Index given : o.loops_list) {
    m.config = stored;  // at T = 1 a custom config no longer says which stage is looped
    const Index T = set_loops(m.config, given);
    const auto engine = make_engine(m, o, N, N);
    const int sequence = engine->open();
    std::vector<double> bits(static_cast<std::size_t>(N - 1));
    Progress progress("score", N);
    forward_all(*engine, m.config, sequence, tokens, o.chunk, [&](Index first, Index n, const float* logits) {
      for (Index i = first; i < std::min(first + n, N - 1); ++i)
        bits[i] = surprise({logits + (i - first) * V, static_cast<std::size_t>(V)}, tokens[i + 1]);
      progress(first + n);
    });
    const auto mean = [&](Index from, Index to) {
      return std::accumulate(bits.begin() + from, bits.begin() + to, 0.0) / static_cast<double>(to - from);
    };
    const double all = mean(0, N - 1);
    rows.push_back({{"loops", T}, {"predictions", N - 1}, {"bits_per_byte", all}, {"perplexity", std::exp2(all)}});
    if (o.halt > 0) rows.back()["mean_loops"] = mean_loops(engine->loops_run(sequence));
    for (Index from = 1; from < N; from *= 2) {  // by position of the byte predicted, in doubling ranges
      const Index to = std::min(2 * from, N);
      positions.push_back({{"loops", T}, {"from", from}, {"to", to - 1}, {"bits_per_byte", mean(from - 1, to - 1)}});
    }
  }
  if (!o.by_position) return put_rows(rows, o);
  if (!o.csv) put_rows(rows, o, {{"by_position", positions}});  // of two tables, CSV has the one that was asked for
  if (!o.csv && !o.json) put("\n");
  if (!o.json) put_rows(positions, o);
}

/// The number that a text is, decimal and nothing else, if it lies in the range.
template <class T>
std::optional<T> parse_number(std::string_view text, const Range<T>& range) {
  T v{};
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), v);
  const bool good = error == std::errc() && end == text.data() + text.size() && range.has(v);
  return good ? std::optional(v) : std::nullopt;
}

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
void logits(const Options& o) {
  std::optional<MappedFile> file;
  const std::string_view list = text_or_file("--tokens", o.tokens, o.tokens_file, file);
  Model m = load_model(o.model);
  check_halt(m.config, o);
  set_loops(m.config, o.loops);
  const Index V = m.config.vocab_size;
  const std::vector<int> tokens = read_tokens(list, V, file ? o.tokens_file : "--tokens");
  const Index N = std::ssize(tokens), K = o.prefill ? o.prefill : N;
  if (K > N) throw Usage("--prefill: " + std::to_string(K) + " of " + std::to_string(N) + " tokens");
  const auto engine = make_engine(m, o, K, N);
  const int sequence = engine->open();
  const char *open = "", *between = " ", *close = "\n";  // of a row
  if (o.json) put("{\"tokens\":" + dump(tokens) + ",\"logits\":["), open = "[", between = ",", close = "]";
  const auto print = [&](Index, Index n, const float* rows) {
    std::ostringstream text;
    text << std::setprecision(9);
    for (Index i = 0; i < n; ++i) {
      for (Index v = 0; v < V; ++v) text << (v ? between : open) << rows[i * V + v];
      text << close;
      if (o.json) open = ",[";
    }
    put(text.str());
  };
  std::vector<float> row(static_cast<std::size_t>(V));
  const std::span<const int> prompt = std::span(tokens).first(static_cast<std::size_t>(K));
  if (o.last) prefill(*engine, sequence, prompt, o.chunk, row.data());
  else forward_all(*engine, m.config, sequence, prompt, o.chunk, print);
  for (Index i = K; i < N; ++i) {
    decode(*engine, {&sequence, 1}, {&tokens[static_cast<std::size_t>(i)], 1}, row.data());
    if (!o.last) print(i, 1, row.data());
  }
  if (o.last) print(N - 1, 1, row.data());
  const Json loops(engine->loops_run(sequence));
  if (o.json) put("]" + (o.halt > 0 ? ",\"loops\":" + dump(loops) : "") + "}\n");
}

/// How tasks went: one, or several together.
struct Tally {
  Index count = 0, correct = 0;  ///< of tasks
  std::vector<Index> loops_run;  ///< of their positions, with --halt
};

/// Greedy completions of some tasks, prompts and decode steps batched.
void answer_batch(Engine& engine, const Config& c, std::span<const Task> tasks, Index chunk, Tally* went) {
  const std::size_t V = static_cast<std::size_t>(c.vocab_size), count = tasks.size();
  std::vector<float> logits(count * V);
  std::vector<std::vector<int>> prompts;
  std::vector<Segment> pass;
  for (const Task& t : tasks) {
    prompts.push_back(bytes_to_tokens(t.prompt, "a prompt"));
    pass.push_back({engine.open(), prompts.back(), Logits::last});
  }
  if (count == 1) prefill(engine, pass[0].sequence, prompts[0], chunk, logits.data());
  else engine.forward(pass, logits.data());
  std::vector<std::string> written(count);
  std::vector<std::size_t> open(count);  // tasks whose answers are not complete; row i of the logits is task open[i]'s
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
    const auto loops = engine.loops_run(pass[i].sequence);
    went[i] = {1, written[i] == tasks[i].answer, {loops.begin(), loops.end()}};
    engine.close(pass[i].sequence);
  }
}

/// `yocou eval`
void eval(const Options& o) {
  Model m = load_text_model(o);
  const MappedFile file(o.file);
  require_memory(4 * Exact(std::ssize(file.text())), o.file);
  const std::vector<Task> tasks = read_tasks(file.text(), o.file, o.by);
  constexpr Index together = 64;  // tasks in a batch, if their prompts fit one chunk
  Index longest = 0, prompts = 0, correct = 0;
  for (const Task& t : tasks)
    longest = std::max(longest, std::ssize(t.prompt) + std::ssize(t.answer)), prompts += std::ssize(t.prompt);
  std::vector<Json> rows;
  const Config stored = m.config;
  for (const Index given : o.loops_list) {
    m.config = stored;  // at T = 1 a custom config no longer says which stage is looped
    const Index T = set_loops(m.config, given);
    const auto engine = make_engine(m, o, prompts, longest, std::min(together, std::ssize(tasks)));
    std::vector<Tally> went(tasks.size());
    Progress progress("eval", std::ssize(tasks));
    for (Index first = 0, last = 0; first < std::ssize(tasks); first = last) {
      for (Index sum = 0; last < std::ssize(tasks) && last - first < together; ++last)
        if ((sum += std::ssize(tasks[last].prompt)) > o.chunk && last > first) break;
      answer_batch(*engine, m.config, std::span(tasks).subspan(first, last - first), o.chunk, &went[first]);
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
      if (o.halt > 0) rows.back()["mean_loops"] = mean_loops(group.loops_run);
    }
  }
  const Index total = std::ssize(tasks) * std::ssize(o.loops_list);
  put_rows(rows, o, {{"accuracy", static_cast<double>(correct) / static_cast<double>(total)}, {"count", total}});
}

/// `yocou trace`: what each application of a layer does to the state, means over the prompt's positions (Figure 8).
void trace(const Options& o) {
  const Model m = load_text_model(o);
  const Config& c = m.config;
  const std::vector<int> prompt = bytes_to_tokens(*o.prompt, "the prompt");
  struct Sums {
    Index stage, loop, layer, rows = 0;
    double norm = 0, angle = 0, loop_cosine = 0;
    std::vector<Index> load = {};
  };
  std::vector<Sums> applications;
  std::vector<float> before, loop_before;  // the states after the application before, and after the loop before
  std::size_t next = 0;
  const Index D = c.dim, N = std::ssize(prompt);
  const auto engine = make_engine(m, o, N, N);
  const auto ends_loop = [&](const auto& a) { return a.stage >= 0 && a.layer + 1 == c.stages[a.stage].layers; };
  engine->on_layer = [&](const Application& a) {
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
      const Index row = (a.rows.empty() ? i : a.rows[i]) * D;
      const auto x = a.x.subspan(i * D, D), old = std::span<const float>(before).subspan(row, D);
      sums.norm += std::sqrt(std::inner_product(x.begin(), x.end(), x.begin(), 0.0) / static_cast<double>(D));
      if (a.stage >= 0) sums.angle += std::acos(cosine(x, old)) / M_PI;
      if (a.loop > 0 && ends_loop(a))
        sums.loop_cosine += cosine(x, std::span<const float>(loop_before).subspan(row, D));
      std::ranges::copy(x, before.begin() + row);
      if (ends_loop(a)) std::ranges::copy(x, loop_before.begin() + row);
    }
  };
  forward_all(*engine, c, engine->open(), prompt, o.chunk, [](Index, Index, const float*) {});
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
    if (!o.json && !words.empty()) load = join(words, " ");
    rows.push_back(
        {{"application", std::ssize(rows)}, {"stage", a.stage < 0 ? "embed" : c.stages[a.stage].name}, {"loop", a.loop},
            {"layer", a.layer}, {"norm", mean(a.norm, true)}, {"angular_distance", mean(a.angle, a.stage >= 0)},
            {"loop_cosine", mean(a.loop_cosine, a.loop > 0 && ends_loop(a))}, {"router_load", load}});
    if (o.halt > 0) rows.back()["rows"] = a.rows;
  }
  put_rows(rows, o);
}

/// What cost, verify and bench work on: a checkpoint's config, or a shape in one or several architectures; without
/// --arch in all that take the overrides.
std::vector<Config> configs_of(const Options& o) {
  if (!o.model.empty()) {
    Config c = load_model(o.model).config;
    check_halt(c, o);
    set_loops(c, o.loops);
    return {c};
  }
  Names names;
  for (const Arch& a : archs())
    if (o.arch.empty() && (!o.loops || a.takes_loops()) && (!o.window || a.takes_window()) &&
        (a.streams ? o.device != "cuda" : !o.streams) && (o.halt == 0 || (a.parts[0].looped && a.takes_window())))
      names.push_back(a.name);
  std::istringstream given(o.arch);
  for (std::string name; std::getline(given, name, ',');) names.push_back(name);
  std::vector<Config> all;
  for (const std::string& name : names)
    check_halt(all.emplace_back(make_config(o.shape, name, {o.layers, o.window, o.loops, o.streams})), o);
  return all;
}

/// The weights for one of them: the checkpoint's, or random ones.
Model model_of(const Config& c, const Options& o) {
  const Dtype dtype = dtype_of(o.dtype);
  if (o.model.empty()) require_memory(count_params(c).all() * size_of(dtype), "a model of random weights");
  Model m = o.model.empty() ? random_model(c, dtype, o.seed) : load_model(o.model);
  m.config = c;
  return m;
}

inline constexpr Index batch_limit = Index{1} << 20;  ///< sequences

/// `yocou cost`
void cost(const Options& o) {
  const Index s = o.kv_bytes, B = o.batch;
  std::optional<Config> yoco_u;  // the reference of the ratios, in the same shape
  if (o.model.empty() && o.layers % 2 == 0) yoco_u = make_config(o.shape, "yoco-u", {o.layers, o.window, o.loops});
  std::vector<Json> rows, orders;
  for (const Config& c : configs_of(o)) {
    const Params p = count_params(c);
    const Arch* arch = find_arch(c.arch);
    if (arch)
      orders.push_back({{"arch", arch->name}, {"KV cache", arch->kv_cache}, {"prefill", arch->prefill},
          {"decode, a step", arch->decode}});
    for (const Index N : o.N) {
      const Exact kv = B * cache_bytes(c, N, s), prefill = B * prefill_flops(c, N), step = B * decode_flops(c, N);
      Json row = {{"arch", c.arch}, {"N", N}, {"batch", B}, {"cache_bytes", kv.v}, {"prefill_flops", prefill.v},
          {"decode_flops", step.v}, {"params", p.params.v}, {"active_params", p.active.v}, {"embed_params", p.embed.v},
          {"head_params", p.head.v}, {"decode_bytes", decode_bytes(c, N, B, /*weight bytes=*/2, s).v}};
      if (yoco_u) {
        const auto ratio = [B](const Exact& a, const Exact& b) { return double(a) / double(B * b); };
        row["cache_ratio"] = ratio(kv, cache_bytes(*yoco_u, N, s));
        row["prefill_ratio"] = ratio(prefill, prefill_flops(*yoco_u, N));
        row["decode_ratio"] = ratio(step, decode_flops(*yoco_u, N));
        const auto from = crossover(*yoco_u, c);
        row["prefill_crossover_N"] = from ? Json(*from) : Json();
      }
      if (o.memory) {  // weights in two bytes, and the caches
        const auto fits = [&](Index b, Index n) { return 2 * p.all() + b * cache_bytes(c, n, s) <= Exact(o.memory); };
        row["max_N"] = largest(N_limit, [&](Index n) { return fits(B, n); });
        row["max_batch"] = largest(batch_limit, [&](Index b) { return fits(b, N); });
      }
      if (arch)
        row["kv_big_o"] = arch->kv_cache, row["prefill_big_o"] = arch->prefill, row["decode_big_o"] = arch->decode;
      rows.push_back(std::move(row));
    }
  }
  if (o.json || o.csv) return put_rows(rows, o);
  using Column = std::tuple<const char*, const char*, double>;  // key, title, unit
  static const std::vector<Column> columns{{"arch", "arch", 0}, {"N", "N", 0}, {"params", "params M", 1e6},
      {"active_params", "active M", 1e6}, {"cache_bytes", "KV MB", 0x1p20}, {"prefill_flops", "prefill TFLOP", 1e12},
      {"decode_flops", "decode GFLOP", 1e9}, {"decode_bytes", "decode GB", 1e9}, {"cache_ratio", "KV x", 0},
      {"prefill_ratio", "prefill x", 0}, {"decode_ratio", "decode x", 0},
      {"prefill_crossover_N", "yoco-u cheaper from", 0}, {"max_N", "max N", 0}, {"max_batch", "max batch", 0}};
  std::vector<Json> table(rows.size());
  for (std::size_t i = 0; i < rows.size(); ++i)
    for (const auto& [key, title, unit] : columns)
      if (rows[i].contains(key)) table[i][title] = unit ? Json(rows[i][key].get<double>() / unit) : rows[i][key];
  put_rows(table, o);
  put("\nKV MB = 2^20 bytes, " + std::to_string(s) + " a number; batch " + std::to_string(B) +
      "; x: relative to yoco-u\n\n");
  put_rows(orders, o);
}

/// Tokens that mean nothing, for measuring.
std::vector<int> random_tokens(const Config& c, Index n, Index seed) {
  std::mt19937_64 random(static_cast<std::uint64_t>(seed));
  std::vector<int> tokens(static_cast<std::size_t>(n));
  for (int& t : tokens) t = static_cast<int>(random() % static_cast<std::uint64_t>(c.vocab_size));
  return tokens;
}

/// One comparison of `verify`.
Json check(const char* quantity, const Config& c, Index N, const Exact& formula, Index measured) {
  return {{"quantity", quantity}, {"arch", c.arch}, {"N", N}, {"formula", formula.v}, {"measured", measured},
      {"equal", formula == Exact(measured)}};
}

/// Really runs a prefill of N tokens and `steps` decode steps and holds what the operations and the arena counted
/// against the formulas.
void verify_run(const Model& m, const Options& o, Index N, std::vector<Json>& rows) {
  const Config& c = m.config;
  const Index B = o.batch, s = size_of(dtype_of(o.kv_dtype));
  const auto engine = make_engine(m, o, N, N + o.steps, B);
  const auto flops = [&] { return static_cast<Index>(engine->counters.flops); };
  const auto add = [&](const char* quantity, Index n, const Exact& formula, Index measured) {
    rows.push_back(check(quantity, c, n, B * formula, measured));
  };
  std::vector<int> sequences;
  std::vector<float> logits(static_cast<std::size_t>(B * c.vocab_size));
  // Of FLOP, `each` a sequence; where rows halt, by the loops that this run's positions p0 .. p0+n-1 ran.
  const auto flops_formula = [&](Index p0, Index n, const Exact& each) {
    Exact sum = 0;
    for (const int b : sequences) sum += o.halt > 0 ? halting_flops(c, p0, engine->loops_run(b).subspan(p0, n)) : each;
    return sum;
  };
  Exact cross = 0, global = 0, rings = 0;  // rows through the cross-decoder, rows of K^, V^ a token, bytes of the rings
  for (const Stage& g : c.stages) {
    if (g.attention == Attention::window) rings += Exact(g.layers) * g.loops * g.window * 2 * c.kv_dim() * s;
    if (g.attention != Attention::shared) continue;
    cross = g.refresh_kv ? Exact(g.loops - 1) * N + 1 : Exact(g.loops);
    global = g.refresh_kv ? g.loops : 1;
  }
  for (Index b = 0; b < B; ++b) sequences.push_back(engine->open());
  add("ring_bytes", 0, rings, engine->cache_bytes());  // an empty sequence holds its rings, whole, and no block
  for (Index b = 0; b < B; ++b) prefill(*engine, sequences[b], random_tokens(c, N, b), o.chunk, logits.data());
  add("cache_bytes_prefill", N, cache_bytes(c, N, s), engine->cache_bytes());
  rows.push_back(check("prefill_flops", c, N, flops_formula(0, N, prefill_flops(c, N)), flops()));
  add("cross_positions", N, cross, static_cast<Index>(engine->counters.cross_positions));
  add("global_rows", N, global * N, engine->global_rows());
  for (Index k = 0; k < o.steps; ++k) {
    const Index before = flops();
    decode(*engine, sequences, random_tokens(c, B, k), logits.data());
    rows.push_back(check("decode_flops", c, N + k, flops_formula(N + k, 1, decode_flops(c, N + k)), flops() - before));
  }
  add("cache_bytes_decode", N + o.steps, cache_bytes(c, N + o.steps, s), engine->cache_bytes());
  add("global_rows", N + o.steps, global * (N + o.steps), engine->global_rows());
}

/// Allocates the caches of N tokens, touched, without weights or tokens. A cell that does not fit is a row that says so.
Json verify_allocation(const Config& c, const Options& o, Index N) {
  const Dtype dtype = dtype_of(o.kv_dtype);
  const Exact formula = o.batch * cache_bytes(c, N, size_of(dtype));
  malloc_trim(0);  // what earlier cells have freed goes back to the system, so that the growth is this cell's
  const Index available = available_memory(), before = resident_memory();
  const bool fits = formula <= Exact(available);
  Index held = 0, grown = 0;
  if (fits)
    hold_caches(c, dtype, N, o.batch, [&](Index bytes) {
      held = bytes;
      grown = resident_memory() - before;
    });
  Json row = check("cache_bytes_prefill", c, N, formula, held);
  if (!fits) row["measured"] = row["equal"] = nullptr;
  row["note"] = fits ? "resident memory grew by " + std::to_string(grown)
                     : "does not fit: " + std::to_string(available) + " bytes are available";
  return row;
}

/// `yocou verify`
void verify(const Options& o) {
  const std::vector<Config> configs = configs_of(o);
  std::vector<Json> rows;
  Progress progress("verify", std::ssize(configs) * std::ssize(o.N));
  Index done = 0;
  for (const Config& c : configs) {
    std::optional<Model> m;
    if (!o.allocate_only) {
      m = model_of(c, o);
      Index stored = 0;
      for_each_tensor(c, m->weights, [&](const std::string& name, const Shape&, const Tensor& t) {
        if (name != "embed" && name != "head") stored += t.rows * t.cols;
      });
      rows.push_back(check("params", c, 0, count_params(c).params, stored));
    }
    for (const Index N : o.N) {
      if (m) verify_run(*m, o, N, rows);
      else rows.push_back(verify_allocation(c, o, N));
      progress(++done);
    }
  }
  const auto having = [&](const Json& equal) {
    return std::ranges::count_if(rows, [&](const Json& row) { return row["equal"] == equal; });
  };
  const auto unequal = having(false);
  put_rows(rows, o, {{"resident_bytes", resident_memory()}});
  if (!o.json && !o.csv)
    put("\n" + std::to_string(rows.size()) + " comparisons, " + std::to_string(unequal) + " differ, " +
        std::to_string(having(nullptr)) + " did not fit; the process holds " + std::to_string(resident_memory()) +
        " bytes in memory now: caches, weights and buffers, the program and its libraries, and freed memory\n");
  for (const Json& row : rows)
    if (row["equal"] == false)
      fail("verify: ", unequal, " rows differ, the first ", cell(row["quantity"]), " of ", cell(row["arch"]),
          " at N = ", cell(row["N"]), ": formula ", cell(row["formula"]), ", measured ", cell(row["measured"]));
}

/// The runs of one phase of a cell of `bench`: prefill, or decode.
struct Phase {
  const char* name;
  Index tokens;  ///< of one run
  std::vector<double> seconds = {};
  Counters work = {};  ///< of the last run

  template <class Run>
  void time(const Engine& engine, Run&& run) {
    const Counters before = engine.counters;
    const auto start = Clock::now();
    run();
    seconds.push_back(seconds_since(start));
    work = engine.counters - before;
  }
};

/// One cell of `bench`: `runs` times a prefill of the batch and decode steps, after which rows says how fast they were.
/// Calls prefilled(tokens) behind every chunk.
void bench_run(const Model& m, const Options& o, Index N, const Limits& limits, std::vector<Json>& rows,
    const std::function<void(Index)>& prefilled) {
  const Config& c = m.config;
  const Index B = o.batch;
  const auto engine = make_engine(m, o, N, N + o.steps + 1, B);
  std::vector<float> logits(static_cast<std::size_t>(B * c.vocab_size));
  Index kv = 0;
  Phase prefills{"prefill", B * N}, decodes{"decode", B * o.steps};
  std::vector<int> sequences;
  const auto step = [&](Index k) { decode(*engine, sequences, random_tokens(c, B, k), logits.data()); };
  try {
    for (Index i = 0; i < o.runs; ++i) {
      prefills.time(*engine, [&] {
        for (Index b = 0; b < B; ++b) {
          sequences.push_back(engine->open());
          prefill(*engine, sequences.back(), random_tokens(c, N, b), o.chunk, logits.data(),
              [&, before = Index{0}](Index done) mutable { prefilled(done - std::exchange(before, done)); });
        }
      });
      kv = engine->cache_bytes();
      step(1);  // warm
      decodes.time(*engine, [&] {
        for (Index k = 0; k < o.steps; ++k) step(k);
      });
      for (const int sequence : sequences) engine->close(sequence);
      sequences.clear();
    }
  } catch (const Interrupted&) {  // the runs that ended still count
  }
  for (Phase* p : {&prefills, &decodes}) {
    std::vector<double>& t = p->seconds;
    if (t.empty()) continue;
    std::ranges::sort(t);
    const double median = (t[t.size() / 2] + t[(t.size() - 1) / 2]) / 2;
    const double gflops = 1e-9 * static_cast<double>(p->work.flops) / median, of_gemm = gflops / limits.gemm_gflops;
    const double gbs = 1e-9 * static_cast<double>(p->work.bytes) / median, of_read = gbs / limits.read_gbs;
    rows.push_back({{"arch", c.arch}, {"N", N}, {"batch", B}, {"phase", p->name},
        {"tok_s", static_cast<double>(p->tokens) / median}, {"spread", (t.back() - t.front()) / median},
        {"gflop_s", gflops}, {"gb_s", gbs}, {"attainment", std::max(of_gemm, of_read)}, {"of_gemm", of_gemm},
        {"of_read", of_read}, {"kv_bytes", kv}});
  }
}

/// `yocou bench`
void bench(const Options& o) {
  const std::vector<Config> configs = configs_of(o);
  if (o.threads) set_thread_count(o.threads);
  const Limits limits = measure_limits();
  std::vector<Json> rows;
  const Index cells = std::accumulate(o.N.begin(), o.N.end(), Index{0}) * std::ssize(configs);
  Progress progress("bench", cells * o.runs * o.batch);
  Index done = 0;
  for (const Config& c : configs) {
    if (interrupted) break;
    const Model m = model_of(c, o);
    for (const Index N : o.N)
      if (!interrupted) bench_run(m, o, N, limits, rows, [&](Index tokens) { progress(done += tokens); });
  }
  const std::string cpu = line_of("/proc/cpuinfo", "model name\t: ");
  const Json machine = {{"cpu", cpu.empty() ? "unknown" : cpu}, {"threads", thread_count()}, {"build", build_name()},
      {"version", version}, {"device", o.device}, {"weights", o.model.empty() ? o.dtype : "as stored"},
      {"kv_dtype", o.kv_dtype}, {"chunk", o.chunk}, {"gemm_gflop_s", limits.gemm_gflops},
      {"read_gb_s", limits.read_gbs}};
  if (!o.json) put("# " + dump(machine) + "\n");
  put_rows(rows, o, {{"machine", machine}});
  stop_if_interrupted();
}

/// `yocou init`
void init(const Options& o) {
  const Config c = make_config(o.shape, o.arch, {o.layers, o.window, o.loops, o.streams});
  write_random_checkpoint(c, dtype_of(o.dtype), o.seed, o.out);
}

/// `yocou show`
void show(const Options& o) {
  const Model m = load_model(o.model);
  const Json config = config_json(m.config);
  std::vector<Json> tensors;
  for (const StoredTensor& t : m.tensors)
    tensors.push_back({{"name", t.name}, {"dtype", name_of(t.dtype)}, {"shape", t.shape}, {"bytes", t.end - t.begin}});
  if (o.json) return put(dump({{"config", config}, {"tensors", tensors}}) + "\n");
  put(config.dump(2) + "\n\n");
  put_rows(tensors, o);
  const Params p = count_params(m.config);
  put("\n" + std::to_string(tensors.size()) + " tensors, " + std::to_string(m.tensors.back().end) +
      " bytes; parameters " + to_string(p.params) + " (active " + to_string(p.active) + "), embedding " +
      to_string(p.embed) + ", head " + to_string(p.head) + "\n");
}

/// A command: what it is called, says and does. Its options hold its own defaults until the command line is read.
struct Command {
  std::string name, help, example;
  void (*run)(const Options&);
  Options options = {};
};

std::vector<Command> all_commands() {
  const std::string austen = "data/austen.safetensors ", cups = "data/cups-random.safetensors ";
  return {
      {"generate", "Continue a text, streaming it", austen + "-p \"It was\" -n 200 --temperature 0.8", generate},
      {"score", "Bits per byte and perplexity", austen + "data/austen-heldout.txt --loops 1,2,3", score},
      {"eval", "Accuracy of greedy completions", cups + "data/cups.jsonl --by moves --loops 1,3", eval},
      {"logits", "Logits of given tokens, every position", austen + "--tokens 72,101,108 --json", logits},
      {"trace", "What each layer application does to the state", austen + "-p \"It was a dark night\"", trace},
      {"cost", "Parameters, cache bytes and FLOPs by formula", "--arch yoco-u,transformer -N 16384,262144", cost,
          {.shape = "1.3b", .N = {16384, 65536, 262144}}},
      {"verify", "Allocate and run, and compare with the formulas", "--shape tiny -N 1,64,257 --batch 2", verify,
          {.shape = "tiny", .N = {1, 63, 64, 65, 255, 256, 257, 300}}},
      {"bench", "Speed, beside the machine's measured limits", "--arch yoco-u,transformer -N 1024,4096", bench,
          {.shape = "small", .arch = "yoco-u", .N = {1024, 4096, 16384}}},
      {"init", "Write a checkpoint of random weights", "--shape tiny -o tiny.safetensors", init, {.arch = "yoco-u"}},
      {"show", "Config, tensors, shapes, dtypes, sizes", austen, show},
  };
}

/// "80GB", "24GiB", "512MB", or bytes, as bytes. MB and GB are 2^20 and 2^30 bytes, as in the paper's tables.
std::string memory_size(std::string& text) {
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

/// Declares the command line: an option's name, range and help, and the commands that take it, live here alone.
void declare(CLI::App& app, std::vector<Command>& commands) {
  for (const Command& c : commands)
    app.add_subcommand(c.name, c.help)->footer("Example: yocou " + c.name + " " + c.example);
  const auto each = [&](const std::string& takers, auto&& use) {  // use(subcommand, options) for each that is named
    for (Command& c : commands)
      if (takers.find(c.name) != std::string::npos) use(*app.get_subcommand(c.name), c.options);
  };
  const auto require = [&](const std::string& takers, const char* name) {
    each(takers, [&](CLI::App& c, Options&) { c.get_option(name)->required(); });
  };
  const auto flag = [&](const std::string& takers, const char* name, bool Options::*to, const char* help) {
    each(takers, [&](CLI::App& c, Options& o) { c.add_flag(name, o.*to, help); });
  };
  const auto text = [&](const std::string& takers, const char* name, auto Options::*to, const std::string& help,
                        const CLI::Validator& check = {}) {
    each(
        takers, [&](CLI::App& c, Options& o) { c.add_option(name, o.*to, help)->capture_default_str()->check(check); });
  };
  // One number, or several with commas where T is a list. CLI11 alone would read 010 as 8 and cut off 2^64.
  const auto number = [&](const std::string& takers, const std::string& name, auto Options::*to, const auto& range,
                          const char* help) {
    using N = std::remove_cv_t<decltype(range.low)>;
    constexpr bool list = !std::is_same_v<std::decay_t<decltype(std::declval<Options>().*to)>, N>;
    each(takers, [&](CLI::App& c, Options& o) {
      const CLI::callback_t read = [=, &value = o.*to](const CLI::results_t& given) {
        std::vector<N> all;
        std::istringstream pieces(given[0] + ",");
        for (std::string piece; std::getline(pieces, piece, ',');)
          if (const auto v = parse_number(piece, range); v && (list || all.empty())) all.push_back(*v);
          else
            throw CLI::ValidationError(
                name, "'" + given[0] + "' is not " + range.text() + (list ? ", or several: 1,2,3" : ""));
        if constexpr (list) value = all;
        else value = all[0];
        return true;
      };
      std::string shown = dump(o.*to);
      if (list) shown = shown.substr(1, shown.size() - 2);
      auto* option = c.add_option(name, read, help)->type_name(std::is_integral_v<N> ? "INT" : "FLOAT");
      if (shown != "0") option->default_str(shown);
    });
  };
  const CLI::Validator filled([](std::string& s) { return std::string(s.empty() ? "must not be empty" : ""); }, "");
  const CLI::IsMember shapes(shape_names()), devices({"cpu", "cuda"});
  const CLI::IsMember kv_dtypes({"f32", "bf16"}), dtypes({"f32", "bf16", "f16"});
  const Range<Index> from_0{0, sizes.high}, Ns{1, N_limit}, batches{1, batch_limit}, many{1, 1'000'000};
  const Range<double> temperatures{0, 1e38}, shares{above_0, 1};
  const Range<std::uint64_t> seeds{0, std::numeric_limits<std::uint64_t>::max()};
  const std::string running = "generate score eval logits trace verify bench", random = "verify bench init",
                    shaped = "cost " + random, costed = "cost verify bench", rows = "score eval trace " + costed;
  Names names;
  for (const Arch& a : archs()) names.push_back(a.name);

  text(rows + " generate logits show", "MODEL", &Options::model, "a checkpoint (.safetensors)");
  text("score", "FILE", &Options::file, "text, any bytes");
  text("eval", "TASKS", &Options::file, "JSON lines {\"prompt\",\"answer\", ...}");
  text("eval", "--by", &Options::by, "field to group by", filled);
  text("generate trace", "-p,--prompt", &Options::prompt, "a text");
  text("generate", "--prompt-file", &Options::prompt_file, "a file, any bytes, in place of a text");
  number("generate", "-n,--tokens", &Options::n, from_0, "tokens to add");
  number("generate", "--temperature", &Options::temperature, temperatures, "0, the default: the likeliest token");
  number("generate", "--top-k", &Options::top_k, from_0, "draw from the k likeliest; 0, the default: from all");
  number("generate", "--top-p", &Options::top_p, shares, "draw from the smallest set of this probability");
  text("logits", "--tokens", &Options::tokens, "token ids: 1,2,3");
  text("logits", "--tokens-file", &Options::tokens_file, "a file of token ids, separated by commas or white space");
  number("logits", "--prefill", &Options::prefill, sizes, "tokens run as prefill, the rest one by one (default all)");
  flag("logits", "--last", &Options::last, "the last position only, prefilled with the early stop");
  text(shaped, "--shape", &Options::shape, "D, L, H and so on", shapes);
  text(shaped, "--arch", &Options::arch, "one or several (init: one; cost, verify: default all): " + join(names, ","),
      filled);
  number(shaped, "--layers", &Options::layers, counts, "L, in place of the shape's");
  number(shaped, "--window", &Options::window, sizes, "W, in place of the shape's");
  number(shaped, "--streams", &Options::streams, Range<Index>{2, counts.high}, "P of parscale (default 2)");
  number(shaped + " generate logits trace", "--loops", &Options::loops, counts, "T of the looped stage");
  number("generate score eval logits trace verify", "--halt", &Options::halt, shares,
      "rows that a loop turns by less than A, of a half turn, loop no further");
  number("score eval", "--loops", &Options::loops_list, counts, "T of the looped stage, one or several: 1,2,3");
  number(costed, "-N", &Options::N, Ns, "tokens, one or several");
  number(costed, "--batch", &Options::batch, batches, "sequences");
  number("cost", "--kv-bytes", &Options::kv_bytes, Range<Index>{1, 8}, "bytes of a cached number");
  each("cost", [](CLI::App& c, Options& o) {
    c.add_option("--memory", o.memory, "a budget like 80GB: the largest N and batch that fit beside 2-byte weights")
        ->transform(CLI::Validator(memory_size, ""));
  });
  number("verify bench", "--steps", &Options::steps, many, "decode steps after each prefill");
  number("bench", "--runs", &Options::runs, Range<Index>{1, 1000}, "runs, of which the median counts");
  flag("verify", "--allocate-only", &Options::allocate_only, "allocate the caches of N tokens, run nothing");
  text(running, "--device", &Options::device, "where it runs", devices);
  number(running, "--chunk", &Options::chunk, sizes, "tokens a prefill pass (default 512, on cuda 8192)");
  number(running, "--threads", &Options::threads, Range<Index>{0, 1024}, "0, the default: as many as there are");
  text(running, "--kv-dtype", &Options::kv_dtype, "type of cached numbers (default f32, on cuda bf16)", kv_dtypes);
  text(random, "--dtype", &Options::dtype, "of the random weights", dtypes);
  number(random + " generate", "--seed", &Options::seed, seeds, "of what is random (default 0)");
  text("init", "-o,--output", &Options::out, "file to write", filled);
  flag("score", "--by-position", &Options::by_position, "also by position, in doubling ranges; as CSV only so");
  flag(rows + " generate logits show", "--json", &Options::json, "JSON on stdout");
  flag(rows, "--csv", &Options::csv, "CSV on stdout");

  require("generate score eval logits trace show", "MODEL");
  require("score", "FILE"), require("eval", "TASKS"), require("trace", "--prompt");
  require("init", "--shape"), require("init", "--output");
  each(rows, [](CLI::App& c, Options&) { c.get_option("--csv")->excludes(c.get_option("--json")); });
  each(costed, [](CLI::App& c, Options&) {
    for (const char* shape : {"--shape", "--arch", "--layers", "--window", "--streams"})
      c.get_option("MODEL")->excludes(c.get_option(shape));
  });
}

int run(std::vector<std::string> arguments) {
  const auto complain = [](const std::string& what, int status) {
    std::cerr << "yocou: " << cell(valid(what.substr(0, 500))) << (what.size() > 500 ? "..." : "") << std::endl;
    return status;
  };
  CLI::App app("Universal YOCO: the full forward pass, its caches and its costs", "yocou");
  try {
    std::vector<Command> commands = all_commands();
    declare(app, commands);
    app.require_subcommand(0, 1);
    app.set_version_flag("--version", std::string("yocou ") + version + " (" + build_name() + ")");
    const auto empty = std::ranges::find(arguments, "--prompt=");  // CLI11 takes it for a missing value
    if (empty != arguments.end()) *empty = "", arguments.insert(empty, "--prompt");
    std::ranges::reverse(arguments);
    app.parse(arguments);
    for (auto& [name, help, example, run, o] : commands) {
      if (!app.got_subcommand(name)) continue;
      if (!o.chunk) o.chunk = o.device == "cuda" ? 8192 : 512;
      if (o.kv_dtype.empty()) o.kv_dtype = o.device == "cuda" ? "bf16" : "f32";
      run(o);
      return 0;
    }
    throw Usage("no command is given, see yocou --help");
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
/// Runs before anything that was compiled for x86-64-v3.
__attribute__((constructor(101), target("arch=x86-64"))) static void check_processor() {
  __builtin_cpu_init();
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("bmi2")) return;
  static const char line[] = "yocou: this processor lacks AVX2, FMA or BMI2; yocou needs x86-64-v3\n";
  [[maybe_unused]] const auto written = write(STDERR_FILENO, line, sizeof line - 1);
  _exit(1);
}

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
