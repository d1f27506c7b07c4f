/// @file
/// model_schedule.cpp -- the one schedule: what a Plan keeps, and the order in which run_stages() calls an engine.
#include "fixtures.h"

namespace yocou::test {
namespace {

/// What is kept, entry by entry: "ring 5", "blocks", "global".
std::string kept_by(const Plan& plan) {
  std::string all;
  for (const Kept& k : plan.kept) {
    all += all.empty() ? "" : ", ";
    all += k.what == Keeps::ring ? "ring " + std::to_string(k.window) : k.what == Keeps::blocks ? "blocks" : "global";
  }
  return all;
}

/// Operations that do nothing but note that they were called: a layer as "stage.loop.layer>entry".
struct Recorder {
  bool wanted = true;   ///< whether a row of the pass wants logits
  std::string calls{};  ///< so far

  void note(const std::string& call) { calls += (calls.empty() ? "" : " ") + call; }
  void project_global(const Plan::Loop& loop) { note("project>" + std::to_string(loop.first)); }
  bool keep_wanted_rows() {
    note("keep");
    return wanted;
  }
  void end_loop(const Plan::Loop&) {}
  void layer(const Place& p) {
    const auto text = [](Index i) { return std::to_string(i); };
    note(text(p.stage) + "." + text(p.loop) + "." + text(p.layer) + ">" + text(p.kept));
  }
};

std::string schedule(const Config& c, bool wanted = true) {
  Recorder recorder{wanted};
  run_stages(c, Plan(c), recorder);
  return recorder.calls;
}

TEST_CASE("every architecture keeps and runs what its table says, L = 4 and W = 5", "[plan]") {
  struct Expected {
    const char *arch, *kept, *calls, *without;  ///< the last: of a chunk whose logits nobody wants
  };
  const char* const low = "0.0.0>0 0.0.1>1 0.1.0>2 0.1.1>3 0.2.0>4 0.2.1>5";  // three loops of two layers
  const std::string yoco_u = std::string(low) + " project>6 keep 1.0.0>6 1.0.1>6",
                    yoco_u_none = std::string(low) + " project>6 keep", rins = std::string(low) + " 1.0.0>6 1.0.1>7";
  const Expected all[] = {
      {"yoco-u", "ring 5, ring 5, ring 5, ring 5, ring 5, ring 5, global", yoco_u.c_str(), yoco_u_none.c_str()},
      {"yoco", "ring 5, ring 5, global", "0.0.0>0 0.0.1>1 project>2 keep 1.0.0>2 1.0.1>2",
          "0.0.0>0 0.0.1>1 project>2 keep"},
      {"transformer", "blocks, blocks, blocks, blocks", "0.0.0>0 0.0.1>1 0.0.2>2 0.0.3>3",
          "0.0.0>0 0.0.1>1 0.0.2>2 0.0.3>3"},
      {"ut", "blocks, blocks, blocks, blocks, blocks, blocks, blocks, blocks",
          "0.0.0>0 0.0.1>1 0.0.2>2 0.0.3>3 0.1.0>4 0.1.1>5 0.1.2>6 0.1.3>7",
          "0.0.0>0 0.0.1>1 0.0.2>2 0.0.3>3 0.1.0>4 0.1.1>5 0.1.2>6 0.1.3>7"},
      {"rins", "blocks, blocks, blocks, blocks, blocks, blocks, blocks, blocks", rins.c_str(), rins.c_str()},
      {"upper-loop", "ring 5, ring 5, global",
          "0.0.0>0 0.0.1>1 project>2 keep 1.0.0>2 1.0.1>2 1.1.0>2 1.1.1>2 1.2.0>2 1.2.1>2",
          "0.0.0>0 0.0.1>1 project>2 keep"},
      {"upper-loop-unshared", "ring 5, ring 5, global, global, global",
          "0.0.0>0 0.0.1>1 project>2 1.0.0>2 1.0.1>2 project>3 1.1.0>3 1.1.1>3 project>4 keep 1.2.0>4 1.2.1>4",
          "0.0.0>0 0.0.1>1 project>2 1.0.0>2 1.0.1>2 project>3 1.1.0>3 1.1.1>3 project>4 keep"},
  };
  CHECK(std::size(all) == arch_names().size());
  for (const Expected& e : all) {
    const Config c = small_arch(e.arch);
    CAPTURE(e.arch);
    CHECK(kept_by(Plan(c)) == e.kept);
    CHECK(schedule(c) == e.calls);
    CHECK(schedule(c, /*wanted=*/false) == e.without);
  }
}

/// Operations that hold every call against the definition of a stage, and count.
struct Checker {
  const Config& c;
  const Plan& plan;
  std::vector<Index> writers;  ///< by entry: how many (loop, layer) or projections write it
  Index applications = 0;
  bool early = true;  ///< rows that nobody wants are still there

  void project_global(const Plan::Loop& loop) {
    const Stage& s = c.stages[static_cast<std::size_t>(loop.stage)];
    CHECK(s.attention == Attention::shared);
    CHECK((loop.loop == 0 || s.refresh_kv));
    ++writers.at(static_cast<std::size_t>(loop.first));
  }
  bool keep_wanted_rows() {
    early = false;
    return true;
  }
  void end_loop(const Plan::Loop&) {}
  void layer(const Place& p) {
    const Stage& s = c.stages[static_cast<std::size_t>(p.stage)];
    const Kept& kept = plan.kept.at(static_cast<std::size_t>(p.kept));
    const bool is_shared = s.attention == Attention::shared;
    CHECK(kept.what == (is_shared ? Keeps::global : s.attention == Attention::window ? Keeps::ring : Keeps::blocks));
    CHECK(kept.window == s.window);
    if (!is_shared) ++writers[static_cast<std::size_t>(p.kept)];
    // rows go as soon as no later cache needs them, and not before
    CHECK(early == (!is_shared || (s.refresh_kv && p.loop + 1 < s.loops)));
    ++applications;
  }
};

TEST_CASE("any config: every entry has one writer, every layer runs once a loop and reads its stage's kind", "[plan]") {
  std::mt19937_64 random(21);
  for (int i = 0; i < 200; ++i) {
    const Config c = random_config(random);
    const Plan plan(c);
    Checker checker{c, plan, std::vector<Index>(plan.kept.size())};
    CAPTURE(brief(c));
    run_stages(c, plan, checker);
    CHECK(std::count(checker.writers.begin(), checker.writers.end(), 1) == std::ssize(plan.kept));
    Index applications = 0;
    for (const Stage& s : c.stages) applications += s.layers * s.loops;
    CHECK(checker.applications == applications);
  }
}

}  // namespace
}  // namespace yocou::test
