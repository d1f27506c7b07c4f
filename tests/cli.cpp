/// @file
/// cli.cpp -- the built program from outside: what it prints, what it refuses, how it ends. Nothing here knows the
/// sources; files are made by a small safetensors writer that can also write them wrong.
#include <fcntl.h>
#include <poll.h>
#include <pty.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <termios.h>
#include <unistd.h>

#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>
#include <limits>
#include <nlohmann/json.hpp>
#include <set>
#include <sstream>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "catch.h"

namespace {

namespace fs = std::filesystem;
using Json = nlohmann::ordered_json;
using Words = std::vector<std::string>;

#ifdef YOCOU_SANITIZED
constexpr bool sanitized = true;
#else
constexpr bool sanitized = false;
#endif
constexpr double patience = 240;        ///< seconds after which a run counts as hung, on a busy machine too
constexpr bool slow_bench = sanitized;  ///< bench first measures the machine: minutes in instrumented code

// ---------------------------------------------------------------------------------------------------------------------
// Running the program

/// A folder of this process, gone at its end.
const fs::path& folder() {
  static const struct Folder {
    fs::path path = fs::temp_directory_path() / ("yocou-cli-" + std::to_string(getpid()));
    Folder() { fs::create_directories(path); }
    ~Folder() {
      std::error_code ignored;
      fs::remove_all(path, ignored);
    }
  } it;
  return it.path;
}
std::string in_folder(const std::string& name) { return (folder() / name).string(); }

std::string write_file(const std::string& name, const std::string& bytes) {
  const std::string path = in_folder(name);
  std::ofstream(path, std::ios::binary).write(bytes.data(), static_cast<std::streamsize>(bytes.size()));
  return path;
}

struct Result {
  int status = -1;  ///< exit status, or -1
  int signal = 0;   ///< that ended it
  bool hung = false;
  std::string out, err;
  long peak_kib = 0;
  double seconds = 0;  ///< from start to end
  double busy = 0;     ///< of them the processor's, all threads together
};

/// A running yocou: stdin closed, stdout and stderr collected.
class Process {
 public:
  struct How {
    std::string out_file;     ///< stdout goes to this file instead of a pipe
    bool terminal = false;    ///< stdout is a terminal
    long file_limit = 0;      ///< bytes a written file may have; longer writes fail with an error
    bool bounded = false;     ///< 2 GiB of address space (not under sanitizers, which reserve terabytes)
    fs::path directory = {};  ///< to run in
  };
  explicit Process(const Words& arguments) : Process(arguments, How{}) {}
  Process(const Words& arguments, const How& how) {
    int out[2] = {-1, -1}, err[2];
    REQUIRE(pipe2(err, O_CLOEXEC) == 0);
    if (how.terminal) {
      REQUIRE(openpty(&out[0], &out[1], nullptr, nullptr, nullptr) == 0);
      termios raw{};
      tcgetattr(out[1], &raw);
      cfmakeraw(&raw);
      tcsetattr(out[1], TCSANOW, &raw);
      fcntl(out[0], F_SETFD, FD_CLOEXEC), fcntl(out[1], F_SETFD, FD_CLOEXEC);
    } else if (!how.out_file.empty()) {
      out[1] = open(how.out_file.c_str(), O_WRONLY | O_CREAT | O_CLOEXEC, 0644);
      REQUIRE(out[1] >= 0);
    } else {
      REQUIRE(pipe2(out, O_CLOEXEC) == 0);
    }
    std::vector<char*> argv;
    std::string program = YOCOU_PROGRAM;
    Words copy = arguments;
    argv.push_back(program.data());
    for (std::string& a : copy) argv.push_back(a.data());
    argv.push_back(nullptr);
    const std::string directory = how.directory.string();
    start_ = std::chrono::steady_clock::now();
    pid_ = fork();
    REQUIRE(pid_ >= 0);
    if (pid_ == 0) {
      ::close(0);
      dup2(out[1], 1), dup2(err[1], 2);
      if (how.file_limit) {
        const rlimit limit{static_cast<rlim_t>(how.file_limit), static_cast<rlim_t>(how.file_limit)};
        signal(SIGXFSZ, SIG_IGN), setrlimit(RLIMIT_FSIZE, &limit);
      }
      if (how.bounded && !sanitized) {
        const rlimit limit{rlim_t{2} << 30, rlim_t{2} << 30};
        setrlimit(RLIMIT_AS, &limit);
      }
      if (!directory.empty() && chdir(directory.c_str()) != 0) _exit(126);
      execv(argv[0], argv.data());
      _exit(127);
    }
    ::close(out[1]), ::close(err[1]);
    out_ = out[0], err_ = err[0];
  }
  Process(const Process&) = delete;
  Process& operator=(const Process&) = delete;
  ~Process() {
    if (!done_) ::kill(pid_, SIGKILL), finish();
  }

  /// Reads until `ready` holds or the program has closed its streams; false when patience ran out.
  bool read_until(const std::function<bool(const Result&)>& ready) {
    while (!ready(result_)) {
      if (out_ < 0 && err_ < 0) return true;
      const double left = patience - elapsed();
      if (left <= 0) return false;
      pollfd fds[2] = {{out_, POLLIN, 0}, {err_, POLLIN, 0}};
      if (poll(fds, 2, static_cast<int>(left * 1000) + 1) <= 0) continue;
      drain(fds[0], out_, result_.out), drain(fds[1], err_, result_.err);
    }
    return true;
  }
  void send(int signal) { ::kill(pid_, signal); }
  /// Waits until the program has taken over `signal`, as a busy machine may take long to get there.
  void await_handler(int signal) const {
    for (std::string line; elapsed() < patience; std::this_thread::sleep_for(std::chrono::milliseconds(5))) {
      std::ifstream status("/proc/" + std::to_string(pid_) + "/status");
      while (std::getline(status, line))
        if (line.rfind("SigCgt:", 0) == 0 && (std::stoull(line.substr(8), nullptr, 16) >> (signal - 1) & 1)) return;
    }
  }
  void close_stdout() { ::close(out_), out_ = -1; }
  Result& finish() {
    if (done_) return result_;
    result_.hung = !read_until([](const Result&) { return false; });
    if (result_.hung) ::kill(pid_, SIGKILL);
    int status = 0;
    rusage usage{};
    wait4(pid_, &status, 0, &usage);
    done_ = true;
    if (out_ >= 0) ::close(out_);
    if (err_ >= 0) ::close(err_);
    drop_progress(result_.err);
    result_.seconds = elapsed();
    result_.peak_kib = usage.ru_maxrss;
    for (const timeval& t : {usage.ru_utime, usage.ru_stime})
      result_.busy += static_cast<double>(t.tv_sec) + 1e-6 * static_cast<double>(t.tv_usec);
    if (WIFEXITED(status)) result_.status = WEXITSTATUS(status);
    if (WIFSIGNALED(status)) result_.signal = WTERMSIG(status);
    return result_;
  }

 private:
  double elapsed() const { return std::chrono::duration<double>(std::chrono::steady_clock::now() - start_).count(); }
  /// Takes out the progress lines ("score 51%, 2 s"), which a slow machine sees and a fast one does not.
  static void drop_progress(std::string& err) {
    std::istringstream lines(std::exchange(err, ""));
    for (std::string line; std::getline(lines, line);)
      if (line.find("%, ") == std::string::npos || !line.ends_with(" s")) err += line + (lines.eof() ? "" : "\n");
  }
  static void drain(const pollfd& from, int& fd, std::string& to) {
    if (fd < 0 || !(from.revents & (POLLIN | POLLHUP | POLLERR))) return;
    char buffer[65536];
    const ssize_t n = ::read(fd, buffer, sizeof buffer);  // a terminal whose program has gone gives EIO
    if (n > 0) to.append(buffer, static_cast<std::size_t>(n));
    else ::close(fd), fd = -1;
  }
  std::chrono::steady_clock::time_point start_;
  pid_t pid_ = -1;
  int out_ = -1, err_ = -1;
  bool done_ = false;
  Result result_;
};

Result yocou(const Words& arguments, const Process::How& how) { return Process(arguments, how).finish(); }
Result yocou(const Words& arguments) { return yocou(arguments, Process::How{}); }

std::string joined(const Words& words) {
  std::string all;
  for (const std::string& w : words) all += (all.empty() ? "" : " ") + (w.size() > 200 ? w.substr(0, 200) + "..." : w);
  return all;
}

/// One line on stderr, and no control character in it.
bool one_line(const std::string& err) {
  if (err.size() < 2 || err.back() != '\n') return false;
  for (std::size_t i = 0; i + 1 < err.size(); ++i)
    if (static_cast<unsigned char>(err[i]) < 32 || err[i] == 127) return false;
  return true;
}

/// Ends with `status`, says so in one line that holds all `needles`, and leaves stdout empty.
void refused(const Words& arguments, int status, const Words& needles, const Process::How& how) {
  const Result r = yocou(arguments, how);
  std::string wrong;
  if (r.hung) wrong += "hung; ";
  if (r.status != status) wrong += "exit " + std::to_string(r.status) + " signal " + std::to_string(r.signal) + "; ";
  if (!r.out.empty()) wrong += "wrote to stdout; ";
  if (!one_line(r.err) || r.err.rfind("yocou: ", 0) != 0) wrong += "not one line; ";
  if (r.err.size() > 1000) wrong += "a line of " + std::to_string(r.err.size()) + " bytes; ";
  for (const std::string& needle : needles)
    if (r.err.find(needle) == std::string::npos) wrong += "does not say '" + needle + "'; ";
  if (!sanitized && r.peak_kib > 400 * 1024) wrong += "took " + std::to_string(r.peak_kib) + " KiB; ";
  CAPTURE(joined(arguments), r.err.substr(0, 500), r.out.substr(0, 100));
  CHECK(wrong == "");
}
void refused(const Words& arguments, int status, const Words& needles = {}) {
  refused(arguments, status, needles, Process::How{});
}

/// Runs, must exit 0; its result.
Result good(const Words& arguments, const Process::How& how) {
  const Result r = yocou(arguments, how);
  CAPTURE(joined(arguments), r.signal, r.hung, r.err.substr(0, 500));
  REQUIRE(r.status == 0);
  return r;
}
Result good(const Words& arguments) { return good(arguments, Process::How{}); }
Json good_json(const Words& arguments) {
  const Result r = good(arguments);
  CAPTURE(joined(arguments), r.out.substr(0, 500));
  REQUIRE(Json::accept(r.out));  // also refuses text that is not UTF-8
  return Json::parse(r.out);
}

/// The keys of an object: all of `required`, besides those at most `extra`.
void has_keys(const Json& j, const std::set<std::string>& required, const std::set<std::string>& extra = {}) {
  std::set<std::string> missing = required, unexpected;
  for (const auto& [key, value] : j.items())
    if (!missing.erase(key) && !extra.count(key)) unexpected.insert(key);
  CAPTURE(j.dump().substr(0, 300));
  CHECK(missing == std::set<std::string>{});
  CHECK(unexpected == std::set<std::string>{});
}

// ---------------------------------------------------------------------------------------------------------------------
// Writing checkpoints, also wrong ones

/// JSON text in which a string "RAW:x" stands for the token x: for numbers that a JSON library would not write.
std::string raw(const Json& j) {
  std::string text = j.dump();
  for (std::size_t at; (at = text.find("\"RAW:")) != std::string::npos;) {
    const std::size_t end = text.find('"', at + 1);
    text.erase(end, 1).erase(at, 5);
  }
  return text;
}

/// A safetensors file in parts.
struct File {
  Json header = Json::object();
  std::string data;
  std::string bytes(const std::string& text) const {
    const std::uint64_t length = text.size();
    std::string all(8, '\0');
    std::memcpy(all.data(), &length, 8);
    return all + text + data;
  }
  std::string bytes() const {
    std::string text = raw(header);
    text.resize((text.size() + 7) / 8 * 8, ' ');
    return bytes(text);
  }
};

using Fill = std::function<float(const std::string& name, std::int64_t row, std::int64_t col)>;

/// Small numbers that differ.
float noise(const std::string& name, std::int64_t row, std::int64_t col) {
  std::uint64_t z =
      std::hash<std::string>()(name) + static_cast<std::uint64_t>(row * 1000003 + col) * 0x9e3779b97f4a7c15u;
  z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u, z ^= z >> 27;
  if (name.find("norm") != std::string::npos) return 1;
  return static_cast<float>(z % 2001) / 1000.f - 1.f;
}

/// YOCO-U with head_dim 4: two window layers three times, two shared layers.
Json config_of(std::int64_t dim = 8, std::int64_t vocab = 256) {
  return Json{{"arch", "yoco-u"}, {"vocab_size", vocab}, {"dim", dim}, {"heads", 2}, {"kv_heads", 1}, {"head_dim", 4},
      {"ffn_dim", 12},
      {"stages", {{{"name", "self"}, {"layers", 2}, {"loops", 3}, {"attention", "window"}, {"window", 4}},
                     {{"name", "cross"}, {"layers", 2}, {"attention", "shared"}}}}};
}
Json moe_config() {
  Json c = config_of();
  c.erase("ffn_dim");
  c["moe"] = {{"experts", 4}, {"active", 2}, {"dim", 6}, {"shared_dim", 5}, {"normalize", true}};
  return c;
}

/// The file of a config, F32, its numbers from `fill`; a matrix's rows count through all dimensions but the last.
File checkpoint(const Json& c, const Fill& fill = noise) {
  File f;
  f.header["__metadata__"] = {{"yocou", raw(c)}};
  const auto add = [&](const std::string& name, const std::vector<std::int64_t>& shape) {
    std::int64_t rows = 1;
    for (std::size_t i = 0; i + 1 < shape.size(); ++i) rows *= shape[i];
    const std::size_t begin = f.data.size();
    for (std::int64_t r = 0; r < rows; ++r)
      for (std::int64_t col = 0; col < shape.back(); ++col) {
        const float v = fill(name, r, col);
        f.data.append(reinterpret_cast<const char*>(&v), 4);
      }
    f.header[name] = {{"dtype", "F32"}, {"shape", shape}, {"data_offsets", {begin, f.data.size()}}};
  };
  const std::int64_t D = c["dim"], V = c["vocab_size"], q = c["heads"].get<std::int64_t>() * c["head_dim"].get<int>(),
                     kv = c["kv_heads"].get<std::int64_t>() * c["head_dim"].get<int>();
  const auto ffn = [&](const std::string& at, std::int64_t F) {
    add(at + "w_gate", {F, D}), add(at + "w_up", {F, D}), add(at + "w_down", {D, F});
  };
  add("embed", {V, D});
  bool global = false;
  for (const Json& s : c["stages"])
    for (int i = 0; i < s["layers"].get<int>(); ++i) {
      const std::string at = s["name"].get<std::string>() + "." + std::to_string(i) + ".";
      const bool shared = s["attention"] == "shared";
      global = global || shared;
      add(at + "attn_norm", {D}), add(at + "wq", {q, D});
      if (!shared) add(at + "wk", {kv, D}), add(at + "wv", {kv, D});
      add(at + "wo", {D, q}), add(at + "ffn_norm", {D});
      if (!c.contains("moe")) {
        ffn(at, c["ffn_dim"]);
        continue;
      }
      const std::int64_t E = c["moe"]["experts"], Fe = c["moe"]["dim"], Fs = c["moe"].value("shared_dim", 0);
      add(at + "router", {E, D});
      add(at + "experts.w_gate", {E, Fe, D}), add(at + "experts.w_up", {E, Fe, D});
      add(at + "experts.w_down", {E, D, Fe});
      if (Fs) ffn(at + "shared.", Fs);
    }
  if (global) add("kv_norm", {D}), add("kv.wk", {kv, D}), add("kv.wv", {kv, D});
  add("norm", {D});
  if (!c.value("tied_embeddings", false)) add("head", {V, D});
  return f;
}

bool ends_with(const std::string& s, const std::string& end) {
  return s.size() >= end.size() && s.compare(s.size() - end.size(), end.size(), end) == 0;
}

/// CONST: nothing is added to the state and all embeddings are alike, so `logits` is every position's distribution.
std::string constant_model(const std::string& name, const std::function<float(int token)>& logits, int vocab = 256) {
  return write_file(
      name, checkpoint(config_of(8, vocab), [&](const std::string& tensor, std::int64_t r, std::int64_t c) {
        if (ends_with(tensor, ".wo") || ends_with(tensor, ".w_down")) return 0.f;
        if (tensor == "embed") return 1.f;
        if (tensor == "head") return c == 0 ? logits(static_cast<int>(r)) : 0.f;
        return noise(tensor, r, c);
      }).bytes());
}

/// Writes text[0], then each byte of `text` after the one before it; behind any other byte, text[0].
std::string script_model(const std::string& name, const std::string& text) {
  const auto byte = [&](std::size_t i) { return static_cast<unsigned char>(text[i % text.size()]); };
  return write_file(name, checkpoint(config_of(256), [&](const std::string& tensor, std::int64_t r, std::int64_t c) {
    if (ends_with(tensor, ".wo") || ends_with(tensor, ".w_down")) return 0.f;
    if (tensor == "embed") return r == c ? 1.f : 0.f;
    if (tensor != "head") return noise(tensor, r, c);
    bool written = false;
    for (std::size_t i = 0; i < text.size(); ++i) {
      if (byte(i) == c && byte(i + 1) == r) return 1.f;
      written = written || byte(i) == c;
    }
    return !written && r == byte(0) ? 1.f : 0.f;
  }).bytes());
}

/// A model whose greedy text and sampled text are not trivial.
const std::string& random_model() {
  static const std::string path = write_file("random.safetensors", checkpoint(config_of()).bytes());
  return path;
}
/// The same with logits about 1, so that sampling draws from many bytes.
const std::string& mild_model() {
  static const std::string path =
      write_file("mild.safetensors", checkpoint(config_of(), [](const std::string& n, std::int64_t r, std::int64_t c) {
        return n == "head" ? noise(n, r, c) * 0.5f : noise(n, r, c);
      }).bytes());
  return path;
}

/// What every command that takes a checkpoint says of a bad one.
void bad_file(const std::string& path, const Words& needles) {
  Words all = needles;
  all.push_back(path.substr(0, 60));
  Process::How how;
  how.bounded = true;
  refused({"show", path}, 1, all, how);
  refused({"generate", path, "-p", "a", "-n", "1"}, 1, all, how);
}

}  // namespace

