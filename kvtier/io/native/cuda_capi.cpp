// C interface of pinning, for kvtier/io/cuda.py. Throws no exception. Functions return 0 or an errno; with EREMOTEIO,
// `message` holds CUDA's error.
#include <map>
#include <mutex>

#include "pinned.h"
#include "without_exceptions.h"

#define EXPORT extern "C" __attribute__((visibility("default")))

namespace {

struct Pinned {
  std::mutex mutex;
  std::map<uintptr_t, std::unique_ptr<kvtier::PinnedRange>> ranges;  // by address
};

// Never destroyed: at process exit the driver may be destroyed first.
Pinned& pinned() {
  static Pinned* only = new Pinned;
  return *only;
}

}  // namespace

// For tests: replaces the driver by another library; null: the host's driver.
EXPORT void kvtier_cuda_load(const char* path) { kvtier::use_cuda_library(path); }

// As CUDA counts: 13000 for 13.0.
EXPORT int kvtier_cuda_version(int* version, char* message, size_t message_bytes) {
  return kvtier::without_exceptions(message, message_bytes, [&] {
    const kvtier::CudaDriver& driver = kvtier::cuda_driver();
    driver.check(driver.cuDriverGetVersion(version), "cuDriverGetVersion");
  });
}

// Sets the calling thread's capture mode for its lifetime.
EXPORT int kvtier_cuda_relax_thread(char* message, size_t message_bytes) {
  return kvtier::without_exceptions(message, message_bytes, [&] {
    const kvtier::CudaDriver& driver = kvtier::cuda_driver();
    int mode = kvtier::kCudaRelaxedCapture;
    driver.check(driver.cuThreadExchangeStreamCaptureMode(&mode), "cuThreadExchangeStreamCaptureMode");
  });
}

// EEXIST: that address is pinned already.
EXPORT int kvtier_cuda_pin(void* address, size_t bytes, int ordinal, char* message, size_t message_bytes) {
  return kvtier::without_exceptions(message, message_bytes, [&] {
    auto context = std::make_shared<kvtier::PrimaryContext>(ordinal);
    // Registering a large arena takes many seconds, so it is done before the lock is taken.
    auto range = std::make_unique<kvtier::PinnedRange>(std::move(context), address, bytes);
    std::lock_guard<std::mutex> lock(pinned().mutex);
    if (!pinned().ranges.try_emplace(reinterpret_cast<uintptr_t>(address), std::move(range)).second)
      throw std::system_error(EEXIST, std::generic_category());
  });
}

// ENOENT: nothing is pinned there. After EREMOTEIO the memory must not be freed.
EXPORT int kvtier_cuda_unpin(void* address, char* message, size_t message_bytes) {
  std::unique_lock<std::mutex> lock(pinned().mutex);
  const auto found = pinned().ranges.extract(reinterpret_cast<uintptr_t>(address));
  lock.unlock();
  if (!found) return ENOENT;
  return kvtier::without_exceptions(message, message_bytes, [&] { found.mapped()->release(); });
}
