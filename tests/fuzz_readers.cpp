/// @file
/// fuzz_readers.cpp -- libFuzzer on the three readers that face bytes from elsewhere:
///
///   fuzz_readers --reader=checkpoint|config|tasks CORPUS
///
/// Any input must be read, or refused by an Error of one short line; what is read must be usable and survive being
/// written and read again. Everything else -- another exception, a sanitizer's report, a hang, memory -- is a finding.
#include <sys/mman.h>
#include <unistd.h>

#include <cmath>
#include <cstring>
#include <nlohmann/json.hpp>

#include "yocou.h"

namespace {

using namespace yocou;

void demand(bool holds, const char* what) {
  if (holds) return;
  std::fprintf(stderr, "violated: %s\n", what);
  std::abort();
}

/// The costs of any config that is accepted can be asked for; they may be too large for 128 bits, never wrong.
void ask_costs(const Config& c) {
  for (const Index N : {Index{1}, Index{257}, Index{1} << 40}) try {
      demand(cache_bytes(c, N, 2) <= cache_bytes(c, N, 4), "more bytes a number, more bytes");
      demand(prefill_flops(c, N) >= decode_flops(c, 0), "a prefill is at least a step");
      demand(count_params(c).active <= count_params(c).params, "active parameters are some of all");
    } catch (const Error&) {
    }
}

void read_config_text(std::string_view text) {
  const Config c = read_config(parse_json(text, "f"), "f");
  const std::string written = config_json(c).dump();
  demand(config_json(read_config(parse_json(written, "f"), "f")).dump() == written, "a config survives writing");
  ask_costs(c);
}

/// The end offset of the last tensor that a header names, when it is small; how much data to put behind it.
std::size_t data_size(std::string_view header) {
  const std::size_t at = header.rfind("data_offsets");
  if (at == std::string_view::npos) return 0;
  const std::size_t comma = header.find(',', at);
  std::size_t n = 0;
  for (std::size_t i = comma; comma != std::string_view::npos && ++i < header.size() && n < 100'000;)
    if (header[i] >= '0' && header[i] <= '9') n = 10 * n + static_cast<std::size_t>(header[i] - '0');
    else break;
  return n < 100'000 ? n : 0;
}

/// A file as it is; or, when it begins with '{', only a header, to which a right length and data are added: otherwise
/// hardly any mutation would get past the first check.
void read_checkpoint(std::string_view input) {
  static const int file = memfd_create("checkpoint", 0);
  std::string bytes(input);
  if (!input.empty() && input[0] == '{') {
    std::string header(input);
    header.resize((header.size() + 7) / 8 * 8, ' ');
    const std::uint64_t length = header.size();
    bytes.assign(reinterpret_cast<const char*>(&length), 8);
    bytes += header;
    for (std::size_t i = 0, n = data_size(input); i < n; ++i) bytes += static_cast<char>(i % 61);  // small numbers
  }
  demand(ftruncate(file, 0) == 0, "the memory file is emptied");
  demand(pwrite(file, bytes.data(), bytes.size(), 0) == static_cast<ssize_t>(bytes.size()), "it is written");
  const Model m = load_model("/proc/self/fd/" + std::to_string(file));
  unsigned sum = 0;
  for_each_tensor(m.config, m.weights, [&](const std::string&, const Shape&, const Tensor& t) {
    const auto* data = static_cast<const unsigned char*>(t.data);
    for (Index i = 0; i < t.bytes(); ++i) sum += data[i];
  });
  demand(sum != 0xdeadbeef || bytes.size() > 1, "every byte of every tensor can be read");
  read_config_text(config_json(m.config).dump());
  try {  // and it runs, or says what is not finite
    if (prefill_flops(m.config, 3) > Exact(1'000'000) || cache_bytes(m.config, 3, 4) > Exact(1'000'000)) return;
  } catch (const Error&) {
    return;
  }
  const auto engine = make_cpu_engine(m.config, m.weights, {Dtype::f32, 3, 3, 1});
  const std::vector<int> tokens{0, static_cast<int>(m.config.vocab_size - 1), 0};
  std::vector<float> logits(static_cast<std::size_t>(m.config.vocab_size));
  prefill(*engine, engine->open(), tokens, 2, logits.data());
  demand(std::all_of(logits.begin(), logits.end(), [](float v) { return std::isfinite(v); }), "logits are finite");
}

void read_task_text(std::string_view text) {
  for (const Task& t : read_tasks(text, "f", text.size() % 2 ? "level" : "")) {
    demand(!t.prompt.empty() && !t.answer.empty(), "tasks are not empty");
    demand(Json::accept(t.group), "a group is JSON");
  }
}

void (*reader)(std::string_view) = nullptr;

}  // namespace

extern "C" int LLVMFuzzerInitialize(int* argc, char*** argv) {
  set_thread_count(1);
  for (int i = 1; i < *argc; ++i) {
    const std::string_view a = (*argv)[i];
    if (a == "--reader=checkpoint") reader = read_checkpoint;
    if (a == "--reader=config") reader = read_config_text;
    if (a == "--reader=tasks") reader = read_task_text;
  }
  demand(reader, "--reader=checkpoint, config or tasks is given");
  return 0;
}

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  try {
    reader({reinterpret_cast<const char*>(data), size});
  } catch (const Error& e) {
    const std::string_view what = e.what();
    demand(!what.empty() && what.size() < 1000, "an error is a short line");
  }
  return 0;
}