// =====================================================================================================================

TEST_CASE("cli: help and version", "[cli][portable]") {
  CHECK(good({"--version"}).out.rfind("yocou ", 0) == 0);
  const std::string all = good({"--help"}).out;
  for (const char* command :
      {"generate", "score", "eval", "logits", "trace", "cost", "verify", "bench", "init", "show"}) {
    CHECK(all.find(command) != std::string::npos);
    CHECK(good({command, "--help"}).out.find("Example: yocou") != std::string::npos);
  }
}

TEST_CASE("cli: wrong usage is exit 2, one line, nothing on stdout", "[cli]") {
  const std::string m = random_model(), text = write_file("text", "some text to score");
  const Words g = {"generate", m, "-p", "a", "-n", "2"};
  const auto with = [](Words base, const Words& more) {
    base.insert(base.end(), more.begin(), more.end());
    return base;
  };
  refused({}, 2);
  refused({"nonsense"}, 2, {"nonsense"});
  refused({"generate"}, 2);
  refused({"generate", m, "-p"}, 2);
  refused({"generate", m}, 2, {"prompt"});
  refused(with(g, {"--nonsense"}), 2, {"nonsense"});
  refused(with(g, {"extra"}), 2, {"extra"});
  refused(with(g, {"-p", "again"}), 2, {"prompt"});
  refused(with(g, {"--prompt-file", text}), 2, {"prompt-file"});
  for (const char* bad : {"0", "-1", "1.5", "x", "", "99999999999999999999", "1e3"})
    refused(with(g, {"--chunk", bad}), 2, {"--chunk"});
  for (const char* bad : {"0", "4097", "-1", "1000000000", "1,2", "x", "2.5"})
    refused(with(g, {"--loops", bad}), 2, {"--loops"});
  for (const char* bad : {"0", "1.5", "-0.5", "nan", "inf", "x", "1.0000001"})
    refused(with(g, {"--top-p", bad}), 2, {"--top-p"});
  for (const char* bad : {"-1", "nan", "inf", "-inf", "x", "", "1e400"})
    refused(with(g, {"--temperature", bad}), 2, {"--temperature"});
  for (const char* bad : {"-1", "x", "1.5", "18446744073709551616", "99999999999999999999999"})
    refused(with(g, {"--seed", bad}), 2, {"--seed"});
  for (const char* bad : {"-1", "x", "1.5"}) refused(with(g, {"--top-k", bad}), 2, {"--top-k"});
  for (const char* bad : {"-1", "x", "1.5", "4294967297", "99999999999999999999"})
    refused({"generate", m, "-p", "a", "-n", bad}, 2);
  refused(with(g, {"--threads", "-1"}), 2, {"--threads"});
  refused(with(g, {"--device", "gpu"}), 2, {"--device"});
  refused(with(g, {"--kv-dtype", "f16"}), 2, {"--kv-dtype"});

  const Words l = {"logits", m, "--tokens", "1,2,3"};
  refused({"logits", m}, 2, {"--tokens"});
  refused(with(l, {"--tokens-file", text}), 2, {"--tokens"});
  for (const char* bad : {"0", "-1", "99", "4"}) refused(with(l, {"--prefill", bad}), 2, {"--prefill"});

  for (const char* bad : {"0", "x", "1,0", "1,,2", "5000", "", ","})
    refused({"score", m, text, "--loops", bad}, 2, {"--loops"});
  refused({"score", m}, 2);
  refused({"eval", m}, 2);
  refused({"trace", m}, 2, {"prompt"});

  for (const std::string command : {"cost", "verify", "bench"}) {
    refused({command, "--arch", "nonsense"}, 2, {"nonsense"});
    refused({command, "--arch", ""}, 2, {"--arch"});
    refused({command, "--arch", "yoco-u,,yoco"}, 2, {"--arch"});
    refused({command, "--shape", "nonsense"}, 2, {"nonsense"});
    for (const char* bad : {"0", "-1", "1.5", "x", "1,x", "", "99999999999999999999"})
      refused({command, "--arch", "yoco-u", "-N", bad}, 2, {"-N"});
    refused({command, "--batch", "0"}, 2, {"--batch"});
    refused({command, "--arch", "transformer", "--loops", "2"}, 2, {"--loops"});
    refused({command, "--arch", "yoco", "--loops", "2"}, 2, {"--loops"});
    for (const char* arch : {"transformer", "ut", "rins"})
      refused({command, "--arch", arch, "--window", "8"}, 2, {"--window"});
    for (const char* arch : {"yoco-u", "yoco", "rins", "upper-loop", "upper-loop-unshared"})
      refused({command, "--arch", arch, "--layers", "5"}, 2, {"--layers"});
    refused({command, "--arch", "yoco-u", "--layers", "0"}, 2, {"--layers"});
    refused({command, "--arch", "yoco-u", "--window", "0"}, 2, {"--window"});
    refused({command, m, "--shape", "tiny"}, 2, {"MODEL"});
    refused({command, "--json", "--csv"}, 2);
  }
  for (const char* bad : {"x", "-1GB", "0", "5PB", "nan", "inf", "", "1e30GB"})
    refused({"cost", "--memory", bad}, 2, {"--memory"});
  refused({"verify", "--steps", "0"}, 2, {"--steps"});
  refused({"bench", "--runs", "0"}, 2, {"--runs"});
  refused({"init", "--shape", "tiny"}, 2);
  refused({"init", "-o", in_folder("x")}, 2, {"--shape"});
  refused({"init", "--shape", "tiny", "--dtype", "f64", "-o", in_folder("x")}, 2, {"--dtype"});
  refused({"init", "--shape", "tiny", "--arch", "yoco-u,yoco", "-o", in_folder("x")}, 2, {"--arch"});
  refused({"init", "--shape", "tiny", "--arch", "transformer", "--loops", "2", "-o", in_folder("x")}, 2, {"--loops"});
  CHECK(!fs::exists(in_folder("x")));
  refused({"show"}, 2);
  refused({"show", m, m}, 2);

  Json plain = config_of();  // a checkpoint without a looped stage
  plain["arch"] = "yoco", plain["stages"][0]["loops"] = 1;
  const std::string yoco = write_file("yoco.safetensors", checkpoint(plain).bytes());
  refused({"generate", yoco, "-p", "a", "--loops", "2"}, 2, {"--loops"});
  refused({"score", yoco, text, "--loops", "2"}, 2, {"--loops"});
}

TEST_CASE("cli: integers are decimal", "[cli]") {
  const auto n = [](const char* value) {
    return good({"generate", random_model(), "-p", "a", "-n", value}).out.size();
  };
  CHECK(n("16") == 16);
  const Result octal = yocou({"generate", random_model(), "-p", "a", "-n", "010"});  // ten, or refused; never eight
  CHECK((octal.status == 2 || octal.out.size() == 10));
  const Result hex = yocou({"generate", random_model(), "-p", "a", "-n", "0x10"});
  CHECK(hex.status == 2);
}

TEST_CASE("cli: files that are none", "[cli]") {
  const std::string m = random_model(), fifo = in_folder("fifo");
  REQUIRE(mkfifo(fifo.c_str(), 0600) == 0);
  const std::string missing = in_folder("missing"), directory = folder().string();
  for (const std::string& path : {missing, directory, fifo, std::string("/dev/null"), std::string("/dev/zero")}) {
    bad_file(path, {});
    refused({"generate", m, "--prompt-file", path}, 1);
    refused({"score", m, path}, 1, {path});
    refused({"eval", m, path}, 1, {path});
    refused({"logits", m, "--tokens-file", path}, 1, {path});
    for (const char* command : {"cost", "verify", "bench"}) refused({command, path}, 1, {path});
  }
  refused({"show", ""}, 1);
  refused({"show", std::string(10000, 'x')}, 1);
  refused({"show", "a\nb\x1b[2J"}, 1);
  fs::remove(fifo);
}

