#include "pinned.h"

#include <sys/mman.h>

#include <cerrno>
#include <cstring>
#include <system_error>
#include <utility>

#include "batch.h"

namespace kvtier {
namespace {

constexpr size_t kHugePageBytes = size_t{2} << 20;

}  // namespace

PinnedRange::PinnedRange(std::shared_ptr<PrimaryContext> context, void* address, size_t bytes)
    : context_(std::move(context)), address_(address), bytes_(bytes) {
  const CudaDriver& driver = context_->driver;
  const CurrentContext current(*context_);
  driver.check(driver.cuMemHostRegister(address, bytes, kCudaPortableMemory), "cuMemHostRegister");
  registered_ = true;
  // After a fork these pages would be shared copy-on-write, and this process's next write would move it to other pages
  // than the device reads. Fails for memory that is not whole pages, at the owner's risk.
  madvise(address_, bytes_, MADV_DONTFORK);
}

PinnedRange::~PinnedRange() {
  try {
    release();
  } catch (const CudaFailed&) {
    // An owner that must know calls release() itself.
  }
}

void PinnedRange::release() {
  if (!std::exchange(registered_, false)) return;
  const CudaDriver& driver = context_->driver;
  const CurrentContext current(*context_);
  driver.check(driver.cuMemHostUnregister(address_), "cuMemHostUnregister");
  madvise(address_, bytes_, MADV_DOFORK);
}

PinnedBuffer::PinnedBuffer(std::shared_ptr<PrimaryContext> context, size_t bytes)
    : mapped_bytes_(bytes + kHugePageBytes) {
  mapping_ = mmap(nullptr, mapped_bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (mapping_ == MAP_FAILED) throw std::system_error(errno, std::generic_category());
  data_ = reinterpret_cast<uint8_t*>(round_up(reinterpret_cast<uintptr_t>(mapping_), kHugePageBytes));
  madvise(data_, bytes, MADV_HUGEPAGE);
  std::memset(data_, 0, bytes);
  if (!context) return;
  try {
    range_ = std::make_unique<PinnedRange>(std::move(context), data_, bytes);
  } catch (...) {
    munmap(mapping_, mapped_bytes_);
    throw;
  }
}

PinnedBuffer::~PinnedBuffer() {
  if (abandoned_) {
    if (range_) range_->abandon();
    return;
  }
  try {
    if (range_) range_->release();
  } catch (const CudaFailed&) {
    return;  // still registered: freed pages could be reused while the device reads them
  }
  munmap(mapping_, mapped_bytes_);
}

}  // namespace kvtier
