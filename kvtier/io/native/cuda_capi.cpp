// C interface of pinning, loaded by kvtier/io/cuda.py. Throws no exception.
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

// Never destroyed: at the end of the process the driver may be gone before it.
Pinned& pinned() {
  static Pinned* only = new Pinned;
  return *only;
}

}  // namespace

// Tests only: another library in the driver's place; null: the host's own.
EXPORT void kvtier_cuda_load(const char* path) { kvtier::use_cuda_library(path); }

// As CUDA gives it (13000 for 13.0). 0 or errno, as below.
EXPORT int kvtier_cuda_version(int* version, char* message, size_t message_bytes) {
  return kvtier::without_exceptions(message, message_bytes, [&] {
    const kvtier::CudaDriver& driver = kvtier::cuda_driver();
    driver.check(driver.cuDriverGetVersion(version), "cuDriverGetVersion");
  });
}

// Of the calling thread, for good. 0 or errno, as below.
EXPORT int kvtier_cuda_relax_thread(char* message, size_t message_bytes) {
  return kvtier::without_exceptions(message, message_bytes, [&] {
    const kvtier::CudaDriver& driver = kvtier::cuda_driver();
    int mode = kvtier::kCudaRelaxedCapture;
    driver.check(driver.cuThreadExchangeStreamCaptureMode(&mode), "cuThreadExchangeStreamCaptureMode");
  });
}

// 0 or errno; EEXIST: that address is pinned already; EREMOTEIO: `message` tells what CUDA said.
EXPORT int kvtier_cuda_pin(void* address, size_t bytes, int ordinal, char* message, size_t message_bytes) {
  return kvtier::without_exceptions(message, message_bytes, [&] {
    auto context = std::make_shared<kvtier::PrimaryContext>(ordinal);
    // A large arena takes many seconds, which must hold nobody else up: the map is locked only when it is done.
    auto range = std::make_unique<kvtier::PinnedRange>(std::move(context), address, bytes);
    std::lock_guard<std::mutex> lock(pinned().mutex);
    if (!pinned().ranges.try_emplace(reinterpret_cast<uintptr_t>(address), std::move(range)).second)
      throw std::system_error(EEXIST, std::generic_category());
  });
}

// 0 or errno; ENOENT: nothing is pinned there; EREMOTEIO: `message` tells what CUDA said, and the memory must stay.
EXPORT int kvtier_cuda_unpin(void* address, char* message, size_t message_bytes) {
  std::unique_ptr<kvtier::PinnedRange> range;
  {
    std::lock_guard<std::mutex> lock(pinned().mutex);
    const auto found = pinned().ranges.find(reinterpret_cast<uintptr_t>(address));
    if (found == pinned().ranges.end()) return ENOENT;
    range = std::move(found->second);
    pinned().ranges.erase(found);
  }
  return kvtier::without_exceptions(message, message_bytes, [&] { range->release(); });
}
