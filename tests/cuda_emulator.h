/// @file
/// cuda_emulator.h -- enough of CUDA to run kernels.cu, unchanged, on a CPU: for tests only.
///
/// Every CUDA thread is a fiber (Boost.Context); blocks run one after another. A thread gives up the processor only
/// where threads wait for each other: one primitive, `meet`, serves shuffles, barriers, ldmatrix, mma and wgmma alike:
/// N threads come together, each leaves a pointer to its operands, and the last one computes for all. The other place
/// is an mbarrier. So "nobody can run and no copy is in flight" is a deadlock, and the message says who waits where.
///
/// What it is for is finding faults, which it reports by throwing emu::Fault:
///   - device and shared memory start as 0xFF bytes (NaN, -1), in exact allocations (ASan sees the first byte outside)
///   - a collective that not all of its threads reach, or that they reach with different operations, masks or counts
///   - `late` mode: asynchronous work happens at its wait, its destination holds NaN until then; stream work happens
///     at the synchronisation. Early mode does everything at once. A right program cannot tell them apart.
///   - a seed other than 0 shuffles the order in which threads and copies proceed, and the order of the blocks
///   - mbarrier misuse; wrong tensor maps, descriptors, alignments; operands of wgmma not passed through a proxy fence
///
/// It says nothing about speed, registers, bank conflicts, or rounding inside the tensor cores, and its layouts are as
/// right as our reading of the PTX manual.
#pragma once
#include <cuda.h>
#include <cuda_bf16.h>
#include <cuda_runtime_api.h>
#include <sys/mman.h>

#include <algorithm>
#include <array>
#include <boost/context/detail/fcontext.hpp>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <exception>
#include <functional>
#include <limits>
#include <map>
#include <memory>
#include <random>
#include <sstream>
#include <stdexcept>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#undef __launch_bounds__
#define __launch_bounds__(...)
#undef __grid_constant__
#define __grid_constant__

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif
#if defined(__SANITIZE_THREAD__)
#include <sanitizer/tsan_interface.h>
extern "C" void AnnotateIgnoreReadsBegin(const char*, int);
extern "C" void AnnotateIgnoreReadsEnd(const char*, int);
extern "C" void AnnotateIgnoreWritesBegin(const char*, int);
extern "C" void AnnotateIgnoreWritesEnd(const char*, int);
#endif

inline uint3 blockIdx;
inline dim3 blockDim, gridDim;

namespace emu {

/// A fault of the program under test.
struct Fault : std::runtime_error {
  using std::runtime_error::runtime_error;
};
template <class... Part>
[[noreturn]] void fault(const Part&... part) {
  std::ostringstream line;
  (line << ... << part);
  throw Fault(line.str());
}

/// How to run; tests set it between launches.
struct Options {
  bool late = false;          ///< asynchronous work as late as allowed, instead of at once
  unsigned seed = 0;          ///< 0: threads in order; others shuffle threads, copies and blocks
  int devices = 1;            ///< that the machine has
  int major = 9;              ///< compute capability that the device claims
  bool library = true;        ///< there is a cuBLASLt
  std::size_t memory = ~0ul;  ///< of the device, bytes
  int fail_launch = 0;        ///< the launch, from now on, that is refused; 0: none
};
inline Options options;
inline std::mt19937 rng(1);
inline void configure(Options o) { options = o, rng.seed(o.seed + 1); }

/// The schedules that tests run under: 0 all at once and in order, 1 as late as allowed, 2 and 3 shuffled orders. With
/// YOCOU_SCHEDULE=n in the environment they become four others, two early and two late ones, all shuffled.
inline Options schedule(unsigned i) {
  const char* more = std::getenv("YOCOU_SCHEDULE");
  Options o;
  o.late = i == 1 || i == 3, o.seed = more ? 4 * unsigned(std::atoi(more)) + i : i == 2 ? 1 : i == 3 ? 2 : 0;
  return o;
}

/// Under ThreadSanitizer the runtime hides its own memory accesses: only the kernel's are to be judged.
struct Quiet {
#if defined(__SANITIZE_THREAD__)
  Quiet() { AnnotateIgnoreReadsBegin("", 0), AnnotateIgnoreWritesBegin("", 0); }
  ~Quiet() { AnnotateIgnoreWritesEnd("", 0), AnnotateIgnoreReadsEnd("", 0); }
#else
  Quiet() {}  // not defaulted: a user-provided constructor keeps "unused variable" quiet
#endif
  Quiet(const Quiet&) = delete;
};
inline void released([[maybe_unused]] void* p) {
#if defined(__SANITIZE_THREAD__)
  __tsan_release(p);
#endif
}
inline void acquired([[maybe_unused]] void* p) {
#if defined(__SANITIZE_THREAD__)
  __tsan_acquire(p);
#endif
}

// ---------------------------------------------------------------------------------------------------------------------
// Fibers

namespace fc = boost::context::detail;

inline constexpr std::size_t stack_bytes = 256 * 1024, page_bytes = 4096;

/// Stacks are kept and used again; a guard page lies below each.
struct StackPool {
  std::vector<char*> free;
  char* take() {
    if (!free.empty()) {
      char* s = free.back();
      free.pop_back();
      return s;
    }
    void* p = mmap(
        nullptr, page_bytes + stack_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (p == MAP_FAILED || mprotect(p, page_bytes, PROT_NONE)) throw std::bad_alloc();
    return static_cast<char*>(p) + page_bytes;
  }
  void give(char* s) {
#if defined(__SANITIZE_ADDRESS__)
    __asan_unpoison_memory_region(s, stack_bytes);
#endif
    free.push_back(s);
  }
};
inline StackPool stacks;

/// A copy that a thread has asked for with cp.async.
struct Copy {
  void* to;
  const void* from;
  bool valid;
};

/// One CUDA thread.
struct Thread {
  uint3 index{};
  unsigned id = 0;
  fc::fcontext_t context = nullptr;
  char* stack = nullptr;
  bool done = false;
  const char* waits_in = nullptr;  ///< the operation it waits in, and the line that called it
  int line = 0;
  std::deque<std::vector<Copy>> groups;  ///< committed cp.async groups, oldest first
  std::vector<Copy> open;                ///< copies not committed yet
  void* fake_stack = nullptr;            ///< of ASan
  void* fiber = nullptr;                 ///< of TSan
};

/// A place where `expected` threads come together.
struct Meet {
  const char* kind = nullptr;
  int line = 0;
  unsigned parameter = 0, expected = 0, arrived = 0;
  std::vector<Thread*> waiting;
  std::vector<void*> operands;
};

/// An mbarrier's state. It lives here and not in shared memory; the kernel holds its address.
struct Mbarrier {
  unsigned count = 0;    ///< arrivals a phase needs
  unsigned pending = 0;  ///< still missing
  long bytes = 0;        ///< announced and not yet arrived
  unsigned phase = 0;    ///< completed phases
  std::vector<Thread*> waiting;
};

/// One wgmma instruction of a warpgroup, kept until it is waited for (late mode).
struct Wgmma {
  int n;
  bool a_in_registers, b_mn_major, accumulate;
  std::uint64_t a_descriptor, b_descriptor;
  std::array<std::array<std::uint32_t, 4>, 128> a;
  std::array<float*, 128> d;
  std::vector<float> before;  ///< accumulators at the issue, when they were replaced by NaN
};

/// What a warpgroup has issued.
struct Warpgroup {
  Meet meet;
  bool fenced = false;
  std::vector<Wgmma> open;
  std::deque<std::vector<Wgmma>> groups;
};

/// The tensor map that our encoder writes into a CUtensorMap.
struct TensorMap {
  std::uint64_t magic;
  char* base;
  std::uint64_t size[2], stride;  ///< columns and rows; bytes between rows
  std::uint32_t box[2], element, swizzle;
};
static_assert(sizeof(TensorMap) <= sizeof(CUtensorMap));
inline constexpr std::uint64_t map_magic = 0x796f636f752d6d70;

void start_thread(fc::transfer_t);

/// The one streaming multiprocessor: it runs a block at a time.
struct Machine {
  Thread host, *current = &host;
  std::vector<std::unique_ptr<Thread>> threads;
  std::deque<Thread*> ready;
  std::size_t started = 0, live = 0;
  Thread* victim = nullptr;  ///< in shuffled order: proceeds only when nobody else can, so that others overtake it
  std::function<void()> body;
  std::exception_ptr error;
  unsigned char* shared = nullptr;
  std::size_t shared_bytes = 0;
  std::vector<unsigned char> shadow;  ///< shared memory as the asynchronous proxy sees it
  bool proxy_fence = false;           ///< the next barrier makes generic writes visible to it
  std::vector<Meet> warps;
  std::array<Meet, 16> barriers;
  std::vector<Warpgroup> warpgroups;
  std::map<std::uint64_t*, Mbarrier> mbarriers;
  std::deque<std::function<void()>> copies;  ///< TMA loads in flight (late mode)
  std::uint64_t switches = 0, launches = 0;
  std::vector<void*> finished;  ///< TSan's fibers of finished threads: kept, a recycled one would hide races

