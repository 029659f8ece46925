// A double of CUDA's driver, a library of its own (see cuda_double.py): device memory is host memory, a stream is a
// thread. A copy reads its source only when its turn comes, `delay_us` late or when the gate opens, so that a slot that
// is used again too early gives wrong bytes. What real CUDA would not notice is counted as a fault, and so is what would
// spoil another thread's capture of a graph. Not in it: PCIe, real asynchrony of the device, sticky errors.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#define EXPORT extern "C" __attribute__((visibility("default")))

namespace {

constexpr int kInvalidValue = 1, kInvalidContext = 201, kInvalidHandle = 400, kNotReady = 600, kInvalidDevice = 101,
              kAlreadyRegistered = 712, kNotRegistered = 713, kCaptureUnsupported = 900;
constexpr int kGlobalCapture = 0, kRelaxedCapture = 2;

struct Event {
  uint64_t recorded = 0, reached = 0;  // a record is waited for until `reached` has its number
};

// A copy, or a record of an event.
struct Task {
  std::function<void()> copy;
  Event* event = nullptr;
  uint64_t number = 0;
};

struct Stream {
  std::deque<Task> work;
  bool busy = false, stop = false;
  std::thread thread;
};

// One lock for all: this is a double, not a driver.
struct World {
  std::mutex mutex;
  std::condition_variable changed;
  std::map<uintptr_t, size_t> registered;
  std::vector<std::pair<uintptr_t, uintptr_t>> copying;  // sources of copies that have not ended
  int64_t streams = 0, events = 0, contexts = 0, copies = 0, reached = 0, faults = 0, delay_us = 0;
  bool gate_closed = false, capturing = false;
  std::string failing;  // names of the calls that fail
  int64_t calls_before = 0, failures = 0;
  int code = 0;
};

World& world() {
  static World* only = new World;
  return *only;
}

// The stack of contexts of this thread.
thread_local void* contexts[8];
thread_local int n_contexts = 0;

// What may be called on this thread while some thread captures a graph.
thread_local int capture_mode = kGlobalCapture;

void* current() { return n_contexts == 0 ? nullptr : contexts[n_contexts - 1]; }

// 0, or the error that a test asked for. Under the lock.
int injected(const char* call) {
  World& w = world();
  if (w.failures == 0 || w.failing.find(call) == std::string::npos) return 0;
  if (w.calls_before > 0) {
    w.calls_before--;
    return 0;
  }
  w.failures--;
  return w.code;
}

#define BEGIN(call)                                          \
  World& w = world();                                        \
  std::unique_lock<std::mutex> lock(w.mutex);                \
  if (const int error = injected(call); error != 0) return error

// Of calls that CUDA may refuse during a capture (here: all of them).
#define BEGIN_UNSAFE(call)                                    \
  BEGIN(call);                                                \
  if (w.capturing && capture_mode != kRelaxedCapture) {       \
    w.faults++;                                               \
    return kCaptureUnsupported;                               \
  }

void run(Stream* stream) {
  World& w = world();
  std::unique_lock<std::mutex> lock(w.mutex);
  for (;;) {
    w.changed.wait(lock, [&] { return stream->stop || !stream->work.empty(); });
    if (stream->work.empty()) return;
    Task task = std::move(stream->work.front());
    stream->work.pop_front();
    if (task.copy) {
      stream->busy = true;
      lock.unlock();
      task.copy();
      lock.lock();
      stream->busy = false;
    }
    // Who sees the event must find the stream idle, too: the lock was kept since the task left the queue.
    if (task.event != nullptr) {
      task.event->reached = task.number;
      w.reached++;
    }
    w.changed.notify_all();
  }
}

void copy(uint64_t target, uintptr_t source, size_t bytes) {
  World& w = world();
  int64_t delay_us;
  {
    std::unique_lock<std::mutex> lock(w.mutex);
    w.changed.wait(lock, [&] { return !w.gate_closed; });
    delay_us = w.delay_us;
  }
  std::this_thread::sleep_for(std::chrono::microseconds(delay_us));
  std::memcpy(reinterpret_cast<void*>(target), reinterpret_cast<void*>(source), bytes);
  std::lock_guard<std::mutex> lock(w.mutex);
  w.copying.erase(std::find(w.copying.begin(), w.copying.end(), std::make_pair(source, source + bytes)));
  w.copies++;
}

bool is_registered(uintptr_t address, size_t bytes) {
  auto after = world().registered.upper_bound(address);
  if (after == world().registered.begin()) return false;
  --after;
  return address + bytes <= after->first + after->second;
}

}  // namespace

