// Second half of a device read: copies a pinned slot to device memory while the thread reads the next run.
#pragma once
#include <memory>
#include <vector>

#include "neighbours.h"
#include "pinned.h"

namespace kvtier {

// Slots, stream and copies in flight of one thread. Not locked: only that thread calls it.
//
// The device reads a slot until the event of its run has completed. Then the run has landed and the slot is free.
class DeviceStage {
 public:
  // `slots`: n_slots x slot_bytes of `pool`, for this stage alone. Throws CudaFailed.
  DeviceStage(std::shared_ptr<PinnedBuffer> pool, uint8_t* slots, uint32_t n_slots, uint64_t slot_bytes);
  ~DeviceStage();
  DeviceStage(const DeviceStage&) = delete;
  DeviceStage& operator=(const DeviceStage&) = delete;

  // Call first, on the thread that calls the others.
  void enter();

  bool empty() const { return in_flight_ == 0; }
  bool full() const { return in_flight_ == slots_.size(); }

  // Reads a run into a free slot and starts its copies; moves from `run`.
  // Pieces that cannot be read are not copied, and their operations fail. False: no copy was started, and all
  // operations have failed. Not when full().
  bool send(Run& run);

  // True when finish_oldest() would not wait. Not when empty().
  bool oldest_is_done() const;

  // Waits for the oldest run and returns it: each piece has landed, or its operation has failed.
  Run finish_oldest();

 private:
  struct Slot {
    uint8_t* data;
    CuEvent event;
    Run run;
  };

  bool copy(const Run& run, const Slot& slot);
  bool copy(uint64_t target, const uint8_t* source, uint64_t bytes);
  void settle();
  void destroy();

  const std::shared_ptr<PinnedBuffer> pool_;
  const CudaDriver& driver_;
  std::vector<Slot> slots_;
  CuStream stream_ = nullptr;
  size_t oldest_ = 0, in_flight_ = 0;  // slots oldest_ ... oldest_ + in_flight_ - 1, modulo their number
  bool broken_ = false;                // a CUDA call failed for good: no copy is started any more
};

// Opens one stage a thread, over one buffer. Throws CudaFailed, or std::system_error without memory.
std::vector<std::unique_ptr<DeviceStage>> open_stages(int ordinal, uint32_t threads, uint32_t slots,
                                                      uint64_t slot_bytes);

}  // namespace kvtier