  /// Continues with another thread; returns when somebody continues with this one.
  void leave() {
    Thread* self = current;
    Thread* next = pick();
    if (next == self) return;
    if (!next->context) {
      next->stack = stacks.take();
      next->context = fc::make_fcontext(next->stack + stack_bytes, stack_bytes, start_thread);
#if defined(__SANITIZE_THREAD__)
      next->fiber = __tsan_create_fiber(0);
#endif
    }
    current = next, ++switches;
#if defined(__SANITIZE_ADDRESS__)
    __sanitizer_start_switch_fiber(self->done ? nullptr : &self->fake_stack, next == &host ? host.stack : next->stack,
        next == &host ? host_stack_bytes : stack_bytes);
#endif
#if defined(__SANITIZE_THREAD__)
    if (!host.fiber) host.fiber = __tsan_get_current_fiber();
    __tsan_switch_to_fiber(next->fiber, __tsan_switch_to_fiber_no_sync);
#endif
    arrive(fc::jump_fcontext(next->context, self));
  }
  /// First thing in a thread that was switched to.
  void arrive(fc::transfer_t t) {
    Thread* from = static_cast<Thread*>(t.data);
    from->context = t.fctx;
#if defined(__SANITIZE_ADDRESS__)
    const void* bottom;
    std::size_t size;
    __sanitizer_finish_switch_fiber(current->fake_stack, &bottom, &size);
    if (from == &host) host.stack = const_cast<char*>(static_cast<const char*>(bottom)), host_stack_bytes = size;
#endif
    if (from->done && from->stack) stacks.give(std::exchange(from->stack, nullptr));
  }
  std::size_t host_stack_bytes = 0;

  /// Chooses who runs next; completes copies when nobody can.
  Thread* pick() {
    for (;;) {
      if (error || !live) return &host;
      const bool fresh = started < threads.size();
      if (options.seed) {
        const std::size_t choices = ready.size() + fresh + !copies.empty();
        if (choices) {
          std::size_t i = rng() % choices;
          if (i < ready.size()) {
            if (ready[i] == victim && choices > 1) continue;
            std::swap(ready[i], ready.back());
            Thread* t = ready.back();
            ready.pop_back();
            return t;
          }
          if (fresh && i == ready.size()) return threads[started++].get();
          complete_copy(rng() % copies.size());
          continue;
        }
      } else if (!ready.empty()) {
        Thread* t = ready.front();
        ready.pop_front();
        return t;
      } else if (fresh) {
        return threads[started++].get();
      } else if (!copies.empty()) {
        complete_copy(0);
        continue;
      }
      std::map<std::string, int> waiters;
      for (auto& t : threads)
        if (!t->done) ++waiters[std::string(t->waits_in ? t->waits_in : "?") + " at line " + std::to_string(t->line)];
      std::ostringstream text;
      text << "deadlock in block " << blockIdx.x << "," << blockIdx.y << "," << blockIdx.z << ":";
      for (auto& [where, n] : waiters) text << " " << n << " threads wait in " << where << ";";
      text << " " << threads.size() - live << " have ended";
      error = std::make_exception_ptr(Fault(text.str()));
    }
  }
  void complete_copy(std::size_t i) {
    auto copy = std::move(copies[i]);
    copies.erase(copies.begin() + std::ptrdiff_t(i));
    try {
      copy();
    } catch (...) {
      error = std::current_exception();
    }
  }
  void wait(const char* what, int line) {
    Thread* self = current;
    self->waits_in = what, self->line = line;
    leave();
    self->waits_in = nullptr;
  }
  /// Lets others go first now and then, so that a missing barrier shows.
  void maybe_yield() {
    if (options.seed && rng() % 16 == 0) ready.push_back(current), leave();
  }