// --- what tests ask and set ---

EXPORT int64_t fake_outstanding() {
  World& w = world();
  std::lock_guard<std::mutex> lock(w.mutex);
  return w.streams + w.events + w.contexts + static_cast<int64_t>(w.registered.size());
}

EXPORT int64_t fake_faults() {
  std::lock_guard<std::mutex> lock(world().mutex);
  return world().faults;
}

EXPORT int64_t fake_copies() {
  std::lock_guard<std::mutex> lock(world().mutex);
  return world().copies;
}

EXPORT int64_t fake_events_reached() {
  std::lock_guard<std::mutex> lock(world().mutex);
  return world().reached;
}

EXPORT int64_t fake_failures_left() {
  World& w = world();
  std::lock_guard<std::mutex> lock(w.mutex);
  return w.failures;
}

// Copies that were asked for and have not ended.
EXPORT int64_t fake_copying() {
  std::lock_guard<std::mutex> lock(world().mutex);
  return static_cast<int64_t>(world().copying.size());
}

// The contexts that the calling thread has made current.
EXPORT int64_t fake_contexts_of_thread() { return n_contexts; }

EXPORT int64_t fake_capture_mode_of_thread() { return capture_mode; }

// As if the engine were capturing a graph on a thread of its own.
EXPORT void fake_capture(int capturing) {
  std::lock_guard<std::mutex> lock(world().mutex);
  world().capturing = capturing != 0;
}

EXPORT void fake_delay(int64_t microseconds) {
  std::lock_guard<std::mutex> lock(world().mutex);
  world().delay_us = microseconds;
}

// Copies do not begin while it is closed.
EXPORT void fake_gate(int closed) {
  std::lock_guard<std::mutex> lock(world().mutex);
  world().gate_closed = closed != 0;
  world().changed.notify_all();
}

// `calls` (names with spaces between) give `code` `failures` times in all, after `calls_before` calls that work.
EXPORT void fake_fail(const char* calls, int64_t calls_before, int64_t failures, int code) {
  World& w = world();
  std::lock_guard<std::mutex> lock(w.mutex);
  w.failing = calls;
  w.calls_before = calls_before;
  w.failures = failures;
  w.code = code;
}

// --- the driver ---

EXPORT int cuInit(unsigned flags) {
  BEGIN("cuInit");
  return flags == 0 ? 0 : kInvalidValue;
}

EXPORT int cuDriverGetVersion(int* version) {
  *version = 13000;
  return 0;
}

EXPORT int cuGetErrorName(int error, const char** name) {
  static const std::map<int, const char*> names{{kInvalidValue, "CUDA_ERROR_INVALID_VALUE"},
                                                {2, "CUDA_ERROR_OUT_OF_MEMORY"},
                                                {kInvalidDevice, "CUDA_ERROR_INVALID_DEVICE"},
                                                {kInvalidContext, "CUDA_ERROR_INVALID_CONTEXT"},
                                                {kAlreadyRegistered, "CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED"},
                                                {kNotRegistered, "CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED"},
                                                {kCaptureUnsupported, "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED"}};
  const auto found = names.find(error);
  if (found == names.end()) return kInvalidValue;
  *name = found->second;
  return 0;
}

EXPORT int cuDeviceGet(int* device, int ordinal) {
  *device = ordinal;
  return ordinal < 2 ? 0 : kInvalidDevice;
}

