/// @file
/// cuda_program.cpp -- the program itself with the emulated GPU behind `--device cuda`: every command beside its answer
/// on the CPU, and the two engines beside each other on random models.
#include <unistd.h>

#include <fstream>
#include <nlohmann/json.hpp>

#include "catch.h"
#include "cuda_emulator.h"
#include "cuda_model.h"

namespace {

using namespace yocou;

/// By how much the GPU's logits may differ from the CPU's, as a share of the largest. The GPU rounds to BF16 what the
/// CPU keeps in float32, and how far that moves logits depends on the model: so it is measured, in double precision, on
/// the same tokens, with the roundings and without. The GPU's are another draw of the same kind (its sums round
/// elsewhere, its P is rounded too), so twice that is allowed; 2^-8 where the roundings happened to cancel.
double limit(const Config& c, const Weights& w, const std::vector<int>& tokens, bool f32_cache = false) {
  std::vector<Tensor> from;
  for_each_tensor(c, w, [&](const std::string&, const Shape&, const Tensor& t) { from.push_back(t); });
  std::vector<cuda_test::Vec> logits[2];
  for (const bool rounded : {false, true}) {
    cuda_test::SmallModel m(c);
    for (std::size_t i = 0; i < from.size(); ++i) {
      widen(from[i], 0, std::ssize(m.storage[i]), m.storage[i].data());
      if (rounded)
        for (float& v : m.storage[i]) v = float(cuda_test::round16(v));
    }
    logits[rounded] = cuda_test::Reference(m, rounded, f32_cache).logits(tokens);
  }
  double largest = 0, moved = 0;
  for (std::size_t i = 0; i < logits[0].size(); ++i)
    for (std::size_t v = 0; v < logits[0][i].size(); ++v)
      largest = std::max(largest, std::fabs(logits[0][i][v])),
      moved = std::max(moved, std::fabs(logits[0][i][v] - logits[1][i][v]));
  return 2 * moved / largest + 0x1p-8;
}

struct Output {
  int status;
  std::string out, error;
};

/// Runs a command of the program in this process; what it writes goes to two files.
Output yocou_run(std::vector<std::string> arguments) {
  const int saved[2] = {dup(1), dup(2)};
  std::FILE* files[2] = {std::tmpfile(), std::tmpfile()};
  std::fflush(stdout), std::fflush(stderr);
  for (int i = 0; i < 2; ++i) dup2(fileno(files[i]), i + 1);
  const int status = run(std::move(arguments));
  std::fflush(stdout), std::fflush(stderr);
  std::string text[2];
  for (int i = 0; i < 2; ++i) {
    dup2(saved[i], i + 1), close(saved[i]);
    std::rewind(files[i]);
    for (int ch; (ch = std::fgetc(files[i])) != EOF;) text[i] += char(ch);
    std::fclose(files[i]);
  }
  return {status, text[0], text[1]};
}
/// The same command on both devices: the CPU's answer and the emulated GPU's. Both must succeed.
std::pair<std::string, std::string> on_both(std::vector<std::string> arguments) {
  std::string out[2];
  for (const bool cuda : {false, true}) {
    std::vector<std::string> all = arguments;
    all.insert(all.end(), {"--device", cuda ? "cuda" : "cpu"});
    const Output o = yocou_run(all);
    CAPTURE(arguments, cuda, o.error);
    CHECK(o.status == 0);
    out[cuda] = o.out;
  }
  return {out[0], out[1]};
}
std::pair<Json, Json> json_on_both(std::vector<std::string> arguments) {
  arguments.push_back("--json");
  const auto [cpu, gpu] = on_both(arguments);
  return {Json::parse(cpu), Json::parse(gpu)};
}
const std::string data = YOCOU_SOURCE_DIR "/data/";

}  // namespace

TEST_CASE("cuda program: what runs but not as it could says so in one line, once", "[cuda][program]") {
  // the first test of all: later ones run the general kernels too, and the lines come once a process
  emu::Options o;
  o.major = 8;
  emu::configure(o);
  const std::vector<std::string> command{
      "score", data + "austen.safetensors", data + ".gitignore", "--device", "cuda"};
  const auto notices = [&] {  // without progress lines
    std::string lines;
    std::istringstream all(yocou_run(command).error);
    for (std::string line; std::getline(all, line);)
      if (line.starts_with("yocou: ")) lines += line + "\n";
    return lines;
  };
  CHECK(notices() == "yocou: compute capability 8.x: Hopper's fast kernels cannot run here\n");
  CHECK(notices().empty());
  o = {}, o.library = false;
  emu::configure(o);
  CHECK(notices() == "yocou: cuBLASLt was not found: the program's own products run instead\n");
  CHECK(notices().empty());
  emu::configure({});
}