  void run_block();
  bool is_shared(const void* p, std::size_t n) const {
    auto* c = static_cast<const unsigned char*>(p);
    return c >= shared && c + n <= shared + shared_bytes;
  }
};
inline Machine machine;

inline void start_thread(fc::transfer_t t) {
  Machine& m = machine;
  m.arrive(t);
  try {
    m.body();
    if (!m.current->open.empty() || !m.current->groups.empty()) fault("a thread ends with cp.async not waited for");
  } catch (...) {
    m.error = std::current_exception();
  }
  Quiet quiet;
  m.current->done = true, --m.live;
  m.leave();
  std::abort();  // nobody continues with a thread that has ended
}

/// `expected` threads come together under `m`; the last to arrive calls all(operands), indexed by `slot`.
template <class All>
void meet(Meet& m, const char* kind, unsigned parameter, unsigned expected, unsigned slot, void* operand, int line,
    All&& all) {
  Quiet quiet;
  Machine& machine = emu::machine;
  machine.maybe_yield();
  if (m.arrived == 0) {
    m.kind = kind, m.line = line, m.parameter = parameter, m.expected = expected;
    m.operands.assign(std::max<std::size_t>(expected, slot + 1), nullptr);
  } else if (std::strcmp(m.kind, kind) || m.parameter != parameter || m.expected != expected) {
    fault("thread ", machine.current->id, " calls ", kind, "(", parameter, ") of ", expected, " threads at line ", line,
        " where others wait in ", m.kind, "(", m.parameter, ") of ", m.expected, " threads at line ", m.line);
  }
  if (slot >= m.operands.size()) m.operands.resize(slot + 1);
  m.operands[slot] = operand;
  released(&m);
  if (++m.arrived < expected) {
    m.waiting.push_back(machine.current);
    machine.wait(kind, line);
  } else {
    all(m.operands);
    m.arrived = 0;
    for (Thread* t : m.waiting) machine.ready.push_back(t);
    m.waiting.clear();
    // the last to arrive must not always be the first to go on
    if (machine.current == machine.victim) machine.ready.push_back(machine.current), machine.leave();
  }
  acquired(&m);
}

/// All 32 lanes of the warp.
template <class All>
void meet_warp(const char* kind, unsigned parameter, void* operand, int line, All&& all) {
  const unsigned id = machine.current->id;
  meet(machine.warps[id / 32], kind, parameter, 32, id % 32, operand, line, std::forward<All>(all));
}
/// All 128 threads of the warpgroup.
template <class All>
void meet_warpgroup(const char* kind, unsigned parameter, void* operand, int line, All&& all) {
  const unsigned id = machine.current->id;
  if (id / 128 >= machine.warpgroups.size()) fault(kind, " at line ", line, ": thread ", id, " is in no warpgroup");
  meet(machine.warpgroups[id / 128].meet, kind, parameter, 128, id % 128, operand, line, std::forward<All>(all));
}
inline void full_mask(unsigned mask, const char* what, int line) {
  if (mask != 0xffffffffu) fault(what, " at line ", line, ": mask ", mask, " is not the whole warp");
}

/// The generic proxy's writes become visible to the asynchronous one at the first barrier after a fence.
inline void refresh_shadow() {
  if (machine.proxy_fence) std::memcpy(machine.shadow.data(), machine.shared, machine.shared_bytes);
  machine.proxy_fence = false;
}

inline void Machine::run_block() {
  const std::size_t n = std::size_t(blockDim.x) * blockDim.y * blockDim.z;
  threads.clear(), ready.clear(), copies.clear(), mbarriers.clear();
  for (std::size_t i = 0; i < n; ++i) {
    threads.push_back(std::make_unique<Thread>());
    threads[i]->id = unsigned(i);
    threads[i]->index = {
        unsigned(i % blockDim.x), unsigned(i / blockDim.x % blockDim.y), unsigned(i / blockDim.x / blockDim.y)};
  }
  victim = options.seed ? threads[rng() % n].get() : nullptr;
  started = 0, live = n, error = nullptr, proxy_fence = false;
  warps.assign(n / 32, {}), warpgroups.assign(n / 128, {}), barriers.fill({});
  // exact size: the byte behind the block's shared memory belongs to nobody
  void* p = nullptr;
  if (shared_bytes && posix_memalign(&p, 1024, shared_bytes)) throw std::bad_alloc();
  shared = static_cast<unsigned char*>(p);
  if (p) std::memset(p, 0xff, shared_bytes);
  shadow.assign(shared_bytes, 0xff);
  {
    Quiet quiet;
    leave();
  }
  for (auto& t : threads) {  // after a fault: the abandoned ones are dropped, never resumed
    if (t->stack) stacks.give(std::exchange(t->stack, nullptr));
#if defined(__SANITIZE_THREAD__)
    if (t->fiber) finished.push_back(t->fiber);
#endif
  }
  std::string left;
  if (!error) {
    for (auto& [address, b] : mbarriers)
      if (b.bytes) left = "a block ends with an mbarrier that still expects " + std::to_string(b.bytes) + " bytes";
    for (auto& g : warpgroups)
      if (!g.open.empty() || !g.groups.empty()) left = "a block ends with wgmma not waited for";
    if (!copies.empty()) left = "a block ends with a TMA copy in flight";
  }
  std::free(p);
  shared = nullptr;
  if (error) std::rethrow_exception(std::exchange(error, nullptr));
  if (!left.empty()) fault(left);
}

// ---------------------------------------------------------------------------------------------------------------------
// Streams, graphs, memory

using Work = std::function<void()>;
struct Graph {
  std::vector<Work> work;
};
/// A stream runs its work in order: at once, or, in late mode, when somebody synchronises.
struct Stream {
  std::vector<Work> queue;
  std::unique_ptr<Graph> capture;
  void add(Work w) {
    if (capture) capture->work.push_back(std::move(w));
    else if (options.late) queue.push_back(std::move(w));
    else w();
  }
  void drain() {
    if (capture) fault("a stream that is being captured cannot be waited for");
    auto todo = std::exchange(queue, {});
    for (auto& w : todo) w();
  }
};
inline Stream default_stream;
inline std::vector<Stream*> streams{&default_stream};
inline Stream& of(cudaStream_t s) { return s ? *reinterpret_cast<Stream*>(s) : default_stream; }
inline void drain_all() {
  for (Stream* s : streams) s->drain();
}
inline std::map<void*, std::size_t> allocations;  ///< device memory, to notice wrong frees and leaks
inline std::map<const void*, int> shared_limit;   ///< by kernel, from cudaFuncSetAttribute

/// Freed device memory: kept a while, full of 0xFF, to notice who still writes there.
inline std::deque<std::pair<unsigned char*, std::size_t>> freed;
inline void check_freed(std::size_t keep) {
  for (const auto& [p, n] : freed)
    if (std::any_of(p, p + n, [](unsigned char c) { return c != 0xff; }))
      fault("device memory was written after cudaFree");
  for (; freed.size() > keep; freed.pop_front()) std::free(freed.front().first);
}

struct Shape {
  dim3 grid, block;
  std::size_t shared;
};
/// Runs all blocks of a launch.
inline void run_grid(const Shape& s, const std::function<void()>& body) {
  Machine& m = machine;
  if (m.current != &m.host) fault("a launch from inside a kernel");
  ++m.launches;
  gridDim = s.grid, blockDim = s.block, m.body = body, m.shared_bytes = s.shared;
  const std::uint64_t blocks = std::uint64_t(s.grid.x) * s.grid.y * s.grid.z;
  std::vector<std::uint64_t> order(blocks);
  for (std::uint64_t i = 0; i < blocks; ++i) order[i] = i;
  if (options.seed) std::shuffle(order.begin(), order.end(), rng);
  for (const std::uint64_t i : order) {
    blockIdx = {unsigned(i % s.grid.x), unsigned(i / s.grid.x % s.grid.y), unsigned(i / s.grid.x / s.grid.y)};
    m.run_block();
  }
}
inline void check_shape(const Shape& s, const void* kernel) {
  const std::size_t threads = std::size_t(s.block.x) * s.block.y * s.block.z;
  if (!s.grid.x || !s.grid.y || !s.grid.z || s.grid.x > 0x7fffffffu || s.grid.y > 65535 || s.grid.z > 65535)
    fault("grid ", s.grid.x, "x", s.grid.y, "x", s.grid.z, " is not allowed");
  if (!threads || threads > 1024) fault("a block of ", threads, " threads is not allowed");
  if (threads % 32) fault("a block of ", threads, " threads is no whole number of warps");
  const std::size_t limit = shared_limit.count(kernel) ? std::size_t(shared_limit[kernel]) : 48 * 1024;
  if (s.shared > limit) fault("a launch asks for ", s.shared, " bytes of shared memory, allowed are ", limit);
}

}  // namespace emu

#define UNROLL
#define threadIdx (::emu::machine.current->index)  // the others are variables: runtime structures have such fields

template <class... Parameter, class... Argument>
cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t* c, void (*kernel)(Parameter...), Argument&&... argument) {
  if (emu::options.fail_launch && !--emu::options.fail_launch) return cudaErrorLaunchOutOfResources;
  const emu::Shape shape{c->gridDim, c->blockDim, c->dynamicSmemBytes};
  emu::check_shape(shape, reinterpret_cast<const void*>(kernel));
  std::tuple<std::decay_t<Parameter>...> kept(static_cast<Argument&&>(argument)...);
  emu::of(c->stream).add([shape, kernel, kept] { emu::run_grid(shape, [&] { std::apply(kernel, kept); }); });
  return cudaSuccess;
}