TEST_CASE("cli: malformed headers", "[cli]") {
  const File f = checkpoint(config_of());
  const std::string whole = f.bytes();
  const auto length = [&](std::uint64_t n) {
    std::string bytes = whole;
    std::memcpy(bytes.data(), &n, 8);
    return bytes;
  };
  const auto text = [&](const std::string& header) {
    return f.bytes(header + std::string(7 - (header.size() + 7) % 8, ' '));
  };
  const std::string header = raw(f.header);
  const auto replaced = [&](const std::string& from, const std::string& to) {
    std::string h = header;
    REQUIRE(h.find(from) != std::string::npos);
    return text(h.replace(h.find(from), from.size(), to));
  };
  good({"show", write_file("whole.safetensors", whole)});

  struct Case {
    const char* what;
    std::string bytes;
    Words needles;
  };
  const std::vector<Case> cases = {
      {"no byte", "", {"0"}},
      {"7 bytes", std::string(7, '\0'), {"7"}},
      {"8 bytes", std::string(8, '\0'), {}},
      {"8 bytes of FF", std::string(8, '\xff'), {"header", "18446744073709551615"}},
      {"length of all ones", length(~std::uint64_t{0}), {"header", "18446744073709551615"}},
      {"length 2^63", length(std::uint64_t{1} << 63), {"header", "9223372036854775808"}},
      {"length 2^63 - 1", length((std::uint64_t{1} << 63) - 1), {"header"}},
      {"length 2^32", length(std::uint64_t{1} << 32), {"header", "4294967296"}},
      {"length file - 7", length(whole.size() - 7), {"header"}},
      {"length file - 8", length(whole.size() - 8), {"header"}},
      {"length 0", length(0), {"header"}},
      {"length 1", length(1), {"header"}},
      {"length cut", length(header.size() / 2), {"header", "JSON"}},
      {"not JSON", text("hello"), {"header", "JSON"}},
      {"an array", text("[]"), {"header", "object"}},
      {"a number", text("1"), {"header", "object"}},
      {"two values", text("{}{}"), {"header"}},
      {"empty object", text("{}"), {"__metadata__"}},
      {"NUL", text(std::string(16, '\0')), {"header"}},
      {"invalid UTF-8", replaced("\"norm\"", "\"no\xff\xferm\""), {"header"}},
      {"deep arrays", text(std::string(100000, '[')), {"header", "deep"}},
      {"deep objects", text([] {
         std::string s;
         for (int i = 0; i < 50000; ++i) s += "{\"a\":";
         return s;
       }()),
          {"header", "deep"}},
      {"many keys", text([] {
         std::string keys = "{\"k\":0";
         for (int k = 0; k < 200'000; ++k) keys += ",\"k" + std::to_string(k) + "\":0";
         return keys + "}";
       }()),
          {"header", "keys"}},
      {"many values", text([] {
         std::string values = "[0";
         for (int k = 0; k < 8'000'000; ++k) values += ",0";
         return values + "]";
       }()),
          {"header", "values"}},
      {"a long token", text("{\"" + std::string(10'000'000, 'x')), {"header"}},
      {"control characters in a token", text("{\"\x1b[2J\n\": 1}"), {"header"}},
      {"duplicate tensor", replaced("\"norm\":", "\"embed\":"), {"duplicate", "embed"}},
      {"duplicate metadata", replaced("\"norm\":", "\"__metadata__\":"), {"duplicate", "__metadata__"}},
      {"duplicate key in a tensor", replaced("\"dtype\":\"F32\"", "\"dtype\":\"F32\",\"dtype\":\"F32\""),
          {"duplicate", "dtype"}},
      {"metadata not an object",
          [&] {
            File g = f;
            g.header["__metadata__"] = 5;
            return g.bytes();
          }(),
          {"__metadata__"}},
      {"no config",
          [&] {
            File g = f;
            g.header["__metadata__"] = {{"format", "pt"}};
            return g.bytes();
          }(),
          {"yocou"}},
      {"config not a string",
          [&] {
            File g = f;
            g.header["__metadata__"] = {{"yocou", {{"a", 1}}}};
            return g.bytes();
          }(),
          {"yocou"}},
      {"no metadata",
          [&] {
            File g = f;
            g.header.erase("__metadata__");
            return g.bytes();
          }(),
          {"__metadata__"}},
      {"config not JSON",
          [&] {
            File g = f;
            g.header["__metadata__"]["yocou"] = "{";
            return g.bytes();
          }(),
          {"config"}},
      {"config deep",
          [&] {
            File g = f;
            g.header["__metadata__"]["yocou"] = std::string(100000, '[');
            return g.bytes();
          }(),
          {"config", "deep"}},
      {"config an array",
          [&] {
            File g = f;
            g.header["__metadata__"]["yocou"] = "[]";
            return g.bytes();
          }(),
          {"config", "object"}},
      {"10 bytes cut", whole.substr(0, whole.size() - 10), {"head"}},
      {"10 bytes added", whole + std::string(10, 'x'), {}},
      {"data missing", whole.substr(0, whole.size() - f.data.size()), {}},
      {"unaligned data", f.bytes(header + std::string(8 - header.size() % 8 + 1, ' ')), {"align"}},
  };
  for (const Case& c : cases) {
    INFO(c.what);
    bad_file(write_file("bad.safetensors", c.bytes), c.needles);
  }
  SECTION("every cut of the file, and of its header") {
    for (std::size_t n = 0; n < whole.size(); n += n < 40 || n + 40 > whole.size() ? 1 : whole.size() / 40) {
      const Result r = yocou({"show", write_file("bad.safetensors", whole.substr(0, n))});
      CAPTURE(n, r.err);
      CHECK((r.status == 1 && r.out.empty() && one_line(r.err)));
    }
  }
}

TEST_CASE("cli: malformed tensors", "[cli]") {
  const File f = checkpoint(config_of());
  struct Case {
    const char* what;
    std::function<void(File&)> change;
    Words needles;
  };
  const auto offsets = [](const char* tensor, Json begin, Json end) {
    return [=](File& g) { g.header[tensor]["data_offsets"] = {begin, end}; };
  };
  const auto moved = [](const char* tensor, int begin, int end) {
    return [=](File& g) {
      Json& o = g.header[tensor]["data_offsets"];
      o = {o[0].get<int>() + begin, o[1].get<int>() + end};
    };
  };
  const auto shape = [](const char* tensor, Json s) { return [=](File& g) { g.header[tensor]["shape"] = s; }; };
  const auto field = [](const char* tensor, const char* key, Json v) {
    return [=](File& g) { g.header[tensor][key] = v; };
  };
  const std::vector<Case> cases = {
      {"4 bytes for 8192", offsets("embed", 0, 4), {"embed", "8192", "4"}},
      {"reversed", offsets("embed", 8192, 0), {"embed"}},
      {"beyond the file", offsets("embed", 0, 1 << 30), {"embed"}},
      {"beyond 2^63", offsets("embed", 0, "RAW:9223372036854775808"), {"embed"}},
      {"beyond 2^64", offsets("embed", 0, "RAW:18446744073709551616"), {"embed"}},
      {"beyond 2^128", offsets("embed", 0, "RAW:" + std::string(60, '9')), {"embed"}},
      {"begin near 2^64", offsets("embed", "RAW:18446744073709551608", 8184), {"embed"}},
      {"negative", offsets("embed", -1, 8191), {"embed"}},
      {"fraction", offsets("embed", 0, 8192.5), {"embed"}},
      {"float", offsets("embed", 0, 1.5), {"embed"}},
      {"string", offsets("embed", "0", "8192"), {"embed"}},
      {"null", offsets("embed", nullptr, 8192), {"embed"}},
      {"one offset", field("embed", "data_offsets", {0}), {"embed"}},
      {"three offsets", field("embed", "data_offsets", {0, 1, 2}), {"embed"}},
      {"offsets no list", field("embed", "data_offsets", 0), {"embed"}},
      {"1 byte overlap", moved("self.0.wq", -1, -1), {"self.0.wq"}},
      {"4 byte overlap", moved("self.0.wq", -4, -4), {"self.0.wq", "overlap"}},
      {"1 byte gap", moved("head", 1, 1), {"head"}},
      {"4 byte gap",
          [](File& g) {
            Json& o = g.header["head"]["data_offsets"];
            o = {o[0].get<int>() + 4, o[1].get<int>() + 4}, g.data += "1234";
          },
          {"head", "gap"}},
      {"the same bytes twice",
          [](File& g) { g.header["self.0.wk"]["data_offsets"] = g.header["self.0.wv"]["data_offsets"]; }, {"self.0.w"}},
      {"shape overflows 64 bits", shape("embed", {std::int64_t{1} << 32, std::int64_t{1} << 32}), {"embed"}},
      {"shape overflows to the right size", shape("embed", {"RAW:9223372036854775807", 2}), {"embed"}},
      {"shape beyond 2^64", shape("embed", {"RAW:18446744073709551616", 8}), {"embed"}},
      {"shape beyond 2^128", shape("embed", {"RAW:" + std::string(50, '9'), 8}), {"embed"}},
      {"zero size", shape("embed", {0, 8}), {"embed"}},
      {"zero size and no bytes",
          [](File& g) {
            g.header["more"] = {{"dtype", "F32"}, {"shape", {0}}, {"data_offsets", {0, 0}}};
          },
          {"more"}},
      {"negative size", shape("embed", {-256, -8}), {"embed"}},
      {"fractional size", shape("embed", {256.5, 8}), {"embed"}},
      {"size a string", shape("embed", {"256", 8}), {"embed"}},
      {"no dimension", shape("embed", Json::array()), {"embed"}},
      {"4 dimensions", shape("embed", {256, 8, 1, 1}), {"embed"}},
      {"10^5 dimensions", [](File& g) { g.header["embed"]["shape"] = std::vector<int>(100000, 1); }, {"embed"}},
      {"shape no list", field("embed", "shape", 2048), {"embed"}},
      {"transposed", shape("embed", {8, 256}), {"embed", "[256,8]", "[8,256]"}},
      {"flat", shape("embed", {2048}), {"embed", "[256,8]", "[2048]"}},
      {"half as wide", field("embed", "dtype", "BF16"), {"embed", "4096", "8192"}},
      {"unknown dtype", field("embed", "dtype", "F8_E4M3"), {"embed", "F8_E4M3"}},
      {"integers", field("embed", "dtype", "I32"), {"embed", "I32"}},
      {"lower case", field("embed", "dtype", "f32"), {"embed", "f32"}},
      {"dtype a number", field("embed", "dtype", 5), {"embed", "dtype"}},
      {"no dtype", [](File& g) { g.header["embed"].erase("dtype"); }, {"embed", "dtype"}},
      {"no shape", [](File& g) { g.header["embed"].erase("shape"); }, {"embed", "shape"}},
      {"no offsets", [](File& g) { g.header["embed"].erase("data_offsets"); }, {"embed", "data_offsets"}},
      {"unknown field", field("embed", "strides", {8, 1}), {"embed", "strides"}},
      {"tensor a number", [](File& g) { g.header["embed"] = 5; }, {"embed", "object"}},
      {"missing",
          [](File& g) {
            g.header.erase("head");
            g.data.resize(g.data.size() - 8192);
          },
          {"head", "[256,8]"}},
      {"extra",
          [](File& g) {
            g.header["more"] = {{"dtype", "F32"}, {"shape", {1}}, {"data_offsets", {g.data.size(), g.data.size() + 4}}};
            g.data += "1234";
          },
          {"more"}},
      {"extra, with control characters",
          [](File& g) {
            g.header["\x1b[2J\n\r\x7f\xc2\x9b"] = {
                {"dtype", "F32"}, {"shape", {1}}, {"data_offsets", {g.data.size(), g.data.size() + 4}}};
            g.data += "1234";
          },
          {}},
      {"extra, with a very long name",
          [](File& g) {
            g.header[std::string(1'000'000, 'n')] = {
                {"dtype", "F32"}, {"shape", {1}}, {"data_offsets", {g.data.size(), g.data.size() + 4}}};
            g.data += "1234";
          },
          {"nnnn"}},
      {"misshapen",
          [](File& g) {
            g.header["self.1.wo"]["shape"] = {4, 16};
          },
          {"self.1.wo", "[8,8]", "[4,16]"}},
  };
  for (const Case& c : cases) {
    INFO(c.what);
    File g = f;
    c.change(g);
    bad_file(write_file("bad.safetensors", g.bytes()), c.needles);
  }
}

TEST_CASE("cli: configs that break a rule", "[cli]") {
  struct Case {
    const char* what;
    std::function<void(Json&)> change;
    Words needles;
    bool moe = false;
  };
  std::vector<Case> cases;
  const auto set = [](const std::string& key, const Json& v) { return [=](Json& c) { c[key] = v; }; };
  const auto stage = [](int s, const std::string& key, const Json& v) {
    return [=](Json& c) { c["stages"][static_cast<std::size_t>(s)][key] = v; };
  };
  const auto moe = [](const std::string& key, const Json& v) { return [=](Json& c) { c["moe"][key] = v; }; };
  const std::vector<Json> no_size = {0, -1, -4, 1.5, "4", nullptr, true, Json::array(), "RAW:2147483648",
      "RAW:9223372036854775808", "RAW:18446744073709551617", "RAW:340282366920938463463374607431768211457"};
  for (const char* key : {"vocab_size", "dim", "heads", "kv_heads", "head_dim", "ffn_dim"}) {
    for (const Json& v : no_size) cases.push_back({key, set(key, v), {key}});
    cases.push_back({key, [=](Json& c) { c.erase(key); }, {key}});
    cases.push_back({key, set(key, "RAW:1e400"), {"1e400"}});
  }
  for (const Json& v : no_size) {
    cases.push_back({"layers", stage(0, "layers", v), {"layers"}});
    cases.push_back({"loops", stage(0, "loops", v), {"loops"}});
    cases.push_back({"window", stage(0, "window", v), {"window"}});
    cases.push_back({"experts", moe("experts", v), {"experts"}, true});
    cases.push_back({"active", moe("active", v), {"active"}, true});
    cases.push_back({"expert dim", moe("dim", v), {"dim"}, true});
    if (v != 0) cases.push_back({"shared_dim", moe("shared_dim", v), {"shared_dim"}, true});
  }
  for (const char* key : {"norm_eps", "rope_theta", "embed_scale"})
    for (const Json& v :
        {Json(-1), Json(-1e-9), Json("1"), Json(nullptr), Json(true), Json(Json::array()), Json("RAW:1e39")})
      if (!(v == "RAW:1e39" && std::string(key) == "rope_theta")) cases.push_back({key, set(key, v), {key}});
  const std::vector<Case> more = {
      {"rope_theta 0", set("rope_theta", 0), {"rope_theta"}},
      {"NaN", set("norm_eps", "RAW:NaN"), {"config"}},
      {"Infinity", set("norm_eps", "RAW:Infinity"), {"config"}},
      {"eps 1e400", set("norm_eps", "RAW:1e400"), {"1e400"}},
      {"unknown key", set("dropout", 0.1), {"dropout"}},
      {"unknown key with control characters", set("a\x1b[2J\nb", 1), {}},
      {"unknown key in a stage", stage(0, "dilation", 2), {"dilation"}},
      {"unknown key in moe", moe("capacity", 2), {"capacity"}, true},
      {"unknown arch", set("arch", "gpt"), {"gpt"}},
      {"arch missing", [](Json& c) { c.erase("arch"); }, {"arch"}},
      {"unknown tokenizer", set("tokenizer", "bpe"), {"tokenizer", "bpe"}},
      {"unknown rope_pairing", set("rope_pairing", "pairs"), {"rope_pairing", "pairs"}},
      {"unknown attention", stage(0, "attention", "sparse"), {"attention", "sparse"}},
      {"attention missing", [](Json& c) { c["stages"][0].erase("attention"); }, {"attention"}},
      {"name missing", [](Json& c) { c["stages"][0].erase("name"); }, {"name"}},
      {"layers missing", [](Json& c) { c["stages"][0].erase("layers"); }, {"layers"}},
      {"window missing", [](Json& c) { c["stages"][0].erase("window"); }, {"window"}},
      {"window on shared", stage(1, "window", 4), {"window"}},
      {"refresh_kv on window", stage(0, "refresh_kv", false), {"refresh_kv"}},
      {"refresh_kv a number", stage(1, "refresh_kv", 1), {"refresh_kv"}},
      {"rope a string", stage(0, "rope", "yes"), {"rope"}},
      {"tied a number", set("tied_embeddings", 1), {"tied_embeddings"}},
      {"heads not a multiple", [](Json& c) { c["heads"] = 3, c["kv_heads"] = 2; }, {"heads", "3", "2"}},
      {"more kv_heads than heads", set("kv_heads", 4), {"heads"}},
      {"odd head_dim with rope", set("head_dim", 5), {"head_dim", "5"}},
      {"loops 10^9", stage(0, "loops", 1000000000), {"loops"}},
      {"layers 4097", stage(0, "layers", 4097), {"layers"}},
      {"loops 4097", stage(0, "loops", 4097), {"loops"}},
      {"4096 layers, few tensors", stage(0, "layers", 4096), {}},
      {"no stages", set("stages", Json::array()), {"stages"}},
      {"stages missing", [](Json& c) { c.erase("stages"); }, {"stages"}},
      {"stages an object", set("stages", Json::object()), {"stages"}},
      {"stage a number", set("stages", {1}), {"stage"}},
      {"shared first",
          [](Json& c) {
            std::swap(c["stages"][0], c["stages"][1]);
            c["arch"] = "custom";
          },
          {"shared"}},
      {"two shared",
          [](Json& c) {
            c["stages"][0] = c["stages"][1];
            c["stages"][0]["name"] = "other";
            c["arch"] = "custom";
          },
          {"shared"}},
      {"name with a dot", stage(0, "name", "a.b"), {"name", "a.b"}},
      {"name kv", stage(0, "name", "kv"), {"name", "kv"}},
      {"name empty", stage(0, "name", ""), {"name"}},
      {"name twice", stage(0, "name", "cross"), {"cross"}},
      {"name with control characters", [](Json& c) { c["stages"][0]["name"] = "a\x1b[2Jb\n"; }, {"name"}},
      {"name with a C1 control",
          [](Json& c) {
            c["stages"][0]["name"] =
                "a\xc2\x9b"
                "2Jb";
          },
          {"name"}},
      {"name a number", stage(0, "name", 7), {"name"}},
      {"ffn_dim and moe", set("ffn_dim", 12), {"ffn_dim", "moe"}, true},
      {"neither ffn_dim nor moe", [](Json& c) { c.erase("moe"); }, {"ffn_dim"}, true},
      {"moe a number", set("moe", 4), {"moe"}, true},
      {"more active than experts", moe("active", 5), {"active", "5", "4"}, true},
      {"normalize a string", moe("normalize", "yes"), {"normalize"}, true},
      {"label: kinds", [](Json& c) { c["stages"][0]["attention"] = "full", c["stages"][0].erase("window"); },
          {"arch", "yoco-u"}},
      {"label: too few stages", [](Json& c) { c["stages"].erase(1); }, {"arch", "yoco-u"}},
      {"label: loops of the other stage", stage(1, "loops", 2), {"arch", "yoco-u"}},
      {"label: refresh_kv", stage(1, "refresh_kv", true), {"arch", "yoco-u"}},
      {"label: yoco loops", set("arch", "yoco"), {"arch", "yoco"}},
      {"label: transformer", set("arch", "transformer"), {"arch", "transformer"}},
  };
  cases.insert(cases.end(), more.begin(), more.end());
  const File dense = checkpoint(config_of()), mixture = checkpoint(moe_config());
  good({"show", write_file("good.safetensors", mixture.bytes())});
  for (const Case& c : cases) {
    Json config = c.moe ? moe_config() : config_of();
    c.change(config);
    INFO(c.what << " " << raw(config));
    File g = c.moe ? mixture : dense;
    g.header["__metadata__"]["yocou"] = raw(config);
    Words needles = c.needles;
    needles.push_back("bad.safetensors");
    refused({"show", write_file("bad.safetensors", g.bytes())}, 1, needles);
  }
  SECTION("duplicate keys") {
    for (const auto& [from, to] : std::vector<std::pair<std::string, std::string>>{
             {"\"heads\":", "\"dim\":8,\"heads\":"}, {"\"layers\":", "\"name\":\"x\",\"layers\":"}}) {
      File g = dense;
      std::string text = raw(config_of());
      g.header["__metadata__"]["yocou"] = text.replace(text.find(from), from.size(), to);
      bad_file(write_file("bad.safetensors", g.bytes()), {"duplicate"});
    }
  }
  SECTION("windows and loops that no machine holds") {
    Json config = config_of();
    config["stages"][0]["window"] = 2147483647, config["stages"][0]["loops"] = 4096;
    const std::string path = write_file("large.safetensors", checkpoint(config).bytes());
    good({"show", path});
    refused({"generate", path, "-p", "a", "-n", "1"}, 1, {"memory", "562949953"});  // 2 G dh s x layers x loops x W
    refused({"verify", path, "-N", "1"}, 1, {"memory"});
  }
}

TEST_CASE("cli: tied and untied heads", "[cli]") {
  for (const bool moe : {false, true}) {
    Json untied = moe ? moe_config() : config_of(), tied = untied;
    tied["tied_embeddings"] = true;
    const File with = checkpoint(untied), without = checkpoint(tied);
    File g = with;  // tied, but a head in the file
    g.header["__metadata__"]["yocou"] = raw(tied);
    bad_file(write_file("bad.safetensors", g.bytes()), {"head", "tied"});
    g = without;  // untied, but none
    g.header["__metadata__"]["yocou"] = raw(untied);
    bad_file(write_file("bad.safetensors", g.bytes()), {"head"});
    // a head that is a copy of the embedding gives what a tied one does
    const File copied = checkpoint(untied,
        [](const std::string& n, std::int64_t r, std::int64_t c) { return noise(n == "head" ? "embed" : n, r, c); });
    const std::string a = write_file("tied.safetensors", without.bytes()),
                      b = write_file("copy.safetensors", copied.bytes());
    CHECK(good({"logits", a, "--tokens", "1,2,3,250"}).out == good({"logits", b, "--tokens", "1,2,3,250"}).out);
  }
}

TEST_CASE("cli: NaN and infinity are named when they reach the logits", "[cli][portable]") {
  const float nan = std::numeric_limits<float>::quiet_NaN(), inf = std::numeric_limits<float>::infinity();
  for (const float bad : {nan, inf, -inf})
    for (const char* tensor : {"embed", "self.0.wq", "self.1.w_down", "cross.0.wo", "kv.wv", "norm", "head"}) {
      const std::string path = write_file(
          "bad.safetensors", checkpoint(config_of(), [&](const std::string& n, std::int64_t r, std::int64_t c) {
            return n == tensor && c == 1 ? bad : noise(n, r, c);
          }).bytes());
      INFO(tensor << " " << bad);
      refused({"generate", path, "-p", "abc", "-n", "2"}, 1, {"finite"});
      refused({"score", path, write_file("text", "abc")}, 1, {"finite"});
      refused({"logits", path, "--tokens", "1,2"}, 1, {"finite"});
    }
  // a row that nothing reads is not looked at
  const std::string unused = write_file(
      "unused.safetensors", checkpoint(config_of(), [&](const std::string& n, std::int64_t r, std::int64_t c) {
        return n == "embed" && r == 7 ? nan : noise(n, r, c);
      }).bytes());
  good({"logits", unused, "--tokens", "1,2"});
  refused({"logits", unused, "--tokens", "1,7"}, 1, {"finite"});
}

TEST_CASE("cli: greedy, ties and small temperatures", "[cli][portable]") {
  const auto says = [](const std::string& m, const Words& more, std::size_t n = 5) {
    Words all = {"generate", m, "-p", "x", "-n", std::to_string(n)};
    all.insert(all.end(), more.begin(), more.end());
    return good(all).out;
  };
  const std::string m = constant_model("const.safetensors", [](int t) {
    return t == 0 ? 2.f : t == 1 ? 4.f : t == 2 ? 3.f : -9.f;
  });
  for (const char* t : {"0", "1e-40", "1e-6", "1e-300", "4.9e-324"})
    CHECK(says(m, {"--temperature", t}) == std::string(5, '\1'));
  CHECK(says(m, {"--temperature", "100", "--top-k", "1"}) == std::string(5, '\1'));
  CHECK(says(m, {"--temperature", "1", "--top-p", "1e-9"}) == std::string(5, '\1'));
  const std::string tie =
      constant_model("tie.safetensors", [](int t) { return t == 77 || t == 200 || t == 9 ? 1.f : 0.f; });
  CHECK(says(tie, {}) == std::string(5, '\x09'));
  CHECK(says(tie, {"--temperature", "1", "--top-k", "1"}) == std::string(5, '\x09'));
  CHECK(says(tie, {"--temperature", "1", "--top-k", "2"}, 200).find_first_not_of("\x09\x4d") == std::string::npos);
  const std::string all = says(tie, {"--temperature", "1", "--top-k", "300"}, 200);  // above V: all
  CHECK(std::set<char>(all.begin(), all.end()).size() > 50);
  CHECK(says(tie, {"--temperature", "1", "--top-k", "0"}, 200) == all);
  for (const int byte : {0xff, 0x00, 0x0a, 0xc0}) {
    const std::string one = constant_model("one.safetensors", [&](int t) { return t == byte ? 9.f : 0.f; });
    CHECK(says(one, {}, 7) == std::string(7, static_cast<char>(byte)));
  }
  const std::string wide = constant_model(
      "wide.safetensors", [](int t) { return t == 300 ? 9.f : 0.f; }, 320);
  const Result r = yocou({"generate", wide, "-p", "x", "-n", "1"});
  CHECK((r.status == 1 && r.out.empty() && one_line(r.err) && r.err.find("300") != std::string::npos));
}

TEST_CASE("cli: seeds", "[cli][portable]") {
  const auto text = [](const char* seed) {
    const Result r = good({"generate", mild_model(), "-p", "x", "-n", "200", "--temperature", "1", "--seed", seed});
    CHECK(r.err.find(std::string("seed ") + seed) != std::string::npos);
    CHECK(r.out.size() == 200);
    return r.out;
  };
  const std::string zero = text("0");
  CHECK(text("0") == zero);
  CHECK(text("1") != zero);
  CHECK(text("9223372036854775807") != text("9223372036854775806"));
  const Result large =
      yocou({"generate", mild_model(), "-p", "x", "-n", "200", "--temperature", "1", "--seed", "18446744073709551615"});
  if (large.status == 0) {  // taken as it is, or refused; never another seed in its place
    CHECK(large.err.find("seed 18446744073709551615") != std::string::npos);
    CHECK(large.out != text("9223372036854775807"));
  } else {
    CHECK(large.status == 2);
  }
}

TEST_CASE("cli: prompts", "[cli]") {
  const std::string m = random_model();
  refused({"generate", m, "-p", ""}, 1, {"prompt"});
  refused({"generate", m, "--prompt="}, 1, {"prompt"});
  refused({"generate", m, "--prompt-file", write_file("empty", "")}, 1);
  refused({"trace", m, "-p", ""}, 1, {"prompt"});
  const auto prompt_tokens = [&](const Words& how) {
    Words all = {"generate", m, "-n", "0", "--json"};
    all.insert(all.end(), how.begin(), how.end());
    return good_json(all)["prompt_tokens"].get<std::size_t>();
  };
  for (const std::string p : {"[a,b]", "[abc]", "-abc", "--json", "\"abc\"", "'abc'", "{}", "a\nb", " a ", "[", "--",
           "\\n", "a,b", "%s", "++", "\xff\xfe", "\x80", "\xf0\x9f\x98", "a=b", "\t", "#", ";"}) {
    CAPTURE(p);
    CHECK(prompt_tokens({"-p", p}) == p.size());
    CHECK(prompt_tokens({"--prompt=" + p}) == p.size());
    CHECK(prompt_tokens({"--prompt-file", write_file("prompt", p)}) == p.size());
  }
  std::string every;
  for (int i = 0; i < 256; ++i) every += static_cast<char>(i);
  CHECK(prompt_tokens({"--prompt-file", write_file("prompt", every)}) == 256);
  CHECK(prompt_tokens({"--prompt-file", write_file("prompt", std::string(3, '\0'))}) == 3);
  const Result none = good({"generate", m, "-p", "x", "-n", "0"});
  CHECK(none.out.empty());
  CHECK(one_line(none.err));
  CHECK(good({"generate", m, "-p", "x", "-n", "1"}).out.size() == 1);
  CHECK(good({"generate", m, "-p", std::string(250, 'x'), "-n", "600"}).out.size() == 600);
  CHECK(good({"generate", m, "-p", std::string(10000, 'x'), "-n", "3"}).out.size() == 3);
  // the prompt as text and as a file, whole and in chunks: the same continuation
  const std::string text = good({"generate", m, "-p", "some \xffprompt", "-n", "40"}).out;
  CHECK(
      good({"generate", m, "--prompt-file", write_file("prompt", "some \xffprompt"), "-n", "40", "--chunk", "3"}).out ==
      text);
  CHECK(good_json({"generate", m, "-p", "some \xffprompt", "-n", "40", "--json"})["tokens"].size() == 40);
}

TEST_CASE("cli: rates are of what ran", "[cli]") {
  const std::string m = in_folder("tiny.safetensors"), prompt = write_file("prompt", std::string(2000, 'y'));
  good({"init", "--shape", "tiny", "-o", m});
  const auto number_before = [](const std::string& text, const std::string& unit, std::size_t from) {
    const std::size_t end = text.find(unit, from), begin = text.rfind(' ', end - 2);
    return std::stod(text.substr(begin));
  };
  for (const int n : {1, 2, 64}) {
    const Result r = good({"generate", m, "--prompt-file", prompt, "--threads", "1", "-n", std::to_string(n)});
    CAPTURE(r.err, r.seconds, r.busy);
    REQUIRE(r.err.find("prompt 2000 tokens") == 0);
    double seconds = 2000 / number_before(r.err, " tok/s", 0);
    const std::size_t decode = r.err.find("; decode ");
    REQUIRE(decode != std::string::npos);
    if (n == 1) {
      CHECK(r.err.find("inf") == std::string::npos);
      CHECK(r.err.find("tok/s", decode) == std::string::npos);
    } else {
      CHECK(std::stoi(r.err.substr(decode + 9)) == n - 1);
      seconds += (n - 1) / number_before(r.err, " tok/s", decode);
    }
    CHECK(seconds < r.seconds);
    // most of its work; of its time nobody can say, on a machine that let it wait before or after
    if (!sanitized) CHECK(seconds > 0.5 * r.busy);
  }
}

TEST_CASE("cli: bytes out", "[cli][portable]") {
  const std::string m = script_model("script.safetensors", "\xe6\xad\xaa");
  const std::string expected = "\xe6\xad\xaa\xe6\xad\xaa\xe6";
  CHECK(good({"generate", m, "-p", "x", "-n", "7"}).out == expected);
  const std::string file = in_folder("out");
  Process::How how;
  how.out_file = file;
  good({"generate", m, "-p", "x", "-n", "7"}, how);
  std::ostringstream bytes;
  bytes << std::ifstream(file, std::ios::binary).rdbuf();
  CHECK(bytes.str() == expected);
  const Json j = good_json({"generate", m, "-p", "x", "-n", "7", "--json"});
  CHECK(j["text"] == "\xe6\xad\xaa\xe6\xad\xaa\xef\xbf\xbd");
  CHECK(j["tokens"] == Json({0xe6, 0xad, 0xaa, 0xe6, 0xad, 0xaa, 0xe6}));
}

TEST_CASE("cli: on a terminal, whole characters and U+FFFD", "[cli]") {
  Process::How terminal;
  terminal.terminal = true;
  const auto shown = [&](const std::string& text) {
    const std::string m = script_model("script.safetensors", text);
    const Result r = good({"generate", m, "-p", "x", "-n", std::to_string(text.size())}, terminal);
    REQUIRE((!r.out.empty() && r.out.back() == '\n'));
    return r.out.substr(0, r.out.size() - 1);
  };
  const std::string bad = "\xef\xbf\xbd";
  CHECK(shown("ab") == "ab");
  CHECK(shown("\xc3\xa9") == "\xc3\xa9");
  CHECK(shown("\xe6\xad\xaa") == "\xe6\xad\xaa");
  CHECK(shown("\xf0\x9f\x98\x80") == "\xf0\x9f\x98\x80");
  CHECK(shown("\xe6\xad") == bad);  // cut at the end
  CHECK(shown("\xe6\xad"
              "b") == bad + "b");                // cut by another character
  CHECK(shown("\x80") == bad);                   // a lone continuation
  CHECK(shown("a\x80\x81") == "a" + bad + bad);  // two of them
  CHECK(shown("\xc0"
              "a") == bad + "a");                   // never valid
  CHECK(shown("\xed\xa0\x80") == bad + bad + bad);  // a surrogate
  CHECK(shown("\xf5z") == bad + "z");               // beyond U+10FFFF
  CHECK(shown("\xf4\x90z") == bad + bad + "z");
  CHECK(shown("\xe0\x80z") == bad + bad + "z");      // overlong
  CHECK(shown("\xe6\xc3\xa9") == bad + "\xc3\xa9");  // a new character where a continuation was due
  SECTION("an error begins on a line of its own") {
    const auto fill = [](const std::string& n, std::int64_t r, std::int64_t c) {  // behind x an a, behind a token 300
      if (ends_with(n, ".wo") || ends_with(n, ".w_down")) return 0.f;
      if (n == "embed") return r == c ? 1.f : 0.f;
      return n != "head" ? noise(n, r, c) : (c == 'x' && r == 'a') || (c == 'a' && r == 300) ? 1.f : 0.f;
    };
    const std::string m = write_file("late.safetensors", checkpoint(config_of(320, 320), fill).bytes());
    const Result r = yocou({"generate", m, "-p", "x", "-n", "5"}, terminal);
    CAPTURE(r.err);
    CHECK(r.status == 1);
    CHECK(r.out == "a\n");
    CHECK((one_line(r.err) && r.err.find("300") != std::string::npos));
  }
  SECTION("a complete character is there before the next byte") {
    const std::string m = script_model("script.safetensors", "\xe6\xad\xaa");
    Process p({"generate", m, "-p", "x", "-n", "2000000"}, terminal);
    CHECK(p.read_until([](const Result& r) { return r.out.size() >= 9; }));
    p.send(SIGINT);
    const Result& r = p.finish();
    CAPTURE(r.err);
    CHECK(r.status == 130);
    CHECK(r.out.substr(0, 9) == "\xe6\xad\xaa\xe6\xad\xaa\xe6\xad\xaa");
    CHECK(r.out.back() == '\n');  // the shell's prompt starts on a fresh line
  }
}

TEST_CASE("cli: readers that go, disks that are full", "[cli]") {
  const std::string m = random_model();
  SECTION("a closed reader ends it quietly") {
    Process p({"generate", m, "-p", "a", "-n", "2000000"});
    p.read_until([](const Result& r) { return r.out.size() >= 10; });
    p.close_stdout();
    const Result& r = p.finish();
    CHECK(!r.hung);
    CHECK(r.err.empty());
    CHECK((r.status == 0 || r.signal == SIGPIPE));
  }
  SECTION("a full disk behind stdout is an error") {
    Process::How full;
    full.out_file = "/dev/full";
    for (const Words& a : std::vector<Words>{{"generate", m, "-p", "a", "-n", "3"}, {"show", m}, {"cost", "--json"},
             {"cost", "--csv"}, {"logits", m, "--tokens", "1,2"}, {"verify", "--arch", "yoco", "-N", "1"}})
      refused(a, 1, {"output"}, full);
  }
  SECTION("init leaves no half file") {
    const fs::path empty = folder() / "init";
    fs::create_directories(empty);
    Process::How limited;
    limited.file_limit = 100000;
    refused({"init", "--shape", "tiny", "-o", (empty / "x").string()}, 1, {"x"}, limited);
    CHECK(fs::is_empty(empty));
    refused({"init", "--shape", "tiny", "-o", (empty / "none" / "x").string()}, 1, {"x"});
    refused({"init", "--shape", "tiny", "-o", "/proc/yocou.safetensors"}, 1, {"/proc/yocou.safetensors"});
    refused({"init", "--shape", "tiny", "-o", empty.string()}, 1);
    refused({"init", "--shape", "tiny", "-o", ""}, 2, {"--output"});
    CHECK(fs::is_empty(empty));
    const std::string old = (empty / "old").string();  // what was there stays when the new one fails
    std::ofstream(old) << "precious";
    refused({"init", "--shape", "tiny", "-o", old}, 1, {"old"}, limited);
    CHECK(fs::file_size(old) == 8);
    good({"init", "--shape", "tiny", "-o", old});
    CHECK(fs::file_size(old) > 100000);
    CHECK(std::distance(fs::directory_iterator(empty), fs::directory_iterator()) == 1);
    const std::string fifo = (empty / "fifo").string();  // a device must not be replaced by a file
    REQUIRE(mkfifo(fifo.c_str(), 0600) == 0);
    refused({"init", "--shape", "tiny", "-o", fifo}, 1, {"fifo"});
    CHECK(fs::is_fifo(fifo));
    fs::remove_all(empty);
  }
}

TEST_CASE("cli: interrupted", "[cli]") {
  SECTION("generate says what it measured") {
    Process p({"generate", random_model(), "-p", "a", "-n", "2000000"});
    REQUIRE(p.read_until([](const Result& r) { return r.out.size() >= 50; }));
    p.send(SIGINT);
    const Result& r = p.finish();
    CAPTURE(r.err);
    CHECK(r.status == 130);
    CHECK(one_line(r.err));
    CHECK(r.err.find("decode " + std::to_string(r.out.size() - 1) + " steps") != std::string::npos);
    CHECK(r.err.find("tok/s") != std::string::npos);
  }
  SECTION("bench prints the rows it has") {
    if (slow_bench) return;
    Process p({"bench", "--shape", "tiny", "-N", "256", "--runs", "1000", "--json", "--threads", "1"});
    REQUIRE(p.read_until([](const Result& r) {  // a hundredth of the runs: both rows have some
      const std::size_t line = r.err.rfind("bench ");
      return line != std::string::npos && std::atoi(r.err.c_str() + line + 6) >= 1;
    }));
    p.send(SIGINT);
    const Result& r = p.finish();
    CAPTURE(r.err, r.out);
    CHECK(r.status == 130);
    REQUIRE(Json::accept(r.out));
    CHECK(Json::parse(r.out)["rows"].size() == 2);
  }
  SECTION("long work of every command ends at the first Ctrl-C") {
    const std::string m = in_folder("tiny.safetensors"), large = write_file("large.txt", std::string(1'000'000, 'z')),
                      out = in_folder("new.safetensors");
    if (!fs::exists(m)) good({"init", "--shape", "tiny", "-o", m});
    std::string tokens, tasks = "{\"prompt\":\"" + std::string(1'000'000, 'x') + "\",\"answer\":\"a\"}\n";
    for (int i = 0; i < 1'000'000; ++i) tokens += "7 ";
    const std::string task_file = write_file("large.jsonl", tasks), token_file = write_file("large.tokens", tokens);
    for (const Words& a : std::vector<Words>{{"score", m, large}, {"logits", m, "--last", "--tokens-file", token_file},
             {"eval", m, task_file}, {"generate", m, "--prompt-file", large},
             {"verify", "--shape", "small", "--arch", "yoco-u", "-N", "200000"},
             {"bench", "--shape", "small", "-N", "200000"}, {"init", "--shape", "1.3b", "-o", out}}) {
      if (slow_bench && a[0] == "bench") continue;
      Process p(a);
      p.await_handler(SIGINT);
      std::this_thread::sleep_for(std::chrono::milliseconds(400));
      p.send(SIGINT);
      const Result& r = p.finish();
      CAPTURE(joined(a), r.err, r.hung, r.signal);
      CHECK(r.status == 130);
      CHECK(r.out.size() < 1000);
    }
    for (const auto& entry : fs::directory_iterator(folder()))
      CHECK(entry.path().string().find("new.safetensors") == std::string::npos);
    for (const std::string& f : {large, task_file, token_file}) fs::remove(f);
  }
}

TEST_CASE("cli: a checkpoint that is cut short while it is read", "[cli]") {
  const std::string m = write_file("cut.safetensors", checkpoint(config_of(256)).bytes());
  Process p({"generate", m, "-p", "a", "-n", "2000000"});
  REQUIRE(p.read_until([](const Result& r) { return r.out.size() >= 10; }));
  REQUIRE(truncate(m.c_str(), 0) == 0);
  const Result& r = p.finish();
  CAPTURE(r.err, r.signal);
  CHECK(r.status == 1);
  CHECK(one_line(r.err));
  CHECK(r.err.find("truncated") != std::string::npos);
}

TEST_CASE("cli: more memory than there is", "[cli]") {
  const std::string m = in_folder("tiny.safetensors");
  if (!fs::exists(m)) good({"init", "--shape", "tiny", "-o", m});
  Json config = config_of();
  config["arch"] = "custom",
  config["stages"][0] = {{"name", "f"}, {"layers", 2}, {"loops", 4096}, {"attention", "full"}};
  const std::string deep = write_file("deep.safetensors", checkpoint(config).bytes());
  refused({"generate", deep, "-p", "a", "-n", "2147483646"}, 1,
      {"56301", "available"});  // beside the cross-decoder's, 2 G dh s x layers x loops x rows = 562,949,953,421,312
  refused({"verify", "--arch", "transformer", "--shape", "1.3b", "-N", "1099511627776", "--dtype", "f32", "--layers",
              "4096"},
      1, {"memory", "available"});
  refused({"verify", "--arch", "yoco-u", "--shape", "10b-moe", "-N", "1", "--dtype", "f32", "--layers", "4096"}, 1,
      {"memory", "available"});
  if (!slow_bench)
    refused({"bench", "--arch", "yoco-u", "--shape", "10b-moe", "-N", "1", "--dtype", "f32", "--layers", "4096"}, 1,
        {"memory", "available"});
  refused({"verify", "--arch", "transformer", "--shape", "tiny", "-N", "1099511627776"}, 1, {"memory", "available"});
  SECTION("files of a terabyte, without a block on the disk") {
    const std::string sparse = write_file("sparse", "");
    if (truncate(sparse.c_str(), off_t{1} << 40) != 0) return;  // a file system that has no such sizes
    refused({"show", sparse}, 1, {"sparse"});
    refused({"generate", m, "--prompt-file", sparse}, 1, {"memory"});
    refused({"score", m, sparse}, 1, {"memory"});
    refused({"logits", m, "--tokens-file", sparse}, 1);
    refused({"eval", m, sparse}, 1);
    fs::remove(sparse);
  }
}

TEST_CASE("cli: --device cuda where there is none", "[cli]") {
  const bool built_in = good({"--version"}).out.find("no CUDA") == std::string::npos;
  const Result r = yocou({"generate", random_model(), "-p", "a", "-n", "1", "--device", "cuda"});
  CAPTURE(r.err);
  if (built_in && r.status == 0) return;  // a machine with a device
  CHECK(r.status == 1);
  CHECK(r.out.empty());
  CHECK(one_line(r.err));
  CHECK(r.err.find("CUDA") != std::string::npos);
}

TEST_CASE("cli: tokens and task files", "[cli]") {
  const std::string m = random_model();
  for (const char* bad : {"256", "-1", "1,2,x", "1.5", "1;2", "99999999999999999999", "0x10", "1e2", ",", "+1"})
    refused({"logits", m, "--tokens", bad}, 1, {"--tokens"});
  refused({"logits", m, "--tokens-file",
              write_file("t", std::string("1\0"
                                          "2",
                                  3))},
      1);
  refused({"logits", m, "--tokens-file", write_file("t", " \n")}, 1);
  const std::string list = good({"logits", m, "--tokens", "1,2,3"}).out;
  CHECK(good({"logits", m, "--tokens-file", write_file("t", "1\n2\t\r\n 3,\n")}).out == list);
  for (const char* bad : {"", "\n", "x", "{}", "[]", "{\"prompt\":\"a\"}", "{\"prompt\":\"a\",\"answer\":1}",
           "{\"prompt\":\"\",\"answer\":\"a\"}", "{\"prompt\":\"a\",\"answer\":\"\"}",
           "{\"prompt\":\"a\",\"answer\":\"b\"}\n{", "{\"prompt\":\"a\",\"prompt\":\"b\",\"answer\":\"b\"}",
           "{\"prompt\":\"a\",\"answer\":\"\xff\"}", "{\"prompt\":\"a\",\"answer\":\"b\"} {}"})
    refused({"eval", m, write_file("bad.jsonl", bad)}, 1, {"bad.jsonl"});
  refused({"eval", m, write_file("bad.jsonl", std::string(100000, '['))}, 1, {"bad.jsonl:1", "deep"});
  refused({"eval", m, write_file("bad.jsonl", "{\"prompt\":\"a\",\"answer\":\"b\"}\n\n{\"prompt\":\"a\"}\n")}, 1,
      {"bad.jsonl:3", "answer"});
  refused({"eval", m, write_file("bad.jsonl", "{\"prompt\":\"a\",\"answer\":\"b\"}"), "--by", "level"}, 1, {"level"});
  refused({"score", m, write_file("t", "")}, 1, {"0"});
  refused({"score", m, write_file("t", "a")}, 1, {"1"});
  const std::string few = write_file("few.safetensors", checkpoint(config_of(8, 100)).bytes());
  refused({"generate", few, "-p", "a"}, 1, {"vocab_size", "100"});
  refused({"score", few, write_file("t", "abc")}, 1, {"vocab_size"});
  refused({"eval", few, write_file("t", "{\"prompt\":\"a\",\"answer\":\"b\"}")}, 1, {"vocab_size"});
  good({"logits", few, "--tokens", "1,99"});
  refused({"logits", few, "--tokens", "1,100"}, 1, {"100", "99"});
}

TEST_CASE("cli: the same answer every time", "[cli]") {
  const std::string m = in_folder("tiny.safetensors");
  if (!fs::exists(m)) good({"init", "--shape", "tiny", "-o", m});
  const std::string prompt = write_file("prompt", std::string(300, 'q') + "some more of a prompt");
  const auto text = [&](const Words& more) {
    Words all = {"generate", m, "--prompt-file", prompt, "-n", "60", "--temperature", "0.9"};
    all.insert(all.end(), more.begin(), more.end());
    return good(all).out;
  };
  const std::string once = text({});
  CHECK(once.size() == 60);
  for (const Words& more : std::vector<Words>{{}, {"--threads", "1"}, {"--threads", "2"}, {"--threads", "3"},
           {"--chunk", "7"}, {"--chunk", "100", "--threads", "2"}})
    CHECK(text(more) == once);
  const std::string logits =
      good({"logits", m, "--tokens-file", write_file("t", "1 2 3 4 5 6 7 8 9 10"), "--json"}).out;
  for (const char* k : {"1", "4", "10"})
    CHECK(good({"logits", m, "--tokens", "1,2,3,4,5,6,7,8,9,10", "--prefill", k, "--json", "--threads", "2"}).out ==
          logits);
  // init: the same file from the same seed
  const auto bytes = [](const std::string& path) {
    std::ostringstream all;
    all << std::ifstream(path, std::ios::binary).rdbuf();
    return all.str();
  };
  const std::string a = in_folder("a"), b = in_folder("b");
  good({"init", "--shape", "tiny", "-o", a, "--seed", "3"}), good({"init", "--shape", "tiny", "-o", b, "--seed", "3"});
  CHECK(bytes(a) == bytes(b));
  good({"init", "--shape", "tiny", "-o", b, "--seed", "4"});
  CHECK(bytes(a) != bytes(b));
}

TEST_CASE("cli: score", "[cli][portable]") {
  const std::string zero = constant_model("zero.safetensors", [](int) { return 0.f; });
  std::string text;
  for (int i = 0; i < 300; ++i) text += static_cast<char>(i * 7);
  const std::string file = write_file("text", text);
  const Json eight = good_json({"score", zero, file, "--json"});
  has_keys(eight, {"rows"});
  has_keys(eight["rows"][0], {"loops", "predictions", "bits_per_byte", "perplexity"});
  CHECK(eight["rows"][0]["predictions"] == 299);
  CHECK(eight["rows"][0]["bits_per_byte"].get<double>() == 8.0);
  CHECK(eight["rows"][0]["perplexity"].get<double>() == Approx(256).epsilon(1e-12));

  const std::string m = random_model();
  std::string tokens;
  for (const char c : text) tokens += std::to_string(static_cast<unsigned char>(c)) + ",";
  const Json rows = good_json({"logits", m, "--tokens-file", write_file("t", tokens), "--json"});
  double nats = 0;
  for (std::size_t t = 1; t < text.size(); ++t) {
    const Json& row = rows["logits"][t - 1];
    double max = -1e300, sum = 0;
    for (const Json& v : row) max = std::max(max, v.get<double>());
    for (const Json& v : row) sum += std::exp(v.get<double>() - max);
    nats += max + std::log(sum) - row[static_cast<unsigned char>(text[t])].get<double>();
  }
  const Json scored = good_json({"score", m, file, "--json", "--by-position", "--loops", "1,3,2"});
  has_keys(scored, {"rows", "by_position"});
  REQUIRE(scored["rows"].size() == 3);
  CHECK(scored["rows"][0]["loops"] == 1);
  CHECK(scored["rows"][1]["loops"] == 3);
  CHECK(scored["rows"][1]["bits_per_byte"].get<double>() == Approx(nats / 299 / std::log(2.0)).epsilon(1e-6));
  CHECK(scored["rows"][1]["perplexity"].get<double>() == Approx(std::exp(nats / 299)).epsilon(1e-5));
  CHECK(good_json({"score", m, file, "--json", "--chunk", "17"})["rows"][0]["bits_per_byte"] ==
        scored["rows"][1]["bits_per_byte"]);
  CHECK(!scored["by_position"].empty());
  good({"score", m, file}), good({"score", m, file, "--csv"});
}

TEST_CASE("cli: logits", "[cli][portable]") {
  const std::string m = random_model(), tokens = "104,101,108,108,111,32,255,0,10,200,7,8";
  const Result whole = good({"logits", m, "--tokens", tokens, "--json"});
  const Json j = Json::parse(whole.out);
  has_keys(j, {"tokens", "logits"});
  CHECK(j["tokens"] == Json::parse("[" + tokens + "]"));
  REQUIRE(j["logits"].size() == 12);
  for (const Json& row : j["logits"]) CHECK(row.size() == 256);
  int nine = 0;  // 9 significant digits tell every float32 from every other
  std::istringstream numbers(whole.out.substr(whole.out.find("\"logits\"") + 9));
  for (std::string n; std::getline(numbers, n, ',');) {
    int digits = 0;
    for (const char c : n.substr(0, n.find('e'))) digits += std::isdigit(static_cast<unsigned char>(c)) ? 1 : 0;
    if (n.find("0.") != std::string::npos) --digits;
    CHECK(digits <= 12);
    nine += digits >= 8 ? 1 : 0;
  }
  CHECK(nine > 1000);
  for (int k = 1; k <= 12; ++k) {
    CHECK(good({"logits", m, "--tokens", tokens, "--json", "--prefill", std::to_string(k)}).out == whole.out);
    const Json last = good_json({"logits", m, "--tokens", tokens, "--json", "--last", "--prefill", std::to_string(k)});
    REQUIRE(last["logits"].size() == 1);
    CHECK(last["logits"][0] == j["logits"][11]);
    CHECK(last["tokens"] == j["tokens"]);
  }
}

TEST_CASE("cli: eval, alone and in batches", "[cli]") {
  const std::string m = random_model();
  std::vector<std::pair<std::string, std::string>> tasks;
  std::string right, wrong;
  for (int i = 0; i < 40; ++i) {
    const std::string prompt(static_cast<std::size_t>(1 + i * 13 % 90), static_cast<char>('a' + i % 26));
    const Json tokens = good_json({"generate", m, "-p", prompt, "-n", std::to_string(1 + i % 7), "--json"})["tokens"];
    std::string answer;
    for (const Json& t : tokens) answer += static_cast<char>(t.get<int>());
    if (!Json::accept("\"" + answer + "\"")) continue;  // JSON holds UTF-8 only
    tasks.push_back({prompt, answer});
    right += Json{{"prompt", prompt}, {"answer", answer}, {"level", i % 3}}.dump() + "\n";
    answer.back() = answer.back() == 'x' ? 'y' : 'x';
    if (Json::accept("\"" + answer + "\"")) wrong += Json{{"prompt", prompt}, {"answer", answer}}.dump() + "\n";
  }
  if (tasks.size() < 5) WARN("only " << tasks.size() << " tasks of 40 are UTF-8");
  const std::string file = write_file("right.jsonl", right);
  for (const char* chunk : {"1", "64", "512"}) {
    const Json j = good_json({"eval", m, file, "--json", "--by", "level", "--chunk", chunk});
    has_keys(j, {"accuracy", "count", "rows"});
    CHECK(j["accuracy"] == 1.0);
    CHECK(j["count"] == tasks.size());
    for (const Json& row : j["rows"]) {
      has_keys(row, {"loops", "group", "count", "correct", "accuracy"});
      CHECK(row["correct"] == row["count"]);
      CHECK(row["loops"] == 3);
    }
  }
  if (!wrong.empty()) CHECK(good_json({"eval", m, write_file("wrong.jsonl", wrong), "--json"})["accuracy"] == 0.0);
  const Json loops = good_json({"eval", m, file, "--json", "--loops", "1,3"});
  REQUIRE(loops["rows"].size() == 2);
  CHECK(loops["rows"][1]["accuracy"] == 1.0);
  good({"eval", m, file, "--csv"}), good({"eval", m, file});
}

TEST_CASE("cli: show, cost, verify, bench and trace as JSON", "[cli][portable]") {
  const std::string m = random_model(), moe = write_file("moe.safetensors", checkpoint(moe_config()).bytes());
  const Json shown = good_json({"show", moe, "--json"});
  has_keys(shown, {"config", "tensors"});
  CHECK(shown["tensors"].size() == checkpoint(moe_config()).header.size() - 1);
  for (const Json& t : shown["tensors"]) has_keys(t, {"name", "dtype", "shape", "bytes"});
  CHECK(shown["config"]["stages"][0]["window"] == 4);
  CHECK(good({"show", m}).out.find("interleaved") != std::string::npos);

  const std::set<std::string> cost_keys = {"arch", "N", "batch", "cache_bytes", "prefill_flops", "decode_flops",
                                  "params", "active_params", "embed_params", "head_params"},
                              cost_more = {"decode_bytes", "cache_ratio", "prefill_ratio", "decode_ratio",
                                  "prefill_crossover_N", "kv_big_o", "prefill_big_o", "decode_big_o"};
  const Json costs = good_json({"cost", "--json", "-N", "1,256,257,16384,65536,262144"});
  has_keys(costs, {"rows"});
  CHECK(costs["rows"].size() == 8 * 6);
  for (const Json& row : costs["rows"]) has_keys(row, cost_keys, cost_more);
  const std::vector<std::int64_t> published = {
      31981568, 31981568, 32505856, std::int64_t{62} << 20, std::int64_t{158} << 20, std::int64_t{542} << 20};
  for (std::size_t i = 0; i < 6; ++i) CHECK(costs["rows"][i]["cache_bytes"] == published[i]);
  for (const Json& row : good_json({"cost", "--json", "--memory", "80GB"})["rows"]) {
    std::set<std::string> keys = cost_keys;
    keys.insert({"max_N", "max_batch"});
    has_keys(row, keys, cost_more);
    CHECK(row["max_N"].is_number_integer());
  }
  CHECK(good_json({"cost", m, "--json", "-N", "10"})["rows"][0]["arch"] == "yoco-u");

  const Json verified =
      good_json({"verify", "--shape", "tiny", "-N", "1,65", "--json", "--batch", "2", "--threads", "1"});
  has_keys(verified, {"rows"}, {"resident_bytes"});
  std::set<std::string> quantities;
  for (const Json& row : verified["rows"]) {
    has_keys(row, {"quantity", "arch", "N", "formula", "measured", "equal"});
    CHECK(row["equal"] == true);
    CHECK(row["formula"] == row["measured"]);
    quantities.insert(row["quantity"]);
  }
  for (const char* q :
      {"cache_bytes_prefill", "cache_bytes_decode", "prefill_flops", "decode_flops", "cross_positions", "params"})
    CHECK(quantities.count(q) == 1);
  CHECK(good_json({"verify", moe, "-N", "1,9", "--json", "--kv-dtype", "bf16"})["rows"].size() > 8);

  const Json traced = good_json({"trace", moe, "-p", "some text", "--json"});
  has_keys(traced, {"rows"});
  CHECK(traced["rows"].size() == 1 + 2 * 3 + 2);  // the embeddings, and every application
  for (const Json& row : traced["rows"])
    has_keys(
        row, {"application", "stage", "loop", "layer", "norm", "angular_distance", "router_load"}, {"loop_cosine"});
  double load = 0;
  for (const Json& l : traced["rows"][1]["router_load"]) load += l.get<double>();
  CHECK(load == Approx(1));
  good({"trace", moe, "-p", "x", "--csv"}), good({"trace", m, "-p", "x"});

  if (slow_bench) return;
  const Json benched =
      good_json({"bench", "--shape", "tiny", "-N", "20,30", "--runs", "1", "--json", "--batch", "2", "--threads", "1"});
  has_keys(benched, {"machine", "rows"});
  REQUIRE(benched["rows"].size() == 4);
  for (const Json& row : benched["rows"]) {
    has_keys(row, {"arch", "N", "batch", "phase", "tok_s", "spread", "gflop_s", "gb_s", "attainment", "kv_bytes"},
        {"of_gemm", "of_read"});
    CHECK((row["phase"] == "prefill" || row["phase"] == "decode"));
    CHECK(row["tok_s"].get<double>() > 0);
  }
}

TEST_CASE("cli: CSV has as many cells in every line", "[cli]") {
  const auto rectangular = [](const Words& arguments) {
    const Result r = good(arguments);
    std::istringstream lines(r.out);
    std::size_t cells = 0;
    for (std::string line; std::getline(lines, line);) {
      if (line.rfind("#", 0) == 0) continue;
      std::size_t n = 1;
      bool quoted = false;
      for (const char c : line) quoted = quoted != (c == '"'), n += c == ',' && !quoted ? 1 : 0;
      if (!cells) cells = n;
      CAPTURE(joined(arguments), line);
      CHECK(n == cells);
    }
    CHECK(cells > 3);
  };
  rectangular({"cost", "--csv"});
  rectangular({"cost", "--csv", "--memory", "80GB"});
  rectangular({"verify", "--csv", "-N", "1"});
  rectangular({"verify", random_model(), "--csv", "-N", "1", "--allocate-only"});
  rectangular({"verify", "--csv", "-N", "1,1099511627776", "--allocate-only", "--arch", "transformer,yoco-u"});
  rectangular({"trace", random_model(), "-p", "abc", "--csv"});
  rectangular({"score", random_model(), write_file("t", "abcdef"), "--csv"});
  rectangular({"score", random_model(), write_file("t", "abcdef"), "--csv", "--by-position"});
}

TEST_CASE("cli: cost of any model", "[cli][cost]") {
  const auto rows = [](Words more) {
    more.insert(more.begin(), {"cost", "--json"});
    return good_json(more)["rows"];
  };
  SECTION("K and M are 2^10 and 2^20") {
    CHECK(rows({"-N", "16K,1M,3"}) == rows({"-N", "16384,1048576,3"}));
    for (const char* bad : {"K", "1G", "1.5K", "-1K", "1KK", "1k", "99999999999M", "0K"})
      refused({"cost", "-N", bad}, 2, {"-N"});
    CHECK(good({"generate", random_model(), "-p", "a", "-n", "1K"}).out.size() == 1024);
  }
  SECTION("a checkpoint's config in a file of its own is that model") {
    const std::string m = random_model(), file = write_file("config.json", config_of().dump());
    const Json shown = good_json({"show", m, "--json"})["config"];
    CHECK(rows({"--config", file, "-N", "5,1000"}) == rows({m, "-N", "5,1000"}));
    CHECK(rows({"--config", write_file("whole.json", shown.dump()), "-N", "5"}) == rows({m, "-N", "5"}));
    CHECK(rows({"--config", file, "--loops", "5", "-N", "5"}) == rows({m, "--loops", "5", "-N", "5"}));
    good({"verify", "--config", file, "-N", "3,300"});
    const std::string made = in_folder("made.safetensors");
    good({"init", "--config", file, "-o", made, "--dtype", "f32"});
    CHECK(good_json({"show", made, "--json"})["config"] == shown);
    for (const std::string command : {"cost", "verify", "bench"}) {
      for (const Words& other : std::vector<Words>{{m}, {"--shape", "tiny"}, {"--arch", "yoco"}, {"--dim", "64"}}) {
        Words all = {command, "--config", file};
        all.insert(all.end(), other.begin(), other.end());
        refused(all, 2, {"--config"});
      }
      refused({command, "--config", ""}, 2, {"--config"});
      refused({command, "--config", write_file("bad.json", "{\"arch\":\"yoco-u\"}")}, 1, {"bad.json", "vocab_size"});
      refused({command, "--config", write_file("bad.json", "")}, 1, {"bad.json", "JSON"});
      refused({command, "--config", in_folder("missing")}, 1, {"missing"});
    }
    refused({"init", "-o", made}, 2, {"--config"});
  }
  SECTION("sizes over a shape") {
    const Json one = rows({"--shape", "tiny", "--arch", "transformer", "-N", "9", "--layers", "2", "--dim", "32",
        "--heads", "6", "--kv-heads", "3", "--head-dim", "8", "--ffn-dim", "20", "--vocab", "300"})[0];
    CHECK(one["cache_bytes"] == 2 * 3 * 8 * 2 * 2 * 256);
    CHECK(one["params"] == 2 * (2 * 32 + 32 * (2 * 48 + 2 * 24) + 3 * 32 * 20) + 32);
    CHECK(one["head_params"] == 300 * 32);
    for (const std::string command : {"cost", "verify", "bench"}) {
      refused({command, "--shape", "tiny", "--heads", "3", "--kv-heads", "2"}, 2, {"heads 3", "kv_heads 2"});
      refused({command, "--shape", "tiny", "--head-dim", "7"}, 2, {"head_dim 7"});
      refused({command, "--shape", "10b-moe", "--ffn-dim", "7"}, 2, {"--ffn-dim"});
      refused({command, random_model(), "--vocab", "300"}, 2, {"--vocab"});
      refused({command, "--dim", "0"}, 2, {"--dim"});
    }
  }
  SECTION("without --arch, those that take the sizes") {
    std::set<std::string> odd;
    for (const Json& row : rows({"--layers", "3", "-N", "1"})) odd.insert(row["arch"]);
    CHECK(odd == std::set<std::string>{"parscale", "transformer", "ut"});
  }
  SECTION("--explain adds up to the figures") {
    for (const Words& what : std::vector<Words>{{"--arch", "yoco-u"}, {"--arch", "upper-loop-unshared", "--loops", "4"},
             {"--arch", "rins", "--batch", "3"}, {"--arch", "yoco", "--shape", "10b-moe"}}) {
      Words all = {"cost", "--explain", "-N", "1000"}, plain = {"-N", "1000"};
      all.insert(all.end(), what.begin(), what.end()), plain.insert(plain.end(), what.begin(), what.end());
      const Json row = rows(plain)[0];
      std::istringstream lines(good(all).out);
      std::vector<std::int64_t> totals;
      std::int64_t sum = 0, n = 0;
      for (std::string line; std::getline(lines, line);) {
        if (const auto equals = line.rfind(" = "); line.starts_with("  ") && equals != std::string::npos) {
          std::istringstream factors(line.substr(line.find(" = ") + 3, equals - line.find(" = ")));
          std::int64_t product = 1, value = std::stoll(line.substr(equals + 3));
          for (std::string f; factors >> f && f != "=";)
            if (f != "x") product *= std::stoll(f);
          CAPTURE(joined(what), line);
          CHECK(product == value);
          sum += value, ++n;
        }
        if (line.starts_with("  total ")) {
          CHECK(std::stoll(line.substr(8)) == sum);
          totals.push_back(std::stoll(line.substr(line.rfind(' ') + 1))), sum = 0;
        }
      }
      CHECK(n > 20);
      CHECK(totals == std::vector<std::int64_t>{row["cache_bytes"], row["prefill_flops"], row["decode_flops"],
                          row["decode_bytes"], row["params"]});
    }
    refused({"cost", "--explain", "--json"}, 2, {"--explain"});
  }
}

TEST_CASE("cli: costs beyond 2^64 are exact", "[cli]") {
  __extension__ typedef unsigned __int128 Wide;
  const std::string out =
      good({"cost", "--shape", "1.3b", "--arch", "transformer", "-N", "1099511627776", "--batch", "1048576", "--json"})
          .out;
  const auto number = [&](const std::string& key) {
    const std::size_t at = out.find("\"" + key + "\":");
    REQUIRE(at != std::string::npos);
    const std::size_t begin = at + key.size() + 3;
    return out.substr(begin, out.find_first_of(",}", begin) - begin);
  };
  const auto decimal = [](Wide v) {
    std::string s;
    for (; v; v /= 10) s.insert(s.begin(), static_cast<char>('0' + static_cast<int>(v % 10)));
    return s;
  };
  const Wide N = Wide{1} << 40, B = 1 << 20, D = 2560, q = 20 * 128, kv = 4 * 128, F = 6912, V = 100352, L = 20;
  const Wide fixed = 4 * D * q + 4 * D * kv + 6 * D * F;
  CHECK(number("prefill_flops") == decimal(B * (2 * D * V + L * (fixed * N + 4 * q * (N * (N + 1) / 2)))));
  CHECK(number("decode_flops") == decimal(B * (2 * D * V + L * (fixed + 4 * q * (N + 1)))));
  CHECK(number("cache_bytes") == decimal(B * (2 * kv * 2 * L * N)));
  CHECK(decimal(B * 2 * kv * 2 * L * N).size() > 20);  // beyond 2^64 it is
}

TEST_CASE("cli: cells of Table 10 by allocation", "[cli]") {
  struct Cell {
    const char* arch;
    std::int64_t N, megabytes;
  };
  for (const Cell& c :
      {Cell{"yoco-u", 16384, 62}, Cell{"yoco", 16384, 42}, Cell{"yoco-u", 65536, 158}, Cell{"upper-loop", 16384, 42}}) {
    const Json row = good_json({"verify", "--allocate-only", "--shape", "1.3b", "--arch", c.arch, "-N",
        std::to_string(c.N), "--kv-dtype", "bf16", "--json"})["rows"][0];
    has_keys(row, {"quantity", "arch", "N", "formula", "measured", "equal"}, {"note"});
    CHECK(row["formula"] == c.megabytes << 20);
    CHECK(row["measured"] == c.megabytes << 20);
    CHECK(row["equal"] == true);
  }
  // a cell that fits no machine is a row that says so
  const Json row = good_json({"verify", "--allocate-only", "--shape", "1.3b", "--arch", "transformer", "-N",
      "1099511627776", "--json"})["rows"][0];
  CHECK(row["formula"] == Json::parse("90071992547409920"));
  CHECK(row["measured"].is_null());
  CHECK(row["equal"].is_null());
  CHECK(row.dump().find("does not fit") != std::string::npos);
}

TEST_CASE("cli: tensors beyond 2^31 numbers", "[cli]") {
  // A mixture of 2^18 experts in a sparse file, of which every token takes the last: the same as that expert alone.
  const std::int64_t E = 1 << 18, D = 128, Fe = 72;
  Json config = {{"arch", "custom"}, {"vocab_size", 16}, {"dim", D}, {"heads", 2}, {"kv_heads", 1}, {"head_dim", 4},
      {"moe", {{"experts", 1}, {"active", 1}, {"dim", Fe}, {"normalize", true}}},
      {"stages", {{{"name", "f"}, {"layers", 1}, {"attention", "full"}}}}};
  const File one = checkpoint(config, [](const std::string& n, std::int64_t r, std::int64_t c) {
    if (n == "embed" && c == 0) return 9.f;
    if (n == "f.0.router") return c == 0 ? 1.f : 0.f;  // so every token's logit is above the zeros of the others
    return noise(n, r, c) * (n == "f.0.wo" ? 0.01f : 1.f);
  });
  const std::string small = write_file("one.safetensors", one.bytes());

  config["moe"]["experts"] = E;
  File many;
  many.header["__metadata__"] = {{"yocou", raw(config)}};
  std::vector<std::pair<std::int64_t, std::string>> pieces;  // where the numbers go that are not zero
  std::int64_t at = 0;
  for (const auto& [name, entry] : one.header.items()) {
    if (name == "__metadata__") continue;
    const std::int64_t begin = entry["data_offsets"][0], size = entry["data_offsets"][1].get<std::int64_t>() - begin;
    const bool per_expert = name == "f.0.router" || name.find("experts.") != std::string::npos;
    Json shape = entry["shape"];
    if (per_expert) shape[0] = E;
    const std::int64_t all = per_expert ? size * E : size;
    many.header[name] = {{"dtype", "F32"}, {"shape", shape}, {"data_offsets", {at, at + all}}};
    pieces.push_back(
        {at + all - size, one.data.substr(static_cast<std::size_t>(begin), static_cast<std::size_t>(size))});
    at += all;
  }
  const std::string head = many.bytes(), large = write_file("many.safetensors", head);
  const std::int64_t data = static_cast<std::int64_t>(head.size());
  if (truncate(large.c_str(), data + at) != 0) return;  // a file system that has no such sizes
  const int file = open(large.c_str(), O_WRONLY | O_CLOEXEC);
  for (const auto& [offset, bytes] : pieces)
    REQUIRE(pwrite(file, bytes.data(), bytes.size(), data + offset) == static_cast<ssize_t>(bytes.size()));
  close(file);
  CHECK(E * Fe * D > std::int64_t{1} << 31);
  CHECK(good({"logits", large, "--tokens", "3,1,15,0"}).out == good({"logits", small, "--tokens", "3,1,15,0"}).out);
  fs::remove(large);
}

TEST_CASE("cli: the fuzzer's seeds, and what it found", "[cli]") {
  const fs::path corpus = fs::path(YOCOU_SOURCE_DIR) / "tests" / "corpus";
  int read = 0, files = 0;
  const auto either = [&](const Words& arguments) {  // read, or refused in one line
    const Result r = yocou(arguments);
    CAPTURE(joined(arguments), r.signal, r.err);
    CHECK((r.status == 0 || (r.status == 1 && r.out.empty() && one_line(r.err))));
    ++files, read += r.status == 0;
  };
  for (const auto& entry : fs::directory_iterator(corpus / "checkpoint")) either({"show", entry.path().string()});
  for (const auto& entry : fs::directory_iterator(corpus / "tasks"))
    either({"eval", random_model(), entry.path().string()});
  for (const auto& entry : fs::directory_iterator(corpus / "config")) {
    std::ostringstream text;
    text << std::ifstream(entry.path()).rdbuf();
    File f = checkpoint(config_of());
    f.header["__metadata__"]["yocou"] = text.str();
    either({"show", write_file("bad.safetensors", f.bytes())});
  }
  CHECK(files > 20);
  CHECK(read > 5);
}

// ---------------------------------------------------------------------------------------------------------------------
// Streams, and loops that halt

TEST_CASE("cli: streams go through every command, and are refused where they mean nothing", "[cli][streams]") {
  const std::string model = in_folder("streams.safetensors");
  good({"init", "--shape", "tiny", "--arch", "parscale", "--streams", "3", "-o", model});
  const Json shown = good_json({"show", model, "--json"});
  CHECK(shown["config"]["streams"] == Json({{"count", 3}, {"prefix", 48}, {"smooth", 0.01}}));
  std::map<std::string, Json> shapes;
  for (const Json& t : shown["tensors"]) shapes[t["name"]] = t["shape"];
  CHECK(shapes["layers.3.prefix_v"] == Json({3, 48, 64}));
  CHECK(shapes["mix.w1"] == Json({128, 3 * 128}));
  CHECK(shapes["mix.b2"] == Json({3}));
  const std::string tokens = "72,101,108,108,111";
  const std::string whole = good({"logits", model, "--tokens", tokens}).out;
  CHECK(good({"logits", model, "--tokens", tokens, "--prefill", "2", "--chunk", "1"}).out == whole);
  CHECK(ends_with(whole, good({"logits", model, "--tokens", tokens, "--last"}).out));
  CHECK(good_json({"generate", model, "-p", "a", "-n", "4", "--json"})["tokens"].size() == 4);
  const std::string text = write_file("text", "some text of a few bytes"),
                    task = write_file("tasks.jsonl", R"({"prompt":"ab","answer":"c"})");
  CHECK(good_json({"score", model, text, "--json"})["rows"][0]["loops"] == 1);
  CHECK(good_json({"eval", model, task, "--json"})["count"] == 1);
  CHECK(good_json({"trace", model, "-p", "ab", "--json"})["rows"].size() == 5);
  for (const Json& row : good_json({"verify", model, "-N", "1,65", "--steps", "1", "--batch", "2", "--json"})["rows"])
    CHECK(row["equal"] == true);
  const auto cost = [](const char* P) {
    return good_json(
        {"cost", "--shape", "tiny", "--arch", "parscale", "--streams", P, "-N", "300", "--json"})["rows"][0];
  };
  CHECK(cost("4")["cache_bytes"] == 2 * cost("2")["cache_bytes"].get<std::int64_t>());
  CHECK(good_json({"cost", "--shape", "tiny", "--streams", "2", "-N", "1", "--json"})["rows"].size() == 1);
  refused({"cost", "--shape", "tiny", "--arch", "transformer", "--streams", "2"}, 2, {"--streams", "transformer"});
  refused({"init", "--shape", "tiny", "--arch", "parscale", "--streams", "1", "-o", in_folder("no")}, 2, {"--streams"});
  refused({"cost", model, "--streams", "2"}, 2, {"--streams"});
  refused({"generate", model, "-p", "a", "--loops", "2"}, 2, {"--loops", "parscale"});
  refused({"generate", model, "-p", "a", "--halt", "0.1"}, 2, {"--halt", "parscale"});
  refused({"generate", model, "-p", "a", "--device", "cuda"}, 1, {"--device cuda"});
  File f = checkpoint(config_of());
  Json config = config_of();
  config["streams"] = {{"count", 2}, {"prefix", 3}, {"smooth", 0}};
  f.header["__metadata__"]["yocou"] = config.dump();
  bad_file(write_file("bad.safetensors", f.bytes()), {"streams"});
}

TEST_CASE("cli: --halt says what ran, agrees with itself, and is refused where nothing can halt", "[cli][halt]") {
  const std::string& model = random_model();
  const std::string tokens = "72,101,108,108,111,32,119,111,114,108,100";
  const auto logits = [&](const Words& more) {
    Words words{"logits", model, "--tokens", tokens, "--json"};
    words.insert(words.end(), more.begin(), more.end());
    return good_json(words);
  };
  CHECK(!logits({}).contains("loops"));
  std::set<int> seen;
  for (const char* A : {"0.001", "0.05", "0.1", "0.2", "0.3", "1"}) {
    const Json whole = logits({"--halt", A});
    CAPTURE(A);
    CHECK(whole["loops"].size() == 11);
    for (const Json& t : whole["loops"]) seen.insert(t.get<int>());
    CHECK(logits({"--halt", A, "--prefill", "3", "--chunk", "2"}) == whole);
    CHECK(logits({"--halt", A, "--last"})["loops"] == whole["loops"]);
  }
  CHECK(seen == std::set<int>{1, 2, 3});
  CHECK(logits({"--halt", "1"})["logits"] == logits({"--loops", "1"})["logits"]);
  CHECK(logits({"--halt", "1e-9"})["logits"] == logits({})["logits"]);
  const std::string text = write_file("text", "some text of a few bytes"),
                    task = write_file(
                        "tasks.jsonl", "{\"prompt\":\"ab\",\"answer\":\"c\"}\n{\"prompt\":\"b\",\"answer\":\"cd\"}");
  CHECK(good_json({"score", model, text, "--halt", "1", "--json"})["rows"][0]["mean_loops"] == 1.0);
  CHECK(
      good_json({"score", model, text, "--halt", "1e-9", "--loops", "1,3", "--json"})["rows"][1]["mean_loops"] == 3.0);
  CHECK(good_json({"eval", model, task, "--halt", "1e-9", "--json"})["rows"][0]["mean_loops"] == 3.0);
  CHECK(!good_json({"eval", model, task, "--json"})["rows"][0].contains("mean_loops"));
  const Result written = good({"generate", model, "-p", "abc", "-n", "3", "--halt", "1", "--json"});
  CHECK(Json::parse(written.out)["mean_loops"] == 1.0);
  CHECK(written.err.find("mean loops 1;") != std::string::npos);
  const Json traced = good_json({"trace", model, "-p", "abcd", "--halt", "1", "--json"})["rows"];
  CHECK(traced[2]["rows"] == 4);
  CHECK(traced[3]["rows"] == 0);
  CHECK(traced[3]["norm"] == nullptr);
  CHECK(traced[7]["rows"] == 4);
  for (const char* A : {"0.1", "0.2", "1"})
    for (const Json& row : good_json({"verify", model, "-N", "1,9,30", "--steps", "2", "--batch", "2", "--chunk", "7",
             "--halt", A, "--json"})["rows"])
      CHECK(row["equal"] == true);
  CHECK(good_json({"verify", "--shape", "tiny", "-N", "3", "--halt", "0.1", "--json"})["rows"][0]["arch"] == "yoco-u");
  for (const char* A : {"0", "-0.1", "1.5", "nan", "x"})
    refused({"generate", model, "-p", "a", "--halt", A}, 2, {"--halt"});
  for (const char* arch : {"yoco", "transformer", "ut", "upper-loop", "yoco-u,ut"})
    refused({"verify", "--shape", "tiny", "-N", "1", "--halt", "0.1", "--arch", arch}, 2, {"--halt"});
  refused({"generate", model, "-p", "a", "--halt", "0.1", "--device", "cuda"}, 1, {"--device cuda"});
  Json config = config_of();  // custom: the one stage with loops above 1 is the one that loops
  config["arch"] = "custom";
  const std::string custom = write_file("custom.safetensors", checkpoint(config).bytes());
  const Json rows = good_json({"score", custom, text, "--halt", "0.1", "--loops", "1,2,3", "--json"})["rows"];
  CHECK(rows == good_json({"score", model, text, "--halt", "0.1", "--loops", "1,2,3", "--json"})["rows"]);
  config["stages"][1]["loops"] = 2;
  refused({"score", write_file("two.safetensors", checkpoint(config).bytes()), text, "--halt", "0.1"}, 2, {"--halt"});
}