namespace {

// ---------------------------------------------------------------------------------------------------------------------
// The engines

std::unique_ptr<Engine> engine_on(bool cuda, const cuda_test::SmallModel& m, const EngineOptions& o) {
  if (cuda) return make_cuda_engine(m.c, m.w, o);
  return make_cpu_engine(m.c, m.w, o);
}

/// All logits of three sequences: prefill in chunks, alone and together, then decode steps one by one and batched.
std::vector<std::vector<float>> run_passes(Engine& e, const Config& c, const std::vector<std::vector<int>>& sequences) {
  std::vector<std::vector<float>> out(3);
  std::vector<std::size_t> done(3);
  const std::size_t V = std::size_t(c.vocab_size);
  std::vector<int> open;
  for (int i = 0; i < 3; ++i) open.push_back(e.open());
  const auto pass = [&](std::vector<std::pair<std::size_t, std::size_t>> parts) {
    std::vector<Segment> segments;
    std::size_t rows = 0;
    for (const auto& [s, n] : parts)
      segments.push_back({open[s], std::span(sequences[s]).subspan(done[s], n), Logits::all}), rows += n;
    std::vector<float> logits(rows * V);
    e.forward(segments, logits.data());
    auto row = logits.begin();
    for (const auto& [s, n] : parts) {
      out[s].insert(out[s].end(), row, row + std::ptrdiff_t(n * V));
      row += std::ptrdiff_t(n * V), done[s] += n;
    }
  };
  const auto left = [&](std::size_t s) { return sequences[s].size() - done[s]; };
  pass({{0, sequences[0].size() / 3}});
  pass({{1, sequences[1].size() - 3}, {0, sequences[0].size() / 3}, {2, 1}});
  pass({{0, left(0) - 3}});
  for (int i = 0; i < 3; ++i) pass({{2, 1}, {0, 1}, {1, 1}});
  while (left(2)) pass({{2, 1}});
  return out;
}

/// A model that any checkpoint may hold, in small; head widths that the fast kernels take, and others.
Config random_config(std::mt19937& random) {
  const auto one_of = [&](std::initializer_list<Index> v) { return *(v.begin() + random() % v.size()); };
  const auto coin = [&] { return random() % 2 == 0; };
  Config c;
  const std::pair<Index, Index> heads[] = {{4, 2}, {3, 3}, {6, 1}, {1, 1}, {6, 2}};
  std::tie(c.heads, c.kv_heads) = heads[random() % std::size(heads)];
  c.head_dim = c.heads > 4 ? one_of({64, 10}) : one_of({64, 64, 128, 24, 34});
  c.vocab_size = one_of({5, 67, 256}), c.dim = one_of({20, 41, 72});
  c.norm_eps = std::array{1e-5, 0.5}[random() % 2], c.rope_theta = std::array{10000.0, 100.0}[random() % 2];
  c.rope_half = coin(), c.tied_embeddings = coin(), c.embed_scale = coin() ? 1 : 4.5;
  if (coin()) c.ffn_dim = one_of({9, 40, 100});
  else c.moe = Moe{one_of({1, 4}), 1, one_of({7, 16}), one_of({0, 12}), coin()}, c.moe->active = c.moe->experts;
  const Index own = one_of({0, 1, 1, 2});
  for (Index i = 0; i < own; ++i) {
    const bool window = coin();
    c.stages.push_back({"own" + std::to_string(i), one_of({1, 2}), one_of({1, 2}),
        window ? Attention::window : Attention::full, window ? one_of({1, 2, 5, 16, 70}) : 0, random() % 4 != 0,
        /*refresh_kv=*/false});
  }
  if (own == 0 || coin())
    c.stages.push_back({"cross", one_of({1, 2}), one_of({1, 2}), Attention::shared, 0, coin(), coin()});
  return c;
}

std::vector<int> some_tokens(const Config& c, std::size_t n, unsigned seed) {
  std::mt19937 random(seed);
  std::vector<int> t(n);
  for (int& v : t) v = int(random() % unsigned(c.vocab_size));
  return t;
}

/// The share of the largest logit by which the engines differ at most. Where `margins` are given, rows at and behind a
/// choice of experts that a rounding may turn say nothing.
double difference(const std::vector<float>& cpu, const std::vector<float>& gpu, Index V,
    const std::vector<double>* margins = nullptr, double certain = 0) {
  REQUIRE(cpu.size() == gpu.size());
  double largest = 0, worst = 0;
  for (const float v : cpu) largest = std::max(largest, std::fabs(double(v)));
  for (std::size_t i = 0; i < cpu.size(); ++i)
    if (!margins || (*margins)[i / std::size_t(V)] > certain) {
      const double d = std::fabs(double(cpu[i]) - double(gpu[i]));
      if (!(d <= worst) && !std::isnan(worst)) worst = d;  // a NaN stays
    }
  return worst / largest;
}

}  // namespace