extern "C" {
inline cudaError_t cudaMalloc(void** p, size_t n) {
  *p = nullptr;
  std::size_t held = 0;
  for (const auto& [address, bytes] : emu::allocations) held += bytes;
  if (held + n > emu::options.memory || posix_memalign(p, 256, n ? n : 1)) return cudaErrorMemoryAllocation;
  std::memset(*p, 0xff, n);
  emu::allocations[*p] = n;
  return cudaSuccess;
}
inline cudaError_t cudaFree(void* p) {
  if (!p) return cudaSuccess;
  emu::drain_all();
  const auto it = emu::allocations.find(p);
  if (it == emu::allocations.end()) emu::fault("cudaFree of an address that cudaMalloc did not return");
  const std::size_t n = it->second;
  emu::allocations.erase(it);
#if defined(__SANITIZE_ADDRESS__)
  const bool keep = false;  // ASan notices more, and at once
#else
  const bool keep = n <= 1 << 16;
#endif
  if (!keep) return std::free(p), cudaSuccess;
  std::memset(p, 0xff, n);
  emu::freed.push_back({static_cast<unsigned char*>(p), n});
  return emu::check_freed(16), cudaSuccess;
}
inline cudaError_t cudaMallocHost(void** p, size_t n) { return *p = std::malloc(n), cudaSuccess; }
inline cudaError_t cudaFreeHost(void* p) { return emu::drain_all(), std::free(p), cudaSuccess; }
inline cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t n, cudaMemcpyKind, cudaStream_t s) {
  emu::of(s).add([=] { std::memcpy(to, from, n); });
  return cudaSuccess;
}
inline cudaError_t cudaMemcpy(void* to, const void* from, size_t n, cudaMemcpyKind) {
  return emu::drain_all(), std::memcpy(to, from, n), cudaSuccess;
}
inline cudaError_t cudaMemsetAsync(void* p, int v, size_t n, cudaStream_t s) {
  emu::of(s).add([=] { std::memset(p, v, n); });
  return cudaSuccess;
}
inline cudaError_t cudaStreamCreateWithFlags(cudaStream_t* s, unsigned) {
  auto* made = new emu::Stream;
  emu::streams.push_back(made);
  return *s = reinterpret_cast<cudaStream_t>(made), cudaSuccess;
}
inline cudaError_t cudaStreamDestroy(cudaStream_t s) {
  emu::of(s).drain();
  std::erase(emu::streams, &emu::of(s));
  delete &emu::of(s);
  return cudaSuccess;
}
inline cudaError_t cudaStreamSynchronize(cudaStream_t s) {
  return emu::of(s).drain(), emu::check_freed(16), cudaSuccess;
}
inline cudaError_t cudaDeviceSynchronize() { return emu::drain_all(), cudaSuccess; }
inline cudaError_t cudaStreamBeginCapture(cudaStream_t s, cudaStreamCaptureMode) {
  if (emu::of(s).capture) emu::fault("cudaStreamBeginCapture of a stream that is being captured");
  return emu::of(s).capture = std::make_unique<emu::Graph>(), cudaSuccess;
}
inline cudaError_t cudaStreamEndCapture(cudaStream_t s, cudaGraph_t* g) {
  if (!emu::of(s).capture) emu::fault("cudaStreamEndCapture without a capture");
  return *g = reinterpret_cast<cudaGraph_t>(emu::of(s).capture.release()), cudaSuccess;
}
inline cudaError_t cudaGraphInstantiate(cudaGraphExec_t* e, cudaGraph_t g, unsigned long long) {
  return *e = reinterpret_cast<cudaGraphExec_t>(new emu::Graph(*reinterpret_cast<emu::Graph*>(g))), cudaSuccess;
}
inline cudaError_t cudaGraphLaunch(cudaGraphExec_t e, cudaStream_t s) {
  for (auto& w : reinterpret_cast<emu::Graph*>(e)->work) emu::of(s).add(w);
  return cudaSuccess;
}
inline cudaError_t cudaGraphDestroy(cudaGraph_t g) { return delete reinterpret_cast<emu::Graph*>(g), cudaSuccess; }
inline cudaError_t cudaGraphExecDestroy(cudaGraphExec_t e) {
  return delete reinterpret_cast<emu::Graph*>(e), cudaSuccess;
}
inline cudaError_t cudaGetDeviceCount(int* n) {
  return *n = emu::options.devices, *n ? cudaSuccess : cudaErrorNoDevice;
}
inline cudaError_t cudaSetDevice(int) { return cudaSuccess; }
inline cudaError_t cudaGetDevice(int* d) { return *d = 0, cudaSuccess; }
inline cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr a, int) {
  *value = a == cudaDevAttrComputeCapabilityMajor ? emu::options.major : a == cudaDevAttrMultiProcessorCount ? 132 : 0;
  return cudaSuccess;
}
inline cudaError_t cudaEventCreate(cudaEvent_t* e) { return *e = nullptr, cudaSuccess; }
inline cudaError_t cudaEventDestroy(cudaEvent_t) { return cudaSuccess; }
inline cudaError_t cudaEventRecord(cudaEvent_t, cudaStream_t) { return cudaSuccess; }
inline cudaError_t cudaEventSynchronize(cudaEvent_t) { return emu::drain_all(), cudaSuccess; }
inline cudaError_t cudaEventElapsedTime(float* ms, cudaEvent_t, cudaEvent_t) { return *ms = 1, cudaSuccess; }
inline cudaError_t cudaGetDeviceProperties(cudaDeviceProp* p, int) {
  *p = {};
  std::strcpy(p->name, "emulator");
  return cudaSuccess;
}
inline cudaError_t cudaGetLastError() { return cudaSuccess; }
inline const char* cudaGetErrorString(cudaError_t e) {
  return e == cudaErrorNoDevice ? "no CUDA-capable device is detected" : "an error of the emulator";
}
inline const char* cudaGetErrorName(cudaError_t) { return "cudaErrorUnknown"; }
inline cudaError_t cudaFuncSetAttribute(const void* kernel, cudaFuncAttribute a, int value) {
  if (a == cudaFuncAttributeMaxDynamicSharedMemorySize) {
    if (value > 227 * 1024) emu::fault("a block cannot have ", value, " bytes of shared memory");
    emu::shared_limit[kernel] = value;
  }
  return cudaSuccess;
}