EXPORT int cuDevicePrimaryCtxRetain(void** context, int device) {
  BEGIN("cuDevicePrimaryCtxRetain");
  static char devices[2];
  *context = &devices[device];
  w.contexts++;
  return 0;
}

EXPORT int cuDevicePrimaryCtxRelease_v2(int) {
  BEGIN("cuDevicePrimaryCtxRelease");
  w.contexts--;
  return 0;
}

EXPORT int cuCtxSetCurrent(void* context) {
  BEGIN("cuCtxSetCurrent");
  if (n_contexts == 0) n_contexts = 1;
  contexts[n_contexts - 1] = context;
  return 0;
}

EXPORT int cuCtxPushCurrent_v2(void* context) {
  if (n_contexts == 8) return kInvalidValue;
  contexts[n_contexts++] = context;
  return 0;
}

EXPORT int cuCtxPopCurrent_v2(void** context) {
  if (n_contexts == 0) return kInvalidContext;
  *context = contexts[--n_contexts];
  return 0;
}

EXPORT int cuThreadExchangeStreamCaptureMode(int* mode) {
  BEGIN("cuThreadExchangeStreamCaptureMode");
  if (current() == nullptr) return kInvalidContext;
  std::swap(*mode, capture_mode);
  return 0;
}

EXPORT int cuStreamCreate(Stream** stream, unsigned flags) {
  BEGIN_UNSAFE("cuStreamCreate");
  if (current() == nullptr) return kInvalidContext;
  if (flags != 1) w.faults++;  // it would wait for the model's kernels
  *stream = new Stream;
  (*stream)->thread = std::thread(run, *stream);
  w.streams++;
  return 0;
}

EXPORT int cuStreamSynchronize(Stream* stream) {
  BEGIN_UNSAFE("cuStreamSynchronize");
  w.changed.wait(lock, [&] { return stream->work.empty() && !stream->busy; });
  return 0;
}

EXPORT int cuStreamDestroy_v2(Stream* stream) {
  {
    BEGIN_UNSAFE("cuStreamDestroy");
    if (!stream->work.empty() || stream->busy) w.faults++;
    stream->stop = true;
    w.streams--;
    w.changed.notify_all();
  }
  stream->thread.join();
  delete stream;
  return 0;
}

EXPORT int cuEventCreate(Event** event, unsigned) {
  BEGIN_UNSAFE("cuEventCreate");
  if (current() == nullptr) return kInvalidContext;
  *event = new Event;
  w.events++;
  return 0;
}

EXPORT int cuEventDestroy_v2(Event* event) {
  BEGIN_UNSAFE("cuEventDestroy");
  if (event->reached != event->recorded) w.faults++;
  w.events--;
  delete event;
  return 0;
}

EXPORT int cuEventRecord(Event* event, Stream* stream) {
  BEGIN("cuEventRecord");
  if (current() == nullptr) return kInvalidContext;
  const uint64_t number = ++event->recorded;
  stream->work.push_back({nullptr, event, number});
  w.changed.notify_all();
  return 0;
}

EXPORT int cuEventQuery(Event* event) {
  BEGIN_UNSAFE("cuEventQuery");
  return event->reached == event->recorded ? 0 : kNotReady;
}

EXPORT int cuEventSynchronize(Event* event) {
  BEGIN_UNSAFE("cuEventSynchronize");
  w.changed.wait(lock, [&] { return event->reached == event->recorded; });
  return 0;
}

EXPORT int cuMemcpyHtoDAsync_v2(uint64_t target, const void* source, size_t bytes, Stream* stream) {
  BEGIN("cuMemcpyHtoDAsync");
  if (current() == nullptr) return kInvalidContext;
  const uintptr_t start = reinterpret_cast<uintptr_t>(source);
  if (!is_registered(start, bytes)) w.faults++;  // a detour, and not asynchronous
  w.copying.emplace_back(start, start + bytes);
  stream->work.push_back({[target, start, bytes] { copy(target, start, bytes); }});
  w.changed.notify_all();
  return 0;
}