TEST_CASE("cuda and cpu engines agree: random models", "[cuda][program]") {
  const unsigned seed = unsigned(GENERATE(range(0, 15)));
  emu::Options o = emu::schedule(seed % 4);
  if (seed % 5 == 4) o.major = 8, o.library = false;  // the general kernels
  emu::configure(o);
  std::mt19937 random(seed);
  const Config c = random_config(random);
  const Dtype kv = seed % 6 == 5 ? Dtype::f32 : Dtype::bf16;
  CAPTURE(seed, config_json(c).dump());
  const cuda_test::SmallModel m(c, seed + 1);
  const std::vector<std::vector<int>> tokens{
      some_tokens(c, 40 + seed, 1), some_tokens(c, 9 + seed % 7, 2), some_tokens(c, 6, 3)};
  const EngineOptions options{kv, 100, 200, 3};
  const auto cpu = engine_on(false, m, {Dtype::f32, 100, 200, 3}), gpu = engine_on(true, m, options);
  const auto right = run_passes(*cpu, c, tokens), found = run_passes(*gpu, c, tokens);
  for (std::size_t s = 0; s < 3; ++s) {
    const double most = limit(c, m.w, tokens[s], kv == Dtype::f32);
    CHECK(difference(right[s], found[s], c.vocab_size) < most);
  }
  CHECK(gpu->counters.flops == cpu->counters.flops);
  CHECK(gpu->counters.cross_positions == cpu->counters.cross_positions);
  CHECK(gpu->global_rows() == cpu->global_rows());
  CHECK(gpu->cache_bytes() * size_of(Dtype::f32) == cpu->cache_bytes() * size_of(kv));
  emu::configure({});
}

TEST_CASE("cuda and cpu engines agree: experts chosen", "[cuda][program]") {
  const bool normalize = GENERATE(false, true);
  emu::configure(emu::schedule(normalize ? 3 : 0));
  Config c;
  c.vocab_size = 67, c.dim = 72, c.heads = 2, c.kv_heads = 1, c.head_dim = 64;
  c.moe = Moe{8, 2, 20, 12, normalize};
  c.stages = {{"self", 1, 2, Attention::window, 5, true, false}, {"cross", 1, 1, Attention::shared, 0, false, false}};
  const cuda_test::SmallModel m(c, 5);
  const EngineOptions options{Dtype::bf16, 40, 40, 1};
  Index compared = 0;
  for (unsigned i = 0; i < 8; ++i) {
    const auto tokens = some_tokens(c, 12, i);
    cuda_test::Reference reference(m, /*rounded=*/false);
    reference.logits(tokens);
    std::vector<float> logits[2];
    for (const bool cuda : {false, true}) {
      const auto e = engine_on(cuda, m, options);
      logits[cuda].resize(12 * 67);
      const Segment part{e->open(), tokens, Logits::all};
      e->forward({&part, 1}, logits[cuda].data());
    }
    constexpr double certain = 0.05;
    for (const double margin : reference.margins) compared += margin > certain;
    CHECK(difference(logits[0], logits[1], 67, &reference.margins, certain) < 0.04);
  }
  CHECK(compared >= 16);  // of 96 rows: those before the first close choice of their sequence
  emu::configure({});
}

// ---------------------------------------------------------------------------------------------------------------------
// The program

namespace {

std::vector<float> logits_of(const Json& j) {
  std::vector<float> all;
  for (const Json& row : j["logits"])
    for (const Json& v : row) all.push_back(v.get<float>());
  return all;
}

}  // namespace