/// cuTensorMapEncodeTiled for matrices, with the rules of its documentation.
inline CUresult emu_encode_tiled(CUtensorMap* map, CUtensorMapDataType type, cuuint32_t rank, void* base,
    const cuuint64_t* size, const cuuint64_t* stride, const cuuint32_t* box, const cuuint32_t* step,
    CUtensorMapInterleave, CUtensorMapSwizzle swizzle, CUtensorMapL2promotion, CUtensorMapFloatOOBfill) {
  const unsigned element = type == CU_TENSOR_MAP_DATA_TYPE_FLOAT32 ? 4 : 2;
  const unsigned span = swizzle == CU_TENSOR_MAP_SWIZZLE_128B ? 128 : 0;
  if (rank != 2) emu::fault("tensor map: only matrices are emulated");
  if (reinterpret_cast<std::uintptr_t>(base) % 16) emu::fault("tensor map: the base is not 16-byte aligned");
  if (stride[0] % 16 || stride[0] >= (1ull << 40))
    emu::fault("tensor map: row stride ", stride[0], " is not x16 bytes");
  if (stride[0] < size[0] * element) emu::fault("tensor map: rows overlap");
  for (int i = 0; i < 2; ++i) {
    if (!size[i] || size[i] > (1ull << 32)) emu::fault("tensor map: size ", size[i]);
    if (!box[i] || box[i] > 256) emu::fault("tensor map: box ", box[i], " is not 1 .. 256");
    if (step[i] != 1) emu::fault("tensor map: element stride ", step[i]);
  }
  if (box[0] * element % 16) emu::fault("tensor map: the box's rows are not x16 bytes");
  if (span && box[0] * element > span) emu::fault("tensor map: the box is wider than the swizzle's ", span, " bytes");
  const emu::TensorMap made{
      emu::map_magic, static_cast<char*>(base), {size[0], size[1]}, stride[0], {box[0], box[1]}, element, span};
  std::memset(static_cast<void*>(map), 0, sizeof(*map));
  std::memcpy(static_cast<void*>(map), &made, sizeof(made));
  return CUDA_SUCCESS;
}
inline cudaError_t cudaGetDriverEntryPointByVersion(
    const char*, void** f, unsigned, unsigned long long, cudaDriverEntryPointQueryResult* r) {
  *r = cudaDriverEntryPointSuccess;
  return *f = reinterpret_cast<void*>(&emu_encode_tiled), cudaSuccess;
}
}  // extern "C"

// ---------------------------------------------------------------------------------------------------------------------
// CUDA's own device functions

using std::max;
using std::min;

inline void named_barrier(unsigned id, unsigned threads, int line = __builtin_LINE()) {
  if (id >= 16 || !threads || threads % 32) emu::fault("barrier ", id, " of ", threads, " threads at line ", line);
  const unsigned slot = emu::machine.current->id;
  emu::meet(
      emu::machine.barriers[id], "barrier", id, threads, slot, nullptr, line, [](auto&) { emu::refresh_shadow(); });
}
inline void __syncthreads(int line = __builtin_LINE()) {
  named_barrier(0, unsigned(emu::machine.threads.size()), line);
}
inline void __syncwarp(unsigned mask = 0xffffffffu, int line = __builtin_LINE()) {
  emu::full_mask(mask, "__syncwarp", line);
  emu::meet_warp("__syncwarp", 0, nullptr, line, [](auto&) {});
}
template <class T>
T emu_shuffle(const char* kind, T value, unsigned source, int line) {
  struct Operand {
    T value;
    unsigned source;
    T result;
  } mine{value, source, T{}};
  emu::meet_warp(kind, 0, &mine, line, [&](std::vector<void*>& all) {
    for (void* p : all) {
      auto* o = static_cast<Operand*>(p);
      o->result = static_cast<Operand*>(all[o->source])->value;
    }
  });
  return mine.result;
}
inline unsigned emu_lane() { return emu::machine.current->id % 32; }
template <class T>
T __shfl_xor_sync(unsigned mask, T value, int bits, int line = __builtin_LINE()) {
  emu::full_mask(mask, "__shfl_xor_sync", line);
  if (bits < 0 || bits > 31) emu::fault("__shfl_xor_sync at line ", line, ": lane mask ", bits);
  return emu_shuffle("__shfl_xor_sync", value, emu_lane() ^ unsigned(bits), line);
}
template <class T>
T __shfl_up_sync(unsigned mask, T value, unsigned by, int line = __builtin_LINE()) {
  emu::full_mask(mask, "__shfl_up_sync", line);
  return emu_shuffle("__shfl_up_sync", value, emu_lane() < by ? emu_lane() : emu_lane() - by, line);
}
template <class T>
T __shfl_sync(unsigned mask, T value, int lane, int line = __builtin_LINE()) {
  emu::full_mask(mask, "__shfl_sync", line);
  return emu_shuffle("__shfl_sync", value, unsigned(lane) % 32, line);
}
inline unsigned __ballot_sync(unsigned mask, int predicate, int line = __builtin_LINE()) {
  emu::full_mask(mask, "__ballot_sync", line);
  std::pair<int, unsigned> mine{predicate, 0};
  emu::meet_warp("__ballot_sync", 0, &mine, line, [](std::vector<void*>& all) {
    unsigned bits = 0;
    for (unsigned i = 0; i < 32; ++i) bits |= unsigned(static_cast<decltype(mine)*>(all[i])->first != 0) << i;
    for (void* p : all) static_cast<decltype(mine)*>(p)->second = bits;
  });
  return mine.second;
}
inline int __popc(unsigned x) { return __builtin_popcount(x); }
template <class T>
T atomicAdd(T* p, T v) {
  emu::Quiet quiet;
  const T old = *p;
  return *p = old + v, old;
}
inline float __uint_as_float(unsigned x) {
  float f;
  return std::memcpy(&f, &x, 4), f;
}
inline unsigned __float_as_uint(float f) {
  unsigned x;
  return std::memcpy(&x, &f, 4), x;
}

