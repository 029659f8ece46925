#include "device_stage.h"

#include <algorithm>
#include <cerrno>
#include <utility>

namespace kvtier {
DeviceStage::DeviceStage(std::shared_ptr<PinnedBuffer> pool, uint8_t* slots, uint32_t n_slots, uint64_t slot_bytes)
    : pool_(std::move(pool)), driver_(pool_->context().driver) {
  const CurrentContext current(pool_->context());
  try {
    // Non-blocking: a copy must not wait for the model's kernels on the legacy stream.
    driver_.check(driver_.cuStreamCreate(&stream_, kCudaNonBlockingStream), "cuStreamCreate");
    for (uint32_t i = 0; i < n_slots; i++) {
      slots_.push_back({slots + i * slot_bytes, nullptr, {}});
      driver_.check(driver_.cuEventCreate(&slots_.back().event, kCudaBlockingSync | kCudaNoTiming), "cuEventCreate");
    }
  } catch (...) {
    destroy();
    throw;
  }
}

DeviceStage::~DeviceStage() {
  try {
    const CurrentContext current(pool_->context());
    destroy();
  } catch (const CudaFailed&) {
    broken_ = true;
  }
  if (broken_) pool_->abandon();
}

void DeviceStage::destroy() {
  for (Slot& slot : slots_)
    if (slot.event != nullptr) driver_.cuEventDestroy(slot.event);
  if (stream_ != nullptr) driver_.cuStreamDestroy(stream_);
}

void DeviceStage::enter() {
  int capture_mode = kCudaRelaxedCapture;  // not restored: the thread is ours. See CurrentContext
  if (driver_.cuCtxSetCurrent(pool_->context().handle()) != 0 ||
      driver_.cuThreadExchangeStreamCaptureMode(&capture_mode) != 0)
    broken_ = true;
}

bool DeviceStage::send(Run& run) {
  if (broken_) {
    run.fail(EREMOTEIO);
    return false;
  }
  Slot& slot = slots_[(oldest_ + in_flight_) % slots_.size()];
  read_run(run, slot.data);
  if (!run.is_wanted()) return false;
  if (!copy(run, slot)) {
    run.fail(EREMOTEIO);
    settle();
    return false;
  }
  slot.run = std::move(run);
  in_flight_++;
  return true;
}

// Skips gaps, and pieces that could not be read: the slot holds bytes of another run in their place.
bool DeviceStage::copy(const Run& run, const Slot& slot) {
  for (const Piece& piece : run.pieces) {
    if (piece.op->error.load(std::memory_order_relaxed) != 0) continue;
    if (!copy(piece.target(), slot.data + (piece.offset() - run.offset()), piece.bytes)) return false;
  }
  return driver_.cuEventRecord(slot.event, stream_) == 0;
}

bool DeviceStage::copy(uint64_t target, const uint8_t* source, uint64_t bytes) {
  return driver_.cuMemcpyHtoDAsync(target, source, bytes, stream_) == 0;
}

bool DeviceStage::oldest_is_done() const { return driver_.cuEventQuery(slots_[oldest_].event) != kCudaNotReady; }

Run DeviceStage::finish_oldest() {
  Slot& slot = slots_[oldest_];
  if (driver_.cuEventSynchronize(slot.event) != 0) {
    slot.run.fail(EREMOTEIO);
    settle();
  }
  oldest_ = (oldest_ + 1) % slots_.size();
  in_flight_--;
  return std::exchange(slot.run, {});
}

// Waits for the stream after a failed call, because a copy may still be in flight. If that fails too, the context is
// lost: no kernel will run in it that could read late bytes as KV, and the slots are never used again.
void DeviceStage::settle() {
  if (driver_.cuStreamSynchronize(stream_) != 0) broken_ = true;
}

std::vector<std::unique_ptr<DeviceStage>> open_stages(int ordinal, uint32_t threads, uint32_t slots,
                                                      uint64_t slot_bytes) {
  const uint64_t thread_bytes = slots * slot_bytes;
  auto pool = std::make_shared<PinnedBuffer>(std::make_shared<PrimaryContext>(ordinal), threads * thread_bytes);
  std::vector<std::unique_ptr<DeviceStage>> stages;
  for (uint32_t i = 0; i < threads; i++)
    stages.push_back(std::make_unique<DeviceStage>(pool, pool->data() + i * thread_bytes, slots, slot_bytes));
  return stages;
}

}  // namespace kvtier