TEST_CASE("cuda program: greedy text is the CPU's, up to the first near-tie", "[cuda][program]") {
  const auto [model, prompt, n, schedule] = GENERATE(table<std::string, std::string, std::string, unsigned>(
      {{"austen", "It is a truth universally acknowledged, that a single man in possession of", "24", 0},
          {"austen", "She was", "8", 3}, {"needle-yoco-u", "key", "8", 2}}));
  CAPTURE(model, prompt);
  emu::configure(emu::schedule(schedule));
  const std::string path = data + model + ".safetensors";
  const auto [cpu, gpu] = on_both({"generate", path, "-p", prompt, "-n", n});
  REQUIRE(cpu.size() == std::stoul(n));
  REQUIRE(gpu.size() == cpu.size());
  if (cpu == gpu) return;
  // where they part, the CPU's two best logits must be closer than the devices are allowed to differ
  const std::string same = prompt + cpu.substr(0, std::size_t(std::ranges::mismatch(cpu, gpu).in1 - cpu.begin()));
  const Model m = load_model(path);
  const std::vector<int> tokens(same.begin(), same.end());  // ASCII
  std::vector<float> row(std::size_t(m.config.vocab_size));
  const auto engine = make_cpu_engine(m.config, m.weights, {Dtype::f32, std::ssize(tokens), std::ssize(tokens), 1});
  prefill(*engine, engine->open(), tokens, std::ssize(tokens), row.data());
  double largest = 0;
  for (const float v : row) largest = std::max(largest, std::fabs(double(v)));
  std::ranges::sort(row, std::greater());
  CAPTURE(same, cpu, gpu, row[0], row[1]);
  CHECK(double(row[0] - row[1]) < 2 * limit(m.config, m.weights, tokens) * largest);
}

TEST_CASE("cuda program: logits of every golden model", "[cuda][program]") {
  const std::string name =
      GENERATE("austen", "cups-ut", "golden/tiny-all-stages", "golden/tiny-half-pairing", "golden/tiny-moe-all-active");
  CAPTURE(name);
  emu::configure(emu::schedule(1));
  const std::string path = data + name + ".safetensors";
  const Model m = load_model(path);
  const Index V = m.config.vocab_size;
  const std::vector<int> list = some_tokens(m.config, 24, 5);
  const double most = limit(m.config, m.weights, list);
  std::string tokens;
  for (const int t : list) tokens += std::to_string(t) + ",";
  for (const std::vector<std::string>& how :
      {std::vector<std::string>{}, {"--prefill", "17"}, {"--prefill", "20", "--chunk", "6", "--last"}}) {
    std::vector<std::string> arguments{"logits", path, "--tokens", tokens};
    arguments.insert(arguments.end(), how.begin(), how.end());
    const auto [cpu, gpu] = json_on_both(arguments);
    CHECK(cpu["tokens"] == gpu["tokens"]);
    CHECK(difference(logits_of(cpu), logits_of(gpu), V) < most);
  }
}

TEST_CASE("cuda program: score, eval and trace", "[cuda][program]") {
  emu::configure(emu::schedule(2));
  const auto close = [](const Json& cpu, const Json& gpu, double share) {
    return cpu.is_null() ? gpu.is_null()
                         : std::fabs(cpu.get<double>() - gpu.get<double>()) <= share * std::fabs(cpu.get<double>());
  };
  const std::filesystem::path folder =
      std::filesystem::temp_directory_path() / ("yocou-cuda-" + std::to_string(getpid()));
  REQUIRE(std::filesystem::create_directory(folder));
  const std::string text = folder / "text", tasks = folder / "tasks";
  {
    std::ofstream(text) << "The family of Dashwood had long been settled";
    std::ifstream all(data + "cups.jsonl");
    std::ofstream some(tasks);
    std::string line;
    for (int i = 0; i < 6 && std::getline(all, line); ++i) some << line << "\n";
  }
  auto [cpu, gpu] = json_on_both({"score", data + "austen.safetensors", text, "--loops", "1,3", "--by-position"});
  for (const char* table : {"rows", "by_position"}) {
    REQUIRE(cpu[table].size() == gpu[table].size());
    for (std::size_t i = 0; i < cpu[table].size(); ++i) {
      CAPTURE(cpu[table][i].dump(), gpu[table][i].dump());
      CHECK(close(cpu[table][i]["bits_per_byte"], gpu[table][i]["bits_per_byte"], 0.02));
    }
  }
  std::tie(cpu, gpu) = json_on_both({"eval", data + "cups-t3.safetensors", tasks, "--loops", "1,3"});
  CHECK(cpu == gpu);
  std::tie(cpu, gpu) = json_on_both({"trace", data + "austen.safetensors", "-p", "It was a truth"});
  REQUIRE(cpu["rows"].size() == gpu["rows"].size());
  for (std::size_t i = 0; i < cpu["rows"].size(); ++i) {
    const Json &a = cpu["rows"][i], &b = gpu["rows"][i];
    CAPTURE(a.dump(), b.dump());
    for (const char* key : {"stage", "loop", "layer", "application"}) CHECK(a[key] == b[key]);
    for (const char* key : {"norm", "angular_distance"}) CHECK(close(a[key], b[key], 0.02));
    CHECK(a["router_load"].size() == b["router_load"].size());
    double moved = 0;  // shares of choices that went to another expert: at most a close one here and there
    for (std::size_t e = 0; e < a["router_load"].size(); ++e)
      moved += std::fabs(a["router_load"][e].get<double>() - b["router_load"][e].get<double>()) / 2;
    CHECK(moved < 0.1);
  }
  std::filesystem::remove_all(folder);
}