// ---------------------------------------------------------------------------------------------------------------------
// The wrappers that kernels.cu writes in PTX

template <class T>
T* shared_memory() {
  return reinterpret_cast<T*>(emu::machine.shared);
}
template <int N>
void settle_registers(float (&)[N]) {}
inline void grid_wait() {}
inline void grid_launch() {}
inline float fast_exp2(float x) { return std::exp2(x); }
inline uint4 load_here(const uint4* p, int line = __builtin_LINE()) {
  if (reinterpret_cast<std::uintptr_t>(p) % 16) emu::fault("load_here at line ", line, " of a misaligned address");
  return *p;
}

inline void cp_async16(void* to, const void* from, bool valid, int line = __builtin_LINE()) {
  emu::Quiet quiet;
  if (reinterpret_cast<std::uintptr_t>(to) % 16 || (valid && reinterpret_cast<std::uintptr_t>(from) % 16))
    emu::fault("cp_async16 at line ", line, ": misaligned");
  if (!emu::machine.is_shared(to, 16)) emu::fault("cp_async16 at line ", line, ": outside shared memory");
  if (emu::options.late) {  // from now on nobody may read it, wgmma neither
    std::memset(to, 0xff, 16);
    std::memset(emu::machine.shadow.data() + (static_cast<unsigned char*>(to) - emu::machine.shared), 0xff, 16);
  }
  emu::machine.current->open.push_back({to, from, valid});
}
inline void emu_copy(const emu::Copy& c) { c.valid ? std::memcpy(c.to, c.from, 16) : std::memset(c.to, 0, 16); }
inline void cp_async_commit() {
  emu::Quiet quiet;
  emu::Thread& t = *emu::machine.current;
  t.groups.push_back(std::exchange(t.open, {}));
  if (!emu::options.late)
    for (auto& c : t.groups.back()) emu_copy(c);
}
template <int Left>
void cp_async_wait() {
  emu::Quiet quiet;
  emu::machine.maybe_yield();
  for (auto& groups = emu::machine.current->groups; groups.size() > Left; groups.pop_front())
    if (emu::options.late)
      for (auto& c : groups.front()) emu_copy(c);
}

/// Lane l names row l % 8 of matrix l / 8; it receives elements 2(l % 4), 2(l % 4) + 1 of row l / 4 of every matrix.
template <bool Transposed>
void emu_ldmatrix(std::uint32_t (&r)[4], const void* row, int line) {
  struct Operand {
    const void* row;
    std::uint32_t* r;
  } mine{row, r};
  if (reinterpret_cast<std::uintptr_t>(row) % 16) emu::fault("ldmatrix at line ", line, ": a row is misaligned");
  if (!emu::machine.is_shared(row, 16)) emu::fault("ldmatrix at line ", line, ": a row is outside shared memory");
  emu::meet_warp(Transposed ? "ldmatrix.trans" : "ldmatrix", 0, &mine, line, [](std::vector<void*>& all) {
    const auto element = [&](int matrix, int row, int column) {
      std::uint16_t x;
      std::memcpy(&x, static_cast<const char*>(static_cast<Operand*>(all[8 * matrix + row])->row) + 2 * column, 2);
      return std::uint32_t(x);
    };
    for (int l = 0; l < 32; ++l)
      for (int i = 0; i < 4; ++i) {
        const int a = l / 4, b = 2 * (l % 4);
        static_cast<Operand*>(all[l])->r[i] =
            Transposed ? element(i, b, a) | element(i, b + 1, a) << 16 : element(i, a, b) | element(i, a, b + 1) << 16;
      }
  });
}
inline void ldmatrix(std::uint32_t (&r)[4], const void* row, int line = __builtin_LINE()) {
  emu_ldmatrix<false>(r, row, line);
}
inline void ldmatrix_trans(std::uint32_t (&r)[4], const void* row, int line = __builtin_LINE()) {
  emu_ldmatrix<true>(r, row, line);
}

inline float emu_half(std::uint32_t pair, int which) {
  return __uint_as_float(which ? pair & 0xffff0000u : pair << 16);
}

/// mma.m16n8k16: with g = lane / 4 and t = lane % 4, register i of A holds row g + 8(i % 2), columns 2t + 8(i / 2) and
/// the next; register i of B rows 2t + 8i and the next of column g; C row g + 8(i / 2), column 2t + i % 2.
inline void mma_bf16(
    float (&d)[4], const std::uint32_t (&a)[4], std::uint32_t b0, std::uint32_t b1, int line = __builtin_LINE()) {
  struct Operand {
    float* d;
    const std::uint32_t* a;
    std::uint32_t b[2];
  } mine{d, a, {b0, b1}};
  emu::meet_warp("mma", 0, &mine, line, [](std::vector<void*>& all) {
    float A[16][16], B[16][8];
    for (int l = 0; l < 32; ++l) {
      const auto* o = static_cast<Operand*>(all[l]);
      const int g = l / 4, t = l % 4;
      for (int h = 0; h < 2; ++h) {
        for (int i = 0; i < 4; ++i) A[g + 8 * (i % 2)][2 * t + 8 * (i / 2) + h] = emu_half(o->a[i], h);
        for (int i = 0; i < 2; ++i) B[2 * t + 8 * i + h][g] = emu_half(o->b[i], h);
      }
    }
    for (int l = 0; l < 32; ++l)
      for (int i = 0; i < 4; ++i) {
        const int row = l / 4 + 8 * (i / 2), column = 2 * (l % 4) + i % 2;
        float sum = static_cast<Operand*>(all[l])->d[i];
        for (int k = 0; k < 16; ++k) sum += A[row][k] * B[k][column];
        static_cast<Operand*>(all[l])->d[i] = sum;
      }
  });
}