EXPORT int cuMemcpyDtoHAsync_v2(uint64_t target, uint64_t source, size_t bytes, Stream* stream) {
  BEGIN("cuMemcpyDtoHAsync");
  if (current() == nullptr) return kInvalidContext;
  if (!is_registered(target, bytes)) w.faults++;
  w.copying.emplace_back(source, source + bytes);
  stream->work.push_back({[target, source, bytes] { copy(target, source, bytes); }});
  w.changed.notify_all();
  return 0;
}

// A kernel is a function of the host that gets the addresses of its arguments.
EXPORT int cuLaunchKernel(void (*kernel)(void**), unsigned x, unsigned y, unsigned z, unsigned threads, unsigned,
                          unsigned, unsigned, Stream* stream, void** arguments, void**) {
  BEGIN("cuLaunchKernel");
  if (current() == nullptr) return kInvalidContext;
  if (x == 0 || y == 0 || z == 0 || threads == 0) return kInvalidValue;
  std::vector<uint64_t> values;  // the driver copies them before it returns
  for (int i = 0; i < 24; i++) values.push_back(*static_cast<uint64_t*>(arguments[i]));
  stream->work.push_back({[kernel, values]() mutable {
    std::vector<void*> places;
    for (uint64_t& value : values) places.push_back(&value);
    kernel(places.data());
  }});
  w.changed.notify_all();
  return 0;
}

// CUDA_MEMCPY2D; only what goes from host to device.
struct Rows {
  size_t source_x, source_y;
  unsigned source_type;
  uintptr_t source_host;
  uint64_t source_device;
  void* source_array;
  size_t source_pitch;
  size_t target_x, target_y;
  unsigned target_type;
  void* target_host;
  uint64_t target_device;
  void* target_array;
  size_t target_pitch;
  size_t width, height;
};

EXPORT int cuMemcpy2DAsync_v2(const Rows* given, Stream* stream) {
  BEGIN("cuMemcpy2DAsync");
  if (current() == nullptr) return kInvalidContext;
  const Rows rows = *given;
  if (rows.source_type != 1 || rows.target_type != 2 || rows.width == 0 || rows.height == 0 ||
      rows.source_pitch < rows.width || rows.target_pitch < rows.width || rows.source_x + rows.source_y != 0 ||
      rows.target_x + rows.target_y != 0)
    return kInvalidValue;
  if (!is_registered(rows.source_host, (rows.height - 1) * rows.source_pitch + rows.width)) w.faults++;
  for (size_t row = 0; row < rows.height; row++) {
    const uintptr_t start = rows.source_host + row * rows.source_pitch;
    const uint64_t target = rows.target_device + row * rows.target_pitch;
    w.copying.emplace_back(start, start + rows.width);
    stream->work.push_back({[target, start, bytes = rows.width] { copy(target, start, bytes); }});
  }
  w.changed.notify_all();
  return 0;
}

EXPORT int cuMemHostRegister_v2(void* address, size_t bytes, unsigned flags) {
  BEGIN_UNSAFE("cuMemHostRegister");
  if (current() == nullptr) return kInvalidContext;
  if (flags != 1 || bytes == 0) return kInvalidValue;
  return w.registered.emplace(reinterpret_cast<uintptr_t>(address), bytes).second ? 0 : kAlreadyRegistered;
}

EXPORT int cuMemHostUnregister(void* address) {
  BEGIN_UNSAFE("cuMemHostUnregister");
  if (current() == nullptr) return kInvalidContext;
  const auto found = w.registered.find(reinterpret_cast<uintptr_t>(address));
  if (found == w.registered.end()) return kNotRegistered;
  const uintptr_t start = found->first, end = start + found->second;
  for (const auto& [from, to] : w.copying)
    if (from < end && to > start) w.faults++;
  w.registered.erase(found);
  return 0;
}
