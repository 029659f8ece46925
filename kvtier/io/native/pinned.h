// Page-locked host memory, registered with CUDA for direct copies.
#pragma once
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>

#include "cuda_driver.h"

namespace kvtier {

// Memory of somebody else's, registered with CUDA as long as this lives.
class PinnedRange {
 public:
  // Throws CudaFailed.
  PinnedRange(std::shared_ptr<PrimaryContext> context, void* address, size_t bytes);
  ~PinnedRange();
  PinnedRange(const PinnedRange&) = delete;
  PinnedRange& operator=(const PinnedRange&) = delete;

  // Throws CudaFailed: the memory may still be in CUDA's hands and must stay. It is not tried again.
  void release();

  // For copies that nobody can wait for: the memory stays registered, whatever happens to this.
  void abandon() { registered_ = false; }

  const std::shared_ptr<PrimaryContext>& context() const { return context_; }

 private:
  const std::shared_ptr<PrimaryContext> context_;
  void* const address_;
  const size_t bytes_;
  bool registered_ = false;
};

// Registered memory of our own: one anonymous mapping, huge pages advised, touched.
class PinnedBuffer {
 public:
  // Throws CudaFailed, or std::system_error when there is no memory.
  PinnedBuffer(std::shared_ptr<PrimaryContext> context, size_t bytes);
  ~PinnedBuffer();
  PinnedBuffer(const PinnedBuffer&) = delete;
  PinnedBuffer& operator=(const PinnedBuffer&) = delete;

  uint8_t* data() const { return data_; }
  const PrimaryContext& context() const { return *range_->context(); }

  // The memory is never given back: a copy that nobody could wait for may still read it. From any thread.
  void abandon() { abandoned_ = true; }

 private:
  void* mapping_;
  size_t mapped_bytes_;
  uint8_t* data_;
  std::unique_ptr<PinnedRange> range_;
  std::atomic<bool> abandoned_{false};
};

}  // namespace kvtier