// --- mbarrier and TMA

inline emu::Mbarrier& emu_mbarrier(std::uint64_t* b, const char* what, int line) {
  auto it = emu::machine.mbarriers.find(b);
  if (it == emu::machine.mbarriers.end())
    emu::fault(what, " at line ", line, " on an mbarrier that is not initialised");
  return it->second;
}
inline void emu_phase(emu::Mbarrier& m) {
  if (m.pending || m.bytes) return;
  ++m.phase, m.pending = m.count;
  for (emu::Thread* t : m.waiting) emu::machine.ready.push_back(t);
  m.waiting.clear();
}
inline void mbar_init(std::uint64_t* b, unsigned count, int line = __builtin_LINE()) {
  emu::Quiet quiet;
  if (reinterpret_cast<std::uintptr_t>(b) % 8 || !emu::machine.is_shared(b, 8) || !count || count >= 1u << 20)
    emu::fault("mbar_init at line ", line, ": bad address or count");
  if (emu::machine.mbarriers.count(b)) emu::fault("mbar_init at line ", line, " on an mbarrier in use");
  emu::machine.mbarriers[b] = {count, count, 0, 0, {}};
}
inline void mbar_fence_init() {}
inline void mbar_arrive(std::uint64_t* b, int line = __builtin_LINE()) {
  emu::Quiet quiet;
  emu::machine.maybe_yield();
  emu::Mbarrier& m = emu_mbarrier(b, "mbar_arrive", line);
  if (!m.pending) emu::fault("mbar_arrive at line ", line, ": more arrivals than the mbarrier's ", m.count);
  emu::released(&m);
  --m.pending;
  emu_phase(m);
}
/// Arrives and announces bytes.
inline void mbar_expect(std::uint64_t* b, unsigned bytes, int line = __builtin_LINE()) {
  emu::Quiet quiet;
  emu::machine.maybe_yield();
  emu::Mbarrier& m = emu_mbarrier(b, "mbar_expect", line);
  if (!m.pending) emu::fault("mbar_expect at line ", line, ": more arrivals than the mbarrier's ", m.count);
  if (m.bytes + long(bytes) >= 1l << 20) emu::fault("mbar_expect at line ", line, ": too many bytes");
  emu::released(&m);
  m.bytes += bytes, --m.pending;
  emu_phase(m);
}
/// Waits until the phase of this parity has completed.
inline void mbar_wait(std::uint64_t* b, unsigned parity, int line = __builtin_LINE()) {
  emu::Quiet quiet;
  emu::machine.maybe_yield();
  emu::Mbarrier& m = emu_mbarrier(b, "mbar_wait", line);
  while ((m.phase & 1) == parity) {
    m.waiting.push_back(emu::machine.current);
    emu::machine.wait("mbar_wait", line);
  }
  emu::acquired(&m);
}
inline std::uintptr_t emu_swizzle(std::uintptr_t address) { return address ^ ((address >> 7 & 7) << 4); }

/// The box at column x, row y of the matrix; what lies outside the matrix arrives as zeros.
inline void tma_load(void* to, const CUtensorMap* map, int x, int y, std::uint64_t* b, int line = __builtin_LINE()) {
  emu::Quiet quiet;
  emu::TensorMap t;
  std::memcpy(&t, map, sizeof(t));
  if (t.magic != emu::map_magic) emu::fault("tma_load at line ", line, ": not a tensor map");
  const std::size_t row_bytes = t.box[0] * t.element, bytes = row_bytes * t.box[1];
  if (!emu::machine.is_shared(to, bytes)) emu::fault("tma_load at line ", line, ": outside shared memory");
  if (reinterpret_cast<std::uintptr_t>(to) % (t.swizzle ? 1024 : 128))
    emu::fault("tma_load at line ", line, ": destination not aligned to ", t.swizzle ? 1024 : 128);
  emu_mbarrier(b, "tma_load", line);
  const auto work = [=] {
    emu::Machine& m = emu::machine;
    for (std::uint32_t r = 0; r < t.box[1]; ++r)
      for (std::uint32_t c = 0; c < t.box[0]; ++c) {
        const long column = long(x) + c, row = long(y) + r;
        const bool inside = column >= 0 && row >= 0 && column < long(t.size[0]) && row < long(t.size[1]);
        std::uintptr_t address = reinterpret_cast<std::uintptr_t>(to) + r * row_bytes + c * t.element;
        if (t.swizzle) address = emu_swizzle(address);
        auto* p = reinterpret_cast<unsigned char*>(address);
        if (inside) std::memcpy(p, t.base + row * long(t.stride) + column * t.element, t.element);
        else std::memset(p, 0, t.element);
        std::memcpy(m.shadow.data() + (p - m.shared), p, t.element);
      }
    emu::Mbarrier& bar = emu_mbarrier(b, "tma_load", line);
    bar.bytes -= long(bytes);
    if (bar.pending == bar.count && bar.bytes < 0)
      emu::fault("tma_load at line ", line, ": ", bytes, " bytes arrive, more than the mbarrier expects");
    emu_phase(bar);
  };
  if (!emu::options.late && !emu::options.seed) return work();
  std::memset(to, 0xff, bytes);
  std::memset(emu::machine.shadow.data() + (static_cast<unsigned char*>(to) - emu::machine.shared), 0xff, bytes);
  emu::machine.copies.push_back(work);
}
inline void fence_proxy_async() {
  emu::Quiet quiet;
  emu::machine.proxy_fence = true;
}

// --- wgmma

/// Where element (r, k) of an operand lies: r along M or N, k along K, from the descriptor's fields (bytes >> 4).
inline std::size_t emu_descriptor(std::uint64_t d, bool mn_major, int r, int k) {
  const std::size_t start = (d & 0x3fff) << 4, leading = (d >> 16 & 0x3fff) << 4, stride = (d >> 32 & 0x3fff) << 4;
  if (d >> 62 != 1) emu::fault("wgmma descriptor: the swizzle is not 128 bytes");
  if (d >> 49 & 7) emu::fault("wgmma descriptor: base offset ", d >> 49 & 7);
  const std::size_t offset = mn_major ? (r / 64) * leading + 2 * (r % 64) + (k / 8) * stride + 128 * (k % 8)
                                      : (r / 8) * stride + (r % 8) * 128 + 2 * k;
  const std::size_t base = reinterpret_cast<std::uintptr_t>(emu::machine.shared) & 0x3ffff;
  const std::size_t at = emu_swizzle(start + offset);
  // the 14-bit field wraps at 256 KB: an emulated block's memory does not start at 0
  const std::size_t relative = (at - base) & 0x3ffff;
  if (relative + 2 > emu::machine.shared_bytes) emu::fault("wgmma descriptor: reads outside shared memory");
  return relative;
}
inline std::uint32_t shared_address(const void* p) {
  return std::uint32_t(reinterpret_cast<std::uintptr_t>(p) & 0x3ffff);
}