TEST_CASE("cuda program: verify and bench", "[cuda][program]") {
  emu::configure({});
  const auto [cpu, gpu] = json_on_both({"verify", "--shape", "tiny", "--layers", "2", "-N", "1,65", "--steps", "1",
      "--kv-dtype", "bf16", "--arch", "yoco-u,ut,upper-loop-unshared"});
  CHECK(cpu["rows"] == gpu["rows"]);
  const Output o = yocou_run({"bench", "--shape", "tiny", "--layers", "2", "-N", "40", "--runs", "1", "--steps", "1",
      "--batch", "2", "--device", "cuda", "--json"});
  CHECK(o.status == 0);
  const Json rows = Json::parse(o.out)["rows"];
  CHECK(rows.size() == 2);
  CHECK(rows[0]["kv_bytes"] == 2 * static_cast<Index>(cache_bytes(make_config("tiny", "yoco-u", {2, 0, 0}), 40, 2).v));
}

TEST_CASE("cuda program: what cannot run says so in one line", "[cuda][program]") {
  const std::vector<std::string> command{
      "generate", data + "austen.safetensors", "-p", "It", "-n", "2", "--device", "cuda"};
  const auto refused = [&](const emu::Options& o, const char* why, std::vector<std::string> more = {}) {
    emu::configure(o);
    std::vector<std::string> all = command;
    all.insert(all.end(), more.begin(), more.end());
    const Output out = yocou_run(all);
    CAPTURE(out.error);
    CHECK(out.status == 1);
    CHECK(out.out.empty());
    CHECK(std::ranges::count(out.error, '\n') == 1);
    CHECK(out.error.find(why) != std::string::npos);
  };
  emu::Options o;
  o.devices = 0;
  refused(o, "no device, or no driver for it");
  o = {}, o.major = 7;
  refused(o, "compute capability is 7.x");
  o = {}, o.memory = 1 << 20;
  refused(o, "out of device memory");
  // sizes that no shape of the program has
  Config c;
  c.vocab_size = 67, c.dim = 8, c.heads = c.kv_heads = 1, c.head_dim = 8, c.ffn_dim = 8;
  c.stages = {{"self", 1, 1, Attention::full, 0, true, false}};
  const auto make = [&](const Config& config, const EngineOptions& options) {
    return engine_on(true, cuda_test::SmallModel(config), options);
  };
  emu::configure({});
  CHECK_THROWS_WITH(make(c, {Dtype::f32, 1, Index{1} << 31, 1}), "CUDA: 2147483648 positions; at most 2^31 - 2");
  CHECK_THROWS_AS(make(c, {Dtype::f32, 1, 1, 65536}), Error);
  CHECK_THROWS_AS(make(c, {Dtype::f32, 4000001, 1, 1}), Error);
  CHECK_THROWS_AS(make(c, {Dtype::f16, 1, 1, 1}), Error);
  c.head_dim = 512;
  CHECK_THROWS_WITH(make(c, {Dtype::f32, 1, 1, 1}), "CUDA: head_dim is 512; the kernels take at most 256");
}
