/// @file
/// model_golden.cpp -- logits that an independent model, written in PyTorch and run in float64, gave for
/// stored checkpoints (data/golden.py), and files that Python's safetensors library wrote.
#include <unistd.h>

#include <filesystem>
#include <map>

#include "fixtures.h"

namespace yocou::test {
namespace {

const std::filesystem::path data_folder = std::filesystem::path(YOCOU_SOURCE_DIR) / "data";

std::vector<std::filesystem::path> golden_files() {
  std::vector<std::filesystem::path> files;
  for (const auto& entry : std::filesystem::directory_iterator(data_folder / "golden"))
    if (entry.path().extension() == ".json") files.push_back(entry.path());
  std::sort(files.begin(), files.end());
  return files;
}

/// Holds a checkpoint against a file of golden logits.
void hold_golden(const std::filesystem::path& golden, const std::filesystem::path& checkpoint) {
  CAPTURE(golden.string(), checkpoint.string());
  const MappedFile file(golden.string());
  const Json json = parse_json(file.text(), golden.string());
  Model m = load_model(checkpoint.string());
  const Index T = json["loops"].get<Index>(), V = m.config.vocab_size;
  if (T > 1 || m.config.arch == "yoco-u") set_loops(m.config, T);  // throws where nothing loops
  const Tokens tokens = json["tokens"].get<Tokens>();
  const std::vector<Index> positions = json["positions"].get<std::vector<Index>>();
  Doubles expected;
  REQUIRE(json["logits"].size() == positions.size());
  for (const Json& logits : json["logits"]) {
    REQUIRE(std::ssize(logits) == V);
    for (const Json& v : logits) expected.push_back(v.get<double>());
  }
  for (const How& how : {How{}, How{Dtype::f32, 5, std::ssize(tokens) / 2}}) {
    const Floats all = run_all(m.config, m.weights, tokens, how);
    Floats found;
    for (const Index p : positions) found.insert(found.end(), row(all, p, V).begin(), row(all, p, V).end());
    close(found, expected, 2e-5 * largest_of(expected));
  }
}

TEST_CASE("golden logits of the independent model, every file", "[golden]") {
  const auto files = golden_files();
  REQUIRE(files.size() >= 20);
  Index shipped = 0;
  for (const auto& golden : files) {
    const MappedFile file(golden.string());
    const std::string checkpoint = parse_json(file.text(), golden.string())["checkpoint"].get<std::string>();
    const bool tiny = checkpoint.compare(0, 5, "tiny-") == 0;
    shipped += !tiny;
    hold_golden(golden, (tiny ? data_folder / "golden" : data_folder) / checkpoint);
  }
  CHECK(shipped >= 4);
}

TEST_CASE("what Python's safetensors library wrote loads, and is the same model", "[golden]") {
  const auto load = [](const std::string& name) {
    return load_model((data_folder / "golden" / (name + ".safetensors")).string());
  };
  const std::vector<std::pair<std::string, Dtype>> files{
      {"moe", Dtype::f32}, {"moe-bf16", Dtype::bf16}, {"moe-f16", Dtype::f16}};
  const Model original = load("tiny-moe");
  const Tokens tokens = tokens_of(original.config, 40);
  for (const auto& entry : files) {
    const std::string& name = entry.first;
    const Dtype dtype = entry.second;
    const Model ours = load("tiny-" + name), theirs = load("library-" + name);
    CAPTURE(name);
    hold_golden(data_folder / "golden" / ("tiny-" + name + ".json"),
        data_folder / "golden" / ("library-" + name + ".safetensors"));
    CHECK(brief(ours.config) == brief(theirs.config));
    same(run_all(theirs.config, theirs.weights, tokens), run_all(ours.config, ours.weights, tokens));
    // the 16-bit files hold the same weights, each rounded to the nearest
    std::map<std::string, Tensor> wide;
    for_each_tensor(
        original.config, original.weights, [&](const std::string& n, const Shape&, const Tensor& t) { wide[n] = t; });
    Index wrong = 0, count = 0;
    for_each_tensor(theirs.config, theirs.weights, [&](const std::string& n, const Shape&, const Tensor& t) {
      CHECK(t.dtype == dtype);
      const double half = dtype == Dtype::f32 ? 0 : dtype == Dtype::bf16 ? 0x1p-9 : 0x1p-12;
      for (Index r = 0; r < t.rows; ++r)
        for (Index k = 0; k < t.cols; ++k, ++count) {
          const double v = oracle::number(wide.at(n), r, k);
          wrong += !(std::fabs(oracle::number(t, r, k) - v) <= half * 2 * std::fabs(v) + (half > 0 ? 0x1p-25 : 0));
        }
    });
    CHECK(wrong == 0);
    CHECK(count > 5000);
  }
}

TEST_CASE("a written checkpoint reads back as the random model it was made from", "[golden]") {
  const std::filesystem::path path =
      std::filesystem::temp_directory_path() / ("yocou-test-" + std::to_string(getpid()) + ".safetensors");
  for (const Dtype dtype : {Dtype::f32, Dtype::bf16, Dtype::f16})
    for (const bool moe : {false, true}) {
      Config c = small_arch("yoco-u");
      if (moe) c = with_moe(c, {5, 2, 7, 9, true});
      c.tied_embeddings = moe;
      write_random_checkpoint(c, dtype, 5, path.string());
      {
        const Model stored = load_model(path.string()), made = random_model(c, dtype, 5);
        CHECK(brief(stored.config) == brief(c));
        const Tokens tokens = tokens_of(c, 20);
        same(run_all(stored.config, stored.weights, tokens), run_all(made.config, made.weights, tokens));
        const Model other = random_model(c, dtype, 6);
        CHECK(first_difference(
                  run_all(other.config, other.weights, tokens), run_all(made.config, made.weights, tokens)) >= 0);
      }
      std::filesystem::remove(path);
    }
}

}  // namespace
}  // namespace yocou::test