inline void emu_run(emu::Wgmma& w) {
  const auto element = [&](std::uint64_t descriptor, bool mn_major, int r, int k) {
    std::uint16_t x;
    std::memcpy(&x, emu::machine.shadow.data() + emu_descriptor(descriptor, mn_major, r, k), 2);
    return emu_half(x, 0);
  };
  static float A[64][16], B[16][256];
  for (int n = 0; n < w.n; ++n)
    for (int k = 0; k < 16; ++k) B[k][n] = element(w.b_descriptor, w.b_mn_major, n, k);
  for (int m = 0; m < 64; ++m)
    for (int k = 0; k < 16; ++k) {
      const int lane = 32 * (m / 16) + 4 * (m % 8) + k % 8 / 2;
      A[m][k] = w.a_in_registers ? emu_half(w.a[lane][m % 16 / 8 + 2 * (k / 8)], k % 2)
                                 : element(w.a_descriptor, false, m, k);
    }
  for (int id = 0; id < 128; ++id) {
    const int row = 16 * (id / 32) + id % 32 / 4;
    float* d = w.d[id];
    if (!w.before.empty()) std::memcpy(d, w.before.data() + std::size_t(id) * w.n / 2, std::size_t(w.n) / 2 * 4);
    for (int i = 0; i < w.n / 2; ++i) {
      const int m = row + 8 * (i % 4 / 2), n = 8 * (i / 4) + 2 * (id % 4) + i % 2;
      float sum = w.accumulate ? d[i] : 0;
      for (int k = 0; k < 16; ++k) sum += A[m][k] * B[k][n];
      d[i] = sum;
    }
  }
}
inline emu::Warpgroup& emu_warpgroup() {
  static emu::Warpgroup none;  // meet_warpgroup refuses it
  const unsigned i = emu::machine.current->id / 128;
  return i < emu::machine.warpgroups.size() ? emu::machine.warpgroups[i] : none;
}
inline void wgmma_fence(int line = __builtin_LINE()) {
  auto& g = emu_warpgroup();
  emu::meet_warpgroup("wgmma_fence", 0, nullptr, line, [&](auto&) { g.fenced = true; });
}
inline void wgmma_commit(int line = __builtin_LINE()) {
  auto& g = emu_warpgroup();
  emu::meet_warpgroup("wgmma_commit", 0, nullptr, line, [&](auto&) { g.groups.push_back(std::exchange(g.open, {})); });
}
template <int Left>
void wgmma_wait(int line = __builtin_LINE()) {
  auto& g = emu_warpgroup();
  emu::meet_warpgroup("wgmma_wait", Left, nullptr, line, [&](auto&) {
    for (; g.groups.size() > Left; g.groups.pop_front())
      if (emu::options.late)
        for (auto& w : g.groups.front()) emu_run(w);
    g.fenced = false;
  });
}
/// One instruction, M = 64, K = 16, N = 2 * Registers.
template <int Registers>
void emu_wgmma(float (&d)[Registers], const std::uint32_t* a, std::uint64_t a_descriptor, std::uint64_t b_descriptor,
    bool b_mn_major, bool accumulate, int line) {
  struct Operand {
    float* d;
    const std::uint32_t* a;
    std::uint64_t a_descriptor, b_descriptor;
    bool accumulate;
  } mine{d, a, a_descriptor, b_descriptor, accumulate};
  auto& g = emu_warpgroup();
  emu::meet_warpgroup("wgmma", Registers, &mine, line, [&](std::vector<void*>& all) {
    if (!g.fenced) emu::fault("wgmma at line ", line, " without a wgmma_fence since the registers were last used");
    emu::Wgmma w{2 * Registers, a != nullptr, b_mn_major, accumulate, a_descriptor, b_descriptor, {}, {}, {}};
    for (int i = 0; i < 128; ++i) {
      const auto& o = *static_cast<Operand*>(all[i]);
      if (o.a_descriptor != a_descriptor || o.b_descriptor != b_descriptor || o.accumulate != accumulate)
        emu::fault("wgmma at line ", line, ": operands differ inside the warpgroup");
      w.d[i] = o.d;
      if (o.a) std::memcpy(w.a[i].data(), o.a, 16);
    }
    if (!emu::options.late) return emu_run(w);
    bool pending = false;  // an earlier instruction already owns these accumulators
    const auto owns = [&](const emu::Wgmma& other) { return other.d[0] == w.d[0]; };
    for (auto& o : g.open) pending |= owns(o);
    for (auto& group : g.groups)
      for (auto& o : group) pending |= owns(o);
    if (!pending)
      for (float* p : w.d) {
        w.before.insert(w.before.end(), p, p + Registers);
        std::fill(p, p + Registers, std::numeric_limits<float>::quiet_NaN());
      }
    g.open.push_back(std::move(w));
  });
}
/// D += A B, B from shared memory: A from registers, or, with wgmma_ss, from shared memory too (K-major).
template <bool BMnMajor, int Registers>
void wgmma_rs(
    float (&d)[Registers], const std::uint32_t (&a)[4], std::uint64_t b, bool accumulate, int line = __builtin_LINE()) {
  emu_wgmma(d, a, 0, b, BMnMajor, accumulate, line);
}
template <int Registers>
void wgmma_ss(float (&d)[Registers], std::uint64_t a, std::uint64_t b, bool accumulate, int line = __builtin_LINE()) {
  emu_wgmma(d, nullptr, a, b, false, accumulate, line);
}

// ---------------------------------------------------------------------------------------------------------------------
// In place of a library

namespace emu {
/// Runs y = x W^T, described as kernels.cu describes it, as a piece of work of the stream.
struct Library {
  bool found() const { return options.library; }
  template <class Product>
  bool run(const Product& p, cudaStream_t stream) {
    if (!options.library) return false;
    of(stream).add([p] {
      for (std::int64_t i = 0; i < p.n; ++i)
        for (std::int64_t o = 0; o < p.out; ++o) {
          float sum = 0;
          for (std::int64_t k = 0; k < p.ld; ++k)
            sum += __bfloat162float(p.x[i * p.ld + k]) * __bfloat162float(p.w[o * p.ld + k]);
          const std::int64_t at = i * p.ldy + o;
          if (int(p.to) == 0) static_cast<__nv_bfloat16*>(p.y)[at] = __float2bfloat16(sum);
          if (int(p.to) == 1) static_cast<float*>(p.y)[at] = sum;
          if (int(p.to) == 2) static_cast<float*>(p.y)[at] += sum;
        }
    });
    return true;
  }
};
}  // namespace emu
