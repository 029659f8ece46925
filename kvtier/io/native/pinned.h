// Page-locked host memory, registered with CUDA for direct copies.
#pragma once
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>

#include "cuda_driver.h"

namespace kvtier {

// Registration of memory that another object owns.
class PinnedRange {
 public:
  // Throws CudaFailed.
  PinnedRange(std::shared_ptr<PrimaryContext> context, void* address, size_t bytes);
  ~PinnedRange();
  PinnedRange(const PinnedRange&) = delete;
  PinnedRange& operator=(const PinnedRange&) = delete;

  // Unregisters the memory, once. Throws CudaFailed: then it may still be registered and must not be freed.
  void release();

  // Keeps the memory registered after this object, for copies whose end cannot be awaited.
  void abandon() { registered_ = false; }

  const std::shared_ptr<PrimaryContext>& context() const { return context_; }

 private:
  const std::shared_ptr<PrimaryContext> context_;
  void* const address_;
  const size_t bytes_;
  bool registered_ = false;
};

// Registered memory: one anonymous mapping, huge pages advised, touched.
class PinnedBuffer {
 public:
  // Without a context the memory is not registered. Throws CudaFailed, or std::system_error without memory.
  PinnedBuffer(std::shared_ptr<PrimaryContext> context, size_t bytes);
  ~PinnedBuffer();
  PinnedBuffer(const PinnedBuffer&) = delete;
  PinnedBuffer& operator=(const PinnedBuffer&) = delete;

  uint8_t* data() const { return data_; }
  const PrimaryContext& context() const { return *range_->context(); }

  // Never frees the memory: a copy whose end could not be awaited may still read it. Thread-safe.
  void abandon() { abandoned_ = true; }

 private:
  void* mapping_;
  size_t mapped_bytes_;
  uint8_t* data_;
  std::unique_ptr<PinnedRange> range_;
  std::atomic<bool> abandoned_{false};
};

}  // namespace kvtier
