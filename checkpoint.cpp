/// @file
/// checkpoint.cpp -- the models as data: every architecture of the paper as a list of stages, shapes, configs as JSON, and
/// checkpoints in .safetensors files. A file is mapped, never copied, and every byte of it is doubted: what is not
/// exactly a model gives one line that names the file, the thing, what was expected and what was found.
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <map>
#include <nlohmann/json.hpp>
#include <numeric>
#include <set>

#include "yocou.h"

namespace yocou {

// =====================================================================================================================
// 1. Architectures: every system of the paper as a value

// clang-format off
const std::vector<Arch>& archs() {
  using enum Attention;
  // [archs]
  static const std::vector<Arch> all = {
    {"yoco-u",      3, {{"self", window, true, true}, {"cross", shared, true}},
                       "O((N + W T L) D)",   "O(L/2 T N D)",         "O(L/2 (N + W T) D)"},
    {"yoco",        1, {{"self", window, true}, {"cross", shared, true}},
                       "O((N + W L) D)",     "O(L/2 N D)",           "O(L/2 (N + W) D)"},
    {"transformer", 1, {{"layers", full, false}},
                       "O(L N D)",           "O(L N^2 D)",           "O(L N D)"},
    {"ut",          2, {{"layers", full, false, true}},
                       "O(L T N D)",         "O(L T N^2 D)",         "O(L T N D)"},
    {"rins",        3, {{"loop", full, true, true}, {"final", full, true}},
                       "O(L/2 (T + 1) N D)", "O(L/2 (T + 1) N^2 D)", "O(L/2 (T + 1) N D)"},
    {"upper-loop",  3, {{"self", window, true}, {"cross", shared, true, true}},
                       "O((N + W L) D)",     "O(L/2 N D)",           "O(L/2 (T N + W) D)"},
    {"upper-loop-unshared", 3, {{"self", window, true}, {"cross", shared, true, true, true}},
                       "O((T N + W L) D)",   "O(L/2 T N^2 D)",       "O(L/2 (T N + W) D)"},
    {"parscale",    1, {{"layers", full, false}},
                       "O(P L N D)",         "O(P L N^2 D)",         "O(P L N D)",          /*streams=*/true},
  };
  // [archs]
  return all;
}
// clang-format on

const Arch* find_arch(const std::string& name) {
  const auto it = std::ranges::find(archs(), name, &Arch::name);
  return it == archs().end() ? nullptr : &*it;
}

Index looped_stage(const Config& c) {
  const Arch* arch = find_arch(c.arch);
  Index found = -1, count = 0;
  for (Index s = 0; s < std::ssize(c.stages); ++s) {
    const bool marked = arch ? s < std::ssize(arch->parts) && arch->parts[s].looped : c.stages[s].loops > 1;
    if (marked) found = s;
    count += marked;
  }
  return count == 1 ? found : -1;
}

Index set_loops(Config& c, Index T) {
  if (const Index s = looped_stage(c); s >= 0) return T ? c.stages[s].loops = T : c.stages[s].loops;
  if (T) throw Usage("--loops: arch '" + c.arch + "' has no looped stage");
  return 1;
}

// clang-format off
/// The shapes. F and V of 1.3b are not published and chosen here; F 0: the mixture of experts of the 10B model.
const struct { const char* name; Index D, L, H, G, dh, F, V, W; } shapes[] = {
  {"1.3b",    2560, 20, 20, 4, 128, 6912, 100352, 512},
  {"10b-moe", 2560, 20, 20, 4, 128,    0, 100352, 512},
  {"small",    512,  8,  4, 1, 128, 1408,    256, 512},
  {"tiny",     128,  4,  2, 1,  64,  352,    256,  64}};
// clang-format on

const Names& shape_names() {
  static const Names all = [] {
    Names names;
    for (const auto& s : shapes) names.emplace_back(s.name);
    return names;
  }();
  return all;
}

Config make_config(const std::string& shape, const std::string& arch_name, const ShapeOptions& o) {
  const Arch* arch = find_arch(arch_name);
  const auto* p = std::ranges::find_if(shapes, [&](const auto& s) { return s.name == shape; });
  if (!arch) throw Usage("--arch: no architecture '" + arch_name + "'");
  if (p == std::end(shapes)) throw Usage("--shape: no shape '" + shape + "'");
  if (o.window && !arch->takes_window()) throw Usage("--window: arch '" + arch_name + "' has no window stage");
  if (o.streams && !arch->streams) throw Usage("--streams: arch '" + arch_name + "' has no streams");
  Config c;
  c.arch = arch_name;
  if (arch->streams) c.streams = {o.streams ? o.streams : 2, /*prefix=*/48, /*smooth=*/0.01};
  const auto either = [](Index over, Index own) { return over ? over : own; };
  c.vocab_size = either(o.vocab_size, p->V), c.dim = either(o.dim, p->D), c.ffn_dim = either(o.ffn_dim, p->F);
  c.heads = either(o.heads, p->H), c.kv_heads = either(o.kv_heads, p->G), c.head_dim = either(o.head_dim, p->dh);
  if (!p->F && o.ffn_dim) throw Usage("--ffn-dim: shape '" + shape + "' has a mixture of experts");
  if (!p->F) c.moe = Moe{64, 8, 1024, 1024, true};
  const Index L = either(o.layers, p->L), W = either(o.window, p->W);
  for (const Arch::Part& part : arch->parts) {
    if (part.half && L % 2)
      throw Usage("--layers: arch '" + arch_name + "' halves its layers, " + std::to_string(L) + " is odd");
    c.stages.push_back({part.name, part.half ? L / 2 : L, part.looped ? arch->loops : 1, part.attention,
        part.attention == Attention::window ? W : 0, /*rope=*/part.attention != Attention::shared, part.refresh});
  }
  set_loops(c, o.loops);
  try {
    return read_config(config_json(c), "--shape " + shape);
  } catch (const Error& e) {  // sizes that do not go together
    throw Usage(e.what());
  }
}

// [tensors]
void for_each_tensor(const Config& c, Weights& w, const TensorVisit& visit) {
  const Index D = c.dim, P = c.streams.count;
  const auto swiglu = [&](const std::string& name, Ffn& f, Index F, Index E) {
    const auto stacked = [E](Index a, Index b) { return E ? Shape{E, a, b} : Shape{a, b}; };
    visit(name + "w_gate", stacked(F, D), f.gate);
    visit(name + "w_up", stacked(F, D), f.up);
    visit(name + "w_down", stacked(D, F), f.down);
  };
  visit("embed", Shape{c.vocab_size, D}, w.embed);
  for (std::size_t s = 0; s < c.stages.size(); ++s)
    for (std::size_t i = 0; i < w.stages[s].size(); ++i) {
      Layer& l = w.stages[s][i];
      const std::string name = c.stages[s].name + "." + std::to_string(i) + ".";
      visit(name + "attn_norm", Shape{D}, l.attn_norm);
      visit(name + "wq", Shape{c.q_dim(), D}, l.wq);
      if (c.stages[s].attention != Attention::shared) {
        visit(name + "wk", Shape{c.kv_dim(), D}, l.wk);
        visit(name + "wv", Shape{c.kv_dim(), D}, l.wv);
      }
      if (P > 1) {
        visit(name + "prefix_k", Shape{P, c.streams.prefix, c.kv_dim()}, l.prefix_k);
        visit(name + "prefix_v", Shape{P, c.streams.prefix, c.kv_dim()}, l.prefix_v);
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
  if (P > 1) {
    visit("mix.w1", Shape{D, P * D}, w.mix_w1);
    visit("mix.b1", Shape{D}, w.mix_b1);
    visit("mix.w2", Shape{P, D}, w.mix_w2);
    visit("mix.b2", Shape{P}, w.mix_b2);
  }
  if (!c.tied_embeddings) visit("head", Shape{c.vocab_size, D}, w.head);
}
// [tensors]

void for_each_tensor(const Config& c, const Weights& w,
    const std::function<void(const std::string&, const Shape&, const Tensor&)>& visit) {
  Weights views = w;
  for_each_tensor(c, views, TensorVisit(visit));
}

// =====================================================================================================================
// 2. Checkpoints: a config and tensors in one .safetensors file, mapped, never copied; every byte of it is doubted

std::string dump(const Json& j, bool ascii) { return j.dump(-1, ' ', ascii, Json::error_handler_t::replace); }

std::string valid(const std::string& text) { return Json::parse(dump(text)).get<std::string>(); }

std::string quote(const Json& v) {
  const std::string s = dump(v, /*ascii=*/true);
  return s.size() > 120 ? s.substr(0, 120) + "..." : s;
}

Json parse_json(std::string_view text, const std::string& where) {
  std::vector<std::set<std::string>> keys;
  std::size_t values = 0;  // bounds that no real model comes near: an ordered object looks its keys up one by one
  using Event = Json::parse_event_t;
  const auto check = [&](int depth, Event event, Json& value) {
    if (depth > 32) fail(where, ": JSON nested deeper than 32");
    if (++values > 2'000'000) fail(where, ": JSON of more than 2000000 values");
    if (event == Event::key && keys.back().size() == 65'536) fail(where, ": more than 65536 keys in one object");
    if (event == Event::object_start) keys.emplace_back();
    if (event == Event::object_end) keys.pop_back();
    if (event == Event::key && !keys.back().insert(value.get<std::string>()).second)
      fail(where, ": duplicate key ", quote(value));
    return true;
  };
  try {
    return Json::parse(text, check);
  } catch (const Json::exception& e) {
    const std::string_view what = e.what();
    fail(where, ": not valid JSON: ", what.substr(what.find(']') + 2).substr(0, 160));
  }
}

std::string join(const Names& names, const char* between) {
  std::string all;
  for (std::size_t i = 0; i < names.size(); ++i) all += (i ? between : "") + names[i];
  return all;
}

const Names attention_names{"window", "full", "shared"}, dtype_names{"F32", "BF16", "F16"};
const std::string& name_of(Dtype t) { return dtype_names[static_cast<std::size_t>(t)]; }

/// An object's fields, read or written by the same calls. Reading throws Error for what is missing, of the wrong kind,
/// out of range, or left over. A field may be missing when the value it would set is a good one already: its default.
class Fields {
 public:
  explicit Fields(Json& to) : to_(&to) {}
  Fields(const Json& from, std::string where) : where_(std::move(where)) {
    if (!from.is_object()) fail(where_, ": expected an object, found ", from.type_name());
    from.get_to(left_);
  }
  /// What has not been taken yet of what is read.
  bool has(const std::string& key) const { return left_.count(key) > 0; }
  Json take(const std::string& key) {
    if (!has(key)) fail(where_, ": key \"", key, "\" is missing");
    return left_.extract(key).mapped();
  }
  template <class T>
  void number(const std::string& key, T& value, const Range<T>& range) {
    field(key, value, range.text(), [&](const Json& v) {
      if constexpr (std::is_floating_point_v<T>) return v.is_number() && range.has(v.get<T>());
      else return v.is_number_integer() && v.get<__int128>() == v.get<T>() && range.has(v.get<T>());
    });
  }
  void flag(const std::string& key, bool& value, bool otherwise) {
    if (!to_) value = otherwise;
    field(key, value, "true or false", [](const Json& v) { return v.is_boolean(); });
  }
  /// A string: any, or one of `names`.
  void text(const std::string& key, std::string& value, const Names& names = {}) {
    field(key, value, names.empty() ? "a string" : "one of " + join(names), [&](const Json& v) {
      return v.is_string() && (names.empty() || std::ranges::count(names, v.get<std::string>()) > 0);
    });
  }
  /// An enumeration whose values `names` lists in their order. It may not be missing.
  template <class T>
  void choice(const std::string& key, T& value, const Names& names) {
    std::string name = to_ ? names[static_cast<std::size_t>(value)] : "";
    text(key, name, names);
    value = static_cast<T>(std::ranges::find(names, name) - names.begin());
  }
  /// A list of objects, at least one; visit(Fields&, value) deals with the fields of each.
  template <class T, class Visit>
  void objects(const std::string& key, std::vector<T>& values, Visit&& visit) {
    Json list = to_ ? Json(Json::array_t(values.size())) : take(key);
    if (!list.is_array() || list.empty()) fail(where_, ": \"", key, "\" must list at least one object");
    values.resize(list.size());
    for (std::size_t i = 0; i < values.size(); ++i) {
      Fields f = to_ ? Fields(list[i]) : Fields(list[i], where_ + ": " + key + "[" + std::to_string(i) + "]");
      visit(f, values[i]);
      f.done();
    }
    if (to_) (*to_)[key] = list;
  }
  /// An object within.
  Fields inside(const std::string& key) { return to_ ? Fields((*to_)[key]) : Fields(take(key), where_ + ": " + key); }
  /// Every key must have been taken.
  void done() const {
    if (!left_.empty()) fail(where_, ": key ", quote(left_.begin()->first), " is unknown, or out of place here");
  }

 private:
  template <class T, class Good>
  void field(const std::string& key, T& value, const std::string& expected, Good&& good) {
    if (to_) (*to_)[key] = value;
    if (to_ || (!has(key) && good(Json(value)))) return;
    const Json v = take(key);
    if (!good(v)) fail(where_, ": \"", key, "\" must be ", expected, ", found ", quote(v));
    v.get_to(value);
  }
  Json* to_ = nullptr;                ///< what is written
  std::map<std::string, Json> left_;  ///< what is read and has not been taken
  std::string where_;
};

/// The fields of a stage, read or written: those that its attention has a use for.
void stage_fields(Fields& f, Stage& s) {
  f.text("name", s.name);
  f.number("layers", s.layers, counts);
  f.number("loops", s.loops, counts);
  f.choice("attention", s.attention, attention_names);
  const bool shared = s.attention == Attention::shared;
  if (s.attention == Attention::window) f.number("window", s.window, sizes);
  f.flag("rope", s.rope, /*otherwise=*/!shared);
  if (shared) f.flag("refresh_kv", s.refresh_kv, /*otherwise=*/false);
}

/// The fields of a config.
void config_fields(Fields& f, Config& c) {
  Names labels{"custom"};
  for (const Arch& a : archs()) labels.push_back(a.name);
  f.text("arch", c.arch, labels);
  f.number("vocab_size", c.vocab_size, sizes);
  f.number("dim", c.dim, sizes);
  f.number("heads", c.heads, sizes);
  f.number("kv_heads", c.kv_heads, sizes);
  f.number("head_dim", c.head_dim, sizes);
  if (c.moe || f.has("moe")) {
    Moe& moe = c.moe ? *c.moe : c.moe.emplace();
    Fields m = f.inside("moe");
    m.number("experts", moe.experts, sizes);
    m.number("active", moe.active, sizes);
    m.number("dim", moe.dim, sizes);
    m.number("shared_dim", moe.shared_dim, {0, sizes.high});
    m.flag("normalize", moe.normalize, /*otherwise=*/false);
    m.done();
  } else {
    f.number("ffn_dim", c.ffn_dim, sizes);
  }
  if (c.streams.count > 1 || f.has("streams")) {
    if (f.has("streams")) c.streams.smooth = -1;  // there is no default
    Fields s = f.inside("streams");
    s.number("count", c.streams.count, {2, counts.high});
    s.number("prefix", c.streams.prefix, sizes);
    s.number("smooth", c.streams.smooth, {0, 1});
    s.done();
  }
  std::string pairing = c.rope_half ? "half" : "interleaved";
  f.number("norm_eps", c.norm_eps, {0, 1e38});  // these are float32 later
  f.number("rope_theta", c.rope_theta, {above_0, 1e38});
  f.text("rope_pairing", pairing, {"interleaved", "half"});
  f.number("embed_scale", c.embed_scale, {0, 1e38});
  f.flag("tied_embeddings", c.tied_embeddings, /*otherwise=*/false);
  f.text("tokenizer", c.tokenizer, {"bytes"});
  f.objects("stages", c.stages, stage_fields);
  c.rope_half = pairing == "half";
}

Config read_config(const Json& json, const std::string& path) {
  const std::string where = path + ": config";
  Config c;
  c.arch = "";  // there is no default
  Fields f(json, where);
  config_fields(f, c);
  if (c.moe && f.has("ffn_dim")) fail(where, ": \"ffn_dim\" and \"moe\" exclude each other");
  f.done();
  if (c.moe && c.moe->active > c.moe->experts)
    fail(where, ": moe: ", c.moe->active, " active experts of ", c.moe->experts);
  if (c.heads % c.kv_heads) fail(where, ": heads ", c.heads, " is not a multiple of kv_heads ", c.kv_heads);
  const bool streams = c.streams.count > 1;
  if (c.streams.smooth == 1) fail(where, ": streams: \"smooth\" must be below 1");
  std::set<std::string> names{"kv"};  // the global cache's prefix
  for (const Stage& s : c.stages) {
    const std::string at = where + ": stage " + quote(s.name);
    const auto odd = [](unsigned char ch) { return ch < 32 || ch >= 127 || ch == '.'; };
    if (s.name.empty() || std::ranges::any_of(s.name, odd))
      fail(at, ": a stage's name is printable ASCII, not empty, and has no dot");
    if (!names.insert(s.name).second) fail(at, ": another stage, or the global cache, has this name");
    if (streams && (s.attention != Attention::full || s.loops > 1))
      fail(at, ": streams take full stages of one loop, found ", s.loops, " x ",
          attention_names[static_cast<std::size_t>(s.attention)]);
    if (s.rope && c.head_dim % 2) fail(at, ": head_dim ", c.head_dim, " is odd, RoPE needs pairs");
    if (s.attention == Attention::shared && &s != &c.stages.back()) fail(at, ": the one shared stage must be the last");
  }
  const auto fits = [](const Arch::Part& p, const Stage& s) {
    return p.attention == s.attention && p.refresh == s.refresh_kv && (p.looped || s.loops == 1);
  };
  const Arch* arch = find_arch(c.arch);  // a label promises its stages
  if (arch && arch->streams != streams)
    fail(where, ": arch ", c.arch, arch->streams ? " needs" : " excludes", " the key \"streams\"");
  if (arch && !std::equal(arch->parts.begin(), arch->parts.end(), c.stages.begin(), c.stages.end(), fits))
    fail(where, ": \"arch\" says ", c.arch, ", the stages do not; \"custom\" fits any stages");
  return c;
}

Json config_json(Config c) {
  Json j;
  Fields f(j);
  config_fields(f, c);
  return j;
}

/// What changes under a running program is not protected: a file that is cut short ends the program with one line
/// (main()), one that is rewritten in place changes the weights; replacing it by rename is safe.
MappedFile::MappedFile(const std::string& path) {
  const int fd = ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  if (fd < 0) fail(path, ": ", std::strerror(errno));
  struct stat info {};
  const bool regular = fstat(fd, &info) == 0 && S_ISREG(info.st_mode);
  size_ = regular ? static_cast<std::size_t>(info.st_size) : 0;
  if (size_ > 0) p_ = ::mmap(nullptr, size_, PROT_READ, MAP_PRIVATE, fd, 0);
  const int error = errno;
  ::close(fd);
  if (!regular) fail(path, ": not a regular file");
  if (p_ == MAP_FAILED) fail(path, ": cannot be mapped: ", std::strerror(error));
}
MappedFile::~MappedFile() {
  if (p_) ::munmap(p_, size_);
}

Tensor as_matrix(const void* data, Dtype dtype, const Shape& shape) {
  const Index rows = std::accumulate(shape.begin(), shape.end() - 1, Index{1}, std::multiplies<>());
  return {data, dtype, rows, shape.back()};
}

Weights empty_weights(const Config& c) {
  Weights w;
  for (const Stage& s : c.stages) w.stages.emplace_back(static_cast<std::size_t>(s.layers));
  return w;
}

/// The header's entry of a tensor that the config asks for: dtype, shape and offsets agree, and lie in the `data` bytes
/// behind the header. Throws Error naming the tensor, expected and found.
StoredTensor read_tensor(
    const Json& entry, const std::string& name, const Shape& shape, Index data, const std::string& where) {
  Fields f(entry, where);
  StoredTensor t{name, Dtype::f32, shape, 0, 0};
  f.choice("dtype", t.dtype, dtype_names);
  const Json found = f.take("shape"), offsets = f.take("data_offsets");
  f.done();
  if (found != Json(shape)) fail(where, ": expected shape ", dump(shape), ", found ", quote(found));
  Index bytes = size_of(t.dtype);
  for (const Index d : shape)
    if (__builtin_mul_overflow(bytes, d, &bytes) || bytes > data)
      fail(where, ": shape ", dump(shape), " takes more than the file's ", data, " bytes of data");
  const auto offset = [&](const Json& v) { return v.is_number_integer() && v >= 0 && v <= data; };
  if (!offsets.is_array() || offsets.size() != 2 || !offset(offsets[0]) || !offset(offsets[1]))
    fail(where, ": \"data_offsets\" must be two integers from 0 to the file's ", data, ", found ", quote(offsets));
  offsets[0].get_to(t.begin), offsets[1].get_to(t.end);
  if (t.end - t.begin != bytes)
    fail(where, ": shape ", dump(shape), " ", name_of(t.dtype), " takes ", bytes, " bytes, data_offsets ",
        dump(offsets), " give ", t.end - t.begin);
  return t;
}

Model load_model(const std::string& path) {
  Model m;
  m.file = std::make_unique<MappedFile>(path);
  const std::string_view file = m.file->text();
  std::uint64_t length = 0;
  constexpr std::size_t limit = 100'000'000;
  if (file.size() < 8) fail(path, ": a safetensors file has at least 8 bytes, found ", file.size());
  std::memcpy(&length, file.data(), 8);
  if (length > std::min(file.size() - 8, limit))
    fail(path, ": the header claims ", length, " bytes; ", file.size() - 8, " follow in the file, ", limit,
        " are the limit");
  const Json header = parse_json(file.substr(8, length), path + ": header");
  const std::string_view numbers = file.substr(8 + length);
  if (!header.is_object()) fail(path, ": header: expected an object, found ", header.type_name());
  auto stored = header.get<std::map<std::string, Json>>();
  const Json meta = stored["__metadata__"];
  stored.erase("__metadata__");
  if (!meta.is_object() || !meta.contains("yocou") || !meta["yocou"].is_string())
    fail(path, ": no __metadata__ with a string \"yocou\", the config; not a yocou checkpoint");
  m.config = read_config(parse_json(meta["yocou"].get<std::string>(), path + ": config"), path);
  Index layers = 0;
  for (const Stage& s : m.config.stages) layers += s.layers;
  if (layers > std::ssize(stored))
    fail(path, ": the config has ", layers, " layers, the file only ", stored.size(), " tensors");
  m.weights = empty_weights(m.config);
  for_each_tensor(m.config, m.weights, [&](const std::string& name, const Shape& shape, Tensor& t) {
    const std::string where = path + ": tensor " + quote(name);
    const auto node = stored.extract(name);
    if (!node) fail(where, ": expected shape ", dump(shape), ", found none in the file");
    const StoredTensor& s = m.tensors.emplace_back(read_tensor(node.mapped(), name, shape, std::ssize(numbers), where));
    t = as_matrix(numbers.data() + s.begin, s.dtype, shape);
    if ((8 + length + s.begin) % size_of(s.dtype))
      fail(where, ": its data is not aligned to ", size_of(s.dtype), " bytes");
  });
  if (!stored.empty())
    fail(path, ": tensor ", quote(stored.begin()->first), " is not in the config",
        stored.begin()->first == "head" ? ": tied_embeddings makes embed the head" : "");
  std::ranges::sort(m.tensors, {}, &StoredTensor::begin);
  Index at = 0;
  for (const StoredTensor& t : m.tensors) {
    if (t.begin != at)
      fail(path, ": tensor ", quote(t.name), ": data begins at ", t.begin, ", expected ", at,
          t.begin < at ? ", overlap" : ", gap");
    at = t.end;
  }
  if (at != std::ssize(numbers)) fail(path, ": the tensors end at ", at, ", the data at ", numbers.size());
  if (m.config.tied_embeddings) m.weights.head = m.weights.embed;
  return m;
}

/// Random numbers first .. first+count-1 of a tensor: gains 1, biases 0, matrices uniform with variance 1/fan_in. A
/// function of (seed, tensor, index) alone, so it does not depend on threads or on how the tensor is cut.
void random_numbers(std::uint64_t seed, std::uint64_t tensor, const std::string& name, const Shape& shape, Dtype dtype,
    Index first, Index count, void* out) {
  constexpr Index piece = 4096;
  const bool vector = shape.size() == 1;
  const float constant = name.starts_with("mix.b") ? 0 : 1;
  const float range = static_cast<float>(std::sqrt(3.0 / static_cast<double>(shape.back())));
  const std::uint64_t stream = (seed * 0x9e3779b97f4a7c15u) ^ (tensor * 0xd1342543de82ef95u);
#pragma omp parallel for schedule(static) if (count > 16 * piece)
  for (Index at = 0; at < count; at += piece) {
    float numbers[piece];
    const Index n = std::min(piece, count - at);
    for (Index i = 0; i < n; ++i) {
      std::uint64_t z = stream + static_cast<std::uint64_t>(first + at + i) * 0x9e3779b97f4a7c15u;  // splitmix64
      z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
      z = (z ^ z >> 27) * 0x94d049bb133111ebu;
      const float u = static_cast<float>((z ^ z >> 31) >> 40) * 0x1p-23f - 1.f;  // [-1, 1)
      numbers[i] = vector ? constant : u * range;
    }
    narrow(numbers, n, dtype, static_cast<char*>(out) + at * size_of(dtype));
  }
}

Model random_model(const Config& c, Dtype dtype, std::uint64_t seed) {
  Model m;
  m.config = c;
  m.weights = empty_weights(c);
  for_each_tensor(c, m.weights, [&](const std::string& name, const Shape& shape, Tensor& t) {
    stop_if_interrupted();
    t = as_matrix(nullptr, dtype, shape);
    const auto number = static_cast<std::uint64_t>(m.memory.size());
    const auto size = static_cast<std::size_t>((t.bytes() + 63) / 64 * 64);
    m.memory.emplace_back(std::aligned_alloc(64, size), &std::free);
    void* data = m.memory.back().get();
    if (!data) fail("out of memory: tensor ", name, " of random weights takes ", t.bytes(), " bytes");
    random_numbers(seed, number, name, shape, dtype, 0, t.rows * t.cols, data);
    t.data = data;
  });
  if (c.tied_embeddings) m.weights.head = m.weights.embed;
  return m;
}

/// A file that appears under its name only when it is whole: written beside it, then renamed. Throws Error when the
/// disk does not take it.
class OutputFile {
 public:
  explicit OutputFile(const std::string& path) : path_(path), beside_(path + ".part" + std::to_string(getpid())) {
    std::error_code none;
    const auto there = std::filesystem::status(path, none);
    if (exists(there) && !is_regular_file(there)) fail(path, ": exists and is not a regular file");
    check(out_ = std::fopen(beside_.c_str(), "wbx"));
  }
  OutputFile(const OutputFile&) = delete;
  void write(const void* data, std::size_t bytes) { check(std::fwrite(data, 1, bytes, out_) == bytes); }
  void commit() {
    check(std::fflush(out_) == 0 && fsync(fileno(out_)) == 0);
    check(std::fclose(std::exchange(out_, nullptr)) == 0 && std::rename(beside_.c_str(), path_.c_str()) == 0);
  }
  ~OutputFile() {
    if (out_) std::fclose(out_);
    std::remove(beside_.c_str());  // nothing after a commit
  }

 private:
  void check(bool good) const {
    if (!good) fail(path_, ": cannot be written: ", std::strerror(errno));
  }
  std::string path_, beside_;
  std::FILE* out_ = nullptr;
};

void write_random_checkpoint(const Config& c, Dtype dtype, std::uint64_t seed, const std::string& path) {
  Json header;
  header["__metadata__"] = {{"format", "pt"}, {"yocou", config_json(c).dump()}};  // pt: transformers' mark for PyTorch
  Weights w = empty_weights(c);
  Index at = 0;
  for_each_tensor(c, w, [&](const std::string& name, const Shape& shape, Tensor&) {
    const Index begin = std::exchange(at, at + as_matrix(nullptr, dtype, shape).bytes());
    header[name] = {{"dtype", name_of(dtype)}, {"shape", shape}, {"data_offsets", {begin, at}}};
  });
  std::string text = header.dump();
  text.resize((text.size() + 7) / 8 * 8, ' ');
  OutputFile file(path);
  const std::uint64_t length = text.size();
  file.write(&length, 8);
  file.write(text.data(), text.size());
  std::vector<char> buffer;
  std::uint64_t number = 0;
  for_each_tensor(c, w, [&](const std::string& name, const Shape& shape, Tensor&) {
    const Tensor t = as_matrix(nullptr, dtype, shape);
    for (Index i = 0, count = t.rows * t.cols; i < count; i += 1 << 20) {
      const Index n = std::min<Index>(1 << 20, count - i);
      buffer.resize(static_cast<std::size_t>(n * size_of(dtype)));
      random_numbers(seed, number, name, shape, dtype, i, n, buffer.data());
      file.write(buffer.data(), buffer.size());
      stop_if_interrupted();
    }
    ++number;
  });
  file.commit();
}

std::vector<Task> read_tasks(std::string_view text, const std::string& path, const std::string& by) {
  std::vector<Task> tasks;
  Index number = 0;
  for (std::size_t at = 0, end; at < text.size(); at = end + 1) {
    end = std::min(text.size(), text.find('\n', at));
    const std::string_view line = text.substr(at, end - at);
    const std::string where = path + ":" + std::to_string(++number);
    if (line.find_first_not_of(" \t\r") == std::string_view::npos) continue;
    const Json json = parse_json(line, where);
    Fields f(json, where);
    Task& t = tasks.emplace_back();
    t.group = by.empty() ? "null" : dump(Fields(f).take(by));
    f.text("prompt", t.prompt);
    f.text("answer", t.answer);
    if (t.prompt.empty() || t.answer.empty()) fail(where, ": \"prompt\" and \"answer\" must not be empty");
  }
  if (tasks.empty()) fail(path, ": no tasks");
  return tasks;
}

}  // namespace yocou
